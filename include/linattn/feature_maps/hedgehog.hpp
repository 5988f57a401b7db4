// A learned map that imitates softmax weights: a softmax over the coordinates of W x + b and their opposites.
#pragma once

#include <linattn/detail/learned_map.hpp>
#include <linattn/detail/registers.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <limits>

LINATTN_NAMESPACE_BEGIN

/// phi(x) = softmax over all 2 m of [u, -u] / temperature,  u = W x + b,  W (m, D), b (m) trained.  C = 2 m; mostly m =
/// D.  Features > 0, with a sum of 1 in each row.
///
/// Kernel: phi(q).phi(k), the more the more peaks u(q) and u(k) have in common. It estimates nothing by itself, so
/// there is no bias or variance to state: W and b are trained, head by head, until the normalised weights are close to
/// those of a softmax attention (cross-entropy of the two), and then with the model. The softmax's denominator is part
/// of the map: a query's cancels when normalised, a key's does not.
///
///     hedgehog<float> map(64);                             // W = I, b = 0: where training starts, C = 128
///     hedgehog<float> map(W, b, heads, 0.5);               // one set for each head: W (H m, D), b (H m)
///
/// Use it to take the softmax out of a trained transformer, with weights distilled for that, where the positive maps
/// without parameters leave attention too flat. Not untrained, where it has no relation to softmax, and not to save
/// memory: C is 2 D. Some public code has temperature 1/2. The paper has a form with exp in place of the
/// softmax, too; that is learned_linear<T, exponential> of W and -W below it.
///
/// Gradients: of x, and of W and b by `make_gradient`; the temperature is fixed, as W and b can take it up. Numerics:
/// the largest |u| is subtracted, so that nothing overflows while |u| / temperature does not; the error of u over
/// temperature, and some ulp. A feature far below its row's largest is 0 by underflow. NaN is kept, and fills its row.
///
/// Cost a token: C D flops and C exponentials; a vjp as much again without exponentials, and as much for W. No
/// allocation after the constructor. Copies share the parameters; a map is immutable and may be used by any number of
/// threads. Source: Zhang et al., The hedgehog and the porcupine: expressive linear attentions with softmax mimicry,
/// 2024.
template <class T = float>
class hedgehog : public detail::learned_map<T>, public detail::storable<hedgehog<T>> {
  using base = detail::learned_map<T>;
  using P = detail::packet<T>;

 public:
  static constexpr const char* name = "hedgehog";  ///< in messages and records
  using typename base::gradient;

  /// W (H m, D) and b (H m), the sets of H = heads heads below each other, in any storage order. Throws
  /// std::invalid_argument for sizes that do not fit and a temperature that is not positive and finite. Allocates the
  /// parameters once more.
  hedgehog(const typename base::weights_view& weights, const typename base::bias_view& bias, Eigen::Index heads = 1,
           double temperature = 1)
      : base(name, weights, bias, heads, temperature) {
    if (!is_temperature(temperature)) {
      detail::refuse(name, "temperature is ", temperature, "; it divides W x + b, and must be positive");
    }
  }

  /// W = I, b = 0 for all heads of D = head_dim coordinates. Throws as above, and for a head_dim below 1.
  explicit hedgehog(Eigen::Index head_dim, double temperature = 1)
      : hedgehog(identity_of(head_dim), row_vector<T>::Zero(head_dim), 1, temperature) {}

  /// C = 2 m.
  Eigen::Index dimension(Eigen::Index /*head_dim*/) const noexcept { return 2 * this->rows(); }
  double temperature() const noexcept { return this->own(); }

  /// phi (R, C) from x (R, D).
  void forward(const const_tile<T>& x, tile<T>& phi, tile_position where) const noexcept {
    const Eigen::Index m = this->rows();
    const T slope = inverse_temperature();
    this->project(x, phi, where);
    detail::for_each_row(x, phi, [&](Eigen::Index /*r*/, const T* /*in*/, T* row) LINATTN_INLINE_LAMBDA {
      P size = P::zero();  // |u|, the largest so far
      detail::for_each_register<T>(m, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        const P u = detail::load_up_to(row + c, left);
        size = max(max(u, P::zero() - u), size);
      });
      const P shift(-slope * detail::largest_lane(size));
      P total = P::zero();
      detail::for_each_register<T>(m, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        const P u = detail::load_up_to(row + c, left);
        const P with = exp_of_negative(fma(u, P(slope), shift));
        const P against = exp_of_negative(fma(u, P(-slope), shift));
        const P both = with + against;
        total = total + (left < P::size ? both.first(left) : both);
        detail::store_up_to(row + c, with, left);
        detail::store_up_to(row + m + c, against, left);
      });
      const P share(T(1) / sum(total));
      detail::transform_in_place(row, 2 * m, [&](const P& e) LINATTN_INLINE_LAMBDA { return e * share; });
    });
  }

  /// dx (R, D) = du W,  dW += du^T x,  db += sum_r du,  du (R, m) = (a_+ - a_-) / temperature,  where a = phi (dphi -
  /// phi.dphi) and its halves. `g` may be null. Throws std::invalid_argument for the gradient of a map of other sizes.
  void vjp(const const_tile<T>& x, const const_tile<T>& phi, const const_tile<T>& dphi, tile<T>& dx,
           tile_position where, gradient* g) const {
    this->check(name, g);
    constexpr Eigen::Index most = 32;  // rows at a time, for the sake of their means
    const Eigen::Index m = this->rows();
    const P slope(inverse_temperature());
    for (Eigen::Index first = 0; first < x.rows(); first += most) {
      const Eigen::Index count = std::min(most, x.rows() - first);
      const T* const p = phi.data() + first * phi.outerStride();
      const T* const upstream = dphi.data() + first * dphi.outerStride();
      T means[most];  // phi.dphi
      for (Eigen::Index r = 0; r < count; ++r) {
        means[r] = detail::dot(p + r * phi.outerStride(), upstream + r * dphi.outerStride(), 2 * m);
      }
      const auto du = [&](Eigen::Index r, Eigen::Index c, Eigen::Index n) LINATTN_INLINE_LAMBDA {
        const auto a = [&](Eigen::Index half) LINATTN_INLINE_LAMBDA {
          const T* const d = upstream + r * dphi.outerStride() + half + c;
          return detail::load_up_to(p + r * phi.outerStride() + half + c, n) * (detail::load_up_to(d, n) - P(means[r]));
        };
        return (a(0) - a(m)) * slope;
      };
      auto rows = dx.middleRows(first, count);
      this->pull_back(x.middleRows(first, count), rows, where, du, g);
    }
  }

 private:
  friend class detail::storable<hedgehog>;

  explicit hedgehog(detail::record_reader& in) : base(in) {
    if (!is_temperature(temperature())) in.fail("its temperature is ", temperature());
  }

  static bool is_temperature(double t) { return t > 0 && t <= std::numeric_limits<double>::max(); }
  T inverse_temperature() const noexcept { return static_cast<T>(1 / temperature()); }

  static row_matrix<T> identity_of(Eigen::Index head_dim) {
    if (head_dim < 1) detail::refuse(name, "head_dim is ", head_dim, "; at least 1 is needed");
    return row_matrix<T>::Identity(head_dim, head_dim);
  }
};

LINATTN_NAMESPACE_END
