// The gradient of the delta rules, in the blocks of correction.hpp, with scratch that does not depend on N.
//
// Per head, S' = a_t S_(t-1), w_t = v_t - S'^T k_t, u_t = beta_t w_t, S_t = S' + k_t u_t^T, out_t = S_t^T q_t. With R_t
// the gradient with respect to S_t, and dv_t = beta_t R_t^T k_t,
//
//   forwards     w_t                                                               S   (C, M), written as by the rule
//   backwards    R_t^T k_t, dv_t,  dbeta_t = (R_t^T k_t).w_t,  dk_t = R_t u_t      R_t = q_t dout_t^T
//                                                                                        + a_(t+1) (R - k dv^T)_(t+1)
//   forwards     dq_t = S_t dout_t,  dk_t -= S' dv_t                               S^T (M, C), written with k_t, u_t
//
// Three sweeps: S is built from the start, never by going back from S_t to S_(t-1), and nothing is stored for every
// token but what waits in the caller's rows: w_t where dv_t will stand, then u_t where dq_t will. Where M > D it does
// not fit there, and the third sweep finds it again as the first one did. R is kept as it is for what it says about k,
// and transposed for what it says about u. The terms of dlog_decay are (gradient_sweeps.hpp)
//
//   x_t = q_t dq_t - k_t (R_t u_t) - k_t (S' dv_t)
//
// gradient_correction_blocks.hpp has the blocks of each sweep.
#pragma once

#include <linattn/detail/gradient_correction_blocks.hpp>
#include <linattn/detail/gradient_sweeps.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// For the delta rules.
template <class Map, class T, class Layout>
class correction_gradient_engine : gradient_sweeps<Map, T, Layout> {
  using base = gradient_sweeps<Map, T, Layout>;
  using base::feature_stride;
  using base::head_dim;
  using base::heads;
  using base::m_a;
  using base::m_douts;
  using base::m_dphi;
  using base::m_dvalues;
  using base::m_keys;
  using base::m_layout;
  using base::m_packing;
  using base::m_queries;
  using base::m_states;
  using base::m_values;
  using base::place_of;
  using base::row_stride;
  using base::rule;
  using base::tokens;
  using base::transposed;
  using base::value_dim;
  using base::wants_decays;
  using typename base::arguments;
  using typename base::forward_engine;
  using typename base::P;
  static constexpr Eigen::Index B = correction_block;

 public:
  correction_gradient_engine(const forward_engine& forward, const arguments& a, T* scratch)
      : base(forward, a, scratch),
        m_beta(scratch + m_layout.beta()),
        m_read(scratch + m_layout.found()),
        m_rows{scratch + m_layout.reading(), nullptr, scratch + m_layout.carry(), nullptr} {
    // In whole cache lines each (workspace_layout::gradient_correction_size).
    T* at = scratch + m_layout.gradient_correction();
    const auto take = [&](Eigen::Index size) {
      T* const place = at;
      at += round_up(size, line<T>);
      return place;
    };
    const Eigen::Index rows = m_layout.tokens();
    m_corrected = take(m_layout.state.size());
    m_rows.writing = take(2 * rows * feature_stride());
    m_pairs = take(2 * rows * row_stride());
    m_written = take(2 * rows * row_stride());
    m_rows.coefficients = take(4 * rows * B);
    m_transposed_rows.coefficients = m_rows.coefficients;
    m_transposed_rows.found = take(2 * B * feature_stride());
    m_transposed_rows.writing = take(2 * B * feature_stride());
    m_transposed_rows.carry = take(feature_stride());
  }

  /// As gradient_engine::causal.
  void causal(const T* initial, T* dstate, Eigen::Index position) const {
    begin(initial);
    this->template for_each_tile<false>(
        tokens(), m_a.kept_keys, [&](const head_tile& t, const head_tile& next) { find_residuals(t, next, position); });
    this->begin_decay_sums(dstate, [&](Eigen::Index h, Eigen::Index c, Eigen::Index m) {
      return m_corrected[place_of(h) + c * row_stride() + m];
    });
    this->transpose_all(dstate);
    this->template for_each_tile<true>(tokens(), m_a.kept_keys, [&](const head_tile& t, const head_tile& next) {
      backwards(t, next, position, dstate);
    });
    this->decay_initial(dstate);
    if (!keeps_written()) begin(initial);
    this->begin_transposed(initial);
    this->template for_each_tile<false>(
        tokens(), m_a.kept_keys, [&](const head_tile& t, const head_tile& next) { forwards(t, next, position); });
    if (!wants_decays()) return;
    this->template for_each_tile<true>(tokens(), m_a.kept_keys, [&](const head_tile& t, const head_tile&) {
      for (Eigen::Index r = 0; r < t.rows; ++r) this->sum_decays(token_of<true>(t, r), t.head);
    });
  }

 private:
  /// S of the heads that this is about.
  void begin(const T* initial) const {
    const Eigen::Index first = place_of(m_states.first()), last = first + place_of(heads());
    if (initial != nullptr) {
      std::copy(initial + first, initial + last, m_corrected + first);
    } else {
      std::fill(m_corrected + first, m_corrected + last, T(0));
    }
  }

  /// Whether u_t waits in the rows of dq.
  bool keeps_written() const { return value_dim() <= head_dim(); }

  // ---- sweeps -------------------------------------------------------------------------------------------------------

  /// w of a tile, to wait in its rows of dv.
  void find_residuals(const head_tile& t, const head_tile& next, Eigen::Index position) const {
    const auto k = rows_of<false>(m_a.k, t, head_dim());
    m_packing.template pack<role::key, false>(k, t.rows, B, {position + t.first, t.head}, m_keys);
    correct(t, next);
    const auto dv = rows_of<false>(m_a.dv, t, value_dim());
    unpack(m_values, dv, t.rows);
  }

  /// dv and dbeta of a tile, and the half of dk that R knows.
  void backwards(const head_tile& t, const head_tile& next, Eigen::Index position, T* dstate) const {
    const tile_position where{position + t.first, t.head};
    const auto k = rows_of<true>(m_a.k, t, head_dim());
    const auto dv = rows_of<true>(m_a.dv, t, value_dim());  // w
    const Eigen::Index blocks = round_up(t.rows, B) / B;
    m_packing.template pack<role::query, true>(rows_of<true>(m_a.q, t, head_dim()), t.rows, B, where, m_queries);
    m_packing.template pack<role::key, true>(k, t.rows, B, where, m_keys);  // last, for unpack
    this->pack_rows(const_rows(dv), t.rows, B, m_values);
    pack_pairs<1>(rows_of<true>(m_a.dout, t, value_dim()), t.rows, T(1), m_written);
    pack_beta<true>(t);
    const T* const decay = this->template pack_decays<true>(t, B);
    attend_backwards<B, rule>(
        m_layout.state, blocks, {m_queries, m_keys, nullptr, nullptr, decay, m_beta}, m_rows, m_written, m_dvalues,
        m_read, dstate + place_of(t.head),
        this->ahead(next, rows_of<false>(m_a.q, next, head_dim()), rows_of<false>(m_a.k, next, head_dim()),
                    rows_of<false>(m_a.dv, next, value_dim())));
    for (Eigen::Index r = 0; r < t.rows; ++r) {
      T* const w = m_values + r * row_stride();
      T* const found = m_dvalues + r * row_stride();
      P product = P::zero();
      const P beta(m_beta[r]);
      for (Eigen::Index m = 0; m < row_stride(); m += P::size) {
        product = fma(P::load(w + m), P::load(found + m), product);
        (beta * P::load(w + m)).store(w + m);  // u
        (beta * P::load(found + m)).store(found + m);
      }
      if (m_a.dbeta.data != nullptr) *m_a.dbeta.at(token_of<true>(t, r), t.head) = sum(product);
    }
    unpack(m_dvalues, dv, t.rows);
    if (keeps_written()) unpack(m_values, rows_of<true>(m_a.dq, t, head_dim()), t.rows);
    attend_transposed<B, rule>(
        m_layout.transposed(), blocks,
        transposed_rows<1, 2, T>{m_values, m_written, {m_keys, m_queries}, decay, {m_dphi}}, m_transposed_rows,
        transposed(t.head),
        this->ahead(next, rows_of<false>(m_a.dout, next, value_dim()), rows_of<false>(m_a.dk, next, head_dim())));
    for (Eigen::Index r = 0; wants_decays() && r < t.rows; ++r) {
      this->template add_to_decays<false>(token_of<true>(t, r), t.head, T(-1), m_keys + r * feature_stride(),
                                          m_dphi + r * feature_stride());
    }
    m_packing.template unpack<role::key, true>(k, t.rows, where, m_keys, m_dphi, rows_of<true>(m_a.dk, t, head_dim()));
  }

  /// dq of a tile, and the half of dk that S knows.
  void forwards(const head_tile& t, const head_tile& next, Eigen::Index position) const {
    const tile_position where{position + t.first, t.head};
    const auto q = rows_of<false>(m_a.q, t, head_dim());
    const auto k = rows_of<false>(m_a.k, t, head_dim());
    const auto pack_keys = [&] { m_packing.template pack<role::key, false>(k, t.rows, B, where, m_keys); };
    pack_keys();
    m_packing.template pack<role::query, false>(q, t.rows, B, where, m_queries);  // last, for the first unpack
    const T* decay = nullptr;
    if (keeps_written()) {
      this->pack_rows(const_rows(rows_of<false>(m_a.dq, t, head_dim())), t.rows, B, m_written);
      decay = this->template pack_decays<false>(t, B);
    } else {
      decay = correct(t, next);
    }
    pack_pairs<0>(rows_of<false>(m_a.dout, t, value_dim()), t.rows, T(1), m_pairs);
    pack_pairs<1>(const_rows(rows_of<false>(m_a.dv, t, value_dim())), t.rows, T(-1), m_pairs);
    T* const dkeys = m_rows.reading;  // (T, C); no longer in use
    attend_transposed<B, rule>(
        m_layout.transposed(), round_up(t.rows, B) / B,
        transposed_rows<2, 1, T>{m_pairs, m_written, {m_keys}, decay, {m_dphi, dkeys}}, m_transposed_rows,
        transposed(t.head),
        this->ahead(next, rows_of<false>(m_a.dout, next, value_dim()), rows_of<false>(m_a.dv, next, value_dim()),
                    rows_of<false>(m_a.dk, next, head_dim()), rows_of<false>(m_a.dq, next, head_dim())));
    for (Eigen::Index r = 0; wants_decays() && r < t.rows; ++r) {
      const Eigen::Index row = r * feature_stride(), token = token_of<false>(t, r);
      this->template add_to_decays<true>(token, t.head, T(1), m_queries + row, m_dphi + row);
      this->template add_to_decays<true>(token, t.head, T(1), m_keys + row, dkeys + row);
    }
    m_packing.template unpack<role::query, false>(q, t.rows, where, m_queries, m_dphi,
                                                  rows_of<false>(m_a.dq, t, head_dim()));
    if constexpr (!has_packet<Map, T>) pack_keys();  // their x, for the second one
    m_packing.template unpack<role::key, false, true>(k, t.rows, where, m_keys, dkeys,
                                                      rows_of<false>(m_a.dk, t, head_dim()));
  }

  /// The packed keys of a tile, written to S: values v to w, m_written u. Returns the decays.
  const T* correct(const head_tile& t, const head_tile& next) const {
    this->pack_rows(rows_of<false>(m_a.v, t, value_dim()), t.rows, B, m_values);
    pack_beta<false>(t);
    const T* const decay = this->template pack_decays<false>(t, B);
    attend_residuals<B, rule>(
        m_layout.state, round_up(t.rows, B) / B, {nullptr, m_keys, nullptr, nullptr, decay, m_beta}, m_rows, m_values,
        m_written, m_read, m_corrected + place_of(t.head),
        this->ahead(next, rows_of<false>(m_a.q, next, head_dim()), rows_of<false>(m_a.k, next, head_dim()),
                    rows_of<false>(m_a.v, next, value_dim())));
    return decay;
  }

  // ---- rows ---------------------------------------------------------------------------------------------------------

  static tile_rows<const T> const_rows(const tile_rows<T>& x) {
    return {x.data, x.stride, x.size, x.numbers, x.direction};
  }

  template <bool Backwards>
  void pack_beta(const head_tile& t) const {
    for (Eigen::Index r = 0; r < t.rows; ++r) m_beta[r] = *m_a.gates.beta.at(token_of<Backwards>(t, r), t.head);
    std::fill(m_beta + t.rows, m_beta + round_up(t.rows, B), T(0));
  }

  /// to (blocks, 2 B, M): rows of x times `factor`, into the first or the second B rows of each block.
  template <Eigen::Index Place>
  void pack_pairs(const tile_rows<const T>& x, Eigen::Index rows, T factor, T* to) const {
    const P by(factor);
    for (Eigen::Index r = 0; r < rows; r += B) {
      T* const block = to + (2 * r + Place * B) * row_stride();
      const Eigen::Index here = std::min(B, rows - r);
      transform_rows(x.from(r), here, value_dim(), block, row_stride(),
                     [&](const P& value) LINATTN_INLINE_LAMBDA { return value * by; });
      std::fill(block + here * row_stride(), block + B * row_stride(), T(0));
    }
  }

  void unpack(const T* values, const tile_rows<T>& to, Eigen::Index rows) const {
    unpack_outputs<false>(m_layout, values, values, denominator_policy::none(), to, rows);
  }

  T* m_beta;                  // (T)
  T* m_read;                  // (2 B, M)
  correction_rows<T> m_rows;  // reading (2 T, C), writing (2 T, C)
  T* m_corrected;             // (H, C, M)
  T* m_pairs;                 // (2 T, M): dout and -dv
  T* m_written;               // (2 T, M): -dv and dout, or u (T, M)
  transposed_scratch<T> m_transposed_rows;
};

}  // namespace detail
LINATTN_NAMESPACE_END
