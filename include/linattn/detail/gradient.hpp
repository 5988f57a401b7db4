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
//
// Where the rule decays, S_(i-1) is multiplied by a_i and R_(i+1) by a_(i+1), before the token is added: the kernel's
// decays, along the columns of the transposed states. What is left over, a_1, is R's last step (gradient_sweeps.hpp).
//
// Where the map writes log phi, S, z, R and dz are kept by running maxima (gradient_log_features.hpp).
#pragma once

#include <linattn/detail/gradient_log_features.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// For rules that do not correct.
template <class Map, class T, class Layout>
class gradient_engine : gradient_log_features<Map, T, Layout> {
  using base = gradient_log_features<Map, T, Layout>;
  using base::add;
  using base::ahead;
  using base::clear_silent_features;
  using base::decay_by;
  using base::feature_stride;
  using base::features;
  using base::head_dim;
  using base::log_of;
  using base::log_scales;
  using base::m_a;
  using base::m_decay;
  using base::m_douts;
  using base::m_dphi;
  using base::m_dvalues;
  using base::m_keys;
  using base::m_layout;
  using base::m_normalizes;
  using base::m_packing;
  using base::m_queries;
  using base::m_scales;
  using base::m_transposed;
  using base::m_values;
  using base::pack_rows;
  using base::place_of;
  using base::rule;
  using base::transpose_all;
  using base::transposed;
  using base::unpack_values;
  using base::value_dim;
  using base::wants_decays;
  using base::with_decay;
  using typename base::arguments;
  using typename base::forward_engine;
  using typename base::P;

 public:
  gradient_engine(const forward_engine& forward, const arguments& a, T* scratch)
      : base(forward, a, scratch), m_policy(forward.policy) {}

  /// Causal: `initial`, the state before row 0 or null; `dstate`, the gradient with respect to the final state, becomes
  /// that of the initial one. `position` is that of row 0.
  void causal(const T* initial, T* dstate, Eigen::Index position) const {
    const Eigen::Index tokens = m_a.queries;
    begin(initial);
    for_each_tile<false>(tokens, m_a.kept_keys,
                         [&](const head_tile& t, const head_tile& next) { forwards(t, next, position); });
    this->begin_decay_sums(dstate, [&](Eigen::Index h, Eigen::Index c, Eigen::Index m) {
      return transposed(h)[m * feature_stride() + c];
    });
    transpose_all(dstate);
    for_each_tile<true>(tokens, m_a.kept_keys,
                        [&](const head_tile& t, const head_tile& next) { backwards(t, next, position, dstate); });
    this->decay_initial(dstate);
  }

  /// Non-causal. `dstate` is zero before, and rubbish afterwards. Positions are those of row 0 of k and of q.
  void noncausal(T* dstate, Eigen::Index key_position, Eigen::Index query_position) const {
    const Eigen::Index queries = m_a.queries, keys = m_a.keys;
    begin(nullptr);
    for_each_tile<false>(keys, m_a.kept_keys,
                         [&](const head_tile& t, const head_tile& next) { absorb(t, next, key_position); });
    for_each_tile<false>(queries, m_a.kept_queries,
                         [&](const head_tile& t, const head_tile& next) { read(t, next, query_position, dstate); });
    transpose_all(dstate);
    for_each_tile<false>(keys, m_a.kept_keys,
                         [&](const head_tile& t, const head_tile& next) { read_back(t, next, key_position, dstate); });
  }

 private:
  T* sums(const head_tile& t) const { return base::sums(t.head); }

  template <bool Backwards, class F>
  void for_each_tile(Eigen::Index tokens, const std::uint8_t* mask, const F& f) const {
    base::template for_each_tile<Backwards>(tokens, mask, f);
  }

  /// S^T and z of the initial state, of all heads.
  void begin(const T* initial) const {
    this->begin_transposed(initial);
    this->for_each_head([&](Eigen::Index h) {
      const T* const head = initial == nullptr ? nullptr : initial + place_of(h);
      if constexpr (rule.normalizes) {
        T* const z = base::sums(h);
        std::fill_n(z, m_layout.sum_stride(), T(0));
        if (head != nullptr) std::copy_n(head + m_layout.state.z_offset(), features(), z);
      }
      if constexpr (rule.log_scaled) this->begin_log_scales(h, head);
    });
  }

  // ---- causal -------------------------------------------------------------------------------------------------------

  /// One tile of the first sweep: dq. The denominator and c of a token wait in its rows of dk and dv.
  void forwards(const head_tile& t, const head_tile& next, Eigen::Index position) const {
    constexpr Eigen::Index B = causal_block;
    const tile_position where{position + t.first, t.head};
    const auto q = rows_of<false>(m_a.q, t, head_dim());
    m_packing.template pack<role::key, false>(rows_of<false>(m_a.k, t, head_dim()), t.rows, B, where, m_keys);
    m_packing.template pack<role::query, false>(q, t.rows, B, where, m_queries);  // last, for unpack
    pack_rows(rows_of<false>(m_a.v, t, value_dim()), t.rows, B, m_values);
    pack_rows(rows_of<false>(m_a.dout, t, value_dim()), t.rows, B, m_douts);
    const T* decay = this->template pack_decays<false>(t, B);
    if constexpr (rule.log_scaled) {
      decay = this->template scale<true>(t.rows, B, m_keys, m_queries, log_scales(t.head));
    }
    head_rows<T> packed{m_douts, m_values, m_keys, m_dphi, decay};
    packed.clears = !forward_engine::clears_rows || !m_normalizes;
    attend_panels<B, with_decay(reads_and_writes, decay_axis::column), T>(
        m_layout.transposed(), round_up(t.rows, B) / B, packed, transposed(t.head),
        ahead(next, rows_of<false>(m_a.q, next, head_dim()), rows_of<false>(m_a.k, next, head_dim()),
              rows_of<false>(m_a.v, next, value_dim()), rows_of<false>(m_a.dout, next, value_dim()),
              rows_of<false>(m_a.dq, next, head_dim())));
    if (m_normalizes) {
      const auto denominators = rows_of<false>(m_a.dk, t, head_dim());
      const auto products = rows_of<false>(m_a.dv, t, value_dim());
      for (Eigen::Index r = 0; r < t.rows; ++r) {
        add(r, m_keys + r * feature_stride(), sums(t));
        const quotient by = divide(r, sums(t));
        *denominators.row(r) = by.denominator;
        *products.row(r) = by.product;
      }
    }
    if constexpr (forward_engine::z_decays) {
      for (Eigen::Index r = 0; !m_normalizes && wants_decays() && r < t.rows; ++r) {
        add(r, m_keys + r * feature_stride(), sums(t));  // for its part in the gradient of the decays
      }
      if (m_normalizes) clear_silent_features(t.head);
    }
    if constexpr (rule.log_scaled) this->template to_logarithms<role::query, false>(q, t.rows, B, where);
    for (Eigen::Index r = 0; wants_decays() && r < t.rows; ++r) {
      this->template add_to_decays<false>(token_of<false>(t, r), t.head, T(1), m_queries + r * feature_stride(),
                                          m_dphi + r * feature_stride());
    }
    m_packing.template unpack<role::query, false>(q, t.rows, where, m_queries, m_dphi,
                                                  rows_of<false>(m_a.dq, t, head_dim()));
  }

  /// One tile of the second sweep: dk and dv.
  void backwards(const head_tile& t, const head_tile& next, Eigen::Index position, T* dstate) const {
    constexpr Eigen::Index B = causal_block;
    const tile_position where{position + t.first, t.head};
    const auto k = rows_of<true>(m_a.k, t, head_dim());
    const auto dk = rows_of<true>(m_a.dk, t, head_dim());   // its first element: the denominator
    const auto dv = rows_of<true>(m_a.dv, t, value_dim());  // its first element: c
    T* const R = dstate + place_of(t.head);                 // (C, M)

    m_packing.template pack<role::query, true>(rows_of<true>(m_a.q, t, head_dim()), t.rows, B, where, m_queries);
    m_packing.template pack<role::key, true>(k, t.rows, B, where, m_keys);  // last, for unpack
    pack_rows(rows_of<true>(m_a.v, t, value_dim()), t.rows, B, m_values);
    pack_rows(rows_of<true>(m_a.dout, t, value_dim()), t.rows, B, m_douts);
    for (Eigen::Index r = 0; m_normalizes && r < t.rows; ++r) divide_query(m_queries, r, *dk.row(r));
    const Eigen::Index blocks = round_up(t.rows, B) / B;
    const T* decay = this->template pack_decays<true>(t, B);
    if constexpr (rule.log_scaled) {
      decay = this->template scale<true>(t.rows, B, m_queries, m_keys, R + m_layout.state.log_scale_offset());
    }
    attend_panels<B, with_decay(reads_and_writes, decay_axis::row), T>(
        m_layout.state, blocks, {m_keys, m_queries, m_douts, m_dvalues, decay}, R,
        ahead(next, rows_of<false>(m_a.q, next, head_dim()), rows_of<false>(m_a.k, next, head_dim()),
              rows_of<false>(m_a.v, next, value_dim())));
    attend_panels<B, with_decay(reads_and_writes, decay_axis::column), T>(
        m_layout.transposed(), blocks, {m_values, m_douts, m_queries, m_dphi, decay}, transposed(t.head),
        ahead(next, rows_of<false>(m_a.dout, next, value_dim()), rows_of<false>(m_a.dk, next, head_dim()),
              rows_of<false>(m_a.dv, next, value_dim())));
    if constexpr (rule.normalizes) {
      T* const dz = R + m_layout.state.z_offset();  // (C)
      for (Eigen::Index r = 0; r < t.rows; ++r) {
        decay_by(r, dz);
        if (m_normalizes) subtract_query(m_queries, r, *dv.row(r), dz);
        add(dz, m_dphi + r * feature_stride());
      }
      if constexpr (forward_engine::z_decays) {
        for (Eigen::Index c = 0; c < features(); ++c) dz[c] = without_silence(dz[c]);
      }
    }
    if constexpr (rule.log_scaled) this->template to_logarithms<role::key, true>(k, t.rows, B, where);
    for (Eigen::Index r = 0; wants_decays() && r < t.rows; ++r) {
      const Eigen::Index token = token_of<true>(t, r);
      this->template add_to_decays<true>(token, t.head, T(-1), m_keys + r * feature_stride(),
                                         m_dphi + r * feature_stride());
      this->sum_decays(token, t.head);
    }
    unpack_values(dv, t.rows);
    m_packing.template unpack<role::key, true>(k, t.rows, where, m_keys, m_dphi, dk);
  }

  // ---- non-causal ---------------------------------------------------------------------------------------------------

  /// S^T and z of all keys.
  void absorb(const head_tile& t, const head_tile& next, Eigen::Index position) const {
    constexpr Eigen::Index B = half_block;
    const tile_position where{position + t.first, t.head};
    m_packing.template pack<role::key, false>(rows_of<false>(m_a.k, t, head_dim()), t.rows, B, where, m_keys);
    pack_rows(rows_of<false>(m_a.v, t, value_dim()), t.rows, B, m_values);
    if constexpr (rule.log_scaled) this->template scale<false>(t.rows, B, m_keys, m_queries, log_scales(t.head));
    attend_panels<B, with_decay(writes_only, decay_axis::column), T>(
        m_layout.transposed(), round_up(t.rows, B) / B, {m_values, m_values, m_keys, m_dphi, m_decay},
        transposed(t.head),
        ahead(next, rows_of<false>(m_a.k, next, head_dim()), rows_of<false>(m_a.v, next, value_dim())));
    if (!m_normalizes) return;
    for (Eigen::Index r = 0; r < t.rows; ++r) add(r, m_keys + r * feature_stride(), sums(t));
  }

  /// dq of a tile of queries, and what they give to R and dz.
  void read(const head_tile& t, const head_tile& next, Eigen::Index position, T* dstate) const {
    constexpr Eigen::Index B = half_block;
    const tile_position where{position + t.first, t.head};
    const auto q = rows_of<false>(m_a.q, t, head_dim());
    T* const R = dstate + place_of(t.head);
    T* const divided = rule.log_scaled ? m_keys : m_queries;  // phi(q) / den
    m_packing.template pack<role::query, false>(q, t.rows, B, where, m_queries);
    pack_rows(rows_of<false>(m_a.dout, t, value_dim()), t.rows, B, m_douts);
    if constexpr (rule.log_scaled) {
      std::copy(m_queries, m_queries + round_up(t.rows, B) * feature_stride(), divided);
      this->scale_reading(t.rows, log_scales(t.head), m_queries);
    }
    const Eigen::Index blocks = round_up(t.rows, B) / B;
    attend_panels<B, reads_only, T>(
        m_layout.transposed(), blocks, {m_douts, m_douts, m_queries, m_dphi}, transposed(t.head),
        ahead(next, rows_of<false>(m_a.q, next, head_dim()), rows_of<false>(m_a.dout, next, value_dim())));
    T denominators[most_tokens], products[most_tokens];
    for (Eigen::Index r = 0; m_normalizes && r < t.rows; ++r) {
      const quotient by = divide(r, sums(t));
      denominators[r] = by.denominator;
      products[r] = by.product;
    }
    if constexpr (rule.log_scaled) this->template to_logarithms<role::query, false>(q, t.rows, B, where);
    m_packing.template unpack<role::query, false>(q, t.rows, where, m_queries, m_dphi,
                                                  rows_of<false>(m_a.dq, t, head_dim()));
    for (Eigen::Index r = 0; m_normalizes && r < t.rows; ++r) divide_query(divided, r, denominators[r]);
    if constexpr (rule.log_scaled) {
      this->template scale<false>(t.rows, B, divided, m_queries, R + m_layout.state.log_scale_offset());
    }
    for (Eigen::Index r = 0; m_normalizes && r < t.rows; ++r) {
      decay_by(r, R + m_layout.state.z_offset());
      subtract_query(divided, r, products[r], R + m_layout.state.z_offset());
    }
    attend_panels<B, with_decay(writes_only, decay_axis::row), T>(
        m_layout.state, blocks, {divided, divided, m_douts, m_dvalues, m_decay}, R,
        ahead(next, rows_of<false>(m_a.dq, next, head_dim())));
  }

  /// dk and dv of a tile of keys.
  void read_back(const head_tile& t, const head_tile& next, Eigen::Index position, const T* dstate) const {
    constexpr Eigen::Index B = half_block;
    const tile_position where{position + t.first, t.head};
    const auto k = rows_of<false>(m_a.k, t, head_dim());
    const auto dv = rows_of<false>(m_a.dv, t, value_dim());
    const T* const R = dstate + place_of(t.head);
    m_packing.template pack<role::key, false>(k, t.rows, B, where, m_keys);
    pack_rows(rows_of<false>(m_a.v, t, value_dim()), t.rows, B, m_values);
    if constexpr (rule.log_scaled) {
      this->scale_reading(t.rows, R + m_layout.state.log_scale_offset(), m_keys);
    }
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
    if constexpr (rule.log_scaled) this->template to_logarithms<role::key, false>(k, t.rows, B, where);
    unpack_values(dv, t.rows);
    m_packing.template unpack<role::key, false>(k, t.rows, where, m_keys, m_dphi,
                                                rows_of<false>(m_a.dk, t, head_dim()));
  }

  // ---- rows ---------------------------------------------------------------------------------------------------------

  struct quotient {
    T denominator;  // after the policy, or its logarithm where the features are
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
    const T before = forward_engine::z_decays ? without_silence(sum(denominators)) : sum(denominators);
    const denominator_policy policy = rule.log_scaled ? m_policy.at_scale(m_scales[r]) : m_policy;
    const T denominator = policy(before);
    const reciprocal<T> factor(denominator);
    const T product = policy.follows(before) ? sum(products) * factor.power * factor.inverse : T(0);
    const P minus(-product);
    for (Eigen::Index c = 0; c < feature_stride(); c += P::size) {
      const P difference = fma(minus, P::load(z + c), P::load(dphi + c));
      (difference * P(factor.power) * P(factor.inverse)).store(dphi + c);
    }
    if constexpr (rule.log_scaled) return {log_of(denominator) + m_scales[r], product};
    return {denominator, product};
  }

  /// phi(q_r) becomes phi(q_r) / den, which is in range where G / den is not; in logarithms where the features are.
  LINATTN_INLINE void divide_query(T* queries, Eigen::Index r, T denominator) const {
    T* const phi = queries + r * feature_stride();
    if constexpr (rule.log_scaled) {
      for (Eigen::Index c = 0; c < feature_stride(); c += P::size) (P::load(phi + c) - P(denominator)).store(phi + c);
    } else {
      const reciprocal<T> factor(denominator);
      for (Eigen::Index c = 0; c < feature_stride(); c += P::size) {
        (P::load(phi + c) * P(factor.power) * P(factor.inverse)).store(phi + c);
      }
    }
  }

  /// dz -= phi(q_r) / den c, after divide_query.
  LINATTN_INLINE void subtract_query(const T* queries, Eigen::Index r, T product, T* dz) const {
    const T* const phi = queries + r * feature_stride();
    const P minus(-product);
    for (Eigen::Index c = 0; c < feature_stride(); c += P::size) {
      fma(minus, P::load(phi + c), P::load(dz + c)).store(dz + c);
    }
  }

  denominator_policy m_policy;
};

}  // namespace detail
LINATTN_NAMESPACE_END
