// The generator: published and golden values, the distribution of its draws, and that a draw is a pure function.
#include <gtest/gtest.h>

#include <linattn/detail/random.hpp>
#include <linattn/feature_maps/positive_random.hpp>
#include <linattn/feature_maps/random_fourier.hpp>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

using linattn::detail::inverse_normal;
using linattn::detail::natural_logarithm;
using linattn::detail::random_bits;
using linattn::detail::random_block;
using linattn::detail::random_normal;
using linattn::detail::random_uniform;

/// Seeds are fixed, so a statistic is one number for ever; it must lie within this many standard deviations, which one
/// generator in 16,000 misses by chance.
constexpr double sigmas = 4;

/// FNV-1a over the bits of draws: one changed bit in one draw changes it.
std::uint64_t hash_of_draws(std::uint64_t seed, std::uint64_t stream, std::uint64_t count) {
  std::uint64_t hash = 0xCBF29CE484222325;
  for (std::uint64_t i = 0; i < count; ++i) {
    hash = (hash ^ std::bit_cast<std::uint64_t>(random_normal(seed, stream, i))) * 0x100000001B3;
  }
  return hash;
}

TEST(Random, PublishedBlocks) {  // the known answers that come with Philox 4x32-10
  using block = std::array<std::uint32_t, 4>;
  EXPECT_EQ(random_block(0, 0, 0), (block{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}));
  EXPECT_EQ(random_block(~0ULL, ~0ULL, ~0ULL), (block{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}));
  EXPECT_EQ(random_block(0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3243F6A88),
            (block{0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}));
}

TEST(Random, BitsAreHalvesOfBlocks) {
  static_assert(random_bits(0, 0, 0) == 0xE169C58D6627E8D5, "usable in constant expressions");
  EXPECT_EQ(random_bits(0, 0, 1), 0x9B00DBD8BC57AC4CULL);
  EXPECT_NE(random_bits(0, 0, 2), random_bits(0, 0, 0));
  EXPECT_NE(random_bits(0, 1, 0), random_bits(0, 0, 0));
  EXPECT_NE(random_bits(1, 0, 0), random_bits(0, 0, 0));
}

TEST(Random, GoldenNormalDraws) {
#if defined(__FAST_MATH__)
  GTEST_SKIP() << "-ffast-math reorders the sums: draws differ in their last bits";
#endif
  // Must come out bit for bit with every compiler and every set of flags but -ffast-math.
  EXPECT_EQ(random_normal(1, 0, 0), 0x1.407827c9b8c2ap+0);
  EXPECT_EQ(random_normal(1, 0, 1), 0x1.1d3b4d4d8d10ep-1);
  EXPECT_EQ(random_normal(1, 0, 2), 0x1.256344ddbc09cp+0);
  EXPECT_EQ(random_normal(1, 0, 3), 0x1.9b7ed635d87b2p-2);
  EXPECT_EQ(random_normal(1, 0, 4), 0x1.23064f5e93eaap-3);
  EXPECT_EQ(random_normal(1, 0, 5), 0x1.6a7445015d132p+0);
  EXPECT_EQ(hash_of_draws(42, 0, 100000), 0x89FFF98B29A81D1AULL);
  EXPECT_EQ(hash_of_draws(42, 1, 100000), 0x246370C7AC83E28AULL);
}

TEST(Random, UniformDrawsAreInsideTheUnitInterval) {
  // (2^52 - 1 + 1/2) 2^-52 and (0 + 1/2) 2^-52 are doubles: neither end rounds to 0 or 1.
  static_assert((4503599627370495.0 + 0.5) * 0x1p-52 < 1.0);
  static_assert((0.0 + 0.5) * 0x1p-52 > 0.0);
  for (std::uint64_t i = 0; i < 10000; ++i) {
    const double u = random_uniform(3, 0, i);
    ASSERT_GT(u, 0.0);
    ASSERT_LT(u, 1.0);
  }
}

TEST(Random, UniformDrawsAreUniform) {
  constexpr std::uint64_t draws = 1U << 18U;
  constexpr std::size_t cells = 256;
  for (const std::uint64_t seed : {0ULL, 1ULL, 42ULL, 0xFFFFFFFFFFFFFFFFULL}) {
    std::vector<double> counts(cells, 0.0);
    for (std::uint64_t i = 0; i < draws; ++i) {
      counts[static_cast<std::size_t>(random_uniform(seed, 0, i) * double(cells))] += 1;
    }
    const double expected = double(draws) / double(cells);
    double chi_squared = 0;
    for (const double count : counts) chi_squared += (count - expected) * (count - expected) / expected;
    EXPECT_NEAR(chi_squared, double(cells - 1), sigmas * std::sqrt(2.0 * double(cells - 1))) << "seed " << seed;
  }
}

TEST(Random, NormalDrawsHaveNormalMoments) {
  constexpr std::uint64_t draws = 1U << 16U;
  for (const std::uint64_t seed : {0ULL, 1ULL, 42ULL, 0xFFFFFFFFFFFFFFFFULL}) {
    double sums[4] = {};
    double lagged = 0;
    double across_streams = 0;
    double across_seeds = 0;
    double last = 0;
    for (std::uint64_t i = 0; i < draws; ++i) {
      const double x = random_normal(seed, 0, i);
      sums[0] += x;
      sums[1] += x * x;
      sums[2] += x * x * x;
      sums[3] += x * x * x * x;
      lagged += x * last;
      across_streams += x * random_normal(seed, 1, i);
      across_seeds += x * random_normal(seed + 1, 0, i);
      last = x;
    }
    // E x^n = 0, 1, 0, 3, and the variances of x, x^2, x^3, x^4 and x y are 1, 2, 15, 96 and 1.
    const double root = std::sqrt(double(draws));
    EXPECT_NEAR(sums[0] / double(draws), 0, sigmas * std::sqrt(1.0) / root) << "seed " << seed;
    EXPECT_NEAR(sums[1] / double(draws), 1, sigmas * std::sqrt(2.0) / root) << "seed " << seed;
    EXPECT_NEAR(sums[2] / double(draws), 0, sigmas * std::sqrt(15.0) / root) << "seed " << seed;
    EXPECT_NEAR(sums[3] / double(draws), 3, sigmas * std::sqrt(96.0) / root) << "seed " << seed;
    EXPECT_NEAR(lagged / double(draws), 0, sigmas / root) << "seed " << seed;
    EXPECT_NEAR(across_streams / double(draws), 0, sigmas / root) << "seed " << seed;
    EXPECT_NEAR(across_seeds / double(draws), 0, sigmas / root) << "seed " << seed;
  }
}

TEST(Random, LogarithmAgreesWithLongDouble) {
  // One rounding of the result, one of its largest term, and the polynomial's.
  constexpr long double rounding = 4 * 0x1p-53L;
  for (std::uint64_t i = 0; i < 20000; ++i) {
    const double u = random_uniform(5, 0, i);
    for (const double x : {u, u * 0x1p-50, 1.0 - u * 0x1p-20, 0.5 + u}) {
      const long double expected = std::log(static_cast<long double>(x));
      ASSERT_LE(std::abs(natural_logarithm(x) - expected), rounding * std::max(1.0L, std::abs(expected))) << x;
    }
  }
  EXPECT_EQ(natural_logarithm(1.0), 0.0);
}

TEST(Random, InverseNormalInvertsTheDistributionFunction) {
  // The polynomials' stated errors, with the rounding of the logarithm and of Horner's rule on top.
  constexpr long double in_the_centre = 2e-14L;
  constexpr long double in_the_tails = 5e-12L;
  const auto relative_error = [](double p) {
    const long double x = inverse_normal(p);
    const long double tail = std::min<long double>(p, 1.0L - p);
    const long double found = std::erfc(std::abs(x) / std::sqrt(2.0L)) / 2;  // the distribution function at -|x|
    const long double density = std::exp(-x * x / 2) / std::sqrt(2 * std::acos(-1.0L));
    return std::abs(found - tail) / (density * std::abs(x));
  };
  for (std::uint64_t i = 0; i < 20000; ++i) {
    const double p = random_uniform(6, 0, i);
    ASSERT_LE(relative_error(p), p > 0.002 && p < 0.998 ? in_the_centre : in_the_tails) << p;
    ASSERT_LE(relative_error(p * 0x1p-10), in_the_tails) << p * 0x1p-10;
    const double smallest = (std::floor(1000 * p) + 0.5) * 0x1p-52;  // what the smallest 1000 integers turn into
    ASSERT_LE(relative_error(smallest), in_the_tails) << smallest;
    ASSERT_EQ(inverse_normal(1 - p), -inverse_normal(p)) << p;  // both are multiples of 2^-53
  }
  EXPECT_LE(relative_error(0x1p-53), in_the_tails);
  EXPECT_LE(relative_error(1 - 0x1p-53), in_the_tails);
  EXPECT_EQ(inverse_normal(0.5), 0.0);
}

TEST(Random, ProjectionsAreTheDraws) {
  constexpr Eigen::Index head_dim = 5;
  constexpr Eigen::Index features = 37;
  const linattn::positive_random<double> map(head_dim, features, 42);
  const linattn::positive_random<float> single(head_dim, features, 42);
  const linattn::random_fourier<float> fourier(head_dim, 2 * features, 42);
  const auto w = map.projection();
  ASSERT_EQ(w.rows(), features);
  ASSERT_EQ(w.cols(), head_dim);
  for (Eigen::Index c = 0; c < features; ++c) {
    for (Eigen::Index d = 0; d < head_dim; ++d) {
      const double draw = random_normal(42, 0, static_cast<std::uint64_t>(c * head_dim + d));
      EXPECT_EQ(w(c, d), draw);
      EXPECT_EQ(single.projection()(c, d), static_cast<float>(draw));
      EXPECT_EQ(fourier.projection()(c, d), static_cast<float>(draw));
    }
  }
}

TEST(Random, MoreFeaturesKeepTheFirstDirections) {
  const linattn::positive_random<float> few(8, 3, 7);
  const linattn::positive_random<float> many(8, 100, 7);
  EXPECT_EQ(few.projection(), many.projection().topRows(3));
}

}  // namespace
