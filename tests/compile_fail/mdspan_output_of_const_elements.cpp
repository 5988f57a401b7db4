// expect: this output is an mdspan of const elements
#include <linattn/linattn.hpp>

#include <cstddef>

namespace {
template <class T>
struct span_of_elements {
  using element_type = T;
  T* data;
  static constexpr std::size_t rank() { return 2; }
  T* data_handle() const { return data; }
  std::size_t extent(std::size_t) const { return 4; }
  std::size_t stride(std::size_t d) const { return d == 0 ? 4 : 1; }
};
}  // namespace

void mdspan_output_of_const_elements(const linattn::linear_attention<linattn::elu_plus_one>& attention,
                                     const linattn::row_matrix<float>& q, float* data) {
  auto workspace = attention.make_workspace();
#ifdef LINATTN_MUST_FAIL
  const span_of_elements<const float> out{data};
#else
  const span_of_elements<float> out{data};
#endif
  attention.forward(q, q, q, out, workspace);
}
