// expect: this matrix is column-major, but a token must be one contiguous row
#include <linattn/linattn.hpp>

void column_major_input(const linattn::linear_attention<linattn::elu_plus_one>& attention) {
#ifdef LINATTN_MUST_FAIL
  using matrix = Eigen::MatrixXf;
#else
  using matrix = linattn::row_matrix<float>;
#endif
  const matrix q = matrix::Ones(3, 4);
  attention.forward_causal(q, q, q);
}
