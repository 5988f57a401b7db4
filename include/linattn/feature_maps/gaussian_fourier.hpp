// Random Fourier features of the Gaussian kernel: bounded, signed.
#pragma once

#include <linattn/detail/fourier_map.hpp>

#include <Eigen/Core>
#include <cstdint>

LINATTN_NAMESPACE_BEGIN

/// phi(x) = m^(-1/2) [cos(W x'), sin(W x')],  x' = temperature^(-1/2) x,  W (m, D),  C = 2 m, signed features.
///
/// Kernel: phi(q).phi(k) is an unbiased estimate of exp(-|q - k|^2 / (2 temperature)) over draws of W, the Gaussian
/// kernel of variance temperature, sqrt(D) where the options do not say. It is softmax's numerator times a factor of
/// the query, which normalising cancels, and a factor exp(-|k|^2 / (2 temperature)) of the key, which stays: among keys
/// of one length it is softmax's.
///
/// Sign: as `random_fourier`: not normalised unless asked for; denominators <= 0 are likely where few keys are near.
/// Variance: (1 - exp(-|d|^2))^2 / (2 m), d = q' - k': at most 1 / (2 m) whatever the input, so small kernel values
/// drown in it.
///
/// Use it where a bounded kernel of distance is wanted. Not to stand in for softmax on keys of different lengths; there
/// take `random_fourier`, or for keys of unit length `rfa`. Numerics: |phi| <= m^(-1/2) for every input. NaN is kept.
///
/// Cost a token: C D flops and C / 2 pairs of sine and cosine. What all random maps share: random_features.hpp.
/// Source: Rahimi and Recht, Random features for large-scale kernel machines, 2007.
template <class T = float>
class gaussian_fourier : public detail::fourier_map<T>, public detail::storable<gaussian_fourier<T>> {
  using base = detail::fourier_map<T>;

 public:
  static constexpr const char* name = "gaussian_fourier";  ///< in messages and records

  /// C = features, even, for heads of D = head_dim coordinates. Throws std::invalid_argument as random_fourier.
  gaussian_fourier(Eigen::Index head_dim, Eigen::Index features, std::uint64_t seed,
                   const random_feature_options& options = {})
      : base(base::draw(name, head_dim, features, seed, options)) {}

  /// The map of the same sizes with another seed.
  gaussian_fourier redraw(std::uint64_t seed) const {
    return {this->head_dim(), this->m_features, seed, this->options()};
  }

  void forward(const const_tile<T>& x, tile<T>& phi) const noexcept {
    this->project_rows(x, phi, [&](const T* /*in*/, T* row) LINATTN_INLINE_LAMBDA {
      this->waves(row, this->m_input_scale, this->m_feature_scale);
    });
  }

  /// dx (R, D) = temperature^(-1/2) W^T du. C D flops a token.
  void vjp(const const_tile<T>& /*x*/, const const_tile<T>& phi, const const_tile<T>& dphi,
           tile<T>& dx) const noexcept {
    this->directions().apply_transposed(dx, this->m_input_scale, this->angle_gradient(phi, dphi));
  }

 private:
  friend class detail::storable<gaussian_fourier>;

  explicit gaussian_fourier(detail::record_reader& in) : base(typename base::parameters(in)) {}
};

LINATTN_NAMESPACE_END
