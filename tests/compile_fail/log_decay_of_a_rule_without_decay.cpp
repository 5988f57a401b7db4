// expect: this update rule does not decay, so its state has no log_decay
#include <linattn/linattn.hpp>
#include <linattn/update_rules/delta.hpp>

using rule_of_log_decay_of_a_rule_without_decay =
#ifdef LINATTN_MUST_FAIL
    linattn::delta;
#else
    linattn::gated_delta<>;
#endif

float log_decay_of_a_rule_without_decay(
    const linattn::linear_attention<linattn::identity, rule_of_log_decay_of_a_rule_without_decay>& attention) {
  return attention.make_state().log_decay(0)[0];
}
