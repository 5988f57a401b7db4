// Trigonometric random features: signed, so normalised they can have denominators <= 0 (at N(0, 1) and D = 64 a third
// of the rows and more).
#pragma once

#include <linattn/detail/fourier_map.hpp>

#include <Eigen/Core>
#include <cmath>
#include <cstdint>

LINATTN_NAMESPACE_BEGIN

/// phi(x) = m^(-1/2) e^(|x'|^2 / 2) [cos(W x'), sin(W x')],  x' = D^(-1/4) x,  W (m, D),  C = 2 m, signed features.
///
/// Kernel: phi(q).phi(k) is an unbiased estimate of exp(q.k / sqrt(D)), the numerator of softmax attention, over draws
/// of W.
///
/// Sign: estimates of small weights are often negative and so are denominators. With N(0, 1) inputs at D = 64, 34 %
/// of the rows (C = 4096) to 49 % (C = 64) have one <= 0: the normalised output is useless. check_feature_map counts
/// them for a map and input scale. The map says signed_features, so an operator does not normalise unless its options
/// say `.normalize = true`; do that where the check counts none, that is for small inputs. Not normalised, the output
/// estimates sum_j exp(q.k_j / sqrt(D)) v_j.
///
/// Variance: with d = D^(-1/4) (q - k) and z = D^(-1/4) (q + k) the variance of an estimate is
/// exp(|z|^2 - 2 q.k / sqrt(D)) (1 - exp(-|d|^2))^2 / (2 m). Small for large weights and zero for q = k, large against
/// small weights: less than `positive_random`'s while |z| is small, and hopeless at D = 64 and unit inputs, where it
/// grows as exp(16).
///
/// Use it to match softmax attention at small logits: at D = 16, inputs of standard deviation 0.5 and C = 1024 it has
/// about three quarters of the error of `positive_random` (below C = 64 it is the worse one). Not where denominators
/// must be positive whatever the input; there take `positive_random`.
///
/// Orthogonal directions have about 0.6 of the error there, 0.9 at D = 64; see random_feature_options.
///
/// Numerics: features overflow float from |x'|^2 = 177 on (double: 1419), sums of products from half of that. NaN is
/// kept.
///
/// Cost a token: C D flops and C / 2 pairs of sine and cosine. What all random maps share: random_features.hpp.
/// Sources: Rahimi and Recht, Random features for large-scale kernel machines, 2007; Choromanski et al., Rethinking
/// attention with Performers, 2021.
template <class T = float>
class random_fourier : public detail::fourier_map<T>, public detail::storable<random_fourier<T>> {
  using base = detail::fourier_map<T>;

 public:
  static constexpr const char* name = "random_fourier";  ///< in messages and records

  /// C = features, even: m = C / 2 directions for heads of D = head_dim coordinates. Throws std::invalid_argument for
  /// sizes below 1 and an odd C.
  random_fourier(Eigen::Index head_dim, Eigen::Index features, std::uint64_t seed,
                 const random_feature_options& options = {})
      : base(base::draw(name, head_dim, features, seed, options)) {}

  /// The map of the same sizes with another seed.
  random_fourier redraw(std::uint64_t seed) const {
    return {this->head_dim(), this->m_features, seed, this->options()};
  }

  /// phi (R, C) from x (R, D).
  void forward(const const_tile<T>& x, tile<T>& phi) const noexcept {
    this->project_rows(x, phi, [&](const T* in, T* row) LINATTN_INLINE_LAMBDA {
      const T growth = std::exp(this->half_square(in));
      this->waves(row, this->m_input_scale, growth * this->m_feature_scale);
    });
  }

  /// dx (R, D) = D^(-1/4) (W^T du + (sum_c phi_c dphi_c) x'). C D flops a token.
  void vjp(const const_tile<T>& x, const const_tile<T>& phi, const const_tile<T>& dphi, tile<T>& dx) const noexcept {
    this->pull_back(x, phi, dphi, dx, this->m_input_scale, this->m_input_scale * this->m_input_scale,
                    this->angle_gradient(phi, dphi));
  }

 private:
  friend class detail::storable<random_fourier>;

  explicit random_fourier(detail::record_reader& in) : base(typename base::parameters(in)) {}
};

LINATTN_NAMESPACE_END
