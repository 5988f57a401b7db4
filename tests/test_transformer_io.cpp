// Weights of a transformer from files: round trips, other names, and files that do not fit, each fault of which is
// told.
#include <gtest/gtest.h>

#include <linattn/linattn.hpp>
#include <linattn/transformer_io.hpp>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "support/inputs.hpp"
#include "support/refusal.hpp"

namespace {

using Eigen::Index;
using linattn::loaded_transformer;
using linattn::row_matrix;
using linattn::safetensors_entry;
using linattn::safetensors_file;
using linattn::safetensors_metadata;
using support::refusal;

const safetensors_metadata words{{"wiring", "pre_norm"}, {"activation", "gelu"}, {"positions", "learned"},
                                 {"heads", "2"},         {"head_dim", "3"},      {"attention", "elu_plus_one"},
                                 {"note", "kept"}};

linattn::transformer_weights<float> some_weights(Index memory_width = 0) {
  auto w = linattn::make_transformer_weights<float>({.layers = 2,
                                                     .width = 5,
                                                     .query_width = 6,
                                                     .value_width = 4,
                                                     .feed_forward = 7,
                                                     .symbols = 9,
                                                     .positions = 11,
                                                     .outputs = 8,
                                                     .memory_width = memory_width,
                                                     .final_norm = true});
  std::uint64_t seed = 0;
  linattn::for_each_tensor(w, [&](const std::string&, auto& tensor) {
    tensor = support::normal_matrix<float>(tensor.rows(), tensor.cols(), ++seed);
  });
  return w;
}

struct tensor_list {
  std::vector<std::string> names;
  std::vector<row_matrix<float>> values;
  std::vector<std::vector<Index>> shapes;

  explicit tensor_list(const linattn::transformer_weights<float>& w) {
    linattn::for_each_tensor(w, [&](const std::string& name, const auto& tensor) {
      const bool is_vector = tensor.IsVectorAtCompileTime;
      add(name, tensor, is_vector ? std::vector{tensor.size()} : std::vector{tensor.rows(), tensor.cols()});
    });
  }
  void add(const std::string& name, const row_matrix<float>& value, std::vector<Index> shape) {
    names.push_back(name);
    values.push_back(value);
    shapes.push_back(std::move(shape));
  }
  std::size_t find(const std::string& name) const {
    return static_cast<std::size_t>(std::find(names.begin(), names.end(), name) - names.begin());
  }
  void erase(const std::string& name) {
    const auto at = static_cast<std::ptrdiff_t>(find(name));
    names.erase(names.begin() + at);
    values.erase(values.begin() + at);
    shapes.erase(shapes.begin() + at);
  }
  safetensors_file file(const safetensors_metadata& metadata = words) const {
    std::vector<safetensors_entry<float>> entries;
    for (std::size_t i = 0; i < names.size(); ++i) entries.emplace_back(names[i], values[i], shapes[i]);
    std::ostringstream to;
    linattn::save_safetensors(to, entries, metadata);
    const std::string text = to.str();
    const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
    return safetensors_file::parse(std::vector<std::byte>(bytes, bytes + text.size()));
  }
};

void expect_same(const linattn::transformer_weights<float>& a, const linattn::transformer_weights<float>& b) {
  const tensor_list of_a(a), of_b(b);
  ASSERT_EQ(of_a.names, of_b.names);
  for (std::size_t i = 0; i < of_a.names.size(); ++i) EXPECT_EQ(of_a.values[i], of_b.values[i]) << of_a.names[i];
}

TEST(TransformerIo, WhatIsSavedIsLoaded) {
  const std::string path = testing::TempDir() + "transformer_io.safetensors";
  loaded_transformer<float> saved;
  saved.options = {.wiring = linattn::wiring::pre_norm,
                   .activation = linattn::activation::gelu,
                   .positions = linattn::position_encoding::learned};
  saved.weights = some_weights();
  saved.attention = {.head_dim = 3, .heads = 2};
  saved.attention_name = "elu_plus_one";
  saved.metadata = {{"note", "kept"}};
  linattn::save_transformer(path, saved);
  const auto loaded = linattn::load_transformer<float>(safetensors_file::open(path));
  expect_same(loaded.weights, saved.weights);
  EXPECT_EQ(loaded.options.wiring, saved.options.wiring);
  EXPECT_EQ(loaded.options.activation, saved.options.activation);
  EXPECT_EQ(loaded.options.positions, saved.options.positions);
  EXPECT_EQ(loaded.attention.heads, 2);
  EXPECT_EQ(loaded.attention.head_dim, 3);
  EXPECT_EQ(loaded.attention.value_dim, 2);
  EXPECT_EQ(loaded.attention_name, "elu_plus_one");
  EXPECT_EQ(loaded.metadata, words);

  const linattn::transformer model(loaded.options, loaded.weights,
                                   linattn::linear_attention<linattn::elu_plus_one>(loaded.attention));
  const std::vector<Index> x{1, 8, 0, 3};
  EXPECT_EQ(model.forward_causal(x).cols(), 8);
}

/// Everything a file can say that is not what it says by default.
TEST(TransformerIo, AModelThatIsLoadedComputesWhatTheSavedOneDid) {
  using attention = linattn::linear_attention<linattn::elu_plus_one, linattn::decay>;
  const std::string path = testing::TempDir() + "transformer_io_shared.safetensors";
  loaded_transformer<float> saved;
  saved.options = {.wiring = linattn::wiring::post_norm,
                   .positions = linattn::position_encoding::sinusoid_concatenated,
                   .norm_epsilon = 0.1,
                   .input_width = 3};
  saved.weights = linattn::make_transformer_weights<float>({.layers = 1,
                                                            .width = 5,
                                                            .query_width = 12,
                                                            .key_width = 3,
                                                            .value_width = 4,
                                                            .output_width = 8,
                                                            .feed_forward = 7});
  std::uint64_t seed = 0;
  linattn::for_each_tensor(saved.weights, [&](const std::string&, auto& tensor) {
    tensor = support::normal_matrix<float>(tensor.rows(), tensor.cols(), ++seed);
  });
  saved.attention = {.head_dim = 3, .value_dim = 2, .heads = 4, .key_heads = 1, .value_heads = 2};
  saved.log_decay = {-0.5, 0};
  saved.metadata = {{"key_heads", "7"}};  // of another model, and overwritten
  linattn::save_transformer(path, saved);
  const auto loaded = linattn::load_transformer<float>(safetensors_file::open(path));
  EXPECT_EQ(loaded.options.norm_epsilon, 0.1);
  EXPECT_EQ(loaded.options.input_width, 3);
  EXPECT_EQ(loaded.attention.key_heads, 1);
  EXPECT_EQ(loaded.attention.value_heads, 2);
  EXPECT_EQ(loaded.attention.value_dim, 2);
  EXPECT_EQ(loaded.log_decay, saved.log_decay);
  const row_matrix<float> x = support::normal_matrix<float>(6, 3, 99);
  const auto run = [&](const auto& m) {
    return linattn::transformer(m.options, m.weights, attention(m.attention, {}, linattn::decay(m.log_decay)))
        .forward_causal(x);
  };
  EXPECT_EQ(run(loaded), run(saved));
}

TEST(TransformerIo, DecaysThatNoFileHoldsAreNotSaved) {
  loaded_transformer<float> saved;
  saved.weights = some_weights();
  saved.attention = {.head_dim = 3, .heads = 2};
  const std::string path = testing::TempDir() + "transformer_io_refused.safetensors";
  const auto with = [&](const std::vector<double>& decays) {
    saved.log_decay = decays;
    return refusal([&] { linattn::save_transformer(path, saved); });
  };
  const std::string prefix = "linattn::save_transformer: log_decay has ";
  EXPECT_EQ(with({-1}), prefix + "1 numbers, expected one for each of 2 value heads, or none");
  const std::string end = ", expected finite numbers <= 0, which JSON can hold";
  EXPECT_EQ(with({-1, 0.5}), prefix + "0.5" + end);
  EXPECT_EQ(with({-1, -std::numeric_limits<double>::infinity()}), prefix + "-inf" + end);
  EXPECT_NE(with({std::nan(""), 0}).find("nan" + end), std::string::npos);
}

TEST(TransformerIo, DecodersHaveTheNamesOfTheirOwn) {
  const auto w = some_weights(10);
  const tensor_list tensors(w);
  for (const char* const name : {"layers.1.self_attention.key_projection.weight",
                                 "layers.1.cross_attention.value_projection.bias", "layers.0.norm3.weight"}) {
    EXPECT_LT(tensors.find(name), tensors.names.size()) << name;
  }
  expect_same(linattn::load_transformer_weights<float>(tensors.file()), w);
}

TEST(TransformerIo, WithoutBiasesNormsEmbeddingOrHead) {
  const auto w = linattn::make_transformer_weights<float>({.layers = 1,
                                                           .width = 5,
                                                           .query_width = 6,
                                                           .value_width = 4,
                                                           .feed_forward = 7,
                                                           .norms = false,
                                                           .biases = false});
  expect_same(linattn::load_transformer_weights<float>(tensor_list(w).file()), w);
}

TEST(TransformerIo, NamesAreTheCallersToChange) {
  const auto w = some_weights();
  tensor_list tensors(w);
  for (std::string& name : tensors.names) name = "model." + name;
  const auto names = [](const std::string& ours) { return "model." + ours; };
  expect_same(linattn::load_transformer_weights<float>(tensors.file(), names), w);
  EXPECT_NE(refusal([&] {
              linattn::load_transformer_weights<float>(tensors.file());
            }).find("there is no layer: no tensor 'layers.0.attention.query_projection.weight'"),
            std::string::npos);
}

TEST(TransformerIo, EveryFaultIsInOneMessage) {
  tensor_list tensors(some_weights());
  tensors.erase("layers.1.linear2.weight");
  tensors.erase("layers.0.attention.key_projection.bias");
  const std::size_t misshapen = tensors.find("layers.1.norm2.bias");
  tensors.values[misshapen] = row_matrix<float>::Zero(1, 4);
  tensors.shapes[misshapen] = {4};
  const std::size_t transposed = tensors.find("layers.0.linear1.weight");
  tensors.shapes[transposed] = {5, 7};
  tensors.add("optimizer.step", row_matrix<float>::Zero(1, 1), {});
  EXPECT_EQ(refusal([&] { linattn::load_transformer_weights<float>(tensors.file()); }),
            "linattn::load_transformer_weights: the tensors are not those of a transformer:"
            "\n  missing: layers.0.attention.key_projection.bias"
            "\n  misshapen: layers.0.linear1.weight is (5, 7), but should be (5, 5)"
            "\n  misshapen: layers.0.linear1.bias is (7), but should be (5)"
            "\n  misshapen: layers.0.linear2.weight is (5, 7), but should be (5, 5)"
            "\n  misshapen: layers.1.linear1.weight is (7, 5), but should be (5, 5)"
            "\n  misshapen: layers.1.linear1.bias is (7), but should be (5)"
            "\n  missing: layers.1.linear2.weight"
            "\n  misshapen: layers.1.norm2.bias is (4), but should be (5)"
            "\n  superfluous: optimizer.step");
}

TEST(TransformerIo, WhatIsNoFloatingPointNumberIsNamed) {
  const std::string header =
      R"({"layers.0.attention.query_projection.weight":{"dtype":"I8","shape":[1,1],"data_offsets":[0,1]}})";
  std::vector<std::byte> bytes(8 + header.size() + 1);
  bytes[0] = std::byte(header.size());
  std::copy_n(reinterpret_cast<const std::byte*>(header.data()), header.size(), bytes.begin() + 8);
  const std::string text = refusal([&] { linattn::load_transformer_weights<float>(safetensors_file::parse(bytes)); });
  EXPECT_NE(text.find("no floating-point numbers: layers.0.attention.query_projection.weight"), std::string::npos);
}

/// Sizes that only together ask for more memory than there is: refused before it is asked for.
TEST(TransformerIo, SizesOfAFileAskForNoMemory) {
  constexpr Index much = 200000;  // squared, 160 GB
  tensor_list tensors(linattn::make_transformer_weights<float>({.layers = 1}));
  tensors.add("layers.0.attention.query_projection.weight", row_matrix<float>::Zero(1, much), {1, much});
  tensors.add("layers.0.linear1.weight", row_matrix<float>::Zero(much, 1), {much, 1});
  EXPECT_NE(refusal([&] {
              linattn::load_transformer_weights<float>(tensors.file());
            }).find("missing: layers.0.linear2.weight"),
            std::string::npos);
}

TEST(TransformerIo, MetadataThatDoNotSayWhatTheyMustAreRefused) {
  const tensor_list tensors(some_weights());
  const auto with = [&](const std::string& key, const std::string& value) {
    safetensors_metadata m = words;
    m[key] = value;
    return refusal([&] { linattn::load_transformer<float>(tensors.file(m)); });
  };
  const auto without = [&](const std::string& key) {
    safetensors_metadata m = words;
    m.erase(key);
    return refusal([&] { linattn::load_transformer<float>(tensors.file(m)); });
  };
  const std::string prefix = "linattn::load_transformer: the metadata ";
  for (const char* const key : {"wiring", "activation", "heads", "head_dim"}) {
    EXPECT_EQ(without(key), prefix + "have no '" + key + "'");
  }
  EXPECT_EQ(with("wiring", "Pre"), prefix + "say wiring = 'Pre', which is none of paper post_norm pre_norm");
  EXPECT_EQ(with("positions", ""),
            prefix + "say positions = '', which is none of none sinusoid_added sinusoid_concatenated learned");
  for (const char* const number : {"", "0", "-2", "2x", " 2", "99999999999999999999", "2.0"}) {
    EXPECT_EQ(with("heads", number), prefix + "say heads = '" + number + "', which is no number from 1 on");
  }
  for (const char* const number : {"", "0", "-1e-5", "1e-5x", "\"1\"", "nan"}) {
    EXPECT_EQ(with("norm_epsilon", number), prefix + "say norm_epsilon = '" + number + "', which is no number above 0");
  }
  for (const char* const list :
       {"", "-1", "[]", "[-1]", "[-1, 0.5]", "[-1, \"0\"]", "[-1, 0, 0]", "[-1, -1e999]", "[-1, 0"}) {
    EXPECT_EQ(with("log_decay", list),
              prefix + "say log_decay = '" + list + "', which is no array of 2 numbers <= 0, one for each value head");
  }
  EXPECT_EQ(with("log_decay", std::string(1000, '[')),
            prefix + "say log_decay = '" + std::string(100, '[') +
                "...', which is no array of 2 numbers <= 0, one for each value head");
  // Heads whose product is that of the weights, 6, only modulo 2^64, among others.
  for (const char* const number : {"1", "3", "4", "9223372036854775807"}) {
    EXPECT_EQ(with("heads", number),
              prefix + "say heads = " + number + " and head_dim = 3, but the first query projection has 6 rows");
  }
}

}  // namespace
