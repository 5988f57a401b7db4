// expect: drafts are not built for feature maps that are kept as logarithms
#include <linattn/linattn.hpp>

void draft_of_log_features() {
#ifdef LINATTN_MUST_FAIL
  using map = linattn::exponential;
#else
  using map = linattn::elu_plus_one;
#endif
  const linattn::linear_attention<map> attention({.head_dim = 4});
  const linattn::row_matrix<float> x(3, 4);
  linattn::row_matrix<float> out(3, 4);
  const auto s = attention.make_state();
  auto draft = attention.make_draft();
  auto ws = attention.make_workspace();
  attention.forward_causal(s, x, x, x, out, draft, ws);
}
