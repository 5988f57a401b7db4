// expect: this update rule takes inputs beside q, k and v; write them behind v
#include <linattn/linattn.hpp>
#include <linattn/update_rules/gated.hpp>

void gated_step_without_inputs(const linattn::linear_attention<linattn::identity, linattn::gated<>>& attention,
                               const linattn::row_vector<float>& x, const linattn::row_vector<float>& log_decay,
                               linattn::row_vector<float>& out) {
  auto state = attention.make_state();
  auto workspace = attention.make_workspace();
#ifdef LINATTN_MUST_FAIL
  attention.step(state, x, x, x, out, workspace);
  static_cast<void>(log_decay);
#else
  attention.step(state, x, x, x, {.log_decay = log_decay}, out, workspace);
#endif
}
