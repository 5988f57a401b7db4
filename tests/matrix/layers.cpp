// What stands around the attention: gates, norm, convolution, cached softmax, transformer, weights, samples.
#include "matrix.hpp"

#include "support/transformer_inputs.hpp"

#include <linattn/check_feature_map.hpp>
#include <linattn/gated_rms_norm.hpp>
#include <linattn/linattn.hpp>
#include <linattn/mixture_of_logistics.hpp>
#include <linattn/models.hpp>
#include <linattn/sampling.hpp>
#include <linattn/short_convolution.hpp>
#include <linattn/softmax_cache.hpp>
#include <linattn/transformer.hpp>
#if __has_include(<nlohmann/json.hpp>)
#include <linattn/transformer_io.hpp>
#endif

#include <cmath>
#include <sstream>

namespace matrix::of_layers {

using row_matrix = linattn::row_matrix<float>;
constexpr Index N = 12, D = 4, H = 2;

bool small_layers() {
  const row_matrix x = support::normal_matrix<float>(N, H * D, 1), gate = support::normal_matrix<float>(N, H * D, 2);
  row_matrix y(N, H * D), decays(N, H * D);
  linattn::gated_rms_norm(x, gate, {}, y, {.heads = H, .activation = linattn::gate_activation::sigmoid});
  const row_matrix head = x.row(3).tail(D);
  const float scale = 1 / std::sqrt(head.squaredNorm() / float(D) + 1e-6F);
  const row_matrix expected = (head.array() * scale / (1 + (-gate.row(3).tail(D).array()).exp())).matrix();
  bool good = check(close(y.row(3).tail(D), expected), "gated_rms_norm", "one head");
  linattn::log_sigmoid_gate(x, decays, 1);
  good &= check(close(decays.array().exp().matrix(), (1 / (1 + (-x.array()).exp())).matrix()), "gates", "log_sigmoid");

  const row_matrix taps = support::normal_matrix<float>(H * D, 4, 3);
  const linattn::short_convolution<float> convolution(taps, {}, linattn::convolution_activation::silu);
  auto s = convolution.make_state(), t = convolution.make_state();
  row_matrix stepped(N, H * D);
  convolution.forward(s, x, y);
  for (Index i = 0; i < N; ++i) convolution.step(t, x.row(i), stepped.row(i));
  good &= check(close(stepped, y), "short_convolution", "step");
  return good;
}

bool model_by_name() {
  const row_matrix q = support::normal_matrix<float>(N, H * D, 1), v = support::normal_matrix<float>(N, H * D, 3);
  const linattn::retention<float> retention({.head_dim = D, .heads = H});
  const row_matrix out = retention.forward_causal(q, q, v);
  bool good = check(close(out.row(0).head(D), row_matrix(q.row(0).head(D).squaredNorm() / 2 * v.row(0).head(D))),
                    "retention", "first token");

  good &= check(linattn::check_feature_map(linattn::elu_plus_one(), D).passed, "check_feature_map", "elu + 1");
  return good;
}

/// Steps against the whole sequence.
template <class Attention>
bool model(const char* name, const Attention& attn) {
  const auto weights = support::random_transformer<float>(
      {.layers = 2, .width = 9, .query_width = H * D, .value_width = H * D, .feed_forward = 11, .symbols = 7}, 4);
  const linattn::transformer<Attention> model({.wiring = linattn::wiring::pre_norm}, weights, attn);
  const auto x = support::random_symbols(N, 7, 5);
  const row_matrix whole = model.forward_causal(x);
  row_matrix stepped(N, model.outputs());
  auto s = model.make_state();
  auto ws = model.make_workspace(1);
  for (Index i = 0; i < N; ++i) model.step(s, x[std::size_t(i)], stepped.row(i), ws);
  return check(close(stepped, whole), name, "transformer, step");
}

bool samples() {
  const linattn::row_vector<float> logits = support::normal_matrix<float>(1, 9, 6);
  Index largest = 0;
  logits.maxCoeff(&largest);
  linattn::sampler draw({.temperature = 0.8, .top_p = 0.01, .seed = 1}, 9);
  bool good = check(linattn::greedy(logits) == largest && draw(logits) == largest, "sampling", "greedy, top_p");
  double sum = 0;
  const linattn::mixture_of_logistics mixture(3, 8);
  for (Index level = 0; level < 8; ++level) sum += std::exp(mixture.log_likelihood(logits, level));
  good &= check(std::abs(sum - 1) < 1e-5, "mixture_of_logistics", "sum of probabilities");
  return good;
}

bool weights_in_files() {
#if __has_include(<nlohmann/json.hpp>)
  const row_matrix w = support::normal_matrix<float>(3, 5, 7);
  std::stringstream to;
  linattn::save_safetensors(to, {{"w", w}}, {{"heads", "2"}});
  const std::string text = to.str();
  const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
  const auto file = linattn::safetensors_file::parse({bytes, bytes + text.size()});
  row_matrix read(3, 5);
  file.copy("w", read);
  return check(read == w && file.metadata().at("heads") == "2", "safetensors", "save, parse");
#else
  return true;
#endif
}

}  // namespace matrix::of_layers

bool matrix::layers() {
  using namespace of_layers;
  bool good = small_layers();
  good &= model_by_name();
  good &= samples();
  good &= weights_in_files();
  good &= model("linear attention", linattn::linear_attention<linattn::elu_plus_one>({.head_dim = D, .heads = H}));
  good &= model("softmax", linattn::cached_softmax<float>({.head_dim = D, .heads = H}, N));
  return good;
}
