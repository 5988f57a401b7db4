// The tools that update rules are tested with: seeded inputs are what they say, and the sizes that errors are judged by
// let rounding pass and nothing else.
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/rule_inputs.hpp"
#include "support/rule_oracle.hpp"
#include "support/rule_sizes.hpp"
#include "support/trial.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

using Eigen::Index;
using support::key_pattern;
using support::row_matrix;
using support::rule_kind;
using support::rule_tokens;
using support::traits_of;

const support::rule_shape shape = {33, 6, 5, 3};

// ---- inputs ---------------------------------------------------------------------------------------------------------

class RuleInputs : public testing::TestWithParam<rule_kind> {};

std::string rule_name(const testing::TestParamInfo<rule_kind>& rule) { return traits_of(rule.param).name; }
INSTANTIATE_TEST_SUITE_P(all, RuleInputs, testing::ValuesIn(support::all_rules), rule_name);

TEST_P(RuleInputs, SameSeedSameBitsAnotherSeedAllOther) {
  const rule_tokens<float> x(GetParam(), shape, 1), same(GetParam(), shape, 1), other(GetParam(), shape, 2);
  for (const auto member :
       {&rule_tokens<float>::q, &rule_tokens<float>::k, &rule_tokens<float>::v, &rule_tokens<float>::log_decay,
        &rule_tokens<float>::beta, &rule_tokens<float>::a, &rule_tokens<float>::b, &rule_tokens<float>::bonus}) {
    EXPECT_TRUE(support::bitwise_equal(x.*member, same.*member));
    EXPECT_EQ(((x.*member).array() == (other.*member).array()).count(), 0);
  }
}

// Keys of rules that correct are no longer than 1 and not much shorter: rounding to T shortens or lengthens by T's ulp.
TEST_P(RuleInputs, KeysOfRulesThatCorrectHaveLengthOne) {
  const bool unit = traits_of(GetParam()).corrects;
  const bool transforms = traits_of(GetParam()).transforms;
  const rule_tokens<float> x(GetParam(), shape, 3);
  constexpr double rounding = 4 * std::numeric_limits<float>::epsilon();
  for (Index t = 0; t < shape.tokens; ++t) {
    for (Index h = 0; h < shape.heads; ++h) {
      const auto norm = [&](const row_matrix<float>& rows) {
        return double(rows.row(t).segment(h * shape.features, shape.features).cast<double>().norm());
      };
      if (unit) {
        EXPECT_LE(norm(x.k), 1);
        EXPECT_GE(norm(x.k), 1 - rounding);
      }
      if (transforms) {
        EXPECT_LE(norm(x.a), 1);
        EXPECT_LE(norm(x.b), 1);
      }
    }
  }
}

TEST(RuleInputs, KeysRepeatAndVanishAsAsked) {
  const auto keys = [](key_pattern pattern) {
    return rule_tokens<float>(rule_kind::delta, shape, 4, {.keys = pattern}).k;
  };
  const auto repeated = keys(key_pattern::repeated), two = keys(key_pattern::two), zeros = keys(key_pattern::zeros);
  for (Index t = 0; t < shape.tokens; ++t) {
    EXPECT_EQ(repeated.row(t), repeated.row(0));
    EXPECT_EQ(two.row(t), two.row(t % 2));
    EXPECT_EQ(zeros.row(t).isZero(0), t % 3 == 1);
  }
  EXPECT_NE(two.row(0), two.row(1));
  EXPECT_NE(repeated.row(0).head(shape.features), repeated.row(0).segment(shape.features, shape.features));
}

TEST(RuleInputs, GatesAndBetasAreFromTheirSets) {
  for (const support::gate_set& gates : support::gate_sets()) {
    SCOPED_TRACE(gates.name);
    const rule_tokens<double> x(rule_kind::gated_delta_per_feature, {64, 4, 1, 2}, 5,
                                {.gates = gates, .betas = support::beta_pattern::corners});
    EXPECT_TRUE((x.log_decay.array() <= 0).all());
    EXPECT_TRUE((x.beta.array() == 0 || x.beta.array() == 1 || x.beta.array() == 2).all());
    for (const double value : gates.values) EXPECT_TRUE((x.log_decay.array() == value).any()) << value;
    for (Index t = 0; gates.in_turn && t < 64; ++t) {
      EXPECT_TRUE((x.log_decay.row(t).array() == gates.values[std::size_t(t) % gates.values.size()]).all());
    }
  }
}

TEST_P(RuleInputs, APaddedTokenLeavesTheStateAndIsAsGoodAsNone) {
  if (traits_of(GetParam()).decay == support::rule_traits::decay_shape::fixed) return;  // decays at every token
  rule_tokens<float> x(GetParam(), shape, 6);
  std::vector<bool> kept(std::size_t(shape.tokens), true);
  for (const Index t : {Index(0), Index(7), Index(8), shape.tokens - 1}) {
    x.pad(t);
    kept[std::size_t(t)] = false;
  }
  const auto without = x.where(kept);
  EXPECT_EQ(without.shape.tokens, shape.tokens - 4);
  EXPECT_EQ(without.q.row(1), x.q.row(2));
  EXPECT_EQ(without.v.row(6), x.v.row(9));
  const auto initial = support::wide(support::rule_initial_state<float>(shape, 6));
  const auto padded_result = support::rule_oracle(GetParam(), x.wide(), &initial);
  const auto result = support::rule_oracle(GetParam(), without.wide(), &initial);
  for (Index h = 0; h < shape.heads; ++h) EXPECT_EQ(padded_result.state[std::size_t(h)], result.state[std::size_t(h)]);
  EXPECT_EQ(padded_result.out.row(9), result.out.row(6));
}

TEST_P(RuleInputs, RowsFollowEachOther) {
  const rule_tokens<float> x(GetParam(), shape, 7);
  const auto whole = support::rule_oracle(GetParam(), x.wide());
  const auto first = support::rule_oracle(GetParam(), x.rows(0, 10).wide());
  const auto second = support::rule_oracle(GetParam(), x.rows(10, shape.tokens - 10).wide(), &first.state);
  EXPECT_EQ(first.out, whole.out.topRows(10));
  EXPECT_EQ(second.out, whole.out.bottomRows(shape.tokens - 10));
  for (std::size_t h = 0; h < whole.state.size(); ++h) EXPECT_EQ(second.state[h], whole.state[h]);
}

// ---- sizes ----------------------------------------------------------------------------------------------------------

/// The recurrence in T, rounding where an implementation would.
template <class T>
struct rounded {
  row_matrix<T> out;
  std::vector<row_matrix<T>> state;

  rounded(const rule_tokens<T>& x, std::vector<row_matrix<T>> s) : out(x.q.rows(), x.v.cols()), state(std::move(s)) {
    const support::rule_traits rule = traits_of(x.kind);
    using decays = support::rule_traits::decay_shape;
    const Index features = x.shape.features, value_dim = x.shape.value_dim;
    for (Index h = 0; h < x.shape.heads; ++h) {
      row_matrix<T>& S = state[std::size_t(h)];
      for (Index t = 0; t < x.q.rows(); ++t) {
        const auto of_head = [&](const row_matrix<T>& all) -> row_matrix<T> {
          return all.row(t).segment(h * features, features);
        };
        const row_matrix<T> q = of_head(x.q), k = of_head(x.k), v = x.v.row(t).segment(h * value_dim, value_dim);
        row_matrix<T> w = row_matrix<T>::Zero(1, features);
        if (rule.decay == decays::fixed) w.setConstant(x.log_decay(0, h));
        if (rule.decay == decays::per_head) w.setConstant(x.log_decay(t, h));
        if (rule.decay == decays::per_feature) w = of_head(x.log_decay);
        w = w.array().exp().eval();
        auto o = out.row(t).segment(h * value_dim, value_dim);
        if (rule.reads_first) {
          o = q * S + q.cwiseProduct(x.bonus.middleCols(h * features, features)).cwiseProduct(k).sum() * v;
        }
        row_matrix<T> recalled;
        if (rule.transforms) recalled = of_head(x.a) * S;
        S = (w.row(0).transpose().asDiagonal() * S).eval();
        S += k.transpose() * (rule.corrects ? row_matrix<T>(x.beta(t, h) * (v - k * S)) : v);
        if (rule.transforms) S += of_head(x.b).transpose() * recalled;
        if (!rule.reads_first) o = q * S;
      }
    }
  }
};

/// What token-by-token evaluation is off by, in roundings of the sizes: 6 at worst were seen, where 9 features are
/// summed one after the other.
constexpr double token_roundings = 10;

template <class T>
testing::AssertionResult judged(const rounded<T>& actual, const support::rule_result& truth,
                                const support::rule_result& sizes) {
  if (auto r = support::near(actual.out, truth.out, sizes.out, token_roundings); !r) return r << " (out)";
  for (std::size_t h = 0; h < truth.state.size(); ++h) {
    if (auto r = support::near(actual.state[h], truth.state[h], sizes.state[h], token_roundings); !r)
      return r << " (S)";
  }
  return testing::AssertionSuccess();
}

template <class T>
class RuleSizes : public testing::Test {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(RuleSizes, scalars);

template <class T, class F>
void for_each_problem(const F& f) {
  for (const rule_kind kind : support::all_rules) {
    for (const support::gate_set& gates : support::gate_sets()) {
      for (const auto keys : support::all_key_patterns) {
        for (const auto betas : support::all_beta_patterns) {
          SCOPED_TRACE(std::string(traits_of(kind).name) + ", gates " + gates.name + ", keys " +
                       std::to_string(int(keys)) + ", betas " + std::to_string(int(betas)));
          f(rule_tokens<T>(kind, {65, 9, 5, 1}, 8, {.gates = gates, .keys = keys, .betas = betas}));
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

TYPED_TEST(RuleSizes, RoundingPasses) {
  for_each_problem<TypeParam>([](const rule_tokens<TypeParam>& x) {
    const auto initial = support::rule_initial_state<TypeParam>(x.shape, 8);
    const auto wide_initial = support::wide(initial);
    EXPECT_TRUE(judged(rounded<TypeParam>(x, initial), support::rule_oracle(x.kind, x.wide(), &wide_initial),
                       support::rule_sizes<TypeParam>(x.kind, x.wide(), &wide_initial)));
  });
}

/// Judged against x: the rounded evaluation of something else.
template <class T>
testing::AssertionResult passes_for(const rule_tokens<T>& x, const rule_tokens<T>& something_else) {
  const auto initial = support::rule_initial_state<T>(x.shape, 9);
  const auto wide_initial = support::wide(initial);
  return judged(rounded<T>(something_else, initial), support::rule_oracle(x.kind, x.wide(), &wide_initial),
                support::rule_sizes<T>(x.kind, x.wide(), &wide_initial));
}

TYPED_TEST(RuleSizes, ALostTokenDoesNotPass) {
  for (const rule_kind kind : support::all_rules) {
    const rule_tokens<TypeParam> x(kind, {65, 9, 5, 1}, 9);
    EXPECT_TRUE(passes_for(x, x));
    for (Index t = 0; t < x.shape.tokens; ++t) {
      auto lost = x;
      lost.v.row(t).setZero();
      EXPECT_FALSE(passes_for(x, lost)) << traits_of(kind).name << ", token " << t;
      lost = x;
      lost.pad(t);
      EXPECT_FALSE(passes_for(x, lost)) << traits_of(kind).name << ", token " << t;
    }
  }
}

// The next token's gate, or half a per cent more of one.
TYPED_TEST(RuleSizes, AWrongGateDoesNotPass) {
  for (const rule_kind kind : support::all_rules) {
    if (traits_of(kind).decay == support::rule_traits::decay_shape::none) continue;
    const rule_tokens<TypeParam> x(kind, {65, 9, 5, 1}, 10);
    for (Index t = 0; t + 1 < x.log_decay.rows(); ++t) {
      auto wrong = x;
      wrong.log_decay.row(t) = x.log_decay.row(t + 1);
      EXPECT_FALSE(passes_for(x, wrong)) << traits_of(kind).name << ", token " << t;
    }
    auto wrong = x;
    wrong.log_decay *= TypeParam(1.005);
    EXPECT_FALSE(passes_for(x, wrong)) << traits_of(kind).name;
  }
}

// What an implementation clears once a token is allowed for, and no more than that.
TYPED_TEST(RuleSizes, ClearingEntriesNextToZeroPasses) {
  constexpr long double cleared = 0x1p-100L;
  for (const rule_kind kind : {rule_kind::decay, rule_kind::gated_per_head, rule_kind::gated_per_feature}) {
    rule_tokens<TypeParam> x(kind, {3, 4, 2, 1}, 11, {.gates = {"minus_90", {-90}}});
    x.k.setZero();  // the initial state alone, which e^-270 ends
    const auto initial = support::wide(support::rule_initial_state<TypeParam>(x.shape, 11));
    const auto truth = support::rule_oracle(kind, x.wide(), &initial);
    const row_matrix<TypeParam> nothing = row_matrix<TypeParam>::Zero(3, 2);
    EXPECT_FALSE(
        support::near(nothing, truth.out, support::rule_sizes<TypeParam>(kind, x.wide(), &initial, 0).out, 10));
    EXPECT_TRUE(
        support::near(nothing, truth.out, support::rule_sizes<TypeParam>(kind, x.wide(), &initial, cleared).out, 10));
    EXPECT_FALSE(support::near(row_matrix<TypeParam>::Constant(3, 2, TypeParam(1e-20)), truth.out,
                               support::rule_sizes<TypeParam>(kind, x.wide(), &initial, cleared).out, 10));
  }
}

}  // namespace
