// expect: states of a delta rule cannot be merged, because what the later tokens take back depends on the earlier state
#include <linattn/linattn.hpp>
#include <linattn/update_rules/delta.hpp>

void merge_of_delta_states(const linattn::linear_attention<linattn::identity, linattn::delta>& attention,
                           const linattn::row_matrix<float>& k, const linattn::row_matrix<float>& beta) {
  auto state = attention.make_state();
#ifdef LINATTN_MUST_FAIL
  const auto later = attention.make_state();
  state.merge(later);
#endif
  attention.absorb(state, k, k, {.beta = beta});
}
