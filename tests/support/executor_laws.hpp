// What every executor promises, whoever runs the tasks.
#pragma once

#include <linattn/executors.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace support {

using Eigen::Index;

/// More of the last than Eigen's pool keeps in a queue (1,024), which it then runs in the thread that adds them.
inline constexpr Index task_counts[] = {0, 1, 2, 3, 17, 3000};

/// f(0) ... f(n - 1), each once, and all of them done when the call returns.
template <class Executor>
void runs_every_task_once(const Executor& executor) {
  static_assert(linattn::executor<Executor>);
  for (const Index n : task_counts) {
    SCOPED_TRACE("tasks: " + std::to_string(n));
    std::vector<std::atomic<int>> runs(static_cast<std::size_t>(n) + 1);
    executor.parallel_for(n, [&](Index i) { ++runs.at(static_cast<std::size_t>(i)); });
    for (Index i = 0; i < n; ++i) ASSERT_EQ(runs[static_cast<std::size_t>(i)], 1) << "task " << i;
    ASSERT_EQ(runs.back(), 0) << "a task beyond the last";
  }
}

/// What tasks write without a lock, each its own, is seen by the caller and by the tasks of the next call.
template <class Executor>
void orders_calls(const Executor& executor) {
  constexpr Index n = 5;
  constexpr int calls = 50;
  int numbers[n] = {};
  for (int call = 0; call < calls; ++call) {
    executor.parallel_for(n, [&](Index i) { ++numbers[(i + call) % n]; });
  }
  for (const int x : numbers) EXPECT_EQ(x, calls);
}

/// Of several exceptions, the lowest task's reaches the caller, when all tasks are done; the next call is as any other.
template <class Executor>
void passes_exceptions_on(const Executor& executor) {
  constexpr Index n = 16;
  for (const std::vector<Index>& throwing : {std::vector<Index>{0}, {1}, {n - 1}, {3, 7}, {0, 1, 2, n - 1}}) {
    SCOPED_TRACE("lowest that throws: " + std::to_string(throwing.front()));
    std::atomic<Index> done = 0;
    std::string caught;
    try {
      executor.parallel_for(n, [&](Index i) {
        // The higher ones throw at once, the others are still at work then: a call that does not wait leaves too early.
        if (i <= throwing.front()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        ++done;
        for (const Index t : throwing) {
          if (i == t) throw std::runtime_error(std::to_string(i));
        }
      });
    } catch (const std::runtime_error& e) {
      caught = e.what();
    }
    EXPECT_EQ(caught, std::to_string(throwing.front()));
    EXPECT_EQ(done, n);
  }
  runs_every_task_once(executor);
}

}  // namespace support
