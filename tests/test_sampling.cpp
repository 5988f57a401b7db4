// Sampling: draws against a plain reference and by chi-square, likelihoods against long double, the mixture of
// logistics with its tails, and that draws are the same everywhere.
#include <gtest/gtest.h>

#include <linattn/mixture_of_logistics.hpp>
#include <linattn/sampling.hpp>

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/refusal.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

namespace {

using Eigen::Index;
using linattn::mixture_of_logistics;
using linattn::random_stream;
using linattn::row_matrix;
using linattn::row_vector;
using linattn::sampler;
using linattn::sampling_options;
using support::normal_matrix;
using support::refusal;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// Seeds are fixed, so a statistic is one number for ever; it must lie within this many standard deviations, which one
/// right sampler in 16,000 misses by chance.
constexpr double sigmas = 4;

/// A count that is expected less often tells nothing about its square's distribution: such cells are taken together.
constexpr double least_expected = 10;

/// How many standard deviations chi-square lies from its mean, for counts of draws from p.
double chi_square_deviation(const std::vector<double>& counts, const std::vector<double>& p) {
  const double draws = std::accumulate(counts.begin(), counts.end(), 0.0);
  double chi_square = 0, cells = 0, rest_counted = 0, rest_expected = 0;
  const auto add = [&](double counted, double expected) {
    chi_square += (counted - expected) * (counted - expected) / expected;
    cells += 1;
  };
  for (std::size_t i = 0; i < p.size(); ++i) {
    EXPECT_TRUE(p[i] > 0 || counts[i] == 0) << "symbol " << i << " has no probability";
    if (p[i] * draws >= least_expected) {
      add(counts[i], p[i] * draws);
    } else {
      rest_counted += counts[i];
      rest_expected += p[i] * draws;
    }
  }
  if (rest_expected >= least_expected) {
    add(rest_counted, rest_expected);
  } else {
    EXPECT_LE(rest_counted, 3 * least_expected);
  }
  return (chi_square - (cells - 1)) / std::sqrt(2 * (cells - 1));
}

template <class F>
std::vector<double> counts_of(std::size_t symbols, Index draws, const F& draw) {
  std::vector<double> counts(symbols, 0.0);
  for (Index i = 0; i < draws; ++i) counts.at(static_cast<std::size_t>(draw())) += 1;
  return counts;
}

// ---- the exponential ------------------------------------------------------------------------------------------------

TEST(NaturalExponential, IsRightAndTheSameEverywhere) {
  using linattn::detail::natural_exponential;
  // Half an ulp of the last sum, and what a rounded r is off by.
  constexpr double ulps = 1.5;
  std::uint64_t hash = 0xCBF29CE484222325;
  for (int i = -708 * 128; i <= 709 * 128; ++i) {
    const double x = i * 0x1p-7 - (i + 90624) % 7 * 0x1p-12;  // exact, contracted or not
    if (x < -708) continue;
    const double y = natural_exponential(x);
    const long double expected = std::exp(static_cast<long double>(x));
    ASSERT_LE(std::abs(static_cast<long double>(y) - expected), ulps * support::ulp<double>(expected)) << x;
    hash = (hash ^ std::bit_cast<std::uint64_t>(y)) * 0x100000001B3;
  }
  EXPECT_EQ(natural_exponential(0), 1);
  EXPECT_EQ(natural_exponential(-709), 0);
  EXPECT_EQ(natural_exponential(-infinity), 0);
  EXPECT_EQ(natural_exponential(710), infinity);
  EXPECT_EQ(natural_exponential(infinity), infinity);
#if !defined(__FAST_MATH__)
  EXPECT_EQ(hash, 0xA9E73B31FEBCF7D8ULL);
#endif
}

// ---- draws ----------------------------------------------------------------------------------------------------------

/// The distribution that options make of logits, from a full sort.
std::vector<long double> distribution(const std::vector<double>& x, const sampling_options& o) {
  std::vector<std::size_t> order(x.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return x[a] > x[b]; });
  std::vector<long double> p(x.size(), 0);
  const std::size_t k = o.top_k == 0 ? x.size() : std::min(x.size(), static_cast<std::size_t>(o.top_k));
  for (std::size_t rank = 0; rank < k; ++rank) {
    const double above = x[order[rank]] == x[order[0]] ? 0 : x[order[rank]] - x[order[0]];
    p[order[rank]] = std::exp(static_cast<long double>(above) / static_cast<long double>(o.temperature));
  }
  const auto normalise = [&] {
    const long double sum = std::accumulate(p.begin(), p.end(), 0.0L);
    for (long double& share : p) share /= sum;
  };
  normalise();
  long double share = 0;
  for (std::size_t rank = 0; rank < k && o.top_p < 1; ++rank) {
    if (share >= static_cast<long double>(o.top_p)) p[order[rank]] = 0;
    share += p[order[rank]];
  }
  normalise();
  return p;
}

/// Every draw is the symbol whose share of (0, 1), in the order of symbols, its random number lies in.
void expect_reference_draws(const std::vector<double>& x, const sampling_options& o, Index draws) {
  // Sums of some hundred doubles; a random number this close to an edge may fall on either side.
  constexpr double edge = 1e-13;
  const std::vector<long double> p = distribution(x, o);
  sampler draw(o, Index(x.size()));
  const Eigen::Map<const Eigen::RowVectorXd> logits(x.data(), Index(x.size()));
  for (Index i = 0; i < draws; ++i) {
    const auto u = static_cast<long double>(linattn::detail::random_uniform(o.seed, 0, std::uint64_t(i)));
    const auto symbol = static_cast<std::size_t>(draw(logits));
    ASSERT_LT(symbol, x.size());
    const long double below = std::accumulate(p.begin(), p.begin() + std::ptrdiff_t(symbol), 0.0L);
    ASSERT_GT(p[symbol], 0) << "draw " << i << " is symbol " << symbol;
    ASSERT_GE(u, below - edge) << "draw " << i << " is symbol " << symbol;
    ASSERT_LE(u, below + p[symbol] + edge) << "draw " << i << " is symbol " << symbol;
  }
}

std::vector<double> logits_of(Index n, std::uint64_t seed, double sigma, bool ties) {
  const row_matrix<double> x = normal_matrix<double>(1, n, seed, sigma);
  std::vector<double> logits(x.data(), x.data() + n);
  if (ties) std::for_each(logits.begin(), logits.end(), [](double& y) { y = std::round(y); });
  return logits;
}

TEST(Sampler, DrawsWhatAPlainReferenceDoes) {
  std::uint64_t seed = 0;
  for (const Index n : {1, 2, 17, 256}) {
    for (const bool ties : {false, true}) {
      for (const double temperature : {0.1, 1.0, 3.0}) {
        for (const Index top_k : {0, 1, 2, 10, 300}) {
          for (const double top_p : {0.01, 0.5, 0.95, 1.0}) {
            const sampling_options o{.temperature = temperature, .top_k = top_k, .top_p = top_p, .seed = ++seed};
            expect_reference_draws(logits_of(n, seed, 2, ties), o, 100);
          }
        }
      }
    }
  }
}

TEST(Sampler, DrawsForbiddenSymbolsNever) {
  std::vector<double> x = logits_of(40, 3, 1, false);
  for (const std::size_t i : {0U, 7U, 8U, 39U}) x[i] = -infinity;
  for (const Index top_k : {0, 38}) {
    for (const double top_p : {0.9, 1.0}) {
      expect_reference_draws(x, {.top_k = top_k, .top_p = top_p, .seed = 5}, 2000);
    }
  }
}

TEST(Sampler, SharesAmongInfiniteLogits) {
  expect_reference_draws({infinity, 3, infinity, -infinity, infinity}, {.seed = 5}, 500);
  expect_reference_draws({infinity, 3, infinity, -infinity, infinity}, {.top_k = 2, .seed = 5}, 500);
  expect_reference_draws({-1e308, 1e308, 1e308}, {.temperature = 1e-300, .seed = 5}, 500);
  EXPECT_EQ(linattn::greedy(Eigen::RowVector3d(1, infinity, infinity)), 1);
}

TEST(Sampler, FollowsItsDistribution) {
  constexpr Index draws = 1 << 16;
  const row_matrix<float> x = normal_matrix<float>(1, 17, 4, 1.5);
  const std::vector<double> logits(x.data(), x.data() + 17);
  std::uint64_t seed = 0;
  for (const double temperature : {0.5, 1.0, 2.0}) {
    for (const Index top_k : {0, 5}) {
      for (const double top_p : {0.8, 1.0}) {
        const sampling_options o{.temperature = temperature, .top_k = top_k, .top_p = top_p, .seed = ++seed};
        const std::vector<long double> p = distribution(logits, o);
        sampler draw(o);
        const auto counts = counts_of(17, draws, [&] { return draw(x.row(0)); });
        if (std::count(p.begin(), p.end(), 0.0L) > 15) continue;  // no degree of freedom
        EXPECT_LE(std::abs(chi_square_deviation(counts, std::vector<double>(p.begin(), p.end()))), sigmas)
            << "temperature " << temperature << ", top_k " << top_k << ", top_p " << top_p;
      }
    }
  }
}

TEST(Sampler, TakesTheLargestAtTemperatureZero) {
  sampler draw({.temperature = 0});
  EXPECT_EQ(draw(Eigen::RowVector4f(1, 3, 3, 2)), 1);
  EXPECT_EQ(linattn::greedy(Eigen::RowVector4f(1, 3, 3, 2)), 1);
  EXPECT_EQ(linattn::greedy(Eigen::RowVector2d(-infinity, -1e300)), 1);
  EXPECT_EQ(linattn::greedy(Eigen::Matrix<float, 1, 1>(-7.0F)), 0);
  // The smallest temperature that is not 0 shares among the largest.
  sampler cold({.temperature = std::numeric_limits<double>::denorm_min()});
  const auto counts = counts_of(4, 1 << 12, [&] { return cold(Eigen::RowVector4f(1, 3, 3, 2)); });
  EXPECT_LE(std::abs(chi_square_deviation(counts, {0, 0.5, 0.5, 0})), sigmas);
}

TEST(Sampler, DrawsTheSameEverywhere) {
  // Symbols of draws 0 ... 29, recorded once; logits are exact in float and double.
  row_vector<float> x(9);
  x << 0.5F, -1.25F, 2, 0, 0.75F, -3, 1.5F, 1.5F, -0.5F;
  const auto symbols = [&](const sampling_options& o) {
    sampler draw(o);
    std::string text;
    for (int i = 0; i < 30; ++i) text += static_cast<char>('0' + draw(x));
    return text;
  };
  EXPECT_EQ(symbols({.seed = 1}), "767647006722263476624762800273");
  EXPECT_EQ(symbols({.temperature = 0.7, .top_k = 5, .top_p = 0.9, .seed = 2}), "422472662727222666662676722626");
}

TEST(Sampler, IsAValueWithASeed) {
  const row_matrix<double> x = normal_matrix<double>(1, 50, 1);
  sampler draw({.seed = 3});
  for (int i = 0; i < 10; ++i) draw(x.row(0));
  sampler copy = draw;
  sampler other({.seed = 4});
  bool differs = false;
  for (int i = 0; i < 50; ++i) {
    const Index symbol = draw(x.row(0));
    EXPECT_EQ(copy(x.row(0)), symbol);
    differs = differs || other(x.row(0)) != symbol;
  }
  EXPECT_TRUE(differs);
}

TEST(Sampler, AllocatesNothingForTheSymbolsItHasRoomFor) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  const row_matrix<float> x = normal_matrix<float>(1, 300, 1);
  sampler draw({.top_k = 40, .top_p = 0.9}, 300);
  sampler grown({.top_p = 0.9});
  grown(x.row(0));
  const support::allocation_count count;
  for (int i = 0; i < 20; ++i) {
    draw(x.row(0));
    grown(x.row(0).leftCols(200 + i));
  }
  linattn::log_likelihood(x.row(0), 3);
  linattn::greedy(x.row(0));
  EXPECT_EQ(count.total(), 0);
}

TEST(Sampler, SaysWhatIsWrong) {
  const auto options = [](const sampling_options& o, Index symbols = 0) {
    return refusal([&] { const sampler draw(o, symbols); });
  };
  const std::string prefix = "linattn::sampler: ";
  EXPECT_EQ(options({}), "");
  EXPECT_EQ(options({.temperature = -0.5}), prefix + "temperature is -0.5, expected 0 or a finite number above");
  EXPECT_EQ(options({.temperature = nan}), prefix + "temperature is nan, expected 0 or a finite number above");
  EXPECT_EQ(options({.temperature = infinity}), prefix + "temperature is inf, expected 0 or a finite number above");
  EXPECT_EQ(options({.top_k = -1}), prefix + "top_k is -1, expected 0 for all, or more");
  for (const double p : {0.0, -1.0, 1.5, nan}) {
    EXPECT_TRUE(options({.top_p = p}).ends_with(", expected a share in (0, 1]")) << p;
  }
  EXPECT_EQ(options({}, -3), prefix + "room for -3 symbols is asked for");

  sampler draw({.seed = 9});
  sampler same = draw;
  const row_vector<float> none(0);
  EXPECT_EQ(refusal([&] { draw(none); }), prefix + "there are no logits");
  EXPECT_EQ(refusal([&] { draw(Eigen::RowVector3d(1, nan, 2)); }), prefix + "logit 1 of 3 is NaN");
  EXPECT_EQ(refusal([&] { draw(Eigen::RowVector2d(-infinity, -infinity)); }), prefix + "all of the 2 logits are -inf");
  EXPECT_EQ(refusal([&] { linattn::greedy(Eigen::RowVector2d(nan, 1)); }), "linattn::greedy: logit 0 of 2 is NaN");
  const row_matrix<float> x = normal_matrix<float>(1, 100, 1);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(draw(x.row(0)), same(x.row(0)));  // refusals used no random number
  EXPECT_EQ(refusal([&] { linattn::log_likelihood(x.row(0), 100); }),
            "linattn::log_likelihood: there is no symbol 100 among 100 logits");
  EXPECT_EQ(refusal([&] { linattn::log_likelihood(x.row(0), -1); }),
            "linattn::log_likelihood: there is no symbol -1 among 100 logits");
  row_vector<float> out(99);
  EXPECT_NE(refusal([&] { linattn::log_softmax(x.row(0), out); }), "");
}

// ---- likelihoods ----------------------------------------------------------------------------------------------------

TEST(LogSoftmax, IsThatOfLongDouble) {
  // ln n and the largest difference are rounded, each to a few ulp.
  constexpr double relative = 1e-14;
  for (const Index n : {1, 2, 17, 1000}) {
    for (const double sigma : {0.1, 5.0, 200.0}) {
      const row_matrix<double> x = normal_matrix<double>(1, n, std::uint64_t(n), sigma);
      row_matrix<long double> expected = x.cast<long double>();
      const long double largest = expected.maxCoeff();
      const long double log_sum = std::log((expected.array() - largest).exp().sum());
      expected = (expected.array() - largest - log_sum).matrix();
      row_vector<double> log_p(n);
      linattn::log_softmax(x.row(0), log_p);
      EXPECT_TRUE(support::close(log_p, expected, relative));
      for (Index i = 0; i < n; i += 3) EXPECT_EQ(linattn::log_likelihood(x.row(0), i), log_p[i]);
      row_vector<float> in_place = x.cast<float>();
      const double first = linattn::log_likelihood(in_place, 0);
      linattn::log_softmax(in_place, in_place);
      EXPECT_EQ(in_place[0], static_cast<float>(first));
    }
  }
}

TEST(LogSoftmax, OfNumbersThatAreNone) {
  const auto log_p = [](Eigen::RowVector3d x) {
    linattn::log_softmax(x, x);
    return x;
  };
  EXPECT_TRUE(support::all_nan(log_p({1, nan, 2})));
  EXPECT_TRUE(support::all_nan(log_p({nan, 1, 2})));
  EXPECT_TRUE(support::all_nan(log_p({infinity, nan, 2})));
  EXPECT_TRUE(support::all_nan(log_p({-infinity, -infinity, -infinity})));
  EXPECT_EQ(log_p({-infinity, 5, -infinity}), Eigen::RowVector3d(-infinity, 0, -infinity));
  EXPECT_EQ(log_p({infinity, 5, infinity}), Eigen::RowVector3d(-std::log(2.0), -infinity, -std::log(2.0)));
  EXPECT_EQ(log_p({1e308, -1e308, 0}), Eigen::RowVector3d(0, -infinity, -1e308));
}

// ---- the mixture of logistics ---------------------------------------------------------------------------------------

/// ln P_k(level), as it is written down, in long double.
long double reference_bin(Index level, Index levels, long double mean, long double raw_scale) {
  const auto softplus = [](long double x) { return std::max(x, 0.0L) + std::log1p(std::exp(-std::abs(x))); };
  const auto sigma = [](long double x) { return 1 / (1 + std::exp(-x)); };
  const long double scale = std::exp(std::max(raw_scale, -7.0L));
  const long double h = 1 / static_cast<long double>(levels - 1);
  const long double y = 2 * static_cast<long double>(level) * h - 1;
  if (level == 0) return -softplus(-(y - mean + h) / scale);
  if (level == levels - 1) return -softplus((y - mean - h) / scale);
  const long double p = sigma((y - mean + h) / scale) - sigma((y - mean - h) / scale);
  if (p > 1e-5L) return std::log(p);
  const long double middle = (y - mean) / scale;
  return middle - std::log(scale) - 2 * softplus(middle) + std::log(2 * h);
}

template <class T>
long double reference_log_likelihood(const row_vector<T>& row, Index level, Index levels) {
  const Index K = row.size() / 3;
  long double largest = -std::numeric_limits<long double>::infinity(), all = 0, there = 0;
  for (Index k = 0; k < K; ++k) largest = std::max(largest, static_cast<long double>(row[k]));
  long double most = -std::numeric_limits<long double>::infinity();
  std::vector<long double> terms;
  for (Index k = 0; k < K; ++k) {
    all += std::exp(static_cast<long double>(row[k]) - largest);
    terms.push_back(
        static_cast<long double>(row[k]) - largest +
        reference_bin(level, levels, static_cast<long double>(row[K + k]), static_cast<long double>(row[2 * K + k])));
    most = std::max(most, terms.back());
  }
  for (const long double term : terms) there += std::exp(term - most);
  return most + std::log(there) - std::log(all);
}

/// Logits, means in and a little outside [-1, 1], log-scales on both sides of -7.
template <class T>
row_vector<T> mixture_row(Index components, std::uint64_t seed) {
  row_vector<T> row(3 * components);
  row.head(components) = normal_matrix<T>(1, components, seed, 2).row(0);
  row.segment(components, components) = normal_matrix<T>(1, components, seed + 1, 0.7).row(0);
  row.tail(components) = normal_matrix<T>(1, components, seed + 2, 2).row(0).array() - T(3.5);
  return row;
}

template <class T>
void expect_reference_likelihoods(Index components, Index levels, std::uint64_t seed) {
  // A difference of sigmas is at least 1e-5 and off by an ulp of 1: 2e-11. Tails have no such cancellation.
  constexpr double bound = 3e-11;
  const mixture_of_logistics mixture(components, levels);
  const row_vector<T> row = mixture_row<T>(components, seed);
  ASSERT_EQ(mixture.parameters(), row.size());
  for (Index level = 0; level < levels; ++level) {
    const long double expected = reference_log_likelihood(row, level, levels);
    const double actual = mixture.log_likelihood(row, level);
    EXPECT_LE(std::abs(static_cast<long double>(actual) - expected),
              static_cast<long double>(bound) * std::max(1.0L, std::abs(expected)))
        << "level " << level << " of " << levels << ": " << actual << " instead of " << expected;
  }
}

TEST(MixtureOfLogistics, HasTheLikelihoodsOfItsFormula) {
  for (const Index components : {1, 3, 10}) {
    for (const Index levels : {2, 3, 16, 256}) {
      expect_reference_likelihoods<float>(components, levels, std::uint64_t(components * 1000 + levels));
      expect_reference_likelihoods<double>(components, levels, std::uint64_t(components * 1000 + levels + 500));
    }
  }
}

TEST(MixtureOfLogistics, HasFarTails) {
  const mixture_of_logistics one(1);
  const auto expect = [&](double mean, double raw_scale, Index level) {
    const row_vector<double> row = Eigen::RowVector3d(0.3, mean, raw_scale);
    const long double expected = reference_log_likelihood(row, level, 256);
    // The argument of a tail, (y - m) / s, is rounded; so is its logarithm, which it is.
    constexpr double relative = 1e-14;
    EXPECT_LE(std::abs(static_cast<long double>(one.log_likelihood(row, level)) - expected),
              static_cast<long double>(relative) * std::max(1.0L, std::abs(expected)))
        << mean << " " << raw_scale << " " << level;
    return one.log_likelihood(row, level);
  };
  // Thousands of scales away: probabilities that are no doubles, with logarithms that are.
  EXPECT_LT(expect(-1, -7, 255), -2180);
  EXPECT_LT(expect(1, -7, 0), -2180);
  EXPECT_LT(expect(-1, -7, 128), -1090);
  EXPECT_LT(expect(50, -7, 100), -50000);
  EXPECT_EQ(expect(-1, -7, 255), expect(-1, -7.5, 255));  // the clamp
  EXPECT_EQ(expect(-1, -7, 255), expect(-1, -1e30, 255));
  EXPECT_NE(expect(-1, -7, 255), expect(-1, -6.99, 255));
  expect(0, 700, 5);  // so wide that nothing is left between the outermost levels
  expect(0, 700, 0);
}

TEST(MixtureOfLogistics, AddsUpToOne) {
  // What the density in the middle, in place of bins of at most 1e-5, may be off by: the largest of them by about
  // itself, and with steep tails every next one by a smaller share.
  constexpr double of_substituted_bins = 1e-4;
  // Bins and tails telescope: rounding alone, where nothing is substituted.
  constexpr double rounding = 1e-13;
  for (const Index levels : {2, 16, 256}) {
    const mixture_of_logistics mixture(10, levels);
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      row_vector<double> row = mixture_row<double>(10, 10 * seed);
      double sum = 0;
      for (Index level = 0; level < levels; ++level) sum += std::exp(mixture.log_likelihood(row, level));
      EXPECT_NEAR(sum, 1, of_substituted_bins) << levels << " levels";
      row.segment(10, 10) *= 0.1;
      row.tail(10).setConstant(-1);
      sum = 0;
      for (Index level = 0; level < levels; ++level) sum += std::exp(mixture.log_likelihood(row, level));
      EXPECT_NEAR(sum, 1, rounding) << levels << " levels";
    }
  }
}

TEST(MixtureOfLogistics, DrawsWhatItsLikelihoodsSay) {
  constexpr Index draws = 1 << 16;
  for (const Index levels : {2, 16, 256}) {
    const mixture_of_logistics mixture(5, levels);
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      const row_vector<float> row = mixture_row<float>(5, 100 * seed + std::uint64_t(levels));
      std::vector<double> p;
      for (Index level = 0; level < levels; ++level) p.push_back(std::exp(mixture.log_likelihood(row, level)));
      random_stream random(seed);
      const auto counts = counts_of(std::size_t(levels), draws, [&] { return mixture.sample(row, random); });
      EXPECT_LE(std::abs(chi_square_deviation(counts, p)), sigmas) << levels << " levels, seed " << seed;
      EXPECT_EQ(random.drawn(), std::uint64_t(2 * draws));
    }
  }
}

// A scale that is clamped leaves a mean beside the edge of two levels to both.
TEST(MixtureOfLogistics, DrawsWithTheClampedScale) {
  const mixture_of_logistics one(1);
  const row_vector<double> row = Eigen::RowVector3d(0, 0.2 / 255, -20);
  std::vector<double> p;
  for (Index level = 0; level < 256; ++level) p.push_back(std::exp(one.log_likelihood(row, level)));
  ASSERT_LT(p[128], 0.75);
  random_stream random(5);
  const auto counts = counts_of(256, 1 << 12, [&] { return one.sample(row, random); });
  EXPECT_LE(std::abs(chi_square_deviation(counts, p)), sigmas);
}

TEST(MixtureOfLogistics, DrawsTheSameEverywhere) {
  const mixture_of_logistics mixture(2);
  row_vector<float> row(6);
  row << 0.5F, -0.25F, -0.5F, 0.75F, -2, -1.5F;
  random_stream random(11);
  std::vector<Index> levels(12);
  for (Index& level : levels) level = mixture.sample(row, random);
  EXPECT_EQ(levels, (std::vector<Index>{204, 214, 80, 229, 87, 51, 254, 43, 58, 255, 255, 255}));
  random.skip_to(4);
  EXPECT_EQ(mixture.sample(row, random), levels[2]);
}

TEST(MixtureOfLogistics, OfNumbersThatAreNone) {
  const mixture_of_logistics mixture(2);
  const auto row_of = [](double a, double b, double m, double s) {
    return (row_vector<double>(6) << a, b, m, 0.0, s, -3.0).finished();
  };
  random_stream random(1);
  for (const auto& row : {row_of(nan, 0, 0, -3), row_of(0, 0, nan, -3), row_of(0, 0, 0, nan)}) {
    EXPECT_TRUE(std::isnan(mixture.log_likelihood(row, 7)));
    EXPECT_TRUE(refusal([&] { mixture.sample(row, random); }).ends_with("is NaN"));
  }
  EXPECT_EQ(random.drawn(), 0U);
  // A component that does not occur says nothing; one infinitely far away or wide, its tails.
  const mixture_of_logistics one(1);
  const auto alone = row_of(-infinity, 0, 0.5, -3);
  EXPECT_EQ(mixture.log_likelihood(alone, 100), one.log_likelihood(Eigen::RowVector3d(0, 0, -3), 100));
  EXPECT_EQ(one.sample(Eigen::RowVector3d(0, infinity, -3), random), 255);
  EXPECT_EQ(one.sample(Eigen::RowVector3d(0, -infinity, -3), random), 0);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(one.sample(Eigen::RowVector3d(0, 0, infinity), random) % 255, 0);
  for (int i = 0; i < 10; ++i) {  // of both, the mean decides
    EXPECT_EQ(one.sample(Eigen::RowVector3d(0, infinity, infinity), random), 255);
    EXPECT_EQ(one.sample(Eigen::RowVector3d(0, -infinity, infinity), random), 0);
  }
  for (const double sign : {1.0, -1.0}) {
    EXPECT_EQ(one.log_likelihood(Eigen::RowVector3d(0, sign * infinity, -3), 100), -infinity) << sign;
    EXPECT_EQ(one.log_likelihood(Eigen::RowVector3d(0, sign * 1e308, -7), 100), -infinity) << sign;
  }
  EXPECT_TRUE(std::isnan(one.log_likelihood(Eigen::RowVector3d(-infinity, 0, -3), 100)));
}

TEST(MixtureOfLogistics, SaysWhatIsWrong) {
  EXPECT_EQ(refusal([] { const mixture_of_logistics mixture(0); }),
            "linattn::mixture_of_logistics: 0 components and 256 levels are asked for, at least 1 and 2 are needed");
  EXPECT_EQ(refusal([] { const mixture_of_logistics mixture(3, 1); }),
            "linattn::mixture_of_logistics: 3 components and 1 levels are asked for, at least 1 and 2 are needed");
  const mixture_of_logistics mixture(10);
  row_vector<float> row = mixture_row<float>(10, 1);
  random_stream random(1);
  EXPECT_EQ(refusal([&] { mixture.log_likelihood(row.head(29), 0); }),
            "linattn::mixture_of_logistics::log_likelihood: the row has 29 parameters, 10 components have 30");
  EXPECT_EQ(refusal([&] { mixture.log_likelihood(row, 256); }),
            "linattn::mixture_of_logistics::log_likelihood: there is no level 256 of 256");
  EXPECT_EQ(refusal([&] { mixture.sample(row.head(10), random); }),
            "linattn::mixture_of_logistics::sample: the row has 10 parameters, 10 components have 30");
  row.head(10).setConstant(-std::numeric_limits<float>::infinity());
  EXPECT_EQ(refusal([&] { mixture.sample(row, random); }),
            "linattn::mixture_of_logistics::sample: all of the 10 logits are -inf");
}

}  // namespace
