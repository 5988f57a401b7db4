// From which length on does linear attention win against softmax attention?
//
//   BM_softmax_naive   softmax_attention, the O(N^2) reference as the equation is written: plain loops, easy to beat
//   BM_softmax_tiled   online softmax in tiles, without the N x N matrix: the baseline to take seriously
//   BM_forward_causal  linear_attention::forward_causal on the same inputs
//   BM_cached_step     cached_softmax::step, one token of eight heads at position N: it reads all keys and values, at
//                      read_fraction of the bandwidth measured in the memory level that holds them
//
// All causal, one head but for the last. The crossover is where the times meet: softmax grows as N^2, linear as N.
// charts.py reads it off.
#include "common.hpp"
#include "softmax_baselines.hpp"

using namespace linattn;
using namespace linattn_bench;

namespace {

template <class T>
void BM_softmax_naive(benchmark::State& state) {
  const Index d = state.range(0), n = state.range(1);
  const problem<T> p(n, d, d, 1);
  reference_options o;
  o.causal = true;
  timed<T>(state, double(n), softmax_flops(double(n), double(d), double(d), 1, true), [&] {
    row_matrix<T> out = softmax_attention(p.q, p.k, p.v, o);  // (N, M)
    benchmark::DoNotOptimize(out.data());
  });
}

/// Largest relative error of a few output rows, first and last of tiles among them, against the reference in double.
template <class T>
double check_softmax(const problem<T>& p) {
  double worst = 0;
  for (const Index row : {Index(0), Index(1), Index(63), Index(64), Index(255), Index(256), p.n / 3, p.n - 1}) {
    if (row >= p.n) continue;
    const row_matrix<double> want =
        softmax_attention<double>(p.q.middleRows(row, 1), p.k.topRows(row + 1), p.v.topRows(row + 1));  // (1, M)
    const double error = (p.out.row(row).template cast<double>() - want).norm() / want.norm();
    if (!(error <= worst)) worst = error;  // a NaN stays
  }
  return worst;
}

template <class T>
void BM_softmax_tiled(benchmark::State& state) {
  const Index d = state.range(0), n = state.range(1);
  problem<T> p(n, d, d, 1);
  tiled_softmax<T> softmax(n, d);
  softmax(p.q, p.k, p.v, p.out);
  const double error = check_softmax(p);
  if (!(error <= row_tolerance<T>)) return fail(state, "softmax in tiles differs from the reference by ", error);
  timed<T>(state, double(n), softmax_flops(double(n), double(d), double(d), 1, true), [&] {
    softmax(p.q, p.k, p.v, p.out);
    benchmark::ClobberMemory();
  });
}

template <class Map, class T>
void BM_forward_causal(benchmark::State& state) {
  const Index d = state.range(0), n = state.range(1);
  const linear_attention<Map, additive, T> attention({.head_dim = d});
  problem<T> p(n, d, d, 1);
  auto ws = attention.make_workspace();
  attention.forward_causal(p.q, p.k, p.v, p.out, ws);
  const double error = check_rows(attention, p, true);
  if (!(error <= row_tolerance<T>)) return fail(state, "rows differ from the reference by ", error);
  timed<T>(state, double(n), causal_flops(double(n), double(attention.features()), double(d), 1), [&] {
    attention.forward_causal(p.q, p.k, p.v, p.out, ws);
    benchmark::ClobberMemory();
  });
}

template <class T>
void BM_cached_step(benchmark::State& state) {
  constexpr Index heads = 8, steps = 16;
  const Index d = state.range(0), n = state.range(1);
  const cached_softmax<T> attention({.head_dim = d, .heads = heads}, n + steps);
  problem<T> p(n, d, d, heads);
  auto cache = attention.make_state();
  auto ws = attention.make_workspace();
  attention.absorb(cache, p.k.topRows(n - steps / 2), p.v.topRows(n - steps / 2), ws);
  const auto prefix = cache;
  double elapsed = 0;
  for (auto _ : state) {
    cache = prefix;
    const double start = seconds();
    for (Index t = 0; t < steps; ++t) {
      attention.step(cache, p.q.row(t), p.k.row(t), p.v.row(t), p.out.row(t), ws);
      benchmark::ClobberMemory();
    }
    const double each = (seconds() - start) / steps;
    state.SetIterationTime(each);
    elapsed += each;
  }
  const double bytes = 2 * double(n * d * heads) * sizeof(T);
  const double rate = bytes * double(state.iterations()) / elapsed;
  const memory_level& level = level_of(bytes);
  state.SetLabel(level.name);
  state.counters["bytes_per_second"] = rate;
  state.counters["read_fraction"] = rate / level.read;
}

/// Powers of two up to `Most`.
template <Index Most>
void shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"D", "N"})->Unit(benchmark::kMicrosecond);
  for (const Index d : {32, 64, 128}) {
    for (Index n = 1; n <= Most; n *= 2) b->Args({d, n});
  }
}

BENCHMARK_TEMPLATE1(BM_softmax_naive, float)->Apply(shapes<2048>);  // the next takes seconds
BENCHMARK_TEMPLATE1(BM_softmax_tiled, float)->Apply(shapes<16384>);
BENCHMARK_TEMPLATE2(BM_forward_causal, elu_plus_one, float)->Apply(shapes<16384>);
BENCHMARK_TEMPLATE1(BM_cached_step, float)
    ->ArgNames({"D", "N"})
    ->Args({32, 784})
    ->Args({32, 3072})
    ->Args({64, 3072})
    ->Unit(benchmark::kMicrosecond)
    ->UseManualTime();

}  // namespace

int main(int argc, char** argv) { return run(argc, argv, default_flags); }
