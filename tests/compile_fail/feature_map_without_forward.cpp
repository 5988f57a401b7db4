// expect: the feature map has no `void forward(linattn::const_tile<T> x, linattn::tile<T> phi) const`
#include <linattn/linattn.hpp>

namespace {
struct without_forward {
  static constexpr Eigen::Index dimension(Eigen::Index head_dim) { return head_dim; }
#ifndef LINATTN_MUST_FAIL
  template <class T>
  void forward(const linattn::const_tile<T>& x, linattn::tile<T>& phi) const {
    phi = x.cwiseAbs();
  }
#endif
};
}  // namespace

void feature_map_without_forward() { linattn::linear_attention<without_forward> attention({.head_dim = 4}); }
