// expect: to save and load states the map needs a `static constexpr const char* name`
#include <linattn/linear_attention.hpp>
#include <linattn/state_io.hpp>

namespace {

struct absolute_value {
#ifndef LINATTN_MUST_FAIL
  static constexpr const char* name = "absolute_value";
#endif
  static constexpr Eigen::Index dimension(Eigen::Index head_dim) noexcept { return head_dim; }
  template <class T>
  void forward(const linattn::const_tile<T>& x, linattn::tile<T>& phi) const {
    phi = x.cwiseAbs();
  }
};

}  // namespace

Eigen::Index save_of_a_map_without_name() {
  const linattn::linear_attention<absolute_value> attention({.head_dim = 4});
  return linattn::saved_bytes(attention);
}
