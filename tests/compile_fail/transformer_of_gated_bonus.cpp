// expect: a transformer projects log_decay and beta, not the inputs of gated_bonus or generalized_delta
#include <linattn/linattn.hpp>
#include <linattn/transformer.hpp>

void transformer_of_gated_bonus(const linattn::transformer_weights<float>& weights) {
#ifdef LINATTN_MUST_FAIL
  using rule = linattn::gated_bonus;
#else
  using rule = linattn::gated<linattn::decay_kind::per_feature>;
#endif
  using attention = linattn::linear_attention<linattn::identity, rule>;
  const linattn::transformer<attention> model({}, weights, attention({.head_dim = 4}));
}
