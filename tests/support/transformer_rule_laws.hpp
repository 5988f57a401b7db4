// What a transformer over a rule with inputs must do, for any of them: the equations, and itself in every other way of
// running it. One program for two or three rules: each is an operator to compile.
#pragma once

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/rule_for.hpp"
#include "support/transformer_inputs.hpp"
#include "support/transformer_oracle.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

namespace support {

/// Two layers of F = 17, D = 5, M = 4; the coordinates are the features. Query heads may share.
template <class Rule>
struct rule_transformer {
  using attention = linattn::linear_attention<linattn::identity, Rule, double>;
  using model_type = linattn::transformer<attention>;
  using state_type = typename model_type::state_type;
  using matrix = linattn::row_matrix<double>;
  static constexpr Eigen::Index D = 5, M = 4, N = 40, symbols = 11;
  static constexpr rule_kind kind = rule_kind_of<Rule>();
  /// Layers pass on the roundings of what they are given; rules with decay and delta have more than the additive one.
  static constexpr double composition = 10 * tolerance<double>::relative_rms;

  oracle_heads heads;
  linattn::transformer_options options = {.wiring = linattn::wiring::pre_norm,
                                          .activation = linattn::activation::gelu,
                                          .positions = linattn::position_encoding::sinusoid_added};
  linattn::transformer_weights<double> weights = random_transformer<double>(sizes(), 5);
  model_type model{options, weights,
                   attention({.head_dim = D,
                              .value_dim = M,
                              .heads = heads.queries,
                              .key_heads = heads.keys,
                              .value_heads = heads.values})};
  std::vector<Eigen::Index> x = random_symbols(N, symbols, 6);
  wide_matrix expected = transformer_oracle(options, weights, rows_of(weights, std::span<const Eigen::Index>(x)),
                                            rule_attention_oracle(kind, heads));

  explicit rule_transformer(const oracle_heads& shared = {3, 3, 3}) : heads(shared) {}

  linattn::transformer_sizes sizes() const {
    const rule_traits traits = traits_of(kind);
    using shape = rule_traits::decay_shape;
    return {.layers = 2,
            .width = 17,
            .query_width = heads.queries * D,
            .key_width = heads.keys * D,
            .value_width = heads.values * M,
            .output_width = heads.outputs() * M,
            .feed_forward = 33,
            .symbols = symbols,
            .outputs = 9,
            .log_decays = traits.decay == shape::per_feature ? heads.values * D
                          : traits.decay == shape::per_head  ? heads.values
                                                             : 0,
            .betas = traits.corrects ? heads.values : 0,
            .final_norm = true};
  }

  std::span<const Eigen::Index> part(Eigen::Index first, Eigen::Index n) const {
    return std::span<const Eigen::Index>(x).subspan(std::size_t(first), std::size_t(n));
  }
};

template <class Rule>
class TransformerOfRule : public testing::Test {};
TYPED_TEST_SUITE_P(TransformerOfRule);

TYPED_TEST_P(TransformerOfRule, IsItsEquations) {
  using subject = rule_transformer<TypeParam>;
  for (const oracle_heads& heads : {oracle_heads{3, 3, 3}, {4, 2, 2}, {2, 2, 4}}) {
    const subject m(heads);
    EXPECT_TRUE(close(m.model.forward_causal(m.part(0, m.N)), m.expected, m.composition)) << heads.queries << " heads";
    auto s = m.model.make_state();
    auto ws = m.model.make_workspace();
    typename subject::matrix y(m.N, m.model.outputs());
    for (Eigen::Index t = 0; t < m.N; ++t) m.model.step(s, m.x[std::size_t(t)], y.row(t), ws);
    EXPECT_TRUE(close(y, m.expected, m.composition)) << heads.queries << " heads";
    EXPECT_EQ(s.tokens(), m.N);
  }
}

TYPED_TEST_P(TransformerOfRule, PrefillThenSteps) {
  using subject = rule_transformer<TypeParam>;
  const subject m;
  for (const Eigen::Index rows : {1, 7, 64}) {
    for (const Eigen::Index prompt : {1, 13, 39}) {
      auto s = m.model.make_state();
      auto ws = m.model.make_workspace(rows);
      typename subject::matrix y(m.N, m.model.outputs());
      m.model.forward_causal(s, m.part(0, prompt), y.topRows(prompt), ws);
      for (Eigen::Index t = prompt; t < m.N; ++t) m.model.step(s, m.x[std::size_t(t)], y.row(t), ws);
      EXPECT_TRUE(close(y, m.expected, m.composition)) << rows << " rows, " << prompt << " tokens";
    }
  }
}

// Rows without keys have gates of their own, which are those of tokens that are not there.
TYPED_TEST_P(TransformerOfRule, PaddingIsSeenByNone) {
  using subject = rule_transformer<TypeParam>;
  const subject m;
  auto ws = m.model.make_workspace(64);
  for (const Eigen::Index keys : {0, 1, 13, 20}) {
    auto s = m.model.make_state(), alone = m.model.make_state();
    typename subject::matrix y(20, m.model.outputs()), of_keys(keys, m.model.outputs()), next(2, m.model.outputs());
    m.model.forward_causal(s, m.part(0, 20), y, ws, keys);
    m.model.forward_causal(alone, m.part(0, keys), of_keys, ws);
    EXPECT_TRUE(same_bits(y.topRows(keys), of_keys)) << keys;
    m.model.step(s, m.x[std::size_t(keys)], next.row(0), ws);
    m.model.step(alone, m.x[std::size_t(keys)], next.row(1), ws);
    EXPECT_TRUE(same_bits(next.row(0), next.row(1))) << keys;
    EXPECT_TRUE(close(next.row(0), m.expected.row(keys), m.composition)) << keys;
  }
}

TYPED_TEST_P(TransformerOfRule, ASequenceOfABatchIsAlone) {
  using subject = rule_transformer<TypeParam>;
  const subject m;
  auto ws = m.model.make_workspace(7);
  std::vector<typename subject::state_type> states;
  for (Eigen::Index b = 0; b < 7; ++b) {
    states.push_back(m.model.make_state());
    typename subject::matrix y(3 * b, m.model.outputs());
    m.model.forward_causal(states.back(), m.part(0, 3 * b), y, ws);
  }
  auto alone = states;
  for (Eigen::Index t = 0; t < 5; ++t) {
    std::vector<Eigen::Index> x_t;
    for (Eigen::Index b = 0; b < 7; ++b) x_t.push_back(m.x[std::size_t(3 * b + t)]);
    typename subject::matrix y(7, m.model.outputs()), y_alone = y;
    m.model.step(std::span(states), x_t, y, ws);
    for (std::size_t b = 0; b < 7; ++b) m.model.step(alone[b], x_t[b], y_alone.row(Eigen::Index(b)), ws);
    ASSERT_TRUE(same_bits(y, y_alone)) << t;
    for (Eigen::Index b = 0; b < 7; ++b) ASSERT_TRUE(close(y.row(b), m.expected.row(3 * b + t), m.composition));
  }
}

TYPED_TEST_P(TransformerOfRule, AllocatesNothing) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  using subject = rule_transformer<TypeParam>;
  const subject m;
  auto ws = m.model.make_workspace(7);
  std::vector<typename subject::state_type> states(7, m.model.make_state());
  auto s = m.model.make_state();
  typename subject::matrix y(m.N, m.model.outputs());
  for (int time = 0; time < 2; ++time) {  // a first call must not be a special one
    const allocation_count count;
    m.model.step(s, m.x[0], y.row(0), ws);
    m.model.step(std::span(states), m.part(0, 7), y.topRows(7), ws);
    m.model.forward_causal(s, m.part(0, m.N), y, ws);
    m.model.forward_causal(s, m.part(0, m.N), y.topRows(1), ws, 13);
    EXPECT_EQ(count.total(), 0);
  }
}

REGISTER_TYPED_TEST_SUITE_P(TransformerOfRule, IsItsEquations, PrefillThenSteps, PaddingIsSeenByNone,
                            ASequenceOfABatchIsAlone, AllocatesNothing);

}  // namespace support
