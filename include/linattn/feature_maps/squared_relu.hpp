// phi(x) = max(x, 0)^2: the specimen to copy for an elementwise feature map of your own.
#pragma once

#include <linattn/feature_map.hpp>

LINATTN_NAMESPACE_BEGIN

/// phi_c(x) = max(x_c, 0)^2, C = D, features >= 0.
///
/// Kernel: sum_c max(q_c, 0)^2 max(k_c, 0)^2, computed as it stands: an estimate of nothing, and no relation to
/// softmax.
///
/// Use it in place of relu where weights are to be more peaked: large coordinates dominate. Not where rows may lack a
/// positive coordinate: they have phi = 0, and where every product vanishes the output is 0.
///
/// Cost a token: 2 D flops. NaN is kept.
/// Source: So et al., Primer, 2021, where it is the activation of a feed-forward layer.
struct squared_relu {
  static constexpr const char* name = "squared_relu";  ///< in records of states
  /// C, the number of features of a head of D = head_dim coordinates.
  static constexpr Eigen::Index dimension(Eigen::Index head_dim) noexcept { return head_dim; }

  /// One register of coordinates. The argument comes first in max: that keeps its NaN.
  template <class Packet>
  Packet packet(const Packet& x) const noexcept {
    const Packet positive = max(x, Packet(0));
    return positive * positive;
  }

  /// One register of the gradient: 2 max(x, 0) dphi. `phi` is packet(x), for maps whose derivative is made of it.
  template <class Packet>
  Packet vjp_packet(const Packet& x, const Packet& /*phi*/, const Packet& dphi) const noexcept {
    return max(x, Packet(0)) * (dphi + dphi);
  }

  /// phi (R, C) from x (R, D).
  template <class T>
  void forward(const const_tile<T>& x, tile<T>& phi) const noexcept {
    elementwise_forward(*this, x, phi);
  }
};

LINATTN_NAMESPACE_END
