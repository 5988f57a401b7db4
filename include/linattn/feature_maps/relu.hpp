// phi(x) = max(x, 0).
#pragma once

#include <linattn/feature_map.hpp>

LINATTN_NAMESPACE_BEGIN

/// phi_c(x) = max(x_c, 0), C = D, features >= 0.
///
/// Kernel: sum over the coordinates where q and k are both positive. Where every product vanishes (q = -1, say) the
/// denominator is 0 and the output is 0. Cost: 1 flop a coordinate. NaN is kept.
struct relu {
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
