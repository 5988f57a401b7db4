// Update rules over features: what they say of k and q holds for phi(k) and phi(query_scale q).
#include <linattn/feature_maps/cosformer.hpp>
#include <linattn/feature_maps/elu_plus_one.hpp>

#include "support/compare.hpp"
#include "support/oracle.hpp"
#include "support/rule_inputs.hpp"
#include "support/rule_machine.hpp"
#include "support/rule_oracle.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <numbers>

namespace {

using Eigen::Index;
using matrix = linattn::row_matrix<float>;
using tokens = support::rule_tokens<float>;
using views = support::rule_views<float>;
using support::wide_vector;

constexpr Index N = 38, D = 5, M = 6, H = 2;
constexpr double query_scale = 0.75;
constexpr double rounding = support::tolerance<float>::relative_rms;
constexpr Index first_position = 3;

/// forward_causal in two calls, and step, from a state that begins at first_position.
template <class Map, class Rule>
void expect_recurrence(const Map& map, const support::oracle_map& oracle, const Rule& rule = {}) {
  const Index features = map.dimension(D);
  tokens x(support::rule_kind_of<Rule>(), {N, D, M, H}, 1);
  x.log_decay = tokens(x.kind, {N, features, M, H}, 2).log_decay;  // one for each feature, where there is one for each
  x.beta *= 0.0625F;                                               // features are longer than 1
  x.query_scale = query_scale;
  support::rule_inputs mapped = x.wide();
  support::apply(oracle, mapped, first_position);
  const support::rule_result truth = support::rule_oracle(x.kind, mapped);

  using attention = linattn::linear_attention<Map, Rule>;
  const attention attn({.head_dim = D, .value_dim = M, .heads = H, .query_scale = query_scale}, map, rule);
  const views in(x);
  const auto check = [&](const auto& call) {
    support::machine_of<attention> m(attn, first_position);
    matrix out = matrix::Zero(N, H * M);
    call(m, out);
    EXPECT_TRUE(support::close(out, truth.out, rounding));
    for (Index h = 0; h < H; ++h) EXPECT_TRUE(support::close(m.s(h), truth.state[std::size_t(h)], rounding));
  };
  check([&](auto& m, matrix& out) {
    m.forward_causal(in.rows(0, 13), out.topRows(13));
    m.forward_causal(in.rows(13, N - 13), out.bottomRows(N - 13));
  });
  check([&](auto& m, matrix& out) { m.fold(in, out); });
}

TEST(RulesOfFeatures, EluPlusOne) {
  using linattn::decay_kind;
  const linattn::elu_plus_one map;
  const support::oracle_map oracle = support::oracle_elu_plus_one();
  expect_recurrence<linattn::elu_plus_one, linattn::gated<decay_kind::per_head>>(map, oracle);
  expect_recurrence<linattn::elu_plus_one, linattn::gated<decay_kind::per_feature>>(map, oracle);
  expect_recurrence<linattn::elu_plus_one, linattn::gated_delta<decay_kind::per_head>>(map, oracle);
}

// More features than coordinates, and other ones at each position.
TEST(RulesOfFeatures, AMapThatKnowsPositions) {
  constexpr Index horizon = 64;
  const linattn::cosformer map(horizon);
  const support::oracle_map oracle([](const wide_vector& x, Index position, Index) {
    const long double angle = std::numbers::pi_v<long double> / 2 * static_cast<long double>(position) / horizon;
    wide_vector phi(2 * D);
    phi << x.cwiseMax(0) * std::cos(angle), x.cwiseMax(0) * std::sin(angle);
    return phi;
  });
  using linattn::decay_kind;
  expect_recurrence<linattn::cosformer, linattn::gated<decay_kind::per_head>>(map, oracle);
  expect_recurrence<linattn::cosformer, linattn::gated<decay_kind::per_feature>>(map, oracle);
  expect_recurrence<linattn::cosformer, linattn::gated_delta<decay_kind::per_feature>>(map, oracle);
}

}  // namespace
