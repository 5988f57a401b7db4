// How close to the FMA peak do the gradients come, and do they grow linearly?
//
//   BM_vjp_causal          linear_attention::vjp_causal                          10 N C M H useful flops
//   BM_forward_vjp_causal  forward_causal, then vjp_causal: a training step      14 N C M H
//   BM_vjp                 linear_attention::vjp, as many keys as queries        10 N C M H
//
// Everything is included: feature map and its derivative, normaliser, heads packed in one (N, H D) matrix.
// scratch_bytes is the workspace: the same for every N.
#include "common.hpp"

using namespace linattn;
using namespace linattn_bench;

namespace {

enum class what { vjp_causal, forward_vjp_causal, vjp };

template <class T>
struct gradient_problem : problem<T> {
  row_matrix<T> dout, dq, dk, dv;

  gradient_problem(Index n_, Index d_, Index m_, Index h_) : problem<T>(n_, d_, m_, h_) {
    dout = normal_matrix<T>(n_, h_ * m_, 4);
    dq.setZero(n_, h_ * d_);
    dk.setZero(n_, h_ * d_);
    dv.setZero(n_, h_ * m_);
  }
};

/// |<dout, J d> - <vjp, d>| / (|vjp| |d|) for one random direction d of q, k and v together, by central differences of
/// the double operator.
template <class Map, class T>
double check_direction(const gradient_problem<T>& p, bool causal) {
  const linear_attention<Map, additive, double> exact({.head_dim = p.d, .value_dim = p.m, .heads = p.h});
  using matrix = row_matrix<double>;
  const matrix q = p.q.template cast<double>(), k = p.k.template cast<double>(), v = p.v.template cast<double>();
  const matrix a = normal_matrix<double>(p.n, p.h * p.d, 5), b = normal_matrix<double>(p.n, p.h * p.d, 6),
               c = normal_matrix<double>(p.n, p.h * p.m, 7);
  const auto out = [&](double step) -> matrix {
    const matrix qs = q + step * a, ks = k + step * b, vs = v + step * c;
    return causal ? exact.forward_causal(qs, ks, vs) : exact.forward(qs, ks, vs);
  };
  constexpr double step = 1e-5;
  const double want = ((out(step) - out(-step)).cwiseProduct(p.dout.template cast<double>())).sum() / (2 * step);
  const matrix dq = p.dq.template cast<double>(), dk = p.dk.template cast<double>(), dv = p.dv.template cast<double>();
  const double got = dq.cwiseProduct(a).sum() + dk.cwiseProduct(b).sum() + dv.cwiseProduct(c).sum();
  return std::abs(got - want) / std::sqrt(dq.squaredNorm() + dk.squaredNorm() + dv.squaredNorm());
}

/// Rounding in float over N tokens; a direction is one number, so its error is as random as an element's.
template <class T>
inline constexpr double direction_tolerance = std::is_same_v<T, float> ? 1e-4 : 1e-7;

template <class Map, class T, what What>
void bench(benchmark::State& state) {
  const Index n = state.range(0), d = state.range(1), m = state.range(2), h = state.range(3);
  const linear_attention<Map, additive, T> attention({.head_dim = d, .value_dim = m, .heads = h});
  static gradient_problem<T> p(1, 1, 1, 1);
  if (p.n != n || p.d != d || p.m != m || p.h != h) p = gradient_problem<T>(n, d, m, h);
  auto ws = attention.make_workspace();
  const auto call = [&] {
    if (What == what::forward_vjp_causal) attention.forward_causal(p.q, p.k, p.v, p.out, ws);
    if (What == what::vjp) {
      attention.vjp(p.q, p.k, p.v, p.dout, p.dq, p.dk, p.dv, ws);
    } else {
      attention.vjp_causal(p.q, p.k, p.v, p.dout, p.dq, p.dk, p.dv, ws);
    }
    benchmark::ClobberMemory();
  };
  call();
  static std::set<std::array<Index, 4>> checked;
  if (checked.insert({n, d, m, h}).second) {
    const double error = check_direction<Map>(p, What != what::vjp);
    if (!(error <= direction_tolerance<T>)) return fail(state, "the gradient differs from differences by ", error);
  }
  const double c = double(attention.features());
  const double flops = vjp_flops(double(n), c, double(m), double(h)) +
                       (What == what::forward_vjp_causal ? causal_flops(double(n), c, double(m), double(h)) : 0);
  timed<T>(state, double(n), flops, call);
  state.counters["scratch_bytes"] = double(ws.bytes());
}

template <class Map, class T>
void BM_vjp_causal(benchmark::State& state) {
  bench<Map, T, what::vjp_causal>(state);
}
template <class Map, class T>
void BM_forward_vjp_causal(benchmark::State& state) {
  bench<Map, T, what::forward_vjp_causal>(state);
}
template <class Map, class T>
void BM_vjp(benchmark::State& state) {
  bench<Map, T, what::vjp>(state);
}

void shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"N", "D", "M", "H"})->Unit(benchmark::kMillisecond);
  for (const Index d : {32, 64, 128}) {
    for (const Index n : {256, 1024, 4096, 16384}) b->Args({n, d, d, 8});
  }
}

BENCHMARK_TEMPLATE2(BM_vjp_causal, elu_plus_one, float)->Apply(shapes);
BENCHMARK_TEMPLATE2(BM_forward_vjp_causal, elu_plus_one, float)->Apply(shapes);
BENCHMARK_TEMPLATE2(BM_vjp, elu_plus_one, float)->Apply(shapes);

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
