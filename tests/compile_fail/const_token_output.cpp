// expect: this output is const; pass a mutable vector, row or Map
#include <linattn/matrix_view.hpp>

linattn::vector_view<float> const_token_output(const Eigen::VectorXf& fixed, Eigen::VectorXf& out) {
#ifdef LINATTN_MUST_FAIL
  (void)out;
  return fixed;
#else
  (void)fixed;
  return out;
#endif
}
