// expect: to save and load states it needs `std::uint64_t fingerprint() const`
#include <linattn/linear_attention.hpp>
#include <linattn/state_io.hpp>

#include <bit>
#include <cstdint>
#include <sstream>

namespace {

struct scaled_identity {
  static constexpr const char* name = "scaled_identity";
  float scale = 1;
#ifndef LINATTN_MUST_FAIL
  std::uint64_t fingerprint() const { return std::bit_cast<std::uint32_t>(scale); }
#endif
  static constexpr Eigen::Index dimension(Eigen::Index head_dim) noexcept { return head_dim; }
  template <class T>
  void forward(const linattn::const_tile<T>& x, linattn::tile<T>& phi) const {
    phi = T(scale) * x;
  }
};

}  // namespace

void save_of_a_map_with_parameters() {
  const linattn::linear_attention<scaled_identity> attention({.head_dim = 4});
  std::ostringstream stream;
  linattn::save(attention, attention.make_state(), stream);
}
