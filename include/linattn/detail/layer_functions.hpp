// What a transformer's layers do between their products, row by row: norms, activations, residuals, positions.
#pragma once

#include <linattn/detail/layout.hpp>
#include <linattn/detail/registers.hpp>
#include <linattn/detail/simd.hpp>
#include <linattn/matrix_view.hpp>

#include <Eigen/Core>
#include <cmath>
#include <unsupported/Eigen/SpecialFunctions>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// y = (x - mean(x)) / sqrt(var(x) + epsilon) weight + bias of each row, var the mean square; y may be x.
///
/// The mean is the rounded one and, beside it, the mean of what that leaves: where coordinates are large and close
/// together, the rounding of a sum of them exceeds their spread, and would be divided by it.
template <class T>
void layer_norm(matrix_view<const T> x, const T* weight, const T* bias, T epsilon, matrix_view<T> y) noexcept {
  using P = packet<T>;
  const Eigen::Index n = x.cols();
  for (Eigen::Index r = 0; r < x.rows(); ++r) {
    const T* const in = x.row(r);
    T* const out = y.row(r);
    const P mean(total(in, n) / T(n));
    P rest = P::zero();
    for_each_register<T>(n, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
      const P from_mean = load_up_to(in + c, left) - mean;
      rest = rest + (left < P::size ? from_mean.first(left) : from_mean);
    });
    rest = P(sum(rest) / T(n));
    P squares = P::zero();
    for_each_register<T>(n, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
      P from_mean = load_up_to(in + c, left) - mean - rest;
      if (left < P::size) from_mean = from_mean.first(left);
      squares = fma(from_mean, from_mean, squares);
    });
    const P scale(T(1) / std::sqrt(sum(squares) / T(n) + epsilon));
    for_each_register<T>(n, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
      const P unit = (load_up_to(in + c, left) - mean - rest) * scale;
      store_up_to(out + c, fma(unit, load_up_to(weight + c, left), load_up_to(bias + c, left)), left);
    });
  }
}

/// x += y.
template <class T>
void add_rows(matrix_view<T> x, matrix_view<const T> y) noexcept {
  for (Eigen::Index r = 0; r < x.rows(); ++r) {
    for_each_register<T>(x.cols(), [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
      store_up_to(x.row(r) + c, load_up_to(x.row(r) + c, left) + load_up_to(y.row(r) + c, left), left);
    });
  }
}

/// max(x, 0) in place; NaN is kept.
template <class T>
void relu_rows(matrix_view<T> x) noexcept {
  for (Eigen::Index r = 0; r < x.rows(); ++r) {
    transform_in_place(x.row(r), x.cols(), [](const packet<T>& v) { return max(v, packet<T>::zero()); });
  }
}

/// x Phi(x) = x (1 + erf(x / sqrt(2))) / 2 in place, to 3 epsilon |x|; NaN is kept, and made of -inf. Rows are aligned
/// and padded to whole registers with what may be overwritten, so that no lane falls to another erf than its
/// neighbours'.
template <class T>
void gelu_rows(matrix_view<T> x) noexcept {
  for (Eigen::Index r = 0; r < x.rows(); ++r) {
    Eigen::Map<Eigen::Array<T, 1, Eigen::Dynamic>, Eigen::Aligned64> row(x.row(r), padded<T>(x.cols()));
    row = row * T(0.5) * (T(1) + (row * T(0.70710678118654752440)).erf());
  }
}

/// sin(p / 10000^(2 i / n)) in columns 2 i and the cosines in columns 2 i + 1, added to x or written over it; n
/// columns.
template <class T>
void sinusoid(Eigen::Index position, const double* frequencies, T* x, Eigen::Index n, bool adds) noexcept {
  for (Eigen::Index c = 0; c < n; ++c) {
    const double angle = double(position) * frequencies[c / 2];
    const T wave = T(c % 2 == 0 ? std::sin(angle) : std::cos(angle));
    x[c] = adds ? x[c] + wave : wave;
  }
}

}  // namespace detail
LINATTN_NAMESPACE_END
