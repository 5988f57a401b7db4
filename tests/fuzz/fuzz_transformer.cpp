// Whatever tensors and metadata a safetensors file brings, `load_transformer` and the transformer made of it refuse
// them with a sentence, or take a model that has every tensor of the file and runs.
//
// An input is a list of edits of a whole model: tensors lost, renamed and resized, alone or with all of their kind, and
// metadata set. Random bytes that are no file at all are fuzz_safetensors' business.
#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/linear_attention.hpp>
#include <linattn/softmax_cache.hpp>
#include <linattn/transformer_io.hpp>

#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

using namespace linattn;
using Eigen::Index;

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

struct model_file {
  std::map<std::string, std::vector<Index>> shapes;
  std::map<std::string, std::string> metadata;
};

/// F = 8, two heads of 4, feed-forward 5, six symbols, four outputs; the decoder's memory has width 7.
model_file whole_model(bool is_decoder, bool learns_positions) {
  constexpr Index width = 8, memory_width = 7, feed_forward = 5, symbols = 6, outputs = 4, positions = 5;
  model_file file;
  const auto dense = [&](const std::string& name, Index rows, Index cols) {
    file.shapes[name + ".weight"] = {rows, cols};
    file.shapes[name + ".bias"] = {rows};
  };
  const auto norm = [&](const std::string& name) {
    file.shapes[name + ".weight"] = file.shapes[name + ".bias"] = {width};
  };
  file.shapes["embedding.weight"] = {symbols, width};
  if (learns_positions) file.shapes["positions.weight"] = {positions, width};
  for (const std::string layer : {"layers.0.", "layers.1."}) {
    const auto attention = [&](const std::string& name, Index from) {
      dense(layer + name + ".query_projection", width, width);
      dense(layer + name + ".key_projection", width, from);
      dense(layer + name + ".value_projection", width, from);
      dense(layer + name + ".out_projection", width, width);
    };
    attention(is_decoder ? "self_attention" : "attention", width);
    if (is_decoder) attention("cross_attention", memory_width);
    dense(layer + "linear1", feed_forward, width);
    dense(layer + "linear2", width, feed_forward);
    norm(layer + "norm1");
    norm(layer + "norm2");
    if (is_decoder) norm(layer + "norm3");
  }
  norm("norm");
  dense("predictor", outputs, width);
  file.metadata = {{"wiring", "pre_norm"}, {"activation", "gelu"}, {"heads", "2"}, {"head_dim", "4"}};
  file.metadata["positions"] = learns_positions ? "learned" : "sinusoid_added";
  return file;
}

constexpr std::array<const char*, 14> keys = {
    "wiring",       "activation", "positions", "heads",   "head_dim", "input_width", "key_heads", "value_heads",
    "norm_epsilon", "attention",  "log_decay", "dataset", "",         "heads "};
constexpr std::array<const char*, 22> words = {"paper",   "post_norm", "none", "learned", "sinusoid_concatenated",
                                               "relu",    "1",         "2",    "4",       "8",
                                               "16",      "0",         "-1",   "0.5",     "1e-300",
                                               "1e999",   "NaN",       "[[",   "",        "9223372036854775807",
                                               "[-1, 0]", "[0, {}]"};
constexpr std::array<const char*, 16> kinds = {"bias",      "norm",     "linear1",   "linear2",  "query", "key",
                                               "value",     "out_",     "attention", "cross",    "norm3", "embedding",
                                               "predictor", "layers.1", "layers.0",  "positions"};
/// Small ones, and those whose products and sums overflow (in a shape with a 0: no data).
constexpr std::array<Index, 12> sizes = {0, 1, 2, 3, 4, 7, 8, 16, 1'000, Index(1) << 32U, Index(1) << 62U, 5};

void edit(model_file& file, FuzzedDataProvider& input) {
  const auto any_tensor = [&] {
    return std::next(file.shapes.begin(),
                     input.ConsumeIntegralInRange<std::ptrdiff_t>(0, std::ptrdiff_t(file.shapes.size()) - 1));
  };
  const auto resize = [&](std::vector<Index>& shape, Index size) {
    if (!shape.empty()) shape[input.ConsumeBool() ? 0 : shape.size() - 1] = size;
  };
  switch (input.ConsumeIntegralInRange(0, 6)) {
    case 0:
      file.metadata[input.PickValueInArray(keys)] = input.PickValueInArray(words);
      break;
    case 1:
      file.metadata.erase(input.PickValueInArray(keys));
      break;
    case 2:
      file.shapes.erase(any_tensor());
      break;
    case 3:
      resize(any_tensor()->second, input.PickValueInArray(sizes));
      break;
    case 4:
      any_tensor()->second.assign(input.ConsumeIntegralInRange<std::size_t>(0, 3), 2);
      break;
    case 5: {
      const std::string_view kind = input.PickValueInArray(kinds);
      std::erase_if(file.shapes, [&](const auto& tensor) { return tensor.first.find(kind) != std::string::npos; });
      break;
    }
    default: {  // one width for another, wherever it stands
      const Index from = input.PickValueInArray(sizes), to = input.PickValueInArray(sizes);
      for (auto& [name, shape] : file.shapes) std::replace(shape.begin(), shape.end(), from, to);
    }
  }
}

/// The file's bytes; none where its data would be beyond what an input is worth.
std::vector<std::byte> bytes_of(const model_file& file) {
  constexpr std::uint64_t most_data = 60'000;
  nlohmann::json header = {{"__metadata__", file.metadata}};
  std::uint64_t end = 0;
  for (const auto& [name, shape] : file.shapes) {
    std::uint64_t size = sizeof(float);
    for (const Index n : shape) {
      if (n > 1 && size > most_data) return {};
      size *= std::uint64_t(n);
    }
    if (size > most_data || end + size > most_data) return {};
    header[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {end, end + size}}};
    end += size;
  }
  const std::string text = header.dump();
  std::vector<std::byte> bytes(8 + text.size() + end, std::byte(0x3d));  // all elements 0.046
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = std::byte(text.size() >> 8 * i);
  std::transform(text.begin(), text.end(), bytes.begin() + 8, [](char c) { return std::byte(c); });
  return bytes;
}

template <class Attention, class... Args>
void run(const loaded_transformer<float>& file, const Args&... args) {
  const auto attention = [&] { return Attention(file.attention, args...); };
  using model_type = transformer<Attention>;
  const bool is_decoder = file.weights.layers.front().cross.key.weight.size() > 0;
  const model_type model = is_decoder ? model_type(file.options, file.weights, attention(), attention())
                                      : model_type(file.options, file.weights, attention());
  auto state = model.make_state();
  auto ws = model.make_workspace(2);
  row_matrix<float> out(3, model.outputs());
  if (model.sizes().symbols > 0) {
    const std::vector<Index> symbols{0, model.sizes().symbols - 1, 0};
    model.forward_causal(state, symbols, out, ws);
  } else {
    const row_matrix<float> x = row_matrix<float>::Constant(3, model.input_width(), 0.5F);
    model.forward_causal(state, x, out, ws);
  }
}

/// Whether it was not refused. A refusal names a function of the library.
template <class F>
bool accepts(const F& call) {
  try {
    call();
  } catch (const std::invalid_argument& refusal) {
    require(std::string_view(refusal.what()).starts_with("linattn::"), refusal.what());
    return false;
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider input(data, size);
  const bool is_decoder = input.ConsumeBool();
  model_file file = whole_model(is_decoder, input.ConsumeBool());
  while (input.remaining_bytes() > 0 && !file.shapes.empty()) edit(file, input);
  std::vector<std::byte> bytes = bytes_of(file);
  if (bytes.empty()) return -1;
  accepts([&] {
    const auto model = load_transformer<float>(safetensors_file::parse(std::move(bytes)));
    std::size_t tensors = 0;
    for_each_tensor(model.weights, [&](const std::string& name, const auto& tensor) {
      const auto found = file.shapes.find(name);
      require(found != file.shapes.end(), "a tensor that the file does not have");
      Index elements = 1;
      for (const Index n : found->second) elements *= n;
      require(tensor.size() == elements, "a tensor of another size than the file's");
      ++tensors;
    });
    require(tensors == file.shapes.size(), "a tensor of the file was not loaded");
    accepts([&] { run<linear_attention<elu_plus_one>>(model); });
    accepts([&] { run<cached_softmax<float>>(model, Index(8)); });
  });
  return 0;
}
