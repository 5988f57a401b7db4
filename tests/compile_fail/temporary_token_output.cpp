// expect: this output is a temporary vector that would be lost; pass a named vector
#include <linattn/matrix_view.hpp>

linattn::vector_view<float> temporary_token_output(Eigen::VectorXf& out) {
#ifdef LINATTN_MUST_FAIL
  (void)out;
  return Eigen::VectorXf(4);
#else
  return out;
#endif
}
