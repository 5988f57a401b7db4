// The packing pass of the gradients: rows in the order of a sweep, and dx back to the caller through the map's vjp.
#pragma once

#include <linattn/detail/differentiable.hpp>
#include <linattn/detail/packing.hpp>

#include <algorithm>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Some tokens of one head; without rows: none.
struct head_tile : token_tile {
  Eigen::Index head = 0;
};

/// What the tile's head has of them, `dim` elements, in the order of the tokens or backwards.
template <bool Backwards, class T>
LINATTN_INLINE tile_rows<T> rows_of(const token_rows<T>& x, const head_tile& t, Eigen::Index dim) {
  const tile_rows<T> rows = x.in(t, t.head, dim);
  if constexpr (Backwards) return rows.reversed(t.rows);
  return rows;
}

/// Row r of a tile in the order of a sweep is this token.
template <bool Backwards>
LINATTN_INLINE Eigen::Index token_of(const head_tile& t, Eigen::Index r) {
  return t.at(Backwards ? t.rows - 1 - r : r);
}

/// Rows 0 ... rows - 1 of x (rows, size) in the opposite order.
template <class T>
LINATTN_INLINE void reverse_rows(T* x, Eigen::Index rows, Eigen::Index size) {
  for (Eigen::Index r = 0; r < rows / 2; ++r) {
    std::swap_ranges(x + r * size, x + (r + 1) * size, x + (rows - 1 - r) * size);
  }
}

/// to (cols, rows) = from (rows, cols) transposed.
template <class T>
LINATTN_INLINE void transpose(const T* from, Eigen::Index from_stride, Eigen::Index rows, Eigen::Index cols, T* to,
                              Eigen::Index to_stride) {
  using strides = Eigen::OuterStride<>;
  const Eigen::Map<const row_matrix<T>, Eigen::Unaligned, strides> x(from, rows, cols, strides(from_stride));
  Eigen::Map<row_matrix<T>, Eigen::Unaligned, strides>(to, cols, rows, strides(to_stride)) = x.transpose();
}

/// A map with what packs rows for it. Maps that know positions are given the tokens in their order, whatever that of
/// the sweep.
template <class Map, class T, class Layout>
class gradient_packing {
  using P = packet<T>;
  using gradient_type = typename gradient_of<Map>::type;

 public:
  template <class Arguments>
  gradient_packing(const Map& map, const Layout& layout, T query_scale, const Arguments& a, T* scratch)
      : m_map(map),
        m_layout(layout),
        m_query_scale(query_scale),
        m_gradient(a.gradient),
        m_query_from_state(a.query_from_state),
        m_key_from_state(a.key_from_state),
        m_x(scratch + layout.tile()),
        m_dx(scratch + layout.gradient_tile()) {}

  /// phi (rows, C) of x, both in the order of the sweep. `where` is that of the earliest token.
  template <role Role, bool Backwards>
  void pack(tile_rows<const T> x, Eigen::Index rows, Eigen::Index block, const tile_position& where, T* phi) const {
    constexpr bool turns = Backwards && takes_position<Role, Map, T>;
    if constexpr (turns) x = x.reversed(rows);
    pack_features<Role>(m_map, m_layout, x, rows, block, m_query_scale, located<Role>(where), m_x, phi);
    if constexpr (turns) reverse_rows(phi, rows, m_layout.state.feature_stride());
  }

  /// dx (rows, D) from x, phi and dphi (rows, C), of which rubbish is left. The x that are not read again from the
  /// caller's rows are those that `pack` packed last. With Adds, dx is added to.
  template <role Role, bool Backwards, bool Adds = false>
  void unpack(tile_rows<const T> x, Eigen::Index rows, const tile_position& where, T* phi, T* dphi,
              tile_rows<T> dx) const {
    if constexpr (has_vjp_packet<Map, T>) {
      unpack_fused<Role, Adds>(x, rows, phi, dphi, dx);
    } else {
      constexpr bool turns = Backwards && takes_position<Role, Map, T>;
      if constexpr (turns) {
        x = x.reversed(rows);
        dx = dx.reversed(rows);
        reverse_rows(phi, rows, m_layout.state.feature_stride());
        reverse_rows(dphi, rows, m_layout.state.feature_stride());
      }
      unpack_tile<Role, Adds>(x, rows, where, phi, dphi, dx);
    }
  }

 private:
  /// The tile of a state as one of its query or key head.
  template <role Role>
  tile_position located(tile_position where) const {
    if constexpr (takes_position<Role, Map, T>) {
      where.head += Role == role::query ? m_query_from_state : m_key_from_state;
    }
    return where;
  }

  template <role Role>
  P scale() const {
    return P(Role == role::query ? m_query_scale : T(1));
  }

  template <role Role, bool Adds>
  void unpack_fused(const tile_rows<const T>& x, Eigen::Index rows, const T* phi, const T* dphi,
                    const tile_rows<T>& dx) const {
    const Eigen::Index head_dim = m_layout.head_dim;
    const Eigen::Index stride = m_layout.state.feature_stride();
    const P factor = scale<Role>();
    for (Eigen::Index r = 0; r < rows; ++r, phi += stride, dphi += stride) {
      const T* const in = x.row(r);
      T* const out = dx.row(r);
      const auto at = [&](const P& value, Eigen::Index d) LINATTN_INLINE_LAMBDA {
        return P(m_map.vjp_packet(value * factor, P::load(phi + d), P::load(dphi + d))) * factor;
      };
      for_each_register<T>(head_dim, [&](Eigen::Index d, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        put<Adds>(at(load_up_to(in + d, left), d), out + d, left);
      });
    }
  }

  template <role Role, bool Adds>
  void unpack_tile(const tile_rows<const T>& x, Eigen::Index rows, const tile_position& where, const T* phi,
                   const T* dphi, const tile_rows<T>& dx) const {
    using input = const_tile<T>;
    using strides = Eigen::OuterStride<>;
    const Eigen::Index head_dim = m_layout.head_dim;
    const Eigen::Index features = m_layout.state.features;
    const strides x_stride(m_layout.tile_stride()), phi_stride(m_layout.state.feature_stride());
    const P factor = scale<Role>();
    if constexpr (has_packet<Map, T>) {  // the x of an elementwise map were never put into the tile
      transform_rows(x, rows, head_dim, m_x, m_layout.tile_stride(),
                     [&](const P& value) LINATTN_INLINE_LAMBDA { return value * factor; });
    }
    tile<T> out(m_dx, rows, head_dim, x_stride);
    call_vjp<Role, Map, T>(m_map, input(m_x, rows, head_dim, x_stride), input(phi, rows, features, phi_stride),
                           input(dphi, rows, features, phi_stride), out, located<Role>(where), m_gradient);
    for (Eigen::Index r = 0; r < rows; ++r) {
      const T* const from = m_dx + r * m_layout.tile_stride();
      T* const to = dx.row(r);
      for_each_register<T>(head_dim, [&](Eigen::Index d, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        put<Adds>(P::load(from + d) * factor, to + d, left);
      });
    }
  }

  template <bool Adds>
  static LINATTN_INLINE void put(const P& value, T* to, Eigen::Index left) {
    store_up_to(to, Adds ? load_up_to(to, left) + value : value, left);
  }

  const Map& m_map;
  const Layout& m_layout;
  T m_query_scale;
  gradient_type* m_gradient;
  Eigen::Index m_query_from_state;
  Eigen::Index m_key_from_state;
  T* m_x;   // (T, D)
  T* m_dx;  // (T, D)
};

}  // namespace detail
LINATTN_NAMESPACE_END
