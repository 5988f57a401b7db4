// 08_softmax_approximation: linear attention in place of softmax attention. How close, how quick, and with which map?
//
//     softmax    sum_j exp(q_i.k_j / sqrt(D)) v_j / sum_j exp(q_i.k_j / sqrt(D))            every pair of tokens
//     random     exp(q.k / sqrt(D)) = the mean of phi(q).phi(k) over random features phi    every token once
//
// The variance of phi(q).phi(k), relative to its square, is (exp(|q' + k'|^2) - 1) / C for positive_random, with
// q' = q / D^(1/4): more features bring it down as 1 / C, larger queries and keys bring it up exponentially. So the
// size of the inputs decides whether a map will do, and the time at hand how many features it may have. Where inputs
// are so small that softmax hardly tells keys apart, the mean of all v is close, too, and is what a map has to beat.

#include <linattn/linattn.hpp>
#include <linattn/reference.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace {

using matrix = linattn::row_matrix<float>;
using Eigen::Index;

constexpr Index tokens = 256, head_dim = 32;
constexpr double sigmas[] = {0.25, 0.5, 1};  // standard deviations of queries and keys
constexpr std::size_t settings = std::size(sigmas);

matrix normal(double sigma, std::uint64_t seed) {
  std::mt19937_64 bits(seed);
  std::normal_distribution<float> distribution(0, float(sigma));
  return matrix::NullaryExpr(tokens, head_dim, [&] { return distribution(bits); });
}

struct problem {
  matrix q, k, v;
  matrix softmax;  // (N, M)
  double milliseconds;
};

template <class Call>
double milliseconds_of(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

problem make_problem(double sigma) {
  problem p{normal(sigma, 1), normal(sigma, 2), normal(1, 3), {}, 0};
  p.milliseconds = milliseconds_of([&] { p.softmax = linattn::softmax_attention(p.q, p.k, p.v); });
  return p;
}

struct row {
  std::string name;
  Index features;
  double errors[settings];
  double milliseconds;
};

/// make(p) is the map for a problem.
template <class Make>
row measure(const char* name, const std::vector<problem>& problems, Make make) {
  row result{name, 0, {}, std::numeric_limits<double>::infinity()};
  for (std::size_t i = 0; i < settings; ++i) {
    const problem& p = problems[i];
    // Maps with signed features are not normalised unless one says so: their denominators may come near 0.
    const linattn::linear_attention attention({.head_dim = head_dim, .normalize = true}, make(p));
    auto ws = attention.make_workspace();
    matrix out(tokens, head_dim);
    result.features = attention.features();
    for (int run = 0; run < 2; ++run) {  // the quickest run, which nothing interrupted
      const double time = milliseconds_of([&] { attention.forward(p.q, p.k, p.v, out, ws); });
      result.milliseconds = std::min(result.milliseconds, time);
    }
    result.errors[i] = (out - p.softmax).norm() / p.softmax.norm();
  }
  return result;
}

void print(const row& r) {
  std::printf("%-18s%6td", r.name.c_str(), r.features);
  for (const double error : r.errors) std::printf("%12.3f", error);
  std::printf("%12.2f\n", r.milliseconds);
}

}  // namespace

int main() {
  std::vector<problem> problems;
  for (const double sigma : sigmas) problems.push_back(make_problem(sigma));

  std::printf("N = %td, D = M = %td, not causal. Error of the output, |out - softmax| / |softmax|:\n\n", tokens,
              head_dim);
  std::printf("%-18s%6s", "map", "C");
  for (const double sigma : sigmas) std::printf("  sigma %4.2f", sigma);
  std::printf("%12s\n%-18s%6s%12s%12s%12s%12.2f\n", "ms", "softmax, in loops", "", "", "", "",
              problems[0].milliseconds);
  row mean{"mean of v", 1, {}, 0};
  for (std::size_t i = 0; i < settings; ++i) {
    const problem& p = problems[i];
    mean.errors[i] = (p.softmax.rowwise() - p.v.colwise().mean()).norm() / p.softmax.norm();
  }
  print(mean);
  print(measure("elu_plus_one", problems, [](const problem&) { return linattn::elu_plus_one(); }));

  constexpr std::uint64_t seed = 7;
  constexpr linattn::random_feature_options orthogonal = {.rows = linattn::random_rows::orthogonal};
  std::vector<row> rows;
  for (const Index c : {64, 256, 1024}) {
    rows.push_back(measure("random_fourier", problems, [&](const problem&) {
      return linattn::random_fourier<float>(head_dim, c, seed, orthogonal);
    }));
    rows.push_back(measure("positive_random", problems, [&](const problem&) {
      return linattn::positive_random<float>(head_dim, c, seed, orthogonal);
    }));
    rows.push_back(measure("hyperbolic", problems,
                           [&](const problem&) { return linattn::hyperbolic<float>(head_dim, c, seed, orthogonal); }));
    rows.push_back(measure("gerf, optimal A", problems, [&](const problem& p) {
      return linattn::gerf<float>(head_dim, c, seed, linattn::gerf<float>::optimal(p.q, p.k), orthogonal);
    }));
    for (std::size_t i = rows.size() - 4; i < rows.size(); ++i) print(rows[i]);
  }

  // A map that is no closer than the mean of all v is of no use, however cheap.
  bool as_documented = true;
  std::printf("\n");
  for (std::size_t i = 0; i < settings; ++i) {
    const problem& p = problems[i];
    const double z2 = double(p.q.squaredNorm() + p.k.squaredNorm()) / double(tokens) / std::sqrt(double(head_dim));
    const row* best = &rows[0];
    for (const row& r : rows) best = r.errors[i] < best->errors[i] ? &r : best;
    const bool will_do = best->errors[i] < mean.errors[i];
    std::printf("sigma %4.2f: |q' + k'|^2 about %4.1f, its exponential %9.0f: %s\n", sigmas[i], z2, std::exp(z2),
                will_do ? (best->name + " comes closest").c_str() : "no map will do; take softmax");
    as_documented = as_documented && will_do == (sigmas[i] < 1);
  }
  return as_documented ? 0 : 1;
}
