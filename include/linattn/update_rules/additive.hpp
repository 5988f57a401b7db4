// The rule of the 2020 paper: S_i = S_(i-1) + phi(k_i) v_i^T, z_i = z_(i-1) + phi(k_i).
#pragma once

#include <linattn/version.hpp>

LINATTN_NAMESPACE_BEGIN

/// How a rule forgets: not at all, one factor per head and token, or one per feature and token.
enum class decay_kind { none, per_head, per_feature };

/// What an update rule is to the engine: compile-time traits and an aggregate of input views beside q, k, v. A rule
/// contains no kernel code.
///
/// additive:  S_i = S_(i-1) + phi(k_i) v_i^T,  z_i = z_(i-1) + phi(k_i),  out_i = phi(q_i) S_i / (phi(q_i) z_i)
///
/// Numerics: a prefix sum that never forgets. A float state saturates where the next addend is below half an ulp of
/// the sum: adding 1 to an entry stops having effect at 2^24 = 1.6e7 tokens. Use double, or a rule with decay, for
/// streams longer than that (six minutes of one token per 48 kHz audio sample).
struct additive {
  static constexpr decay_kind decay = decay_kind::none;
  static constexpr bool corrects = false;          ///< no delta correction of what is written
  static constexpr bool normalizes = true;         ///< keeps z = sum phi(k)
  static constexpr int writes = 1;                 ///< rank-one writes per token
  static constexpr bool reads_after_write = true;  ///< token i sees itself
  struct inputs {};                                ///< no gates
};

LINATTN_NAMESPACE_END
