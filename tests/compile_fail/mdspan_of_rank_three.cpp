// expect: a matrix is an mdspan of rank 2
#include <linattn/linattn.hpp>

#include <cstddef>

namespace {
template <std::size_t Rank>
struct span_of_rank {
  using element_type = float;
  float* data;
  static constexpr std::size_t rank() { return Rank; }
  float* data_handle() const { return data; }
  std::size_t extent(std::size_t) const { return 4; }
  std::size_t stride(std::size_t d) const { return d + 1 == Rank ? 1 : 4; }
};
}  // namespace

void mdspan_of_rank_three(const linattn::linear_attention<linattn::elu_plus_one>& attention, float* data) {
#ifdef LINATTN_MUST_FAIL
  const span_of_rank<3> q{data};
#else
  const span_of_rank<2> q{data};
#endif
  attention.forward(q, q, q);
}
