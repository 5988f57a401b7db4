// expect: segments are for the delta rules; states of this update rule merge
#include <linattn/linattn.hpp>

void segment_of_a_rule_that_merges() {
  const linattn::linear_attention<linattn::identity, linattn::gated<>> attention({.head_dim = 4});
#ifdef LINATTN_MUST_FAIL
  auto later = attention.make_segment();
#else
  auto later = attention.make_state();
#endif
  auto s = attention.make_state();
  s.merge(later);
}
