// 09_gated_delta_decode: prefill, decode, and back again: what an inference engine does with a Gated DeltaNet layer.
//
//     4,096 tokens      256 tokens           256 tokens
//     forward_causal -> step step ... -> |   step step ...   the same bits as the first time
//                    |                   |   ^
//                    snapshot = state    state = snapshot
//
// The rule: S = a S + beta k (v - a S^T k)^T, out = S^T q. Decays and betas come from raw projections as the model's
// public code has them (gates.hpp). A state is a value: copying it is the snapshot, assigning it the way back.
#include <linattn/gates.hpp>
#include <linattn/linattn.hpp>

#include <chrono>
#include <cstdio>
#include <random>

namespace {

using matrix = linattn::row_matrix<float>;
using vector = linattn::row_vector<float>;
using Eigen::Index;

constexpr Index heads = 16, dim = 128, prompt = 4096, decoded = 256, tokens = prompt + decoded;

matrix normal(Index rows, Index cols, unsigned seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> draw;
  return matrix::NullaryExpr(rows, cols, [&] { return draw(bits); });
}

/// The layer after its projections: what the rule takes.
struct layer_inputs {
  matrix q = normal(tokens, heads* dim, 1);
  matrix k = normal(tokens, heads* dim, 2);
  matrix v = normal(tokens, heads* dim, 3);
  matrix log_decay{tokens, heads};
  matrix beta{tokens, heads};

  layer_inputs() {
    linattn::l2_normalize(q, heads, q);
    linattn::l2_normalize(k, heads, k);
    const vector a_log = vector::Zero(heads), dt_bias = vector::Constant(heads, -4);  // learned, in a model
    linattn::gated_delta_net_gate(normal(tokens, heads, 4), a_log, dt_bias, log_decay);
    linattn::sigmoid_beta(normal(tokens, heads, 5), beta);
  }
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int main() {
  const linattn::linear_attention<linattn::identity, linattn::gated_delta<>> attention(
      {.head_dim = dim, .heads = heads, .query_scale = 1 / std::sqrt(double(dim))});
  const layer_inputs x;
  auto workspace = attention.make_workspace();
  auto state = attention.make_state();
  matrix out(tokens, heads * dim);

  auto start = std::chrono::steady_clock::now();
  attention.forward_causal(state, x.q.topRows(prompt), x.k.topRows(prompt), x.v.topRows(prompt),
                           {.log_decay = x.log_decay.topRows(prompt), .beta = x.beta.topRows(prompt)},
                           out.topRows(prompt), workspace);
  std::printf("prefill   %4ld tokens  %7.0f tokens/s, one layer of %ld heads of %ld, one core\n", long(prompt),
              double(prompt) / seconds_since(start), long(heads), long(dim));

  const auto decode = [&] {
    for (Index t = prompt; t < tokens; ++t) {
      attention.step(state, x.q.row(t), x.k.row(t), x.v.row(t),
                     {.log_decay = x.log_decay.row(t), .beta = x.beta.row(t)}, out.row(t), workspace);
    }
  };
  const auto snapshot = state;
  start = std::chrono::steady_clock::now();
  decode();
  std::printf("decode    %4ld tokens  %7.0f tokens/s\n", long(decoded), double(decoded) / seconds_since(start));

  const matrix first = out.bottomRows(decoded);
  out.bottomRows(decoded).setZero();
  start = std::chrono::steady_clock::now();
  state = snapshot;
  std::printf("roll back                 %.0f us for %.1f MB\n", seconds_since(start) * 1e6,
              double(heads * dim * dim) * sizeof(float) * 1e-6);
  decode();
  const bool identical = (first.array() == out.bottomRows(decoded).array()).all();
  std::printf("decode again               %s\n", identical ? "the same bits" : "DIFFERENT");
  return identical && first.allFinite() ? 0 : 1;
}
