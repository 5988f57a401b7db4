// expect: the vector holds another scalar type than the operator
#include <linattn/matrix_view.hpp>

float token_of_another_scalar(const Eigen::VectorXd& q) {
#ifdef LINATTN_MUST_FAIL
  const linattn::vector_view<const float> token = q;
#else
  const Eigen::VectorXf converted = q.cast<float>();
  const linattn::vector_view<const float> token = converted;
#endif
  return *token.data();
}
