// Speculative decoding: outputs of a draft are those of stepping, the state it was made from stays as it is, and
// accepting j of its tokens is j steps. Steps that are put off are a draft, token by token.
#include <linattn/linattn.hpp>

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/rule_calls.hpp"
#include "support/sanitizer.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace {

using Eigen::Index;
using linattn::decay_kind;
using linattn::row_matrix;
using support::allocation_count;

/// Two ways to the same sums of up to 23 tokens: the roundings of either, a few of each sum of C terms. In double the
/// same count of roundings.
template <class T>
inline constexpr double summation = 8 * double(std::numeric_limits<T>::epsilon());

template <class Map, class Rule, class Scalar>
struct subject {
  using map = Map;
  using rule = Rule;
  using scalar = Scalar;
};

template <class Subject>
class Draft : public testing::Test {
 public:
  using T = typename Subject::scalar;
  using rule = typename Subject::rule;
  using tokens = support::rule_tokens<T>;

  static constexpr Index prefix = 7, capacity = 16;
  static constexpr double rounding = summation<T>;

  /// Ragged, one panel and more, and features beyond one tile.
  static std::vector<support::rule_shape> shapes() {
    return {{0, 17, 9, 2}, {0, 5, 40, 2}, {0, 64, 64, 2}, {0, 3, 1, 1}, {0, 530, 18, 1}};
  }

  static tokens make(support::rule_shape shape, std::uint64_t seed, const support::rule_patterns& patterns = {}) {
    shape.tokens = prefix + capacity;
    return tokens(support::rule_kind_of<rule>(), shape, seed, patterns);
  }
  static auto attention(const tokens& x) {
    return support::operator_for<typename Subject::map, rule>(
        x, {.query_scale = 0.5, .normalize = !std::is_same_v<typename Subject::map, linattn::identity>});
  }

  /// A draft of tokens prefix ... prefix + n - 1 of x, from the state after the prefix.
  template <class Operator>
  struct drafted {
    using inputs = typename Operator::inputs;
    typename Operator::state_type state;
    typename Operator::draft_type draft;
    row_matrix<T> out;

    drafted(const Operator& attn, const tokens& x, Index n, typename Operator::workspace_type& ws)
        : state(attn.make_state(3)), draft(attn.make_draft()), out(n, x.v.cols()) {
      support::step_over(attn, state, x.rows(0, prefix));
      const tokens part = x.rows(prefix, n);
      attn.forward_causal(state, part.q, part.k, part.v, support::inputs_of<Operator>(part), out, draft, ws);
    }
  };

  template <class Operator>
  static void expect_steps(const Operator& attn, const tokens& x, Index n, Index accepted) {
    SCOPED_TRACE(std::to_string(n) + " tokens, of which " + std::to_string(accepted) + " are accepted");
    auto ws = attn.make_workspace();
    drafted<Operator> d(attn, x, n, ws);
    auto s = attn.make_state(3);
    support::step_over(attn, s, x.rows(0, prefix));
    EXPECT_TRUE(support::same_bits(support::contents_of(d.state), support::contents_of(s))) << "the state was written";
    EXPECT_EQ(d.state.tokens(), prefix);
    EXPECT_EQ(d.draft.tokens(), n);

    attn.accept(d.state, d.draft, accepted, ws);
    const row_matrix<T> first = support::step_over(attn, s, x.rows(prefix, accepted));
    EXPECT_EQ(d.state.tokens(), s.tokens());
    EXPECT_TRUE(support::close(support::contents_of(d.state), support::contents_of(s), rounding));
    row_matrix<T> all(n, x.v.cols());
    all << first, support::step_over(attn, s, x.rows(prefix + accepted, n - accepted));
    EXPECT_TRUE(support::close(d.out, all, rounding));
  }
};

using linattn::identity;
#if defined(LINATTN_UNDER_SANITIZER)
// One of each kind, among them both scalars: the others lay out and address their drafts as these do.
using types = testing::Types<subject<linattn::elu_plus_one, linattn::additive, float>,
                             subject<identity, linattn::gated<decay_kind::per_feature>, double>,
                             subject<identity, linattn::gated_bonus, float>,
                             subject<identity, linattn::gated_delta<decay_kind::per_feature>, float>,
                             subject<identity, linattn::generalized_delta, double>>;
#else
using types = testing::Types<
    subject<linattn::elu_plus_one, linattn::additive, float>, subject<linattn::elu_plus_one, linattn::additive, double>,
    subject<identity, linattn::additive, float>, subject<identity, linattn::decay, float>,
    subject<identity, linattn::decay, double>, subject<identity, linattn::gated<decay_kind::per_head>, float>,
    subject<identity, linattn::gated<decay_kind::per_head>, double>,
    subject<identity, linattn::gated<decay_kind::per_feature>, float>,
    subject<identity, linattn::gated<decay_kind::per_feature>, double>, subject<identity, linattn::gated_bonus, float>,
    subject<identity, linattn::gated_bonus, double>, subject<identity, linattn::delta, float>,
    subject<identity, linattn::delta, double>, subject<identity, linattn::gated_delta<decay_kind::per_head>, float>,
    subject<identity, linattn::gated_delta<decay_kind::per_head>, double>,
    subject<identity, linattn::gated_delta<decay_kind::per_feature>, float>,
    subject<identity, linattn::gated_delta<decay_kind::per_feature>, double>,
    subject<identity, linattn::generalized_delta, float>, subject<identity, linattn::generalized_delta, double>>;
#endif

struct names {
  template <class Subject>
  static std::string GetName(int) {
    return std::string(support::traits_of(support::rule_kind_of<typename Subject::rule>()).name) +
           (std::is_same_v<typename Subject::map, identity> ? "" : "_normalized") +
           (std::is_same_v<typename Subject::scalar, float> ? "_float" : "_double");
  }
};
TYPED_TEST_SUITE(Draft, types, names);

TYPED_TEST(Draft, AnyNumberOfAcceptedTokensIsAsManySteps) {
  const auto x = this->make({0, 17, 9, 2}, 1);
  const auto attn = this->attention(x);
  for (Index accepted = 0; accepted <= this->capacity; ++accepted) {
    this->expect_steps(attn, x, this->capacity, accepted);
  }
}

TYPED_TEST(Draft, AnyShapeAndLength) {
  std::uint64_t seed = 2;
  for (const support::rule_shape& shape : this->shapes()) {
    const auto x = this->make(shape, seed++);
    const auto attn = this->attention(x);
    for (const Index n : {0, 1, 2, 7, 9, 16}) this->expect_steps(attn, x, n, (n + 1) / 2);
  }
}

TYPED_TEST(Draft, ExtremeGates) {
  if constexpr (TypeParam::rule::traits.decay == decay_kind::none) return;  // it has no gates
  for (const support::gate_set& gates : support::gate_sets()) {
    SCOPED_TRACE(gates.name);
    const auto x = this->make({0, 6, 10, 2}, 3, {gates});
    const auto attn = this->attention(x);
    for (const Index accepted : {1, 5, 16}) this->expect_steps(attn, x, 16, accepted);
  }
}

TYPED_TEST(Draft, NothingAccepted) {
  const auto x = this->make({0, 17, 9, 2}, 4);
  const auto attn = this->attention(x);
  auto ws = attn.make_workspace();
  typename TestFixture::template drafted<std::remove_cv_t<decltype(attn)>> d(attn, x, 5, ws);
  const auto before = support::contents_of(d.state);
  attn.accept(d.state, d.draft, 0, ws);
  EXPECT_TRUE(support::same_bits(support::contents_of(d.state), before));
  EXPECT_EQ(d.state.tokens(), this->prefix);
}

TYPED_TEST(Draft, WhatIsRejectedLeavesNoTrace) {
  using scalar = typename TypeParam::scalar;
  using attention = decltype(this->attention(this->make({0, 1, 1, 1}, 0)));
  const auto x = this->make({0, 17, 9, 2}, 5);
  const auto attn = this->attention(x);
  auto ws = attn.make_workspace();
  for (const Index accepted : {1, 3, 8, 11}) {
    auto spoilt = x;
#if defined(__FAST_MATH__)
    const auto garbage = scalar(1e30);
#else
    const scalar garbage = std::numeric_limits<scalar>::quiet_NaN();
#endif
    for (auto* const rows : {&spoilt.q, &spoilt.k, &spoilt.v}) {
      rows->bottomRows(this->capacity - accepted).setConstant(garbage);
    }
    typename TestFixture::template drafted<attention> clean(attn, x, this->capacity, ws);
    typename TestFixture::template drafted<attention> dirty(attn, spoilt, this->capacity, ws);
    EXPECT_TRUE(support::same_bits(dirty.out.topRows(accepted), clean.out.topRows(accepted)));
    attn.accept(clean.state, clean.draft, accepted, ws);
    attn.accept(dirty.state, dirty.draft, accepted, ws);
    EXPECT_TRUE(support::same_bits(support::contents_of(dirty.state), support::contents_of(clean.state)));
  }
}

TYPED_TEST(Draft, TokensOneByOneAreThoseTogetherBitForBit) {
  std::uint64_t seed = 20;
  for (const support::rule_shape& shape : this->shapes()) {
    const auto x = this->make(shape, seed++);
    const auto attn = this->attention(x);
    using attention = std::remove_cv_t<decltype(attn)>;
    auto ws = attn.make_workspace();
    const Index n = attention::draft_type::steps_at_once;
    typename TestFixture::template drafted<attention> together(attn, x, n, ws);
    auto s = attn.make_state(3);
    support::step_over(attn, s, x.rows(0, this->prefix));
    const auto before = support::contents_of(s);
    auto d = attn.make_draft();
    EXPECT_TRUE(support::same_bits(support::step_over(attn, s, x.rows(this->prefix, n), d), together.out));
    EXPECT_TRUE(support::same_bits(support::contents_of(s), before)) << "the state was written";
    EXPECT_EQ(d.tokens(), n);

    attn.accept(s, d, ws);
    EXPECT_EQ(d.tokens(), 0);
    attn.accept(together.state, together.draft, n, ws);
    EXPECT_TRUE(support::same_bits(support::contents_of(s), support::contents_of(together.state)));
    EXPECT_EQ(s.tokens(), together.state.tokens());
    attn.accept(s, d, ws);  // of nothing
    EXPECT_TRUE(support::same_bits(support::contents_of(s), support::contents_of(together.state)));
  }
}

TYPED_TEST(Draft, StepsPutOffAreSteps) {
  std::uint64_t seed = 30;
  for (const support::rule_shape& shape : this->shapes()) {
    const auto x = this->make(shape, seed++);
    const auto attn = this->attention(x);
    auto ws = attn.make_workspace();
    for (const Index n : {1, 2, 3, 4, 5, 16}) {
      auto expected = attn.make_state(3);
      support::step_over(attn, expected, x.rows(0, this->prefix));
      auto s = expected;
      auto d = attn.make_draft();
      const auto part = x.rows(this->prefix, n);
      EXPECT_TRUE(support::close(support::step_over(attn, s, part, d), support::step_over(attn, expected, part),
                                 this->rounding));
      EXPECT_EQ(s.tokens() + d.tokens(), this->prefix + n);
      EXPECT_EQ(s.first_position() + s.tokens(), d.position());
      attn.accept(s, d, ws);
      EXPECT_EQ(s.tokens(), this->prefix + n);
      EXPECT_TRUE(support::close(support::contents_of(s), support::contents_of(expected), this->rounding));
    }
  }
}

/// A step behind tokens that were drafted takes them for accepted; and a draft that was cleared begins anywhere.
TYPED_TEST(Draft, AStepGoesOnBehindADraft) {
  const auto x = this->make({0, 17, 9, 2}, 7);
  const auto attn = this->attention(x);
  using attention = std::remove_cv_t<decltype(attn)>;
  auto ws = attn.make_workspace();
  for (const Index n : {1, 3, 9, 15}) {
    typename TestFixture::template drafted<attention> d(attn, x, n, ws);
    auto expected = attn.make_state(3);
    support::step_over(attn, expected, x.rows(0, this->prefix + n));
    const auto token = x.rows(this->prefix + n, 1);
    EXPECT_TRUE(support::close(support::step_over(attn, d.state, token, d.draft),
                               support::step_over(attn, expected, token), this->rounding));
    attn.accept(d.state, d.draft, ws);
    EXPECT_TRUE(support::close(support::contents_of(d.state), support::contents_of(expected), this->rounding));

    support::step_over(attn, d.state, token, d.draft);
    d.state.reset();
    d.draft.clear();
    auto anew = attn.make_state(3);
    EXPECT_TRUE(support::close(support::step_over(attn, d.state, x.rows(0, 3), d.draft),
                               support::step_over(attn, anew, x.rows(0, 3)), this->rounding));
  }
}

TYPED_TEST(Draft, NothingAllocates) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  using scalar = typename TypeParam::scalar;
  const auto x = this->make({0, 17, 9, 2}, 6).rows(0, 16);
  const auto attn = this->attention(x);
  auto ws = attn.make_workspace();
  auto s = attn.make_state();
  auto d = attn.make_draft();
  row_matrix<scalar> out(16, x.v.cols());
  const auto inputs = support::inputs_of<decltype(attn)>(x);
  for (int time = 0; time < 2; ++time) {
    const allocation_count count;
    attn.forward_causal(s, x.q, x.k, x.v, inputs, out, d, ws);
    attn.accept(s, d, 9, ws);
    d.clear();
    for (Index i = 0; i < 5; ++i) {
      attn.step(s, x.q.row(i), x.k.row(i), x.v.row(i), support::token_inputs_of<decltype(attn)>(x, i), out.row(i), d,
                ws);
    }
    attn.accept(s, d, ws);
    EXPECT_EQ(count.total(), 0);
  }
}

TEST(DraftOfFixedSizes, NothingTouchesTheHeap) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  const linattn::linear_attention<identity, linattn::gated_delta<>, float, 8, 8, 2> attn;
  const support::rule_tokens<float> x(support::rule_kind::gated_delta_per_head, {5, 8, 8, 2}, 1);
  row_matrix<float> out(5, 16);
  const allocation_count count;
  auto ws = attn.make_workspace();
  auto s = attn.make_state();
  auto d = attn.make_draft();
  attn.forward_causal(s, x.q, x.k, x.v, {.log_decay = x.log_decay, .beta = x.beta}, out, d, ws);
  attn.accept(s, d, 5, ws);
  EXPECT_EQ(count.total(), 0);
  auto stepped = attn.make_state();
  EXPECT_TRUE(support::close(out, support::step_over(attn, stepped, x), summation<float>));
  EXPECT_TRUE(support::close(support::contents_of(s), support::contents_of(stepped), summation<float>));
}

/// What decays along with a normaliser, and a map that is told where a token stands.
template <class Attention>
void expect_steps_put_off(const Attention& attn, Index d, Index m) {
  constexpr Index n = 23;
  const auto q = support::normal_matrix<float>(n, attn.heads() * d, 1);
  const auto k = support::normal_matrix<float>(n, attn.heads() * d, 2);
  const auto v = support::normal_matrix<float>(n, attn.heads() * m, 3);
  auto expected = attn.make_state(3), s = attn.make_state(3);
  row_matrix<float> out(n, v.cols());
  auto draft = attn.make_draft();
  auto ws = attn.make_workspace();
  for (Index i = 0; i < n; ++i) attn.step(s, q.row(i), k.row(i), v.row(i), out.row(i), draft, ws);
  EXPECT_TRUE(support::close(out, attn.forward_causal(expected, q, k, v), summation<float>));
  attn.accept(s, draft, ws);
  EXPECT_TRUE(support::close(support::contents_of(s), support::contents_of(expected), summation<float>));
}

TEST(StepsPutOff, KnowTheirPositionsAndNormalisers) {
  const linattn::options sizes{.head_dim = 5, .value_dim = 19, .heads = 2};
  expect_steps_put_off(linattn::linear_attention<linattn::cosformer>(sizes, linattn::cosformer(40)), 5, 19);
  using decay = linattn::normalized<linattn::decay>;
  decay fading;
  fading.log_decay = {-0.3, -0.01};
  expect_steps_put_off(linattn::linear_attention<linattn::elu_plus_one, decay>(sizes, {}, fading), 5, 19);
}

/// Steps clear silence as often as they do it themselves: 65,536 of zeros leave nothing of a state that fades.
TEST(StepsPutOff, EndInExactZeros) {
  linattn::decay fading;
  fading.log_decay = {std::log(0.97)};
  const linattn::linear_attention<identity, linattn::decay> attn({.head_dim = 3, .value_dim = 17}, {}, fading);
  auto s = attn.make_state();
  s.kv(0).setOnes();
  auto draft = attn.make_draft();
  auto ws = attn.make_workspace();
  const row_matrix<float> none = row_matrix<float>::Zero(1, 17);
  row_matrix<float> out(1, 17);
  const auto key = none.leftCols(3);
  for (Index i = 0; i < 65536; ++i) attn.step(s, key.row(0), key.row(0), none.row(0), out.row(0), draft, ws);
  attn.accept(s, draft, ws);
  EXPECT_EQ(row_matrix<float>(s.kv(0)), (row_matrix<float>::Zero(3, 17)));
}

/// Grouped queries, one query head for several states, and none; neighbours sharing, or heads in turn.
template <class Map, class Rule>
void expect_shared_heads_draft_as_they_step(bool normalize) {
  struct counts {
    Index queries, keys, states;
  };
  constexpr Index n = 5, d = 17, m = 9;
  for (const counts& heads : {counts{6, 2, 2}, counts{2, 2, 6}, counts{4, 1, 2}, counts{3, 3, 3}}) {
    for (const auto sharing : {linattn::head_sharing::interleaved, linattn::head_sharing::tiled}) {
      const linattn::linear_attention<Map, Rule> attn({.head_dim = d,
                                                       .value_dim = m,
                                                       .heads = heads.queries,
                                                       .key_heads = heads.keys,
                                                       .value_heads = heads.states,
                                                       .sharing = sharing,
                                                       .normalize = normalize});
      const support::rule_tokens<float> gates(support::rule_kind_of<Rule>(), {n, d, m, heads.states}, 1);
      const auto q = support::normal_matrix<float>(n, heads.queries * d, 2);
      const row_matrix<float> k = support::normal_matrix<float>(n, heads.keys * d, 3) / 4;
      const auto x = support::inputs_of<decltype(attn)>(gates);
      auto s = attn.make_state(), expected = attn.make_state();
      for (auto* const each : {&s, &expected}) attn.absorb(*each, k, gates.v, x);
      auto ws = attn.make_workspace();
      auto draft = attn.make_draft();
      row_matrix<float> out(n, attn.output_heads() * m);
      attn.forward_causal(std::as_const(s), q, k, gates.v, x, out, draft, ws);
      EXPECT_TRUE(support::close(out, attn.forward_causal(expected, q, k, gates.v, x), summation<float>));
      auto put_off = s;
      attn.accept(s, draft, n, ws);
      EXPECT_TRUE(support::close(support::contents_of(s), support::contents_of(expected), summation<float>));

      row_matrix<float> token(1, out.cols());
      draft.clear();
      for (Index i = 0; i < n; ++i) {
        attn.step(put_off, q.row(i), k.row(i), gates.v.row(i), support::token_inputs_of<decltype(attn)>(gates, i),
                  token.row(0), draft, ws);
        EXPECT_TRUE(support::close(token, row_matrix<float>(out.row(i)), summation<float>));
      }
    }
  }
}

TEST(DraftOfSharedHeads, IsWhatTheyStep) {
  expect_shared_heads_draft_as_they_step<linattn::elu_plus_one, linattn::additive>(true);
  expect_shared_heads_draft_as_they_step<identity, linattn::gated_bonus>(false);
  expect_shared_heads_draft_as_they_step<identity, linattn::gated_delta<>>(false);
}

class DraftErrors : public testing::Test {
 public:
  using attention = linattn::linear_attention<linattn::elu_plus_one>;

  const attention attn{linattn::options{.head_dim = 6, .value_dim = 5, .heads = 2}};
  const support::rule_tokens<float> x{support::rule_kind::additive, {17, 6, 5, 2}, 1};
  row_matrix<float> out = row_matrix<float>::Constant(17, 10, 7);
  attention::workspace_type ws = attn.make_workspace();
  attention::state_type s = attn.make_state(2);
  attention::draft_type d = attn.make_draft();

  void draft(Index n) {
    attn.forward_causal(std::as_const(s), x.q.topRows(n), x.k.topRows(n), x.v.topRows(n), out.topRows(n), d, ws);
  }
  /// The sentence of what `call` throws, the state untouched by it.
  template <class Call>
  std::string sentence(const Call& call) {
    const auto before = support::contents_of(s);
    try {
      call();
    } catch (const std::invalid_argument& error) {
      EXPECT_TRUE(support::same_bits(support::contents_of(s), before));
      return error.what();
    }
    return "nothing was thrown";
  }
};

TEST_F(DraftErrors, TooManyTokens) {
  EXPECT_EQ(sentence([&] { draft(17); }), "linattn::forward_causal: a draft has room for 16 tokens, not for 17");
  EXPECT_EQ(out, (row_matrix<float>::Constant(17, 10, 7)));
  EXPECT_EQ(d.tokens(), 0);
}

TEST_F(DraftErrors, MoreAcceptedThanDrafted) {
  draft(3);
  EXPECT_EQ(sentence([&] { attn.accept(s, d, 4, ws); }), "linattn::accept: the draft holds 3 tokens, not 4");
  EXPECT_EQ(sentence([&] { attn.accept(s, d, -1, ws); }), "linattn::accept: the draft holds 3 tokens, not -1");
}

TEST_F(DraftErrors, AcceptedTwice) {
  draft(3);
  attn.accept(s, d, 2, ws);
  EXPECT_EQ(sentence([&] { attn.accept(s, d, 1, ws); }),
            "linattn::accept: the state's next token is number 4, the draft begins with number 2: it was drafted from "
            "another state, or accepted already");
}

TEST_F(DraftErrors, ADraftOfAnotherOperator) {
  const attention other({.head_dim = 6, .value_dim = 4, .heads = 2});
  d = other.make_draft();
  const std::string expected =
      "the draft is (2 heads, 6 features, 4 values), expected (2 heads, 6 features, 5 values): take it from this "
      "operator's make_draft()";
  EXPECT_EQ(sentence([&] { draft(3); }), "linattn::forward_causal: " + expected);
  EXPECT_EQ(sentence([&] { attn.accept(s, d, 0, ws); }), "linattn::accept: " + expected);
  d = {};
  EXPECT_NE(sentence([&] { draft(3); }).find("the draft is empty"), std::string::npos);
}

TEST_F(DraftErrors, ShapesAndTheState) {
  EXPECT_NE(sentence([&] {
              attn.forward_causal(std::as_const(s), x.q.topRows(3), x.k.topRows(2), x.v.topRows(3), out.topRows(3), d,
                                  ws);
            }).find("linattn::forward_causal: k is (2, 12), expected (3, 12)"),
            std::string::npos);
  attention::state_type empty;
  draft(1);
  EXPECT_NE(sentence([&] { attn.accept(empty, d, 1, ws); }).find("linattn::accept: the state is empty"),
            std::string::npos);
}

}  // namespace
