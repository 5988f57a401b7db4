// 01_hello: attention in time linear in the number of tokens, in one call.
//
//     out_i = sum_{j <= i} w_ij v_j,   w_ij = phi(q_i).phi(k_j) / sum_{j <= i} phi(q_i).phi(k_j)
//
// q, k and v are (N, H*D), out is (N, H*M): one row a token, head h in columns h*D ... (h + 1)*D - 1. Here N = 6
// tokens, H = 2 heads, D = M = 4.

#include <linattn/linattn.hpp>

#include <cmath>
#include <iostream>

int main() {
  using matrix = linattn::row_matrix<float>;  // Eigen, row-major
  constexpr Eigen::Index tokens = 6, heads = 2, head_dim = 4;

  matrix q(tokens, heads * head_dim), k(tokens, heads * head_dim), v(tokens, heads * head_dim);
  for (Eigen::Index i = 0; i < q.size(); ++i) {
    const float x = static_cast<float>(i);
    q.data()[i] = std::sin(x);
    k.data()[i] = std::cos(1.7F * x);
    v.data()[i] = std::floor(x / (heads * head_dim));  // the value of token i is i, everywhere
  }

  const linattn::linear_attention<linattn::elu_plus_one> attention({.head_dim = head_dim, .heads = heads});
  const matrix out = attention.forward_causal(q, k, v);  // (N, H*M)
  std::cout << out << "\n";

  // Token 0 sees itself alone; what follows are averages of 0 ... i, never outside.
  bool correct = out.row(0) == v.row(0);
  for (Eigen::Index i = 1; i < tokens; ++i) {
    correct = correct && (out.row(i).array() > 0 && out.row(i).array() < static_cast<float>(i)).all();
  }
  return correct ? 0 : 1;
}
