// phi(x) = max(x, 0).
#pragma once

#include <linattn/feature_map.hpp>

LINATTN_NAMESPACE_BEGIN

/// phi_c(x) = max(x_c, 0), C = D, features >= 0.
///
/// Kernel: sum_c max(q_c, 0) max(k_c, 0), over the coordinates where q and k are both positive, computed as it stands:
/// an estimate of nothing, and no relation to softmax.
///
/// Use it for sparse features at the least cost, and after a projection, see `learned_linear`. Not where rows may lack
/// a positive coordinate (q = -1, say): where every product vanishes the denominator is 0 and the output is 0. The
/// derivative vanishes for x <= 0.
///
/// Cost a token: D flops. NaN is kept.
/// Source: Choromanski et al., Rethinking attention with Performers, 2021, without its directions.
struct relu {
  static constexpr const char* name = "relu";  ///< in records of states
  static constexpr Eigen::Index dimension(Eigen::Index head_dim) noexcept { return head_dim; }

  template <class Packet>
  Packet packet(const Packet& x) const noexcept {
    return max(x, Packet(0));
  }

  /// The derivative at 0 is 0.
  template <class Packet>
  Packet vjp_packet(const Packet& x, const Packet& /*phi*/, const Packet& dphi) const noexcept {
    return where_positive(x, dphi);
  }

  template <class T>
  void forward(const const_tile<T>& x, tile<T>& phi) const noexcept {
    elementwise_forward(*this, x, phi);
  }
};

LINATTN_NAMESPACE_END
