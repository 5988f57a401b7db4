// The transformer whose layers have feature maps of their own: trained ones, or random ones with a seed each; and a
// decoder whose cross-attention is another operator than its attention.
#include <linattn/feature_maps/hedgehog.hpp>
#include <linattn/feature_maps/positive_random.hpp>
#include <linattn/linattn.hpp>
#include <linattn/transformer.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/transformer_inputs.hpp"
#include "support/transformer_oracle.hpp"

#include <gtest/gtest.h>

#include <span>
#include <vector>

namespace {

using Eigen::Index;
using linattn::hedgehog;
using linattn::positive_random;
using matrix = linattn::row_matrix<double>;

constexpr Index D = 5, M = 4, H = 3, N = 20;
constexpr linattn::transformer_sizes sizes = {.layers = 3,
                                              .width = 17,
                                              .query_width = H * D,
                                              .value_width = H * M,
                                              .feed_forward = 33,
                                              .symbols = 11,
                                              .outputs = 9};
const linattn::transformer_options options = {.wiring = linattn::wiring::pre_norm};
const linattn::options three_heads = {.head_dim = D, .value_dim = M, .heads = H};

/// Layers pass on the roundings of what they are given, and those of exponentials of them.
constexpr double composition = 10 * support::tolerance<double>::relative_rms;

template <class Attention, class MapOf>
std::vector<Attention> one_a_layer(const MapOf& map) {
  std::vector<Attention> all;
  for (std::size_t l = 0; l < std::size_t(sizes.layers); ++l) all.emplace_back(three_heads, map(l));
  return all;
}

hedgehog<double> trained_map(std::size_t layer) {
  return {support::normal_matrix<double>(H * D, D, 100 + layer), Eigen::VectorXd::Constant(H * D, 0.1 * double(layer)),
          H};
}
positive_random<double> random_map(std::size_t layer) { return {D, 16, 200 + layer}; }

TEST(TransformerMaps, EachLayerHasItsOwn) {
  using attention = linattn::linear_attention<hedgehog<double>, linattn::additive, double>;
  const auto weights = support::random_transformer<double>(sizes, 1);
  const linattn::transformer<attention> model(options, weights, one_a_layer<attention>(trained_map));
  const std::vector<Index> x = support::random_symbols(N, sizes.symbols, 2);
  const auto expected = [&](bool causal) {
    return support::transformer_oracle(options, weights, support::rows_of(weights, std::span<const Index>(x)),
                                       support::kernel_oracle(trained_map, {H, H, H}, causal));
  };
  EXPECT_TRUE(support::close(model.forward_causal(x), expected(true), composition));
  EXPECT_TRUE(support::close(model.forward(x), expected(false), composition));
  auto s = model.make_state();
  auto ws = model.make_workspace();
  matrix y(N, model.outputs());
  for (Index t = 0; t < N; ++t) model.step(s, x[std::size_t(t)], y.row(t), ws);
  EXPECT_TRUE(support::close(y, expected(true), composition));
}

TEST(TransformerMaps, ADecoderHasTwoOperators) {
  using attention = linattn::linear_attention<hedgehog<double>, linattn::additive, double>;
  using cross_attention = linattn::linear_attention<positive_random<double>, linattn::additive, double>;
  linattn::transformer_sizes with_memory = sizes;
  with_memory.memory_width = 6;
  const auto weights = support::random_transformer<double>(with_memory, 3);
  const linattn::transformer<attention, cross_attention> model(options, weights, one_a_layer<attention>(trained_map),
                                                               one_a_layer<cross_attention>(random_map));
  const std::vector<Index> x = support::random_symbols(N, sizes.symbols, 4);
  const matrix memory = support::normal_matrix<double>(10, 6, 5);
  const support::wide_matrix expected =
      support::transformer_oracle(options, weights, support::rows_of(weights, std::span<const Index>(x)),
                                  support::kernel_oracle(trained_map, {H, H, H}, true),
                                  support::kernel_oracle(random_map, {H, H, H}, false), support::wide(memory));

  auto s = model.make_state();
  auto ws = model.make_workspace(7);
  model.absorb_memory(s, memory, ws);
  auto stepping = s;
  matrix y(N, model.outputs());
  model.forward_causal(s, x, y, ws);
  EXPECT_TRUE(support::close(y, expected, composition));
  for (Index t = 0; t < N; ++t) model.step(stepping, x[std::size_t(t)], y.row(t), ws);
  EXPECT_TRUE(support::close(y, expected, composition));
}

}  // namespace
