// phi(x) = exp(x).
#pragma once

#include <linattn/feature_map.hpp>

LINATTN_NAMESPACE_BEGIN

/// phi_c(x) = exp(x_c), C = D, features > 0.
///
/// Kernel: sum_c exp(q_c + k_c). Written as log phi(x) = x, so that nothing overflows: the engine scales by the largest
/// key so far, feature by feature. Numerics: exact for logits of any size that x itself can hold. Cost: two exp a
/// feature and token, and the kernel with decays (5 C M flops a token where elu_plus_one has 4). Use it for sharp
/// attention to single coordinates; elu_plus_one is smoother and costs less.
struct exponential {
  static constexpr bool log_features = true;
  static constexpr Eigen::Index dimension(Eigen::Index head_dim) noexcept { return head_dim; }

  template <class Packet>
  Packet packet(const Packet& x) const noexcept {
    return x;
  }

  template <class Packet>
  Packet vjp_packet(const Packet& /*x*/, const Packet& /*log_phi*/, const Packet& dlog_phi) const noexcept {
    return dlog_phi;
  }

  template <class T>
  void forward(const const_tile<T>& x, tile<T>& log_phi) const noexcept {
    elementwise_forward(*this, x, log_phi);
  }
};

LINATTN_NAMESPACE_END
