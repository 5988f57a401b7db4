// Half and bfloat16 in memory, float in registers: loads that widen and stores that round.
//
// Widening is exact. Rounding is to nearest even, once: gradual into the subnormal numbers of either type, and to
// infinity from half a step above its largest number on. A NaN stays one. All in the registers' own width, so that it
// costs a few instructions a register; integers do what the processor has no conversion for. (AVX512-BF16 has one, but
// it takes subnormal numbers for zero.)
#pragma once

#include <linattn/detail/compiler.hpp>
#include <linattn/version.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

LINATTN_PUSH_SIMD_WARNINGS
LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Whether S only stores: what is computed with is float.
template <class S>
inline constexpr bool is_narrow = std::is_same_v<S, Eigen::half> || std::is_same_v<S, Eigen::bfloat16>;

/// What elements of S are computed in.
template <class S>
using computed_t = std::conditional_t<is_narrow<S>, float, S>;

#if defined(LINATTN_VECTOR)

template <class U, Eigen::Index N>
struct vector_of {
  typedef U type LINATTN_VECTOR(N * sizeof(U));
};

/// N lanes: `halves` as they are stored, `words` the bits of floats.
template <Eigen::Index N>
struct narrow_lanes {
  using halves = typename vector_of<std::uint16_t, N>::type;
  using words = typename vector_of<std::uint32_t, N>::type;
  using integers = typename vector_of<std::int32_t, N>::type;
  using floats = typename vector_of<float, N>::type;

  template <class S>
  static LINATTN_INLINE words widen(const halves& x) {
    const words bits = extend(x);
    if constexpr (std::is_same_v<S, Eigen::bfloat16>) return bits << 16;
#if defined(EIGEN_VECTORIZE_AVX512)
    if constexpr (N == 16) return std::bit_cast<words>(_mm512_cvtph_ps(std::bit_cast<__m256i>(x)));
#endif
#if defined(__F16C__) && defined(EIGEN_VECTORIZE_AVX)
    if constexpr (N == 8) return std::bit_cast<words>(_mm256_cvtph_ps(std::bit_cast<__m128i>(x)));
#endif
    // The exponent's bias is 15 here and 127 there; the product is exact, and makes subnormal numbers normal ones.
    const words magnitude = (bits & 0x7fff) << 13;
    const words finite = std::bit_cast<words>(std::bit_cast<floats>(magnitude) * 0x1p112F);
    return finite | (above(magnitude, (0x7c00 << 13) - 1) & 0x7f800000) | (bits & 0x8000) << 16;
  }

  template <class S>
  static LINATTN_INLINE halves round(const words& x) {
    if constexpr (std::is_same_v<S, Eigen::bfloat16>) {
      const words odd = (x >> 16) & 1;
#if defined(EIGEN_VECTORIZE_AVX512)
      if constexpr (N == 16) {  // with a mask, of which GCC 12 would make a vector
        const __m512i bits = std::bit_cast<__m512i>(x);
        const __mmask16 is_number = _mm512_cmp_ps_mask(std::bit_cast<__m512>(x), std::bit_cast<__m512>(x), _CMP_ORD_Q);
        const __m512i nearest = _mm512_mask_add_epi32(std::bit_cast<__m512i>(x | 0x400000), is_number, bits,
                                                      std::bit_cast<__m512i>(odd + 0x7fff));
        return LINATTN_CONVERT_VECTOR(std::bit_cast<words>(nearest) >> 16, halves);
      }
#endif
      const words nearest = select(above(x & 0x7fffffff, 0x7f800000), x | 0x400000, x + 0x7fff + odd);
      return LINATTN_CONVERT_VECTOR(nearest >> 16, halves);
    }
#if defined(EIGEN_VECTORIZE_AVX512)
    if constexpr (N == 16) {
      return std::bit_cast<halves>(
          _mm512_cvtps_ph(std::bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
#endif
#if defined(__F16C__) && defined(EIGEN_VECTORIZE_AVX)
    if constexpr (N == 8) {
      return std::bit_cast<halves>(
          _mm256_cvtps_ph(std::bit_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
#endif
    const words magnitude = x & 0x7fffffff;
    const words is_nan = above(magnitude, 0x7f800000);
    // From 2^16 on the result is infinite, or NaN; below 2^-14 it is subnormal, and adding 1/2, of which the last bit
    // is 2^-24 as the subnormals' is, rounds to it.
    const words normal = (magnitude - ((127 - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const words shifted = std::bit_cast<words>(std::bit_cast<floats>(magnitude) + 0.5F);
    const words finite = select(above(magnitude, (113 << 23) - 1), normal, shifted - (126u << 23));
    const words result = select(above(magnitude, (143 << 23) - 1), (is_nan & 0x200) | 0x7c00, finite);
    return LINATTN_CONVERT_VECTOR(result | ((x >> 16) & 0x8000), halves);
  }

 private:
  static LINATTN_INLINE words extend(const halves& x) {
    // What convertvector stands for, but GCC 12 takes it apart into narrower registers.
#if defined(EIGEN_VECTORIZE_AVX512)
    if constexpr (N == 16) return std::bit_cast<words>(_mm512_cvtepu16_epi32(std::bit_cast<__m256i>(x)));
#endif
#if defined(EIGEN_VECTORIZE_AVX2)
    if constexpr (N == 8) return std::bit_cast<words>(_mm256_cvtepu16_epi32(std::bit_cast<__m128i>(x)));
#endif
    return LINATTN_CONVERT_VECTOR(x, words);
  }
  /// All bits of the lanes whose x, below 2^31, is larger.
  static LINATTN_INLINE words above(const words& x, std::int32_t bound) {
    return std::bit_cast<words>(std::bit_cast<integers>(x) > bound);
  }
  static LINATTN_INLINE words select(const words& mask, const words& x, const words& y) {
    return (mask & x) | (~mask & y);
  }
};

#endif

/// Registers of N floats, of Eigen's type Native, from and to N elements of S anywhere.
template <class Native, Eigen::Index N>
struct narrow_memory {
  template <class S>
  static LINATTN_INLINE Native load(const S* x) {
    if constexpr (N == 1) {
      return float(*x);
    } else {
#if defined(LINATTN_VECTOR)
      typename narrow_lanes<N>::halves stored;
      std::memcpy(&stored, x, sizeof stored);
      return std::bit_cast<Native>(narrow_lanes<N>::template widen<S>(stored));
#else
      float lanes[N];
      for (Eigen::Index i = 0; i < N; ++i) lanes[i] = float(x[i]);
      return Eigen::internal::ploadu<Native>(lanes);
#endif
    }
  }

  template <class S>
  static LINATTN_INLINE void store(S* x, const Native& values) {
    if constexpr (N == 1) {
      *x = S(values);
    } else {
#if defined(LINATTN_VECTOR)
      using lanes = narrow_lanes<N>;
      const typename lanes::halves stored = lanes::template round<S>(std::bit_cast<typename lanes::words>(values));
      std::memcpy(static_cast<void*>(x), &stored, sizeof stored);
#else
      float lanes[N];
      Eigen::internal::pstoreu(lanes, values);
      for (Eigen::Index i = 0; i < N; ++i) x[i] = S(lanes[i]);
#endif
    }
  }

  /// The first n elements, the other lanes 0; 0 < n < N.
  template <class S>
  static LINATTN_INLINE Native load_partial(const S* x, Eigen::Index n) {
#if defined(EIGEN_VECTORIZE_AVX512) && defined(__AVX512BW__) && defined(__AVX512VL__)
    if constexpr (N == 16) {
      using halves = typename narrow_lanes<N>::halves;
      const auto stored = std::bit_cast<halves>(_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), x));
      return std::bit_cast<Native>(narrow_lanes<N>::template widen<S>(stored));
    }
#endif
    S buffer[N];
    std::fill_n(buffer, N, S(0));
    copy_first<N / 2>(buffer, x, n);
    return load(buffer);
  }

  template <class S>
  static LINATTN_INLINE void store_partial(S* x, Eigen::Index n, const Native& values) {
#if defined(EIGEN_VECTORIZE_AVX512) && defined(__AVX512BW__) && defined(__AVX512VL__)
    if constexpr (N == 16) {
      using lanes = narrow_lanes<N>;
      const typename lanes::halves stored = lanes::template round<S>(std::bit_cast<typename lanes::words>(values));
      return _mm256_mask_storeu_epi16(x, __mmask16((1u << n) - 1), std::bit_cast<__m256i>(stored));
    }
#endif
    S buffer[N];
    store(buffer, values);
    copy_first<N / 2>(x, buffer, n);
  }

 private:
  /// n < 2 Size elements, in pieces of powers of two: a loop over them would become a call.
  template <Eigen::Index Size, class S>
  static LINATTN_INLINE void copy_first(S* to, const S* from, Eigen::Index n) {
    if constexpr (Size > 0) {
      const bool piece = (n & Size) != 0;
      if (piece) std::copy_n(from, Size, to);
      copy_first<Size / 2>(piece ? to + Size : to, piece ? from + Size : from, n);
    }
  }
};

}  // namespace detail
LINATTN_NAMESPACE_END
LINATTN_POP_SIMD_WARNINGS
