// Positive random features of the softmax kernel.
#pragma once

#include <linattn/detail/random_map.hpp>
#include <linattn/detail/registers.hpp>

#include <Eigen/Core>
#include <cstdint>

LINATTN_NAMESPACE_BEGIN

/// phi_c(x) = m^(-1/2) exp(w_c . x' - |x'|^2 / 2),  x' = D^(-1/4) x,  c = 1 ... m,  C = m, features > 0.
///
/// Kernel: phi(q).phi(k) is an unbiased estimate of exp(q.k / sqrt(D)), the numerator of softmax attention, over the
/// draws w_c ~ N(0, I). The map applies D^(-1/4) itself: leave query_scale at 1. Denominators are sums of positive
/// numbers, so the operator normalises; the quotient is no longer unbiased, but consistent as m grows.
///
/// Variance: with z = D^(-1/4) (q + k) the relative variance of the estimate is (exp(|z|^2) - 1) / m. For inputs of
/// standard deviation s, E|z|^2 = 2 s^2 sqrt(D): at D = 64, s = 1 that is exp(16), and no practical m helps; at s = 0.5
/// it is exp(4), and m = 1024 leaves 23 % per weight before averaging. The error falls as 1 / sqrt(m).
///
/// Orthogonal directions have 0.9 of the error at D = 16, s = 0.5 and any C, see random_feature_options; `hyperbolic`
/// and `gerf` have less at an equal C.
///
/// Use it to stand in for softmax attention at small logits, with m of some multiples of D and inputs scaled down or
/// l2-normalised. Not for large or peaked logits, where it estimates the largest weights worst, and not where no
/// softmax is to be matched: elu_plus_one costs C = D and no projection. `random_fourier` has less variance while |z|
/// is small, but signed features.
///
/// Numerics: a feature is at most exp(|w_c|^2 / 2) m^(-1/2), reached at x' = w_c: no overflow in float for any input up
/// to about D = 100, where |w_c|^2 comes near 177. Long inputs underflow in float: features are 0 from |x'|^2 of about
/// 300 on and their products from 180, and the output with them. NaN is kept. Under -ffast-math NaN may be lost and
/// draws may differ.
///
/// Cost a token: 2 C D flops and C exponentials. No allocation after the constructor, which draws C D numbers. Copies
/// share the matrix; a map is immutable and may be used by any number of threads.
/// Source: Choromanski et al., Rethinking attention with Performers, 2021.
template <class T = float>
class positive_random : public detail::random_map<T> {
 public:
  /// m = features directions for heads of D = head_dim coordinates, the same for a seed on every compiler and machine;
  /// more features keep the directions of fewer. Throws std::invalid_argument for sizes below 1.
  positive_random(Eigen::Index head_dim, Eigen::Index features, std::uint64_t seed,
                  const random_feature_options& options = {})
      : detail::random_map<T>("positive_random", head_dim, features, features, seed, options, this->root(head_dim)) {}

  /// The map of the same sizes with another seed: new directions. A state absorbed with one map is read with that map.
  positive_random redraw(std::uint64_t seed) const {
    return {this->head_dim(), this->m_features, seed, this->m_options};
  }

  /// phi (R, C) from x (R, D).
  void forward(const const_tile<T>& x, tile<T>& phi) const noexcept {
    using P = detail::packet<T>;
    const P input_scale(this->m_input_scale);
    const P feature_scale(this->m_feature_scale);
    this->project_rows(x, phi, [&](const T* in, T* row) LINATTN_INLINE_LAMBDA {
      const P half_norm(-this->half_square(in));
      detail::transform_in_place(row, phi.cols(), [&](const P& u) LINATTN_INLINE_LAMBDA {
        return exp(fma(u, input_scale, half_norm)) * feature_scale;
      });
    });
  }

  /// dx (R, D) = D^(-1/4) (W^T a - (sum_c a_c) x'),  a = phi dphi elementwise. 2 C D flops a token.
  void vjp(const const_tile<T>& x, const const_tile<T>& phi, const const_tile<T>& dphi, tile<T>& dx) const noexcept {
    this->pull_back(x, phi, dphi, dx, this->m_input_scale, -this->m_input_scale * this->m_input_scale,
                    [&](Eigen::Index r, Eigen::Index c, Eigen::Index n) LINATTN_INLINE_LAMBDA {
                      return detail::load_up_to(phi.data() + r * phi.outerStride() + c, n) *
                             detail::load_up_to(dphi.data() + r * dphi.outerStride() + c, n);
                    });
  }
};

LINATTN_NAMESPACE_END
