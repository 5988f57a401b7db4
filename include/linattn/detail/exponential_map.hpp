// What positive random maps share: exponentials of projections, one or two a direction.
#pragma once

#include <linattn/detail/random_map.hpp>
#include <linattn/detail/registers.hpp>

#include <Eigen/Core>
#include <cmath>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// log phi of phi = (Halves m)^(-1/2) exp(-|x'|^2 / 2) [exp(stretch W x')], and [exp(-stretch W x')] behind it where
/// Halves is 2: the base of the positive random maps.
template <class T, int Halves>
class exponential_map : public random_map<T> {
  static_assert(Halves == 1 || Halves == 2);
  using P = packet<T>;

 public:
  static constexpr bool log_features = true;

  /// log phi (R, C) from x (R, D).
  void forward(const const_tile<T>& x, tile<T>& log_phi) const noexcept {
    exponents(x, log_phi, [](const P& half_norm, Eigen::Index /*c*/, Eigen::Index /*left*/) LINATTN_INLINE_LAMBDA {
      return half_norm;
    });
  }

  /// dx (R, D) = temperature^(-1/2) (stretch W^T (a_+ - a_-) - (sum_c a_c) x'),  a = dlog phi and its halves. 2 m D
  /// flops a token.
  void vjp(const const_tile<T>& x, const const_tile<T>& /*log_phi*/, const const_tile<T>& dlog_phi,
           tile<T>& dx) const noexcept {
    const Eigen::Index m = this->directions().rows();
    this->directions().apply_transposed(dx, m_slope,
                                        [&](Eigen::Index r, Eigen::Index c, Eigen::Index n) LINATTN_INLINE_LAMBDA {
                                          const T* const a = dlog_phi.data() + r * dlog_phi.outerStride() + c;
                                          if constexpr (Halves == 1) return load_up_to(a, n);
                                          return load_up_to(a, n) - load_up_to(a + m, n);
                                        });
    const T share = -this->m_input_scale * this->m_input_scale;
    for (Eigen::Index r = 0; r < x.rows(); ++r) {
      dx.row(r) += (share * total(dlog_phi.data() + r * dlog_phi.outerStride(), dlog_phi.cols())) * x.row(r);
    }
  }

 protected:
  using typename random_map<T>::parameters;

  explicit exponential_map(const parameters& p, T stretch = T(1))
      : random_map<T>(p, Halves),
        m_slope(stretch * this->m_input_scale),
        m_log_amplitude(T(-0.5 * std::log(double(Halves) * double(p.projection.rows())))) {}

  /// The logarithms, with constant(-|x'|^2 / 2, c, n), a register from direction c on.
  template <class Constant>
  void exponents(const const_tile<T>& x, tile<T>& log_phi, const Constant& constant) const noexcept {
    const Eigen::Index m = this->directions().rows();
    const P slope(m_slope);
    const P opposite(-m_slope);
    const P amplitude(m_log_amplitude);
    this->project_rows(x, log_phi, [&](const T* in, T* row) LINATTN_INLINE_LAMBDA {
      const P half_norm(-this->half_square(in));
      for_each_register<T>(m, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        const P u = load_up_to(row + c, left);
        const P exponent = constant(half_norm, c, left) + amplitude;
        store_up_to(row + c, fma(u, slope, exponent), left);
        if constexpr (Halves == 2) store_up_to(row + m + c, fma(u, opposite, exponent), left);
      });
    });
  }

 private:
  T m_slope;          // stretch temperature^(-1/2)
  T m_log_amplitude;  // log (Halves m)^(-1/2)
};

}  // namespace detail
LINATTN_NAMESPACE_END
