// Outputs that notice a write beside them, and heap buffers without a byte to spare.
#pragma once

#include <gtest/gtest.h>
#include <Eigen/Core>

#include <cstring>
#include <memory>

namespace support {

/// A (rows, cols) output inside a larger matrix of sentinels: `margin` rows and columns of them on every side. The
/// output starts one margin into a row, so that an odd margin makes it unaligned.
///
///   support::framed<float> out(n, h * m);
///   attn.forward_causal(q, k, v, out.matrix(), ws);
///   EXPECT_TRUE(out.frame_intact());
template <class T>
class framed {
 public:
  using storage = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using inner = Eigen::Map<storage, Eigen::Unaligned, Eigen::OuterStride<>>;

  framed(Eigen::Index rows, Eigen::Index cols, Eigen::Index margin = 3)
      : m_rows(rows), m_cols(cols), m_margin(margin), m_all(rows + 2 * margin, cols + 2 * margin) {
    for (Eigen::Index i = 0; i < m_all.rows(); ++i) {
      for (Eigen::Index j = 0; j < m_all.cols(); ++j) m_all(i, j) = sentinel(i, j);
    }
  }

  inner matrix() {
    return inner(m_all.data() + m_margin * m_all.cols() + m_margin, m_rows, m_cols, Eigen::OuterStride<>(m_all.cols()));
  }

  /// Every sentinel around the output is still there.
  testing::AssertionResult frame_intact() const { return intact(false); }

  /// Nothing has been written at all, inside or outside: for calls that must refuse first.
  testing::AssertionResult untouched() const { return intact(true); }

 private:
  /// No value an attention output has, and another one everywhere: a shifted copy of the frame shows, too.
  static T sentinel(Eigen::Index i, Eigen::Index j) { return static_cast<T>(-70000 - 37 * (i % 50) - (j % 37)); }

  testing::AssertionResult intact(bool inside_too) const {
    for (Eigen::Index i = 0; i < m_all.rows(); ++i) {
      for (Eigen::Index j = 0; j < m_all.cols(); ++j) {
        const bool inside = i >= m_margin && i < m_margin + m_rows && j >= m_margin && j < m_margin + m_cols;
        const T expected = sentinel(i, j), found = m_all(i, j);
        if ((inside && !inside_too) || std::memcmp(&expected, &found, sizeof(T)) == 0) continue;
        return testing::AssertionFailure()
               << "the sentinel at (" << i - m_margin << ", " << j - m_margin << ") of a (" << m_rows << ", " << m_cols
               << ") output was overwritten with " << static_cast<double>(found);
      }
    }
    return testing::AssertionSuccess();
  }

  Eigen::Index m_rows, m_cols, m_margin;
  storage m_all;
};

/// A (rows, cols) matrix with a row stride on a heap buffer that ends with its last element: under AddressSanitizer one
/// element read or written too far ends the program. `offset` elements before the first shift it off alignment.
template <class T>
class exact_buffer {
 public:
  using storage = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using view = Eigen::Map<storage, Eigen::Unaligned, Eigen::OuterStride<>>;

  exact_buffer(Eigen::Index rows, Eigen::Index cols, Eigen::Index row_stride, Eigen::Index offset)
      : m_rows(rows), m_cols(cols), m_row_stride(row_stride), m_offset(offset) {
    const Eigen::Index size = rows == 0 ? offset : offset + (rows - 1) * row_stride + cols;
    m_data.reset(new T[static_cast<std::size_t>(size)]());
  }
  exact_buffer(Eigen::Index rows, Eigen::Index cols) : exact_buffer(rows, cols, cols, 0) {}

  /// A copy of x.
  template <class X>
  explicit exact_buffer(const Eigen::MatrixBase<X>& x, Eigen::Index extra_stride = 0, Eigen::Index offset = 0)
      : exact_buffer(x.rows(), x.cols(), x.cols() + extra_stride, offset) {
    matrix() = x;
  }

  view matrix() { return view(m_data.get() + m_offset, m_rows, m_cols, Eigen::OuterStride<>(m_row_stride)); }
  T* data() { return m_data.get() + m_offset; }

 private:
  Eigen::Index m_rows, m_cols, m_row_stride, m_offset;
  std::unique_ptr<T[]> m_data;
};

}  // namespace support
