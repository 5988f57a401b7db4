// generate_images: a transformer with linear attention, trained in PyTorch (examples/training), draws images here.
//
//     generate_images [weights.safetensors] [--digits] [--quick]
//
// An image is a sequence: first its class, then its pixels row by row, and the model says how likely each grey level of
// the next pixel is. Such a transformer is a recurrent network: every pixel costs the same time and memory, where a
// softmax transformer reads all pixels before it again. Below are new images of every class, held-out images of which
// only the upper half was given, the bits that a held-out pixel costs, and images per second in the paper's three ways.
//
// Without a file: Fashion-MNIST where its weights are there, otherwise, and with --digits, handwritten digits. --quick:
// fewer of everything. Writes generated_<dataset>.png into the current directory, where the program was built with stb.
//
// Exit code: 0; 1 if the bits are not those of the training script; 2 for arguments and files that are refused.

#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/sampling.hpp>
#include <linattn/softmax_cache.hpp>
#include <linattn/transformer_io.hpp>
#include <linattn/transformer_uncached.hpp>

#ifdef LINATTN_EXAMPLE_STB
#define STB_IMAGE_WRITE_IMPLEMENTATION
#endif
#include "pictures.hpp"

#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace {

using Eigen::Index;
using levels_matrix = linattn::row_matrix<Index>;  // (images, N), one image a row
using linear = linattn::transformer<linattn::linear_attention<linattn::elu_plus_one>>;
using softmax = linattn::transformer<linattn::cached_softmax<float>>;

const std::string data = LINATTN_EXAMPLES_DIR "/data/";

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// What a weights file says of its images.
struct image_format {
  explicit image_format(const linattn::safetensors_metadata& of)
      : metadata(of), side(number("side")), levels(number("levels", 2)), classes(number("classes")) {}

  std::string text(std::string_view key) const {
    const auto found = metadata.find(key);
    if (found != metadata.end()) return found->second;
    throw std::invalid_argument("these are no weights of an image model: the metadata have no '" + std::string(key) +
                                "'");
  }
  Index number(std::string_view key, Index least = 1) const {
    const Index n = std::atol(text(key).c_str());
    if (n >= least && n <= 1024) return n;
    throw std::invalid_argument("the metadata say " + std::string(key) + " = '" + text(key) + "'");
  }
  Index pixels() const { return side * side; }  // N
  bool is_like(const image_format& o) const { return side == o.side && levels == o.levels && classes == o.classes; }
  Index class_symbol(Index c) const { return levels + c; }

  linattn::safetensors_metadata metadata;
  Index side, levels, classes;
};

struct labelled_images {
  levels_matrix images;
  std::vector<Index> labels;
};

/// Images that the model was not trained on; none where we have none for it.
labelled_images load_held_out(const image_format& format) {
  const bool is_fashion = format.text("dataset") == "Fashion-MNIST";
  const std::string path = data + (is_fashion ? "fashion_held_out.safetensors" : "digits.safetensors");
  if (!std::filesystem::exists(path)) return {};
  const auto file = linattn::safetensors_file::open(path);
  const auto* const images = file.tensor("held_out.images");
  const auto* const labels = file.tensor("held_out.labels");
  if (images == nullptr || labels == nullptr || !format.is_like(image_format(file.metadata()))) return {};
  const Index count = images->shape.at(0), per_byte = format.pixels() / images->shape.at(1);  // 1, or 2 of 16 levels
  labelled_images held_out{levels_matrix(count, format.pixels()), {}};
  for (Index i = 0; i < held_out.images.size(); ++i) {
    const Index byte = std::to_integer<Index>(images->data[std::size_t(i / per_byte)]);
    held_out.images.data()[i] = per_byte == 1 ? byte : i % 2 == 0 ? byte % 16 : byte / 16;
  }
  for (const std::byte label : labels->data) held_out.labels.push_back(std::to_integer<Index>(label));
  return held_out;
}

/// The symbols of an image up to pixel `known` - 1: the class before them, token i at the place of pixel i.
std::vector<Index> prompt(const image_format& format, Index label, const Index* pixels, Index known) {
  std::vector<Index> symbols = {format.class_symbol(label)};
  symbols.insert(symbols.end(), pixels, pixels + known);
  return symbols;
}

/// Draws pixels `known` ... N - 1 of each row of `images`. The prompts are read by the parallel form, and the rest is
/// stepped, a pixel of all images at a time. Any of the three ways to run a model will do.
template <class Model>
void complete(const Model& model, const image_format& format, const std::vector<Index>& labels, Index known,
              levels_matrix& images, bool shows_progress = true) {
  constexpr float temperature = 0.8F;
  const Index n = format.pixels(), count = images.rows();
  std::vector states(std::size_t(count), model.make_state());
  auto ws = model.make_workspace(std::max<Index>(count, 64));
  linattn::row_matrix<float> logits(count, model.outputs());
  for (Index b = 0; b < count; ++b) {
    const auto symbols = prompt(format, labels[std::size_t(b)], images.row(b).data(), known);
    model.forward_causal(states[std::size_t(b)], symbols, logits.row(b), ws);
  }
  linattn::sampler draw({.temperature = temperature, .seed = 2020});
  std::vector<Index> drawn(static_cast<std::size_t>(count));
  for (Index i = known; i < n; ++i) {
    if (i > known) model.step(states, drawn, logits, ws);
    for (Index b = 0; b < count; ++b) images(b, i) = drawn[std::size_t(b)] = draw(logits.row(b));
    if (shows_progress && pictures::terminal_columns() > 0 && (i % 16 == 15 || i == n - 1)) {
      std::printf("\rpixel %td of %td%s", i + 1, n, i == n - 1 ? "\n" : "");
      std::fflush(stdout);
    }
  }
}

/// Mean of -log2 of the probability that each pixel was given.
template <class Model>
double bits_per_pixel(const Model& model, const image_format& format, const labelled_images& held_out, Index count) {
  const Index n = format.pixels();
  auto state = model.make_state();
  auto ws = model.make_workspace(64);
  linattn::row_matrix<float> logits(n, model.outputs());
  double nats = 0;
  for (Index b = 0; b < count; ++b) {
    const Index* const pixels = held_out.images.row(b).data();
    state.reset();
    model.forward_causal(state, prompt(format, held_out.labels[std::size_t(b)], pixels, n - 1), logits, ws);
    for (Index i = 0; i < n; ++i) nats -= linattn::log_likelihood(logits.row(i), pixels[i]);
  }
  return nats / double(count * n) / std::log(2.0);
}

template <class Model>
double images_per_second(const Model& model, const image_format& format, const std::vector<Index>& labels) {
  levels_matrix images = levels_matrix::Zero(Index(labels.size()), format.pixels());
  double best = 0;
  for (int i = 0; i < 2; ++i) {
    const double start = seconds();
    complete(model, format, labels, 0, images, false);
    best = std::max(best, double(labels.size()) / (seconds() - start));
  }
  return best;
}

/// Without a cache, token i is a pass over all tokens up to i. A dozen of those, and straight lines between them.
double images_per_second_uncached(const softmax& model, const image_format& format) {
  const Index n = format.pixels(), samples = 12;
  const linattn::uncached_transformer uncached(model, n);
  auto state = uncached.make_state();
  auto ws = uncached.make_workspace();
  linattn::row_matrix<float> logits(1, model.outputs());
  const std::vector<Index> symbols(std::size_t(n), 0);
  double total = 0, before = 0;
  for (Index s = 0, tokens_before = 0; s < samples; ++s) {
    const Index tokens = std::max<Index>(1, n * s / (samples - 1));
    state.reset();
    const double start = seconds();
    uncached.forward_causal(state, std::span(symbols).first(std::size_t(tokens)), logits, ws);
    const double taken = seconds() - start;
    total += double(tokens - tokens_before) * (s == 0 ? taken : (taken + before) / 2);
    before = taken, tokens_before = tokens;
  }
  return 1 / total;
}

/// One picture of each class where the terminal is wide enough, otherwise in several rows.
void print_images(const image_format& format, const levels_matrix& images, const std::vector<Index>& which) {
  const Index columns = pictures::columns_that_fit(format.side, Index(which.size()));
  const Index rows = (Index(which.size()) + columns - 1) / columns;
  pictures::sheet page(format.side, columns, rows);
  for (std::size_t i = 0; i < which.size(); ++i) {
    page.put(Index(i) / columns, Index(i) % columns, images.row(which[i]).data(), format.levels);
  }
  pictures::print(page);
}

template <class Model>
int show(const Model& model, const linattn::loaded_transformer<float>& file, bool quick) {
  const image_format format(file.metadata);
  const Index n = format.pixels(), each = quick ? 2 : 10;
  std::vector<pictures::sheet> sheets;
  std::printf("%s: %td x %td pixels, %td grey levels, %td classes; %td layers of width %td, %s attention\n",
              format.text("dataset").c_str(), format.side, format.side, format.levels, format.classes, model.layers(),
              model.width(), file.attention_name.c_str());

  std::printf("\n%td new images of each class:\n", each);
  std::vector<Index> labels, first_of_class;
  for (Index c = 0; c < format.classes; ++c) {
    first_of_class.push_back(c * each);
    labels.insert(labels.end(), std::size_t(each), c);
  }
  levels_matrix images(format.classes * each, n);
  complete(model, format, labels, 0, images);
  print_images(format, images, first_of_class);
  sheets.emplace_back(format.side, each, format.classes);
  for (Index i = 0; i < images.rows(); ++i) {
    sheets[0].put(i / each, i % each, images.row(i).data(), format.levels);
  }

  const labelled_images held_out = load_held_out(format);
  int exit_code = 0;
  if (const Index known = n / 2; held_out.images.rows() > 0) {
    const Index count = 5;
    std::printf("\nheld-out images: the half that was given, the model's completion, the image:\n");
    levels_matrix completed = held_out.images.topRows(count);
    complete(model, format, held_out.labels, known, completed);
    levels_matrix all(3 * count, n);
    sheets.emplace_back(format.side, 3, count);
    for (Index i = 0; i < 3 * count; ++i) {
      if (i % 3 == 1) {
        all.row(i) = completed.row(i / 3);
      } else {
        all.row(i) = held_out.images.row(i / 3);
      }
      if (i % 3 == 0) all.row(i).tail(n - known).setConstant(-1);
      sheets[1].put(i / 3, i % 3, all.row(i).data(), format.levels);
    }
    pictures::print(sheets[1]);

    const Index judged = quick ? std::min<Index>(held_out.images.rows(), 20000 / n) : held_out.images.rows();
    const double bits = bits_per_pixel(model, format, held_out, judged);
    std::printf("\nheld out: %.6f bits per pixel, %td images", bits, judged);
    if (judged == held_out.images.rows()) {
      constexpr double tolerance = 1e-4;  // sums of floats in another order than PyTorch's
      const double trained = std::atof(format.text("held_out_bits_per_pixel").c_str());
      exit_code = std::abs(bits - trained) <= tolerance ? 0 : 1;
      std::printf("; the training script had %.6f: %s", trained, exit_code == 0 ? "ok" : "NOT THE SAME");
    }
    std::printf("\n");
  }

  const linear as_linear(file.options, file.weights, linear::attention_type(file.attention));
  const softmax as_softmax(file.options, file.weights, softmax::attention_type(file.attention, n));
  std::printf(
      "\nimages of %td tokens per second, one thread, %td at once (how long it takes does not depend on which\n"
      "attention the weights were trained with):\n",
      n, images.rows());
  const double rate = images_per_second(as_linear, format, labels);
  std::printf("%10.3g  linear attention, as a recurrent network\n", rate);
  const double cached = images_per_second(as_softmax, format, labels);
  std::printf("%10.3g  softmax attention with a cache of keys and values: %.2f times as long\n", cached, rate / cached);
  const double uncached = images_per_second_uncached(as_softmax, format);
  std::printf(
      "%10.3g  softmax attention without: %.0f times as long (12 of %td positions measured, the others between "
      "them)\n",
      uncached, rate / uncached, n);
  std::printf(
      "The gain grows with the number of tokens and the size of the batch, and %td tokens are %s: see\n"
      "benchmarks/bench_generation for the paper's 784 and 3,072 with models of its size.\n",
      n, n < 256 ? "few" : "the least of the paper's");

  const std::string png = std::string("generated_") + (n == 64 ? "digits" : "fashion") + ".png";
  if (pictures::write_png(png, sheets, format.side < 16 ? 4 : 2)) std::printf("\nall of them: %s\n", png.c_str());
  return exit_code;
}

int run(std::string path, bool digits, bool quick) {
  if (path.empty()) {
    path = data + "fashion_linear.safetensors";
    if (digits || !std::filesystem::exists(path)) path = data + "digits_linear.safetensors";
  }
  const auto file = linattn::load_transformer<float>(linattn::safetensors_file::open(path));
  const image_format format(file.metadata);
  const linattn::transformer_weights<float>& w = file.weights;
  if (w.embedding.rows() != format.levels + format.classes || w.predictor.weight.rows() != format.levels ||
      (w.positions.rows() > 0 && w.positions.rows() < format.pixels())) {
    throw std::invalid_argument(path + ": the tensors are not those of such images");
  }
  if (file.attention_name == "elu_plus_one") {
    return show(linear(file.options, w, linear::attention_type(file.attention)), file, quick);
  }
  if (file.attention_name == "softmax") {
    return show(softmax(file.options, w, softmax::attention_type(file.attention, format.pixels())), file, quick);
  }
  throw std::invalid_argument(path + ": attention '" + file.attention_name + "' is not known here");
}

}  // namespace

int main(int argc, char** argv) {
  std::string path;
  bool digits = false, quick = false;
  for (const std::string_view argument : std::span(argv + 1, std::size_t(argc - 1))) {
    if (argument == "--digits") {
      digits = true;
    } else if (argument == "--quick") {
      quick = true;
    } else if (path.empty() && !argument.starts_with("--")) {
      path = argument;
    } else {
      std::fprintf(stderr, "usage: generate_images [weights.safetensors] [--digits] [--quick]\n");
      return 2;
    }
  }
  try {
    return run(path, digits, quick);
  } catch (const std::invalid_argument& refused) {
    std::fprintf(stderr, "generate_images: %s\n", refused.what());
    return 2;
  }
}
