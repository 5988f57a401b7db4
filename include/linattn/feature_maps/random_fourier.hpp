// Trigonometric random features: signed, so normalised they can have denominators <= 0 (40 % of rows at N(0, 1), D =
// 64).
#pragma once

#include <linattn/detail/random_projection.hpp>
#include <linattn/feature_map.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

LINATTN_NAMESPACE_BEGIN

namespace detail {

template <class T>
struct sine_and_cosine {
  packet<T> sine;
  packet<T> cosine;
};

/// sin u and cos u to 5 epsilon, u taken as exact; within [-1, 1] up to rounding for every u, and NaN kept.
///
///   h = (u - 2 pi n) / 2,  |h| <= pi / 2        sin u = 2 sin h cos h        cos u = 1 - 2 sin^2 h
///
/// with odd and even polynomials in h, interpolated at Chebyshev nodes (2e-8 in float, 1e-18 in double). n 2 pi is
/// subtracted in two parts, the first exact for |n| < 2^16. The clamp bounds the result where u has no phase left.
template <class T>
LINATTN_INLINE sine_and_cosine<T> sincos(const packet<T>& u) {
  using P = packet<T>;
  constexpr bool single = std::is_same_v<T, float>;
  const P n = floor(fma(u, P(T(0.15915494309189533577)), P(T(0.5))));
  const P high = fma(n, P(single ? T(-6.28125) : T(-6.283185243606567)), u);
  const P turn = fma(n, P(single ? T(-0.0019353071795864769) : T(-6.3573019094112787e-08)), high);
  const P h = min(max(turn * P(T(0.5)), P(T(-1.6))), P(T(1.6)));
  const P z = h * h;
  P s;
  P c;
  if constexpr (single) {
    s = P(T(2.630318081585478e-06));
    s = fma(s, z, P(T(-0.0001982134379298083)));
    s = fma(s, z, P(T(0.008333231596071784)));
    s = fma(s, z, P(T(-0.1666666585318928)));
    c = P(T(-2.6508844065115494e-07));
    c = fma(c, z, P(T(2.478491208017009e-05)));
    c = fma(c, z, P(T(-0.0013888803715295553)));
    c = fma(c, z, P(T(0.04166666598557934)));
  } else {
    s = P(T(2.72848526429958e-15));
    s = fma(s, z, P(T(-7.643728492315687e-13)));
    s = fma(s, z, P(T(1.605896959588758e-10)));
    s = fma(s, z, P(T(-2.5052107495717588e-08)));
    s = fma(s, z, P(T(2.755731921819272e-06)));
    s = fma(s, z, P(T(-0.00019841269841251312)));
    s = fma(s, z, P(T(0.00833333333333331)));
    s = fma(s, z, P(T(-0.16666666666666666)));
    c = P(T(-1.5203802487563747e-16));
    c = fma(c, z, P(T(4.777756710759802e-14)));
    c = fma(c, z, P(T(-1.1470708404543127e-11)));
    c = fma(c, z, P(T(2.0876756542081153e-09)));
    c = fma(c, z, P(T(-2.7557319221083075e-07)));
    c = fma(c, z, P(T(2.4801587301578018e-05)));
    c = fma(c, z, P(T(-0.0013888888888888879)));
    c = fma(c, z, P(T(0.041666666666666664)));
  }
  const P sine = fma(h * z, s, h);                          // sin h
  const P cosine = fma(z, fma(z, c, P(T(-0.5))), P(T(1)));  // cos h
  const P twice = sine + sine;
  return {twice * cosine, fma(sine * P(T(-2)), sine, P(T(1)))};
}

}  // namespace detail

/// phi(x) = m^(-1/2) e^(|x'|^2 / 2) [cos(W x'), sin(W x')],  x' = D^(-1/4) x,  W (m, D),  C = 2 m, signed features.
///
/// Kernel: phi(q).phi(k) is an unbiased estimate of exp(q.k / sqrt(D)), the numerator of softmax attention, over draws
/// of W with N(0, 1) entries. The map applies D^(-1/4) itself: leave query_scale at 1.
///
/// Sign: estimates of small weights are often negative and so are denominators. With N(0, 1) inputs at D = 64 about
/// 40 % of the rows have a denominator <= 0, and the normalised output is useless; check_feature_map counts the share
/// for a map and an input scale. The map says signed_features, so an operator does not normalise unless its options
/// say `.normalize = true`; do that where the check counts none, that is for small inputs. Not normalised, the output
/// estimates sum_j exp(q.k_j / sqrt(D)) v_j.
///
/// Variance: with d = D^(-1/4) (q - k) and z = D^(-1/4) (q + k) the variance of an estimate is
/// exp(|z|^2 - 2 q.k / sqrt(D)) (1 - exp(-|d|^2))^2 / (2 m). Small for large weights and zero for q = k, large against
/// small weights: less than `positive_random`'s while |z| is small, and hopeless at D = 64 and unit inputs, where it
/// grows as exp(16). Errors fall as 1 / sqrt(m).
///
/// Use it to match softmax attention at small logits: at D = 16, inputs of standard deviation 0.5 and C = 1024 it has
/// about three quarters of the error of `positive_random` (below C = 100 it is the worse one). Not where denominators
/// must be positive whatever the input; there take `positive_random`.
///
/// Numerics: features overflow float from |x'|^2 = 177 on (double: 1419), sums of products from half of that. NaN is
/// kept. Under -ffast-math NaN may be lost and draws may differ.
///
/// Cost a token: C D flops and C / 2 pairs of sine and cosine. No allocation after the constructor, which draws C D / 2
/// numbers. Copies share the matrix; a map is immutable and may be used by any number of threads.
/// Sources: Rahimi and Recht, 2007; Peng et al., Random feature attention, 2021; Choromanski et al., 2021.
template <class T = float>
class random_fourier {
 public:
  using scalar = T;
  static constexpr bool signed_features = true;

  /// C = features, even: m = C / 2 directions for heads of D = head_dim coordinates, the same for a seed on every
  /// compiler and machine. Throws std::invalid_argument for sizes below 1 and an odd C.
  random_fourier(Eigen::Index head_dim, Eigen::Index features, std::uint64_t seed)
      : m_projection("random_fourier", head_dim, directions(features), seed),
        m_input_scale(static_cast<T>(1 / std::sqrt(std::sqrt(static_cast<double>(head_dim))))),
        m_feature_scale(static_cast<T>(1 / std::sqrt(static_cast<double>(m_projection.rows())))) {}

  /// The map of the same sizes with another seed: new directions. A state absorbed with one map is read with that map.
  random_fourier redraw(std::uint64_t seed) const { return random_fourier(head_dim(), 2 * m_projection.rows(), seed); }

  /// C = 2 m, for the head_dim() the map was made for.
  Eigen::Index dimension(Eigen::Index /*head_dim*/) const noexcept { return 2 * m_projection.rows(); }
  Eigen::Index head_dim() const noexcept { return m_projection.head_dim(); }
  std::uint64_t seed() const noexcept { return m_projection.seed(); }

  /// W (m, D), one direction a row: a view of the map's own memory.
  auto projection() const noexcept { return m_projection.matrix(); }

  /// phi (R, C) from x (R, D).
  void forward(const const_tile<T>& x, tile<T>& phi) const noexcept {
    using P = detail::packet<T>;
    m_projection.apply(x, phi);  // W x (R, m), where the cosines go
    const Eigen::Index m = m_projection.rows();
    const Eigen::Index whole = m / P::size * P::size;
    const P input_scale(m_input_scale);
    for (Eigen::Index r = 0; r < x.rows(); ++r) {
      const T squares = detail::squared_norm(x.data() + r * x.outerStride(), x.cols());
      const P scale = exp(P(T(0.5) * m_input_scale * m_input_scale * squares)) * P(m_feature_scale);
      T* const cosines = phi.data() + r * phi.outerStride();
      T* const sines = cosines + m;
      for (Eigen::Index c = 0; c < whole; c += P::size) {
        const auto values = detail::sincos(P::load_unaligned(cosines + c) * input_scale);
        (values.cosine * scale).store_unaligned(cosines + c);
        (values.sine * scale).store_unaligned(sines + c);
      }
      if (whole < m) {
        alignas(detail::slab_alignment) T lanes[2][P::size] = {};
        std::copy(cosines + whole, cosines + m, lanes[0]);
        const auto values = detail::sincos(P::load(lanes[0]) * input_scale);
        (values.cosine * scale).store_unaligned(lanes[0]);
        (values.sine * scale).store_unaligned(lanes[1]);
        std::copy(lanes[0], lanes[0] + (m - whole), cosines + whole);
        std::copy(lanes[1], lanes[1] + (m - whole), sines + whole);
      }
    }
  }

  /// dx (R, D) = D^(-1/4) (W^T du + (sum_c phi_c dphi_c) x'), where du = cosines dsines - sines dcosines are phi's and
  /// dphi's halves. C D flops a token.
  void vjp(const const_tile<T>& x, const const_tile<T>& phi, const const_tile<T>& dphi, tile<T>& dx) const noexcept {
    const Eigen::Index m = m_projection.rows();
    m_projection.apply_transposed(dx, m_input_scale,
                                  [&](Eigen::Index r, Eigen::Index c, Eigen::Index n) LINATTN_INLINE_LAMBDA {
                                    const T* const cosines = phi.data() + r * phi.outerStride() + c;
                                    const T* const dcosines = dphi.data() + r * dphi.outerStride() + c;
                                    return detail::load_up_to(cosines, n) * detail::load_up_to(dcosines + m, n) -
                                           detail::load_up_to(cosines + m, n) * detail::load_up_to(dcosines, n);
                                  });
    for (Eigen::Index r = 0; r < x.rows(); ++r) {
      const T total = detail::dot(phi.data() + r * phi.outerStride(), dphi.data() + r * dphi.outerStride(), phi.cols());
      dx.row(r) += (m_input_scale * m_input_scale * total) * x.row(r);
    }
  }

 private:
  static Eigen::Index directions(Eigen::Index features) {
    if (features < 1) detail::refuse("random_fourier", "features is ", features, "; at least 2 are needed");
    if (features % 2 != 0) {
      detail::refuse("random_fourier", "features is ", features,
                     "; cosines and sines come in pairs, so it must be even");
    }
    return features / 2;
  }

  detail::random_projection<T> m_projection;
  T m_input_scale;    // D^(-1/4)
  T m_feature_scale;  // m^(-1/2)
};

LINATTN_NAMESPACE_END
