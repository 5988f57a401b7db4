// What does one token of decoding cost, and does it depend on what came before? (It does not: the state is all there
// is.)
//
//   BM_step  linear_attention::step  one token of all heads: pack, kernel with blocks of one, unpack
//
// 4 C M H useful flops a token, but the bound is traffic: the state is read and written once.
#include "common.hpp"

using namespace linattn;
using namespace linattn_bench;

namespace {

template <class Map, class T>
void BM_step(benchmark::State& state) {
  const Index n = state.range(0), d = state.range(1), m = state.range(2), h = state.range(3);
  const linear_attention<Map, additive, T> attention({.head_dim = d, .value_dim = m, .heads = h});
  constexpr Index period = 64;  // tokens of input, used in turn
  problem<T> p(period, d, m, h);
  auto ws = attention.make_workspace();
  auto s = attention.make_state();
  const auto step = [&](Index t) {
    auto out = p.out.row(t);
    attention.step(s, p.q.row(t), p.k.row(t), p.v.row(t), out, ws);
  };
  for (Index t = 0; t < period; ++t) step(t);
  const double error = check_rows(attention, p, true);
  if (!(error <= row_tolerance<T>)) return fail(state, "rows differ from the reference by ", error);

  Index t = 0;
  timed<T>(state, double(n), double(n) * causal_flops(1, double(attention.features()), double(m), double(h)), [&] {
    for (Index i = 0; i < n; ++i) step(t++ % period);
    benchmark::ClobberMemory();
  });
  const double bytes = double(n) * step_bytes(double(attention.features()), double(m), double(h), sizeof(T));
  state.counters["state_bytes_per_second"] = state.counters["tokens_per_second"] / double(n) * bytes;
}

void shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"N", "D", "M", "H"})->Unit(benchmark::kNanosecond);
  for (const Index d : {16, 32, 64, 128}) {
    for (const Index h : {1, 8}) b->Args({1, d, d, h});
  }
}

BENCHMARK_TEMPLATE2(BM_step, elu_plus_one, float)->Apply(shapes);
BENCHMARK_TEMPLATE2(BM_step, elu_plus_one, double)->Apply(shapes);

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
