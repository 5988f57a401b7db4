// Heads that share: the operator with few heads of k and v, or of q and k, is the one without sharing that is given
// them as often as they are used.
//
// Rules without correction compute the same chains of roundings either way, so bits are compared; rules with correction
// take other blocks for more readers where the vector instructions have few registers, and are compared by error.
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/sanitizer.hpp"
#include "support/shared_heads.hpp"

#include <linattn/linattn.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace {

using Eigen::Index;
using linattn::decay_kind;
using linattn::head_sharing;
using linattn::row_matrix;
using linattn::vector_view;
using support::heads_of;
using support::shared;

using gated_feature = linattn::gated<decay_kind::per_feature>;
using kimi_delta = linattn::gated_delta<decay_kind::per_feature>;

constexpr Index D = 13, M = 21;  // neither is a multiple of a register
constexpr Index tokens = 45;     // two passes over the tokens, and a ragged block

using counts = support::head_counts;
const std::vector<counts> all_counts = {{2, 1, 1}, {3, 1, 1},  {8, 1, 1}, {6, 2, 2},  {10, 2, 2}, {16, 2, 2}, {9, 3, 3},
                                        {1, 1, 3}, {11, 1, 1}, {2, 2, 6}, {4, 4, 8},  {1, 1, 8},  {6, 1, 2},  {2, 1, 4},
                                        {7, 7, 7}, {4, 2, 4},  {5, 1, 5}, {24, 4, 8}, {2, 4, 4}};

/// Inputs of every rule, shared or repeated for each output head.
template <class T>
struct problem {
  row_matrix<T> q, k, v, log_decay, log_decays, beta, a, b, bonus;
  std::vector<double> fixed;

  problem() = default;
  problem(const counts& n, Index rows, std::uint64_t seed) {
    seed *= 16;
    q = support::normal_matrix<T>(rows, n.queries * D, seed++);
    k = support::normal_matrix<T>(rows, n.keys * D, seed++, 1 / std::sqrt(double(D)));
    v = support::normal_matrix<T>(rows, n.values * M, seed++);
    log_decay = support::uniform_matrix<T>(rows, n.values, seed++, -0.5, 0);
    log_decays = support::uniform_matrix<T>(rows, n.values * D, seed++, -0.5, 0);
    beta = support::uniform_matrix<T>(rows, n.values, seed++);
    a = support::normal_matrix<T>(rows, n.values * D, seed++, 1 / std::sqrt(double(D)));
    b = -a * T(0.5);
    bonus = support::normal_matrix<T>(rows, n.values * D, seed++);
    for (Index s = 0; s < n.values; ++s) fixed.push_back(-0.1 * double(s));
  }

  /// What an operator with n.outputs() heads of everything is given.
  problem repeated(const counts& n, head_sharing how) const {
    const Index all = n.outputs();
    const auto state = [&](Index h) { return shared(how, h, n.values, all); };
    problem p;
    p.q = heads_of(q, all, D, [&](Index h) { return shared(how, h, n.queries, all); });
    p.k = heads_of(k, all, D, [&](Index h) { return shared(how, state(h), n.keys, n.values); });
    p.v = heads_of(v, all, M, state);
    p.log_decay = heads_of(log_decay, all, 1, state);
    p.log_decays = heads_of(log_decays, all, D, state);
    p.beta = heads_of(beta, all, 1, state);
    p.a = heads_of(a, all, D, state);
    p.b = heads_of(b, all, D, state);
    p.bonus = heads_of(bonus, all, D, state);
    for (Index h = 0; h < all; ++h) p.fixed.push_back(fixed[std::size_t(state(h))]);
    return p;
  }

  problem rows(Index first, Index count) const {
    problem p = *this;
    for (const auto x : {&problem::q, &problem::k, &problem::v, &problem::log_decay, &problem::log_decays,
                         &problem::beta, &problem::a, &problem::b, &problem::bonus}) {
      p.*x = (this->*x).middleRows(first, count).eval();
    }
    return p;
  }

  template <class Operator>
  typename Operator::inputs inputs() const {
    typename Operator::inputs x;
    if constexpr (requires { x.log_decay; }) {
      x.log_decay = Operator::rule.decay == decay_kind::per_feature ? log_decays : log_decay;
    }
    if constexpr (requires { x.beta; }) x.beta = beta;
    if constexpr (requires { x.a; }) x.a = a;
    if constexpr (requires { x.b; }) x.b = b;
    if constexpr (requires { x.bonus; }) x.bonus = bonus;
    return x;
  }
};

template <class Types>
class HeadSharing : public testing::Test {
 public:
  using map = std::tuple_element_t<0, Types>;
  using rule = std::tuple_element_t<1, Types>;
  using T = std::tuple_element_t<2, Types>;
  using operator_type = linattn::linear_attention<map, rule, T>;
  using state_type = typename operator_type::state_type;
  using inputs = problem<T>;

  static operator_type make(const counts& n, head_sharing how, const inputs& p) {
    rule given;
    if constexpr (rule::traits.fixed_decay) given.log_decay = p.fixed;
    return operator_type({.head_dim = D,
                          .value_dim = M,
                          .heads = n.queries,
                          .key_heads = n.keys,
                          .value_heads = n.values,
                          .sharing = how,
                          .query_scale = 0.5},
                         map(), given);
  }

  static void expect_same(const row_matrix<T>& actual, const row_matrix<T>& expected) {
    if constexpr (rule::traits.corrects == linattn::correction::none) {
      EXPECT_TRUE(support::bitwise_equal(actual, expected));
    } else {
      EXPECT_TRUE(support::close(actual, expected, support::tolerance<T>::relative_rms));
    }
  }

  /// S, and z, of the state that each head of `repeated` holds for itself.
  static void expect_same_states(const state_type& s, const state_type& repeated, head_sharing how) {
    for (Index h = 0; h < repeated.heads(); ++h) {
      const Index from = shared(how, h, s.heads(), repeated.heads());
      expect_same(s.kv(from), repeated.kv(h));
      if constexpr (rule::traits.normalizes) expect_same(s.k_sum(from), repeated.k_sum(h));
    }
  }

  /// f(shared operator, its inputs, operator without sharing, its inputs, how) for all counts and both mappings.
  template <class F>
  static void for_each(const F& f) {
    std::uint64_t seed = 0;
    for (const counts& n : all_counts) {
      for (const head_sharing how : {head_sharing::interleaved, head_sharing::tiled}) {
        SCOPED_TRACE(n.name(how));
        const inputs p(n, tokens, ++seed);
        const inputs r = p.repeated(n, how);
        f(make(n, how, p), p, make({n.outputs(), n.outputs(), n.outputs()}, head_sharing::interleaved, r), r, how);
      }
    }
  }

  static row_matrix<T> step_all(const operator_type& attn, state_type& s, const inputs& p) {
    row_matrix<T> out(p.q.rows(), attn.output_heads() * M);
    auto ws = attn.make_workspace();
    for (Index i = 0; i < p.q.rows(); ++i) {
      // One row as a token: of many sequences there is one.
      const inputs row = p.rows(i, 1);
      attn.step(std::span<state_type>(&s, 1), row.q, row.k, row.v, row.template inputs<operator_type>(),
                out.middleRows(i, 1), ws);
    }
    return out;
  }
};

template <class... Types>
using cases = testing::Types<Types...>;
#if defined(LINATTN_UNDER_SANITIZER)
// One of each kind, among them both scalars: heads are addressed the same way for all.
using all_types = cases<std::tuple<linattn::elu_plus_one, linattn::additive, float>,
                        std::tuple<linattn::identity, linattn::gated_bonus, float>,
                        std::tuple<linattn::identity, kimi_delta, double>>;
#else
using all_types = cases<
    std::tuple<linattn::elu_plus_one, linattn::additive, float>,
    std::tuple<linattn::elu_plus_one, linattn::additive, double>,
    std::tuple<linattn::exponential, linattn::additive, float>, std::tuple<linattn::identity, linattn::decay, float>,
    std::tuple<linattn::identity, linattn::gated<>, float>, std::tuple<linattn::identity, gated_feature, double>,
    std::tuple<linattn::identity, linattn::gated_bonus, float>, std::tuple<linattn::identity, linattn::delta, double>,
    std::tuple<linattn::identity, linattn::gated_delta<>, float>, std::tuple<linattn::identity, kimi_delta, double>,
    std::tuple<linattn::identity, linattn::generalized_delta, double>>;
#endif
TYPED_TEST_SUITE(HeadSharing, all_types);

TYPED_TEST(HeadSharing, CausalIsTheOperatorWithHeadsRepeated) {
  using fixture = TestFixture;
  fixture::for_each([](const auto& attn, const auto& p, const auto& all, const auto& r, head_sharing how) {
    auto s = attn.make_state();
    auto t = all.make_state();
    fixture::expect_same(attn.forward_causal(s, p.q, p.k, p.v, p.template inputs<typename fixture::operator_type>()),
                         all.forward_causal(t, r.q, r.k, r.v, r.template inputs<typename fixture::operator_type>()));
    fixture::expect_same_states(s, t, how);
    EXPECT_EQ(s.tokens(), tokens);
  });
}

TYPED_TEST(HeadSharing, StepsAreTheOperatorWithHeadsRepeated) {
  using fixture = TestFixture;
  fixture::for_each([](const auto& attn, const auto& p, const auto& all, const auto& r, head_sharing how) {
    auto s = attn.make_state();
    auto t = all.make_state();
    fixture::expect_same(fixture::step_all(attn, s, p.rows(0, 5)), fixture::step_all(all, t, r.rows(0, 5)));
    fixture::expect_same_states(s, t, how);
  });
}

TYPED_TEST(HeadSharing, AbsorbAndReadAreTheOperatorWithHeadsRepeated) {
  using fixture = TestFixture;
  fixture::for_each([](const auto& attn, const auto& p, const auto& all, const auto& r, head_sharing how) {
    auto s = attn.make_state();
    auto t = all.make_state();
    attn.absorb(s, p.k, p.v, p.template inputs<typename fixture::operator_type>());
    all.absorb(t, r.k, r.v, r.template inputs<typename fixture::operator_type>());
    fixture::expect_same_states(s, t, how);
    fixture::expect_same(attn.read(s, p.q), all.read(t, r.q));
  });
}

// Law 6, and law 2: a row's bits do not depend on what follows it, and calls may be split anywhere.
TYPED_TEST(HeadSharing, RowsDependOnEarlierRowsOnly) {
  using fixture = TestFixture;
  fixture::for_each([](const auto& attn, const auto& p, const auto&, const auto&, head_sharing) {
    const auto whole = attn.forward_causal(p.q, p.k, p.v, p.template inputs<typename fixture::operator_type>());
    for (const Index n : {Index(1), Index(7), Index(33)}) {
      auto s = attn.make_state();
      const auto head = p.rows(0, n), tail = p.rows(n, tokens - n);
      const auto first =
          attn.forward_causal(s, head.q, head.k, head.v, head.template inputs<typename fixture::operator_type>());
      EXPECT_TRUE(support::bitwise_equal(first, whole.topRows(n).eval()));
      fixture::expect_same(
          attn.forward_causal(s, tail.q, tail.k, tail.v, tail.template inputs<typename fixture::operator_type>()),
          whole.bottomRows(tokens - n).eval());
    }
  });
}

TEST(HeadSharingSegments, MergeAsTheirTokensWould) {
  using fixture = HeadSharing<std::tuple<linattn::identity, linattn::gated_delta<>, double>>;
  fixture::for_each([](const auto& attn, const auto& p, const auto&, const auto&, head_sharing) {
    using operator_type = typename fixture::operator_type;
    auto s = attn.make_state();
    auto t = attn.make_state();
    auto segment = attn.make_segment(7);
    const auto head = p.rows(0, 7), tail = p.rows(7, tokens - 7);
    for (auto* const x : {&s, &t}) attn.absorb(*x, head.k, head.v, head.template inputs<operator_type>());
    attn.absorb(s, tail.k, tail.v, tail.template inputs<operator_type>());
    attn.absorb(segment, tail.k, tail.v, tail.template inputs<operator_type>());
    t.merge(segment);
    for (Index h = 0; h < s.heads(); ++h) fixture::expect_same(t.kv(h), s.kv(h));
  });
}

template <class T>
class SharedSums : public HeadSharing<std::tuple<linattn::elu_plus_one, linattn::additive, T>> {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(SharedSums, scalars);

TYPED_TEST(SharedSums, NonCausalAndDenominatorsAreTheOperatorWithHeadsRepeated) {
  using fixture = TestFixture;
  fixture::for_each([](const auto& attn, const auto& p, const auto& all, const auto& r, head_sharing) {
    auto s = attn.make_state();
    auto t = all.make_state();
    fixture::expect_same(attn.forward(s, p.q, p.k, p.v), all.forward(t, r.q, r.k, r.v));
    auto ws = attn.make_workspace();
    auto all_ws = all.make_workspace();
    row_matrix<TypeParam> out(tokens, attn.output_heads() * M), denominators(tokens, attn.output_heads());
    row_matrix<TypeParam> all_out = out, all_denominators = denominators;
    attn.read(s, p.q, out, ws, denominators);
    all.read(t, r.q, all_out, all_ws, all_denominators);
    fixture::expect_same(out, all_out);
    fixture::expect_same(denominators, all_denominators);
  });
}

// ---- options and shapes ---------------------------------------------------------------------------------------------

using additive_attention = linattn::linear_attention<linattn::elu_plus_one>;

TEST(HeadSharingOptions, CountsAndTheirDefaults) {
  const additive_attention grouped({.head_dim = 4, .heads = 8, .key_heads = 2});
  EXPECT_EQ(grouped.heads(), 8);
  EXPECT_EQ(grouped.key_heads(), 2);
  EXPECT_EQ(grouped.value_heads(), 2);
  EXPECT_EQ(grouped.output_heads(), 8);
  EXPECT_EQ(grouped.make_state().heads(), 2);
  const additive_attention inverse({.head_dim = 4, .heads = 2, .value_heads = 6});
  EXPECT_EQ(inverse.key_heads(), 2);
  EXPECT_EQ(inverse.output_heads(), 6);
  EXPECT_EQ(inverse.make_state().heads(), 6);
}

template <class F>
void expect_refusal(const F& f, const std::vector<std::string>& parts) {
  try {
    f();
    ADD_FAILURE() << "not refused";
  } catch (const std::invalid_argument& error) {
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what() << " lacks " << part;
    }
  }
}

TEST(HeadSharingOptions, CountsThatDoNotDivide) {
  const std::vector<counts> wrong = {{3, 2, 2}, {2, 3, 3}, {8, 8, 2}, {4, 3, 4}, {5, 1, 2}, {6, 4, 6}};
  for (const counts& n : wrong) {
    expect_refusal(
        [&] { additive_attention({.head_dim = 4, .heads = n.queries, .key_heads = n.keys, .value_heads = n.values}); },
        {"linattn::linear_attention: ", "heads is " + std::to_string(n.queries),
         "key_heads is " + std::to_string(n.keys), "value_heads is " + std::to_string(n.values), "divide"});
  }
}

TEST(HeadSharingOptions, FixedHeadsAreNotShared) {
  using fixed = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, float, 4, 4, 8>;
  expect_refusal([] { fixed({.key_heads = 2}); }, {"key_heads is 2", "8 in the type"});
  expect_refusal([] { fixed({.value_heads = 2}); }, {"value_heads is 2", "8 in the type"});
}

TEST(HeadSharingOptions, ADecayRuleHasOneDecayAState) {
  using attention = linattn::linear_attention<linattn::identity, linattn::decay>;
  const linattn::options grouped{.head_dim = 4, .heads = 8, .key_heads = 2};
  EXPECT_NO_THROW(attention(grouped, {}, linattn::decay({-0.1, -0.2})));
  expect_refusal([&] { attention(grouped, {}, linattn::decay(std::vector<double>(8, -0.1))); },
                 {"8 log-decays for 2 heads"});
}

TEST(HeadSharingShapes, AreRefusedBeforeAnythingIsWritten) {
  const additive_attention attn({.head_dim = D, .value_dim = M, .heads = 8, .key_heads = 2, .value_heads = 4});
  const problem<float> p({8, 2, 4}, 3, 1);
  auto s = attn.make_state();
  auto ws = attn.make_workspace();
  row_matrix<float> out = row_matrix<float>::Constant(3, 8 * M, 7);
  const row_matrix<float> before = out;
  const row_matrix<float> wide = row_matrix<float>::Zero(3, 8 * M);
  expect_refusal([&] { attn.forward_causal(s, p.q, p.q, p.v, out, ws); }, {"k is (3, 104)", "(3, 26)"});
  expect_refusal([&] { attn.forward_causal(s, p.k, p.k, p.v, out, ws); }, {"q is (3, 26)", "(3, 104)"});
  expect_refusal([&] { attn.forward_causal(s, p.q, p.k, wide, out, ws); }, {"v is (3, 168)", "(3, 84)"});
  row_matrix<float> narrow = row_matrix<float>::Zero(3, 4 * M);
  expect_refusal([&] { attn.forward_causal(s, p.q, p.k, p.v, narrow, ws); }, {"out is (3, 84)", "(3, 168)"});
  EXPECT_EQ(out, before);
  EXPECT_EQ(s.tokens(), 0);
  EXPECT_NO_THROW(attn.forward_causal(s, p.q, p.k, p.v, out, ws));
  auto other = additive_attention({.head_dim = D, .value_dim = M, .heads = 8}).make_state();
  expect_refusal([&] { attn.read(other, p.q); }, {"8 heads", "4 heads"});
}

}  // namespace
