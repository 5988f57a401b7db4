// Two ways of doing one thing, timed in turn within one process, so that both meet the same machine.
#pragma once

#include "common.hpp"

#include <linattn/executors.hpp>

#include <chrono>
#include <ctime>
#include <thread>
#include <vector>

namespace linattn_bench {

/// The middle one; of an even number, the upper of the two.
inline double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + std::ptrdiff_t(x.size() / 2), x.end());
  return x[x.size() / 2];
}

/// CPU seconds of all threads of this process.
inline double process_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

inline double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// An executor that takes the CPU time of the tasks which another one runs.
template <class Executor>
class metered {
 public:
  explicit metered(const Executor& executor) : m_executor(executor) {}

  template <class F>
  void parallel_for(Index n, const F& f) const {
    std::vector<double> taken(static_cast<std::size_t>(n), 0);
    const auto caller = std::this_thread::get_id();
    double own = 0;
    m_executor.parallel_for(n, [&](Index i) {
      const double start = seconds();
      f(i);
      double& t = taken[static_cast<std::size_t>(i)] = seconds() - start;
      if (std::this_thread::get_id() == caller) own += t;
    });
    m_beyond += *std::max_element(taken.begin(), taken.end()) - own;
  }

  /// What the longest tasks take more than the calling thread's own.
  double beyond() const { return m_beyond; }

 private:
  const Executor& m_executor;
  mutable double m_beyond = 0;
};

/// What a call took, in seconds.
struct cost {
  double wall = 0;
  double cpu = 0;   ///< of all threads
  double path = 0;  ///< CPU of the calling thread and of the longest tasks: what it lasts where every task has a core
};

/// call(executor), measured.
template <class Executor, class Call>
cost measured(const Executor& executor, const Call& call) {
  const metered<Executor> meter(executor);
  const double wall = wall_seconds(), cpu = process_seconds(), own = seconds();
  call(meter);
  return {wall_seconds() - wall, process_seconds() - cpu, seconds() - own + meter.beyond()};
}

/// call(), in the calling thread, `times` times: for calls so short that reading the clocks would count.
template <class Call>
cost measured_alone(Index times, const Call& call) {
  const double wall = wall_seconds(), own = seconds();
  for (Index i = 0; i < times; ++i) call();
  const double cpu = seconds() - own;
  return {wall_seconds() - wall, cpu, cpu};
}

/// Costs of two ways, pair by pair.
class pairs {
 public:
  void add(const cost& base, const cost& other) {
    m_wall.push_back(other.wall);
    m_cpu.push_back(other.cpu);
    m_wall_ratio.push_back(base.wall / other.wall);
    m_path_ratio.push_back(base.path / other.path);
    m_cpu_ratio.push_back(other.cpu / base.cpu);
  }
  /// Medians. Of the speedups, the first is what the wall clock says, neighbours included; the second is that of a
  /// machine which gives every task a core, and misses only what threads wait for the system to start them.
  double wall() const { return median(m_wall); }
  double cpu() const { return median(m_cpu); }
  double speedup() const { return median(m_wall_ratio); }
  double path_speedup() const { return median(m_path_ratio); }
  double cpu_ratio() const { return median(m_cpu_ratio); }

 private:
  std::vector<double> m_wall, m_cpu, m_wall_ratio, m_path_ratio, m_cpu_ratio;
};

}  // namespace linattn_bench
