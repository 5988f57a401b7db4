// Prefetching the caller's rows while the kernel computes.
#pragma once

#include <linattn/detail/layout.hpp>

#include <algorithm>
#include <cstdint>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// The first line of every page among n elements, into L2. The processor's own prefetcher follows a state that is
/// stepped from memory, but stops at the end of a page: with this it comes a quarter faster.
template <class T>
LINATTN_INLINE void prefetch_pages(const T* first, Eigen::Index n) {
  constexpr std::uintptr_t page = 4096;
  const auto begin = reinterpret_cast<std::uintptr_t>(first);
  const std::uintptr_t end = begin + std::uintptr_t(n) * sizeof(T);
  LINATTN_PREFETCH(begin);
  for (std::uintptr_t at = (begin / page + 1) * page; at < end; at += page) LINATTN_PREFETCH(at);
}

/// The caller's rows that come next: what the packing of the next head, or of the next tokens, will read and write, at
/// most five blocks of rows (q, k, v, dout and dq of a gradient). The kernel fetches them into L2 a few lines before
/// each micro-block: a packing pass alone is too short for the processor's own prefetcher to reach the speed of memory.
/// All lines, or none: those left out stall, and the prefetcher no longer sees a stream.
class rows_ahead {
  static constexpr Eigen::Index most_blocks = 5;
  static constexpr auto line_bytes = Eigen::Index(slab_alignment);

  struct block {
    std::uintptr_t first = 0;
    Eigen::Index stride = 0;  // bytes
    Eigen::Index lines = 0;   // of a row
  };

 public:
  rows_ahead() = default;
  explicit rows_ahead(Eigen::Index rows) noexcept : m_rows(rows) {}

  /// Rows of `size` elements, `stride` elements apart. Where rows do not begin on a line, the first one of each is left
  /// to the columns before them, unless these are the `leading` ones.
  template <class T>
  LINATTN_INLINE void add(const T* first, Eigen::Index stride, Eigen::Index size, bool leading) noexcept {
    const auto address = reinterpret_cast<std::uintptr_t>(first);
    const Eigen::Index bytes = size * Eigen::Index(sizeof(T));
    const auto before = Eigen::Index(address % slab_alignment);  // on the row's first line
    const Eigen::Index left_out = leading || before == 0 ? -before : line_bytes - before;
    m_blocks[m_size++] = {address + std::uintptr_t(left_out), stride * Eigen::Index(sizeof(T)),
                          round_up(std::max(bytes - left_out, Eigen::Index(0)), line_bytes) / line_bytes};
  }

  /// What one of `panels` panels fetches before each micro-block of B tokens: some of the block's rows, or a piece of
  /// one. As a rule these are as many lines as the panel has of each block of rows, and the loops over them unrolled:
  /// they would take longer than the prefetches.
  template <Eigen::Index B, Eigen::Index PanelLines>
  class share {
   public:
    LINATTN_INLINE share(const rows_ahead& all, Eigen::Index panel, Eigen::Index panels) noexcept
        : m_size(all.m_size), m_rows(all.m_rows) {
      const Eigen::Index pieces = std::max(panels / B, Eigen::Index(1));
      const Eigen::Index height = (B + panels - 1) / panels;
      const Eigen::Index first = panel / pieces * height;
      m_height = std::clamp(B - first, Eigen::Index(0), height);
      for (Eigen::Index i = 0; i < m_size; ++i) {
        const block& x = all.m_blocks[i];
        const Eigen::Index width = (x.lines + pieces - 1) / pieces;
        const Eigen::Index begin = std::min(panel % pieces * width, x.lines);
        m_blocks[i] = {x.first + std::uintptr_t(first * x.stride + begin * line_bytes), x.stride,
                       std::min(width, x.lines - begin)};
      }
    }

    /// Before the micro-block that begins with row `row`.
    LINATTN_INLINE void fetch(Eigen::Index row) const noexcept {
      if (row + B > m_rows) return;
      for (Eigen::Index i = 0; i < m_size; ++i) {
        const block& x = m_blocks[i];
        const std::uintptr_t first = x.first + std::uintptr_t(row * x.stride);
        if (m_height * x.lines == usual && m_height == 1) {
          grid<1>(first, x.stride);
        } else if (m_height * x.lines == usual && m_height == 2) {
          grid<2>(first, x.stride);
        } else if (m_height * x.lines == usual && m_height == 4) {
          grid<4>(first, x.stride);
        } else {
          for (Eigen::Index r = 0; r < m_height; ++r) {
            for (Eigen::Index l = 0; l < x.lines; ++l) {
              LINATTN_PREFETCH(first + std::uintptr_t(r * x.stride + l * line_bytes));
            }
          }
        }
      }
    }

   private:
    static constexpr Eigen::Index usual = B * PanelLines;

    template <Eigen::Index Height>
    static LINATTN_INLINE void grid(std::uintptr_t first, Eigen::Index stride) noexcept {
      unroll<Height>([&](auto) LINATTN_INLINE_LAMBDA {
        unroll<usual / Height>([&](auto l) LINATTN_INLINE_LAMBDA { LINATTN_PREFETCH(first + l * line_bytes); });
        first += std::uintptr_t(stride);
      });
    }

    Eigen::Index m_size;
    Eigen::Index m_rows;
    Eigen::Index m_height = 0;
    block m_blocks[most_blocks];
  };

 private:
  block m_blocks[most_blocks];
  Eigen::Index m_size = 0;
  Eigen::Index m_rows = 0;
};

}  // namespace detail
LINATTN_NAMESPACE_END
