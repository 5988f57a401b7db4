// A feature map on its own: its features and its gradient of a whole matrix, through tiles such as the engine's.
#pragma once

#include <linattn/detail/guarded_tile.hpp>
#include <linattn/detail/registers.hpp>
#include <linattn/feature_map.hpp>

#include "support/inputs.hpp"

#include <gtest/gtest.h>
#include <Eigen/Core>

#include <utility>

namespace support {

using linattn::detail::role;

/// What the map writes for x (R, D), first row at `position`, with sentinels around the output: phi (R, C), or log phi.
template <role Role = role::query, class Map, class T>
row_matrix<T> written(const Map& map, const row_matrix<T>& x, Eigen::Index position = 0, Eigen::Index head = 0) {
  constexpr T sentinel = T(-4321);
  linattn::detail::guarded_tile<T> in(x.rows(), x.cols());
  linattn::detail::guarded_tile<T> out(x.rows(), map.dimension(x.cols()));
  in.view() = x;
  out.fill(sentinel);
  linattn::tile<T> phi = out.view();
  const linattn::const_tile<T> tile = std::as_const(in).view();
  const linattn::tile_position where{position, head};
  if constexpr (linattn::detail::has_positional_forward<Map, T>) {
    map.forward(tile, phi, where);
  } else if constexpr (linattn::detail::has_forward<Map, T>) {
    map.forward(tile, phi);
  } else if constexpr (Role == role::query) {
    map.forward_queries(tile, phi);
  } else {
    map.forward_keys(tile, phi);
  }
  EXPECT_TRUE(out.surrounded_by(sentinel));
  return phi;
}

/// phi (R, C), of the logarithms by the library's own exp where the map writes those.
template <role Role = role::query, class Map, class T>
row_matrix<T> features(const Map& map, const row_matrix<T>& x, Eigen::Index position = 0, Eigen::Index head = 0) {
  row_matrix<T> phi = written<Role>(map, x, position, head);
  if constexpr (linattn::detail::has_log_features<Map>) {
    linattn::detail::transform_in_place(phi.data(), phi.size(), [](const auto& packet) { return exp(packet); });
  }
  return phi;
}

/// dx (R, D) of the gradient (R, C) of what the map writes at x (R, D), in the same way; the gradient of parameters is
/// added to what is given for it.
template <role Role = role::query, class Map, class T>
row_matrix<T> gradient(const Map& map, const row_matrix<T>& x, const row_matrix<T>& dphi, Eigen::Index position = 0,
                       Eigen::Index head = 0, typename linattn::detail::gradient_of<Map>::type* parameters = nullptr) {
  constexpr T sentinel = T(-4321);
  linattn::detail::guarded_tile<T> in(x.rows(), x.cols());
  linattn::detail::guarded_tile<T> phi(x.rows(), dphi.cols());
  linattn::detail::guarded_tile<T> upstream(x.rows(), dphi.cols());
  linattn::detail::guarded_tile<T> out(x.rows(), x.cols());
  in.view() = x;
  phi.view() = written<Role>(map, x, position, head);
  upstream.view() = dphi;
  out.fill(sentinel);
  linattn::tile<T> dx = out.view();
  linattn::detail::call_vjp<Role>(map, std::as_const(in).view(), std::as_const(phi).view(),
                                  std::as_const(upstream).view(), dx, linattn::tile_position{position, head},
                                  parameters);
  EXPECT_TRUE(out.surrounded_by(sentinel));
  return dx;
}

/// The same in double by central differences: an error of h^2 / 6 times a third derivative, and of rounding / h.
template <role Role = role::query, class Map>
row_matrix<double> differences(const Map& map, const row_matrix<double>& x, const row_matrix<double>& dphi,
                               Eigen::Index position = 0, Eigen::Index head = 0) {
  constexpr double h = 1e-5;
  row_matrix<double> dx(x.rows(), x.cols());
  for (Eigen::Index d = 0; d < x.cols(); ++d) {
    row_matrix<double> above = x;
    row_matrix<double> below = x;
    above.col(d).array() += h;
    below.col(d).array() -= h;
    const row_matrix<double> change =
        written<Role>(map, above, position, head) - written<Role>(map, below, position, head);
    dx.col(d) = change.cwiseProduct(dphi).rowwise().sum() / (2 * h);
  }
  return dx;
}

}  // namespace support
