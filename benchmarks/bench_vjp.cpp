// How close to the FMA peak do the gradients come, and do they grow linearly?
//
//   BM_vjp_causal          linear_attention::vjp_causal                          10 N C M H useful flops
//   BM_forward_vjp_causal  forward_causal, then vjp_causal: a training step      14 N C M H
//   BM_vjp                 linear_attention::vjp, as many keys as queries        10 N C M H
//   BM_vjp_causal_of_rule  vjp_causal of an update rule, without feature map, with gradients of log-decay and beta:
//                          gated 12, delta 16, gated delta 18 N C M H
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

/// Keys of length 1, decays in (0.9, 1) or so, betas in (0, 1).
template <class Rule>
struct rule_gradient_problem : gradient_problem<float> {
  using attention = linear_attention<identity, Rule, float>;
  rule_gradients<float, Rule> d;
  row_matrix<float> log_decay, beta;

  rule_gradient_problem(Index n_, Index d_, Index m_, Index h_) : gradient_problem<float>(n_, d_, m_, h_) {
    for (Index i = 0; i < n; ++i) {
      for (Index head = 0; head < h; ++head) k.row(i).segment(head * this->problem<float>::d, d_).normalize();
    }
    q *= 1 / std::sqrt(float(d_));
    const bool per_feature = Rule::traits.decay == decay_kind::per_feature;
    log_decay = normal_matrix<float>(n, per_feature ? h * d_ : h, 4).cwiseAbs() * -0.05F;
    beta = (normal_matrix<float>(n, h, 6).array().tanh() * 0.5F + 0.5F).matrix();
    d.dq = q, d.dk = k, d.dv = v;
    if constexpr (requires { d.inputs.log_decay; }) d.inputs.log_decay = log_decay;
    if constexpr (requires { d.inputs.beta; }) d.inputs.beta = beta;
  }

  template <class T>
  static auto inputs(const row_matrix<T>& g, const row_matrix<T>& b) {
    typename linear_attention<identity, Rule, T>::inputs x;
    if constexpr (requires { x.log_decay; }) x.log_decay = g;
    if constexpr (requires { x.beta; }) x.beta = b;
    return x;
  }

  /// As check_direction, of all inputs.
  double error() const {
    using matrix = row_matrix<double>;
    const Index dim = this->problem<float>::d;
    const linear_attention<identity, Rule, double> exact({.head_dim = dim, .value_dim = m, .heads = h});
    double got = 0, size = 0;
    std::uint32_t seed = 5;
    const auto moved = [&](const row_matrix<float>& x, const row_matrix<float>* gradient, double step) -> matrix {
      const matrix direction = 0.1 * normal_matrix<double>(x.rows(), x.cols(), seed++);
      if (gradient != nullptr) {
        got += direction.cwiseProduct(gradient->template cast<double>()).sum();
        size += 0.01 * gradient->template cast<double>().squaredNorm();
      }
      return x.template cast<double>() + step * direction;
    };
    const auto loss = [&](double step, bool first) {
      seed = 5;
      const row_matrix<float>*dg = nullptr, *db = nullptr;
      if constexpr (requires { d.inputs.log_decay; }) dg = &d.inputs.log_decay;
      if constexpr (requires { d.inputs.beta; }) db = &d.inputs.beta;
      const matrix qs = moved(q, first ? &d.dq : nullptr, step), ks = moved(k, first ? &d.dk : nullptr, step),
                   vs = moved(v, first ? &d.dv : nullptr, step), gs = moved(log_decay, first ? dg : nullptr, step),
                   bs = moved(beta, first ? db : nullptr, step);
      return exact.forward_causal(qs, ks, vs, inputs<double>(gs, bs)).cwiseProduct(dout.template cast<double>()).sum();
    };
    constexpr double step = 1e-5;
    const double want = (loss(step, true) - loss(-step, false)) / (2 * step);
    return std::abs(got - want) / std::sqrt(size);
  }
};

template <class Rule>
void BM_vjp_causal_of_rule(benchmark::State& state) {
  const Index n = state.range(0), d = state.range(1), m = state.range(2), h = state.range(3);
  rule_gradient_problem<Rule> p(n, d, m, h);
  const typename rule_gradient_problem<Rule>::attention attention({.head_dim = d, .value_dim = m, .heads = h});
  auto ws = attention.make_workspace();
  const auto x = p.template inputs<float>(p.log_decay, p.beta);
  const auto call = [&] {
    attention.vjp_causal(p.q, p.k, p.v, x, p.dout, p.d.dq, p.d.dk, p.d.dv, p.d.views(), ws);
    benchmark::ClobberMemory();
  };
  call();
  const double error = p.error();
  if (!(error <= direction_tolerance<float>)) return fail(state, "the gradient differs from differences by ", error);
  timed<float>(state, double(n), vjp_flops(Rule::traits, double(n), double(d), double(m), double(h)), call);
  state.counters["scratch_bytes"] = double(ws.bytes());
}

void rule_shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"N", "D", "M", "H"})->Unit(benchmark::kMillisecond);
  for (const Index d : {64, 128}) b->Args({4096, d, d, 8});
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
BENCHMARK_TEMPLATE(BM_vjp_causal_of_rule, gated<>)->Apply(rule_shapes);
BENCHMARK_TEMPLATE(BM_vjp_causal_of_rule, gated<decay_kind::per_feature>)->Apply(rule_shapes);
BENCHMARK_TEMPLATE(BM_vjp_causal_of_rule, delta)->Apply(rule_shapes);
BENCHMARK_TEMPLATE(BM_vjp_causal_of_rule, gated_delta<>)->Apply(rule_shapes);
BENCHMARK_TEMPLATE(BM_vjp_causal_of_rule, gated_delta<decay_kind::per_feature>)->Apply(rule_shapes);

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
