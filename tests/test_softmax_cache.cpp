// cached_softmax: equal to the reference, the same bits however a sequence is cut, no heap in the production calls.
namespace {
void note_failed_assertion(const char* condition);
}
#define LINATTN_ASSERT(condition) ((condition) ? void() : note_failed_assertion(#condition))

#include <linattn/softmax_cache.hpp>

#include <linattn/reference.hpp>

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/reference_data.hpp"
#include "support/refusal.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

/// `step` cannot throw, and what follows a failed precondition cannot go on: the program ends, in a test that forks.
void note_failed_assertion(const char* condition) {
  std::fprintf(stderr, "%s\n", condition);
  std::exit(3);
}

using Eigen::Index;
using linattn::cached_softmax;
using linattn::row_matrix;
using support::tolerance;

/// What the reference is evaluated in: a wider type than the one under test.
template <class T>
using wide = std::conditional_t<std::is_same_v<T, float>, double, long double>;

/// A block of the online softmax; rows that are computed together; a panel of keys in any build is at most this long.
constexpr Index block = linattn::detail::softmax_layout<float>::block;
constexpr Index panel = 64;

template <class T>
class SoftmaxCache : public testing::Test {
 protected:
  using attention = cached_softmax<T>;
  using state = typename attention::state_type;
  using inputs = support::attention_inputs<T>;

  static inputs make_inputs(const attention& attn, Index queries, Index keys, std::uint64_t seed, double sigma = 1) {
    inputs x(queries, keys, attn.heads() * attn.head_dim(), attn.value_heads() * attn.value_dim(), seed, sigma);
    return x;
  }
  static row_matrix<wide<T>> reference(const attention& attn, const inputs& x, bool causal) {
    linattn::reference_options o;
    o.heads = attn.heads();
    o.causal = causal;
    return linattn::softmax_attention<wide<T>>(x.q, x.k, x.v, o);
  }
  static row_matrix<T> steps(const attention& attn, state& s, const inputs& x) {
    row_matrix<T> out(x.q.rows(), attn.output_heads() * attn.value_dim());
    auto ws = attn.make_workspace();
    for (Index t = 0; t < x.q.rows(); ++t) attn.step(s, x.q.row(t), x.k.row(t), x.v.row(t), out.row(t), ws);
    return out;
  }
};
using float_types = testing::Types<float, double>;
TYPED_TEST_SUITE(SoftmaxCache, float_types);

// ---- against others -------------------------------------------------------------------------------------------------

TYPED_TEST(SoftmaxCache, EqualsTheReferenceAtOddSizes) {
  using T = TypeParam;
  std::uint64_t seed = 0;
  for (const Index dim : {1, 2, 3, 7, 8, 9, 15, 16, 17, 64, 65}) {
    const Index value_dim = dim % 2 == 0 ? dim : (3 * dim) % 20 + 1, heads = dim < 10 ? 3 : 1;
    const cached_softmax<T> attn({.head_dim = dim, .value_dim = value_dim, .heads = heads});
    for (const Index n : {Index(1), Index(2), Index(9), panel - 1, panel + 1, block + 7}) {
      const auto x = this->make_inputs(attn, n, n, ++seed);
      EXPECT_TRUE(support::close(attn.forward_causal(x.q, x.k, x.v), this->reference(attn, x, true),
                                 tolerance<T>::relative_rms))
          << "causal, N = " << n << ", D = " << dim;
      EXPECT_TRUE(
          support::close(attn.forward(x.q, x.k, x.v), this->reference(attn, x, false), tolerance<T>::relative_rms))
          << "N = " << n << ", D = " << dim;
    }
  }
}

TYPED_TEST(SoftmaxCache, EqualsTheReferenceOverSeveralBlocks) {
  using T = TypeParam;
  const cached_softmax<T> attn({.head_dim = 8, .heads = 2});
  auto x = this->make_inputs(attn, 3 * block + 5, 3 * block + 5, 1);
  EXPECT_TRUE(
      support::close(attn.forward_causal(x.q, x.k, x.v), this->reference(attn, x, true), tolerance<T>::relative_rms));
  x = this->make_inputs(attn, 21, 3 * block + 5, 2);
  EXPECT_TRUE(support::close(attn.forward(x.q, x.k, x.v), this->reference(attn, x, false), tolerance<T>::relative_rms));
  // Every block brings a larger logit, so that what was summed before has to shrink.
  x.q.setOnes();
  for (Index t = 0; t < x.k.rows(); ++t) x.k.row(t).setConstant(T(0.002) * T(t));
  EXPECT_TRUE(support::close(attn.forward(x.q, x.k, x.v), this->reference(attn, x, false), tolerance<T>::relative_rms));
}

TYPED_TEST(SoftmaxCache, EqualsPyTorch) {
  using T = TypeParam;
  for (const char* name : {"softmax_causal_02_grad", "softmax_noncausal_07_allmasked_grad"}) {
    const auto c = support::reference_case::load(name);
    const cached_softmax<T> attn(
        {.head_dim = Index(c.number("dk")), .value_dim = Index(c.number("dv")), .heads = Index(c.number("H"))},
        Index(c.number("M")));
    for (Index b = 0; b < Index(c.number("B")); ++b) {
      const row_matrix<T> q = c.tokens<T>("q", b), k = c.tokens<T>("k", b), v = c.tokens<T>("v", b);
      const row_matrix<double> expected = c.tokens<double>("o", b);
      auto s = attn.make_state();
      if (c.number("causal") == 1) {
        EXPECT_TRUE(support::close(attn.forward_causal(s, q, k, v), expected, tolerance<T>::relative_rms)) << name;
        continue;
      }
      const auto length = Index(c.array("key_lengths").values[std::size_t(b)]);
      const row_matrix<T> out = attn.forward(s, q, k.topRows(length), v.topRows(length));
      EXPECT_TRUE(support::close(out, expected, tolerance<T>::relative_rms)) << name << ", length " << length;
      if (length == 0) {
        EXPECT_TRUE(support::all_zero(out)) << name;
      }
    }
  }
}

TYPED_TEST(SoftmaxCache, ScaleMultipliesTheUsualOne) {
  using T = TypeParam;
  const cached_softmax<T> attn({.head_dim = 5, .heads = 2, .query_scale = -0.7});
  const auto x = this->make_inputs(attn, 9, 30, 3);
  linattn::reference_options o;
  o.heads = 2;
  o.scale = -0.7 / std::sqrt(5.0);
  EXPECT_TRUE(support::close(attn.forward(x.q, x.k, x.v), linattn::softmax_attention<wide<T>>(x.q, x.k, x.v, o),
                             tolerance<T>::relative_rms));
}

/// Weights fall below the least number there is; the sums are of what remains.
TYPED_TEST(SoftmaxCache, LargeLogitsDoNotOverflow) {
  using T = TypeParam;
  const cached_softmax<T> attn({.head_dim = 4});
  const auto x = this->make_inputs(attn, block + 9, block + 9, 4, 100);  // logits of some 10,000
  // A logit of that size is 1e4 roundings of 2^-24 off, and its weight as much, relatively.
  constexpr double rounded_logits = std::is_same_v<T, float> ? 3e-3 : 1e-11;
  const row_matrix<T> out = attn.forward_causal(x.q, x.k, x.v);
  EXPECT_TRUE(support::all_finite(out));
  EXPECT_TRUE(support::close(out, this->reference(attn, x, true), rounded_logits));
}

TYPED_TEST(SoftmaxCache, LogSumsAreThoseOfTheDenominators) {
  using T = TypeParam;
  const cached_softmax<T> attn({.head_dim = 3, .heads = 2}, 2 * block);
  const auto x = this->make_inputs(attn, 5, block + 3, 5);
  auto s = attn.make_state();
  auto ws = attn.make_workspace();
  row_matrix<T> out(5, 6), log_sums(5, 2);
  attn.read(s, x.q, out, ws, log_sums);
  EXPECT_TRUE(support::all_zero(out));
  EXPECT_TRUE((log_sums.array() == -std::numeric_limits<T>::infinity()).all());
  attn.absorb(s, x.k, x.v, ws);
  attn.read(s, x.q, out, ws, log_sums);
  row_matrix<wide<T>> expected(5, 2);
  for (Index h = 0; h < 2; ++h) {
    const row_matrix<wide<T>> logits = x.q.middleCols(3 * h, 3).template cast<wide<T>>() *
                                       x.k.middleCols(3 * h, 3).template cast<wide<T>>().transpose() /
                                       std::sqrt(wide<T>(3));
    expected.col(h) = logits.array().exp().rowwise().sum().log();
  }
  EXPECT_TRUE(support::close(log_sums, expected, tolerance<T>::relative_rms));
  EXPECT_TRUE(support::same_bits(out, attn.read(s, x.q)));
}

// ---- one engine -----------------------------------------------------------------------------------------------------

TYPED_TEST(SoftmaxCache, NoSplitMovesABit) {
  using T = TypeParam;
  const Index n = 2 * block + 37;
  const cached_softmax<T> attn({.head_dim = 9, .value_dim = 17, .heads = 2}, n);
  const auto x = this->make_inputs(attn, n, n, 6);
  auto whole = attn.make_state();
  const row_matrix<T> expected = attn.forward_causal(whole, x.q, x.k, x.v);
  auto stepped = attn.make_state();
  EXPECT_TRUE(support::same_bits(this->steps(attn, stepped, x), expected)) << "step by step";
  EXPECT_EQ(stepped.tokens(), n);
  support::random_bits random(7);
  for (int trial = 0; trial < 4; ++trial) {
    auto s = attn.make_state();
    row_matrix<T> out(n, expected.cols());
    auto ws = attn.make_workspace();
    for (Index first = 0; first < n;) {
      const Index rows = std::min(random.below(trial % 2 == 0 ? 12 : 150), n - first);
      attn.forward_causal(s, x.q.middleRows(first, rows), x.k.middleRows(first, rows), x.v.middleRows(first, rows),
                          out.middleRows(first, rows), ws);
      first += rows;
      EXPECT_EQ(s.tokens(), first);
    }
    EXPECT_TRUE(support::same_bits(out, expected)) << "split number " << trial;
  }
}

TYPED_TEST(SoftmaxCache, ForwardIsAbsorbThenReadAndRowsAreAlone) {
  using T = TypeParam;
  const cached_softmax<T> attn({.head_dim = 8, .value_dim = 5, .heads = 3}, block + 30);
  const auto x = this->make_inputs(attn, 83, block + 21, 8);
  auto s = attn.make_state();
  const row_matrix<T> expected = attn.forward(s, x.q, x.k, x.v);
  auto parts = attn.make_state();
  attn.absorb(parts, x.k.topRows(70), x.v.topRows(70));
  attn.absorb(parts, x.k.bottomRows(x.k.rows() - 70), x.v.bottomRows(x.k.rows() - 70));
  EXPECT_TRUE(support::same_bits(attn.read(parts, x.q), expected));
  for (const Index row : {0, 1, 63, 64, 82}) {
    EXPECT_TRUE(support::same_bits(attn.read(parts, x.q.middleRows(row, 1)), expected.middleRows(row, 1))) << row;
  }
  EXPECT_EQ(parts.tokens(), x.k.rows()) << "read must not move a state";
}

TYPED_TEST(SoftmaxCache, BatchOfStatesIsStepOfEach) {
  using T = TypeParam;
  const cached_softmax<T> attn({.head_dim = 7, .heads = 2}, 2 * block);
  std::vector<typename TestFixture::state> together, alone;
  const std::vector<Index> lengths = {0, 5, panel, block - 1, block};
  for (const Index n : lengths) {
    const auto x = this->make_inputs(attn, n, n, 9 + std::uint64_t(n));
    together.push_back(attn.make_state());
    attn.absorb(together.back(), x.k, x.v);
    alone.push_back(together.back());
  }
  const auto count = Index(lengths.size());
  const auto x = this->make_inputs(attn, count, count, 10);
  auto ws = attn.make_workspace();
  row_matrix<T> out(count, 14), expected(count, 14);
  attn.step(together, x.q, x.k, x.v, out, ws);
  for (Index b = 0; b < count; ++b) {
    attn.step(alone[std::size_t(b)], x.q.row(b), x.k.row(b), x.v.row(b), expected.row(b), ws);
    EXPECT_EQ(together[std::size_t(b)].tokens(), lengths[std::size_t(b)] + 1);
  }
  EXPECT_TRUE(support::same_bits(out, expected));
}

TYPED_TEST(SoftmaxCache, SharedHeadsAreRepeatedOnes) {
  using T = TypeParam;
  for (const auto sharing : {linattn::head_sharing::interleaved, linattn::head_sharing::tiled}) {
    const cached_softmax<T> shared({.head_dim = 3, .value_dim = 2, .heads = 6, .key_heads = 2, .sharing = sharing});
    const cached_softmax<T> repeated({.head_dim = 3, .value_dim = 2, .heads = 6});
    const support::attention_inputs<T> x(11, 18, 4, 11);
    const row_matrix<T> k = x.k.leftCols(6);
    row_matrix<T> many_k(11, 18), many_v(11, 12);
    for (Index h = 0; h < 6; ++h) {
      const Index of = sharing == linattn::head_sharing::tiled ? h % 2 : h / 3;
      many_k.middleCols(3 * h, 3) = k.middleCols(3 * of, 3);
      many_v.middleCols(2 * h, 2) = x.v.middleCols(2 * of, 2);
    }
    EXPECT_EQ(shared.key_heads(), 2);
    EXPECT_EQ(shared.output_heads(), 6);
    EXPECT_TRUE(support::same_bits(shared.forward_causal(x.q, k, x.v), repeated.forward_causal(x.q, many_k, many_v)));
  }
}

TYPED_TEST(SoftmaxCache, StateIsAValue) {
  using T = TypeParam;
  const cached_softmax<T> attn({.head_dim = 4, .heads = 2}, 40);
  const auto x = this->make_inputs(attn, 20, 20, 12);
  const auto y = this->make_inputs(attn, 9, 9, 13);
  auto s = attn.make_state();
  EXPECT_EQ(s.tokens(), 0);
  EXPECT_EQ(s.capacity(), 40);
  attn.absorb(s, x.k, x.v);
  auto fork = s;
  const row_matrix<T> expected = attn.forward_causal(s, y.q, y.k, y.v);
  EXPECT_EQ(fork.tokens(), 20);
  EXPECT_TRUE(support::same_bits(attn.forward_causal(fork, y.q, y.k, y.v), expected));
  auto fresh = attn.make_state();
  const row_matrix<T> first = attn.forward_causal(fresh, y.q, y.k, y.v);
  s.reset();
  EXPECT_EQ(s.tokens(), 0);
  EXPECT_TRUE(support::same_bits(attn.forward_causal(s, y.q, y.k, y.v), first)) << "after reset";
  const auto moved = std::move(fork);
  EXPECT_EQ(moved.tokens(), 29);
  EXPECT_EQ(fork.tokens(), 0);  // NOLINT(bugprone-use-after-move): empty is what it has to be
  EXPECT_NE(support::refusal([&] { attn.absorb(fork, y.k, y.v); }).find("empty"), std::string::npos);
  EXPECT_EQ(attn.state_bytes(40), attn.state_bytes());
  EXPECT_GE(attn.state_bytes(), Index(40 * 2 * (4 + 4) * sizeof(T)));
}

// ---- NaN, empty -----------------------------------------------------------------------------------------------------

TYPED_TEST(SoftmaxCache, LaterTokensLeaveARowAlone) {
  LINATTN_NEEDS_NAN();
  using T = TypeParam;
  const Index n = block + 20;
  const cached_softmax<T> attn({.head_dim = 4, .value_dim = 3}, n);
  const auto x = this->make_inputs(attn, n, n, 14);
  const row_matrix<T> expected = attn.forward_causal(x.q, x.k, x.v);
  for (const T bad : {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity()}) {
    for (const Index from : {Index(1), Index(6), panel + 3, block - 1, block, block + 5}) {
      auto y = x;
      y.k.bottomRows(n - from).setConstant(bad);
      y.v.bottomRows(n - from).setConstant(bad);
      auto s = attn.make_state();
      const row_matrix<T> out = attn.forward_causal(s, y.q, y.k, y.v);
      EXPECT_TRUE(support::same_bits(out.topRows(from), expected.topRows(from))) << bad << " from " << from;
      EXPECT_TRUE(support::all_nan(out.bottomRows(n - from))) << bad << " from " << from;
      s.reset();  // what the memory still holds must not show
      EXPECT_TRUE(support::same_bits(this->steps(attn, s, x), expected)) << "after reset";
    }
  }
}

TYPED_TEST(SoftmaxCache, NaNOfAQueryStaysInItsRow) {
  LINATTN_NEEDS_NAN();
  using T = TypeParam;
  const cached_softmax<T> attn({.head_dim = 4, .value_dim = 3, .heads = 2});
  auto x = this->make_inputs(attn, 20, 20, 15);
  const row_matrix<T> expected = attn.forward(x.q, x.k, x.v);
  x.q(7, 1) = std::numeric_limits<T>::quiet_NaN();
  const row_matrix<T> out = attn.forward(x.q, x.k, x.v);
  EXPECT_TRUE(support::all_nan(out.row(7).head(3)));
  EXPECT_TRUE(support::same_bits(out.row(7).tail(3), expected.row(7).tail(3))) << "another head";
  EXPECT_TRUE(support::same_bits(out.topRows(7), expected.topRows(7)));
  EXPECT_TRUE(support::same_bits(out.bottomRows(12), expected.bottomRows(12)));
}

TYPED_TEST(SoftmaxCache, NothingIsFine) {
  using T = TypeParam;
  const cached_softmax<T> attn({.head_dim = 4}, 3);
  const auto none = this->make_inputs(attn, 0, 0, 16);
  const auto x = this->make_inputs(attn, 3, 3, 17);
  auto s = attn.make_state();
  EXPECT_EQ(attn.forward_causal(s, none.q, none.k, none.v).rows(), 0);
  EXPECT_TRUE(support::all_zero(attn.read(s, x.q)));
  EXPECT_TRUE(support::all_zero(attn.forward(x.q, none.k, none.v)));
  EXPECT_EQ(s.tokens(), 0);
}

// ---- refusals -------------------------------------------------------------------------------------------------------

TYPED_TEST(SoftmaxCache, RefusesMoreTokensThanItHasRoomForAndKeepsWhatItHas) {
  using T = TypeParam;
  const cached_softmax<T> attn({.head_dim = 4}, 12);
  const auto x = this->make_inputs(attn, 10, 10, 18);
  auto s = attn.make_state();
  attn.absorb(s, x.k, x.v);
  auto ws = attn.make_workspace();
  row_matrix<T> out = row_matrix<T>::Constant(3, 4, T(7));
  const auto q = x.q.topRows(3), k = x.k.topRows(3), v = x.v.topRows(3);
  for (const std::string& text : {support::refusal([&] { attn.forward_causal(s, q, k, v, out, ws); }),
                                  support::refusal([&] { attn.forward(s, q, k, v, out, ws); }),
                                  support::refusal([&] { attn.absorb(s, k, v, ws); })}) {
    EXPECT_NE(text.find("holds 10 tokens and has room for 12, but 3 more"), std::string::npos) << text;
  }
  EXPECT_EQ(s.tokens(), 10);
  EXPECT_TRUE((out.array() == T(7)).all());
  attn.absorb(s, k.topRows(2), v.topRows(2));
  EXPECT_EQ(s.tokens(), 12);
  EXPECT_EXIT(attn.step(s, q.row(0), k.row(0), v.row(0), out.row(0), ws), testing::ExitedWithCode(3), "no room");
}

TYPED_TEST(SoftmaxCache, RefusesWrongShapesWithBothSizes) {
  using T = TypeParam;
  const cached_softmax<T> attn({.head_dim = 4, .heads = 2}, 12);
  const cached_softmax<T> other({.head_dim = 3, .heads = 2}, 12);
  const auto x = this->make_inputs(attn, 5, 5, 19);
  auto s = attn.make_state();
  auto ws = attn.make_workspace();
  auto other_ws = other.make_workspace();
  auto other_state = other.make_state();
  row_matrix<T> out(5, 8), narrow(5, 7), sums(5, 1);
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << text << "' does not say '" << part << "'";
  };
  expect(support::refusal([&] { attn.forward(s, narrow, x.k, x.v, out, ws); }),
         "forward: q is (5, 7), expected (5, 8)");
  expect(support::refusal([&] { attn.forward_causal(s, x.q.topRows(4), x.k, x.v, out, ws); }),
         "forward_causal: k is (5, 8), expected (4, 8)");
  expect(support::refusal([&] { attn.absorb(s, x.k, narrow, ws); }), "absorb: v is (5, 7), expected (5, 8)");
  expect(support::refusal([&] { attn.read(s, x.q, narrow, ws); }), "read: out is (5, 7), expected (5, 8)");
  expect(support::refusal([&] { attn.read(s, x.q, out, ws, sums); }), "read: log_sums is (5, 1), expected (5, 2)");
  expect(support::refusal([&] { attn.read(s, x.q, out, other_ws); }), "make_workspace()");
  expect(support::refusal([&] { attn.read(other_state, x.q, out, ws); }), "(2 heads, 3 coordinates, 3 values)");
  EXPECT_EQ(s.tokens(), 0);
}

TEST(SoftmaxCacheOptions, AreRefusedWhereTheyMeanNothing) {
  using attention = cached_softmax<float>;
  const auto expect = [](const auto& call, const char* part) {
    const std::string text = support::refusal(call);
    EXPECT_NE(text.find(part), std::string::npos) << "'" << text << "' does not say '" << part << "'";
  };
  expect([] { attention({.heads = 2}); }, "head_dim is 0");
  expect([] { attention({.head_dim = -3}); }, "head_dim is -3");
  expect([] { attention({.head_dim = 4, .heads = 6, .key_heads = 4}); }, "heads is 6, key_heads is 4");
  expect([] { attention({.head_dim = 4, .query_scale = std::numeric_limits<double>::infinity()}); }, "query_scale");
  expect([] { attention({.head_dim = 4, .normalize = false}); }, "divided by their plain sum");
  expect([] { attention({.head_dim = 4, .denominator = linattn::denominator_policy::add(1e-6)}); },
         "divided by their plain sum");
  expect([] { attention({.head_dim = 4}, -1); }, "max_tokens is -1");
  expect([] { attention({.head_dim = 4}).make_state(); }, "make_state: the capacity is 0");
  expect([] { attention({.head_dim = 4}).make_state(std::numeric_limits<Index>::max() / 8); }, "address space");
  // Sizes whose products, 2^64 and more, are no Index: what a stranger's file may ask for.
  constexpr Index large = Index(1) << 32;
  expect([] { attention({.head_dim = large, .heads = large}); }, "address space");
  expect([] { attention({.head_dim = std::numeric_limits<Index>::max()}); }, "address space");
  expect([] { attention({.head_dim = 4}, std::numeric_limits<Index>::max()); }, "address space");
}

// ---- the heap -------------------------------------------------------------------------------------------------------

TYPED_TEST(SoftmaxCache, CallsWithAWorkspaceDoNotAllocate) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  using T = TypeParam;
  const cached_softmax<T> attn({.head_dim = 9, .value_dim = 17, .heads = 2}, 1000);
  const auto x = this->make_inputs(attn, 300, 300, 20);
  auto s = attn.make_state();
  const auto before = s;
  auto ws = attn.make_workspace();
  row_matrix<T> out(300, 34), sums(300, 2);
  const support::allocation_count count;
  attn.forward_causal(s, x.q, x.k, x.v, out, ws);
  attn.forward(s, x.q, x.k, x.v, out, ws);
  attn.absorb(s, x.k, x.v, ws);
  attn.read(s, x.q, out, ws, sums);
  for (Index t = 0; t < 100; ++t) attn.step(s, x.q.row(t), x.k.row(t), x.v.row(t), out.row(t), ws);
  s = before;
  attn.step(std::span<typename TestFixture::state>(&s, 1), x.q.topRows(1), x.k.topRows(1), x.v.topRows(1),
            out.topRows(1), ws);
  s.reset();
  const long seen = count.total();
  EXPECT_EQ(seen, 0);
}

}  // namespace
