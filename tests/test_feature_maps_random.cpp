// Random maps beyond those of test_feature_maps.cpp, and orthogonal directions: values against closed forms in long
// double, what they estimate and with which variance, how directions are drawn, gradients.
#include <gtest/gtest.h>

#include <linattn/check_feature_map.hpp>
#include <linattn/linattn.hpp>

#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/map_probe.hpp"
#include "support/oracle.hpp"

namespace {

using Eigen::Index;
using linattn::random_feature_options;
using linattn::random_rows;
using support::features;
using support::row_matrix;
using support::wide_matrix;

/// Statistics of fixed seeds lie within this many standard deviations of their expectation.
constexpr double sigmas = 4;

/// As in test_feature_maps.cpp: the absolute error of an exponent, a sum of D <= 65 terms whose partial sums reach
/// about 15, is the relative error of the exponential.
template <class T>
constexpr double random_feature_rms = 60 * std::numeric_limits<T>::epsilon();

/// Central differences in double: 1e-9 of their own, and what is wrong is wrong by 1e-3 at least.
constexpr double difference_rms = 1e-6;

/// Less than a register, whole registers, and one element more, for every packet width.
constexpr Index awkward_sizes[] = {1, 3, 7, 8, 9, 16, 17, 33, 65};

constexpr random_rows every_kind[] = {random_rows::independent, random_rows::orthogonal, random_rows::regularized};

template <class T>
struct MoreRandomMaps : testing::Test {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(MoreRandomMaps, scalars);

double mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / double(values.size());
}

double variance_of(const std::vector<double>& values) {
  const double mean = mean_of(values);
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return squares / double(values.size() - 1);
}

// ---- closed forms

/// phi from u = W x' / its scale of input (m) and x (D), one row at a time.
template <class T, class Map, class F>
void expect_closed_form(const Map& map, Index features_of_map, const F& closed_form) {
  const Index d = map.head_dim();
  const auto x = support::normal_matrix<T>(6, d, 100 * std::uint64_t(d) + std::uint64_t(features_of_map));
  const wide_matrix w = map.projection().template cast<long double>();
  wide_matrix exact(x.rows(), features_of_map);
  for (Index r = 0; r < x.rows(); ++r) {
    const support::wide_vector row = x.row(r).template cast<long double>();
    exact.row(r) = closed_form(w, row);
  }
  EXPECT_TRUE(support::close(features(map, x), exact, random_feature_rms<T>)) << "D = " << d << ", m = " << w.rows();
}

support::wide_vector both_halves(const support::wide_vector& first, const support::wide_vector& second) {
  support::wide_vector all(first.size() + second.size());
  all << first, second;
  return all;
}

TYPED_TEST(MoreRandomMaps, EqualTheirClosedForms) {
  using T = TypeParam;
  using support::wide_vector;
  constexpr double a = -0.15;
  constexpr long double temperature = 1.75L;
  for (const Index d : awkward_sizes) {
    for (const Index m : awkward_sizes) {
      const long double root = std::sqrt(static_cast<long double>(d));
      const long double norm = 1 / std::sqrt(static_cast<long double>(m));
      const auto u = [](const wide_matrix& w, const wide_vector& x, long double divisor) -> wide_vector {
        return x * w.transpose() / std::sqrt(divisor);
      };
      expect_closed_form<T>(linattn::hyperbolic<T>(d, 2 * m, 1), 2 * m,
                            [&](const wide_matrix& w, const wide_vector& x) {
                              const wide_vector v = u(w, x, root);
                              const long double size = norm / std::sqrt(2.0L) * std::exp(-x.squaredNorm() / (2 * root));
                              return wide_vector(size * both_halves(v.array().exp(), (-v).array().exp()));
                            });
      expect_closed_form<T>(linattn::gerf<T>(d, m, 2, a), m, [&](const wide_matrix& w, const wide_vector& x) {
        wide_vector phi = u(w, x, root);
        for (Index c = 0; c < m; ++c) {
          const long double exponent = static_cast<long double>(a) * w.row(c).squaredNorm() +
                                       std::sqrt(1 - 4 * static_cast<long double>(a)) * phi[c] -
                                       x.squaredNorm() / (2 * root);
          phi[c] = norm * std::pow(1 - 4 * static_cast<long double>(a), static_cast<long double>(d) / 4) *
                   std::exp(exponent);
        }
        return phi;
      });
      expect_closed_form<T>(linattn::rfa<T>(d, 2 * m, 3, {.temperature = double(temperature)}), 2 * m,
                            [&](const wide_matrix& w, const wide_vector& x) {
                              const wide_vector v = u(w, x / x.norm(), temperature);
                              return wide_vector(norm * both_halves(v.array().cos(), v.array().sin()));
                            });
      expect_closed_form<T>(linattn::gaussian_fourier<T>(d, 2 * m, 4), 2 * m,
                            [&](const wide_matrix& w, const wide_vector& x) {
                              const wide_vector v = u(w, x, root);
                              return wide_vector(norm * both_halves(v.array().cos(), v.array().sin()));
                            });
      expect_closed_form<T>(linattn::generalized_relu<T>(d, m, 5, {}, 0.25), m,
                            [&](const wide_matrix& w, const wide_vector& x) {
                              return wide_vector(norm * u(w, x, root).array().max(0) + 0.25L);
                            });
    }
  }
}

TYPED_TEST(MoreRandomMaps, ATemperatureReplacesTheRootOfD) {
  using T = TypeParam;
  const auto x = support::normal_matrix<T>(5, 16, 6);
  const auto same = [&](const auto& map, const auto& hotter) {  // 4 and its quarter power are exact
    EXPECT_TRUE(support::same_bits(features(hotter, row_matrix<T>(x * T(2))), features(map, x)));
  };
  same(linattn::positive_random<T>(16, 20, 1), linattn::positive_random<T>(16, 20, 1, {.temperature = 16}));
  same(linattn::random_fourier<T>(16, 20, 1), linattn::random_fourier<T>(16, 20, 1, {.temperature = 16}));
  same(linattn::hyperbolic<T>(16, 20, 1), linattn::hyperbolic<T>(16, 20, 1, {.temperature = 16}));
  same(linattn::gerf<T>(16, 20, 1, -0.1), linattn::gerf<T>(16, 20, 1, -0.1, {.temperature = 16}));
  same(linattn::gaussian_fourier<T>(16, 20, 1), linattn::gaussian_fourier<T>(16, 20, 1, {.temperature = 16}));
  same(linattn::generalized_relu<T>(16, 20, 1), linattn::generalized_relu<T>(16, 20, 1, {.temperature = 16}));
}

TYPED_TEST(MoreRandomMaps, RfaSeesDirectionsOnly) {
  using T = TypeParam;
  const auto x = support::normal_matrix<T>(5, 9, 7);
  const linattn::rfa<T> map(9, 14, 1);
  EXPECT_TRUE(support::same_bits(features(map, row_matrix<T>(x * T(1024))), features(map, x)));
  const row_matrix<T> zero = row_matrix<T>::Zero(1, 9);
  EXPECT_TRUE(support::same_bits(features(map, zero), features(linattn::gaussian_fourier<T>(9, 14, 1), zero)));
}

TYPED_TEST(MoreRandomMaps, GerfWithoutAIsPositiveRandom) {
  using T = TypeParam;
  const auto x = support::normal_matrix<T>(5, 9, 8);
  EXPECT_TRUE(support::same_bits(features(linattn::gerf<T>(9, 14, 1, 0), x),
                                 features(linattn::positive_random<T>(9, 14, 1), x)));
}

// ---- directions

row_matrix<double> directions(Index head_dim, Index rows, std::uint64_t seed, random_rows kind) {
  return linattn::detail::random_projection<double>("directions", head_dim, rows, seed, kind).matrix();
}

TEST(Directions, AreAtRightAnglesInBlocksOfD) {
  constexpr double rounding = 1e-14;
  for (const Index d : awkward_sizes) {
    for (const random_rows kind : {random_rows::orthogonal, random_rows::regularized}) {
      row_matrix<double> w = directions(d, 2 * d + 1, 10, kind);
      if (kind == random_rows::regularized) {
        EXPECT_LE((w.rowwise().norm().array() / std::sqrt(double(d)) - 1).abs().maxCoeff(), rounding);
      }
      w.rowwise().normalize();
      for (const Index first : {Index(0), d}) {
        const row_matrix<double> block = w.middleRows(first, d);
        EXPECT_LE((block * block.transpose() - row_matrix<double>::Identity(d, d)).cwiseAbs().maxCoeff(), rounding)
            << "D = " << d;
      }
    }
  }
}

TEST(Directions, OfFewerFeaturesAreTheFirstOfMore) {
  for (const random_rows kind : every_kind) {
    const auto all = directions(7, 25, 11, kind);
    for (const Index m : {1, 6, 7, 8, 20}) {
      EXPECT_TRUE(support::same_bits(directions(7, m, 11, kind), all.topRows(m))) << m;
    }
  }
}

/// E[w_c] = 0 and E[w_c w_c^T] = I for every row c for itself: with a QR by reflections for an orthogonal block, whose
/// signs are not corrected, the mean of a component is about -0.1 at D = 8.
TEST(Directions, HaveMeanZeroAndUnitCovariance) {
  constexpr Index head_dim = 8;
  constexpr Index rows = 2 * head_dim - 3;  // the second block is not whole
  constexpr int seeds = 8000;
  // A mean of `seeds` draws with variance 1, and of products of two with variance at most 2. The largest of 104 means
  // and of 832 products is within 4 of their deviations in all but 1 % and 5 % of cases.
  const double of_means = sigmas / std::sqrt(double(seeds));
  const double of_products = 1.25 * sigmas * std::sqrt(2.0 / seeds);
  for (const random_rows kind : every_kind) {
    row_matrix<double> mean = row_matrix<double>::Zero(rows, head_dim);
    std::vector<row_matrix<double>> covariance(rows, row_matrix<double>::Zero(head_dim, head_dim));
    for (int seed = 0; seed < seeds; ++seed) {
      const auto w = directions(head_dim, rows, std::uint64_t(seed), kind);
      mean += w / seeds;
      for (Index c = 0; c < rows; ++c) covariance[std::size_t(c)] += w.row(c).transpose() * w.row(c) / seeds;
    }
    EXPECT_LE(mean.cwiseAbs().maxCoeff(), of_means) << int(kind);
    for (const auto& matrix : covariance) {
      EXPECT_LE((matrix - row_matrix<double>::Identity(head_dim, head_dim)).cwiseAbs().maxCoeff(), of_products)
          << int(kind);
    }
  }
}

TEST(Directions, OrthogonalLengthsAreThoseOfIndependentNormals) {
  // |w|^2 of D normals has mean D and variance 2 D; the variance of its square deviation is 8 D^2 + 48 D. Lengths of
  // one block must depend neither on each other, although its directions do, nor on the direction.
  constexpr Index head_dim = 8;
  constexpr int seeds = 4000;
  std::vector<double> first;
  std::vector<double> products;
  std::vector<double> with_direction;
  for (int seed = 0; seed < seeds; ++seed) {
    const auto w = directions(head_dim, 2, std::uint64_t(seed), random_rows::orthogonal);
    first.push_back(w.row(0).squaredNorm());
    products.push_back((w.row(0).squaredNorm() - head_dim) * (w.row(1).squaredNorm() - head_dim));
    with_direction.push_back((w.row(1).squaredNorm() - head_dim) * w(1, 0) / w.row(1).norm());
  }
  constexpr double d = head_dim;
  EXPECT_NEAR(mean_of(first), d, sigmas * std::sqrt(2 * d / seeds));
  EXPECT_NEAR(variance_of(first), 2 * d, sigmas * std::sqrt((8 * d * d + 48 * d) / seeds));
  EXPECT_NEAR(mean_of(products), 0, sigmas * 2 * d / std::sqrt(double(seeds)));
  EXPECT_NEAR(mean_of(with_direction), 0,
              sigmas * std::sqrt(2.0 / seeds));  // a component of a unit row: variance 1 / D
}

/// To the last bit, as orthogonal ones are made of fused multiply-adds, roots and quotients in a fixed order.
TEST(Directions, AreTheSameOnEveryCompiler) {
#if defined(__FAST_MATH__)
  GTEST_SKIP() << "-ffast-math: draws may differ";
#endif
  const auto orthogonal = directions(5, 8, 2026, random_rows::orthogonal);
  const auto regularized = directions(5, 8, 2026, random_rows::regularized);
  EXPECT_EQ(orthogonal(0, 0), 0x1.cadf5af80c8bap-5);
  EXPECT_EQ(orthogonal(4, 4), -0x1.b576f7810f78p-3);
  EXPECT_EQ(orthogonal(7, 1), -0x1.1b1e1fc7771f3p-1);
  EXPECT_EQ(regularized(4, 4), -0x1.63bf8f00dd952p-2);
}

// ---- what they estimate

using estimator = std::function<double(std::uint64_t seed)>;

std::vector<double> estimates(const estimator& estimate, int seeds) {
  std::vector<double> values;
  for (int seed = 0; seed < seeds; ++seed) values.push_back(estimate(std::uint64_t(seed)));
  return values;
}

/// phi(q).phi(k) of make(seed).
template <class Make>
estimator product(const row_matrix<double>& q, const row_matrix<double>& k, const Make& make) {
  return [=](std::uint64_t seed) {
    const auto map = make(seed);
    return features(map, q).row(0).dot(features(map, k).row(0));
  };
}

struct pair {
  static constexpr Index head_dim = 8;
  row_matrix<double> q, k;
  double softmax;     ///< exp(q'.k')
  double sum_square;  ///< |q' + k'|^2
  double distance;    ///< |q' - k'|^2
  double norms;       ///< |q'|^2 + |k'|^2

  pair(std::uint64_t seed, double sigma)
      : q(support::normal_matrix<double>(1, head_dim, 200 + seed, sigma)),
        k(support::normal_matrix<double>(1, head_dim, 300 + seed, sigma)) {
    const double root = std::sqrt(double(head_dim));
    softmax = std::exp(q.row(0).dot(k.row(0)) / root);
    sum_square = (q + k).squaredNorm() / root;
    distance = (q - k).squaredNorm() / root;
    norms = (q.squaredNorm() + k.squaredNorm()) / root;
  }

  double cosine() const { return q.row(0).dot(k.row(0)) / (q.norm() * k.norm()); }

  /// Arc-cosine kernel of degree 1.
  double rectified() const {
    const double angle = std::acos(cosine());
    return q.norm() * k.norm() / std::sqrt(double(head_dim)) *
           (std::sin(angle) + (std::acos(-1.0) - angle) * std::cos(angle)) / (2 * std::acos(-1.0));
  }
};

TEST(RandomEstimates, AreWithoutBias) {
  constexpr Index d = pair::head_dim;
  constexpr Index count = 20;  // two blocks and a half, and for pairs one and a quarter
  constexpr int seeds = 400;
  for (std::uint64_t number = 0; number < 4; ++number) {
    const pair p(number, 0.7);
    for (const random_rows kind : {random_rows::independent, random_rows::orthogonal}) {
      const random_feature_options options{.rows = kind};
      const auto expect = [&](const char* name, double exact, const auto& make) {
        const auto values = estimates(product(p.q, p.k, make), seeds);
        EXPECT_NEAR(mean_of(values), exact, sigmas * std::sqrt(variance_of(values) / seeds))
            << name << ", pair " << number << ", rows " << int(kind);
      };
      const auto make = [&](auto map) { return map; };
      expect("positive_random", p.softmax,
             [&](std::uint64_t seed) { return make(linattn::positive_random<double>(d, count, seed, options)); });
      expect("random_fourier", p.softmax,
             [&](std::uint64_t seed) { return make(linattn::random_fourier<double>(d, count, seed, options)); });
      expect("hyperbolic", p.softmax,
             [&](std::uint64_t seed) { return make(linattn::hyperbolic<double>(d, count, seed, options)); });
      expect("gerf", p.softmax,
             [&](std::uint64_t seed) { return make(linattn::gerf<double>(d, count, seed, -0.05, options)); });
      expect("gaussian_fourier", std::exp(-p.distance / 2),
             [&](std::uint64_t seed) { return make(linattn::gaussian_fourier<double>(d, count, seed, options)); });
      expect("rfa", std::exp(p.cosine() - 1),
             [&](std::uint64_t seed) { return make(linattn::rfa<double>(d, count, seed, options)); });
      expect("generalized_relu", p.rectified(),
             [&](std::uint64_t seed) { return make(linattn::generalized_relu<double>(d, count, seed, options, 0)); });
    }
  }
}

TEST(RandomEstimates, RegularizedOnesAreCloseToSoftmaxFromBelow) {
  constexpr Index d = pair::head_dim;
  constexpr int seeds = 400;
  for (std::uint64_t number = 0; number < 4; ++number) {
    const pair p(number, 0.7);
    const auto values =
        estimates(product(p.q, p.k,
                          [](std::uint64_t seed) {
                            return linattn::positive_random<double>(d, 24, seed, {.rows = random_rows::regularized});
                          }),
                  seeds);
    const double noise = sigmas * std::sqrt(variance_of(values) / seeds);
    EXPECT_LE(mean_of(values), p.softmax + noise);
    EXPECT_GE(mean_of(values), 0.75 * p.softmax - noise);  // E over a sphere of radius sqrt(8), |z|^2 <= 4
  }
}

TEST(RandomEstimates, HaveTheDocumentedVariance) {
  constexpr Index d = pair::head_dim;
  constexpr Index count = 64;
  constexpr int seeds = 1000;
  // As in test_feature_maps.cpp: the sample variance of 1000 estimates is good to about 6 %.
  constexpr double relative = sigmas * 0.06;
  for (std::uint64_t number = 0; number < 4; ++number) {
    const pair p(number, 0.5);
    const auto expect = [&](const char* name, double exact, const auto& make) {
      const double found = variance_of(estimates(product(p.q, p.k, make), seeds));
      EXPECT_NEAR(found, exact, relative * exact) << name << ", pair " << number;
    };
    const double square = p.softmax * p.softmax;
    const double positive = square * (std::exp(p.sum_square) - 1) / double(count);
    expect("hyperbolic", positive * (1 - std::exp(-p.sum_square)),
           [](std::uint64_t seed) { return linattn::hyperbolic<double>(d, count, seed); });
    constexpr double a = -0.05;
    const double second_moment = std::pow(1 - 4 * a, d) * std::pow(1 - 8 * a, -d / 2.0) *
                                 std::exp(2 * p.sum_square * (1 - 4 * a) / (1 - 8 * a) - p.norms);
    expect("gerf", (second_moment - square) / double(count),
           [](std::uint64_t seed) { return linattn::gerf<double>(d, count, seed, a); });
    const auto waves = [&](double distance) {
      return std::pow(1 - std::exp(-distance), 2) / double(count);  // 2 m = C
    };
    expect("gaussian_fourier", waves(p.distance),
           [](std::uint64_t seed) { return linattn::gaussian_fourier<double>(d, count, seed); });
    expect("rfa", waves(2 - 2 * p.cosine()), [](std::uint64_t seed) { return linattn::rfa<double>(d, count, seed); });
  }
}

TEST(RandomEstimates, OrthogonalDirectionsHaveLessVariance) {
  constexpr Index d = pair::head_dim;
  constexpr int seeds = 2000;
  // The ratio of two sample variances of 2000 deviates by 6 % from 1 where there is no effect. Seen are 0.41 and 0.25;
  // for positive features it is 0.87, which would take 20 times as many seeds to tell from 1.
  constexpr double no_effect = 1 - sigmas * 0.06;
  const auto total = [&](const auto& make) {
    double sum = 0;
    for (std::uint64_t number = 0; number < 4; ++number) {
      const pair p(number, 0.3);
      sum += variance_of(estimates(product(p.q, p.k, make), seeds)) / (p.softmax * p.softmax);
    }
    return sum;
  };
  const auto ratio = [&](const char* name, const auto& make) {
    const double independent = total([&](std::uint64_t seed) { return make(seed, random_rows::independent); });
    const double orthogonal = total([&](std::uint64_t seed) { return make(seed, random_rows::orthogonal); });
    EXPECT_LE(orthogonal, no_effect * independent) << name << ": " << orthogonal / independent;
  };
  ratio("hyperbolic", [](std::uint64_t seed, random_rows kind) {
    return linattn::hyperbolic<double>(d, 2 * d, seed, {.rows = kind});
  });
  ratio("random_fourier", [](std::uint64_t seed, random_rows kind) {
    return linattn::random_fourier<double>(d, 2 * d, seed, {.rows = kind});
  });
}

// ---- gerf::optimal

TEST(Gerf, OptimalTakesTheMeanOverAllPairsOfEachHead) {
  constexpr Index heads = 2;
  constexpr Index d = 6;
  const auto q = support::normal_matrix<double>(9, heads * d, 401, 0.8);
  const auto k = support::normal_matrix<double>(7, heads * d, 402, 0.6);
  double squares = 0;
  for (Index h = 0; h < heads; ++h) {
    for (Index i = 0; i < q.rows(); ++i) {
      for (Index j = 0; j < k.rows(); ++j) {
        squares += (q.row(i) + k.row(j)).segment(h * d, d).squaredNorm() / double(heads * q.rows() * k.rows());
      }
    }
  }
  const double rho = squares / std::sqrt(double(d)) / double(d);
  const double a = linattn::gerf<double>::optimal(q, k, heads);
  // The logarithm of the second moment for |z|^2 = rho D, a D-th of it.
  const auto cost = [&](double x) {
    return std::log(1 - 4 * x) - 0.5 * std::log(1 - 8 * x) + 2 * rho * (1 - 4 * x) / (1 - 8 * x);
  };
  constexpr double aside = 1e-3;
  EXPECT_LT(a, 0);
  EXPECT_LT(cost(a), cost(a + aside));
  EXPECT_LT(cost(a), cost(a - aside));
  const row_matrix<double> zero = row_matrix<double>::Zero(3, d);
  EXPECT_EQ(linattn::gerf<double>::optimal(zero, zero), 0);
}

TEST(Gerf, OptimalHasLessVarianceThanPositiveRandom) {
  constexpr Index d = pair::head_dim;
  constexpr int seeds = 500;
  double positive = 0;
  double fitted = 0;
  for (std::uint64_t number = 0; number < 4; ++number) {
    const pair p(number, 0.6);
    const double a = linattn::gerf<double>::optimal(p.q, p.k);
    const double square = p.softmax * p.softmax;
    positive += variance_of(estimates(
                    product(p.q, p.k, [](std::uint64_t seed) { return linattn::positive_random<double>(d, 64, seed); }),
                    seeds)) /
                square;
    fitted +=
        variance_of(estimates(
            product(p.q, p.k, [&](std::uint64_t seed) { return linattn::gerf<double>(d, 64, seed, a); }), seeds)) /
        square;
  }
  EXPECT_LT(fitted, positive);
}

// ---- the contract, seeds, errors

template <class T, class Map>
void check_contract(const Map& map) {
  static_assert(linattn::detail::is_differentiable<Map, T>);
  const auto report = linattn::check_feature_map<T>(map, map.head_dim(), {.rows = 16, .deviation = 0.5});
  EXPECT_TRUE(report.passed) << "D = " << map.head_dim() << ": " << (report.passed ? "" : report.problems.front());
}

template <class Map>
void check_seeds(const Map& map) {
  using T = typename Map::scalar;
  const auto x = support::normal_matrix<T>(4, map.head_dim(), 3);
  const auto phi = features(map, x);
  const Map other = map.redraw(map.seed() + 1);
  EXPECT_EQ(other.seed(), map.seed() + 1);
  EXPECT_EQ(other.dimension(0), map.dimension(0));
  EXPECT_FALSE(support::bitwise_equal(features(other, x), phi)) << "another seed";
  EXPECT_TRUE(support::same_bits(features(other.redraw(map.seed()), x), phi)) << "and back, with every option";
  EXPECT_EQ(Map(map).projection().data(), map.projection().data()) << "copies share the matrix";
}

TYPED_TEST(MoreRandomMaps, KeepTheContractAndTheirOptionsWhenRedrawn) {
  using T = TypeParam;
  for (const Index d : awkward_sizes) {
    for (const random_rows kind : every_kind) {
      const random_feature_options options{.rows = kind, .temperature = 3};
      const auto check = [](const auto& map) {
        check_contract<T>(map);
        check_seeds(map);
      };
      check(linattn::hyperbolic<T>(d, 38, 5, options));
      check(linattn::rfa<T>(d, 38, 5, options));
      check(linattn::gaussian_fourier<T>(d, 38, 5, options));
      check(linattn::generalized_relu<T>(d, 37, 5, options, 0.01));
      check(linattn::positive_random<T>(d, 37, 5, options));
      check(linattn::random_fourier<T>(d, 38, 5, options));
      if (kind != random_rows::regularized) check(linattn::gerf<T>(d, 37, 5, -0.1, options));
    }
  }
}

std::string refusal(const std::function<void()>& make) {
  try {
    make();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(MoreRandomMapsErrors, AreOneSentenceEach) {
  EXPECT_EQ(refusal([] { linattn::hyperbolic<float>(8, 7, 1); }),
            "linattn::hyperbolic: features is 7; opposite directions come in pairs, so it must be even");
  EXPECT_EQ(refusal([] { linattn::rfa<float>(8, 0, 1); }), "linattn::rfa: features is 0; at least 2 are needed");
  EXPECT_EQ(refusal([] { linattn::gerf<float>(0, 8, 1, 0); }), "linattn::gerf: head_dim is 0; at least 1 is needed");
  EXPECT_EQ(refusal([] { linattn::gerf<float>(8, 8, 1, 0.125); }),
            "linattn::gerf: A is 0.125; it must be below 1/8, where the variance is infinite");
  EXPECT_EQ(refusal([] { linattn::gerf<float>(8, 8, 1, 0, {.rows = random_rows::regularized}); }),
            "linattn::gerf: directions of one length are not weighed by A; use independent or orthogonal ones");
  EXPECT_EQ(refusal([] { linattn::generalized_relu<float>(8, 8, 1, {}, -1); }),
            "linattn::generalized_relu: epsilon is -1; it must not be negative");
  EXPECT_EQ(refusal([] { linattn::positive_random<float>(8, 8, 1, {.temperature = -2}); }),
            "linattn::positive_random: temperature is -2; it divides q.k, and 0 stands for the map's own");
#if !defined(__FAST_MATH__)
  EXPECT_EQ(refusal([] {
              linattn::positive_random<float>(8, 8, 1, {.temperature = std::numeric_limits<double>::infinity()});
            }),
            "linattn::positive_random: temperature is inf; it divides q.k, and 0 stands for the map's own");
#endif
  const row_matrix<float> three = row_matrix<float>::Zero(2, 3);
  const row_matrix<float> four = row_matrix<float>::Zero(2, 4);
  EXPECT_EQ(refusal([&] { linattn::gerf<float>::optimal(three, four); }),
            "linattn::gerf::optimal: q is (2, 3), k is (2, 4), heads is 1; needed are (Nq, H D) and (Nk, H D) with at "
            "least one row each");
}

TEST(MoreRandomMapsMemory, ForwardDoesNotAllocate) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  constexpr Index head_dim = 64;
  constexpr Index count = 1024;
  const auto check = [](const auto& map) {
    linattn::detail::guarded_tile<float> in(5, head_dim);
    linattn::detail::guarded_tile<float> out(5, count);
    const linattn::const_tile<float> x = std::as_const(in).view();
    linattn::tile<float> phi = out.view();
    const support::allocation_count allocations;
    map.forward(x, phi);
    EXPECT_EQ(allocations.total(), 0);
  };
  check(linattn::hyperbolic<float>(head_dim, count, 1));
  check(linattn::rfa<float>(head_dim, count, 1));
  check(linattn::gaussian_fourier<float>(head_dim, count, 1));
  check(linattn::generalized_relu<float>(head_dim, count, 1));
  check(linattn::gerf<float>(head_dim, count, 1, -0.1));
}

// ---- gradients

TEST(RandomGradients, EqualCentralDifferences) {
  for (const Index d : {1, 3, 8, 17}) {
    const auto x = support::normal_matrix<double>(4, d, 500 + std::uint64_t(d));
    const auto check = [&](const char* name, const auto& map) {
      const auto dphi = support::normal_matrix<double>(4, map.dimension(d), 600 + std::uint64_t(d));
      EXPECT_TRUE(support::close(support::gradient(map, x, dphi), support::differences(map, x, dphi), difference_rms))
          << name << ", D = " << d;
    };
    const random_feature_options options{.rows = random_rows::orthogonal, .temperature = 2};
    check("positive_random", linattn::positive_random<double>(d, 21, 1, options));
    check("random_fourier", linattn::random_fourier<double>(d, 22, 1, options));
    check("hyperbolic", linattn::hyperbolic<double>(d, 22, 1, options));
    check("gerf", linattn::gerf<double>(d, 21, 1, -0.2, options));
    check("gaussian_fourier", linattn::gaussian_fourier<double>(d, 22, 1, options));
    check("generalized_relu", linattn::generalized_relu<double>(d, 21, 1, options));
    if (d > 1) check("rfa", linattn::rfa<double>(d, 22, 1, options));  // D = 1 has two directions and no slope
  }
}

TEST(RandomGradients, RfaHasNoneWhereThereIsNoDirection) {
  const linattn::rfa<double> map(3, 8, 1);
  const auto dphi = support::normal_matrix<double>(1, 8, 700);
  EXPECT_TRUE(support::all_zero(support::gradient(map, row_matrix<double>(row_matrix<double>::Zero(1, 3)), dphi)));
}

}  // namespace
