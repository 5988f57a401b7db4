// How close to the machine's limits do the update rules come?
//
//   BM_prefill  linear_attention::forward_causal  N tokens; the bound is arithmetic, peak_fraction of the FMA peak
//   BM_step     linear_attention::step            one token; the bound is traffic, update_fraction of the rate at which
//                                                 the nearest level of memory that holds the state is read and written
//   BM_silent_step                                the same on inputs of zeros, after 10,000 of them
//   BM_put_off_step                               BM_step into a draft, which is written once in steps_at_once tokens
//                                                 (draft.hpp)
//
// No feature map. Keys have length 1, betas lie in (0, 1), decays in (0.9, 1) or so, as in models. Useful flops are
// those of rule_flops in common.hpp.
#include "common.hpp"

#include <cmath>
#include <utility>

using namespace linattn;
using namespace linattn_bench;

namespace {

using gated_feature = gated<decay_kind::per_feature>;
using kimi_delta = gated_delta<decay_kind::per_feature>;
using rwkv6 = gated_bonus;
using rwkv7 = generalized_delta;

/// What every rule may take: decays (N, H) and (N, H D), beta (N, H), a and b (N, H D), bonus (1, H D).
template <class T>
struct rule_problem : problem<T> {
  row_matrix<T> log_decay, log_decays, beta, a, b, bonus;

  rule_problem(Index n_, Index d_, Index m_, Index h_) : problem<T>(n_, d_, m_, h_) {
    const auto heads_of = [this](row_matrix<T>& x, Index i, Index head) {
      return x.row(i).segment(head * this->d, this->d);
    };
    for (Index i = 0; i < this->n; ++i) {
      for (Index head = 0; head < this->h; ++head) heads_of(this->k, i, head).normalize();
    }
    this->q *= T(1) / std::sqrt(T(this->d));
    log_decay = normal_matrix<T>(this->n, this->h, 4).cwiseAbs() * T(-0.05);
    log_decays = normal_matrix<T>(this->n, this->h * this->d, 5).cwiseAbs() * T(-0.05);
    beta = (normal_matrix<T>(this->n, this->h, 6).array().tanh() * T(0.5) + T(0.5)).matrix();
    a = -this->k;
    b = this->k;
    for (Index i = 0; i < this->n; ++i) {
      for (Index head = 0; head < this->h; ++head) heads_of(b, i, head) *= beta(i, head);
    }
    bonus = normal_matrix<T>(1, this->h * this->d, 7);
  }

  template <class Inputs>
  Inputs inputs(bool per_feature) const {
    Inputs x;
    if constexpr (requires { x.log_decay; }) x.log_decay = per_feature ? log_decays : log_decay;
    if constexpr (requires { x.beta; }) x.beta = beta;
    if constexpr (requires { x.a; }) x.a = a;
    if constexpr (requires { x.b; }) x.b = b;
    if constexpr (requires { x.bonus; }) x.bonus = matrix_view<const T>(bonus.data(), this->n, bonus.cols(), 0);
    return x;
  }
};

template <class Rule, class T>
struct subject {
  static constexpr bool per_feature = Rule::traits.decay == decay_kind::per_feature;
  using operator_type = linear_attention<identity, Rule, T>;
  using inputs = typename operator_type::inputs;

  static operator_type make(Index d, Index m, Index h) {
    Rule rule;
    if constexpr (Rule::traits.fixed_decay) rule.log_decay.assign(std::size_t(h), -0.03);
    return operator_type({.head_dim = d, .value_dim = m, .heads = h, .normalize = false}, {}, rule);
  }

  /// Relative RMS error of the last head's outputs, against a loop over its tokens in double.
  static double error(const rule_problem<T>& p) {
    using vector = row_vector<double>;
    const Index h = p.h - 1, d = p.d, m = p.m;
    row_matrix<double> S = row_matrix<double>::Zero(d, m);
    const auto row = [&](const row_matrix<T>& x, Index i, Index size) -> vector {
      return x.row(i).segment(h * size, size).template cast<double>();
    };
    double squares = 0, total = 0;
    for (Index i = 0; i < p.n; ++i) {
      const vector q = row(p.q, i, d), k = row(p.k, i, d), v = row(p.v, i, m);
      vector decay = vector::Ones(d), want(m);
      if constexpr (requires(inputs x) { x.log_decay; }) {
        if (per_feature) {
          decay = row(p.log_decays, i, d).array().exp();
        } else {
          decay.setConstant(std::exp(double(p.log_decay(i, h))));
        }
      } else if constexpr (Rule::traits.fixed_decay) {
        decay.setConstant(std::exp(-0.03));
      }
      if constexpr (!Rule::traits.reads_after_write) {
        want = q * S + (q.array() * row(p.bonus, 0, d).array() * k.array()).sum() * v;
        S = decay.asDiagonal() * S;
        S += k.transpose() * v;
      } else if constexpr (Rule::traits.corrects == correction::rank_one) {
        const vector read = row(p.a, i, d) * S;
        S = decay.asDiagonal() * S;
        S += row(p.b, i, d).transpose() * read + k.transpose() * v;
        want = q * S;
      } else {
        S = decay.asDiagonal() * S;
        const vector u = Rule::traits.corrects == correction::delta ? vector(double(p.beta(i, h)) * (v - k * S)) : v;
        S += k.transpose() * u;
        want = q * S;
      }
      squares += (row(p.out, i, m) - want).squaredNorm();
      total += want.squaredNorm();
    }
    return std::sqrt(squares / total);
  }
};

/// The bar of the closing table: N = 4096, |k| = 1, beta in [0, 1].
template <class T>
inline constexpr double rule_tolerance = std::is_same_v<T, float> ? 2e-6 : 1e-12;

template <class Rule, class T>
void BM_prefill(benchmark::State& state) {
  using tested = subject<Rule, T>;
  const Index n = state.range(0), d = state.range(1), m = state.range(2), h = state.range(3);
  const auto attention = tested::make(d, m, h);
  static rule_problem<T> p(1, 1, 1, 1);  // kept: repetitions share a shape's inputs
  if (p.n != n || p.d != d || p.m != m || p.h != h) p = rule_problem<T>(n, d, m, h);
  auto ws = attention.make_workspace();
  const auto x = p.template inputs<typename tested::inputs>(tested::per_feature);
  const auto call = [&] {
    attention.forward_causal(p.q, p.k, p.v, x, p.out, ws);
    benchmark::ClobberMemory();
  };
  call();
  static std::set<std::array<Index, 4>> checked;
  if (checked.insert({n, d, m, h}).second) {
    const double error = tested::error(p);
    if (!(error <= rule_tolerance<T>)) return fail(state, "outputs differ from the token loop by ", error);
    state.counters["relative_error"] = error;
  }
  timed<T>(state, double(n), rule_flops(Rule::traits, double(n), double(d), double(m), double(h)), call);
}

enum class decoding { as_it_sounds, silent, put_off };

template <class Rule, class T>
void bench_step(benchmark::State& state, decoding how) {
  using tested = subject<Rule, T>;
  constexpr Index period = 64;  // tokens of input, used in turn
  const Index d = state.range(0), m = state.range(1), h = state.range(2);
  const auto attention = tested::make(d, m, h);
  rule_problem<T> p(period, d, m, h);
  if (how == decoding::silent) p.q.setZero(), p.k.setZero(), p.v.setZero();
  auto ws = attention.make_workspace();
  auto s = attention.make_state();
  auto draft = attention.make_draft();
  const auto x = p.template inputs<typename tested::inputs>(tested::per_feature);
  Index t = 0;
  const auto call = [&] {
    const auto token = [t](const matrix_view<const T>& view) { return vector_view<const T>(view.row(t), view.cols()); };
    typename tested::operator_type::token_inputs gates;
    if constexpr (requires { gates.log_decay; }) gates.log_decay = token(x.log_decay);
    if constexpr (requires { gates.beta; }) gates.beta = token(x.beta);
    if constexpr (requires { gates.a; }) gates.a = token(x.a);
    if constexpr (requires { gates.b; }) gates.b = token(x.b);
    if constexpr (requires { gates.bonus; }) gates.bonus = token(x.bonus);
    if (how == decoding::put_off) {
      attention.step(s, p.q.row(t), p.k.row(t), p.v.row(t), gates, p.out.row(t), draft, ws);
    } else {
      attention.step(s, p.q.row(t), p.k.row(t), p.v.row(t), gates, p.out.row(t), ws);
    }
    t = (t + 1) % period;
    benchmark::ClobberMemory();
  };
  if (how == decoding::silent) {
    s.kv(0).setOnes();
    for (int i = 0; i < 10000; ++i) call();
  }
  const double bytes = 2 * double(d * m * h) * sizeof(T);
  const memory_level& level = level_of(bytes / 2);
  timed<T>(state, 1, rule_flops(Rule::traits, 1, double(d), double(m), double(h)), call);
  const double rate = bytes * state.counters["tokens_per_second"];
  state.counters["update_fraction"] = rate / level.update;
  state.SetLabel(level.name);
}

template <class Rule, class T>
void BM_step(benchmark::State& state) {
  bench_step<Rule, T>(state, decoding::as_it_sounds);
}
template <class Rule, class T>
void BM_silent_step(benchmark::State& state) {
  bench_step<Rule, T>(state, decoding::silent);
}
template <class Rule, class T>
void BM_put_off_step(benchmark::State& state) {
  bench_step<Rule, T>(state, decoding::put_off);
}

void prefill_shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"N", "D", "M", "H"})->Unit(benchmark::kMillisecond);
  for (const Index d : {64, 128}) {
    for (const Index h : {1, 8, 16}) b->Args({4096, d, d, h});
  }
}
void step_shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"D", "M", "H"})->Unit(benchmark::kMicrosecond);
  for (const Index d : {64, 128}) {
    for (const Index h : {1, 8, 16}) b->Args({d, d, h});
  }
}

#define LINATTN_BENCH_RULE(rule)                                       \
  BENCHMARK_TEMPLATE2(BM_prefill, rule, float)->Apply(prefill_shapes); \
  BENCHMARK_TEMPLATE2(BM_step, rule, float)->Apply(step_shapes);       \
  BENCHMARK_TEMPLATE2(BM_put_off_step, rule, float)->Apply(step_shapes)

LINATTN_BENCH_RULE(additive);
LINATTN_BENCH_RULE(decay);
LINATTN_BENCH_RULE(gated<>);
LINATTN_BENCH_RULE(gated_feature);
LINATTN_BENCH_RULE(delta);
LINATTN_BENCH_RULE(gated_delta<>);
LINATTN_BENCH_RULE(kimi_delta);
LINATTN_BENCH_RULE(rwkv6);
LINATTN_BENCH_RULE(rwkv7);
BENCHMARK_TEMPLATE2(BM_silent_step, decay, float)->Apply(step_shapes);
BENCHMARK_TEMPLATE2(BM_silent_step, gated<>, float)->Apply(step_shapes);

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
