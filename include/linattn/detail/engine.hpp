// The engine: one pass over the tokens serves every verb.
//
//   reads and writes   causal, and with one token a decode step
//   writes only        absorb: the first half of the non-causal form
//   reads only         read: its second half
#pragma once

#include <linattn/detail/kernel.hpp>
#include <linattn/detail/packing.hpp>
#include <linattn/options.hpp>
#include <linattn/state.hpp>
#include <linattn/workspace.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

struct engine_access {
  template <class State, class Layout>
  static State make_state(const Layout& layout, Eigen::Index first_position) {
    return State(layout, first_position);
  }
  template <class Workspace, class Layout>
  static Workspace make_workspace(const Layout& layout) {
    return Workspace(layout);
  }
  template <class State>
  static auto* data(State& state) noexcept {
    return state.m_slab.data();
  }
  template <class State>
  static bool is_empty(const State& state) noexcept {
    return state.m_slab.size() != std::size_t(state.m_layout.size()) || state.m_slab.size() == 0;
  }
  template <class State>
  static void add_tokens(State& state, Eigen::Index n) noexcept {
    state.m_tokens += n;
  }
  template <class Workspace>
  static auto& slab(Workspace& workspace) noexcept {
    return workspace.m_slab;
  }
};

/// What a pass needs beside its arguments: the operator's constants.
template <class Map, class T, class Layout>
struct engine {
  const Map& map;
  const Layout& layout;
  T query_scale;
  denominator_policy policy;
  bool normalizes;

  /// `state` is the slab; q, k, v, out are packed (N, H D), (N, H D), (N, H M), (N, H M), unused ones empty. `position`
  /// is that of row 0. denominators (N, H), optional: q.z before the policy. `layout.tokens()` tokens at a time,
  /// head by head; micro-blocks are B tokens, counted from row 0, and the last one is filled up with zeros: a row's
  /// bits do not depend on what follows it.
  template <Eigen::Index B, bool Reads, bool Writes>
  void pass(Eigen::Index tokens, state_pointer<Writes, T> state, const matrix_view<const T>& q,
            const matrix_view<const T>& k, const matrix_view<const T>& v, const matrix_view<T>& out,
            Eigen::Index position, T* scratch, const matrix_view<T>& denominators_out = {}) const {
    // Writing alone has no denominators, whatever the operator's choice.
    if (Reads && (normalizes || denominators_out.rows() > 0)) {
      pass_rows<B, Reads, Writes, Reads>(tokens, state, q, k, v, out, position, scratch, denominators_out);
    } else {
      pass_rows<B, Reads, Writes, false>(tokens, state, q, k, v, out, position, scratch, denominators_out);
    }
  }

  /// Rows of less than this are taken to be in L2 already, where fetching them would cost and save nothing.
  static constexpr Eigen::Index near_bytes = Eigen::Index(1) << 20;

 private:
  template <Eigen::Index B, bool Reads, bool Writes, bool Normalizes>
  void pass_rows(Eigen::Index tokens, state_pointer<Writes, T> state, const matrix_view<const T>& q,
                 const matrix_view<const T>& k, const matrix_view<const T>& v, const matrix_view<T>& out,
                 Eigen::Index position, T* scratch, const matrix_view<T>& denominators_out) const {
    T* const queries = scratch + layout.queries();            // (T, C)
    T* const keys = scratch + layout.keys();                  // (T, C)
    T* const values = scratch + layout.values();              // (T, M)
    T* const outputs = scratch + layout.outputs();            // (T, M)
    T* const denominators = scratch + layout.denominators();  // (T)
    T* const tile = scratch + layout.tile();                  // (T, D)
    const Eigen::Index heads = layout.state.heads;
    const Eigen::Index head_dim = layout.head_dim;
    const Eigen::Index value_dim = layout.state.value_dim;
    const Eigen::Index most = layout.tokens();
    const bool far = tokens * 2 * heads * (head_dim + value_dim) * Eigen::Index(sizeof(T)) > near_bytes;

    for (Eigen::Index first = 0; first < tokens; first += most) {
      const Eigen::Index rows = std::min(most, tokens - first);
      for (Eigen::Index h = 0; h < heads; ++h) {
        const tile_position where{position + first, h};
        if constexpr (Reads) {
          pack_features<role::query>(map, layout, q.row(first) + h * head_dim, q.row_stride(), rows, B, query_scale,
                                     where, tile, queries);
        }
        if constexpr (Writes) {
          pack_features<role::key>(map, layout, k.row(first) + h * head_dim, k.row_stride(), rows, B, T(1), where, tile,
                                   keys);
          pack_values(layout, v.row(first) + h * value_dim, v.row_stride(), rows, B, values);
        }
        rows_ahead next;
        if (B > 1 && far) {
          next = h + 1 < heads
                     ? ahead<Reads, Writes>(q, k, v, out, first, rows, h + 1)
                     : ahead<Reads, Writes>(q, k, v, out, first + rows, std::min(most, tokens - first - rows), 0);
        }
        attend_head<B, Reads, Writes, Normalizes, T>(layout.state, round_up(rows, B) / B,
                                                     {queries, keys, values, outputs},
                                                     state + h * layout.state.head_stride(), denominators, next);
        if constexpr (Reads) {
          T* const to = out.row(first) + h * value_dim;
          if (Normalizes && normalizes) {
            unpack_outputs<true>(layout, outputs, denominators, policy, to, out.row_stride(), rows);
          } else {
            unpack_outputs<false>(layout, outputs, denominators, policy, to, out.row_stride(), rows);
          }
          if (Normalizes && denominators_out.rows() > 0) {
            for (Eigen::Index r = 0; r < rows; ++r) denominators_out(first + r, h) = denominators[r];
          }
        }
      }
    }
  }

  /// The rows of one head that packing will touch.
  template <bool Reads, bool Writes>
  LINATTN_INLINE rows_ahead ahead(const matrix_view<const T>& q, const matrix_view<const T>& k,
                                  const matrix_view<const T>& v, const matrix_view<T>& out, Eigen::Index first,
                                  Eigen::Index rows, Eigen::Index head) const {
    rows_ahead next(rows);
    if (rows <= 0) return next;
    const auto add = [&](const auto& x, Eigen::Index dim)
                         LINATTN_INLINE_LAMBDA { next.add(x.row(first) + head * dim, x.row_stride(), dim, head == 0); };
    if constexpr (Reads) add(q, layout.head_dim);
    if constexpr (Writes) add(k, layout.head_dim), add(v, layout.state.value_dim);
    if constexpr (Reads) add(out, layout.state.value_dim);
    return next;
  }
};

}  // namespace detail
LINATTN_NAMESPACE_END
