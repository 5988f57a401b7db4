// expect: one token is a vector, but this is a matrix; pass .row(i) of a row-major matrix
#include <linattn/matrix_view.hpp>

linattn::vector_view<const float> matrix_as_token(const linattn::row_matrix<float>& q) {
#ifdef LINATTN_MUST_FAIL
  return q;
#else
  return q.row(0);
#endif
}
