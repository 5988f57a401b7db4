// A map's tile with sentinels around it, for check_feature_map.
#pragma once

#include <linattn/detail/layout.hpp>
#include <linattn/feature_map.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cstring>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// A tile between rows and columns that nobody may touch.
template <class T>
class guarded_tile {
 public:
  guarded_tile(Eigen::Index rows, Eigen::Index cols)
      : m_rows(rows), m_cols(cols), m_stride(round_up(cols, line<T>) + line<T>), m_memory((rows + 2) * m_stride) {}

  T* row(Eigen::Index r) { return m_memory.data() + (r + 1) * m_stride; }
  const T* row(Eigen::Index r) const { return m_memory.data() + (r + 1) * m_stride; }
  /// Element i in row-major order.
  const T& operator[](Eigen::Index i) const { return row(i / m_cols)[i % m_cols]; }
  Eigen::Index size() const { return m_rows * m_cols; }
  Eigen::Index rows() const { return m_rows; }
  Eigen::Index cols() const { return m_cols; }
  void fill(T value) { std::fill(m_memory.begin(), m_memory.end(), value); }
  tile<T> view() { return tile<T>(row(0), m_rows, m_cols, Eigen::OuterStride<>(m_stride)); }
  const_tile<T> view() const { return const_tile<T>(row(0), m_rows, m_cols, Eigen::OuterStride<>(m_stride)); }

  /// Sets what lies outside the tile.
  void surround(T value) {
    const guarded_tile inside = *this;
    fill(value);
    for (Eigen::Index r = 0; r < m_rows; ++r) std::copy(inside.row(r), inside.row(r) + m_cols, row(r));
  }

  /// Whether everything outside the tile still holds `value`.
  bool surrounded_by(T value) const {
    guarded_tile expected = *this;
    expected.surround(value);
    return std::memcmp(expected.m_memory.data(), m_memory.data(), m_memory.size() * sizeof(T)) == 0;
  }

 private:
  Eigen::Index m_rows;
  Eigen::Index m_cols;
  Eigen::Index m_stride;
  heap_slab<T> m_memory;
};

}  // namespace detail
LINATTN_NAMESPACE_END
