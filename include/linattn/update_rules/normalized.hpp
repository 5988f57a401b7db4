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
///     using near_attention = linear_attention<elu_plus_one, normalized<decay>>;
///     near_attention attn({.head_dim = 64, .heads = 2}, {}, {decay({-0.7, -0.01})});
///     linear_attention<elu_plus_one, normalized<gated<>>> gated_attn({.head_dim = 64});
///
/// Rule is `decay`, `gated` or one of your own that reads what it has written and does not correct; what it takes stays
/// the same. With signed maps it divides only where `.normalize = true` says so, as every operator; by the options'
/// denominator policy. Cost: 4 C + M flops a token and head more.
///
/// Numerics: what has decayed below 2^-100 is silence. A denominator below it is 0, and so are the output and its
/// gradients, as before the first token; an entry of z below it is cleared with its row of S, now and then as S is
/// elsewhere. So keys whose features are all as small weigh nothing, where the additive rule still averages them.
template <class Rule>
struct normalized : Rule {
  static_assert(
      Rule::traits.corrects == correction::none && Rule::traits.reads_after_write,
      "linattn: normalized<Rule>: a rule that corrects, or reads before it writes, has no weights to divide by");
  static constexpr rule_traits traits{
      .decay = Rule::traits.decay, .fixed_decay = Rule::traits.fixed_decay, .normalizes = true};
};

LINATTN_NAMESPACE_END
