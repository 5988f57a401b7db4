// Half and bfloat16 storage: what a float operator computes from the same numbers, each output rounded once. The rules
// that ONNX knows are tested in test_onnx.cpp, in both types; here are those with the other inputs.
#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/feature_maps/identity.hpp>
#include <linattn/linear_attention.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/rule_calls.hpp"
#include "support/rule_inputs.hpp"
#include "support/sentinel.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

using Eigen::Index;
using linattn::row_matrix;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// As Eigen's scalars round, one by one.
template <class S>
row_matrix<S> rounded(const row_matrix<float>& x) {
  return x.cast<S>();
}

// ---- registers ------------------------------------------------------------------------------------------------------

using P = linattn::detail::packet<float>;

template <class S>
class NarrowStorage : public testing::Test {};
using narrow_types = testing::Types<Eigen::half, Eigen::bfloat16>;
TYPED_TEST_SUITE(NarrowStorage, narrow_types);

/// All 2^16 of them.
template <class S>
std::vector<S> all_numbers() {
  std::vector<S> all;
  for (std::uint32_t i = 0; i < 0x10000; ++i) all.push_back(std::bit_cast<S>(static_cast<std::uint16_t>(i)));
  return all;
}

template <class S>
void expect_same(S actual, S expected, float from) {
  if (support::classify(expected) == support::number::nan) {
    EXPECT_EQ(support::classify(actual), support::number::nan);
  } else {
    EXPECT_EQ(std::bit_cast<std::uint16_t>(actual), std::bit_cast<std::uint16_t>(expected)) << from;
  }
}

TYPED_TEST(NarrowStorage, EveryNumberIsWidenedExactly) {
  const std::vector<TypeParam> all = all_numbers<TypeParam>();
  std::vector<float> wide(all.size());
  for (Index i = 0; i < Index(all.size()); i += P::size) {
    P::load_unaligned(all.data() + i).store_unaligned(wide.data() + i);
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    const float expected = float(all[i]);
    if (support::classify(expected) == support::number::nan) {
      EXPECT_EQ(support::classify(wide[i]), support::number::nan) << i;
    } else {
      EXPECT_EQ(std::bit_cast<std::uint32_t>(wide[i]), std::bit_cast<std::uint32_t>(expected)) << i;
    }
  }
}

// Every number, the middle between it and the next one, where even numbers win, and the floats on either side of these;
// among them the last that is finite, and subnormal numbers of both types.
TYPED_TEST(NarrowStorage, FloatsAreRoundedToTheNearestEvenNumber) {
  std::vector<float> floats;
  for (const TypeParam& x : all_numbers<TypeParam>()) {
    const auto bits = std::bit_cast<std::uint32_t>(float(x));
    for (const std::uint32_t step : {0u, 0x800u, 0x1000u, 0x8000u}) {  // 0x800: half's subnormal numbers, from 2^-23 on
      for (const std::uint32_t neighbour : {0u, 1u, ~0u})
        floats.push_back(std::bit_cast<float>(bits + step + neighbour));
    }
  }
  support::random_bits random(1);
  for (int i = 0; i < 0x10000; ++i) floats.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random.next())));
  ASSERT_EQ(Index(floats.size()) % P::size, 0);
  std::vector<TypeParam> narrow(floats.size());
  for (Index i = 0; i < Index(floats.size()); i += P::size) {
    P::load_unaligned(floats.data() + i).store_unaligned(narrow.data() + i);
  }
  for (std::size_t i = 0; i < floats.size(); ++i) expect_same(narrow[i], TypeParam(floats[i]), floats[i]);
}

TYPED_TEST(NarrowStorage, PartialRegistersLeaveTheRestAlone) {
  for (Index n = 1; n < P::size; ++n) {
    // A heap buffer without a byte to spare: what is read beyond it, AddressSanitizer sees.
    std::vector<TypeParam> stored;
    for (Index i = 0; i < n; ++i) stored.push_back(TypeParam(float(i + 2)));
    std::vector<float> wide(std::size_t(P::size), nan);
    P::load_partial(stored.data(), n).store_unaligned(wide.data());
    std::vector<TypeParam> back(std::size_t(P::size), TypeParam(-1.F));
    (P::load_unaligned(wide.data()) + P(1.F)).store_partial(back.data(), n);
    for (Index i = 0; i < P::size; ++i) {
      EXPECT_EQ(wide[std::size_t(i)], i < n ? float(i + 2) : 0.F);
      EXPECT_EQ(float(back[std::size_t(i)]), i < n ? float(i + 3) : -1.F);
    }
  }
}

/// Of two heads: with their number in the type there are no passes of shared heads to compile.
template <class Map, class Rule, class S>
auto operator_of(const linattn::options& o) {
  return linattn::linear_attention<Map, Rule, S, Eigen::Dynamic, Eigen::Dynamic, 2>(o);
}

// ---- every verb of the rules ----------------------------------------------------------------------------------------

/// Inputs that S holds, in S and in float.
template <class S>
struct both {
  support::rule_tokens<S> narrow;
  support::rule_tokens<float> wide;

  both(support::rule_kind kind, const support::rule_shape& shape, std::uint64_t seed,
       const support::rule_patterns& patterns)
      : narrow(kind, {}, seed), wide(kind, shape, seed, patterns) {
    narrow.shape = shape;
    const auto take = [](row_matrix<S>& to, row_matrix<float>& from) {
      to = rounded<S>(from);
      from = to.template cast<float>();
    };
    take(narrow.q, wide.q), take(narrow.k, wide.k), take(narrow.v, wide.v);
    take(narrow.log_decay, wide.log_decay), take(narrow.beta, wide.beta);
    take(narrow.a, wide.a), take(narrow.b, wide.b), take(narrow.bonus, wide.bonus);
  }
};

template <class Rule_, class S_>
struct stored_rule {
  using Rule = Rule_;
  using S = S_;
};

template <class X>
class NarrowRules : public testing::Test {};
using rules = testing::Types<stored_rule<linattn::gated_bonus, Eigen::bfloat16>,
                             stored_rule<linattn::generalized_delta, Eigen::half>>;
TYPED_TEST_SUITE(NarrowRules, rules);

TYPED_TEST(NarrowRules, AreFloatWithOneRounding) {
  using S = typename TypeParam::S;
  using Rule = typename TypeParam::Rule;
  const std::vector<support::rule_shape> shapes = {
      {.tokens = 1, .features = 1, .value_dim = 1, .heads = 2},
      {.tokens = 37, .features = 17, .value_dim = 9, .heads = 2},
      {.tokens = 75, .features = 5, .value_dim = 40, .heads = 2},
  };
  std::uint64_t seed = 1;
  for (const support::gate_set& gates : support::gate_sets()) {
    for (const support::rule_shape& shape : shapes) {
      const both<S> x(support::rule_kind_of<Rule>(), shape, seed++, {.gates = gates});
      const linattn::options o{.head_dim = shape.features, .value_dim = shape.value_dim, .query_scale = 0.5};
      const auto narrow = operator_of<linattn::identity, Rule, S>(o);
      const auto wide = operator_of<linattn::identity, Rule, float>(o);
      const auto narrow_inputs = support::inputs_of<decltype(narrow)>(x.narrow);
      const auto wide_inputs = support::inputs_of<decltype(wide)>(x.wide);
      auto ws = narrow.make_workspace();
      auto s = narrow.make_state();
      auto expected_state = wide.make_state();
      const row_matrix<float> expected = wide.forward_causal(expected_state, x.wide.q, x.wide.k, x.wide.v, wide_inputs);

      support::framed<S> out(shape.tokens, x.narrow.v.cols());
      narrow.forward_causal(s, x.narrow.q, x.narrow.k, x.narrow.v, narrow_inputs, out.matrix(), ws);
      EXPECT_TRUE(support::same_bits(out.matrix(), rounded<S>(expected))) << gates.name;
      EXPECT_TRUE(out.frame_intact());
      EXPECT_TRUE(support::same_bits(support::contents_of(s), support::contents_of(expected_state)));

      const both<S> few(x.narrow.kind,
                        {std::min(shape.tokens, Index(16)), shape.features, shape.value_dim, shape.heads}, seed,
                        {.gates = gates});
      auto draft = narrow.make_draft();
      auto expected_draft = wide.make_draft();
      auto wide_ws = wide.make_workspace();
      row_matrix<S> proposed(few.narrow.shape.tokens, few.narrow.v.cols());
      row_matrix<float> expected_proposed(proposed.rows(), proposed.cols());
      narrow.forward_causal(std::as_const(s), few.narrow.q, few.narrow.k, few.narrow.v,
                            support::inputs_of<decltype(narrow)>(few.narrow), proposed, draft, ws);
      wide.forward_causal(std::as_const(expected_state), few.wide.q, few.wide.k, few.wide.v,
                          support::inputs_of<decltype(wide)>(few.wide), expected_proposed, expected_draft, wide_ws);
      EXPECT_TRUE(support::same_bits(proposed, rounded<S>(expected_proposed)));
      auto put_off = s;
      auto expected_put_off = expected_state;
      draft.clear(), expected_draft.clear();
      EXPECT_TRUE(support::same_bits(support::step_over(narrow, put_off, few.narrow, draft),
                                     rounded<S>(support::step_over(wide, expected_put_off, few.wide, expected_draft))));

      if constexpr (Rule::traits.corrects != linattn::correction::none) {
        EXPECT_TRUE(support::same_bits(support::step_over(narrow, s, x.narrow),
                                       rounded<S>(support::step_over(wide, expected_state, x.wide))));
        // A call without a state leaves its own in the workspace, where segments then keep a row of zeros.
        narrow.forward_causal(x.narrow.q, x.narrow.k, x.narrow.v, narrow_inputs, out.matrix(), ws);
        auto segment = narrow.make_segment();
        auto expected_segment = wide.make_segment();
        narrow.absorb(segment, x.narrow.k, x.narrow.v, narrow_inputs, ws);
        wide.absorb(expected_segment, x.wide.k, x.wide.v, wide_inputs, wide_ws);
        s.merge(segment);
        expected_state.merge(expected_segment);
        EXPECT_TRUE(support::same_bits(support::contents_of(s), support::contents_of(expected_state)));
      }
    }
  }
}

// ---- attention with a normaliser ------------------------------------------------------------------------------------

/// q, k and v of an operator that normalises, in S and in float.
template <class S>
struct attention_pair {
  row_matrix<float> q, k, v;
  row_matrix<S> narrow_q, narrow_k, narrow_v;

  attention_pair(Index tokens, Index query_cols, Index value_cols) {
    const support::attention_inputs<float> x(tokens, query_cols, value_cols, 5);
    q = x.q, k = x.k, v = x.v;
    round();
  }
  void round() {
    narrow_q = rounded<S>(q), narrow_k = rounded<S>(k), narrow_v = rounded<S>(v);
    q = narrow_q.template cast<float>(), k = narrow_k.template cast<float>(), v = narrow_v.template cast<float>();
  }
};

template <class S>
void expect_float_with_one_rounding(const linattn::options& o, const attention_pair<S>& x) {
  const auto narrow = operator_of<linattn::elu_plus_one, linattn::additive, S>(o);
  const auto wide = operator_of<linattn::elu_plus_one, linattn::additive, float>(o);
  // 0 ulp: the same numbers, and NaN where NaN is.
  EXPECT_TRUE(support::within_ulps(narrow.forward_causal(x.narrow_q, x.narrow_k, x.narrow_v),
                                   rounded<S>(wide.forward_causal(x.q, x.k, x.v)), 0));
  auto s = narrow.make_state();
  auto expected_state = wide.make_state();
  EXPECT_TRUE(support::within_ulps(narrow.forward(s, x.narrow_q, x.narrow_k, x.narrow_v),
                                   rounded<S>(wide.forward(expected_state, x.q, x.k, x.v)), 0));
  auto ws = narrow.make_workspace();
  row_matrix<S> out(x.q.rows(), narrow.output_heads() * narrow.value_dim());
  row_matrix<float> denominators(out.rows(), narrow.output_heads()), expected = denominators;
  row_matrix<float> expected_out(out.rows(), out.cols());
  narrow.read(s, x.narrow_q, out, ws, denominators);
  wide.read(expected_state, x.q, expected_out, ws, expected);
  EXPECT_TRUE(support::within_ulps(denominators, expected, 0));
}

TEST(NarrowAttention, NormalisesInFloat) {
  for (const Index n : {1, 7, 130}) {
    expect_float_with_one_rounding<Eigen::half>({.head_dim = 19, .value_dim = 33}, {n, 38, 66});
  }
}

TEST(NarrowAttention, NanAndInfinityAndSubnormalNumbersAreThoseOfFloat) {
  LINATTN_NEEDS_NAN();
  for (const float special : {nan, infinity, -infinity, 0x1p-24F, -0x1p-20F, 65504.F}) {
    attention_pair<Eigen::half> x(9, 40, 40);
    x.q(2, 3) = x.k(4, 19) = x.v(6, 0) = special;
    x.round();
    expect_float_with_one_rounding({.head_dim = 20}, x);
  }
}

TEST(NarrowAttention, OutputsBeyondHalfAreInfinite) {
  LINATTN_NEEDS_NAN();
  attention_pair<Eigen::half> x(5, 4, 4);
  x.v.setConstant(60000);
  x.round();
  const auto attention =
      operator_of<linattn::elu_plus_one, linattn::additive, Eigen::half>({.head_dim = 2, .normalize = false});
  const row_matrix<Eigen::half> out = attention.forward_causal(x.narrow_q, x.narrow_k, x.narrow_v);
  EXPECT_EQ(float(out(4, 0)), infinity);
}

}  // namespace
