// Positive random features in pairs of opposite directions.
#pragma once

#include <linattn/detail/exponential_map.hpp>

#include <Eigen/Core>
#include <cstdint>

LINATTN_NAMESPACE_BEGIN

/// phi(x) = (2 m)^(-1/2) exp(-|x'|^2 / 2) [exp(W x'), exp(-W x')],  x' = D^(-1/4) x,  W (m, D),  C = 2 m, features > 0.
///
/// Kernel: phi(q).phi(k) is an unbiased estimate of exp(q.k / sqrt(D)), the numerator of softmax attention, over draws
/// of W: `positive_random` whose second half of directions is the first turned round.
///
/// Variance: (1 - exp(-|z|^2)) times that of `positive_random` at the same C, z = q' + k': never more, much less while
/// |z| is small, the same where |z| is large.
///
/// Use it in place of `positive_random`, at half the projection. Not where that fails, either: inputs of standard
/// deviation 1 at D = 64.
///
/// Numerics: written as log phi, which the engine scales by the largest of each feature so far: normalised, nothing
/// overflows or underflows while |x'|^2 fits. The exponent's rounding is the feature's relative error. NaN is kept.
///
/// Cost a token: C D flops and C exponentials. What all random maps share: random_features.hpp.
/// Source: Choromanski et al., Rethinking attention with Performers, 2021.
template <class T = float>
class hyperbolic : public detail::exponential_map<T, 2>, public detail::storable<hyperbolic<T>> {
  using base = detail::exponential_map<T, 2>;

 public:
  static constexpr const char* name = "hyperbolic";  ///< in messages and records

  /// C = features, even: m = C / 2 directions for heads of D = head_dim coordinates. Throws std::invalid_argument for
  /// sizes below 1 and an odd C.
  hyperbolic(Eigen::Index head_dim, Eigen::Index features, std::uint64_t seed,
             const random_feature_options& options = {})
      : base({name, head_dim, detail::directions_of_pairs(name, features, "opposite directions"), seed, options}) {}

  /// The map of the same sizes with another seed.
  hyperbolic redraw(std::uint64_t seed) const { return {this->head_dim(), this->m_features, seed, this->options()}; }

 private:
  friend class detail::storable<hyperbolic>;

  explicit hyperbolic(detail::record_reader& in) : base(typename base::parameters(in)) {}
};

LINATTN_NAMESPACE_END
