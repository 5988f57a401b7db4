// Errors: one sentence with the function's name and both sizes, before anything is written.
#pragma once

#include <linattn/version.hpp>

#include <string>

#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
#include <stdexcept>
#else
#include <cstdio>
#include <cstdlib>
#endif

/// Debug-build precondition: shapes in `step`, outputs that overlap inputs. Define it before including linattn to
/// use a handler of your own; a handler that throws inside `step` terminates, because `step` is noexcept.
#ifndef LINATTN_ASSERT
#define LINATTN_ASSERT(condition) eigen_assert(condition)
#endif

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Throws std::invalid_argument("linattn::<function>: <sentence>"); prints it and aborts where exceptions are off.
[[noreturn]] inline void refuse(const char* function, const std::string& sentence) {
  const std::string text = std::string("linattn::") + function + ": " + sentence;
#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
  throw std::invalid_argument(text);
#else
  std::fputs((text + "\n").c_str(), stderr);
  std::abort();
#endif
}

inline std::string shape_text(Eigen::Index rows, Eigen::Index cols) {
  return "(" + std::to_string(rows) + ", " + std::to_string(cols) + ")";
}

}  // namespace detail
LINATTN_NAMESPACE_END
