// Deterministic, parameter-free projection: sparse products of rectified coordinates.
#pragma once

#include <linattn/detail/registers.hpp>
#include <linattn/feature_map.hpp>

#include <Eigen/Core>
#include <algorithm>

LINATTN_NAMESPACE_BEGIN

/// phi_(j,i)(x) = y_i y_(i-j),  y = [max(x, 0), max(-x, 0)] (2 D), indices modulo 2 D,  j = 1 ... Nu,  i = 0 ... 2 D-1.
/// C = 2 D Nu, features >= 0.
///
/// Kernel: sum over pairs of coordinates j apart whose signs agree in q and k, computed as it stands: an estimate of
/// nothing, and no relation to softmax. Most features of a row are 0, so keys that differ in signs do not disturb each
/// other: a state holds about C keys that can be told apart, where D orthogonal ones are all that `relu` can hold. Nu
/// up to D - 1 is of use: products D apart vanish, and beyond that they come again.
///
/// Use it where many pairs are to be kept apart and C = 2 D Nu is paid for. Not where every key must have weight: a row
/// may have phi = 0 (at D = 1 every row has), and where every product vanishes the output is 0. Features are products
/// of two coordinates: inputs beyond 1e9 overflow float sums. NaN is kept.
///
/// Cost a token: C products and 4 D rectifications a j; no exponential. The source divides a row by the sum of its
/// features; per-query factors cancel when normalised, per-key factors do not, and are not applied here.
/// Source: Schlag, Irie, Schmidhuber, Linear transformers are secretly fast weight programmers, 2021.
template <Eigen::Index Nu = 1>
struct dpfp {
  static constexpr const char* name = "dpfp";  ///< in records of states

  static_assert(Nu >= 1, "linattn: dpfp<Nu> takes products of coordinates 1 ... Nu apart, so Nu is at least 1");

  static constexpr Eigen::Index dimension(Eigen::Index head_dim) noexcept { return 2 * head_dim * Nu; }

  template <class T>
  void forward(const const_tile<T>& x, tile<T>& phi) const noexcept {
    using P = detail::packet<T>;
    detail::for_each_row(x, phi, [&](Eigen::Index /*r*/, const T* in, T* out) LINATTN_INLINE_LAMBDA {
      for_each_run(x.cols(), [&](const run& at) LINATTN_INLINE_LAMBDA {
        detail::for_each_register<T>(at.length, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
          const P product = rectified(in, at.first, c, left) * rectified(in, at.second, c, left);
          detail::store_up_to(out + at.feature + c, product, left);
        });
      });
    });
  }

  /// A product hands its gradient to either factor, where that is positive. 6 C flops a token.
  template <class T>
  void vjp(const const_tile<T>& x, const const_tile<T>& /*phi*/, const const_tile<T>& dphi,
           tile<T>& dx) const noexcept {
    using P = detail::packet<T>;
    dx.setZero();
    detail::for_each_row(
        x, dphi, dx, [&](Eigen::Index /*r*/, const T* in, const T* gradient, T* out) LINATTN_INLINE_LAMBDA {
          // One factor after the other: their registers in dx may overlap.
          const auto pass = [&](const factor& to, const P& g, Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
            const P sign(to.negated ? T(-1) : T(1));
            const P through = where_positive(rectified(in, to, c, left), g);
            T* const place = out + to.coordinate + c;
            detail::store_up_to(place, fma(sign, through, detail::load_up_to(place, left)), left);
          };
          for_each_run(x.cols(), [&](const run& at) LINATTN_INLINE_LAMBDA {
            detail::for_each_register<T>(at.length, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
              const P g = detail::load_up_to(gradient + at.feature + c, left);
              pass(at.first, g * rectified(in, at.second, c, left), c, left);
              pass(at.second, g * rectified(in, at.first, c, left), c, left);
            });
          });
        });
  }

 private:
  /// Elements of y from one coordinate of x on, all of one sign.
  struct factor {
    Eigen::Index coordinate;
    bool negated;
  };

  /// `length` features whose factors lie in a row in x, too.
  struct run {
    Eigen::Index feature;
    Eigen::Index length;
    factor first;
    factor second;
  };

  template <class F>
  static LINATTN_INLINE void for_each_run(Eigen::Index head_dim, const F& f) {
    const Eigen::Index size = 2 * head_dim;
    const auto element = [&](Eigen::Index i) { return factor{i % head_dim, i >= head_dim}; };  // y_i
    for (Eigen::Index j = 1; j <= Nu; ++j) {
      for (Eigen::Index i = 0; i < size;) {
        const factor first = element(i);
        const factor second = element((i + size - j % size) % size);
        const Eigen::Index length = head_dim - std::max(first.coordinate, second.coordinate);
        f(run{(j - 1) * size + i, length, first, second});
        i += length;
      }
    }
  }

  /// max(+-x, 0) from coordinate + c on. The argument comes first in max: that keeps its NaN.
  template <class T>
  static LINATTN_INLINE detail::packet<T> rectified(const T* x, const factor& at, Eigen::Index c, Eigen::Index left) {
    using P = detail::packet<T>;
    return max(detail::load_up_to(x + at.coordinate + c, left) * P(at.negated ? T(-1) : T(1)), P(T(0)));
  }
};

LINATTN_NAMESPACE_END
