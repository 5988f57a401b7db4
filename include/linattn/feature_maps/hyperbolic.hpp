// Positive random features in pairs of opposite directions.
#pragma once

#include <linattn/detail/random_map.hpp>
#include <linattn/detail/registers.hpp>

#include <Eigen/Core>
#include <cstdint>

LINATTN_NAMESPACE_BEGIN

/// phi(x) = (2 m)^(-1/2) exp(-|x'|^2 / 2) [exp(W x'), exp(-W x')],  x' = D^(-1/4) x,  W (m, D),  C = 2 m, features > 0.
///
/// Kernel: phi(q).phi(k) is an unbiased estimate of exp(q.k / sqrt(D)), the numerator of softmax attention, over draws
/// of W: `positive_random` whose second half of directions is the first turned round. The map applies D^(-1/4) itself.
///
/// Variance: (1 - exp(-|z|^2)) times that of `positive_random` at the same C, z = q' + k': never more, much less while
/// |z| is small, the same where |z| is large. Errors fall as 1 / sqrt(m).
///
/// Use it in place of `positive_random`, at half the projection. Not where that fails, either: inputs of standard
/// deviation 1 at D = 64.
///
/// Numerics: as `positive_random`: no overflow in float for any input up to about D = 100, underflow to 0 from
/// |x'|^2 of about 300 on. NaN is kept.
///
/// Cost a token: C D flops and C exponentials. Source: Choromanski et al., Rethinking attention with Performers, 2021.
template <class T = float>
class hyperbolic : public detail::random_map<T> {
 public:
  /// C = features, even: m = C / 2 directions for heads of D = head_dim coordinates. Throws std::invalid_argument for
  /// sizes below 1 and an odd C.
  hyperbolic(Eigen::Index head_dim, Eigen::Index features, std::uint64_t seed,
             const random_feature_options& options = {})
      : detail::random_map<T>("hyperbolic", head_dim, features,
                              detail::directions_of_pairs("hyperbolic", features, "opposite directions"), seed, options,
                              this->root(head_dim)) {}

  /// The map of the same sizes with another seed.
  hyperbolic redraw(std::uint64_t seed) const { return {this->head_dim(), this->m_features, seed, this->m_options}; }

  void forward(const const_tile<T>& x, tile<T>& phi) const noexcept {
    using P = detail::packet<T>;
    const Eigen::Index m = this->m_projection.rows();
    const P input_scale(this->m_input_scale);
    const P opposite(-this->m_input_scale);
    const P feature_scale(this->m_feature_scale * T(0.70710678118654752440));
    this->project_rows(x, phi, [&](const T* in, T* row) LINATTN_INLINE_LAMBDA {
      const P half_norm(-this->half_square(in));
      detail::for_each_register<T>(m, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        const P u = detail::load_up_to(row + c, left);
        detail::store_up_to(row + c, exp(fma(u, input_scale, half_norm)) * feature_scale, left);
        detail::store_up_to(row + m + c, exp(fma(u, opposite, half_norm)) * feature_scale, left);
      });
    });
  }

  /// dx (R, D) = D^(-1/4) (W^T (a_+ - a_-) - (sum_c a_c) x'),  a = phi dphi and its halves. C D flops a token.
  void vjp(const const_tile<T>& x, const const_tile<T>& phi, const const_tile<T>& dphi, tile<T>& dx) const noexcept {
    const Eigen::Index m = this->m_projection.rows();
    this->pull_back(x, phi, dphi, dx, this->m_input_scale, -this->m_input_scale * this->m_input_scale,
                    [&](Eigen::Index r, Eigen::Index c, Eigen::Index n) LINATTN_INLINE_LAMBDA {
                      const T* const p = phi.data() + r * phi.outerStride() + c;
                      const T* const g = dphi.data() + r * dphi.outerStride() + c;
                      return detail::load_up_to(p, n) * detail::load_up_to(g, n) -
                             detail::load_up_to(p + m, n) * detail::load_up_to(g + m, n);
                    });
  }
};

LINATTN_NAMESPACE_END
