// phi(x) = exp(x).
#pragma once

#include <linattn/feature_map.hpp>

LINATTN_NAMESPACE_BEGIN

/// phi_c(x) = exp(x_c), C = D, features > 0.
///
/// Kernel: sum_c exp(q_c + k_c), computed as it stands: an estimate of nothing, and no relation to softmax. A large
/// coordinate of q picks the keys that have a large one there.
///
/// Use it where a model is trained with it. `softmax_normalized` is the same with the queries' half made bounded.
///
/// Numerics: written as log phi(x) = x, and the engine scales by the largest key so far, feature by feature: where the
/// operator normalises, logits of any size will do while q + k fits. Gradients carry the rounding of the largest logit,
/// an ulp of 100 being 8e-6 in float. NaN is kept.
///
/// Cost a token: 2 D exponentials, and the kernel with decays, which has 5 C M flops where elu_plus_one has 4.
/// Source: Shen et al., Efficient attention: attention with linear complexities, 2018 (its keys).
struct exponential {
  static constexpr const char* name = "exponential";  ///< in records of states
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
