// The rule of the 2020 paper: S_i = S_(i-1) + phi(k_i) v_i^T, z_i = z_(i-1) + phi(k_i).
#pragma once

#include <linattn/update_rules/rule_traits.hpp>

LINATTN_NAMESPACE_BEGIN

/// S_i = S_(i-1) + phi(k_i) v_i^T,  z_i = z_(i-1) + phi(k_i),  out_i = phi(q_i) S_i / (phi(q_i) z_i)
///
/// Inputs: none. Cost: 4 C M flops a token and head.
///
/// Numerics: a prefix sum that never forgets. A float state saturates where the next addend is below half an ulp of
/// the sum: adding 1 to an entry stops having effect at 2^24 = 1.6e7 tokens. Use double, or a rule with decay, for
/// streams longer than that (six minutes of one token per 48 kHz audio sample).
struct additive {
  static constexpr rule_traits traits{.normalizes = true};
  /// It takes nothing beside q, k and v.
  template <class View>
  struct inputs {};
};

LINATTN_NAMESPACE_END
