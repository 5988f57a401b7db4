#include <linattn/linattn.hpp>

// With a positive map and v = 1 every output is 1, whatever q and k are.
int main() {
  using matrix = linattn::row_matrix<float>;
  const linattn::linear_attention<linattn::elu_plus_one> attention({.head_dim = 4, .heads = 2});
  const matrix q = matrix::Constant(3, 8, 0.5F);
  const matrix k = matrix::Constant(3, 8, -0.5F);
  const matrix out = attention.forward_causal(q, k, matrix::Ones(3, 8).eval());
  return out.isOnes(1e-6F) ? 0 : 1;
}
