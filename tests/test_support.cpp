// The tests' own tools: a comparison that lets a NaN pass, or a counter that sees nothing, would make every other test
// worthless.
#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/oracle.hpp"
#include "support/oracle_for.hpp"
#include "support/reference_data.hpp"
#include "support/sentinel.hpp"

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <new>
#include <string>

namespace {

using support::row_matrix;
using support::tolerance;

template <class T>
constexpr T nan = std::numeric_limits<T>::quiet_NaN();
template <class T>
constexpr T infinity = std::numeric_limits<T>::infinity();

template <class T>
row_matrix<T> sample() {
  row_matrix<T> x(2, 3);
  x << T(1), T(-2), T(0.5), T(0.25), T(3), T(-4);
  return x;
}

template <class T>
class Compare : public testing::Test {};
using float_types = testing::Types<float, double>;
TYPED_TEST_SUITE(Compare, float_types);

TYPED_TEST(Compare, EqualMatricesPass) {
  const auto x = sample<TypeParam>();
  EXPECT_TRUE(support::close(x, x, 0));
  EXPECT_TRUE(support::within_ulps(x, x, 0));
  EXPECT_TRUE(support::same_bits(x, x));
  EXPECT_EQ(support::relative_rms_error(x, x), 0);
  EXPECT_TRUE(support::all_finite(x));
}

TYPED_TEST(Compare, ANonFiniteValueOnOneSideFails) {
  using T = TypeParam;
  const auto x = sample<T>();
  for (const T bad : {nan<T>, infinity<T>, -infinity<T>}) {
    for (Eigen::Index i = 0; i < x.size(); ++i) {
      auto y = x;
      y.data()[i] = bad;
      EXPECT_FALSE(support::close(y, x, 1e30)) << bad << " at " << i;
      EXPECT_FALSE(support::close(x, y, 1e30)) << bad << " at " << i;
      EXPECT_FALSE(support::within_ulps(y, x, 1e30)) << bad << " at " << i;
      EXPECT_FALSE(support::within_ulps(x, y, 1e30)) << bad << " at " << i;
      EXPECT_FALSE(support::same_bits(y, x)) << bad << " at " << i;
      EXPECT_FALSE(support::all_finite(y)) << bad << " at " << i;
      EXPECT_FALSE(support::close(y, x.template cast<long double>(), 1e30)) << bad << " at " << i;
      EXPECT_FALSE(support::close(x, y.template cast<long double>(), 1e30)) << bad << " at " << i;
    }
  }
}

TYPED_TEST(Compare, NaNEverywhereOnOneSideFails) {
  using T = TypeParam;
  const auto x = sample<T>();
  const row_matrix<T> bad = row_matrix<T>::Constant(2, 3, nan<T>);
  EXPECT_FALSE(support::close(bad, x, 1e30));
  EXPECT_FALSE(support::close(x, bad, 1e30));
  EXPECT_FALSE(support::close(bad, row_matrix<T>::Zero(2, 3), 1e30));
  EXPECT_FALSE(support::within_ulps(bad, row_matrix<T>::Zero(2, 3), 1e30));
  EXPECT_FALSE(support::all_zero(bad));
  EXPECT_TRUE(support::all_nan(bad));
  EXPECT_FALSE(support::all_nan(x));
}

TYPED_TEST(Compare, DifferentNonFiniteValuesFailAndEqualOnesPass) {
  using T = TypeParam;
  auto x = sample<T>(), y = sample<T>();
  x(0, 1) = infinity<T>;
  for (const T other : {nan<T>, -infinity<T>}) {
    y(0, 1) = other;
    EXPECT_FALSE(support::close(x, y, 1e30));
    EXPECT_FALSE(support::within_ulps(x, y, 1e30));
  }
  y(0, 1) = infinity<T>;
  EXPECT_TRUE(support::close(x, y, 0));
  x(0, 1) = y(0, 1) = nan<T>;
  EXPECT_TRUE(support::close(x, y, 0));
  x(1, 1) += T(1);
  EXPECT_FALSE(support::close(x, y, 1e-3)) << "a NaN on both sides must not hide the rest";
}

TYPED_TEST(Compare, RelativeRmsIsTheQuotientOfNorms) {
  using T = TypeParam;
  const auto x = sample<T>();
  auto y = x;
  y(1, 2) += T(0.5);
  const double expected = 0.5 / std::sqrt(1 + 4 + 0.25 + 0.0625 + 9 + 16);
  constexpr double rounding_of_the_expectation = 1e-12;
  EXPECT_NEAR(support::relative_rms_error(y, x), expected, rounding_of_the_expectation);
  EXPECT_TRUE(support::close(y, x, expected * 1.001));
  EXPECT_FALSE(support::close(y, x, expected * 0.999));
}

TYPED_TEST(Compare, NothingIsCloseToZeroButZero) {
  using T = TypeParam;
  const row_matrix<T> zero = row_matrix<T>::Zero(2, 2);
  row_matrix<T> tiny = zero;
  tiny(1, 0) = std::numeric_limits<T>::denorm_min();
  EXPECT_FALSE(support::close(tiny, zero, 1e30));
  EXPECT_TRUE(support::close(zero, zero, 0));
  EXPECT_TRUE(support::all_zero(zero));
  EXPECT_TRUE(support::all_zero(-zero));
  EXPECT_FALSE(support::all_zero(tiny));
  EXPECT_FALSE(support::same_bits(row_matrix<T>(-zero), zero)) << "the sign of a zero is a bit";
}

TYPED_TEST(Compare, UlpsAreThoseOfTheActualType) {
  using T = TypeParam;
  auto x = sample<T>();
  auto y = x;
  y(1, 1) = std::nextafter(x(1, 1), infinity<T>);
  EXPECT_EQ(support::max_ulp_error(y, x), 1);
  y(0, 0) = std::nextafter(std::nextafter(x(0, 0), infinity<T>), infinity<T>);
  EXPECT_EQ(support::max_ulp_error(y, x.template cast<long double>()), 2);
  EXPECT_FALSE(support::within_ulps(y, x, 1));
  EXPECT_TRUE(support::within_ulps(y, x, 2));
  y = x;
  x(0, 2) = T(0);
  y(0, 2) = std::numeric_limits<T>::denorm_min();
  EXPECT_EQ(support::max_ulp_error(y, x), 1) << "next to zero an ulp is the smallest subnormal";
}

TYPED_TEST(Compare, AValueThatRoundsToInfinityMayBeInfinityInUlpsOnly) {
  using T = TypeParam;
  row_matrix<T> actual(1, 1);
  actual(0, 0) = infinity<T>;
  row_matrix<long double> expected(1, 1);
  expected(0, 0) = 4.0L * std::numeric_limits<T>::max();
  EXPECT_TRUE(support::within_ulps(actual, expected, 0));
  EXPECT_FALSE(support::close(actual, expected, 1e30));
}

TYPED_TEST(Compare, ShapesMustAgree) {
  using T = TypeParam;
  const auto x = sample<T>();
  const row_matrix<T> turned = x.transpose();
  const auto result = support::close(turned, x, 1e30);
  EXPECT_FALSE(result);
  EXPECT_STREQ(result.message(), "shape (3, 2) instead of (2, 3)");
  EXPECT_FALSE(support::within_ulps(turned, x, 1e30));
  EXPECT_FALSE(support::same_bits(turned, x));
  EXPECT_TRUE(support::close(row_matrix<T>(0, 3), row_matrix<T>(0, 3), 0));
}

TYPED_TEST(Compare, FailuresNameTheWorstElement) {
  using T = TypeParam;
  const auto x = sample<T>();
  auto y = x;
  y(0, 1) = T(-2.25);
  y(1, 0) = T(0.5);
  y(1, 2) = T(-3);
  const std::string text = support::close(y, x, 1e-3).message();
  EXPECT_NE(text.find("worst at (1, 2): -3 instead of -4"), std::string::npos) << text;
  y(0, 0) = nan<T>;
  const std::string text_of_nan = support::close(y, x, 1e-3).message();
  EXPECT_NE(text_of_nan.find("worst at (0, 0): nan instead of 1"), std::string::npos) << text_of_nan;
}

TYPED_TEST(Compare, ClassifiesByBits) {
  using T = TypeParam;
  using support::classify;
  using support::number;
  for (const T x : {T(0), T(-0.0), T(1), std::numeric_limits<T>::max(), std::numeric_limits<T>::denorm_min()}) {
    EXPECT_EQ(classify(x), number::finite);
    EXPECT_EQ(classify(static_cast<long double>(x)), number::finite);
  }
  EXPECT_EQ(classify(nan<T>), number::nan);
  EXPECT_EQ(classify(infinity<T>), number::plus_infinity);
  EXPECT_EQ(classify(-infinity<T>), number::minus_infinity);
  EXPECT_EQ(classify(nan<long double>), number::nan);
  EXPECT_EQ(classify(infinity<long double>), number::plus_infinity);
  EXPECT_EQ(classify(-infinity<long double>), number::minus_infinity);
  EXPECT_EQ(classify(std::numeric_limits<long double>::max()), number::finite);
  EXPECT_EQ(classify(Eigen::half(infinity<float>)), number::plus_infinity);
  EXPECT_EQ(classify(Eigen::bfloat16(nan<float>)), number::nan);
}

// ---- inputs
// ----------------------------------------------------------------------------------------------------------

TEST(Inputs, TheSameSeedGivesTheSameBitsOnEveryCompiler) {
  support::random_bits bits(7);
  EXPECT_EQ(bits.next(), 13309856274357028511ULL);
  EXPECT_EQ(bits.next(), 14614310455841013470ULL);
  const auto x = support::normal_matrix<double>(1, 4, 7);
  EXPECT_EQ(x(0, 0), -0x1.96910493ec166p-2);
  EXPECT_EQ(x(0, 1), 0x1.19b9e4d6ae55cp+0);
  EXPECT_EQ(x(0, 2), 0x1.6736e0ba081d5p-1);
  EXPECT_EQ(x(0, 3), -0x1.9832340e9f812p-2);
}

TEST(Inputs, NormalNumbersHaveTheMomentsAndQuantilesOfTheNormalDistribution) {
  constexpr Eigen::Index n = 400000;
  const auto x = support::normal_matrix<double>(1, n, 1);
  const double count = static_cast<double>(n);
  // Five standard deviations of each estimate; the seed is fixed, so this cannot fail by chance.
  const double five_sigma = 5 / std::sqrt(count);
  EXPECT_NEAR(x.mean(), 0, five_sigma);
  EXPECT_NEAR(x.array().square().mean(), 1, five_sigma * std::sqrt(2.0));
  EXPECT_NEAR(x.array().cube().mean(), 0, five_sigma * std::sqrt(15.0));
  EXPECT_NEAR(x.array().pow(4).mean(), 3, five_sigma * std::sqrt(96.0));
  for (const double bound : {0.1, 0.5, 1.0, 1.5, 2.0, 3.0}) {
    const double share = static_cast<double>((x.array().abs() < bound).count()) / count;
    const double p = std::erf(bound / std::sqrt(2.0));
    EXPECT_NEAR(share, p, five_sigma * std::sqrt(p * (1 - p))) << bound;
  }
}

TEST(Inputs, SeedsDifferAndMatricesOfOneTestAreDistinct) {
  const support::attention_inputs<float> a(5, 6, 4, 1), b(5, 6, 4, 2);
  EXPECT_FALSE(support::bitwise_equal(a.q, b.q));
  EXPECT_FALSE(support::bitwise_equal(a.q, a.k));
  EXPECT_FALSE(support::bitwise_equal(a.v, b.q.leftCols(4)));
}

TEST(Inputs, UniformNumbersStayInsideTheirInterval) {
  const auto x = support::uniform_matrix<double>(100, 100, 3, -2, 5);
  EXPECT_GT(x.minCoeff(), -2);
  EXPECT_LT(x.maxCoeff(), 5);
  const double five_sigma_of_the_mean = 5 * 7 / std::sqrt(12.0) / 100;
  EXPECT_NEAR(x.mean(), 1.5, five_sigma_of_the_mean);
}

// ---- the oracle
// ------------------------------------------------------------------------------------------------------

constexpr double long_double_rounding = 1e-16;  // of sums of a few dozen terms at 2^-64 each

TEST(Oracle, TokenLoopEqualsPairsOfTokens) {
  const support::attention_inputs<double> x(11, 11, 2 * 5, 2 * 3, 4);
  const auto w = support::normal_matrix<long double>(7, 5, 9);
  for (const auto& map : {support::oracle_elu_plus_one(), support::oracle_identity(), support::oracle_exponential(),
                          support::oracle_positive_random(w), support::oracle_random_fourier(w)}) {
    for (const bool causal : {false, true}) {
      for (const bool normalize : {false, true}) {
        support::oracle_options options{2, causal, 0.7L, normalize, {}, 0};
        const auto first = support::oracle_recurrent(map, x.k, x.q, x.v, options);
        const auto loop = support::oracle_recurrent(map, x.q, x.k, x.v, options, &first.state);
        const auto pairs = support::oracle_quadratic(map, x.q, x.k, x.v, options, &first.state);
        EXPECT_TRUE(support::close(loop.out, pairs.out, long_double_rounding));
        EXPECT_TRUE(support::close(loop.denominators, pairs.denominators, long_double_rounding));
      }
    }
  }
}

TEST(Oracle, IsRightWhereTheAnswerIsKnown) {
  row_matrix<double> q(1, 2), k(2, 2), v(2, 1);
  q << 1, -1;
  k << 0, 2, 1, -2;
  v << 10, 20;
  // elu + 1: phi(q) = (2, 1/e), phi(k) = (1, 3), (2, e^-2).
  const long double first = 2 + 3 * std::exp(-1.0L), second = 4 + std::exp(-3.0L);
  const auto r = support::oracle_recurrent(support::oracle_elu_plus_one(), q, k, v, {});
  row_matrix<long double> expected(1, 1);
  expected << (first * 10 + second * 20) / (first + second);
  EXPECT_TRUE(support::close(r.out, expected, long_double_rounding));
  EXPECT_EQ(r.state.z[0][0], 3);
  EXPECT_EQ(r.state.s[0](0, 0), 50);
}

TEST(Oracle, GuardsTheDenominatorAsTheLibrarySays) {
  row_matrix<double> q(1, 2), k(1, 2), v(1, 1);
  q << 1, -1;
  k << 1, 1;
  v << 3;
  const auto out = [&](support::oracle_denominator guard) {
    return support::oracle_recurrent(support::oracle_identity(), q, k, v, {1, false, 1, true, guard, 0}).out(0, 0);
  };
  EXPECT_EQ(out({}), 0) << "0/0 = 0";
  EXPECT_EQ(out(support::oracle_for(linattn::denominator_policy::add(0.5))), 0);
  k << 1, 3;  // q.k = -2
  EXPECT_EQ(out({}), 3);
  EXPECT_EQ(out(support::oracle_for(linattn::denominator_policy::add(0.5))), 4);
  EXPECT_EQ(out(support::oracle_for(linattn::denominator_policy::clamp(0.5))), -12);
}

TEST(Oracle, MapsKeepNaN) {
  LINATTN_NEEDS_NAN();
  support::wide_vector x(2);
  x << nan<long double>, 1;
  for (const auto& map : {support::oracle_elu_plus_one(), support::oracle_identity(), support::oracle_relu(),
                          support::oracle_squared_relu(), support::oracle_exponential()}) {
    const support::wide_vector phi = map.keys(x, 0, 0);
    EXPECT_EQ(support::classify(phi[0]), support::number::nan);
    EXPECT_EQ(support::classify(phi[1]), support::number::finite);
  }
}

TEST(Oracle, RandomMapsEstimateTheSoftmaxKernel) {
  constexpr Eigen::Index head_dim = 4, features = 20000;
  const auto w = support::normal_matrix<long double>(features, head_dim, 5);
  const support::wide_vector q = support::normal_matrix<long double>(1, head_dim, 6, 0.5);
  const support::wide_vector k = support::normal_matrix<long double>(1, head_dim, 7, 0.5);
  const long double kernel = std::exp(q.dot(k) / 2);  // sqrt(D) = 2
  constexpr double five_sigma = 0.05;                 // relative deviation of one sample < 1.4 at these sizes
  for (const auto& map : {support::oracle_positive_random(w), support::oracle_random_fourier(w)}) {
    const long double estimate = map.queries(q, 0, 0).dot(map.keys(k, 0, 0));
    EXPECT_NEAR(static_cast<double>(estimate / kernel), 1, five_sigma);
  }
}

// ---- reference data
// --------------------------------------------------------------------------------------------------

TEST(ReferenceData, ReadsEveryCase) {
  for (const char* name : {"ft_causal_03", "ft_noncausal_02", "ft_recurrent_02", "softmax_causal_02_grad",
                           "softmax_noncausal_07_allmasked_grad"}) {
    const auto c = support::reference_case::load(name);
    const auto q = c.tokens<float>("q", 0);
    EXPECT_EQ(q.rows(), static_cast<Eigen::Index>(c.number("N"))) << name;
    EXPECT_EQ(q.cols(), static_cast<Eigen::Index>(c.number("H") * c.number("dk"))) << name;
    EXPECT_TRUE(support::all_finite(q)) << name;
    EXPECT_EQ(c.tokens<double>("o", 0).cols(), static_cast<Eigen::Index>(c.number("H") * c.number("dv"))) << name;
  }
}

TEST(ReferenceData, SlicesBatchAndHead) {
  const auto c = support::reference_case::load("ft_recurrent_02");
  const auto& s = c.array("S");
  const auto block = c.head<double>("S", 1, 2);
  ASSERT_EQ(block.rows(), s.shape[2]);
  ASSERT_EQ(block.cols(), s.shape[3]);
  EXPECT_EQ(block(0, 1), s.values[std::size_t((1 * s.shape[1] + 2) * s.shape[2] * s.shape[3] + 1)]);
  EXPECT_EQ(c.head<double>("Z", 0, 0).rows(), 1);
  EXPECT_THROW(c.head<double>("Z", 0, 3), std::runtime_error);
  EXPECT_THROW(c.tokens<double>("q", 2), std::runtime_error);
  EXPECT_THROW(c.tokens<double>("Z", 0), std::runtime_error);
}

TEST(ReferenceData, PacksWhateverFollowsThePosition) {
  const auto c = support::reference_case::load("fla_gateddelta_02_grad");
  EXPECT_EQ(c.packed<double>("q", 1), c.tokens<double>("q", 1));
  const auto& g = c.array("g");
  const auto packed = c.packed<double>("g", 1);
  ASSERT_EQ(packed.rows(), g.shape[1]);
  ASSERT_EQ(packed.cols(), g.shape[2]);
  EXPECT_EQ(packed(2, 1), g.values[std::size_t((1 * g.shape[1] + 2) * g.shape[2] + 1)]);
  EXPECT_THROW(c.packed<double>("g", 2), std::runtime_error);
  EXPECT_EQ(c.row<double>("g").cols(), Eigen::Index(g.values.size()));
  EXPECT_EQ(c.text("update_rule"), "gated_delta (per head)");
  EXPECT_THROW(c.text("no such key"), std::runtime_error);
  EXPECT_THROW(support::reference_case::load("lightning_orig_01").packed<double>("slopes", 0), std::runtime_error);
}

/// A folder of one's own, gone at the end.
class temporary_case {
 public:
  temporary_case() {
    std::string pattern = testing::TempDir() + "linattn_case_XXXXXX";
    m_folder = mkdtemp(pattern.data());
    write("manifest.txt", "x f32 2 1 x.bin\n");
    write("case.txt", "eps=1e-6\nscale=none\n");
    write("x.bin", std::string("\0\0\x80\x3f\0\0\0\xc0", 8));  // 1, -2
  }
  ~temporary_case() {
    for (const char* name : {"manifest.txt", "case.txt", "x.bin"}) std::remove((m_folder + "/" + name).c_str());
    rmdir(m_folder.c_str());
  }
  void write(const char* name, const std::string& content) const {
    std::ofstream(m_folder + "/" + name, std::ios::binary) << content;
  }
  /// What is wrong with it, "" when nothing.
  std::string complaint() const {
    try {
      const support::reference_case c(m_folder);
      return "";
    } catch (const std::runtime_error& error) {
      return std::string(error.what()).substr(m_folder.size() + 1);
    }
  }
  const std::string& folder() const { return m_folder; }

 private:
  std::string m_folder;
};

TEST(ReferenceData, ReadsLittleEndianFloats) {
  const temporary_case files;
  const support::reference_case c(files.folder());
  EXPECT_EQ(c.array("x").values, (std::vector<double>{1, -2}));
  EXPECT_EQ(c.number("eps"), 1e-6);
  EXPECT_THROW(c.number("scale"), std::runtime_error);
  EXPECT_THROW(c.number("seed"), std::runtime_error);
  EXPECT_THROW(c.array("y"), std::runtime_error);
  EXPECT_FALSE(c.has("y"));
}

TEST(ReferenceData, SaysWhatIsWrongWithABadFile) {
  const temporary_case files;
  EXPECT_EQ(files.complaint(), "");
  files.write("x.bin", "1234567");
  EXPECT_EQ(files.complaint(), "x.bin holds 7 bytes, its manifest says 8");
  files.write("x.bin", "123456789");
  EXPECT_EQ(files.complaint(), "x.bin holds 9 bytes, its manifest says 8");
  files.write("manifest.txt", "x f16 2 1 x.bin\n");
  EXPECT_EQ(files.complaint(), "manifest.txt has the dtype 'f16', not f32 or f64");
  files.write("manifest.txt", "x f32 2 one x.bin\n");
  EXPECT_EQ(files.complaint(), "manifest.txt has the dimension 'one', not a number");
  files.write("manifest.txt", "x f32 x.bin\n");
  EXPECT_EQ(files.complaint(), "manifest.txt has a line that is not 'name dtype dim0 ... file': x f32 x.bin");
  files.write("manifest.txt", "x f32 2 y.bin\n");
  EXPECT_EQ(files.complaint(), "y.bin cannot be read");
  files.write("manifest.txt", "\n");
  EXPECT_EQ(files.complaint(), "manifest.txt names no array");
  EXPECT_THROW(support::reference_case::load("no_such_case"), std::runtime_error);
}

// ---- allocations
// -----------------------------------------------------------------------------------------------------

/// Hides a pointer from the optimiser, which may otherwise remove a matching pair of calls.
void* volatile keep;

TEST(Allocations, EveryWayToTheHeapIsSeen) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  const auto seen = [](auto&& get, auto&& give_back) {
    const support::allocation_count count;
    keep = get();
    const long allocations = count.allocations();
    give_back(keep);
    EXPECT_EQ(count.frees(), 1);
    EXPECT_EQ(count.total(), allocations + 1);
    return allocations;
  };
  const auto release = [](void* p) { std::free(p); };
  EXPECT_EQ(seen([] { return std::malloc(10); }, release), 1) << "malloc";
  EXPECT_EQ(seen([] { return std::calloc(3, 10); }, release), 1) << "calloc";
  EXPECT_EQ(seen([] { return std::aligned_alloc(64, 128); }, release), 1) << "aligned_alloc";
  EXPECT_EQ(seen([] { return memalign(64, 128); }, release), 1) << "memalign";
  EXPECT_EQ(seen(
                []() -> void* {
                  void* p = nullptr;
                  return posix_memalign(&p, 64, 100) == 0 ? p : nullptr;
                },
                release),
            1)
      << "posix_memalign";
  EXPECT_EQ(seen(
                [] {
                  keep = std::malloc(10);
                  return std::realloc(keep, 100000);
                },
                release),
            2)
      << "malloc, then realloc";
  EXPECT_EQ(seen([] { return ::operator new(10); }, [](void* p) { ::operator delete(p); }), 1) << "operator new";
  EXPECT_EQ(seen([] { return ::operator new[](10); }, [](void* p) { ::operator delete[](p); }), 1) << "operator new[]";
  EXPECT_EQ(seen([] { return ::operator new(10, std::nothrow); }, [](void* p) { ::operator delete(p); }), 1)
      << "operator new(nothrow)";
  EXPECT_EQ(seen([] { return ::operator new(10, std::align_val_t(64)); },
                 [](void* p) { ::operator delete(p, std::align_val_t(64)); }),
            1)
      << "operator new(align_val_t)";
}

TEST(Allocations, MemoryComesAlignedAndZeroedAsAsked) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  for (const std::size_t alignment : {std::size_t(16), std::size_t(64), std::size_t(4096)}) {
    void* a = std::aligned_alloc(alignment, alignment);
    void* b = nullptr;
    ASSERT_EQ(posix_memalign(&b, alignment, 100), 0);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a) % alignment, 0u);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b) % alignment, 0u);
    std::free(a);
    std::free(b);
  }
  void* p = nullptr;
  EXPECT_EQ(posix_memalign(&p, 3, 10), EINVAL);
  auto* zeros = static_cast<unsigned char*>(std::calloc(100, 10));
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(zeros[i], 0);
  std::free(zeros);
}

TEST(Allocations, AProductOver128KiBIsSeen) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  const Eigen::MatrixXf a = support::normal_matrix<float>(300, 300, 1);
  Eigen::MatrixXf out(300, 300);
  const support::allocation_count count;
  out.noalias() = a * a;  // 360,000 bytes an operand: its packed blocks leave the stack
  EXPECT_GT(count.allocations(), 0);
}

TEST(Allocations, NoneIsSeenWhereThereIsNone) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  const Eigen::MatrixXf a = support::normal_matrix<float>(64, 64, 1);
  Eigen::MatrixXf out(64, 64);
  const support::allocation_count count;
  out.noalias() = a * a;
  out = out + a;
  EXPECT_EQ(count.total(), 0);
}

// ---- sentinels
// -------------------------------------------------------------------------------------------------------

TEST(Sentinels, ANeighbourOverwrittenIsNoticedOnEverySide) {
  for (const Eigen::Index margin : {1, 3}) {
    support::framed<float> out(4, 5, margin);
    EXPECT_TRUE(out.untouched());
    out.matrix().setConstant(1);
    EXPECT_TRUE(out.frame_intact());
    EXPECT_FALSE(out.untouched());
    float* const first = &out.matrix()(0, 0);
    const Eigen::Index stride = out.matrix().outerStride();
    for (const Eigen::Index offset :
         {Eigen::Index(-1), Eigen::Index(5), -stride, 4 * stride, 2 * stride + 5, 3 * stride - 1, 3 * stride + 5}) {
      const float before = first[offset];
      first[offset] = nan<float>;
      EXPECT_FALSE(out.frame_intact()) << offset;
      first[offset] = before;
      EXPECT_TRUE(out.frame_intact()) << offset;
    }
  }
}

TEST(Sentinels, FailureSaysWhere) {
  support::framed<double> out(2, 2);
  out.matrix().setZero();
  (&out.matrix()(1, 1))[1] = 5;
  EXPECT_STREQ(out.frame_intact().message(), "the sentinel at (1, 2) of a (2, 2) output was overwritten with 5");
}

TEST(ExactBuffer, HoldsAMatrixAtAnyStrideAndOffset) {
  const auto x = support::normal_matrix<float>(3, 5, 2);
  for (const Eigen::Index extra : {0, 2}) {
    for (const Eigen::Index offset : {0, 1}) {
      support::exact_buffer<float> buffer(x, extra, offset);
      EXPECT_TRUE(support::same_bits(buffer.matrix(), x));
      EXPECT_EQ(buffer.matrix().outerStride(), 5 + extra);
    }
  }
  EXPECT_EQ(support::exact_buffer<float>(0, 4).matrix().rows(), 0);
}

}  // namespace
