// Many sequences and heads in the layouts that frameworks keep them in, without a copy.
#pragma once

#include <linattn/detail/sequence_rows.hpp>
#include <linattn/matrix_view.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

LINATTN_NAMESPACE_BEGIN

/// A view of B sequences of tokens, H heads of each, D elements of a head side by side: anything that has a constant
/// distance between heads and between tokens, and sequences a constant distance apart or packed one after the other.
///
///     bnhd(data, B, N, H, D)            (B, N, H, D), which is (B, N, H D) as well
///     bhnd(data, B, N, H, D)            (B, H, N, D)
///     packed(x, cu_seqlens, H)          (tokens of all sequences, H D); sequence b is rows cu_seqlens[b] ...
///                                       cu_seqlens[b + 1] - 1
///     batch_view(data, sizes, strides)  any other distances, in elements
///
/// What has one number a head (log_decay per head, beta) is a view with D = 1. Strides of 0 repeat, for inputs only.
/// Throws std::invalid_argument for negative sizes, a null pointer to something, sizes that do not divide, offsets that
/// fall or leave the rows, and outputs whose elements would overlap. The memory, and that of the offsets, stays the
/// caller's; a copy copies a few words.
template <class T>
class batch_view {
 public:
  using value_type = std::remove_const_t<T>;
  /// How many there are.
  struct sizes {
    Eigen::Index sequences = 0;  ///< B
    Eigen::Index tokens = 0;     ///< N, of each
    Eigen::Index heads = 0;      ///< H
    Eigen::Index dim = 0;        ///< D
  };
  /// From one to the next, in elements.
  struct strides {
    Eigen::Index sequence = 0;
    Eigen::Index token = 0;
    Eigen::Index head = 0;
  };

  constexpr batch_view() noexcept = default;

  // By value: of nested types by reference GCC 12 deduces references that bind to no braces.
  explicit batch_view(T* data, sizes n, strides s) : m_data(data), m_sizes(n), m_strides(s) { check(); }

  /// Rows of tokens, all sequences one after the other; `offsets` are B + 1, int32 or int64.
  template <std::signed_integral Offset>
  explicit batch_view(const matrix_view<T>& x, std::span<const Offset> offsets, Eigen::Index heads)
      : m_data(x.data()),
        m_sizes{Eigen::Index(offsets.size()) - 1, x.rows(), heads, heads > 0 ? x.cols() / heads : 0},
        m_strides{0, x.row_stride(), m_sizes.dim} {
    static_assert(sizeof(Offset) == 4 || sizeof(Offset) == 8, "linattn: cu_seqlens are 32-bit or 64-bit integers");
    if (heads < 1 || x.cols() % heads != 0) {
      detail::refuse("packed", "rows of ", x.cols(), " elements are not ", heads, " heads of one size");
    }
    if (offsets.empty()) detail::refuse("packed", "cu_seqlens is empty; it has one number more than sequences");
    Eigen::Index before = 0;
    for (const Offset offset : offsets) {
      if (offset < before || offset > x.rows()) {
        detail::refuse("packed", "cu_seqlens has ", Eigen::Index(offset), " after ", before, ", among ", x.rows(),
                       " rows: it must not fall, nor leave the rows");
      }
      before = offset;
    }
    (sizeof(Offset) == 4 ? m_narrow : m_wide) = offsets.data();
  }

  /// A write view reads, too.
  template <class U>
  requires(std::is_const_v<T>&& std::is_same_v<U, value_type>) batch_view(const batch_view<U>& other)
  noexcept  // NOLINT(google-explicit-constructor)
      : m_data(other.m_data),
        m_sizes{other.m_sizes.sequences, other.m_sizes.tokens, other.m_sizes.heads, other.m_sizes.dim},
        m_strides{other.m_strides.sequence, other.m_strides.token, other.m_strides.head},
        m_narrow(other.m_narrow),
        m_wide(other.m_wide) {}

  constexpr T* data() const noexcept { return m_data; }
  constexpr Eigen::Index sequences() const noexcept { return m_sizes.sequences; }
  constexpr Eigen::Index heads() const noexcept { return m_sizes.heads; }
  constexpr Eigen::Index dim() const noexcept { return m_sizes.dim; }
  constexpr bool is_packed() const noexcept { return m_narrow != nullptr || m_wide != nullptr; }
  /// Tokens of sequence b.
  Eigen::Index tokens(Eigen::Index b) const noexcept {
    return is_packed() ? offset(b + 1) - offset(b) : m_sizes.tokens;
  }
  /// Tokens that precede sequence b in a packed view: where its rows begin, and its part of a mask.
  Eigen::Index first_row(Eigen::Index b) const noexcept { return is_packed() ? offset(b) : 0; }

  /// Head h of token i of sequence b: dim() elements.
  T* at(Eigen::Index b, Eigen::Index i, Eigen::Index h) const noexcept {
    return m_data + b * m_strides.sequence + (first_row(b) + i) * m_strides.token + h * m_strides.head;
  }
  /// Sequence b as the engine takes it.
  detail::token_rows<T> rows(Eigen::Index b) const noexcept { return {at(b, 0, 0), m_strides.token, m_strides.head}; }

 private:
  template <class U>
  friend class batch_view;

  Eigen::Index offset(Eigen::Index b) const noexcept {
    return m_wide != nullptr ? number<std::int64_t>(m_wide, b) : number<std::int32_t>(m_narrow, b);
  }
  /// Element b of integers of that size, which may be of another type, as long long and long.
  template <class Int>
  static Eigen::Index number(const void* integers, Eigen::Index b) noexcept {
    Int n;
    std::memcpy(&n, static_cast<const std::byte*>(integers) + b * Eigen::Index(sizeof n), sizeof n);
    return Eigen::Index(n);
  }

  void check() const {
    const auto& n = m_sizes;
    if (n.sequences < 0 || n.tokens < 0 || n.heads < 0 || n.dim < 0) {
      detail::refuse("batch_view", "a size is negative: ", n.sequences, " sequences, ", n.tokens, " tokens, ", n.heads,
                     " heads, ", n.dim, " elements");
    }
    const bool is_empty = n.sequences == 0 || n.tokens == 0 || n.heads == 0 || n.dim == 0;
    if (m_data == nullptr && !is_empty) {
      detail::refuse("batch_view", "a null pointer cannot hold ", n.sequences, " sequences of ", n.tokens, " tokens");
    }
    if constexpr (!std::is_const_v<T>) {
      // From the closest to the farthest: each stride must step over what the closer ones span.
      struct axis {
        Eigen::Index stride, count;
      };
      axis axes[] = {{m_strides.sequence, n.sequences}, {m_strides.token, n.tokens}, {m_strides.head, n.heads}};
      for (axis& a : axes) a.stride = a.stride < 0 ? -a.stride : a.stride;
      if (axes[0].stride < axes[1].stride) std::swap(axes[0], axes[1]);
      if (axes[1].stride < axes[2].stride) std::swap(axes[1], axes[2]);
      if (axes[0].stride < axes[1].stride) std::swap(axes[0], axes[1]);
      Eigen::Index span = n.dim;
      for (int i = 2; i >= 0 && !is_empty; --i) {
        if (axes[i].count > 1 && axes[i].stride < span) {
          detail::refuse("batch_view", "elements of an output overlap: a stride of ", axes[i].stride, " over ", span);
        }
        span += (axes[i].count - 1) * axes[i].stride;
      }
    }
  }

  T* m_data = nullptr;
  sizes m_sizes;
  strides m_strides;
  const void* m_narrow = nullptr;  // int32 offsets
  const void* m_wide = nullptr;    // int64 offsets
};

/// (B, N, H, D), the same memory as (B, N, H D).
template <class T>
batch_view<T> bnhd(T* data, Eigen::Index sequences, Eigen::Index tokens, Eigen::Index heads, Eigen::Index dim) {
  return batch_view<T>(data, {sequences, tokens, heads, dim}, {tokens * heads * dim, heads * dim, dim});
}

/// (B, H, N, D).
template <class T>
batch_view<T> bhnd(T* data, Eigen::Index sequences, Eigen::Index tokens, Eigen::Index heads, Eigen::Index dim) {
  return batch_view<T>(data, {sequences, tokens, heads, dim}, {heads * tokens * dim, dim, tokens * dim});
}

/// Sequences of different lengths, one after the other in the rows of x (tokens, H D): sequence b has rows
/// cu_seqlens[b] ... cu_seqlens[b + 1] - 1.
template <class X, std::ranges::contiguous_range Offsets>
auto packed(X&& x, const Offsets& cu_seqlens, Eigen::Index heads) {
  using element = std::remove_pointer_t<decltype(x.data())>;
  using offset = std::remove_cvref_t<decltype(*std::ranges::data(cu_seqlens))>;
  return batch_view<element>(matrix_view<element>(x), std::span<const offset>(cu_seqlens), heads);
}

LINATTN_NAMESPACE_END
