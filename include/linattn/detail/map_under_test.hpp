// A map as functions, for check_feature_map: so that what checks it compiles once per scalar.
#pragma once

#include <linattn/detail/differentiable.hpp>

#include <Eigen/Core>
#include <functional>
#include <type_traits>
#include <vector>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// One way to call a map, the same of a copy of it, and its gradient, which is empty where the map has none.
template <class T>
struct map_form {
  using function = std::function<void(const const_tile<T>& x, tile<T>& phi, tile_position where)>;
  using gradient = std::function<void(const const_tile<T>& x, const const_tile<T>& phi, const const_tile<T>& dphi,
                                      tile<T>& dx, tile_position where)>;
  const char* name;
  function original;
  function copy;
  gradient vjp = {};
};

/// A map as its checker sees it. `forms` are forward, or forward_queries and forward_keys; `fused` is its packet(x), as
/// one more form, for elementwise maps.
template <class T>
struct map_under_test {
  Eigen::Index head_dim = 0;
  Eigen::Index features = 0;
  bool is_positional = false;
  bool is_signed = false;
  bool writes_log = false;
  std::vector<map_form<T>> forms;
  std::vector<map_form<T>> fused;
};

template <class T, class Map>
map_under_test<T> describe_map(const Map& map, Eigen::Index head_dim, Eigen::Index features) {
  using input = const_tile<T>;
  using output = tile<T>;
  map_under_test<T> result{head_dim, features, is_positional<Map, T>, has_signed_features<Map>, has_log_features<Map>,
                           {},       {}};
  const auto add = [&map](std::vector<map_form<T>>& forms, const char* name, auto call) {
    forms.push_back(
        {name, [&map, call](const input& x, output& phi, tile_position where) { call(map, x, phi, where); },
         [copy = Map(map), call](const input& x, output& phi, tile_position where) { call(copy, x, phi, where); }});
  };
  const auto add_tile_vjp = [&]<role Role>(std::integral_constant<role, Role>) {
    if constexpr (has_vjp_for<Role, Map, T>) {
      result.forms.back().vjp = [&map](const input& x, const input& phi, const input& dphi, output& dx,
                                       tile_position where) {
        call_vjp<Role, Map, T>(map, x, phi, dphi, dx, where, nullptr);
      };
    }
  };
  constexpr std::integral_constant<role, role::query> queries;
  constexpr std::integral_constant<role, role::key> keys;
  if constexpr (is_asymmetric<Map, T>) {
    add(result.forms, "forward_queries",
        [](const Map& m, const input& x, output& phi, [[maybe_unused]] tile_position where) {
          if constexpr (has_positional_queries<Map, T>) {
            m.forward_queries(x, phi, where);
          } else {
            m.forward_queries(x, phi);
          }
        });
    add_tile_vjp(queries);
    add(result.forms, "forward_keys",
        [](const Map& m, const input& x, output& phi, [[maybe_unused]] tile_position where) {
          if constexpr (has_positional_keys<Map, T>) {
            m.forward_keys(x, phi, where);
          } else {
            m.forward_keys(x, phi);
          }
        });
    add_tile_vjp(keys);
  } else {
    add(result.forms, "forward", [](const Map& m, const input& x, output& phi, [[maybe_unused]] tile_position where) {
      if constexpr (has_positional_forward<Map, T>) {
        m.forward(x, phi, where);
      } else {
        m.forward(x, phi);
      }
    });
    add_tile_vjp(keys);
  }
  if constexpr (has_packet<Map, T>) {
    add(result.fused, "packet",
        [](const Map& m, const input& x, output& phi, tile_position) { elementwise_forward(m, x, phi); });
    if constexpr (has_vjp_packet<Map, T>) {
      result.fused.back().vjp = [&map](const input& x, const input& phi, const input& dphi, output& dx, tile_position) {
        elementwise_vjp(map, x, phi, dphi, dx);
      };
    }
  }
  return result;
}

}  // namespace detail
LINATTN_NAMESPACE_END
