// OpenMP's threads as an executor: what the program is compiled for decides whether it is there.
#include "support/executor_laws.hpp"

#ifndef _OPENMP
#error "compile this file with OpenMP (-fopenmp)"
#endif
#include <omp.h>

namespace {

TEST(OpenMp, RunsEveryTaskOnce) {
  const int threads_before = omp_get_max_threads();
  for (const int threads : {1, 3}) {
    omp_set_num_threads(threads);
    support::runs_every_task_once(linattn::openmp());
    support::orders_calls(linattn::openmp());
  }
  omp_set_num_threads(threads_before);
}

TEST(OpenMp, PassesExceptionsOn) { support::passes_exceptions_on(linattn::openmp()); }

TEST(OpenMp, CallsFromInsideARegionRunInTheirThread) {
  std::atomic<int> tasks = 0, elsewhere = 0;
#pragma omp parallel num_threads(3)
  {
    const auto self = std::this_thread::get_id();
#pragma omp single nowait
    linattn::openmp().parallel_for(7, [&](Eigen::Index) {
      ++tasks;
      if (std::this_thread::get_id() != self) ++elsewhere;
    });
  }
  EXPECT_EQ(tasks, 7);
  EXPECT_EQ(elsewhere, 0);
}

}  // namespace
