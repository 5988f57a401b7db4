// expect: this update rule keeps no sum of keys z, so its state has no k_sum
#include <linattn/linattn.hpp>
#include <linattn/update_rules/gated.hpp>

float k_sum_of_a_rule_without_z(const linattn::linear_attention<linattn::identity, linattn::gated<>>& attention) {
  auto state = attention.make_state();
#ifdef LINATTN_MUST_FAIL
  return state.k_sum(0)[0];
#else
  return state.kv(0)(0, 0);
#endif
}
