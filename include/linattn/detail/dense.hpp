// The affine map of a layer, y = x W^T + b: weights packed once, for one row as they stream from memory, and for many.
#pragma once

#include <linattn/detail/layout.hpp>
#include <linattn/detail/projection.hpp>
#include <linattn/matrix_view.hpp>
#include <linattn/transformer_weights.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <initializer_list>
#include <memory>
#include <utility>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// W (out, in) and b (out) in panels of columns of W^T: b, then one row of the panel for each input, one panel after
/// the other. So one row of x reads the weights as a single stream, and blocks of rows a panel that stays in the cache.
///
/// A y is one chain of fused multiply-adds from b over the inputs in their order: its bits do not depend on the rows it
/// is computed with, and a token alone gives what it gives in a sequence. Immutable, shared by copies.
template <class T>
class dense {
 public:
  dense() = default;
  /// The maps of one input that are computed together: their outputs stand side by side. Empty ones have none.
  dense(std::initializer_list<const affine_weights<T>*> parts) {
    for (const affine_weights<T>* p : parts) {
      m_inputs = std::max(m_inputs, p->weight.cols());
      m_outputs += p->weight.rows();
    }
    heap_slab<T> panels(round_up(m_outputs, width) * (1 + m_inputs));
    Eigen::Index column = 0;
    for (const affine_weights<T>* p : parts) {
      for (Eigen::Index o = 0; o < p->weight.rows(); ++o, ++column) {
        T* const to = panels.data() + column / width * width * (1 + m_inputs) + column % width;
        if (p->bias.size() > 0) *to = p->bias[o];
        for (Eigen::Index i = 0; i < p->weight.cols(); ++i) to[(1 + i) * width] = p->weight(o, i);
      }
    }
    m_panels = std::make_shared<const heap_slab<T>>(std::move(panels));
  }

  Eigen::Index inputs() const noexcept { return m_inputs; }
  Eigen::Index outputs() const noexcept { return m_outputs; }
  bool is_empty() const noexcept { return m_outputs == 0; }
  Eigen::Index bytes() const noexcept {
    return m_panels == nullptr ? 0 : static_cast<Eigen::Index>(m_panels->size() * sizeof(T));
  }

  /// y (rows, outputs) = x (rows, inputs) W^T + b. 2 inputs outputs flops a row; no allocation.
  void apply(matrix_view<const T> x, matrix_view<T> y) const noexcept {
    for (Eigen::Index c = 0; c < m_outputs; c += width) {
      Eigen::Index r = 0;
      for (; r + most_rows <= x.rows(); r += most_rows) block<most_rows>(x, y, r, c);
      unroll<most_rows - 1>([&](auto less_one) {
        if (x.rows() - r == less_one + 1) block<less_one + 1>(x, y, r, c);
      });
    }
  }

 private:
  static constexpr Eigen::Index most_packets = 4;
  static constexpr Eigen::Index width = std::max(line<T>, most_packets* packet<T>::size);  // of a panel
  /// Rows at once: 6 x 4 or 4 x 2 sums, the weights beside them and one coordinate fill the registers. With 32 of them
  /// and 64 rows the products run at 0.9 of peak (bench_generation).
  static constexpr Eigen::Index registers = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS;
  static constexpr Eigen::Index most_rows = registers >= 32 ? 6 : 4;

  /// Rows r ... r + Rows - 1 of one panel's columns, from c on.
  template <Eigen::Index Rows>
  LINATTN_INLINE void block(matrix_view<const T> x, matrix_view<T> y, Eigen::Index r, Eigen::Index c) const noexcept {
    constexpr Eigen::Index packets = (Rows + 1) * most_packets < registers ? most_packets : most_packets / 2;
    const T* const panel = m_panels->data() + c * (1 + m_inputs);
    for (Eigen::Index part = 0; part < width && c + part < m_outputs; part += packets * packet<T>::size) {
      project_block<Rows, packets>(x.row(r), x.row_stride(), m_inputs, panel + part, width, y.row(r) + c + part,
                                   y.row_stride(), m_outputs - c - part);
    }
  }

  std::shared_ptr<const heap_slab<T>> m_panels;
  Eigen::Index m_inputs = 0;
  Eigen::Index m_outputs = 0;
};

}  // namespace detail
LINATTN_NAMESPACE_END
