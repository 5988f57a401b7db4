// expect: the feature map has no `vjp` (an elementwise one: no `vjp_packet`)
#include <linattn/linattn.hpp>

namespace {
struct without_vjp {
  static constexpr Eigen::Index dimension(Eigen::Index head_dim) { return head_dim; }
  template <class T>
  void forward(const linattn::const_tile<T>& x, linattn::tile<T>& phi) const {
    phi = x.cwiseAbs();
  }
#ifndef LINATTN_MUST_FAIL
  template <class T>
  void vjp(const linattn::const_tile<T>& x, const linattn::const_tile<T>&, const linattn::const_tile<T>& dphi,
           linattn::tile<T>& dx) const {
    dx = x.cwiseSign().cwiseProduct(dphi);
  }
#endif
};
}  // namespace

void feature_map_without_vjp() {
  const linattn::linear_attention<without_vjp> attention({.head_dim = 4});
  const linattn::row_matrix<float> x(3, 4);
  attention.forward_causal(x, x, x);
  attention.vjp_causal(x, x, x, x);
}
