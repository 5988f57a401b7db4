// What do more threads bring?
//
//   BM_heads     forward_causal of B x H heads, D = M = 64, on T threads against one workspace
//   BM_panels    one sequence of one head, D = 64, M = 128, cut by columns of values
//   BM_segments  one sequence of one head, D = M = 32, cut by tokens (batch_options::segments), against the best
//                sequential run, which is the one without segments
//   BM_packed    1,000 sequences of 1 to 100 tokens, packed, against one of as many tokens; one thread
//
// Each iteration times both ways, one after the other; figures are medians over iterations. speedup and efficiency =
// speedup / T are those of the wall clock and mean something where nobody else has work for the cores. path_speedup and
// path_efficiency are taken from CPU times of the calling thread and of the longest task, and cpu_ratio is that of all
// CPU seconds spent: what the division itself costs. Results of both ways are compared first, bit for bit where they
// have to be.
#include "paired.hpp"

#include <linattn/batch.hpp>

#include <cstring>
#include <random>

using namespace linattn;
using namespace linattn_bench;

namespace {

using attention = linear_attention<elu_plus_one>;

constexpr Index iterations = 21;

/// B sequences in (B, N, H, D), as a batch takes them.
struct batch_problem : problem<float> {
  Index sequences, tokens;
  attention attn;

  batch_problem(Index b, Index n_, Index h_, Index d_, Index m_)
      : problem<float>(b * n_, d_, m_, h_),
        sequences(b),
        tokens(n_),
        attn({.head_dim = d_, .value_dim = m_, .heads = h_}) {}

  template <class X>
  auto view(X& x) const {
    return bnhd(x.data(), sequences, tokens, h, x.cols() / h);
  }
  template <class Executor>
  void run(workspaces<attention> ws, const Executor& executor, std::vector<attention::state_type>* segments = nullptr) {
    batch_options<attention> o;
    if (segments != nullptr) o.segments = *segments;
    forward_causal(attn, {}, view(q), view(k), view(v), view(out), ws, executor, o);
  }
};

/// Relative RMS of a - b.
double difference(const row_matrix<float>& a, const row_matrix<float>& b) {
  return double((a - b).norm()) / std::max(double(b.norm()), 1e-300);
}

/// Counters of `threads` threads against one.
void set_counters(benchmark::State& state, const pairs& times, double tokens, double flops, Index threads) {
  const auto t = double(threads);
  state.counters["tokens_per_second"] = tokens / times.wall();
  state.counters["flops_per_second"] = flops / times.wall();
  state.counters["speedup"] = times.speedup();
  state.counters["efficiency"] = times.speedup() / t;
  state.counters["path_speedup"] = times.path_speedup();
  state.counters["path_efficiency"] = times.path_speedup() / t;
  state.counters["cpu_ratio"] = times.cpu_ratio();
}

/// Threads against one workspace, and the same bits from both.
void compare_threads(benchmark::State& state, batch_problem& p, Index threads) {
  auto alone = make_workspaces(p.attn, 1), many = make_workspaces(p.attn, threads);
  const thread_pool pool{static_cast<int>(threads)};
  p.run(alone, sequential());
  const row_matrix<float> expected = p.out;
  p.out.setZero();
  p.run(many, pool);
  if (std::memcmp(p.out.data(), expected.data(), std::size_t(expected.size()) * sizeof(float)) != 0) {
    return fail(state, "threads change the result by ", difference(p.out, expected));
  }
  pairs times;
  for (auto _ : state) {
    const cost one = measured(sequential(), [&](const auto& executor) { p.run(alone, executor); });
    const cost all = measured(pool, [&](const auto& executor) { p.run(many, executor); });
    state.SetIterationTime(all.wall);
    times.add(one, all);
  }
  const double tokens = double(p.n), c = double(p.attn.features());
  set_counters(state, times, tokens, causal_flops(tokens, c, double(p.m), double(p.h)), threads);
}

void BM_heads(benchmark::State& state) {
  const Index all_heads = state.range(0), threads = state.range(1), heads = std::min<Index>(all_heads, 8);
  const Index tokens = std::min<Index>(16384, 65536 / all_heads);
  batch_problem p(all_heads / heads, tokens, heads, 64, 64);
  compare_threads(state, p, threads);
}

void BM_panels(benchmark::State& state) {
  batch_problem p(1, 65536, 1, 64, 128);
  compare_threads(state, p, state.range(0));
}

/// Sums of a million terms in another order, each added with a rounding error of 2^-24 of the sum so far; outputs are
/// averages of values that nearly cancel, a thousandth of them. A segment that is left out changes everything.
constexpr double segment_tolerance = 1e-4;  // rounding of sums of 1e6 terms gives up to 2e-5

void BM_segments(benchmark::State& state) {
  const Index segments = state.range(0), threads = state.range(1);
  batch_problem p(1, 1000000, 1, 32, 32);
  auto alone = make_workspaces(p.attn, 1), many = make_workspaces(p.attn, threads);
  auto states = make_states(p.attn, segments + 1);
  const thread_pool pool{static_cast<int>(threads)};
  p.run(alone, sequential());
  const row_matrix<float> expected = p.out;
  p.out.setZero();
  p.run(many, pool, &states);
  const double error = difference(p.out, expected);
  if (!(error <= segment_tolerance)) return fail(state, "segments change the result by ", error);
  pairs times;
  for (auto _ : state) {
    const cost one = measured(sequential(), [&](const auto& executor) { p.run(alone, executor); });
    const cost all = measured(pool, [&](const auto& executor) { p.run(many, executor, &states); });
    state.SetIterationTime(all.wall);
    times.add(one, all);
  }
  set_counters(state, times, double(p.n), causal_flops(double(p.n), double(p.attn.features()), double(p.m), 1),
               threads);
  state.counters["relative_difference"] = error;
}

/// packed_per_whole is the ratio of CPU times.
void BM_packed(benchmark::State& state) {
  const Index heads = state.range(0);
  const bool keeps = state.range(1) != 0;
  constexpr Index count = 1000;
  std::mt19937 bits(11);
  std::uniform_int_distribution<Index> length(1, 100);
  std::vector<std::int64_t> cu_seqlens = {0};
  for (Index b = 0; b < count; ++b) cu_seqlens.push_back(cu_seqlens.back() + length(bits));
  const Index tokens = cu_seqlens.back();
  batch_problem p(1, tokens, heads, 64, 64);
  auto ws = make_workspaces(p.attn, 1);
  auto states = make_states(p.attn, keeps ? count : 0);
  const auto run_whole = [&](const auto& executor) { p.run(ws, executor); };
  const auto run_packed = [&](const auto& executor) {
    batch_states<attention> kept;
    if (keeps) kept = states;
    forward_causal(p.attn, kept, packed(p.q, cu_seqlens, heads), packed(p.k, cu_seqlens, heads),
                   packed(p.v, cu_seqlens, heads), packed(p.out, cu_seqlens, heads), ws, executor);
  };
  run_packed(sequential());
  for (const std::size_t b : {std::size_t(0), std::size_t(count / 2), std::size_t(count - 1)}) {
    const Index first = cu_seqlens[b], n = cu_seqlens[b + 1] - first;
    const row_matrix<float> own =
        p.attn.forward_causal(p.q.middleRows(first, n), p.k.middleRows(first, n), p.v.middleRows(first, n));
    if (own != p.out.middleRows(first, n)) return fail(state, "not the bits of its own call: sequence ", double(b));
  }
  pairs times;
  for (auto _ : state) {
    const cost whole = measured(sequential(), run_whole);
    const cost parts = measured(sequential(), run_packed);
    state.SetIterationTime(parts.wall);
    times.add(whole, parts);
  }
  state.counters["tokens_per_second"] = double(tokens) / times.cpu();
  state.counters["packed_per_whole"] = times.cpu_ratio();
}

std::vector<Index> thread_counts() {
  std::vector<Index> counts;
  const Index most = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  for (Index t = 1; t < most; t *= 2) counts.push_back(t);
  counts.push_back(most);
  return counts;
}

void head_counts(benchmark::internal::Benchmark* b) {
  for (const Index heads : {1, 2, 8, 64}) {
    for (const Index threads : thread_counts()) b->Args({heads, threads});
  }
}
void just_threads(benchmark::internal::Benchmark* b) {
  for (const Index threads : thread_counts()) b->Arg(threads);
}
void segment_counts(benchmark::internal::Benchmark* b) {
  for (const Index threads : thread_counts()) {
    if (threads == 1) continue;
    for (const Index segments : {threads, 2 * threads, 4 * threads, 8 * threads}) b->Args({segments, threads});
  }
}

#define LINATTN_BENCH_PAIRS(function, ...) \
  BENCHMARK(function)->ArgNames(__VA_ARGS__)->Iterations(iterations)->UseManualTime()->Unit(benchmark::kMillisecond)

LINATTN_BENCH_PAIRS(BM_heads, {"BxH", "T"})->Apply(head_counts);
LINATTN_BENCH_PAIRS(BM_panels, {"T"})->Apply(just_threads);
LINATTN_BENCH_PAIRS(BM_segments, {"G", "T"})->Apply(segment_counts);
LINATTN_BENCH_PAIRS(BM_packed, {"H", "states"})->Args({1, 0})->Args({8, 0})->Args({1, 1})->Args({8, 1});

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
