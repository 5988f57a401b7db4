// What positive random maps share: exponentials of projections, one or two a direction.
#pragma once

#include <linattn/detail/random_map.hpp>
#include <linattn/detail/registers.hpp>

#include <Eigen/Core>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// phi = (Halves m)^(-1/2) exp(-|x'|^2 / 2) [exp(stretch W x')], and [exp(-stretch W x')] behind it where Halves is 2:
/// the base of the positive random maps.
template <class T, int Halves>
class exponential_map : public random_map<T> {
  static_assert(Halves == 1 || Halves == 2);
  using P = packet<T>;

 public:
  /// phi (R, C) from x (R, D).
  void forward(const const_tile<T>& x, tile<T>& phi) const noexcept {
    exponentials(x, phi, [](const P& half_norm, Eigen::Index /*c*/, Eigen::Index /*left*/) LINATTN_INLINE_LAMBDA {
      return half_norm;
    });
  }

  /// dx (R, D) = temperature^(-1/2) (stretch W^T (a_+ - a_-) - (sum_c a_c) x'),  a = phi dphi and its halves. 2 m D
  /// flops a token.
  void vjp(const const_tile<T>& x, const const_tile<T>& phi, const const_tile<T>& dphi, tile<T>& dx) const noexcept {
    const Eigen::Index m = this->directions().rows();
    this->pull_back(x, phi, dphi, dx, m_slope, -this->m_input_scale * this->m_input_scale,
                    [&](Eigen::Index r, Eigen::Index c, Eigen::Index n) LINATTN_INLINE_LAMBDA {
                      const T* const p = phi.data() + r * phi.outerStride() + c;
                      const T* const g = dphi.data() + r * dphi.outerStride() + c;
                      const P a = load_up_to(p, n) * load_up_to(g, n);
                      if constexpr (Halves == 1) return a;
                      return a - load_up_to(p + m, n) * load_up_to(g + m, n);
                    });
  }

 protected:
  using typename random_map<T>::parameters;

  explicit exponential_map(const parameters& p, T stretch = T(1))
      : random_map<T>(p, Halves), m_slope(stretch * this->m_input_scale) {}

  /// The features, with exponents from constant(-|x'|^2 / 2, c, n), a register from direction c on.
  template <class Constant>
  void exponentials(const const_tile<T>& x, tile<T>& phi, const Constant& constant) const noexcept {
    const Eigen::Index m = this->directions().rows();
    const P slope(m_slope);
    const P opposite(-m_slope);
    const P amplitude(Halves == 1 ? this->m_feature_scale : this->m_feature_scale * T(0.70710678118654752440));
    this->project_rows(x, phi, [&](const T* in, T* row) LINATTN_INLINE_LAMBDA {
      const P half_norm(-this->half_square(in));
      for_each_register<T>(m, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        const P u = load_up_to(row + c, left);
        const P exponent = constant(half_norm, c, left);
        store_up_to(row + c, exp(fma(u, slope, exponent)) * amplitude, left);
        if constexpr (Halves == 2) store_up_to(row + m + c, exp(fma(u, opposite, exponent)) * amplitude, left);
      });
    });
  }

 private:
  T m_slope;  // stretch temperature^(-1/2)
};

}  // namespace detail
LINATTN_NAMESPACE_END
