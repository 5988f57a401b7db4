// Feature maps for the gradient tests: every shipped map behind one type, and the kinds that the library does not ship.
#pragma once

#include <linattn/feature_map.hpp>

#include <Eigen/Core>
#include <cmath>
#include <functional>

namespace support {

using linattn::const_tile;
using linattn::tile;

/// Any map with forward and vjp in double, so that the operator is compiled once for all of them.
class any_map {
 public:
  using scalar = double;

  template <class Map>
  any_map(const Map& map, Eigen::Index head_dim)
      : m_dimension(map.dimension(head_dim)),
        m_forward([map](const const_tile<double>& x, tile<double>& phi) { map.forward(x, phi); }),
        m_vjp([map](const const_tile<double>& x, const const_tile<double>& phi, const const_tile<double>& dphi,
                    tile<double>& dx) {
          if constexpr (linattn::detail::has_vjp_packet<Map, double>) {
            linattn::elementwise_vjp(map, x, phi, dphi, dx);
          } else {
            map.vjp(x, phi, dphi, dx);
          }
        }) {}

  Eigen::Index dimension(Eigen::Index) const { return m_dimension; }
  void forward(const const_tile<double>& x, tile<double>& phi) const { m_forward(x, phi); }
  void vjp(const const_tile<double>& x, const const_tile<double>& phi, const const_tile<double>& dphi,
           tile<double>& dx) const {
    m_vjp(x, phi, dphi, dx);
  }

 private:
  Eigen::Index m_dimension;
  std::function<void(const const_tile<double>&, tile<double>&)> m_forward;
  std::function<void(const const_tile<double>&, const const_tile<double>&, const const_tile<double>&, tile<double>&)>
      m_vjp;
};

/// The same for maps that write log phi.
struct any_log_map : any_map {
  static constexpr bool log_features = true;
  using any_map::any_map;
};

/// phi(x) = relu(W x + b): a map with parameters.
struct learned_map {
  using scalar = double;
  struct gradient {
    Eigen::MatrixXd W;     // (C, D)
    Eigen::RowVectorXd b;  // (C)
  };

  Eigen::MatrixXd W;
  Eigen::RowVectorXd b;

  Eigen::Index dimension(Eigen::Index) const { return W.rows(); }
  Eigen::Index head_dim() const { return W.cols(); }
  gradient make_gradient() const {
    return {Eigen::MatrixXd::Zero(W.rows(), W.cols()), Eigen::RowVectorXd::Zero(b.size())};
  }
  void forward(const const_tile<double>& x, tile<double>& phi) const {
    phi = ((x * W.transpose()).rowwise() + b).cwiseMax(0);
  }
  void vjp(const const_tile<double>& x, const const_tile<double>& phi, const const_tile<double>& dphi, tile<double>& dx,
           gradient* g) const {
    const Eigen::MatrixXd du = (phi.array() > 0).select(dphi, 0);  // (R, C)
    dx = du * W;
    if (g == nullptr) return;
    g->W += du.transpose() * x;
    g->b += du.colwise().sum();
  }
};

/// Queries and keys through different maps, each of which knows its token's position and head.
struct turning_map {
  static constexpr Eigen::Index dimension(Eigen::Index head_dim) { return head_dim; }

  void forward_queries(const const_tile<double>& x, tile<double>& phi, linattn::tile_position where) const {
    for (Eigen::Index r = 0; r < x.rows(); ++r) phi.row(r) = factor(where, r) * x.row(r).array().exp();
  }
  void forward_keys(const const_tile<double>& x, tile<double>& phi, linattn::tile_position where) const {
    for (Eigen::Index r = 0; r < x.rows(); ++r) phi.row(r) = factor(where, r) * (x.row(r).array().square() + 0.1);
  }
  void vjp_queries(const const_tile<double>&, const const_tile<double>& phi, const const_tile<double>& dphi,
                   tile<double>& dx, linattn::tile_position) const {
    dx = phi.cwiseProduct(dphi);
  }
  void vjp_keys(const const_tile<double>& x, const const_tile<double>&, const const_tile<double>& dphi,
                tile<double>& dx, linattn::tile_position where) const {
    for (Eigen::Index r = 0; r < x.rows(); ++r) {
      dx.row(r) = 2 * factor(where, r) * x.row(r).array() * dphi.row(r).array();
    }
  }

 private:
  static double factor(const linattn::tile_position& where, Eigen::Index r) {
    return 1.5 + std::sin(static_cast<double>(where.first_position + r + 3 * where.head));
  }
};

}  // namespace support
