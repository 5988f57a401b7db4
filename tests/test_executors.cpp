// Executors: every task once, exceptions, threads that are the pool's own or somebody else's.
#include "support/executor_laws.hpp"

#include <memory>
#include <mutex>
#include <set>

namespace {

using Eigen::Index;
using linattn::sequential;
using linattn::thread_pool;

// ---- what is an executor --------------------------------------------------------------------------------------------

struct by_template {
  template <class F>
  void parallel_for(Index n, const F& f) const {
    for (Index i = n; i-- > 0;) f(i);
  }
};
struct other_integers {
  template <class F>
  void parallel_for(std::size_t n, F f) const {
    for (std::size_t i = 0; i < n; ++i) f(static_cast<Index>(i));
  }
};
struct not_const {
  template <class F>
  void parallel_for(Index n, const F& f) {
    for (Index i = 0; i < n; ++i) f(i);
  }
};
struct nothing {};

static_assert(linattn::executor<sequential> && linattn::executor<thread_pool>);
static_assert(linattn::executor<by_template> && linattn::executor<other_integers>);
static_assert(!linattn::executor<not_const>, "calls take executors by const reference");
static_assert(!linattn::executor<nothing> && !linattn::executor<int>);

// ---- sequential -----------------------------------------------------------------------------------------------------

TEST(Executors, SequentialRunsInOrderAndStopsAtTheFirstException) {
  support::runs_every_task_once(sequential());
  support::orders_calls(sequential());
  std::vector<Index> order;
  const auto f = [&](Index i) {
    order.push_back(i);
    if (i == 2) throw std::runtime_error("two");
  };
  EXPECT_THROW(sequential().parallel_for(5, f), std::runtime_error);
  EXPECT_EQ(order, (std::vector<Index>{0, 1, 2}));
}

// ---- Eigen's pool ---------------------------------------------------------------------------------------------------

class Pool : public testing::TestWithParam<int> {};

TEST_P(Pool, RunsEveryTaskOnce) {
  const thread_pool pool(GetParam());
  EXPECT_EQ(pool.threads(), GetParam());
  support::runs_every_task_once(pool);
  support::orders_calls(pool);
}

INSTANTIATE_TEST_SUITE_P(Executors, Pool, testing::Values(1, 2, 3, 8),
                         [](const auto& p) { return std::to_string(p.param) + "Threads"; });

TEST(Executors, PoolPassesExceptionsOn) {
  // A pool of one thread has none beside the caller's and is `sequential`, which stops at once.
  for (const int threads : {2, 5}) support::passes_exceptions_on(thread_pool(threads));
}

TEST(Executors, LowestTasksExceptionWinsThoughThrownLast) {
  const thread_pool pool(4);
  std::atomic<bool> last_threw = false;
  const auto f = [&](Index i) {
    if (i == 3) {
      last_threw = true;
      throw std::runtime_error("last task");
    }
    if (i == 1) {
      while (!last_threw) std::this_thread::yield();
      throw std::logic_error("first task");
    }
  };
  EXPECT_THROW(pool.parallel_for(4, f), std::logic_error);
}

TEST(Executors, AsManyTasksAsThreadsRunAtOnce) {
  constexpr int threads = 3;
  const thread_pool pool(threads);
  std::atomic<int> arrived = 0;
  std::mutex mutex;
  std::set<std::thread::id> seen;
  pool.parallel_for(threads, [&](Index) {
    for (++arrived; arrived < threads;) std::this_thread::yield();  // for ever, were they one after the other
    const std::lock_guard lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(seen.size(), std::size_t(threads));
  EXPECT_TRUE(seen.count(std::this_thread::get_id())) << "the calling thread works, too";
}

TEST(Executors, PoolsWithoutThreadsRunInTheCallingOne) {
  for (const int threads : {1, 0, -3}) {
    const thread_pool pool(threads);
    EXPECT_EQ(pool.threads(), 1);
    std::vector<Index> order;
    pool.parallel_for(4, [&](Index i) { order.push_back(i); });
    EXPECT_EQ(order, (std::vector<Index>{0, 1, 2, 3}));
  }
  EXPECT_GE(thread_pool().threads(), 1);
}

TEST(Executors, CallsFromSeveralThreadsShareAPool) {
  const thread_pool pool(3);
  constexpr int callers = 4, calls = 100;
  std::vector<std::thread> threads;
  std::vector<int> sums(callers, 0), caught(callers, 0);
  for (std::size_t c = 0; c < callers; ++c) {
    threads.emplace_back([&, c] {
      for (int call = 0; call < calls; ++call) {
        int parts[6] = {};
        try {
          pool.parallel_for(6, [&](Index i) {
            parts[i] = int(i);
            if (c == 0 && i == 5) throw std::runtime_error("the first caller's alone");
          });
        } catch (const std::runtime_error&) {
          ++caught[c];
        }
        for (const int part : parts) sums[c] += part;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(sums, std::vector<int>(callers, calls * (0 + 1 + 2 + 3 + 4 + 5)));
  EXPECT_EQ(caught, (std::vector<int>{calls, 0, 0, 0}));
}

TEST(Executors, PoolOfTheProgramIsSharedAndOutlivesTheExecutor) {
  Eigen::ThreadPool theirs(2);
  {
    const thread_pool pool(theirs);
    EXPECT_EQ(pool.threads(), 3);
    support::runs_every_task_once(pool);
    support::orders_calls(pool);
    support::passes_exceptions_on(pool);
  }
  Eigen::Barrier done(1);
  theirs.Schedule([&] { done.Notify(); });
  done.Wait();  // still at work
}

}  // namespace
