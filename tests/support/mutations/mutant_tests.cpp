// What the mutations of list.cmake break, one named test for each. There are three operator types and everything is
// small: 38 tokens are a pass of 32 and one of 6, with a whole and a partial micro-block; D = 5 and M = 6 are a whole
// packet of four and a partial one; two heads.
#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/feature_maps/identity.hpp>
#include <linattn/linear_attention.hpp>
#include <linattn/transformer.hpp>
#include <linattn/update_rules/delta.hpp>
#include <linattn/update_rules/gated.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/oracle.hpp"
#include "support/rule_inputs.hpp"
#include "support/rule_oracle.hpp"
#include "support/sentinel.hpp"
#include "support/transformer_inputs.hpp"

#include <gtest/gtest.h>

namespace {

using Eigen::Index;
using attention = linattn::linear_attention<linattn::elu_plus_one>;
using matrix = linattn::row_matrix<float>;

constexpr Index N = 38, D = 5, M = 6, H = 2;
constexpr double rounding = support::tolerance<float>::relative_rms;

struct Mutant : testing::Test {
  attention attn{linattn::options{.head_dim = D, .value_dim = M, .heads = H}};
  matrix q = support::normal_matrix<float>(N, H* D, 1);
  matrix k = support::normal_matrix<float>(N, H* D, 2);
  matrix v = support::normal_matrix<float>(N, H* M, 3);

  matrix causal() const { return attn.forward_causal(q, k, v); }
  support::oracle_result truth(long double query_scale = 1) const {
    return support::oracle_recurrent(support::oracle_elu_plus_one(), q, k, v,
                                     {.heads = H, .causal = true, .query_scale = query_scale});
  }
};

TEST_F(Mutant, StateIsTheSumOfOuterProducts) {
  auto s = attn.make_state();
  attn.absorb(s, k, v);
  const auto expected = truth();
  for (Index h = 0; h < H; ++h) {
    EXPECT_TRUE(support::close(s.kv(h), expected.state.s[std::size_t(h)], rounding));
    EXPECT_TRUE(support::close(s.k_sum(h), expected.state.z[std::size_t(h)], rounding));
  }
}

TEST_F(Mutant, LastCoordinatesCount) {
  const matrix out = causal();
  k(0, H * D - 1) += 1;
  EXPECT_GT((causal() - out).rightCols(M).bottomRows(N - 1).cwiseAbs().minCoeff(), 0);
  v(0, H * M - 1) += 1;
  EXPECT_GT((causal() - out).col(H * M - 1).minCoeff(), 0);
}

TEST_F(Mutant, LastRowsAreWritten) {
  matrix out = matrix::Constant(N, H * M, -99);
  auto ws = attn.make_workspace();
  attn.forward_causal(q, k, v, out, ws);
  EXPECT_TRUE(support::close(out.bottomRows(2), truth().out.bottomRows(2), rounding));
}

TEST_F(Mutant, EveryRowThatIsSeenMatters) {
  const matrix out = causal();
  for (Index j = 0; j < N; ++j) {
    v.row(j).array() += 1;
    ASSERT_GT((causal() - out).bottomRows(N - j).minCoeff(), 0) << "row " << j;
    v.row(j).array() -= 1;
  }
}

TEST_F(Mutant, LastValuesCount) {
  const matrix out = causal();
  v.row(N - 1).array() += 1;
  EXPECT_GT((causal() - out).row(N - 1).minCoeff(), 0);
}

TEST_F(Mutant, FirstRowIsItsValue) { EXPECT_TRUE(support::close(causal().row(0), v.row(0), rounding)); }

TEST_F(Mutant, OnesGiveOne) {
  v.setOnes();
  EXPECT_TRUE(support::close(causal(), v, rounding));
}

TEST_F(Mutant, AUsedWorkspaceIsAsGoodAsANewOne) {
  auto used = attn.make_workspace();
  auto fresh = attn.make_workspace();
  auto s = attn.make_state();
  auto expected = attn.make_state();
  matrix out(N, H * M);
  attn.forward_causal(q, k, v, out, used);
  attn.forward_causal(s, q.topRows(5), k.topRows(5), v.topRows(5), out.topRows(5), used);
  attn.forward_causal(expected, q.topRows(5), k.topRows(5), v.topRows(5), out.topRows(5), fresh);
  for (Index h = 0; h < H; ++h) EXPECT_TRUE(support::same_bits(s.k_sum(h), expected.k_sum(h)));
}

TEST_F(Mutant, OutputsKeepToTheirColumns) {
  support::framed<float> out(N, H * M);
  auto ws = attn.make_workspace();
  attn.forward_causal(q, k, v, out.matrix(), ws);
  EXPECT_TRUE(out.frame_intact());
}

TEST_F(Mutant, LastColumnsAreWritten) {
  // Three packets of columns: a pair and a single one.
  const attention wide({.head_dim = D, .value_dim = 12});
  const matrix values = support::normal_matrix<float>(N, 12, 4);
  const matrix out = wide.forward_causal(q.leftCols(D), k.leftCols(D), values);
  EXPECT_TRUE(support::close(out.row(0), values.row(0), rounding));
}

TEST_F(Mutant, EveryTileReadsItsOwnRows) {
  EXPECT_TRUE(support::close(causal().row(35), truth().out.row(35), rounding));
}

TEST_F(Mutant, HeadsAreSeparate) {
  const attention single({.head_dim = D, .value_dim = M});
  const matrix out = causal();
  for (Index h = 0; h < H; ++h) {
    EXPECT_TRUE(support::close(
        out.middleCols(h * M, M),
        single.forward_causal(q.middleCols(h * D, D), k.middleCols(h * D, D), v.middleCols(h * M, M)), rounding));
  }
}

TEST_F(Mutant, FeaturesBeyondATileCount) {
  constexpr Index wide = 600;  // a tile is 512 rows of the state with packets of four
  const attention many({.head_dim = wide, .value_dim = M});
  const matrix x = support::normal_matrix<float>(6, wide, 5);
  const auto expected =
      support::oracle_recurrent(support::oracle_elu_plus_one(), x, x, v.topLeftCorner(6, M), {.causal = true});
  EXPECT_TRUE(support::close(many.forward_causal(x, x, v.topLeftCorner(6, M)), expected.out, rounding));
}

TEST_F(Mutant, QueryScaleMultipliesQueries) {
  const attention scaled({.head_dim = D, .value_dim = M, .heads = H, .query_scale = 0.5});
  EXPECT_TRUE(support::close(scaled.forward_causal(q, k, v), truth(0.5L).out, rounding));
}

TEST_F(Mutant, NoKeyGivesZero) { EXPECT_TRUE(support::all_zero(attn.forward(q, matrix(0, H * D), matrix(0, H * M)))); }

// <dout, J d> = <vjp(dout), d> for d = q, k, v in turn.
TEST_F(Mutant, GradientsAreThoseOfTheOutput) {
  const matrix dout = support::normal_matrix<float>(N, H * M, 6);
  const auto d = attn.vjp_causal(q, k, v, dout);
  const auto along = [&](matrix& x, const matrix& dx) {
    constexpr float step = 0x1p-6F;  // the square of it, 2e-4, is what differences are off by
    const matrix at = x;
    x = at * (1 + step);
    const matrix ahead = causal();
    x = at * (1 - step);
    const matrix behind = causal();
    x = at;
    EXPECT_NEAR((ahead - behind).cwiseProduct(dout).sum() / (2 * step), dx.cwiseProduct(at).sum(), 0.01 * dx.norm());
  };
  along(q, d.dq);
  along(k, d.dk);
  along(v, d.dv);
}

TEST_F(Mutant, GradientsOfSharedHeadsAreSums) {
  const attention grouped({.head_dim = D, .value_dim = M, .heads = H, .key_heads = 1});
  const matrix dout = support::normal_matrix<float>(N, H * M, 6);
  const matrix one_k = k.leftCols(D), one_v = v.leftCols(M);
  k.rightCols(D) = one_k;
  v.rightCols(M) = one_v;
  auto ds = grouped.make_state();
  auto separate = attn.make_state();
  ds.kv(0).setConstant(0.5F);
  separate.kv(0) = ds.kv(0);
  const auto d = grouped.vjp_causal(grouped.make_state(), q, one_k, one_v, dout, ds);
  const auto e = attn.vjp_causal(attn.make_state(), q, k, v, dout, separate);
  EXPECT_TRUE(support::close(d.dq, e.dq, rounding));
  EXPECT_TRUE(support::close(d.dk, matrix(e.dk.leftCols(D) + e.dk.rightCols(D)), rounding));
  EXPECT_TRUE(support::close(d.dv, matrix(e.dv.leftCols(M) + e.dv.rightCols(M)), rounding));
  EXPECT_TRUE(support::close(ds.kv(0), matrix(separate.kv(0) + separate.kv(1)), rounding));
}

TEST_F(Mutant, MergeAppends) {
  auto whole = attn.make_state();
  auto first = attn.make_state();
  auto later = attn.make_state();
  attn.absorb(whole, k, v);
  attn.absorb(first, k.topRows(10), v.topRows(10));
  attn.absorb(later, k.bottomRows(N - 10), v.bottomRows(N - 10));
  first.merge(later);
  for (Index h = 0; h < H; ++h) EXPECT_TRUE(support::close(first.kv(h), whole.kv(h), rounding));
}

// ---- update rules ---------------------------------------------------------------------------------------------------

/// 37 tokens: blocks of two, which correct, have a partial one, too.
constexpr support::rule_shape rule_size = {N - 1, D, M, H};
using rule_tokens = support::rule_tokens<float>;

/// Decays per feature, and reads before it writes.
struct MutantOfGated : Mutant {
  using rule = linattn::gated_bonus;
  const linattn::linear_attention<linattn::identity, rule> gated{
      linattn::options{.head_dim = D, .value_dim = M, .heads = H}};
  rule_tokens x{support::rule_kind::gated_bonus, rule_size, 7};

  auto inputs() const {
    return decltype(gated)::inputs{.log_decay = x.log_decay,
                                   .bonus = linattn::matrix_view<const float>(x.bonus.data(), N - 1, H * D, 0)};
  }
};

/// Corrects, with a decay per head.
struct MutantOfDelta : Mutant {
  const linattn::linear_attention<linattn::identity, linattn::gated_delta<>> corrected{
      linattn::options{.head_dim = D, .value_dim = M, .heads = H}};
  rule_tokens x{support::rule_kind::gated_delta_per_head, rule_size, 8};
};

template <class State>
void expect_state(const State& s, const support::rule_result& truth) {
  for (Index h = 0; h < H; ++h) EXPECT_TRUE(support::close(s.kv(h), truth.state[std::size_t(h)], rounding));
}

TEST_F(MutantOfGated, DecaysAndBonusAreThoseOfTheRecurrence) {
  const auto truth = support::rule_oracle(x.kind, x.wide());
  auto s = gated.make_state();
  EXPECT_TRUE(support::close(gated.forward_causal(s, x.q, x.k, x.v, inputs()), truth.out, rounding));
  expect_state(s, truth);
}

TEST_F(MutantOfGated, SilenceEndsInZeros) {
  auto s = gated.make_state();
  gated.absorb(s, x.k, x.v, inputs());
  x.k.setZero();
  x.log_decay.setConstant(-2);  // of 37 tokens: 2^-107
  gated.absorb(s, x.k, x.v, inputs());
  for (Index h = 0; h < H; ++h) EXPECT_TRUE(support::all_zero(s.kv(h)));
}

TEST_F(MutantOfGated, StateCarriesItsTotalLogDecay) {
  auto s = gated.make_state();
  gated.absorb(s, x.k, x.v, inputs());
  for (Index h = 0; h < H; ++h) {
    EXPECT_TRUE(support::close(s.log_decay(h), x.log_decay.middleCols(h * D, D).colwise().sum(), rounding));
  }
}

TEST_F(MutantOfDelta, CorrectionsAreThoseOfTheRecurrence) {
  const auto truth = support::rule_oracle(x.kind, x.wide());
  auto s = corrected.make_state();
  EXPECT_TRUE(support::close(corrected.forward_causal(s, x.q, x.k, x.v, {.log_decay = x.log_decay, .beta = x.beta}),
                             truth.out, rounding));
  expect_state(s, truth);
}

struct MutantOfTransformer : Mutant {
  using model_type = linattn::transformer<attention>;
  const linattn::transformer_weights<float> weights = support::random_transformer<float>(
      {.layers = 1, .width = 7, .query_width = H * D, .value_width = H * M, .feed_forward = 9}, 4);
  const model_type model{{.wiring = linattn::wiring::pre_norm}, weights, attn};
  const matrix x = support::normal_matrix<float>(5, 7, 5);
};

TEST_F(MutantOfTransformer, BiasesAreAdded) {
  const matrix y = model.forward_causal(x);
  auto moved = weights;
  moved.layers[0].linear2.bias.array() += 1;
  EXPECT_TRUE(
      support::close(model_type(model.options(), moved, attn).forward_causal(x), y + matrix::Ones(5, 7), rounding));
}

TEST_F(MutantOfTransformer, PaddingIsNoToken) {
  auto s = model.make_state();
  auto ws = model.make_workspace(2);
  matrix y(5, 7);
  model.forward_causal(s, x, y, ws, 3);
  EXPECT_EQ(s.tokens(), 3);
}

}  // namespace
