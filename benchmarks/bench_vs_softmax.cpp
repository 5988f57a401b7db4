// From which length on does linear attention win against softmax attention as the equation is written?
//
//   BM_softmax         softmax_attention, the O(N^2) reference: plain loops, easy to beat
//   BM_softmax_blocks  64 queries at a time through Eigen's matrix products: the baseline to take seriously
//   BM_forward_causal  linear_attention::forward_causal on the same inputs
//
// Both causal, one head. Read the crossover off `tokens_per_second`: softmax falls as 1/N, linear stays.
#include "common.hpp"

using namespace linattn;
using namespace linattn_bench;

namespace {

template <class T>
void BM_softmax(benchmark::State& state) {
  const Index n = state.range(0), d = state.range(1), m = state.range(2), h = state.range(3);
  const problem<T> p(n, d, m, h);
  reference_options o;
  o.heads = h;
  o.causal = true;
  timed<T>(state, double(n), softmax_flops(double(n), double(d), double(m), double(h), true), [&] {
    row_matrix<T> out = softmax_attention(p.q, p.k, p.v, o);  // (N, H M)
    benchmark::DoNotOptimize(out.data());
  });
}

/// out (N, M) = softmax(q k^T / sqrt(D)) v for one head, causal, a block of queries against the keys it sees.
template <class T>
void softmax_blocks(const row_matrix<T>& q, const row_matrix<T>& k, const row_matrix<T>& v, row_matrix<T>& out) {
  constexpr Index block = 64;
  const T scale = T(1) / std::sqrt(T(q.cols()));
  row_matrix<T> p;
  for (Index i = 0; i < q.rows(); i += block) {
    const Index rows = std::min(block, q.rows() - i);
    const Index keys = i + rows;
    p.noalias() = q.middleRows(i, rows) * k.topRows(keys).transpose();  // (rows, keys)
    for (Index r = 0; r < rows; ++r) {
      auto seen = p.row(r).head(i + r + 1).array();
      seen = ((seen - seen.maxCoeff()) * scale).exp();
      seen /= seen.sum();
      p.row(r).tail(rows - r - 1).setZero();
    }
    out.middleRows(i, rows).noalias() = p * v.topRows(keys);  // (rows, M)
  }
}

template <class T>
void BM_softmax_blocks(benchmark::State& state) {
  const Index n = state.range(0), d = state.range(1), m = state.range(2), h = state.range(3);
  problem<T> p(n, d, m, h);
  softmax_blocks(p.q, p.k, p.v, p.out);
  reference_options o;
  o.causal = true;
  const double error = (p.out - softmax_attention(p.q, p.k, p.v, o)).norm() / p.out.norm();
  if (!(error <= row_tolerance<T>)) return fail(state, "softmax in blocks differs from the reference by ", error);
  timed<T>(state, double(n), softmax_flops(double(n), double(d), double(m), double(h), true), [&] {
    softmax_blocks(p.q, p.k, p.v, p.out);
    benchmark::ClobberMemory();
  });
}

template <class Map, class T>
void BM_forward_causal(benchmark::State& state) {
  const Index n = state.range(0), d = state.range(1), m = state.range(2), h = state.range(3);
  const linear_attention<Map, additive, T> attention({.head_dim = d, .value_dim = m, .heads = h});
  problem<T> p(n, d, m, h);
  auto ws = attention.make_workspace();
  attention.forward_causal(p.q, p.k, p.v, p.out, ws);
  const double error = check_rows(attention, p, true);
  if (!(error <= row_tolerance<T>)) return fail(state, "rows differ from the reference by ", error);
  timed<T>(state, double(n), causal_flops(double(n), double(attention.features()), double(m), double(h)), [&] {
    attention.forward_causal(p.q, p.k, p.v, p.out, ws);
    benchmark::ClobberMemory();
  });
}

void shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"N", "D", "M", "H"})->Unit(benchmark::kMicrosecond);
  for (const Index d : {32, 64, 128}) {
    for (const Index n : {1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 2048}) b->Args({n, d, d, 1});
  }
}

BENCHMARK_TEMPLATE1(BM_softmax, float)->Apply(shapes);
BENCHMARK_TEMPLATE1(BM_softmax_blocks, float)->Apply(shapes);
BENCHMARK_TEMPLATE2(BM_forward_causal, elu_plus_one, float)->Apply(shapes);

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
