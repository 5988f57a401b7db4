// The oracles of the update rules against each other and against numbers of independent implementations.
#include "support/compare.hpp"
#include "support/reference_data.hpp"
#include "support/rule_gradient_oracle.hpp"
#include "support/rule_inputs.hpp"
#include "support/rule_matrix_oracle.hpp"
#include "support/rule_oracle.hpp"
#include "support/rule_reference.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using Eigen::Index;
using support::rule_kind;
using support::rule_tokens;
using support::traits_of;
using support::wide_matrix;

/// Two ways to one number in long double: 6 epsilon at worst were seen over 40 tokens, in states that grow. A token
/// lost or a decay applied once too often moves the result by 1e-2 and more.
constexpr double same_in_long_double = 50 * double(std::numeric_limits<long double>::epsilon());

class RuleOracles : public testing::TestWithParam<rule_kind> {};

std::string rule_name(const testing::TestParamInfo<rule_kind>& rule) { return traits_of(rule.param).name; }
INSTANTIATE_TEST_SUITE_P(all, RuleOracles, testing::ValuesIn(support::all_rules), rule_name);

void expect_same(const support::rule_result& actual, const support::rule_result& expected, double bound) {
  EXPECT_TRUE(support::close(actual.out, expected.out, bound)) << "out";
  ASSERT_EQ(actual.state.size(), expected.state.size());
  for (std::size_t h = 0; h < actual.state.size(); ++h) {
    EXPECT_TRUE(support::close(actual.state[h], expected.state[h], bound)) << "S of head " << h;
  }
}

const support::rule_shape shapes[] = {{0, 3, 2, 2}, {1, 5, 3, 2}, {2, 1, 1, 1}, {17, 8, 3, 2}, {40, 7, 9, 1}};

TEST_P(RuleOracles, TokenLoopIsTheMatrixForm) {
  for (const support::gate_set& gates : support::gate_sets()) {
    for (const support::rule_shape& shape : shapes) {
      SCOPED_TRACE(gates.name + ", N = " + std::to_string(shape.tokens));
      rule_tokens<double> x(GetParam(), shape, 1, {.gates = gates});
      x.query_scale = 0.75;
      const auto initial = support::wide(support::rule_initial_state<double>(shape, 1));
      for (const support::rule_state* from : {static_cast<const support::rule_state*>(nullptr), &initial}) {
        expect_same(support::rule_oracle(GetParam(), x.wide(), from),
                    support::rule_matrix_oracle(GetParam(), x.wide(), from), same_in_long_double);
      }
    }
  }
}

TEST_P(RuleOracles, TokenLoopIsTheMatrixFormForAllKeysAndBetas) {
  const support::rule_shape shape = {33, 6, 5, 2};
  const auto initial = support::wide(support::rule_initial_state<double>(shape, 2));
  for (const auto keys : support::all_key_patterns) {
    for (const auto betas : support::all_beta_patterns) {
      SCOPED_TRACE("keys " + std::to_string(int(keys)) + ", betas " + std::to_string(int(betas)));
      const auto x = rule_tokens<float>(GetParam(), shape, 2, {.keys = keys, .betas = betas}).wide();
      expect_same(support::rule_oracle(GetParam(), x, &initial), support::rule_matrix_oracle(GetParam(), x, &initial),
                  same_in_long_double);
    }
  }
}

TEST_P(RuleOracles, SegmentsApplyToAnyStateAndCompose) {
  const support::rule_shape shape = {12, 4, 3, 2};
  const rule_tokens<double> x(GetParam(), shape, 10);
  const auto initial = support::wide(support::rule_initial_state<double>(shape, 10));
  const auto truth = support::rule_oracle(GetParam(), x.wide(), &initial).state;
  const auto all = support::rule_segment_oracle(GetParam(), x.wide());
  const auto first = support::rule_segment_oracle(GetParam(), x.rows(0, 7).wide());
  const auto second = support::rule_segment_oracle(GetParam(), x.rows(7, 5).wide());
  for (std::size_t h = 0; h < truth.size(); ++h) {
    EXPECT_TRUE(support::close(all.a[h] * initial[h] + all.x[h], truth[h], same_in_long_double));
    EXPECT_TRUE(support::close(second.a[h] * first.a[h], all.a[h], same_in_long_double));
    EXPECT_TRUE(support::close(second.a[h] * first.x[h] + second.x[h], all.x[h], same_in_long_double));
  }
}

TEST(RuleOracle, BonusMayBeOneForAllTokensOrOnePerToken) {
  const support::rule_shape shape = {9, 3, 2, 2};
  const auto one = rule_tokens<double>(rule_kind::gated_bonus, shape, 5).wide();
  auto many = one;
  many.bonus = one.bonus.replicate(shape.tokens, 1);
  expect_same(support::rule_oracle(rule_kind::gated_bonus, many), support::rule_oracle(rule_kind::gated_bonus, one), 0);
  many.bonus = support::normal_matrix<double>(shape.tokens, 6, 6).cast<long double>();
  expect_same(support::rule_oracle(rule_kind::gated_bonus, many),
              support::rule_matrix_oracle(rule_kind::gated_bonus, many), same_in_long_double);
}

TEST(RuleOracle, AdditiveOnFeaturesIsTheOracleOfAttentionUndivided) {
  const support::rule_shape shape = {19, 4, 3, 2};
  const support::oracle_map map = support::oracle_elu_plus_one();
  auto x = rule_tokens<double>(rule_kind::additive, shape, 6).wide();
  const auto truth = support::oracle_recurrent(
      map, x.q, x.k, x.v, {.heads = 2, .causal = true, .query_scale = 0.75L, .normalize = false, .denominator = {}});
  x.query_scale = 0.75L;
  support::apply(map, x);
  EXPECT_EQ(x.query_scale, 1);
  expect_same(support::rule_oracle(rule_kind::additive, x), {truth.out, truth.state.s}, same_in_long_double);
}

// A map's feature count, position and head reach it.
TEST(RuleOracle, ApplyTellsTheMapPositionAndHead) {
  const support::oracle_map map([](const support::wide_vector& v, Index position, Index head) {
    support::wide_vector phi(3);
    phi << v[0], 10 * position, head;
    return phi;
  });
  support::rule_inputs x{.heads = 2, .q = wide_matrix::Constant(2, 4, 7), .k = wide_matrix::Constant(2, 4, 5)};
  support::apply(map, x, 8);
  wide_matrix k(2, 6);
  k << 5, 80, 0, 5, 80, 1, 5, 90, 0, 5, 90, 1;
  EXPECT_EQ(x.k, k);
  EXPECT_EQ(x.q(1, 0), 7);
}

TEST(RuleOracle, LogDecayOfMinusInfinityIsAFactorOfZero) {
  LINATTN_NEEDS_NAN();
  constexpr long double infinity = std::numeric_limits<long double>::infinity();
  const support::rule_shape shape = {1, 2, 2, 1};
  auto x = rule_tokens<double>(rule_kind::gated_per_feature, shape, 7).wide();
  x.log_decay << -infinity, 0;
  const wide_matrix written = x.k.transpose() * x.v;
  support::rule_state initial = {wide_matrix::Constant(2, 2, 3)};
  auto s = support::rule_oracle(rule_kind::gated_per_feature, x, &initial).state[0];
  EXPECT_EQ(s.row(0), written.row(0));
  EXPECT_EQ(s.row(1), wide_matrix(written.row(1).array() + 3));
  initial[0](0, 1) = infinity;
  s = support::rule_oracle(rule_kind::gated_per_feature, x, &initial).state[0];
  EXPECT_EQ(s(0, 0), written(0, 0));
  EXPECT_TRUE(support::all_nan(s.block(0, 1, 1, 1)));
}

TEST(RuleOracle, RefusesInputsOfTheWrongShape) {
  const support::rule_shape shape = {4, 3, 2, 2};
  const auto good = rule_tokens<double>(rule_kind::gated_delta_per_head, shape, 8).wide();
  for (const auto member : {&support::rule_inputs::q, &support::rule_inputs::k, &support::rule_inputs::v,
                            &support::rule_inputs::log_decay, &support::rule_inputs::beta}) {
    auto x = good;
    x.*member = (good.*member).topRows(3);
    EXPECT_THROW(support::rule_oracle(rule_kind::gated_delta_per_head, x), std::invalid_argument);
  }
  EXPECT_THROW(support::rule_oracle(rule_kind::gated_per_feature, good), std::invalid_argument) << "gates per head";
}

// ---- independent implementations ------------------------------------------------------------------------------------

/// They computed in double, and gave their inputs exactly.
constexpr double in_double = support::tolerance<double>::relative_rms;
/// Or in float.
constexpr double in_float = support::tolerance<float>::relative_rms;

TEST(RuleReferences, TokenLoopAndMatrixFormGiveTheirNumbers) {
  for (const support::rule_reference& c : support::rule_references()) {
    SCOPED_TRACE(c.name);
    const auto loop = support::rule_oracle(c.kind, c.inputs, &c.initial);
    expect_same(loop, c.expected, in_double);
    expect_same(support::rule_matrix_oracle(c.kind, c.inputs, &c.initial), c.expected, in_double);
    if (c.peer_in_float) expect_same(loop, *c.peer_in_float, in_float);
  }
}

void expect_same(const support::rule_state& actual, const support::rule_state& expected, double bound) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t h = 0; h < actual.size(); ++h) {
    EXPECT_TRUE(support::close(actual[h], expected[h], bound)) << "of head " << h;
  }
}

TEST(RuleReferences, GradientsAreTheirs) {
  int seen = 0;
  for (const support::rule_reference& c : support::rule_references()) {
    if (!c.gradients) continue;
    SCOPED_TRACE(c.name);
    const auto d = support::rule_gradient_oracle(c.kind, c.inputs, c.gradients->dout, &c.gradients->dstate, &c.initial);
    const support::rule_gradients& e = c.gradients->expected;
    EXPECT_TRUE(support::close(d.dq, e.dq, in_double)) << "dq";
    EXPECT_TRUE(support::close(d.dk, e.dk, in_double)) << "dk";
    EXPECT_TRUE(support::close(d.dv, e.dv, in_double)) << "dv";
    EXPECT_TRUE(support::close(d.dlog_decay, e.dlog_decay, in_double)) << "dlog_decay";
    EXPECT_TRUE(support::close(d.dbeta, e.dbeta, in_double)) << "dbeta";
    EXPECT_TRUE(support::close(d.da, e.da, in_double)) << "da";
    EXPECT_TRUE(support::close(d.db, e.db, in_double)) << "db";
    expect_same(d.dinitial, e.dinitial, in_double);
    ++seen;
  }
  EXPECT_EQ(seen, 12);  // six cases of two batch elements
}

// The bonus is one for the batch: its gradient there is summed over it.
TEST(RuleReferences, GradientOfTheBonusIsTheirs) {
  wide_matrix sum;
  for (const support::rule_reference& c : support::rule_references()) {
    if (c.kind != rule_kind::gated_bonus) continue;
    const auto d = support::rule_gradient_oracle(c.kind, c.inputs, c.gradients->dout, &c.gradients->dstate, &c.initial);
    sum = sum.size() == 0 ? d.dbonus : wide_matrix(sum + d.dbonus);
  }
  EXPECT_TRUE(
      support::close(sum, support::reference_case::load("fla_rwkv6_02_grad").row<long double>("du"), in_double));
}

// ---- gradients ------------------------------------------------------------------------------------------------------

/// A central difference with step h is off by h^2 times third derivatives, and by rounding / h.
constexpr long double difference_step = 1e-6L;
/// h^2 = 1e-12 times what the third derivatives are more than the first; a term left out is 1e-2 and more.
constexpr double of_differences = 1e-10;
/// The same for gradients that are next to nothing, behind gates nearly shut: the loss is 1 to 1000, rounded to 1e-16
/// and divided by h.
constexpr double of_small_differences = 1e-10;

testing::AssertionResult is_difference(const wide_matrix& actual, const wide_matrix& difference) {
  if (actual.rows() != difference.rows() || actual.cols() != difference.cols()) {
    return testing::AssertionFailure() << support::detail::shapes(actual, difference);
  }
  if (auto finite = support::all_finite(actual - difference); !finite) return finite;
  const auto error = (actual - difference).norm();
  const auto allowed = of_differences * difference.norm() + of_small_differences;
  if (error <= allowed) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "off by " << error << ", allowed " << allowed;
}

struct gradient_problem {
  rule_kind kind;
  support::rule_inputs x;
  support::rule_state initial;
  wide_matrix dout;
  support::rule_state dstate;

  gradient_problem(rule_kind rule, const support::rule_shape& shape, const support::rule_patterns& patterns)
      : kind(rule),
        x(rule_tokens<double>(rule, shape, 3, patterns).wide()),
        initial(support::wide(support::rule_initial_state<double>(shape, 3))),
        dout(support::normal_matrix<double>(shape.tokens, shape.heads * shape.value_dim, 4).cast<long double>()),
        dstate(support::wide(support::rule_initial_state<double>(shape, 4))) {
    x.query_scale = 0.75;
  }

  long double loss() const {
    const auto result = support::rule_oracle(kind, x, &initial);
    long double sum = result.out.cwiseProduct(dout).sum();
    for (std::size_t h = 0; h < dstate.size(); ++h) sum += result.state[h].cwiseProduct(dstate[h]).sum();
    return sum;
  }

  /// d loss / d input, element by element.
  wide_matrix difference(wide_matrix& input) const {
    wide_matrix d(input.rows(), input.cols());
    for (Index i = 0; i < input.size(); ++i) {
      const long double at = input.data()[i];
      input.data()[i] = at + difference_step;
      const long double above = loss();
      input.data()[i] = at - difference_step;
      const long double below = loss();
      input.data()[i] = at;
      d.data()[i] = (above - below) / (2 * difference_step);
    }
    return d;
  }

  void check() {
    const auto d = support::rule_gradient_oracle(kind, x, dout, &dstate, &initial);
    EXPECT_TRUE(is_difference(d.dq, difference(x.q))) << "dq";
    EXPECT_TRUE(is_difference(d.dk, difference(x.k))) << "dk";
    EXPECT_TRUE(is_difference(d.dv, difference(x.v))) << "dv";
    EXPECT_TRUE(is_difference(d.dlog_decay, difference(x.log_decay))) << "dlog_decay";
    EXPECT_TRUE(is_difference(d.dbeta, difference(x.beta))) << "dbeta";
    EXPECT_TRUE(is_difference(d.da, difference(x.a))) << "da";
    EXPECT_TRUE(is_difference(d.db, difference(x.b))) << "db";
    EXPECT_TRUE(is_difference(d.dbonus, difference(x.bonus))) << "dbonus";
    for (std::size_t h = 0; h < initial.size(); ++h) {
      EXPECT_TRUE(is_difference(d.dinitial[h], difference(initial[h]))) << "dS_0 of head " << h;
    }
  }
};

TEST_P(RuleOracles, GradientIsTheCentralDifference) {
  for (const support::rule_shape& shape : {support::rule_shape{1, 2, 3, 1}, {6, 3, 2, 2}}) {
    for (const auto betas : {support::beta_pattern::up_to_two, support::beta_pattern::corners}) {
      for (const auto keys : support::all_key_patterns) {
        SCOPED_TRACE("N = " + std::to_string(shape.tokens) + ", keys " + std::to_string(int(keys)));
        gradient_problem(GetParam(), shape, {.keys = keys, .betas = betas}).check();
      }
    }
  }
}

TEST(RuleOracle, GradientOfABonusPerTokenIsTheCentralDifference) {
  gradient_problem problem(rule_kind::gated_bonus, {4, 2, 3, 2}, {});
  problem.x.bonus = support::normal_matrix<double>(4, 4, 9).cast<long double>();
  problem.check();
}

TEST_P(RuleOracles, GradientIsTheCentralDifferenceAtExtremeGates) {
  for (const support::gate_set& gates : support::gate_sets()) {
    SCOPED_TRACE(gates.name);
    gradient_problem(GetParam(), {5, 2, 3, 2}, {.gates = gates}).check();
  }
}

}  // namespace
