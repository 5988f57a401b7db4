// Drafts: what does accepting J of 16 drafted tokens cost, and drafting them, beside one decode step? And a step whose
// write is put off?
//
//   BM_accept<rule,float>/J:../D:../M:../H:../states:..
//   BM_put_off<rule,float>/D:../M:../H:../states:..
//
// A round of BM_accept drafts 16 tokens for each of `states` sequences, then times `accept` of J tokens for all of
// them, then `step` for all of them; one of BM_put_off puts off a token of each sequence, as often as one pass over a
// state writes, and accepts, then steps as often. Figures are medians over the rounds of one run, so that both calls
// meet the same machine; ..._per_step are ratios of times. One state of 8 heads by 128 stays in L2; 128 of them are
// larger than the last cache here, as the layers and sequences of a served model are.
//
// The arithmetic of accept grows with J where the traffic does not: J tokens are 2 J C M flops a head. peak_fraction is
// theirs.
#include "common.hpp"

#include <cmath>
#include <utility>

using namespace linattn;
using namespace linattn_bench;

namespace {

using kimi_delta = gated_delta<decay_kind::per_feature>;
using rwkv7 = generalized_delta;

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + std::ptrdiff_t(x.size() / 2), x.end());
  return x[x.size() / 2];
}

/// Sequences of one model, and 16 tokens for all of them.
template <class Rule, class T>
struct sequences {
  using attention = linear_attention<identity, Rule, T>;
  static constexpr Index tokens = attention::draft_type::capacity;
  static constexpr bool per_feature = Rule::traits.decay == decay_kind::per_feature;

  attention attn;
  problem<T> p;
  row_matrix<T> log_decay, beta, a, b;
  typename attention::inputs x;
  typename attention::token_inputs token;
  typename attention::workspace_type ws;
  std::vector<typename attention::state_type> states;
  std::vector<typename attention::draft_type> drafts;

  sequences(Index d, Index m, Index h, Index count)
      : attn({.head_dim = d, .value_dim = m, .heads = h, .normalize = false}),
        p(tokens, d, m, h),
        log_decay(normal_matrix<T>(tokens, per_feature ? h * d : h, 4).cwiseAbs() * T(-0.05)),
        beta(row_matrix<T>::Constant(tokens, h, T(0.5))),
        ws(attn.make_workspace()),
        states(std::size_t(count), attn.make_state()),
        drafts(std::size_t(count), attn.make_draft()) {
    p.k *= T(1) / std::sqrt(T(d));  // of length 1 or so, as the rules that correct need
    a = -p.k, b = T(0.5) * p.k;
    const auto give = [](const row_matrix<T>& all, auto& rows, auto& row) { rows = all, row = all.row(0); };
    if constexpr (requires { x.log_decay; }) give(log_decay, x.log_decay, token.log_decay);
    if constexpr (requires { x.beta; }) give(beta, x.beta, token.beta);
    if constexpr (requires { x.a; }) give(a, x.a, token.a);
    if constexpr (requires { x.b; }) give(b, x.b, token.b);
  }

  /// f(i) for every sequence; seconds.
  template <class F>
  double seconds_of(const F& f) const {
    const double start = seconds();
    for (std::size_t i = 0; i < states.size(); ++i) f(i);
    benchmark::ClobberMemory();
    return seconds() - start;
  }
  double seconds_of_step() {
    return seconds_of(
        [&](std::size_t i) { attn.step(states[i], p.q.row(0), p.k.row(0), p.v.row(0), token, p.out.row(0), ws); });
  }
};

template <class Rule, class T>
void BM_accept(benchmark::State& state) {
  const Index accepted = state.range(0), d = state.range(1), m = state.range(2), h = state.range(3);
  sequences<Rule, T> all(d, m, h, state.range(4));
  auto& p = all.p;
  std::vector<double> accepting, ratio, draft_ratio;
  const double peak = fma_peak<T>();
  for (auto _ : state) {
    const double drafting = all.seconds_of([&](std::size_t i) {
      all.attn.forward_causal(std::as_const(all.states[i]), p.q, p.k, p.v, all.x, p.out, all.drafts[i], all.ws);
    });
    accepting.push_back(all.seconds_of(
        [&](std::size_t i) { all.attn.accept(all.states[i], std::as_const(all.drafts[i]), accepted, all.ws); }));
    const double stepping = all.seconds_of_step();
    ratio.push_back(accepting.back() / stepping);
    draft_ratio.push_back(drafting / stepping);
  }
  const double seconds_each = median(accepting) / double(all.states.size());
  state.counters["accept_per_step"] = median(ratio);
  state.counters["draft_per_step"] = median(draft_ratio);
  state.counters["accept_microseconds"] = seconds_each * 1e6;
  state.counters["peak_fraction"] = 2 * double(Rule::traits.writes() * accepted * d * m * h) / seconds_each / peak;
}

template <class Rule, class T>
void BM_put_off(benchmark::State& state) {
  sequences<Rule, T> all(state.range(0), state.range(1), state.range(2), state.range(3));
  auto& p = all.p;
  std::vector<double> putting_off, ratio;
  for (auto _ : state) {
    double put_off = 0, stepping = 0;
    constexpr Index round = decltype(all)::attention::draft_type::steps_at_once;
    for (Index t = 0; t < round; ++t) {
      put_off += all.seconds_of([&](std::size_t i) {
        all.attn.step(all.states[i], p.q.row(0), p.k.row(0), p.v.row(0), all.token, p.out.row(0), all.drafts[i],
                      all.ws);
      });
    }
    put_off += all.seconds_of([&](std::size_t i) { all.attn.accept(all.states[i], all.drafts[i], all.ws); });
    for (Index t = 0; t < round; ++t) stepping += all.seconds_of_step();
    putting_off.push_back(put_off / double(round));
    ratio.push_back(put_off / stepping);
  }
  state.counters["put_off_per_step"] = median(ratio);
  state.counters["put_off_microseconds"] = median(putting_off) / double(all.states.size()) * 1e6;
}

void lengths(benchmark::internal::Benchmark* b) {
  b->ArgNames({"J", "D", "M", "H", "states"})->Unit(benchmark::kMicrosecond);
  for (const Index states : {1, 128}) {
    for (const Index accepted : {1, 2, 4, 8, 16}) b->Args({accepted, 128, 128, 8, states});
  }
}

void counts(benchmark::internal::Benchmark* b) {
  b->ArgNames({"D", "M", "H", "states"})->Unit(benchmark::kMicrosecond);
  for (const Index states : {1, 128}) b->Args({128, 128, 8, states});
}

#define LINATTN_BENCH_DRAFT(rule)                              \
  BENCHMARK_TEMPLATE2(BM_accept, rule, float)->Apply(lengths); \
  BENCHMARK_TEMPLATE2(BM_put_off, rule, float)->Apply(counts)

LINATTN_BENCH_DRAFT(gated_delta<>);
LINATTN_BENCH_DRAFT(kimi_delta);
LINATTN_BENCH_DRAFT(rwkv7);
LINATTN_BENCH_DRAFT(additive);
LINATTN_BENCH_DRAFT(gated<>);

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
