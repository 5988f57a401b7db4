// Speculative decoding: what tokens that may yet be dropped would write, without writing it.
//
//   auto d = attn.make_draft();                                        // once
//   attn.forward_causal(s, q, k, v, {.log_decay = g}, out, d, ws);     // up to 16 proposed tokens; s is const
//   attn.accept(s, d, j, ws);                                          // the first j were right: s moves on by j
//
// Neither a snapshot of the state nor a second run over the accepted tokens. Decoding whose writes are put off, for the
// delta rules and states in L2:
//
//   attn.step(s, q_t, k_t, v_t, {.log_decay = g_t}, out_t, d, ws);     // reads s; once in steps_at_once writes it, too
//   attn.accept(s, d, ws);                                             // what is pending, before s is used without d
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/draft_layout.hpp>
#include <linattn/state.hpp>

#include <Eigen/Core>
#include <string>

LINATTN_NAMESPACE_BEGIN

/// The tokens of one call of the drafting `forward_causal`, or of steps that are put off, made by
/// `linear_attention::make_draft`.
///
/// Of every head and token it holds what the update rule would write into the state, and by how much it would decay:
/// features w, values x and log-decays, such that the state after the first j tokens is
///
///     S_j = g_j0 S_0 + sum_(i<j) g_(i,j] w_i x_i^T          g_(i,j] = the product of the decays of tokens i + 1 ... j
///
/// with w = phi(k) and x = v, or for rules that correct the corrected value u; diagonal plus rank one has two such
/// pairs a token, (b, u) and (k, v). Both are of the size of a token, not of a state.
///
/// Accepting reads and writes the state once, as a step does, so where traffic is the bound it costs what a step costs;
/// its 2 j C M flops a head (twice that for diagonal plus rank one) show where the state lies in a near cache and j is
/// large. `bench_draft` prints both.
///
/// A value, reused for ever: each drafting call overwrites it, and no call allocates. Memory: 16 (C + M) elements a
/// head, twice that for diagonal plus rank one, and for decays per feature 32 C more; inline, without heap, where C, M
/// and H are compile-time constants. One draft belongs to one sequence at a time.
template <rule_traits Rule, class T, Eigen::Index Features, Eigen::Index ValueDim, Eigen::Index Heads>
class draft {
  using layout_type = detail::draft_layout<T, Features, ValueDim, Heads, Rule>;

 public:
  using scalar = T;
  /// Tokens that a draft has room for.
  static constexpr Eigen::Index capacity = detail::draft_tokens;
  /// Steps that a draft collects before the next one writes them all to the state: as many as one read and write of it
  /// takes, 4, or 2 for diagonal plus rank one.
  static constexpr Eigen::Index steps_at_once = layout_type::steps_at_once;

  draft() = default;

  Eigen::Index heads() const noexcept { return m_layout.state.heads; }  ///< of the state, where heads share states
  Eigen::Index features() const noexcept { return m_layout.state.features; }
  Eigen::Index value_dim() const noexcept { return m_layout.state.value_dim; }

  /// Tokens that it holds: those of the last drafting call and of steps put off since; 0 when it is made or cleared.
  Eigen::Index tokens() const noexcept { return m_tokens; }
  /// Where the first of them stands: first_position() + tokens() of the state that they were drafted from.
  Eigen::Index position() const noexcept { return m_position; }

  /// Drops the tokens: those that were not accepted, or all where their sequence begins anew.
  void clear() noexcept { m_tokens = 0; }

  /// Bytes held.
  Eigen::Index bytes() const noexcept { return Eigen::Index(m_slab.size() * sizeof(T)); }

  /// "(H heads, C features, M values)" for messages, or that there is nothing.
  std::string sizes() const {
    if (m_slab.size() == 0) return "empty (default-made or moved from)";
    return detail::sentence(detail::state_sizes{heads(), features(), value_dim()});
  }

 private:
  friend struct detail::engine_access;

  explicit draft(const layout_type& layout) : m_layout(layout), m_slab(layout.size()) {}

  static constexpr Eigen::Index slab_size = layout_type::is_fixed ? layout_type().size() : Eigen::Dynamic;

  layout_type m_layout;
  detail::slab<T, slab_size> m_slab;
  Eigen::Index m_tokens = 0;
  Eigen::Index m_position = 0;
};

LINATTN_NAMESPACE_END
