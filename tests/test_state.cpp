// The state: a value that holds one sequence. Copies fork it, snapshots roll it back, merging joins its parts.
#include <linattn/linattn.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/oracle.hpp"
#include "support/refusal.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using Eigen::Index;
using linattn::row_matrix;

// One shape for all: 3 heads, and 5 and 3 coordinates, which leave every packet ragged.
constexpr Index D = 5;
constexpr Index M = 3;
constexpr Index H = 3;

template <class T>
using dynamic = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, T>;
template <class T>
using fixed = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, T, D, M, H>;

template <class State>
testing::AssertionResult same(const State& a, const State& b) {
  if (a.tokens() != b.tokens()) return testing::AssertionFailure() << a.tokens() << " and " << b.tokens() << " tokens";
  if (a.first_position() != b.first_position()) {
    return testing::AssertionFailure() << "first positions " << a.first_position() << " and " << b.first_position();
  }
  for (Index h = 0; h < H; ++h) {
    if (const auto kv = support::same_bits(a.kv(h), b.kv(h)); !kv) {
      return testing::AssertionFailure() << "S of head " << h << ": " << kv.message();
    }
    if (const auto z = support::same_bits(a.k_sum(h), b.k_sum(h)); !z) {
      return testing::AssertionFailure() << "z of head " << h << ": " << z.message();
    }
  }
  return testing::AssertionSuccess();
}

/// [S z] of all heads, one below the other.
template <class State>
row_matrix<typename State::scalar> entries(const State& s) {
  row_matrix<typename State::scalar> all(H * D, M + 1);
  for (Index h = 0; h < H; ++h) {
    all.block(h * D, 0, D, M) = s.kv(h);
    all.block(h * D, M, D, 1) = s.k_sum(h).transpose();
  }
  return all;
}

/// Two ways to one result, which round differently.
template <class T>
testing::AssertionResult near(const row_matrix<T>& a, const row_matrix<T>& b) {
  return support::close(a, b, support::tolerance<T>::relative_rms);
}

template <class State>
testing::AssertionResult near_states(const State& a, const State& b) {
  if (a.tokens() != b.tokens()) return testing::AssertionFailure() << a.tokens() << " and " << b.tokens() << " tokens";
  return near(entries(a), entries(b));
}

using support::refusal;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// An operator, a workspace of its own, and what the tests do with them.
template <class Operator>
struct setup {
  using T = typename Operator::scalar;
  using state = typename Operator::state_type;
  using inputs = support::attention_inputs<T>;

  const Operator attn{{.head_dim = D, .value_dim = M, .heads = H}};
  typename Operator::workspace_type ws = attn.make_workspace();

  static inputs tokens(Index n, std::uint64_t seed) { return inputs(n, H * D, H * M, seed); }

  state after(Index n, std::uint64_t seed) {
    const inputs x = tokens(n, seed);
    state s = attn.make_state();
    attn.absorb(s, x.k, x.v, ws);
    return s;
  }

  /// The outputs of rows [first, first + n), one step each.
  row_matrix<T> steps(state& s, const inputs& x, Index first, Index n) {
    row_matrix<T> y(n, H * M);
    for (Index i = 0; i < n; ++i) {
      attn.step(s, x.q.row(first + i), x.k.row(first + i), x.v.row(first + i), y.row(i), ws);
    }
    return y;
  }

  /// The same in one call.
  row_matrix<T> block(state& s, const inputs& x, Index first, Index n) {
    row_matrix<T> y(n, H * M);
    attn.forward_causal(s, x.q.middleRows(first, n), x.k.middleRows(first, n), x.v.middleRows(first, n), y, ws);
    return y;
  }

  /// Every verb that may refuse refuses this state, with its name and a sentence.
  void expect_refused(state& s, const std::string& sentence) {
    const inputs x = tokens(2, 1);
    row_matrix<T> y(2, H * M);
    const std::pair<const char*, std::string> texts[] = {
        {"forward", refusal([&] { attn.forward(s, x.q, x.k, x.v, y, ws); })},
        {"forward", refusal([&] { attn.forward(s, x.q, x.k, x.v); })},
        {"forward_causal", refusal([&] { attn.forward_causal(s, x.q, x.k, x.v, y, ws); })},
        {"forward_causal", refusal([&] { attn.forward_causal(s, x.q, x.k, x.v); })},
        {"absorb", refusal([&] { attn.absorb(s, x.k, x.v, ws); })},
        {"absorb", refusal([&] { attn.absorb(s, x.k, x.v); })},
        {"read", refusal([&] { attn.read(s, x.q, y, ws); })},
        {"read", refusal([&] { attn.read(s, x.q); })}};
    for (const auto& [verb, text] : texts) {
      EXPECT_TRUE(contains(text, std::string("linattn::") + verb + ":")) << verb << ": " << text;
      EXPECT_TRUE(contains(text, sentence)) << verb << ": " << text;
    }
  }
};

/// Every test runs with sizes known at run time, where a state owns memory, and at compile time, where it does not.
template <class Operator>
class State : public testing::Test {};
using operators = testing::Types<dynamic<float>, dynamic<double>, fixed<float>, fixed<double>>;
TYPED_TEST_SUITE(State, operators);

/// What an owner of memory leaves behind and a plain value does not.
template <class T>
class DynamicState : public testing::Test {};
using dynamic_operators = testing::Types<dynamic<float>, dynamic<double>>;
TYPED_TEST_SUITE(DynamicState, dynamic_operators);

template <class T>
class FixedState : public testing::Test {};
using fixed_operators = testing::Types<fixed<float>, fixed<double>>;
TYPED_TEST_SUITE(FixedState, fixed_operators);

// ---- what it holds --------------------------------------------------------------------------------------------------

TYPED_TEST(State, JustMadeHasSeenNothing) {
  setup<TypeParam> use;
  const auto s = use.attn.make_state();
  EXPECT_EQ(s.tokens(), 0);
  EXPECT_EQ(s.first_position(), 0);
  EXPECT_EQ(s.heads(), H);
  EXPECT_EQ(s.features(), D);
  EXPECT_EQ(s.value_dim(), M);
  EXPECT_TRUE(support::all_zero(entries(s)));
  EXPECT_EQ(use.attn.make_state(17).first_position(), 17);
}

TYPED_TEST(State, ViewsHaveTheShapesOfTheEquations) {
  using T = typename TypeParam::scalar;
  setup<TypeParam> use;
  auto s = use.after(7, 1);
  const auto& constant = s;
  const auto x = use.tokens(7, 1);
  support::oracle_options o;
  o.heads = H;
  const auto expected = support::oracle_recurrent(support::oracle_elu_plus_one(), x.q, x.k, x.v, o);
  for (Index h = 0; h < H; ++h) {
    ASSERT_EQ(s.kv(h).rows(), D);
    ASSERT_EQ(s.kv(h).cols(), M);
    ASSERT_EQ(s.k_sum(h).size(), D);
    EXPECT_TRUE(support::close(s.kv(h), expected.state.s[std::size_t(h)], support::tolerance<T>::relative_rms));
    EXPECT_TRUE(support::close(s.k_sum(h), expected.state.z[std::size_t(h)], support::tolerance<T>::relative_rms));
    EXPECT_EQ(constant.kv(h).data(), s.kv(h).data());
    EXPECT_EQ(constant.k_sum(h).data(), s.k_sum(h).data());
  }
  // Views into the state, not copies; those of a const state do not write.
  s.kv(1)(2, 1) = T(42);
  s.k_sum(2)[3] = T(43);
  EXPECT_EQ(constant.kv(1)(2, 1), T(42));
  EXPECT_EQ(constant.k_sum(2)[3], T(43));
  static_assert(std::is_const_v<std::remove_pointer_t<decltype(constant.kv(0).data())>> &&
                std::is_const_v<std::remove_pointer_t<decltype(constant.k_sum(0).data())>>);
}

TYPED_TEST(State, RefusesAHeadThatIsNotThere) {
  setup<TypeParam> use;
  auto s = use.attn.make_state();
  const auto& constant = s;
  for (const Index head : {Index(-1), H, H + 1, std::numeric_limits<Index>::max()}) {
    for (const std::string& text : {refusal([&] { s.kv(head); }), refusal([&] { constant.kv(head); }),
                                    refusal([&] { s.k_sum(head); }), refusal([&] { constant.k_sum(head); })}) {
      EXPECT_TRUE(contains(text, std::to_string(head))) << text;
      EXPECT_TRUE(contains(text, std::to_string(H) + " heads")) << text;
    }
  }
}

// Whatever is written through the views is where every path starts from.
TYPED_TEST(State, StartsFromAnySAndZ) {
  using T = typename TypeParam::scalar;
  setup<TypeParam> use;
  const Index n = 11;
  const auto x = use.tokens(n, 2);
  support::oracle_state initial;
  auto start = use.attn.make_state();
  for (Index h = 0; h < H; ++h) {
    start.kv(h) = support::normal_matrix<T>(D, M, 100 + std::uint64_t(h));
    start.k_sum(h) = support::uniform_matrix<T>(1, D, 200 + std::uint64_t(h), 1, 2);
    initial.s.push_back(start.kv(h).template cast<long double>());
    initial.z.push_back(start.k_sum(h).template cast<long double>());
  }
  const auto map = support::oracle_elu_plus_one();
  support::oracle_options o;
  o.heads = H;
  const auto full = support::oracle_recurrent(map, x.q, x.k, x.v, o, &initial);
  o.causal = true;
  const auto causal = support::oracle_recurrent(map, x.q, x.k, x.v, o, &initial);
  constexpr double bound = support::tolerance<T>::relative_rms;

  auto s = start;
  EXPECT_TRUE(support::close(use.block(s, x, 0, n), causal.out, bound));
  auto by_steps = start;
  EXPECT_TRUE(support::close(use.steps(by_steps, x, 0, n), causal.out, bound));
  auto absorbed = start;
  EXPECT_TRUE(support::close(use.attn.forward(absorbed, x.q, x.k, x.v), full.out, bound));
  EXPECT_TRUE(support::close(use.attn.read(absorbed, x.q), full.out, bound));
  for (const auto* end : {&s, &by_steps, &absorbed}) {
    for (Index h = 0; h < H; ++h) {
      EXPECT_TRUE(support::close(end->kv(h), full.state.s[std::size_t(h)], bound));
      EXPECT_TRUE(support::close(end->k_sum(h), full.state.z[std::size_t(h)], bound));
    }
  }
}

TYPED_TEST(State, CountsTokens) {
  setup<TypeParam> use;
  const auto x = use.tokens(9, 3);
  auto s = use.attn.make_state(-3);  // a position is any number
  use.attn.absorb(s, x.k, x.v, use.ws);
  EXPECT_EQ(s.tokens(), 9);
  use.attn.absorb(s, x.k, x.v);
  EXPECT_EQ(s.tokens(), 18);
  use.block(s, x, 2, 5);
  EXPECT_EQ(s.tokens(), 23);
  use.steps(s, x, 0, 2);
  EXPECT_EQ(s.tokens(), 25);
  use.attn.forward(s, x.q.topRows(2), x.k, x.v);  // keys count, queries do not
  EXPECT_EQ(s.tokens(), 34);
  use.attn.read(s, x.q);
  use.block(s, x, 0, 0);
  EXPECT_EQ(s.tokens(), 34);
  EXPECT_EQ(s.first_position(), -3);
  use.attn.forward_causal(x.q, x.k, x.v);  // touches no state
  EXPECT_EQ(s.tokens(), 34);
}

// ---- a value --------------------------------------------------------------------------------------------------------

TYPED_TEST(State, ACopyIsDeep) {
  setup<TypeParam> use;
  const auto x = use.tokens(6, 4);
  auto original = use.after(5, 5);
  const auto untouched = use.after(5, 5);
  auto copy = original;
  EXPECT_TRUE(same(copy, original));
  EXPECT_NE(copy.kv(0).data(), original.kv(0).data());

  const auto y = use.steps(original, x, 0, 6);
  EXPECT_TRUE(same(copy, untouched));
  // The fork goes the same way when it is given the same tokens.
  EXPECT_TRUE(support::same_bits(use.steps(copy, x, 0, 6), y));
  EXPECT_TRUE(same(copy, original));
}

TYPED_TEST(State, AssignmentBetweenEqualSizesKeepsTheMemory) {
  setup<TypeParam> use;
  auto target = use.after(9, 6);
  const auto source = use.after(5, 7);
  const auto* const memory = target.kv(0).data();
  target = source;
  EXPECT_EQ(target.kv(0).data(), memory);
  EXPECT_TRUE(same(target, source));
  auto made = use.attn.make_state(12);
  target = made;
  EXPECT_EQ(target.kv(0).data(), memory);
  EXPECT_EQ(target.first_position(), 12);
  EXPECT_EQ(target.tokens(), 0);
}

TYPED_TEST(State, SelfAssignmentChangesNothing) {
  setup<TypeParam> use;
  auto s = use.after(5, 8);
  const auto before = s;
  auto& itself = s;
  s = itself;
  EXPECT_TRUE(same(s, before));
}

TYPED_TEST(State, MovingCarriesTheSequence) {
  setup<TypeParam> use;
  auto s = use.after(5, 9);
  const auto before = s;
  auto moved = std::move(s);
  EXPECT_TRUE(same(moved, before));
  auto target = use.after(7, 10);
  target = std::move(moved);
  EXPECT_TRUE(same(target, before));
  s = target;  // a moved-from state may be assigned to
  EXPECT_TRUE(same(s, before));
}

TYPED_TEST(DynamicState, MovedFromIsEmptyAndRefused) {
  setup<TypeParam> use;
  auto s = use.after(5, 11);
  const auto taken = std::move(s);
  use.expect_refused(s, "the state is empty");  // NOLINT(bugprone-use-after-move)
  auto target = use.after(3, 11);
  auto other = use.after(5, 11);
  target = std::move(other);
  use.expect_refused(other, "the state is empty");  // NOLINT(bugprone-use-after-move)
  EXPECT_NE(refusal([&] { other.kv(0); }), "");
  EXPECT_NE(refusal([&] { other.k_sum(0); }), "");
  other.reset();
  use.expect_refused(other, "the state is empty");
}

TYPED_TEST(DynamicState, DefaultMadeIsEmptyAndRefused) {
  setup<TypeParam> use;
  typename TypeParam::state_type s;
  use.expect_refused(s, "the state is empty");
  EXPECT_EQ(s.tokens(), 0);
  EXPECT_NE(refusal([&] { s.kv(0); }), "");
  s.reset();
  use.expect_refused(s, "the state is empty");
  s = use.attn.make_state();
  EXPECT_TRUE(same(s, use.attn.make_state()));
}

// With its sizes in the type there is nothing to be empty of: a default-made state is one just made.
TYPED_TEST(FixedState, DefaultMadeIsOneJustMade) {
  setup<TypeParam> use;
  typename TypeParam::state_type s;
  EXPECT_TRUE(same(s, use.attn.make_state()));
  auto made = use.attn.make_state();
  const auto x = use.tokens(6, 12);
  EXPECT_TRUE(support::same_bits(use.block(s, x, 0, 6), use.block(made, x, 0, 6)));
}

TYPED_TEST(State, ResetIsJustMade) {
  using T = typename TypeParam::scalar;
  setup<TypeParam> use;
  const auto x = use.tokens(9, 13);
  for (const Index position : {0, 17}) {
    auto s = use.attn.make_state(position);
    const auto first = use.block(s, x, 0, 9);
    s.kv(0)(0, 0) = std::numeric_limits<T>::quiet_NaN();
    s.k_sum(2)[1] = std::numeric_limits<T>::infinity();
    s.reset();
    EXPECT_TRUE(same(s, use.attn.make_state(position)));
    EXPECT_TRUE(support::same_bits(use.block(s, x, 0, 9), first));
  }
}

TYPED_TEST(State, SnapshotRollsBack) {
  setup<TypeParam> use;
  const auto x = use.tokens(12, 14);
  for (const Index steps : {0, 1, 5}) {
    auto s = use.after(6, 15);
    const auto untouched = use.after(6, 15);
    const auto snapshot = s;
    use.steps(s, x, 0, steps);
    use.block(s, x, 0, steps);
    s = snapshot;
    EXPECT_TRUE(same(s, untouched)) << steps;
    auto straight = use.after(6, 15);
    EXPECT_TRUE(support::same_bits(use.steps(s, x, 5, 4), use.steps(straight, x, 5, 4))) << steps;
  }
}

// ---- sequences ------------------------------------------------------------------------------------------------------

TYPED_TEST(State, TwoSequencesInterleaved) {
  using T = typename TypeParam::scalar;
  setup<TypeParam> use;
  const auto a = use.tokens(9, 16);
  const auto b = use.tokens(9, 17);
  auto alone_a = use.attn.make_state();
  auto alone_b = use.attn.make_state();
  const auto expected_a = use.steps(alone_a, a, 0, 9);
  const auto expected_b = use.steps(alone_b, b, 0, 9);

  auto mixed_a = use.attn.make_state();
  auto mixed_b = use.attn.make_state();
  row_matrix<T> y_a(9, H * M), y_b(9, H * M);
  for (Index i = 0; i < 9; ++i) {  // one workspace serves both
    y_a.row(i) = use.steps(mixed_a, a, i, 1);
    y_b.row(i) = use.steps(mixed_b, b, i, 1);
  }
  EXPECT_TRUE(support::same_bits(y_a, expected_a));
  EXPECT_TRUE(support::same_bits(y_b, expected_b));
  EXPECT_TRUE(same(mixed_a, alone_a));
  EXPECT_TRUE(same(mixed_b, alone_b));
}

TYPED_TEST(State, OneTokenOfManySequencesAtOnce) {
  using T = typename TypeParam::scalar;
  setup<TypeParam> use;
  auto ws = use.attn.make_workspace();
  for (const auto count : {std::size_t(0), std::size_t(1), std::size_t(5)}) {
    std::vector<decltype(use.attn.make_state())> together(count, use.attn.make_state());
    auto alone = together;
    for (std::uint64_t turn = 0; turn < 3; ++turn) {
      const auto x = use.tokens(Index(count), 23 + turn);  // row b: the next token of sequence b
      row_matrix<T> y(Index(count), H * M);
      use.attn.step(together, x.q, x.k, x.v, y, ws);
      for (std::size_t b = 0; b < count; ++b) {
        EXPECT_TRUE(support::same_bits(y.row(Index(b)), use.steps(alone[b], x, Index(b), 1)));
        EXPECT_TRUE(same(together[b], alone[b]));
      }
    }
  }
}

TYPED_TEST(State, SeveralTokensAtOnceInTheMiddleOfDecoding) {
  using T = typename TypeParam::scalar;
  setup<TypeParam> use;
  const auto x = use.tokens(11, 18);
  auto whole = use.attn.make_state();
  const auto expected = use.block(whole, x, 0, 11);

  auto s = use.attn.make_state();
  row_matrix<T> y(11, H * M);
  y.topRows(5) = use.block(s, x, 0, 5);
  y.middleRows(5, 2) = use.steps(s, x, 5, 2);
  y.middleRows(7, 3) = use.block(s, x, 7, 3);
  y.middleRows(10, 1) = use.steps(s, x, 10, 1);
  EXPECT_TRUE(near(y, expected));
  EXPECT_TRUE(near_states(s, whole));
}

// Heads are independent: their loops run over the same numbers in the same order, so the bits are equal.
TYPED_TEST(State, ThreeHeadsAreThreeSingleHeads) {
  using T = typename TypeParam::scalar;
  setup<TypeParam> use;
  const Index n = 37;  // more than one packed block, a ragged end
  const auto x = use.tokens(n, 19);
  auto s = use.attn.make_state();
  const row_matrix<T> causal = use.block(s, x, 0, n);
  const row_matrix<T> full = use.attn.forward(x.q, x.k, x.v);
  auto decoding = use.attn.make_state();
  const row_matrix<T> stepped = use.steps(decoding, x, 0, n);

  const dynamic<T> single({.head_dim = D, .value_dim = M});
  auto ws = single.make_workspace();
  for (Index h = 0; h < H; ++h) {
    const auto q = x.q.middleCols(h * D, D);
    const auto k = x.k.middleCols(h * D, D);
    const auto v = x.v.middleCols(h * M, M);
    auto own = single.make_state();
    EXPECT_TRUE(support::same_bits(causal.middleCols(h * M, M), single.forward_causal(own, q, k, v))) << h;
    EXPECT_TRUE(support::same_bits(s.kv(h), own.kv(0))) << h;
    EXPECT_TRUE(support::same_bits(s.k_sum(h), own.k_sum(0))) << h;
    EXPECT_TRUE(support::same_bits(full.middleCols(h * M, M), single.forward(q, k, v))) << h;
    own.reset();
    row_matrix<T> y(n, M);
    for (Index i = 0; i < n; ++i) single.step(own, q.row(i), k.row(i), v.row(i), y.row(i), ws);
    EXPECT_TRUE(support::same_bits(stepped.middleCols(h * M, M), y)) << h;
    EXPECT_TRUE(support::same_bits(decoding.kv(h), own.kv(0))) << h;
  }
}

// ---- merging --------------------------------------------------------------------------------------------------------

TYPED_TEST(State, MergeAppends) {
  using T = typename TypeParam::scalar;
  setup<TypeParam> use;
  const auto x = use.tokens(13, 20);
  auto whole = use.attn.make_state(4);
  use.attn.absorb(whole, x.k, x.v, use.ws);
  for (const Index cut : {0, 1, 4, 6, 13}) {
    auto earlier = use.attn.make_state(4);
    auto later = use.attn.make_state(4 + cut);
    use.attn.absorb(earlier, x.k.topRows(cut), x.v.topRows(cut), use.ws);
    use.attn.absorb(later, x.k.bottomRows(13 - cut), x.v.bottomRows(13 - cut), use.ws);
    const auto later_before = later;
    earlier.merge(later);
    EXPECT_TRUE(near_states(earlier, whole)) << cut;
    EXPECT_EQ(earlier.first_position(), 4);
    EXPECT_TRUE(same(later, later_before));
  }
  // With nothing on either side, bit for bit.
  auto s = whole;
  s.merge(use.attn.make_state());
  EXPECT_TRUE(same(s, whole));
  auto nothing = use.attn.make_state(4);
  nothing.merge(whole);
  EXPECT_TRUE(same(nothing, whole));
  // With itself: every token twice.
  s.merge(s);
  EXPECT_EQ(s.tokens(), 26);
  EXPECT_TRUE(support::same_bits(entries(s), row_matrix<T>(entries(whole) * T(2))));
}

TYPED_TEST(DynamicState, MergeRefusesOtherSizes) {
  setup<TypeParam> use;
  auto s = use.after(5, 21);
  const auto before = s;
  const linattn::options others[] = {{.head_dim = D + 1, .value_dim = M, .heads = H},
                                     {.head_dim = D, .value_dim = M + 1, .heads = H},
                                     {.head_dim = D, .value_dim = M, .heads = H + 1}};
  for (const auto& other : others) {
    const auto later = TypeParam(other).make_state();
    const std::string text = refusal([&] { s.merge(later); });
    EXPECT_TRUE(contains(text, "merge")) << text;
    EXPECT_TRUE(contains(text, "(3 heads, 5 features, 3 values)")) << text;
    EXPECT_TRUE(contains(text, later.sizes())) << text;
    EXPECT_TRUE(same(s, before));
  }
  EXPECT_NE(refusal([&] { s.merge(typename TypeParam::state_type()); }), "");
  EXPECT_TRUE(same(s, before));
}

TYPED_TEST(DynamicState, MergeRefusesMovedFromStates) {
  setup<TypeParam> use;
  auto s = use.after(5, 22);
  const auto before = s;
  auto gone = use.after(5, 22);
  const auto taken = std::move(gone);
  EXPECT_NE(refusal([&] { gone.merge(s); }), "");  // NOLINT(bugprone-use-after-move)
  EXPECT_NE(refusal([&] { s.merge(gone); }), "");  // NOLINT(bugprone-use-after-move)
  EXPECT_TRUE(same(s, before));
}

// A NaN that a sequence has seen stays in that sequence's head; what lies beside S in memory does not carry it on.
TYPED_TEST(State, ANanStaysInItsHead) {
  using T = typename TypeParam::scalar;
  setup<TypeParam> use;
  auto x = use.tokens(6, 23);
  auto clean = use.attn.make_state();
  use.attn.absorb(clean, x.k, x.v, use.ws);
  x.k(2, D + 1) = std::numeric_limits<T>::quiet_NaN();  // head 1, coordinate 1
  auto s = use.attn.make_state();
  use.attn.absorb(s, x.k, x.v, use.ws);
  for (const Index h : {0, 2}) {
    EXPECT_TRUE(support::same_bits(s.kv(h), clean.kv(h)));
    EXPECT_TRUE(support::same_bits(s.k_sum(h), clean.k_sum(h)));
  }
  for (Index c = 0; c < D; ++c) {
    EXPECT_EQ(std::isnan(s.k_sum(1)[c]), c == 1);
    for (Index m = 0; m < M; ++m) EXPECT_EQ(std::isnan(s.kv(1)(c, m)), c == 1);
  }
}

}  // namespace
