// Gradient sweeps where the map writes log phi: running maxima, and the scales of rows that read.
//
// S and z are kept by the running maximum of log phi(k), as forwards (packing.hpp), and R and dz by one of their own,
// of log phi(q) / den from the last token on. With both, in logarithms,
//
//     dlog phi(q_i) = phi(q_i) dphi(q_i)     dlog phi(k_i) = phi(k_i) dphi(k_i)
//
// and no factor is larger than 1 where the operator normalises: phi(k_i) phi(q_j) / den_j is a weight of attention.
#pragma once

#include <linattn/detail/gradient_sweeps.hpp>

#include <cmath>
#include <limits>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Sweeps whose features may be logarithms.
template <class Map, class T, class Layout>
class gradient_log_features : protected gradient_sweeps<Map, T, Layout> {
  using base = gradient_sweeps<Map, T, Layout>;

 protected:
  using base::feature_stride;
  using base::features;
  using base::m_decay;
  using base::m_dphi;
  using base::m_dvalues;
  using base::m_keys;
  using base::m_layout;
  using base::m_packing;
  using base::m_queries;
  using base::rule;
  using typename base::arguments;
  using typename base::forward_engine;
  using typename base::P;

  gradient_log_features(const forward_engine& forward, const arguments& a, T* scratch)
      : base(forward, a, scratch),
        m_normalizes(forward.normalizes),
        m_log_scales(scratch + m_layout.log_scales()),
        m_scales(scratch + m_layout.beta()) {}

  T* log_scales(Eigen::Index head) const { return m_log_scales + head * m_layout.sum_stride(); }  // of S and z (C)

  /// Those of a head of the initial state, or of nothing.
  void begin_log_scales(Eigen::Index head, const T* state) const {
    std::fill_n(log_scales(head), feature_stride(), std::numeric_limits<T>::lowest());
    if (state != nullptr) std::copy_n(state + m_layout.state.log_scale_offset(), feature_stride(), log_scales(head));
  }

  /// scale_keys of packing.hpp with the decays that it makes, of a tile: rows that write and, where Reads, rows that
  /// read, whose scales are m_scales then.
  template <bool Reads>
  const T* scale(Eigen::Index rows, Eigen::Index block, T* writing, T* reading, T* log_scale) const {
    scale_keys<rule, Reads, T>(rows, features(), feature_stride(), writing, reading, static_cast<const T*>(nullptr),
                               m_decay, log_scale);
    std::fill(m_decay + rows * feature_stride(), m_decay + round_up(rows, block) * feature_stride(), T(1));
    if constexpr (Reads) scale_queries(rows, features(), feature_stride(), reading, m_scales);
    return m_decay;
  }

  /// The same of rows that read a state which nothing is written to.
  void scale_reading(Eigen::Index rows, const T* log_scale, T* reading) const {
    for (Eigen::Index r = 0; r < rows; ++r) this->add(log_scale, reading + r * feature_stride());
    scale_queries(rows, features(), feature_stride(), reading, m_scales);
  }

  /// dphi (rows, C) becomes dlog phi, and the features log phi again, as the map's vjp wants them. Features were
  /// divided by exp(scale), which as two factors is in range; for queries it cancels where the operator normalises.
  template <role Role, bool Backwards>
  void to_logarithms(const tile_rows<const T>& x, Eigen::Index rows, Eigen::Index block,
                     const tile_position& where) const {
    T* const phi = Role == role::query ? m_queries : m_keys;
    for (Eigen::Index r = 0; r < rows; ++r) {
      const P root(Role == role::key || !m_normalizes ? std::exp(m_scales[r] / 2) : T(1));
      for (Eigen::Index c = 0; c < feature_stride(); c += P::size) {
        T* const dphi = m_dphi + r * feature_stride() + c;
        (P::load(phi + r * feature_stride() + c) * P::load(dphi) * root * root).store(dphi);
      }
    }
    m_packing.template pack<Role, Backwards>(x, rows, block, where, phi);
  }

  /// dv (rows, M) to the caller, times exp(scale) where keys were divided by it.
  void unpack_values(const tile_rows<T>& dv, Eigen::Index rows) const {
    constexpr denominator_policy as_they_are;
    if constexpr (rule.log_scaled) {
      unpack_outputs<true, power_of_e>(m_layout, m_dvalues, m_scales, as_they_are, dv, rows);
    } else {
      unpack_outputs<false>(m_layout, m_dvalues, m_dvalues, as_they_are, dv, rows);
    }
  }

  /// log x, and for 0, which divides nothing, infinity.
  static T log_of(T x) { return x == T(0) ? std::numeric_limits<T>::infinity() : std::log(x); }

  bool m_normalizes;
  T* m_log_scales;  // (H, C)
  T* m_scales;      // (T), logarithms of what queries, or keys, are scaled by
};

}  // namespace detail
LINATTN_NAMESPACE_END
