// Data-dependent decay, per head or per feature; and RWKV-6, which reads before it writes.
#pragma once

#include <linattn/update_rules/rule_traits.hpp>

LINATTN_NAMESPACE_BEGIN

/// S_i = a_i S_(i-1) + phi(k_i) v_i^T,  out_i = phi(q_i) S_i,  a_i = exp(log_decay_i)
///
/// one a_i for all of a head's state (`per_head`: Mamba-2, simple GLA, MiniMax), or one for each row c of it
/// (`per_feature`: GLA, HGRN2), a_i then standing for Diag(a_i).
///
/// Inputs: log_decay, (N, H) or (N, H C), <= 0; -inf wipes the state. Cost: 5 C M flops a token and head, and one exp,
/// or C of them. Not normalised: no z is kept.
/// Numerics: token by token, so every factor is an exp of one log-decay: no quotient and no exponent of a sum. The
/// state carries its total log-decay, by which `merge` appends. What falls below 2^-100 is cleared, as in `decay`.
/// Sources: Yang et al., Gated Linear Attention, 2023; Dao and Gu, Transformers are SSMs, 2024; Qin et al., HGRN2,
/// 2024.
template <decay_kind Decay = decay_kind::per_head>
struct gated {
  static_assert(Decay != decay_kind::none, "linattn: a gated rule decays; write gated<decay_kind::per_head>");
  static constexpr rule_traits traits{.decay = Decay};
  /// What it takes beside q, k and v.
  template <class View>
  struct inputs {
    View log_decay;  ///< (N, H) per head, (N, H C) per feature
  };
};

/// S_i = Diag(a_i) S_(i-1) + phi(k_i) v_i^T,  out_i = phi(q_i) (S_(i-1) + Diag(bonus) phi(k_i) v_i^T)
///
/// RWKV-6 (Peng et al., Eagle and Finch, 2024): a token is read before it is written, and sees itself through the bonus
/// of its features instead. So `step` is not `absorb` then `read`: it is `read`, plus the bonus, then `absorb`.
///
/// Inputs: log_decay (N, H C), and bonus (N, H C), as a rule one row for all tokens (a matrix_view of row stride 0).
/// Cost: 5 C M flops a token and head, C exp.
struct gated_bonus {
  static constexpr rule_traits traits{.decay = decay_kind::per_feature, .reads_after_write = false};
  /// What it takes beside q, k and v.
  template <class View>
  struct inputs {
    View log_decay;  ///< (N, H C)
    View bonus;      ///< (N, H C)
  };
};

LINATTN_NAMESPACE_END
