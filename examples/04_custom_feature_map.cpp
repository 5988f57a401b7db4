// 04_custom_feature_map: a feature map of your own, checked, and at work in the operator.
//
//     phi_c(x) = 1 + x_c + x_c^2 / 2,   C = D
//
// The start of exp's series, coordinate by coordinate: at least 1/2 everywhere, so that denominators cannot vanish, and
// it grows as x^2 where exp overflows. The contract is in linattn/feature_map.hpp.

#include <linattn/check_feature_map.hpp>
#include <linattn/linattn.hpp>
#include <linattn/reference.hpp>

#include <cmath>
#include <iostream>

struct quadratic {
  static constexpr Eigen::Index dimension(Eigen::Index head_dim) noexcept { return head_dim; }

  template <class Packet>  // one register of coordinates: the operator fuses this into its packing
  Packet packet(const Packet& x) const noexcept {
    return fma(fma(x, Packet(0.5F), Packet(1)), x, Packet(1));
  }
  template <class T>  // phi (R, C) from x (R, D), R tokens at once: whatever is not elementwise is written here
  void forward(const linattn::const_tile<T>& x, linattn::tile<T>& phi) const noexcept {
    linattn::elementwise_forward(*this, x, phi);
  }
};

struct careless : quadratic {  // clamped, and NaN becomes -1 on the way: max keeps the NaN of its first argument only
  template <class Packet>
  Packet packet(const Packet& x) const noexcept {
    return quadratic::packet(max(Packet(-1), x));
  }
  template <class T>
  void forward(const linattn::const_tile<T>& x, linattn::tile<T>& phi) const noexcept {
    linattn::elementwise_forward(*this, x, phi);
  }
};

template <class Map>
bool passes(const char* name, const Map& map) {
  const auto report = linattn::check_feature_map<float>(map, 16);
  std::cout << name << ": " << (report.passed ? "passed" : "failed") << ", " << report.features << " features\n";
  if (report.passed) {
    std::cout << "  " << report.non_positive << " of " << report.denominators << " random rows cannot be normalised\n";
  }
  for (const std::string& problem : report.problems) std::cout << "  " << problem << "\n";
  return report.passed;
}

int main() {
  const bool sound = passes("quadratic", quadratic());
  passes("careless", careless());

  using matrix = linattn::row_matrix<float>;
  constexpr Eigen::Index tokens = 300, heads = 2, head_dim = 16;
  matrix q(tokens, heads * head_dim), k(tokens, heads * head_dim), v(tokens, heads * head_dim);
  for (Eigen::Index i = 0; i < q.size(); ++i) {
    const float x = static_cast<float>(i);
    q.data()[i] = std::sin(0.37F * x);
    k.data()[i] = std::cos(1.7F * x);
    v.data()[i] = std::sin(0.011F * x);
  }
  const linattn::linear_attention<quadratic> attention({.head_dim = head_dim, .heads = heads});
  const matrix out = attention.forward_causal(q, k, v);

  // The same by pairs of tokens, in double: sim(q_i, k_j) = phi(q_i).phi(k_j), all N^2 / 2 of them.
  const auto expected = linattn::kernel_attention<double>(quadratic(), q, k, v, {.heads = heads, .causal = true});
  constexpr double tolerance = 1e-6;  // rounding of prefix sums in float
  const double error = (out.cast<double>() - expected).norm() / expected.norm();
  std::cout << "operator against all pairs of tokens: relative error " << error << "\n";
  return sound && error <= tolerance ? 0 : 1;
}
