// What does one token of decoding cost, and does it depend on what came before? (It does not: the state is all there
// is.)
//
//   BM_step          linear_attention::step            one token of all heads, sizes at run time or in the type
//   BM_step/silent   the same on inputs of zeros
//   BM_step_states   step of many states in one call   the next token of each of many sequences, L1 to DRAM
//   BM_block         linear_attention::forward_causal  a block of 1 to 64 tokens, as audio and robotics have them
//   BM_step_latency  every one of 1e6 steps by the wall clock: p50, p99, p99.9, max
//   BM_block_latency every one of 1e5 blocks of 64 samples, and p99.9 as a share of the 1.33 ms they last at 48 kHz
//
// 4 C M H useful flops a token, but the bound is traffic: the state is read and written once. update_fraction is its
// rate over the in-place read and write rate of the nearest level of memory that holds the states.
#include "common.hpp"

#include <chrono>
#include <string>

using namespace linattn;
using namespace linattn_bench;

namespace {

template <class Map, class T>
auto dynamic_operator(Index d, Index h) {
  return linear_attention<Map, additive, T>({.head_dim = d, .heads = h});
}

constexpr Index period = 64;  // tokens of input, used in turn

/// Sequences step by step, and what is measured of them.
template <class Operator>
class decoder {
 public:
  using T = typename Operator::scalar;

  decoder(const Operator& attention, Index sequences, bool silent)
      : m_attention(attention),
        m_inputs(std::max(period, sequences), attention.head_dim(), attention.value_dim(), attention.heads()),
        m_workspace(attention.make_workspace()),
        m_states(std::size_t(sequences), attention.make_state()) {
    if (silent) m_inputs.q.setZero(), m_inputs.k.setZero(), m_inputs.v.setZero();
  }

  void step(Index t) {
    auto out = m_inputs.out.row(t);
    m_attention.step(m_states.front(), m_inputs.q.row(t), m_inputs.k.row(t), m_inputs.v.row(t), out, m_workspace);
  }
  void step_all() {
    const auto rows = Index(m_states.size());
    m_attention.step(m_states, m_inputs.q.topRows(rows), m_inputs.k.topRows(rows), m_inputs.v.topRows(rows),
                     m_inputs.out.topRows(rows), m_workspace);
  }
  void block(Index n) {
    m_attention.forward_causal(m_states.front(), m_inputs.q.topRows(n), m_inputs.k.topRows(n), m_inputs.v.topRows(n),
                               m_inputs.out.topRows(n), m_workspace);
  }
  /// Steps through one period and compares.
  bool agrees(benchmark::State& state) {
    for (Index t = 0; t < period; ++t) step(t);
    problem<T> checked = m_inputs;
    checked.n = period;
    const double error = check_rows(m_attention, checked, true);
    m_states.front().reset();
    if (!(error <= row_tolerance<T>)) fail(state, "rows differ from the reference by ", error);
    return error <= row_tolerance<T>;
  }

 private:
  const Operator& m_attention;
  problem<T> m_inputs;
  typename Operator::workspace_type m_workspace;
  std::vector<typename Operator::state_type> m_states;
};

template <class Operator>
void set_traffic(benchmark::State& state, const Operator& attention, double sequences) {
  if (state.error_occurred()) return;
  const auto c = double(attention.features()), m = double(attention.value_dim()), h = double(attention.heads());
  const double bytes = step_bytes(c, m, h, sizeof(typename Operator::scalar));
  const memory_level& level = level_of(sequences * bytes / 2);
  const double rate = state.counters["tokens_per_second"] * bytes;
  state.counters["nanoseconds_per_token"] = 1e9 / state.counters["tokens_per_second"];
  state.counters["state_bytes_per_token"] = bytes;
  state.counters["state_bytes_per_second"] = rate;
  state.counters["update_fraction"] = rate / level.update;
  state.SetLabel(level.name);
}

template <class Operator>
double flops_per_token(const Operator& attention) {
  return causal_flops(1, double(attention.features()), double(attention.value_dim()), double(attention.heads()));
}

template <class Operator>
void bench_step(benchmark::State& state, const Operator& attention, bool silent) {
  decoder<Operator> decode(attention, 1, silent);
  if (!silent && !decode.agrees(state)) return;
  constexpr Index steps = 16;
  Index t = 0;
  timed<typename Operator::scalar>(state, double(steps), double(steps) * flops_per_token(attention), [&] {
    for (Index i = 0; i < steps; ++i) decode.step(t++ % period);
    benchmark::ClobberMemory();
  });
  set_traffic(state, attention, 1);
}

template <class Operator>
void bench_states(benchmark::State& state, const Operator& attention) {
  const Index sequences = state.range(0);
  decoder<Operator> decode(attention, sequences, false);
  if (!decode.agrees(state)) return;
  const auto tokens = double(sequences);
  timed<typename Operator::scalar>(state, tokens, tokens * flops_per_token(attention), [&] {
    decode.step_all();
    benchmark::ClobberMemory();
  });
  set_traffic(state, attention, tokens);
}

template <class Operator>
void bench_block(benchmark::State& state, const Operator& attention) {
  const Index n = state.range(0);
  decoder<Operator> decode(attention, 1, false);
  if (!decode.agrees(state)) return;
  timed<typename Operator::scalar>(state, double(n), double(n) * flops_per_token(attention), [&] {
    decode.block(n);
    benchmark::ClobberMemory();
  });
}

/// Times of single calls by the wall clock, which is what a deadline is kept by: neighbours and the system included.
/// Reading the clock is part of every time; clock_ns says how much.
template <class Call>
void set_latencies(benchmark::State& state, std::size_t calls, double deadline, Call call) {
  using clock = std::chrono::steady_clock;
  std::vector<double> times(calls), empty(1000);
  const auto measure = [](std::vector<double>& into, const auto& f) {
    Index t = 0;
    for (double& time : into) {
      const auto start = clock::now();
      f(t++);
      time = std::chrono::duration<double, std::nano>(clock::now() - start).count();
    }
    std::sort(into.begin(), into.end());
  };
  for (auto _ : state) {
    measure(empty, [](Index) {});
    measure(times, call);
  }
  const auto at = [&](double share) { return times[std::min(calls - 1, std::size_t(share * double(calls)))]; };
  state.counters["clock_ns"] = empty[empty.size() / 2];
  state.counters["p50_ns"] = at(0.5);
  state.counters["p99_ns"] = at(0.99);
  state.counters["p99.9_ns"] = at(0.999);
  state.counters["max_ns"] = times.back();
  if (deadline > 0) state.counters["p99.9_of_deadline"] = at(0.999) * 1e-9 / deadline;
}

template <class Operator>
void bench_step_latency(benchmark::State& state, const Operator& attention) {
  decoder<Operator> decode(attention, 1, false);
  if (!decode.agrees(state)) return;
  set_latencies(state, 1000000, 0, [&](Index t) { decode.step(t % period); });
}

template <class Operator>
void bench_block_latency(benchmark::State& state, const Operator& attention) {
  decoder<Operator> decode(attention, 1, false);
  if (!decode.agrees(state)) return;
  set_latencies(state, 100000, 64 / 48000.0, [&](Index) { decode.block(64); });
}

// ---- the table ------------------------------------------------------------------------------------------------------

benchmark::internal::Benchmark* add(const std::string& name, std::function<void(benchmark::State&)> f) {
  return benchmark::RegisterBenchmark(name.c_str(), std::move(f))->Unit(benchmark::kNanosecond);
}

std::string sizes(const char* how, Index d, Index h) {
  return std::string(how) + "/D:" + std::to_string(d) + "/H:" + std::to_string(h);
}

template <class T, class Operator>
void register_sizes(const char* how, const Operator& attention) {
  const std::string scalar = std::is_same_v<T, float> ? "float/" : "double/";
  const std::string name = scalar + sizes(how, attention.head_dim(), attention.heads());
  add("BM_step/" + name, [attention](benchmark::State& state) { bench_step(state, attention, false); });
  if (!std::is_same_v<T, float>) return;
  add("BM_step/silent/" + name, [attention](benchmark::State& state) { bench_step(state, attention, true); });
  if (attention.heads() > 1 || attention.head_dim() > 32) return;
  for (const Index n : {1, 4, 16, 64}) {
    add("BM_block/" + name, [attention](benchmark::State& state) { bench_block(state, attention); })
        ->ArgName("N")
        ->Arg(n);
  }
}

template <class T, Index D, Index H>
void register_both() {
  register_sizes<T>("dynamic", dynamic_operator<elu_plus_one, T>(D, H));
  register_sizes<T>("fixed", linear_attention<elu_plus_one, additive, T, D, D, H>());
}

void register_all() {
  register_both<float, 4, 1>();
  register_both<float, 8, 1>();
  register_both<float, 16, 1>();
  register_both<float, 32, 1>();
  register_both<float, 64, 1>();
  register_both<float, 128, 1>();
  register_both<float, 64, 8>();
  register_both<float, 128, 8>();
  register_both<double, 64, 8>();
  for (const Index sequences : {1, 4, 16, 64, 256, 1024, 4096}) {
    add("BM_step_states/" + sizes("dynamic", 64, 1),
        [](benchmark::State& state) { bench_states(state, dynamic_operator<elu_plus_one, float>(64, 1)); })
        ->ArgName("B")
        ->Arg(sequences);
  }
  add("BM_step_latency/" + sizes("dynamic", 64, 8), [](benchmark::State& state) {
    bench_step_latency(state, dynamic_operator<elu_plus_one, float>(64, 8));
  })->Iterations(1);
  add("BM_step_latency/" + sizes("fixed", 16, 1), [](benchmark::State& state) {
    bench_step_latency(state, linear_attention<elu_plus_one, additive, float, 16>());
  })->Iterations(1);
  add("BM_block_latency/" + sizes("fixed", 16, 1), [](benchmark::State& state) {
    bench_block_latency(state, linear_attention<elu_plus_one, additive, float, 16>());
  })->Iterations(1);
}

}  // namespace

int main(int argc, char** argv) {
  register_all();
  return run(argc, argv);
}
