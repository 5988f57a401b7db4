// demo_million_tokens: one long sequence, token by token, through linear attention and through softmax attention.
//
//     demo_million_tokens [--quick]       2^20 tokens in under half a minute; --quick: 2^14 in about a second
//
// Both attend from every token to all tokens before it, 8 heads of 64 coordinates, on one thread:
//
//     linear    S += phi(k) v^T, z += phi(k), out = phi(q) S / phi(q) z     O(1) a token, the state never grows
//     softmax   the cache of keys and values grows by one row a head,       O(n) a token at position n
//               out = softmax(q K^T / sqrt(D)) V over all of it
//
// so that N tokens cost O(N) and O(N^2). The softmax side runs until its time budget is spent; its later rows are a
// straight line through the measured ones. Tokens are a function of their position: none are stored, and three rows of
// the linear output can be checked against the sum over all pairs (eq. 3, in double) at the end.
//
// Exit code: 0; 1 if a check fails; 2 for an unknown argument.

#include <linattn/linattn.hpp>
#include <linattn/reference.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace {

using Eigen::Index;
using row = linattn::row_vector<float>;
using matrix = linattn::row_matrix<float>;
using clock_type = std::chrono::steady_clock;

constexpr Index heads = 8;      // H
constexpr Index head_dim = 64;  // D = M = C
constexpr Index width = heads * head_dim;

double seconds_since(clock_type::time_point start) {
  return std::chrono::duration<double>(clock_type::now() - start).count();
}

/// Query, key and value of one token, (1, H*D) each: uniform, mean 0, variance 1, each number a hash of where it
/// stands.
struct token {
  row q = row(width), k = row(width), v = row(width);

  void generate(Index position) {
    generate_query(position);
    generate_key_and_value(position);
  }
  void generate_query(Index position) { fill(q, position, 0x2545f491U); }
  void generate_key_and_value(Index position) {
    fill(k, position, 0x9e3779b9U);
    fill(v, position, 0x7f4a7c15U);
  }

 private:
  static void fill(row& out, Index position, std::uint32_t seed) {
    float* const x = out.data();
    const std::uint32_t first = static_cast<std::uint32_t>(position) * static_cast<std::uint32_t>(width);
    for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(width); ++i) {
      std::uint32_t hash = (first + i) ^ seed;
      hash = (hash ^ hash >> 16) * 0x85ebca6bU;
      hash = (hash ^ hash >> 13) * 0xc2b2ae35U;
      hash ^= hash >> 16;
      constexpr float unit = 0x1p-23f * 1.7320508f;
      x[i] = static_cast<float>(static_cast<std::int32_t>(hash >> 8) - (1 << 23)) * unit;
    }
  }
};

/// Softmax attention as a decoder runs it: keys and values of each head contiguous, two matrix-vector products a head.
class softmax_decoder {
 public:
  void step(const token& t, row& out) {
    ++m_tokens;
    if (m_weights.size() < m_tokens) m_weights.resize(2 * m_tokens);
    for (Index h = 0; h < heads; ++h) {
      std::vector<float>& keys = m_keys[static_cast<std::size_t>(h)];
      std::vector<float>& values = m_values[static_cast<std::size_t>(h)];
      keys.insert(keys.end(), t.k.data() + h * head_dim, t.k.data() + (h + 1) * head_dim);
      values.insert(values.end(), t.v.data() + h * head_dim, t.v.data() + (h + 1) * head_dim);

      const Eigen::Map<const matrix> K(keys.data(), m_tokens, head_dim);    // (n, D)
      const Eigen::Map<const matrix> V(values.data(), m_tokens, head_dim);  // (n, M)
      auto w = m_weights.head(m_tokens);                                    // (1, n)
      const row q = t.q.segment(h * head_dim, head_dim) / std::sqrt(static_cast<float>(head_dim));
      w.transpose().noalias() = K * q.transpose();
      w = (w.array() - w.maxCoeff()).exp();
      out.segment(h * head_dim, head_dim).noalias() = w * V;
      out.segment(h * head_dim, head_dim) /= w.sum();
    }
  }
  Index tokens() const { return m_tokens; }

 private:
  Index m_tokens = 0;
  row m_weights;
  std::array<std::vector<float>, static_cast<std::size_t>(heads)> m_keys, m_values;
};

/// Row `position` of eq. 3 with phi(x) = elu(x) + 1: a plain sum over all earlier tokens, in double.
linattn::row_vector<double> quadratic_row(Index position) {
  using vector = linattn::row_vector<double>;
  const auto phi = [](const row& x) {
    const Eigen::ArrayXd wide = x.transpose().cast<double>();
    return vector(wide.max(0.0) + wide.min(0.0).exp());
  };
  token t;
  t.generate_query(position);
  const vector phi_q = phi(t.q);
  vector phi_k(width), v(width);
  vector sum = vector::Zero(width), weights = vector::Zero(heads);  // (1, H*M), (1, H)
  for (Index j = 0; j <= position; ++j) {
    t.generate_key_and_value(j);
    phi_k = phi(t.k);
    v = t.v.cast<double>();
    for (Index h = 0; h < heads; ++h) {
      const Index at = h * head_dim;
      const double similarity = phi_q.segment<head_dim>(at).dot(phi_k.segment<head_dim>(at));
      sum.segment<head_dim>(at) += similarity * v.segment<head_dim>(at);
      weights[h] += similarity;
    }
  }
  for (Index h = 0; h < heads; ++h) sum.segment<head_dim>(h * head_dim) /= weights[h];
  return sum;
}

/// How far `actual` is from `expected`, relative to the size of `expected`.
double relative_rms(const row& actual, const linattn::row_vector<double>& expected) {
  return (actual.cast<double>() - expected).norm() / expected.norm();
}

/// a + b n, least squares.
struct line {
  double n = 0, x = 0, y = 0, xx = 0, xy = 0;
  void add(double position, double value) {
    n += 1, x += position, y += value, xx += position * position, xy += position * value;
  }
  double slope() const { return (n * xy - x * y) / (n * xx - x * x); }
  double at(double position) const { return y / n + slope() * (position - x / n); }
};

std::string bytes_text(double bytes) {
  const std::array<const char*, 5> units = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < units.size(); ++unit) bytes /= 1024;
  std::array<char, 32> text = {};
  std::snprintf(text.data(), text.size(), bytes < 10 && unit > 0 ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
  return text.data();
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc == 2 && std::string_view(argv[1]) == "--quick";
  if (argc > 2 || (argc == 2 && !quick)) {
    std::fprintf(stderr, "usage: demo_million_tokens [--quick]\n");
    return 2;
  }
  const Index tokens = Index(1) << (quick ? 14 : 20);
  const double softmax_budget = quick ? 0.5 : 10;  // seconds
  const std::array<Index, 3> checked = {tokens / 1024 - 1, tokens / 32 - 1, tokens - 1};

  const linattn::linear_attention<linattn::elu_plus_one> attention({.head_dim = head_dim, .heads = heads});
  auto state = attention.make_state();
  auto workspace = attention.make_workspace();
  softmax_decoder softmax;
  token t;
  row out(width);

  {  // code, tables and scratch are brought in by a token that does not count
    auto warm_state = attention.make_state();
    softmax_decoder warm_softmax;
    t.generate(0);
    attention.step(warm_state, t.q, t.k, t.v, out, workspace);
    warm_softmax.step(t, out);
  }

  const double state_bytes = double(heads * (state.kv(0).size() + state.k_sum(0).size())) * sizeof(float);
  std::printf("%td tokens, %td heads x %td, float, one thread; nanoseconds are per token, all heads\n\n", tokens, heads,
              head_dim);
  std::printf("%9s %11s %10s %14s %10s %12s\n", "position", "linear ns", "state", "softmax ns", "KV cache",
              "QK^T in full");

  std::array<row, 3> checked_rows;
  line softmax_line;
  double linear_seconds = 0, softmax_seconds = 0, last_measured = 0;
  for (Index position = 1, begin = 0; position <= tokens; begin = position, position *= 2) {
    double segment = 0;  // seconds of the steps of tokens [begin, position), making the tokens not counted
    for (Index i = begin; i < position; ++i) {
      t.generate(i);
      const auto start = clock_type::now();
      attention.step(state, t.q, t.k, t.v, out, workspace);
      segment += seconds_since(start);
      for (std::size_t c = 0; c < checked.size(); ++c) {
        if (i == checked[c]) checked_rows[c] = out;
      }
    }
    linear_seconds += segment;

    const Index window = std::min<Index>(64, position - begin);  // tokens before `position` that its row is the mean of
    double in_window = 0;
    for (Index i = begin; i < position && softmax_seconds < softmax_budget; ++i) {
      t.generate(i);
      const auto start = clock_type::now();
      softmax.step(t, out);
      const double elapsed = seconds_since(start);
      softmax_seconds += elapsed;
      if (i >= position - window) in_window += elapsed;
    }
    const bool measured = softmax.tokens() == position;
    if (measured) {
      last_measured = 1e9 * in_window / double(window);
      softmax_line.add(double(position), last_measured);
    }

    const double n = double(position);
    std::printf("%9td %11.0f %10s %14.0f %10s %12s%s\n", position, 1e9 * segment / double(position - begin),
                bytes_text(state_bytes).c_str(), measured ? last_measured : softmax_line.at(n),
                bytes_text(2 * n * width * sizeof(float)).c_str(), bytes_text(n * n * heads * sizeof(float)).c_str(),
                measured ? "" : "   softmax extrapolated");
    std::fflush(stdout);
  }

  const double hours = (softmax_line.at(0) + softmax_line.at(double(tokens))) / 2 * double(tokens) * 1e-9 / 3600;
  std::printf(
      "\nall %td tokens: linear %.2f s (measured), softmax %.3g h (extrapolated from the first %td, which took %.1f "
      "s)\n",
      tokens, linear_seconds, hours, softmax.tokens(), softmax_seconds);
  std::printf(
      "FlashAttention changes the memory, not the time: it never stores the last column, but still computes all of "
      "it.\n");

  // The state is a sum of N terms in float: each addition rounds by at most epsilon / 2, at random, so that errors grow
  // as sqrt(N) epsilon / 2 of the sum; the factor leaves room for q and for the values' own cancellation.
  constexpr double headroom = 8;
  std::printf("\nchecking against the O(N^2) form in double:\n");
  bool correct = true;
  for (std::size_t c = 0; c < checked.size(); ++c) {
    const double rows = double(checked[c] + 1);
    const double tolerance = headroom * std::sqrt(rows) * double(std::numeric_limits<float>::epsilon()) / 2;
    const double difference = relative_rms(checked_rows[c], quadratic_row(checked[c]));
    const bool close = difference <= tolerance;
    correct = correct && close;
    std::printf("  row %8td: relative RMS difference %.1e, tolerance %.1e: %s\n", checked[c], difference, tolerance,
                close ? "ok" : "WRONG");
    std::fflush(stdout);
  }

  {  // the softmax side is no straw man only if it is softmax attention
    constexpr Index n = 64;
    constexpr double tolerance = 1e-5;  // Eigen's float exp and sums of 64 terms
    matrix q(n, width), k(n, width), v(n, width);
    softmax_decoder decoder;
    for (Index i = 0; i < n; ++i) {
      t.generate(i);
      q.row(i) = t.q, k.row(i) = t.k, v.row(i) = t.v;
      decoder.step(t, out);
    }
    const auto expected = linattn::softmax_attention<double>(q, k, v, {.heads = heads, .causal = true});
    const double difference = relative_rms(out, expected.row(n - 1));
    const bool close = difference <= tolerance;
    correct = correct && close;
    std::printf("  softmax row %4td: relative RMS difference %.1e, tolerance %.1e: %s\n", n - 1, difference, tolerance,
                close ? "ok" : "WRONG");
  }
  return correct ? 0 : 1;
}
