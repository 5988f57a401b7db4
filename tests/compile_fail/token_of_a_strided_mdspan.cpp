// expect: the layout of this mdspan does not promise contiguous elements
#include <linattn/linattn.hpp>

#include <cstddef>

namespace {
template <bool Exhaustive>
struct span_of_a_token {
  using element_type = float;
  float* data;
  static constexpr std::size_t rank() { return 1; }
  static constexpr bool is_always_exhaustive() { return Exhaustive; }
  float* data_handle() const { return data; }
  std::size_t extent(std::size_t) const { return 4; }
};
}  // namespace

linattn::vector_view<float> token_of_a_strided_mdspan(float* data) {
#ifdef LINATTN_MUST_FAIL
  return span_of_a_token<false>{data};
#else
  return span_of_a_token<true>{data};
#endif
}
