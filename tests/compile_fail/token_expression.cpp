// expect: this is an unevaluated Eigen expression; store it first, e.g. linattn::row_vector<float>
#include <linattn/matrix_view.hpp>

float token_expression(const linattn::row_vector<float>& q) {
#ifdef LINATTN_MUST_FAIL
  const linattn::vector_view<const float> token = 2 * q;
#else
  const linattn::row_vector<float> doubled = 2 * q;
  const linattn::vector_view<const float> token = doubled;
#endif
  return *token.data();
}
