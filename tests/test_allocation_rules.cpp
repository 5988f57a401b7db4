// No verb of any update rule allocates after make_workspace and make_state.
#include "support/allocations.hpp"
#include "support/rule_inputs.hpp"
#include "support/rule_machine.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <span>

namespace {

using Eigen::Index;
using support::allocation_count;
using matrix = linattn::row_matrix<float>;
using tokens = support::rule_tokens<float>;
using views = support::rule_views<float>;

class RuleAllocation : public testing::TestWithParam<support::rule_subject<float>> {};
INSTANTIATE_TEST_SUITE_P(all, RuleAllocation, testing::ValuesIn(support::rule_subjects<float>()),
                         [](const testing::TestParamInfo<support::rule_subject<float>>& subject) {
                           return subject.param.name;
                         });

/// Every verb, twice: a first call must not be a special one.
TEST_P(RuleAllocation, None) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  // The last is far beyond the 128 KiB from which stack scratch of Eigen's would move to the heap.
  for (const support::rule_shape& shape :
       GetParam().of({{0, 3, 2, 2}, {1, 1, 1, 1}, {7, 5, 3, 2}, {70, 17, 9, 3}, {5, 512, 130, 2}})) {
    const tokens x(GetParam().kind, shape, 1);
    const auto m = GetParam().make(x), later = m->fork();
    matrix out(shape.tokens, shape.heads * shape.value_dim), out_t(1, shape.heads * shape.value_dim);
    const tokens of_token(GetParam().kind, {1, shape.features, shape.value_dim, shape.heads}, 2);
    const views all(x), one(of_token);
    const auto expect_none = [&](const char* what, const auto& call) {
      for (int time = 0; time < 2; ++time) {
        const allocation_count count;
        call();
        const long seen = count.total();
        EXPECT_EQ(seen, 0) << what << ", " << shape.features << " features";
      }
    };
    expect_none("forward_causal", [&] { m->forward_causal_alone(all, out); });
    expect_none("forward_causal with a state", [&] { m->forward_causal(all, out); });
    expect_none("absorb", [&] { m->absorb(all); });
    expect_none("read", [&] { m->read(all.q, out); });
    expect_none("step", [&] { m->step(one, linattn::vector_view<float>(out_t.row(0))); });
    expect_none("merge", [&] { m->merge(*later); });
    expect_none("reset", [&] { m->reset(); });
  }
}

// With all sizes in the type there is none from the very start.
TEST(RuleAllocationOfFixedSizes, None) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  constexpr Index n = 20, D = 16, M = 8, H = 2;
  const tokens x(support::rule_kind::gated_delta_per_feature, {n, D, M, H}, 3);
  matrix out(n, H * M);

  const allocation_count count;
  const linattn::linear_attention<linattn::identity, linattn::gated_delta<linattn::decay_kind::per_feature>, float, D,
                                  M, H>
      attn;
  auto ws = attn.make_workspace();
  auto s = attn.make_state();
  attn.forward_causal(s, x.q, x.k, x.v, {.log_decay = x.log_decay, .beta = x.beta}, out, ws);
  attn.absorb(s, x.k, x.v, {.log_decay = x.log_decay, .beta = x.beta});  // its own workspace lives on the stack
  attn.step(s, x.q.row(0), x.k.row(0), x.v.row(0), {.log_decay = x.log_decay.row(0), .beta = x.beta.row(0)}, out.row(0),
            ws);
  attn.step(std::span(&s, 1), x.q.topRows(1), x.k.topRows(1), x.v.topRows(1),
            {.log_decay = x.log_decay.topRows(1), .beta = x.beta.topRows(1)}, out.topRows(1), ws);
  auto fork = s;
  s = fork;
  s.log_decay(0);
  s.reset();
  const long seen = count.total();
  EXPECT_EQ(seen, 0);
}

}  // namespace
