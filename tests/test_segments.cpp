// Segments of the delta rules: the affine map (A, X) that a run of tokens is. Merging one is absorbing its tokens.
#include <linattn/linattn.hpp>

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/rule_calls.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace {

using Eigen::Index;
using linattn::decay_kind;
using linattn::identity;
using linattn::row_matrix;
using support::allocation_count;

/// Keys of length 1 and beta in (0, 1): no transition is longer than 1, and what a token writes, errors too, is taken
/// back by those that follow. So whatever the number of tokens or merges, some roundings remain (6 were seen).
template <class T>
inline constexpr double roundings = 12 * double(std::numeric_limits<T>::epsilon());

template <class Rule, class Scalar>
struct subject {
  using rule = Rule;
  using scalar = Scalar;
};

template <class Subject>
class Segments : public testing::Test {
 public:
  using T = typename Subject::scalar;
  using rule = typename Subject::rule;
  using tokens = support::rule_tokens<T>;
  using attention = linattn::linear_attention<identity, rule, T>;
  using segment = typename attention::segment_type;
  using state = typename attention::state_type;

  static constexpr support::rule_kind kind = support::rule_kind_of<rule>();

  /// One block of columns of A, several, the last one in part; and A narrower than X.
  static std::vector<support::rule_shape> shapes() { return {{53, 17, 9, 2}, {53, 40, 5, 2}, {53, 5, 40, 2}}; }

  static segment segment_of(const attention& attn, const tokens& x, Index first_position = 0) {
    segment s = attn.make_segment(first_position);
    attn.absorb(s, x.k, x.v, support::inputs_of<attention>(x));
    return s;
  }
  static state state_of(const attention& attn, const tokens& x) {
    state s = attn.make_state();
    attn.absorb(s, x.k, x.v, support::inputs_of<attention>(x));
    return s;
  }

  /// A beside X, head below head, and their log-decays below all.
  static row_matrix<T> contents_of(const segment& s) {
    const Index c = s.features(), m = s.value_dim();
    row_matrix<T> all = row_matrix<T>::Zero(s.heads() * (c + 1), c + m);
    for (Index h = 0; h < s.heads(); ++h) {
      all.block(h * (c + 1), 0, c, c) = s.transition(h);
      all.block(h * (c + 1), c, c, m) = s.kv(h);
      if constexpr (rule::traits.decay != decay_kind::none) {
        const auto total = s.log_decay(h);
        all.block(h * (c + 1) + c, 0, 1, total.size()) = total;
      }
    }
    return all;
  }
};

using types = testing::Types<subject<linattn::delta, float>, subject<linattn::delta, double>,
                             subject<linattn::gated_delta<decay_kind::per_head>, float>,
                             subject<linattn::gated_delta<decay_kind::per_head>, double>,
                             subject<linattn::gated_delta<decay_kind::per_feature>, float>,
                             subject<linattn::gated_delta<decay_kind::per_feature>, double>,
                             subject<linattn::generalized_delta, float>, subject<linattn::generalized_delta, double>>;

struct names {
  template <class Subject>
  static std::string GetName(int) {
    return std::string(support::traits_of(support::rule_kind_of<typename Subject::rule>()).name) +
           (std::is_same_v<typename Subject::scalar, float> ? "_float" : "_double");
  }
};
TYPED_TEST_SUITE(Segments, types, names);

TYPED_TEST(Segments, AreTheAffineMapOfTheirTokens) {
  using scalar = typename TypeParam::scalar;
  for (const support::rule_shape& shape : this->shapes()) {
    const support::rule_tokens<scalar> x(this->kind, shape, 1);
    const auto attn = support::operator_for<identity, typename TypeParam::rule>(x);
    const auto s = this->segment_of(attn, x);
    const support::rule_segment truth = support::rule_segment_oracle(this->kind, x.wide());
    EXPECT_EQ(s.tokens(), shape.tokens);
    for (Index h = 0; h < shape.heads; ++h) {
      EXPECT_TRUE(support::close(s.transition(h), truth.a[std::size_t(h)], roundings<scalar>));
      EXPECT_TRUE(support::close(s.kv(h), truth.x[std::size_t(h)], roundings<scalar>));
    }
  }
}

TYPED_TEST(Segments, MergingOneIsAbsorbingItsTokens) {
  using scalar = typename TypeParam::scalar;
  for (const support::rule_shape& shape : this->shapes()) {
    const support::rule_tokens<scalar> x(this->kind, shape, 2);
    const auto attn = support::operator_for<identity, typename TypeParam::rule>(x);
    for (const Index first : {0, 1, 20, 53}) {
      auto s = this->state_of(attn, x.rows(0, first));
      s.merge(this->segment_of(attn, x.rows(first, shape.tokens - first), first));
      const auto whole = this->state_of(attn, x);
      EXPECT_EQ(s.tokens(), whole.tokens());
      EXPECT_TRUE(support::close(support::contents_of(s), support::contents_of(whole), roundings<scalar>));
    }
  }
}

TYPED_TEST(Segments, AbsorbInPartsAsInOne) {
  using scalar = typename TypeParam::scalar;
  const support::rule_tokens<scalar> x(this->kind, {53, 17, 9, 2}, 3);
  const auto attn = support::operator_for<identity, typename TypeParam::rule>(x);
  auto parts = this->segment_of(attn, x.rows(0, 11));
  const auto rest = x.rows(11, 42);
  auto ws = attn.make_workspace();
  attn.absorb(parts, rest.k, rest.v, support::inputs_of<decltype(attn)>(rest), ws);
  EXPECT_EQ(parts.tokens(), 53);
  EXPECT_TRUE(
      support::close(this->contents_of(parts), this->contents_of(this->segment_of(attn, x)), roundings<scalar>));
}

TYPED_TEST(Segments, MergeWithEachOtherInAnyGrouping) {
  using scalar = typename TypeParam::scalar;
  for (const support::rule_shape& shape : this->shapes()) {
    const support::rule_tokens<scalar> x(this->kind, shape, 4);
    const auto attn = support::operator_for<identity, typename TypeParam::rule>(x);
    const auto a = this->segment_of(attn, x.rows(0, 9)), b = this->segment_of(attn, x.rows(9, 30)),
               c = this->segment_of(attn, x.rows(39, 14));
    auto left = a;
    left.merge(b);
    left.merge(c);
    auto right = b;
    right.merge(c);
    auto all = a;
    all.merge(right);
    EXPECT_EQ(left.tokens(), 53);
    EXPECT_EQ(all.tokens(), 53);
    EXPECT_TRUE(support::close(this->contents_of(left), this->contents_of(all), roundings<scalar>));
    EXPECT_TRUE(
        support::close(this->contents_of(left), this->contents_of(this->segment_of(attn, x)), roundings<scalar>));
  }
}

TYPED_TEST(Segments, MayBeAppendedToThemselves) {
  using scalar = typename TypeParam::scalar;
  const support::rule_tokens<scalar> x(this->kind, {9, 17, 9, 2}, 5);
  const auto attn = support::operator_for<identity, typename TypeParam::rule>(x);
  auto twice = this->segment_of(attn, x);
  twice.merge(twice);
  auto expected = this->segment_of(attn, x);
  attn.absorb(expected, x.k, x.v, support::inputs_of<decltype(attn)>(x));
  EXPECT_TRUE(support::close(this->contents_of(twice), this->contents_of(expected), roundings<scalar>));
}

TYPED_TEST(Segments, WithoutTokensChangeNothing) {
  using scalar = typename TypeParam::scalar;
  const support::rule_tokens<scalar> x(this->kind, {9, 40, 5, 2}, 6);
  const auto attn = support::operator_for<identity, typename TypeParam::rule>(x);
  auto s = this->state_of(attn, x);
  const auto before = support::contents_of(s);
  auto part = this->segment_of(attn, x);
  part.reset();
  EXPECT_EQ(part.tokens(), 0);
  s.merge(part);
  EXPECT_EQ(support::contents_of(s), before);
  EXPECT_EQ(s.tokens(), 9);
}

TYPED_TEST(Segments, ErrorsOfAChainStaySmall) {
  using scalar = typename TypeParam::scalar;
  const Index count = 1024, length = 16;
  const support::rule_tokens<scalar> x(this->kind, {count, 24, 8, 1}, 7);
  const auto attn = support::operator_for<identity, typename TypeParam::rule>(x);
  auto all = attn.make_segment();
  for (Index first = 0; first < count; first += length) all.merge(this->segment_of(attn, x.rows(first, length)));
  auto s = attn.make_state();
  s.merge(all);
  const auto truth = support::rule_oracle(this->kind, x.wide()).state;
  EXPECT_TRUE(support::close(s.kv(0), truth[0], roundings<scalar>));
}

// As absorbing does, merging leaves no subnormal number in a state that decays.
TYPED_TEST(Segments, MergingSilenceEndsInZeros) {
  if constexpr (TestFixture::rule::traits.decay != decay_kind::none) {
    using scalar = typename TestFixture::T;
    // e^-88 is a normal number in float, 1e-3 times that is not.
    typename TestFixture::tokens x(TestFixture::kind, {1, 5, 4, 2}, 9, {.gates = {"minus_88", {-88}}});
    x.pad(0);
    x.log_decay.setConstant(scalar(-88));
    const typename TestFixture::attention attn({.head_dim = 5, .value_dim = 4, .heads = 2});
    auto s = attn.make_state();
    for (Index h = 0; h < 2; ++h) s.kv(h).setConstant(scalar(1e-3));
    s.merge(TestFixture::segment_of(attn, x));
    for (Index h = 0; h < 2; ++h) EXPECT_TRUE(support::all_zero(s.kv(h)));
  }
}

TYPED_TEST(Segments, AbsorbWithoutAllocating) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  using scalar = typename TypeParam::scalar;
  const support::rule_tokens<scalar> x(this->kind, {9, 17, 9, 2}, 8);
  const auto attn = support::operator_for<identity, typename TypeParam::rule>(x);
  auto s = attn.make_segment();
  auto ws = attn.make_workspace();
  const auto inputs = support::inputs_of<decltype(attn)>(x);
  const allocation_count count;
  attn.absorb(s, x.k, x.v, inputs, ws);
  s.reset();
  EXPECT_EQ(count.total(), 0);
}

TEST(SegmentsOfFixedSizes, AreFreshAndInline) {
  using attention = linattn::linear_attention<identity, linattn::delta, float, 8, 3, 2>;
  const attention attn;
  const support::rule_tokens<float> x(support::rule_kind::delta, {5, 8, 3, 2}, 9);
  attention::segment_type s;
  EXPECT_EQ(s.transition(1), (row_matrix<float>::Identity(8, 8)));
  attn.absorb(s, x.k, x.v, {.beta = x.beta});
  const support::rule_segment truth = support::rule_segment_oracle(x.kind, x.wide());
  EXPECT_TRUE(support::close(s.transition(1), truth.a[1], roundings<float>));
  EXPECT_TRUE(support::close(s.kv(1), truth.x[1], roundings<float>));
}

TEST(SegmentsOfSharedHeads, AreOnesOfStates) {
  using attention = linattn::linear_attention<identity, linattn::gated_delta<>>;
  const attention attn({.head_dim = 17, .value_dim = 9, .heads = 2, .value_heads = 4});
  const support::rule_tokens<float> x(support::rule_kind::gated_delta_per_head, {20, 17, 9, 4}, 10);
  const row_matrix<float> k = x.k.leftCols(2 * 17);
  auto s = attn.make_state(), whole = attn.make_state();
  auto part = attn.make_segment();
  const auto absorb = [&](auto& into, Index first, Index count) {
    const auto rows = x.rows(first, count);
    attn.absorb(into, k.middleRows(first, count), rows.v, {.log_decay = rows.log_decay, .beta = rows.beta});
  };
  absorb(whole, 0, 20);
  absorb(s, 0, 7);
  absorb(part, 7, 13);
  s.merge(part);
  EXPECT_EQ(part.heads(), 4);
  EXPECT_TRUE(support::close(support::contents_of(s), support::contents_of(whole), roundings<float>));
}

class SegmentErrors : public testing::Test {
 public:
  using attention = linattn::linear_attention<identity, linattn::delta>;
  const attention attn{linattn::options{.head_dim = 6, .value_dim = 5, .heads = 2}};
  const attention other{linattn::options{.head_dim = 6, .value_dim = 4, .heads = 2}};
  const support::rule_tokens<float> x{support::rule_kind::delta, {3, 6, 5, 2}, 1};

  template <class Call>
  static std::string sentence(const Call& call) {
    try {
      call();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "nothing was thrown";
  }
};

TEST_F(SegmentErrors, OtherSizes) {
  auto s = attn.make_state();
  auto part = attn.make_segment(), odd = other.make_segment();
  EXPECT_EQ(sentence([&] { s.merge(odd); }),
            "linattn::state::merge: this state is (2 heads, 6 features, 5 values), the segment (2 heads, 6 features, 4 "
            "values)");
  EXPECT_EQ(sentence([&] { part.merge(odd); }),
            "linattn::segment::merge: this segment is (2 heads, 6 features, 5 values), the later one (2 heads, 6 "
            "features, 4 values)");
  EXPECT_EQ(sentence([&] { attn.absorb(odd, x.k, x.v, {.beta = x.beta}); }),
            "linattn::absorb: the segment is (2 heads, 6 features, 4 values), expected (2 heads, 6 features, 5 "
            "values)");
  EXPECT_EQ(odd.tokens(), 0);
}

TEST_F(SegmentErrors, EmptyOnesAndHeadsThatAreNotThere) {
  auto s = attn.make_state();
  attention::segment_type empty;
  EXPECT_NE(sentence([&] { s.merge(empty); }).find("the segment empty (default-made or moved from)"),
            std::string::npos);
  EXPECT_NE(sentence([&] { attn.absorb(empty, x.k, x.v, {.beta = x.beta}); }).find("the segment is empty"),
            std::string::npos);
  EXPECT_NE(sentence([&] { static_cast<void>(empty.kv(0)); }).find("this segment is empty"), std::string::npos);
  EXPECT_EQ(sentence([&] { static_cast<void>(attn.make_segment().transition(2)); }),
            "linattn::segment: head 2 of a segment of 2 heads");
}

TEST_F(SegmentErrors, ShapesOfTheCall) {
  auto part = attn.make_segment();
  EXPECT_NE(sentence([&] {
              attn.absorb(part, x.k.topRows(2), x.v, {.beta = x.beta});
            }).find("linattn::absorb: v is (3, 10), expected (2, 10)"),
            std::string::npos);
  EXPECT_NE(sentence([&] { attn.absorb(part, x.k, x.v, {}); }).find("the update rule's input beta is not given"),
            std::string::npos);
  EXPECT_EQ(part.transition(0), (row_matrix<float>::Identity(6, 6)));
}

}  // namespace
