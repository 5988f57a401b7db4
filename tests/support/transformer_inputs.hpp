// Seeded weights and symbols for transformers, in which nothing is 0 or 1: what is left out of a sum shows.
#pragma once

#include "support/inputs.hpp"

#include <linattn/transformer_weights.hpp>

#include <Eigen/Core>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace support {

/// Matrices ~ N(0, 1 / inputs), so that rows keep their size; biases ~ N(0, 0.3^2), norms' weights 1 + N(0, 0.3^2).
template <class T>
linattn::transformer_weights<T> random_transformer(const linattn::transformer_sizes& n, std::uint64_t seed) {
  auto weights = linattn::make_transformer_weights<T>(n);
  std::uint64_t stream = 1000 * seed;
  linattn::for_each_tensor(weights, [&](const std::string& name, auto& tensor) {
    const bool is_matrix = tensor.rows() > 1 || !tensor.IsVectorAtCompileTime;
    const bool is_table = name == "embedding.weight" || name == "positions.weight";
    const double sigma = !is_matrix ? 0.3 : is_table ? 1 : 1 / std::sqrt(double(tensor.cols()));
    tensor = normal_matrix<T>(tensor.rows(), tensor.cols(), stream++, sigma);
    if (!is_matrix && name.ends_with(".weight")) tensor.array() += T(1);
  });
  return weights;
}

inline std::vector<Eigen::Index> random_symbols(Eigen::Index tokens, Eigen::Index symbols, std::uint64_t seed) {
  random_bits random(seed);
  std::vector<Eigen::Index> x(static_cast<std::size_t>(tokens));
  for (Eigen::Index& symbol : x) symbol = random.below(symbols);
  return x;
}

}  // namespace support
