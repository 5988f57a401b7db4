// A Gated DeltaNet layer from projections to output: convolution, SiLU, normalised queries and keys, gates, the rule,
// the gated norm. Whole sequences against single tokens, and against the layer's equations in long double.
#include <gtest/gtest.h>

#include <linattn/gated_rms_norm.hpp>
#include <linattn/gates.hpp>
#include <linattn/linattn.hpp>
#include <linattn/short_convolution.hpp>

#include <cmath>

#include "support/compare.hpp"
#include "support/inputs.hpp"

namespace {

using Eigen::Index;
using linattn::row_matrix;
using linattn::row_vector;
using wide = long double;
using wide_matrix = row_matrix<wide>;

constexpr Index heads = 3, d = 17, m = 20;  // D and M of a head: no multiples of a register
constexpr Index query_cols = heads * d, value_cols = heads * m, channels = 2 * query_cols + value_cols;

/// What the projections of N tokens give, and the layer's weights.
template <class T>
struct layer_inputs {
  explicit layer_inputs(Index n)
      : qkv(support::normal_matrix<T>(n, channels, 1)),
        gate(support::normal_matrix<T>(n, value_cols, 2)),
        decay(support::normal_matrix<T>(n, heads, 3)),
        beta(support::normal_matrix<T>(n, heads, 4)) {}

  row_matrix<T> qkv, gate, decay, beta;
  row_matrix<T> taps = support::normal_matrix<T>(channels, 4, 5);
  row_vector<T> a_log = support::normal_matrix<T>(1, heads, 6);
  row_vector<T> dt_bias = support::normal_matrix<T>(1, heads, 7);
  row_vector<T> norm = support::normal_matrix<T>(1, m, 8);
};

/// The layer as a user writes it.
template <class T>
class layer {
 public:
  using attention =
      linattn::linear_attention<linattn::identity, linattn::gated_delta<linattn::decay_kind::per_head>, T>;

  explicit layer(const layer_inputs<T>& weights)
      : m_weights(weights),
        m_convolution(weights.taps, {}, linattn::convolution_activation::silu),
        m_attention({.head_dim = d, .value_dim = m, .heads = heads, .query_scale = 1 / std::sqrt(double(d))}) {}

  auto make_state() const { return std::pair(m_convolution.make_state(), m_attention.make_state()); }

  /// Rows first ... first + n - 1 of the inputs, after those that the state has seen.
  template <class State>
  row_matrix<T> operator()(State& s, const layer_inputs<T>& x, Index first, Index n) const {
    row_matrix<T> qkv(n, channels), decay(n, heads), beta(n, heads), out(n, value_cols);
    if (n == 1) {
      m_convolution.step(s.first, x.qkv.row(first), qkv.row(0));
    } else {
      m_convolution.forward(s.first, x.qkv.middleRows(first, n), qkv);
    }
    auto q = qkv.leftCols(query_cols), k = qkv.middleCols(query_cols, query_cols);
    linattn::l2_normalize(q, heads, q);
    linattn::l2_normalize(k, heads, k);
    linattn::gated_delta_net_gate(x.decay.middleRows(first, n), m_weights.a_log, m_weights.dt_bias, decay);
    linattn::sigmoid_beta(x.beta.middleRows(first, n), beta);
    auto ws = m_attention.make_workspace();
    const auto v = qkv.rightCols(value_cols);
    if (n == 1) {
      m_attention.step(s.second, q.row(0), k.row(0), v.row(0), {.log_decay = decay.row(0), .beta = beta.row(0)},
                       out.row(0), ws);
    } else {
      m_attention.forward_causal(s.second, q, k, v, {.log_decay = decay, .beta = beta}, out, ws);
    }
    linattn::gated_rms_norm(out, x.gate.middleRows(first, n), m_weights.norm, out, {.heads = heads});
    return out;
  }

 private:
  const layer_inputs<T>& m_weights;
  linattn::short_convolution<T> m_convolution;
  attention m_attention;
};

wide sigmoid(wide x) { return 1 / (1 + std::exp(-x)); }

/// Token by token, as the model's equations are written.
template <class T>
wide_matrix equations(const layer_inputs<T>& x) {
  const Index n = x.qkv.rows();
  wide_matrix convolved(n, channels), out(n, value_cols);
  for (Index t = 0; t < n; ++t) {
    for (Index c = 0; c < channels; ++c) {
      wide sum = 0;
      for (Index j = 0; j < 4; ++j) sum += t - 3 + j < 0 ? 0 : wide(x.taps(c, j)) * wide(x.qkv(t - 3 + j, c));
      convolved(t, c) = sum * sigmoid(sum);
    }
  }
  for (Index h = 0; h < heads; ++h) {
    wide_matrix state = wide_matrix::Zero(d, m);
    for (Index t = 0; t < n; ++t) {
      const auto unit = [](const auto& row) -> row_vector<wide> { return row / std::sqrt(row.squaredNorm() + 1e-6L); };
      const row_vector<wide> q = unit(convolved.row(t).segment(h * d, d)) / std::sqrt(wide(d)),
                             k = unit(convolved.row(t).segment(query_cols + h * d, d)),
                             v = convolved.row(t).segment(2 * query_cols + h * m, m);
      const wide rate = std::exp(wide(x.a_log(h))), raw = wide(x.decay(t, h)) + wide(x.dt_bias(h));
      state *= std::exp(-rate * std::log1p(std::exp(raw)));
      const row_vector<wide> correction = sigmoid(wide(x.beta(t, h))) * (v - k * state);
      state += k.transpose() * correction;
      const row_vector<wide> o = q * state;
      const wide scale = 1 / std::sqrt(o.squaredNorm() / wide(m) + 1e-6L);
      for (Index j = 0; j < m; ++j) {
        const wide g = x.gate(t, h * m + j);
        out(t, h * m + j) = o(j) * scale * wide(x.norm(j)) * g * sigmoid(g);
      }
    }
  }
  return out;
}

template <class T>
struct GatedDeltaNetLayer : testing::Test {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(GatedDeltaNetLayer, scalars);

/// The rule's 2e-6 (float, |k| = 1, beta in [0, 1]), and as much for what stands before and after it: the norm divides
/// by outputs that may be small.
template <class T>
constexpr double layer_rms = std::is_same_v<T, float> ? 4e-6 : 1e-13;

TYPED_TEST(GatedDeltaNetLayer, EqualsItsEquations) {
  using T = TypeParam;
  const layer_inputs<T> x(70);
  const layer<T> l(x);
  auto s = l.make_state();
  EXPECT_TRUE(support::close(l(s, x, 0, 70), equations(x), layer_rms<T>));
}

TYPED_TEST(GatedDeltaNetLayer, StepsContinueWhatAPrefillBegan) {
  using T = TypeParam;
  constexpr Index n = 41, prefill = 23;
  const layer_inputs<T> x(n);
  const layer<T> l(x);
  auto s = l.make_state(), by_parts = l.make_state();
  const row_matrix<T> whole = l(s, x, 0, n);
  row_matrix<T> out(n, value_cols);
  out.topRows(prefill) = l(by_parts, x, 0, prefill);
  const auto snapshot = by_parts;
  for (Index t = prefill; t < n; ++t) out.row(t) = l(by_parts, x, t, 1);
  EXPECT_TRUE(support::close(out, whole, layer_rms<T>));
  by_parts = snapshot;
  row_matrix<T> again = out;
  for (Index t = prefill; t < n; ++t) again.row(t) = l(by_parts, x, t, 1);
  EXPECT_TRUE(support::same_bits(again, out)) << "from a snapshot";
}

}  // namespace
