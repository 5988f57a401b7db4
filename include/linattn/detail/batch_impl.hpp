// Bodies of batch.hpp: checks, slices, and the engine's passes for each.
#pragma once

#include <linattn/batch.hpp>
#include <linattn/detail/batch_slices.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// One call on a batch: what it is given, checked, and cut.
template <class Attention, class Executor>
class batch_call {
 public:
  using access = engine_access;
  using S = typename Attention::scalar;
  using T = typename Attention::accumulator_type;
  using layout_type = std::remove_cvref_t<decltype(access::layout(std::declval<const Attention&>()))>;
  using rows_type = sequence_rows<S, T, Attention::rule>;
  using input = batch_input<Attention>;
  using output = batch_output<Attention>;
  using inputs = batch_inputs<Attention>;
  using states_type = batch_states<Attention>;
  using state_type = typename Attention::state_type;
  static constexpr rule_traits rule = Attention::rule;
  using heads_type = decltype(layout_type::state.heads);
  static constexpr bool cuts_heads = std::is_same_v<heads_type, extent<Eigen::Dynamic>>;
  static constexpr bool cuts_columns =
      cuts_heads && std::is_same_v<decltype(layout_type::state.value_dim), extent<Eigen::Dynamic>>;

  batch_call(const char* function, const Attention& attn, const states_type& states, workspaces<Attention> ws,
             const Executor& executor, const batch_options<Attention>& o, Eigen::Index sequences)
      : m_function(function),
        m_attn(attn),
        m_layout(access::layout(attn)),
        m_states(states),
        m_workspaces(ws),
        m_executor(executor),
        m_options(o),
        m_sequences(sequences) {
    if (ws.empty()) refuse(function, "no workspaces are given; make_workspaces(attn, n) makes n");
    for (auto& one : ws) access::require_workspace(attn, function, one);
    require_states();
  }

  // ---- checks -------------------------------------------------------------------------------------------------------

  /// x has the batch's sequences and, sequence by sequence, the tokens of `like`.
  template <class U>
  void require(const char* name, const batch_view<U>& x, const input& like, Eigen::Index heads,
               Eigen::Index dim) const {
    if (x.sequences() != m_sequences || x.heads() != heads || x.dim() != dim) {
      refuse(m_function, name, " has ", x.sequences(), " sequences of ", x.heads(), " heads of ", x.dim(),
             " elements, expected ", m_sequences, " of ", heads, " of ", dim);
    }
    for (Eigen::Index b = 0; b < m_sequences; ++b) {
      if (x.tokens(b) != like.tokens(b)) {
        refuse(m_function, name, " has ", x.tokens(b), " tokens in sequence ", b, ", expected ", like.tokens(b));
      }
      if (x.data() == nullptr && like.tokens(b) > 0) refuse(m_function, name, " is not given");
    }
  }
  void require_queries(const input& q) const { require("q", q, q, m_attn.heads(), m_attn.head_dim()); }
  /// The mask of x's tokens.
  void require_mask(const token_mask& mask, const input& x) const {
    if (mask.is_none()) return;
    if (x.is_packed()) refuse(m_function, "a mask is given for packed sequences, which have no padding");
    mask.check(m_function, m_sequences, m_sequences > 0 ? x.tokens(0) : 0);
  }
  void require_no_query_mask() const {
    if (!m_options.query_mask.is_none()) {
      refuse(m_function, "query_mask is given, but the queries are those of the keys' tokens; give mask");
    }
  }
  void require_keys(const input& k, const input& v, const input& like) const {
    require_mask(m_options.mask, k);
    require("k", k, like, m_attn.key_heads(), m_attn.head_dim());
    require("v", v, like, m_attn.value_heads(), m_attn.value_dim());
  }
  void require_output(const output& out, const input& q) const {
    require("out", out, q, m_attn.output_heads(), m_attn.value_dim());
  }
  template <class Inputs>
  void require_inputs(const Inputs& x, const input& like) const {
    access::for_each_input(m_attn, x, [&](const char* name, const auto& view, Eigen::Index columns, const char*) {
      require(name, view, like, m_attn.value_heads(), columns);
    });
  }
  void require_one_token(const input& q) const {
    for (Eigen::Index b = 0; b < m_sequences; ++b) {
      if (q.tokens(b) != 1) refuse(m_function, "q has ", q.tokens(b), " tokens in sequence ", b, ", expected 1");
    }
  }

  // ---- states -------------------------------------------------------------------------------------------------------

  /// The slab of sequence b; null where it starts from nothing.
  T* slab(Eigen::Index b) const {
    T* result = nullptr;
    access::visit(m_states, [&](const auto& states) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(states)>, state_pool>) {
        result = slab_of<T>(states, b);
      } else {
        result = access::data(states[std::size_t(b)]);
      }
    });
    return result;
  }
  Eigen::Index position(Eigen::Index b) const {
    const T* const s = slab(b);
    if (s == nullptr) return 0;
    return Eigen::Index(m_layout.state.number(s, trailer::first_position) + m_layout.state.number(s, trailer::tokens));
  }
  /// After all tasks are done.
  void add_tokens(const input& k) const {
    for (Eigen::Index b = 0; b < m_sequences; ++b) {
      if (T* const s = slab(b)) m_layout.state.add_tokens(s, kept_keys(b, k).tokens());
    }
  }

  // ---- masks --------------------------------------------------------------------------------------------------------

  kept_rows kept_keys(Eigen::Index b, const input& k) const { return m_options.mask.of(b, k.tokens(b)); }
  kept_rows kept_queries(Eigen::Index b, const input& q) const { return m_options.query_mask.of(b, q.tokens(b)); }

  /// Rows of out that no pass writes, of the heads and columns of a task's engine.
  template <class Engine>
  void clear_masked_rows(const Engine& engine, Eigen::Index b, const output& out, const kept_rows& kept,
                         Eigen::Index column) const {
    token_rows<S> rows = out.rows(b);
    rows.data += column;
    for (Eigen::Index h = engine.states.first(); h < engine.states.first() + engine.states.size(); ++h) {
      for (Eigen::Index r = 0; r < m_layout.heads.readers; ++r) {
        clear_masked(rows, out.tokens(b), kept, m_layout.heads.output_of(h, r), engine.layout.state.value_dim);
      }
    }
  }

  // ---- rows ---------------------------------------------------------------------------------------------------------

  template <class U, class Inputs>
  rule_inputs<token_rows<U>, rule> gates(const Inputs& x, Eigen::Index b) const {
    using result_type = rule_inputs<token_rows<U>, rule>;
    result_type result;
    if constexpr (result_type::has_log_decay) result.log_decay = x.log_decay.rows(b);
    if constexpr (result_type::has_beta) result.beta = x.beta.rows(b);
    if constexpr (result_type::has_rank_one) result.a = x.a.rows(b);
    if constexpr (result_type::has_rank_one) result.b = x.b.rows(b);
    if constexpr (result_type::has_bonus) result.bonus = x.bonus.rows(b);
    if constexpr (rule.fixed_decay) result.fixed_log_decay = m_attn.update_rule().log_decay.data();
    return result;
  }

  rows_type all_rows(Eigen::Index b, const input& q, const input& k, const input& v, const inputs& x,
                     const output& out) const {
    rows_type rows = key_rows(b, k, v, x);
    rows.q = q.rows(b);
    rows.out = out.rows(b);
    rows.keep(kept_keys(b, k));
    return rows;
  }
  rows_type writing_rows(Eigen::Index b, const input& k, const input& v, const inputs& x) const {
    rows_type rows = key_rows(b, k, v, x);
    rows.keep(kept_keys(b, k));
    return rows;
  }
  rows_type key_rows(Eigen::Index b, const input& k, const input& v, const inputs& x) const {
    rows_type rows;
    rows.position = position(b);
    rows.k = k.rows(b);
    rows.v = v.rows(b);
    rows.gates = gates<const S>(x, b);
    return rows;
  }
  /// The last query stands where the last key does, of which there are `absorbed` beside those that the state counts.
  rows_type reading_rows(Eigen::Index b, const input& q, const output& out, Eigen::Index absorbed) const {
    rows_type rows;
    rows.q = q.rows(b);
    rows.out = out.rows(b);
    rows.keep(kept_queries(b, q));
    rows.position = position(b) + absorbed - rows.tokens;
    return rows;
  }

  // ---- tasks --------------------------------------------------------------------------------------------------------

  /// work(engine, b, slab, scratch, column) for all heads of all sequences, on as many workspaces as there are. Where a
  /// head is cut, the engine's layout has the columns of one part alone, the first of them `column`; `slab` is then a
  /// state of that layout. weight(b) is what a head of sequence b costs, about.
  template <bool Writes, class Weight, class Work>
  void run(const Weight& weight, const Work& work) const {
    const Eigen::Index width = Eigen::Index(m_workspaces.size());
    const Eigen::Index heads = cuts_heads ? Eigen::Index(m_layout.state.heads) : 1;
    if (m_sequences == 0) return;
    const Eigen::Index panels = panels_of_head(width / std::max(m_sequences * heads, Eigen::Index(1)));
    if constexpr (cuts_columns) {
      if (panels > 1) return run_panels<Writes>(panels, work);
    }
    Eigen::Index tokens = 0;
    for (Eigen::Index b = 0; b < m_sequences; ++b) tokens += weight(b);
    const batch_slices<Weight> slices(m_sequences, heads, std::min(width, m_sequences * heads), weight);
    m_executor.parallel_for(std::min(width, m_sequences * heads), [&](Eigen::Index w) {
      T* const scratch = access::slab(m_workspaces[std::size_t(w)]).data();
      slices.for_each(w, [&](Eigen::Index b, Eigen::Index first, Eigen::Index last) {
        auto engine = access::engine(m_attn);
        engine.rows_are_far = engine.is_far(tokens);
        if constexpr (cuts_heads) engine.states = {first, last};
        T* state = slab(b);
        if (state == nullptr) {
          state = scratch + m_layout.own_state();
          clear_heads(m_layout, state, engine.states);
        }
        work(engine, b, state, scratch, Eigen::Index(0));
      });
    });
  }

  // ---- gradients ----------------------------------------------------------------------------------------------------

  template <class Inputs, class Gradients, class Parameters>
  void require_gradients(const input& q, const input& k, const input& v, const Inputs& x, const input& dout,
                         const output& dq, const output& dk, const output& dv, const Gradients& dx,
                         const Parameters& dmap, bool causal) const {
    access::require_gradient(m_attn, m_function);
    require_queries(q);
    require_keys(k, v, causal ? q : k);
    require_inputs(x, k);
    require("dout", dout, q, m_attn.output_heads(), m_attn.value_dim());
    require("dq", dq, q, m_attn.heads(), m_attn.head_dim());
    require("dk", dk, k, m_attn.key_heads(), m_attn.head_dim());
    require("dv", dv, k, m_attn.value_heads(), m_attn.value_dim());
    access::for_each_input(m_attn, dx, [&](const char* name, const auto& view, Eigen::Index columns, const char*) {
      if (view.data() != nullptr) {
        require(sentence("the gradient of ", name).c_str(), view, k, m_attn.value_heads(), columns);
      }
    });
    if (causal) {
      require_no_query_mask();
    } else {
      require_mask(m_options.query_mask, q);
    }
    if (!dmap.empty() && Eigen::Index(dmap.size()) != m_sequences) {
      refuse(m_function, Eigen::Index(dmap.size()), " gradients of the map's parameters are given for ", m_sequences,
             " sequences");
    }
  }

  template <class Engine, class Gradients, class Parameters>
  auto gradient_rows(const Engine& engine, Eigen::Index b, const input& q, const input& k, const input& v,
                     const inputs& x, const input& dout, const output& dq, const output& dk, const output& dv,
                     const Gradients& dx, const Parameters& dmap, bool causal) const {
    gradient_arguments<S, rule, typename Attention::parameter_gradient> a;
    const kept_rows keys = kept_keys(b, k), queries = causal ? keys : kept_queries(b, q);
    a.queries = queries.tokens();
    a.keys = keys.tokens();
    a.kept_queries = queries.kept;
    a.kept_keys = keys.kept;
    a.q = from_row(q.rows(b), queries);
    a.k = from_row(k.rows(b), keys);
    a.v = from_row(v.rows(b), keys);
    a.dout = from_row(dout.rows(b), queries);
    a.dq = to_row(engine, dq, b, queries);
    a.dk = to_row(engine, dk, b, keys);
    a.dv = to_row(engine, dv, b, keys);
    a.gradient = dmap.empty() ? nullptr : &dmap[std::size_t(b)];
    a.gates = gates<const S>(x, b);
    if constexpr (decltype(a.gates)::has_log_decay) {
      a.gates.log_decay = from_row(a.gates.log_decay, keys);
      if (dx.log_decay.data() != nullptr) a.dlog_decay = to_row(engine, dx.log_decay, b, keys);
    }
    if constexpr (decltype(a.gates)::has_beta) {
      a.gates.beta = from_row(a.gates.beta, keys);
      if (dx.beta.data() != nullptr) a.dbeta = to_row(engine, dx.beta, b, keys);
    }
    return a;
  }
  template <class U>
  static token_rows<U> from_row(token_rows<U> rows, const kept_rows& kept) {
    rows.data += kept.first * rows.row_stride;
    return rows;
  }
  /// The same of a gradient, whose masked rows are set to 0.
  template <class Engine>
  static token_rows<S> to_row(const Engine& engine, const output& to, Eigen::Index b, const kept_rows& kept) {
    for (Eigen::Index h = engine.states.first(); h < engine.states.first() + engine.states.size(); ++h) {
      clear_masked(to.rows(b), to.tokens(b), kept, h, to.dim());
    }
    return from_row(to.rows(b), kept);
  }

  /// work(engine, b, workspace) for every sequence: for ranges of its heads, or where they add to one gradient of
  /// parameters for all of them.
  template <class Weight, class Work>
  void run_gradients(bool by_sequence, const Weight& weight, const Work& work) const {
    const Eigen::Index parts = cuts_heads && !by_sequence ? Eigen::Index(m_layout.state.heads) : 1;
    const Eigen::Index width = std::min(Eigen::Index(m_workspaces.size()), m_sequences * parts);
    if (width == 0) return;
    const batch_slices<Weight> slices(m_sequences, parts, width, weight);
    m_executor.parallel_for(width, [&](Eigen::Index w) {
      slices.for_each(w, [&](Eigen::Index b, Eigen::Index first, Eigen::Index last) {
        auto engine = access::engine(m_attn);
        if constexpr (cuts_heads) {
          if (!by_sequence) engine.states = {first, last};
        }
        work(engine, b, m_workspaces[std::size_t(w)]);
      });
    });
  }

  // ---- segments -----------------------------------------------------------------------------------------------------

  /// forward_causal with every sequence in `count` segments: all but the last are absorbed, each into a state of its
  /// own; in turn these become what precedes each segment; all segments run from there. State g of a sequence is that
  /// before segment g; the last one is for the scan.
  void run_segments(std::span<state_type> states, const input& q, const input& k, const input& v, const inputs& x,
                    const output& out) const {
    const Eigen::Index given = Eigen::Index(states.size());
    const Eigen::Index count = given / std::max(m_sequences, Eigen::Index(1)) - 1;
    if (count < 1 || given % m_sequences != 0) {
      refuse(m_function, given, " states are given for the segments of ", m_sequences,
             " sequences; G segments take G + 1 states for each sequence");
    }
    for (const auto& s : states) access::require_state(m_attn, m_function, s);
    const auto state_at = [&](Eigen::Index b, Eigen::Index g) -> state_type& {
      return states[std::size_t(b * (count + 1) + g)];
    };
    const auto begin_of = [&](Eigen::Index b, Eigen::Index g) {
      const Eigen::Index tokens = kept_keys(b, k).tokens();
      return std::min(round_up(tokens * g / count, most_tokens), tokens);
    };
    for (Eigen::Index b = 0; b < m_sequences; ++b) {
      const Eigen::Index first = position(b);
      for (Eigen::Index g = 0; g < count; ++g) {
        m_layout.state.begin(access::data(state_at(b, g)), first + begin_of(b, std::max(g - 1, Eigen::Index(0))));
      }
      if (const T* const from = slab(b)) std::copy_n(from, m_layout.state.size(), access::data(state_at(b, 0)));
    }
    const auto segment_rows = [&](Eigen::Index b, Eigen::Index g) {
      rows_type rows = all_rows(b, q, k, v, x, out);
      rows.narrow(begin_of(b, g), begin_of(b, g + 1) - begin_of(b, g));
      return rows;
    };
    run_segment_tasks(count - 1, k, [&](const auto& engine, Eigen::Index b, Eigen::Index g, T* scratch) {
      engine.template pass<half_block, writes_only>(segment_rows(b, g), access::data(state_at(b, g + 1)), scratch);
    });
    for (Eigen::Index b = 0; b < m_sequences; ++b) {
      state_type& before = state_at(b, count);
      for (Eigen::Index g = 1; g < count; ++g) {
        before = state_at(b, g - 1);
        before.merge(state_at(b, g));
        state_at(b, g) = before;
      }
    }
    run_segment_tasks(count, k, [&](const auto& engine, Eigen::Index b, Eigen::Index g, T* scratch) {
      if (g == 0) clear_masked_rows(engine, b, out, kept_keys(b, k), 0);
      engine.template pass<causal_block, reads_and_writes>(segment_rows(b, g), access::data(state_at(b, g)), scratch);
    });
    for (Eigen::Index b = 0; b < m_sequences; ++b) {
      if (T* const to = slab(b)) std::copy_n(access::data(state_at(b, count - 1)), m_layout.state.size(), to);
    }
  }

 private:
  /// work(engine, b, g, scratch) for all heads of the segments g < count of all sequences.
  template <class Work>
  void run_segment_tasks(Eigen::Index count, const input& k, const Work& work) const {
    const Eigen::Index heads = cuts_heads ? Eigen::Index(m_layout.state.heads) : 1;
    const Eigen::Index width = std::min(Eigen::Index(m_workspaces.size()), m_sequences * heads * count);
    if (width == 0) return;
    const auto weight = [&](Eigen::Index b) { return k.tokens(b) / count + least_tokens; };
    const batch_slices<decltype(weight)> slices(m_sequences, heads * count, width, weight);
    m_executor.parallel_for(width, [&](Eigen::Index w) {
      slices.for_each(w, [&](Eigen::Index b, Eigen::Index first, Eigen::Index last) {
        for (Eigen::Index from = first; from < last;) {
          const Eigen::Index g = from / heads;
          const Eigen::Index end = std::min(last, (g + 1) * heads);
          auto engine = access::engine(m_attn);
          if constexpr (cuts_heads) engine.states = {from - g * heads, end - g * heads};
          work(engine, b, g, access::slab(m_workspaces[std::size_t(w)]).data());
          from = end;
        }
      });
    });
  }

  /// Columns of a panel of values, two registers: what the kernel takes at once.
  static constexpr Eigen::Index panel_columns = 2 * packet<T>::size;

  Eigen::Index panels_of_head(Eigen::Index wanted) const {
    if constexpr (!cuts_columns) return 1;
    return std::min(wanted, (m_attn.value_dim() + panel_columns - 1) / panel_columns);
  }

  template <class Layout, class Range>
  static void clear_heads(const Layout& layout, T* state, const Range& range) {
    layout.state.clear(state, range.first(), range.first() + range.size());
  }

  /// Fewer heads than workspaces: each head in `panels` parts, a workspace each. Every part has a state of its own, of
  /// its columns and the head's z and scales, which are the same in all of them; it is put together when all are done.
  template <bool Writes, class Work>
  void run_panels(Eigen::Index panels, const Work& work) const {
    const Eigen::Index heads = m_layout.state.heads;
    const Eigen::Index groups = (m_attn.value_dim() + panel_columns - 1) / panel_columns;
    const auto part_of = [&](Eigen::Index task) {
      part p{task / panels / heads, task / panels % heads, m_layout};
      const Eigen::Index n = task % panels;
      p.column = groups * n / panels * panel_columns;
      const Eigen::Index end = std::min(groups * (n + 1) / panels * panel_columns, m_attn.value_dim());
      p.layout.state.value_dim = decltype(p.layout.state.value_dim)(end - p.column);
      return p;
    };
    const Eigen::Index tasks = m_sequences * heads * panels;
    m_executor.parallel_for(tasks, [&](Eigen::Index task) {
      const part p = part_of(task);
      T* const scratch = access::slab(m_workspaces[std::size_t(task)]).data();
      T* const own = scratch + p.layout.own_state();
      const state_range<extent<Eigen::Dynamic>> range(p.head, p.head + 1);
      if (const T* const from = slab(p.sequence)) {
        const T* const head = from + p.head * m_layout.state.head_stride();
        copy_columns(head + p.column, m_layout.state, own + p.head * p.layout.state.head_stride(), p.layout.state,
                     p.layout.state);
        copy_rest(head, m_layout.state, own + p.head * p.layout.state.head_stride(), p.layout.state);
      } else {
        clear_heads(p.layout, own, range);
      }
      const auto whole = access::engine(m_attn);
      std::remove_const_t<decltype(whole)> engine{whole.map,    p.layout,         whole.query_scale,
                                                  whole.policy, whole.normalizes, range};
      work(engine, p.sequence, own, scratch, p.column);
    });
    for (Eigen::Index task = 0; Writes && task < tasks; ++task) {
      const part p = part_of(task);
      T* const to = slab(p.sequence);
      if (to == nullptr) continue;
      const T* const own = access::slab(m_workspaces[std::size_t(task)]).data() + p.layout.own_state() +
                           p.head * p.layout.state.head_stride();
      T* const head = to + p.head * m_layout.state.head_stride();
      copy_columns(own, p.layout.state, head + p.column, m_layout.state, p.layout.state);
      if (p.column == 0) copy_rest(own, p.layout.state, head, m_layout.state);
    }
  }

  struct part {
    Eigen::Index sequence;
    Eigen::Index head;
    layout_type layout;
    Eigen::Index column = 0;
  };

  /// The rows of S, as many columns as `narrow` has.
  template <class Layout>
  static void copy_columns(const T* from, const Layout& from_layout, T* to, const Layout& to_layout,
                           const Layout& narrow) {
    for (Eigen::Index c = 0; c < narrow.features; ++c) {
      std::copy_n(from + c * from_layout.row_stride(), narrow.row_stride(), to + c * to_layout.row_stride());
    }
  }
  /// z, and what else a head has behind S.
  template <class Layout>
  static void copy_rest(const T* from, const Layout& from_layout, T* to, const Layout& to_layout) {
    std::copy(from + from_layout.z_offset(), from + from_layout.head_stride(), to + to_layout.z_offset());
  }

  void require_states() const {
    access::visit(m_states, [&](const auto& states) {
      const auto n = Eigen::Index(states.size());
      if (n != m_sequences) refuse(m_function, n, " states are given for ", m_sequences, " sequences");
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(states)>, state_pool>) {
        require_pool<T>(m_function, states, m_layout.state);
      } else {
        for (const auto& s : states) access::require_state(m_attn, m_function, s);
      }
    });
  }

  const char* m_function;
  const Attention& m_attn;
  const layout_type& m_layout;
  const states_type& m_states;
  workspaces<Attention> m_workspaces;
  const Executor& m_executor;
  const batch_options<Attention>& m_options;
  Eigen::Index m_sequences;
};

/// Rows of which a task has the columns from `column` on.
template <class Rows>
Rows from_column(Rows rows, Eigen::Index column) {
  if (rows.v.data != nullptr) rows.v.data += column;
  if (rows.out.data != nullptr) rows.out.data += column;
  return rows;
}

}  // namespace detail

template <class Attention>
std::vector<typename Attention::workspace_type> make_workspaces(const Attention& attn, Eigen::Index n) {
  if (n < 1) detail::refuse("make_workspaces", n, " workspaces are asked for, at least 1 is needed");
  return std::vector<typename Attention::workspace_type>(std::size_t(n), attn.make_workspace());
}

template <class Attention>
std::vector<typename Attention::state_type> make_states(const Attention& attn, Eigen::Index n,
                                                        Eigen::Index first_position) {
  if (n < 0) detail::refuse("make_states", n, " states are asked for");
  return std::vector<typename Attention::state_type>(std::size_t(n), attn.make_state(first_position));
}

template <class Attention, executor Executor>
void forward_causal(const Attention& attn, std::type_identity_t<batch_states<Attention>> states,
                    batch_input<Attention> q, batch_input<Attention> k, batch_input<Attention> v,
                    const batch_inputs<Attention>& x, batch_output<Attention> out, workspaces<Attention> ws,
                    const Executor& executor, const batch_options<Attention>& o) {
  const detail::batch_call<Attention, Executor> call("forward_causal", attn, states, ws, executor, o, q.sequences());
  call.require_queries(q);
  call.require_keys(k, v, q);
  call.require_inputs(x, q);
  call.require_output(out, q);
  call.require_no_query_mask();
  if (!o.segments.empty()) {
    if constexpr (Attention::rule.corrects == correction::none) {
      call.run_segments(o.segments, q, k, v, x, out);
      return call.add_tokens(k);
    } else {
      detail::refuse("forward_causal",
                     "segments of one sequence are for rules whose states merge; of a delta rule they would cost more "
                     "than they save");
    }
  }
  const auto weight = [&](Eigen::Index b) { return call.kept_keys(b, k).tokens() + detail::least_tokens; };
  const auto work = [&](const auto& engine, Eigen::Index b, auto* slab, auto* scratch, Eigen::Index column) {
    call.clear_masked_rows(engine, b, out, call.kept_keys(b, k), column);
    engine.template pass<detail::causal_block, detail::reads_and_writes>(
        detail::from_column(call.all_rows(b, q, k, v, x, out), column), slab, scratch);
  };
  call.template run<true>(weight, work);
  call.add_tokens(k);
}

template <class Attention, executor Executor>
void forward_causal(const Attention& attn, std::type_identity_t<batch_states<Attention>> states,
                    batch_input<Attention> q, batch_input<Attention> k, batch_input<Attention> v,
                    batch_output<Attention> out, workspaces<Attention> ws, const Executor& executor,
                    const batch_options<Attention>& o) {
  static_cast<void>(detail::engine_access::no_inputs<Attention>());
  forward_causal(attn, states, q, k, v, batch_inputs<Attention>(), out, ws, executor, o);
}

template <class Attention, executor Executor>
void forward(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> q,
             batch_input<Attention> k, batch_input<Attention> v, batch_output<Attention> out, workspaces<Attention> ws,
             const Executor& executor, const batch_options<Attention>& o) {
  static_assert(!Attention::rule.is_ordered(),
                "linattn: forward, which lets every query see every key, is not defined for a rule in which the order "
                "of the tokens matters; use forward_causal, or absorb and read");
  const detail::batch_call<Attention, Executor> call("forward", attn, states, ws, executor, o, q.sequences());
  call.require_queries(q);
  call.require_keys(k, v, k);
  call.require_output(out, q);
  call.require_mask(o.query_mask, q);
  const auto weight = [&](Eigen::Index b) { return q.tokens(b) + k.tokens(b) + detail::least_tokens; };
  const auto work = [&](const auto& engine, Eigen::Index b, auto* slab, auto* scratch, Eigen::Index column) {
    call.clear_masked_rows(engine, b, out, call.kept_queries(b, q), column);
    engine.template pass<detail::half_block, detail::writes_only>(
        detail::from_column(call.writing_rows(b, k, v, {}), column), slab, scratch);
    engine.template pass<detail::half_block, detail::reads_only>(
        detail::from_column(call.reading_rows(b, q, out, call.kept_keys(b, k).tokens()), column), slab, scratch);
  };
  call.template run<true>(weight, work);
  call.add_tokens(k);
}

template <class Attention, executor Executor>
void step(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> q,
          batch_input<Attention> k, batch_input<Attention> v, const batch_inputs<Attention>& x,
          batch_output<Attention> out, workspaces<Attention> ws, const Executor& executor) {
  const batch_options<Attention> none;
  const detail::batch_call<Attention, Executor> call("step", attn, states, ws, executor, none, q.sequences());
  call.require_one_token(q);
  call.require_queries(q);
  call.require_keys(k, v, q);
  call.require_inputs(x, q);
  call.require_output(out, q);
  const auto weight = [](Eigen::Index) { return Eigen::Index(1); };
  const auto work = [&](const auto& engine, Eigen::Index b, auto* slab, auto* scratch, Eigen::Index column) {
    engine.template pass<1, detail::reads_and_writes>(detail::from_column(call.all_rows(b, q, k, v, x, out), column),
                                                      slab, scratch);
  };
  call.template run<true>(weight, work);
  call.add_tokens(k);
}

template <class Attention, executor Executor>
void step(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> q,
          batch_input<Attention> k, batch_input<Attention> v, batch_output<Attention> out, workspaces<Attention> ws,
          const Executor& executor) {
  static_cast<void>(detail::engine_access::no_inputs<Attention>());
  step(attn, states, q, k, v, batch_inputs<Attention>(), out, ws, executor);
}

template <class Attention, executor Executor>
void absorb(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> k,
            batch_input<Attention> v, const batch_inputs<Attention>& x, workspaces<Attention> ws,
            const Executor& executor, const batch_options<Attention>& o) {
  const detail::batch_call<Attention, Executor> call("absorb", attn, states, ws, executor, o, k.sequences());
  call.require_keys(k, v, k);
  call.require_inputs(x, k);
  const auto weight = [&](Eigen::Index b) { return k.tokens(b) + detail::least_tokens; };
  const auto work = [&](const auto& engine, Eigen::Index b, auto* slab, auto* scratch, Eigen::Index column) {
    engine.template pass<detail::half_block, detail::writes_only>(
        detail::from_column(call.writing_rows(b, k, v, x), column), slab, scratch);
  };
  call.template run<true>(weight, work);
  call.add_tokens(k);
}

template <class Attention, executor Executor>
void read(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> q,
          batch_output<Attention> out, workspaces<Attention> ws, const Executor& executor,
          const batch_options<Attention>& o) {
  const detail::batch_call<Attention, Executor> call("read", attn, states, ws, executor, o, q.sequences());
  call.require_queries(q);
  call.require_output(out, q);
  call.require_mask(o.query_mask, q);
  const auto weight = [&](Eigen::Index b) { return q.tokens(b) + detail::least_tokens; };
  const auto work = [&](const auto& engine, Eigen::Index b, auto* slab, auto* scratch, Eigen::Index column) {
    call.clear_masked_rows(engine, b, out, call.kept_queries(b, q), column);
    engine.template pass<detail::half_block, detail::reads_only>(
        detail::from_column(call.reading_rows(b, q, out, 0), column), slab, scratch);
  };
  call.template run<false>(weight, work);
}

template <class Attention, executor Executor>
void vjp(const Attention& attn, batch_input<Attention> q, batch_input<Attention> k, batch_input<Attention> v,
         batch_input<Attention> dout, batch_output<Attention> dq, batch_output<Attention> dk,
         batch_output<Attention> dv, workspaces<Attention> ws, const Executor& executor,
         const batch_options<Attention>& o, std::span<typename Attention::parameter_gradient> dmap) {
  static_assert(!Attention::rule.is_ordered(),
                "linattn: vjp is the gradient of forward, which is not defined for a rule in which the order of the "
                "tokens matters; use vjp_causal");
  const batch_states<Attention> none;
  const detail::batch_call<Attention, Executor> call("vjp", attn, none, ws, executor, o, q.sequences());
  const batch_inputs<Attention> x;
  const batch_input_gradients<Attention> dx;
  call.require_gradients(q, k, v, x, dout, dq, dk, dv, dx, dmap, false);
  const auto weight = [&](Eigen::Index b) { return q.tokens(b) + k.tokens(b) + detail::least_tokens; };
  call.run_gradients(!dmap.empty(), weight, [&](const auto& engine, Eigen::Index b, auto& own) {
    const auto a = call.gradient_rows(engine, b, q, k, v, x, dout, dq, dk, dv, dx, dmap, false);
    detail::engine_access::run_vjp(attn, engine, a, own);
  });
}

template <class Attention, executor Executor>
void vjp_causal(const Attention& attn, std::span<const typename Attention::state_type> s0, batch_input<Attention> q,
                batch_input<Attention> k, batch_input<Attention> v, const batch_inputs<Attention>& x,
                batch_input<Attention> dout, std::span<typename Attention::state_type> ds, batch_output<Attention> dq,
                batch_output<Attention> dk, batch_output<Attention> dv, const batch_input_gradients<Attention>& dx,
                workspaces<Attention> ws, const Executor& executor, const batch_options<Attention>& o,
                std::span<typename Attention::parameter_gradient> dmap) {
  const batch_states<Attention> gradients = ds.empty() ? batch_states<Attention>() : batch_states<Attention>(ds);
  const detail::batch_call<Attention, Executor> call("vjp_causal", attn, gradients, ws, executor, o, q.sequences());
  call.require_gradients(q, k, v, x, dout, dq, dk, dv, dx, dmap, true);
  if (s0.size() != ds.size()) {
    detail::refuse("vjp_causal", Eigen::Index(s0.size()), " initial states are given, and gradients of ",
                   Eigen::Index(ds.size()));
  }
  for (const auto& s : s0) detail::engine_access::require_state(attn, "vjp_causal", s);
  const auto weight = [&](Eigen::Index b) { return q.tokens(b) + detail::least_tokens; };
  call.run_gradients(!dmap.empty(), weight, [&](const auto& engine, Eigen::Index b, auto& own) {
    const auto a = call.gradient_rows(engine, b, q, k, v, x, dout, dq, dk, dv, dx, dmap, true);
    detail::engine_access::run_vjp_causal(attn, engine, a, s0.empty() ? nullptr : &s0[std::size_t(b)],
                                          ds.empty() ? nullptr : &ds[std::size_t(b)], own);
  });
}

LINATTN_NAMESPACE_END
