// The short convolution: its equation in long double, its laws to the bit, padding, NaN, and what it refuses.
#include <gtest/gtest.h>

#include <linattn/short_convolution.hpp>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/sentinel.hpp"

namespace {

using Eigen::Index;
using linattn::convolution_activation;
using linattn::row_matrix;
using linattn::row_vector;
using linattn::short_convolution;
using wide_matrix = row_matrix<long double>;

/// Less than a register, whole registers and one channel more.
constexpr Index awkward_channels[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 65};
constexpr Index widths[] = {1, 2, 3, 4, 7};

template <class T>
struct ShortConvolution : testing::Test {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(ShortConvolution, scalars);

/// y_tc = act(bias_c + sum_j w_cj x_(t - W + 1 + j)c), rows before the first being those of `past` (W - 1, channels).
template <class T>
wide_matrix equation(const row_matrix<T>& weight, const row_vector<T>& bias, bool silu, const row_matrix<T>& past,
                     const row_matrix<T>& x) {
  const Index width = weight.cols();
  wide_matrix y(x.rows(), x.cols());
  for (Index t = 0; t < x.rows(); ++t) {
    for (Index c = 0; c < x.cols(); ++c) {
      long double sum = bias.size() == 0 ? 0 : bias(c);
      for (Index j = 0; j < width; ++j) {
        const Index at = t - width + 1 + j;
        sum += static_cast<long double>(weight(c, j)) * (at < 0 ? past(width - 1 + at, c) : x(at, c));
      }
      y(t, c) = silu ? sum / (1 + std::exp(-sum)) : sum;
    }
  }
  return y;
}

/// One convolution of each kind: all widths, with and without bias and SiLU.
template <class T, class F>
void for_each_convolution(Index channels, const F& f) {
  std::uint64_t seed = 1;
  for (const Index width : widths) {
    for (const bool biased : {false, true}) {
      for (const auto activation : {convolution_activation::none, convolution_activation::silu}) {
        const row_matrix<T> weight = support::normal_matrix<T>(channels, width, ++seed);
        row_vector<T> bias;
        if (biased) bias = support::normal_matrix<T>(1, channels, ++seed);
        f(short_convolution<T>(weight, bias, activation), weight, bias, activation == convolution_activation::silu);
      }
    }
  }
}

TYPED_TEST(ShortConvolution, EqualsItsEquationFromAnyState) {
  using T = TypeParam;
  for (const Index channels : awkward_channels) {
    for_each_convolution<T>(channels, [&](const auto& conv, const auto& weight, const auto& bias, bool silu) {
      for (const Index tokens : {1, 2, 3, 5, 12}) {
        const row_matrix<T> x = support::normal_matrix<T>(tokens, channels, 90),
                            past = support::normal_matrix<T>(conv.width() - 1, channels, 91);
        auto s = conv.make_state();
        EXPECT_TRUE(support::all_zero(s.inputs()));
        s.inputs() = past;
        support::framed<T> y(tokens, channels);
        conv.forward(s, x, y.matrix());
        EXPECT_TRUE(
            support::close(y.matrix(), equation<T>(weight, bias, silu, past, x), support::tolerance<T>::relative_rms))
            << "W = " << conv.width() << ", " << channels << " channels, " << tokens << " tokens";
        EXPECT_TRUE(y.frame_intact());
        row_matrix<T> all(past.rows() + tokens, channels);
        all << past, x;
        EXPECT_TRUE(support::same_bits(s.inputs(), all.bottomRows(past.rows())));
      }
    });
  }
}

TYPED_TEST(ShortConvolution, StepsAndSplitsAgreeToTheBit) {
  using T = TypeParam;
  constexpr Index tokens = 13;
  for (const Index channels : awkward_channels) {
    const row_matrix<T> x = support::normal_matrix<T>(tokens, channels, 92);
    for_each_convolution<T>(channels, [&](const auto& conv, const auto&, const auto&, bool) {
      auto s = conv.make_state();
      row_matrix<T> whole(tokens, channels);
      conv.forward(s, x, whole);

      auto by_step = conv.make_state();
      support::framed<T> y(tokens, channels, 1);
      for (Index t = 0; t < tokens; ++t) conv.step(by_step, x.row(t), y.matrix().row(t));
      EXPECT_TRUE(support::same_bits(y.matrix(), whole)) << "W = " << conv.width() << ", " << channels;
      EXPECT_TRUE(support::same_bits(by_step.inputs(), s.inputs()));
      EXPECT_TRUE(y.frame_intact());

      auto by_parts = conv.make_state();
      support::exact_buffer<T> in(x, 3, 1), out(tokens, channels);
      for (Index first = 0, size = 0; first < tokens; first += size, size = (size + 1) % 5) {
        const Index n = std::min(size, tokens - first);
        conv.forward(by_parts, in.matrix().middleRows(first, n), out.matrix().middleRows(first, n));
      }
      EXPECT_TRUE(support::same_bits(out.matrix(), whole));
      EXPECT_TRUE(support::same_bits(by_parts.inputs(), s.inputs()));
    });
  }
}

TYPED_TEST(ShortConvolution, PaddingIsAsIfItWereNotThere) {
  LINATTN_NEEDS_NAN();
  using T = TypeParam;
  constexpr Index tokens = 11, channels = 9;
  // Left, right, between; one and several; none and all.
  const std::vector<std::string> patterns = {"..xxxxxxxxx", "xxxxxxxxx..", "xx..xxx.xxx", "x.x.x.x.x.x",
                                             "...........", "xxxxxxxxxxx", "..........x"};
  for (const std::string& pattern : patterns) {
    for_each_convolution<T>(channels, [&](const auto& conv, const auto&, const auto&, bool) {
      row_matrix<T> x = support::normal_matrix<T>(tokens, channels, 93);
      bool keep[tokens];
      std::vector<Index> kept;
      for (Index t = 0; t < tokens; ++t) {
        keep[t] = pattern[std::size_t(t)] == 'x';
        if (keep[t]) {
          kept.push_back(t);
        } else {
          x.row(t).setConstant(std::numeric_limits<T>::quiet_NaN());
        }
      }
      const Index n = static_cast<Index>(kept.size());
      row_matrix<T> without(n, channels), expected(n, channels), y(tokens, channels);
      for (Index i = 0; i < n; ++i) without.row(i) = x.row(kept[std::size_t(i)]);
      auto s = conv.make_state(), masked = conv.make_state();
      s.inputs() = support::normal_matrix<T>(conv.width() - 1, channels, 94);
      masked = s;
      conv.forward(s, without, expected);
      conv.forward(masked, x, y, keep);
      for (Index i = 0; i < n; ++i) {
        EXPECT_TRUE(support::same_bits(y.row(kept[std::size_t(i)]), expected.row(i))) << pattern << ", row " << i;
      }
      for (Index t = 0; t < tokens; ++t) {
        EXPECT_TRUE(keep[t] || support::all_zero(y.row(t))) << pattern;
      }
      EXPECT_TRUE(support::same_bits(masked.inputs(), s.inputs())) << pattern;
    });
  }
}

TYPED_TEST(ShortConvolution, NaNReachesAWindowAndIsForgotten) {
  LINATTN_NEEDS_NAN();
  using T = TypeParam;
  constexpr Index tokens = 12, channels = 5, bad = 4;
  for_each_convolution<T>(channels, [&](const auto& conv, const auto&, const auto&, bool) {
    row_matrix<T> x = support::normal_matrix<T>(tokens, channels, 95), clean(tokens, channels), y(tokens, channels);
    auto a = conv.make_state(), b = conv.make_state();
    conv.forward(a, x, clean);
    x(bad, 2) = std::numeric_limits<T>::quiet_NaN();
    conv.forward(b, x, y);
    for (Index t = 0; t < tokens; ++t) {
      for (Index c = 0; c < channels; ++c) {
        const bool hit = c == 2 && t >= bad && t < bad + conv.width();
        EXPECT_EQ(std::isnan(y(t, c)), hit) << t << ", " << c;
        EXPECT_TRUE(hit || y(t, c) == clean(t, c)) << t << ", " << c;
      }
    }
  });
}

TYPED_TEST(ShortConvolution, StatesAreValues) {
  using T = TypeParam;
  const row_matrix<T> weight = support::normal_matrix<T>(6, 4, 96), x = support::normal_matrix<T>(9, 6, 97);
  const short_convolution<T> conv(weight);
  auto s = conv.make_state();
  row_matrix<T> y(9, 6), again(9, 6);
  conv.forward(s, x.topRows(5), y.topRows(5));
  const auto snapshot = s;
  conv.forward(s, x.bottomRows(4), y.bottomRows(4));
  s = snapshot;
  conv.forward(s, x.bottomRows(4), again.bottomRows(4));
  EXPECT_TRUE(support::same_bits(again.bottomRows(4), y.bottomRows(4)));
  s.reset();
  conv.forward(s, x, again);
  EXPECT_TRUE(support::same_bits(again, y));
}

TYPED_TEST(ShortConvolution, NoCallAllocates) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  using T = TypeParam;
  const row_matrix<T> weight = support::normal_matrix<T>(19, 4, 98), x = support::normal_matrix<T>(9, 19, 99);
  const short_convolution<T> conv(weight, {}, convolution_activation::silu);
  auto s = conv.make_state();
  auto other = s;
  row_matrix<T> y(9, 19);
  const bool keep[9] = {true, true, false, true, false, false, true, true, true};
  const support::allocation_count count;
  conv.forward(s, x, y);
  conv.forward(s, x, y, keep);
  conv.step(s, x.row(0), y.row(0));
  other = s;
  other.reset();
  EXPECT_EQ(count.total(), 0);
}

template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(ShortConvolutionErrors, SizesAreNamedBeforeAnythingIsWritten) {
  const row_matrix<float> weight = row_matrix<float>::Ones(5, 4), x = row_matrix<float>::Ones(3, 5);
  const short_convolution<> conv(weight);
  auto s = conv.make_state();
  support::framed<float> y(3, 5), narrow(3, 4), rows(2, 5);
  EXPECT_EQ(refusal([&] { conv.forward(s, x.leftCols(4), narrow.matrix()); }),
            "linattn::short_convolution::forward: x is (3, 4), but the weight asks for (3, 5)");
  EXPECT_EQ(refusal([&] { conv.forward(s, x, narrow.matrix()); }),
            "linattn::short_convolution::forward: y is (3, 4), but x asks for (3, 5)");
  EXPECT_EQ(refusal([&] { conv.forward(s, x, rows.matrix()); }),
            "linattn::short_convolution::forward: y is (2, 5), but x asks for (3, 5)");
  const bool keep[2] = {true, true};
  EXPECT_EQ(refusal([&] { conv.forward(s, x, y.matrix(), keep); }),
            "linattn::short_convolution::forward: keep has 2 entries for x (3, 5)");
  const row_matrix<float> longer = row_matrix<float>::Ones(5, 7), none(5, 0), nobody(0, 4);
  auto other = short_convolution<>(longer).make_state();
  EXPECT_EQ(refusal([&] { conv.forward(other, x, y.matrix()); }),
            "linattn::short_convolution::forward: the state is (6, 5), but the weight asks for (3, 5)");
  linattn::short_convolution_state<float> empty, moved = std::move(s);
  EXPECT_EQ(refusal([&] { conv.forward(empty, x, y.matrix()); }),
            "linattn::short_convolution::forward: the state is (0, 0), but the weight asks for (3, 5)");
  EXPECT_EQ(refusal([&] { conv.forward(s, x, y.matrix()); }),  // NOLINT(bugprone-use-after-move): that is the point
            "linattn::short_convolution::forward: the state is (0, 5), but the weight asks for (3, 5)");
  EXPECT_TRUE(y.untouched() && narrow.untouched() && rows.untouched());
  EXPECT_TRUE(support::all_zero(moved.inputs()));

  const row_vector<float> bias = row_vector<float>::Ones(4);
  EXPECT_EQ(refusal([&] { short_convolution<> wrong(weight, bias); }),
            "linattn::short_convolution: bias has 4 entries, but the weight asks for 5");
  EXPECT_EQ(refusal([&] { short_convolution<> wrong(none); }),
            "linattn::short_convolution: a weight of (5, 0) has no channels (rows) or no taps (columns)");
  EXPECT_EQ(refusal([&] { short_convolution<> wrong(nobody); }),
            "linattn::short_convolution: a weight of (0, 4) has no channels (rows) or no taps (columns)");
}

}  // namespace
