// Second-order Taylor features of the softmax kernel: exact, deterministic, quadratic in D.
#pragma once

#include <linattn/detail/registers.hpp>
#include <linattn/feature_map.hpp>

#include <Eigen/Core>
#include <cmath>

LINATTN_NAMESPACE_BEGIN

/// phi(x) = [1, x', x'_i x'_j for j < i, x'_i^2 / sqrt(2)],  x' = D^(-1/4) x; the products row by row, i = 0 ... D-1,
/// with the square at the end of each row.  C = 1 + D + D (D + 1) / 2, signed features.
///
/// Kernel: phi(q).phi(k) = 1 + s + s^2 / 2 with s = q.k / sqrt(D), without any error: the start of the series of
/// exp(s), the numerator of softmax attention. The map applies D^(-1/4) itself: leave query_scale at 1.
///
/// Sign: features are signed, but the kernel is ((1 + s)^2 + 1) / 2 >= 1/2, so that denominators are at least half the
/// number of keys: the operator normalises. Far keys of opposite direction get more weight than near ones: the parabola
/// rises again below s = -1.
///
/// Use it for a softmax that is not too sharp (|s| up to about 2) with small D, where it is the most exact per feature
/// and needs no seed: C = 153 at D = 16. Not for D = 64 (C = 2145) or peaked attention.
///
/// Numerics: a few ulp; sums of squares overflow float from |x| of about 1e9 on. NaN is kept.
/// Cost a token: C products, and the state of C features.
/// Source: Arora et al., Simple linear attention language models balance the recall-throughput tradeoff, 2024, packed
/// here by symmetry to about half of its 1 + D + D^2 features.
struct taylor {
  static constexpr const char* name = "taylor";  ///< in records of states
  static constexpr bool signed_features = true;
  static constexpr bool positive_kernel = true;

  static constexpr Eigen::Index dimension(Eigen::Index head_dim) noexcept {
    return 1 + head_dim + head_dim * (head_dim + 1) / 2;
  }

  template <class T>
  void forward(const const_tile<T>& x, tile<T>& phi) const noexcept {
    using P = detail::packet<T>;
    const Eigen::Index head_dim = x.cols();
    const scales<T> scale(head_dim);
    detail::for_each_row(x, phi, [&](Eigen::Index /*r*/, const T* in, T* out) LINATTN_INLINE_LAMBDA {
      const T* const end = out + dimension(head_dim);
      *out++ = T(1);
      detail::for_each_register<T>(head_dim, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        detail::store_up_to(out + c, detail::load_up_to(in + c, left) * P(scale.linear), left);
      });
      out += head_dim;
      for (Eigen::Index i = 0; i < head_dim; ++i) {
        const P factor(in[i] * scale.product);
        // The last register may spill into the next row of products, which is written afterwards, but not beyond phi.
        for (Eigen::Index c = 0; c < i; c += P::size) {
          detail::store_up_to(out + c, factor * detail::load_up_to(in + c, head_dim - c), end - (out + c));
        }
        out[i] = in[i] * scale.square * in[i];
        out += i + 1;
      }
    });
  }

  /// 2 C flops a token for either factor of a product.
  template <class T>
  void vjp(const const_tile<T>& x, const const_tile<T>& /*phi*/, const const_tile<T>& dphi,
           tile<T>& dx) const noexcept {
    using P = detail::packet<T>;
    const Eigen::Index head_dim = x.cols();
    const scales<T> scale(head_dim);
    detail::for_each_row(
        x, dphi, dx, [&](Eigen::Index /*r*/, const T* in, const T* gradient, T* out) LINATTN_INLINE_LAMBDA {
          ++gradient;
          detail::for_each_register<T>(head_dim, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
            detail::store_up_to(out + c, detail::load_up_to(gradient + c, left) * P(scale.linear), left);
          });
          gradient += head_dim;
          for (Eigen::Index i = 0; i < head_dim; ++i) {
            const P factor(in[i] * scale.product);
            P others = P::zero();
            detail::for_each_register<T>(i, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
              const P g = detail::load_up_to(gradient + c, left);
              others = fma(g, detail::load_up_to(in + c, left), others);
              detail::store_up_to(out + c, fma(g, factor, detail::load_up_to(out + c, left)), left);
            });
            out[i] += scale.product * sum(others) + T(2) * scale.square * in[i] * gradient[i];
            gradient += i + 1;
          }
        });
  }

 private:
  template <class T>
  struct scales {
    T linear;   // D^(-1/4)
    T product;  // D^(-1/2)
    T square;   // (2 D)^(-1/2)

    explicit scales(Eigen::Index head_dim)
        : linear(static_cast<T>(1 / std::sqrt(std::sqrt(static_cast<double>(head_dim))))),
          product(static_cast<T>(1 / std::sqrt(static_cast<double>(head_dim)))),
          square(static_cast<T>(1 / std::sqrt(2 * static_cast<double>(head_dim)))) {}
  };
};

LINATTN_NAMESPACE_END
