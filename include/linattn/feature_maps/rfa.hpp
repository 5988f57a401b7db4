// Random Fourier features of normalised rows.
#pragma once

#include <linattn/detail/fourier_map.hpp>
#include <linattn/detail/registers.hpp>

#include <Eigen/Core>
#include <cmath>
#include <cstdint>

LINATTN_NAMESPACE_BEGIN

/// phi(x) = m^(-1/2) [cos(W x^ / sqrt(temperature)), sin(W x^ / sqrt(temperature))],  x^ = x / |x|,  W (m, D),  C = 2
/// m, signed features.
///
/// Kernel: phi(q).phi(k) is an unbiased estimate of exp(-|q^ - k^|^2 / (2 temperature)) over draws of W, which on unit
/// rows is exp(q^.k^ / temperature) times the constant exp(-1 / temperature): softmax attention of unit queries and
/// keys when normalised. The temperature is 1 where the options do not say; the source's sigma is its square root.
/// x = 0 stays 0, where the kernel is exp(-1 / (2 temperature)) with every unit row.
///
/// Sign: as `random_fourier`, but unit rows are never far apart: the kernel is at least exp(-2 / temperature), and at
/// temperature 1 and C >= 32 denominators of 256 keys are positive. Count others with check_feature_map, then set
/// `.normalize = true`; signed features are not normalised otherwise.
/// Variance: (1 - exp(-|d|^2))^2 / (2 m), d = (q^ - k^) / sqrt(temperature): at most 1 / (2 m).
///
/// Use it for models that normalise queries and keys anyway; it is the random map that large inputs cannot harm. Not
/// where lengths carry meaning, nor at temperatures far below 1, where the kernel is small against the error.
/// Numerics: |phi| <= m^(-1/2); lengths beyond 1e19 or below 1e-19 in float lose their direction. NaN is kept.
///
/// Cost a token: C D flops, C / 2 pairs of sine and cosine, a square root. What all random maps share:
/// random_features.hpp.
/// Source: Peng et al., Random feature attention, 2021.
template <class T = float>
class rfa : public detail::fourier_map<T>, public detail::storable<rfa<T>> {
  using base = detail::fourier_map<T>;

 public:
  static constexpr const char* name = "rfa";  ///< in messages and records

  /// C = features, even, for heads of D = head_dim coordinates. Throws std::invalid_argument as random_fourier.
  rfa(Eigen::Index head_dim, Eigen::Index features, std::uint64_t seed, const random_feature_options& options = {})
      : base(base::draw(name, head_dim, features, seed, options), 1) {}

  /// The map of the same sizes with another seed.
  rfa redraw(std::uint64_t seed) const { return {this->head_dim(), this->m_features, seed, this->options()}; }

  void forward(const const_tile<T>& x, tile<T>& phi) const noexcept {
    this->project_rows(x, phi, [&](const T* in, T* row) LINATTN_INLINE_LAMBDA {
      this->waves(row, this->m_input_scale * inverse_length(in), this->m_feature_scale);
    });
  }

  /// dx (R, D) = (g - x^ (x^.g)) / |x|,  g = W^T du / sqrt(temperature); 0 at x = 0. C D flops a token.
  void vjp(const const_tile<T>& x, const const_tile<T>& phi, const const_tile<T>& dphi, tile<T>& dx) const noexcept {
    this->directions().apply_transposed(dx, this->m_input_scale, this->angle_gradient(phi, dphi));
    detail::for_each_row(x, dx, [&](Eigen::Index r, const T* in, const T* out) LINATTN_INLINE_LAMBDA {
      const T inverse = inverse_length(in);
      const T along = detail::dot(in, out, x.cols()) * inverse * inverse;
      dx.row(r) = inverse * (dx.row(r) - along * x.row(r));
    });
  }

 private:
  friend class detail::storable<rfa>;

  explicit rfa(detail::record_reader& in) : base(typename base::parameters(in), 1) {}

  /// 1 / |x|, and 0 at 0. A NaN passes.
  T inverse_length(const T* x) const noexcept {
    const T squares = detail::squared_norm(x, this->head_dim());
    return squares == T(0) ? T(0) : T(1) / std::sqrt(squares);
  }
};

LINATTN_NAMESPACE_END
