// expect: the gradient of this update rule is not built; additive, decay, gated, delta and gated_delta have one
#include <linattn/linattn.hpp>

void gradient_of_gated_bonus() {
#ifdef LINATTN_MUST_FAIL
  using rule = linattn::gated_bonus;
#else
  using rule = linattn::gated<linattn::decay_kind::per_feature>;
#endif
  const linattn::linear_attention<linattn::identity, rule> attention({.head_dim = 4});
  const linattn::row_matrix<float> x(3, 4);
#ifdef LINATTN_MUST_FAIL
  attention.vjp_causal(x, x, x, {.log_decay = x, .bonus = x}, x);
#else
  attention.vjp_causal(x, x, x, {.log_decay = x}, x);
#endif
}
