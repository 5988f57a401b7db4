// phi(x) = exp(x).
#pragma once

#include <linattn/feature_map.hpp>

LINATTN_NAMESPACE_BEGIN

/// phi_c(x) = exp(x_c), C = D, features > 0.
///
/// Kernel: sum_c exp(q_c + k_c), computed as it stands: an estimate of nothing, and no relation to softmax. A large
/// coordinate of q picks the keys that have a large one there.
///
/// Use it where a model is trained with it and inputs are bounded, with `softmax_normalized` where queries are not. Not
/// where inputs have no bound.
///
/// Numerics: 2 ulp; a coordinate above 88.7 in float (709.7 in double) is inf, and sums of products overflow from
/// q_c + k_c of that size on: keep inputs below about 40, or use double. NaN is kept.
///
/// Cost a token: D exponentials.
/// Source: Shen et al., Efficient attention: attention with linear complexities, 2018 (its keys).
struct exponential {
  static constexpr Eigen::Index dimension(Eigen::Index head_dim) noexcept { return head_dim; }

  template <class Packet>
  Packet packet(const Packet& x) const noexcept {
    return exp(x);
  }

  template <class Packet>
  Packet vjp_packet(const Packet& /*x*/, const Packet& phi, const Packet& dphi) const noexcept {
    return phi * dphi;
  }

  template <class T>
  void forward(const const_tile<T>& x, tile<T>& phi) const noexcept {
    elementwise_forward(*this, x, phi);
  }
};

LINATTN_NAMESPACE_END
