// Gates: the formulas of the papers in long double, at ordinary and extreme arguments, and what the calls refuse.
#include <gtest/gtest.h>

#include <linattn/gates.hpp>

#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/reference_data.hpp"
#include "support/sentinel.hpp"

namespace {

using Eigen::Index;
using linattn::row_matrix;
using linattn::row_vector;
using wide = long double;
using wide_matrix = row_matrix<wide>;

template <class T>
constexpr T nan = std::numeric_limits<T>::quiet_NaN();
template <class T>
constexpr T infinity = std::numeric_limits<T>::infinity();

/// Less than a register, whole registers, one element more, and more than a block of kept constants (256 columns).
constexpr Index awkward_sizes[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 65, 257, 300};

/// exp rounds by 2 ulp, the division, the logarithm and the last operation by about half of one each.
constexpr double logistic_ulps = 3;
/// One product more, or a rounded rate or constant.
constexpr double gate_ulps = 4;
/// A rate rounds twice, as exp and in the product. (x + bias would round, too: the tests take sums that are exact.)
constexpr double biased_gate_ulps = 5;
/// Two logarithms, whose sum is up to twice the result; and ln(1 - b), rounded.
constexpr double hgrn2_ulps = 6;

template <class T>
struct Gates : testing::Test {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(Gates, scalars);

// ---- closed forms

wide softplus(wide x) { return (x > 0 ? x : 0) + std::log1p(std::exp(-std::abs(x))); }
wide log_sigmoid(wide x) { return -softplus(-x); }
wide sigmoid(wide x) { return 1 / (1 + std::exp(-x)); }

template <class T, class F>
wide_matrix each(const row_matrix<T>& x, const F& f) {
  wide_matrix result(x.rows(), x.cols());
  for (Index i = 0; i < x.rows(); ++i) {
    for (Index j = 0; j < x.cols(); ++j) result(i, j) = f(static_cast<wide>(x(i, j)), j);
  }
  return result;
}

/// From -inf to inf: every binary order, both signs, and a fine grid where the logistic function bends.
template <class T>
row_matrix<T> whole_range() {
  using limits = std::numeric_limits<T>;
  std::vector<T> values = {T(0), -T(0), infinity<T>, -infinity<T>, limits::max(), limits::lowest()};
  for (int e = limits::min_exponent - limits::digits; e < limits::max_exponent; ++e) {
    for (const double m : {1.0, 1.25, 1.7}) {
      values.push_back(std::ldexp(static_cast<T>(m), e));
      values.push_back(-std::ldexp(static_cast<T>(m), e));
    }
  }
  const T reach = std::is_same_v<T, float> ? T(110) : T(760);  // beyond both ends of exp
  for (int i = 0; i <= 6000; ++i) values.push_back(reach * T(i - 3000) / T(3000));
  for (int i = 0; i <= 6000; ++i) values.push_back(T(8) * T(i - 3000) / T(3000));
  return Eigen::Map<row_matrix<T>>(values.data(), 1, static_cast<Index>(values.size()));
}

// ---- the logistic family over the whole range

TYPED_TEST(Gates, LogisticFunctionsOverTheWholeRange) {
  LINATTN_NEEDS_NAN();
  using T = TypeParam;
  const row_matrix<T> x = whole_range<T>();
  row_matrix<T> y(1, x.cols());
  linattn::sigmoid_beta(x, y);
  EXPECT_TRUE(support::within_ulps(y, each(x, [](wide v, Index) { return sigmoid(v); }), logistic_ulps));
  linattn::log_sigmoid_gate(x, y, 1);
  EXPECT_TRUE(support::within_ulps(y, each(x, [](wide v, Index) { return log_sigmoid(v); }), logistic_ulps));
  EXPECT_LE(y.maxCoeff(), T(0));

  row_vector<T> a_log = row_vector<T>::Zero(x.cols()), bias = row_vector<T>::Zero(x.cols());
  linattn::gated_delta_net_gate(x, a_log, bias, y);
  EXPECT_TRUE(support::within_ulps(y, each(x, [](wide v, Index) { return -softplus(v); }), logistic_ulps));

  linattn::rwkv6_gate(x, y);
  EXPECT_TRUE(support::within_ulps(y, each(x, [](wide v, Index) { return -std::exp(v); }), logistic_ulps));
}

TYPED_TEST(Gates, SiluHasItsLimits) {
  LINATTN_NEEDS_NAN();
  using T = TypeParam;
  // Where e^x is subnormal, so is the sigmoid, and its last bit is |x| times as large in the product.
  const T subnormal_from = T(std::is_same_v<T, float> ? -87 : -708);
  const row_matrix<T> all = whole_range<T>();
  const row_matrix<T> x = all.array().max(subnormal_from).matrix();
  row_matrix<T> y(1, x.cols());
  linattn::silu(x, y);
  EXPECT_TRUE(support::within_ulps(y, each(x, [](wide v, Index) { return v * sigmoid(v); }), gate_ulps));
  linattn::silu(all, y);
  for (Index j = 0; j < all.cols(); ++j) {
    if (all(j) >= subnormal_from) continue;
    const T underflow = T(2) * std::numeric_limits<T>::min();  // e^-87 and e^-708 are not far above min()
    EXPECT_LE(std::abs(y(j)), T(760) * underflow) << "x = " << all(j);
  }
  EXPECT_EQ(y(2), infinity<T>);
  EXPECT_EQ(y(3), T(0));
}

// ---- schedules

TEST(Schedules, RetentionForgetsAPowerOfTwo) {
  row_vector<double> g(40);
  linattn::retention_log_decay(g);
  for (Index h = 0; h < 40; ++h) {
    EXPECT_NEAR(g(h), static_cast<double>(std::log1p(-std::exp2(-5.0L - h))), 1e-15 * std::abs(g(h))) << h;
  }
  row_vector<float> single(30);
  linattn::retention_log_decay(single);
  EXPECT_FLOAT_EQ(single(29), std::exp2(-34.0F) * -1.0F);  // gamma itself is 1 in float
}

TEST(Schedules, LightningSlopesEqualTheOriginal) {
  const auto original = support::reference_case::load("lightning_orig_01");
  const std::vector<double>& slopes = original.array("slopes").values;
  row_vector<double> g(static_cast<Index>(slopes.size()));
  linattn::lightning_log_decay(g);
  for (Index h = 0; h < g.size(); ++h) EXPECT_DOUBLE_EQ(-g(h), slopes[std::size_t(h)]) << h;

  // The decays of that case are what its outputs were computed with: o_1 - o_0 has one factor of each.
  const auto q = original.tokens<double>("q", 0), k = original.tokens<double>("k", 0),
             v = original.tokens<double>("v", 0), o = original.tokens<double>("o", 0);
  const Index heads = g.size(), d = q.cols() / heads, m = v.cols() / heads;
  for (Index h = 0; h < heads; ++h) {
    row_matrix<double> s = row_matrix<double>::Zero(d, m);
    for (Index i = 0; i < q.rows(); ++i) {
      s = std::exp(g(h)) * s + k.row(i).segment(h * d, d).transpose() * v.row(i).segment(h * m, m);
      EXPECT_TRUE(support::close(q.row(i).segment(h * d, d) * s, o.row(i).segment(h * m, m), 1e-11)) << h << ", " << i;
    }
  }
}

TEST(Schedules, LightningSlopesOfOtherNumbersOfHeads) {
  for (const Index heads : {1, 2, 3, 5, 6, 7, 12, 20}) {
    Index p = 1;
    while (p * 2 <= heads) p *= 2;
    std::vector<double> expected;
    for (Index h = 1; h <= p; ++h) expected.push_back(std::pow(2.0, -8.0 * double(h) / double(p)));
    for (Index h = 1; Index(expected.size()) < heads; h += 2) {
      expected.push_back(std::pow(2.0, -8.0 * double(h) / double(2 * p)));
    }
    row_vector<double> g(heads);
    linattn::lightning_log_decay(g);
    for (Index h = 0; h < heads; ++h) EXPECT_NEAR(g(h), -expected[std::size_t(h)], 1e-15) << heads << ", " << h;
  }
}

TEST(Schedules, MinimaxDecaysLessInDeeperLayers) {
  row_vector<double> first(6), last(6);
  linattn::minimax_log_decay(0, 80, first);
  linattn::minimax_log_decay(79, 80, last);
  for (Index h = 0; h < 6; ++h) {
    const double slope = std::pow(2.0, -8.0 * double(h + 1) / 6);
    EXPECT_NEAR(first(h), -slope * (1 + 1e-5), 1e-15);
    EXPECT_NEAR(last(h), -slope * (1 - 79 / (79 + 1e-5) + 1e-5), 1e-15);
  }
  row_vector<double> alibi(6);
  linattn::lightning_log_decay(alibi);
  EXPECT_FALSE(support::close(first, alibi, 0.1)) << "two rules with one name";
  EXPECT_THROW(linattn::minimax_log_decay(80, 80, last), std::invalid_argument);
  EXPECT_THROW(linattn::minimax_log_decay(-1, 80, last), std::invalid_argument);
}

// ---- gates of models

/// Multiples of 1/4 up to 16: sums of two are exact in float.
template <class T>
row_matrix<T> quarters(Index rows, Index cols, std::uint64_t seed) {
  return (support::uniform_matrix<double>(rows, cols, seed, -64, 64).array().round() / 4).matrix().template cast<T>();
}

TYPED_TEST(Gates, RatesAndBiasesMeetTheirColumns) {
  using T = TypeParam;
  for (const Index n : awkward_sizes) {
    for (const Index heads : {Index(1), n}) {
      const row_matrix<T> x = quarters<T>(3, n, 1);
      const row_vector<T> bias = quarters<T>(1, n, 2), a_log = support::normal_matrix<T>(1, heads, 3);
      const Index d = n / heads;
      row_matrix<T> y(3, n);
      linattn::kimi_delta_gate(x, a_log, bias, y);
      const auto softplus_gate = [&](wide v, Index j) {
        return -std::exp(static_cast<wide>(a_log(j / d))) * softplus(v + static_cast<wide>(bias(j)));
      };
      EXPECT_TRUE(support::within_ulps(y, each(x, softplus_gate), biased_gate_ulps)) << n;

      const row_vector<T> slow = row_vector<T>::Constant(heads, T(std::log(0.5))), unit = row_vector<T>::Zero(heads);
      linattn::kimi_delta_safe_gate(x, unit, bias, y);
      EXPECT_TRUE(support::within_ulps(
          y, each(x, [&](wide v, Index j) { return -5 * sigmoid(v + static_cast<wide>(bias(j))); }), biased_gate_ulps))
          << n;
      linattn::kimi_delta_safe_gate(x, slow, bias, y, -2);
      // e^A_log is one half to rounding, by which the argument, up to 16, is off: 16 ulp, and as many in the sigmoid.
      constexpr double rounded_rate_ulps = 40;
      EXPECT_TRUE(support::within_ulps(
          y, each(x, [&](wide v, Index j) { return -2 * sigmoid((v + static_cast<wide>(bias(j))) / 2); }),
          rounded_rate_ulps))
          << n;
    }
    const row_matrix<T> x = quarters<T>(2, n, 4);
    const row_vector<T> bias = quarters<T>(1, n, 5), a_log = support::normal_matrix<T>(1, n, 6);
    row_matrix<T> g(2, n), h(2, n), delta(2, n);
    linattn::gated_delta_net_gate(x, a_log, bias, g);
    linattn::mamba2_gate(x, a_log, bias, h, delta);
    EXPECT_TRUE(support::same_bits(g, h)) << "Mamba-2 and Gated DeltaNet share the gate";
    EXPECT_TRUE(support::within_ulps(
        delta, each(x, [&](wide v, Index j) { return softplus(v + static_cast<wide>(bias(j))); }), logistic_ulps));
    linattn::mamba2_gate(x, a_log, bias, h, delta, {.low = 0.25, .high = 1.5});
    EXPECT_GE(delta.minCoeff(), T(0.25));
    EXPECT_LE(delta.maxCoeff(), T(1.5));
    EXPECT_TRUE(support::close(h, -(a_log.array().exp().matrix().replicate(2, 1).cwiseProduct(delta)),
                               support::tolerance<T>::relative_rms));
  }
}

TYPED_TEST(Gates, ConstantsOfModels) {
  using T = TypeParam;
  const row_matrix<T> x = support::normal_matrix<T>(4, 33, 7, 3);
  row_matrix<T> y(4, 33);
  linattn::log_sigmoid_gate(x, y);
  EXPECT_TRUE(support::within_ulps(y, each(x, [](wide v, Index) { return log_sigmoid(v) / 16; }), gate_ulps));
  linattn::rwkv7_gate(x, y);
  EXPECT_TRUE(support::within_ulps(y, each(x, [](wide v, Index) { return -std::exp(-0.5L) * sigmoid(v); }), gate_ulps));
  EXPECT_TRUE(
      support::within_ulps(y, each(x, [](wide v, Index) { return -std::exp(-softplus(-v) - 0.5L); }), gate_ulps))
      << "the authors' first form";
  linattn::sigmoid_beta(x, y, 2);
  EXPECT_TRUE(support::within_ulps(y, each(x, [](wide v, Index) { return 2 * sigmoid(v); }), gate_ulps));
}

TYPED_TEST(Gates, Hgrn2IsBoundedFromBelowAndKeepsItsDigits) {
  LINATTN_NEEDS_NAN();
  using T = TypeParam;
  const row_matrix<T> f = whole_range<T>();
  for (const double bound : {0.0, 0x1p-20, 0.25, 0.5, 0.875, 1.0}) {  // 1 - bound is exact
    const row_vector<T> b = row_vector<T>::Constant(f.cols(), T(bound));
    row_matrix<T> g(1, f.cols()), key(1, f.cols());
    linattn::hgrn2_gate(f, b, g, key);
    const wide w = static_cast<wide>(static_cast<T>(bound));
    EXPECT_TRUE(support::within_ulps(key, each(f, [&](wide v, Index) { return (1 - w) * sigmoid(-v); }), gate_ulps))
        << bound;
    wide_matrix expected = each(f, [&](wide v, Index) {
      // Where alpha is near 1, 1 - alpha is what is exact; beside 0, b or e^f.
      const wide rest = (1 - w) * sigmoid(-v);
      return rest < 0.5L ? std::log1p(-rest) : w == 0 ? log_sigmoid(v) : std::log(w + (1 - w) * sigmoid(v));
    });
    if (w == 0) expected(3) = static_cast<wide>(std::numeric_limits<T>::lowest());  // f = -inf, as documented
    EXPECT_TRUE(support::within_ulps(g, expected, hgrn2_ulps)) << bound;
    EXPECT_LE(g.maxCoeff(), T(0));
  }
}

TYPED_TEST(Gates, Hgrn2BoundsRiseWithDepth) {
  using T = TypeParam;
  const row_matrix<T> learned = support::normal_matrix<T>(5, 9, 8, 2);
  row_matrix<T> bounds(5, 9);
  linattn::hgrn2_lower_bounds(learned, bounds);
  const wide_matrix e = learned.template cast<wide>().array().exp().matrix();
  wide_matrix expected = wide_matrix::Zero(5, 9);
  for (Index l = 1; l < 5; ++l) expected.row(l) = expected.row(l - 1) + e.row(l).cwiseQuotient(e.colwise().sum());
  constexpr double sums_of_five = 8;  // ulp
  EXPECT_TRUE(support::within_ulps(bounds, expected, sums_of_five));
  EXPECT_TRUE(support::all_zero(bounds.row(0)));

  row_matrix<T> extreme = row_matrix<T>::Zero(3, 1);
  extreme(0, 0) = T(-200);  // the first layer's share rounds away: the last bound is 1, and allowed
  row_matrix<T> steep(3, 1), g(3, 1), key(3, 1);
  linattn::hgrn2_lower_bounds(extreme, steep);
  EXPECT_EQ(steep(2, 0), T(1));
  linattn::hgrn2_gate(extreme, steep.row(2), g, key);
  EXPECT_TRUE(support::all_zero(g));
  EXPECT_TRUE(support::all_zero(key));
}

// ---- heads

TYPED_TEST(Gates, HeadsAreNormalisedByThemselves) {
  using T = TypeParam;
  for (const Index d : awkward_sizes) {
    for (const Index heads : {1, 3}) {
      row_matrix<T> x = support::normal_matrix<T>(4, heads * d, 9);
      x.row(2).setZero();
      x.row(3) *= T(1e-3);  // where epsilon counts
      support::framed<T> out(4, heads * d);
      linattn::l2_normalize(x, heads, out.matrix());
      EXPECT_TRUE(out.frame_intact());
      wide_matrix expected = x.template cast<wide>();
      for (Index i = 0; i < 4; ++i) {
        for (Index h = 0; h < heads; ++h) {
          auto head = expected.row(i).segment(h * d, d);
          head /= std::sqrt(head.squaredNorm() + 1e-6L);
        }
      }
      EXPECT_TRUE(support::close(out.matrix(), expected, support::tolerance<T>::relative_rms)) << d;
      EXPECT_TRUE(support::all_zero(out.matrix().row(2)));
      linattn::l2_normalize(x, heads, x);
      EXPECT_TRUE(support::same_bits(x, out.matrix())) << "in place";
    }
  }
}

TYPED_TEST(Gates, Rwkv7KeysRemoveAUnitKeyAndWriteAScaledOne) {
  using T = TypeParam;
  for (const Index d : awkward_sizes) {
    const Index heads = 2, cols = heads * d;
    const auto k = support::normal_matrix<T>(3, cols, 10), x = support::normal_matrix<T>(3, cols, 11);
    const row_vector<T> removal = support::normal_matrix<T>(1, cols, 12),
                        replacement = support::normal_matrix<T>(1, cols, 13);
    support::framed<T> key(3, cols), a(3, cols), b(3, cols);
    linattn::rwkv7_keys(k, x, {removal, replacement}, heads, key.matrix(), a.matrix(), b.matrix());
    EXPECT_TRUE(key.frame_intact() && a.frame_intact() && b.frame_intact());
    wide_matrix kappa = k.cwiseProduct(removal.replicate(3, 1)).template cast<wide>();
    const wide_matrix iota = each(x, [](wide v, Index) { return sigmoid(v); });
    for (Index i = 0; i < 3; ++i) {
      for (Index h = 0; h < heads; ++h) kappa.row(i).segment(h * d, d).normalize();
    }
    const wide_matrix written = k.template cast<wide>().array() *
                                (1 + (iota.array() - 1) * replacement.template cast<wide>().replicate(3, 1).array());
    const double bound = support::tolerance<T>::relative_rms;
    EXPECT_TRUE(support::close(a.matrix(), -kappa, bound)) << d;
    EXPECT_TRUE(support::close(b.matrix(), kappa.cwiseProduct(iota), bound)) << d;
    EXPECT_TRUE(support::close(key.matrix(), written, bound)) << d;
  }
  row_matrix<T> zero = row_matrix<T>::Zero(1, 4), a(1, 4), b(1, 4);
  const row_vector<T> ones = row_vector<T>::Ones(4);
  linattn::rwkv7_keys(zero, row_matrix<T>(zero), {ones, ones}, 2, zero, a, b);
  EXPECT_TRUE(support::all_zero(a) && support::all_zero(b) && support::all_zero(zero));
}

TYPED_TEST(Gates, ValuesAreScaledHeadByHead) {
  using T = TypeParam;
  for (const Index m : awkward_sizes) {
    const auto v = support::normal_matrix<T>(3, 2 * m, 14), scale = support::normal_matrix<T>(3, 2, 15);
    support::framed<T> out(3, 2 * m);
    linattn::scale_heads(v, scale, out.matrix());
    EXPECT_TRUE(out.frame_intact());
    row_matrix<T> expected(3, 2 * m);
    for (Index i = 0; i < 3; ++i) {
      for (Index j = 0; j < 2 * m; ++j) expected(i, j) = v(i, j) * scale(i, j / m);
    }
    EXPECT_TRUE(support::same_bits(out.matrix(), expected));
  }
}

// ---- rows, places, NaN

/// Every function with one (N, 12) input and one output of its shape, on 3 heads of 4.
template <class T>
std::vector<std::pair<std::string, std::function<void(linattn::matrix_view<const T>, linattn::matrix_view<T>)>>>
every_gate() {
  using in = linattn::matrix_view<const T>;
  using out = linattn::matrix_view<T>;
  const row_vector<T> heads = support::normal_matrix<T>(1, 3, 20), columns = support::normal_matrix<T>(1, 12, 21);
  const row_vector<T> bounds = columns.array().abs().min(T(0.9)).matrix();
  return {{"silu", [](in x, out y) { linattn::silu(x, y); }},
          {"sigmoid_beta", [](in x, out y) { linattn::sigmoid_beta(x, y); }},
          {"log_sigmoid_gate", [](in x, out y) { linattn::log_sigmoid_gate(x, y); }},
          {"rwkv6_gate", [](in x, out y) { linattn::rwkv6_gate(x, y); }},
          {"rwkv7_gate", [](in x, out y) { linattn::rwkv7_gate(x, y); }},
          {"l2_normalize", [](in x, out y) { linattn::l2_normalize(x, 3, y); }},
          {"gated_delta_net_gate", [=](in x, out y) { linattn::gated_delta_net_gate(x, columns, columns, y); }},
          {"kimi_delta_gate", [=](in x, out y) { linattn::kimi_delta_gate(x, heads, columns, y); }},
          {"kimi_delta_safe_gate", [=](in x, out y) { linattn::kimi_delta_safe_gate(x, heads, columns, y); }},
          {"hgrn2_gate",
           [=](in x, out y) {
             row_matrix<T> key(x.rows(), 12);
             linattn::hgrn2_gate(x, bounds, y, key);
           }},
          {"mamba2_gate", [=](in x, out y) {
             row_matrix<T> delta(x.rows(), 12);
             linattn::mamba2_gate(x, columns, columns, y, delta);
           }}};
}

TYPED_TEST(Gates, ARowDependsOnItselfAloneAndPlaceDoesNotMatter) {
  using T = TypeParam;
  const row_matrix<T> x = support::normal_matrix<T>(7, 12, 22, 4);
  for (const auto& [name, gate] : every_gate<T>()) {
    support::framed<T> whole(7, 12, 1), single(7, 12, 5);
    gate(x, whole.matrix());
    for (Index i = 0; i < 7; ++i) gate(x.row(i), single.matrix().row(i));
    EXPECT_TRUE(support::same_bits(single.matrix(), whole.matrix())) << name;
    EXPECT_TRUE(whole.frame_intact()) << name;
    EXPECT_TRUE(single.frame_intact()) << name;
    support::exact_buffer<T> in_place(x, 3, 1);
    gate(in_place.matrix(), in_place.matrix());
    EXPECT_TRUE(support::same_bits(in_place.matrix(), whole.matrix())) << name << " in place";
    row_matrix<T> nothing(0, 12);
    gate(nothing, nothing);
  }
}

TYPED_TEST(Gates, NaNStaysAndSpreadsOverItsHeadAtMost) {
  LINATTN_NEEDS_NAN();
  using T = TypeParam;
  const row_matrix<T> x = support::normal_matrix<T>(3, 12, 23);
  row_matrix<T> spoilt = x;
  spoilt(1, 5) = nan<T>;
  for (const auto& [name, gate] : every_gate<T>()) {
    row_matrix<T> clean(3, 12), y(3, 12);
    gate(x, clean);
    gate(spoilt, y);
    const bool by_head = name == "l2_normalize";
    for (Index i = 0; i < 3; ++i) {
      for (Index j = 0; j < 12; ++j) {
        const bool hit = i == 1 && (by_head ? j / 4 == 1 : j == 5);
        EXPECT_EQ(std::isnan(y(i, j)), hit) << name << " at " << i << ", " << j;
        EXPECT_TRUE(hit || y(i, j) == clean(i, j)) << name;
      }
    }
  }
}

TYPED_TEST(Gates, NothingAllocates) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  using T = TypeParam;
  const row_matrix<T> x = support::normal_matrix<T>(5, 300, 24);
  const row_vector<T> columns = row_vector<T>::Constant(300, T(0.5)), heads = row_vector<T>::Zero(3);
  row_matrix<T> y(5, 300), z(5, 300), w(5, 300);
  const support::allocation_count count;
  linattn::retention_log_decay(y.row(0));
  linattn::lightning_log_decay(y.row(0));
  linattn::minimax_log_decay(1, 2, y.row(0));
  linattn::silu(x, y);
  linattn::sigmoid_beta(x, y);
  linattn::log_sigmoid_gate(x, y);
  linattn::hgrn2_lower_bounds(x, y);
  linattn::hgrn2_gate(x, columns, y, z);
  linattn::mamba2_gate(x, columns, columns, y, z);
  linattn::gated_delta_net_gate(x, columns, columns, y);
  linattn::kimi_delta_gate(x, heads, columns, y);
  linattn::kimi_delta_safe_gate(x, heads, columns, y);
  linattn::rwkv6_gate(x, y);
  linattn::rwkv7_gate(x, y);
  linattn::rwkv7_keys(x, x, {columns, columns}, 3, y, z, w);
  linattn::l2_normalize(x, 3, y);
  linattn::scale_heads(x, x.leftCols(3), y);
  EXPECT_EQ(count.total(), 0);
}

// ---- refusals

/// The sentence of a call that must leave its output alone.
template <class Call>
std::string refusal(support::framed<float>& out, const Call& call) {
  std::string sentence = "nothing was thrown";
  try {
    call(out.matrix());
  } catch (const std::invalid_argument& error) {
    sentence = error.what();
  }
  EXPECT_TRUE(out.untouched());
  return sentence;
}

TEST(GateErrors, WrongShapesAreNamedBeforeAnythingIsWritten) {
  const row_matrix<float> x = row_matrix<float>::Zero(5, 12), other = row_matrix<float>::Zero(5, 12);
  const row_vector<float> three = row_vector<float>::Zero(3), five = row_vector<float>::Zero(5),
                          twelve = row_vector<float>::Zero(12);
  support::framed<float> narrow(5, 11), right(5, 12), beside(5, 12);
  const auto is = [](const std::string& sentence, const std::string& expected) { EXPECT_EQ(sentence, expected); };
  is(refusal(narrow, [&](auto&& y) { linattn::sigmoid_beta(x, y); }),
     "linattn::sigmoid_beta: the output is (5, 11), but the input asks for (5, 12)");
  is(refusal(narrow, [&](auto&& y) { linattn::gated_delta_net_gate(x, twelve, twelve, y); }),
     "linattn::gated_delta_net_gate: log_decay is (5, 11), but a asks for (5, 12)");
  is(refusal(right, [&](auto&& y) { linattn::gated_delta_net_gate(x, three, twelve, y); }),
     "linattn::gated_delta_net_gate: a_log has 3 entries, but a asks for 12");
  is(refusal(right, [&](auto&& y) { linattn::kimi_delta_gate(x, five, twelve, y); }),
     "linattn::kimi_delta_gate: f has 12 columns, which 5 heads cannot share equally");
  is(refusal(right, [&](auto&& y) { linattn::kimi_delta_gate(x, three, five, y); }),
     "linattn::kimi_delta_gate: dt_bias has 5 entries, but f asks for 12");
  is(refusal(right, [&](auto&& y) { linattn::kimi_delta_safe_gate(x, three, twelve, y, 5); }),
     "linattn::kimi_delta_safe_gate: the lower bound is 5, not below 0");
  is(refusal(right, [&](auto&& y) { linattn::log_sigmoid_gate(x, y, 0); }),
     "linattn::log_sigmoid_gate: the normalizer is 0, not above 0");
  is(refusal(right, [&](auto&& y) { linattn::l2_normalize(x, 5, y); }),
     "linattn::l2_normalize: x has 12 columns, which 5 heads cannot share equally");
  is(refusal(right, [&](auto&& y) { linattn::l2_normalize(x, 0, y); }),
     "linattn::l2_normalize: x has 12 columns, which 0 heads cannot share equally");
  is(refusal(right, [&](auto&& y) { linattn::scale_heads(x, other.topRows(4), y); }),
     "linattn::scale_heads: scale is (4, 12), but v asks for (5, 12)");
  is(refusal(right, [&](auto&& y) { linattn::hgrn2_gate(x, five, y, beside.matrix()); }),
     "linattn::hgrn2_gate: lower_bound has 5 entries, but f asks for 12");
  const row_vector<float> two = row_vector<float>::Constant(12, 2);
  is(refusal(right, [&](auto&& y) { linattn::hgrn2_gate(x, two, y, beside.matrix()); }),
     "linattn::hgrn2_gate: lower_bound 0 is 2, not in [0, 1]");
  is(refusal(right, [&](auto&& y) { linattn::hgrn2_gate(x, twelve, y, narrow.matrix()); }),
     "linattn::hgrn2_gate: key is (5, 11), but f asks for (5, 12)");
  is(refusal(right, [&](auto&& y) { linattn::hgrn2_lower_bounds(other.topRows(4), y); }),
     "linattn::hgrn2_lower_bounds: lower_bounds is (5, 12), but learned asks for (4, 12)");
  is(refusal(right, [&](auto&& y) { linattn::mamba2_gate(x, twelve, twelve, y, narrow.matrix()); }),
     "linattn::mamba2_gate: delta is (5, 11), but dt asks for (5, 12)");
  is(refusal(right,
             [&](auto&& y) {
               linattn::mamba2_gate(x, twelve, twelve, y, beside.matrix(), {2, 1});
             }),
     "linattn::mamba2_gate: the limits are 2 and 1, not 0 <= low <= high");
  support::framed<float> third(5, 12);
  is(refusal(right,
             [&](auto&& y) {
               linattn::rwkv7_keys(x, other, {twelve, five}, 3, y, beside.matrix(), third.matrix());
             }),
     "linattn::rwkv7_keys: replacement has 5 entries, but k asks for 12");
  is(refusal(right,
             [&](auto&& y) {
               linattn::rwkv7_keys(x, other, {twelve, twelve}, 3, y, beside.matrix(), narrow.matrix());
             }),
     "linattn::rwkv7_keys: b is (5, 11), but k asks for (5, 12)");
  EXPECT_TRUE(narrow.untouched() && beside.untouched() && third.untouched());
}

}  // namespace
