// What does one token of each of many sequences cost, and does it matter where their states lie?
//
//   BM_batch_step  step of B sequences, contiguous states, T threads; against the same number of single calls
//   BM_pool_slots  step of B sequences whose states lie in random slots of a pool, against slots 0 ... B - 1
//
// 8 heads of 64 x 64: 130 KiB of state a sequence, read and written once a token, so that few sequences stay in the
// caches and many do not. Each iteration times both ways, one after the other; figures are medians over iterations.
// tokens_per_second is that of the wall clock with several threads, of CPU time with one.
#include "paired.hpp"

#include <linattn/batch.hpp>

#include <algorithm>
#include <numeric>
#include <random>

using namespace linattn;
using namespace linattn_bench;

namespace {

using attention = linear_attention<elu_plus_one>;

constexpr Index iterations = 51;
constexpr std::int32_t pool_slots = 1024;

/// One token of each sequence, and a pool with more states than they need.
class decoder {
 public:
  decoder(Index sequences, Index threads)
      : m_inputs(sequences, 64, 64, 8),
        m_attn({.head_dim = 64, .heads = 8}),
        m_workspaces(make_workspaces(m_attn, threads)),
        m_memory(m_attn.state_bytes() / Index(sizeof(float)) * pool_slots) {
    m_pool = {.memory = m_memory.data(), .bytes_per_slot = m_attn.state_bytes(), .capacity = pool_slots};
    reset();
  }
  void reset() const {
    for (std::int32_t slot = 0; slot < pool_slots; ++slot) m_attn.make_state(m_pool[slot]);
  }

  template <class Executor>
  void step(const std::vector<std::int32_t>& slots, const Executor& executor) {
    m_pool.slots = slots;
    linattn::step(m_attn, m_pool, one_each(m_inputs.q, 8), one_each(m_inputs.k, 8), one_each(m_inputs.v, 8),
                  one_each(m_inputs.out, 8), m_workspaces, executor);
  }
  /// The same, a call for each sequence.
  void step_singly(const std::vector<std::int32_t>& slots) {
    for (std::size_t b = 0; b < slots.size(); ++b) {
      const auto row = static_cast<Index>(b);
      auto state = m_attn.attach_state(m_pool[slots[b]]);
      m_attn.step(state, m_inputs.q.row(row), m_inputs.k.row(row), m_inputs.v.row(row), m_inputs.out.row(row),
                  m_workspaces.front());
    }
  }
  const row_matrix<float>& out() const { return m_inputs.out; }
  double bytes_per_token() const { return step_bytes(64, 64, 8, sizeof(float)); }

 private:
  problem<float> m_inputs;
  attention m_attn;
  std::vector<attention::workspace_type> m_workspaces;
  detail::heap_slab<float> m_memory;
  state_pool m_pool;
};

std::vector<std::int32_t> first_slots(Index count) {
  std::vector<std::int32_t> slots(static_cast<std::size_t>(count));
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}
std::vector<std::int32_t> random_slots(Index count) {
  auto slots = first_slots(pool_slots);
  std::shuffle(slots.begin(), slots.end(), std::mt19937(5));
  slots.resize(static_cast<std::size_t>(count));
  return slots;
}

/// Two ways to take a step, timed in turn after they gave the same bits from the same states.
template <class Base, class Other>
bool compare(benchmark::State& state, decoder& decode, pairs& times, const Base& base, const Other& other) {
  base();
  const row_matrix<float> expected = decode.out();
  decode.reset();
  other();
  if (decode.out() != expected) {
    fail(state, "the outputs differ, of so many sequences: ", double(expected.rows()));
    return false;
  }
  for (auto _ : state) {
    const cost first = base(), second = other();
    state.SetIterationTime(second.wall);
    times.add(first, second);
  }
  return true;
}

void set_rate(benchmark::State& state, const decoder& decode, const pairs& times, Index tokens, Index threads) {
  const double rate = double(tokens) / (threads == 1 ? times.cpu() : times.wall());
  state.counters["tokens_per_second"] = rate;
  state.counters["state_bytes_per_second"] = rate * decode.bytes_per_token();
}

void BM_batch_step(benchmark::State& state) {
  const Index sequences = state.range(0), threads = state.range(1);
  decoder decode(sequences, threads);
  const thread_pool pool{static_cast<int>(threads)};
  const auto slots = first_slots(sequences);
  const Index times_each = std::max<Index>(1, 64 / sequences);
  const auto singly = [&] { return measured_alone(times_each, [&] { decode.step_singly(slots); }); };
  const auto at_once = [&] {
    if (threads == 1) return measured_alone(times_each, [&] { decode.step(slots, sequential()); });
    return measured(pool, [&](const auto& executor) {
      for (Index i = 0; i < times_each; ++i) decode.step(slots, executor);
    });
  };
  pairs times;
  if (!compare(state, decode, times, singly, at_once)) return;
  set_rate(state, decode, times, sequences * times_each, threads);
  state.counters["speedup"] = times.speedup();
  state.counters["path_speedup"] = times.path_speedup();
  state.counters["cpu_ratio"] = times.cpu_ratio();
}

/// random_per_contiguous is the ratio of CPU times.
void BM_pool_slots(benchmark::State& state) {
  const Index sequences = state.range(0), threads = state.range(1);
  decoder decode(sequences, threads);
  const thread_pool pool{static_cast<int>(threads)};
  const auto in_order = first_slots(sequences), anywhere = random_slots(sequences);
  const auto step = [&](const std::vector<std::int32_t>& slots) {
    return measured(pool, [&](const auto& executor) { decode.step(slots, executor); });
  };
  pairs times;
  if (!compare(
          state, decode, times, [&] { return step(in_order); }, [&] { return step(anywhere); })) {
    return;
  }
  set_rate(state, decode, times, sequences, threads);
  state.counters["random_per_contiguous"] = times.cpu_ratio();
}

void all_counts(benchmark::internal::Benchmark* b) {
  b->ArgNames({"B", "T"})->Iterations(iterations)->UseManualTime()->Unit(benchmark::kMicrosecond);
  for (const Index threads : {1, 2}) {
    for (Index sequences = 1; sequences <= pool_slots; sequences *= 2) b->Args({sequences, threads});
  }
}
void some_counts(benchmark::internal::Benchmark* b) {
  b->ArgNames({"B", "T"})->Iterations(iterations)->UseManualTime()->Unit(benchmark::kMicrosecond);
  for (const Index threads : {1, 2}) {
    for (const Index sequences : {16, 64, 256}) b->Args({sequences, threads});
  }
}

BENCHMARK(BM_batch_step)->Apply(all_counts);
BENCHMARK(BM_pool_slots)->Apply(some_counts);

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
