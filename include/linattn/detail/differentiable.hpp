// What the contract of feature_map.hpp says about gradients, as traits and one call.
#pragma once

#include <linattn/feature_map.hpp>

#include <type_traits>

LINATTN_NAMESPACE_BEGIN
namespace detail {

enum class role { query, key };

/// Whether queries, or keys, have a form of their own.
template <role Role, class Map, class T>
inline constexpr bool is_separate = Role == role::query
                                        ? (has_forward_queries<Map, T> || has_positional_queries<Map, T>)
                                        : (has_forward_keys<Map, T> || has_positional_keys<Map, T>);

/// Whether the form that serves queries, or keys, takes the position.
template <role Role, class Map, class T>
inline constexpr bool takes_position = !is_separate<Role, Map, T> ? has_positional_forward<Map, T>
                                       : Role == role::query      ? has_positional_queries<Map, T>
                                                                  : has_positional_keys<Map, T>;

template <class Map>
concept has_parameters = requires(const Map& map) {
  typename Map::gradient;
  map.make_gradient();
};

template <class Map>
struct gradient_of {
  using type = no_parameters;
};
template <has_parameters Map>
struct gradient_of<Map> {
  using type = typename Map::gradient;
};

/// Fused into unpacking; a map with parameters has to see whole tiles.
template <class Map, class T>
concept has_vjp_packet = has_packet<Map, T> && !has_parameters<Map> && requires(const Map& map, const packet<T>& x) {
  map.vjp_packet(x, x, x);
};

template <class Map, class T, class... More>
concept has_vjp = requires(const Map& map, const const_tile<T>& x, tile<T>& dx, const More&... more) {
  map.vjp(x, x, x, dx, more...);
};

template <class Map, class T, class... More>
concept has_vjp_queries = requires(const Map& map, const const_tile<T>& x, tile<T>& dx, const More&... more) {
  map.vjp_queries(x, x, x, dx, more...);
};

template <class Map, class T, class... More>
concept has_vjp_keys = requires(const Map& map, const const_tile<T>& x, tile<T>& dx, const More&... more) {
  map.vjp_keys(x, x, x, dx, more...);
};

/// f(where, gradient), or with those of the two that the map's vjp takes.
template <role Role, class Map, class T, class F>
constexpr auto with_vjp_arguments(const tile_position& where, typename gradient_of<Map>::type* gradient, const F& f) {
  if constexpr (takes_position<Role, Map, T> && has_parameters<Map>) {
    return f(where, gradient);
  } else if constexpr (takes_position<Role, Map, T>) {
    return f(where);
  } else if constexpr (has_parameters<Map>) {
    return f(gradient);
  } else {
    return f();
  }
}

/// dx (R, D) from x (R, D), phi and dphi (R, C) by the tile form for queries or keys.
template <role Role, class Map, class T>
void call_vjp(const Map& map, const const_tile<T>& x, const const_tile<T>& phi, const const_tile<T>& dphi, tile<T>& dx,
              const tile_position& where, typename gradient_of<Map>::type* gradient) {
  with_vjp_arguments<Role, Map, T>(where, gradient, [&](const auto&... more) {
    if constexpr (!is_separate<Role, Map, T>) {
      map.vjp(x, phi, dphi, dx, more...);
    } else if constexpr (Role == role::query) {
      map.vjp_queries(x, phi, dphi, dx, more...);
    } else {
      map.vjp_keys(x, phi, dphi, dx, more...);
    }
  });
}

template <role Role, class Map, class T>
inline constexpr bool has_vjp_for =
    decltype(with_vjp_arguments<Role, Map, T>(tile_position(), nullptr, [](const auto&... more) {
      if constexpr (!is_separate<Role, Map, T>) {
        return std::bool_constant<has_vjp<Map, T, std::remove_cvref_t<decltype(more)>...>>();
      } else if constexpr (Role == role::query) {
        return std::bool_constant<has_vjp_queries<Map, T, std::remove_cvref_t<decltype(more)>...>>();
      } else {
        return std::bool_constant<has_vjp_keys<Map, T, std::remove_cvref_t<decltype(more)>...>>();
      }
    }))::value;

/// Whether gradients go through the map.
template <class Map, class T>
inline constexpr bool is_differentiable = has_vjp_packet<Map, T> ||
                                          (has_vjp_for<role::query, Map, T> && has_vjp_for<role::key, Map, T>);

}  // namespace detail
LINATTN_NAMESPACE_END
