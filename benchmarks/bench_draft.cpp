// Speculative decoding: what does accepting J of 16 drafted tokens cost, and drafting them, beside one decode step?
//
//   BM_accept<rule,float>/J:../D:../M:../H:../states:..
//
// A round drafts 16 tokens for each of `states` sequences, then times `accept` of J tokens for all of them, then `step`
// for all of them; figures are medians over the rounds of one run, so that both calls meet the same machine.
// accept_per_step and draft_per_step are ratios of times. One state of 8 heads by 128 stays in L2; 128 of them are
// larger than the last cache here, as the layers and sequences of a served model are.
//
// The arithmetic grows with J where the traffic does not: J tokens are 2 J C M flops a head. peak_fraction is theirs.
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

template <class Rule, class T>
void BM_accept(benchmark::State& state) {
  using attention = linear_attention<identity, Rule, T>;
  constexpr Index tokens = attention::draft_type::capacity;
  const Index accepted = state.range(0), d = state.range(1), m = state.range(2), h = state.range(3);
  const auto count = std::size_t(state.range(4));
  const attention attn({.head_dim = d, .value_dim = m, .heads = h, .normalize = false});

  problem<T> p(tokens, d, m, h);
  p.k *= T(1) / std::sqrt(T(d));  // of length 1 or so, as the rules that correct need
  constexpr bool per_feature = Rule::traits.decay == decay_kind::per_feature;
  const row_matrix<T> log_decay = normal_matrix<T>(tokens, per_feature ? h * d : h, 4).cwiseAbs() * T(-0.05);
  const row_matrix<T> beta = row_matrix<T>::Constant(tokens, h, T(0.5));
  const row_matrix<T> a = -p.k, b = T(0.5) * p.k;
  typename attention::inputs x;
  typename attention::token_inputs token;
  const auto give = [](const row_matrix<T>& all, auto& rows, auto& row) { rows = all, row = all.row(0); };
  if constexpr (requires { x.log_decay; }) give(log_decay, x.log_decay, token.log_decay);
  if constexpr (requires { x.beta; }) give(beta, x.beta, token.beta);
  if constexpr (requires { x.a; }) give(a, x.a, token.a);
  if constexpr (requires { x.b; }) give(b, x.b, token.b);

  auto ws = attn.make_workspace();
  std::vector<typename attention::state_type> states(count, attn.make_state());
  std::vector<typename attention::draft_type> drafts(count, attn.make_draft());
  std::vector<double> accepting, drafting, ratio, draft_ratio;
  const double peak = fma_peak<T>();
  for (auto _ : state) {
    const double start = seconds();
    for (std::size_t i = 0; i < count; ++i) {
      attn.forward_causal(std::as_const(states[i]), p.q, p.k, p.v, x, p.out, drafts[i], ws);
    }
    const double drafted = seconds();
    for (std::size_t i = 0; i < count; ++i) attn.accept(states[i], drafts[i], accepted, ws);
    const double done = seconds();
    for (std::size_t i = 0; i < count; ++i) {
      attn.step(states[i], p.q.row(0), p.k.row(0), p.v.row(0), token, p.out.row(0), ws);
    }
    const double stepped = seconds();
    benchmark::ClobberMemory();
    drafting.push_back(drafted - start);
    accepting.push_back(done - drafted);
    ratio.push_back((done - drafted) / (stepped - done));
    draft_ratio.push_back((drafted - start) / (stepped - done));
  }
  const double seconds_each = median(accepting) / double(count);
  state.counters["accept_per_step"] = median(ratio);
  state.counters["draft_per_step"] = median(draft_ratio);
  state.counters["accept_microseconds"] = seconds_each * 1e6;
  state.counters["peak_fraction"] = 2 * double(Rule::traits.writes() * accepted * d * m * h) / seconds_each / peak;
}

void lengths(benchmark::internal::Benchmark* b) {
  b->ArgNames({"J", "D", "M", "H", "states"})->Unit(benchmark::kMicrosecond);
  for (const Index states : {1, 128}) {
    for (const Index accepted : {1, 2, 4, 8, 16}) b->Args({accepted, 128, 128, 8, states});
  }
}

BENCHMARK_TEMPLATE2(BM_accept, gated_delta<>, float)->Apply(lengths);
BENCHMARK_TEMPLATE2(BM_accept, kimi_delta, float)->Apply(lengths);
BENCHMARK_TEMPLATE2(BM_accept, rwkv7, float)->Apply(lengths);
BENCHMARK_TEMPLATE2(BM_accept, additive, float)->Apply(lengths);
BENCHMARK_TEMPLATE2(BM_accept, gated<>, float)->Apply(lengths);

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
