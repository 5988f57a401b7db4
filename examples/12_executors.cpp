// 12_executors: who runs the work of a batch is an argument. The bits do not depend on it.
//
//     forward_causal(attn, states, q, k, v, out, ws, executor)
//
//     task 0 ------ workspace 0        as many tasks at once as there are workspaces: ranges of heads of the sequences
//     task 1 ------ workspace 1        or, where there are fewer heads than workspaces, columns of their values
//     ...
//
// An executor is any type with parallel_for(n, f). linattn has `sequential`, `thread_pool` (Eigen's) and, in programs
// compiled for it, `openmp`; below are two more, of std::thread and of oneTBB.

#include <linattn/batch.hpp>
#include <linattn/linattn.hpp>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <future>
#include <thread>
#include <vector>

#ifdef LINATTN_EXAMPLE_TBB
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>
#endif

namespace {

using attention = linattn::linear_attention<linattn::elu_plus_one>;
using matrix = linattn::row_matrix<float>;
using Eigen::Index;

/// A thread for each task, started and joined by every call: nothing to set up, and each call pays for its threads.
struct thread_each {
  template <class F>
  void parallel_for(Index n, const F& f) const {
    std::vector<std::future<void>> results;
    std::vector<std::thread> threads;
    for (Index i = 0; i < n; ++i) {
      std::packaged_task<void()> task([&f, i] { f(i); });
      results.push_back(task.get_future());
      threads.emplace_back(std::move(task));
    }
    for (auto& thread : threads) thread.join();
    for (auto& result : results) result.get();  // an exception of f(i) leaves from here
  }
};
static_assert(linattn::executor<thread_each>);

#ifdef LINATTN_EXAMPLE_TBB
/// oneTBB: the arena says how many threads, and is the program's to share.
struct tbb_arena {
  oneapi::tbb::task_arena& arena;

  template <class F>
  void parallel_for(Index n, const F& f) const {
    arena.execute([&] { oneapi::tbb::parallel_for(Index(0), n, f); });
  }
};
static_assert(linattn::executor<tbb_arena>);
#endif

/// A prompt of every sequence and one token more: forward_causal, then step.
struct workload {
  Index sequences, tokens, heads, dim, value_dim;
  attention attn{{.head_dim = dim, .value_dim = value_dim, .heads = heads}};
  matrix q = waves(dim, 0.3F), k = waves(dim, 0.7F), v = waves(value_dim, 1.1F);

  matrix waves(Index columns, float frequency) const {
    matrix x(sequences * tokens, heads * columns);
    for (Index i = 0; i < x.size(); ++i) x.data()[i] = std::sin(frequency * float(i % 10007));
    return x;
  }

  struct result {
    matrix out, next;
    double seconds = 0;
  };

  template <class Executor>
  result run(Index width, const Executor& executor) const {
    result r{matrix(sequences * tokens, heads * value_dim), matrix(sequences, heads * value_dim)};
    auto workspaces = linattn::make_workspaces(attn, width);
    auto states = linattn::make_states(attn, sequences);
    const auto start = std::chrono::steady_clock::now();
    linattn::forward_causal(attn, states, linattn::bnhd(q.data(), sequences, tokens, heads, dim),
                            linattn::bnhd(k.data(), sequences, tokens, heads, dim),
                            linattn::bnhd(v.data(), sequences, tokens, heads, value_dim),
                            linattn::bnhd(r.out.data(), sequences, tokens, heads, value_dim), workspaces, executor);
    r.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    linattn::step(attn, states, linattn::one_each(q.topRows(sequences), heads),
                  linattn::one_each(k.topRows(sequences), heads), linattn::one_each(v.topRows(sequences), heads),
                  linattn::one_each(r.next, heads), workspaces, executor);
    return r;
  }
};

bool same(const workload::result& a, const workload::result& b) {
  return a.out.allFinite() && (a.out.array() == b.out.array()).all() && (a.next.array() == b.next.array()).all();
}

/// The same work by everyone; false where a bit differs.
bool compare(const char* title, const workload& work, Index threads) {
  std::printf("%s: %ld sequences of %ld tokens, %ld heads of %ld x %ld\n", title, long(work.sequences),
              long(work.tokens), long(work.heads), long(work.dim), long(work.value_dim));
  const auto expected = work.run(1, linattn::sequential());
  bool all_same = true;
  const auto show = [&](const char* who, Index width, const workload::result& r) {
    const bool is_same = same(expected, r);
    std::printf("  %-34s %2ld workspaces  %9.0f tokens/s  %s\n", who, long(width),
                double(work.sequences * work.tokens) / r.seconds, is_same ? "the same bits" : "DIFFERENT");
    all_same = all_same && is_same;
  };
  show("sequential", 1, expected);
  show("sequential", threads, work.run(threads, linattn::sequential()));

  const linattn::thread_pool pool{static_cast<int>(threads)};
  for (const Index width : {Index(1), threads, 3 * threads}) show("thread_pool", width, work.run(width, pool));

  Eigen::ThreadPool programs_own(static_cast<int>(threads));
  show("thread_pool on the program's own", threads, work.run(threads, linattn::thread_pool(programs_own)));
#ifdef _OPENMP
  show("openmp", threads, work.run(threads, linattn::openmp()));
#endif
  show("a std::thread for each task", threads, work.run(threads, thread_each()));
#ifdef LINATTN_EXAMPLE_TBB
  oneapi::tbb::task_arena arena(static_cast<int>(threads));
  show("an arena of oneTBB", threads, work.run(threads, tbb_arena{arena}));
#endif
  return all_same;
}

}  // namespace

int main() {
  const Index threads = std::max(2, static_cast<int>(std::thread::hardware_concurrency()));
  const bool many = compare("Many heads", {4, 1000, 4, 32, 32}, threads);
  const bool one = compare("One head, cut by columns of values", {1, 4000, 1, 64, 128}, threads);
#ifndef _OPENMP
  std::printf("(compiled without OpenMP)\n");
#endif
#ifndef LINATTN_EXAMPLE_TBB
  std::printf("(compiled without oneTBB: libtbb-dev on Debian)\n");
#endif
  return many && one ? 0 : 1;
}
