// Loops over the registers of one row, as feature maps need them: whole registers, and the last one in part.
//
// A partial register is padded with zeros and never read or written beyond its lanes, and the order of every sum
// depends on the length alone: so a row's result depends on neither its place nor its neighbours.
#pragma once

#include <linattn/detail/simd.hpp>

#include <Eigen/Core>
#include <algorithm>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// A register from x, zero from lane n on where n is less than a register.
template <class S>
LINATTN_INLINE packet<computed_t<S>> load_up_to(const S* x, Eigen::Index n) {
  using P = packet<computed_t<S>>;
  return n < P::size ? P::load_partial(x, n) : P::load_unaligned(x);
}

/// The register to x, its first n lanes where n is less than a register.
template <class S>
LINATTN_INLINE void store_up_to(S* x, const packet<computed_t<S>>& values, Eigen::Index n) {
  if (n < packet<computed_t<S>>::size) {
    values.store_partial(x, n);
  } else {
    values.store_unaligned(x);
  }
}

/// f(offset, lanes left) for the registers of n elements.
template <class T, class F>
LINATTN_INLINE void for_each_register(Eigen::Index n, const F& f) {
  for (Eigen::Index c = 0; c < n; c += packet<T>::size) f(c, n - c);
}

/// x = f(x) in place, n elements.
template <class T, class F>
LINATTN_INLINE void transform_in_place(T* x, Eigen::Index n, const F& f) {
  for_each_register<T>(n, [&](Eigen::Index c, Eigen::Index left)
                              LINATTN_INLINE_LAMBDA { store_up_to(x + c, f(load_up_to(x + c, left)), left); });
}

/// f(r, row of x, row of y) for the rows of two tiles, the second of which may be written.
template <class X, class Y, class F>
LINATTN_INLINE void for_each_row(const X& x, Y& y, const F& f) {
  for (Eigen::Index r = 0; r < x.rows(); ++r) f(r, x.data() + r * x.outerStride(), y.data() + r * y.outerStride());
}

/// The same for three tiles.
template <class X, class Y, class Z, class F>
LINATTN_INLINE void for_each_row(const X& x, const Y& y, Z& z, const F& f) {
  for_each_row(x, y, [&](Eigen::Index r, const auto* of_x, const auto* of_y) LINATTN_INLINE_LAMBDA {
    f(r, of_x, of_y, z.data() + r * z.outerStride());
  });
}

/// The largest lane; a NaN may be lost.
template <class T>
LINATTN_INLINE T largest_lane(const packet<T>& x) {
  alignas(slab_alignment) T lanes[packet<T>::size];
  x.store(lanes);
  return *std::max_element(lanes, lanes + packet<T>::size);
}

/// a.b of n elements.
template <class T>
LINATTN_INLINE T dot(const T* a, const T* b, Eigen::Index n) {
  packet<T> products = packet<T>::zero();
  for_each_register<T>(n, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
    products = fma(load_up_to(a + c, left), load_up_to(b + c, left), products);
  });
  return sum(products);
}

/// The sum of n elements.
template <class T>
LINATTN_INLINE T total(const T* x, Eigen::Index n) {
  packet<T> lanes = packet<T>::zero();
  for_each_register<T>(
      n, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA { lanes = lanes + load_up_to(x + c, left); });
  return sum(lanes);
}

/// |x|^2 of n elements.
template <class T>
LINATTN_INLINE T squared_norm(const T* x, Eigen::Index n) {
  return dot(x, x, n);
}

}  // namespace detail
LINATTN_NAMESPACE_END
