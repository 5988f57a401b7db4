// The named models, each from raw projections to outputs, by the recipe in its comment, against its paper's equations
// in long double.
#include <linattn/models.hpp>

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/rule_oracle.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace {

using Eigen::Index;
using linattn::row_matrix;
using linattn::row_vector;
using support::wide_matrix;
using support::wide_vector;
using wide = long double;

/// Sums of up to 45 tokens by 20 features of either sign, and gates of a few ulp: some roundings each, most of them
/// unrelated. The largest error seen is 3.
template <class T>
inline constexpr double roundings = 8 * double(std::numeric_limits<T>::epsilon());

constexpr Index tokens = 45, heads = 3, d = 20, m = 9;  // D and M of a head: no multiples of a register

wide sigmoid(wide x) { return 1 / (1 + std::exp(-x)); }
wide softplus(wide x) { return std::log1p(std::exp(x)); }
wide silu(wide x) { return x * sigmoid(x); }

template <class X, class F>
wide_matrix each(const X& x, const F& f) {
  wide_matrix y = x.template cast<wide>();
  for (Index i = 0; i < y.rows(); ++i) {
    for (Index j = 0; j < y.cols(); ++j) y(i, j) = f(y(i, j), j);
  }
  return y;
}
template <class X>
wide_matrix each_silu(const X& x) {
  return each(x, [](wide value, Index) { return silu(value); });
}

/// By head, with the epsilon of the models' code.
wide_matrix normalized(wide_matrix x, wide epsilon = 1e-6L) {
  for (Index i = 0; i < x.rows(); ++i) {
    for (Index h = 0; h < heads; ++h) {
      auto part = x.row(i).segment(h * d, d);
      part /= std::sqrt(part.squaredNorm() + epsilon);
    }
  }
  return x;
}

template <class Scalar>
class Models : public testing::Test {
 public:
  using T = Scalar;

  /// Projections and weights, N(0, 1).
  row_matrix<T> q = draw(tokens, heads*d), k = draw(tokens, heads*d), v = draw(tokens, heads*m);
  row_matrix<T> wide_gate = draw(tokens, heads*d), rate = draw(tokens, heads*d);  // (N, H D)
  row_matrix<T> gate = draw(tokens, heads), narrow = draw(tokens, heads);         // (N, H)
  row_vector<T> a_log = draw(1, heads), bias = draw(1, heads), wide_bias = draw(1, heads*d);
  /// Where a recipe writes.
  row_matrix<T> g = row_matrix<T>(tokens, heads*d), g_head = row_matrix<T>(tokens, heads);
  row_matrix<T> beta = row_matrix<T>(tokens, heads), out = row_matrix<T>(tokens, heads*m);

  const linattn::options sizes{.head_dim = d, .value_dim = m, .heads = heads};
  const wide scale = 1 / std::sqrt(wide(d));

  /// What the equations ask of q, k and v: for the oracle, as they come.
  support::rule_inputs raw() const {
    return {.heads = heads, .q = q.template cast<wide>(), .k = k.template cast<wide>(), .v = v.template cast<wide>()};
  }
  /// q, k and v through SiLU.
  support::rule_inputs activated() const {
    return {.heads = heads, .q = each_silu(q), .k = each_silu(k), .v = each_silu(v)};
  }

  void expect_equations(support::rule_kind kind, const support::rule_inputs& x) const {
    EXPECT_TRUE(support::close(out, support::rule_oracle(kind, x).out, roundings<T>));
  }

 private:
  row_matrix<T> draw(Index rows, Index cols) { return support::normal_matrix<T>(rows, cols, ++m_seed); }
  std::uint64_t m_seed = 0;
};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(Models, scalars);

TYPED_TEST(Models, Retention) {
  const linattn::retention<TypeParam> attn(this->sizes);
  this->out = attn.forward_causal(this->q, this->k, this->v);

  support::rule_inputs x = this->raw();
  x.query_scale = this->scale;
  x.log_decay = wide_matrix(1, heads);
  x.log_decay << std::log(1 - 1.0L / 32), std::log(1 - 1.0L / 64), std::log(1 - 1.0L / 128);
  this->expect_equations(support::rule_kind::decay, x);
}

TYPED_TEST(Models, LightningAttention) {
  const linattn::lightning_attention<TypeParam> attn(this->sizes);
  support::rule_inputs x = this->activated();
  linattn::silu(this->q, this->q);
  linattn::silu(this->k, this->k);
  linattn::silu(this->v, this->v);
  this->out = attn.forward_causal(this->q, this->k, this->v);
  // Three heads: the two of H = 2, and the first of H = 4.
  x.log_decay = wide_matrix(1, heads);
  x.log_decay << -1.0L / 16, -1.0L / 256, -1.0L / 4;
  this->expect_equations(support::rule_kind::decay, x);

  const linattn::lightning_attention<TypeParam> minimax(this->sizes, 2, 5);
  this->out = minimax.forward_causal(this->q, this->k, this->v);
  for (Index h = 0; h < heads; ++h) {
    x.log_decay(0, h) = -std::exp2(-8 * wide(h + 1) / heads) * (1 - 2 / (4 + 1e-5L) + 1e-5L);
  }
  this->expect_equations(support::rule_kind::decay, x);
}

TYPED_TEST(Models, GatedLinearAttention) {
  const linattn::gated_linear_attention<TypeParam> attn(this->sizes);
  linattn::log_sigmoid_gate(this->wide_gate, this->g);
  this->out = attn.forward_causal(this->q, this->k, this->v, {.log_decay = this->g});

  support::rule_inputs x = this->raw();
  x.query_scale = this->scale;
  x.log_decay = each(this->wide_gate, [](wide f, Index) { return std::log(sigmoid(f)) / 16; });
  this->expect_equations(support::rule_kind::gated_per_feature, x);
}

TYPED_TEST(Models, Mamba2) {
  const linattn::mamba2_ssd<TypeParam> attn(this->sizes);
  row_matrix<TypeParam> delta(tokens, heads), scaled(tokens, heads * m);
  linattn::mamba2_gate(this->gate, this->a_log, this->bias, this->g_head, delta);
  linattn::scale_heads(this->v, delta, scaled);
  this->out = attn.forward_causal(this->q, this->k, scaled, {.log_decay = this->g_head});

  support::rule_inputs x = this->raw();
  const wide_matrix step = each(this->gate, [&](wide dt, Index h) { return softplus(dt + wide(this->bias[h])); });
  for (Index h = 0; h < heads; ++h) {
    for (Index i = 0; i < tokens; ++i) x.v.row(i).segment(h * m, m) *= step(i, h);
  }
  x.log_decay = each(step, [&](wide dt, Index h) { return -std::exp(wide(this->a_log[h])) * dt; });
  this->expect_equations(support::rule_kind::gated_per_head, x);
}

TYPED_TEST(Models, Hgrn2) {
  const linattn::hgrn2<TypeParam> attn(this->sizes);
  const row_vector<TypeParam> bound = this->wide_bias.cwiseAbs().cwiseMin(TypeParam(4)) / TypeParam(8);
  row_matrix<TypeParam> key(tokens, heads * d);
  support::rule_inputs x = this->raw();
  x.q = each_silu(this->q);
  linattn::hgrn2_gate(this->wide_gate, bound, this->g, key);
  linattn::silu(this->q, this->q);
  this->out = attn.forward_causal(this->q, key, this->v, {.log_decay = this->g});

  const wide_matrix alpha =
      each(this->wide_gate, [&](wide f, Index j) { return wide(bound[j]) + (1 - wide(bound[j])) * sigmoid(f); });
  x.query_scale = this->scale;
  x.k = each(alpha, [](wide value, Index) { return 1 - value; });
  x.log_decay = each(alpha, [](wide value, Index) { return std::log(value); });
  this->expect_equations(support::rule_kind::gated_per_feature, x);
}

TYPED_TEST(Models, Rwkv6) {
  const linattn::rwkv6<TypeParam> attn(this->sizes);
  const linattn::matrix_view<const TypeParam> bonus(this->wide_bias.data(), tokens, heads * d, 0);
  linattn::rwkv6_gate(this->wide_gate, this->g);
  this->out = attn.forward_causal(this->q, this->k, this->v, {.log_decay = this->g, .bonus = bonus});

  support::rule_inputs x = this->raw();
  x.bonus = this->wide_bias.template cast<wide>();
  x.log_decay = each(this->wide_gate, [](wide w, Index) { return -std::exp(w); });
  this->expect_equations(support::rule_kind::gated_bonus, x);
}

TYPED_TEST(Models, Rwkv7) {
  using scalar = TypeParam;
  const linattn::rwkv7<scalar> attn(this->sizes);
  const row_vector<scalar> removal = this->wide_bias, replacement = this->wide_bias.cwiseAbs() / scalar(4);
  row_matrix<scalar> key(tokens, heads * d), a(tokens, heads * d), b(tokens, heads * d);
  linattn::rwkv7_gate(this->wide_gate, this->g);
  linattn::rwkv7_keys(this->k, this->rate, {.removal = removal, .replacement = replacement}, heads, key, a, b);
  this->out = attn.forward_causal(this->q, key, this->v, {.log_decay = this->g, .a = a, .b = b});

  support::rule_inputs x = this->raw();
  const wide_matrix kappa = normalized(each(this->k, [&](wide value, Index j) { return value * wide(removal[j]); }), 0);
  const wide_matrix iota = each(this->rate, [](wide value, Index) { return sigmoid(value); });
  x.a = -kappa;
  x.b = kappa.cwiseProduct(iota);
  x.k = x.k.cwiseProduct(each(iota, [&](wide value, Index j) { return 1 + (value - 1) * wide(replacement[j]); }));
  x.log_decay = each(this->wide_gate, [](wide w, Index) { return -std::exp(-0.5L) * sigmoid(w); });
  this->expect_equations(support::rule_kind::generalized_delta, x);
}

/// What the delta nets do to q, k, v and beta, both ways.
template <class Test>
support::rule_inputs delta_inputs(Test& test) {
  support::rule_inputs x = test.activated();
  x.q = normalized(x.q);
  x.k = normalized(x.k);
  x.query_scale = test.scale;
  x.beta = each(test.narrow, [](wide value, Index) { return sigmoid(value); });
  for (auto* const rows : {&test.q, &test.k, &test.v}) linattn::silu(*rows, *rows);
  linattn::l2_normalize(test.q, heads, test.q);
  linattn::l2_normalize(test.k, heads, test.k);
  linattn::sigmoid_beta(test.narrow, test.beta);
  return x;
}

TYPED_TEST(Models, DeltaNet) {
  const linattn::delta_net<TypeParam> attn(this->sizes);
  const support::rule_inputs x = delta_inputs(*this);
  this->out = attn.forward_causal(this->q, this->k, this->v, {.beta = this->beta});
  this->expect_equations(support::rule_kind::delta, x);
}

TYPED_TEST(Models, GatedDeltaNet) {
  const linattn::gated_delta_net<TypeParam> attn(this->sizes);
  support::rule_inputs x = delta_inputs(*this);
  linattn::gated_delta_net_gate(this->gate, this->a_log, this->bias, this->g_head);
  this->out = attn.forward_causal(this->q, this->k, this->v, {.log_decay = this->g_head, .beta = this->beta});

  x.log_decay = each(
      this->gate, [&](wide a, Index h) { return -std::exp(wide(this->a_log[h])) * softplus(a + wide(this->bias[h])); });
  this->expect_equations(support::rule_kind::gated_delta_per_head, x);
}

TYPED_TEST(Models, KimiDeltaAttention) {
  const linattn::kimi_delta_attention<TypeParam> attn(this->sizes);
  support::rule_inputs x = delta_inputs(*this);
  linattn::kimi_delta_gate(this->wide_gate, this->a_log, this->wide_bias, this->g);
  this->out = attn.forward_causal(this->q, this->k, this->v, {.log_decay = this->g, .beta = this->beta});
  x.log_decay = each(this->wide_gate, [&](wide f, Index j) {
    return -std::exp(wide(this->a_log[j / d])) * softplus(f + wide(this->wide_bias[j]));
  });
  this->expect_equations(support::rule_kind::gated_delta_per_feature, x);

  linattn::kimi_delta_safe_gate(this->wide_gate, this->a_log, this->wide_bias, this->g);
  this->out = attn.forward_causal(this->q, this->k, this->v, {.log_decay = this->g, .beta = this->beta});
  x.log_decay = each(this->wide_gate, [&](wide f, Index j) {
    return -5 * sigmoid(std::exp(wide(this->a_log[j / d])) * (f + wide(this->wide_bias[j])));
  });
  this->expect_equations(support::rule_kind::gated_delta_per_feature, x);
}

// ---- what all of them share

TEST(ModelOptions, QueryScaleMultipliesTheModelsOwn) {
  const auto x = support::normal_matrix<float>(4, 16, 1);
  const linattn::retention<> attn({.head_dim = 16});
  const linattn::retention<> unscaled({.head_dim = 16, .query_scale = 4});
  EXPECT_EQ(unscaled.forward_causal(x, x, x), 4 * attn.forward_causal(x, x, x));
}

TEST(ModelOptions, FixedSizes) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  using model = linattn::gated_delta_net<float, 16, 8, 2>;
  static_assert(
      std::is_base_of_v<linattn::linear_attention<linattn::identity, linattn::gated_delta<>, float, 16, 8, 2>, model>);
  const auto x = support::normal_matrix<float>(1, 32, 1);
  const row_vector<float> gates = row_vector<float>::Constant(2, 0.5F);
  row_vector<float> out(16);
  const support::allocation_count count;
  const model attn;
  auto s = attn.make_state();
  auto ws = attn.make_workspace();
  attn.step(s, x.row(0), x.row(0), x.row(0).leftCols(16), {.log_decay = gates, .beta = gates}, out, ws);
  EXPECT_EQ(count.total(), 0);
  EXPECT_EQ(attn.heads(), 2);

  const linattn::retention<float, 16, 8, 2> fixed;
  const linattn::retention<float> sized({.head_dim = 16, .value_dim = 8, .heads = 2});
  const auto q = support::normal_matrix<float>(5, 32, 2), v = support::normal_matrix<float>(5, 16, 3);
  EXPECT_TRUE(support::same_bits(fixed.forward_causal(q, q, v), sized.forward_causal(q, q, v)));
}

TEST(ModelOptions, RefusalsAreTheOperators) {
  const auto sentence = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  EXPECT_NE(sentence([] { linattn::retention<>({.heads = 2}); }).find("head_dim is not given"), std::string::npos);
  EXPECT_NE(sentence([] { linattn::delta_net<>({.head_dim = -3}); }).find("head_dim is -3"), std::string::npos);
  EXPECT_NE(sentence([] { linattn::rwkv7<>({.head_dim = 4, .normalize = true}); }).find(".normalize = true"),
            std::string::npos);
  EXPECT_NE(sentence([] { linattn::lightning_attention<>({.head_dim = 4}, 3, 3); }).find("there is no layer 3 of 3"),
            std::string::npos);
}

}  // namespace
