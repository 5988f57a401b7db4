// generate_images: a transformer with linear attention, trained in PyTorch (examples/training), draws images here.
//
//     generate_images [weights.safetensors] [--digits] [--quick]
//
// An image is a sequence: first its class, then its pixels row by row, and the model says how likely each grey level of
// the next pixel is. Such a transformer is a recurrent network: every pixel costs the same time and memory, where a
// softmax transformer reads all pixels before it again. Below are new images of every class, held-out images of which
// only the upper half was given, the bits that a held-out pixel costs, and images per second in the paper's three ways.
//
// Without a file: Fashion-MNIST, or with --digits handwritten digits. --quick: fewer of everything. Writes
// generated_<dataset>.png into the current directory, where the program was built with stb.
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
#include "image_data.hpp"
#include "pictures.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace {

using Eigen::Index;
using linear = linattn::transformer<linattn::linear_attention<linattn::elu_plus_one>>;
using fading =
    linattn::transformer<linattn::linear_attention<linattn::elu_plus_one, linattn::normalized<linattn::decay>>>;
using softmax = linattn::transformer<linattn::cached_softmax<float>>;

constexpr const char* fading_name = "elu_plus_one_decay";
const std::string data = LINATTN_EXAMPLES_DIR "/data/";

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

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
              image_rows& images, bool shows_progress = true) {
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
double images_per_second(const Model& model, const image_format& format, Index batch) {
  const std::vector<Index> labels(std::size_t(batch), 0);
  image_rows images = image_rows::Zero(batch, format.pixels());
  double best = 0;
  for (int i = 0; i < (format.pixels() < 256 ? 5 : 1); ++i) {  // what lasts milliseconds, the best of some
    const double start = seconds();
    complete(model, format, labels, 0, images, false);
    best = std::max(best, double(batch) / (seconds() - start));
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

/// Some of the images beside each other, in several rows where the terminal is too narrow.
void print_images(const image_format& format, const image_rows& images, const std::vector<Index>& which) {
  const auto count = static_cast<Index>(which.size());
  const Index columns = pictures::columns_that_fit(format.side, count);
  pictures::sheet page(format.side, columns, (count + columns - 1) / columns);
  for (Index i = 0; i < count; ++i) {
    page.put(i / columns, i % columns, images.row(which[std::size_t(i)]).data(), format.levels);
  }
  pictures::print(page);
}

/// `each` images of every class, printed and on a sheet with a row for each of them.
template <class Model>
pictures::sheet draw_classes(const Model& model, const image_format& format, Index each) {
  std::vector<Index> labels, first_of_class;
  for (Index c = 0; c < format.classes; ++c) {
    first_of_class.push_back(c * each);
    labels.insert(labels.end(), std::size_t(each), c);
  }
  image_rows images(format.classes * each, format.pixels());
  complete(model, format, labels, 0, images);
  print_images(format, images, first_of_class);
  pictures::sheet page(format.side, each, format.classes);
  for (Index i = 0; i < images.rows(); ++i) {
    page.put(i / each, i % each, images.row(i).data(), format.levels);
  }
  return page;
}

/// Held-out images without their lower half, what the model makes of it, and what it was.
template <class Model>
pictures::sheet draw_completions(const Model& model, const image_format& format, const labelled_images& held_out) {
  const Index count = std::min<Index>(5, held_out.images.rows()), known = format.pixels() / 2;
  const image_rows whole = held_out.images.topRows(count);
  image_rows given = whole, completed = whole;
  given.rightCols(format.pixels() - known).setConstant(-1);
  complete(model, format, held_out.labels, known, completed);
  pictures::sheet page(format.side, 3, count);
  for (Index i = 0; i < count; ++i) {
    page.put(i, 0, given.row(i).data(), format.levels);
    page.put(i, 1, completed.row(i).data(), format.levels);
    page.put(i, 2, whole.row(i).data(), format.levels);
  }
  pictures::print(page);
  return page;
}

linear as_linear(const linattn::loaded_transformer<float>& file) {
  return linear(file.options, file.weights, linear::attention_type(file.attention));
}
fading as_fading(const linattn::loaded_transformer<float>& file) {
  return fading(file.options, file.weights,
                fading::attention_type(file.attention, {}, {linattn::decay(file.log_decay)}));
}
softmax as_softmax(const linattn::loaded_transformer<float>& file, const image_format& format) {
  return softmax(file.options, file.weights, softmax::attention_type(file.attention, format.pixels()));
}

/// The paper's three ways to generate, with the same weights: times do not depend on what they were trained for.
void compare_speed(const linattn::loaded_transformer<float>& file, const image_format& format, Index batch) {
  const Index n = format.pixels();
  const double width = double(file.weights.layers[0].linear1.weight.cols());  // F; a layer's flops, over 2 F:
  const double products = 4 * width + 2 * double(file.weights.layers[0].linear1.weight.rows());
  const double flop_ratio = (products + double(n)) / (products + 2 * double(file.attention.head_dim));
  const softmax with_softmax = as_softmax(file, format);
  std::printf("\nimages of %td tokens per second, %td at once, one thread:\n", n, batch);
  const double rate = file.attention_name == fading_name ? images_per_second(as_fading(file), format, batch)
                                                         : images_per_second(as_linear(file), format, batch);
  std::printf("%10.3g  linear attention, as a recurrent network\n", rate);
  const double cached = images_per_second(with_softmax, format, batch);
  std::printf("%10.3g  softmax with a cache of keys and values: %.2f times as long, %.2f times the flops\n", cached,
              rate / cached, flop_ratio);
  const double uncached = images_per_second_uncached(with_softmax, format);
  std::printf("%10.3g  softmax without: %.0f times as long (12 positions measured, straight lines between)\n", uncached,
              rate / uncached);
  if (n < 256)
    std::printf("So few tokens say nothing of how the ways compare: the cache is hardly longer than a state.\n");
  std::printf("The gain grows with their number. The paper's 784 and 3,072 in models of its size: bench_generation.\n");
}

template <class Model>
int show(const Model& model, const linattn::loaded_transformer<float>& file, bool quick) {
  const image_format format(file.metadata);
  const Index each = quick ? 2 : 10;
  std::printf("%s: %td x %td pixels, %td grey levels, %td classes; %td layers of width %td, attention %s\n",
              format.text("dataset").c_str(), format.side, format.side, format.levels, format.classes, model.layers(),
              model.width(), file.attention_name.c_str());
  std::printf("\n%td new images of each class, of which here is one:\n", each);
  std::vector<pictures::sheet> sheets = {draw_classes(model, format, each)};

  bool is_same = true;
  if (const auto held_out = load_held_out(format, data); held_out.images.rows() > 0) {
    std::printf("\nheld-out images: the half that was given, the model's completion, the image:\n");
    sheets.push_back(draw_completions(model, format, held_out));
    const Index all = held_out.images.rows(), judged = quick ? std::min<Index>(all, 20000 / format.pixels()) : all;
    const double bits = bits_per_pixel(model, format, held_out, judged);
    std::printf("\n%td held-out images: %.6f bits per pixel", judged, bits);
    if (judged == all) {
      constexpr double tolerance = 1e-4;  // sums of floats in another order than PyTorch's
      const std::string trained = format.text("held_out_bits_per_pixel");
      is_same = std::abs(bits - std::atof(trained.c_str())) <= tolerance;
      std::printf("; the training script had %s: %s", trained.c_str(), is_same ? "ok" : "NOT THE SAME");
    }
    std::printf("\n");
  }
  compare_speed(file, format, format.classes * each);

  const std::string png = std::string("generated_") + (format.side == 8 ? "digits" : "fashion") + ".png";
  if (pictures::write_png(png, sheets, format.side < 16 ? 8 : 4)) std::printf("\nall of them: %s\n", png.c_str());
  return is_same ? 0 : 1;
}

int run(std::string path, bool digits, bool quick) {
  if (path.empty()) path = data + (digits ? "digits_linear.safetensors" : "fashion_linear.safetensors");
  const auto file = linattn::load_transformer<float>(linattn::safetensors_file::open(path));
  const image_format format(file.metadata);
  const linattn::transformer_weights<float>& w = file.weights;
  if (w.embedding.rows() != format.levels + format.classes || w.predictor.weight.rows() != format.levels ||
      (w.positions.rows() > 0 && w.positions.rows() < format.pixels())) {
    throw std::invalid_argument(path + ": the tensors are not those of such images");
  }
  if (file.attention_name == "elu_plus_one") return show(as_linear(file), file, quick);
  if (file.attention_name == fading_name) return show(as_fading(file), file, quick);
  if (file.attention_name == "softmax") return show(as_softmax(file, format), file, quick);
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
