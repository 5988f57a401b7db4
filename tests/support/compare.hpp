// Comparisons that a NaN cannot slip through, with failure texts that name the worst element.
//
//   EXPECT_TRUE(support::close(actual, expected, support::tolerance<float>::relative_rms));
//
// A NaN or an infinity on one side only fails every comparison, also under -ffast-math: numbers are classified by their
// bits, because there a compiler may take std::isnan for false and `!(error > bound)` for `error <= bound`.
#pragma once

#include <gtest/gtest.h>
#include <Eigen/Core>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <type_traits>

/// Begins a test about NaN or infinity: no promise about them holds where the compiler may assume there are none.
#define LINATTN_NEEDS_NAN()                                                                            \
  if (__FINITE_MATH_ONLY__) {                                                                          \
    GTEST_SKIP() << "built with -ffast-math or the like: the compiler may assume that no NaN is seen"; \
  }                                                                                                    \
  static_assert(true)

namespace support {

/// The tolerances of the tests, by scalar type; each bounds an error that has a name.
template <class T>
struct tolerance;

template <>
struct tolerance<float> {
  /// Any path against the reference evaluated in double: N <= 4096 tokens, N(0, 1) inputs, positive maps. Rounding of
  /// prefix sums gives 1e-7 to 4e-7 there; a lost token, feature or lane moves some rows by 1/N = 2e-4 or more, which
  /// is 1e-5 of the whole and above. Also for two paths of one computation, whose rounding differs.
  static constexpr double relative_rms = 1e-6;
  /// A feature against its closed form: 2 ulp of the packet exp, 1 of the operation around it, 1 of the comparison.
  static constexpr double feature_ulps = 4;
};

template <>
struct tolerance<double> {
  /// As in float, with 2^-53 for 2^-24: rounding gives 1e-15, and the margin of 1e-13 is for the reference's own.
  static constexpr double relative_rms = 1e-13;
  static constexpr double feature_ulps = 4;
};

/// What the bits of a number say it is.
enum class number { finite, nan, plus_infinity, minus_infinity };

inline number classify(double x) {
  const auto bits = std::bit_cast<std::uint64_t>(x);
  if ((bits >> 52 & 0x7ff) != 0x7ff) return number::finite;
  if ((bits & 0xfffffffffffffULL) != 0) return number::nan;
  return bits >> 63 ? number::minus_infinity : number::plus_infinity;
}
inline number classify(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits >> 23 & 0xff) != 0xff) return number::finite;
  if ((bits & 0x7fffff) != 0) return number::nan;
  return bits >> 31 ? number::minus_infinity : number::plus_infinity;
}
inline number classify(long double x) {
  if constexpr (std::numeric_limits<long double>::digits ==
                64) {  // x87: 64 bits of significand, then sign and exponent
    std::uint64_t significand;
    std::uint16_t top;
    std::memcpy(&significand, &x, sizeof significand);
    std::memcpy(&top, reinterpret_cast<const char*>(&x) + sizeof significand, sizeof top);
    if ((top & 0x7fff) != 0x7fff) return number::finite;
    if (significand << 1 != 0) return number::nan;
    return top >> 15 ? number::minus_infinity : number::plus_infinity;
  } else {
    return classify(static_cast<double>(x));
  }
}
template <class T>
requires(!std::is_floating_point_v<T>) number classify(const T& x) {  // half and bfloat16
  return classify(static_cast<float>(x));
}

inline bool finite(number kind) { return kind == number::finite; }

/// +0 or -0 by its bits: with subnormals flushed (-ffast-math links that in), x == 0 holds for them, too.
template <class T>
bool is_zero(const T& x) {
  if constexpr (sizeof(T) == 2) {
    return static_cast<std::uint16_t>(std::bit_cast<std::uint16_t>(x) << 1) == 0;
  } else if constexpr (sizeof(T) == 4) {
    return std::bit_cast<std::uint32_t>(x) << 1 == 0;
  } else if constexpr (sizeof(T) == 8) {
    return std::bit_cast<std::uint64_t>(x) << 1 == 0;
  } else {
    return x == T(0);
  }
}

/// The distance between T's neighbours of x.
template <class T>
long double ulp(long double x) {
  using limits = std::numeric_limits<T>;
  const int exponent = x == 0 ? limits::min_exponent - 1 : std::max(std::ilogb(x), limits::min_exponent - 1);
  return std::ldexp(1.0L, exponent - (limits::digits - 1));
}

/// Everything about two matrices that a failure text needs.
struct comparison {
  bool same_shape = true;
  double relative_rms = 0;  ///< sqrt(sum (a - e)^2 / sum e^2); infinite for a NaN or inf on one side, or e = 0 != a
  double max_ulps = 0;      ///< max |a - e| in ulps of a's type at e; infinite likewise
  std::string shapes;
  std::string worst;       ///< the element of the largest |a - e|
  std::string worst_ulps;  ///< the element that is most ulps off
};

namespace detail {

template <class A, class E>
std::string element(Eigen::Index i, Eigen::Index j, const A& actual, const E& expected) {
  std::ostringstream text;
  text.precision(std::numeric_limits<A>::max_digits10);
  text << "at (" << i << ", " << j << "): " << static_cast<long double>(actual) << " instead of "
       << static_cast<long double>(expected);
  return text.str();
}

template <class A, class E>
std::string shapes(const A& actual, const E& expected) {
  std::ostringstream text;
  text << "shape (" << actual.rows() << ", " << actual.cols() << ") instead of (" << expected.rows() << ", "
       << expected.cols() << ")";
  return text.str();
}

}  // namespace detail

template <class A, class E>
comparison compare(const Eigen::DenseBase<A>& actual_expression, const Eigen::DenseBase<E>& expected_expression) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const auto& actual = actual_expression.eval();
  const auto& expected = expected_expression.eval();
  using T = typename A::Scalar;
  comparison result;
  if (actual.rows() != expected.rows() || actual.cols() != expected.cols()) {
    result = {false, infinity, infinity, detail::shapes(actual, expected), {}, {}};
    return result;
  }
  long double squared_error = 0, squared_size = 0, largest = -1, most_ulps = -1;
  bool one_sided = false, one_sided_ulps = false;
  for (Eigen::Index i = 0; i < actual.rows(); ++i) {
    for (Eigen::Index j = 0; j < actual.cols(); ++j) {
      const T a = actual(i, j);
      const auto e = expected(i, j);
      const number kind_a = classify(a), kind_e = classify(e), kind_rounded = classify(static_cast<T>(e));
      if (finite(kind_a) && finite(kind_e)) {
        const long double error = std::abs(static_cast<long double>(a) - static_cast<long double>(e));
        squared_error += error * error;
        squared_size += static_cast<long double>(e) * static_cast<long double>(e);
        if (error > largest && !one_sided) {
          largest = error;
          result.worst = detail::element(i, j, a, e);
        }
        const long double ulps = finite(kind_rounded) ? error / ulp<T>(static_cast<long double>(e)) : 1;
        if (finite(kind_rounded) && ulps > most_ulps && !one_sided_ulps) {
          most_ulps = ulps;
          result.worst_ulps = detail::element(i, j, a, e);
        }
      } else if (kind_a != kind_e && !one_sided) {
        one_sided = true;
        result.worst = detail::element(i, j, a, e);
      }
      // A value beyond T's range rounds to infinity: in ulps that is right, as a difference it is not.
      if ((!finite(kind_a) || !finite(kind_rounded)) && kind_a != kind_rounded && !one_sided_ulps) {
        one_sided_ulps = true;
        result.worst_ulps = detail::element(i, j, a, e);
      }
    }
  }
  if (one_sided || (squared_size == 0 && squared_error > 0)) {
    result.relative_rms = infinity;
  } else if (squared_error > 0) {
    result.relative_rms = static_cast<double>(std::sqrt(squared_error / squared_size));
  }
  result.max_ulps = one_sided_ulps ? infinity : static_cast<double>(std::max(most_ulps, 0.0L));
  return result;
}

/// sqrt(sum (a - e)^2 / sum e^2). NaN and inf in the same place on both sides count as equal.
template <class A, class E>
double relative_rms_error(const Eigen::DenseBase<A>& actual, const Eigen::DenseBase<E>& expected) {
  return compare(actual, expected).relative_rms;
}

/// max |a - e| in ulps of a's type at e.
template <class A, class E>
double max_ulp_error(const Eigen::DenseBase<A>& actual, const Eigen::DenseBase<E>& expected) {
  return compare(actual, expected).max_ulps;
}

/// Same shape and the same bits: +0 is not -0, and a NaN equals only itself.
template <class A, class B>
bool bitwise_equal(const Eigen::DenseBase<A>& a_expression, const Eigen::DenseBase<B>& b_expression) {
  using T = typename A::Scalar;
  static_assert(std::is_same_v<T, typename B::Scalar>, "bits are compared between equal types");
  static_assert(!std::is_same_v<T, long double>, "a long double has padding bits");
  const auto& a = a_expression.eval();
  const auto& b = b_expression.eval();
  if (a.rows() != b.rows() || a.cols() != b.cols()) return false;
  for (Eigen::Index i = 0; i < a.rows(); ++i) {
    for (Eigen::Index j = 0; j < a.cols(); ++j) {
      const T x = a(i, j), y = b(i, j);
      if (std::memcmp(&x, &y, sizeof(T)) != 0) return false;
    }
  }
  return true;
}

// ---- what tests assert
// -----------------------------------------------------------------------------------------------

/// relative_rms_error(actual, expected) <= bound.
template <class A, class E>
testing::AssertionResult close(const Eigen::DenseBase<A>& actual, const Eigen::DenseBase<E>& expected, double bound) {
  const comparison c = compare(actual, expected);
  if (!c.same_shape) return testing::AssertionFailure() << c.shapes;
  if (c.relative_rms <= bound) return testing::AssertionSuccess() << "relative RMS error " << c.relative_rms;
  return testing::AssertionFailure() << "relative RMS error " << c.relative_rms << " exceeds " << bound << "; worst "
                                     << c.worst;
}

/// max_ulp_error(actual, expected) <= bound.
template <class A, class E>
testing::AssertionResult within_ulps(const Eigen::DenseBase<A>& actual, const Eigen::DenseBase<E>& expected,
                                     double bound) {
  const comparison c = compare(actual, expected);
  if (!c.same_shape) return testing::AssertionFailure() << c.shapes;
  if (c.max_ulps <= bound) return testing::AssertionSuccess() << c.max_ulps << " ulp";
  return testing::AssertionFailure() << c.max_ulps << " ulp exceed " << bound << "; worst " << c.worst_ulps;
}

/// bitwise_equal(actual, expected).
template <class A, class E>
testing::AssertionResult same_bits(const Eigen::DenseBase<A>& actual, const Eigen::DenseBase<E>& expected) {
  if (bitwise_equal(actual, expected)) return testing::AssertionSuccess();
  const comparison c = compare(actual, expected);
  if (!c.same_shape) return testing::AssertionFailure() << c.shapes;
  return testing::AssertionFailure() << "bits differ"
                                     << (c.max_ulps > 0 ? "; worst " + c.worst_ulps : ", in a sign of zero or a NaN");
}

/// No NaN and no infinity.
template <class A>
testing::AssertionResult all_finite(const Eigen::DenseBase<A>& actual_expression) {
  const auto& actual = actual_expression.eval();
  for (Eigen::Index i = 0; i < actual.rows(); ++i) {
    for (Eigen::Index j = 0; j < actual.cols(); ++j) {
      if (finite(classify(actual(i, j)))) continue;
      return testing::AssertionFailure() << static_cast<long double>(actual(i, j)) << " at (" << i << ", " << j << ")";
    }
  }
  return testing::AssertionSuccess();
}

/// Nothing but NaN; what a NaN that must not be swallowed leaves.
template <class A>
testing::AssertionResult all_nan(const Eigen::DenseBase<A>& actual_expression) {
  const auto& actual = actual_expression.eval();
  for (Eigen::Index i = 0; i < actual.rows(); ++i) {
    for (Eigen::Index j = 0; j < actual.cols(); ++j) {
      if (classify(actual(i, j)) == number::nan) continue;
      return testing::AssertionFailure() << static_cast<long double>(actual(i, j)) << " at (" << i << ", " << j << ")";
    }
  }
  return testing::AssertionSuccess();
}

/// Exactly zero everywhere; the sign of a zero is free.
template <class A>
testing::AssertionResult all_zero(const Eigen::DenseBase<A>& actual_expression) {
  const auto& actual = actual_expression.eval();
  for (Eigen::Index i = 0; i < actual.rows(); ++i) {
    for (Eigen::Index j = 0; j < actual.cols(); ++j) {
      if (is_zero(typename A::Scalar(actual(i, j)))) continue;
      return testing::AssertionFailure() << static_cast<long double>(actual(i, j)) << " at (" << i << ", " << j << ")";
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace support
