// Rectified features, weighted by a cosine of the distance of tokens.
#pragma once

#include <linattn/detail/registers.hpp>
#include <linattn/feature_map.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstdint>

LINATTN_NAMESPACE_BEGIN

/// phi(x at position i) = [cos(a_i) max(x, 0), sin(a_i) max(x, 0)],  a_i = (pi / 2) min(i, P) / P,  i = 0, 1, ...
/// C = 2 D, features >= 0.
///
/// Kernel: sum_c max(q_c, 0) max(k_c, 0) times cos(pi (i - j) / (2 P)): relu's, and near tokens count more than far
/// ones, down to nothing at a distance of P. It is computed as it stands: an estimate of nothing, and no relation to
/// softmax. The horizon P is the user's: the longest sequence expected, and part of what a model was trained with. It
/// does not follow the length of the input, so that streaming and batch agree. Positions from P on count as P: all
/// tokens there are at distance 0 of each other, and features stay >= 0 for sequences of any length.
///
/// Use it where recency helps and lengths are known. Not for endless streams, where all tokens end up at P, and not
/// where rows may lack a positive coordinate: like relu's their output is 0. NaN is kept.
///
/// Cost a token: 3 flops a coordinate, one sine and one cosine. Source: Qin et al., cosFormer, 2022, which counts
/// positions from 1 and takes P from the input; only differences of positions matter below P.
class cosformer {
 public:
  static constexpr const char* name = "cosformer";  ///< in records of states

  /// P = horizon, at least 1; throws std::invalid_argument below.
  explicit cosformer(Eigen::Index horizon) : m_horizon(horizon) {
    if (horizon < 1) detail::refuse("cosformer", "horizon is ", horizon, "; at least 1 is needed");
  }

  static constexpr Eigen::Index dimension(Eigen::Index head_dim) noexcept { return 2 * head_dim; }
  Eigen::Index horizon() const noexcept { return m_horizon; }
  std::uint64_t fingerprint() const noexcept { return std::uint64_t(m_horizon); }

  template <class T>
  void forward(const const_tile<T>& x, tile<T>& phi, tile_position where) const noexcept {
    using P = detail::packet<T>;
    detail::for_each_row(x, phi, [&](Eigen::Index r, const T* in, T* out) LINATTN_INLINE_LAMBDA {
      const weights<T> weight(*this, where.first_position + r);
      detail::for_each_register<T>(x.cols(), [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        const P positive = max(detail::load_up_to(in + c, left), P(T(0)));
        detail::store_up_to(out + c, positive * weight.cosine, left);
        detail::store_up_to(out + x.cols() + c, positive * weight.sine, left);
      });
    });
  }

  template <class T>
  void vjp(const const_tile<T>& x, const const_tile<T>& /*phi*/, const const_tile<T>& dphi, tile<T>& dx,
           tile_position where) const noexcept {
    using P = detail::packet<T>;
    detail::for_each_row(
        x, dphi, dx, [&](Eigen::Index r, const T* in, const T* gradient, T* out) LINATTN_INLINE_LAMBDA {
          const weights<T> weight(*this, where.first_position + r);
          detail::for_each_register<T>(x.cols(), [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
            const P g = fma(detail::load_up_to(gradient + c, left), weight.cosine,
                            detail::load_up_to(gradient + x.cols() + c, left) * weight.sine);
            detail::store_up_to(out + c, where_positive(detail::load_up_to(in + c, left), g), left);
          });
        });
  }

 private:
  template <class T>
  struct weights {
    detail::packet<T> cosine;
    detail::packet<T> sine;

    weights(const cosformer& map, Eigen::Index position) {
      constexpr double quarter_turn = 1.5707963267948966;
      const double angle =
          quarter_turn * static_cast<double>(std::min(position, map.m_horizon)) / static_cast<double>(map.m_horizon);
      // Rounding makes neither negative: pi / 2 in double is a little below pi / 2.
      cosine = detail::packet<T>(static_cast<T>(std::cos(angle)));
      sine = detail::packet<T>(static_cast<T>(std::sin(angle)));
    }
  };

  Eigen::Index m_horizon;
};

LINATTN_NAMESPACE_END
