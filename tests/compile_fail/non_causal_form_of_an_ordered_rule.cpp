// expect: forward, which lets every query see every key, is not defined for a rule in which the order of the tokens
#include <linattn/linattn.hpp>
#include <linattn/update_rules/decay.hpp>

void non_causal_form_of_an_ordered_rule(const linattn::linear_attention<linattn::identity, linattn::decay>& attention,
                                        const linattn::row_matrix<float>& q) {
#ifdef LINATTN_MUST_FAIL
  attention.forward(q, q, q);
#else
  attention.forward_causal(q, q, q);
#endif
}
