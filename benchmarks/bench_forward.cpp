// How close to the FMA peak do the bulk forms come, and do they grow linearly?
//
//   BM_forward         linear_attention::forward         pack, kernel writing, kernel reading, unpack
//   BM_forward_causal  linear_attention::forward_causal  pack, kernel reading and writing, unpack
//   BM_grouped_query   forward_causal of H query heads   `ratio` is its time over that of H heads which share nothing
//
// Everything is included: feature map, normaliser, heads packed in one (N, H D) matrix. 4 N C M H useful flops each; of
// grouped queries (2 H + 2 K) N C M, so that with H / K = 8 heads a state the ratio's floor is 9 / 16 = 0.56.
#include "common.hpp"

using namespace linattn;
using namespace linattn_bench;

namespace {

template <class Map, class T>
void bench(benchmark::State& state, bool causal) {
  const Index n = state.range(0), d = state.range(1), m = state.range(2), h = state.range(3);
  const linear_attention<Map, additive, T> attention({.head_dim = d, .value_dim = m, .heads = h});
  static problem<T> p(1, 1, 1, 1);  // kept: repetitions and both forms share a shape's inputs
  if (p.n != n || p.d != d || p.m != m || p.h != h) p = problem<T>(n, d, m, h);
  auto ws = attention.make_workspace();
  const auto call = [&] {
    if (causal) {
      attention.forward_causal(p.q, p.k, p.v, p.out, ws);
    } else {
      attention.forward(p.q, p.k, p.v, p.out, ws);
    }
    benchmark::ClobberMemory();
  };
  call();
  static std::set<std::array<Index, 5>> checked;
  if (checked.insert({causal, n, d, m, h}).second) {
    const double error = check_rows(attention, p, causal);
    if (!(error <= row_tolerance<T>)) return fail(state, "rows differ from the reference by ", error);
  }
  timed<T>(state, double(n),
           causal ? causal_flops(double(n), double(attention.features()), double(m), double(h))
                  : forward_flops(double(n), double(attention.features()), double(m), double(h)),
           call);
}

template <class Map, class T>
void BM_forward(benchmark::State& state) {
  bench<Map, T>(state, false);
}
template <class Map, class T>
void BM_forward_causal(benchmark::State& state) {
  bench<Map, T>(state, true);
}

/// H query heads over K states. Both operators take turns in a batch, and the ratio is that of their quickest calls, so
/// that a busy machine disturbs both alike.
template <class Map, class T>
void BM_grouped_query(benchmark::State& state) {
  const Index n = state.range(0), d = state.range(1), m = state.range(2), h = state.range(3), k = state.range(4);
  const linear_attention<Map, additive, T> grouped({.head_dim = d, .value_dim = m, .heads = h, .key_heads = k});
  const linear_attention<Map, additive, T> separate({.head_dim = d, .value_dim = m, .heads = h});
  problem<T> p(n, d, m, h), all(n, d, m, h);
  p.k = p.k.leftCols(k * d).eval();
  p.v = p.v.leftCols(k * m).eval();
  for (Index head = 0; head < h; ++head) {
    all.k.middleCols(head * d, d) = p.k.middleCols(head / (h / k) * d, d);
    all.v.middleCols(head * m, m) = p.v.middleCols(head / (h / k) * m, m);
  }
  auto ws = grouped.make_workspace(), all_ws = separate.make_workspace();
  const auto call = [&] {
    grouped.forward_causal(p.q, p.k, p.v, p.out, ws);
    benchmark::ClobberMemory();
  };
  const auto call_separate = [&] {
    separate.forward_causal(all.q, all.k, all.v, all.out, all_ws);
    benchmark::ClobberMemory();
  };
  const auto time_of = [](const auto& f) {
    const double start = seconds();
    f();
    return seconds() - start;
  };
  call(), call_separate();
  if (!(p.out == all.out))
    return fail(state, "outputs differ from those of separate heads by ", (p.out - all.out).norm());
  double best = 1e9, best_separate = 1e9;
  for (int i = 0; i < 25; ++i) {
    best = std::min(best, time_of(call));
    best_separate = std::min(best_separate, time_of(call_separate));
  }
  const double pairs = double(n) * double(grouped.features()) * double(m);
  timed<T>(state, double(n), 2 * pairs * double(h + k), call);
  state.counters["ratio"] = best / best_separate;
}

void shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"N", "D", "M", "H"})->Unit(benchmark::kMillisecond);
  for (const Index d : {32, 64, 128}) {
    for (const Index n : {256, 1024, 4096, 16384, 65536}) b->Args({n, d, d, 8});
  }
}

BENCHMARK_TEMPLATE2(BM_forward, elu_plus_one, float)->Apply(shapes);
BENCHMARK_TEMPLATE2(BM_forward_causal, elu_plus_one, float)->Apply(shapes);
/// The core alone: no map, no normaliser, one head.
BENCHMARK_TEMPLATE2(BM_forward_causal, identity, float)
    ->ArgNames({"N", "D", "M", "H"})
    ->Unit(benchmark::kMillisecond)
    ->Args({4096, 32, 32, 1})
    ->Args({4096, 64, 64, 1})
    ->Args({4096, 128, 128, 1});
BENCHMARK_TEMPLATE2(BM_grouped_query, elu_plus_one, float)
    ->ArgNames({"N", "D", "M", "H", "K"})
    ->Unit(benchmark::kMillisecond)
    ->Args({4096, 64, 64, 8, 1})
    ->Args({4096, 64, 64, 32, 4})
    ->Args({4096, 64, 64, 32, 8})
    ->Args({4096, 128, 128, 8, 1})
    ->Args({4096, 128, 128, 32, 4});

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
