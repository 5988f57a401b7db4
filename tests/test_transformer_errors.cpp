// What a transformer refuses, with which sentence, and that nothing was written before. A failed debug assertion ends
// the program with a code of its own here.
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int exit_code_of_assertions = 42;
[[noreturn]] void end_by_assertion(const char* condition) {
  std::fputs(condition, stderr);
  std::_Exit(exit_code_of_assertions);
}

}  // namespace

#define LINATTN_ASSERT(condition) ((condition) ? void() : end_by_assertion(#condition))

#include <linattn/linattn.hpp>
#include <linattn/transformer.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/refusal.hpp"
#include "support/sentinel.hpp"
#include "support/transformer_inputs.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using Eigen::Index;
using linattn::position_encoding;
using linattn::transformer_options;
using linattn::transformer_sizes;
using linattn::wiring;
using attention = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, double>;
using model_type = linattn::transformer<attention>;
using weights_type = linattn::transformer_weights<double>;
using layer_weights = linattn::layer_weights<double>;
using matrix = linattn::row_matrix<double>;
using symbols = std::vector<Index>;

constexpr Index D = 5, M = 4, H = 3, F = 7, vocabulary = 11, longest = 12, memory_width = 6;

/// Sizes with every part there is; `memory` makes a decoder of them.
transformer_sizes everything(Index memory = 0) {
  return {.layers = 2,
          .width = F,
          .query_width = H * D,
          .value_width = H * M,
          .feed_forward = 17,
          .symbols = vocabulary,
          .positions = longest,
          .outputs = 9,
          .memory_width = memory,
          .final_norm = true};
}
const transformer_options learned = {.positions = position_encoding::learned};
attention operator_of(Index heads = H, Index head_dim = D, Index value_dim = M) {
  return attention({.head_dim = head_dim, .value_dim = value_dim, .heads = heads});
}
weights_type weights_of(const transformer_sizes& n) { return support::random_transformer<double>(n, 1); }
model_type encoder(const transformer_sizes& n = everything()) { return {learned, weights_of(n), operator_of()}; }
model_type decoder() { return {learned, weights_of(everything(memory_width)), operator_of(), operator_of()}; }

std::string refusal_of(const transformer_options& o, const weights_type& w, const std::vector<attention>& attn,
                       const std::vector<attention>& cross = {}) {
  return support::refusal([&] { model_type(o, w, attn, cross); });
}
std::string refusal_of(const transformer_options& o, const weights_type& w) {
  const bool is_decoder = w.layers.at(0).cross.key.weight.size() > 0;
  return refusal_of(o, w, std::vector<attention>(w.layers.size(), operator_of()),
                    std::vector<attention>(is_decoder ? w.layers.size() : 0, operator_of()));
}

testing::AssertionResult says(const std::string& text, const std::vector<std::string>& parts) {
  if (text.empty()) return testing::AssertionFailure() << "not refused";
  for (const std::string& part : parts) {
    if (text.find(part) == std::string::npos) return testing::AssertionFailure() << "no '" << part << "' in: " << text;
  }
  return testing::AssertionSuccess();
}

std::vector<std::string> names_of(const weights_type& w) {
  std::vector<std::string> names;
  linattn::for_each_tensor(w, [&](const std::string& name, const auto&) { names.push_back(name); });
  return names;
}
/// A tensor by its name, to (rows, cols) more or, with `clears`, to nothing.
void reshape(weights_type& w, const std::string& which, Index more_rows, Index more_cols, bool clears = false) {
  linattn::for_each_tensor(w, [&](const std::string& name, auto& tensor) {
    if (name != which) return;
    linattn::detail::clear_tensor(tensor, clears ? 0 : tensor.rows() + more_rows,
                                  clears ? 0 : tensor.cols() + more_cols);
  });
}

// ---- construction ---------------------------------------------------------------------------------------------------

// Sizes that nothing else fixes are taken as they are, so that others are found not to fit them.
TEST(TransformerWeights, EveryTensorOfAWrongShapeIsNamed) {
  for (const Index memory : {Index(0), memory_width}) {
    const weights_type all = weights_of(everything(memory));
    ASSERT_EQ(refusal_of(learned, all), "");
    for (const std::string& name : names_of(all)) {
      weights_type wide = all;
      reshape(wide, name, 0, 1);
      std::string blamed = name;
      if (name == "embedding.weight") blamed = "inputs of 8 columns do not fit layers of width 7";
      if (name == "layers.0.cross_attention.key_projection.weight") {
        blamed = "layers.0.cross_attention.value_projection.weight";
      }
      EXPECT_TRUE(says(refusal_of(learned, wide), {"linattn::transformer", blamed})) << name;

      if (!name.ends_with(".weight") || name.find("norm") != std::string::npos) continue;  // vectors have one row
      if (name == "embedding.weight" || name == "positions.weight") continue;              // any number of rows will do
      weights_type tall = all;
      reshape(tall, name, 1, 0);
      if (name == "predictor.weight") blamed = "predictor.bias";
      if (name == "layers.0.linear1.weight") blamed = "layers.0.linear2.weight";
      if (name.find("layers.0.") == 0 && name.find("attention.out_projection.weight") != std::string::npos &&
          name.find("cross") == std::string::npos) {
        blamed = "layers.1.linear1.weight";  // the first layer's width is that of all
      } else if (name == "layers.0.cross_attention.key_projection.weight") {
        blamed = name;
      }
      EXPECT_TRUE(says(refusal_of(learned, tall), {"linattn::transformer", blamed})) << name;
    }
  }
}

TEST(TransformerWeights, AllThatIsWrongStandsInOneMessageWithBothShapes) {
  weights_type w = weights_of(everything());
  reshape(w, "layers.0.linear2.weight", 0, 3);
  reshape(w, "layers.1.attention.key_projection.weight", 2, 0);
  reshape(w, "layers.1.norm2.bias", 0, 1);
  reshape(w, "norm.weight", 0, 2);
  EXPECT_TRUE(
      says(refusal_of(learned, w),
           {"layers.0.linear2.weight is (7, 20), but should be (7, 17)",
            "layers.1.attention.key_projection.weight is (17, 7), but should be (15, 7)",
            "layers.1.norm2.bias is (1, 8), but should be (1, 7)", "norm.weight is (1, 9), but should be (1, 7)"}));
}

TEST(TransformerWeights, WhatIsMissingIsNamed) {
  const weights_type all = weights_of(everything(memory_width));
  for (const std::string& name : names_of(all)) {
    if (name.ends_with(".bias")) continue;
    std::string blamed = name;
    if (name == "embedding.weight") continue;  // inputs are vectors then
    if (name == "positions.weight") blamed = "positions are learned where there are weights of them";
    if (name == "predictor.weight" || name == "norm.weight") {
      blamed = name.substr(0, name.find('.')) + ".bias is (1, " + (name == "norm.weight" ? "7" : "9") +
               "), but has no place";
    }
    if (name == "layers.0.cross_attention.key_projection.weight") {
      blamed = "layers.0.cross_attention.value_projection.weight is (12, 6), but has no place";
    }
    weights_type w = all;
    reshape(w, name, 0, 0, true);
    EXPECT_TRUE(says(refusal_of(learned, w, {operator_of(), operator_of()}, {operator_of(), operator_of()}), {blamed}))
        << name;
  }
  weights_type w = all;
  for (const char* const name : {"layers.0.linear1.weight", "layers.0.linear2.weight"}) reshape(w, name, 0, 0, true);
  EXPECT_TRUE(says(refusal_of(learned, w), {"layers.0.linear1.weight and layers.0.linear2.weight are missing"}));
  weights_type nothing;
  nothing.layers.resize(2);
  EXPECT_TRUE(says(refusal_of({}, nothing), {"missing"}));
  for (layer_weights& layer : nothing.layers) layer.linear1.weight.resize(17, 0);
  EXPECT_TRUE(says(refusal_of({.wiring = wiring::paper}, nothing), {"missing"})) << "a width of 0";
}

TEST(TransformerWeights, WhatHasNoPlaceIsNamed) {
  EXPECT_TRUE(
      says(refusal_of({.wiring = wiring::paper, .positions = position_encoding::learned}, weights_of(everything())),
           {"layers.0.norm1.weight is (1, 7), but has no place", "layers.1.norm2.bias"}));
  transformer_sizes gated = everything();
  gated.log_decays = H;
  gated.betas = H;
  EXPECT_TRUE(says(refusal_of(learned, weights_of(gated)),
                   {"layers.0.attention.log_decay_projection.weight is (3, 7), but has no place",
                    "layers.1.attention.beta_projection.bias"}));
}

TEST(TransformerWeights, OperatorsOfOtherSizes) {
  const weights_type w = weights_of(everything());
  EXPECT_TRUE(says(refusal_of(learned, w, {operator_of(4), operator_of(4)}),
                   {"layers.0.attention.query_projection.weight is (15, 7), but should be (20, 7)",
                    "layers.1.attention.out_projection.weight is (7, 12), but should be (7, 16)"}));
  EXPECT_TRUE(says(refusal_of(learned, w, {operator_of(3, 5), operator_of(5, 3)}), {"differ in their sizes"}));
  EXPECT_TRUE(says(refusal_of(learned, w, {operator_of()}), {"1 attention operators for 2 layers"}));
  EXPECT_TRUE(says(refusal_of(learned, w, {}), {"0 attention operators for 2 layers"}));
  EXPECT_TRUE(says(refusal_of(learned, {}, {}), {"no layer"}));
}

TEST(TransformerWeights, CrossAttentionsThatDoNotFit) {
  const std::vector<attention> two(2, operator_of());
  const weights_type of_decoder = weights_of(everything(memory_width)), of_encoder = weights_of(everything());
  EXPECT_TRUE(says(refusal_of(learned, of_decoder, two, {}), {"need cross-attention operators"}));
  EXPECT_TRUE(says(refusal_of(learned, of_encoder, two, two), {"need weights of a memory"}));
  EXPECT_TRUE(
      says(refusal_of(learned, of_decoder, two, {operator_of()}), {"1 cross-attention operators for 2 layers"}));
  EXPECT_TRUE(says(refusal_of(learned, of_decoder, two, {operator_of(3, 5), operator_of(1, 15)}),
                   {"cross-attention operators differ in their sizes"}));
  const auto refusal_of_both = [&](const attention& cross) {
    return refusal_of(learned, of_decoder, two, {cross, cross});
  };
  EXPECT_TRUE(says(refusal_of_both(operator_of(3, 6)), {"18 columns of queries, the attention 15"}));
  EXPECT_TRUE(says(refusal_of_both(operator_of(3, 5, 2)), {"6 columns of values, the attention 12"}));
  EXPECT_TRUE(says(refusal_of_both(attention({.head_dim = D, .value_dim = H * M, .heads = H, .key_heads = 1})),
                   {"5 columns of keys, the attention 15"}));
  EXPECT_EQ(refusal_of_both(operator_of(1, 15, 12)), "") << "heads of its own are fine";
}

TEST(TransformerWeights, OptionsThatDoNotFit) {
  const weights_type w = weights_of(everything());
  for (const double epsilon : {0.0, -1e-5, std::numeric_limits<double>::quiet_NaN()}) {
    if (__FINITE_MATH_ONLY__ && std::isnan(epsilon)) continue;
    EXPECT_TRUE(
        says(refusal_of({.positions = position_encoding::learned, .norm_epsilon = epsilon}, w), {"norm_epsilon"}));
  }
  EXPECT_TRUE(says(refusal_of({}, w), {"positions are learned", "12 rows"}));
  transformer_sizes n = everything();
  n.positions = 0;
  EXPECT_TRUE(says(refusal_of(learned, weights_of(n)), {"positions are learned", "0 rows"}));
  EXPECT_TRUE(says(refusal_of({.positions = position_encoding::sinusoid_concatenated}, weights_of(n)),
                   {"inputs of 7 columns do not fit layers of width 7: positions are concatenated"}));
  n.symbols = 0;
  EXPECT_TRUE(says(refusal_of({.input_width = 5}, weights_of(n)), {"inputs of 5 columns", "width 7"}));
  EXPECT_TRUE(says(refusal_of({.input_width = -1}, weights_of(n)), {"inputs of -1 columns"}));
  EXPECT_TRUE(
      says(refusal_of({.positions = position_encoding::sinusoid_concatenated, .input_width = -1}, weights_of(n)),
           {"inputs of -1 columns"}));
}

// ---- calls ----------------------------------------------------------------------------------------------------------

testing::AssertionResult same_state(const model_type::state_type& a, const model_type::state_type& b) {
  if (a.tokens() != b.tokens()) return testing::AssertionFailure() << a.tokens() << " and " << b.tokens() << " tokens";
  const auto same = [](const auto& x, const auto& y) -> testing::AssertionResult {
    for (std::size_t l = 0; l < x.size(); ++l) {
      if (x[l].tokens() != y[l].tokens()) return testing::AssertionFailure() << "tokens of layer " << l;
      for (Index h = 0; h < x[l].heads(); ++h) {
        if (const auto r = support::same_bits(x[l].kv(h), y[l].kv(h)); !r) return r;
      }
    }
    return testing::AssertionSuccess();
  };
  if (const auto r = same(a.layers(), b.layers()); !r) return r;
  return same(a.memories(), b.memories());
}

/// A model that has seen 3 tokens, and calls that it must refuse.
class Calls : public testing::TestWithParam<bool> {
 protected:
  using ws_type = model_type::workspace_type;
  const model_type model = GetParam() ? decoder() : encoder();
  ws_type ws = model.make_workspace(8);
  model_type::state_type s = seen(model, ws);
  const symbols x = {1, 2, 3, 4};
  const matrix vectors = support::normal_matrix<double>(4, F, 2);

  static model_type::state_type seen(const model_type& of, ws_type& scratch) {
    auto state = of.make_state();
    matrix out(3, of.outputs());
    if (!state.memories().empty()) {
      of.absorb_memory(state, support::normal_matrix<double>(2, memory_width, 3), scratch);
    }
    of.forward_causal(state, symbols{0, 1, 2}, out, scratch);
    return state;
  }

  /// The call's sentence has all `parts`; neither `state` nor an output of (rows, cols) was written.
  void expect_refused(const std::function<void(model_type::state_type&, model_type::output)>& call,
                      const std::vector<std::string>& parts, model_type::state_type& state, Index rows = 4,
                      Index cols = 9) {
    support::framed<double> out(rows, cols);
    const auto before = state;
    EXPECT_TRUE(says(support::refusal([&] { call(state, out.matrix()); }), parts));
    EXPECT_TRUE(out.untouched());
    EXPECT_TRUE(same_state(state, before));
  }

  /// The same of every bulk verb that there is, called with these arguments.
  template <class X>
  void expect_refused_by_all(const X& input, const std::vector<std::string>& parts, Index rows = 4, Index cols = 9,
                             Index keys = -1) {
    expect_refused([&](auto& state, auto out) { model.forward_causal(state, input, out, ws, keys); }, parts, s, rows,
                   cols);
    if (GetParam()) return;
    expect_refused([&](auto&, auto out) { model.forward(input, out, ws, keys); }, parts, s, rows, cols);
  }
};
INSTANTIATE_TEST_SUITE_P(all, Calls, testing::Bool(),
                         [](const auto& is_decoder) { return is_decoder.param ? "decoder" : "encoder"; });

TEST_P(Calls, OfRightArgumentsAreNotRefused) {
  support::framed<double> out(4, 9);
  model.forward_causal(s, x, out.matrix(), ws, 4);
  model.forward_causal(s, vectors, out.matrix(), ws, 0);
  EXPECT_TRUE(out.frame_intact());
}

TEST_P(Calls, Shapes) {
  for (const Index rows : {Index(0), Index(2), Index(3), Index(5)}) {
    expect_refused_by_all(x, {"out is (" + std::to_string(rows) + ", 9)", "4 tokens give (4, 9)", "(1, 9)"}, rows);
  }
  for (const Index cols : {8, 10}) {
    expect_refused_by_all(x, {"out is (4, " + std::to_string(cols) + ")", "(4, 9)"}, 4, cols);
  }
  expect_refused_by_all(symbols(), {"out is (1, 9)", "0 tokens"}, 1);
  for (const Index width : {F - 1, F + 1}) {
    expect_refused_by_all(support::normal_matrix<double>(4, width, 4),
                          {"x is (4, " + std::to_string(width) + ")", "7 columns"});
  }
}

TEST_P(Calls, SymbolsOutOfRange) {
  for (const Index bad :
       {Index(-1), vocabulary, std::numeric_limits<Index>::min(), std::numeric_limits<Index>::max()}) {
    for (const std::size_t at : {0u, 3u}) {
      symbols wrong = x;
      wrong[at] = bad;
      expect_refused_by_all(wrong, {"symbol " + std::to_string(bad) + " at " + std::to_string(at), "embedding has 11"});
    }
  }
}

TEST_P(Calls, KeysOutOfRange) {
  for (const Index keys : {Index(-2), Index(5), std::numeric_limits<Index>::max()}) {
    expect_refused_by_all(x, {std::to_string(keys) + " keys", "4 tokens"}, 4, 9, keys);
  }
}

TEST_P(Calls, PositionsBeyondTheLearned) {
  const symbols ten(10, 1), thirteen(13, 1);  // after 3 tokens of 12
  expect_refused([&](auto& state, auto out) { model.forward_causal(state, ten, out, ws); },
                 {"tokens up to number 13", "positions are learned for 12"}, s, 10);
  if (GetParam()) return;
  auto long_ws = model.make_workspace(13);
  expect_refused([&](auto&, auto out) { model.forward(thirteen, out, long_ws); },
                 {"13", "positions are learned for 12"}, s, 13);
}

TEST_P(Calls, WorkspacesOfOtherModels) {
  transformer_sizes n = everything(GetParam() ? memory_width : 0);
  const auto of = [&](const transformer_sizes& sizes, const attention& attn) {
    return GetParam() ? model_type(learned, weights_of(sizes), attn, attn)
                      : model_type(learned, weights_of(sizes), attn);
  };
  std::vector<model_type> others;
  n.width = F + 1;
  others.push_back(of(n, operator_of()));
  n = everything(GetParam() ? memory_width : 0);
  n.feed_forward = 16;
  others.push_back(of(n, operator_of()));
  n.feed_forward = 17;
  n.value_width = 1 * H;
  others.push_back(of(n, operator_of(H, D, 1)));
  others.push_back(GetParam() ? encoder() : decoder());
  for (const model_type& other : others) {
    auto wrong = other.make_workspace(8);
    const std::vector<std::string> sentence = {"the workspace has rows of", "this model's make_workspace()"};
    expect_refused([&](auto& state, auto out) { model.forward_causal(state, x, out, wrong); }, sentence, s);
    if (GetParam()) {
      expect_refused(
          [&](auto& state, auto) { model.absorb_memory(state, matrix(matrix::Ones(2, memory_width)), wrong); },
          sentence, s);
    } else {
      expect_refused([&](auto&, auto out) { model.forward(x, out, wrong); }, sentence, s);
    }
  }
  // The same widths, cut into other heads.
  n = everything(GetParam() ? memory_width : 0);
  const model_type other = of(n, operator_of(1, 15, 12));
  auto wrong = other.make_workspace(8);
  expect_refused([&](auto& state, auto out) { model.forward_causal(state, x, out, wrong); }, {"workspace"}, s);
}

TEST_P(Calls, WhatIsMovedFrom) {
  ws_type moved = ws;
  const ws_type to = std::move(moved);
  expect_refused([&](auto& state, auto out) { model.forward_causal(state, x, out, moved); },
                 {"forward_causal", "the workspace is moved from"}, s);
  auto old = s;
  const auto taken = std::move(old);
  EXPECT_EQ(taken.tokens(), 3);
  EXPECT_EQ(old.tokens(), 0);
  expect_refused([&](auto& state, auto out) { model.forward_causal(state, x, out, ws); }, {"0 layers"}, old);
}

TEST_P(Calls, StatesOfOtherModels) {
  const std::vector<std::string> sentence = {"transformer::forward_causal", "the state has", "make_state()"};
  const auto run = [&](auto& state, auto out) { model.forward_causal(state, x, out, ws); };
  model_type::state_type none;
  expect_refused(run, sentence, none);
  transformer_sizes n = everything();
  n.layers = 3;
  auto of_more_layers = encoder(n).make_state();
  expect_refused(run, sentence, of_more_layers);
  auto of_other_kind = (GetParam() ? encoder() : decoder()).make_state();
  expect_refused(run, sentence, of_other_kind);
  // The same numbers of layers and columns, cut into other heads: in the attention, or in the memory alone.
  const attention one_head = operator_of(1, 15, 12);
  const weights_type w = weights_of(everything(GetParam() ? memory_width : 0));
  auto of_other_heads =
      (GetParam() ? model_type(learned, w, one_head, one_head) : model_type(learned, w, one_head)).make_state();
  expect_refused(run, {"the state is"}, of_other_heads);
  if (!GetParam()) return;
  auto of_another_memory = model_type(learned, w, operator_of(), one_head).make_state();
  expect_refused(run, {"the state is"}, of_another_memory);
  expect_refused([&](auto& state, auto) { model.absorb_memory(state, matrix(matrix::Ones(2, memory_width)), ws); },
                 {"the state is"}, of_another_memory);
}

TEST_P(Calls, Memories) {
  if (GetParam()) {
    for (const Index width : {memory_width - 1, memory_width + 1}) {
      expect_refused([&](auto& state, auto) { model.absorb_memory(state, matrix(matrix::Ones(2, width)), ws); },
                     {"the memory is (2, " + std::to_string(width) + ")", "6 columns"}, s);
    }
    expect_refused([&](auto&, auto out) { model.forward(x, out, ws); }, {"a decoder's", "use forward_causal"}, s);
  } else {
    expect_refused([&](auto& state, auto) { model.absorb_memory(state, matrix(matrix::Ones(2, memory_width)), ws); },
                   {"the memory is (2, 6)"}, s);
  }
}

TEST_P(Calls, SequencesLongerThanTheWorkspace) {
  if (GetParam()) return;  // it has forward_causal alone, which takes any number of tokens
  expect_refused([&](auto&, auto out) { model.forward(symbols(9, 1), out, ws); },
                 {"9 tokens", "not 8", "make_workspace(9)"}, s, 9);
}

TEST_P(Calls, WorkspacesWithoutRows) {
  for (const Index rows : {0, -1}) {
    EXPECT_TRUE(says(support::refusal([&] { model.make_workspace(rows); }), {std::to_string(rows) + " rows"}));
  }
}

// ---- debug assertions -----------------------------------------------------------------------------------------------

class StepDeathTest : public testing::Test {
 protected:
  const model_type model = encoder();
  model_type::workspace_type ws = model.make_workspace(2);
  std::vector<model_type::state_type> states{2, model.make_state()};
  matrix out = matrix(3, 9);

  template <class F>
  void expect_assertion(const F& call, const std::string& sentence) {
    EXPECT_EXIT(call(), testing::ExitedWithCode(exit_code_of_assertions), sentence);
  }
};

TEST_F(StepDeathTest, Shapes) {
  model.step(std::span(states), symbols{1, 2}, out.topRows(2), ws);
  matrix narrow(2, 8);
  const std::string rows = "x and out need a row for each state";
  expect_assertion([&] { model.step(std::span(states), symbols{1}, out.topRows(2), ws); }, rows);
  expect_assertion([&] { model.step(std::span(states), symbols{1, 2}, out, ws); }, rows);
  expect_assertion([&] { model.step(std::span(states), symbols{1, 2}, narrow, ws); }, rows);
  expect_assertion([&] { model.step(std::span(states), matrix(matrix::Ones(2, F + 1)), out.topRows(2), ws); },
                   "x has another width");
  states.push_back(model.make_state());
  expect_assertion([&] { model.step(std::span(states), symbols{1, 2, 3}, out, ws); }, "rows for fewer sequences");
}

TEST_F(StepDeathTest, SymbolsAndPositions) {
  for (const Index bad : {Index(-1), vocabulary}) {
    expect_assertion([&] { model.step(states[0], bad, out.row(0), ws); }, "no symbol of the embedding");
    expect_assertion(
        [&] {
          model.step(std::span(states), symbols{1, bad}, out.topRows(2), ws);
        },
        "no symbol of the embedding");
  }
  for (Index t = 0; t < longest; ++t) model.step(states[1], 1, out.row(0), ws);
  expect_assertion([&] { model.step(std::span(states), symbols{1, 2}, out.topRows(2), ws); }, "no position is learned");
}

// A later token would be read where an output was written.
TEST_F(StepDeathTest, OutputsBesideTheirInputs) {
  transformer_sizes n = everything();
  n.outputs = F;
  const model_type of_width = encoder(n);
  const matrix all = support::normal_matrix<double>(5, F, 5);
  const matrix want = of_width.forward_causal(matrix(all.topRows(4)));
  auto scratch = of_width.make_workspace(2);
  auto s = of_width.make_state();
  matrix x = all;
  of_width.forward_causal(s, x.topRows(4), x.topRows(4), scratch);
  EXPECT_TRUE(support::same_bits(x.topRows(4), want)) << "in the place of their inputs";
  s.reset();
  x = all;
  of_width.forward_causal(s, x.topRows(4), x.row(1), scratch);
  EXPECT_TRUE(support::same_bits(x.row(1), want.row(3))) << "the last alone, anywhere";
  s.reset();
  expect_assertion([&] { of_width.forward_causal(s, x.topRows(4), x.bottomRows(4), scratch); }, "overlap");
}

TEST_F(StepDeathTest, StatesAndWorkspacesOfOtherModels) {
  const model_type other = decoder();
  auto other_ws = other.make_workspace(2);
  expect_assertion(
      [&] {
        model.step(std::span(states), symbols{1, 2}, out.topRows(2), other_ws);
      },
      "the workspace is of another model");
  states[1] = other.make_state();
  expect_assertion(
      [&] {
        model.step(std::span(states), symbols{1, 2}, out.topRows(2), ws);
      },
      "the state is of another model");
  states[1] = {};
  expect_assertion(
      [&] {
        model.step(std::span(states), symbols{1, 2}, out.topRows(2), ws);
      },
      "the state is of another model");
}

// ---- what the types promise -----------------------------------------------------------------------------------------

using state = model_type::state_type;
using workspace = model_type::workspace_type;
static_assert(noexcept(std::declval<const model_type&>().step(std::declval<std::span<state>>(), model_type::symbols(),
                                                              model_type::output(), std::declval<workspace&>())));
static_assert(std::is_default_constructible_v<state> && std::is_copy_constructible_v<state> &&
              std::is_copy_assignable_v<state> && std::is_nothrow_move_constructible_v<state>);
static_assert(std::is_copy_constructible_v<model_type> && std::is_nothrow_move_constructible_v<workspace>);
static_assert(noexcept(std::declval<state&>().reset()));

}  // namespace
