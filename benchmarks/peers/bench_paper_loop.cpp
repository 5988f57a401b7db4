// What does the library bring against the 2020 paper's per-token loop (paper_loop.hpp)?
//
//   BM_loop        the loop: features in, no normaliser
//   BM_product     linattn's same product: no feature map, no normaliser
//   BM_attention   linattn with elu + 1 and the normaliser, both of which the loop leaves to others
//
// All on the loop's layout, (H, N, D). peak_fraction is that of CPU time on one thread and of the wall clock on more.
// run.py interleaves the repetitions. Before timing, the loop's outputs are compared with the product's.
#include "../common.hpp"
#include "../paired.hpp"

#include "paper_loop.hpp"

#include <linattn/batch.hpp>
#include <linattn/executors.hpp>

#include <map>
#include <thread>

using namespace linattn;
using namespace linattn_bench;

namespace {

constexpr Index tokens = 4096, heads = 8;

struct inputs {
  Index d;
  row_matrix<float> q = normal_matrix<float>(heads * tokens, d, 1);  // (H N, D), as are the others
  row_matrix<float> k = normal_matrix<float>(heads * tokens, d, 2);
  row_matrix<float> v = normal_matrix<float>(heads * tokens, d, 3);
  row_matrix<float> out = row_matrix<float>::Zero(heads * tokens, d);

  explicit inputs(Index dim) : d(dim) {}
};

/// Kept: repetitions share a shape's inputs.
inputs& inputs_of(Index d) {
  static std::map<Index, inputs> kept;
  return kept.try_emplace(d, d).first->second;
}

void run_loop(inputs& p, int threads) {
  const auto d = std::size_t(p.d);
  peers::paper_loop(p.q.data(), p.k.data(), p.v.data(), p.out.data(), heads, tokens, d, d, threads);
}

/// linattn on the same memory.
template <class Map>
class subject {
 public:
  subject(Index d, bool normalize, int threads)
      : m_attention({.head_dim = d, .heads = heads, .normalize = normalize}),
        m_workspaces(make_workspaces(m_attention, threads)),
        m_pool(threads) {}

  void run(inputs& p) {
    const auto view = [&](auto& x) { return bhnd(x.data(), 1, tokens, heads, p.d); };
    forward_causal(m_attention, {}, view(p.q), view(p.k), view(p.v), view(p.out), m_workspaces, m_pool);
  }

 private:
  using attention = linear_attention<Map>;
  attention m_attention;
  std::vector<typename attention::workspace_type> m_workspaces;
  thread_pool m_pool;
};

/// Both round in float, in another order, running sums of 4,096 terms. A token or a head that is mistaken changes a
/// part in a hundred.
constexpr double same_product_tolerance = 1e-5;

double loop_error(inputs& p) {
  subject<identity> product(p.d, false, 1);
  product.run(p);
  const row_matrix<float> expected = p.out;
  p.out.setZero();
  run_loop(p, 2);
  return double((p.out - expected).norm()) / double(expected.norm());
}

template <class Call>
void timed_on(int threads, benchmark::State& state, const Call& call) {
  const Index d = state.range(0);
  const double peak = fma_peak<float>() * threads;
  const auto now = threads == 1 ? seconds : wall_seconds;
  call();
  const double start = now();
  for (auto _ : state) {
    call();
    benchmark::ClobberMemory();
  }
  const double each = (now() - start) / double(state.iterations());
  state.counters["peak_gflops"] = peak * 1e-9;
  state.counters["peak_fraction"] = causal_flops(tokens, double(d), double(d), heads) / each / peak;
}

void BM_loop(benchmark::State& state) {
  inputs& p = inputs_of(state.range(0));
  static std::set<Index> checked;
  if (checked.insert(p.d).second) {
    const double error = loop_error(p);
    if (!(error <= same_product_tolerance))
      return fail(state, "the loop's outputs differ from the product's by ", error);
  }
  const int threads = int(state.range(1));
  timed_on(threads, state, [&] { run_loop(p, threads); });
}

void BM_product(benchmark::State& state) {
  const int threads = int(state.range(1));
  subject<identity> product(state.range(0), false, threads);
  timed_on(threads, state, [&] { product.run(inputs_of(state.range(0))); });
}

void BM_attention(benchmark::State& state) {
  const int threads = int(state.range(1));
  subject<elu_plus_one> attention(state.range(0), true, threads);
  timed_on(threads, state, [&] { attention.run(inputs_of(state.range(0))); });
}

void shapes(benchmark::internal::Benchmark* b) {
  const int all = int(std::max(1U, std::thread::hardware_concurrency()));
  b->ArgNames({"D", "threads"})->Unit(benchmark::kMillisecond)->UseRealTime();
  for (const Index d : {32, 64, 128}) {
    b->Args({d, 1});
    if (all > 1) b->Args({d, all});
  }
}

BENCHMARK(BM_loop)->Apply(shapes);
BENCHMARK(BM_product)->Apply(shapes);
BENCHMARK(BM_attention)->Apply(shapes);

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
