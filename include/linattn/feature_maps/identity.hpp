// phi(x) = x.
#pragma once

#include <linattn/feature_map.hpp>

LINATTN_NAMESPACE_BEGIN

/// phi(x) = x, C = D, signed.
///
/// Kernel: q.k, the plain bilinear form, exactly.
///
/// Sign: denominators q.z may vanish or be negative, so operators with this map are not normalised unless options say
/// so.
///
/// Use it with rules that normalise in other ways or not at all, as models with decay, gates or the delta rule do, and
/// for fast weights: a state holds D keys at right angles without loss. Not with a normaliser.
///
/// Cost a token: none. NaN is kept.
/// Source: Schmidhuber, Learning to control fast-weight memories, 1992.
struct identity {
  static constexpr const char* name = "identity";  ///< in records of states
  static constexpr bool signed_features = true;

  static constexpr Eigen::Index dimension(Eigen::Index head_dim) noexcept { return head_dim; }

  template <class Packet>
  Packet packet(const Packet& x) const noexcept {
    return x;
  }

  template <class Packet>
  Packet vjp_packet(const Packet& /*x*/, const Packet& /*phi*/, const Packet& dphi) const noexcept {
    return dphi;
  }

  template <class T>
  void forward(const const_tile<T>& x, tile<T>& phi) const noexcept {
    elementwise_forward(*this, x, phi);
  }
};

LINATTN_NAMESPACE_END
