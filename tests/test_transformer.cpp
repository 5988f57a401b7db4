// The transformer over the paper's attention: against its equations, and against itself in every other way of running
// it. Numbers of others: test_transformer_reference.cpp. Rules with gates: test_transformer_rules.cpp.
#include <linattn/linattn.hpp>
#include <linattn/transformer.hpp>

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/transformer_inputs.hpp"
#include "support/transformer_oracle.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

namespace {

using Eigen::Index;
using linattn::activation;
using linattn::position_encoding;
using linattn::row_matrix;
using linattn::transformer_options;
using linattn::transformer_sizes;
using linattn::wiring;
using support::rows_of;
using support::wide;
using support::wide_matrix;

using attention = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, double>;
using model_type = linattn::transformer<attention>;
using matrix = row_matrix<double>;
using symbols = std::vector<Index>;

/// A few layers, each of which passes its inputs' roundings on and adds as many as one path of attention does.
constexpr double composition = 5 * support::tolerance<double>::relative_rms;

/// Layers of odd widths unless told otherwise: F = 7, 3 heads of D = 5, M = 4, 17 hidden units, 11 symbols.
constexpr Index D = 5, M = 4, H = 3, vocabulary = 11;
transformer_sizes small(Index layers = 2) {
  return {.layers = layers,
          .width = 7,
          .query_width = H * D,
          .value_width = H * M,
          .feed_forward = 17,
          .symbols = vocabulary,
          .outputs = 9,
          .final_norm = true};
}
const linattn::options three_heads = {.head_dim = D, .value_dim = M, .heads = H};

auto elu_oracle(bool causal = true, Index keys = -1, const support::oracle_heads& heads = {H, H, H}) {
  return support::kernel_oracle([](std::size_t) { return linattn::elu_plus_one(); }, heads, causal, keys);
}

/// forward_causal from the state in parts of `part` tokens, with a workspace of `rows`.
matrix prefill_in_parts(const model_type& model, model_type::state_type& s, const symbols& x, Index part, Index rows) {
  auto ws = model.make_workspace(rows);
  matrix out(Index(x.size()), model.outputs());
  for (Index begin = 0; begin < out.rows(); begin += part) {
    const Index n = std::min(part, out.rows() - begin);
    model.forward_causal(s, std::span(x).subspan(std::size_t(begin), std::size_t(n)), out.middleRows(begin, n), ws);
  }
  return out;
}

matrix stepped(const model_type& model, model_type::state_type& s, const symbols& x) {
  auto ws = model.make_workspace();
  matrix out(Index(x.size()), model.outputs());
  for (Index t = 0; t < out.rows(); ++t) model.step(s, x[std::size_t(t)], out.row(t), ws);
  return out;
}

testing::AssertionResult same_states(const model_type::state_type& a, const model_type::state_type& b) {
  if (a.tokens() != b.tokens()) return testing::AssertionFailure() << a.tokens() << " and " << b.tokens() << " tokens";
  for (std::size_t l = 0; l < a.layers().size(); ++l) {
    for (Index h = 0; h < a.layers()[l].heads(); ++h) {
      if (const auto r = support::same_bits(a.layers()[l].kv(h), b.layers()[l].kv(h)); !r) return r;
      if (const auto r = support::same_bits(a.layers()[l].k_sum(h), b.layers()[l].k_sum(h)); !r) return r;
    }
  }
  return testing::AssertionSuccess();
}

// ---- one layer, its formula written out -----------------------------------------------------------------------------

class Formula : public testing::TestWithParam<activation> {
 protected:
  static constexpr double epsilon = 1e-3;  // large, so that it shows
  const linattn::transformer_weights<double> norms = support::random_transformer<double>(sizes(true), 1);
  const linattn::transformer_weights<double> no_norms = support::random_transformer<double>(sizes(false), 2);
  const matrix x = support::normal_matrix<double>(13, 7, 3);

  static transformer_sizes sizes(bool norms) {
    return {.layers = 1, .width = 7, .query_width = H * D, .value_width = H * M, .feed_forward = 17, .norms = norms};
  }
  static wide_matrix A(const wide_matrix& from, const linattn::layer_weights<double>& w) {
    return support::multi_head(0, from, from, w.attention, elu_oracle());
  }
  static wide_matrix MLP(const wide_matrix& from, const linattn::layer_weights<double>& w) {
    const wide_matrix hidden = support::affine(from, w.linear1);
    const auto act = [](long double h) -> long double {
      if (GetParam() == activation::relu) return h > 0 ? h : 0;
      return h * (1 + std::erf(h / std::sqrt(2.0L))) / 2;
    };
    return support::affine(hidden.unaryExpr(act), w.linear2);
  }
  static wide_matrix LN(const wide_matrix& from, const linattn::norm_weights<double>& n) {
    return support::layer_norm(from, n, epsilon);
  }
  matrix run(wiring how, const linattn::transformer_weights<double>& w) const {
    const model_type model({.wiring = how, .activation = GetParam(), .norm_epsilon = epsilon}, w,
                           attention(three_heads));
    EXPECT_EQ(model.outputs(), 7);
    return model.forward_causal(x);
  }
};
INSTANTIATE_TEST_SUITE_P(all, Formula, testing::Values(activation::relu, activation::gelu),
                         [](const auto& of) { return of.param == activation::relu ? "relu" : "gelu"; });

TEST_P(Formula, Paper) {
  const auto& w = no_norms.layers[0];
  const wide_matrix y = MLP(A(wide(x), w) + wide(x), w);
  EXPECT_TRUE(support::close(run(wiring::paper, no_norms), y, composition));
}

TEST_P(Formula, PostNorm) {
  const auto& w = norms.layers[0];
  const wide_matrix u = LN(wide(x) + A(wide(x), w), w.norm_attention);
  const wide_matrix y = LN(u + MLP(u, w), w.norm_feed_forward);
  EXPECT_TRUE(support::close(run(wiring::post_norm, norms), y, composition));
}

TEST_P(Formula, PreNorm) {
  const auto& w = norms.layers[0];
  const wide_matrix u = wide(x) + A(LN(wide(x), w.norm_attention), w);
  const wide_matrix y = u + MLP(LN(u, w.norm_feed_forward), w);
  EXPECT_TRUE(support::close(run(wiring::pre_norm, norms), y, composition));
}

// ---- stacks, against the oracle -------------------------------------------------------------------------------------

/// forward_causal, step and forward of symbols, each against the equations.
void expect_equations(const transformer_options& o, const linattn::transformer_weights<double>& w,
                      const linattn::options& of = three_heads) {
  const support::oracle_heads heads{of.heads, of.key_heads > 0 ? of.key_heads : of.heads,
                                    of.value_heads > 0 ? of.value_heads
                                    : of.key_heads > 0 ? of.key_heads
                                                       : of.heads};
  const model_type model(o, w, attention(of));
  const symbols x = support::random_symbols(13, w.embedding.rows(), 5);
  const wide_matrix inputs = rows_of(w, x);
  const wide_matrix causal = support::transformer_oracle(o, w, inputs, elu_oracle(true, -1, heads));
  EXPECT_TRUE(support::close(model.forward_causal(x), causal, composition)) << "forward_causal";
  auto s = model.make_state();
  EXPECT_TRUE(support::close(stepped(model, s, x), causal, composition)) << "step";
  EXPECT_TRUE(support::close(model.forward(x), support::transformer_oracle(o, w, inputs, elu_oracle(false, -1, heads)),
                             composition))
      << "forward";
  // Vectors in the place of the embedding's rows are the same inputs.
  EXPECT_TRUE(support::same_bits(model.forward_causal(matrix(inputs.cast<double>())), model.forward_causal(x)));
}

TEST(Transformer, EveryWiringAndActivationInStacks) {
  for (const wiring how : {wiring::paper, wiring::post_norm, wiring::pre_norm}) {
    for (const activation act : {activation::relu, activation::gelu}) {
      SCOPED_TRACE("wiring " + std::to_string(int(how)) + ", activation " + std::to_string(int(act)));
      transformer_sizes n = small(3);
      n.norms = how != wiring::paper;
      expect_equations({.wiring = how, .activation = act}, support::random_transformer<double>(n, 7));
    }
  }
}

TEST(Transformer, Positions) {
  for (const auto positions :
       {position_encoding::sinusoid_added, position_encoding::sinusoid_concatenated, position_encoding::learned}) {
    for (const Index width : {7, 8}) {
      SCOPED_TRACE("positions " + std::to_string(int(positions)) + ", width " + std::to_string(width));
      transformer_sizes n = small();
      n.width = width;
      if (positions == position_encoding::learned) n.positions = 13;
      if (positions == position_encoding::sinusoid_concatenated) n.embedding = 4;
      expect_equations({.wiring = wiring::pre_norm, .positions = positions}, support::random_transformer<double>(n, 8));
    }
  }
}

TEST(Transformer, WithAndWithoutPredictorFinalNormAndBiases) {
  for (const bool has_predictor : {false, true}) {
    for (const bool has_norm : {false, true}) {
      for (const bool has_biases : {false, true}) {
        transformer_sizes n = small(1);
        n.outputs = has_predictor ? 9 : 0;
        n.final_norm = has_norm;
        n.biases = has_biases;
        SCOPED_TRACE(std::to_string(has_predictor) + std::to_string(has_norm) + std::to_string(has_biases));
        expect_equations({}, support::random_transformer<double>(n, 9));
      }
    }
  }
}

// Any bias may be left out alone: projections have them in some models, the feed-forward map in others.
TEST(Transformer, BiasesOfSomeMapsOnly) {
  const auto all = support::random_transformer<double>(small(), 10);
  std::vector<std::string> biases;
  linattn::for_each_tensor(all, [&](const std::string& name, const auto&) {
    if (name.ends_with(".bias")) biases.push_back(name);
  });
  ASSERT_EQ(biases.size(), 2u * 8 + 2);
  for (const std::string& without : biases) {
    SCOPED_TRACE(without);
    auto w = all;
    linattn::for_each_tensor(w, [&](const std::string& name, auto& tensor) {
      if (name == without) linattn::detail::clear_tensor(tensor, 0, 0);
    });
    expect_equations({.wiring = wiring::pre_norm}, w);
  }
}

TEST(Transformer, OddWidths) {
  for (const Index width : {1, 7, 17, 33}) {
    for (const Index hidden : {1, 7, 65}) {
      SCOPED_TRACE("F = " + std::to_string(width) + ", " + std::to_string(hidden) + " hidden units");
      transformer_sizes n = small();
      n.width = width;
      n.feed_forward = hidden;
      n.outputs = width + 1;
      for (const activation act : {activation::relu, activation::gelu}) {
        expect_equations({.wiring = wiring::pre_norm, .activation = act}, support::random_transformer<double>(n, 11));
      }
    }
  }
}

TEST(Transformer, HeadsShared) {
  struct sharing {
    Index heads, key_heads, value_heads;
  };
  for (const auto& [heads, key_heads, value_heads] : {sharing{4, 2, 2}, {4, 1, 1}, {4, 2, 4}, {2, 2, 4}, {1, 2, 4}}) {
    SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(key_heads) + " of keys, " +
                 std::to_string(value_heads) + " of values");
    transformer_sizes n = small();
    n.query_width = heads * D;
    n.key_width = key_heads * D;
    n.value_width = value_heads * M;
    n.output_width = std::max(heads, value_heads) * M;
    expect_equations(
        {}, support::random_transformer<double>(n, 12),
        {.head_dim = D, .value_dim = M, .heads = heads, .key_heads = key_heads, .value_heads = value_heads});
  }
}

TEST(Transformer, VectorInputsOfTheirOwnWidth) {
  transformer_sizes n = small();
  n.symbols = 0;
  const auto w = support::random_transformer<double>(n, 13);
  const transformer_options o = {
      .wiring = wiring::pre_norm, .positions = position_encoding::sinusoid_concatenated, .input_width = 3};
  const model_type model(o, w, attention(three_heads));
  EXPECT_EQ(model.input_width(), 3);
  // Rows that are not packed.
  const matrix wide_rows = support::normal_matrix<double>(13, 5, 14);
  const auto x = wide_rows.middleCols(1, 3);
  const wide_matrix expected = support::transformer_oracle(o, w, wide(x), elu_oracle());
  EXPECT_TRUE(support::close(model.forward_causal(x), expected, composition));
  auto s = model.make_state();
  auto ws = model.make_workspace();
  matrix y(13, model.outputs());
  for (Index t = 0; t < 13; ++t) model.step(s, x.row(t), y.row(t), ws);
  EXPECT_TRUE(support::close(y, expected, composition));
}

// ---- the same sequence, run in other ways ---------------------------------------------------------------------------

/// Three pre-norm layers of width 33 with gelu and learned positions.
class Ways : public testing::Test {
 protected:
  static constexpr Index N = 70;
  static transformer_sizes sizes() {
    transformer_sizes n = small(3);
    n.width = 33;
    n.positions = N;
    return n;
  }
  const linattn::transformer_weights<double> weights = support::random_transformer<double>(sizes(), 21);
  const transformer_options options = {
      .wiring = wiring::pre_norm, .activation = activation::gelu, .positions = position_encoding::learned};
  const model_type model{options, weights, attention(three_heads)};
  const symbols x = support::random_symbols(N, vocabulary, 22);
  model_type::state_type end = model.make_state();
  const matrix y = prefill_in_parts(model, end, x, N, 64);

  symbols part(Index first, Index n) const { return {x.begin() + first, x.begin() + first + n}; }
};

TEST_F(Ways, StepGivesTheBitsOfForwardCausal) {
  EXPECT_TRUE(
      support::close(y, support::transformer_oracle(options, weights, rows_of(weights, x), elu_oracle()), composition));
  auto s = model.make_state();
  EXPECT_TRUE(support::same_bits(stepped(model, s, x), y));
  EXPECT_TRUE(same_states(s, end));
}

TEST_F(Ways, AnySplitGivesTheSameBits) {
  for (const Index part : {1, 2, 5, 8, 33, 69}) {
    auto s = model.make_state();
    EXPECT_TRUE(support::same_bits(prefill_in_parts(model, s, x, part, 64), y)) << part;
    EXPECT_TRUE(same_states(s, end)) << part;
  }
  for (const Index prompt : {1, 7, 40, 69}) {  // prefill, steps, and prefill again
    auto s = model.make_state();
    const Index middle = prompt + (N - prompt) / 2;
    matrix out(N, model.outputs());
    out << prefill_in_parts(model, s, part(0, prompt), prompt, 16), stepped(model, s, part(prompt, middle - prompt)),
        prefill_in_parts(model, s, part(middle, N - middle), N, 16);
    EXPECT_TRUE(support::same_bits(out, y)) << prompt;
    EXPECT_TRUE(same_states(s, end)) << prompt;
  }
}

TEST_F(Ways, AnyWorkspaceGivesTheSameBits) {
  for (const Index rows : {1, 2, 3, 7, 64, 100}) {
    auto s = model.make_state();
    EXPECT_TRUE(support::same_bits(prefill_in_parts(model, s, x, N, rows), y)) << rows;
    EXPECT_TRUE(same_states(s, end)) << rows;
  }
  EXPECT_TRUE(support::same_bits(model.forward_causal(x), y));
}

TEST_F(Ways, OneRowOfOutputsIsTheLast) {
  for (const Index rows : {1, 7, 64, 100}) {
    for (const Index n : {Index(1), Index(7), Index(14), N}) {
      auto s = model.make_state();
      auto ws = model.make_workspace(rows);
      matrix last(1, model.outputs());
      model.forward_causal(s, part(0, n), last, ws);
      EXPECT_TRUE(support::same_bits(last, y.row(n - 1))) << n << " tokens, " << rows << " rows";
      EXPECT_EQ(s.tokens(), n);
    }
  }
  auto ws = model.make_workspace(N);
  matrix last(1, model.outputs());
  model.forward(x, last, ws);
  EXPECT_TRUE(support::same_bits(last, model.forward(x).bottomRows(1)));
}

TEST_F(Ways, NoTokensAreNothing) {
  auto s = end;
  auto ws = model.make_workspace(3);
  matrix none(0, model.outputs());
  model.forward_causal(s, symbols(), none, ws);
  model.forward(symbols(), none, ws);
  model.step(std::span<model_type::state_type>(), symbols(), none, ws);
  EXPECT_TRUE(same_states(s, end));
  EXPECT_EQ(model.forward_causal(symbols()).rows(), 0);
  EXPECT_EQ(model.forward(symbols()).rows(), 0);
}

// What has no key is as good as deleted, for the others and for the state; itself it sees those that have.
TEST_F(Ways, PaddingIsSeenByNone) {
  for (const Index rows : {1, 5, 64}) {
    for (const Index keys : {0, 1, 5, 12, 20}) {
      auto s = model.make_state(), alone = model.make_state();
      auto ws = model.make_workspace(rows);
      matrix out(20, model.outputs()), of_keys(keys, model.outputs());
      model.forward_causal(s, part(0, 20), out, ws, keys);
      model.forward_causal(alone, part(0, keys), of_keys, ws);
      EXPECT_TRUE(support::same_bits(out.topRows(keys), of_keys)) << keys << " keys";
      EXPECT_TRUE(same_states(s, alone)) << keys << " keys";
      const wide_matrix expected =
          support::transformer_oracle(options, weights, rows_of(weights, part(0, 20)), elu_oracle(true, keys));
      EXPECT_TRUE(support::close(out, expected, composition)) << keys << " keys";
      // The sequence goes on where its keys end.
      matrix next(1, model.outputs());
      model.step(s, x[std::size_t(keys)], next.row(0), ws);
      EXPECT_TRUE(support::same_bits(next, y.row(keys))) << keys << " keys";
    }
  }
  auto ws = model.make_workspace(20);
  for (const Index keys : {0, 1, 12, 20}) {
    matrix out(20, model.outputs());
    model.forward(part(0, 20), out, ws, keys);
    const wide_matrix expected =
        support::transformer_oracle(options, weights, rows_of(weights, part(0, 20)), elu_oracle(false, keys));
    EXPECT_TRUE(support::close(out, expected, composition)) << keys << " keys";
  }
}

TEST_F(Ways, ACopyIsASnapshot) {
  auto s = model.make_state();
  prefill_in_parts(model, s, part(0, 30), 30, 64);
  const auto snapshot = s;
  auto fork = model.make_state();
  prefill_in_parts(model, fork, part(50, 9), 9, 64);
  fork = snapshot;
  EXPECT_TRUE(support::same_bits(stepped(model, s, part(30, 40)), y.bottomRows(40)));
  EXPECT_EQ(snapshot.tokens(), 30);
  EXPECT_TRUE(same_states(fork, snapshot));
  EXPECT_TRUE(support::same_bits(stepped(model, fork, part(30, 40)), y.bottomRows(40)));
  s = snapshot;
  EXPECT_TRUE(support::same_bits(prefill_in_parts(model, s, part(30, 40), 40, 64), y.bottomRows(40)));
  s.reset();
  EXPECT_EQ(s.tokens(), 0);
  EXPECT_TRUE(same_states(s, model.make_state()));
  EXPECT_TRUE(support::same_bits(stepped(model, s, x), y));
}

TEST_F(Ways, CopiesOfAModelShareItsWeights) {
  const model_type copy = model;
  EXPECT_EQ(copy.weight_bytes(), model.weight_bytes());
  EXPECT_GE(model.weight_bytes(), Index(sizeof(double)) * (3 * (33 * (2 * H * D + 2 * H * M) + 2 * 17 * 33) + 9 * 33));
  EXPECT_TRUE(support::same_bits(copy.forward_causal(x), y));
}

// Sequences of different ages join and leave; each gives what it gives alone.
TEST_F(Ways, ASequenceOfABatchIsAlone) {
  struct sequence {
    symbols x;
    matrix y;
    Index at = 0;
    model_type::state_type s;
  };
  support::random_bits random(31);
  std::vector<sequence> all;
  for (std::uint64_t i = 0; i < 12; ++i) {
    sequence one{support::random_symbols(30, vocabulary, 40 + i), {}, random.below(20), model.make_state()};
    auto s = model.make_state();
    one.y = stepped(model, s, one.x);
    prefill_in_parts(model, one.s, {one.x.begin(), one.x.begin() + one.at}, 30, 64);
    all.push_back(one);
  }
  auto ws = model.make_workspace(12);
  for (int round = 0; round < 100; ++round) {
    std::vector<std::size_t> chosen;
    symbols x_t;
    std::vector<model_type::state_type> states;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (all[i].at == 30 || random.uniform() < 0.4) continue;
      chosen.push_back(i);
      x_t.push_back(all[i].x[std::size_t(all[i].at)]);
      states.push_back(all[i].s);
    }
    matrix out(Index(chosen.size()), model.outputs());
    model.step(std::span(states), x_t, out, ws);
    for (std::size_t b = 0; b < chosen.size(); ++b) {
      sequence& one = all[chosen[b]];
      ASSERT_TRUE(support::same_bits(out.row(Index(b)), one.y.row(one.at)))
          << "round " << round << ", " << chosen.size() << " sequences";
      one.s = states[b];
      ++one.at;
    }
  }
  EXPECT_TRUE(std::all_of(all.begin(), all.end(), [](const sequence& one) { return one.at == 30; }));
}

TEST_F(Ways, ANanStaysInItsSequence) {
  LINATTN_NEEDS_NAN();
  std::vector<model_type::state_type> states(5, end);
  for (auto& s : states) s.reset();
  auto ws = model.make_workspace(5);
  matrix in = support::normal_matrix<double>(5, 33, 51), out(5, model.outputs()), without = out;
  auto others = states;
  model.step(std::span(others), in, without, ws);
  in(2, 17) = std::nan("");
  model.step(std::span(states), in, out, ws);
  for (const Index b : {0, 1, 3, 4}) EXPECT_TRUE(support::same_bits(out.row(b), without.row(b)));
  EXPECT_TRUE(support::all_nan(out.row(2)));
}

// ---- encoder and decoder --------------------------------------------------------------------------------------------

class Decoder : public testing::TestWithParam<wiring> {
 protected:
  static constexpr Index memory_width = 6;
  static transformer_sizes sizes() {
    transformer_sizes n = small();
    n.memory_width = memory_width;
    n.norms = GetParam() != wiring::paper;
    return n;
  }
  const linattn::transformer_weights<double> weights = support::random_transformer<double>(sizes(), 61);
  const transformer_options options = {.wiring = GetParam(), .activation = activation::gelu};
  const model_type model{options, weights, attention(three_heads), attention(three_heads)};
  const symbols x = support::random_symbols(13, vocabulary, 62);
  const matrix memory = support::normal_matrix<double>(10, memory_width, 63);

  wide_matrix expected(const matrix& of) const {
    return support::transformer_oracle(options, weights, rows_of(weights, x), elu_oracle(), elu_oracle(false),
                                       wide(of));
  }
};
INSTANTIATE_TEST_SUITE_P(all, Decoder, testing::Values(wiring::paper, wiring::post_norm, wiring::pre_norm),
                         [](const auto& of) {
                           return of.param == wiring::paper       ? "paper"
                                  : of.param == wiring::post_norm ? "post_norm"
                                                                  : "pre_norm";
                         });

TEST_P(Decoder, NamesItsTensorsAsDecodersDo) {
  std::vector<std::string> names;
  linattn::for_each_tensor(weights, [&](const std::string& name, const auto&) { names.push_back(name); });
  std::vector<std::string> wanted = {"layers.1.self_attention.query_projection.weight",
                                     "layers.1.cross_attention.out_projection.bias"};
  if (GetParam() != wiring::paper) wanted.insert(wanted.end(), {"layers.0.norm2.weight", "layers.0.norm3.bias"});
  for (const std::string& name : wanted) EXPECT_EQ(std::count(names.begin(), names.end(), name), 1) << name;
}

TEST_P(Decoder, AbsorbsItsMemoryOnceAndReadsItAtEveryToken) {
  auto ws = model.make_workspace(4);
  auto s = model.make_state();
  model.absorb_memory(s, memory, ws);
  EXPECT_EQ(s.tokens(), 0);
  const auto ready = s;
  matrix y(13, model.outputs());
  model.forward_causal(s, x, y, ws);
  EXPECT_TRUE(support::close(y, expected(memory), composition));

  auto stepping = ready;
  EXPECT_TRUE(support::same_bits(stepped(model, stepping, x), y));

  std::vector<model_type::state_type> batch(3, ready);
  matrix y_t(3, model.outputs());
  for (Index t = 0; t < 13; ++t) {
    model.step(std::span(batch), symbols(3, x[std::size_t(t)]), y_t, ws);
    for (Index b = 0; b < 3; ++b) ASSERT_TRUE(support::same_bits(y_t.row(b), y.row(t)));
  }
}

TEST_P(Decoder, AbsorbsItsMemoryInParts) {
  auto ws = model.make_workspace(3);
  auto s = model.make_state();
  model.absorb_memory(s, memory.topRows(4), ws);
  model.absorb_memory(s, memory.middleRows(4, 0), ws);
  model.absorb_memory(s, memory.bottomRows(6), ws);
  matrix y(13, model.outputs());
  model.forward_causal(s, x, y, ws);
  EXPECT_TRUE(support::close(y, expected(memory), composition));
  for (const auto& of_layer : s.memories()) EXPECT_EQ(of_layer.tokens(), 10);
}

TEST_P(Decoder, WithoutAMemoryItSeesNothingThere) {
  auto ws = model.make_workspace(20);
  auto s = model.make_state();
  matrix y(13, model.outputs());
  model.forward_causal(s, x, y, ws);
  EXPECT_TRUE(support::close(y, expected(memory.topRows(0)), composition));
  model.absorb_memory(s, memory, ws);
  s.reset();
  matrix again(13, model.outputs());
  model.forward_causal(s, x, again, ws);
  EXPECT_TRUE(support::same_bits(again, y));
}

// ---- no allocation --------------------------------------------------------------------------------------------------

void expect_no_allocation(const model_type& model, model_type::state_type s, Index width) {
  constexpr Index B = 5, N = 20;
  auto ws = model.make_workspace(B);
  auto whole = model.make_workspace(N);
  std::vector<model_type::state_type> states(B, s);
  const symbols x_t = support::random_symbols(B, vocabulary, 1), x = support::random_symbols(N, vocabulary, 2);
  const matrix vectors = support::normal_matrix<double>(N, width, 3);
  matrix out(N, model.outputs());
  for (int time = 0; time < 2; ++time) {  // a first call must not be a special one
    const support::allocation_count count;
    model.step(s, x[0], out.row(0), ws);
    model.step(s, vectors.row(0), out.row(0), ws);
    model.step(std::span(states), x_t, out.topRows(B), ws);
    model.step(std::span(states), vectors.topRows(B), out.topRows(B), ws);
    model.forward_causal(s, x, out, ws);
    model.forward_causal(s, vectors, out, ws, 7);
    model.forward_causal(s, x, out.topRows(1), ws);
    states[1] = s;
    s.reset();
    EXPECT_EQ(count.total(), 0);
  }
  if (!s.memories().empty()) {
    const matrix memory = support::normal_matrix<double>(N, 6, 4);
    const support::allocation_count count;
    model.absorb_memory(s, memory, ws);
    model.step(s, x[0], out.row(0), ws);
    EXPECT_EQ(count.total(), 0);
  } else {
    const support::allocation_count count;
    model.forward(x, out, whole);
    model.forward(vectors, out, whole, 7);
    EXPECT_EQ(count.total(), 0);
  }
}

TEST(TransformerAllocation, None) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  for (const Index width : {7, 600}) {
    transformer_sizes n = small();
    n.width = width;
    const model_type model({.activation = activation::gelu, .positions = position_encoding::sinusoid_added},
                           support::random_transformer<double>(n, 71), attention(three_heads));
    expect_no_allocation(model, model.make_state(), width);
    n.memory_width = 6;
    const model_type decoder({.wiring = wiring::pre_norm}, support::random_transformer<double>(n, 72),
                             attention(three_heads), attention(three_heads));
    expect_no_allocation(decoder, decoder.make_state(), width);
  }
}

}  // namespace
