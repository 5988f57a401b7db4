// Random numbers as a pure function of a seed and a counter: the same bits on every compiler and standard library.
//
// Nothing here may be contracted or handed to libm: integers wrap, every multiply-add is std::fma (correctly rounded by
// definition, in hardware or not), +, -, *, / and sqrt are correctly rounded, and no product meets a sum outside fma.
// So a draw has the same bits with GCC and clang, vectorised or not, whatever -march and -O say. (Not so under
// -ffast-math, and not where double arithmetic is done in extended registers, as on 32-bit x87.)
#pragma once

#include <linattn/version.hpp>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// 128 random bits: Philox 4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw 2011). The seed is the key; the stream tells
/// apart what one seed is used for, the counter numbers the blocks of a stream.
constexpr std::array<std::uint32_t, 4> random_block(std::uint64_t seed, std::uint64_t stream, std::uint64_t counter) {
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32U); };
  std::array<std::uint32_t, 4> x = {low(counter), high(counter), low(stream), high(stream)};
  std::array<std::uint32_t, 2> key = {low(seed), high(seed)};
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53} * x[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57} * x[2];
    x = {high(b) ^ x[1] ^ key[0], low(b), high(a) ^ x[3] ^ key[1], low(a)};
    key = {key[0] + 0x9E3779B9U, key[1] + 0xBB67AE85U};
  }
  return x;
}

/// 64 random bits: half of block index / 2.
constexpr std::uint64_t random_bits(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  const std::array<std::uint32_t, 4> block = random_block(seed, stream, index / 2);
  const std::size_t half = index % 2 == 0 ? 0 : 2;
  return std::uint64_t{block[half + 1]} << 32U | block[half];
}

/// Uniform on the open interval (0, 1): the midpoints (i + 1/2) 2^-52, all of them doubles, symmetric about 1/2.
constexpr double random_uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return (static_cast<double>(random_bits(seed, stream, index) >> 12U) + 0.5) * 0x1p-52;
}

/// c_0 x^n + c_1 x^(n-1) + ... + c_n.
template <std::size_t Terms>
double horner(const std::array<double, Terms>& coefficients, double x) {
  double sum = coefficients[0];
  for (std::size_t i = 1; i < Terms; ++i) sum = std::fma(sum, x, coefficients[i]);
  return sum;
}

/// ln x of a normal x > 0. With x = 2^e y, y in [sqrt(1/2), sqrt(2)), and s = (y - 1) / (y + 1),
///
///   ln x = e ln 2 + 2 atanh(s),   atanh(s) = s + s^3 (1/3 + s^2/5 + s^4/7 + ...),   s^2 < 0.0295
///
/// where the first omitted term is 2e-18.
inline double natural_logarithm(double x) {
  constexpr std::uint64_t sqrt_half = 0x3FE6A09E667F3BCD;  // the bits of sqrt(1/2)
  const auto bits = std::bit_cast<std::uint64_t>(x);
  const std::int64_t e = static_cast<std::int64_t>(bits - sqrt_half) >> 52;
  const auto y = std::bit_cast<double>(bits - (static_cast<std::uint64_t>(e) << 52U));
  const double s = (y - 1.0) / (y + 1.0);
  const double z = s * s;
  constexpr std::array<double, 10> inverse_odds = {1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13,
                                                   1.0 / 11, 1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3};
  const double atanh = std::fma(s * z, horner(inverse_odds, z), s);
  return std::fma(static_cast<double>(e), 0.6931471805599453, 2.0 * atanh);
}

/// The inverse of the standard normal distribution function, for the p that random_uniform gives.
///
/// With w = -ln(4 p (1 - p)) the quotient x / (p - 1/2) is a smooth function of w: two polynomials that interpolate it
/// at Chebyshev nodes, in w for w <= 5 (99.7 % of all p) and in sqrt(w) beyond. Relative errors of the polynomials:
/// 4.2e-15 and 1.7e-12.
inline double inverse_normal(double p) {
  constexpr std::array<double, 19> centre = {
      -1.071445085124458e-09, 1.9543039360250363e-08, -2.7122963618002847e-08, -1.7810514454245042e-07,
      5.727853315406526e-07,  3.601723461181881e-07,  -5.248807350060185e-06,  8.081117609238191e-06,
      2.4475615894861704e-05, -0.0001171936075450048, 5.790428230847476e-05,   0.0008264414398761398,
      -0.0023592918234578053, -0.001379985235919201,  0.024113475295762337,    -0.05536239101894809,
      -0.07384524225200702,   1.7440101219951099,     4.24662693402934};
  constexpr std::array<double, 23> tail = {
      1.6722398975628072e-05, 2.0871565940683234e-05, -0.00019117160592898257, 5.387391719093644e-05,
      0.0006104921490099993,  -0.000701114933273261,  -0.0002883041966533783,  0.0011474078714168198,
      -0.0013649435316213407, 0.0012779094577230047,  -0.0003211053913437236,  -0.0018597111608989073,
      0.00423852544019808,    -0.005624770376320168,  0.005741850113193102,    -0.005169913855180423,
      0.00498137376090877,    -0.006328196305214076,  0.009928503814578151,    -0.014577032182556087,
      0.01038732242632581,    5.42624897631164,       11.146109719309216};
  const double smaller = p < 0.5 ? p : 1.0 - p;
  const double w = -natural_logarithm(4.0 * smaller * (1.0 - smaller));
  const double quotient = w <= 5.0 ? horner(centre, std::fma(w, 0.4, -1.0))     // w in [0, 5] on [-1, 1]
                                   : horner(tail, (std::sqrt(w) - 4.1) / 1.9);  // sqrt(w) in [2.2, 6] on [-1, 1]
  return (p - 0.5) * quotient;
}

/// A draw from N(0, 1), |x| < 8.3.
inline double random_normal(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return inverse_normal(random_uniform(seed, stream, index));
}

}  // namespace detail
LINATTN_NAMESPACE_END
