// Gradients against those by pairs of tokens in double, and what must hold exactly: float and double, sizes known at
// run time and at compile time, strided views, segments, inputs that nothing depends on.
#include <linattn/linattn.hpp>

#include "support/compare.hpp"
#include "support/gradient_oracle.hpp"
#include "support/inputs.hpp"
#include "support/sentinel.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using Eigen::Index;
using linattn::denominator_policy;
using linattn::row_matrix;
using support::normal_matrix;

template <class T>
struct gradient_tolerance;
/// A gradient is a difference, G.v - c, of terms that may be larger than itself: a few times the rounding of the
/// forward pass (support::tolerance). A lost token moves rows by 1/N and more.
template <>
struct gradient_tolerance<float> {
  static constexpr double relative_rms = 2e-6;
};
template <>
struct gradient_tolerance<double> {
  static constexpr double relative_rms = 1e-13;
};

/// elu + 1 and its derivative, in double.
Eigen::MatrixXd phi_of(const Eigen::MatrixXd& x) {
  return x.unaryExpr([](double y) { return y >= 0 ? y + 1 : std::exp(y); });
}
Eigen::MatrixXd dx_of(const Eigen::MatrixXd& x, const Eigen::MatrixXd& dphi) {
  return x.unaryExpr([](double y) { return y >= 0 ? 1 : std::exp(y); }).cwiseProduct(dphi);
}

struct sizes {
  Index D, M, H;
};

template <class T>
struct inputs {
  row_matrix<T> q, k, v, dout;

  inputs(Index queries, Index keys, const sizes& n)
      : q(normal_matrix<T>(queries, n.H * n.D, 1)),
        k(normal_matrix<T>(keys, n.H * n.D, 2)),
        v(normal_matrix<T>(keys, n.H * n.M, 3)),
        dout(normal_matrix<T>(queries, n.H * n.M, 4)) {}
  inputs(Index tokens, const sizes& n) : inputs(tokens, tokens, n) {}
};

struct mode {
  bool normalize;
  denominator_policy policy;
};
const std::vector<mode> modes = {{true, denominator_policy::none()},
                                 {true, denominator_policy::add(2)},
                                 {true, denominator_policy::clamp(300)},
                                 {false, denominator_policy::none()}};
constexpr double query_scale = 0.8;

/// Gradients of every head in double; the state and its gradient, if there are any, come in as states of the operator.
struct expected {
  row_matrix<double> dq, dk, dv;
  std::vector<Eigen::MatrixXd> dS0;
  std::vector<Eigen::VectorXd> dz0;

  template <class T, class State>
  expected(const inputs<T>& x, const sizes& n, const mode& how, bool causal, const State* s0, const State* ds)
      : dq(x.q.rows(), x.q.cols()), dk(x.k.rows(), x.k.cols()), dv(x.v.rows(), x.v.cols()) {
    for (Index h = 0; h < n.H; ++h) {
      const auto features = [&](const row_matrix<T>& a) -> Eigen::MatrixXd {
        return a.middleCols(h * n.D, n.D).template cast<double>();
      };
      const auto values = [&](const row_matrix<T>& a) -> Eigen::MatrixXd {
        return a.middleCols(h * n.M, n.M).template cast<double>();
      };
      support::gradient_oracle oracle(causal, how.normalize, how.policy);
      const auto state_or_zero = [&](const State* s, Eigen::MatrixXd& S, Eigen::VectorXd& z) {
        S = s ? Eigen::MatrixXd(s->kv(h).template cast<double>()) : Eigen::MatrixXd::Zero(n.D, n.M);
        z = s ? Eigen::VectorXd(s->k_sum(h).transpose().template cast<double>()) : Eigen::VectorXd::Zero(n.D);
      };
      state_or_zero(s0, oracle.S0, oracle.z0);
      state_or_zero(ds, oracle.dS, oracle.dz);
      const double scale = static_cast<double>(static_cast<T>(query_scale));
      const Eigen::MatrixXd q = scale * features(x.q), k = features(x.k);
      oracle.run(phi_of(q), phi_of(k), values(x.v), values(x.dout));
      dq.middleCols(h * n.D, n.D) = scale * dx_of(q, oracle.dphi_q);
      dk.middleCols(h * n.D, n.D) = dx_of(k, oracle.dphi_k);
      dv.middleCols(h * n.M, n.M) = oracle.dv;
      dS0.push_back(oracle.dS0);
      dz0.push_back(oracle.dz0);
    }
  }
};

template <class Attention>
Attention make(const sizes& n, const mode& how) {
  return Attention({.head_dim = n.D,
                    .value_dim = n.M,
                    .heads = n.H,
                    .query_scale = query_scale,
                    .normalize = how.normalize,
                    .denominator = how.policy});
}

template <class State>
void fill(State& s, std::uint64_t seed, bool positive) {
  using T = typename State::scalar;
  for (Index h = 0; h < s.heads(); ++h) {
    s.kv(h) = normal_matrix<T>(s.features(), s.value_dim(), seed + std::uint64_t(h));
    s.k_sum(h) = normal_matrix<T>(1, s.features(), seed + 10 + std::uint64_t(h));
    if (positive) s.k_sum(h) = s.k_sum(h).cwiseAbs();
  }
}

/// Both verbs with these sizes, into strided outputs whose surroundings must survive.
template <class Attention>
void expect_agreement(const sizes& n, const std::vector<Index>& lengths) {
  using T = typename Attention::scalar;
  for (const mode& how : modes) {
    const Attention attn = make<Attention>(n, how);
    auto ws = attn.make_workspace();
    for (const Index tokens : lengths) {
      SCOPED_TRACE("N = " + std::to_string(tokens) + ", D = " + std::to_string(n.D) + ", M = " + std::to_string(n.M) +
                   (how.normalize ? ", normalised" : "") + ", policy " + std::to_string(int(how.policy.how)));
      const auto check = [&](const inputs<T>& x, const expected& e, const auto& call) {
        support::framed<T> dq(x.q.rows(), x.q.cols()), dk(x.k.rows(), x.k.cols()), dv(x.v.rows(), x.v.cols());
        call(dq.matrix(), dk.matrix(), dv.matrix());
        EXPECT_TRUE(support::close(dq.matrix(), e.dq, gradient_tolerance<T>::relative_rms)) << "dq";
        EXPECT_TRUE(support::close(dk.matrix(), e.dk, gradient_tolerance<T>::relative_rms)) << "dk";
        EXPECT_TRUE(support::close(dv.matrix(), e.dv, gradient_tolerance<T>::relative_rms)) << "dv";
        EXPECT_TRUE(dq.frame_intact());
        EXPECT_TRUE(dk.frame_intact());
        EXPECT_TRUE(dv.frame_intact());
      };

      auto s0 = attn.make_state(), ds = attn.make_state();
      fill(s0, 5, true);
      fill(ds, 6, false);
      const inputs<T> x(tokens, n);
      const expected e(x, n, how, true, &s0, &ds);
      check(x, e, [&](auto dq, auto dk, auto dv) { attn.vjp_causal(s0, x.q, x.k, x.v, x.dout, ds, dq, dk, dv, ws); });
      for (Index h = 0; h < n.H; ++h) {
        EXPECT_TRUE(support::close(ds.kv(h), e.dS0[std::size_t(h)], gradient_tolerance<T>::relative_rms)) << "dS0";
        EXPECT_TRUE(support::close(ds.k_sum(h).transpose(), e.dz0[std::size_t(h)], gradient_tolerance<T>::relative_rms))
            << "dz0";
      }

      // Without states, at least two keys: the only key's weight is 1, and what remains of its gradient is rounding.
      const typename Attention::state_type* const none = nullptr;
      if (tokens > 1 || !how.normalize) {
        check(x, expected(x, n, how, true, none, none),
              [&](auto dq, auto dk, auto dv) { attn.vjp_causal(x.q, x.k, x.v, x.dout, dq, dk, dv, ws); });
      }
      const inputs<T> uneven(tokens, tokens + 7, n);
      check(uneven, expected(uneven, n, how, false, none, none),
            [&](auto dq, auto dk, auto dv) { attn.vjp(uneven.q, uneven.k, uneven.v, uneven.dout, dq, dk, dv, ws); });
      if (testing::Test::HasFailure()) return;
    }
  }
}

template <class T>
using dynamic = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, T>;
constexpr sizes small{5, 3, 2};
const mode plain{true, denominator_policy::none()};
template <class T>
constexpr double bound = gradient_tolerance<T>::relative_rms;

template <class T>
struct Gradients : testing::Test {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(Gradients, scalars);

TYPED_TEST(Gradients, EqualThoseByPairsOfTokens) {
  using attention = dynamic<TypeParam>;
  expect_agreement<attention>(small, {1, 2, 3, 4, 5, 7, 8, 9, 17, 31, 32, 33, 65});  // blocks are of 4 and 8
  expect_agreement<attention>({33, 18, 1}, {40});
  expect_agreement<attention>({70, 140, 1}, {40});
}

TYPED_TEST(Gradients, EqualThoseByPairsOfTokensWithSizesInTheType) {
  using attention = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, TypeParam, 8, 3, 2>;
  expect_agreement<attention>({8, 3, 2}, {1, 5, 65});
}

TYPED_TEST(Gradients, OfSegmentsAreThoseOfTheWhole) {
  using matrix = row_matrix<TypeParam>;
  const auto attn = make<dynamic<TypeParam>>(small, plain);
  const inputs<TypeParam> x(103, small);
  auto s0 = attn.make_state(), ds = attn.make_state();
  fill(s0, 5, true);
  fill(ds, 6, false);
  auto ds_of_segments = ds;
  const auto whole = attn.vjp_causal(s0, x.q, x.k, x.v, x.dout, ds);

  const std::vector<Index> starts = {0, 1, 38, 38, 70};
  std::vector states = {s0};  // before each segment
  matrix out(x.q.rows(), x.v.cols());
  const auto rows_of = [&](std::size_t i) { return (i + 1 < starts.size() ? starts[i + 1] : x.q.rows()) - starts[i]; };
  for (std::size_t i = 0; i + 1 < starts.size(); ++i) {
    states.push_back(states.back());
    attn.absorb(states.back(), x.k.middleRows(starts[i], rows_of(i)), x.v.middleRows(starts[i], rows_of(i)));
  }
  matrix dq = x.q, dk = x.k, dv = x.v;
  auto ws = attn.make_workspace();
  for (std::size_t i = starts.size(); i-- > 0;) {
    const auto part = [&](auto& a) { return a.middleRows(starts[i], rows_of(i)); };
    attn.vjp_causal(states[i], part(x.q), part(x.k), part(x.v), part(x.dout), ds_of_segments, part(dq), part(dk),
                    part(dv), ws);
  }
  EXPECT_TRUE(support::close(dq, whole.dq, bound<TypeParam>));
  EXPECT_TRUE(support::close(dk, whole.dk, bound<TypeParam>));
  EXPECT_TRUE(support::close(dv, whole.dv, bound<TypeParam>));
  for (Index h = 0; h < small.H; ++h) {
    EXPECT_TRUE(support::close(ds_of_segments.kv(h), ds.kv(h), bound<TypeParam>));
    EXPECT_TRUE(support::close(ds_of_segments.k_sum(h), ds.k_sum(h), bound<TypeParam>));
  }
}

// Sums over the keys before a token, had they been found by subtracting those after it, would have lost four digits.
TYPED_TEST(Gradients, KeepTheirAccuracyBesideKeysOfAnotherSize) {
  const auto attn = make<dynamic<TypeParam>>(small, plain);
  constexpr Index N = 60, third = 20;
  inputs<TypeParam> x(N, small);
  x.k.middleRows(third, third) *= TypeParam(1e4);
  const typename dynamic<TypeParam>::state_type* const none = nullptr;
  for (const bool causal : {true, false}) {
    const expected e(x, small, plain, causal, none, none);
    const auto d = causal ? attn.vjp_causal(x.q, x.k, x.v, x.dout) : attn.vjp(x.q, x.k, x.v, x.dout);
    for (Index first = 0; first < N; first += third) {
      SCOPED_TRACE((causal ? "causal, rows from " : "rows from ") + std::to_string(first));
      EXPECT_TRUE(support::close(d.dq.middleRows(first, third), e.dq.middleRows(first, third), bound<TypeParam>));
      EXPECT_TRUE(support::close(d.dk.middleRows(first, third), e.dk.middleRows(first, third), bound<TypeParam>));
      EXPECT_TRUE(support::close(d.dv.middleRows(first, third), e.dv.middleRows(first, third), bound<TypeParam>));
    }
  }
}

// Denominators near the lower end of float, by which dout cannot be divided.
TEST(GradientRange, SmallDenominators) {
  constexpr double rounding = 2e-5;  // of a query_scale times 55: half an ulp of 44 in an exponent, and some
  const auto attn = make<dynamic<float>>(small, plain);
  inputs<float> x(20, small);
  x.q = (0.3F * x.q.array() - 55).matrix();  // times query_scale: -44
  x.k = (0.3F * x.k.array() - 43).matrix();
  x.dout *= 1000;
  const dynamic<float>::state_type* const none = nullptr;
  const expected e(x, small, plain, true, none, none);
  const auto d = attn.vjp_causal(x.q, x.k, x.v, x.dout);
  EXPECT_TRUE(support::close(d.dq, e.dq, rounding));
  EXPECT_TRUE(support::close(d.dk, e.dk, rounding));
  EXPECT_TRUE(support::close(d.dv, e.dv, rounding));
  const auto all = attn.vjp(x.q, x.k, x.v, x.dout);
  const expected of_all(x, small, plain, false, none, none);
  EXPECT_TRUE(support::close(all.dq, of_all.dq, rounding));
  EXPECT_TRUE(support::close(all.dk, of_all.dk, rounding));
  EXPECT_TRUE(support::close(all.dv, of_all.dv, rounding));
}

// One head, rows up to 20: nothing else is asked for.
TYPED_TEST(Gradients, OfUnusedInputsAreExactlyZero) {
  const auto attn = make<dynamic<TypeParam>>(small, plain);
  constexpr Index N = 50, used = 20;
  inputs<TypeParam> x(N, small);
  x.dout.bottomRows(N - used).setZero();
  x.dout.rightCols(small.M).setZero();
  const auto d = attn.vjp_causal(x.q, x.k, x.v, x.dout);
  for (const auto* g : {&d.dq, &d.dk, &d.dv}) {
    const Index head = g->cols() / 2;
    EXPECT_TRUE(support::all_zero(g->bottomRows(N - used)));
    EXPECT_TRUE(support::all_zero(g->rightCols(head)));
    EXPECT_GT(g->topRows(used).leftCols(head).rowwise().norm().bottomRows(used - 1).minCoeff(), 0);
  }
  const auto all = attn.vjp(x.q, x.k, x.v, x.dout);
  EXPECT_TRUE(support::all_zero(all.dq.bottomRows(N - used)));
  for (const auto* g : {&all.dq, &all.dk, &all.dv}) EXPECT_TRUE(support::all_zero(g->rightCols(g->cols() / 2)));
}

TYPED_TEST(Gradients, AreLinearInDout) {
  const auto attn = make<dynamic<TypeParam>>(small, plain);
  const inputs<TypeParam> x(45, small);
  const row_matrix<TypeParam> other = normal_matrix<TypeParam>(45, x.dout.cols(), 8);
  for (const bool causal : {true, false}) {
    const auto gradients = [&](const row_matrix<TypeParam>& dout) {
      return causal ? attn.vjp_causal(x.q, x.k, x.v, dout) : attn.vjp(x.q, x.k, x.v, dout);
    };
    const auto a = gradients(x.dout), b = gradients(other);
    const auto twice = gradients(x.dout + x.dout), sum = gradients(x.dout + other);
    EXPECT_TRUE(support::same_bits(twice.dq, 2 * a.dq));
    EXPECT_TRUE(support::same_bits(twice.dk, 2 * a.dk));
    EXPECT_TRUE(support::same_bits(twice.dv, 2 * a.dv));
    EXPECT_TRUE(support::close(sum.dq, (a.dq + b.dq).template cast<double>(), bound<TypeParam>));
    EXPECT_TRUE(support::close(sum.dk, (a.dk + b.dk).template cast<double>(), bound<TypeParam>));
    EXPECT_TRUE(support::close(sum.dv, (a.dv + b.dv).template cast<double>(), bound<TypeParam>));
  }
}

TYPED_TEST(Gradients, OfNothingAreNothing) {
  const auto attn = make<dynamic<TypeParam>>(small, plain);
  const inputs<TypeParam> x(4, 0, small), none(0, small);
  EXPECT_TRUE(support::all_zero(attn.vjp(x.q, x.k, x.v, x.dout).dq)) << "no key, output 0";
  auto s0 = attn.make_state(), ds = attn.make_state();
  fill(ds, 6, false);
  const auto before = ds;
  EXPECT_EQ(attn.vjp_causal(s0, none.q, none.k, none.v, none.dout, ds).dq.rows(), 0);
  EXPECT_TRUE(support::same_bits(ds.kv(1), before.kv(1)));
  EXPECT_TRUE(support::same_bits(ds.k_sum(1), before.k_sum(1)));
}

// relu without a positive product: 0/0 = 0 whatever the inputs, as far as they reach.
TYPED_TEST(Gradients, OfAnOutputWithoutDenominatorAreZero) {
  const linattn::linear_attention<linattn::relu, linattn::additive, TypeParam> attn({.head_dim = 3});
  using matrix = row_matrix<TypeParam>;
  const matrix q = matrix::Constant(6, 3, -1), k = matrix::Ones(6, 3), v = normal_matrix<TypeParam>(6, 3, 1);
  const auto d = attn.vjp_causal(q, k, v, v);
  EXPECT_TRUE(support::all_zero(d.dq));
  EXPECT_TRUE(support::all_zero(d.dk));
  EXPECT_TRUE(support::all_zero(d.dv));
}

/// dphi/dx at 0.
template <class T, class Map>
T derivative_at_0(const Map& map) {
  alignas(64) T x[1] = {0}, phi[1], dphi[1] = {1}, dx[1] = {-9};
  const linattn::const_tile<T> in(x, 1, 1, Eigen::OuterStride<>(1));
  linattn::tile<T> features(phi, 1, 1, Eigen::OuterStride<>(1)), out(dx, 1, 1, Eigen::OuterStride<>(1));
  map.forward(in, features);
  linattn::elementwise_vjp(map, in, linattn::const_tile<T>(phi, 1, 1, Eigen::OuterStride<>(1)),
                           linattn::const_tile<T>(dphi, 1, 1, Eigen::OuterStride<>(1)), out);
  return dx[0];
}

TYPED_TEST(Gradients, AreAsDocumentedAtTheKinks) {
  EXPECT_EQ(derivative_at_0<TypeParam>(linattn::elu_plus_one()), TypeParam(1));
  EXPECT_EQ(derivative_at_0<TypeParam>(linattn::relu()), TypeParam(0));
  EXPECT_EQ(derivative_at_0<TypeParam>(linattn::squared_relu()), TypeParam(0));
}

}  // namespace
