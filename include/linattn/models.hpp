// The models people run, by name: each the operator with the map, rule, scale and decays of its paper and public code.
//
//   const linattn::gated_delta_net<> attn({.head_dim = 128, .heads = 16});      // a linear_attention, with its verbs
//   linattn::l2_normalize(q, 16, q);                                            // its recipe, in calls of gates.hpp
//   linattn::l2_normalize(k, 16, k);
//   linattn::gated_delta_net_gate(a, a_log, dt_bias, g);
//   linattn::sigmoid_beta(b, beta);
//   attn.forward_causal(s, q, k, v, {.log_decay = g, .beta = beta}, out, ws);
//
// | model | rule | queries times | decay | state S (C, M) of a head |
// |---|---|---|---|---|
// | retention | decay | 1 / sqrt(D) | fixed, by head | C = D |
// | lightning_attention | decay | 1 | fixed, by head, or by head and layer | C = D |
// | gated_linear_attention | gated, per feature | 1 / sqrt(D) | sigmoid(x)^(1/16) | C = D, as a rule M / 2 |
// | mamba2_ssd | gated, per head | 1 | exp(-e^A_log delta) | C: the model's state size, M: its head size |
// | hgrn2 | gated, per feature | 1 / sqrt(D) | b + (1 - b) sigmoid(f), key 1 - decay | C = D |
// | rwkv6 | gated_bonus | 1 | exp(-e^w) | C = D |
// | rwkv7 | generalized_delta | 1 | exp(-sigmoid(w) / sqrt(e)) | C = D |
// | delta_net | delta | 1 / sqrt(D) | none | C = D |
// | gated_delta_net | gated_delta, per head | 1 / sqrt(D) | exp(-e^A_log softplus) | C = D |
// | kimi_delta_attention | gated_delta, per feature | 1 / sqrt(D) | exp(-e^A_log softplus) | C = D |
//
// None divides by a sum of keys: a norm of the output does that work (gated_rms_norm.hpp), and takes a scale of the
// queries out again but for its epsilon. What precedes q, k and v in a layer is in short_convolution.hpp.
#pragma once

#include <linattn/feature_maps/identity.hpp>
#include <linattn/gates.hpp>
#include <linattn/linear_attention.hpp>

#include <Eigen/Core>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

LINATTN_NAMESPACE_BEGIN

// For all models here:
//
// Type.     Scalar, HeadDim, ValueDim and Heads are those of linear_attention, from which each derives without adding
//           anything: pass it wherever that is taken. All sizes known at compile time keep state and workspace inline.
// Options.  Those of the operator. query_scale multiplies the model's own: with .query_scale = std::sqrt(D) a model
//           whose table entry is 1 / sqrt(D) reads its queries as they are. Errors are the operator's.
// Recipe.   What to call, in order, with the layer's projections: raw ones in, outputs before the layer's norm out.
//           (N, H D) and the like are as in gates.hpp; g, beta, key, a, b are the caller's buffers. A decoding step
//           takes the same calls with one row and attn.step.

namespace detail {

/// The options with 1 / sqrt(D) in the scale of the queries. D is the type's, or the options'; a missing one is left to
/// the operator, which refuses it.
template <Eigen::Index HeadDim>
options with_scaled_queries(options o) {
  const Eigen::Index head_dim = HeadDim != Eigen::Dynamic ? HeadDim : o.head_dim;
  if (head_dim > 0) o.query_scale /= std::sqrt(static_cast<double>(head_dim));
  return o;
}

/// A decay rule with the log-decays that `schedule(span)` fills in, one for each state of the operator.
template <Eigen::Index Heads, class Schedule>
decay scheduled_decay(const options& o, const Schedule& schedule) {
  const Eigen::Index type = Heads != Eigen::Dynamic ? Heads : 1;
  const Eigen::Index heads = o.value_heads > 0 ? o.value_heads
                             : o.key_heads > 0 ? o.key_heads
                             : o.heads > 0     ? o.heads
                                               : type;
  std::vector<double> log_decays(static_cast<std::size_t>(heads));
  schedule(std::span<double>(log_decays));
  return decay(std::move(log_decays));
}

inline constexpr Eigen::Index default_heads(Eigen::Index head_dim) { return head_dim == Eigen::Dynamic ? head_dim : 1; }

}  // namespace detail

// ---- fixed decays --------------------------------------------------------------------------------------------------

/// RetNet: S = gamma_h S + k v^T, out = q S / sqrt(D), gamma_h = 1 - 2^(-5 - h).
///
///     (rotate q and k by their positions: the caller's)
///     attn.forward_causal(s, q, k, v, out, ws);
///
/// The layer ends in gated_rms_norm(out, gate, {}, y, {.heads = H}): no weight, swish.
///
/// Papers and code: the authors' code scales k by 1 / sqrt(D) instead of q, which is the same. It also divides by what
/// depends on the form: by max(|sum of scores|, 1) in the parallel one, by the square root of the sum of decays in the
/// recurrent one, by a running maximum in the chunked one. The three agree with each other, and with this, only after
/// the norm, and up to its epsilon.
/// Source: Sun et al., Retentive network, 2023.
template <class Scalar = float, Eigen::Index HeadDim = Eigen::Dynamic, Eigen::Index ValueDim = HeadDim,
          Eigen::Index Heads = detail::default_heads(HeadDim)>
class retention : public linear_attention<identity, decay, Scalar, HeadDim, ValueDim, Heads> {
 public:
  explicit retention(const options& o = {})
      : retention::linear_attention(
            detail::with_scaled_queries<HeadDim>(o), {},
            detail::scheduled_decay<Heads>(o, [](std::span<double> g) { retention_log_decay(g); })) {}
};

/// Lightning attention: S = exp(-slope_h) S + k v^T, out = q S, with the slopes of `lightning_log_decay`; made with a
/// layer and the number of layers, those of MiniMax-01, `minimax_log_decay`.
///
///     silu(q, q);  silu(k, k);  silu(v, v);
///     attn.forward_causal(s, q, k, v, out, ws);
///
/// The layer ends in gated_rms_norm over all heads, {.heads = 1, .activation = gate_activation::sigmoid}.
///
/// Papers and code: queries are not scaled in the authors' code and in MiniMax-01's. A public kernel collection scales
/// them by 1 / sqrt(D) unless told otherwise, and has other decays under this name: see gates.hpp for the three.
/// Source: Qin et al., Lightning attention-2, 2024; MiniMax, MiniMax-01, 2025.
template <class Scalar = float, Eigen::Index HeadDim = Eigen::Dynamic, Eigen::Index ValueDim = HeadDim,
          Eigen::Index Heads = detail::default_heads(HeadDim)>
class lightning_attention : public linear_attention<identity, decay, Scalar, HeadDim, ValueDim, Heads> {
 public:
  explicit lightning_attention(const options& o = {})
      : lightning_attention::linear_attention(
            o, {}, detail::scheduled_decay<Heads>(o, [](std::span<double> g) { lightning_log_decay(g); })) {}

  /// MiniMax-01's layer 0 ... layers - 1. Throws for another one.
  explicit lightning_attention(const options& o, Eigen::Index layer, Eigen::Index layers)
      : lightning_attention::linear_attention(o, {}, detail::scheduled_decay<Heads>(o, [&](std::span<double> g) {
                                                minimax_log_decay(layer, layers, g);
                                              })) {}
};

// ---- gates that only decay -----------------------------------------------------------------------------------------

/// GLA: S = Diag(alpha) S + k v^T, out = q S / sqrt(D), alpha = sigmoid(x)^(1/16).
///
///     log_sigmoid_gate(x, g);                                            // x, g (N, H D)
///     attn.forward_causal(s, q, k, v, {.log_decay = g}, out, ws);
///
/// The layer ends in gated_rms_norm, {.heads = H}.
///
/// Papers and code: the exponent 1/16 is a parameter of public layers, as is a lower bound on g, by default none.
/// Source: Yang et al., Gated linear attention transformers, 2024.
template <class Scalar = float, Eigen::Index HeadDim = Eigen::Dynamic, Eigen::Index ValueDim = HeadDim,
          Eigen::Index Heads = detail::default_heads(HeadDim)>
class gated_linear_attention
    : public linear_attention<identity, gated<decay_kind::per_feature>, Scalar, HeadDim, ValueDim, Heads> {
 public:
  explicit gated_linear_attention(const options& o = {})
      : gated_linear_attention::linear_attention(detail::with_scaled_queries<HeadDim>(o)) {}
};

/// Mamba-2's SSD: S = exp(-e^A_log delta) S + B (delta x)^T, y = C S + D x: in the words of attention B is the key, C
/// the query, delta x the value.
///
///     mamba2_gate(dt, a_log, dt_bias, g, delta);                         // (N, H)
///     scale_heads(x, delta, v);                                          // v, x (N, H M)
///     attn.forward_causal(s, C, B, v, {.log_decay = g}, y, ws);
///     (y += D x by head: the caller's)
///
/// x, B and C come out of the short convolution with SiLU. {.head_dim = state size, .value_dim = head size}: the
/// published models have 128 and 64. Heads of one group share B and C: repeat their columns, or where the operator's
/// heads share keys give it .heads = groups, .value_heads = H. The layer ends in gated_rms_norm with gate_first.
///
/// Papers and code: queries are not scaled. The authors' code clamps delta to dt_limit, by default not at all
/// (mamba2_limits). Source: Dao and Gu, Transformers are SSMs, 2024.
template <class Scalar = float, Eigen::Index HeadDim = Eigen::Dynamic, Eigen::Index ValueDim = HeadDim,
          Eigen::Index Heads = detail::default_heads(HeadDim)>
class mamba2_ssd : public linear_attention<identity, gated<decay_kind::per_head>, Scalar, HeadDim, ValueDim, Heads> {
 public:
  explicit mamba2_ssd(const options& o = {}) : mamba2_ssd::linear_attention(o) {}
};

/// HGRN2: S = Diag(alpha) S + (1 - alpha) i^T, out = q S / sqrt(D), alpha = b + (1 - b) sigmoid(f).
///
///     hgrn2_gate(f, lower_bound, g, key);                                // (N, H D); lower_bound (H D) of this layer
///     silu(q, q);
///     attn.forward_causal(s, q, key, i, {.log_decay = g}, out, ws);
///
/// lower_bound is a row of hgrn2_lower_bounds, zeros in the first layer. The layer ends in an RMS norm over all heads.
///
/// Papers and code: the paper's equations do not scale queries; the public layer calls GLA's kernel, which does.
/// Source: Qin et al., HGRN2: Gated linear RNNs with state expansion, 2024.
template <class Scalar = float, Eigen::Index HeadDim = Eigen::Dynamic, Eigen::Index ValueDim = HeadDim,
          Eigen::Index Heads = detail::default_heads(HeadDim)>
class hgrn2 : public linear_attention<identity, gated<decay_kind::per_feature>, Scalar, HeadDim, ValueDim, Heads> {
 public:
  explicit hgrn2(const options& o = {}) : hgrn2::linear_attention(detail::with_scaled_queries<HeadDim>(o)) {}
};

// ---- RWKV ----------------------------------------------------------------------------------------------------------

/// RWKV-6: out = r (S + Diag(u) k v^T), then S = Diag(exp(-e^w)) S + k v^T: reads before it writes, so that `step` is
/// not absorb and then read.
///
///     rwkv6_gate(w, g);                                                  // (N, H D)
///     const matrix_view<const float> bonus(u.data(), N, H * D, 0);       // the layer's u (H D), for all tokens
///     attn.forward_causal(s, r, k, v, {.log_decay = g, .bonus = bonus}, out, ws);
///
/// The layer ends in a group norm, which subtracts the mean, times SiLU of the gate.
///
/// Papers and code: receptances are not scaled; kernels that scale queries by default are called with 1. S is (key,
/// value) here; the authors' code keeps it the other way round.
/// Source: Peng et al., Eagle and Finch, 2024.
template <class Scalar = float, Eigen::Index HeadDim = Eigen::Dynamic, Eigen::Index ValueDim = HeadDim,
          Eigen::Index Heads = detail::default_heads(HeadDim)>
class rwkv6 : public linear_attention<identity, gated_bonus, Scalar, HeadDim, ValueDim, Heads> {
 public:
  explicit rwkv6(const options& o = {}) : rwkv6::linear_attention(o) {}
};

/// RWKV-7: S = Diag(w) S + b (a^T S) + key v^T, out = r S: `a` reads the state before its decay.
///
///     rwkv7_gate(w, g);                                                  // (N, H D)
///     rwkv7_keys(k, x, {.removal = k_k, .replacement = k_a}, H, key, a, b);
///     attn.forward_causal(s, r, key, v, {.log_decay = g, .a = a, .b = b}, out, ws);
///
/// x is the projection of the in-context rate, before its sigmoid. The layer ends in a group norm of epsilon
/// D * 1e-5, to which it adds (r . (r_k key)) v by head: the caller's.
///
/// Papers and code: receptances are not scaled. The paper writes the state transposed, S (value, key), with transitions
/// on the right; it is the same recurrence.
/// Source: Peng et al., RWKV-7 "Goose", 2025.
template <class Scalar = float, Eigen::Index HeadDim = Eigen::Dynamic, Eigen::Index ValueDim = HeadDim,
          Eigen::Index Heads = detail::default_heads(HeadDim)>
class rwkv7 : public linear_attention<identity, generalized_delta, Scalar, HeadDim, ValueDim, Heads> {
 public:
  explicit rwkv7(const options& o = {}) : rwkv7::linear_attention(o) {}
};

// ---- delta rules ---------------------------------------------------------------------------------------------------

/// DeltaNet: S = S + beta k (v - k S), out = q S / sqrt(D).
///
///     silu(q, q);  silu(k, k);  silu(v, v);           // the short convolution applies it where there is one
///     l2_normalize(q, H, q);  l2_normalize(k, H, k);
///     sigmoid_beta(x, beta);                          // (N, H); sigmoid_beta(x, beta, 2) for negative eigenvalues
///     attn.forward_causal(s, q, k, v, {.beta = beta}, out, ws);
///
/// The layer ends in an RMS norm by head.
///
/// Papers and code: the equations do not scale queries, the public kernels do. The first paper has other maps in the
/// place of SiLU and the norm, relu or elu + 1 and a division by the sum of the coordinates, or DPFP
/// (feature_maps/dpfp.hpp): those are linear_attention<map, delta>.
/// Source: Schlag et al., Linear transformers are secretly fast weight programmers, 2021; Yang et al., Parallelizing
/// linear transformers with the delta rule, 2024.
template <class Scalar = float, Eigen::Index HeadDim = Eigen::Dynamic, Eigen::Index ValueDim = HeadDim,
          Eigen::Index Heads = detail::default_heads(HeadDim)>
class delta_net : public linear_attention<identity, delta, Scalar, HeadDim, ValueDim, Heads> {
 public:
  explicit delta_net(const options& o = {}) : delta_net::linear_attention(detail::with_scaled_queries<HeadDim>(o)) {}
};

/// Gated DeltaNet, as in Qwen3-Next: S' = alpha S, S = S' + beta k (v - k S'), out = q S / sqrt(D), alpha by head.
///
///     silu(q, q);  silu(k, k);  silu(v, v);           // the short convolution applies it where there is one
///     l2_normalize(q, H, q);  l2_normalize(k, H, k);
///     gated_delta_net_gate(x, a_log, dt_bias, g);     // (N, H)
///     sigmoid_beta(y, beta);                          // (N, H)
///     attn.forward_causal(s, q, k, v, {.log_decay = g, .beta = beta}, out, ws);
///
/// The layer ends in gated_rms_norm, {.heads = H}. Gates and betas are those of the value heads, which may be more than
/// the query and key heads: repeat the columns of q and k (the published model: 16 and 32 heads, neighbours sharing),
/// or where the operator's heads share keys give it .heads = 16, .value_heads = 32.
///
/// Papers and code: the paper decays and corrects in one product, alpha (I - beta k k^T) S + beta k v^T, which is this.
/// l2_normalize adds its epsilon, 1e-6, to the squared length, as the model's code does.
/// Source: Yang, Kautz and Hatamizadeh, Gated delta networks, 2025.
template <class Scalar = float, Eigen::Index HeadDim = Eigen::Dynamic, Eigen::Index ValueDim = HeadDim,
          Eigen::Index Heads = detail::default_heads(HeadDim)>
class gated_delta_net
    : public linear_attention<identity, gated_delta<decay_kind::per_head>, Scalar, HeadDim, ValueDim, Heads> {
 public:
  explicit gated_delta_net(const options& o = {})
      : gated_delta_net::linear_attention(detail::with_scaled_queries<HeadDim>(o)) {}
};

/// Kimi Delta Attention: S' = Diag(alpha) S, S = S' + beta k (v - k S'), out = q S / sqrt(D), alpha by feature.
///
///     silu(q, q);  silu(k, k);  silu(v, v);           // the short convolution applies it where there is one
///     l2_normalize(q, H, q);  l2_normalize(k, H, k);
///     kimi_delta_gate(f, a_log, dt_bias, g);          // (N, H D); or kimi_delta_safe_gate, as the model was trained
///     sigmoid_beta(x, beta);                          // (N, H)
///     attn.forward_causal(s, q, k, v, {.log_decay = g, .beta = beta}, out, ws);
///
/// The layer ends in gated_rms_norm, {.heads = H, .activation = gate_activation::sigmoid}.
///
/// Papers and code: kernels with a bounded gate take log decays above -5 for granted; here any will do.
/// Source: Kimi Team, Kimi Linear, 2025.
template <class Scalar = float, Eigen::Index HeadDim = Eigen::Dynamic, Eigen::Index ValueDim = HeadDim,
          Eigen::Index Heads = detail::default_heads(HeadDim)>
class kimi_delta_attention
    : public linear_attention<identity, gated_delta<decay_kind::per_feature>, Scalar, HeadDim, ValueDim, Heads> {
 public:
  explicit kimi_delta_attention(const options& o = {})
      : kimi_delta_attention::linear_attention(detail::with_scaled_queries<HeadDim>(o)) {}
};

LINATTN_NAMESPACE_END
