// Every map, rule and layer once, small, against another way to the same numbers: for compilers, standards, flags and
// libraries under which the whole test suite would take too long (tests/matrix/run). No GoogleTest: it would have to be
// built with the same flags.
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <cstdio>

namespace matrix {

using Eigen::Index;

/// Roundings of float over 40 tokens and 12 coordinates: 2e-6 of the largest element were seen. A dropped token or a
/// wrong decay is off by 1e-2.
inline constexpr float rounding = 3e-5F;

/// Prints what failed.
inline bool check(bool passed, const char* part, const char* what) {
  if (!passed) std::printf("FAILED: %s: %s\n", part, what);
  return passed;
}

/// The largest difference, relative to the largest element; false also where anything is NaN.
template <class A, class B>
bool close(const A& actual, const B& expected) {
  return actual.rows() == expected.rows() && actual.cols() == expected.cols() && expected.cwiseAbs().maxCoeff() > 0 &&
         (actual - expected).cwiseAbs().maxCoeff() <= rounding * expected.cwiseAbs().maxCoeff();
}

bool maps();
bool rules();
bool layers();
bool serving();

}  // namespace matrix
