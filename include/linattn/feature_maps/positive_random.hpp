// Positive random features of the softmax kernel.
#pragma once

#include <linattn/detail/exponential_map.hpp>

#include <Eigen/Core>
#include <cstdint>

LINATTN_NAMESPACE_BEGIN

/// phi_c(x) = m^(-1/2) exp(w_c . x' - |x'|^2 / 2),  x' = D^(-1/4) x,  c = 1 ... m,  C = m, features > 0.
///
/// Kernel: phi(q).phi(k) is an unbiased estimate of exp(q.k / sqrt(D)), the numerator of softmax attention, over the
/// draws w_c ~ N(0, I). Denominators are sums of positive numbers, so the operator normalises.
///
/// Variance: with z = D^(-1/4) (q + k) the relative variance of the estimate is (exp(|z|^2) - 1) / m. For inputs of
/// standard deviation s, E|z|^2 = 2 s^2 sqrt(D): at D = 64, s = 1 that is exp(16), and no practical m helps; at s = 0.5
/// it is exp(4), and m = 1024 leaves 23 % per weight before averaging.
///
/// Orthogonal directions have 0.9 of the error at D = 16, s = 0.5 and any C, see random_feature_options; `hyperbolic`
/// and `gerf` have less at an equal C.
///
/// Use it to stand in for softmax attention at small logits, with m of some multiples of D and inputs scaled down or
/// l2-normalised. Not for large or peaked logits, where it estimates the largest weights worst, and not where no
/// softmax is to be matched: elu_plus_one costs C = D and no projection. `random_fourier` has less variance while |z|
/// is small, but signed features.
///
/// Numerics: written as log phi, which the engine scales by the largest of each feature so far: normalised, nothing
/// overflows or underflows while |x'|^2 fits. The exponent's rounding is the feature's relative error. NaN is kept.
///
/// Cost a token: 2 C D flops and C exponentials. What all random maps share: random_features.hpp.
/// Source: Choromanski et al., Rethinking attention with Performers, 2021.
template <class T = float>
class positive_random : public detail::exponential_map<T, 1>, public detail::storable<positive_random<T>> {
  using base = detail::exponential_map<T, 1>;

 public:
  static constexpr const char* name = "positive_random";  ///< in messages and records

  /// m = features directions for heads of D = head_dim coordinates. Throws std::invalid_argument for sizes below 1.
  positive_random(Eigen::Index head_dim, Eigen::Index features, std::uint64_t seed,
                  const random_feature_options& options = {})
      : base({name, head_dim, features, seed, options}) {}

  /// The map of the same sizes with another seed.
  positive_random redraw(std::uint64_t seed) const {
    return {this->head_dim(), this->m_features, seed, this->options()};
  }

 private:
  friend class detail::storable<positive_random>;

  explicit positive_random(detail::record_reader& in) : base(typename base::parameters(in)) {}
};

LINATTN_NAMESPACE_END
