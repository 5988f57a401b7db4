// The norm that ends a modern layer: each head by its root mean square, times a gate.
//
//   linattn::gated_rms_norm(o, gate, weight, out, {.heads = 8});   // o, gate, out (N, H M), weight (M)
#pragma once

#include <linattn/detail/head_rows.hpp>
#include <linattn/detail/layer_checks.hpp>
#include <linattn/matrix_view.hpp>

#include <Eigen/Core>
#include <utility>

LINATTN_NAMESPACE_BEGIN

/// What the gate goes through: x sigmoid(x), also called swish, or sigmoid(x).
enum class gate_activation { silu, sigmoid };

/// Designators in this order: `{.heads = 8, .activation = gate_activation::sigmoid}`.
struct gated_rms_norm_options {
  Eigen::Index heads = 1;                              ///< H, packed side by side; 1 norms whole rows
  double epsilon = 1e-6;                               ///< added to the mean square
  gate_activation activation = gate_activation::silu;  ///< what the gate goes through
  bool gate_first = false;                             ///< multiply by the gate before the norm, not after it
};

/// out = (x / sqrt(mean(x^2) + epsilon)) weight act(gate), the mean over the M coordinates of each head: x, gate, out
/// (N, H M), weight (M) for every head, or (H M), or empty for none. With `gate_first`, x act(gate) stands in the place
/// of x, and nothing follows the weight.
///
/// | model | heads | weight | activation | gate_first |
/// |---|---|---|---|---|
/// | Gated DeltaNet, GLA | H | (M) | silu | no |
/// | RetNet | H | none | silu | no |
/// | Kimi Delta Attention | H | (M) | sigmoid | no |
/// | lightning attention (MiniMax-01) | 1, over all heads | (H M) | sigmoid | no |
/// | Mamba-2 | its groups | (H M) | silu | yes |
///
/// Public layers take 1e-5 or 1e-6 for epsilon: read the model's configuration. RWKV's norm subtracts the mean: another
/// function.
///
/// out may stand in the place of x or of the gate, or lie apart (asserted in debug builds). A row's result depends on
/// that row alone, to the bit, so that whole sequences and single tokens agree. Throws std::invalid_argument with both
/// sizes, before anything is written. No allocation, one thread; about 45 flops an element, most of them the gate's,
/// and a square root a head. Forward only: there is no vjp yet.
///
/// Numerics: a few ulp. The sum of squares overflows in float from a root mean square of 1.8e19 / sqrt(M) on, and the
/// head becomes 0. A zero head stays 0 for epsilon > 0. NaN fills its head in x, and its element in the gate.
/// Source: Zhang and Sennrich, Root mean square layer normalization, 2019; Yang et al., Gated delta networks, 2025.
template <class Out>
void gated_rms_norm(detail::input_of<Out> x, detail::input_of<Out> gate, detail::row_of<Out> weight, Out&& out,
                    const gated_rms_norm_options& options = {}) {
  using T = detail::scalar_of<Out>;
  const bool swish = options.activation == gate_activation::silu;
  detail::gated_norm_rows(x, gate, weight, matrix_view<T>(std::forward<Out>(out)), options.heads, options.epsilon,
                          swish, options.gate_first);
}

LINATTN_NAMESPACE_END
