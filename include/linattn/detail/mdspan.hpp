// What views ask of types that are not Eigen's, by the names of their members: no header of theirs is included.
#pragma once

#include <linattn/detail/checks.hpp>

#include <Eigen/Core>
#include <concepts>
#include <cstddef>
#include <limits>
#include <type_traits>
#include <utility>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// The interface of std::mdspan, by the names of its members: std's, Kokkos', or another's.
template <class X>
concept mdspan_like = requires(const std::remove_cvref_t<X>& x) {
  typename std::remove_cvref_t<X>::element_type;
  { std::remove_cvref_t<X>::rank() } -> std::convertible_to<std::size_t>;
  x.data_handle();
  { x.extent(0) } -> std::integral;
};

/// What is asked of such a type before a view of T elements may look at its memory.
template <class X, class T>
struct mdspan_facts {
  using type = std::remove_cvref_t<X>;
  using element = typename type::element_type;
  static constexpr bool same_scalar = std::is_same_v<std::remove_const_t<element>, std::remove_const_t<T>>;
  static constexpr bool writable = std::is_const_v<T> || !std::is_const_v<element>;

  // An accessor may scale or convert what it reads, and then hands out values, or handles that are no pointers.
  static constexpr bool reads_memory() {
    if constexpr (requires { typename type::reference; }) {
      if (!std::is_same_v<typename type::reference, element&>) return false;
    }
    return std::is_convertible_v<decltype(std::declval<const type&>().data_handle()), element*>;
  }
  // Of rank 1 without gaps, whatever its sizes: its stride is 1. Layouts with a stride of their own do not promise it.
  static constexpr bool contiguous() {
    if constexpr (requires { type::is_always_exhaustive(); }) return type::is_always_exhaustive();
    return false;
  }
};

/// A size or stride of any integer type. Throws where it is none of Eigen's.
template <std::integral Int>
Eigen::Index index_of(const char* function, Int n) {
  if (!std::in_range<Eigen::Index>(+n)) detail::refuse(function, "a size or stride does not fit Eigen::Index");
  return static_cast<Eigen::Index>(n);
}

/// Whether the distance between any two elements of such rows can be told in bytes.
inline bool is_addressable(Eigen::Index rows, Eigen::Index cols, Eigen::Index row_stride,
                           std::size_t element_bytes) noexcept {
  const Eigen::Index most = std::numeric_limits<Eigen::Index>::max() / static_cast<Eigen::Index>(element_bytes);
  if (rows == 0 || cols == 0) return true;
  if (cols > most || rows == 1) return cols <= most;
  if (row_stride > most || row_stride < -most) return false;
  return (row_stride < 0 ? -row_stride : row_stride) <= (most - cols) / (rows - 1);
}

}  // namespace detail
LINATTN_NAMESPACE_END
