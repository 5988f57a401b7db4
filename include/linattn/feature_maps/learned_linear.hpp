// A learned affine map of rows, made positive by an elementwise map.
#pragma once

#include <linattn/detail/learned_map.hpp>
#include <linattn/detail/registers.hpp>
#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/feature_maps/exponential.hpp>
#include <linattn/feature_maps/relu.hpp>

#include <Eigen/Core>

LINATTN_NAMESPACE_BEGIN

namespace detail {
/// learned_linear by its activation, in messages and records; null where the map's gradient, which has the features but
/// not W x + b, could not be told.
template <class Activation>
inline constexpr const char* learned_linear_name = nullptr;
template <>
inline constexpr const char* learned_linear_name<relu> = "learned_linear<relu>";
template <>
inline constexpr const char* learned_linear_name<exponential> = "learned_linear<exponential>";
template <>
inline constexpr const char* learned_linear_name<elu_plus_one> = "learned_linear<elu_plus_one>";
}  // namespace detail

/// phi(x) = activation(W x + b),  W (C, D), b (C) trained;  activation: relu, exponential or elu_plus_one.  Any C.
/// Features >= 0, > 0 with the latter two.
///
/// Kernel: activation(W q + b).activation(W k + b), whatever training made of it; it estimates no kernel, so there is
/// no bias or variance to state. A transformer that is finetuned with it learns to do without softmax.
///
///     learned_linear<float> map(W, b);                          // one set for all heads
///     learned_linear<float, exponential> map(W, b, heads);      // one for each: W (H C, D), b (H C)
///
/// Use it with weights from training: C below D makes states smaller, C above D lets them hold more. Not untrained, and
/// not where D is small enough for a fixed map of as many features. With relu a row may have phi = 0, and where every
/// product vanishes the output is 0.
///
/// Gradients: of x, and of W and b by `make_gradient`; where relu has a kink its derivative is 0. Numerics: sums over D
/// in T, and the activation's; with exponential log phi = W x + b is written, and nothing overflows. NaN is kept.
///
/// Cost a token: 2 C D flops and C activations; a vjp as much again, and as much for each of W and x. No allocation
/// after the constructor. Copies share the parameters; a map is immutable and may be used by any number of threads.
/// Source: Kasai et al., Finetuning pretrained transformers into RNNs, 2021 (T2R, with relu and a set for each head).
template <class T = float, class Activation = relu>
class learned_linear : public detail::learned_map<T>, public detail::storable<learned_linear<T, Activation>> {
  using base = detail::learned_map<T>;
  using P = detail::packet<T>;

 public:
  static constexpr const char* name = detail::learned_linear_name<Activation>;  ///< in messages and records
  static_assert(name != nullptr,
                "linattn: learned_linear takes relu, exponential or elu_plus_one, whose gradients follow from their "
                "features");
  static constexpr bool log_features = detail::has_log_features<Activation>;
  using typename base::gradient;

  /// W (H C, D) and b (H C), the sets of H = heads heads below each other, in any storage order. Throws
  /// std::invalid_argument for sizes that do not fit. Allocates the parameters once more.
  learned_linear(const typename base::weights_view& weights, const typename base::bias_view& bias,
                 Eigen::Index heads = 1)
      : base(name, weights, bias, heads) {}

  /// C.
  Eigen::Index dimension(Eigen::Index /*head_dim*/) const noexcept { return this->rows(); }

  /// phi (R, C) from x (R, D).
  void forward(const const_tile<T>& x, tile<T>& phi, tile_position where) const noexcept {
    this->project(x, phi, where);
    for (Eigen::Index r = 0; r < x.rows(); ++r) {
      detail::transform_in_place(phi.data() + r * phi.outerStride(), phi.cols(),
                                 [](const P& u) LINATTN_INLINE_LAMBDA { return Activation().packet(u); });
    }
  }

  /// dx (R, D) = du W,  dW += du^T x,  db += sum_r du,  du (R, C) = activation'(W x + b) dphi. `g` may be null. Throws
  /// std::invalid_argument for the gradient of a map of other sizes.
  void vjp(const const_tile<T>& x, const const_tile<T>& phi, const const_tile<T>& dphi, tile<T>& dx,
           tile_position where, gradient* g) const {
    this->check(name, g);
    const auto du = [&](Eigen::Index r, Eigen::Index c, Eigen::Index n) LINATTN_INLINE_LAMBDA {
      const P features = detail::load_up_to(phi.data() + r * phi.outerStride() + c, n);
      const P upstream = detail::load_up_to(dphi.data() + r * dphi.outerStride() + c, n);
      return P(Activation().vjp_packet(features, features, upstream));  // relu's features have the sign of its argument
    };
    this->pull_back(x, dx, where, du, g);
  }

 private:
  friend class detail::storable<learned_linear>;

  explicit learned_linear(detail::record_reader& in) : base(in) {}
};

LINATTN_NAMESPACE_END
