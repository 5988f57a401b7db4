// What a level's answers are compared with: the causal equation in double, by plain loops, in the program's own code.
//
//     out_i = sum_{j <= i} w_ij v_j / sum_{j <= i} w_ij,   w_ij = phi(q_i).phi(k_j),   phi(x) = elu(x) + 1
#pragma once

#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <vector>

inline constexpr std::int64_t heads = 2, head_dim = 16, width = heads * head_dim;
inline constexpr std::int64_t tokens = 100, prompt = 92;

// Weighted means of numbers up to 1, each weight and each sum within some rounding errors a token.
inline constexpr double tolerance = static_cast<double>(tokens) * std::numeric_limits<float>::epsilon();

struct sequence {
  std::vector<float> q = wave(0.3F), k = wave(0.7F), v = wave(1.1F);

  static std::vector<float> wave(float frequency) {  // (tokens, width)
    std::vector<float> x(tokens * width);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(frequency * static_cast<float>(i));
    return x;
  }
};

inline std::vector<double> oracle(const sequence& x) {
  const auto phi = [](float value) { return value > 0 ? value + 1.0 : std::exp(static_cast<double>(value)); };
  std::vector<double> out(tokens * width);
  for (std::size_t i = 0; i < tokens; ++i) {
    for (std::size_t head = 0; head < width; head += head_dim) {
      double sum = 0;
      for (std::size_t j = 0; j <= i; ++j) {
        double w = 0;
        for (std::size_t d = head; d < head + head_dim; ++d) w += phi(x.q[i * width + d]) * phi(x.k[j * width + d]);
        for (std::size_t m = head; m < head + head_dim; ++m) out[i * width + m] += w * x.v[j * width + m];
        sum += w;
      }
      for (std::size_t m = head; m < head + head_dim; ++m) out[i * width + m] /= sum;
    }
  }
  return out;
}

using session = std::unique_ptr<attention_session, void (*)(attention_session*) noexcept>;
inline session open(const attention_table& level) { return {level.open(head_dim, heads), level.close}; }

// Runs tokens first ... last - 1; the largest error of theirs, infinite if one is not a number.
inline double worst_error(const attention_table& level, attention_session* in, std::int64_t first, std::int64_t last) {
  static const sequence x;
  static const std::vector<double> expected = oracle(x);
  std::vector<float> out(tokens * width);
  const auto at = first * width;
  level.forward(in, x.q.data() + at, x.k.data() + at, x.v.data() + at, out.data() + at, last - first);
  double worst = 0;
  for (auto i = static_cast<std::size_t>(at); i < static_cast<std::size_t>(last * width); ++i) {
    const double error = std::abs(out[i] - expected[i]);
    worst = error <= worst ? worst : std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
  }
  return worst;
}

// The prompt at once, then token by token.
inline double worst_error(const attention_table& level) {
  const session s = open(level);
  double worst = worst_error(level, s.get(), 0, prompt);
  for (std::int64_t i = prompt; i < tokens; ++i) worst = std::max(worst, worst_error(level, s.get(), i, i + 1));
  return worst;
}

// The state after the prompt, as one level leaves it ...
inline std::vector<std::byte> record_of_prompt(const attention_table& level) {
  const session s = open(level);
  worst_error(level, s.get(), 0, prompt);
  std::vector<std::byte> record(level.saved_bytes(s.get()));
  level.save(s.get(), record.data());
  return record;
}

// ... and the tokens after it, as any level goes on from there.
inline double worst_error_after(const attention_table& level, std::span<const std::byte> record) {
  const session s = open(level);
  if (!level.load(s.get(), record.data(), record.size())) return std::numeric_limits<double>::infinity();
  return worst_error(level, s.get(), prompt, tokens);
}
