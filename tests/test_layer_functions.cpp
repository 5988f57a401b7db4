// What a transformer's layers are made of, each alone: affine maps, layer normalisation, activations, sinusoids.
#include <linattn/detail/dense.hpp>
#include <linattn/detail/layer_functions.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/sentinel.hpp"
#include "support/transformer_oracle.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

using Eigen::Index;
using linattn::matrix_view;
using linattn::row_matrix;
using linattn::row_vector;
using support::wide;
using support::wide_matrix;

constexpr double infinity = std::numeric_limits<double>::infinity();

template <class T>
class LayerFunctions : public testing::Test {
 protected:
  static constexpr double epsilon = std::numeric_limits<T>::epsilon();
};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(LayerFunctions, scalars);

// ---- dense ----------------------------------------------------------------------------------------------------------

template <class T>
linattn::affine_weights<T> random_affine(Index outputs, Index inputs, std::uint64_t seed, bool has_bias = true) {
  linattn::affine_weights<T> a{support::normal_matrix<T>(outputs, inputs, seed), {}};
  if (has_bias) a.bias = support::normal_matrix<T>(1, outputs, seed + 1);
  return a;
}

template <class T>
row_matrix<T> apply(const linattn::detail::dense<T>& map, const row_matrix<T>& x) {
  support::framed<T> y(x.rows(), map.outputs());
  map.apply(x, y.matrix());
  EXPECT_TRUE(y.frame_intact()) << x.rows() << " rows, " << map.outputs() << " outputs";
  return y.matrix();
}

// Every remainder of rows, of columns of a panel and of registers.
TYPED_TEST(LayerFunctions, DenseIsTheAffineMapAndWritesNothingBeside) {
  using T = TypeParam;
  for (const Index outputs : {1, 2, 7, 16, 17, 33, 64, 65, 130}) {
    for (const Index inputs : {1, 5, 33}) {
      for (const bool has_bias : {true, false}) {
        const auto a = random_affine<T>(outputs, inputs, 1, has_bias);
        const linattn::detail::dense<T> map{&a};
        EXPECT_EQ(map.inputs(), inputs);
        for (Index rows = 0; rows <= 14; ++rows) {
          const row_matrix<T> x = support::normal_matrix<T>(rows, inputs, 3);
          ASSERT_TRUE(support::close(apply(map, x), support::affine(wide(x), a), support::tolerance<T>::relative_rms))
              << rows << " rows, " << outputs << " outputs, " << inputs << " inputs";
        }
      }
    }
  }
}

TYPED_TEST(LayerFunctions, DenseOfSeveralMapsPutsThemSideBySide) {
  using T = TypeParam;
  const auto a = random_affine<T>(5, 9, 1), b = random_affine<T>(70, 9, 3, false), c = random_affine<T>(3, 9, 5);
  const linattn::affine_weights<T> none;
  const row_matrix<T> x = support::normal_matrix<T>(4, 9, 7);
  row_matrix<T> apart(4, 78);
  apart << apply({&a}, x), apply({&b}, x), apply({&c}, x);
  EXPECT_TRUE(support::same_bits(apply({&a, &b, &none, &c}, x), apart));
  EXPECT_TRUE((linattn::detail::dense<T>{&none}).is_empty());
  EXPECT_TRUE(linattn::detail::dense<T>().is_empty());
}

TYPED_TEST(LayerFunctions, DenseGivesARowTheSameBitsInAnyCompany) {
  using T = TypeParam;
  const auto a = random_affine<T>(77, 33, 1);
  const linattn::detail::dense<T> map{&a};
  const row_matrix<T> x = support::normal_matrix<T>(23, 33, 3);
  const row_matrix<T> all = apply(map, x);
  for (Index rows = 1; rows <= 23; ++rows) {
    for (Index first = 0; first + rows <= 23; first += rows) {
      ASSERT_TRUE(support::same_bits(apply<T>(map, x.middleRows(first, rows)), all.middleRows(first, rows)))
          << "rows " << first << " to " << first + rows;
    }
  }
}

TYPED_TEST(LayerFunctions, DenseReadsNothingBeyondItsRows) {
  using T = TypeParam;
  const auto a = random_affine<T>(19, 7, 1);
  const row_matrix<T> x = support::normal_matrix<T>(9, 7, 3);
  support::exact_buffer<T> in(x, 2, 1), out(9, 19, 20, 1);
  const linattn::detail::dense<T> map{&a};
  map.apply(in.matrix(), out.matrix());
  EXPECT_TRUE(support::same_bits(out.matrix(), apply(map, x)));
}

// ---- layer normalisation --------------------------------------------------------------------------------------------

template <class T>
linattn::norm_weights<T> random_norm(Index n) {
  return {row_vector<T>(support::normal_matrix<T>(1, n, 1)), row_vector<T>(support::normal_matrix<T>(1, n, 2))};
}

constexpr double norm_epsilon = 1e-5;

template <class T>
row_matrix<T> normalized(const row_matrix<T>& x, const linattn::norm_weights<T>& n) {
  support::framed<T> y(x.rows(), x.cols());
  linattn::detail::layer_norm<T>(x, n.weight.data(), n.bias.data(), T(norm_epsilon), y.matrix());
  EXPECT_TRUE(y.frame_intact());
  row_matrix<T> in_place = x;
  linattn::detail::layer_norm<T>(in_place, n.weight.data(), n.bias.data(), T(norm_epsilon), in_place);
  EXPECT_TRUE(support::same_bits(in_place, y.matrix()));
  return in_place;
}

/// Four roundings of a coordinate of size 1, and those of the mean and the variance.
template <class T>
constexpr double norm_roundings = 4 * std::numeric_limits<T>::epsilon();

TYPED_TEST(LayerFunctions, LayerNormIsTheEquation) {
  using T = TypeParam;
  for (const Index n : {2, 3, 7, 16, 17, 33, 64, 257}) {
    const auto weights = random_norm<T>(n);
    const row_matrix<T> x = support::normal_matrix<T>(5, n, 3);
    EXPECT_TRUE(
        support::close(normalized(x, weights), support::layer_norm(wide(x), weights, norm_epsilon), norm_roundings<T>))
        << n << " columns";
  }
}

// What is common to all columns goes away, however large it is: nothing but epsilon and the inputs' own last bits are
// left of a mean of 2^20.
TYPED_TEST(LayerFunctions, LayerNormOfAHugeMean) {
  using T = TypeParam;
  for (const Index n : {7, 33, 64, 257}) {
    const auto weights = random_norm<T>(n);
    row_matrix<T> x = support::normal_matrix<T>(5, n, 3);
    x.array() += T(0x1p20);
    EXPECT_TRUE(
        support::close(normalized(x, weights), support::layer_norm(wide(x), weights, norm_epsilon), norm_roundings<T>))
        << n << " columns";
  }
}

TYPED_TEST(LayerFunctions, LayerNormOfAConstantRowIsTheBias) {
  using T = TypeParam;
  for (const Index n : {1, 7, 33, 257}) {
    const auto weights = random_norm<T>(n);
    for (const double value : {0.0, 0.1, -1e3 / 3, 1e7 / 3, 1e12 / 3}) {
      const row_matrix<T> x = row_matrix<T>::Constant(1, n, T(value));
      EXPECT_TRUE(support::close(normalized(x, weights), row_matrix<T>(weights.bias), norm_roundings<T>))
          << n << " columns of " << value;
    }
  }
}

TYPED_TEST(LayerFunctions, LayerNormKeepsNanAndInfinityInTheirRow) {
  LINATTN_NEEDS_NAN();
  using T = TypeParam;
  const auto weights = random_norm<T>(17);
  for (const double bad : {std::nan(""), infinity}) {
    for (const Index column : {0, 8, 16}) {
      row_matrix<T> x = support::normal_matrix<T>(3, 17, 3);
      const row_matrix<T> without = normalized(x, weights);
      x(1, column) = T(bad);
      const row_matrix<T> y = normalized(x, weights);
      EXPECT_TRUE(support::all_nan(y.row(1)));
      EXPECT_TRUE(support::same_bits(y.row(0), without.row(0)));
      EXPECT_TRUE(support::same_bits(y.row(2), without.row(2)));
    }
  }
}

// ---- activations and residuals --------------------------------------------------------------------------------------

/// A row as layers have them: aligned, padded to whole registers.
template <class T, class F>
row_matrix<T> in_padded_rows(const row_matrix<T>& x, const F& f) {
  const Index stride = linattn::detail::round_up(x.cols(), linattn::detail::line<T>);
  linattn::detail::heap_slab<T> slab(x.rows() * stride);
  const matrix_view<T> rows(slab.data(), x.rows(), x.cols(), stride);
  for (Index r = 0; r < x.rows(); ++r) {
    for (Index c = 0; c < x.cols(); ++c) rows(r, c) = x(r, c);
  }
  f(rows);
  row_matrix<T> y(x.rows(), x.cols());
  for (Index r = 0; r < x.rows(); ++r) {
    for (Index c = 0; c < x.cols(); ++c) y(r, c) = rows(r, c);
  }
  return y;
}
template <class T>
row_matrix<T> gelu_of(const row_matrix<T>& x) {
  return in_padded_rows(x, [](const matrix_view<T>& rows) { linattn::detail::gelu_rows(rows); });
}

/// erf is within one or two roundings of 1 of its value: what x is multiplied with is as good, not its small end.
template <class T>
constexpr double gelu_roundings = 3 * std::numeric_limits<T>::epsilon();

TYPED_TEST(LayerFunctions, GeluIsXTimesTheNormalDistribution) {
  using T = TypeParam;
  row_matrix<T> x(1, 40001);
  for (Index i = 0; i < x.cols(); ++i) x(0, i) = T(double(i - 20000) / 1000);
  const row_matrix<T> y = gelu_of(x);
  for (Index i = 0; i < x.cols(); ++i) {
    const auto expected = double(support::gelu((long double)(x(0, i))));
    ASSERT_NEAR(double(y(0, i)), expected, gelu_roundings<T> * std::abs(double(x(0, i)))) << "x = " << x(0, i);
  }
}

TYPED_TEST(LayerFunctions, GeluOfExtremes) {
  using T = TypeParam;
  const row_matrix<T> huge{{T(-1e30), T(-100), T(-0.0), T(1e-30), T(100), T(1e30)}};
  const row_matrix<T> expected{{T(0), T(0), T(0), T(5e-31), T(100), T(1e30)}};
  EXPECT_TRUE((gelu_of(huge).array() == expected.array()).all()) << gelu_of(huge);
}

// At -infinity the equation says infinity times 0.
TYPED_TEST(LayerFunctions, GeluKeepsNanAndInfinityInTheirPlace) {
  LINATTN_NEEDS_NAN();
  using T = TypeParam;
  const row_matrix<T> x{{T(1), T(infinity), T(1), T(std::nan("")), T(1), T(-infinity), T(1)}};
  const row_matrix<T> y = gelu_of(x);
  EXPECT_EQ(support::classify(y(0, 1)), support::number::plus_infinity);
  EXPECT_EQ(support::classify(y(0, 3)), support::number::nan);
  EXPECT_EQ(support::classify(y(0, 5)), support::number::nan);
  for (const Index c : {0, 2, 4, 6}) EXPECT_NEAR(double(y(0, c)), 0.84134474606854293, gelu_roundings<T>);
}

// Bits must not depend on the place in a register, nor on the length of the row.
TYPED_TEST(LayerFunctions, GeluOfEqualNumbersIsEqual) {
  using T = TypeParam;
  const row_matrix<T> values = support::normal_matrix<T>(100, 1, 1);
  const row_matrix<T> alone = gelu_of<T>(values);
  for (Index n = 1; n <= 37; ++n) {
    ASSERT_TRUE(support::same_bits(gelu_of<T>(values.replicate(1, n)), alone.replicate(1, n))) << n << " columns";
  }
}

TYPED_TEST(LayerFunctions, ReluKeepsWhatIsAboveZero) {
  using T = TypeParam;
  for (const Index n : {1, 7, 16, 33}) {
    const row_matrix<T> x = support::normal_matrix<T>(3, n, 1);
    support::framed<T> y(3, n);
    y.matrix() = x;
    linattn::detail::relu_rows<T>(y.matrix());
    EXPECT_TRUE((y.matrix().array() == x.cwiseMax(T(0)).array()).all());
    EXPECT_TRUE(y.frame_intact());
  }
}

TYPED_TEST(LayerFunctions, ReluKeepsNan) {
  LINATTN_NEEDS_NAN();
  using T = TypeParam;
  for (Index column = 0; column < 19; ++column) {
    row_matrix<T> x = row_matrix<T>::Constant(1, 19, T(-1));
    x(0, column) = T(std::nan(""));
    linattn::detail::relu_rows<T>(x);
    for (Index c = 0; c < 19; ++c) {
      EXPECT_EQ(support::classify(x(0, c)), c == column ? support::number::nan : support::number::finite);
    }
  }
}

TYPED_TEST(LayerFunctions, AddRowsAddsAndWritesNothingBeside) {
  using T = TypeParam;
  for (const Index n : {1, 7, 16, 33}) {
    const row_matrix<T> a = support::normal_matrix<T>(3, n, 1), b = support::normal_matrix<T>(3, n, 2);
    support::framed<T> y(3, n);
    y.matrix() = a;
    linattn::detail::add_rows<T>(y.matrix(), b);
    EXPECT_TRUE(support::same_bits(y.matrix(), a + b));
    EXPECT_TRUE(y.frame_intact());
  }
}

// ---- sinusoids ------------------------------------------------------------------------------------------------------

// Angles are in double: the wave of token 3,071 is off by what that leaves of an angle, and by T's own rounding.
TYPED_TEST(LayerFunctions, SinusoidsAreTheEquationAtEveryPlace) {
  using T = TypeParam;
  constexpr Index tokens = 3072;
  constexpr double of_the_angle = 4 * tokens * std::numeric_limits<double>::epsilon();
  for (const Index n : {1, 2, 7, 64}) {
    std::vector<double> frequencies;
    for (Index i = 0; 2 * i < n; ++i) frequencies.push_back(std::pow(10000.0, -2.0 * double(i) / double(n)));
    const wide_matrix expected = support::sinusoids(tokens, n);
    for (const Index place : {Index(0), Index(1), Index(2), Index(100), tokens - 1}) {
      row_matrix<T> written = row_matrix<T>::Constant(1, n, T(7)), added = written;
      linattn::detail::sinusoid(place, frequencies.data(), written.data(), n, false);
      linattn::detail::sinusoid(place, frequencies.data(), added.data(), n, true);
      for (Index c = 0; c < n; ++c) {
        EXPECT_NEAR(double(written(0, c)), double(expected(place, c)), of_the_angle + this->epsilon);
        EXPECT_EQ(added(0, c), T(7) + written(0, c));
      }
    }
  }
}

}  // namespace
