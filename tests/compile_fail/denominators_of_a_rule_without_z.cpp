// expect: this update rule keeps no sum of keys z, so it has no denominators
#include <linattn/linattn.hpp>
#include <linattn/update_rules/decay.hpp>

void denominators_of_a_rule_without_z(const linattn::linear_attention<linattn::identity, linattn::decay>& attention,
                                      const linattn::row_matrix<float>& q, linattn::row_matrix<float>& out,
                                      linattn::row_matrix<float>& denominators) {
  const auto state = attention.make_state();
  auto workspace = attention.make_workspace();
#ifdef LINATTN_MUST_FAIL
  attention.read(state, q, out, workspace, denominators);
#else
  attention.read(state, q, out, workspace);
  static_cast<void>(denominators);
#endif
}
