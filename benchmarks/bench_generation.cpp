// What does generating an image cost, as a recurrent network and with softmax, at the sizes of the paper's tables?
//
//     bench_generation [--quick]       minutes; --quick: a short image and two layers, to see that it runs
//
// The paper's models with random weights (times do not depend on them): 8 heads of 32, width 256, 1,024 hidden units,
// bytes in, 10 logistics out; MNIST-like 784 tokens and 8 layers, CIFAR-like 3,072 tokens and 16 layers. Three ways to
// run one set of weights, as in tables 1, 2, 4 and 5:
//
//   linear    linear attention, elu + 1: O(1) a token
//   cached    softmax attention over a cache of keys and values: O(n) of token n
//   uncached  softmax attention, all tokens again for each: passes of many rows, of which the last gives an output
//
// Times are CPU seconds of the calling thread and of the longest task beside it: those of the wall clock where each
// thread has a core. Prints markdown, and progress on stderr.
#include "paired.hpp"

#include <linattn/softmax_cache.hpp>
#include <linattn/transformer.hpp>
#include <linattn/transformer_uncached.hpp>

#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <string>

using namespace linattn;
using namespace linattn_bench;

namespace {

using linear_model = transformer<linear_attention<elu_plus_one>>;
using softmax_model = transformer<cached_softmax<float>>;

constexpr double memory = 8.0 * (Index(1) << 30);  // what the largest batch has to fit
constexpr Index width = 256, heads = 8, head_dim = 32, hidden = 1024;
constexpr Index spare = 8;  // tokens that a state has room for beyond an image's, for steps that are repeated

/// The paper's figures: GPU images per second (tables 1, 2, 4), CPU seconds of one image (table 5); linear, cached,
/// uncached.
struct setting {
  const char* name;
  Index tokens, layers;
  std::array<double, 3> gpu_images, cpu_seconds;

  // Flops of an image, as family tables count them: products, scores and sums of values.
  double product_flops() const { return 2.0 * double(layers * (4 * width * width + 2 * width * hidden)); }  // a token
  double linear_flops() const {
    return double(tokens) * (product_flops() + 4.0 * double(layers * heads * head_dim * head_dim));
  }
  double cached_flops() const {
    return double(tokens) * (product_flops() + 4.0 * double(layers * width) * double(tokens) / 2);
  }
  /// All pairs of tokens, and with causal = true those that are needed.
  double uncached_flops(bool causal) const {
    const double n = double(tokens);
    return n * n / 2 * product_flops() + n * n * n / 3 * 4.0 * double(layers * width) * (causal ? 0.5 : 1.0);
  }
  /// Bytes of keys and values that a token of the cache's middle reads, and of a state that is read and written.
  double byte_ratio() const {
    return double(tokens) / 2 * 2 * double(width) / (2.0 * double(heads * (head_dim * head_dim + head_dim)));
  }
};

transformer_weights<float> random_weights(Index layers) {
  auto w = make_transformer_weights<float>({.layers = layers,
                                            .width = width,
                                            .query_width = width,
                                            .value_width = width,
                                            .feed_forward = hidden,
                                            .symbols = 256,
                                            .embedding = width / 2,
                                            .outputs = 30,
                                            .final_norm = true});
  std::uint64_t seed = 1;
  for_each_tensor(w, [&](const std::string& name, auto& tensor) {
    const float scale = name.ends_with("weight") ? 1 / std::sqrt(float(tensor.cols())) : 0.1F;
    tensor = scale * normal_matrix<float>(tensor.rows(), tensor.cols(), ++seed);
  });
  return w;
}

/// Sequences that step together, their halves on two threads where two are asked for.
template <class Model>
class batch {
 public:
  using state_type = typename Model::state_type;

  batch(const Model& model, Index sequences)
      : m_model(model), m_states(std::size_t(sequences), model.make_state()), m_symbols(std::size_t(sequences), 7) {
    for (int t = 0; t < 2; ++t) m_workspaces.push_back(model.make_workspace(sequences));
    m_out.setZero(sequences, model.outputs());
  }
  Index size() const { return m_out.rows(); }
  void place(const state_type& at) {
    for (auto& s : m_states) s = at;
  }
  /// Seconds of a step of all, the best of `times`; every one of them is a token.
  double step(Index threads, int times) {
    double best = INFINITY;
    for (int i = 0; i < times; ++i) {
      const auto call = [&](const auto& executor) {
        executor.parallel_for(threads, [&](Index t) {
          const Index begin = size() * t / threads, count = size() * (t + 1) / threads - begin;
          const auto part = [&](auto& all) { return std::span(all).subspan(std::size_t(begin), std::size_t(count)); };
          m_model.step(part(m_states), part(m_symbols), m_out.middleRows(begin, count), m_workspaces[std::size_t(t)]);
        });
      };
      best = std::min(best, threads == 1 ? measured(sequential(), call).path : measured(m_pool, call).path);
    }
    return best;
  }

 private:
  const Model& m_model;
  std::vector<state_type> m_states;
  std::vector<typename Model::workspace_type> m_workspaces;
  std::vector<Index> m_symbols;
  row_matrix<float> m_out;
  thread_pool m_pool{2};
};

/// Positions at which something that grows steadily is measured, 0 among them.
std::vector<Index> positions(Index tokens, Index count) {
  std::vector<Index> p;
  for (Index i = 0; i < count; ++i) p.push_back(tokens * i / (count - 1));
  return p;
}
/// The sum over an image's tokens of what was measured at some of them: straight lines between.
double integral(const std::vector<Index>& at, const std::vector<double>& y) {
  double sum = 0;
  for (std::size_t i = 1; i < at.size(); ++i) sum += double(at[i] - at[i - 1]) * (y[i] + y[i - 1]) / 2;
  return sum;
}

/// Seconds an image in a batch whose states lie far beyond the caches; of threads 1 and 2.
template <class Model>
std::array<double, 2> seconds_in_batch(const Model& model, Index tokens, Index sequences, Index count) {
  batch<Model> b(model, sequences);
  auto prefix = model.make_state();
  auto ws = model.make_workspace(64);
  row_matrix<float> out(1, model.outputs());
  const auto at = positions(tokens, count);
  std::array<std::vector<double>, 2> taken;
  for (const Index position : at) {
    const std::vector<Index> more(std::size_t(position - prefix.tokens()), 7);
    if (!more.empty()) model.forward_causal(prefix, more, out, ws);
    b.place(prefix);
    for (const Index threads : {1, 2}) {
      taken[std::size_t(threads - 1)].push_back(b.step(threads, 3) / double(sequences));
    }
  }
  return {integral(at, taken[0]), integral(at, taken[1])};
}

/// Every token of one image alone: seconds of each.
template <class Model>
std::vector<double> seconds_alone(const Model& model, Index tokens) {
  batch<Model> b(model, 1);
  b.step(1, 2);
  b.place(model.make_state());
  std::vector<double> taken;
  for (Index i = 0; i < tokens; ++i) taken.push_back(b.step(1, 1));
  return taken;
}

/// Seconds an image without a cache, a dozen of its passes measured; of two threads with an image each.
double seconds_uncached(const softmax_model& model, Index tokens, Index threads) {
  const uncached_transformer uncached(model, tokens);
  std::vector states(2, uncached.make_state());
  std::vector<typename decltype(uncached)::workspace_type> workspaces;
  for (int t = 0; t < 2; ++t) workspaces.push_back(uncached.make_workspace(96));
  row_matrix<float> out(2, model.outputs());
  const std::vector<Index> symbols(std::size_t(tokens), 7);
  const thread_pool pool(2);
  auto at = positions(tokens, 12);
  std::vector<double> taken;
  for (const Index position : at) {
    const auto pass = [&](const auto& executor) {
      executor.parallel_for(threads, [&](Index t) {
        states[std::size_t(t)].reset();
        uncached.forward_causal(states[std::size_t(t)],
                                std::span(symbols).first(std::size_t(std::max<Index>(1, position))), out.row(t),
                                workspaces[std::size_t(t)]);
      });
    };
    taken.push_back((threads == 1 ? measured(sequential(), pass).path : measured(pool, pass).path) / double(threads));
  }
  return integral(at, taken);
}

/// Seconds of the attention of one layer, a token of one sequence, the mean over an image's tokens.
template <class Attention>
double attention_seconds(const Attention& attn, Index tokens, Index sequences, Index count) {
  problem<float> p(std::max<Index>(sequences, 64), head_dim, head_dim, heads);
  std::vector states(std::size_t(sequences), attn.make_state());
  auto prefix = attn.make_state();
  auto ws = attn.make_workspace();
  const auto at = positions(tokens, count);
  std::vector<double> taken;
  Index before = 0;
  for (const Index position : at) {
    for (; before < position; before += std::min<Index>(64, position - before)) {
      const Index more = std::min<Index>(64, position - before);
      attn.absorb(prefix, p.k.topRows(more), p.v.topRows(more), ws);
    }
    for (auto& s : states) s = prefix;
    double best = INFINITY;
    for (int i = 0; i < 3; ++i) {
      const double start = seconds();
      attn.step(states, p.q.topRows(sequences), p.k.topRows(sequences), p.v.topRows(sequences),
                p.out.topRows(sequences), ws);
      best = std::min(best, seconds() - start);
    }
    taken.push_back(best / double(sequences));
  }
  return integral(at, taken) / double(tokens);
}

/// GFLOP/s of a layer's four matrix products, all layers one after the other, for `rows` rows.
double product_rate(const transformer_weights<float>& w, Index rows) {
  std::vector<std::array<detail::dense<float>, 4>> layers;
  for (const auto& l : w.layers) {
    layers.push_back({detail::dense<float>{&l.attention.query, &l.attention.key, &l.attention.value},
                      detail::dense<float>{&l.attention.out}, detail::dense<float>{&l.linear1},
                      detail::dense<float>{&l.linear2}});
  }
  const row_matrix<float> x = normal_matrix<float>(rows, hidden, 3);
  row_matrix<float> y(rows, hidden);
  double flops = 0, best = INFINITY;
  for (int i = 0; i < 5; ++i) {
    flops = 0;
    const double start = seconds();
    for (const auto& layer : layers) {
      for (const auto& product : layer) {
        product.apply(x.leftCols(product.inputs()), y.leftCols(product.outputs()));
        flops += 2.0 * double(rows * product.inputs() * product.outputs());
      }
    }
    best = std::min(best, seconds() - start);
  }
  return flops / best;
}

double read_bandwidth(Index bytes) {
  detail::heap_slab<float> buffer(bytes / Index(sizeof(float)));
  return best_of(5, [&] { return bandwidth_once<access::read>(buffer.data(), bytes, 4); });
}

void progress(const setting& of, const char* what) { std::fprintf(stderr, "%s: %s ...\n", of.name, what); }

double mean(const std::vector<double>& x, Index first, Index last) {
  double sum = 0;
  for (Index i = first; i < last; ++i) sum += x[std::size_t(i)];
  return sum / double(last - first);
}

void report(const setting& of, bool quick) {
  const Index n = of.tokens;
  const auto weights = random_weights(of.layers);
  const transformer_options o{.wiring = wiring::post_norm, .positions = position_encoding::sinusoid_concatenated};
  const options sizes{.head_dim = head_dim, .heads = heads};
  const linear_model linear(o, weights, linear_model::attention_type(sizes));
  const softmax_model softmax(o, weights, softmax_model::attention_type(sizes, n + spare));

  const double linear_bytes = double(of.layers * linear.attention(0).state_bytes());
  const double cached_bytes = double(of.layers * softmax.attention(0).state_bytes(n));
  const double weight_bytes = double(linear.weight_bytes());
  const double linear_batch = std::floor((memory - weight_bytes) / linear_bytes);
  const double cached_batch = std::floor((memory - weight_bytes) / cached_bytes);
  // Enough that states are far beyond the caches, in whole blocks of 6 rows.
  const Index linear_measured = quick ? 12 : 768, cached_measured = quick ? 12 : n > 1000 ? 24 : 96;

  progress(of, "one image, linear");
  const auto linear_alone = seconds_alone(linear, n);
  progress(of, "one image, cached");
  const auto cached_alone = seconds_alone(softmax, n);
  const double bandwidth = read_bandwidth(linear.weight_bytes());
  progress(of, "batch, linear");
  const auto linear_batched = seconds_in_batch(linear, n, linear_measured, 2);
  progress(of, "batch, cached");
  const auto cached_batched = seconds_in_batch(softmax, n, cached_measured, 5);
  progress(of, "uncached");
  const std::array<double, 2> uncached = {seconds_uncached(softmax, n, 1), seconds_uncached(softmax, n, 2)};
  progress(of, "attention alone");
  const double linear_attention_seconds = attention_seconds(linear.attention(0), n, quick ? 64 : 8192, 2);  // 268 MiB
  const double cached_attention_seconds = attention_seconds(softmax.attention(0), n,
                                                            quick      ? 8
                                                            : n > 1000 ? 48
                                                                       : 192,
                                                            5);  // some 300 MB

  const double alone = mean(linear_alone, 0, n) * double(n), cached = mean(cached_alone, 0, n) * double(n);
  const auto row = [](const char* what, double a, double b, double c, bool is_rate) {
    const auto ratio = [&](double x) { return is_rate ? a / x : x / a; };
    std::printf("| %s | %.4g | %.4g (%.3g) | %.4g (%.4g) |\n", what, a, b, ratio(b), c, ratio(c));
  };
  std::printf("\n### %s: %td tokens, %td layers\n\nIn parentheses: how many times linear's time.\n\n", of.name, n,
              of.layers);
  std::printf("| | linear | softmax, cached | softmax, uncached |\n|---|---|---|---|\n");
  std::printf("| state, bytes a sequence | %.0f | %.0f | %td |\n", linear_bytes, cached_bytes, 8 * n);
  std::printf("| sequences in 8 GiB, weights included | %.0f | %.0f | any, one after the other |\n", linear_batch,
              cached_batch);
  row("one image alone, s, 1 thread", alone, cached, uncached[0], false);
  row("the paper's, CPU", of.cpu_seconds[0], of.cpu_seconds[1], of.cpu_seconds[2], false);
  row("largest batch, images/s, 1 thread", 1 / linear_batched[0], 1 / cached_batched[0], 1 / uncached[0], true);
  row("largest batch, images/s, 2 threads", 1 / linear_batched[1], 1 / cached_batched[1], 1 / uncached[1], true);
  row("the paper's, GPU", of.gpu_images[0], of.gpu_images[1], of.gpu_images[2], true);
  row("GFLOP an image", 1e-9 * of.linear_flops(), 1e-9 * of.cached_flops(), 1e-9 * of.uncached_flops(false), false);
  row("the same, causal pairs only, as computed here", 1e-9 * of.linear_flops(), 1e-9 * of.cached_flops(),
      1e-9 * of.uncached_flops(true), false);
  std::printf("| attention alone, us a token and layer | %.3g | %.3g (%.3g; bytes moved %.3g) | |\n",
              1e6 * linear_attention_seconds, 1e6 * cached_attention_seconds,
              cached_attention_seconds / linear_attention_seconds, of.byte_ratio());
  std::printf(
      "\nOne image alone: every token measured. Largest batch: steps of %td sequences (linear) at 2 positions and of "
      "%td "
      "(cached) at 5, whose states are far beyond the caches as those of the largest are; straight lines between. "
      "Uncached: passes at 12 positions, straight lines between; on two threads an image each.\n",
      linear_measured, cached_measured);

  std::printf("\n| tokens/s alone, at position |");
  constexpr Index windows = 6;
  for (Index i = 0; i < windows; ++i) std::printf(" %td |", n * (2 * i + 1) / (2 * windows));
  std::printf("\n|---|---|---|---|---|---|---|\n");
  for (const auto& [name, taken] : {std::pair("linear", &linear_alone), std::pair("softmax, cached", &cached_alone)}) {
    std::printf("| %s |", name);
    for (Index i = 0; i < windows; ++i)
      std::printf(" %.0f |", 1 / mean(*taken, n * i / windows, n * (i + 1) / windows));
    std::printf("\n");
  }

  const double peak = fma_peak<float>();
  batch<linear_model> sixty_four(linear, 64);
  sixty_four.step(1, 1);
  const double step = sixty_four.step(1, 5);
  std::printf(
      "\n* One sequence: a step streams its %.1f MB of weights at %.1f GB/s, %.2f of the %.1f GB/s that reading a "
      "buffer of that size reaches\n",
      1e-6 * weight_bytes, 1e-9 * weight_bytes * double(n) / alone, weight_bytes * double(n) / alone / bandwidth,
      1e-9 * bandwidth);
  std::printf(
      "* 64 sequences: the matrix products run at %.2f of the %.0f GFLOP/s peak; the whole step at %.2f, its "
      "products' flops counted alone\n",
      product_rate(weights, 64) / peak, 1e-9 * peak, 64 * of.product_flops() / step / peak);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc == 2 && std::strcmp(argv[1], "--quick") == 0;
  if (argc > 2 || (argc == 2 && !quick)) {
    std::fprintf(stderr, "usage: bench_generation [--quick]\n");
    return 2;
  }
  report({"MNIST-like", quick ? 98 : 784, quick ? 2 : 8, {142.8, 7.56, 0.45}, {5.5, 7.4, 72.6}}, quick);
  report({"CIFAR-like", quick ? 192 : 3072, quick ? 2 : 16, {17.85, 0.32, 0.004}, {45.1, 71.9, 8651.4}}, quick);
  return 0;
}
