// The gated RMS norm: its equation in long double, ragged heads, places, NaN, and what it refuses.
#include <gtest/gtest.h>

#include <linattn/gated_rms_norm.hpp>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/sentinel.hpp"

namespace {

using Eigen::Index;
using linattn::gate_activation;
using linattn::gated_rms_norm;
using linattn::gated_rms_norm_options;
using linattn::row_matrix;
using linattn::row_vector;
using wide_matrix = row_matrix<long double>;

/// Less than a register, whole registers and one coordinate more.
constexpr Index awkward_sizes[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 65};

template <class T>
struct GatedRmsNorm : testing::Test {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(GatedRmsNorm, scalars);

template <class T>
wide_matrix equation(const row_matrix<T>& x, const row_matrix<T>& gate, const row_vector<T>& weight,
                     const gated_rms_norm_options& o) {
  const Index width = x.cols() / o.heads;
  wide_matrix y = x.template cast<long double>();
  for (Index i = 0; i < x.rows(); ++i) {
    const auto act = [&](Index j) {
      const long double g = gate(i, j), sigmoid = 1 / (1 + std::exp(-g));
      return o.activation == gate_activation::silu ? g * sigmoid : sigmoid;
    };
    for (Index h = 0; h < o.heads; ++h) {
      auto head = y.row(i).segment(h * width, width);
      for (Index j = 0; o.gate_first && j < width; ++j) head(j) *= act(h * width + j);
      head /= std::sqrt(head.squaredNorm() / static_cast<long double>(width) + static_cast<long double>(o.epsilon));
      for (Index j = 0; j < width; ++j) {
        if (weight.size() == width) head(j) *= weight(j);
        if (weight.size() == x.cols() && o.heads > 1) head(j) *= weight(h * width + j);
        if (!o.gate_first) head(j) *= act(h * width + j);
      }
    }
  }
  return y;
}

/// What every model in the header's table asks for, on 3 heads.
template <class F>
void for_each_option(const F& f) {
  for (const Index heads : {1, 3}) {
    for (const auto activation : {gate_activation::silu, gate_activation::sigmoid}) {
      for (const bool gate_first : {false, true}) {
        for (const double epsilon : {1e-6, 0.25}) {
          f(gated_rms_norm_options{
              .heads = heads, .epsilon = epsilon, .activation = activation, .gate_first = gate_first});
        }
      }
    }
  }
}

TYPED_TEST(GatedRmsNorm, EqualsItsEquation) {
  using T = TypeParam;
  for (const Index m : awkward_sizes) {
    const row_matrix<T> x = support::normal_matrix<T>(4, 3 * m, 1), gate = support::normal_matrix<T>(4, 3 * m, 2, 3);
    for_each_option([&](const gated_rms_norm_options& o) {
      for (const Index weights : {Index(0), 3 * m / o.heads, 3 * m}) {
        const row_vector<T> weight = support::normal_matrix<T>(1, weights, 3);
        support::framed<T> y(4, 3 * m);
        gated_rms_norm(x, gate, weight, y.matrix(), o);
        EXPECT_TRUE(support::close(y.matrix(), equation<T>(x, gate, weight, o), support::tolerance<T>::relative_rms))
            << "M = " << m << ", " << o.heads << " heads, " << weights << " weights";
        EXPECT_TRUE(y.frame_intact());
      }
    });
  }
}

TYPED_TEST(GatedRmsNorm, ARowDependsOnItselfAloneAndPlaceDoesNotMatter) {
  using T = TypeParam;
  const row_matrix<T> x = support::normal_matrix<T>(6, 21, 4), gate = support::normal_matrix<T>(6, 21, 5);
  const row_vector<T> weight = support::normal_matrix<T>(1, 7, 6);
  for_each_option([&](gated_rms_norm_options o) {
    const row_vector<T> w = o.heads == 1 ? row_vector<T>() : weight;
    row_matrix<T> whole(6, 21);
    gated_rms_norm(x, gate, w, whole, o);
    support::framed<T> rows(6, 21, 1);
    for (Index i = 0; i < 6; ++i) gated_rms_norm(x.row(i), gate.row(i), w, rows.matrix().row(i), o);
    EXPECT_TRUE(support::same_bits(rows.matrix(), whole));
    support::exact_buffer<T> in_x(x, 2, 1), in_gate(gate, 3, 1);
    gated_rms_norm(in_x.matrix(), gate, w, in_x.matrix(), o);
    EXPECT_TRUE(support::same_bits(in_x.matrix(), whole)) << "in the place of x";
    gated_rms_norm(x, in_gate.matrix(), w, in_gate.matrix(), o);
    EXPECT_TRUE(support::same_bits(in_gate.matrix(), whole)) << "in the place of the gate";
    row_matrix<T> nothing(0, 21);
    gated_rms_norm(nothing, nothing, w, nothing, o);
  });
}

TYPED_TEST(GatedRmsNorm, ZeroAndExtremeHeads) {
  LINATTN_NEEDS_NAN();
  using T = TypeParam;
  constexpr Index m = 8;
  row_matrix<T> x = row_matrix<T>::Zero(4, m), gate = row_matrix<T>::Constant(4, m, T(2)), y(4, m);
  x.row(1).setConstant(std::numeric_limits<T>::denorm_min());
  x.row(2).setConstant(std::sqrt(std::numeric_limits<T>::max()) / T(4));  // squares of which the head's sum is finite
  x.row(3).setConstant(std::sqrt(std::numeric_limits<T>::max()));         // not so here
  gated_rms_norm(x, gate, {}, y, {.activation = gate_activation::sigmoid});
  EXPECT_TRUE(support::all_zero(y.row(0)));
  EXPECT_LE(y.row(1).maxCoeff(), T(1e-30));
  const row_matrix<T> ones = row_matrix<T>::Constant(1, m, T(1) / (T(1) + std::exp(T(-2))));
  EXPECT_TRUE(support::close(y.row(2), ones, support::tolerance<T>::relative_rms));
  EXPECT_TRUE(support::all_zero(y.row(3)));

  gate.row(0) << T(-std::numeric_limits<T>::infinity()), T(-1000), T(1000), T(0), T(-90), T(90), T(1), T(-1);
  x.row(0).setOnes();
  gated_rms_norm(x.row(0), gate.row(0), {}, y.row(0));
  EXPECT_TRUE(support::all_finite(y));
  EXPECT_EQ(y(0, 0), T(0));
  EXPECT_EQ(y(0, 3), T(0));
}

TYPED_TEST(GatedRmsNorm, NaNFillsItsHead) {
  LINATTN_NEEDS_NAN();
  using T = TypeParam;
  const row_matrix<T> clean = support::normal_matrix<T>(2, 15, 7), gate = support::normal_matrix<T>(2, 15, 8);
  row_matrix<T> x = clean, spoilt = gate, y(2, 15);
  x(1, 7) = spoilt(1, 7) = std::numeric_limits<T>::quiet_NaN();
  gated_rms_norm(x, gate, {}, y, {.heads = 3});
  for (Index i = 0; i < 2; ++i) {
    for (Index j = 0; j < 15; ++j) EXPECT_EQ(std::isnan(y(i, j)), i == 1 && j / 5 == 1) << i << ", " << j;
  }
  gated_rms_norm(clean, spoilt, {}, y, {.heads = 3});
  for (Index i = 0; i < 2; ++i) {
    for (Index j = 0; j < 15; ++j) EXPECT_EQ(std::isnan(y(i, j)), i == 1 && j == 7) << i << ", " << j;
  }
}

TYPED_TEST(GatedRmsNorm, NothingAllocates) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  using T = TypeParam;
  const row_matrix<T> x = support::normal_matrix<T>(3, 34, 9);
  const row_vector<T> weight = support::normal_matrix<T>(1, 17, 10);
  row_matrix<T> y(3, 34);
  const support::allocation_count count;
  gated_rms_norm(x, x, weight, y, {.heads = 2});
  gated_rms_norm(x, x, {}, y, {.heads = 2, .gate_first = true});
  EXPECT_EQ(count.total(), 0);
}

TEST(GatedRmsNormErrors, SizesAreNamedBeforeAnythingIsWritten) {
  const row_matrix<float> x = row_matrix<float>::Ones(5, 12);
  const row_vector<float> five = row_vector<float>::Ones(5);
  support::framed<float> y(5, 12), narrow(5, 11);
  const auto refusal = [&](const auto& gate, const auto& weight, auto&& out, const gated_rms_norm_options& o) {
    try {
      gated_rms_norm(x, gate, weight, out, o);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  const row_vector<float> none;
  EXPECT_EQ(refusal(x, none, y.matrix(), {.heads = 5}),
            "linattn::gated_rms_norm: x has 12 columns, which 5 heads cannot share equally");
  EXPECT_EQ(refusal(x.topRows(4), none, y.matrix(), {}),
            "linattn::gated_rms_norm: gate is (4, 12), but x asks for (5, 12)");
  EXPECT_EQ(refusal(x, none, narrow.matrix(), {}), "linattn::gated_rms_norm: out is (5, 11), but x asks for (5, 12)");
  EXPECT_EQ(refusal(x, five, y.matrix(), {.heads = 3}),
            "linattn::gated_rms_norm: weight has 5 entries, but a head of x asks for 4");
  EXPECT_EQ(refusal(x, none, y.matrix(), {.epsilon = -1}), "linattn::gated_rms_norm: epsilon is -1, below 0");
  EXPECT_TRUE(y.untouched() && narrow.untouched());
}

}  // namespace
