// What random maps of sines and cosines share: the functions themselves, and the two halves of a row.
#pragma once

#include <linattn/detail/random_map.hpp>
#include <linattn/detail/registers.hpp>

#include <Eigen/Core>
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

/// phi = amplitude [cos u, sin u], C = 2 m: the base of the signed random maps.
template <class T>
class fourier_map : public random_map<T> {
 public:
  static constexpr bool signed_features = true;

 protected:
  using typename random_map<T>::parameters;

  explicit fourier_map(const parameters& p, double own_temperature = 0) : random_map<T>(p, 2, own_temperature) {}

  static parameters draw(const char* owner, Eigen::Index head_dim, Eigen::Index features, std::uint64_t seed,
                         const random_feature_options& options) {
    return {owner, head_dim, directions_of_pairs(owner, features, "cosines and sines"), seed, options};
  }

  /// One row: the first half holds W x, and is overwritten; u = angle_scale W x.
  void waves(T* row, T angle_scale, T amplitude) const noexcept {
    using P = packet<T>;
    const Eigen::Index m = this->directions().rows();
    for_each_register<T>(m, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
      const auto values = sincos(load_up_to(row + c, left) * P(angle_scale));
      store_up_to(row + c, values.cosine * P(amplitude), left);
      store_up_to(row + m + c, values.sine * P(amplitude), left);
    });
  }

  /// A register of the gradient of u: cosines dsines - sines dcosines, phi's and dphi's halves.
  auto angle_gradient(const const_tile<T>& phi, const const_tile<T>& dphi) const noexcept {
    return [&phi, &dphi, m = this->directions().rows()](Eigen::Index r, Eigen::Index c, Eigen::Index n)
               LINATTN_INLINE_LAMBDA {
                 const T* const cosines = phi.data() + r * phi.outerStride() + c;
                 const T* const dcosines = dphi.data() + r * dphi.outerStride() + c;
                 return load_up_to(cosines, n) * load_up_to(dcosines + m, n) -
                        load_up_to(cosines + m, n) * load_up_to(dcosines, n);
               };
  }
};

}  // namespace detail
LINATTN_NAMESPACE_END
