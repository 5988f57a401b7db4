// The boundary types: what a caller hands in and gets back, without a copy.
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/mdspan.hpp>

#include <Eigen/Core>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

LINATTN_NAMESPACE_BEGIN

/// The library's matrix: row-major, one token per row, heads side by side in the columns.
template <class T>
using row_matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// The library's vector: one token.
template <class T>
using row_vector = Eigen::Matrix<T, 1, Eigen::Dynamic, Eigen::RowMajor>;

namespace detail {

template <class Derived>
std::true_type is_eigen_object(const Eigen::EigenBase<Derived>*);
std::false_type is_eigen_object(const void*);

/// A concept, not a variable: for a braced list with designators clang 14 asks it of a reference to void, and only a
/// concept says no to that.
template <class X>
concept is_eigen = decltype(is_eigen_object(static_cast<std::remove_cvref_t<X>*>(nullptr)))::value;

template <class Derived>
std::true_type owns_storage(const Eigen::PlainObjectBase<Derived>*);
std::false_type owns_storage(const void*);

// Rows * cols elements laid out so that a view can describe them: facts about an Eigen type X (a forwarding
// reference's deduced type), each the condition of one of the sentences below.
template <class X>
struct eigen_facts {
  using type = std::remove_cvref_t<X>;
  using scalar = typename type::Scalar;
  static constexpr bool direct = (int(Eigen::internal::traits<type>::Flags) & int(Eigen::DirectAccessBit)) != 0;
  static constexpr bool writable = (int(Eigen::internal::traits<type>::Flags) & int(Eigen::LvalueBit)) != 0 &&
                                   !std::is_const_v<std::remove_reference_t<X>>;
  static constexpr bool owning_temporary =
      !std::is_lvalue_reference_v<X> && decltype(owns_storage(static_cast<type*>(nullptr)))::value;
  static constexpr bool column = int(type::ColsAtCompileTime) == 1;
  static constexpr bool vector = bool(type::IsVectorAtCompileTime);
  static constexpr bool row_major = bool(type::IsRowMajor) || column;
  // Inner stride as the type knows it; 0 and Dynamic both mean "not known to be one".
  static constexpr bool contiguous = column ? true : int(Eigen::internal::inner_stride_at_compile_time<type>::ret) == 1;
};

}  // namespace detail

/// A read (T const) or write view of a (rows, cols) matrix whose rows are contiguous: pointer, sizes, row stride.
///
/// Implicit from every dense Eigen object with direct access, row-major order and contiguous rows: a row_matrix, its
/// `middleCols` (packed heads), `middleRows`, a Map or Ref with an outer stride, the transpose of a column-major
/// matrix. A type with one compile-time column counts as (n, 1), one with one compile-time row as (1, n). Explicit
/// from raw memory. Refused at compile time, with the sentence that says what to write instead: column-major order,
/// an unevaluated expression, another scalar, rows with a stride between their elements, a const or temporary output.
///
/// Implicit, too, from std::mdspan and whatever has its interface (rank, extent, stride, data_handle, element_type), of
/// rank 2 and with contiguous rows: throws std::invalid_argument for stride(1) other than 1 (layout_left), and for
/// sizes beyond what pointers reach. DLPack tensors: dlpack.hpp.
///
/// Row stride is in elements. Row stride 0 (one row for every token) is for inputs only; a negative one walks the rows
/// backwards. Throws std::invalid_argument for negative sizes, a null pointer to something, and outputs whose rows
/// would overlap. Copying a view copies four words. The memory stays the caller's.
template <class T>
class matrix_view {
 public:
  using value_type = std::remove_const_t<T>;

  constexpr matrix_view() noexcept = default;

  explicit matrix_view(T* data, Eigen::Index rows, Eigen::Index cols, Eigen::Index row_stride)
      : m_data(data), m_rows(rows), m_cols(cols), m_row_stride(row_stride) {
    check();
  }
  explicit matrix_view(T* data, Eigen::Index rows, Eigen::Index cols) : matrix_view(data, rows, cols, cols) {}

  template <class X>
  requires detail::is_eigen<X> matrix_view(
      X&& x)  // NOLINT(google-explicit-constructor): views are meant to be implicit
  {
    using facts = detail::eigen_facts<X>;
    static_assert(facts::direct,
                  "linattn: this is an unevaluated Eigen expression; store it first, e.g. linattn::row_matrix<float> "
                  "x = <expression>;");
    static_assert(std::is_same_v<typename facts::scalar, value_type>,
                  "linattn: the matrix holds another scalar type than the operator; convert it with .cast<Scalar>() "
                  "and store the result, or instantiate linear_attention with the matrix's Scalar");
    static_assert(facts::row_major,
                  "linattn: this matrix is column-major, but a token must be one contiguous row; use "
                  "linattn::row_matrix<float> (Eigen::MatrixXf is column-major), or pass .transpose() of a (columns, "
                  "tokens) matrix");
    static_assert(facts::contiguous || !facts::direct,
                  "linattn: the elements of a row are not contiguous here (inner stride is not 1 at compile time); "
                  "copy into a linattn::row_matrix, or use a Map with an OuterStride only");
    if constexpr (!std::is_const_v<T>) {
      static_assert(facts::writable, "linattn: this output is const; pass a mutable matrix, block or Map");
      static_assert(!facts::owning_temporary,
                    "linattn: this output is a temporary matrix that would be lost; pass a named matrix");
    }
    if constexpr (facts::direct && facts::row_major && std::is_same_v<typename facts::scalar, value_type> &&
                  (std::is_const_v<T> || facts::writable)) {
      m_data = x.data();
      m_rows = x.rows();
      m_cols = x.cols();
      if constexpr (facts::column) {
        m_row_stride = bool(facts::type::IsRowMajor) ? x.outerStride() : x.innerStride();
      } else {
        m_row_stride = x.outerStride();
      }
      check();
    }
  }

  template <class X>
  requires detail::mdspan_like<X> matrix_view(X&& x)  // NOLINT(google-explicit-constructor): as from Eigen's types
  {
    using facts = detail::mdspan_facts<X, T>;
    constexpr bool is_matrix = facts::type::rank() == 2;
    static_assert(is_matrix, "linattn: a matrix is an mdspan of rank 2, (tokens, heads * dim)");
    static_assert(facts::same_scalar,
                  "linattn: the mdspan holds another scalar type than the operator; convert its elements, or "
                  "instantiate linear_attention with their type");
    static_assert(facts::reads_memory(),
                  "linattn: the accessor of this mdspan does more than index memory; copy what it reads into a "
                  "linattn::row_matrix");
    static_assert(facts::writable, "linattn: this output is an mdspan of const elements; pass one of mutable ones");
    if constexpr (is_matrix && facts::same_scalar && facts::reads_memory() && facts::writable) {
      m_data = x.data_handle();
      m_rows = detail::index_of("matrix_view", x.extent(0));
      m_cols = detail::index_of("matrix_view", x.extent(1));
      m_row_stride = m_rows <= 1 ? m_cols : detail::index_of("matrix_view", x.stride(0));  // of one row it says nothing
      const Eigen::Index stride = detail::index_of("matrix_view", x.stride(1));
      if (m_rows > 0 && m_cols > 1 && stride != 1) {
        detail::refuse("matrix_view", "the mdspan ", detail::shape_text{m_rows, m_cols}, " has strides ",
                       detail::shape_text{m_row_stride, stride},
                       ", but a row must be contiguous: the second must be 1");
      }
      check();
      if (!detail::is_addressable(m_rows, m_cols, m_row_stride, sizeof(T))) {
        detail::refuse("matrix_view", "no memory holds the mdspan ", detail::shape_text{m_rows, m_cols},
                       " with row stride ", m_row_stride);
      }
    }
  }

  /// A write view reads, too.
  template <class U>
  requires(std::is_const_v<T>&& std::is_same_v<U, value_type>) matrix_view(const matrix_view<U>& other)
  noexcept  // NOLINT(google-explicit-constructor)
      : m_data(other.data()), m_rows(other.rows()), m_cols(other.cols()), m_row_stride(other.row_stride()) {}

  constexpr T* data() const noexcept { return m_data; }
  constexpr Eigen::Index rows() const noexcept { return m_rows; }
  constexpr Eigen::Index cols() const noexcept { return m_cols; }
  constexpr Eigen::Index row_stride() const noexcept { return m_row_stride; }
  constexpr T* row(Eigen::Index i) const noexcept { return m_data + i * m_row_stride; }
  constexpr T& operator()(Eigen::Index i, Eigen::Index j) const noexcept { return m_data[i * m_row_stride + j]; }

 private:
  void check() const {
    if (m_rows < 0 || m_cols < 0) {
      detail::refuse("matrix_view", "a size is negative: ", detail::shape_text{m_rows, m_cols});
    }
    if (m_data == nullptr && m_rows > 0 && m_cols > 0) {
      detail::refuse("matrix_view", "a null pointer cannot hold ", detail::shape_text{m_rows, m_cols});
    }
    const auto stride = static_cast<std::size_t>(m_row_stride);
    const std::size_t distance = m_row_stride < 0 ? 0 - stride : stride;  // of the least Index, too
    if (!std::is_const_v<T> && m_rows > 1 && distance < static_cast<std::size_t>(m_cols)) {
      detail::refuse("matrix_view", "rows of an output overlap: row stride ", m_row_stride, " for ", m_cols,
                     " columns");
    }
  }

  T* m_data = nullptr;
  Eigen::Index m_rows = 0;
  Eigen::Index m_cols = 0;
  Eigen::Index m_row_stride = 0;
};

/// A view of one token: size() contiguous elements. Implicit from any contiguous Eigen vector, row or column
/// (VectorXf, RowVectorXf, a row of a row_matrix, a column of a MatrixXf, a Map), from std::span, and from an mdspan of
/// rank 1 whose layout has no gaps (is_always_exhaustive()); explicit from pointer and size. Never throws: `step` takes
/// it and is noexcept.
template <class T>
class vector_view {
 public:
  using value_type = std::remove_const_t<T>;

  constexpr vector_view() noexcept = default;
  constexpr explicit vector_view(T* data, Eigen::Index size) noexcept : m_data(data), m_size(size) {}
  template <class U, std::size_t Extent>
  requires(std::is_same_v<std::remove_const_t<U>, value_type> &&
           (std::is_const_v<T> ||
            !std::is_const_v<U>)) constexpr vector_view(std::span<U, Extent>
                                                            x) noexcept  // NOLINT(google-explicit-constructor)
      : m_data(x.data()), m_size(static_cast<Eigen::Index>(x.size())) {}

  template <class X>
  requires detail::is_eigen<X> vector_view(X&& x)
  noexcept  // NOLINT(google-explicit-constructor)
  {
    using facts = detail::eigen_facts<X>;
    static_assert(facts::direct,
                  "linattn: this is an unevaluated Eigen expression; store it first, e.g. linattn::row_vector<float> "
                  "x = <expression>;");
    static_assert(std::is_same_v<typename facts::scalar, value_type>,
                  "linattn: the vector holds another scalar type than the operator; convert it with .cast<Scalar>() "
                  "and store the result, or instantiate linear_attention with the vector's Scalar");
    static_assert(facts::vector,
                  "linattn: one token is a vector, but this is a matrix; pass .row(i) of a row-major matrix");
    static_assert(int(Eigen::internal::inner_stride_at_compile_time<typename facts::type>::ret) == 1 || !facts::direct,
                  "linattn: the elements of this vector are not contiguous (a row of a column-major matrix, or a "
                  "column of a row-major one); store it in a linattn::row_vector first");
    if constexpr (!std::is_const_v<T>) {
      static_assert(facts::writable, "linattn: this output is const; pass a mutable vector, row or Map");
      static_assert(!facts::owning_temporary,
                    "linattn: this output is a temporary vector that would be lost; pass a named vector");
    }
    if constexpr (facts::direct && facts::vector && std::is_same_v<typename facts::scalar, value_type> &&
                  (std::is_const_v<T> || facts::writable)) {
      m_data = x.data();
      m_size = x.size();
    }
  }

  template <class X>
  requires detail::mdspan_like<X> vector_view(X&& x)
  noexcept  // NOLINT(google-explicit-constructor)
  {
    using facts = detail::mdspan_facts<X, T>;
    constexpr bool is_vector = facts::type::rank() == 1;
    static_assert(is_vector, "linattn: one token is an mdspan of rank 1; of a matrix pass a row, by submdspan");
    static_assert(facts::same_scalar,
                  "linattn: the mdspan holds another scalar type than the operator; convert its elements, or "
                  "instantiate linear_attention with their type");
    static_assert(facts::reads_memory(),
                  "linattn: the accessor of this mdspan does more than index memory; copy what it reads into a "
                  "linattn::row_vector");
    static_assert(facts::writable, "linattn: this output is an mdspan of const elements; pass one of mutable ones");
    static_assert(facts::contiguous(),
                  "linattn: the layout of this mdspan does not promise contiguous elements; use layout_right, or pass "
                  "linattn::vector_view<const float>(x.data_handle(), size) where its stride is 1");
    if constexpr (is_vector && facts::same_scalar && facts::reads_memory() && facts::writable && facts::contiguous()) {
      m_data = x.data_handle();
      m_size = static_cast<Eigen::Index>(x.extent(0));
    }
  }

  template <class U>
  requires(std::is_const_v<T>&& std::is_same_v<U, value_type>) vector_view(const vector_view<U>& other)
  noexcept  // NOLINT(google-explicit-constructor)
      : m_data(other.data()), m_size(other.size()) {}

  constexpr T* data() const noexcept { return m_data; }
  constexpr Eigen::Index size() const noexcept { return m_size; }

 private:
  T* m_data = nullptr;
  Eigen::Index m_size = 0;
};

namespace detail {

/// Whether two strided views share a byte. Exact: column blocks of one matrix share none, although their addresses
/// interleave. Costs a few comparisons where one ends before the other begins, and a division a row of the shorter one
/// elsewhere.
template <class A, class B>
bool overlap(const matrix_view<A>& a, const matrix_view<B>& b) noexcept {
  if (a.rows() == 0 || a.cols() == 0 || b.rows() == 0 || b.cols() == 0) return false;
  struct rows_in_memory {  // in bytes; the direction of a walk does not matter, and of one row the stride does not
    std::intptr_t first, count, stride, width;
    std::intptr_t end() const { return first + (count - 1) * stride + width; }
  };
  const auto rows_of = [](const auto& x) {
    constexpr auto size = static_cast<std::intptr_t>(sizeof(*x.data()));
    rows_in_memory rows{reinterpret_cast<std::intptr_t>(x.data()), 1, 1, x.cols() * size};
    if (x.rows() > 1 && x.row_stride() != 0) {
      rows.count = x.rows();
      rows.stride = x.row_stride() * size;
      if (rows.stride < 0) {
        rows.first += (rows.count - 1) * rows.stride;
        rows.stride = -rows.stride;
      }
    }
    return rows;
  };
  rows_in_memory few = rows_of(a), many = rows_of(b);
  if (few.end() <= many.first || many.end() <= few.first) return false;
  if (few.count > many.count) std::swap(few, many);
  for (std::intptr_t low = few.first; few.count > 0; --few.count, low += few.stride) {
    const std::intptr_t gone = low - many.first - many.width;  // a row that begins there, or before, ends before `low`
    const std::intptr_t next = gone < 0 ? 0 : gone / many.stride + 1;
    if (next < many.count && many.first + next * many.stride < low + few.width) return true;
  }
  return false;
}

}  // namespace detail
LINATTN_NAMESPACE_END
