// Heads that share, by the definition of options.hpp written again: what the operator of separate heads is given, and
// how its gradients add up.
#pragma once

#include <linattn/options.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <string>

namespace support {

/// Number `head` of `many` uses this one of `few`.
inline Eigen::Index shared(linattn::head_sharing how, Eigen::Index head, Eigen::Index few, Eigen::Index many) {
  return how == linattn::head_sharing::tiled ? head % few : head * few / many;
}

/// Heads of q, of k and of v.
struct head_counts {
  Eigen::Index queries, keys, values;

  Eigen::Index outputs() const { return std::max(queries, values); }
  /// What an output head reads.
  Eigen::Index state_of(linattn::head_sharing how, Eigen::Index output) const {
    return shared(how, output, values, outputs());
  }
  Eigen::Index query_of(linattn::head_sharing how, Eigen::Index output) const {
    return shared(how, output, queries, outputs());
  }
  Eigen::Index key_of(linattn::head_sharing how, Eigen::Index output) const {
    return shared(how, state_of(how, output), keys, values);
  }
  std::string name(linattn::head_sharing how) const {
    return std::to_string(queries) + " heads, " + std::to_string(keys) + " key heads, " + std::to_string(values) +
           " value heads, " + (how == linattn::head_sharing::tiled ? "tiled" : "interleaved");
  }
};

/// Heads `from(0), from(1), ...` of x side by side.
template <class Matrix, class From>
Matrix heads_of(const Matrix& x, Eigen::Index count, Eigen::Index dim, const From& from) {
  Matrix all(x.rows(), count * dim);
  for (Eigen::Index h = 0; h < count; ++h) all.middleCols(h * dim, dim) = x.middleCols(from(h) * dim, dim);
  return all;
}

/// The other way: `count` heads, of which number from(h) is the sum of those h of x.
template <class Matrix, class From>
Matrix sums_of_heads(const Matrix& x, Eigen::Index count, Eigen::Index dim, const From& from) {
  Matrix sums = Matrix::Zero(x.rows(), count * dim);
  for (Eigen::Index h = 0; h * dim < x.cols(); ++h) sums.middleCols(from(h) * dim, dim) += x.middleCols(h * dim, dim);
  return sums;
}

}  // namespace support
