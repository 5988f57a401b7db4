// The oracles of the update rules against each other and against numbers of independent implementations.
#include "support/compare.hpp"
#include "support/rule_inputs.hpp"
#include "support/rule_matrix_oracle.hpp"
#include "support/rule_oracle.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <string>
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

}  // namespace
