// expect: the accessor of this mdspan does more than index memory
#include <linattn/linattn.hpp>

#include <cstddef>

namespace {
template <class Reference>
struct span_through_an_accessor {
  using element_type = float;
  using reference = Reference;
  float* data;
  static constexpr std::size_t rank() { return 2; }
  float* data_handle() const { return data; }
  std::size_t extent(std::size_t) const { return 4; }
  std::size_t stride(std::size_t d) const { return d == 0 ? 4 : 1; }
};
}  // namespace

void mdspan_with_an_accessor(const linattn::linear_attention<linattn::elu_plus_one>& attention, float* data) {
#ifdef LINATTN_MUST_FAIL
  const span_through_an_accessor<float> scaled{data};  // elements are computed when they are read
#else
  const span_through_an_accessor<float&> scaled{data};
#endif
  attention.forward(scaled, scaled, scaled);
}
