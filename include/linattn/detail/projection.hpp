// The affine product u = W x + b that random and learned maps share: the matrix, the product, and its transposes.
#pragma once

#include <linattn/detail/layout.hpp>
#include <linattn/detail/registers.hpp>
#include <linattn/detail/serialization.hpp>
#include <linattn/detail/simd.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <memory>
#include <type_traits>
#include <utility>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// u (R, m) = b + x (R, D) W^T for `Rows` rows and `Packets` registers of columns, of which `columns` are stored. `w`
/// is b (m) and below it W^T (D, m), zero-padded rows `stride` apart. Every u is one chain of fused multiply-adds over
/// D, whatever the blocking.
template <Eigen::Index Rows, Eigen::Index Packets, class T>
LINATTN_INLINE void project_block(const T* x, Eigen::Index x_stride, Eigen::Index head_dim, const T* w,
                                  Eigen::Index stride, T* u, Eigen::Index u_stride, Eigen::Index columns) {
  using P = packet<T>;
  P product[Rows][Packets];
  unroll<Rows>([&](auto r) LINATTN_INLINE_LAMBDA {
    unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { product[r][p] = P::load(w + p * P::size); });
  });
  w += stride;
  for (Eigen::Index d = 0; d < head_dim; ++d) {
    P weights[Packets];
    unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { weights[p] = P::load(w + d * stride + p * P::size); });
    unroll<Rows>([&](auto r) LINATTN_INLINE_LAMBDA {
      const P coordinate = P::broadcast(x + r * x_stride + d);
      unroll<Packets>([&](auto p)
                          LINATTN_INLINE_LAMBDA { product[r][p] = fma(coordinate, weights[p], product[r][p]); });
    });
  }
  unroll<Rows>([&](auto r) LINATTN_INLINE_LAMBDA {
    unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
      T* const out = u + r * u_stride + p * P::size;
      const Eigen::Index left = columns - p * P::size;
      if (left >= P::size) {
        product[r][p].store_unaligned(out);
      } else if (left > 0) {
        alignas(slab_alignment) T lanes[P::size];
        product[r][p].store(lanes);
        std::copy(lanes, lanes + left, out);
      }
    });
  });
}

/// u (R, m) = b + x (R, D) W^T. Rows of x and u are x_stride and u_stride apart; nothing is written beyond u's m
/// columns.
template <class T>
void project(const T* x, Eigen::Index x_stride, Eigen::Index rows, Eigen::Index head_dim, const T* w,
             Eigen::Index stride, T* u, Eigen::Index u_stride, Eigen::Index features) {
  constexpr Eigen::Index size = packet<T>::size;
  const Eigen::Index whole = rows / 4 * 4;
  for (Eigen::Index c = 0; c < features && whole > 0; c += 2 * size) {  // these two columns of registers stay in L1
    for (Eigen::Index r = 0; r < whole; r += 4) {
      project_block<4, 2>(x + r * x_stride, x_stride, head_dim, w + c, stride, u + r * u_stride + c, u_stride,
                          features - c);
    }
  }
  for (Eigen::Index r = whole; r < rows; ++r) {
    for (Eigen::Index c = 0; c < features; c += 4 * size) {
      project_block<1, 4>(x + r * x_stride, x_stride, head_dim, w + c, stride, u + r * u_stride + c, u_stride,
                          features - c);
    }
  }
}

/// W (m, D) and b (m), one set or several, of which each head uses one. Immutable and shared by copies, so that copying
/// a map is cheap and threads read one matrix.
template <class T>
class projection {
 public:
  /// W as an Eigen expression: (m, D), column-major with an outer stride, no copy.
  using matrix_type =
      Eigen::Map<const Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic>, Eigen::Unaligned, Eigen::OuterStride<>>;
  using vector_type = Eigen::Map<const Eigen::Matrix<T, 1, Eigen::Dynamic>>;

  /// fill(set, W, b) writes each set through writable views of these shapes; W and b are 0 before. Sizes are at
  /// least 1.
  template <class Fill>
  projection(Eigen::Index head_dim, Eigen::Index rows, Eigen::Index sets, const Fill& fill)
      : m_head_dim(head_dim), m_rows(rows), m_sets(sets) {
    // Padded to whole register blocks; an odd number of cache lines a row, because with a power of two the rows of one
    // column block would fall on each other in the L1 cache.
    m_stride = (round_up(rows, std::max(line<T>, 4 * packet<T>::size)) / line<T> | 1) * line<T>;
    heap_slab<T> weights(sets * (1 + head_dim) * m_stride);  // of each set b (m), W^T (D, m)
    for (Eigen::Index set = 0; set < sets; ++set) {
      T* const bias = weights.data() + offset(set);
      fill(set,
           Eigen::Map<Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic>, Eigen::Unaligned, Eigen::OuterStride<>>(
               bias + m_stride, rows, head_dim, Eigen::OuterStride<>(m_stride)),
           Eigen::Map<Eigen::Matrix<T, 1, Eigen::Dynamic>>(bias, rows));
    }
    m_weights = std::make_shared<const heap_slab<T>>(std::move(weights));
  }

  /// From a record: of each set W (m, D) and, where there are biases, b (m).
  projection(record_reader& in, Eigen::Index head_dim, Eigen::Index rows, Eigen::Index sets = 1, bool has_bias = false)
      : projection(head_dim, rows, in.matrices<T>(sets, rows, head_dim),
                   [&](Eigen::Index /*set*/, auto weights, auto bias) {
                     in.matrix(weights);
                     if (has_bias) in.matrix(bias);
                   }) {}

  void write(record_writer& out, bool has_bias) const {
    for (Eigen::Index set = 0; set < m_sets; ++set) {
      out.matrix(matrix(set));
      if (has_bias) out.matrix(bias(set));
    }
  }

  Eigen::Index head_dim() const noexcept { return m_head_dim; }
  Eigen::Index rows() const noexcept { return m_rows; }
  Eigen::Index sets() const noexcept { return m_sets; }
  matrix_type matrix(Eigen::Index set = 0) const noexcept {
    return matrix_type(m_weights->data() + offset(set) + m_stride, m_rows, m_head_dim, Eigen::OuterStride<>(m_stride));
  }
  vector_type bias(Eigen::Index set = 0) const noexcept { return vector_type(m_weights->data() + offset(set), m_rows); }

  /// The first m columns of u (R, >= m) = b + x (R, D) W^T.
  template <class X, class U>
  void apply(const X& x, U& u, Eigen::Index set = 0) const noexcept {
    project(x.data(), x.outerStride(), x.rows(), m_head_dim, m_weights->data() + offset(set), m_stride, u.data(),
            u.outerStride(), m_rows);
  }

  /// dx (R, D) = scale (a (R, m) W): the transpose of `apply`. `a(r, c, n)` gives a register of row r from column c on,
  /// zero from lane n on where n is less than a register.
  template <class Dx, class A>
  void apply_transposed(Dx& dx, T scale, const A& a, Eigen::Index set = 0) const noexcept {
    using P = packet<T>;
    for_each_column_block([&](auto count, Eigen::Index d) LINATTN_INLINE_LAMBDA {
      const T* const w = m_weights->data() + offset(set) + (1 + d) * m_stride;
      for (Eigen::Index r = 0; r < dx.rows(); ++r) {
        P total[count];
        unroll<count>([&](auto i) LINATTN_INLINE_LAMBDA { total[i] = P::zero(); });
        for (Eigen::Index c = 0; c < m_rows; c += P::size) {
          const P lanes = a(r, c, m_rows - c);
          unroll<count>([&](auto i)
                            LINATTN_INLINE_LAMBDA { total[i] = fma(lanes, P::load(w + i * m_stride + c), total[i]); });
        }
        unroll<count>([&](auto i)
                          LINATTN_INLINE_LAMBDA { dx.data()[r * dx.outerStride() + d + i] = scale * sum(total[i]); });
      }
    });
  }

  /// dW (m, D) += a (R, m)^T x (R, D), db (m) += the sum of a's rows; `a` as in apply_transposed. Columns of dW are
  /// `stride` apart. Every sum runs over the rows in their order.
  template <class X, class A>
  void add_gradient(const X& x, const A& a, T* weights, Eigen::Index stride, T* bias) const noexcept {
    using P = packet<T>;
    for_each_column_block([&](auto count, Eigen::Index d) LINATTN_INLINE_LAMBDA {
      for_each_register<T>(m_rows, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        T* const to = weights + d * stride + c;
        P total[count];
        unroll<count>([&](auto i) LINATTN_INLINE_LAMBDA { total[i] = load_up_to(to + i * stride, left); });
        for (Eigen::Index r = 0; r < x.rows(); ++r) {
          const P lanes = a(r, c, left);
          const T* const coordinates = x.data() + r * x.outerStride() + d;
          unroll<count>([&](auto i)
                            LINATTN_INLINE_LAMBDA { total[i] = fma(lanes, P::broadcast(coordinates + i), total[i]); });
        }
        unroll<count>([&](auto i) LINATTN_INLINE_LAMBDA { store_up_to(to + i * stride, total[i], left); });
      });
    });
    for_each_register<T>(m_rows, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
      P total = load_up_to(bias + c, left);
      for (Eigen::Index r = 0; r < x.rows(); ++r) total = total + a(r, c, left);
      store_up_to(bias + c, total, left);
    });
  }

 private:
  Eigen::Index offset(Eigen::Index set) const noexcept { return set * (1 + m_head_dim) * m_stride; }

  /// f(count, d) for the columns d ... d + count - 1 of W: so many stay in L1 while the tokens go by.
  template <class F>
  LINATTN_INLINE void for_each_column_block(const F& f) const {
    constexpr Eigen::Index together = 4;
    Eigen::Index d = 0;
    for (; d + together <= m_head_dim; d += together) f(std::integral_constant<Eigen::Index, together>(), d);
    for (; d < m_head_dim; ++d) f(std::integral_constant<Eigen::Index, 1>(), d);
  }

  std::shared_ptr<const heap_slab<T>> m_weights;
  Eigen::Index m_head_dim;
  Eigen::Index m_rows;
  Eigen::Index m_sets;
  Eigen::Index m_stride = 0;
};

}  // namespace detail
LINATTN_NAMESPACE_END
