// expect: Scalar must be float, double, Eigen::half or Eigen::bfloat16
#include <linattn/linattn.hpp>

void integer_scalar() {
#ifdef LINATTN_MUST_FAIL
  using scalar = int;
#else
  using scalar = float;
#endif
  linattn::linear_attention<linattn::elu_plus_one, linattn::additive, scalar> attention({.head_dim = 4});
}
