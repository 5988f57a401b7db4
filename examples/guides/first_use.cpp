#include <linattn/linattn.hpp>

#include <iostream>

int main() {
  using matrix = linattn::row_matrix<float>;  // row-major, one token per row, heads side by side
  const linattn::linear_attention<linattn::elu_plus_one> attn({.head_dim = 4, .heads = 2});

  const matrix x = matrix::Random(6, 8);          // 6 tokens, 2 heads of 4
  const matrix y = attn.forward_causal(x, x, x);  // the whole sequence at once

  linattn::row_vector<float> y_t(8);  // or token by token: after these three lines nothing allocates
  auto s = attn.make_state();
  auto ws = attn.make_workspace();
  for (Eigen::Index t = 0; t < 6; ++t) attn.step(s, x.row(t), x.row(t), x.row(t), y_t, ws);

  std::cout.precision(3);
  std::cout << "last row, both ways:\n" << y.row(5) << "\n" << y_t << "\n";
  return y.row(5).isApprox(y_t, 1e-5f) ? 0 : 1;
}
