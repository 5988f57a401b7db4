// What the machine can do, measured in the process that is judged by it: FMA peak, clock, bandwidth of each level.
//
// Everything runs on one thread and in float or double packets of the width the library was built with.
#pragma once

#include <linattn/detail/layout.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <string>
#include <vector>

namespace linattn_bench {

using Eigen::Index;

/// CPU seconds of this thread. The machine may be shared: wall time would charge a benchmark for its neighbours, and a
/// probe interrupted by them would flatter it.
inline double seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

/// The best of a few: an interrupted probe measures too little, and a roof measured too low would flatter.
template <class Probe>
double best_of(int times, Probe probe) {
  double best = 0;
  for (int i = 0; i < times; ++i) best = std::max(best, probe());
  return best;
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------

/// FLOP/s of fourteen independent chains of fused multiply-adds on the packet type the library was built with, over
/// about a millisecond. The accumulators have names: an array of them would live in memory. They differ: equal ones
/// would be merged by the compiler.
template <class T>
[[gnu::noinline]] double fma_peak_once() {
  using P = linattn::detail::packet<T>;
  constexpr int rounds = 20000;
  P a(T(1)), b(T(2)), c(T(3)), d(T(4)), e(T(5)), f(T(6)), g(T(7)), h(T(8)), i(T(9)), j(T(10)), k(T(11)), l(T(12)),
      m(T(13)), n(T(14));
  P x(T(0.9375)), y(T(0.0625));
  benchmark::DoNotOptimize(x.lanes);
  benchmark::DoNotOptimize(y.lanes);
  const double start = seconds();
  for (int r = 0; r < rounds; ++r) {
    a = fma(a, x, y), b = fma(b, x, y), c = fma(c, x, y), d = fma(d, x, y), e = fma(e, x, y), f = fma(f, x, y);
    g = fma(g, x, y), h = fma(h, x, y), i = fma(i, x, y), j = fma(j, x, y), k = fma(k, x, y), l = fma(l, x, y);
    m = fma(m, x, y), n = fma(n, x, y);
  }
  T total = sum(((a + b) + (c + d)) + ((e + f) + (g + h)) + ((i + j) + (k + l)) + (m + n));
  benchmark::DoNotOptimize(total);
  return 2.0 * 14 * double(P::size) * rounds / (seconds() - start);
}

template <class T>
double fma_peak() {
  return best_of(5, fma_peak_once<T>);
}

/// The same figure found another way: no Eigen, the compiler's own vectors of the same width, another recurrence, ten
/// times as long. As many chains: multiplying, then adding has six cycles of latency to fill, twice a cycle.
template <class T>
[[gnu::noinline]] double vector_peak_once() {
  constexpr Index size = linattn::detail::packet<T>::size;
  using vector [[gnu::vector_size(size * sizeof(T))]] = T;
  constexpr int rounds = 200000;
  vector scale = vector{} + T(-0.5), one = vector{} + T(1);
  asm volatile("" : "+m"(scale), "+m"(one));
  vector a = one, b = a + one, c = b + one, d = c + one, e = d + one, f = e + one, g = f + one, h = g + one,
         i = h + one, j = i + one, k = j + one, l = k + one, m = l + one, n = m + one;
  const double start = seconds();
  for (int r = 0; r < rounds; ++r) {
    a = a * scale + one, b = b * scale + one, c = c * scale + one, d = d * scale + one, e = e * scale + one;
    f = f * scale + one, g = g * scale + one, h = h * scale + one, i = i * scale + one, j = j * scale + one;
    k = k * scale + one, l = l * scale + one, m = m * scale + one, n = n * scale + one;
  }
  vector total = a + b + c + d + e + f + g + h + i + j + k + l + m + n;
  asm volatile("" : "+m"(total));
  return 2.0 * 14 * double(size) * rounds / (seconds() - start);
}

template <class T>
double vector_peak() {
  return best_of(5, vector_peak_once<T>);
}

/// Cycles per second: a chain of additions of a register, one cycle each on every processor we know. The peak divided
/// by it is flops a cycle, a number the processor's manual states.
[[gnu::noinline]] inline double clock_once() {
  constexpr int rounds = 20000, unrolled = 32;
  std::uint64_t x = 1, y = 3;
  const double start = seconds();
  for (int r = 0; r < rounds; ++r) {
    linattn::detail::unroll<unrolled>([&](auto) {
      x += y;
      asm volatile("" : "+r"(x), "+r"(y));
    });
  }
  return double(rounds) * unrolled / (seconds() - start);
}

inline double clock_rate() { return best_of(5, clock_once); }

// ---- memory ---------------------------------------------------------------------------------------------------------

enum class access {
  read,    ///< sum += x: size bytes
  update,  ///< x += c: size bytes read, the same bytes written
  copy,    ///< y = x: half of size read, the other half written; that y's lines are read first is not counted
};

/// Bytes per second of one access pattern over `size` bytes, `passes` times.
template <access Pattern>
[[gnu::noinline]] double bandwidth_once(float* x, Index size, Index passes) {
  using P = linattn::detail::packet<float>;
  constexpr Index unrolled = 8, stride = unrolled * P::size;
  const Index n = size / Index(sizeof(float)) / (2 * stride) * (2 * stride);
  P total[unrolled];
  linattn::detail::unroll<unrolled>([&](auto u) { total[u] = P::zero(); });
  const P c(1.0F);
  const double start = seconds();
  for (Index pass = 0; pass < passes; ++pass) {
    const Index end = Pattern == access::copy ? n / 2 : n;
    for (Index i = 0; i < end; i += stride) {
      linattn::detail::unroll<unrolled>([&](auto u) {
        const P loaded = P::load(x + i + u * P::size);
        if constexpr (Pattern == access::read) total[u] = total[u] + loaded;
        if constexpr (Pattern == access::update) (loaded + c).store(x + i + u * P::size);
        if constexpr (Pattern == access::copy) loaded.store(x + n / 2 + i + u * P::size);
      });
    }
    benchmark::ClobberMemory();
  }
  float sink = 0;
  linattn::detail::unroll<unrolled>([&](auto u) { sink += sum(total[u]); });
  benchmark::DoNotOptimize(sink);
  return double(passes) * double(n) * sizeof(float) * (Pattern == access::update ? 2 : 1) / (seconds() - start);
}

struct memory_level {
  std::string name;
  double capacity = 0;  ///< bytes; infinite for DRAM
  double probed = 0;    ///< bytes of the buffer its bandwidths were measured on
  double read = 0;      ///< bytes per second
  double update = 0;    ///< bytes per second, reading and writing counted
  double copy = 0;      ///< bytes per second, reading and writing counted
};

/// L1 ... and DRAM, nearest first, measured once a process. A cache is probed with a part of it: three quarters of L1,
/// half of L2, and a quarter of the last one, which other cores share; DRAM with four times the last cache, 1 GiB at
/// most.
inline const std::vector<memory_level>& memory_levels() {
  static const std::vector<memory_level> levels = [] {
    std::vector<memory_level> found;
    for (const auto& cache : benchmark::CPUInfo::Get().caches) {
      if (cache.type != "Instruction")
        found.push_back({std::string("L").append(std::to_string(cache.level)), double(cache.size)});
    }
    if (found.empty()) found = {{"L1", 32 << 10}, {"L2", 1 << 20}, {"L3", 32 << 20}};  // not told: common sizes
    const double last = found.back().capacity;
    for (std::size_t i = 0; i < found.size(); ++i) {
      found[i].probed = found[i].capacity * (i == 0 ? 0.75 : i + 1 < found.size() ? 0.5 : 0.25);
    }
    found.push_back({"DRAM", INFINITY, std::min(4 * last, double(1 << 30))});
    linattn::detail::heap_slab<float> buffer(Index(found.back().probed / sizeof(float)));
    for (auto& level : found) {
      const auto size = Index(level.probed);
      const Index passes = std::max<Index>(1, (Index(32) << 20) / size);  // milliseconds in all
      level.read = best_of(5, [&] { return bandwidth_once<access::read>(buffer.data(), size, passes); });
      level.update = best_of(5, [&] { return bandwidth_once<access::update>(buffer.data(), size, passes); });
      level.copy = best_of(5, [&] { return bandwidth_once<access::copy>(buffer.data(), size, passes); });
    }
    return found;
  }();
  return levels;
}

/// The nearest level that holds `bytes`.
inline const memory_level& level_of(double bytes) {
  return *std::find_if(memory_levels().begin(), memory_levels().end(),
                       [&](const memory_level& level) { return bytes <= level.capacity; });
}

}  // namespace linattn_bench
