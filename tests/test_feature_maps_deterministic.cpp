// Maps without a seed: dpfp, taylor, cosformer, softmax_normalized. Values against closed forms in long double, what
// their documentation promises, and their gradients.
#include <gtest/gtest.h>

#include <linattn/check_feature_map.hpp>
#include <linattn/linattn.hpp>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/map_probe.hpp"
#include "support/oracle.hpp"

namespace {

using Eigen::Index;
using support::features;
using support::role;
using support::row_matrix;
using support::wide_matrix;

/// Less than a register, whole registers, and one element more, for every packet width.
constexpr Index awkward_sizes[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 65};

/// Central differences in double: 1e-10 of their own, and what is wrong is wrong by 1e-3 at least.
constexpr double difference_rms = 1e-7;

template <class T>
struct DeterministicMaps : testing::Test {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(DeterministicMaps, scalars);

long double positive(long double x) { return x < 0 ? 0 : x; }

// ---- closed forms

/// phi of one row x (D), written down with indices modulo 2 D.
wide_matrix dpfp_of(const wide_matrix& x, Index nu) {
  const Index size = 2 * x.cols();
  wide_matrix phi(x.rows(), nu * size);
  for (Index r = 0; r < x.rows(); ++r) {
    const auto y = [&](Index i) { return i < x.cols() ? positive(x(r, i)) : positive(-x(r, i - x.cols())); };
    for (Index j = 1; j <= nu; ++j) {
      for (Index i = 0; i < size; ++i) phi(r, (j - 1) * size + i) = y(i) * y(((i - j) % size + size) % size);
    }
  }
  return phi;
}

template <Index Nu, class T>
void check_dpfp() {
  for (const Index d : awkward_sizes) {
    const auto x = support::normal_matrix<T>(5, d, 1 + std::uint64_t(d));
    constexpr double one_rounding = 0.5;
    EXPECT_TRUE(support::within_ulps(features(linattn::dpfp<Nu>(), x), dpfp_of(x.template cast<long double>(), Nu),
                                     one_rounding))
        << "Nu = " << Nu << ", D = " << d;
  }
}

TYPED_TEST(DeterministicMaps, DpfpIsProductsOfRectifiedNeighbours) {
  check_dpfp<1, TypeParam>();
  check_dpfp<2, TypeParam>();
  check_dpfp<5, TypeParam>();  // more than D at D < 5, and 2 D and more at D < 3
}

TEST(Dpfp, KeepsCKeysApart) {
  // Signs of two neighbouring coordinates make four features out of two coordinates: keys at right angles in phi that
  // are not so in x.
  row_matrix<double> x(4, 2);
  x << 1, 1, 1, -1, -1, 1, -1, -1;
  const auto phi = features(linattn::dpfp<1>(), x);
  EXPECT_EQ(row_matrix<double>(phi * phi.transpose()), (row_matrix<double>::Identity(4, 4)));
}

TYPED_TEST(DeterministicMaps, TaylorFeaturesEqualTheirClosedForm) {
  using T = TypeParam;
  // Four roundings, of the scale (a root and a reciprocal) and of two products; each is half an ulp of its own result,
  // which is up to one of the last one's.
  constexpr double ulps = 4;
  for (const Index d : awkward_sizes) {
    const auto x = support::normal_matrix<T>(5, d, 20 + std::uint64_t(d));
    wide_matrix phi(5, 1 + d + d * (d + 1) / 2);
    const long double root = std::sqrt(static_cast<long double>(d));
    for (Index r = 0; r < 5; ++r) {
      Index c = 0;
      phi(r, c++) = 1;
      for (Index i = 0; i < d; ++i) phi(r, c++) = x(r, i) / std::sqrt(root);
      for (Index i = 0; i < d; ++i) {
        for (Index j = 0; j <= i; ++j) {
          const long double product = static_cast<long double>(x(r, i)) * x(r, j) / root;
          phi(r, c++) = i == j ? product / std::sqrt(2.0L) : product;
        }
      }
    }
    EXPECT_TRUE(support::within_ulps(features(linattn::taylor(), x), phi, ulps)) << "D = " << d;
  }
}

TEST(Taylor, KernelIsTheSeriesOfExp) {
  constexpr double rounding = 1e-13;
  for (const Index d : {1, 4, 16, 33}) {
    const auto q = support::normal_matrix<double>(8, d, 30);
    const auto k = support::normal_matrix<double>(8, d, 31);
    const auto s = (q * k.transpose() / std::sqrt(double(d))).array().eval();
    const row_matrix<double> series = 1 + s + s * s / 2;
    EXPECT_TRUE(
        support::close(features(linattn::taylor(), q) * features(linattn::taylor(), k).transpose(), series, rounding));
    EXPECT_GE(series.minCoeff(), 0.5);
  }
}

TEST(Taylor, IsNormalizedByDefault) {
  const linattn::linear_attention<linattn::taylor> by_default({.head_dim = 4});
  EXPECT_TRUE(by_default.normalizes()) << "signed features, but a positive kernel";
  const linattn::linear_attention<linattn::identity> other({.head_dim = 4});
  EXPECT_FALSE(other.normalizes());
}

TYPED_TEST(DeterministicMaps, CosformerFeaturesEqualTheirClosedForm) {
  using T = TypeParam;
  constexpr Index horizon = 10;
  // Sine and cosine of an angle in double, rounded once, and a product. Near a quarter turn the cosine is as good as
  // the angle, which is a few 1e-16 off: an absolute error that is judged against the row.
  constexpr double rms = 2 * std::numeric_limits<T>::epsilon();
  for (const Index d : awkward_sizes) {
    const auto x = support::normal_matrix<T>(14, d, 40 + std::uint64_t(d));
    const auto phi = features(linattn::cosformer(horizon), x, 3);  // positions 3 to 16
    wide_matrix exact(14, 2 * d);
    for (Index r = 0; r < 14; ++r) {
      const long double angle = std::acos(-1.0L) / 2 * std::min<Index>(3 + r, horizon) / horizon;
      for (Index c = 0; c < d; ++c) {
        exact(r, c) = std::cos(angle) * positive(x(r, c));
        exact(r, d + c) = std::sin(angle) * positive(x(r, c));
      }
    }
    EXPECT_TRUE(support::close(phi, exact, rms)) << "D = " << d;
    EXPECT_GE(phi.minCoeff(), T(0)) << "beyond the horizon, too";
  }
}

TEST(Cosformer, WeighsTokensByTheCosineOfTheirDistance) {
  constexpr Index horizon = 50;
  constexpr double rounding = 1e-14;
  const row_matrix<double> x = row_matrix<double>::Ones(horizon + 20, 1);
  const auto phi = features(linattn::cosformer(horizon), x);
  const row_matrix<double> weights = phi * phi.transpose();
  for (Index i = 0; i < x.rows(); ++i) {
    for (Index j = 0; j < x.rows(); ++j) {
      const auto distance = double(std::min(i, horizon) - std::min(j, horizon));
      EXPECT_NEAR(weights(i, j), std::cos(std::acos(-1.0) * distance / (2 * horizon)), rounding) << i << ", " << j;
    }
  }
}

TYPED_TEST(DeterministicMaps, CosformerStreamsAsInBatch) {
  using T = TypeParam;
  constexpr Index horizon = 40;  // passed by the sequence
  constexpr Index n = 67;
  const linattn::linear_attention<linattn::cosformer, linattn::additive, T> attention({.head_dim = 9, .heads = 2},
                                                                                      linattn::cosformer(horizon));
  const support::attention_inputs<T> in(n, 18, 18, 50);
  const row_matrix<T> batch = attention.forward_causal(in.q, in.k, in.v);
  const auto expected = support::oracle_recurrent(
      support::oracle_map([&](const support::wide_vector& x, Index position, Index) {
        const long double angle = std::acos(-1.0L) / 2 * std::min(position, horizon) / horizon;
        support::wide_vector phi(2 * x.size());
        phi << std::cos(angle) * x.cwiseMax(0), std::sin(angle) * x.cwiseMax(0);
        return phi;
      }),
      in.q, in.k, in.v, {.heads = 2, .causal = true});
  EXPECT_TRUE(support::close(batch, expected.out, support::tolerance<T>::relative_rms));

  auto ws = attention.make_workspace();
  auto state = attention.make_state();
  row_matrix<T> streamed(n, 18);
  attention.forward_causal(state, in.q.topRows(23), in.k.topRows(23), in.v.topRows(23), streamed.topRows(23), ws);
  for (Index i = 23; i < n; ++i) {
    attention.step(state, in.q.row(i), in.k.row(i), in.v.row(i), streamed.row(i), ws);
  }
  EXPECT_TRUE(support::close(streamed, expected.out, support::tolerance<T>::relative_rms));
}

TEST(Cosformer, RefusesAHorizonBelowOne) {
  try {
    linattn::cosformer(0);
    FAIL() << "nothing was refused";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "linattn::cosformer: horizon is 0; at least 1 is needed");
  }
}

TYPED_TEST(DeterministicMaps, SoftmaxNormalizedEqualsItsClosedForms) {
  using T = TypeParam;
  // x - max(x) rounds once: an absolute error of up to 8 / 2 epsilon, which is the exponential's relative one. Then its
  // 2 ulp, the sum's and the quotient's.
  constexpr double rms = 8 * std::numeric_limits<T>::epsilon();
  for (const Index d : awkward_sizes) {
    const auto x = support::normal_matrix<T>(5, d, 60 + std::uint64_t(d));
    const wide_matrix e = x.template cast<long double>().array().exp();
    const wide_matrix shares = e.array().colwise() / e.rowwise().sum().array().eval();
    EXPECT_TRUE(support::close(features<role::query>(linattn::softmax_normalized(), x), shares, rms)) << "D = " << d;
    EXPECT_TRUE(support::within_ulps(features<role::key>(linattn::softmax_normalized(), x), e, 2)) << "D = " << d;
  }
}

TYPED_TEST(DeterministicMaps, SoftmaxNormalizedTakesAnyQuery) {
  using T = TypeParam;
  row_matrix<T> x(2, 3);
  x << T(1e4), T(1e4), T(-1e30), T(-1e4), T(-1e4), T(-1e30);
  row_matrix<T> halves(2, 3);
  halves << T(0.5), T(0.5), T(0), T(0.5), T(0.5), T(0);
  EXPECT_EQ(features<role::query>(linattn::softmax_normalized(), x), halves);
}

TEST(SoftmaxNormalized, NormalisedIsExponential) {
  const support::attention_inputs<double> in(40, 12, 12, 70);
  const linattn::linear_attention<linattn::softmax_normalized, linattn::additive, double> a(
      {.head_dim = 6, .heads = 2});
  const linattn::linear_attention<linattn::exponential, linattn::additive, double> b({.head_dim = 6, .heads = 2});
  EXPECT_TRUE(support::close(a.forward_causal(in.q, in.k, in.v), b.forward_causal(in.q, in.k, in.v),
                             support::tolerance<double>::relative_rms));
}

// ---- the contract

template <class T, class Map>
void check_contract(const Map& map) {
  static_assert(linattn::detail::is_differentiable<Map, T>);
  for (const Index d : awkward_sizes) {
    const auto report = linattn::check_feature_map<T>(map, d, {.rows = 16});
    EXPECT_TRUE(report.passed) << "D = " << d << ": " << (report.passed ? "" : report.problems.front());
  }
}

TYPED_TEST(DeterministicMaps, KeepTheContract) {
  check_contract<TypeParam>(linattn::dpfp<1>());
  check_contract<TypeParam>(linattn::dpfp<3>());
  check_contract<TypeParam>(linattn::taylor());
  check_contract<TypeParam>(linattn::cosformer(20));
  check_contract<TypeParam>(linattn::softmax_normalized());
}

TEST(Deterministic, ForwardDoesNotAllocate) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  constexpr Index head_dim = 33;
  linattn::detail::guarded_tile<float> in(8, head_dim);
  linattn::detail::guarded_tile<float> out(8, linattn::taylor::dimension(head_dim));
  linattn::detail::guarded_tile<float> pairs(8, 2 * head_dim);
  linattn::detail::guarded_tile<float> same(8, head_dim);
  const linattn::const_tile<float> x = std::as_const(in).view();
  linattn::tile<float> phi = out.view();
  linattn::tile<float> phi_of_pairs = pairs.view();
  linattn::tile<float> phi_of_one = same.view();
  const linattn::cosformer cosformer(8);
  const support::allocation_count allocations;
  linattn::taylor().forward(x, phi);
  linattn::dpfp<1>().forward(x, phi_of_pairs);
  cosformer.forward(x, phi_of_pairs, {});
  linattn::softmax_normalized().forward_queries(x, phi_of_one);
  linattn::softmax_normalized().forward_keys(x, phi_of_one);
  EXPECT_EQ(allocations.total(), 0);
}

// ---- gradients

template <role Role, class Map>
void check_gradient(const Map& map, const char* name) {
  // In float the double's gradient is met to the rounding of sums of at most 2 D = 66 terms.
  constexpr double float_rms = 64 * std::numeric_limits<float>::epsilon();
  for (const Index d : awkward_sizes) {
    if (d > 33) continue;
    const row_matrix<double> x = support::normal_matrix<float>(4, d, 80 + std::uint64_t(d)).template cast<double>();
    const row_matrix<double> dphi =
        support::normal_matrix<float>(4, map.dimension(d), 90 + std::uint64_t(d)).template cast<double>();
    const auto dx = support::gradient<Role>(map, x, dphi, 2);
    EXPECT_TRUE(support::close(dx, support::differences<Role>(map, x, dphi, 2), difference_rms))
        << name << ", D = " << d;
    const auto in_float =
        support::gradient<Role>(map, row_matrix<float>(x.cast<float>()), row_matrix<float>(dphi.cast<float>()), 2);
    EXPECT_TRUE(support::close(in_float, dx, float_rms)) << name << ", D = " << d;
  }
}

TEST(Deterministic, GradientsEqualCentralDifferences) {
  check_gradient<role::query>(linattn::dpfp<1>(), "dpfp<1>");
  check_gradient<role::query>(linattn::dpfp<5>(), "dpfp<5>");
  check_gradient<role::query>(linattn::taylor(), "taylor");
  check_gradient<role::query>(linattn::cosformer(5), "cosformer");
  check_gradient<role::query>(linattn::softmax_normalized(), "softmax_normalized, queries");
  check_gradient<role::key>(linattn::softmax_normalized(), "softmax_normalized, keys");
}

}  // namespace
