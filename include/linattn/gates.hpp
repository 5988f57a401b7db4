// From a model's raw projections to what an update rule takes: log decays, betas, normalised keys. One call a tensor.
//
//   linattn::gated_delta_net_gate(a, a_log, dt_bias, g);   // a (N, H), the layer's projection, gives log decays (N, H)
//   linattn::sigmoid_beta(b, beta);                        // (N, H)
//   linattn::l2_normalize(k, heads, k);                    // (N, H D), in place
//   attn.forward_causal(s, q, k, v, {.log_decay = g, .beta = beta}, out, ws);
#pragma once

#include <linattn/detail/gates_impl.hpp>
#include <linattn/detail/head_rows.hpp>
#include <linattn/matrix_view.hpp>

#include <Eigen/Core>
#include <cmath>
#include <limits>
#include <utility>

LINATTN_NAMESPACE_BEGIN

// For all functions here:
//
// Shapes.   Packed as everywhere: one token a row, head h in columns h D ... of (N, H D), column h of (N, H). A layer's
//           weights are vectors, (H) or (H D). Anything a matrix_view or vector_view accepts; N = 0 is fine. The scalar
//           type, float or double, is the first output's, and all arguments share it.
// Decays.   Natural logarithms of alpha in (0, 1], so <= 0, and -inf where alpha is 0. A log decay is right to a few
//           ulp also where alpha rounds to 1; the logarithm of a rounded alpha is not.
// In place. An output may be the input that it has the shape of, or lie apart from all inputs (asserted in debug).
// Rows.     A row's result depends on that row alone, to the bit: a call for N tokens and N calls for one agree.
// Errors.   std::invalid_argument with the function's name and both sizes, before anything is written.
// Cost.     One pass in packets, no allocation, one thread. An element takes an exp, a division and a polynomial, about
//           40 flops; where it is more, the function says so.
// NaN.      Kept, in its element; where a norm is taken, in its head.
//
// Where public implementations differ it is said below: a model trained with one form runs wrong with the other.

// ---- fixed decays (H), for rules whose decay does not depend on the token ------------------------------------------

/// Retention: log_decay_h = ln(1 - 2^(-5 - h)), h = 0 ... H - 1, H the size of the output.
///
/// Exact to rounding for any H, also where 1 - 2^(-5 - h) rounds to 1. Some re-implementations space ln(1 - gamma)
/// evenly between ln 1/32 and ln 1/512 instead, whatever H.
/// Source: Sun et al., Retentive network, 2023.
template <class Out>
void retention_log_decay(Out&& log_decay) {
  using T = detail::scalar_of<Out>;
  const vector_view<T> out(std::forward<Out>(log_decay));
  for (Eigen::Index h = 0; h < out.size(); ++h) {
    out.data()[h] = static_cast<T>(std::log1p(-std::exp2(-5.0 - static_cast<double>(h))));
  }
}

/// Lightning attention: log_decay_h = -slope_h, ALiBi's slopes: 2^(-8 (h + 1) / H) where H is a power of two; otherwise
/// those of the p heads of the largest power of two below H, then every second one of 2 p heads.
///
/// The same in every layer. `minimax_log_decay` is another rule; a public kernel collection has a third one by this
/// name, 8 h / H (1 - l / L) for head h of layer l.
/// Source: Qin et al., Lightning attention-2, 2024; Press et al., Train short, test long, 2022.
template <class Out>
void lightning_log_decay(Out&& log_decay) {
  using T = detail::scalar_of<Out>;
  const vector_view<T> out(std::forward<Out>(log_decay));
  for (Eigen::Index h = 0; h < out.size(); ++h) out.data()[h] = static_cast<T>(-detail::alibi_slope(h, out.size()));
}

/// MiniMax-01's lightning attention: log_decay_h = -2^(-8 (h + 1) / H) (1 - l / (L - 1 + 1e-5) + 1e-5) in layer l = 0
/// ... L - 1 of L: deeper layers remember longer, the last one nearly for ever.
///
/// The plain power for every H, without ALiBi's rule for other numbers than powers of two. The model's first code takes
/// that rule, and L - 1 without 1e-5: equal for the published model's 64 heads but for about 1e-7. Throws for a layer
/// outside 0 ... L - 1.
/// Source: MiniMax, MiniMax-01: Scaling foundation models with lightning attention, 2025.
template <class Out>
void minimax_log_decay(Eigen::Index layer, Eigen::Index layers, Out&& log_decay) {
  using T = detail::scalar_of<Out>;
  if (layer < 0 || layer >= layers) detail::refuse("minimax_log_decay", "there is no layer ", layer, " of ", layers);
  const vector_view<T> out(std::forward<Out>(log_decay));
  const double factor = 1 - static_cast<double>(layer) / (static_cast<double>(layers) - 1 + 1e-5) + 1e-5;
  for (Eigen::Index h = 0; h < out.size(); ++h) {
    out.data()[h] = static_cast<T>(-factor * detail::geometric_slope(h, out.size()));
  }
}

// ---- gates that only decay -----------------------------------------------------------------------------------------

/// Gated linear attention: log_decay = ln sigmoid(x) / normalizer; x (N, H D), the low-rank projection with its bias,
/// or (N, H) for the form with one gate a head.
///
/// The normalizer, 16 in the published models, keeps alpha near 1: sigmoid(x)^(1/16). Public layers differ in it, and
/// may bound the log decay from below afterwards.
/// Source: Yang et al., Gated linear attention transformers, 2024.
template <class Out>
void log_sigmoid_gate(detail::input_of<Out> x, Out&& log_decay, double normalizer = 16) {
  using T = detail::scalar_of<Out>;
  if (!(normalizer > 0)) detail::refuse("log_sigmoid_gate", "the normalizer is ", normalizer, ", not above 0");
  const detail::packet<T> share(static_cast<T>(1 / normalizer));
  detail::elementwise_gate("log_sigmoid_gate", x, matrix_view<T>(std::forward<Out>(log_decay)),
                           [&](const auto& f) LINATTN_INLINE_LAMBDA { return log_sigmoid(f) * share; });
}

/// HGRN2: alpha = b + (1 - b) sigmoid(f), in (b, 1), and 1 - alpha stands in the place of the key: log_decay = ln alpha
/// and key = (1 - b) sigmoid(-f), both (N, H D), from f (N, H D) and the layer's lower bounds b (H D) in [0, 1].
///
/// As the source's logaddexp(ln b, ln(1 - b) + ln sigmoid(f)) where alpha < 1/2; that form cancels as alpha nears 1,
/// and rounds to alphas above it, so there -ln(1 + (1 - b) e^-f / (1 + b e^-f)) is taken instead. Likewise `key` does
/// not subtract. 6 ulp at most, as long as 1 - b is exact.
///
/// In the first layer b = 0 (`hgrn2_lower_bounds`), which is fine here; f = -inf gives lowest() there, whose exp is 0.
/// Two exp, two divisions and three logarithms an element.
/// Source: Qin et al., HGRN2: Gated linear RNNs with state expansion, 2024.
template <class Out, class Key>
void hgrn2_gate(detail::input_of<Out> f, detail::row_of<Out> lower_bound, Out&& log_decay, Key&& key) {
  using T = detail::scalar_of<Out>;
  detail::hgrn2_registers(f, lower_bound, matrix_view<T>(std::forward<Out>(log_decay)),
                          matrix_view<T>(std::forward<Key>(key)));
}

/// HGRN2's lower bounds of all L layers, both (L, H D), from the learned ones: with p = softmax over the layers, column
/// by column, row l of the output is p_1 + ... + p_l: 0 in the first layer, rising with depth, below 1. Once a model.
template <class Out>
void hgrn2_lower_bounds(detail::input_of<Out> learned, Out&& lower_bounds) {
  using T = detail::scalar_of<Out>;
  detail::accumulated_softmax(learned, matrix_view<T>(std::forward<Out>(lower_bounds)));
}

/// The range that Mamba-2 clamps its time steps to; by default all of it.
struct mamba2_limits {
  double low = 0;
  double high = std::numeric_limits<double>::infinity();
};

/// Mamba-2 (SSD): delta = softplus(dt + dt_bias), clamped, and log_decay = -e^A_log delta, both (N, H), from dt (N, H),
/// A_log (H) and dt_bias (H). Then S = alpha S + B (delta x)^T, read by C: give B as key, C as query, and the values to
/// `scale_heads` with delta.
///
/// B and C are shared by the heads of a group, and queries are not scaled (query_scale 1). The skip D x is the
/// caller's. delta may stand in the place of dt. Source: Dao and Gu, Transformers are SSMs, 2024.
template <class Out, class Delta>
void mamba2_gate(detail::input_of<Out> dt, detail::row_of<Out> a_log, detail::row_of<Out> dt_bias, Out&& log_decay,
                 Delta&& delta, const mamba2_limits& limits = {}) {
  using T = detail::scalar_of<Out>;
  detail::mamba2_registers(dt, a_log, dt_bias, matrix_view<T>(std::forward<Out>(log_decay)),
                           matrix_view<T>(std::forward<Delta>(delta)), limits.low, limits.high);
}

/// out_h = scale_h v_h for each head: out, v (N, H M), scale (N, H). One multiplication an element.
template <class Out>
void scale_heads(detail::input_of<Out> v, detail::input_of<Out> scale, Out&& out) {
  using T = detail::scalar_of<Out>;
  detail::scale_head_rows(v, scale, matrix_view<T>(std::forward<Out>(out)));
}

// ---- gates of the delta rules --------------------------------------------------------------------------------------

/// beta = scale sigmoid(x), (N, H): how much of a key's old value is replaced. With scale = 2 the transition, identity
/// minus beta k k^T, has eigenvalues down to -1: what configurations call "allow negative eigenvalues".
/// Source: Yang et al., Parallelizing linear transformers with the delta rule, 2024; Grazzi et al., Unlocking
/// state-tracking in linear RNNs through negative eigenvalues, 2025.
template <class Out>
void sigmoid_beta(detail::input_of<Out> x, Out&& beta, double scale = 1) {
  using T = detail::scalar_of<Out>;
  const detail::packet<T> factor(static_cast<T>(scale));
  detail::elementwise_gate("sigmoid_beta", x, matrix_view<T>(std::forward<Out>(beta)),
                           [&](const auto& b) LINATTN_INLINE_LAMBDA { return sigmoid(b) * factor; });
}

/// Gated DeltaNet: log_decay = -e^A_log softplus(a + dt_bias), (N, H) from a (N, H), A_log (H), dt_bias (H), H the
/// value heads.
///
/// softplus is evaluated for every argument; a common tensor library returns x beyond 20, which is the same in float.
/// Weights stored in half precision are to be converted before the exp.
/// Source: Yang, Kautz and Hatamizadeh, Gated delta networks, 2025.
template <class Out>
void gated_delta_net_gate(detail::input_of<Out> a, detail::row_of<Out> a_log, detail::row_of<Out> dt_bias,
                          Out&& log_decay) {
  using T = detail::scalar_of<Out>;
  detail::require_size("gated_delta_net_gate", "a_log", a_log, "a", a.cols());
  detail::softplus_decay("gated_delta_net_gate", "a", a, a_log, dt_bias, matrix_view<T>(std::forward<Out>(log_decay)));
}

/// Kimi Delta Attention: log_decay = -e^A_log softplus(f + dt_bias), a gate a feature: (N, H D) from f (N, H D), A_log
/// (H), one rate a head, and dt_bias (H D).
/// Source: Kimi Team, Kimi Linear, 2025.
template <class Out>
void kimi_delta_gate(detail::input_of<Out> f, detail::row_of<Out> a_log, detail::row_of<Out> dt_bias, Out&& log_decay) {
  using T = detail::scalar_of<Out>;
  detail::softplus_decay("kimi_delta_gate", "f", f, a_log, dt_bias, matrix_view<T>(std::forward<Out>(log_decay)));
}

/// Kimi Delta Attention's bounded gate: log_decay = lower_bound sigmoid(e^A_log (f + dt_bias)), in (lower_bound, 0);
/// shapes as `kimi_delta_gate`. Not that gate clamped: a model is trained with one of the two.
///
/// Note that e^A_log scales the projection here and the decay there. Throws unless lower_bound < 0. Other libraries
/// bound the gate so that their chunk form cannot overflow; this one needs no bound.
template <class Out>
void kimi_delta_safe_gate(detail::input_of<Out> f, detail::row_of<Out> a_log, detail::row_of<Out> dt_bias,
                          Out&& log_decay, double lower_bound = -5) {
  using T = detail::scalar_of<Out>;
  detail::bounded_decay(f, a_log, dt_bias, matrix_view<T>(std::forward<Out>(log_decay)), lower_bound);
}

// ---- RWKV ----------------------------------------------------------------------------------------------------------

/// RWKV-6: log_decay = -e^w, (N, H D): alpha = e^(-e^w). Public code hands its kernels either w, or -e^w, or alpha, all
/// three under the name w: this takes the first. One exp an element.
/// Source: Peng et al., Eagle and Finch, 2024.
template <class Out>
void rwkv6_gate(detail::input_of<Out> w, Out&& log_decay) {
  using T = detail::scalar_of<Out>;
  detail::elementwise_gate("rwkv6_gate", w, matrix_view<T>(std::forward<Out>(log_decay)),
                           [](const auto& x) LINATTN_INLINE_LAMBDA { return detail::packet<T>::zero() - exp(x); });
}

/// RWKV-7: log_decay = -e^(-1/2) sigmoid(w), (N, H D), in (-0.606531, 0): alpha in (0.545, 1).
///
/// The same as the -e^(-softplus(-w) - 1/2) of the authors' first code, w their low-rank projection with its bias.
/// Source: Peng et al., RWKV-7 "Goose", 2025.
template <class Out>
void rwkv7_gate(detail::input_of<Out> w, Out&& log_decay) {
  using T = detail::scalar_of<Out>;
  const detail::packet<T> most(T(-0.60653065971263342360));
  detail::elementwise_gate("rwkv7_gate", w, matrix_view<T>(std::forward<Out>(log_decay)),
                           [&](const auto& x) LINATTN_INLINE_LAMBDA { return sigmoid(x) * most; });
}

/// The layer's weights for RWKV-7's keys, each (H D).
template <class T>
struct rwkv7_key_weights {
  vector_view<const T> removal;      ///< k_k, xi in the paper: scales the key that is removed
  vector_view<const T> replacement;  ///< k_a: how far iota scales the key that is written
};

/// RWKV-7's keys: with kappa = k * removal divided by its length in each head, and iota = sigmoid(x),
///
///     a = -kappa     b = kappa * iota     key = k (1 + (iota - 1) replacement)
///
/// for S = Diag(alpha) S + b (a^T S) + key v^T: all (N, H D), from k and the rate's projection x (N, H D). `key` may
/// stand in the place of k; the others lie apart from everything.
///
/// The length is sqrt(|.|^2 + epsilon), so that a zero key stays zero: by default (1e-12)^2, which equals the authors'
/// max(|.|, 1e-12) for every key longer than that. A public kernel collection takes 1e-6 when it fuses the norm.
/// Source: Peng et al., RWKV-7 "Goose", 2025.
template <class Key, class A, class B>
void rwkv7_keys(detail::input_of<Key> k, detail::input_of<Key> x,
                const rwkv7_key_weights<detail::scalar_of<Key>>& weights, Eigen::Index heads, Key&& key, A&& a, B&& b,
                double epsilon = 1e-24) {
  using T = detail::scalar_of<Key>;
  detail::rwkv7_key_rows(k, x, weights.removal, weights.replacement, heads, matrix_view<T>(std::forward<Key>(key)),
                         matrix_view<T>(std::forward<A>(a)), matrix_view<T>(std::forward<B>(b)), epsilon);
}

// ---- queries, keys and values --------------------------------------------------------------------------------------

/// out = x / sqrt(|x|^2 + epsilon) in each head: out, x (N, H D). What the delta rules ask of queries and keys.
///
/// Zero stays zero. Where a public layer divides by max(|x|, 1e-12) instead, epsilon = 1e-24 is the same; at lengths
/// near 1 the default moves the last bits only, at length 0.001 it halves the square. |x|^2 overflows in float from
/// lengths of 1.8e19 on, and the head becomes 0. 4 flops an element, a square root a head.
template <class Out>
void l2_normalize(detail::input_of<Out> x, Eigen::Index heads, Out&& out, double epsilon = 1e-6) {
  using T = detail::scalar_of<Out>;
  detail::normalize_head_rows(x, heads, matrix_view<T>(std::forward<Out>(out)), epsilon);
}

/// out = x sigmoid(x), elementwise, also called swish: what lightning attention and the delta rules' layers apply to q,
/// k and v. Its limit 0 at -inf, where x / (1 + e^-x) as written is NaN.
template <class Out>
void silu(detail::input_of<Out> x, Out&& out) {
  using T = detail::scalar_of<Out>;
  detail::elementwise_gate("silu", x, matrix_view<T>(std::forward<Out>(out)),
                           [](const auto& value) LINATTN_INLINE_LAMBDA { return detail::silu(value); });
}

LINATTN_NAMESPACE_END
