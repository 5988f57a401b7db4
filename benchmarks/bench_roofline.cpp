// How close does every form come to what the machine can do?
//
//   BM_machine           no form: the roofs themselves, FMA peak and bandwidths, and an independent probe of the peak
//   BM_forward           linear_attention::forward         absorb, then read
//   BM_forward_causal    linear_attention::forward_causal  pack, kernel reading and writing, unpack
//   BM_absorb, BM_read   linear_attention::absorb, read    the halves of the non-causal form
//   BM_step              linear_attention::step            N = 1 by definition
//   BM_core_causal       forward_causal with the identity map: no map, no normaliser, one head
//   BM_kernel_*/B:b      detail::attend_head on packed, aligned rows, b tokens a micro-block: nothing but the kernel
//
// The bound of a call is the smaller of two roofs. Arithmetic: useful flops at the FMA peak. Memory: the compulsory
// traffic (common.hpp) at the bandwidth of the nearest level that holds the whole working set, inputs, outputs and
// state, because a benchmark calls again and again on the same ones; the library's scratch is not counted. Every
// written byte is paired with a read one at the update rate, and what is left is read at the read rate:
//
//   seconds >= max(flops / peak, 2 written / update + (read - written) / read rate)
//
// Generous to the machine: outputs are not written in place, and their lines are read, too, before they are written.
// bound_fraction is that time over the measured one. It is a share of what is possible only as far as the working set
// stays where the model says: a state larger than L2 moves through L3 once a block of tokens and is charged for once.
#include "common.hpp"

#include <optional>

using namespace linattn;
using namespace linattn_bench;

namespace {

using T = float;

/// How far a rate may exceed a bandwidth: the level is chosen by size alone, but a set just too large for a cache
/// still finds part of itself there, and the bandwidths were measured at another moment of a shared machine.
constexpr double bandwidth_slack = 1.25;
/// How far two probes of the FMA peak may lie apart.
constexpr double probe_tolerance = 0.1;
/// The largest N checked against the quadratic reference in double; longer calls take the same path.
constexpr Index checked_tokens = 1024;
constexpr double most_bytes = double(Index(2) << 30);

enum class form { forward, forward_causal, absorb, read, step };

double flops_of(form which, double n, double c, double m, double h) {
  if (which == form::forward) return forward_flops(n, c, m, h);
  return which == form::absorb || which == form::read ? half_flops(n, c, m, h) : causal_flops(n, c, m, h);
}

traffic traffic_of(form which, double n, double d, double c, double m, double h) {
  if (which == form::absorb) return absorb_traffic(n, d, c, m, h, sizeof(T));
  return which == form::read ? read_traffic(n, d, c, m, h, sizeof(T)) : forward_traffic(n, d, c, m, h, sizeof(T));
}

/// Seconds that `moved` takes at least in `level`.
double memory_seconds(const memory_level& level, const traffic& moved) {
  return 2 * moved.written / level.update + std::max(0.0, moved.read - moved.written) / level.read;
}

/// After timed(): bytes, bound and the fraction of it.
void set_bound(benchmark::State& state, double flops, const traffic& moved) {
  if (state.error_occurred()) return;
  const memory_level& level = level_of(moved.working_set);
  const double rate = state.counters["flops_per_second"];
  const double bound = std::min(state.counters["peak_gflops"] * 1e9, flops / memory_seconds(level, moved));
  state.counters["bytes_per_second"] = rate / flops * moved.bytes();
  state.counters["flops_per_byte"] = flops / moved.bytes();
  state.counters["bound_gflops"] = bound * 1e-9;
  state.counters["bound_fraction"] = rate / bound;
  state.SetLabel(level.name);
  if (rate > bandwidth_slack * bound) fail(state, "faster than the memory: bound_fraction ", rate / bound);
}

using elu_attention = linear_attention<elu_plus_one>;

/// One call of a form on all rows of p, or of `step` on its first.
void call(form which, const elu_attention& attention, elu_attention::state_type& s, problem<T>& p,
          elu_attention::workspace_type& ws) {
  switch (which) {
    case form::forward:
      return attention.forward(s, p.q, p.k, p.v, p.out, ws);
    case form::forward_causal:
      return attention.forward_causal(s, p.q, p.k, p.v, p.out, ws);
    case form::absorb:
      return attention.absorb(s, p.k, p.v, ws);
    case form::read:
      return attention.read(s, p.q, p.out, ws);
    case form::step:
      auto out = p.out.row(0);
      return attention.step(s, p.q.row(0), p.k.row(0), p.v.row(0), out, ws);
  }
}

/// Error of the form against the quadratic reference; absorb and read need each other for that.
double check(form which, const elu_attention& attention, problem<T>& p, elu_attention::workspace_type& ws) {
  auto s = attention.make_state();
  if (which == form::step) {
    problem<T> tokens(16, p.d, p.m, p.h);
    for (Index t = 0; t < tokens.n; ++t) {
      auto out = tokens.out.row(t);
      attention.step(s, tokens.q.row(t), tokens.k.row(t), tokens.v.row(t), out, ws);
    }
    return check_rows(attention, tokens, true);
  }
  const bool half = which == form::absorb || which == form::read;
  if (half) call(form::absorb, attention, s, p, ws);
  call(half ? form::read : which, attention, s, p, ws);
  return check_rows(attention, p, which == form::forward_causal);
}

void bench_form(benchmark::State& state, form which) {
  const Index d = state.range(0), h = state.range(1), n = state.range(2);
  const elu_attention attention({.head_dim = d, .heads = h});
  static std::optional<problem<T>> p;  // kept: repetitions and forms share a shape's inputs
  if (!p || p->n != n || p->d != d || p->h != h) {
    p.reset();
    p.emplace(n, d, d, h);
  }
  auto ws = attention.make_workspace();
  static std::set<std::array<Index, 4>> checked;
  if (n <= checked_tokens && checked.insert({Index(which), d, h, n}).second) {
    const double error = check(which, attention, *p, ws);
    if (!(error <= row_tolerance<T>)) return fail(state, "rows differ from the reference by ", error);
  }
  auto s = attention.make_state();
  attention.absorb(s, p->k.topRows(1), p->v.topRows(1), ws);
  const auto c = double(attention.features());
  const double flops = flops_of(which, double(n), c, double(d), double(h));
  timed<T>(state, double(n), flops, [&] {
    call(which, attention, s, *p, ws);
    benchmark::ClobberMemory();
  });
  set_bound(state, flops, traffic_of(which, double(n), double(d), c, double(d), double(h)));
}

/// The core through the public interface.
void bench_core(benchmark::State& state) {
  const Index d = state.range(0), n = state.range(1);
  const linear_attention<identity> attention({.head_dim = d});
  problem<T> p(n, d, d, 1);
  auto ws = attention.make_workspace();
  attention.forward_causal(p.q, p.k, p.v, p.out, ws);
  const double error = check_rows(attention, p, true);
  if (!(error <= row_tolerance<T>)) return fail(state, "rows differ from the reference by ", error);
  timed<T>(state, double(n), causal_flops(double(n), double(d), double(d), 1), [&] {
    attention.forward_causal(p.q, p.k, p.v, p.out, ws);
    benchmark::ClobberMemory();
  });
}

/// The kernel on packed rows of one head, micro-blocks of B tokens. Keys are small, so that the state stays finite.
template <Index B, detail::kernel_form Form>
void bench_kernel(benchmark::State& state) {
  const Index c = state.range(0), m = state.range(1), n = detail::least_tokens;
  detail::state_layout<T, Eigen::Dynamic, Eigen::Dynamic, 1> layout;
  layout.features = detail::extent<Eigen::Dynamic>(c);
  layout.value_dim = detail::extent<Eigen::Dynamic>(m);
  const auto random = [](Index size, T scale) {
    detail::heap_slab<T> x(size);
    const row_matrix<T> values = normal_matrix<T>(1, size, 1);
    for (Index i = 0; i < size; ++i) x[std::size_t(i)] = scale * values(0, i);
    return x;
  };
  auto q = random(n * layout.feature_stride(), T(1) / T(c));
  auto k = random(n * layout.feature_stride(), T(1e-6));
  auto v = random(n * layout.row_stride(), T(1));
  auto out = random(n * layout.row_stride(), T(0));
  auto s = random(layout.size(), T(1));
  detail::heap_slab<T> denominators(n);
  const double flops = (Form.reads && Form.writes ? causal_flops : half_flops)(double(n), double(c), double(m), 1);
  timed<T>(state, double(n), flops, [&] {
    detail::attend_head<B, Form, false, T>(layout, n / B, {q.data(), k.data(), v.data(), out.data()}, s.data(),
                                           denominators.data(), {});
    benchmark::ClobberMemory();
  });
}

template <Index... B>
void register_kernels() {
  using benchmark::RegisterBenchmark;
  const auto shapes = [](benchmark::internal::Benchmark* b) {
    b->ArgNames({"C", "M"});
    for (const Index d : {32, 64, 128, 256}) b->Args({d, d});
    for (const Index c : {256, 1024, 4096}) b->Args({c, 64});
  };
  (RegisterBenchmark(("BM_kernel_causal/B:" + std::to_string(B)).c_str(), bench_kernel<B, detail::reads_and_writes>)
       ->Apply(shapes),
   ...);
  (RegisterBenchmark(("BM_kernel_absorb/B:" + std::to_string(B)).c_str(), bench_kernel<B, detail::writes_only>)
       ->Apply(shapes),
   ...);
  (RegisterBenchmark(("BM_kernel_read/B:" + std::to_string(B)).c_str(), bench_kernel<B, detail::reads_only>)
       ->Apply(shapes),
   ...);
}

void bench_machine(benchmark::State& state) {
  for (auto _ : state) benchmark::ClobberMemory();
  // Both probes are taken twice, by turns, so that a change of the clock meets both.
  const double peak = best_of(2, fma_peak<T>), probe = best_of(2, vector_peak<T>), clock = clock_rate();
  state.counters["peak_gflops"] = std::max(peak, fma_peak<T>()) * 1e-9;
  state.counters["probe_gflops"] = probe * 1e-9;
  state.counters["clock_ghz"] = clock * 1e-9;
  state.counters["flops_per_cycle"] = peak / clock;
  for (const auto& level : memory_levels()) {
    state.counters[level.name + "_kib"] = level.probed / 1024;
    state.counters[level.name + "_read"] = level.read;
    state.counters[level.name + "_update"] = level.update;
    state.counters[level.name + "_copy"] = level.copy;
  }
  // Too low would flatter. Too high is an error as well, but not where lanes are one and the compiler packs the chains.
  const double ratio = peak / probe;
  if (ratio < 1 - probe_tolerance || (ratio > 1 + probe_tolerance && detail::packet<T>::size > 1)) {
    fail(state, "two probes of the FMA peak differ: ratio ", ratio);
  }
}

void register_all() {
  using benchmark::RegisterBenchmark;
  RegisterBenchmark("BM_machine", bench_machine);
  const std::pair<const char*, form> forms[] = {{"BM_forward", form::forward},
                                                {"BM_forward_causal", form::forward_causal},
                                                {"BM_absorb", form::absorb},
                                                {"BM_read", form::read},
                                                {"BM_step", form::step}};
  std::string skipped;
  for (const Index d : {16, 32, 64, 128, 256}) {
    for (const Index h : {1, 8}) {
      for (const Index n : {1, 64, 1024, 16384, 262144}) {
        const auto elements = double(d), tokens = double(n), heads = double(h);
        if (forward_traffic(tokens, elements, elements, elements, heads, sizeof(T)).working_set > most_bytes) {
          skipped += " D:" + std::to_string(d) + "/H:" + std::to_string(h) + "/N:" + std::to_string(n);
          continue;
        }
        for (const auto& [name, which] : forms) {
          if (which == form::step && n > 1) continue;
          RegisterBenchmark(name, [which = which](benchmark::State& state) { bench_form(state, which); })
              ->ArgNames({"D", "H", "N"})
              ->Args({d, h, n})
              ->Unit(benchmark::kMicrosecond);
        }
      }
    }
  }
  benchmark::AddCustomContext("skipped, over 2 GiB", skipped.empty() ? "nothing" : skipped.substr(1));
  for (const Index d : {32, 64, 128, 256})
    RegisterBenchmark("BM_core_causal", bench_core)->ArgNames({"D", "N"})->Args({d, 4096});
  register_kernels<1, 2, 4, 8>();
}

}  // namespace

int main(int argc, char** argv) {
  register_all();
  return run(argc, argv, default_flags);
}
