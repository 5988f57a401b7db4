// The equations of Katharopoulos, Vyas, Pappas and Fleuret, Transformers are RNNs (ICML 2020), one by one. Eq. 1, the
// layer around attention, is used in eq. 20.
//
// Queries and keys are rows here, so the paper's phi(Q_i)^T phi(K_j) is phi_q.row(i).dot(phi_k.row(j)) and
// phi(K_j) V_j^T is phi_k.row(j).transpose() * v.row(j). Small inputs, double, one head.
#include <linattn/linattn.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace {

using Eigen::Index;
using matrix = linattn::row_matrix<double>;
using row = linattn::row_vector<double>;
using attention = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, double>;
using bilinear = linattn::linear_attention<linattn::identity, linattn::additive, double>;

constexpr Index N = 11;  // tokens
constexpr Index F = 6;   // width of the layer's input x
constexpr Index D = 5;   // query and key coordinates
constexpr Index M = 3;   // value coordinates

/// Sums of at most N D positive terms in double, in two orders.
constexpr double rounding = 1e-14;
/// Central differences of a function that is linear in each argument are exact but for rounding, which the step of 1/4
/// (a power of two) magnifies by 4.
constexpr double difference_rounding = 1e-13;

double phi(double x) { return x >= 0 ? x + 1 : std::exp(x); }
matrix phi(const matrix& x) {
  return x.unaryExpr([](double c) { return phi(c); });
}

/// x (N, F) and the projections of a head: Q = x W_Q, K = x W_K (N, D), V = x W_V (N, M).
struct layer_inputs {
  matrix x = support::normal_matrix<double>(N, F, 1);
  matrix w_q = support::normal_matrix<double>(F, D, 2, 0.5);
  matrix w_k = support::normal_matrix<double>(F, D, 3, 0.5);
  matrix w_v = support::normal_matrix<double>(F, M, 4, 0.5);
  matrix q = x * w_q;
  matrix k = x * w_k;
  matrix v = x * w_v;
  matrix phi_q = phi(q);
  matrix phi_k = phi(k);
};

testing::AssertionResult equal(const matrix& a, const matrix& b, double bound = rounding) {
  return support::close(a, b, bound);
}

// eq. 2:  V' = softmax(Q K^T / sqrt(D)) V, softmax along each row
TEST(Paper, Eq02) {
  const layer_inputs in;
  matrix weights = ((in.q * in.k.transpose()) / std::sqrt(double(D))).array().exp();
  for (Index i = 0; i < N; ++i) weights.row(i) /= weights.row(i).sum();
  EXPECT_TRUE(equal(linattn::attention_weights(in.q, in.k), weights));
  EXPECT_TRUE(equal(linattn::softmax_attention(in.q, in.k, in.v), weights * in.v));
}

// eq. 3:  V'_i = sum_j sim(Q_i, K_j) V_j / sum_j sim(Q_i, K_j), which is eq. 2 for sim(q, k) = exp(q^T k / sqrt(D))
TEST(Paper, Eq03) {
  const layer_inputs in;
  const auto polynomial = [](const auto& q, const auto& k) { return std::pow(q.dot(k) + 1, 2); };
  matrix expected(N, M);
  for (Index i = 0; i < N; ++i) {
    row numerator = row::Zero(M);
    double denominator = 0;
    for (Index j = 0; j < N; ++j) {
      const double sim = polynomial(in.q.row(i), in.k.row(j));
      numerator += sim * in.v.row(j);
      denominator += sim;
    }
    expected.row(i) = numerator / denominator;
  }
  EXPECT_TRUE(equal(linattn::kernel_attention(polynomial, in.q, in.k, in.v), expected));

  const auto softmax = [](const auto& q, const auto& k) { return std::exp(q.dot(k) / std::sqrt(double(D))); };
  EXPECT_TRUE(
      equal(linattn::kernel_attention(softmax, in.q, in.k, in.v), linattn::softmax_attention(in.q, in.k, in.v)));
}

// eq. 4:  V'_i = sum_j phi(Q_i)^T phi(K_j) V_j / sum_j phi(Q_i)^T phi(K_j)
TEST(Paper, Eq04) {
  const layer_inputs in;
  const attention attn({.head_dim = D, .value_dim = M});
  matrix expected(N, M);
  for (Index i = 0; i < N; ++i) {
    row numerator = row::Zero(M);
    double denominator = 0;
    for (Index j = 0; j < N; ++j) {
      numerator += in.phi_q.row(i).dot(in.phi_k.row(j)) * in.v.row(j);
      denominator += in.phi_q.row(i).dot(in.phi_k.row(j));
    }
    expected.row(i) = numerator / denominator;
  }
  EXPECT_TRUE(equal(attn.forward(in.q, in.k, in.v), expected));
  const linattn::feature_similarity<linattn::elu_plus_one> sim;
  EXPECT_TRUE(equal(linattn::kernel_attention(sim, in.q, in.k, in.v), expected));
}

// eq. 5:  V'_i = phi(Q_i)^T sum_j phi(K_j) V_j^T / phi(Q_i)^T sum_j phi(K_j)
TEST(Paper, Eq05) {
  const layer_inputs in;
  const attention attn({.head_dim = D, .value_dim = M});
  auto s = attn.make_state();
  attn.absorb(s, in.k, in.v);
  matrix sum_kv = matrix::Zero(D, M);
  row sum_k = row::Zero(D);
  for (Index j = 0; j < N; ++j) {
    sum_kv += in.phi_k.row(j).transpose() * in.v.row(j);
    sum_k += in.phi_k.row(j);
  }
  EXPECT_TRUE(equal(s.kv(0), sum_kv));
  EXPECT_TRUE(equal(s.k_sum(0), sum_k));
  matrix expected(N, M);
  for (Index i = 0; i < N; ++i) expected.row(i) = in.phi_q.row(i) * sum_kv / in.phi_q.row(i).dot(sum_k);
  EXPECT_TRUE(equal(attn.read(s, in.q), expected));
  EXPECT_TRUE(equal(attn.forward(in.q, in.k, in.v), expected));
}

// eq. 6:  (phi(Q) phi(K)^T) V = phi(Q) (phi(K)^T V)
TEST(Paper, Eq06) {
  const layer_inputs in;
  const attention numerator({.head_dim = D, .value_dim = M, .normalize = false});
  const matrix weights = in.phi_q * in.phi_k.transpose();  // (N, N)
  const matrix memory = in.phi_k.transpose() * in.v;       // (D, M)
  EXPECT_TRUE(equal(numerator.forward(in.q, in.k, in.v), weights * in.v));
  EXPECT_TRUE(equal(numerator.forward(in.q, in.k, in.v), in.phi_q * memory));
}

// eq. 7:  phi(x) = elu(x) + 1
TEST(Paper, Eq07) {
  // z after one key is phi of that key.
  const attention attn({.head_dim = 1});
  for (const double x : {-30.0, -2.0, -1.0, -0.25, 0.0, 0.25, 1.0, 7.0}) {
    auto s = attn.make_state();
    attn.absorb(s, matrix::Constant(1, 1, x).eval(), matrix::Ones(1, 1).eval());
    const double elu = x > 0 ? x : std::expm1(x);
    EXPECT_NEAR(s.k_sum(0)[0], elu + 1, 1e-15 * (1 + std::abs(x))) << "x = " << x;
    EXPECT_GT(s.k_sum(0)[0], 0) << "x = " << x;
  }
}

// eq. 8:  V'_i = sum_{j <= i} sim(Q_i, K_j) V_j / sum_{j <= i} sim(Q_i, K_j)
TEST(Paper, Eq08) {
  const layer_inputs in;
  const auto sim = [](const auto& q, const auto& k) { return std::exp(q.dot(k) / 4) + 0.5; };
  matrix expected(N, M);
  for (Index i = 0; i < N; ++i) {
    row numerator = row::Zero(M);
    double denominator = 0;
    for (Index j = 0; j <= i; ++j) {
      numerator += sim(in.q.row(i), in.k.row(j)) * in.v.row(j);
      denominator += sim(in.q.row(i), in.k.row(j));
    }
    expected.row(i) = numerator / denominator;
  }
  EXPECT_TRUE(equal(linattn::kernel_attention(sim, in.q, in.k, in.v, {.causal = true}), expected));
}

// eq. 9:  V'_i = phi(Q_i)^T sum_{j <= i} phi(K_j) V_j^T / phi(Q_i)^T sum_{j <= i} phi(K_j)
TEST(Paper, Eq09) {
  const layer_inputs in;
  const attention attn({.head_dim = D, .value_dim = M});
  matrix expected(N, M);
  for (Index i = 0; i < N; ++i) {
    matrix sum_kv = matrix::Zero(D, M);
    row sum_k = row::Zero(D);
    for (Index j = 0; j <= i; ++j) {
      sum_kv += in.phi_k.row(j).transpose() * in.v.row(j);
      sum_k += in.phi_k.row(j);
    }
    expected.row(i) = in.phi_q.row(i) * sum_kv / in.phi_q.row(i).dot(sum_k);
  }
  EXPECT_TRUE(equal(attn.forward_causal(in.q, in.k, in.v), expected));
}

// eq. 10:  S_i = sum_{j <= i} phi(K_j) V_j^T
TEST(Paper, Eq10) {
  const layer_inputs in;
  const attention attn({.head_dim = D, .value_dim = M});
  for (Index i = 0; i < N; ++i) {
    auto s = attn.make_state();
    attn.forward_causal(s, in.q.topRows(i + 1), in.k.topRows(i + 1), in.v.topRows(i + 1));
    EXPECT_TRUE(equal(s.kv(0), in.phi_k.topRows(i + 1).transpose() * in.v.topRows(i + 1))) << "i = " << i;
  }
}

// eq. 11:  Z_i = sum_{j <= i} phi(K_j)
TEST(Paper, Eq11) {
  const layer_inputs in;
  const attention attn({.head_dim = D, .value_dim = M});
  for (Index i = 0; i < N; ++i) {
    auto s = attn.make_state();
    attn.forward_causal(s, in.q.topRows(i + 1), in.k.topRows(i + 1), in.v.topRows(i + 1));
    EXPECT_TRUE(equal(s.k_sum(0), in.phi_k.topRows(i + 1).colwise().sum())) << "i = " << i;
  }
}

// eq. 12:  V'_i = phi(Q_i)^T S_i / phi(Q_i)^T Z_i
TEST(Paper, Eq12) {
  const layer_inputs in;
  const attention attn({.head_dim = D, .value_dim = M});
  const matrix out = attn.forward_causal(in.q, in.k, in.v);
  auto s = attn.make_state();
  for (Index i = 0; i < N; ++i) {
    attn.absorb(s, in.k.row(i), in.v.row(i));
    EXPECT_TRUE(equal(out.row(i), in.phi_q.row(i) * s.kv(0) / in.phi_q.row(i).dot(s.k_sum(0)))) << "i = " << i;
  }
}

// Eqs. 13-15 are the gradients of L = sum_i G_i . Vbar_i, where Vbar_i = phi(Q_i)^T S_i is the numerator and
// G_i = dL / dVbar_i. With the identity map the arguments are phi(Q), phi(K) and V themselves.
struct numerator_gradients {
  matrix phi_q = support::normal_matrix<double>(N, D, 5);
  matrix phi_k = support::normal_matrix<double>(N, D, 6);
  matrix v = support::normal_matrix<double>(N, M, 7);
  matrix g = support::normal_matrix<double>(N, M, 8);

  double loss() const {
    const bilinear attn({.head_dim = D, .value_dim = M});
    return attn.forward_causal(phi_q, phi_k, v).cwiseProduct(g).sum();
  }

  /// dL / dx for x one of the members, by central differences.
  matrix gradient(matrix numerator_gradients::*x) const {
    constexpr double h = 0.25;
    matrix result((this->*x).rows(), (this->*x).cols());
    for (Index i = 0; i < result.rows(); ++i) {
      for (Index c = 0; c < result.cols(); ++c) {
        numerator_gradients above = *this, below = *this;
        (above.*x)(i, c) += h;
        (below.*x)(i, c) -= h;
        result(i, c) = (above.loss() - below.loss()) / (2 * h);
      }
    }
    return result;
  }
};

// eq. 13:  grad_{phi(Q_i)} L = G_i (sum_{j <= i} phi(K_j) V_j^T)^T
TEST(Paper, Eq13) {
  const numerator_gradients at;
  matrix expected(N, D);
  for (Index i = 0; i < N; ++i) {
    const matrix s = at.phi_k.topRows(i + 1).transpose() * at.v.topRows(i + 1);  // (D, M)
    expected.row(i) = at.g.row(i) * s.transpose();
  }
  EXPECT_TRUE(equal(at.gradient(&numerator_gradients::phi_q), expected, difference_rounding));
}

// eq. 14:  grad_{phi(K_i)} L = (sum_{j >= i} phi(Q_j) G_j^T) V_i
TEST(Paper, Eq14) {
  const numerator_gradients at;
  matrix expected(N, D);
  for (Index i = 0; i < N; ++i) {
    const matrix r = at.phi_q.bottomRows(N - i).transpose() * at.g.bottomRows(N - i);  // (D, M)
    expected.row(i) = at.v.row(i) * r.transpose();
  }
  EXPECT_TRUE(equal(at.gradient(&numerator_gradients::phi_k), expected, difference_rounding));
}

// eq. 15:  grad_{V_i} L = (sum_{j >= i} phi(Q_j) G_j^T)^T phi(K_i)
TEST(Paper, Eq15) {
  const numerator_gradients at;
  matrix expected(N, M);
  for (Index i = 0; i < N; ++i) {
    const matrix r = at.phi_q.bottomRows(N - i).transpose() * at.g.bottomRows(N - i);  // (D, M)
    expected.row(i) = at.phi_k.row(i) * r;
  }
  EXPECT_TRUE(equal(at.gradient(&numerator_gradients::v), expected, difference_rounding));
}

// eq. 16:  s_0 = 0
TEST(Paper, Eq16) {
  const attention attn({.head_dim = D, .value_dim = M});
  const auto s = attn.make_state();
  EXPECT_TRUE(support::same_bits(s.kv(0), matrix::Zero(D, M)));
}

// eq. 17:  z_0 = 0
TEST(Paper, Eq17) {
  const attention attn({.head_dim = D, .value_dim = M});
  const auto s = attn.make_state();
  EXPECT_TRUE(support::same_bits(s.k_sum(0), row::Zero(D)));
}

/// f(i, s_(i-1), s_i) for every step over the rows of `in`.
template <class Check>
void for_each_step(const layer_inputs& in, const Check& check) {
  const attention attn({.head_dim = D, .value_dim = M});
  auto ws = attn.make_workspace();
  auto s = attn.make_state();
  row out(M);
  for (Index i = 0; i < N; ++i) {
    const auto before = s;
    attn.step(s, in.q.row(i), in.k.row(i), in.v.row(i), out, ws);
    check(i, before, s, out);
  }
}

// eq. 18:  s_i = s_{i-1} + phi(x_i W_K) (x_i W_V)^T
TEST(Paper, Eq18) {
  const layer_inputs in;
  for_each_step(in, [&](Index i, const auto& before, const auto& after, const row&) {
    const row k = phi(matrix(in.x.row(i) * in.w_k));
    const row v = in.x.row(i) * in.w_v;
    EXPECT_TRUE(equal(after.kv(0), before.kv(0) + k.transpose() * v)) << "i = " << i;
  });
}

// eq. 19:  z_i = z_{i-1} + phi(x_i W_K)
TEST(Paper, Eq19) {
  const layer_inputs in;
  for_each_step(in, [&](Index i, const auto& before, const auto& after, const row&) {
    const row k = phi(matrix(in.x.row(i) * in.w_k));
    EXPECT_TRUE(equal(after.k_sum(0), before.k_sum(0) + k)) << "i = " << i;
  });
}

// eq. 20:  y_i = f_l(phi(x_i W_Q)^T s_i / phi(x_i W_Q)^T z_i + x_i)
TEST(Paper, Eq20) {
  layer_inputs in;
  in.w_v = support::normal_matrix<double>(F, F, 9, 0.5);  // M = F, so that x_i may be added
  in.v = in.x * in.w_v;
  const matrix w_1 = support::normal_matrix<double>(F, 7, 10), w_2 = support::normal_matrix<double>(7, F, 11);
  const auto f = [&](const matrix& x) -> matrix { return (x * w_1).cwiseMax(0) * w_2; };
  const attention attn({.head_dim = D, .value_dim = F});

  // The transformer layer (eq. 1) over the whole sequence at once ...
  const matrix transformer = f(attn.forward_causal(in.q, in.k, in.v) + in.x);
  // ... is the recurrent network, token by token, with its state written out.
  auto ws = attn.make_workspace();
  auto s = attn.make_state();
  row attended(F);
  for (Index i = 0; i < N; ++i) {
    attn.step(s, in.q.row(i), in.k.row(i), in.v.row(i), attended, ws);
    const row q = phi(matrix(in.x.row(i) * in.w_q));
    const matrix y = f(q * s.kv(0) / q.dot(s.k_sum(0)) + in.x.row(i));
    EXPECT_TRUE(equal(f(attended + in.x.row(i)), y)) << "i = " << i;
    EXPECT_TRUE(equal(transformer.row(i), y)) << "i = " << i;
  }
}

}  // namespace
