// Masks of tokens, law 9: masked is deleted. Every pass over a sequence with masked rows has the bits of the pass over
// the sequence without them, whatever the masked rows hold.
#include "support/masked_engine.hpp"

#include <linattn/feature_maps/cosformer.hpp>
#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/feature_maps/exponential.hpp>
#include <linattn/feature_maps/identity.hpp>
#include <linattn/update_rules/decay.hpp>
#include <linattn/update_rules/delta.hpp>
#include <linattn/update_rules/gated.hpp>

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using Eigen::Index;
using linattn::token_mask;
using linattn::detail::reads_and_writes;
using linattn::detail::reads_only;
using linattn::detail::writes_only;
using support::mask_pattern;
using support::masked_shape;

constexpr float untouched = -99;

/// Of 90 tokens: three tiles or more. Heads that share nothing; and queries that share states, and values keys.
std::vector<masked_shape> shapes(bool shared) {
  if (!shared) return {{90, 5, 6}, {90, 20, 17}};
  return {{90, 5, 6, 4, 1, 2}, {90, 6, 5, 4, 2, 2, linattn::head_sharing::tiled}, {90, 6, 5, 2, 2, 4}};
}

/// Rows that count are those of the pass without the others; the others are left alone.
template <class Engine>
void expect_rows(const linattn::row_matrix<float>& masked, const linattn::row_matrix<float>& alone,
                 const mask_pattern& mask) {
  using sequence = typename Engine::sequence;
  EXPECT_TRUE(support::same_bits(sequence::rows_where(masked, mask.kept), alone));
  const auto others = sequence::rows_where(masked, mask.kept, false);
  EXPECT_TRUE(support::same_bits(others, others.Constant(others.rows(), others.cols(), untouched)));
}

template <class Map, class Rule, Index Heads = 2>
void masked_is_deleted(const Map& map) {
  using engine_type = support::masked_engine<Map, Rule, float, Heads>;
  constexpr bool denominators = engine_type::rule.normalizes;
  for (const masked_shape& shape : shapes(Heads == Eigen::Dynamic)) {
    SCOPED_TRACE("D = " + std::to_string(shape.head_dim) + ", " + std::to_string(shape.query_heads) + " heads of q");
    const engine_type engine(shape, map);
    const auto before = engine.initial();
    const auto x = engine.inputs(1);
    for (const mask_pattern& mask : support::mask_patterns(shape.tokens)) {
      SCOPED_TRACE("tokens that count: " + mask.name);
      const auto spoilt = x.spoilt(mask.kept);
      const auto kept = x.where(mask.kept);

      const auto causal = engine.template run<reads_and_writes>(spoilt, &mask, before, untouched);
      const auto causal_alone = engine.template run<reads_and_writes>(kept, nullptr, before, untouched);
      EXPECT_TRUE(support::same_bits(causal.state, causal_alone.state));
      expect_rows<engine_type>(causal.out, causal_alone.out, mask);
      if (denominators) expect_rows<engine_type>(causal.denominators, causal_alone.denominators, mask);

      const auto parts = engine.template run<reads_and_writes>(spoilt, &mask, before, untouched, 3);
      const auto parts_alone = engine.template run<reads_and_writes>(kept, nullptr, before, untouched, 3);
      EXPECT_TRUE(support::same_bits(parts.state, parts_alone.state));
      expect_rows<engine_type>(parts.out, parts_alone.out, mask);

      const auto absorbed = engine.template run<writes_only>(spoilt, &mask, before, untouched);
      const auto absorbed_alone = engine.template run<writes_only>(kept, nullptr, before, untouched);
      EXPECT_TRUE(support::same_bits(absorbed.state, absorbed_alone.state));
      EXPECT_TRUE(mask.count() > 0 || support::same_bits(absorbed.state, before));

      const auto read = engine.template run<reads_only>(spoilt, &mask, before, untouched);
      const auto read_alone = engine.template run<reads_only>(kept, nullptr, before, untouched);
      EXPECT_TRUE(support::same_bits(read.state, before));
      expect_rows<engine_type>(read.out, read_alone.out, mask);
      if (denominators) expect_rows<engine_type>(read.denominators, read_alone.denominators, mask);
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(Masks, DeleteTokensOfTheNormalizedForm) {
  masked_is_deleted<linattn::elu_plus_one, linattn::additive>(linattn::elu_plus_one());
}
TEST(Masks, DeleteTokensOfSharedHeads) {
  masked_is_deleted<linattn::identity, linattn::gated<>, Eigen::Dynamic>(linattn::identity());
}
TEST(Masks, DeleteTokensOfLogFeaturesThatDecay) {
  masked_is_deleted<linattn::exponential, linattn::decay>(linattn::exponential());
}
TEST(Masks, DeleteTokensOfPositionalFeaturesWithABonus) {
  masked_is_deleted<linattn::cosformer, linattn::gated_bonus>(linattn::cosformer(200));
}
TEST(Masks, DeleteTokensOfTheDeltaRule) {
  masked_is_deleted<linattn::identity, linattn::gated_delta<>>(linattn::identity());
}
TEST(Masks, DeleteTokensOfTheGeneralizedDeltaRule) {
  masked_is_deleted<linattn::identity, linattn::generalized_delta>(linattn::identity());
}

// ---- token_mask -----------------------------------------------------------------------------------------------------

/// Row numbers that count.
std::vector<Index> rows_of(const token_mask& mask, Index sequence, Index tokens) {
  const linattn::detail::kept_rows x = mask.of(sequence, tokens);
  std::vector<Index> rows;
  for (Index i = x.first; i < x.last; ++i) {
    if (x.kept == nullptr || x.kept[i - x.first] != 0) rows.push_back(i);
  }
  EXPECT_EQ(x.tokens(), Index(rows.size()));
  return rows;
}
using numbers = std::vector<Index>;

TEST(TokenMask, OfNothingKeepsEveryToken) {
  const token_mask mask;
  EXPECT_TRUE(mask.is_none());
  mask.check("f", 3, 4);
  EXPECT_EQ(rows_of(mask, 2, 4), (numbers{0, 1, 2, 3}));
}

TEST(TokenMask, OfAMatrixKeepsWhatIsNotZero) {
  linattn::row_matrix<std::uint8_t> bytes(2, 4);
  bytes << 1, 0, 7, 0, 0, 0, 0, 0;
  const token_mask mask = bytes;
  EXPECT_FALSE(mask.is_none());
  mask.check("f", 2, 4);
  EXPECT_EQ(rows_of(mask, 0, 4), (numbers{0, 2}));
  EXPECT_EQ(rows_of(mask, 1, 4), numbers());
  const linattn::row_matrix<bool> bools = bytes.cast<bool>();
  EXPECT_EQ(rows_of(bools, 0, 4), (numbers{0, 2}));
  EXPECT_EQ(rows_of(bools.rightCols(3), 0, 3), (numbers{1}));
  const std::uint8_t raw[] = {0, 1, 1, 1, 0, 0};
  EXPECT_EQ(rows_of(linattn::matrix_view<const std::uint8_t>(raw, 2, 2, 3), 1, 2), (numbers{0}));
  const Eigen::Matrix<bool, 1, Eigen::Dynamic> one = bools.row(0);
  const token_mask of_one = one;
  of_one.check("f", 1, 4);
  EXPECT_EQ(rows_of(of_one, 0, 4), (numbers{0, 2}));
}

TEST(TokenMask, OfLengthsNarrowsTheRows) {
  const std::vector<Index> n = {0, 3, 5};
  const std::array<std::int32_t, 3> n_32 = {0, 3, 5};
  const std::span<const std::int64_t> none;
  const Eigen::VectorXi n_eigen = (Eigen::VectorXi(3) << 0, 3, 5).finished();
  for (const token_mask& mask : {token_mask::lengths(n), token_mask::lengths(n_32), token_mask::lengths(n_eigen)}) {
    mask.check("f", 3, 5);
    EXPECT_EQ(rows_of(mask, 0, 5), numbers());
    EXPECT_EQ(rows_of(mask, 1, 5), (numbers{0, 1, 2}));
    EXPECT_EQ(rows_of(mask, 2, 5), (numbers{0, 1, 2, 3, 4}));
    EXPECT_EQ(mask.of(1, 5).kept, nullptr);
  }
  const token_mask left = token_mask::left_padding(n);
  left.check("f", 3, 5);
  EXPECT_EQ(rows_of(left, 0, 5), numbers());
  EXPECT_EQ(rows_of(left, 1, 5), (numbers{2, 3, 4}));
  EXPECT_EQ(rows_of(left, 2, 5), (numbers{0, 1, 2, 3, 4}));
  token_mask::lengths(none).check("f", 0, 5);
}

std::string refusal(const token_mask& mask, Index sequences, Index tokens) {
  try {
    mask.check("forward_causal", sequences, tokens);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(TokenMask, RefusesOtherShapesWithASentence) {
  const linattn::row_matrix<bool> square = linattn::row_matrix<bool>::Constant(4, 4, true);
  const linattn::row_matrix<bool> squares = linattn::row_matrix<bool>::Constant(8, 4, true);
  EXPECT_EQ(refusal(square, 4, 4), "");
  const std::string why =
      "a mask of the attention matrix, which linear attention never forms; give (sequences, tokens) = (2, 4) for "
      "padding, call forward_causal for the causal mask, and make documents sequences of their own";
  EXPECT_EQ(refusal(square, 2, 4), "linattn::forward_causal: the mask is (4, 4), " + why);
  EXPECT_EQ(refusal(squares, 2, 4), "linattn::forward_causal: the mask is (8, 4), " + why);
  EXPECT_EQ(refusal(square, 2, 5), "linattn::forward_causal: the mask is (4, 4), expected (2, 5): (sequences, tokens)");
  const std::vector<int> n = {1, 6, -1};
  EXPECT_EQ(refusal(token_mask::lengths(n), 2, 9),
            "linattn::forward_causal: the mask's lengths are 3, expected 2: one for each sequence");
  EXPECT_EQ(refusal(token_mask::lengths(n), 3, 5),
            "linattn::forward_causal: number 1 of the mask's lengths is 6, outside 0 ... 5, the tokens of a sequence");
  EXPECT_EQ(refusal(token_mask::left_padding(n), 3, 6),
            "linattn::forward_causal: number 2 of the mask's left_padding is -1, outside 0 ... 6, the tokens of a "
            "sequence");
}

TEST(TokenMask, MaskedRowsAreCleared) {
  using matrix = linattn::row_matrix<float>;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const linattn::row_matrix<std::uint8_t> kept = (linattn::row_matrix<std::uint8_t>(1, 5) << 1, 0, 1, 1, 0).finished();
  const std::vector<int> two = {2};
  for (const token_mask& mask :
       {token_mask(), token_mask(kept), token_mask::lengths(two), token_mask::left_padding(two)}) {
    const numbers rows = rows_of(mask, 0, 5);
    matrix x = matrix::Constant(5, 6, nan);
    matrix expected = x;
    expected.middleCols(2, 2).setZero();
    for (const Index i : rows) expected.row(i).setConstant(nan);
    linattn::detail::clear_masked(linattn::detail::token_rows<float>(linattn::matrix_view<float>(x), 2), 5,
                                  mask.of(0, 5), 1, 2);
    EXPECT_TRUE(support::same_bits(x, expected));
  }
}

}  // namespace
