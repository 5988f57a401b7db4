// expect: no engine for these traits: a rule that corrects, or reads before it writes, keeps no z
#include <linattn/linattn.hpp>

struct rule_of_traits_that_no_engine_serves {
  static constexpr linattn::rule_traits traits{.decay = linattn::decay_kind::per_feature,
                                               .normalizes = true,
#ifdef LINATTN_MUST_FAIL
                                               .reads_after_write = false
#endif
  };
  template <class View>
  struct inputs {
    View log_decay;
  };
};

void call_rule_of_traits_that_no_engine_serves(
    const linattn::linear_attention<linattn::identity, rule_of_traits_that_no_engine_serves>& attention,
    const linattn::row_matrix<float>& q) {
  attention.forward_causal(q, q, q, {.log_decay = q});
}
