// The packing pass: from the caller's rows of all heads to aligned per-head scratch, through the feature map, and back.
//
// A token's row of all heads is contiguous in memory, so rows are the outer loop here: one head's columns of many rows,
// read in place, would be a power-of-two stride that defeats the prefetcher and one L1 set.
#pragma once

#include <linattn/detail/layout.hpp>
#include <linattn/feature_map.hpp>
#include <linattn/matrix_view.hpp>

#include <algorithm>
#include <limits>

LINATTN_NAMESPACE_BEGIN
namespace detail {

enum class role { query, key };

/// f(x) (n) of every element of a row, whole registers, padding and all written with f's value or zero:
/// out (padded n) = [f(x_0) ... f(x_(n-1)) 0 ... 0]. The ragged end goes through a zero-padded copy: nothing is read
/// past the row. out is aligned, x need not be.
template <class T, class F>
LINATTN_INLINE void transform_row(const T* x, Eigen::Index n, T* out, const F& f) {
  using P = packet<T>;
  const Eigen::Index whole = n / P::size * P::size;
  for (Eigen::Index c = 0; c < whole; c += P::size) f(P::load_unaligned(x + c)).store(out + c);
  if (whole < n) {
    alignas(slab_alignment) T lanes[P::size] = {};
    std::copy(x + whole, x + n, lanes);
    f(P::load(lanes)).store(lanes);
    std::fill(lanes + (n - whole), lanes + P::size, T(0));
    P::load(lanes).store(out + whole);
  }
}

/// phi (H, tokens, C) of rows [first, first + rows) of x (N, H D): for queries of query_scale x. Rows of phi are
/// feature_stride apart and zero beyond C; rows up to the next multiple of `block` are zeroed, so that the kernel may
/// run whole micro-blocks.
template <role Role, class Map, class T, class Layout>
void pack_features(const Map& map, const Layout& layout, const matrix_view<const T>& x, Eigen::Index first,
                   Eigen::Index rows, Eigen::Index block, T query_scale, Eigen::Index position, T* tile_scratch,
                   T* phi) {
  using P = packet<T>;
  const Eigen::Index heads = layout.state.heads;
  const Eigen::Index head_dim = layout.head_dim;
  const Eigen::Index stride = layout.state.feature_stride();
  const Eigen::Index head_stride = layout.head_features();
  const P scale(query_scale);
  const auto scaled = [&](const P& values)
                          LINATTN_INLINE_LAMBDA { return Role == role::query ? values * scale : values; };

  if constexpr (has_packet<Map, T>) {
    for (Eigen::Index r = 0; r < rows; ++r) {
      const T* token = x.row(first + r);
      for (Eigen::Index h = 0; h < heads; ++h) {
        transform_row(token + h * head_dim, head_dim, phi + h * head_stride + r * stride,
                      [&](const P& values) LINATTN_INLINE_LAMBDA { return P(map.packet(scaled(values))); });
      }
    }
  } else {
    const Eigen::Index tile_stride = layout.tile_stride();
    for (Eigen::Index h = 0; h < heads; ++h) {
      for (Eigen::Index r = 0; r < rows; ++r) {
        transform_row(x.row(first + r) + h * head_dim, head_dim, tile_scratch + r * tile_stride, scaled);
      }
      const const_tile<T> in(tile_scratch, rows, head_dim, Eigen::OuterStride<>(tile_stride));        // (R, D)
      tile<T> out(phi + h * head_stride, rows, layout.state.features, Eigen::OuterStride<>(stride));  // (R, C)
      const tile_position where{position + first, h};
      if constexpr (Role == role::query && has_positional_queries<Map, T>) {
        map.forward_queries(in, out, where);
      } else if constexpr (Role == role::query && has_forward_queries<Map, T>) {
        map.forward_queries(in, out);
      } else if constexpr (Role == role::key && has_positional_keys<Map, T>) {
        map.forward_keys(in, out, where);
      } else if constexpr (Role == role::key && has_forward_keys<Map, T>) {
        map.forward_keys(in, out);
      } else if constexpr (has_positional_forward<Map, T>) {
        map.forward(in, out, where);
      } else {
        map.forward(in, out);
      }
    }
  }
  for (Eigen::Index h = 0; h < heads; ++h) {
    T* head = phi + h * head_stride;
    std::fill(head + rows * stride, head + round_up(rows, block) * stride, T(0));
  }
}

/// values (H, tokens, M) of rows [first, first + rows) of v (N, H M), zero-padded like features.
template <class T, class Layout>
void pack_values(const Layout& layout, const matrix_view<const T>& v, Eigen::Index first, Eigen::Index rows,
                 Eigen::Index block, T* values) {
  using P = packet<T>;
  const Eigen::Index heads = layout.state.heads;
  const Eigen::Index value_dim = layout.state.value_dim;
  const Eigen::Index stride = layout.state.row_stride();
  for (Eigen::Index r = 0; r < rows; ++r) {
    const T* token = v.row(first + r);
    for (Eigen::Index h = 0; h < heads; ++h) {
      transform_row(token + h * value_dim, value_dim, values + h * layout.head_values() + r * stride,
                    [](const P& x) LINATTN_INLINE_LAMBDA { return x; });
    }
  }
  for (Eigen::Index h = 0; h < heads; ++h) {
    T* head = values + h * layout.head_values();
    std::fill(head + rows * stride, head + round_up(rows, block) * stride, T(0));
  }
}

/// Two factors whose product is 1 / denominator, none of them subnormal or infinite: power, a power of two, is 1 unless
/// the denominator is near an end of T's range, where 1 / denominator alone would overflow or lose its bits. A zero
/// denominator gives zero factors: 0/0 = 0.
template <class T>
struct reciprocal {
  T power = T(0);
  T inverse = T(0);

  LINATTN_INLINE explicit reciprocal(T denominator) {
    constexpr int range = std::numeric_limits<T>::max_exponent;  // 128, 1024
    constexpr T small = std::numeric_limits<T>::min() * T(4);
    constexpr T large = two_to(range - range / 4);
    if (denominator == T(0)) return;
    const T size = denominator < T(0) ? -denominator : denominator;
    power = size < small ? two_to(range / 2) : size > large ? T(1) / two_to(range / 4) : T(1);
    inverse = T(1) / (denominator * power);
  }

 private:
  static constexpr T two_to(int exponent) {
    T result(1);
    for (int i = 0; i < exponent; ++i) result *= T(2);
    return result;
  }
};

/// Rows [first, first + rows) of out (N, H M) from values (H, tokens, M), divided by denominators (H, tokens) where
/// Normalizes. Only the row's own elements are written.
template <bool Normalizes, class T, class Layout, class Policy>
void unpack_outputs(const Layout& layout, const T* values, const T* denominators, const Policy& policy,
                    const matrix_view<T>& out, Eigen::Index first, Eigen::Index rows) {
  using P = packet<T>;
  const Eigen::Index heads = layout.state.heads;
  const Eigen::Index value_dim = layout.state.value_dim;
  const Eigen::Index whole = value_dim / P::size * P::size;
  for (Eigen::Index r = 0; r < rows; ++r) {
    T* token = out.row(first + r);
    for (Eigen::Index h = 0; h < heads; ++h) {
      const T* from = values + h * layout.head_values() + r * layout.state.row_stride();
      T* to = token + h * value_dim;
      if constexpr (Normalizes) {
        const reciprocal<T> factor(policy(denominators[h * layout.tokens() + r]));
        const P power(factor.power);
        const P inverse(factor.inverse);
        for (Eigen::Index m = 0; m < whole; m += P::size) (P::load(from + m) * power * inverse).store_unaligned(to + m);
        for (Eigen::Index m = whole; m < value_dim; ++m) to[m] = from[m] * factor.power * factor.inverse;
      } else {
        for (Eigen::Index m = 0; m < whole; m += P::size) P::load(from + m).store_unaligned(to + m);
        std::copy(from + whole, from + value_dim, to + whole);
      }
    }
  }
}

}  // namespace detail
LINATTN_NAMESPACE_END
