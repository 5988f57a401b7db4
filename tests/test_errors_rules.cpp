// What the update rules' operators refuse, with which sentence, and that nothing was written before. Debug assertions
// are counted instead of ending the program: `step` is noexcept, so that a handler must not throw.
namespace {

struct assertion_log {
  int failures = 0;
  const char* last = "";
};
assertion_log assertions;

void note_failed_assertion(const char* condition) {
  ++assertions.failures;
  assertions.last = condition;
}

}  // namespace

#define LINATTN_ASSERT(condition) ((condition) ? void() : note_failed_assertion(#condition))

#include "support/compare.hpp"
#include "support/rule_machine.hpp"
#include "support/sentinel.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <ostream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using Eigen::Index;
using linattn::decay_kind;
using support::rule_kind;
using matrix = linattn::row_matrix<float>;
using tokens = support::rule_tokens<float>;
using views = support::rule_views<float>;
using machine = support::rule_machine<float>;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

template <class F>
void expect_refusal(const F& call, const std::vector<std::string>& parts) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    for (const auto& part : parts)
      EXPECT_TRUE(contains(error.what(), part)) << "no '" << part << "' in: " << error.what();
    return;
  }
  ADD_FAILURE() << "not refused; expected a sentence with '" << parts.front() << "'";
}

/// Expects that `call` fails exactly one assertion, whose condition or sentence contains `part`.
template <class F>
void expect_assertion(const F& call, const std::string& part) {
  assertions = {};
  call();
  EXPECT_EQ(assertions.failures, 1) << part;
  EXPECT_TRUE(contains(assertions.last, part)) << "no '" << part << "' in: " << assertions.last;
}

std::string shape(Index rows, Index cols) { return "(" + std::to_string(rows) + ", " + std::to_string(cols) + ")"; }

constexpr Index N = 6, D = 5, M = 3, H = 2;

struct rule_input {
  const char* name;
  views::view views::*member;
};

/// Rules that take each input there is, and what they take.
struct rule_case {
  const char* name;
  rule_kind kind;
  std::unique_ptr<machine> (*make)(const tokens& x);
  std::vector<rule_input> inputs;

  friend std::ostream& operator<<(std::ostream& out, const rule_case& x) { return out << x.name; }
};

constexpr rule_input log_decay = {"log_decay", &views::log_decay}, beta = {"beta", &views::beta}, a = {"a", &views::a},
                     b = {"b", &views::b}, bonus = {"bonus", &views::bonus};

const rule_case cases[] = {
    {"gated_per_head", rule_kind::gated_per_head, support::make_machine<linattn::gated<>, float>, {log_decay}},
    {"gated_bonus", rule_kind::gated_bonus, support::make_machine<linattn::gated_bonus, float>, {log_decay, bonus}},
    {"gated_delta_per_feature",
     rule_kind::gated_delta_per_feature,
     support::make_machine<linattn::gated_delta<decay_kind::per_feature>, float>,
     {log_decay, beta}},
    {"generalized_delta",
     rule_kind::generalized_delta,
     support::make_machine<linattn::generalized_delta, float>,
     {log_decay, a, b}},
};

class RuleErrors : public testing::TestWithParam<rule_case> {
 protected:
  tokens x{GetParam().kind, {N, D, M, H}, 1};
  std::unique_ptr<machine> m = GetParam().make(x);

  void SetUp() override { m->absorb(views(x)); }

  /// Every bulk verb refuses `wrong` with `parts`; outputs and state are as they were.
  void expect_refused(const views& wrong, std::vector<std::string> parts) {
    const auto before = m->fork();
    support::framed<float> out(N, H * M);
    parts.push_back("linattn::forward_causal: ");
    expect_refusal([&] { m->forward_causal(wrong, out.matrix()); }, parts);
    expect_refusal([&] { m->forward_causal_alone(wrong, out.matrix()); }, parts);
    parts.back() = "linattn::absorb: ";
    expect_refusal([&] { m->absorb(wrong); }, parts);
    EXPECT_TRUE(out.untouched());
    EXPECT_EQ(m->tokens(), before->tokens());
    for (Index h = 0; h < H; ++h) {
      EXPECT_TRUE(support::same_bits(m->s(h), before->s(h)));
      EXPECT_TRUE(support::same_bits(m->log_decay(h), before->log_decay(h)));
    }
  }
};
INSTANTIATE_TEST_SUITE_P(all, RuleErrors, testing::ValuesIn(cases),
                         [](const testing::TestParamInfo<rule_case>& rule) { return rule.param.name; });

TEST_P(RuleErrors, AMissingInput) {
  for (const rule_input& input : GetParam().inputs) {
    views wrong(x);
    wrong.*input.member = {};
    expect_refused(wrong, {std::string("the update rule's input ") + input.name + " is not given"});
  }
}

TEST_P(RuleErrors, AnInputOfAnotherShape) {
  for (const rule_input& input : GetParam().inputs) {
    const Index cols = (views(x).*input.member).cols();
    for (const auto& [rows, columns] : {std::pair<Index, Index>{N - 1, cols},
                                        {N + 1, cols},
                                        {1, cols},
                                        {N, cols - 1},
                                        {N, cols + 1},
                                        {N, cols / H},
                                        {N, 0},
                                        {cols, N}}) {
      if (rows == N && columns == cols) continue;
      SCOPED_TRACE(shape(rows, columns));
      const matrix other = matrix::Zero(rows, columns);
      views wrong(x);
      wrong.*input.member = other;
      // A matrix of no columns has no memory, either: it is not given.
      expect_refused(wrong, columns == 0
                                ? std::vector<std::string>{std::string("input ") + input.name + " is not given"}
                                : std::vector<std::string>{input.name + (" is " + shape(rows, columns)),
                                                           "expected " + shape(N, cols), "heads"});
    }
  }
}

TEST_P(RuleErrors, NoTokensNeedNoMemory) {
  const tokens none(GetParam().kind, {0, D, M, H}, 2);
  const auto before = m->fork();
  matrix out(0, H * M);
  EXPECT_NO_THROW(m->forward_causal(views(none), out));
  EXPECT_NO_THROW(m->absorb(views(none)));
  for (Index h = 0; h < H; ++h) EXPECT_TRUE(support::same_bits(m->s(h), before->s(h)));
}

TEST_P(RuleErrors, StepAssertsTheSizesOfItsInputs) {
  matrix out(1, H * M);
  for (const rule_input& input : GetParam().inputs) {
    views wrong = views(x).rows(0, 1);
    // One too many, so that it does not matter that the call goes on.
    const matrix other = matrix::Zero(1, (wrong.*input.member).cols() + 1);
    wrong.*input.member = other;
    expect_assertion([&] { m->fold(wrong, out); }, "an input of the update rule is missing or of another size");
  }
  assertions = {};
  m->fold(views(x).rows(0, 1), out);
  EXPECT_EQ(assertions.failures, 0) << assertions.last;
}

TEST_P(RuleErrors, StepOfManyStatesAssertsOneRowOfInputsForEach) {
  const auto other_machine = m->fork();
  matrix out(2, H * M);
  for (const rule_input& input : GetParam().inputs) {
    views wrong = views(x).rows(0, 2);
    const matrix other = matrix::Zero(3, (wrong.*input.member).cols());
    wrong.*input.member = other;
    expect_assertion([&] { m->step_all({m.get(), other_machine.get()}, wrong, out); }, "one row for each state");
  }
}

TEST_P(RuleErrors, OutputsMustNotOverlapInputsOfTheRule) {
  for (const rule_input& input : GetParam().inputs) {
    views in(x);
    matrix shared = matrix::Zero(N, std::max(H * M, (in.*input.member).cols()));
    in.*input.member = shared.leftCols((in.*input.member).cols());
    expect_assertion([&] { m->forward_causal(in, shared.leftCols(H * M)); }, "overlaps an input");
    expect_assertion([&] { m->forward_causal_alone(in, shared.leftCols(H * M)); }, "overlaps an input");
    expect_assertion([&] { m->fold(in.rows(0, 1), shared.topLeftCorner(1, H * M)); }, "overlaps an input");
  }
}

// The verbs that allocate say it too.
TEST(RuleErrorsOfConvenience, ANameAndBothShapes) {
  const linattn::linear_attention<linattn::identity, linattn::gated<>> attn(
      {.head_dim = D, .value_dim = M, .heads = H});
  const tokens x(rule_kind::gated_per_head, {N, D, M, H}, 3);
  const matrix wrong = matrix::Zero(N, H * D);
  auto s = attn.make_state();
  const std::string sentence = "log_decay is " + shape(N, H * D) + ", expected " + shape(N, H);
  const std::string name = "linattn::forward_causal: ";
  expect_refusal([&] { attn.forward_causal(s, x.q, x.k, x.v, {.log_decay = wrong}); }, {sentence, name});
  expect_refusal([&] { attn.forward_causal(x.q, x.k, x.v, {.log_decay = wrong}); }, {sentence, name});
  expect_refusal([&] { attn.absorb(s, x.k, x.v, {.log_decay = wrong}); }, {sentence, "linattn::absorb: "});
  expect_refusal([&] { attn.forward_causal(x.q, x.k, x.v, {}); }, {"input log_decay is not given", name});
  EXPECT_EQ(s.tokens(), 0);
}

// ---- the operator ---------------------------------------------------------------------------------------------------

using fixed_decay = linattn::linear_attention<linattn::identity, linattn::decay>;

TEST(RuleOptions, DecayHasOneLogDecayAHead) {
  const linattn::options o = {.head_dim = D, .heads = H};
  EXPECT_NO_THROW(fixed_decay(o, {}, linattn::decay({-0.1, 0})));
  for (const std::vector<double>& wrong : {std::vector<double>{}, {-0.1}, {-0.1, -0.1, -0.1}}) {
    expect_refusal([&] { fixed_decay(o, {}, linattn::decay(wrong)); },
                   {"linattn::linear_attention: ", "has " + std::to_string(wrong.size()) + " log-decays for 2 heads"});
  }
  expect_refusal([&] { fixed_decay{o}; }, {"has 0 log-decays for 2 heads"});
}

TEST(RuleOptions, DecayRefusesWhatIsNoLogDecay) {
  LINATTN_NEEDS_NAN();
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const linattn::options o = {.head_dim = D};
  EXPECT_NO_THROW(fixed_decay(o, {}, linattn::decay({-infinity})));
  for (const double wrong : {std::numeric_limits<double>::quiet_NaN(), infinity, 1e300}) {
    expect_refusal([&] { fixed_decay(o, {}, linattn::decay({wrong})); },
                   {"linattn::linear_attention: ", "not a number"});
  }
}

TEST(RuleOptions, OnlyARuleWithZNormalizes) {
  using gated = linattn::linear_attention<linattn::identity, linattn::gated<>>;
  using linattn::delta;
  EXPECT_FALSE(gated({.head_dim = D}).normalizes());
  EXPECT_FALSE(gated({.head_dim = D, .normalize = false}).normalizes());
  const std::vector<std::string> parts = {".normalize = true, but this update rule keeps no sum of keys z"};
  expect_refusal([&] { gated({.head_dim = D, .normalize = true}); }, parts);
  expect_refusal([&] { linattn::linear_attention<linattn::identity, delta>({.head_dim = D, .normalize = true}); },
                 parts);
  expect_refusal([&] { fixed_decay({.head_dim = D, .normalize = true}, {}, linattn::decay({-1})); }, parts);
}

// A superfluous input has no place to stand in: the aggregate of a rule has its own members alone.
template <class Rule>
using inputs_of = typename Rule::template inputs<linattn::matrix_view<const float>>;
static_assert(std::is_empty_v<inputs_of<linattn::additive>> && std::is_empty_v<inputs_of<linattn::decay>>);
static_assert(sizeof(inputs_of<linattn::gated<>>) == sizeof(linattn::matrix_view<const float>));
static_assert(sizeof(inputs_of<linattn::delta>) == sizeof(linattn::matrix_view<const float>));
static_assert(sizeof(inputs_of<linattn::gated_delta<>>) == 2 * sizeof(linattn::matrix_view<const float>));

}  // namespace
