// Where a draft keeps its tokens.
#pragma once

#include <linattn/detail/kernel.hpp>
#include <linattn/detail/layout.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Tokens of a draft: those that every workspace has room for.
inline constexpr Eigen::Index draft_tokens = least_tokens;

/// [head] of the rows that write (C) and their values (M), `writes` of each a token, in turn; then a token's decay and
/// its logarithm, one of each or a row (C). Each on a cache line.
template <class T, Eigen::Index Features, Eigen::Index ValueDim, Eigen::Index Heads, rule_traits Rule>
struct draft_layout {
  static constexpr Eigen::Index writes = Rule.writes();
  static constexpr Eigen::Index pairs = writes * draft_tokens;
  /// Pairs that one pass over the state writes, and the tokens that write them: until there are these, steps are put
  /// off.
  static constexpr Eigen::Index pairs_at_once = 4;
  static constexpr Eigen::Index steps_at_once = pairs_at_once / writes;

  state_layout<T, Features, ValueDim, Heads, Rule> state;

  /// From one token's decay to the next one's.
  constexpr Eigen::Index decay_stride() const noexcept {
    return Rule.decay == decay_kind::per_feature ? state.feature_stride() : Rule.decay == decay_kind::per_head ? 1 : 0;
  }

  constexpr Eigen::Index writing() const noexcept { return 0; }
  constexpr Eigen::Index values() const noexcept { return round_up(pairs * state.feature_stride(), line<T>); }
  constexpr Eigen::Index decay() const noexcept { return values() + round_up(pairs * state.row_stride(), line<T>); }
  constexpr Eigen::Index log_decay() const noexcept {
    return decay() + round_up(draft_tokens * decay_stride(), line<T>);
  }
  constexpr Eigen::Index head_stride() const noexcept {
    return log_decay() + round_up(draft_tokens * decay_stride(), line<T>);
  }
  constexpr Eigen::Index size() const noexcept { return state.heads * head_stride(); }

  static constexpr bool is_fixed = state_layout<T, Features, ValueDim, Heads, Rule>::is_fixed;
};

}  // namespace detail
LINATTN_NAMESPACE_END
