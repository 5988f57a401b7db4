// phi(x) = elu(x) + 1, the map of the 2020 paper.
#pragma once

#include <linattn/feature_map.hpp>

LINATTN_NAMESPACE_BEGIN

/// phi_c(x) = x_c + 1 for x_c >= 0, exp(x_c) below (eq. 7), C = D, features > 0.
///
/// Kernel: sum_c phi_c(q) phi_c(k), computed as it stands: an estimate of nothing, and no relation to softmax.
///
/// Use it where no other map is asked for: every denominator is positive, and unlike relu's its derivative does not
/// vanish for x < 0. Not to stand in for a trained softmax, nor where many keys are to be told apart: all features are
/// positive, so any two keys have much in common.
///
/// Numerics: evaluated as max(x, 0) + exp(min(x, 0)), which does not cancel where elu(x) + 1 as written is 44 % off (x
/// = -17 in float): 2 ulp, 0 only at -inf and below the subnormals, NaN kept.
///
/// Cost a token: D exponentials and 3 D flops.
/// Source: Katharopoulos et al., Transformers are RNNs, 2020.
struct elu_plus_one {
  static constexpr const char* name = "elu_plus_one";  ///< in records of states
  static constexpr Eigen::Index dimension(Eigen::Index head_dim) noexcept { return head_dim; }

  template <class Packet>
  Packet packet(const Packet& x) const noexcept {
    return max(x, Packet(0)) + exp_of_negative(x);
  }

  /// The derivative is 1 for x >= 0 and exp(x) below: min(phi, 1).
  template <class Packet>
  Packet vjp_packet(const Packet& /*x*/, const Packet& phi, const Packet& dphi) const noexcept {
    return min(phi, Packet(1)) * dphi;
  }

  template <class T>
  void forward(const const_tile<T>& x, tile<T>& phi) const noexcept {
    elementwise_forward(*this, x, phi);
  }
};

LINATTN_NAMESPACE_END
