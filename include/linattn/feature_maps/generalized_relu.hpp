// Rectified random projections.
#pragma once

#include <linattn/detail/random_map.hpp>
#include <linattn/detail/registers.hpp>

#include <Eigen/Core>
#include <cstdint>

LINATTN_NAMESPACE_BEGIN

/// phi_c(x) = m^(-1/2) max(w_c.x', 0) + epsilon,  x' = D^(-1/4) x,  c = 1 ... m,  C = m, features > 0 (>= 0 where
/// epsilon is 0).
///
/// Kernel: but for epsilon, phi(q).phi(k) is an unbiased estimate of |q'| |k'| (sin t + (pi - t) cos t) / (2 pi) over
/// draws w_c of N(0, I), with t the angle between q and k: the arc-cosine kernel of degree 1. It grows with the angle's
/// cosine as softmax does, but only in proportion to lengths. Normalised, |q'| cancels and |k'| weighs keys.
/// Epsilon keeps denominators positive and mixes in a little of the plain mean of v.
///
/// Use it where a model is trained with it, or inputs are too large for exponentials: it is the most robust of the
/// random maps. Not to stand in for a trained softmax. `relu` is the same without W, at C = D and no cost.
///
/// Numerics: no exponent and so no overflow before the sums'; NaN is kept. Lengths scale out: a temperature changes no
/// more than the weight of epsilon. The gradient is 0 where w_c.x' is lost beside epsilon, from about 1e-10 m^(1/2)
/// down.
///
/// Cost a token: 2 C D flops. What all random maps share: random_features.hpp.
/// Source: Choromanski et al., Rethinking attention with Performers, 2021.
template <class T = float>
class generalized_relu : public detail::random_map<T>, public detail::storable<generalized_relu<T>> {
  using base = detail::random_map<T>;

 public:
  static constexpr const char* name = "generalized_relu";  ///< in messages and records

  /// C = features for heads of D = head_dim coordinates. Throws std::invalid_argument for sizes below 1 and a negative
  /// epsilon.
  generalized_relu(Eigen::Index head_dim, Eigen::Index features, std::uint64_t seed,
                   const random_feature_options& options = {}, double epsilon = 1e-3)
      : base({name, head_dim, features, seed, options, epsilon}, 1) {
    if (!(epsilon >= 0)) detail::refuse(name, "epsilon is ", epsilon, "; it must not be negative");
  }

  /// The map of the same sizes and epsilon with another seed.
  generalized_relu redraw(std::uint64_t seed) const {
    return {this->head_dim(), this->m_features, seed, this->options(), epsilon()};
  }

  double epsilon() const noexcept { return this->m_parameters.own; }

  void forward(const const_tile<T>& x, tile<T>& phi) const noexcept {
    using P = detail::packet<T>;
    const P scale(this->m_input_scale * this->m_feature_scale);
    const P lowest(static_cast<T>(epsilon()));
    this->project_rows(x, phi, [&](const T* /*in*/, T* row) LINATTN_INLINE_LAMBDA {
      detail::transform_in_place(row, phi.cols(),
                                 [&](const P& u) LINATTN_INLINE_LAMBDA { return fma(max(u, P(T(0))), scale, lowest); });
    });
  }

  /// dx (R, D) = m^(-1/2) D^(-1/4) W^T g,  g = dphi where phi > epsilon and 0 elsewhere. 2 C D flops a token.
  void vjp(const const_tile<T>& /*x*/, const const_tile<T>& phi, const const_tile<T>& dphi,
           tile<T>& dx) const noexcept {
    using P = detail::packet<T>;
    const P lowest(static_cast<T>(epsilon()));
    this->directions().apply_transposed(dx, this->m_input_scale * this->m_feature_scale,
                                        [&](Eigen::Index r, Eigen::Index c, Eigen::Index n) LINATTN_INLINE_LAMBDA {
                                          return where_positive(
                                              detail::load_up_to(phi.data() + r * phi.outerStride() + c, n) - lowest,
                                              detail::load_up_to(dphi.data() + r * dphi.outerStride() + c, n));
                                        });
  }

 private:
  friend class detail::storable<generalized_relu>;

  explicit generalized_relu(detail::record_reader& in) : base(typename base::parameters(in), 1) {
    if (!(epsilon() >= 0)) in.fail("its epsilon is ", epsilon());
  }
};

LINATTN_NAMESPACE_END
