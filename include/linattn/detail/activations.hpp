// The logistic family in packets: what gates are made of. NaN is kept by all of them.
//
// Errors are in ulp over every argument, infinities included, and follow from the 2 ulp of exp. They are the same with
// every Eigen, as exp is. With fma on SSE2 a product and a sum, one rounding more.
#pragma once

#include <linattn/detail/simd.hpp>

#include <limits>
#include <type_traits>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// ln(1 + t) for t in [0, 1]: at most 2 ulp.
///
///   ln(1 + t) = 2 atanh(u / 2) = u + u^3 p(u^2),   u = 2 t / (2 + t) <= 2/3,   p(z) = 1/12 + z/80 + z^2/448 + ...
///
/// No argument is reduced and no exponent taken apart. p interpolates at Chebyshev nodes; what it leaves of the
/// relative error is 4.0e-10 (float, degree 4) and 5.0e-18 (double, degree 9).
template <class T>
LINATTN_INLINE packet<T> log1p_of_unit(const packet<T>& t) {
  using P = packet<T>;
  const P u = (t + t) / (P(T(2)) + t);
  const P z = u * u;
  P p;
  if constexpr (std::is_same_v<T, float>) {
    p = P(T(0.00011340004503917651));
    p = fma(p, z, P(T(0.00042395655861094478)));
    p = fma(p, z, P(T(0.0022337779683049092)));
    p = fma(p, z, P(T(0.012499908228728037)));
    p = fma(p, z, P(T(0.083333334150659266)));
  } else {
    p = P(T(7.7076175746648465e-8));
    p = fma(p, z, P(T(1.6786076519288395e-7)));
    p = fma(p, z, P(T(9.1560919262624455e-7)));
    p = fma(p, z, P(T(4.0631543608566089e-6)));
    p = fma(p, z, P(T(1.8781213458201444e-5)));
    p = fma(p, z, P(T(8.8778268731117472e-5)));
    p = fma(p, z, P(T(0.00043402778744976295)));
    p = fma(p, z, P(T(0.0022321428568053717)));
    p = fma(p, z, P(T(0.012500000000004557)));
    p = fma(p, z, P(T(0.083333333333333323)));
  }
  return fma(u * z, p, u);
}

/// -|x|.
template <class T>
LINATTN_INLINE packet<T> minus_magnitude(const packet<T>& x) {
  return min(x, packet<T>::zero() - x);
}

/// ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|): at most 3 ulp; 0 at -inf, inf at inf.
template <class T>
LINATTN_INLINE packet<T> softplus(const packet<T>& x) {
  return max(x, packet<T>::zero()) + log1p_of_unit(exp_of_negative(minus_magnitude(x)));
}

/// ln(1 / (1 + e^-x)) = min(x, 0) - ln(1 + e^-|x|) <= 0: at most 3 ulp; -inf at -inf, 0 at inf.
template <class T>
LINATTN_INLINE packet<T> log_sigmoid(const packet<T>& x) {
  return min(x, packet<T>::zero()) - log1p_of_unit(exp_of_negative(minus_magnitude(x)));
}

/// 1 / (1 + e^-x) = e^min(x, 0) / (1 + e^-|x|): at most 3 ulp, down into the subnormals; exactly 0 at -inf, 1 at inf.
template <class T>
LINATTN_INLINE packet<T> sigmoid(const packet<T>& x) {
  using P = packet<T>;
  const P e = exp_of_negative(minus_magnitude(x));
  return max(e, where_positive(x, P(T(1)))) / (P(T(1)) + e);  // e <= 1 is e^x where x <= 0
}

/// x / (1 + e^-x), also called swish: at most 4 ulp where e^x is a normal number, |x| of the smallest subnormals below
/// that; the limit 0 at -inf.
template <class T>
LINATTN_INLINE packet<T> silu(const packet<T>& x) {
  return max(x, packet<T>(std::numeric_limits<T>::lowest())) * sigmoid(x);
}

}  // namespace detail
LINATTN_NAMESPACE_END
