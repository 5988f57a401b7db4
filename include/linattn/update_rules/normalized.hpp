// Rules that decay, divided by the weights they have given: averages that forget.
#pragma once

#include <linattn/update_rules/rule_traits.hpp>

LINATTN_NAMESPACE_BEGIN

/// A rule that decays, with the sum of keys z beside S:
///
///     S_i = a_i S_(i-1) + phi(k_i) v_i^T,   z_i = a_i z_(i-1) + phi(k_i),   out_i = phi(q_i) S_i / (phi(q_i) z_i)
///
/// so that out_i is the mean of the values by the weights g_ij phi(q_i).phi(k_j), g_ij the product of the decays over
/// (j, i]: with `decay` linear attention that looks at what is near, with `gated` the gated random feature attention
/// of Peng et al., Random Feature Attention, 2021 (there keys also come times 1 - a_i).
///
///     linear_attention<elu_plus_one, normalized<decay>> attn({.head_dim = 64, .heads = 2}, {}, {decay({-0.7,
///     -0.01})}); linear_attention<elu_plus_one, normalized<gated<>>> attn({.head_dim = 64});
///
/// Rule is `decay`, `gated` or one of your own that reads what it has written and does not correct; what it takes stays
/// the same. The map's denominators should be positive (feature_map.hpp); with the options' denominator policy, and
/// without the division where their `normalize` is false. Cost: C flops a token and head more. Numerics: as Rule; z is
/// cleared where S is, so that after long silence a denominator is 0, as before the first token.
template <class Rule>
struct normalized : Rule {
  static_assert(
      Rule::traits.corrects == correction::none && Rule::traits.reads_after_write,
      "linattn: normalized<Rule>: a rule that corrects, or reads before it writes, has no weights to divide by");
  static constexpr rule_traits traits{
      .decay = Rule::traits.decay, .fixed_decay = Rule::traits.fixed_decay, .normalizes = true};
};

LINATTN_NAMESPACE_END
