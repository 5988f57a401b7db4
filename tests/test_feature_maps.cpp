// The shipped feature maps: values against closed forms in long double, independence of the tile, and what the random
// ones estimate and how well.
#include <gtest/gtest.h>

#include <linattn/detail/guarded_tile.hpp>
#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/feature_maps/exponential.hpp>
#include <linattn/feature_maps/identity.hpp>
#include <linattn/feature_maps/positive_random.hpp>
#include <linattn/feature_maps/random_fourier.hpp>
#include <linattn/feature_maps/relu.hpp>
#include <linattn/feature_maps/squared_relu.hpp>
#include <linattn/linear_attention.hpp>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/map_probe.hpp"
#include "support/oracle.hpp"

#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#define SKIP_UNDER_FAST_MATH() GTEST_SKIP() << "-ffast-math: no promise about NaN, infinity, subnormals and last bits"
#else
#define SKIP_UNDER_FAST_MATH() static_assert(true)
#endif

namespace {

using Eigen::Index;
using support::features;
using support::row_matrix;
using support::wide_matrix;

/// The packet exp: half an ulp of rounding, the rounding of e^r, and the polynomial.
constexpr double exp_ulps = 2;

/// Random features: u and |x'|^2 / 2 are sums of D <= 65 terms whose partial sums reach about 15 here. Their absolute
/// error, sqrt(65) roundings of 15 / 2 epsilon, is the relative error of the exponential.
template <class T>
constexpr double random_feature_rms = 60 * std::numeric_limits<T>::epsilon();

/// Statistics of fixed seeds lie within this many standard deviations of their expectation.
constexpr double sigmas = 4;

constexpr Index awkward_sizes[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 64, 65};

/// One value in every coordinate of one row.
template <class T>
row_matrix<T> constant_row(Index cols, T value) {
  return row_matrix<T>::Constant(1, cols, value);
}

/// Arguments over the whole range of T, subnormals included, 64 a row. In float every 9,973rd number; in double random
/// bits, and random numbers of ordinary size.
template <class T>
row_matrix<T> all_magnitudes() {
  std::vector<T> values;
  if constexpr (std::is_same_v<T, float>) {
    for (std::uint64_t bits = 0; bits < 0x100000000; bits += 9973) {
      values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    }
  } else {
    support::random_bits random(1);
    for (int i = 0; i < 200000; ++i) {
      values.push_back(std::bit_cast<double>(random.next()));
      values.push_back(-750 + 1470 * random.uniform());
    }
  }
  std::erase_if(values, [](T value) { return !support::finite(support::classify(value)); });
  values.resize((values.size() + 63) / 64 * 64, T(0));
  return Eigen::Map<const row_matrix<T>>(values.data(), static_cast<Index>(values.size()) / 64, 64);
}

/// Where formulas of elu(x) + 1 cancel, saturate or change branch.
template <class T>
row_matrix<T> telling_arguments() {
  row_matrix<T> x(1, 12);
  x << T(-100), T(-88), T(-20), T(-17), T(-8), T(-6), T(-1e-8), T(-0.0), T(0), T(1e-8), T(1), T(1e3);
  return x;
}

template <class T>
struct Maps : testing::Test {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(Maps, scalars);

// ---- elementwise maps
// ------------------------------------------------------------------------------------------------

TYPED_TEST(Maps, ExponentialIsWithinTwoUlpEverywhere) {
  SKIP_UNDER_FAST_MATH();
  const auto x = all_magnitudes<TypeParam>();
  EXPECT_TRUE(support::within_ulps(features(linattn::exponential(), x), support::oracle_exponential().key_features(x),
                                   exp_ulps));
}

TYPED_TEST(Maps, ExponentialAtItsEnds) {
  SKIP_UNDER_FAST_MATH();
  using limits = std::numeric_limits<TypeParam>;
  row_matrix<TypeParam> x(1, 3);
  x << -limits::infinity(), limits::infinity(), TypeParam(0);
  const auto phi = features(linattn::exponential(), x);
  EXPECT_EQ(phi(0, 0), TypeParam(0));
  EXPECT_EQ(phi(0, 1), limits::infinity());
  EXPECT_EQ(phi(0, 2), TypeParam(1));
}

TYPED_TEST(Maps, EluPlusOneIsAccurateWhereTheSumCancels) {
  SKIP_UNDER_FAST_MATH();
  const auto x = telling_arguments<TypeParam>();
  EXPECT_TRUE(support::within_ulps(features(linattn::elu_plus_one(), x), support::oracle_elu_plus_one().key_features(x),
                                   support::tolerance<TypeParam>::feature_ulps));
}

TYPED_TEST(Maps, EluPlusOneIsWithinTwoUlpEverywhere) {
  SKIP_UNDER_FAST_MATH();
  const auto x = all_magnitudes<TypeParam>();
  EXPECT_TRUE(support::within_ulps(features(linattn::elu_plus_one(), x), support::oracle_elu_plus_one().key_features(x),
                                   exp_ulps));
}

TYPED_TEST(Maps, PolynomialMapsAreCorrectlyRounded) {
  SKIP_UNDER_FAST_MATH();
  const auto x = all_magnitudes<TypeParam>();
  EXPECT_TRUE(support::same_bits(features(linattn::identity(), x), x));
  EXPECT_TRUE(support::within_ulps(features(linattn::relu(), x), support::oracle_relu().key_features(x), 0));
  const row_matrix<TypeParam> moderate = support::normal_matrix<TypeParam>(100, 64, 4);
  EXPECT_TRUE(support::within_ulps(features(linattn::squared_relu(), moderate),
                                   support::oracle_squared_relu().key_features(moderate), 0.5));
}

TYPED_TEST(Maps, ElementwiseFeaturesDoNotDependOnTheirPlace) {
  const auto each = [](const auto& map) {
    for (const Index d : awkward_sizes) {
      const auto x = support::normal_matrix<TypeParam>(5, d, 100 + std::uint64_t(d), 2);
      const auto phi = features(map, x);
      for (Index r = 0; r < x.rows(); ++r) {
        for (Index c = 0; c < d; ++c) {
          const auto alone = features(map, constant_row(1, x(r, c)));
          ASSERT_TRUE(support::same_bits(phi.block(r, c, 1, 1), alone)) << "row " << r << " of D = " << d;
        }
      }
    }
  };
  each(linattn::elu_plus_one());
  each(linattn::identity());
  each(linattn::relu());
  each(linattn::squared_relu());
  each(linattn::exponential());
}

TYPED_TEST(Maps, EveryMapKeepsNaNInItsRow) {
  SKIP_UNDER_FAST_MATH();
  using T = TypeParam;
  for (const Index d : awkward_sizes) {
    const auto clean = support::normal_matrix<T>(3, d, 5);
    auto poisoned = clean;
    poisoned(1, d - 1) = std::numeric_limits<T>::quiet_NaN();
    const auto elementwise = [&](const auto& map) {
      const auto phi = features(map, poisoned);
      EXPECT_TRUE(support::all_nan(phi.block(1, d - 1, 1, 1)));
      EXPECT_TRUE(support::same_bits(phi.row(0), features(map, clean).row(0)));
      EXPECT_TRUE(support::same_bits(phi.row(2), features(map, clean).row(2)));
      EXPECT_TRUE(support::same_bits(phi.row(1).head(d - 1), features(map, clean).row(1).head(d - 1)));
    };
    elementwise(linattn::elu_plus_one());
    elementwise(linattn::identity());
    elementwise(linattn::relu());
    elementwise(linattn::squared_relu());
    elementwise(linattn::exponential());
    const auto random = [&](const auto& map) {
      const auto phi = features(map, poisoned);
      EXPECT_TRUE(support::all_nan(phi.row(1)));
      EXPECT_TRUE(support::same_bits(phi.row(0), features(map, clean).row(0)));
      EXPECT_TRUE(support::same_bits(phi.row(2), features(map, clean).row(2)));
    };
    random(linattn::positive_random<T>(d, 21, 1));
    random(linattn::random_fourier<T>(d, 42, 1));
  }
}

// ---- random maps: values
// ---------------------------------------------------------------------------------------------

TYPED_TEST(Maps, RandomFeaturesEqualTheirClosedForms) {
  using T = TypeParam;
  for (const Index d : awkward_sizes) {
    for (const Index m : awkward_sizes) {
      const auto x = support::normal_matrix<T>(6, d, 1000 * std::uint64_t(d) + std::uint64_t(m));
      const linattn::positive_random<T> positive(d, m, 11);
      const linattn::random_fourier<T> fourier(d, 2 * m, 12);
      const wide_matrix w = positive.projection().template cast<long double>();
      const wide_matrix v = fourier.projection().template cast<long double>();
      EXPECT_TRUE(support::close(features(positive, x), support::oracle_positive_random(w).key_features(x),
                                 random_feature_rms<T>))
          << "D = " << d << ", m = " << m;
      EXPECT_TRUE(support::close(features(fourier, x), support::oracle_random_fourier(v).key_features(x),
                                 random_feature_rms<T>))
          << "D = " << d << ", m = " << m;
    }
  }
}

TYPED_TEST(Maps, RandomFeaturesDoNotDependOnTheirTile) {
  using T = TypeParam;
  const auto each = [](const auto& map) {
    const Index d = map.head_dim();
    const auto x = support::normal_matrix<T>(11, d, std::uint64_t(d));
    const auto whole = features(map, x);
    for (Index first = 0; first < x.rows(); ++first) {  // every tile of consecutive rows
      for (Index rows = 1; first + rows <= x.rows(); ++rows) {
        const row_matrix<T> part = x.middleRows(first, rows);
        ASSERT_TRUE(support::same_bits(features(map, part), whole.middleRows(first, rows)))
            << "D = " << d << ", C = " << map.dimension(d) << ", rows " << first << " to " << first + rows;
      }
    }
  };
  for (const Index d : {1, 7, 16, 65}) {
    for (const Index m : awkward_sizes) {
      each(linattn::positive_random<T>(d, m, 13));
      each(linattn::random_fourier<T>(d, 2 * m, 13));
    }
  }
}

TYPED_TEST(Maps, RandomFeaturesOfZero) {
  using T = TypeParam;
  const auto x = constant_row(16, T(0));
  const T size = T(1 / std::sqrt(40.0));
  EXPECT_EQ(features(linattn::positive_random<T>(16, 40, 1), x), (constant_row<T>(40, size)));
  const auto phi = features(linattn::random_fourier<T>(16, 80, 1), x);
  EXPECT_EQ(phi.leftCols(40), (constant_row<T>(40, size)));
  EXPECT_TRUE(support::all_zero(phi.rightCols(40)));
}

TYPED_TEST(Maps, SinesAndCosines) {
  SKIP_UNDER_FAST_MATH();
  using P = linattn::detail::packet<TypeParam>;
  // sin h to about an ulp, and cos u = 1 - 2 sin^2 h has four times its error where sin h is near 1.
  constexpr double rounding = 5 * std::numeric_limits<TypeParam>::epsilon();
  support::random_bits random(2);
  double worst = 0;
  alignas(64) TypeParam u[P::size];
  alignas(64) TypeParam sine[P::size];
  alignas(64) TypeParam cosine[P::size];
  for (int i = 0; i < 50000; ++i) {
    const double range = i % 2 == 0 ? 10 : 300;
    for (TypeParam& value : u) value = TypeParam(range * (2 * random.uniform() - 1));
    const auto values = linattn::detail::sincos(P::load(u));
    values.sine.store(sine);
    values.cosine.store(cosine);
    for (Index j = 0; j < P::size; ++j) {
      const auto exact = static_cast<long double>(u[j]);
      worst = std::max(worst, static_cast<double>(std::abs(sine[j] - std::sin(exact))));
      worst = std::max(worst, static_cast<double>(std::abs(cosine[j] - std::cos(exact))));
    }
  }
  EXPECT_LE(worst, rounding);
}

TYPED_TEST(Maps, SinesAndCosinesStayBoundedWithoutAPhase) {
  using P = linattn::detail::packet<TypeParam>;
  constexpr TypeParam bound = 1 + 4 * std::numeric_limits<TypeParam>::epsilon();
  alignas(64) TypeParam lanes[P::size];
  for (const double u : {1e5, 1e8, 1e15, 1e30}) {
    for (const double sign : {1.0, -1.0}) {
      const auto values = linattn::detail::sincos(P(TypeParam(sign * u)));
      values.sine.store(lanes);
      EXPECT_LE(std::abs(lanes[0]), bound) << u;
      values.cosine.store(lanes);
      EXPECT_LE(std::abs(lanes[0]), bound) << u;
    }
  }
}

// ---- random maps: seeds, copies, errors
// ------------------------------------------------------------------------------

template <class Map>
void check_seeds() {
  using T = typename Map::scalar;
  const auto x = support::normal_matrix<T>(4, 16, 3);
  const Map map(16, 64, 5);
  const auto phi = features(map, x);
  EXPECT_EQ(map.seed(), 5U);
  EXPECT_EQ(map.head_dim(), 16);
  EXPECT_EQ(map.dimension(16), 64);
  EXPECT_TRUE(support::same_bits(features(map, x), phi)) << "twice";
  EXPECT_TRUE(support::same_bits(features(Map(16, 64, 5), x), phi)) << "same seed, another object";
  EXPECT_FALSE(support::bitwise_equal(features(Map(16, 64, 6), x), phi)) << "another seed";
  const Map redrawn = map.redraw(6);
  EXPECT_EQ(redrawn.seed(), 6U);
  EXPECT_TRUE(support::same_bits(features(redrawn, x), features(Map(16, 64, 6), x)));
  EXPECT_TRUE(support::same_bits(features(map, x), phi)) << "a redraw leaves the map alone";
  EXPECT_TRUE(support::same_bits(features(map.redraw(5), x), phi));

  Map copy(16, 64, 7);
  {
    const Map original(16, 64, 5);
    copy = original;
    EXPECT_EQ(copy.projection().data(), original.projection().data()) << "copies share the matrix";
  }
  EXPECT_TRUE(support::same_bits(features(copy, x), phi)) << "and keep it alive";
}

TYPED_TEST(Maps, SeedsDecide) {
  check_seeds<linattn::positive_random<TypeParam>>();
  check_seeds<linattn::random_fourier<TypeParam>>();
}

template <class Make>
std::string refusal(const Make& make) {
  try {
    make();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(RandomMaps, RefuseImpossibleSizes) {
  EXPECT_EQ(refusal([] { linattn::positive_random<float>(0, 8, 1); }),
            "linattn::positive_random: head_dim is 0; at least 1 is needed");
  EXPECT_EQ(refusal([] { linattn::positive_random<float>(8, 0, 1); }),
            "linattn::positive_random: features is 0; at least 1 is needed");
  EXPECT_EQ(refusal([] { linattn::random_fourier<float>(-1, 8, 1); }),
            "linattn::random_fourier: head_dim is -1; at least 1 is needed");
  EXPECT_EQ(refusal([] { linattn::random_fourier<float>(8, 0, 1); }),
            "linattn::random_fourier: features is 0; at least 2 are needed");
  EXPECT_EQ(refusal([] { linattn::random_fourier<float>(8, 7, 1); }),
            "linattn::random_fourier: features is 7; cosines and sines come in pairs, so it must be even");
}

TEST(RandomMaps, ForwardDoesNotAllocate) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  constexpr Index head_dim = 128;
  constexpr Index count = 1024;  // a projection of 512 KiB: an Eigen product would allocate
  const linattn::positive_random<float> positive(head_dim, count, 1);
  const linattn::random_fourier<float> fourier(head_dim, count, 1);
  linattn::detail::guarded_tile<float> in(32, head_dim);
  linattn::detail::guarded_tile<float> out(32, count);
  const linattn::const_tile<float> x = std::as_const(in).view();
  linattn::tile<float> phi = out.view();
  const support::allocation_count allocations;
  positive.forward(x, phi);
  fourier.forward(x, phi);
  const linattn::positive_random<float> copy = positive;
  copy.forward(x, phi);
  EXPECT_EQ(allocations.total(), 0);
}

// ---- random maps: what they estimate
// ---------------------------------------------------------------------------------

/// phi(q).phi(k) of the map of each seed for one pair of rows, in double.
template <class Map>
std::vector<double> estimates(const row_matrix<double>& q, const row_matrix<double>& k, Index count, int seeds) {
  std::vector<double> values;
  for (int seed = 0; seed < seeds; ++seed) {
    const Map map(q.cols(), count, static_cast<std::uint64_t>(seed));
    values.push_back(features(map, q).row(0).dot(features(map, k).row(0)));
  }
  return values;
}

struct moments {
  double mean = 0;
  double variance = 0;

  explicit moments(const std::vector<double>& values) {
    const auto n = static_cast<double>(values.size());
    for (const double value : values) mean += value / n;
    for (const double value : values) variance += (value - mean) * (value - mean) / (n - 1);
  }
};

TEST(RandomMaps, EstimateTheSoftmaxKernelWithoutBias) {
  constexpr Index head_dim = 8;
  constexpr Index count = 32;
  constexpr int seeds = 500;
  for (std::uint64_t pair = 0; pair < 6; ++pair) {
    const auto q = support::normal_matrix<double>(1, head_dim, 50 + pair, 0.7);
    const auto k = support::normal_matrix<double>(1, head_dim, 60 + pair, 0.7);
    const double exact = std::exp(q.row(0).dot(k.row(0)) / std::sqrt(double(head_dim)));
    const moments positive(estimates<linattn::positive_random<double>>(q, k, count, seeds));
    const moments fourier(estimates<linattn::random_fourier<double>>(q, k, count, seeds));
    EXPECT_NEAR(positive.mean, exact, sigmas * std::sqrt(positive.variance / seeds)) << "positive, pair " << pair;
    EXPECT_NEAR(fourier.mean, exact, sigmas * std::sqrt(fourier.variance / seeds)) << "fourier, pair " << pair;
  }
}

TEST(RandomMaps, HaveTheDocumentedVariance) {
  constexpr Index head_dim = 8;
  constexpr Index count = 64;
  constexpr int seeds = 1000;
  // The sample variance of 1000 estimates, themselves means over many directions, has a relative standard deviation of
  // sqrt(2 / 1000) and somewhat more for the tails of exp: about 6 %.
  constexpr double relative = sigmas * 0.06;
  for (std::uint64_t pair = 0; pair < 4; ++pair) {
    const auto q = support::normal_matrix<double>(1, head_dim, 70 + pair, 0.4);
    const auto k = support::normal_matrix<double>(1, head_dim, 80 + pair, 0.4);
    const double root = std::sqrt(double(head_dim));
    const double exact = std::exp(q.row(0).dot(k.row(0)) / root);
    const double z = (q + k).squaredNorm() / root;
    const double delta = (q - k).squaredNorm() / root;
    const double positive = exact * exact * (std::exp(z) - 1) / double(count);
    const double fourier =
        std::exp(z) / (exact * exact) * std::pow(1 - std::exp(-delta), 2) / double(count);  // 2 m = C
    EXPECT_NEAR(moments(estimates<linattn::positive_random<double>>(q, k, count, seeds)).variance, positive,
                relative * positive);
    EXPECT_NEAR(moments(estimates<linattn::random_fourier<double>>(q, k, count, seeds)).variance, fourier,
                relative * fourier);
  }
}

/// The slope of log error over log C: the error is the root mean square of phi(q).phi(k) - exp(q.k / sqrt(D)) over
/// `seeds` maps and all pairs of rows.
template <class Map>
double slope_of_error() {
  constexpr Index head_dim = 16;
  constexpr int seeds = 12;
  const auto q = support::normal_matrix<double>(16, head_dim, 90, 0.5);
  const auto k = support::normal_matrix<double>(16, head_dim, 91, 0.5);
  const row_matrix<double> exact = (q * k.transpose() / std::sqrt(double(head_dim))).array().exp();
  std::vector<double> x;
  std::vector<double> y;
  for (const Index count : {16, 32, 64, 128, 256, 512, 1024}) {
    double squares = 0;
    for (int seed = 0; seed < seeds; ++seed) {
      const Map map(head_dim, count, 1000 * static_cast<std::uint64_t>(count) + static_cast<std::uint64_t>(seed));
      squares += (features(map, q) * features(map, k).transpose() - exact).squaredNorm();
    }
    x.push_back(std::log(double(count)));
    y.push_back(std::log(squares) / 2);
  }
  const moments of_x(x);
  const moments of_y(y);
  double covariance = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    covariance += (x[i] - of_x.mean) * (y[i] - of_y.mean) / double(x.size() - 1);
  }
  return covariance / of_x.variance;
}

TEST(RandomMaps, ErrorFallsAsOneOverTheRootOfFeatures) {
  constexpr double spread = 0.1;  // seven points with about 5 % of noise each over a factor of 64
  EXPECT_NEAR(slope_of_error<linattn::positive_random<double>>(), -0.5, spread);
  EXPECT_NEAR(slope_of_error<linattn::random_fourier<double>>(), -0.5, spread);
}

// ---- random maps in the operator
// -------------------------------------------------------------------------------------

template <class Map>
void check_operator() {
  using T = typename Map::scalar;
  constexpr Index head_dim = 16;
  constexpr Index heads = 2;
  const Map map(head_dim, 48, 9);
  const linattn::linear_attention<Map, linattn::additive, T> attn({.head_dim = head_dim, .heads = heads}, map);
  EXPECT_EQ(attn.features(), 48);
  EXPECT_EQ(attn.normalizes(), !linattn::detail::has_signed_features<Map>);
  const support::attention_inputs<T> in(37, heads * head_dim, heads * head_dim, 10);
  const auto out = attn.forward_causal(in.q, in.k, in.v);
  row_matrix<double> expected(37, heads * head_dim);
  for (Index h = 0; h < heads; ++h) {
    const row_matrix<T> q = in.q.middleCols(h * head_dim, head_dim);
    const row_matrix<T> k = in.k.middleCols(h * head_dim, head_dim);
    const auto v = in.v.middleCols(h * head_dim, head_dim).template cast<double>();
    row_matrix<double> weights = features(map, q).template cast<double>() *
                                 features(map, k).template cast<double>().transpose();  // (N, N): one W for both
    weights.template triangularView<Eigen::StrictlyUpper>().setZero();
    row_matrix<double> rows = weights * v;
    if (attn.normalizes()) rows.array().colwise() /= weights.rowwise().sum().array().eval();
    expected.middleCols(h * head_dim, head_dim) = rows;
  }
  EXPECT_TRUE(support::close(out, expected, support::tolerance<T>::relative_rms));
}

TYPED_TEST(Maps, QueriesAndKeysShareTheProjectionInTheOperator) {
  check_operator<linattn::positive_random<TypeParam>>();
  check_operator<linattn::random_fourier<TypeParam>>();
}

TEST(RandomMaps, ApproximateSoftmaxAttention) {
  constexpr Index head_dim = 16;
  // Relative error of the output at this size: 0.096 in the median for positive features, 0.069 for trigonometric ones.
  constexpr double bound = 0.2;
  const support::attention_inputs<float> in(256, 256, head_dim, head_dim, 11, 0.5);
  const auto values = support::normal_matrix<float>(256, head_dim, 12);
  const row_matrix<double> q = in.q.cast<double>();
  row_matrix<double> weights = (q * in.k.cast<double>().transpose() / 4.0).array().exp();
  weights.array().colwise() /= weights.rowwise().sum().array().eval();
  const row_matrix<double> softmax = weights * values.cast<double>();
  const linattn::positive_random<float> positive(head_dim, 1024, 3);
  const linattn::random_fourier<float> fourier(head_dim, 1024, 3);
  const linattn::linear_attention<linattn::positive_random<float>> a({.head_dim = head_dim}, positive);
  const linattn::linear_attention<linattn::random_fourier<float>> b({.head_dim = head_dim, .normalize = true}, fourier);
  EXPECT_TRUE(support::close(a.forward(in.q, in.k, values), softmax, bound));
  EXPECT_TRUE(support::close(b.forward(in.q, in.k, values), softmax, bound));
}

}  // namespace
