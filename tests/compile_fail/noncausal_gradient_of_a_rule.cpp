// expect: vjp is the gradient of forward, which is not defined for a rule in which the order
#include <linattn/linattn.hpp>

void noncausal_gradient_of_a_rule() {
  const linattn::linear_attention<linattn::identity, linattn::decay> attention({.head_dim = 4}, {},
                                                                               linattn::decay({-0.1}));
  const linattn::row_matrix<float> x(3, 4);
#ifdef LINATTN_MUST_FAIL
  attention.vjp(x, x, x, x);
#else
  attention.vjp_causal(x, x, x, x);
#endif
}
