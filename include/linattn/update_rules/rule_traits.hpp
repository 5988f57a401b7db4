// What an update rule is to the engine: compile-time traits, and an aggregate of inputs beside q, k, v.
#pragma once

#include <linattn/version.hpp>

LINATTN_NAMESPACE_BEGIN

/// How a rule forgets: not at all, by one factor per head and token, or by one per head, feature and token.
enum class decay_kind { none, per_head, per_feature };

/// What a rule takes back before it writes: nothing; what the state already holds under the key (the delta rule); or
/// what it holds under one vector, written back under another (diagonal plus rank one).
enum class correction { none, delta, rank_one };

/// The closed set of what rules may differ in. With a_i the decay (1 where there is none), per head
///
///     S_i = a_i S_(i-1) + k_i v_i^T                                        correction::none
///     S_i = S' + beta_i k_i (v_i - S'^T k_i)^T,   S' = a_i S_(i-1)         correction::delta
///     S_i = a_i S_(i-1) + b_i (S_(i-1)^T a_i)^T + k_i v_i^T                correction::rank_one, a_i, b_i vectors
///     out_i = S_i^T q_i,   or where not reads_after_write   S_(i-1)^T q_i + (sum_c q_i[c] bonus[c] k_i[c]) v_i
///
/// A rule contains no kernel code. It is any type with `static constexpr rule_traits traits` and a template
/// `inputs<View>`, an aggregate of the views it takes beside q, k and v, in this order and by these names: log_decay,
/// beta, a, b, bonus. Decays are logarithms: <= 0 in every published rule, -inf to forget everything.
struct rule_traits {
  decay_kind decay = decay_kind::none;
  bool fixed_decay = false;  ///< the decays belong to the operator, not to a token
  correction corrects = correction::none;
  bool normalizes = false;        ///< keeps z, the sum of phi(k) that decays as S does, and divides by phi(q).z
  bool reads_after_write = true;  ///< token i sees itself
  bool log_scaled = false;        ///< set by maps that write log phi: the state is kept by its largest features

  constexpr bool operator==(const rule_traits&) const = default;
  /// Whether the order of the tokens matters, so that there is no non-causal form.
  constexpr bool is_ordered() const {
    return decay != decay_kind::none || corrects != correction::none || !reads_after_write;
  }
  /// Whether the engine has this combination: z belongs to rules that read after they write and do not correct, and a
  /// correction to rules that read after they write; the operator's own decays are one per head.
  constexpr bool is_served() const {
    const bool has_z = !normalizes || (corrects == correction::none && reads_after_write);
    const bool has_reading = reads_after_write || corrects == correction::none;
    return has_z && has_reading && (!fixed_decay || decay == decay_kind::per_head);
  }
  /// Rank-one writes per token.
  constexpr int writes() const { return corrects == correction::rank_one ? 2 : 1; }
};

LINATTN_NAMESPACE_END
