// Prefetching the caller's rows while the kernel computes.
#pragma once

#include <linattn/detail/layout.hpp>

#include <algorithm>
#include <cstdint>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// The caller's rows that come next: what the packing of the next head, or of the next tokens, will read and write, at
/// most four blocks of rows (q, k, v, out). The kernel fetches them into L2 a few lines before each micro-block: a
/// packing pass alone is too short for the processor's own prefetcher to reach memory speed (10 GB/s instead of 40),
/// and one line left out costs as much as all of them.
class rows_ahead {
 public:
  rows_ahead() = default;
  explicit rows_ahead(Eigen::Index rows) noexcept : m_rows(rows) {}

  /// Rows of `size` elements, `stride` elements apart.
  template <class T>
  LINATTN_INLINE void add(const T* first, Eigen::Index stride, Eigen::Index size) noexcept {
    const auto address = reinterpret_cast<std::uintptr_t>(first);
    const auto before = Eigen::Index(address % slab_alignment);
    const Eigen::Index bytes = before + size * Eigen::Index(sizeof(T));
    m_blocks[m_size++] = {address - std::uintptr_t(before), stride * Eigen::Index(sizeof(T)),
                          round_up(bytes, line_bytes) / line_bytes};
  }

  /// What one of `panels` panels fetches before each micro-block of B tokens: some of the block's rows, or a piece of
  /// one. As a rule these are as many lines as the panel has, of each block of rows; they are listed once for all
  /// micro-blocks, because loops over rows and lines take longer than the prefetches.
  template <Eigen::Index B, Eigen::Index PanelLines>
  class share {
   public:
    LINATTN_INLINE share(const rows_ahead& all, Eigen::Index panel, Eigen::Index panels) noexcept : m_all(all) {
      const Eigen::Index pieces = std::max(panels / B, Eigen::Index(1));
      const Eigen::Index height = (B + panels - 1) / panels;
      const Eigen::Index first = panel / pieces * height;
      for (Eigen::Index i = 0; i < all.m_size; ++i) {
        const block& x = all.m_blocks[i];
        const Eigen::Index width = (x.lines + pieces - 1) / pieces;
        const Eigen::Index begin = panel % pieces * width;
        Eigen::Index n = 0;
        for (Eigen::Index r = first; r < std::min(first + height, B); ++r) {
          for (Eigen::Index l = begin; l < std::min(begin + width, x.lines) && n < capacity; ++l) {
            m_lines[i][n++] = x.first + std::uintptr_t(r * x.stride + l * line_bytes);
          }
        }
        m_groups[i] = (n + group - 1) / group;
        for (; n < m_groups[i] * group; ++n) m_lines[i][n] = m_lines[i][0];
      }
    }

    /// Before the micro-block that begins with `token`.
    LINATTN_INLINE void fetch(Eigen::Index token) const noexcept {
      if (token + B > m_all.m_rows) return;
      for (Eigen::Index i = 0; i < m_all.m_size; ++i) {
        const auto offset = std::uintptr_t(token * m_all.m_blocks[i].stride);
        for (Eigen::Index g = 0; g < m_groups[i]; ++g) {
          unroll<group>([&](auto n) LINATTN_INLINE_LAMBDA { LINATTN_PREFETCH(m_lines[i][g * group + n] + offset); });
        }
      }
    }

   private:
    static constexpr Eigen::Index group = B * PanelLines;
    static constexpr Eigen::Index capacity = 8 * group;

    const rows_ahead& m_all;
    std::uintptr_t m_lines[4][capacity];
    Eigen::Index m_groups[4];
  };

 private:
  static constexpr auto line_bytes = Eigen::Index(slab_alignment);

  struct block {
    std::uintptr_t first = 0;
    Eigen::Index stride = 0;  // bytes
    Eigen::Index lines = 0;   // of a row
  };
  block m_blocks[4];
  Eigen::Index m_size = 0;
  Eigen::Index m_rows = 0;
};

}  // namespace detail
LINATTN_NAMESPACE_END
