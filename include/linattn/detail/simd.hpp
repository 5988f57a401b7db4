// One packet type over Eigen's packet layer: with storage.hpp the only file that names Eigen::internal's SIMD
// functions.
#pragma once

#include <linattn/detail/compiler.hpp>
#include <linattn/detail/storage.hpp>
#include <linattn/version.hpp>

#include <Eigen/Core>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

LINATTN_PUSH_SIMD_WARNINGS
LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Bytes that scratch and state rows are aligned to: a cache line, and the widest packet.
inline constexpr std::size_t slab_alignment = 64;

/// `size` lanes of T in one register; size is 1 in the scalar build. Arithmetic is lane by lane.
template <class T>
struct packet {
  using native = typename Eigen::internal::packet_traits<T>::type;
  static constexpr Eigen::Index size = Eigen::internal::unpacket_traits<native>::size;

  native lanes;

  packet() = default;
  LINATTN_INLINE packet(native x) : lanes(x) {}  // NOLINT(google-explicit-constructor)
  LINATTN_INLINE packet(T x)                     // NOLINT(google-explicit-constructor)
      requires(!std::is_same_v<T, native>)
      : lanes(Eigen::internal::pset1<native>(x)) {}

  static LINATTN_INLINE packet zero() { return Eigen::internal::pset1<native>(T(0)); }
  static LINATTN_INLINE packet broadcast(const T* x) { return Eigen::internal::pset1<native>(*x); }
  static LINATTN_INLINE packet load(const T* x) { return Eigen::internal::pload<native>(x); }
  static LINATTN_INLINE packet load_unaligned(const T* x) { return Eigen::internal::ploadu<native>(x); }
  /// Lanes 0 ... n-1 from x, the others 0; 0 < n < size. Nothing else is read.
  static LINATTN_INLINE packet load_partial(const T* x, Eigen::Index n) {
    if constexpr (Eigen::internal::unpacket_traits<native>::masked_load_available) {
      return Eigen::internal::ploadu<native>(x, first_lanes(n));
    } else {
      alignas(slab_alignment) T buffer[size] = {};
      for (Eigen::Index i = 0; i < n; ++i) buffer[i] = x[i];
      return load(buffer);
    }
  }
  LINATTN_INLINE void store(T* x) const { Eigen::internal::pstore(x, lanes); }
  LINATTN_INLINE void store_unaligned(T* x) const { Eigen::internal::pstoreu(x, lanes); }
  /// Lanes 0 ... n-1 to x; 0 < n < size. Nothing else is written.
  LINATTN_INLINE void store_partial(T* x, Eigen::Index n) const {
    if constexpr (Eigen::internal::unpacket_traits<native>::masked_store_available) {
      Eigen::internal::pstoreu<T>(x, lanes, first_lanes(n));
    } else {
      alignas(slab_alignment) T buffer[size];
      store(buffer);
      for (Eigen::Index i = 0; i < n; ++i) x[i] = buffer[i];
    }
  }

  // The same of floats that are stored as half or bfloat16.
  template <class S>
  requires(is_narrow<S>) static LINATTN_INLINE packet load_unaligned(const S* x) { return narrow::load(x); }
  template <class S>
  requires(is_narrow<S>) static LINATTN_INLINE packet load_partial(const S* x, Eigen::Index n) {
    return narrow::load_partial(x, n);
  }
  template <class S>
  requires(is_narrow<S>) LINATTN_INLINE void store_unaligned(S* x) const { narrow::store(x, lanes); }
  template <class S>
  requires(is_narrow<S>) LINATTN_INLINE void store_partial(S* x, Eigen::Index n) const {
    narrow::store_partial(x, n, lanes);
  }

  /// Lanes 0 ... n-1, the others 0 whatever they were; 0 < n < size.
  LINATTN_INLINE packet first(Eigen::Index n) const {
    const native index = Eigen::internal::plset<native>(T(0));
    return Eigen::internal::pand(lanes, Eigen::internal::pcmp_lt(index, Eigen::internal::pset1<native>(T(n))));
  }

  friend LINATTN_INLINE packet operator+(const packet& a, const packet& b) {
    return Eigen::internal::padd(a.lanes, b.lanes);
  }
  friend LINATTN_INLINE packet operator-(const packet& a, const packet& b) {
    return Eigen::internal::psub(a.lanes, b.lanes);
  }
  friend LINATTN_INLINE packet operator*(const packet& a, const packet& b) {
    return Eigen::internal::pmul(a.lanes, b.lanes);
  }
  friend LINATTN_INLINE packet operator/(const packet& a, const packet& b) {
    return Eigen::internal::pdiv(a.lanes, b.lanes);
  }
  /// a b + c, fused where the processor fuses.
  friend LINATTN_INLINE packet fma(const packet& a, const packet& b, const packet& c) {
#if defined(__FMA__) || defined(FP_FAST_FMA)
    // The scalar build: left to the compiler, a b + c is fused in one instantiation and not in the next, and a row's
    // bits would depend on the block it is computed in.
    if constexpr (std::is_same_v<T, native>) return std::fma(a.lanes, b.lanes, c.lanes);
#endif
    return Eigen::internal::pmadd(a.lanes, b.lanes, c.lanes);
  }
  /// The larger; a NaN in the FIRST argument is kept, one in the second may be lost (x86 semantics).
  friend LINATTN_INLINE packet max(const packet& x, const packet& bound) {
    return Eigen::internal::pmax(x.lanes, bound.lanes);
  }
  /// The smaller; a NaN in the FIRST argument is kept, one in the second may be lost.
  friend LINATTN_INLINE packet min(const packet& x, const packet& bound) {
    return Eigen::internal::pmin(x.lanes, bound.lanes);
  }
  /// y where x > 0, and 0 elsewhere whatever y is.
  friend LINATTN_INLINE packet where_positive(const packet& x, const packet& y) {
    if constexpr (size == 1) return x.lanes > T(0) ? y : zero();
    return Eigen::internal::pand(Eigen::internal::pcmp_lt(zero().lanes, x.lanes), y.lanes);
  }
  /// y where x > 0, else z, as where x is NaN.
  friend LINATTN_INLINE packet select_positive(const packet& x, const packet& y, const packet& z) {
    if constexpr (size == 1) return x.lanes > T(0) ? y : z;
    return Eigen::internal::pselect(Eigen::internal::pcmp_lt(zero().lanes, x.lanes), y.lanes, z.lanes);
  }
  /// x, and 0 where |x| < bound; NaN kept.
  friend LINATTN_INLINE packet zero_below(const packet& x, T bound) {
    if constexpr (size == 1) return x.lanes < bound && -bound < x.lanes ? T(0) : x.lanes;
    const native small = Eigen::internal::pcmp_lt(Eigen::internal::pabs(x.lanes), packet(bound).lanes);
    return Eigen::internal::pandnot(x.lanes, small);
  }
  /// The largest integers <= x.
  friend LINATTN_INLINE packet floor(const packet& x) { return Eigen::internal::pfloor(x.lanes); }
  friend LINATTN_INLINE T sum(const packet& x) { return Eigen::internal::predux(x.lanes); }
  friend LINATTN_INLINE T largest(const packet& x) { return Eigen::internal::predux_max(x.lanes); }

 private:
  using narrow = narrow_memory<native, size>;

  /// The bits of lanes 0 ... n-1: what Eigen's masked loads and stores of floats take.
  static constexpr auto first_lanes(Eigen::Index n) {
    using mask = std::conditional_t<(size > 8), std::uint16_t, std::uint8_t>;
    return static_cast<mask>((1u << n) - 1);
  }
};

/// y 2^n for integral n and y in [1/2, 2], rounded once: correct into the subnormal range and up to overflow, where
/// |n| <= 2 max_exponent. Negative promises n <= 0, and saves instructions.
template <bool Negative, class T>
LINATTN_INLINE packet<T> scale_by_power_of_two(const packet<T>& y, const packet<T>& n) {
  using native = typename packet<T>::native;
#if defined(EIGEN_VECTORIZE_AVX512)
  if constexpr (std::is_same_v<native, __m512>) return packet<T>(_mm512_scalef_ps(y.lanes, n.lanes));
  if constexpr (std::is_same_v<native, __m512d>) return packet<T>(_mm512_scalef_pd(y.lanes, n.lanes));
#endif
  if constexpr (packet<T>::size > 1 && std::is_same_v<T, float>) {
    // 2^a of a normal number, built from integers in float: (a + 127) 2^23 is exact and is its bit pattern.
    using integers = typename Eigen::internal::unpacket_traits<native>::integer_packet;
    const auto power = [](const packet<T>& a) LINATTN_INLINE_LAMBDA -> packet<T> {
      const packet<T> bits = fma(a, packet<T>(T(8388608)), packet<T>(T(127) * T(8388608)));
      return Eigen::internal::preinterpret<native>(Eigen::internal::pcast<native, integers>(bits.lanes));
    };
    if constexpr (Negative) {
      constexpr float shift = 60;  // n >= -151, and n + 60 is the exponent of a normal number
      return y * power(n + packet<T>(shift)) * packet<T>(T(0x1p-60F));
    } else {
      const packet<T> half = floor(n * packet<T>(T(0.5)));
      return y * power(half) * power(n - half);
    }
  } else if constexpr (packet<T>::size > 1) {
    return Eigen::internal::pldexp(y.lanes, n.lanes);
  } else {
    return std::ldexp(y.lanes, static_cast<int>(n.lanes));
  }
}

/// e^x, see exp; Negative promises x <= 0 or NaN, and saves two instructions.
template <bool Negative, class T>
LINATTN_INLINE packet<T> exp_in_range(const packet<T>& argument) {
  using P = packet<T>;
  constexpr bool single = std::is_same_v<T, float>;
  // Beyond these e^x is 0 or inf whatever it is. The argument comes first: its NaN survives.
  P x = max(argument, P(single ? T(-104.5) : T(-746)));
  if constexpr (!Negative) x = min(x, P(single ? T(89) : T(710)));
  const P n = floor(fma(x, P(T(1.4426950408889634074)), P(T(0.5))));
  const P high = fma(n, P(single ? T(-0.693359375) : T(-6.93147180369123816490e-01)), x);
  const P r = fma(n, P(single ? T(2.12194440e-4) : T(-1.90821492927058770002e-10)), high);
  P p;
  if constexpr (single) {
    p = P(T(0.001392618359));
    p = fma(p, r, P(T(0.008363179053)));
    p = fma(p, r, P(T(0.04166655462)));
    p = fma(p, r, P(T(0.1666657699)));
  } else {
    p = P(T(2.0914686968086876e-09));
    p = fma(p, r, P(T(2.5105217004720745e-08)));
    p = fma(p, r, P(T(2.7557273643110297e-07)));
    p = fma(p, r, P(T(2.7557255400206422e-06)));
    p = fma(p, r, P(T(2.4801587325547743e-05)));
    p = fma(p, r, P(T(0.00019841269874820627)));
    p = fma(p, r, P(T(0.0013888888888883748)));
    p = fma(p, r, P(T(0.0083333333333261358)));
    p = fma(p, r, P(T(0.041666666666666671)));
    p = fma(p, r, P(T(0.16666666666666671)));
  }
  p = fma(p, r, P(T(0.5)));
  p = fma(p, r, P(T(1)));
  p = fma(p, r, P(T(1)));
  return scale_by_power_of_two<Negative>(p, n);
}

/// e^x: at most 2 ulp, gradual underflow, exactly 0 at -inf, inf only on overflow, NaN kept; the same with every
/// Eigen. (Eigen 3.4's own is up to 4 ulp off, overflows at 88.4 and does not reach 0 at -inf on SSE and AVX2.)
///
///   e^x = 2^n e^r,   n = floor(x / ln 2 + 1/2),   |r| <= ln(2) / 2,   e^r = 1 + r + r^2 p(r)
///
/// p interpolates (e^r - 1 - r) / r^2 at Chebyshev nodes; the relative error of the polynomial is 1.0e-8 (float,
/// degree 4) and 2.3e-19 (double, degree 10). n ln 2 is subtracted in two parts, the first exact.
template <class T>
LINATTN_INLINE packet<T> exp(const packet<T>& x) {
  return exp_in_range<false>(x);
}

/// e^min(x, 0), as exp.
template <class T>
LINATTN_INLINE packet<T> exp_of_negative(const packet<T>& x) {
  return exp_in_range<true>(min(x, packet<T>(T(0))));
}

/// The value of an integral_constant's type, inside lambdas that capture one.
template <class Constant>
inline constexpr Eigen::Index number = std::remove_cvref_t<Constant>::value;

/// f(integral_constant<Index, 0>) ... f(integral_constant<Index, N - 1>): a loop that is unrolled by the language, so
/// that arrays of packets indexed by its variable live in registers.
template <Eigen::Index N, class F>
LINATTN_INLINE void unroll(F&& f) {
  [&]<Eigen::Index... I>(std::integer_sequence<Eigen::Index, I...>) LINATTN_INLINE_LAMBDA {
    (f(std::integral_constant<Eigen::Index, I>()), ...);
  }
  (std::make_integer_sequence<Eigen::Index, N>());
}

}  // namespace detail
LINATTN_NAMESPACE_END
LINATTN_POP_SIMD_WARNINGS
