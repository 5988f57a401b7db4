// A prompt at once, then token by token; a copy of the state is a fork of the sequence, its bytes a record for later.
#include <linattn/linattn.hpp>
#include <linattn/state_io.hpp>

#include <iostream>
#include <sstream>

using matrix = linattn::row_matrix<float>;
constexpr float tolerance = 1e-5F;  // the same sums of 100 terms, rounded in another order

int main() {
  constexpr Eigen::Index tokens = 100, prompt = 92, width = 32;
  const matrix q = matrix::Random(tokens, width), k = matrix::Random(tokens, width), v = matrix::Random(tokens, width);
  bool correct = true;

  const linattn::linear_attention<linattn::elu_plus_one> attn({.head_dim = 16, .heads = 2});
  auto ws = attn.make_workspace();  // scratch: one for each thread
  auto s = attn.make_state();       // memory: one for each sequence
  matrix out(tokens, width);

  attn.forward_causal(s, q.topRows(prompt), k.topRows(prompt), v.topRows(prompt), out.topRows(prompt), ws);
  for (Eigen::Index t = prompt; t < tokens; ++t) {
    attn.step(s, q.row(t), k.row(t), v.row(t), out.row(t), ws);
  }
  std::cout << s.tokens() << " tokens in " << attn.state_bytes() << " bytes\n";
  correct = correct && out.isApprox(attn.forward_causal(q, k, v), tolerance);

  auto fork = s;  // the sequence goes on twice, from here
  linattn::row_vector<float> a(width), b(width);
  attn.step(s, q.row(0), k.row(0), v.row(0), a, ws);
  attn.step(fork, q.row(0), k.row(0), v.row(0), b, ws);
  correct = correct && a == b;
  fork = s;  // assignment rolls back, or forward, without allocating

  auto first = attn.make_state(), second = attn.make_state();
  attn.absorb(first, k.topRows(50), v.topRows(50), ws);
  attn.absorb(second, k.bottomRows(50), v.bottomRows(50), ws);
  first.merge(second);  // as if the 100 keys had been absorbed in turn
  matrix answers(1, width), weights(1, 2);
  attn.read(first, q.row(0), answers, ws, weights);  // weights (1, H): phi(q).z, the evidence behind each answer
  std::cout << first.tokens() << " keys behind one answer\n";
  correct = correct && (weights.array() > 0).all();

  std::stringstream file;  // or an std::ofstream, opened with std::ios::binary
  linattn::save(attn, s, file);
  auto loaded = attn.make_state();
  linattn::load(attn, loaded, file);
  attn.step(s, q.row(1), k.row(1), v.row(1), a, ws);
  attn.step(loaded, q.row(1), k.row(1), v.row(1), b, ws);
  std::cout << "loaded: " << (a == b ? "the same bits" : "DIFFERENT") << "\n";
  return correct && a == b ? 0 : 1;
}
