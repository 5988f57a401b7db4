// The gradient engine: vector-Jacobian products, by the kernel of the forward pass.
//
// With G_i = dout_i, den_i the denominator after its policy (1 where the operator does not normalise) and c_i =
// G_i.out_i (0 there, and where the policy holds the denominator fast), per head
//
//   forwards     dphi(q_i) = (G_i S_i^T - c_i z_i) / den_i       S_i^T = S_(i-1)^T + v_i phi(k_i)^T
//   backwards    dv_i      = phi(k_i) R_i                        R_i   = R_(i+1) + phi(q_i) (G_i / den_i)^T
//                dphi(k_i) = v_i R_i^T + dz_i                    dz_i  = dz_(i+1) - phi(q_i) c_i / den_i
//
// (eqs. 13-15, with the quotient). Each line writes a state and then reads it, as the causal forward pass does: the
// kernel runs with S^T (M, C), with R (C, M) and with R^T (M, C) as its state. R and dz begin as the gradient with
// respect to the final S and z, and end as that of the initial ones. S is built again from the start, never by
// subtraction.
#pragma once

#include <linattn/detail/engine.hpp>

#include <type_traits>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// The rows of one head that a tile reads or writes, in the order of a sweep: the stride may be negative.
template <class T>
struct tile_rows {
  T* first;
  Eigen::Index stride;

  LINATTN_INLINE T* row(Eigen::Index i) const { return first + i * stride; }
  LINATTN_INLINE tile_rows reversed(Eigen::Index rows) const { return {row(rows - 1), -stride}; }
};

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
  using strided = Eigen::Map<const row_matrix<T>, Eigen::Unaligned, Eigen::OuterStride<>>;
  Eigen::Map<row_matrix<T>, Eigen::Unaligned, Eigen::OuterStride<>>(to, cols, rows, Eigen::OuterStride<>(to_stride)) =
      strided(from, rows, cols, Eigen::OuterStride<>(from_stride)).transpose();
}

/// The arguments of a vjp. Shapes as in `forward`; dq, dk, dv are as q, k, v. `gradient` may be null.
template <class T, class Gradient>
struct gradient_arguments {
  matrix_view<const T> q, k, v, dout;
  matrix_view<T> dq, dk, dv;
  Gradient* gradient;
};

template <class Map, class T, class Layout>
class gradient_engine {
  using gradient_type = typename gradient_of<Map>::type;
  using arguments = gradient_arguments<T, gradient_type>;
  using P = packet<T>;
  using access = engine_access;

 public:
  gradient_engine(const engine<Map, T, Layout>& forward, const arguments& a, T* scratch)
      : m_map(forward.map),
        m_layout(forward.layout),
        m_query_scale(forward.query_scale),
        m_policy(forward.policy),
        m_normalizes(forward.normalizes),
        m_a(a),
        m_queries(scratch + m_layout.queries()),
        m_keys(scratch + m_layout.keys()),
        m_values(scratch + m_layout.values()),
        m_douts(scratch + m_layout.outputs()),
        m_features(scratch + m_layout.feature_outputs()),
        m_dvalues(scratch + m_layout.value_outputs()),
        m_tile(scratch + m_layout.tile()),
        m_dx(scratch + m_layout.gradient_tile()),
        m_sums(scratch + m_layout.sums()),
        m_transposed(scratch + m_layout.own_transposed()) {}

  /// Causal: `initial`, the state before row 0 or null; `dstate`, the gradient with respect to the final state, becomes
  /// that of the initial one. `position` is that of row 0.
  void causal(const T* initial, T* dstate, Eigen::Index position) const {
    begin(initial);
    const Eigen::Index tokens = m_a.q.rows();
    const Eigen::Index most = m_layout.tokens();
    for (Eigen::Index first = 0; first < tokens; first += most) {
      const Eigen::Index rows = std::min(most, tokens - first);
      for (Eigen::Index h = 0; h < heads(); ++h) forwards(first, rows, h, position);
    }
    transpose_all(dstate);
    for (Eigen::Index first = (tokens - 1) / most * most; tokens > 0 && first >= 0; first -= most) {
      const Eigen::Index rows = std::min(most, tokens - first);
      for (Eigen::Index h = 0; h < heads(); ++h) backwards(first, rows, h, position, dstate);
    }
  }

  /// Non-causal: every query sees every key. `dstate` is zero before, and rubbish afterwards. Positions are those of
  /// row 0 of k and of q.
  void noncausal(T* dstate, Eigen::Index key_position, Eigen::Index query_position) const {
    begin(nullptr);
    const Eigen::Index most = m_layout.tokens();
    const auto all = [&](Eigen::Index tokens, const auto& f) {
      for (Eigen::Index first = 0; first < tokens; first += most) {
        for (Eigen::Index h = 0; h < heads(); ++h) f(first, std::min(most, tokens - first), h);
      }
    };
    all(m_a.k.rows(), [&](Eigen::Index first, Eigen::Index rows, Eigen::Index h) {
      absorb(first, rows, h, {key_position + first, h});
    });
    all(m_a.q.rows(), [&](Eigen::Index first, Eigen::Index rows, Eigen::Index h) {
      read(first, rows, h, {query_position + first, h}, dstate);
    });
    transpose_all(dstate);
    all(m_a.k.rows(), [&](Eigen::Index first, Eigen::Index rows, Eigen::Index h) {
      write_back(first, rows, h, {key_position + first, h}, dstate);
    });
  }

 private:
  Eigen::Index heads() const { return m_layout.state.heads; }
  Eigen::Index feature_stride() const { return m_layout.state.feature_stride(); }
  Eigen::Index row_stride() const { return m_layout.state.row_stride(); }
  T* sums(Eigen::Index h) const { return m_sums + h * m_layout.sum_stride(); }                            // z (C)
  T* transposed(Eigen::Index h) const { return m_transposed + h * m_layout.transposed().head_stride(); }  // (M, C)

  template <class U>
  tile_rows<U> head_of(const matrix_view<U>& x, Eigen::Index first, Eigen::Index h, Eigen::Index dim) const {
    return {x.row(first) + h * dim, x.row_stride()};
  }
  template <class U>
  tile_rows<U> features_of(const matrix_view<U>& x, Eigen::Index first, Eigen::Index h) const {
    return head_of(x, first, h, m_layout.head_dim);
  }
  template <class U>
  tile_rows<U> values_of(const matrix_view<U>& x, Eigen::Index first, Eigen::Index h) const {
    return head_of(x, first, h, m_layout.state.value_dim);
  }

  /// S^T and z of the initial state, of all heads.
  void begin(const T* initial) const {
    std::fill(m_sums, m_sums + heads() * m_layout.sum_stride(), T(0));
    std::fill(m_transposed, m_transposed + m_layout.transposed().size(), T(0));
    if (initial == nullptr) return;
    transpose_all(initial);
    for (Eigen::Index h = 0; h < heads(); ++h) {
      const T* const z = initial + h * m_layout.state.head_stride() + m_layout.state.z_offset();
      std::copy(z, z + m_layout.state.features, sums(h));
    }
  }

  void transpose_all(const T* state) const {
    for (Eigen::Index h = 0; h < heads(); ++h) {
      transpose(state + h * m_layout.state.head_stride(), row_stride(), m_layout.state.features,
                m_layout.state.value_dim, transposed(h), feature_stride());
    }
  }

  // ---- causal -------------------------------------------------------------------------------------------------------

  /// One tile of the first sweep: dq. The denominator and c of a token wait in its rows of dk and dv.
  void forwards(Eigen::Index first, Eigen::Index rows, Eigen::Index h, Eigen::Index position) const {
    constexpr Eigen::Index B = causal_block;
    const tile_position where{position + first, h};
    const auto q = features_of(m_a.q, first, h);
    pack<role::key, false>(features_of(m_a.k, first, h), rows, B, where, m_keys);
    pack<role::query, false>(q, rows, B, where, m_queries);  // last: its x stays in the tile
    pack_values(m_layout, values_of(m_a.v, first, h).first, m_a.v.row_stride(), rows, B, m_values);
    pack_values(m_layout, values_of(m_a.dout, first, h).first, m_a.dout.row_stride(), rows, B, m_douts);
    attend_panels<B, true, true, T>(m_layout.transposed(), round_up(rows, B) / B,
                                    {m_douts, m_values, m_keys, m_features}, transposed(h), {});
    if (m_normalizes) {
      const auto den = features_of(m_a.dk, first, h);
      const auto c = values_of(m_a.dv, first, h);
      for (Eigen::Index r = 0; r < rows; ++r) {
        add(m_keys + r * feature_stride(), sums(h));
        const auto [denominator, product] = divide(r, h);
        *den.row(r) = denominator;
        *c.row(r) = product;
      }
    }
    unpack_features<role::query, false>(q, rows, where, m_queries, features_of(m_a.dq, first, h));
  }

  /// One tile of the second sweep: dk and dv.
  void backwards(Eigen::Index first, Eigen::Index rows, Eigen::Index h, Eigen::Index position, T* dstate) const {
    constexpr Eigen::Index B = causal_block;
    const tile_position where{position + first, h};
    const auto k = features_of(m_a.k, first, h).reversed(rows);
    const auto v = values_of(m_a.v, first, h).reversed(rows);
    const auto dout = values_of(m_a.dout, first, h).reversed(rows);
    const auto dk = features_of(m_a.dk, first, h).reversed(rows);  // its first element: the denominator
    const auto dv = values_of(m_a.dv, first, h).reversed(rows);    // its first element: c
    T* const R = dstate + h * m_layout.state.head_stride();        // (C, M)
    T* const dz = R + m_layout.state.z_offset();                   // (C)

    pack<role::query, true>(features_of(m_a.q, first, h).reversed(rows), rows, B, where, m_queries);
    pack<role::key, true>(k, rows, B, where, m_keys);
    pack_values(m_layout, v.first, v.stride, rows, B, m_values);
    pack_values(m_layout, dout.first, dout.stride, rows, B, m_douts);
    if (m_normalizes) {
      for (Eigen::Index r = 0; r < rows; ++r) scale_dout(r, reciprocal<T>(*dk.row(r)));
    }
    const Eigen::Index blocks = round_up(rows, B) / B;
    attend_panels<B, true, true, T>(m_layout.state, blocks, {m_keys, m_queries, m_douts, m_dvalues}, R, {});
    attend_panels<B, true, true, T>(m_layout.transposed(), blocks, {m_values, m_douts, m_queries, m_features},
                                    transposed(h), {});
    for (Eigen::Index r = 0; r < rows; ++r) {
      if (m_normalizes) subtract_query(r, reciprocal<T>(*dk.row(r)), *dv.row(r), dz);
      add(dz, m_features + r * feature_stride());
    }
    unpack_outputs<false>(m_layout, m_dvalues, m_dvalues, m_policy, dv.first, dv.stride, rows);
    unpack_features<role::key, true>(k, rows, where, m_keys, dk);
  }

  // ---- non-causal ---------------------------------------------------------------------------------------------------

  /// S^T and z of all keys.
  void absorb(Eigen::Index first, Eigen::Index rows, Eigen::Index h, const tile_position& where) const {
    constexpr Eigen::Index B = half_block;
    pack<role::key, false>(features_of(m_a.k, first, h), rows, B, where, m_keys);
    pack_values(m_layout, values_of(m_a.v, first, h).first, m_a.v.row_stride(), rows, B, m_values);
    attend_panels<B, false, true, T>(m_layout.transposed(), round_up(rows, B) / B,
                                     {m_values, m_values, m_keys, m_features}, transposed(h), {});
    if (!m_normalizes) return;
    for (Eigen::Index r = 0; r < rows; ++r) add(m_keys + r * feature_stride(), sums(h));
  }

  /// dq of a tile of queries, and what they give to R and dz.
  void read(Eigen::Index first, Eigen::Index rows, Eigen::Index h, const tile_position& where, T* dstate) const {
    constexpr Eigen::Index B = half_block;
    const auto q = features_of(m_a.q, first, h);
    T* const R = dstate + h * m_layout.state.head_stride();
    pack<role::query, false>(q, rows, B, where, m_queries);
    pack_values(m_layout, values_of(m_a.dout, first, h).first, m_a.dout.row_stride(), rows, B, m_douts);
    const Eigen::Index blocks = round_up(rows, B) / B;
    attend_panels<B, true, false, T>(m_layout.transposed(), blocks, {m_douts, m_douts, m_queries, m_features},
                                     transposed(h), {});
    if (m_normalizes) {
      for (Eigen::Index r = 0; r < rows; ++r) {
        const auto [denominator, product] = divide(r, h);
        const reciprocal<T> factor(denominator);
        scale_dout(r, factor);
        subtract_query(r, factor, product, R + m_layout.state.z_offset());
      }
    }
    attend_panels<B, false, true, T>(m_layout.state, blocks, {m_queries, m_queries, m_douts, m_dvalues}, R, {});
    unpack_features<role::query, false>(q, rows, where, m_queries, features_of(m_a.dq, first, h));
  }

  /// dk and dv of a tile of keys.
  void write_back(Eigen::Index first, Eigen::Index rows, Eigen::Index h, const tile_position& where,
                  const T* dstate) const {
    constexpr Eigen::Index B = half_block;
    const auto k = features_of(m_a.k, first, h);
    const auto dv = values_of(m_a.dv, first, h);
    const T* const R = dstate + h * m_layout.state.head_stride();
    pack<role::key, false>(k, rows, B, where, m_keys);
    pack_values(m_layout, values_of(m_a.v, first, h).first, m_a.v.row_stride(), rows, B, m_values);
    const Eigen::Index blocks = round_up(rows, B) / B;
    attend_panels<B, true, false, T>(m_layout.state, blocks, {m_keys, m_keys, m_values, m_dvalues}, R, {});
    attend_panels<B, true, false, T>(m_layout.transposed(), blocks, {m_values, m_values, m_keys, m_features},
                                     transposed(h), {});
    for (Eigen::Index r = 0; r < rows; ++r) {
      add(R + m_layout.state.z_offset(), m_features + r * feature_stride());
    }
    unpack_outputs<false>(m_layout, m_dvalues, m_dvalues, m_policy, dv.first, dv.stride, rows);
    unpack_features<role::key, false>(k, rows, where, m_keys, features_of(m_a.dk, first, h));
  }

  // ---- rows ---------------------------------------------------------------------------------------------------------

  struct quotient {
    T denominator;  // after the policy
    T product;      // c
  };

  /// Row r of the features' outputs, G S^T, becomes dphi(q).
  LINATTN_INLINE quotient divide(Eigen::Index r, Eigen::Index h) const {
    const T* const phi = m_queries + r * feature_stride();
    const T* const z = sums(h);
    T* const dphi = m_features + r * feature_stride();
    P denominators = P::zero();
    P products = P::zero();
    for (Eigen::Index c = 0; c < feature_stride(); c += P::size) {
      denominators = fma(P::load(phi + c), P::load(z + c), denominators);
      products = fma(P::load(phi + c), P::load(dphi + c), products);
    }
    const T before = sum(denominators);
    const T denominator = m_policy(before);
    const reciprocal<T> factor(denominator);
    const T product = m_policy.follows(before) ? sum(products) * factor.power * factor.inverse : T(0);
    const P power(factor.power);
    const P inverse(factor.inverse);
    const P minus(-product);
    for (Eigen::Index c = 0; c < feature_stride(); c += P::size) {
      (fma(minus, P::load(z + c), P::load(dphi + c)) * power * inverse).store(dphi + c);
    }
    return {denominator, product};
  }

  /// Row r of the packed G becomes G / den.
  LINATTN_INLINE void scale_dout(Eigen::Index r, const reciprocal<T>& factor) const {
    T* const x = m_douts + r * row_stride();
    for (Eigen::Index m = 0; m < row_stride(); m += P::size) {
      (P::load(x + m) * P(factor.power) * P(factor.inverse)).store(x + m);
    }
  }

  /// dz -= phi(q_r) c / den.
  LINATTN_INLINE void subtract_query(Eigen::Index r, const reciprocal<T>& factor, T product, T* dz) const {
    const T* const phi = m_queries + r * feature_stride();
    const P minus(-(product * factor.power * factor.inverse));
    for (Eigen::Index c = 0; c < feature_stride(); c += P::size) {
      fma(minus, P::load(phi + c), P::load(dz + c)).store(dz + c);
    }
  }

  /// to (C) += from (C).
  LINATTN_INLINE void add(const T* from, T* to) const {
    for (Eigen::Index c = 0; c < feature_stride(); c += P::size) (P::load(to + c) + P::load(from + c)).store(to + c);
  }

  // ---- the map ------------------------------------------------------------------------------------------------------

  /// Whether a form has to be given the tokens in their order, whatever that of the sweep.
  template <role Role>
  static constexpr bool in_order = takes_position<Role, Map, T>;

  /// phi (rows, C) of x, in the order of the sweep; `where` is that of the earliest token.
  template <role Role, bool Backwards>
  void pack(tile_rows<const T> x, Eigen::Index rows, Eigen::Index block, const tile_position& where, T* phi) const {
    constexpr bool turns = Backwards && in_order<Role>;
    if constexpr (turns) x = x.reversed(rows);
    pack_features<Role>(m_map, m_layout, x.first, x.stride, rows, block, m_query_scale, where, m_tile, phi);
    if constexpr (turns) reverse_rows(phi, rows, feature_stride());
  }

  /// dx (rows, D) from x, phi and the features' outputs dphi (rows, C). Where the map is not fused, the tile still
  /// holds the x that `pack` put there last.
  template <role Role, bool Backwards>
  void unpack_features(tile_rows<const T> x, Eigen::Index rows, const tile_position& where, T* phi,
                       tile_rows<T> dx) const {
    const Eigen::Index head_dim = m_layout.head_dim;
    const Eigen::Index whole = head_dim / P::size * P::size;
    const P scale(Role == role::query ? m_query_scale : T(1));
    if constexpr (has_vjp_packet<Map, T>) {
      for (Eigen::Index r = 0; r < rows; ++r) {
        const T* const in = x.row(r);
        const T* const f = phi + r * feature_stride();
        const T* const df = m_features + r * feature_stride();
        T* const out = dx.row(r);
        const auto at = [&](const P& value, Eigen::Index d) LINATTN_INLINE_LAMBDA {
          return P(m_map.vjp_packet(value * scale, P::load(f + d), P::load(df + d))) * scale;
        };
        for (Eigen::Index d = 0; d < whole; d += P::size) at(P::load_unaligned(in + d), d).store_unaligned(out + d);
        if (whole < head_dim) {
          at(P::load_partial(in + whole, head_dim - whole), whole).store_partial(out + whole, head_dim - whole);
        }
      }
    } else {
      constexpr bool turns = Backwards && in_order<Role>;
      const Eigen::Index stride = m_layout.tile_stride();
      if constexpr (turns) {
        x = x.reversed(rows);
        dx = dx.reversed(rows);
        reverse_rows(phi, rows, feature_stride());
        reverse_rows(m_features, rows, feature_stride());
      }
      if constexpr (has_packet<Map, T>) {
        transform_rows(x.first, x.stride, rows, head_dim, m_tile, stride,
                       [&](const P& value) LINATTN_INLINE_LAMBDA { return value * scale; });
      }
      using input = const_tile<T>;
      using strides = Eigen::OuterStride<>;
      tile<T> out(m_dx, rows, head_dim, strides(stride));
      call_vjp<Role, Map, T>(m_map, input(m_tile, rows, head_dim, strides(stride)),
                             input(phi, rows, m_layout.state.features, strides(feature_stride())),
                             input(m_features, rows, m_layout.state.features, strides(feature_stride())), out, where,
                             m_a.gradient);
      for (Eigen::Index r = 0; r < rows; ++r) {
        const T* const from = m_dx + r * stride;
        T* const to = dx.row(r);
        for (Eigen::Index d = 0; d < whole; d += P::size) (P::load(from + d) * scale).store_unaligned(to + d);
        if (whole < head_dim) (P::load(from + whole) * scale).store_partial(to + whole, head_dim - whole);
      }
    }
  }

  const Map& m_map;
  const Layout& m_layout;
  T m_query_scale;
  denominator_policy m_policy;
  bool m_normalizes;
  const arguments& m_a;
  T* m_queries;     // (T, C)
  T* m_keys;        // (T, C)
  T* m_values;      // (T, M)
  T* m_douts;       // (T, M)
  T* m_features;    // (T, C), what the kernel reads for dq and dk
  T* m_dvalues;     // (T, M), what it reads for dv
  T* m_tile;        // (T, D)
  T* m_dx;          // (T, D)
  T* m_sums;        // (H, C)
  T* m_transposed;  // (H, M, C)
};

}  // namespace detail
LINATTN_NAMESPACE_END
