// The FeatureMap contract: what a map must offer, what it may offer, and the one-sentence errors when it does not.
#pragma once

#include <linattn/detail/simd.hpp>
#include <linattn/matrix_view.hpp>
#include <linattn/update_rules/rule_traits.hpp>

#include <Eigen/Core>
#include <type_traits>

LINATTN_NAMESPACE_BEGIN

/// What a feature map reads: x (R, D), R tokens of one head as rows. Each row starts on a
/// boundary of whole packets.
template <class T>
using const_tile = Eigen::Map<const row_matrix<T>, Eigen::AlignedMax, Eigen::OuterStride<>>;

/// What a feature map writes: phi (R, C), as aligned as const_tile. It holds rubbish before.
template <class T>
using tile = Eigen::Map<row_matrix<T>, Eigen::AlignedMax, Eigen::OuterStride<>>;

/// Where a tile stands, for maps that need it: the third argument of `forward`.
struct tile_position {
  Eigen::Index first_position = 0;  ///< position of the tile's first row; row r is first_position + r
  Eigen::Index head = 0;            ///< the head all its rows belong to
};

/// What stands in for the accumulator type: features, state and scratch are held in it. float for Eigen::half and
/// Eigen::bfloat16, which only store; the scalar itself otherwise.
template <class Scalar>
using accumulator_t = detail::computed_t<Scalar>;

// ---------------------------------------------------------------------------------------------------------------------
// A feature map phi: R^D -> R^C is any copyable, immutable type with
//
//   static constexpr Eigen::Index dimension(Eigen::Index head_dim)   C as a function of D. A plain const member
//                                                                    will do; static constexpr makes a fixed-size
//                                                                    operator's state size known at compile time.
//   void forward(const_tile<T> x, tile<T> phi) const                 phi (R, C) from x (R, D), R >= 1 rows at
//                                                                    once, each row from its own x alone. May be
//                                                                    a template.
//
// and, where it applies, any of
//
//   packet(x)                    an elementwise map (C = D) as a function of one register of coordinates, written with
//                                + - * fma max min exp where_positive; the engine fuses it into packing. `forward` is
//                                then one line: elementwise_forward(*this, x, phi).
//   forward(x, phi, position)    instead of the two-argument form: a map that needs the token index or the head. It is
//                                given successive tokens of one head; the others may be given one token of each head.
//   forward_queries(x, phi[, position])  and  forward_keys(x, phi[, position])
//                                a pair, instead of forward: an asymmetric map.
//   vjp_packet(x, phi, dphi)     an elementwise map's gradient: d phi / d x times dphi, register by register; phi is
//                                packet(x).
//   vjp(x, phi, dphi, dx)        any other map's: dx (R, D) = dphi (R, C) times the Jacobian of `forward` at x (R, D),
//                                phi = forward(x) at hand. Tiles aligned as in `forward`; dx holds rubbish before.
//                                With the position behind dx where `forward` takes one; vjp_queries and vjp_keys beside
//                                forward_queries and forward_keys.
//   using gradient = ...         what the gradient of the map's parameters is kept in, and
//   gradient make_gradient() const   zeros of it. Then vjp takes a `gradient*` last, and adds to it what the rows give;
//                                null where nobody asks for it. A gradient serves one thread.
//   head_dim()                   the D a map with parameters was made for; the operator checks it.
//   heads()                      the H of a map with a set of parameters for each head, 1 otherwise; checked, too.
//   static constexpr bool signed_features = true
//                                features may be negative, so denominators may vanish: not normalised by default.
//   static constexpr bool positive_kernel = true
//                                beside signed_features: phi(q).phi(k) > 0 all the same, so normalised by default.
//   static constexpr bool log_features = true
//                                forward (or packet) writes log phi, and vjp differentiates log phi. For features that
//                                could overflow: the engine keeps the state by the largest feature of each row so far
//                                (update_rules/rule_traits.hpp, log_scaled), which is exact.
//   static constexpr const char* name = "..."   at most 32 characters, no other map's: for saved states (state_io.hpp),
//   std::uint64_t fingerprint() const           and of a map with members a number that other parameters do not have.
//   using scalar = float         the accumulator type a map with parameters holds them in; the operator checks it.
//
// x and phi are the engine's aligned scratch in the accumulator type, never the caller's memory, so that a result
// does not depend on addresses. A map is shared by threads: it has no mutable state, allocates nothing in `forward`,
// and takes randomness from a seed in its constructor. NaN in must be NaN out. `feature_maps/squared_relu.hpp` is the
// specimen to copy; `check_feature_map` tests a map of your own against this page.
// ---------------------------------------------------------------------------------------------------------------------

/// In place of `gradient` for a map that has none.
struct no_parameters {};

namespace detail {

template <class Map>
concept has_static_dimension = requires {
  typename std::integral_constant<Eigen::Index, Map::dimension(1)>;
};

template <class Map>
concept has_dimension = requires(const Map& map, Eigen::Index d) {
  { map.dimension(d) } -> std::convertible_to<Eigen::Index>;
};

template <class Map, class T>
concept has_packet = requires(const Map& map, const packet<T>& x) {
  { map.packet(x) } -> std::convertible_to<packet<T>>;
};

template <class Map, class T>
concept has_forward = requires(const Map& map, const const_tile<T>& x, tile<T>& phi) {
  map.forward(x, phi);
};

template <class Map, class T>
concept has_positional_forward = requires(const Map& map, const const_tile<T>& x, tile<T>& phi, tile_position p) {
  map.forward(x, phi, p);
};

template <class Map, class T>
concept has_forward_queries = requires(const Map& map, const const_tile<T>& x, tile<T>& phi) {
  map.forward_queries(x, phi);
};

template <class Map, class T>
concept has_forward_keys = requires(const Map& map, const const_tile<T>& x, tile<T>& phi) {
  map.forward_keys(x, phi);
};

template <class Map, class T>
concept has_positional_queries = requires(const Map& map, const const_tile<T>& x, tile<T>& phi, tile_position p) {
  map.forward_queries(x, phi, p);
};

template <class Map, class T>
concept has_positional_keys = requires(const Map& map, const const_tile<T>& x, tile<T>& phi, tile_position p) {
  map.forward_keys(x, phi, p);
};

template <class Map, class T>
inline constexpr bool is_asymmetric = (has_forward_queries<Map, T> ||
                                       has_positional_queries<Map, T>)&&(has_forward_keys<Map, T> ||
                                                                         has_positional_keys<Map, T>);

template <class Map, class T>
inline constexpr bool is_positional =
    has_positional_forward<Map, T> || has_positional_queries<Map, T> || has_positional_keys<Map, T>;

template <class Map>
inline constexpr bool has_signed_features = [] {
  if constexpr (requires { Map::signed_features; }) {
    return bool(Map::signed_features);
  } else {
    return false;
  }
}();

/// Whether denominators are positive whatever the input, but for rounding.
template <class Map>
inline constexpr bool has_positive_denominators = !has_signed_features<Map> || requires {
  requires Map::positive_kernel;
};

/// Whether the map writes log phi.
template <class Map>
inline constexpr bool has_log_features = [] {
  if constexpr (requires { Map::log_features; }) {
    return bool(Map::log_features);
  } else {
    return false;
  }
}();

/// The rule's traits with what the map adds to them.
template <class Map, rule_traits Rule>
inline constexpr rule_traits rule_with = [] {
  rule_traits rule = Rule;
  rule.log_scaled = has_log_features<Map>;
  return rule;
}();

/// C for a compile-time D, or Dynamic where D or the map's dimension is only known at run time.
template <class Map, Eigen::Index HeadDim>
inline constexpr Eigen::Index features_at_compile_time = [] {
  if constexpr (HeadDim != Eigen::Dynamic && has_static_dimension<Map>) {
    return Eigen::Index(Map::dimension(HeadDim));
  } else {
    return Eigen::Index(Eigen::Dynamic);
  }
}();

/// One readable sentence per missing member, from the operator's class body.
template <class Map, class T>
constexpr bool check_feature_map_members() {
  static_assert(has_dimension<Map>,
                "linattn: the feature map has no `Eigen::Index dimension(Eigen::Index head_dim) const`; it says how "
                "many features C a head of D coordinates has (see linattn/feature_map.hpp)");
  if constexpr (requires { typename Map::scalar; }) {
    static_assert(std::is_same_v<typename Map::scalar, T>,
                  "linattn: the feature map's parameters are of another scalar type than the operator's features; "
                  "write e.g. linear_attention<positive_random<double>, additive, double>");
  }
  static_assert(!(has_log_features<Map> && has_signed_features<Map>),
                "linattn: the feature map has log_features and signed_features; a negative feature has no logarithm");
  static_assert(has_forward<Map, T> || has_positional_forward<Map, T> || is_asymmetric<Map, T>,
                "linattn: the feature map has no `void forward(linattn::const_tile<T> x, linattn::tile<T> phi) const` "
                "for this operator's accumulator type T (nor forward_queries and forward_keys); copy "
                "linattn/feature_maps/squared_relu.hpp as a start");
  return true;
}

}  // namespace detail

/// For constraining code of your own: `Map` can serve as the feature map of an operator with accumulator type T.
template <class Map, class T = float>
concept feature_map = std::copy_constructible<Map> && detail::has_dimension<Map> &&
    (detail::has_forward<Map, T> || detail::has_positional_forward<Map, T> || detail::is_asymmetric<Map, T>);

/// The `forward` of an elementwise map: phi (R, D) = map.packet(x (R, D)), register by register, and the last partial
/// register of a row through a zero-padded copy. D flops of the map a row, no allocation.
template <class Map, class X, class Phi>
void elementwise_forward(const Map& map, const X& x, Phi& phi) {
  using T = typename Phi::Scalar;
  using P = detail::packet<T>;
  const Eigen::Index whole = x.cols() / P::size * P::size;
  for (Eigen::Index r = 0; r < x.rows(); ++r) {
    const T* in = x.data() + r * x.outerStride();
    T* out = phi.data() + r * phi.outerStride();
    for (Eigen::Index c = 0; c < whole; c += P::size) P(map.packet(P::load_unaligned(in + c))).store_unaligned(out + c);
    if (whole < x.cols()) {
      alignas(detail::slab_alignment) T lanes[P::size] = {};
      for (Eigen::Index c = whole; c < x.cols(); ++c) lanes[c - whole] = in[c];
      P(map.packet(P::load(lanes))).store(lanes);
      for (Eigen::Index c = whole; c < x.cols(); ++c) out[c] = lanes[c - whole];
    }
  }
}

/// The `vjp` of an elementwise map: dx (R, D) = map.vjp_packet(x, phi, dphi), each (R, D), register by register. Only
/// for calls from outside: the engine calls vjp_packet itself.
template <class Map, class X, class Dx>
void elementwise_vjp(const Map& map, const X& x, const X& phi, const X& dphi, Dx& dx) {
  using T = typename Dx::Scalar;
  using P = detail::packet<T>;
  for (Eigen::Index r = 0; r < x.rows(); ++r) {
    const T* const in[3] = {x.data() + r * x.outerStride(), phi.data() + r * phi.outerStride(),
                            dphi.data() + r * dphi.outerStride()};
    T* const out = dx.data() + r * dx.outerStride();
    for (Eigen::Index c = 0; c < x.cols(); c += P::size) {
      const Eigen::Index n = x.cols() - c;
      if (n >= P::size) {
        P(map.vjp_packet(P::load_unaligned(in[0] + c), P::load_unaligned(in[1] + c), P::load_unaligned(in[2] + c)))
            .store_unaligned(out + c);
      } else {
        P(map.vjp_packet(P::load_partial(in[0] + c, n), P::load_partial(in[1] + c, n), P::load_partial(in[2] + c, n)))
            .store_partial(out + c, n);
      }
    }
  }
}

LINATTN_NAMESPACE_END
