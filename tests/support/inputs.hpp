// Seeded random inputs: the same bits from every compiler, standard library and set of flags.
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <cstdint>

namespace support {

template <class T>
using row_matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// 64 random bits at a time: a counter in steps of the golden ratio, scrambled by two multiplications (splitmix64).
class random_bits {
 public:
  explicit random_bits(std::uint64_t seed) : m_counter(seed * 0x2545f4914f6cdd1dULL + 0x9e3779b97f4a7c15ULL) {}

  std::uint64_t next() {
    m_counter += 0x9e3779b97f4a7c15ULL;
    std::uint64_t x = m_counter;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
  }

  /// Uniform in (0, 1): the middles of 2^52 intervals, exact in double.
  double uniform() { return (static_cast<double>(next() >> 12) + 0.5) * 0x1p-52; }

  /// Uniform in {0, ..., n - 1}.
  Eigen::Index below(Eigen::Index n) { return static_cast<Eigen::Index>(uniform() * static_cast<double>(n)); }

  /// N(0, 1) by comparing uniform numbers only. Logarithms and cosines differ between libraries in their last bits, and
  /// sums of products between compilers that fuse them; comparisons do not.
  ///
  /// |x| = k + f, k whole. k = 0, 1, ... is drawn with probability ~ e^(-k/2) and kept with e^(-k(k-1)/2): together
  /// e^(-k^2/2). f is uniform in (0, 1) and kept with e^(-f (2k + f) / 2), the rest of e^(-(k + f)^2 / 2).
  double normal() {
    for (;;) {
      int k = 0;
      while (happens_with_exp_of_minus_half()) ++k;
      if (!all_happen(k * (k - 1))) continue;
      const double f = uniform();
      int trials = k + 1;
      while (trials > 0 && happens_with_exp_of_minus(f, (2 * k + f) / (2 * k + 2))) --trials;
      if (trials == 0) return next() >> 63 ? k + f : -(k + f);
    }
  }

 private:
  /// Probability e^(-a b), 0 < a, b < 1: how long a run a > u_1 > u_2 > ... lasts, each member allowed in with
  /// probability b. A run of at least n members has probability (a b)^n / n!, so an even one e^(-a b).
  bool happens_with_exp_of_minus(double a, double b) {
    bool even = true;
    double last = a;
    for (;;) {
      const double u = uniform();
      if (u >= last || uniform() >= b) return even;
      last = u;
      even = !even;
    }
  }
  bool happens_with_exp_of_minus_half() {
    bool even = true;
    double last = 0.5;
    for (;;) {
      const double u = uniform();
      if (u >= last) return even;
      last = u;
      even = !even;
    }
  }
  bool all_happen(int times) {
    while (times > 0 && happens_with_exp_of_minus_half()) --times;
    return times == 0;
  }

  std::uint64_t m_counter;
};

/// (rows, cols) independent N(0, sigma^2), each rounded once to T.
template <class T>
row_matrix<T> normal_matrix(Eigen::Index rows, Eigen::Index cols, std::uint64_t seed, double sigma = 1) {
  random_bits random(seed);
  row_matrix<T> x(rows, cols);
  for (Eigen::Index i = 0; i < rows; ++i) {
    for (Eigen::Index j = 0; j < cols; ++j) x(i, j) = static_cast<T>(sigma * random.normal());
  }
  return x;
}

/// (rows, cols) independent and uniform in (low, high).
template <class T>
row_matrix<T> uniform_matrix(Eigen::Index rows, Eigen::Index cols, std::uint64_t seed, double low = 0,
                             double high = 1) {
  random_bits random(seed);
  row_matrix<T> x(rows, cols);
  for (Eigen::Index i = 0; i < rows; ++i) {
    for (Eigen::Index j = 0; j < cols; ++j) x(i, j) = static_cast<T>(std::fma(high - low, random.uniform(), low));
  }
  return x;
}

/// q, k (N, H D) and v (N, H M) of one test, from one seed.
template <class T>
struct attention_inputs {
  row_matrix<T> q, k, v;

  attention_inputs(Eigen::Index queries, Eigen::Index keys, Eigen::Index query_cols, Eigen::Index value_cols,
                   std::uint64_t seed, double sigma = 1)
      : q(normal_matrix<T>(queries, query_cols, 3 * seed, sigma)),
        k(normal_matrix<T>(keys, query_cols, 3 * seed + 1, sigma)),
        v(normal_matrix<T>(keys, value_cols, 3 * seed + 2, sigma)) {}
  attention_inputs(Eigen::Index tokens, Eigen::Index query_cols, Eigen::Index value_cols, std::uint64_t seed)
      : attention_inputs(tokens, tokens, query_cols, value_cols, seed) {}
};

}  // namespace support
