// expect: the feature map has no `Eigen::Index dimension(Eigen::Index head_dim) const`
#include <linattn/linattn.hpp>

namespace {
struct without_dimension {
#ifndef LINATTN_MUST_FAIL
  static constexpr Eigen::Index dimension(Eigen::Index head_dim) { return head_dim; }
#endif
  template <class T>
  void forward(const linattn::const_tile<T>& x, linattn::tile<T>& phi) const {
    phi = x.cwiseAbs();
  }
};
}  // namespace

void feature_map_without_dimension() { linattn::linear_attention<without_dimension> attention({.head_dim = 4}); }
