// A trained transformer whose attention is linear, run as the recurrent network that it is.
#include <linattn/linattn.hpp>
#include <linattn/sampling.hpp>
#include <linattn/transformer_io.hpp>

#include <iostream>
#include <vector>

int main() {
  const auto file =
      linattn::load_transformer<float>(linattn::safetensors_file::open("examples/data/digits_linear.safetensors"));
  using attention = linattn::linear_attention<linattn::elu_plus_one, linattn::normalized<linattn::decay>>;
  const linattn::transformer<attention> model(file.options, file.weights,
                                              attention(file.attention, {}, {linattn::decay(file.log_decay)}));

  auto ws = model.make_workspace(64);  // of up to 64 tokens, or sequences, at once
  auto s = model.make_state();
  linattn::row_matrix<float> logits(1, model.outputs());  // of the last token; (N, outputs) would take all of them
  linattn::sampler draw({.temperature = 0.8, .seed = 7});

  const std::vector<Eigen::Index> prompt = {17 + 3};  // 17 grey levels are symbols 0 ... 16, digits those behind
  model.forward_causal(s, prompt, logits, ws);
  for (int i = 0; i < 64; ++i) {  // 8 x 8 pixels
    const Eigen::Index pixel = draw(logits.row(0));
    std::cout << " .:-=+*#%@"[pixel * 9 / 16] << (i % 8 == 7 ? "\n" : "");
    if (i < 63) model.step(s, pixel, logits.row(0), ws);  // or step(span of states, symbols, logits, ws): a batch
  }
  return logits.allFinite() ? 0 : 1;
}
