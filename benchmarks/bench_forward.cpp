// How close to the FMA peak do the bulk forms come, and do they grow linearly?
//
//   BM_forward         linear_attention::forward         pack, kernel writing, kernel reading, unpack
//   BM_forward_causal  linear_attention::forward_causal  pack, kernel reading and writing, unpack
//
// Everything is included: feature map, normaliser, heads packed in one (N, H D) matrix. 4 N C M H useful flops each.
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

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
