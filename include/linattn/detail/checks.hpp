// Errors: one sentence with the function's name and both sizes, before anything is written.
#pragma once

#include <linattn/version.hpp>

#include <cstdio>
#include <string>

#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
#include <stdexcept>
#else
#include <cstdlib>
#endif

/// Debug-build precondition: shapes in `step`, outputs that overlap inputs. Define it before including linattn to
/// use a handler of your own; a handler that throws inside `step` terminates, because `step` is noexcept.
#ifndef LINATTN_ASSERT
#define LINATTN_ASSERT(condition) eigen_assert(condition)
#endif

LINATTN_NAMESPACE_BEGIN
namespace detail {

inline void append(std::string& text, const char* part) { text += part; }
inline void append(std::string& text, const std::string& part) { text += part; }
inline void append(std::string& text, Eigen::Index part) { text += std::to_string(part); }
inline void append(std::string& text, double part) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", part);
  text += digits;
}

/// A sentence from its parts: strings and numbers.
template <class... Parts>
std::string sentence(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

inline std::string shape_text(Eigen::Index rows, Eigen::Index cols) { return sentence("(", rows, ", ", cols, ")"); }

/// Throws std::invalid_argument("linattn::<function>: <parts>"); prints it and aborts where exceptions are off.
template <class... Parts>
[[noreturn]] void refuse(const char* function, const Parts&... parts) {
  const std::string text = sentence("linattn::", function, ": ", parts...);
#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
  throw std::invalid_argument(text);
#else
  std::fputs((text + "\n").c_str(), stderr);
  std::abort();
#endif
}

}  // namespace detail
LINATTN_NAMESPACE_END
