// 02_streaming: read a prompt at once, then go on token by token from where it ended.
//
//     prompt (N - 8 tokens)              continuation (8 tokens)
//     |--------- forward_causal --------|- step - step - step ... |
//                                       |
//                                       state: S += phi(k) v^T, z += phi(k), of constant size
//
// The outputs are those of one call over all N tokens. Nothing allocates after make_workspace.

#include <linattn/linattn.hpp>

#include <cmath>
#include <iostream>
#include <limits>

int main() {
  using matrix = linattn::row_matrix<float>;
  constexpr Eigen::Index tokens = 100, prompt = 92, heads = 2, head_dim = 16, width = heads * head_dim;
  matrix q(tokens, width), k(tokens, width), v(tokens, width);
  for (Eigen::Index i = 0; i < q.size(); ++i) {
    const float x = static_cast<float>(i);
    q.data()[i] = std::sin(0.3F * x);
    k.data()[i] = std::cos(0.7F * x);
    v.data()[i] = std::sin(1.1F * x);
  }

  const linattn::linear_attention<linattn::elu_plus_one> attention({.head_dim = head_dim, .heads = heads});
  const matrix whole = attention.forward_causal(q, k, v);  // (N, H*M)

  auto workspace = attention.make_workspace();  // one per thread
  auto state = attention.make_state();          // one per sequence
  matrix out(tokens, width);
  attention.forward_causal(state, q.topRows(prompt), k.topRows(prompt), v.topRows(prompt), out.topRows(prompt),
                           workspace);
  for (Eigen::Index i = prompt; i < tokens; ++i) {
    attention.step(state, q.row(i), k.row(i), v.row(i), out.row(i), workspace);
  }

  // Both sum the same 100 terms, in another order: each addition may round the other way.
  constexpr float tolerance = tokens * std::numeric_limits<float>::epsilon();
  const float difference = (out - whole).cwiseAbs().maxCoeff<Eigen::PropagateNaN>();
  std::cout << state.tokens() << " tokens in a state of " << heads * (state.kv(0).size() + state.k_sum(0).size())
            << " numbers; prompt and steps differ from the whole by " << difference << "\n";
  return difference <= tolerance ? 0 : 1;
}
