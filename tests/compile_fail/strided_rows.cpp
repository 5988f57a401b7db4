// expect: the elements of a row are not contiguous here
#include <linattn/matrix_view.hpp>

linattn::matrix_view<const float> strided_rows(const float* data) {
#ifdef LINATTN_MUST_FAIL
  using stride = Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>;
  return Eigen::Map<const linattn::row_matrix<float>, Eigen::Unaligned, stride>(data, 3, 4, stride(8, 2));
#else
  using stride = Eigen::OuterStride<>;
  return Eigen::Map<const linattn::row_matrix<float>, Eigen::Unaligned, stride>(data, 3, 4, stride(8));
#endif
}
