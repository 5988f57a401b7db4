// Where this kind of arithmetic goes wrong: denominators of zero and below the normal range, long sums, NaN, overflow,
// epsilons that are not small, and processors that flush subnormals to zero.
#include <linattn/linattn.hpp>

#include <linattn/feature_maps/positive_random.hpp>
#include <linattn/feature_maps/random_fourier.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/oracle.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#if defined(__SSE2__)
#include <pmmintrin.h>
#include <xmmintrin.h>
#define LINATTN_TEST_HAS_FLUSH_TO_ZERO 1
#else
#define LINATTN_TEST_HAS_FLUSH_TO_ZERO 0
#endif

namespace {

using Eigen::Index;
using linattn::denominator_policy;
using linattn::matrix_view;
using linattn::row_matrix;

template <class T>
constexpr T nan = std::numeric_limits<T>::quiet_NaN();
template <class T>
constexpr T infinity = std::numeric_limits<T>::infinity();

// ---- every map, by one name -----------------------------------------------------------------------------------------

constexpr Index random_features = 10;
constexpr std::uint64_t random_seed = 3;

template <class Map>
constexpr bool is_random = std::is_constructible_v<Map, Index, Index, std::uint64_t>;

/// Whether all features are >= 0, so that outputs are averages of values.
template <class Map>
constexpr bool is_positive = !linattn::detail::has_signed_features<Map>;

template <class Map>
Map make_map(Index head_dim) {
  if constexpr (is_random<Map>) {
    return Map(head_dim, random_features, random_seed);
  } else {
    return Map();
  }
}

/// The closed form of a map.
template <class Map>
support::oracle_map closed_form(Index head_dim) {
  if constexpr (std::is_same_v<Map, linattn::elu_plus_one>) {
    return support::oracle_elu_plus_one();
  } else if constexpr (std::is_same_v<Map, linattn::identity>) {
    return support::oracle_identity();
  } else if constexpr (std::is_same_v<Map, linattn::relu>) {
    return support::oracle_relu();
  } else if constexpr (std::is_same_v<Map, linattn::squared_relu>) {
    return support::oracle_squared_relu();
  } else if constexpr (std::is_same_v<Map, linattn::exponential>) {
    return support::oracle_exponential();
  } else if constexpr (linattn::detail::has_signed_features<Map>) {
    return support::oracle_random_fourier(make_map<Map>(head_dim).projection().template cast<long double>());
  } else {
    return support::oracle_positive_random(make_map<Map>(head_dim).projection().template cast<long double>());
  }
}

template <class Map, class Scalar>
struct with {
  using map = Map;
  using scalar = Scalar;
  using attention = linattn::linear_attention<Map, linattn::additive, Scalar>;

  /// Normalised whatever the map, so that every map has denominators.
  static attention make(Index head_dim, Index value_dim, Index heads = 1,
                        denominator_policy policy = denominator_policy::none()) {
    return attention(
        {.head_dim = head_dim, .value_dim = value_dim, .heads = heads, .normalize = true, .denominator = policy},
        make_map<Map>(head_dim));
  }
};

template <class Case>
class EveryMap : public testing::Test {};
using every_map =
    testing::Types<with<linattn::elu_plus_one, float>, with<linattn::elu_plus_one, double>,
                   with<linattn::identity, float>, with<linattn::relu, float>, with<linattn::squared_relu, double>,
                   with<linattn::exponential, float>, with<linattn::positive_random<float>, float>,
                   with<linattn::random_fourier<double>, double>>;
TYPED_TEST_SUITE(EveryMap, every_map);

// ---- every path -----------------------------------------------------------------------------------------------------

template <class T>
struct path {
  std::string name;
  bool causal;
  row_matrix<T> out;
};

/// The outputs of all verbs for the same inputs.
template <class Operator, class T>
std::vector<path<T>> every_path(const Operator& attn, const row_matrix<T>& q, const row_matrix<T>& k,
                                const row_matrix<T>& v) {
  const Index n = q.rows();
  auto ws = attn.make_workspace();
  std::vector<path<T>> paths = {{"forward_causal", true, attn.forward_causal(q, k, v)},
                                {"forward", false, attn.forward(q, k, v)}};
  auto s = attn.make_state();
  row_matrix<T> y(n, v.cols());
  for (Index i = 0; i < n; ++i) attn.step(s, q.row(i), k.row(i), v.row(i), y.row(i), ws);
  paths.push_back({"step", true, y});
  paths.push_back({"read", false, attn.read(s, q)});
  s.reset();
  for (Index first = 0, size = 1; first < n; first += size, size = size % 5 + 1) {
    const Index rows = std::min(size, n - first);
    y.middleRows(first, rows) =
        attn.forward_causal(s, q.middleRows(first, rows), k.middleRows(first, rows), v.middleRows(first, rows));
  }
  paths.push_back({"forward_causal in pieces", true, y});
  return paths;
}

/// What they should be.
template <class Map, class T>
support::wide_matrix expected(const path<T>& p, const row_matrix<T>& q, const row_matrix<T>& k, const row_matrix<T>& v,
                              Index heads = 1) {
  support::oracle_options o;
  o.heads = heads;
  o.causal = p.causal;
  return support::oracle_recurrent(closed_form<Map>(q.cols() / heads), q, k, v, o).out;
}

// ---- denominators ---------------------------------------------------------------------------------------------------

TYPED_TEST(EveryMap, AllZeroQueriesAndKeys) {
  using T = typename TypeParam::scalar;
  for (const Index n : {1, 5}) {
    const auto attn = TypeParam::make(3, 2);
    const row_matrix<T> zero = row_matrix<T>::Zero(n, 3), v = support::normal_matrix<T>(n, 2, 1);
    for (const auto& p : every_path(attn, zero, zero, v)) {
      const auto right = expected<typename TypeParam::map>(p, zero, zero, v);
      EXPECT_TRUE(support::close(p.out, right, support::tolerance<T>::relative_rms)) << p.name;
      if (!right.any()) {
        EXPECT_TRUE(support::all_zero(p.out)) << p.name;
      }
    }
  }
}

// relu and squared_relu vanish here: 0/0 = 0. Signed denominators may be of any size; what is promised is no NaN.
TYPED_TEST(EveryMap, NoPositiveCoordinateInKeysOrQueries) {
  using T = typename TypeParam::scalar;
  using map = typename TypeParam::map;
  for (const Index n : {1, 5}) {
    const auto attn = TypeParam::make(3, 2);
    const row_matrix<T> x = support::normal_matrix<T>(n, 3, 2), v = support::normal_matrix<T>(n, 2, 3);
    const row_matrix<T> negative = -x.cwiseAbs(), minus_one = row_matrix<T>::Constant(n, 3, T(-1));
    for (const auto& [q, k] : {std::pair(x, negative), std::pair(minus_one, x), std::pair(minus_one, negative)}) {
      for (const auto& p : every_path(attn, q, k, v)) {
        EXPECT_TRUE(support::all_finite(p.out)) << p.name;
        if constexpr (std::is_same_v<map, linattn::relu> || std::is_same_v<map, linattn::squared_relu>) {
          EXPECT_TRUE(support::all_zero(p.out)) << p.name;
        } else if constexpr (is_positive<map>) {
          EXPECT_TRUE(support::close(p.out, expected<map>(p, q, k, v), support::tolerance<T>::relative_rms)) << p.name;
        }
      }
    }
  }
}

// Signed features: the denominator crosses zero. Exactly at zero the output is 0, whatever stands above.
TEST(Denominators, OfSignedFeaturesMayVanish) {
  row_matrix<float> q(2, 2), k(2, 2), v(2, 1);
  q << 1, -1, 1, -1;
  k << 1, 1, 1, 1;
  v << 3, 5;
  using signed_map = with<linattn::identity, float>;
  for (const auto& p : every_path(signed_map::make(2, 1), q, k, v)) EXPECT_TRUE(support::all_zero(p.out)) << p.name;

  k << 1, 0, 0, 1;  // q.k = 1, -1: row 1 is (v_0 - v_1) / 0
  const auto row_1 = [&](denominator_policy policy) {
    return signed_map::make(2, 1, 1, policy).forward_causal(q, k, v)(1, 0);
  };
  EXPECT_EQ(row_1(denominator_policy::none()), 0.0F);
  EXPECT_EQ(row_1(denominator_policy::clamp(0.5)), -4.0F);
  EXPECT_EQ(row_1(denominator_policy::add(0.5)), -4.0F);
  k << 1, 0, 0, 2;  // q.k = 1, -2: row 1 is (v_0 - 2 v_1) / -1
  EXPECT_EQ(row_1(denominator_policy::none()), 7.0F);
  EXPECT_EQ(row_1(denominator_policy::clamp(0.5)), -14.0F);
  EXPECT_EQ(row_1(denominator_policy::add(1)), 0.0F) << "0 after the policy";
}

TYPED_TEST(EveryMap, ValuesOfOneGiveOne) {
  using T = typename TypeParam::scalar;
  using map = typename TypeParam::map;
  if constexpr (is_positive<map>) {
    const Index n = 37, heads = 2;
    const auto attn = TypeParam::make(5, 3, heads);
    // A coordinate above 1 in every row: relu maps have something to see.
    row_matrix<T> q = support::normal_matrix<T>(n, heads * 5, 4), k = support::normal_matrix<T>(n, heads * 5, 5);
    for (Index h = 0; h < heads; ++h) {
      q.col(5 * h).array() = q.col(5 * h).array().abs() + 1;
      k.col(5 * h).array() = k.col(5 * h).array().abs() + 1;
    }
    const row_matrix<T> ones = row_matrix<T>::Ones(n, heads * 3);
    for (const auto& p : every_path(attn, q, k, ones)) {
      EXPECT_TRUE(support::close(p.out, ones, support::tolerance<T>::relative_rms)) << p.name;
    }
  }
}

// elu + 1 at -45 in float: features are 3e-20 and their products 8e-40, below the normal range. The quotient is still
// an average. What is lost is what each product rounds by, half the smallest subnormal.
TEST(Denominators, BelowTheNormalRange) {
  using elu = with<linattn::elu_plus_one, float>;
  const Index n = 9;
  const auto attn = elu::make(8, 3);
  const row_matrix<float> v = support::uniform_matrix<float>(n, 3, 6, -2, 5), ones = row_matrix<float>::Ones(n, 3);
  for (const float x : {-40.0F, -44.0F, -45.0F, -47.0F, -50.0F}) {
    const row_matrix<float> qk = row_matrix<float>::Constant(n, 8, x);
    const double rounding_of_products = 0x1p-150 / std::exp(2.0 * static_cast<double>(x));
    const double bound = support::tolerance<float>::relative_rms + 2 * rounding_of_products;
    for (const auto& p : every_path(attn, qk, qk, ones)) {
      EXPECT_TRUE(support::close(p.out, ones, bound)) << p.name << " at " << x;
    }
    for (const auto& p : every_path(attn, qk, qk, v)) {
      EXPECT_TRUE(support::close(p.out, expected<linattn::elu_plus_one>(p, qk, qk, v), 5 * bound))
          << p.name << " at " << x;
      for (Index m = 0; m < 3; ++m) {
        const double slack = 5 * bound;  // |V| <= 5
        EXPECT_GE(p.out.col(m).minCoeff(), v.col(m).minCoeff() - slack) << p.name << " at " << x;
        EXPECT_LE(p.out.col(m).maxCoeff(), v.col(m).maxCoeff() + slack) << p.name << " at " << x;
      }
    }
  }
  // Products of 8e-53 are 0 in float: nothing was seen, the output is 0. In double they are ordinary numbers.
  const row_matrix<float> far = row_matrix<float>::Constant(n, 8, -60.0F);
  for (const auto& p : every_path(attn, far, far, v)) EXPECT_TRUE(support::all_zero(p.out)) << p.name;
  const row_matrix<double> far_in_double = far.cast<double>(), ones_in_double = ones.cast<double>();
  for (const auto& p :
       every_path(with<linattn::elu_plus_one, double>::make(8, 3), far_in_double, far_in_double, ones_in_double)) {
    EXPECT_TRUE(support::close(p.out, ones_in_double, support::tolerance<double>::relative_rms)) << p.name;
  }
}

// A feature of elu + 1 is 0 at -inf and nowhere above -104 in float.
TEST(Denominators, OfQueriesAtMinusInfinity) {
  const auto attn = with<linattn::elu_plus_one, float>::make(3, 2);
  row_matrix<float> q = support::normal_matrix<float>(5, 3, 7);
  const row_matrix<float> k = support::normal_matrix<float>(5, 3, 8), v = support::normal_matrix<float>(5, 2, 9);
  q.row(2).setConstant(-infinity<float>);
  for (const auto& p : every_path(attn, q, k, v)) {
    EXPECT_TRUE(support::all_zero(p.out.row(2))) << p.name;
    EXPECT_TRUE(support::all_finite(p.out)) << p.name;
  }
}

// Denominators near the end of the range, whose reciprocals are subnormal.
TEST(Denominators, NearOverflow) {
  const auto attn = with<linattn::relu, float>::make(1, 1);
  row_matrix<float> q(1, 1), k(1, 1), v(1, 1);
  v << 1;
  for (const float x : {40.0F, 43.0F, 43.7F, 44.0F, 44.3F}) {  // squared, e^88.6 = 3.0e38
    q << std::exp(x);
    k << std::exp(x);
    for (const auto& p : every_path(attn, q, k, v)) {
      EXPECT_TRUE(support::close(p.out, v, support::tolerance<float>::relative_rms)) << p.name << " at " << x;
    }
  }
}

// An epsilon is not small beside a denominator of 64 e^-20 = 1.3e-7.
TEST(Denominators, AddedEpsilonAtMinusTen) {
  const Index n = 6, head_dim = 64;
  const row_matrix<float> qk = row_matrix<float>::Constant(n, head_dim, -10.0F);
  const row_matrix<float> v = support::normal_matrix<float>(n, 2, 10);
  const double one_key = 64 * std::exp(-20.0);
  constexpr double bound = support::tolerance<float>::relative_rms;
  using elu = with<linattn::elu_plus_one, float>;

  const auto none = elu::make(head_dim, 2).forward_causal(qk, qk, v);
  EXPECT_TRUE(support::close(none.row(0), v.row(0), bound));

  const double factor = one_key / (one_key + 1e-6);
  ASSERT_NEAR(factor, 0.117, 0.0005);
  const auto added = elu::make(head_dim, 2, 1, denominator_policy::add(1e-6)).forward_causal(qk, qk, v);
  EXPECT_TRUE(support::close(added.row(0), v.row(0).cast<double>() * factor, bound));
  // With V = 1 every row is den / (den + eps).
  const row_matrix<float> ones = row_matrix<float>::Ones(n, 2);
  const auto of_ones = elu::make(head_dim, 2, 1, denominator_policy::add(1e-6)).forward_causal(qk, qk, ones);
  for (Index i = 0; i < n; ++i) {
    const double den = static_cast<double>(i + 1) * one_key;
    EXPECT_TRUE(support::close(of_ones.row(i), ones.row(i).cast<double>() * (den / (den + 1e-6)), bound)) << i;
  }

  const auto clamped = elu::make(head_dim, 2, 1, denominator_policy::clamp(1e-6)).forward_causal(qk, qk, v);
  EXPECT_TRUE(support::close(clamped.row(0), v.row(0).cast<double>() * (one_key / 1e-6), bound));
}

// ---- NaN and infinity -----------------------------------------------------------------------------------------------

constexpr Index n_rows = 11;  // two micro-blocks and a ragged one
constexpr Index bad_row = 5;  // in the middle of the second
constexpr Index head_dim_of_nan = 5, value_dim_of_nan = 3, heads_of_nan = 2;

template <class T>
support::attention_inputs<T> inputs_of_nan() {
  return {n_rows, heads_of_nan * head_dim_of_nan, heads_of_nan * value_dim_of_nan, 11};
}

TYPED_TEST(EveryMap, NanInAQueryStaysInItsRowAndHead) {
  using T = typename TypeParam::scalar;
  const auto attn = TypeParam::make(head_dim_of_nan, value_dim_of_nan, heads_of_nan);
  const auto clean = inputs_of_nan<T>();
  auto x = inputs_of_nan<T>();
  x.q(bad_row, head_dim_of_nan + 1) = nan<T>;  // of head 1
  const auto before = every_path(attn, clean.q, clean.k, clean.v), after = every_path(attn, x.q, x.k, x.v);
  for (std::size_t i = 0; i < before.size(); ++i) {
    auto restored = after[i].out;
    const auto bad = after[i].out.row(bad_row).rightCols(value_dim_of_nan);
    EXPECT_TRUE(support::all_nan(bad)) << after[i].name;
    restored.row(bad_row).rightCols(value_dim_of_nan) = before[i].out.row(bad_row).rightCols(value_dim_of_nan);
    EXPECT_TRUE(support::same_bits(restored, before[i].out)) << after[i].name;
  }
}

TYPED_TEST(EveryMap, NanInAKeyReachesTheRowsThatSeeIt) {
  using T = typename TypeParam::scalar;
  const auto attn = TypeParam::make(head_dim_of_nan, value_dim_of_nan, heads_of_nan);
  const auto clean = inputs_of_nan<T>();
  auto x = inputs_of_nan<T>();
  x.k(bad_row, 1) = nan<T>;  // of head 0
  const auto before = every_path(attn, clean.q, clean.k, clean.v), after = every_path(attn, x.q, x.k, x.v);
  for (std::size_t i = 0; i < before.size(); ++i) {
    const Index first = after[i].causal ? bad_row : 0;
    EXPECT_TRUE(support::same_bits(after[i].out.topRows(first), before[i].out.topRows(first))) << after[i].name;
    EXPECT_TRUE(support::all_nan(after[i].out.bottomRows(n_rows - first).leftCols(value_dim_of_nan))) << after[i].name;
    EXPECT_TRUE(support::same_bits(after[i].out.rightCols(value_dim_of_nan), before[i].out.rightCols(value_dim_of_nan)))
        << after[i].name;
  }
}

TYPED_TEST(EveryMap, NanInAValueStaysInItsColumn) {
  using T = typename TypeParam::scalar;
  const auto attn = TypeParam::make(head_dim_of_nan, value_dim_of_nan, heads_of_nan);
  const auto clean = inputs_of_nan<T>();
  auto x = inputs_of_nan<T>();
  const Index column = value_dim_of_nan + 1;
  x.v(bad_row, column) = nan<T>;
  const auto before = every_path(attn, clean.q, clean.k, clean.v), after = every_path(attn, x.q, x.k, x.v);
  for (std::size_t i = 0; i < before.size(); ++i) {
    const Index first = after[i].causal ? bad_row : 0;
    EXPECT_TRUE(support::all_nan(after[i].out.col(column).tail(n_rows - first))) << after[i].name;
    auto restored = after[i].out;
    restored.col(column).tail(n_rows - first) = before[i].out.col(column).tail(n_rows - first);
    EXPECT_TRUE(support::same_bits(restored, before[i].out)) << after[i].name;
  }
}

// What follows a row does not reach it: infinite, NaN or not there at all.
TYPED_TEST(EveryMap, TheFutureLeavesRowsBitwiseAlone) {
  using T = typename TypeParam::scalar;
  const auto attn = TypeParam::make(head_dim_of_nan, value_dim_of_nan, heads_of_nan);
  const auto clean = inputs_of_nan<T>();
  const auto y = attn.forward_causal(clean.q, clean.k, clean.v);
  for (const Index first : {1, 3, 4, 5, 10}) {
    for (const T bad : {nan<T>, infinity<T>, -infinity<T>, std::numeric_limits<T>::max()}) {
      auto x = inputs_of_nan<T>();
      x.q.bottomRows(n_rows - first).setConstant(bad);
      x.k.bottomRows(n_rows - first).setConstant(bad);
      x.v.bottomRows(n_rows - first).setConstant(bad);
      EXPECT_TRUE(support::same_bits(attn.forward_causal(x.q, x.k, x.v).topRows(first), y.topRows(first))) << first;
    }
    const row_matrix<T> q = clean.q.topRows(first), k = clean.k.topRows(first), v = clean.v.topRows(first);
    EXPECT_TRUE(support::same_bits(attn.forward_causal(q, k, v), y.topRows(first))) << first;
  }
}

// ---- long sums ------------------------------------------------------------------------------------------------------

/// The state of one head of one coordinate after n tokens of key k and value v: a constant stream, as one stored row.
template <class T>
auto constant_stream(Index n, T k, T v) {
  const linattn::linear_attention<linattn::identity, linattn::additive, T, 1> attn;
  auto s = attn.make_state();
  auto ws = attn.make_workspace();
  attn.absorb(s, matrix_view<const T>(&k, n, 1, 0), matrix_view<const T>(&v, n, 1, 0), ws);
  EXPECT_EQ(s.tokens(), n);
  return s;
}

/// A sum of n numbers of one sign, added one by one, is off by at most (n - 1) half ulps, relatively.
template <class T>
double bound_of_sum(Index n) {
  return static_cast<double>(n - 1) * static_cast<double>(std::numeric_limits<T>::epsilon()) / 2;
}

TEST(LongSums, FiveThousandOnesAreExact) {
  const auto s = constant_stream<float>(5000, 1, 1);
  EXPECT_EQ(s.k_sum(0)[0], 5000.0F);
  EXPECT_EQ(s.kv(0)(0, 0), 5000.0F);
}

template <class T>
void expect_million_thirds() {
  const Index n = 1000000;
  const T third = T(1) / T(3);
  const auto s = constant_stream<T>(n, third, 1);
  const double right = static_cast<double>(n) * static_cast<double>(third);
  EXPECT_LE(std::abs(static_cast<double>(s.k_sum(0)[0]) / right - 1), bound_of_sum<T>(n));
  // S and z drift together where values are constant: averages hold to rounding.
  EXPECT_NEAR(static_cast<double>(s.kv(0)(0, 0)) / static_cast<double>(s.k_sum(0)[0]), 1,
              support::tolerance<T>::relative_rms);
}

TEST(LongSums, AMillionThirdsDriftWithinTheBoundInFloat) { expect_million_thirds<float>(); }
TEST(LongSums, AMillionThirdsDriftWithinTheBoundInDouble) { expect_million_thirds<double>(); }

// The limit of an additive state, and one remedy. 2^24 + 1 is not a float: after six minutes of audio at 48 kHz nothing
// more is learned.
TEST(LongSums, FloatSaturatesAtTwoToTheTwentyFour) {
  const Index n = Index(1) << 25;
  const auto single = constant_stream<float>(n, 1, 1);
  EXPECT_EQ(single.k_sum(0)[0], 0x1p24F);
  EXPECT_EQ(single.kv(0)(0, 0), 0x1p24F);
  const auto wide = constant_stream<double>(n, 1, 1);
  EXPECT_EQ(wide.k_sum(0)[0], 0x1p25);
  EXPECT_EQ(wide.kv(0)(0, 0), 0x1p25);
}

// The causal kernel sums by blocks; it saturates where absorb does.
TEST(LongSums, EveryPathSaturates) {
  const linattn::linear_attention<linattn::identity, linattn::additive, float, 1> attn({.normalize = true});
  auto ws = attn.make_workspace();
  const row_matrix<float> ones = row_matrix<float>::Ones(100, 1);
  row_matrix<float> y(100, 1);
  auto start = attn.make_state();
  start.kv(0)(0, 0) = start.k_sum(0)[0] = 0x1p24F - 10;
  auto absorbed = start, causal = start, stepped = start;
  attn.absorb(absorbed, ones, ones, ws);
  attn.forward_causal(causal, ones, ones, ones, y, ws);
  for (Index i = 0; i < 100; ++i) attn.step(stepped, ones.row(i), ones.row(i), ones.row(i), y.row(i), ws);
  for (const auto* s : {&absorbed, &causal, &stepped}) {
    EXPECT_EQ(s->k_sum(0)[0], 0x1p24F);
    EXPECT_EQ(s->kv(0)(0, 0), 0x1p24F);
  }
}

// ---- exponential features -------------------------------------------------------------------------------------------

TEST(Exponential, EqualsTheOracleWhileSumsFit) {
  const Index n = 40;
  const auto attn = with<linattn::exponential, float>::make(8, 3);
  row_matrix<float> q = support::uniform_matrix<float>(n, 8, 12, -20, 20);
  row_matrix<float> k = support::uniform_matrix<float>(n, 8, 13, -20, 20);
  const row_matrix<float> v = support::normal_matrix<float>(n, 3, 14);
  for (const bool first_key_is_large : {false, true}) {
    if (first_key_is_large) k.row(0).setConstant(35);  // and what follows is small beside it
    for (const auto& p : every_path(attn, q, k, v)) {
      EXPECT_TRUE(
          support::close(p.out, expected<linattn::exponential>(p, q, k, v), support::tolerance<float>::relative_rms))
          << p.name;
    }
  }
}

// Logits of +-60 and more, in every order: exp of them, and of their sums, is beyond float.
TEST(Exponential, LogitsFarBeyondTheRangeOfExp) {
  const Index n = 40;
  const auto attn = with<linattn::exponential, float>::make(8, 3);
  const row_matrix<float> v = support::normal_matrix<float>(n, 3, 14);
  for (const float size : {60.0F, 300.0F}) {
    const row_matrix<float> q = support::uniform_matrix<float>(n, 8, 15, -size, size);
    row_matrix<float> k = support::uniform_matrix<float>(n, 8, 16, -size, size);
    for (int order = 0; order < 3; ++order) {
      if (order == 1) k.row(0).setConstant(size);          // and what follows is small beside it
      if (order == 2) k.row(n - 1).setConstant(2 * size);  // and it is small beside what follows
      for (const auto& p : every_path(attn, q, k, v)) {
        EXPECT_TRUE(
            support::close(p.out, expected<linattn::exponential>(p, q, k, v), support::tolerance<float>::relative_rms))
            << p.name << " at " << size;
      }
    }
  }
}

// Not normalised, what exp of a logit is multiplied by may bring it back into range.
TEST(Exponential, LargeAndSmallLogitsNotNormalised) {
  const linattn::linear_attention<linattn::exponential> attn({.head_dim = 1, .normalize = false});
  for (const double x : {45.0, 50.0, -45.0, -50.0}) {
    const double value = x > 0 ? 1e-10 : 1e10;  // e^100 = 2.7e43 and its inverse are beyond float
    const row_matrix<float> qk = row_matrix<float>::Constant(1, 1, float(x));
    const row_matrix<float> v = row_matrix<float>::Constant(1, 1, float(value)), one = row_matrix<float>::Ones(1, 1);
    const double expected = double(v(0, 0)) * std::exp(2 * x);
    auto s = attn.make_state();
    attn.absorb(s, qk, v);
    const double got[] = {attn.forward_causal(qk, qk, v)(0, 0), attn.read(s, qk)(0, 0), attn.forward(qk, qk, v)(0, 0),
                          attn.vjp_causal(qk, qk, v, one).dq(0, 0), attn.vjp(qk, qk, v, one).dk(0, 0)};
    for (const double y : got) EXPECT_NEAR(y / expected, 1, support::tolerance<float>::relative_rms) << "at " << x;
  }
}

// Only what decays is cleared: values of any size are averaged.
TEST(Exponential, TinyValuesAreKept) {
  const Index n = 8;
  const auto attn = with<linattn::exponential, float>::make(4, 4);
  const row_matrix<float> qk = row_matrix<float>::Zero(n, 4), v = row_matrix<float>::Constant(n, 4, 1e-31F);
  for (const auto& p : every_path(attn, qk, qk, v)) {
    EXPECT_TRUE(support::close(p.out, v, support::tolerance<float>::relative_rms)) << p.name;
  }
}

// A feature that is 0 for every key so far, and one that no query has.
TEST(Exponential, FeaturesOfZero) {
  const Index n = 9;
  const auto attn = with<linattn::exponential, float>::make(3, 2);
  const row_matrix<float> v = support::normal_matrix<float>(n, 2, 17);
  row_matrix<float> q = support::normal_matrix<float>(n, 3, 18), k = support::normal_matrix<float>(n, 3, 19);
  k.col(0).head(5).setConstant(-infinity<float>);
  k.row(0).setConstant(-infinity<float>);
  q.col(2).setConstant(-infinity<float>);
  for (const auto& p : every_path(attn, q, k, v)) {
    EXPECT_TRUE(
        support::close(p.out, expected<linattn::exponential>(p, q, k, v), support::tolerance<float>::relative_rms))
        << p.name;
  }
}

// ---- inputs of one row ----------------------------------------------------------------------------------------------

// One row for every token, by a row stride of 0, is the matrix of that row repeated.
TYPED_TEST(EveryMap, BroadcastInputs) {
  using T = typename TypeParam::scalar;
  const Index n = 11;
  const auto attn = TypeParam::make(5, 3);
  const support::attention_inputs<T> x(n, 5, 3, 17);
  const auto repeated = [&](const row_matrix<T>& one) { return row_matrix<T>(one.row(0).replicate(n, 1)); };
  const auto broadcast = [&](const row_matrix<T>& one) { return matrix_view<const T>(one.data(), n, one.cols(), 0); };
  const row_matrix<T> q = repeated(x.q), k = repeated(x.k), v = repeated(x.v);
  EXPECT_TRUE(support::same_bits(attn.forward_causal(broadcast(x.q), x.k, x.v), attn.forward_causal(q, x.k, x.v)));
  EXPECT_TRUE(support::same_bits(attn.forward_causal(x.q, broadcast(x.k), x.v), attn.forward_causal(x.q, k, x.v)));
  EXPECT_TRUE(support::same_bits(attn.forward_causal(x.q, x.k, broadcast(x.v)), attn.forward_causal(x.q, x.k, v)));
  EXPECT_TRUE(support::same_bits(attn.forward(broadcast(x.q), broadcast(x.k), broadcast(x.v)), attn.forward(q, k, v)));
}

// ---- flush to zero --------------------------------------------------------------------------------------------------

#if LINATTN_TEST_HAS_FLUSH_TO_ZERO

/// Subnormal results become zero (FTZ), subnormal operands count as zero (DAZ), as audio and game programs set it.
class flush_to_zero {
 public:
  flush_to_zero() : m_before(_mm_getcsr()) {
    _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
    _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON);
  }
  ~flush_to_zero() { _mm_setcsr(m_before); }
  flush_to_zero(const flush_to_zero&) = delete;
  flush_to_zero& operator=(const flush_to_zero&) = delete;

 private:
  unsigned m_before;
};

TEST(FlushToZero, IsOn) {
  volatile float smallest_normal = std::numeric_limits<float>::min();
  {
    const flush_to_zero mode;
    EXPECT_EQ(smallest_normal * 0.5F, 0.0F);
  }
  EXPECT_GT(smallest_normal * 0.5F, 0.0F);
}

TYPED_TEST(EveryMap, LawsWithFlushToZero) {
  using T = typename TypeParam::scalar;
  using map = typename TypeParam::map;
  constexpr double bound = support::tolerance<T>::relative_rms;
  const Index n = 37;
  const auto attn = TypeParam::make(5, 3, 2);
  const support::attention_inputs<T> x(n, 10, 6, 18);
  std::vector<support::wide_matrix> right;
  for (const auto& p : every_path(attn, x.q, x.k, x.v)) right.push_back(expected<map>(p, x.q, x.k, x.v, 2));

  const flush_to_zero mode;
  const auto paths = every_path(attn, x.q, x.k, x.v);
  if constexpr (is_positive<map>) {
    for (std::size_t i = 0; i < paths.size(); ++i) {
      EXPECT_TRUE(support::close(paths[i].out, right[i], bound)) << paths[i].name;
    }
    const row_matrix<T> q = x.q.cwiseAbs(), k = x.k.cwiseAbs(), ones = row_matrix<T>::Ones(n, 6);
    EXPECT_TRUE(support::close(attn.forward_causal(q, k, x.v).row(0), x.v.row(0), bound));
    for (const auto& p : every_path(attn, q, k, ones)) EXPECT_TRUE(support::close(p.out, ones, bound)) << p.name;
  }
  // The order of the keys does not matter, a.merge(b) is absorbing both.
  auto whole = attn.make_state(), earlier = attn.make_state();
  attn.absorb(whole, x.k, x.v);
  attn.absorb(earlier, x.k.bottomRows(20), x.v.bottomRows(20));
  auto later = attn.make_state();
  attn.absorb(later, x.k.topRows(n - 20), x.v.topRows(n - 20));
  earlier.merge(later);
  for (Index h = 0; h < 2; ++h) {
    EXPECT_TRUE(support::close(earlier.kv(h), whole.kv(h), bound));
    EXPECT_TRUE(support::close(earlier.k_sum(h), whole.k_sum(h), bound));
  }
  // The future.
  const auto y = attn.forward_causal(x.q, x.k, x.v);
  auto bad = x;
  bad.k.bottomRows(n - 6).setConstant(nan<T>);
  bad.v.bottomRows(n - 6).setConstant(infinity<T>);
  EXPECT_TRUE(support::same_bits(attn.forward_causal(bad.q, bad.k, bad.v).topRows(6), y.topRows(6)));
}

// Without subnormals the products of elu + 1 at -45 are 0, and so is the output; neither NaN nor infinite. At -43 they
// are 4e-38, within the normal range, and the law holds.
TEST(FlushToZero, SmallDenominators) {
  const Index n = 9;
  const auto attn = with<linattn::elu_plus_one, float>::make(8, 3);
  const row_matrix<float> v = support::uniform_matrix<float>(n, 3, 19, -2, 5), ones = row_matrix<float>::Ones(n, 3);
  const flush_to_zero mode;
  for (const float x : {-45.0F, -60.0F}) {
    const row_matrix<float> qk = row_matrix<float>::Constant(n, 8, x);
    for (const auto& p : every_path(attn, qk, qk, v)) EXPECT_TRUE(support::all_zero(p.out)) << p.name << " at " << x;
  }
  const row_matrix<float> qk = row_matrix<float>::Constant(n, 8, -43.0F);
  for (const auto& p : every_path(attn, qk, qk, ones)) {
    EXPECT_TRUE(support::close(p.out, ones, support::tolerance<float>::relative_rms)) << p.name;
  }
}

TEST(FlushToZero, LargeDenominators) {
  const auto attn = with<linattn::relu, float>::make(1, 1);
  const flush_to_zero mode;
  const row_matrix<float> v = row_matrix<float>::Ones(1, 1);
  for (const float x : {40.0F, 43.0F, 43.7F, 44.0F, 44.3F}) {
    const row_matrix<float> qk = row_matrix<float>::Constant(1, 1, std::exp(x));
    for (const auto& p : every_path(attn, qk, qk, v)) {
      EXPECT_TRUE(support::close(p.out, v, support::tolerance<float>::relative_rms)) << p.name << " at " << x;
    }
  }
}

#endif

}  // namespace
