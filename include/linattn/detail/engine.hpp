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
  /// is that of row 0. denominators (N, H), optional: q.z before the policy. Tokens are packed `layout.tokens()` at a
  /// time; micro-blocks are B tokens, counted from row 0, and the last one is filled up with zeros: a row's bits do not
  /// depend on what follows it.
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

 private:
  template <Eigen::Index B, bool Reads, bool Writes, bool Normalizes>
  void pass_rows(Eigen::Index tokens, state_pointer<Writes, T> state, const matrix_view<const T>& q,
                 const matrix_view<const T>& k, const matrix_view<const T>& v, const matrix_view<T>& out,
                 Eigen::Index position, T* scratch, const matrix_view<T>& denominators_out) const {
    T* const queries = scratch + layout.queries();            // (H, T, C)
    T* const keys = scratch + layout.keys();                  // (H, T, C)
    T* const values = scratch + layout.values();              // (H, T, M)
    T* const denominators = scratch + layout.denominators();  // (H, T)
    T* const tile_scratch = scratch + layout.tile();          // (T, D)

    for (Eigen::Index first = 0; first < tokens; first += layout.tokens()) {
      const Eigen::Index rows = std::min(Eigen::Index(layout.tokens()), tokens - first);
      if constexpr (Reads) {
        pack_features<role::query>(map, layout, q, first, rows, B, query_scale, position, tile_scratch, queries);
      }
      if constexpr (Writes) {
        pack_features<role::key>(map, layout, k, first, rows, B, T(1), position, tile_scratch, keys);
        pack_values(layout, v, first, rows, B, values);
      }
      const Eigen::Index blocks = round_up(rows, B) / B;
      for (Eigen::Index h = 0; h < layout.state.heads; ++h) {
        const head_block<T> head{queries + h * layout.head_features(), keys + h * layout.head_features(),
                                 values + h * layout.head_values()};
        attend_head<B, Reads, Writes, Normalizes>(layout.state, blocks, head, state + h * layout.state.head_stride(),
                                                  denominators + h * layout.tokens());
      }
      if constexpr (Reads) {
        if (normalizes) {
          unpack_outputs<true>(layout, values, denominators, policy, out, first, rows);
        } else {
          unpack_outputs<false>(layout, values, denominators, policy, out, first, rows);
        }
        if (Normalizes && denominators_out.rows() > 0) {
          for (Eigen::Index r = 0; r < rows; ++r) {
            for (Eigen::Index h = 0; h < layout.state.heads; ++h) {
              denominators_out(first + r, h) = denominators[h * layout.tokens() + r];
            }
          }
        }
      }
    }
  }
};

}  // namespace detail
LINATTN_NAMESPACE_END
