// copy_sequence: the paper's copy task (its figure 2), learnt in PyTorch (examples/training/copy_task.py), done here.
//
//     copy_sequence [weights.safetensors]
//
// The model is given n of ten symbols and a separator, one token at a time, and has to write the same symbols again.
// What it has read is a state of fixed size in every layer: nothing of the sequence is kept beside it. What it writes
// is fed back, so that a wrong symbol may lead to others; the training script feeds back the right one, and that is
// what its accuracy is compared with.
//
// Exit code: 0; 1 if fewer symbols are right than the training script found; 2 for a file that is refused.

#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/sampling.hpp>
#include <linattn/transformer_io.hpp>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Eigen::Index;
using attention = linattn::linear_attention<linattn::elu_plus_one>;
using symbols = std::vector<Index>;

constexpr Index separator = 0;

/// Reads `given` and the separator, then writes as many symbols, the likeliest each. Fed back are those it has written,
/// or the right ones.
symbols copy(const linattn::transformer<attention>& model, const symbols& given, bool feeds_right_ones) {
  auto state = model.make_state();
  auto ws = model.make_workspace();
  linattn::row_vector<float> logits(model.outputs());
  for (const Index symbol : given) model.step(state, symbol, logits, ws);
  symbols written;
  for (Index symbol = separator; written.size() < given.size();) {
    model.step(state, symbol, logits, ws);
    written.push_back(linattn::greedy(logits));
    symbol = feeds_right_ones ? given[written.size() - 1] : written.back();
  }
  return written;
}

Index equal(const symbols& a, const symbols& b) {
  Index n = 0;
  for (std::size_t i = 0; i < a.size(); ++i) n += a[i] == b[i] ? 1 : 0;
  return n;
}

void print(const char* title, const symbols& sequence) {
  std::printf("%s", title);
  for (const Index symbol : sequence) std::printf(" %2td", symbol);
  std::printf("\n");
}

int run(const std::string& path) {
  const auto file = linattn::load_transformer<float>(linattn::safetensors_file::open(path));
  const linattn::transformer<attention> model(file.options, file.weights, attention(file.attention));
  const auto number = [&](const char* key) {
    const auto found = file.metadata.find(key);
    if (found == file.metadata.end()) throw std::invalid_argument(path + ": the metadata have no '" + key + "'");
    return std::atof(found->second.c_str());
  };
  const double said = number("length");
  const auto length = said >= 8 && said <= 1e6 ? Index(said) : 0;  // of the longest sequence, with its copy
  const double accuracy = number("accuracy");
  const Index positions = model.sizes().positions;
  if (file.attention_name != "elu_plus_one" || model.outputs() != 11 || model.sizes().symbols != 11 || length == 0 ||
      (positions > 0 && positions < length)) {
    throw std::invalid_argument(path + ": these are no weights of the copy task with linear attention");
  }

  std::mt19937 random(2020);
  Index right = 0, right_if_corrected = 0, total = 0;
  constexpr int sequences = 500, shown = 2;
  for (int i = 0; i < sequences; ++i) {
    // As long as in training: length / 4 ... (length - 1) / 2 - 1.
    symbols given(std::size_t(length / 4) + random() % std::size_t((length - 1) / 2 - length / 4));
    for (Index& symbol : given) symbol = Index(1 + random() % 10);
    const symbols written = copy(model, given, false);
    right += equal(written, given);
    right_if_corrected += equal(copy(model, given, true), given);
    total += Index(given.size());
    if (i < shown) {
      print("given  ", given);
      print("written", written);
    }
  }
  const auto share = [&](Index n) { return double(n) / double(total); };
  std::printf(
      "%d sequences, %td symbols: %.2f %% are copied; with the right symbol fed back, %.2f %%, where the training "
      "script had %.2f %% of other sequences\n",
      sequences, total, 100 * share(right), 100 * share(right_if_corrected), 100 * accuracy);
  constexpr double allowance = 0.01;  // eight deviations of so many symbols, one in fifty wrong
  return share(right_if_corrected) >= accuracy - allowance ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2) {
    std::fprintf(stderr, "usage: copy_sequence [weights.safetensors]\n");
    return 2;
  }
  try {
    return run(argc == 2 ? argv[1] : LINATTN_EXAMPLES_DIR "/data/copy_task_linear.safetensors");
  } catch (const std::invalid_argument& refused) {
    std::fprintf(stderr, "copy_sequence: %s\n", refused.what());
    return 2;
  }
}
