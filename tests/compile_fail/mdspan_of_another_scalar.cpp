// expect: the mdspan holds another scalar type than the operator
#include <linattn/linattn.hpp>

#include <cstddef>

namespace two_scalars {
template <class T>
struct span_of_scalars {
  using element_type = T;
  T* data;
  static constexpr std::size_t rank() { return 2; }
  T* data_handle() const { return data; }
  std::size_t extent(std::size_t) const { return 4; }
  std::size_t stride(std::size_t d) const { return d == 0 ? 4 : 1; }
};
}  // namespace two_scalars

void mdspan_of_another_scalar(const linattn::linear_attention<linattn::elu_plus_one>& attention,
                              two_scalars::span_of_scalars<double> doubles,
                              two_scalars::span_of_scalars<float> floats) {
#ifdef LINATTN_MUST_FAIL
  attention.forward(doubles, floats, floats);
#else
  static_cast<void>(doubles);
  attention.forward(floats, floats, floats);
#endif
}
