// What the functions around an operator (gates, convolution, norms) take and refuse.
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/matrix_view.hpp>

#include <Eigen/Core>
#include <type_traits>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// What an output holds: the scalar of a function's inputs follows from it, so that inputs convert to views.
template <class Out>
using scalar_of = typename std::remove_cvref_t<Out>::value_type;
template <class Out>
using input_of = matrix_view<const scalar_of<Out>>;
template <class Out>
using row_of = vector_view<const scalar_of<Out>>;

/// Refuses `view` unless it is (rows, cols), the sizes that `giver` asks for.
template <class T>
void require_shape(const char* function, const char* name, const matrix_view<T>& view, const char* giver,
                   Eigen::Index rows, Eigen::Index cols) {
  static_assert(std::is_same_v<std::remove_const_t<T>, float> || std::is_same_v<std::remove_const_t<T>, double>,
                "linattn: gates and norms are computed in float or double");
  if (view.rows() == rows && view.cols() == cols) return;
  refuse(function, name, " is ", shape_text{view.rows(), view.cols()}, ", but ", giver, " asks for ",
         shape_text{rows, cols});
}

template <class T>
void require_size(const char* function, const char* name, const vector_view<T>& view, const char* giver,
                  Eigen::Index size) {
  if (view.size() == size) return;
  refuse(function, name, " has ", view.size(), " entries, but ", giver, " asks for ", size);
}

/// Coordinates a head of `cols` columns. Refuses a number of heads that does not divide them.
inline Eigen::Index require_heads(const char* function, const char* name, Eigen::Index cols, Eigen::Index heads) {
  if (heads < 1 || cols % heads != 0) {
    refuse(function, name, " has ", cols, " columns, which ", heads, " heads cannot share equally");
  }
  return cols / heads;
}

/// Debug builds: outputs may stand in the place of an input, but not beside it.
template <class A, class B>
void assert_apart_or_same([[maybe_unused]] const matrix_view<A>& x, [[maybe_unused]] const matrix_view<B>& out) {
  LINATTN_ASSERT((x.data() == out.data() && (x.rows() <= 1 || x.row_stride() == out.row_stride())) || !overlap(x, out));
}
template <class A, class B>
void assert_apart([[maybe_unused]] const matrix_view<A>& x, [[maybe_unused]] const matrix_view<B>& out) {
  LINATTN_ASSERT(!overlap(x, out));
}

}  // namespace detail
LINATTN_NAMESPACE_END
