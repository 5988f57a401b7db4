// The paper's baselines: a transformer with softmax attention and a key/value cache, and any model without a cache.
#include <gtest/gtest.h>

#include <linattn/linattn.hpp>
#include <linattn/softmax_cache.hpp>
#include <linattn/transformer.hpp>
#include <linattn/transformer_uncached.hpp>

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/refusal.hpp"
#include "support/transformer_oracle.hpp"

namespace {

using Eigen::Index;
using linattn::row_matrix;
using support::refusal;
using softmax = linattn::cached_softmax<double>;

constexpr Index heads = 2, head_dim = 5, outputs = 4, capacity = 30;
/// A stack of two layers rounds some thousand times an output; the oracle's attention is in double, too.
constexpr double in_double = 1e-12;

linattn::transformer_weights<double> some_weights(Index memory_width = 0) {
  auto w = linattn::make_transformer_weights<double>({.layers = 2,
                                                      .width = 10,
                                                      .query_width = heads * head_dim,
                                                      .value_width = heads * head_dim,
                                                      .feed_forward = 17,
                                                      .symbols = 7,
                                                      .outputs = outputs,
                                                      .memory_width = memory_width,
                                                      .final_norm = true});
  std::uint64_t seed = 0;
  linattn::for_each_tensor(w, [&](const std::string&, auto& tensor) {
    tensor = support::normal_matrix<double>(tensor.rows(), tensor.cols(), ++seed);
  });
  return w;
}

const linattn::transformer_options wired{.wiring = linattn::wiring::pre_norm,
                                         .activation = linattn::activation::gelu,
                                         .positions = linattn::position_encoding::sinusoid_added};

linattn::transformer<softmax> some_model() {
  return {wired, some_weights(), softmax({.head_dim = head_dim, .heads = heads}, capacity)};
}

std::vector<Index> symbols(Index n) {
  std::vector<Index> x;
  for (Index i = 0; i < n; ++i) x.push_back((3 * i + i / 4) % 7);
  return x;
}

support::attention_oracle softmax_oracle(bool causal) {
  const auto similarity = [](std::size_t) {
    return [](const auto& q, const auto& k) { return std::exp(q.dot(k) / std::sqrt(double(head_dim))); };
  };
  return support::kernel_oracle(similarity, {.queries = heads}, causal);
}

TEST(TransformerSoftmax, IsTheCompositionOfItsEquations) {
  const auto w = some_weights();
  const auto x = symbols(13);
  for (const bool causal : {false, true}) {
    const auto want = support::transformer_oracle(wired, w, support::rows_of(w, x), softmax_oracle(causal));
    const auto got = causal ? some_model().forward_causal(x) : some_model().forward(x);
    EXPECT_TRUE(support::close(got, want, in_double)) << (causal ? "causal" : "bidirectional");
  }
}

TEST(TransformerSoftmax, StepsOfABatchAreTheBitsOfForwardCausal) {
  const auto model = some_model();
  const auto x = symbols(21);
  const row_matrix<double> want = model.forward_causal(x);
  auto ws = model.make_workspace(2);
  std::vector states(2, model.make_state());
  row_matrix<double> prompt(4, outputs), out(2, outputs);
  model.forward_causal(states[1], std::span(x).first(4), prompt, ws);  // the second is four tokens older
  for (std::size_t t = 0; t + 4 < x.size(); ++t) {
    const Index next[] = {x[t], x[t + 4]};
    model.step(std::span(states), next, out, ws);
    EXPECT_EQ(out.row(0), want.row(Index(t)));
    EXPECT_EQ(out.row(1), want.row(Index(t) + 4));
  }
}

template <class Model>
void expect_same_without_cache(const Model& model) {
  const auto x = symbols(11);
  const row_matrix<double> want = model.forward_causal(x);
  const linattn::uncached_transformer uncached(model, capacity);
  std::vector states(2, uncached.make_state());
  auto ws = uncached.make_workspace(3);
  row_matrix<double> out(2, outputs), last(1, outputs);
  uncached.forward_causal(states[0], std::span(x).first(3), last, ws);
  EXPECT_EQ(last.row(0), want.row(2));
  for (std::size_t t = 0; t + 3 < x.size(); ++t) {
    const Index next[] = {x[t + 3], x[t]};
    uncached.step(std::span(states), next, out, ws);
    EXPECT_EQ(out.row(0), want.row(Index(t) + 3));
    EXPECT_EQ(out.row(1), want.row(Index(t)));
  }
  EXPECT_EQ(states[0].tokens(), Index(x.size()));
  states[0].reset();
  uncached.step(states[0], x[0], out.row(0), ws);
  EXPECT_EQ(out.row(0), want.row(0));
}

TEST(TransformerUncached, GivesTheBitsOfTheCache) { expect_same_without_cache(some_model()); }

TEST(TransformerUncached, GivesTheBitsOfTheRecurrence) {
  using attention = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, double>;
  expect_same_without_cache(
      linattn::transformer<attention>(wired, some_weights(), attention({.head_dim = head_dim, .heads = heads})));
}

TEST(TransformerUncached, RefusesWhatHasNoRoom) {
  const auto model = some_model();
  EXPECT_EQ(refusal([&] { linattn::uncached_transformer(model, 0); }),
            "linattn::uncached_transformer: 0 tokens at most, at least 1 is needed");
  const linattn::uncached_transformer uncached(model, 5);
  auto s = uncached.make_state();
  auto ws = uncached.make_workspace(3);
  row_matrix<double> out(1, outputs), two(2, outputs);
  const auto x = symbols(6);
  EXPECT_EQ(refusal([&] { uncached.forward_causal(s, x, out, ws); }),
            "linattn::uncached_transformer::forward_causal: there is no room for 6 tokens behind 0, of 5");
  EXPECT_EQ(refusal([&] { uncached.forward_causal(s, std::span(x).first(2), two, ws); }),
            "linattn::uncached_transformer::forward_causal: out has 2 rows, but the last token gives 1");
  EXPECT_EQ(s.tokens(), 0);
  const softmax attn({.head_dim = head_dim, .heads = heads}, capacity);
  const linattn::transformer<softmax> decoder(wired, some_weights(6), attn, attn);
  EXPECT_EQ(refusal([&] { linattn::uncached_transformer(decoder, 5); }),
            "linattn::uncached_transformer: the model is a decoder with a memory");
  static_assert(!std::is_constructible_v<linattn::uncached_transformer<linattn::transformer<softmax>>,
                                         linattn::transformer<softmax>, Index>,
                "it would hold a temporary");
}

TEST(TransformerUncached, StatesOfARefusedStepStayWhatTheyWere) {
  const auto model = some_model();
  const linattn::uncached_transformer uncached(model, 5);
  std::vector states(2, uncached.make_state());
  auto ws = uncached.make_workspace(3);
  row_matrix<double> out(2, outputs);
  EXPECT_NE(refusal([&] { uncached.step(states, symbols(2), out.leftCols(3), ws); }), "");
  const std::vector<Index> bad{1, 7};
  EXPECT_NE(refusal([&] { uncached.step(states, bad, out, ws); }).find("symbol 7"), std::string::npos);
  EXPECT_EQ(states[0].tokens(), 0);
  uncached.forward_causal(states[1], symbols(5), out.row(1), ws);
  EXPECT_NE(refusal([&] { uncached.step(states, symbols(2), out, ws); }).find("no room"), std::string::npos);
  EXPECT_EQ(states[0].tokens(), 0);
  EXPECT_EQ(states[1].tokens(), 5);
}

TEST(TransformerSoftmax, TokensWithoutRoomInTheCacheAreRefusedBeforeAnythingIsWritten) {
  const auto model = some_model();
  auto s = model.make_state();
  auto ws = model.make_workspace(4);
  const auto x = symbols(capacity);
  row_matrix<double> out(20, outputs);
  model.forward_causal(s, std::span(x).first(20), out, ws);
  const row_matrix<double> before = out;
  EXPECT_EQ(refusal([&] { model.forward_causal(s, std::span(x).first(20), out, ws); }),
            "linattn::transformer::forward_causal: 20 tokens behind 20 in a state with room for 30");
  EXPECT_EQ(out, before);
  EXPECT_EQ(s.tokens(), 20);
  for (const auto& layer : s.layers()) EXPECT_EQ(layer.tokens(), 20);
  EXPECT_NE(refusal([&] { model.forward(symbols(capacity + 1)); }).find("room for 30"), std::string::npos);
}

TEST(TransformerSoftmax, ALayerWithLessRoomThanTheFirstIsRefusedBeforeAnythingIsWritten) {
  const auto model = some_model();
  auto s = model.make_state();
  auto ws = model.make_workspace(4);
  const row_matrix<double> keys = support::normal_matrix<double>(capacity, heads * head_dim, 97);
  model.attention(1).absorb(s.layers()[1], keys, keys);
  row_matrix<double> out(1, outputs);
  EXPECT_EQ(refusal([&] { model.forward_causal(s, symbols(1), out, ws); }),
            "linattn::transformer::forward_causal: 1 tokens behind 30 in a state with room for 30");
  EXPECT_EQ(s.layers()[0].tokens(), 0);
}

TEST(TransformerSoftmax, ADecoderReadsItsMemory) {
  const Index memory_width = 6;
  const auto w = some_weights(memory_width);
  const softmax attn({.head_dim = head_dim, .heads = heads}, capacity);
  const linattn::transformer<softmax> model(wired, w, attn, attn);
  const row_matrix<double> memory = support::normal_matrix<double>(9, memory_width, 99);
  const auto x = symbols(8);
  const auto want = support::transformer_oracle(wired, w, support::rows_of(w, x), softmax_oracle(true),
                                                softmax_oracle(false), support::wide(memory));
  auto s = model.make_state();
  auto ws = model.make_workspace(4);
  model.absorb_memory(s, memory, ws);
  row_matrix<double> out(Index(x.size()), outputs);
  for (std::size_t t = 0; t < x.size(); ++t) model.step(s, x[t], out.row(Index(t)), ws);
  EXPECT_TRUE(support::close(out, want, in_double));
  EXPECT_NE(refusal([&] {
              model.absorb_memory(s, support::normal_matrix<double>(22, memory_width, 98), ws);
            }).find("room for 30"),
            std::string::npos);
}

}  // namespace
