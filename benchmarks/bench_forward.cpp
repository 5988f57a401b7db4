// How close to the FMA peak do the bulk forms come, and do they grow linearly?
//
//   BM_forward         linear_attention::forward         pack, kernel writing, kernel reading, unpack
//   BM_forward_causal  linear_attention::forward_causal  pack, kernel reading and writing, unpack
//   BM_grouped_query   forward_causal of H query heads   `ratio` is its time over that of H heads which share nothing
//   BM_storage         forward_causal of half, bfloat16  `speedup` is float's time over its own
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

/// q, k, v and out in S. Both operators take turns: the median of the ratios is what a busy machine disturbs least.
template <class Map, class S>
void BM_storage(benchmark::State& state) {
  const Index n = state.range(0), d = state.range(1), m = state.range(2), h = state.range(3);
  const linear_attention<Map, additive, S> narrow({.head_dim = d, .value_dim = m, .heads = h});
  const linear_attention<Map, additive, float> wide({.head_dim = d, .value_dim = m, .heads = h});
  problem<float> p(n, d, m, h);
  const row_matrix<S> q = p.q.cast<S>(), k = p.k.cast<S>(), v = p.v.cast<S>();
  row_matrix<S> out(n, h * m);
  p.q = q.template cast<float>(), p.k = k.template cast<float>(), p.v = v.template cast<float>();
  auto ws = narrow.make_workspace();
  auto wide_ws = wide.make_workspace();
  const auto call = [&] {
    narrow.forward_causal(q, k, v, out, ws);
    benchmark::ClobberMemory();
  };
  const auto call_wide = [&] {
    wide.forward_causal(p.q, p.k, p.v, p.out, wide_ws);
    benchmark::ClobberMemory();
  };
  const auto time_of = [](const auto& f) {
    const double start = seconds();
    f();
    return seconds() - start;
  };
  call(), call_wide();
  if (!(out == p.out.cast<S>())) return fail(state, "outputs are not float's, rounded once; N = ", double(n));
  std::vector<double> speedups(n > 4096 ? 15 : 301);
  for (double& speedup : speedups) {
    const double wide_seconds = time_of(call_wide);
    speedup = wide_seconds / time_of(call);
  }
  const auto median = speedups.begin() + Index(speedups.size() / 2);
  std::nth_element(speedups.begin(), median, speedups.end());
  timed<float>(state, double(n), causal_flops(double(n), double(narrow.features()), double(m), double(h)), call);
  state.counters["speedup"] = *median;
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

/// In DRAM, of 4 and 8 flops a byte of float, and in cache.
void stored_shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"N", "D", "M", "H"})->Unit(benchmark::kMillisecond);
  b->Args({262144, 16, 16, 8})->Args({65536, 32, 32, 8});
  for (const Index d : {16, 17, 40, 64, 128}) b->Args({1024, d, d, 8});
}
BENCHMARK_TEMPLATE2(BM_storage, identity, Eigen::bfloat16)->Apply(stored_shapes);
BENCHMARK_TEMPLATE2(BM_storage, identity, Eigen::half)->Apply(stored_shapes);
BENCHMARK_TEMPLATE2(BM_storage, elu_plus_one, Eigen::bfloat16)->Apply(stored_shapes);
BENCHMARK_TEMPLATE2(BM_storage, elu_plus_one, Eigen::half)->Apply(stored_shapes);

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
