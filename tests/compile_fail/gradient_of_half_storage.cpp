// expect: gradients are not built for half and bfloat16
#include <linattn/linattn.hpp>

void gradient_of_half_storage() {
#ifdef LINATTN_MUST_FAIL
  using scalar = Eigen::bfloat16;
#else
  using scalar = float;
#endif
  const linattn::linear_attention<linattn::elu_plus_one, linattn::additive, scalar> attention({.head_dim = 4});
  const linattn::row_matrix<Eigen::bfloat16> x(3, 4);
  const linattn::row_matrix<scalar> y = x.cast<scalar>();
  attention.vjp_causal(y, y, y, y);
}
