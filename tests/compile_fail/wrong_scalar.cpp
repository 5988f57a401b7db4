// expect: the matrix holds another scalar type than the operator
#include <linattn/linattn.hpp>

void wrong_scalar(const linattn::row_matrix<double>& q) {
#ifdef LINATTN_MUST_FAIL
  const linattn::linear_attention<linattn::elu_plus_one> attention({.head_dim = 4});
#else
  const linattn::linear_attention<linattn::elu_plus_one, linattn::additive, double> attention({.head_dim = 4});
#endif
  attention.forward(q, q, q);
}
