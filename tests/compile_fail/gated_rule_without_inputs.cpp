// expect: this update rule takes inputs beside q, k and v; write them behind v
#include <linattn/linattn.hpp>
#include <linattn/update_rules/gated.hpp>

void gated_rule_without_inputs(const linattn::linear_attention<linattn::identity, linattn::gated<>>& attention,
                               const linattn::row_matrix<float>& q, const linattn::row_matrix<float>& log_decay) {
#ifdef LINATTN_MUST_FAIL
  attention.forward_causal(q, q, q);
  static_cast<void>(log_decay);
#else
  attention.forward_causal(q, q, q, {.log_decay = log_decay});
#endif
}
