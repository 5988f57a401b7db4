// 03_multi_head: all heads of a layer in one call, read where they lie.
//
//     one token, one row:   | q: head 0 ... H-1 | k: head 0 ... H-1 | v: head 0 ... H-1 |      (N, 3 H D)
//                           middleCols(0, H D)    middleCols(H D, H D)   ...
//
// A layer's projection leaves q, k and v side by side in one matrix. Blocks of columns are passed as they are: a view
// is a pointer, two sizes and a row stride, and nothing is copied.

#include <linattn/linattn.hpp>

#include <cmath>
#include <iostream>
#include <limits>

int main() {
  using matrix = linattn::row_matrix<float>;
  constexpr Eigen::Index tokens = 50, heads = 4, head_dim = 8, width = heads * head_dim;
  matrix qkv(tokens, 3 * width);
  for (Eigen::Index i = 0; i < qkv.size(); ++i) qkv.data()[i] = std::sin(0.37F * static_cast<float>(i));

  const auto q = qkv.middleCols(0, width), k = qkv.middleCols(width, width), v = qkv.middleCols(2 * width, width);
  const linattn::linear_attention<linattn::elu_plus_one> layer({.head_dim = head_dim, .heads = heads});
  const matrix packed = layer.forward_causal(q, k, v);  // (N, H*M)

  // Heads know nothing of each other: head h is what a layer of one head makes of columns h*D ... (h + 1)*D - 1.
  const linattn::linear_attention<linattn::elu_plus_one> head({.head_dim = head_dim});
  auto workspace = head.make_workspace();
  matrix single(tokens, width);
  for (Eigen::Index h = 0; h < heads; ++h) {
    const Eigen::Index first = h * head_dim;
    head.forward_causal(q.middleCols(first, head_dim), k.middleCols(first, head_dim), v.middleCols(first, head_dim),
                        single.middleCols(first, head_dim), workspace);  // outputs are views, too
  }

  // The same 50 terms are summed; a different packing may order them differently.
  constexpr float tolerance = tokens * std::numeric_limits<float>::epsilon();
  const float difference = (packed - single).cwiseAbs().maxCoeff<Eigen::PropagateNaN>();
  std::cout << heads << " packed heads differ from " << heads << " single ones by " << difference << "\n";
  return difference <= tolerance ? 0 : 1;
}
