// Fixed decay: what RetNet and Lightning Attention do.
#pragma once

#include <linattn/update_rules/rule_traits.hpp>

#include <utility>
#include <vector>

LINATTN_NAMESPACE_BEGIN

/// S_i = exp(log_decay_h) S_(i-1) + phi(k_i) v_i^T,  out_i = phi(q_i) S_i,  one constant per head h.
///
/// Made with its H log-decays, which belong to the operator; those of RetNet, with gates.hpp:
///
///     std::vector<double> g(8);
///     retention_log_decay(std::span(g));
///     linear_attention<identity, decay> attn({.head_dim = 64, .heads = 8}, {}, decay(g));
///
/// The operator refuses another number of them than value heads, NaN and +infinity. A decay of 0.97 in log space is
/// -0.0305; the half-life of a token is log(2) / -log_decay tokens.
///
/// Inputs: none. Cost: 5 C M flops a token and head, one exp a head and token. Not normalised: no z is kept.
/// Numerics: the state is bounded by max |phi(k) v| / (1 - exp(log_decay)), and what falls below 2^-100 is cleared
/// every few tokens: silence ends in exact zeros instead of subnormal numbers, which cost processors up to 150 times as
/// much. Sources: Sun et al., Retentive Network, 2023; Qin et al., Lightning Attention-2, 2024.
struct decay {
  static constexpr rule_traits traits{.decay = decay_kind::per_head, .fixed_decay = true};
  /// It takes nothing beside q, k and v.
  template <class View>
  struct inputs {};

  std::vector<double> log_decay;  ///< (H)

  decay() = default;
  explicit decay(std::vector<double> log_decays) : log_decay(std::move(log_decays)) {}
};

LINATTN_NAMESPACE_END
