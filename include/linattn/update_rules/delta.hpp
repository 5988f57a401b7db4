// The delta rules: what the state holds under a key is replaced, not added to.
#pragma once

#include <linattn/update_rules/rule_traits.hpp>

LINATTN_NAMESPACE_BEGIN

/// S_i = S_(i-1) + beta_i k_i (v_i - S_(i-1)^T k_i)^T = (I - beta_i k_i k_i^T) S_(i-1) + beta_i k_i v_i^T,  out_i =
/// S_i^T q_i
///
/// With |k_i| = 1 and beta_i = 1 the value under key k_i becomes v_i exactly; beta in [0, 1] interpolates, (1, 2]
/// reflects; beyond, or with longer keys, the state may grow without bound. Normalise keys with l2_normalize
/// (gates.hpp).
///
/// Inputs: beta (N, H). Cost: 6 C M flops a token and head. Not normalised: no z is kept.
/// Numerics: micro-blocks of a few tokens share one reading of the state and solve for their corrections by
/// substitution. What is erased over and over ends in exact zeros: below 2^-100 it is cleared, as in `decay`. No merge:
/// see make_segment. Sources: Schlag et al., Linear Transformers Are Secretly Fast Weight Programmers, 2021; Yang et
/// al., Parallelizing Linear Transformers with the Delta Rule, 2024.
struct delta {
  static constexpr rule_traits traits{.corrects = correction::delta};
  /// What it takes beside q, k and v.
  template <class View>
  struct inputs {
    View beta;  ///< (N, H)
  };
};

/// S_i = S' + beta_i k_i (v_i - S'^T k_i)^T,  S' = a_i S_(i-1),  out_i = S_i^T q_i,  a_i = exp(log_decay_i)
///
/// Decay first, and the correction uses the decayed state; one a_i per head (Gated DeltaNet, Yang et al., 2024), or one
/// per feature, a_i standing for Diag(a_i) (Kimi Delta Attention, 2025).
///
/// Inputs: log_decay (N, H) or (N, H C), <= 0, and beta (N, H). Cost: 7 C M flops a token and head, and one exp, or C.
/// Otherwise as `delta`.
template <decay_kind Decay = decay_kind::per_head>
struct gated_delta {
  static_assert(Decay != decay_kind::none, "linattn: without decay this rule is linattn::delta");
  static constexpr rule_traits traits{.decay = Decay, .corrects = correction::delta};
  /// What it takes beside q, k and v.
  template <class View>
  struct inputs {
    View log_decay;  ///< (N, H) per head, (N, H C) per feature
    View beta;       ///< (N, H)
  };
};

/// S_i = Diag(w_i) S_(i-1) + b_i (S_(i-1)^T a_i)^T + k_i v_i^T,  out_i = S_i^T q_i,  w_i = exp(log_decay_i)
///
/// Diagonal plus rank one (RWKV-7, Peng et al., 2025; its a is -kappa and its b kappa iota): the correction reads the
/// state BEFORE its decay, unlike the delta rules above. a and b are vectors of features, which the map does not touch.
/// Stable where |a_i| |b_i| stays within what w_i leaves.
///
/// Inputs: log_decay, a, b (N, H C). Cost: 9 C M flops a token and head, C exp.
struct generalized_delta {
  static constexpr rule_traits traits{.decay = decay_kind::per_feature, .corrects = correction::rank_one};
  /// What it takes beside q, k and v.
  template <class View>
  struct inputs {
    View log_decay;  ///< (N, H C)
    View a;          ///< (N, H C)
    View b;          ///< (N, H C)
  };
};

LINATTN_NAMESPACE_END
