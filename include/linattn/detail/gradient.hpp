// The gradient engine: vector-Jacobian products, by the kernel of the forward pass.
//
// With G_i = dout_i, den_i the denominator after its policy (1 where the operator does not normalise) and c_i =
// G_i.out_i (0 there, and where the policy holds the denominator fast), per head
//
//   forwards     dphi(q_i) = (G_i S_i^T - c_i z_i) / den_i       S_i^T = S_(i-1)^T + v_i phi(k_i)^T
//   backwards    dv_i      = phi(k_i) R_i                        R_i   = R_(i+1) + phi(q_i) / den_i G_i^T
//                dphi(k_i) = v_i R_i^T + dz_i                    dz_i  = dz_(i+1) - phi(q_i) / den_i c_i
//
// (eqs. 13-15, with the quotient). Each line writes a state and then reads it, as the causal forward pass does: the
// kernel runs with S^T (M, C), with R (C, M) and with R^T (M, C) as its state. R and dz begin as the gradient with
// respect to the final S and z, and end as that of the initial ones. S is built again from the start, never by
// subtraction. The non-causal form has one S and one R for all tokens: absorb keys, read queries and absorb them into
// R, read keys.
#pragma once

#include <linattn/detail/engine.hpp>
#include <linattn/detail/gradient_packing.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// The arguments of a vjp. Shapes as in `forward`; dq, dk, dv are as q, k, v. `gradient` may be null.
template <class T, class Gradient>
struct gradient_arguments {
  matrix_view<const T> q, k, v, dout;
  matrix_view<T> dq, dk, dv;
  Gradient* gradient;
};

template <class Map, class T, class Layout>
class gradient_engine {
  using P = packet<T>;
  using arguments = gradient_arguments<T, typename gradient_of<Map>::type>;
  using forward_engine = engine<Map, T, Layout>;

 public:
  gradient_engine(const forward_engine& forward, const arguments& a, T* scratch)
      : m_layout(forward.layout),
        m_policy(forward.policy),
        m_normalizes(forward.normalizes),
        m_a(a),
        m_packing(forward.map, forward.layout, forward.query_scale, a.gradient, scratch),
        m_queries(scratch + m_layout.queries()),
        m_keys(scratch + m_layout.keys()),
        m_values(scratch + m_layout.values()),
        m_douts(scratch + m_layout.outputs()),
        m_dphi(scratch + m_layout.feature_outputs()),
        m_dvalues(scratch + m_layout.value_outputs()),
        m_sums(scratch + m_layout.sums()),
        m_transposed(scratch + m_layout.own_transposed()) {}

  /// Causal: `initial`, the state before row 0 or null; `dstate`, the gradient with respect to the final state, becomes
  /// that of the initial one. `position` is that of row 0.
  void causal(const T* initial, T* dstate, Eigen::Index position) const {
    const Eigen::Index tokens = m_a.q.rows();
    begin(initial);
    for_each_tile<false>(tokens, [&](const token_tile& t, const token_tile& next) { forwards(t, next, position); });
    transpose_all(dstate);
    for_each_tile<true>(tokens,
                        [&](const token_tile& t, const token_tile& next) { backwards(t, next, position, dstate); });
  }

  /// Non-causal. `dstate` is zero before, and rubbish afterwards. Positions are those of row 0 of k and of q.
  void noncausal(T* dstate, Eigen::Index key_position, Eigen::Index query_position) const {
    const Eigen::Index queries = m_a.q.rows(), keys = m_a.k.rows();
    begin(nullptr);
    for_each_tile<false>(keys, [&](const token_tile& t, const token_tile& next) { absorb(t, next, key_position); });
    for_each_tile<false>(queries,
                         [&](const token_tile& t, const token_tile& next) { read(t, next, query_position, dstate); });
    transpose_all(dstate);
    for_each_tile<false>(
        keys, [&](const token_tile& t, const token_tile& next) { read_back(t, next, key_position, dstate); });
  }

 private:
  Eigen::Index heads() const { return m_layout.state.heads; }
  Eigen::Index head_dim() const { return m_layout.head_dim; }
  Eigen::Index value_dim() const { return m_layout.state.value_dim; }
  Eigen::Index feature_stride() const { return m_layout.state.feature_stride(); }
  Eigen::Index row_stride() const { return m_layout.state.row_stride(); }
  T* sums(const token_tile& t) const { return m_sums + t.head * m_layout.sum_stride(); }  // z (C)
  T* transposed(Eigen::Index head) const { return m_transposed + head * m_layout.transposed().head_stride(); }
  Eigen::Index place_of(Eigen::Index head) const { return head * m_layout.state.head_stride(); }  // in a state

  /// f(tile, the one after it): heads within tiles of tokens, the last tokens first where Backwards. Without the tile
  /// after it where all rows are taken to be in the cache.
  template <bool Backwards, class F>
  void for_each_tile(Eigen::Index tokens, const F& f) const {
    const Eigen::Index most = m_layout.tokens();
    const Eigen::Index tiles = (tokens + most - 1) / most;
    const Eigen::Index row_bytes = (m_a.q.cols() + m_a.v.cols()) * Eigen::Index(sizeof(T));
    const bool far = 2 * tokens * row_bytes > forward_engine::near_bytes;
    const auto tile_at = [&](Eigen::Index i) -> token_tile {
      if (i >= tiles * heads()) return {};
      const Eigen::Index first = (Backwards ? tiles - 1 - i / heads() : i / heads()) * most;
      return {first, std::min(most, tokens - first), i % heads()};
    };
    for (Eigen::Index i = 0; i < tiles * heads(); ++i) f(tile_at(i), far ? tile_at(i + 1) : token_tile());
  }

  /// What the kernel fetches of a tile while it computes the one before it.
  template <class... Rows>
  rows_ahead ahead(const token_tile& next, const Rows&... rows) const {
    rows_ahead all(next.rows);
    if (next.rows > 0) (all.add(rows.first, rows.stride, rows.size, next.head == 0), ...);
    return all;
  }

  /// S^T and z of the initial state, of all heads.
  void begin(const T* initial) const {
    std::fill(m_sums, m_sums + heads() * m_layout.sum_stride(), T(0));
    std::fill(m_transposed, m_transposed + m_layout.transposed().size(), T(0));
    if (initial == nullptr) return;
    transpose_all(initial);
    for (Eigen::Index h = 0; h < heads(); ++h) {
      const T* const z = initial + place_of(h) + m_layout.state.z_offset();
      std::copy(z, z + m_layout.state.features, m_sums + h * m_layout.sum_stride());
    }
  }

  void transpose_all(const T* state) const {
    for (Eigen::Index h = 0; h < heads(); ++h) {
      transpose(state + place_of(h), row_stride(), m_layout.state.features, value_dim(), transposed(h),
                feature_stride());
    }
  }

  // ---- causal -------------------------------------------------------------------------------------------------------

  /// One tile of the first sweep: dq. The denominator and c of a token wait in its rows of dk and dv.
  void forwards(const token_tile& t, const token_tile& next, Eigen::Index position) const {
    constexpr Eigen::Index B = causal_block;
    const tile_position where{position + t.first, t.head};
    const auto q = rows_of<false>(m_a.q, t, head_dim());
    m_packing.template pack<role::key, false>(rows_of<false>(m_a.k, t, head_dim()), t.rows, B, where, m_keys);
    m_packing.template pack<role::query, false>(q, t.rows, B, where, m_queries);  // last, for unpack
    pack_rows(rows_of<false>(m_a.v, t, value_dim()), t.rows, B, m_values);
    pack_rows(rows_of<false>(m_a.dout, t, value_dim()), t.rows, B, m_douts);
    attend_panels<B, reads_and_writes, T>(
        m_layout.transposed(), round_up(t.rows, B) / B, {m_douts, m_values, m_keys, m_dphi}, transposed(t.head),
        ahead(next, rows_of<false>(m_a.q, next, head_dim()), rows_of<false>(m_a.k, next, head_dim()),
              rows_of<false>(m_a.v, next, value_dim()), rows_of<false>(m_a.dout, next, value_dim()),
              rows_of<false>(m_a.dq, next, head_dim())));
    if (m_normalizes) {
      const auto denominators = rows_of<false>(m_a.dk, t, head_dim());
      const auto products = rows_of<false>(m_a.dv, t, value_dim());
      for (Eigen::Index r = 0; r < t.rows; ++r) {
        add(m_keys + r * feature_stride(), sums(t));
        const quotient by = divide(r, sums(t));
        *denominators.row(r) = by.denominator;
        *products.row(r) = by.product;
      }
    }
    m_packing.template unpack<role::query, false>(q, t.rows, where, m_queries, m_dphi,
                                                  rows_of<false>(m_a.dq, t, head_dim()));
  }

  /// One tile of the second sweep: dk and dv.
  void backwards(const token_tile& t, const token_tile& next, Eigen::Index position, T* dstate) const {
    constexpr Eigen::Index B = causal_block;
    const tile_position where{position + t.first, t.head};
    const auto k = rows_of<true>(m_a.k, t, head_dim());
    const auto dk = rows_of<true>(m_a.dk, t, head_dim());   // its first element: the denominator
    const auto dv = rows_of<true>(m_a.dv, t, value_dim());  // its first element: c
    T* const R = dstate + place_of(t.head);                 // (C, M)
    T* const dz = R + m_layout.state.z_offset();            // (C)

    m_packing.template pack<role::query, true>(rows_of<true>(m_a.q, t, head_dim()), t.rows, B, where, m_queries);
    m_packing.template pack<role::key, true>(k, t.rows, B, where, m_keys);  // last, for unpack
    pack_rows(rows_of<true>(m_a.v, t, value_dim()), t.rows, B, m_values);
    pack_rows(rows_of<true>(m_a.dout, t, value_dim()), t.rows, B, m_douts);
    if (m_normalizes) {
      for (Eigen::Index r = 0; r < t.rows; ++r) divide_query(r, *dk.row(r));
    }
    const Eigen::Index blocks = round_up(t.rows, B) / B;
    attend_panels<B, reads_and_writes, T>(
        m_layout.state, blocks, {m_keys, m_queries, m_douts, m_dvalues}, R,
        ahead(next, rows_of<false>(m_a.q, next, head_dim()), rows_of<false>(m_a.k, next, head_dim()),
              rows_of<false>(m_a.v, next, value_dim())));
    attend_panels<B, reads_and_writes, T>(
        m_layout.transposed(), blocks, {m_values, m_douts, m_queries, m_dphi}, transposed(t.head),
        ahead(next, rows_of<false>(m_a.dout, next, value_dim()), rows_of<false>(m_a.dk, next, head_dim()),
              rows_of<false>(m_a.dv, next, value_dim())));
    for (Eigen::Index r = 0; r < t.rows; ++r) {
      if (m_normalizes) subtract_query(r, *dv.row(r), dz);
      add(dz, m_dphi + r * feature_stride());
    }
    unpack_outputs<false>(m_layout, m_dvalues, m_dvalues, m_policy, dv.first, dv.stride, t.rows);
    m_packing.template unpack<role::key, true>(k, t.rows, where, m_keys, m_dphi, dk);
  }

  // ---- non-causal ---------------------------------------------------------------------------------------------------

  /// S^T and z of all keys.
  void absorb(const token_tile& t, const token_tile& next, Eigen::Index position) const {
    constexpr Eigen::Index B = half_block;
    const tile_position where{position + t.first, t.head};
    m_packing.template pack<role::key, false>(rows_of<false>(m_a.k, t, head_dim()), t.rows, B, where, m_keys);
    pack_rows(rows_of<false>(m_a.v, t, value_dim()), t.rows, B, m_values);
    attend_panels<B, writes_only, T>(
        m_layout.transposed(), round_up(t.rows, B) / B, {m_values, m_values, m_keys, m_dphi}, transposed(t.head),
        ahead(next, rows_of<false>(m_a.k, next, head_dim()), rows_of<false>(m_a.v, next, value_dim())));
    if (!m_normalizes) return;
    for (Eigen::Index r = 0; r < t.rows; ++r) add(m_keys + r * feature_stride(), sums(t));
  }

  /// dq of a tile of queries, and what they give to R and dz.
  void read(const token_tile& t, const token_tile& next, Eigen::Index position, T* dstate) const {
    constexpr Eigen::Index B = half_block;
    const tile_position where{position + t.first, t.head};
    const auto q = rows_of<false>(m_a.q, t, head_dim());
    T* const R = dstate + place_of(t.head);
    m_packing.template pack<role::query, false>(q, t.rows, B, where, m_queries);
    pack_rows(rows_of<false>(m_a.dout, t, value_dim()), t.rows, B, m_douts);
    const Eigen::Index blocks = round_up(t.rows, B) / B;
    attend_panels<B, reads_only, T>(
        m_layout.transposed(), blocks, {m_douts, m_douts, m_queries, m_dphi}, transposed(t.head),
        ahead(next, rows_of<false>(m_a.q, next, head_dim()), rows_of<false>(m_a.dout, next, value_dim())));
    T denominators[most_tokens], products[most_tokens];
    if (m_normalizes) {
      for (Eigen::Index r = 0; r < t.rows; ++r) {
        const quotient by = divide(r, sums(t));
        denominators[r] = by.denominator;
        products[r] = by.product;
      }
    }
    m_packing.template unpack<role::query, false>(q, t.rows, where, m_queries, m_dphi,
                                                  rows_of<false>(m_a.dq, t, head_dim()));
    if (m_normalizes) {
      for (Eigen::Index r = 0; r < t.rows; ++r) {
        divide_query(r, denominators[r]);
        subtract_query(r, products[r], R + m_layout.state.z_offset());
      }
    }
    attend_panels<B, writes_only, T>(m_layout.state, blocks, {m_queries, m_queries, m_douts, m_dvalues}, R,
                                     ahead(next, rows_of<false>(m_a.dq, next, head_dim())));
  }

  /// dk and dv of a tile of keys.
  void read_back(const token_tile& t, const token_tile& next, Eigen::Index position, const T* dstate) const {
    constexpr Eigen::Index B = half_block;
    const tile_position where{position + t.first, t.head};
    const auto k = rows_of<false>(m_a.k, t, head_dim());
    const auto dv = rows_of<false>(m_a.dv, t, value_dim());
    const T* const R = dstate + place_of(t.head);
    m_packing.template pack<role::key, false>(k, t.rows, B, where, m_keys);
    pack_rows(rows_of<false>(m_a.v, t, value_dim()), t.rows, B, m_values);
    const Eigen::Index blocks = round_up(t.rows, B) / B;
    attend_panels<B, reads_only, T>(
        m_layout.state, blocks, {m_keys, m_keys, m_values, m_dvalues}, R,
        ahead(next, rows_of<false>(m_a.k, next, head_dim()), rows_of<false>(m_a.v, next, value_dim())));
    attend_panels<B, reads_only, T>(
        m_layout.transposed(), blocks, {m_values, m_values, m_keys, m_dphi}, transposed(t.head),
        ahead(next, rows_of<false>(m_a.dk, next, head_dim()), rows_of<false>(m_a.dv, next, value_dim())));
    for (Eigen::Index r = 0; r < t.rows; ++r) {
      add(R + m_layout.state.z_offset(), m_dphi + r * feature_stride());
    }
    unpack_outputs<false>(m_layout, m_dvalues, m_dvalues, m_policy, dv.first, dv.stride, t.rows);
    m_packing.template unpack<role::key, false>(k, t.rows, where, m_keys, m_dphi,
                                                rows_of<false>(m_a.dk, t, head_dim()));
  }

  // ---- rows ---------------------------------------------------------------------------------------------------------

  void pack_rows(const tile_rows<const T>& x, Eigen::Index rows, Eigen::Index block, T* to) const {
    pack_values(m_layout, x.first, x.stride, rows, block, to);
  }

  struct quotient {
    T denominator;  // after the policy
    T product;      // c
  };

  /// Row r of dphi, which is G S^T, becomes (G S^T - c z) / den.
  LINATTN_INLINE quotient divide(Eigen::Index r, const T* z) const {
    const T* const phi = m_queries + r * feature_stride();
    T* const dphi = m_dphi + r * feature_stride();
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
    const P minus(-product);
    for (Eigen::Index c = 0; c < feature_stride(); c += P::size) {
      const P difference = fma(minus, P::load(z + c), P::load(dphi + c));
      (difference * P(factor.power) * P(factor.inverse)).store(dphi + c);
    }
    return {denominator, product};
  }

  /// phi(q_r) becomes phi(q_r) / den, which is in range where G / den is not.
  LINATTN_INLINE void divide_query(Eigen::Index r, T denominator) const {
    const reciprocal<T> factor(denominator);
    T* const phi = m_queries + r * feature_stride();
    for (Eigen::Index c = 0; c < feature_stride(); c += P::size) {
      (P::load(phi + c) * P(factor.power) * P(factor.inverse)).store(phi + c);
    }
  }

  /// dz -= phi(q_r) / den c, after divide_query.
  LINATTN_INLINE void subtract_query(Eigen::Index r, T product, T* dz) const {
    const T* const phi = m_queries + r * feature_stride();
    const P minus(-product);
    for (Eigen::Index c = 0; c < feature_stride(); c += P::size) {
      fma(minus, P::load(phi + c), P::load(dz + c)).store(dz + c);
    }
  }

  /// to (C) += from (C).
  LINATTN_INLINE void add(const T* from, T* to) const {
    for (Eigen::Index c = 0; c < feature_stride(); c += P::size) (P::load(to + c) + P::load(from + c)).store(to + c);
  }

  const Layout& m_layout;
  denominator_policy m_policy;
  bool m_normalizes;
  const arguments& m_a;
  gradient_packing<Map, T, Layout> m_packing;
  T* m_queries;     // (T, C)
  T* m_keys;        // (T, C)
  T* m_values;      // (T, M)
  T* m_douts;       // (T, M)
  T* m_dphi;        // (T, C), what the kernel reads for dq and dk
  T* m_dvalues;     // (T, M), what it reads for dv
  T* m_sums;        // (H, C)
  T* m_transposed;  // (H, M, C)
};

}  // namespace detail
LINATTN_NAMESPACE_END
