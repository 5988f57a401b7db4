// Who runs the tasks of a batch: an argument of the batch verbs, never hidden.
//
//   linattn::thread_pool pool(8);
//   auto ws = linattn::make_workspaces(attn, 8);
//   linattn::forward_causal(attn, states, q, k, v, out, ws, pool);
//
// An executor is any type with
//
//   parallel_for(n, f)     calls f(0), f(1), ..., f(n - 1), each once, in any order and from any threads, and returns
//                          when all of them have; an exception that leaves an f(i) leaves parallel_for, too
//
// so oneTBB's arena or an engine's own pool is a struct of three lines (examples/12_executors.cpp). n is at most the
// number of workspaces of the call, and f(w) is the only one that uses workspace w. What is computed does not depend on
// who runs it, bitwise.
#pragma once

#include <linattn/version.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <concepts>
#include <exception>
#include <mutex>
#include <thread>

#if __has_include(<Eigen/ThreadPool>)
#include <Eigen/ThreadPool>
#elif __has_include(<unsupported/Eigen/CXX11/ThreadPool>)
#include <unsupported/Eigen/CXX11/ThreadPool>
#endif

LINATTN_NAMESPACE_BEGIN

namespace detail {
struct any_task {
  void operator()(Eigen::Index) const {}
};

/// The first exception of several tasks, kept until all are done.
class first_exception {
 public:
  /// f(i), or what it throws is kept.
  template <class F>
  void guard(const F& f, Eigen::Index i) noexcept {
#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
    try {
      f(i);
    } catch (...) {
      const std::lock_guard lock(m_mutex);
      if (!m_exception || i < m_task) {
        m_exception = std::current_exception();
        m_task = i;
      }
    }
#else
    f(i);
#endif
  }
  /// To the caller, once nothing runs any more: that of the lowest task, whatever the order of time.
  void rethrow() const {
    if (m_exception) std::rethrow_exception(m_exception);
  }

 private:
  std::mutex m_mutex;
  std::exception_ptr m_exception;
  [[maybe_unused]] Eigen::Index m_task = 0;  // without exceptions
};
}  // namespace detail

/// For constraining code of your own: `E` can run tasks, as the comment above says.
template <class E>
concept executor = requires(const E& e, const detail::any_task& f) {
  e.parallel_for(Eigen::Index(), f);
};

/// One task after the other, in the calling thread. The default.
struct sequential {
  template <class F>
  void parallel_for(Eigen::Index n, const F& f) const {
    for (Eigen::Index i = 0; i < n; ++i) f(i);
  }
};

#ifdef _OPENMP
/// OpenMP's threads, where the program is compiled for it (-fopenmp). Called from inside a parallel region it runs in
/// the calling thread, as OpenMP does unless told otherwise.
struct openmp {
  template <class F>
  void parallel_for(Eigen::Index n, const F& f) const {
    detail::first_exception exception;
#pragma omp parallel for schedule(static, 1)
    for (Eigen::Index i = 0; i < n; ++i) exception.guard(f, i);
    exception.rethrow();
  }
};
#endif

/// Eigen's thread pool, its own or one that the program has already. The calling thread takes a share of the work, so a
/// pool of T threads has T - 1 beside it. Calls from several threads at once are fine, from inside its own tasks not:
/// they would wait for each other. A call allocates what it takes to queue n - 1 tasks, and costs some microseconds:
/// too much for a decode step of a few sequences, which `sequential` does in less.
class thread_pool {
 public:
  /// Throws nothing of its own; what the system throws for threads that it does not give, it throws.
  explicit thread_pool(int threads = int(std::max(1u, std::thread::hardware_concurrency())))
      : m_own(std::max(0, threads - 1)), m_pool(threads > 1 ? &m_own : nullptr) {}
  /// The caller's, which outlives this.
  explicit thread_pool(Eigen::ThreadPoolInterface& pool) : m_own(0), m_pool(&pool) {}
  thread_pool(const thread_pool&) = delete;
  thread_pool& operator=(const thread_pool&) = delete;

  /// Threads that work on a call, the calling one among them.
  int threads() const { return 1 + (m_pool == nullptr ? 0 : m_pool->NumThreads()); }

  template <class F>
  void parallel_for(Eigen::Index n, const F& f) const {
    if (n <= 1 || m_pool == nullptr) return sequential().parallel_for(n, f);
    detail::first_exception exception;
    Eigen::Barrier others(static_cast<unsigned>(n - 1));
    for (Eigen::Index i = 1; i < n; ++i) {
      const auto task = [&exception, &others, &f, i] {
        exception.guard(f, i);
        others.Notify();
      };
      schedule(task);
    }
    exception.guard(f, 0);
    others.Wait();
    exception.rethrow();
  }

 private:
  /// Into the queue, or where there is no memory for that, here and now: the tasks before it know this call's frame.
  template <class Task>
  void schedule(const Task& task) const {
#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
    try {
      m_pool->Schedule(task);
    } catch (...) {
      task();
    }
#else
    m_pool->Schedule(task);
#endif
  }

  Eigen::ThreadPool m_own;
  Eigen::ThreadPoolInterface* m_pool;
};

LINATTN_NAMESPACE_END
