// What every benchmark shares: the flop and byte formulas, inputs, the check before timing, and the timed loop.
#pragma once

#include <linattn/linattn.hpp>
#include <linattn/reference.hpp>

#include "machine.hpp"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace linattn_bench {

using linattn::row_matrix;

// ---- useful work, the only flops that count -------------------------------------------------------------------------
// A fused multiply-add is two. The feature map, the normaliser and what a block owes itself are not counted.

/// One half of a form, phi(K)^T V or phi(Q) S: 2 C M a token, per head.
inline double half_flops(double n, double c, double m, double h) { return 2 * n * c * m * h; }
/// Non-causal: phi(K)^T V and phi(Q) S, per head.
inline double forward_flops(double n, double c, double m, double h) { return 4 * n * c * m * h; }
/// Causal: outer product and read-out, 2 C M each a token, per head.
inline double causal_flops(double n, double c, double m, double h) { return 4 * n * c * m * h; }
/// A token of a rule, per head: q S and k v^T, 2 C M each; a decay C M; what a correction reads and, where it writes by
/// itself, writes 2 C M each. So additive 4, decay and gated 5, delta 6, gated delta 7, diagonal plus rank one 9 C M.
inline double rule_flops(const linattn::rule_traits& rule, double n, double c, double m, double h) {
  const bool decays = rule.decay != linattn::decay_kind::none;
  const bool corrects = rule.corrects != linattn::correction::none;
  return (4 + (decays ? 1 : 0) + (corrects ? 2 : 0) + (rule.writes() - 1) * 2) * n * c * m * h;
}
/// Softmax: Q K^T and P V, 2 N^2 D and 2 N^2 M; half of it when causal.
inline double softmax_flops(double n, double d, double m, double h, bool causal) {
  return 2 * n * n * (d + m) * h * (causal ? 0.5 : 1.0);
}
/// Gradients, causal or not, eqs. 13-15: five products of 2 C M each a token, per head, namely S, G S^T, R, R v and
/// phi(k) R. What is done twice (R and its transpose) counts once.
inline double vjp_flops(double n, double c, double m, double h) { return 10 * n * c * m * h; }
/// Of a rule: the decays of S and of R, C M each; where it corrects, S^T k, S dv and k dv^T, 2 C M each. So gated 12,
/// delta 16, gated delta 18 C M.
inline double vjp_flops(const linattn::rule_traits& rule, double n, double c, double m, double h) {
  const bool decays = rule.decay != linattn::decay_kind::none;
  const bool corrects = rule.corrects != linattn::correction::none;
  return vjp_flops(n, c, m, h) + ((decays ? 2 : 0) + (corrects ? 6 : 0)) * n * c * m * h;
}

// ---- compulsory traffic: what a call cannot do without --------------------------------------------------------------
// Each input read once, each output written once, and the state read and written once however long the call.

/// Bytes a call reads and bytes it writes.
struct traffic {
  double read = 0;
  double written = 0;
  double bytes() const { return read + written; }
  /// Bytes it touches, for a state that is read and written where it lies: what a cache has to hold.
  double working_set = 0;
};

/// S (C, M) and z (C) of every head.
inline double state_bytes(double c, double m, double h, double size) { return c * (m + 1) * h * size; }
/// k and v in; the state read and written.
inline traffic absorb_traffic(double n, double d, double c, double m, double h, double size) {
  const double in = n * (d + m) * h * size, state = state_bytes(c, m, h, size);
  return {in + state, state, in + state};
}
/// q in, out out; the state read.
inline traffic read_traffic(double n, double d, double c, double m, double h, double size) {
  const double in = n * d * h * size, out = n * m * h * size, state = state_bytes(c, m, h, size);
  return {in + state, out, in + out + state};
}
/// q, k and v in, out out; the state read and written. Causal, non-causal and, with n = 1, a decode step.
inline traffic forward_traffic(double n, double d, double c, double m, double h, double size) {
  const double in = n * (2 * d + m) * h * size, out = n * m * h * size, state = state_bytes(c, m, h, size);
  return {in + state, out + state, in + out + state};
}
/// State bytes a decode step reads and writes.
inline double step_bytes(double c, double m, double h, double size) { return 2 * state_bytes(c, m, h, size); }

// ---- failures -------------------------------------------------------------------------------------------------------

inline bool& failed() {
  static bool value = false;
  return value;
}

/// Ends this benchmark and, at the end, the binary with an error; says why on stderr.
inline void fail(benchmark::State& state, const char* what, double figure) {
  failed() = true;
  std::fprintf(stderr, "FAILED: %s%g\n", what, figure);
  state.SkipWithError(what);
}

/// Flags for the programs that charts.py reads: medians of three, whole runs in minutes.
inline const std::vector<std::string> default_flags = {"--benchmark_min_time=0.05", "--benchmark_repetitions=3",
                                                       "--benchmark_report_aggregates_only=true"};

/// main of every benchmark binary: non-zero when any check or fraction failed. The command line's flags come after
/// `flags` and win.
inline int run(int argc, char** argv, std::vector<std::string> flags = {}) {
#if defined(__clang__)
  benchmark::AddCustomContext("compiler", "clang " __clang_version__);
#else
  benchmark::AddCustomContext("compiler", "GCC " __VERSION__);
#endif
  benchmark::AddCustomContext("packet_bytes", std::to_string(linattn::detail::packet<float>::size * sizeof(float)));
  std::vector<char*> all = {argv[0]};
  for (auto& flag : flags) all.push_back(flag.data());
  all.insert(all.end(), argv + 1, argv + argc);
  int count = int(all.size());
  all.push_back(nullptr);
  benchmark::Initialize(&count, all.data());
  if (benchmark::ReportUnrecognizedArguments(count, all.data())) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return failed() ? 1 : 0;
}

// ---- inputs and the check before timing -----------------------------------------------------------------------------

/// N(0, 1) in every element. Rows from `drawn` on repeat the first ones: drawing them would take longer than timing.
template <class T>
row_matrix<T> normal_matrix(Index rows, Index cols, std::uint64_t seed) {
  std::mt19937_64 bits(seed);
  std::normal_distribution<T> normal;
  constexpr Index drawn = 4096;
  row_matrix<T> x(rows, cols);
  for (Index i = 0; i < std::min(rows, drawn) * cols; ++i) x.data()[i] = normal(bits);
  for (Index i = drawn; i < rows; ++i) x.row(i) = x.row(i - drawn);
  return x;
}

template <class T>
struct problem {
  Index n, d, m, h;
  row_matrix<T> q, k, v, out;

  problem(Index n_, Index d_, Index m_, Index h_) : n(n_), d(d_), m(m_), h(h_) {
    q = normal_matrix<T>(n, h * d, 1);  // (N, H D)
    k = normal_matrix<T>(n, h * d, 2);  // (N, H D)
    v = normal_matrix<T>(n, h * m, 3);  // (N, H M)
    out.setZero(n, h * m);
  }
};

/// Largest relative RMS error of 16 output rows, among them 0, B - 1, B, the last one and the last head, each against
/// the quadratic reference evaluated in double.
template <class Operator, class T>
double check_rows(const Operator& attention, const problem<T>& p, bool causal) {
  constexpr Index block = linattn::detail::causal_block;
  std::set<std::pair<Index, Index>> rows = {
      {0, 0}, {std::min(block - 1, p.n - 1), 0}, {std::min(block, p.n - 1), p.h - 1}, {p.n - 1, p.h - 1}, {p.n - 1, 0}};
  for (Index i = 0; rows.size() < 16 && i < 64; ++i) rows.insert({(i * 7919 + 31) % p.n, i % p.h});
  double worst = 0;
  for (const auto& [i, h] : rows) {
    const Index keys = causal ? i + 1 : p.n;
    linattn::reference_options o;
    o.normalize = attention.normalizes();
    const row_matrix<double> want = linattn::kernel_attention<double>(
        attention.feature_map(), p.q.block(i, h * p.d, 1, p.d), p.k.block(0, h * p.d, keys, p.d),
        p.v.block(0, h * p.m, keys, p.m), o);  // (1, M)
    const row_matrix<double> got = p.out.block(i, h * p.m, 1, p.m).template cast<double>();
    const double error = (got - want).norm() / std::max(want.norm(), 1e-300);
    if (!(error <= worst)) worst = error;  // a NaN stays
  }
  return worst;
}

/// Rows of one output are fewer than the bar's RMS over all: a row whose values nearly cancel is allowed ten times it.
template <class T>
inline constexpr double row_tolerance = std::is_same_v<T, float> ? 1e-5 : 1e-12;

// ---- the timed loop -------------------------------------------------------------------------------------------------

/// Times `call` and sets the counters: useful FLOP/s, tokens/s, peak_gflops and peak_fraction, the FMA peak being the
/// larger of one measured just before and one just after.
template <class T, class Call>
void timed(benchmark::State& state, double tokens, double flops, Call call) {
  const double before = fma_peak<T>();
  const double start = seconds();
  for (auto _ : state) call();
  const double elapsed = seconds() - start;
  const double peak = std::max(before, fma_peak<T>());
  const double iterations = double(state.iterations());
  const double rate = flops * iterations / elapsed;
  state.counters["flops_per_second"] = rate;
  state.counters["tokens_per_second"] = tokens * iterations / elapsed;
  state.counters["peak_gflops"] = peak * 1e-9;
  state.counters["peak_fraction"] = rate / peak;
  if (rate > peak) fail(state, "the FMA peak was measured too low: peak_fraction ", rate / peak);
}

}  // namespace linattn_bench
