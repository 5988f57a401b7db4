// A call on a batch as tasks: sequences and heads, columns of values, segments.
#pragma once

#include <linattn/detail/batch_call.hpp>
#include <linattn/detail/batch_slices.hpp>

#include <functional>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Rows of which a task has the columns from `column` on.
template <class Rows>
Rows from_column(Rows rows, Eigen::Index column) {
  if (rows.v.data != nullptr) rows.v.data += column;
  if (rows.out.data != nullptr) rows.out.data += column;
  return rows;
}

// ---- columns of values ----------------------------------------------------------------------------------------------

/// Columns of a panel of values, two registers: what the kernel takes at once.
template <class T>
inline constexpr Eigen::Index panel_columns = 2 * packet<T>::size;

/// Some columns of one head, and the layout of an operator that has no others.
template <class Layout>
struct head_panel {
  Eigen::Index sequence;
  Eigen::Index head;
  Layout layout;
  Eigen::Index column = 0;

  Eigen::Index place() const { return head * layout.state.head_stride(); }
};

/// Number `task` of the panels of all heads, `panels` each.
template <class Call>
head_panel<typename Call::layout_type> panel_of(const Call& call, Eigen::Index panels, Eigen::Index task) {
  constexpr Eigen::Index width = panel_columns<typename Call::T>;
  const Eigen::Index heads = call.layout.state.heads;
  const Eigen::Index groups = (call.attn.value_dim() + width - 1) / width;
  const Eigen::Index n = task % panels;
  head_panel<typename Call::layout_type> p{task / panels / heads, task / panels % heads, call.layout};
  p.column = groups * n / panels * width;
  const Eigen::Index end = std::min(groups * (n + 1) / panels * width, call.attn.value_dim());
  p.layout.state.value_dim = decltype(p.layout.state.value_dim)(end - p.column);
  return p;
}

/// The rows of S, as many columns as `narrow` has.
template <class T, class Layout>
void copy_columns(const T* from, const Layout& from_layout, T* to, const Layout& to_layout, const Layout& narrow) {
  for (Eigen::Index c = 0; c < narrow.features; ++c) {
    std::copy_n(from + c * from_layout.row_stride(), narrow.row_stride(), to + c * to_layout.row_stride());
  }
}
/// z, and what else a head has behind S.
template <class T, class Layout>
void copy_rest(const T* from, const Layout& from_layout, T* to, const Layout& to_layout) {
  std::copy(from + from_layout.z_offset(), from + from_layout.head_stride(), to + to_layout.z_offset());
}

/// Fewer heads than workspaces: each head in `panels` parts, a workspace each. Every part has a state of its own, of
/// its columns and the head's z and scales, which are the same in all of them; it is put together when all are done.
template <bool Writes, class Call, class Work>
void run_panels(const Call& call, Eigen::Index panels, const Work& work) {
  using T = typename Call::T;
  const auto& whole = call.layout.state;
  const Eigen::Index tasks = call.sequences * whole.heads * panels;
  call.executor.parallel_for(tasks, [&](Eigen::Index task) {
    const auto p = panel_of(call, panels, task);
    T* const own = call.scratch(task) + p.layout.own_state();
    if (const T* const from = call.slab(p.sequence)) {
      const T* const head = from + p.head * whole.head_stride();
      copy_columns(head + p.column, whole, own + p.place(), p.layout.state, p.layout.state);
      copy_rest(head, whole, own + p.place(), p.layout.state);
    } else {
      p.layout.state.clear(own, p.head, p.head + 1);
    }
    const auto of_all = engine_access::engine(call.attn);
    std::remove_const_t<decltype(of_all)> engine{of_all.map,    p.layout,          of_all.query_scale,
                                                 of_all.policy, of_all.normalizes, {p.head, p.head + 1}};
    work(engine, p.sequence, own, call.scratch(task), p.column);
  });
  for (Eigen::Index task = 0; Writes && task < tasks; ++task) {
    const auto p = panel_of(call, panels, task);
    T* const to = call.slab(p.sequence);
    if (to == nullptr) continue;
    const T* const own = call.scratch(task) + p.layout.own_state() + p.place();
    T* const head = to + p.head * whole.head_stride();
    copy_columns(own, p.layout.state, head + p.column, whole, p.layout.state);
    if (p.column == 0) copy_rest(own, p.layout.state, head, whole);
  }
}

// ---- sequences and heads --------------------------------------------------------------------------------------------

/// work(engine, b, slab, scratch, column) for all heads of all sequences, on as many workspaces as there are. Where a
/// head is cut, the engine's layout has the columns of one part alone, the first of them `column`; `slab` is then a
/// state of that layout. weight(b) is what a head of sequence b costs, about.
template <bool Writes, class Call, class Weight, class Work>
void run_tasks(const Call& call, const Weight& weight, const Work& work) {
  using T = typename Call::T;
  if (call.sequences == 0) return;
  const Eigen::Index heads = call.parts();
  const auto given = Eigen::Index(call.ws.size());
  if constexpr (Call::cuts_columns) {
    constexpr Eigen::Index columns = panel_columns<T>;
    const Eigen::Index panels =
        std::min(given / (call.sequences * heads), (call.attn.value_dim() + columns - 1) / columns);
    if (panels > 1) return run_panels<Writes>(call, panels, work);
  }
  Eigen::Index tokens = 0;
  for (Eigen::Index b = 0; b < call.sequences; ++b) tokens += weight(b);
  const Eigen::Index width = std::min(given, call.sequences * heads);
  const batch_slices<Weight> slices(call.sequences, heads, width, weight);
  call.executor.parallel_for(width, [&](Eigen::Index w) {
    slices.for_each(w, [&](Eigen::Index b, Eigen::Index first, Eigen::Index last) {
      auto engine = engine_access::engine(call.attn);
      engine.rows_are_far = engine.is_far(tokens);
      if constexpr (Call::cuts_heads) engine.states = {first, last};
      T* state = call.slab(b);
      if (state == nullptr) {
        state = call.scratch(w) + call.layout.own_state();
        call.layout.state.clear(state, engine.states.first(), engine.states.first() + engine.states.size());
      }
      work(engine, b, state, call.scratch(w), Eigen::Index(0));
    });
  });
}

// ---- segments -------------------------------------------------------------------------------------------------------

/// work(engine, b, g, scratch) for all heads of the segments g < count of all sequences.
template <class Call, class Work>
void run_segment_tasks(const Call& call, Eigen::Index count, const typename Call::input& k, const Work& work) {
  const Eigen::Index heads = call.parts();
  const Eigen::Index width = std::min(Eigen::Index(call.ws.size()), call.sequences * heads * count);
  if (width == 0) return;
  const auto weight = [&](Eigen::Index b) { return k.tokens(b) / count + least_tokens; };
  const batch_slices<decltype(weight)> slices(call.sequences, heads * count, width, weight);
  call.executor.parallel_for(width, [&](Eigen::Index w) {
    slices.for_each(w, [&](Eigen::Index b, Eigen::Index first, Eigen::Index last) {
      for (Eigen::Index from = first; from < last;) {
        const Eigen::Index g = from / heads;
        const Eigen::Index end = std::min(last, (g + 1) * heads);
        auto engine = engine_access::engine(call.attn);
        if constexpr (Call::cuts_heads) engine.states = {from - g * heads, end - g * heads};
        work(engine, b, g, call.scratch(w));
        from = end;
      }
    });
  });
}

/// forward_causal with every sequence in `count` segments: all but the last are absorbed, each into a state of its
/// own; in turn these become what precedes each segment; all segments run from there. State g of a sequence is that
/// before segment g; the last one is for the scan.
template <class Call>
void run_segments(const Call& call, std::span<typename Call::state_type> states, const typename Call::input& q,
                  const typename Call::input& k, const typename Call::input& v, const typename Call::inputs& x,
                  const typename Call::output& out) {
  using access = engine_access;
  using T = typename Call::T;
  if (call.sequences == 0) return;
  const auto given = Eigen::Index(states.size());
  const Eigen::Index count = given / call.sequences - 1;
  if (count < 1 || given % call.sequences != 0) {
    refuse(call.function, given, " states are given for the segments of ", call.sequences,
           " sequences; G segments take G + 1 states for each sequence");
  }
  for (const auto& s : states) access::require_state(call.attn, call.function, s);
  access::visit(call.states, [&](const auto& of_batch) {
    if constexpr (requires { of_batch.data(); }) {
      const std::less<const void*> before;
      if (before(states.data(), of_batch.data() + of_batch.size()) &&
          before(of_batch.data(), states.data() + states.size())) {
        refuse(call.function, "the states for the segments are states of the batch; they are scratch, of their own");
      }
    }
  });
  const auto& layout = call.layout.state;
  const auto state_at = [&](Eigen::Index b, Eigen::Index g) -> auto& {
    return states[std::size_t(b * (count + 1) + g)];
  };
  const auto begin_of = [&](Eigen::Index b, Eigen::Index g) {
    const Eigen::Index tokens = call.kept_keys(b, k).tokens();
    return std::min(round_up(tokens * g / count, most_tokens), tokens);
  };
  for (Eigen::Index b = 0; b < call.sequences; ++b) {
    const Eigen::Index first = call.position(b);
    for (Eigen::Index g = 0; g < count; ++g) {
      layout.begin(access::data(state_at(b, g)), first + begin_of(b, std::max(g - 1, Eigen::Index(0))));
    }
    if (const T* const from = call.slab(b)) std::copy_n(from, layout.size(), access::data(state_at(b, 0)));
  }
  const auto segment_rows = [&](Eigen::Index b, Eigen::Index g) {
    auto rows = call.all_rows(b, q, k, v, x, out);
    rows.narrow(begin_of(b, g), begin_of(b, g + 1) - begin_of(b, g));
    return rows;
  };
  run_segment_tasks(call, count - 1, k, [&](const auto& engine, Eigen::Index b, Eigen::Index g, T* scratch) {
    engine.template pass<half_block, writes_only>(segment_rows(b, g), access::data(state_at(b, g + 1)), scratch);
  });
  for (Eigen::Index b = 0; b < call.sequences; ++b) {
    auto& before = state_at(b, count);
    for (Eigen::Index g = 1; g < count; ++g) {
      before = state_at(b, g - 1);
      before.merge(state_at(b, g));
      state_at(b, g) = before;
    }
  }
  run_segment_tasks(call, count, k, [&](const auto& engine, Eigen::Index b, Eigen::Index g, T* scratch) {
    if (g == 0) call.clear_masked_rows(engine, b, out, call.kept_keys(b, k), 0);
    engine.template pass<causal_block, reads_and_writes>(segment_rows(b, g), access::data(state_at(b, g)), scratch);
  });
  for (Eigen::Index b = 0; b < call.sequences; ++b) {
    if (T* const to = call.slab(b)) std::copy_n(access::data(state_at(b, count - 1)), layout.size(), to);
  }
}

}  // namespace detail
LINATTN_NAMESPACE_END
