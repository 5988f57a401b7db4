#include <linattn/check_feature_map.hpp>
#include <linattn/linattn.hpp>

#include <iostream>

struct leaky_square {  // phi(x) = x^2 for x > 0, x^2 / 100 below: a function of one coordinate
  static constexpr Eigen::Index dimension(Eigen::Index head_dim) { return head_dim; }  // C, from D

  template <class Packet>  // a register of coordinates
  Packet packet(const Packet& x) const {
    const Packet y = max(x, x * Packet(-0.1f));
    return y * y;
  }
  template <class Packet>  // for gradients: the derivative times dphi; may be left out
  Packet vjp_packet(const Packet& x, const Packet& /*phi*/, const Packet& dphi) const {
    return Packet(2.0f) * max(x, x * Packet(0.01f)) * dphi;
  }
  template <class T>
  void forward(const linattn::const_tile<T>& x, linattn::tile<T>& phi) const {
    linattn::elementwise_forward(*this, x, phi);
  }
};

struct two_sided {  // phi(x) = (max(x, 0), max(-x, 0)): what is not a function of one coordinate for one feature
  static constexpr Eigen::Index dimension(Eigen::Index head_dim) { return 2 * head_dim; }

  template <class T>
  void forward(const linattn::const_tile<T>& x, linattn::tile<T>& phi) const {  // phi (R, C) from x (R, D)
    phi.leftCols(x.cols()) = (x.cwiseAbs() + x) / T(2);
    phi.rightCols(x.cols()) = (x.cwiseAbs() - x) / T(2);
  }
  template <class T>  // for gradients: dx (R, D) from dphi (R, C); may be left out
  void vjp(const linattn::const_tile<T>& x, const linattn::const_tile<T>& /*phi*/, const linattn::const_tile<T>& dphi,
           linattn::tile<T>& dx) const {
    dx = (x.array() > T(0)).select(dphi.leftCols(x.cols()), -dphi.rightCols(x.cols()));
  }
};

template <class Map>
bool works(const Map& map) {
  const auto report = linattn::check_feature_map<float>(map, 64);
  for (const auto& problem : report.problems) std::cout << problem << "\n";
  std::cout << report.features << " features; denominators that are not positive: " << report.non_positive
            << (report.gradient_checked ? "; gradient compared with differences\n" : "; gradient not checked\n");

  using matrix = linattn::row_matrix<float>;
  const matrix q = matrix::Random(100, 64), k = matrix::Random(100, 64), v = matrix::Random(100, 64);
  const linattn::linear_attention<Map> attn({.head_dim = 64}, map);
  const matrix out = attn.forward_causal(q, k, v);
  const auto pairs = linattn::kernel_attention<double>(map, q, k, v, {.causal = true});  // every i with every j <= i
  const double error = (out.cast<double>() - pairs).norm() / pairs.norm();
  std::cout << "the operator against all pairs of tokens: " << (error < 1e-5 ? "equal" : "DIFFERENT") << "\n";
  return report.passed && error < 1e-5;
}

int main() { return works(leaky_square()) && works(two_sided()) ? 0 : 1; }
