// expect: this is an unevaluated Eigen expression; store it first
#include <linattn/linattn.hpp>

void unevaluated_expression(const linattn::linear_attention<linattn::elu_plus_one>& attention,
                            const linattn::row_matrix<float>& q) {
#ifdef LINATTN_MUST_FAIL
  attention.forward_causal(2 * q, q, q);
#else
  const linattn::row_matrix<float> doubled = 2 * q;
  attention.forward_causal(doubled, q, q);
#endif
}
