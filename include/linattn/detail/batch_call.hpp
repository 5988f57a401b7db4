// One call of a verb of batch.hpp: its arguments, checked, and what each sequence has of them.
#pragma once

#include <linattn/batch_options.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// One call on a batch: what it is given, checked, and cut.
template <class Attention, class Executor>
struct batch_call {
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

  const char* function;  // the verb
  const Attention& attn;
  const layout_type& layout;
  const states_type& states;
  workspaces<Attention> ws;
  const Executor& executor;
  const batch_options<Attention>& options;
  Eigen::Index sequences;

  batch_call(const char* verb, const Attention& attention, const states_type& all_states,
             workspaces<Attention> all_workspaces, const Executor& runs, const batch_options<Attention>& o,
             Eigen::Index count)
      : function(verb),
        attn(attention),
        layout(access::layout(attention)),
        states(all_states),
        ws(all_workspaces),
        executor(runs),
        options(o),
        sequences(count) {
    if (ws.empty()) refuse(function, "no workspaces are given; make_workspaces(attn, n) makes n");
    for (auto& one : ws) access::require_workspace(attn, function, one);
    require_states();
  }

  T* scratch(Eigen::Index w) const { return access::slab(ws[std::size_t(w)]).data(); }
  /// Heads that may be tasks of their own.
  Eigen::Index parts() const { return cuts_heads ? Eigen::Index(layout.state.heads) : 1; }

  // ---- checks -------------------------------------------------------------------------------------------------------

  /// x has the batch's sequences and, sequence by sequence, the tokens of `like`. `what` stands before its name.
  template <class U>
  void require(const char* name, const batch_view<U>& x, const input& like, Eigen::Index heads, Eigen::Index dim,
               const char* what = "") const {
    if (x.sequences() != sequences || x.heads() != heads || x.dim() != dim) {
      refuse(function, what, name, " has ", x.sequences(), " sequences of ", x.heads(), " heads of ", x.dim(),
             " elements, expected ", sequences, " of ", heads, " of ", dim);
    }
    for (Eigen::Index b = 0; b < sequences; ++b) {
      if (x.tokens(b) != like.tokens(b)) {
        refuse(function, what, name, " has ", x.tokens(b), " tokens in sequence ", b, ", expected ", like.tokens(b));
      }
      if (x.data() == nullptr && like.tokens(b) > 0) refuse(function, what, name, " is not given");
    }
  }
  void require_queries(const input& q) const { require("q", q, q, attn.heads(), attn.head_dim()); }
  /// The mask of x's tokens.
  void require_mask(const token_mask& mask, const input& x) const {
    if (mask.is_none()) return;
    if (x.is_packed()) refuse(function, "a mask is given for packed sequences, which have no padding");
    mask.check(function, sequences, x.tokens(0));
  }
  void require_no_query_mask() const {
    if (!options.query_mask.is_none()) {
      refuse(function, "query_mask is given, but the queries are those of the keys' tokens; give mask");
    }
  }
  /// What a verb has no use for would be passed over in silence.
  void require_no_mask() const {
    if (!options.mask.is_none()) refuse(function, "mask is given, which is of keys; give query_mask");
  }
  void require_no_segments() const {
    if (!options.segments.empty()) refuse(function, "segments are given, which are forward_causal's alone");
  }
  void require_keys(const input& k, const input& v, const input& like) const {
    require_mask(options.mask, k);
    require("k", k, like, attn.key_heads(), attn.head_dim());
    require("v", v, like, attn.value_heads(), attn.value_dim());
  }
  void require_output(const output& out, const input& q) const {
    require("out", out, q, attn.output_heads(), attn.value_dim());
  }
  template <class Inputs>
  void require_inputs(const Inputs& x, const input& like) const {
    access::for_each_input(attn, x, [&](const char* name, const auto& view, Eigen::Index columns, const char*) {
      require(name, view, like, attn.value_heads(), columns);
    });
  }
  /// Whether a sequence of `to` has no memory with one of x's: in debug builds, H^2 comparisons a sequence.
  template <class U>
  bool is_apart(const output& to, const batch_view<U>& x) const {
    for (Eigen::Index b = 0; b < sequences && to.data() != nullptr && x.data() != nullptr; ++b) {
      for (Eigen::Index h = 0; h < to.heads(); ++h) {
        for (Eigen::Index other = 0; other < x.heads(); ++other) {
          if (overlap(head_of(to, b, h), head_of(x, b, other))) return false;
        }
      }
    }
    return true;
  }
  template <class U>
  static matrix_view<const std::remove_const_t<U>> head_of(const batch_view<U>& x, Eigen::Index b, Eigen::Index h) {
    return matrix_view<const std::remove_const_t<U>>(x.at(b, 0, h), x.tokens(b), x.dim(), x.rows(b).row_stride);
  }
  void require_apart([[maybe_unused]] const output& to, [[maybe_unused]] std::initializer_list<input> from) const {
    for ([[maybe_unused]] const input& x : from) {
      LINATTN_ASSERT(is_apart(to, x) && "linattn: an output of a batch overlaps an input");
    }
  }
  void require_one_token(const input& q) const {
    for (Eigen::Index b = 0; b < sequences; ++b) {
      if (q.tokens(b) != 1) refuse(function, "q has ", q.tokens(b), " tokens in sequence ", b, ", expected 1");
    }
  }

  // ---- states -------------------------------------------------------------------------------------------------------

  /// The slab of sequence b; null where it starts from nothing.
  T* slab(Eigen::Index b) const {
    T* result = nullptr;
    access::visit(states, [&](const auto& given) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(given)>, state_pool>) {
        result = slab_of<T>(given, b);
      } else {
        result = access::data(given[std::size_t(b)]);
      }
    });
    return result;
  }
  Eigen::Index position(Eigen::Index b) const {
    const T* const s = slab(b);
    if (s == nullptr) return 0;
    return Eigen::Index(layout.state.number(s, trailer::first_position) + layout.state.number(s, trailer::tokens));
  }
  /// After all tasks are done.
  void add_tokens(const input& k) const {
    for (Eigen::Index b = 0; b < sequences; ++b) {
      if (T* const s = slab(b)) layout.state.add_tokens(s, kept_keys(b, k).tokens());
    }
  }
  void require_states() const {
    access::visit(states, [&](const auto& given) {
      const auto n = Eigen::Index(given.size());
      if (n != sequences) refuse(function, n, " states are given for ", sequences, " sequences");
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(given)>, state_pool>) {
        require_pool<T>(function, given, layout.state);
      } else {
        for (const auto& s : given) access::require_state(attn, function, s);
      }
    });
  }

  // ---- masks --------------------------------------------------------------------------------------------------------

  kept_rows kept_keys(Eigen::Index b, const input& k) const { return options.mask.of(b, k.tokens(b)); }
  kept_rows kept_queries(Eigen::Index b, const input& q) const { return options.query_mask.of(b, q.tokens(b)); }

  /// Rows of out that no pass writes, of the heads and columns of a task's engine.
  template <class Engine>
  void clear_masked_rows(const Engine& engine, Eigen::Index b, const output& out, const kept_rows& kept,
                         Eigen::Index column) const {
    if (out.tokens(b) == 0) return;
    token_rows<S> rows = out.rows(b);
    rows.data += column;
    for (Eigen::Index h = engine.states.first(); h < engine.states.first() + engine.states.size(); ++h) {
      for (Eigen::Index r = 0; r < layout.heads.readers; ++r) {
        clear_masked(rows, out.tokens(b), kept, layout.heads.output_of(h, r), engine.layout.state.value_dim);
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
    if constexpr (rule.fixed_decay) result.fixed_log_decay = attn.update_rule().log_decay.data();
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
};

}  // namespace detail
LINATTN_NAMESPACE_END
