// Errors: one sentence with the function's name and both sizes, before anything is written.
#pragma once

#include <linattn/detail/compiler.hpp>
#include <linattn/version.hpp>

#include <cstdio>
#include <cstdlib>
#include <string>

#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
#include <stdexcept>
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

/// A state, by its sizes.
template <class State>
requires requires(const State& state) { state.sizes(); }
void append(std::string& text, const State& part) { text += part.sizes(); }

/// A sentence from its parts: strings, numbers, and what has an `append`.
template <class... Parts>
std::string sentence(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

/// Written as "(rows, cols)". No string: its destructor would be a call on the real-time path.
struct shape_text {
  Eigen::Index rows;
  Eigen::Index cols;
};
inline void append(std::string& text, const shape_text& part) {
  text += sentence("(", part.rows, ", ", part.cols, ")");
}

template <class... Parts>
void throw_refusal(const char* function, const Parts&... parts) {
  const std::string text = sentence("linattn::", function, ": ", parts...);
#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
  throw std::invalid_argument(text);
#else
  std::fputs((text + "\n").c_str(), stderr);
  std::abort();
#endif
}

/// Throws std::invalid_argument("linattn::<function>: <parts>"); prints it and aborts where exceptions are off.
///
/// A caller's mistake, which allocates its sentence, is no part of the real-time path: called through a pointer that
/// hides it from -Wfunction-effects, so that checks are allowed in a LINATTN_NONBLOCKING caller. The sanitizer still
/// reports a refusal that happens there.
template <class... Parts>
[[noreturn]] void refuse(const char* function, const Parts&... parts) {
  LINATTN_PUSH_EFFECT_WARNINGS
  void (*const hidden)(const char*, const Parts&...) LINATTN_NONBLOCKING = &throw_refusal<Parts...>;
  LINATTN_POP_EFFECT_WARNINGS
  hidden(function, parts...);
  std::abort();  // not reached: a pointer's type cannot say that its function does not return
}

/// Refuses a matrix that is not (tokens, count * dim), `dim` columns for each of `count` heads.
template <class View>
void require_shape(const char* function, const char* name, const View& x, Eigen::Index tokens, Eigen::Index count,
                   Eigen::Index dim, const char* dim_name) {
  if (x.rows() == tokens && x.cols() == count * dim) return;
  refuse(function, name, " is ", shape_text{x.rows(), x.cols()}, ", expected ", shape_text{tokens, count * dim},
         ": (tokens, heads * ", dim_name, " = ", count, " * ", dim, ")");
}

}  // namespace detail
LINATTN_NAMESPACE_END
