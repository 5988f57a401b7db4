// The projection u = W x that random feature maps share: its matrix, drawn from a seed, and the product.
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/layout.hpp>
#include <linattn/detail/random.hpp>
#include <linattn/detail/registers.hpp>
#include <linattn/detail/simd.hpp>
#include <linattn/random_features.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// u (R, m) = x (R, D) W^T for `Rows` rows and `Packets` registers of columns, of which `columns` are stored. W^T (D,
/// m) has zero-padded rows `stride` apart. Every u is one chain of fused multiply-adds over D, whatever the blocking.
template <Eigen::Index Rows, Eigen::Index Packets, class T>
LINATTN_INLINE void project_block(const T* x, Eigen::Index x_stride, Eigen::Index head_dim, const T* w,
                                  Eigen::Index stride, T* u, Eigen::Index u_stride, Eigen::Index columns) {
  using P = packet<T>;
  P product[Rows][Packets];
  unroll<Rows>([&](auto r) LINATTN_INLINE_LAMBDA {
    unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { product[r][p] = P::zero(); });
  });
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

/// u (R, m) = x (R, D) W^T. Rows of x and u are x_stride and u_stride apart; nothing is written beyond u's m columns.
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

/// Draws W (m, D) row by row in double: a pure function of (seed, kind, D), the same bits on every compiler (see
/// random.hpp), orthogonal rows included.
class direction_source {
 public:
  direction_source(std::uint64_t seed, random_rows kind, Eigen::Index head_dim)
      : m_seed(seed), m_kind(kind), m_head_dim(head_dim) {}

  /// f(c, w_c) for c = 0 ... rows - 1; w_c points to D doubles.
  template <class F>
  void for_each(Eigen::Index rows, const F& f) const {
    const bool independent = m_kind == random_rows::independent;
    const Eigen::Index block_rows = independent ? 1 : m_head_dim;
    std::vector<double> block(static_cast<std::size_t>(block_rows * m_head_dim));
    std::vector<double> lengths(static_cast<std::size_t>(block_rows));
    for (Eigen::Index first = 0; first < rows; first += block_rows) {
      const Eigen::Index count = std::min(block_rows, rows - first);
      for (Eigen::Index r = 0; r < count; ++r) {
        double* const w = block.data() + r * m_head_dim;
        for (Eigen::Index d = 0; d < m_head_dim; ++d) {
          const auto index = static_cast<std::uint64_t>((first + r) * m_head_dim + d);
          w[d] = random_normal(m_seed, stream_of_directions, index);
        }
        if (!independent) {
          lengths[static_cast<std::size_t>(r)] = length(w);
          orthonormalize(block.data(), r);
        }
      }
      for (Eigen::Index r = 0; r < count; ++r) {
        double* const w = block.data() + r * m_head_dim;
        if (!independent) scale(w, lengths[static_cast<std::size_t>(r)]);
        f(first + r, w);
      }
    }
  }

 private:
  static constexpr std::uint64_t stream_of_directions = 0;

  double dot(const double* a, const double* b) const {
    double sum = 0;
    for (Eigen::Index d = 0; d < m_head_dim; ++d) sum = std::fma(a[d], b[d], sum);
    return sum;
  }

  void scale(double* w, double factor) const {
    for (Eigen::Index d = 0; d < m_head_dim; ++d) w[d] *= factor;
  }

  /// Row r of the block at right angles to the rows before it, and of length 1. This is Gram and Schmidt's way, whose
  /// rows are uniform in direction: a QR by reflections leaves them signs that depend on the draw, and the estimates
  /// of positive features a bias. The second pass removes what rounding leaves of the first.
  void orthonormalize(double* block, Eigen::Index r) const {
    double* const w = block + r * m_head_dim;
    for (int pass = 0; pass < 2; ++pass) {
      for (Eigen::Index other = 0; other < r; ++other) {
        const double* const unit = block + other * m_head_dim;
        const double along = dot(w, unit);
        for (Eigen::Index d = 0; d < m_head_dim; ++d) w[d] = std::fma(-along, unit[d], w[d]);
      }
      scale(w, 1 / std::sqrt(dot(w, w)));
    }
  }

  /// Of the row as drawn. With a block of normals G = R Q, R lower triangular with a positive diagonal, Q and the rows
  /// of R are independent, so that lengths, those of R's rows, depend on neither the directions nor each other.
  double length(const double* w) const {
    return std::sqrt(m_kind == random_rows::regularized ? static_cast<double>(m_head_dim) : dot(w, w));
  }

  std::uint64_t m_seed;
  random_rows m_kind;
  Eigen::Index m_head_dim;
};

/// W (m, D), m directions as drawn by direction_source: a pure function of (seed, kind, D), of which the first rows do
/// not depend on m. Immutable and shared by copies, so that copying a map is cheap and threads read one matrix.
template <class T>
class random_projection {
 public:
  /// The matrix as an Eigen expression: (m, D), column-major with an outer stride, no copy.
  using matrix_type =
      Eigen::Map<const Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic>, Eigen::Unaligned, Eigen::OuterStride<>>;

  random_projection(const char* owner, Eigen::Index head_dim, Eigen::Index rows, std::uint64_t seed,
                    random_rows kind = random_rows::independent)
      : m_head_dim(head_dim), m_rows(rows), m_seed(seed) {
    if (head_dim < 1) refuse(owner, "head_dim is ", head_dim, "; at least 1 is needed");
    if (rows < 1) refuse(owner, "features is ", rows, "; at least 1 is needed");
    // Padded to whole register blocks; an odd number of cache lines a row, because with a power of two the rows of one
    // column block would fall on each other in the L1 cache.
    m_stride = (round_up(rows, std::max(line<T>, 4 * packet<T>::size)) / line<T> | 1) * line<T>;
    heap_slab<T> weights(head_dim * m_stride);  // W^T (D, m)
    direction_source(seed, kind, head_dim).for_each(rows, [&](Eigen::Index c, const double* w) {
      for (Eigen::Index d = 0; d < head_dim; ++d) weights.data()[d * m_stride + c] = static_cast<T>(w[d]);
    });
    m_weights = std::make_shared<const heap_slab<T>>(std::move(weights));
  }

  Eigen::Index head_dim() const noexcept { return m_head_dim; }
  Eigen::Index rows() const noexcept { return m_rows; }
  std::uint64_t seed() const noexcept { return m_seed; }
  matrix_type matrix() const noexcept {
    return matrix_type(m_weights->data(), m_rows, m_head_dim, Eigen::OuterStride<>(m_stride));
  }

  /// The first m columns of u (R, >= m) = x (R, D) W^T, with W as drawn.
  template <class X, class U>
  void apply(const X& x, U& u) const noexcept {
    project(x.data(), x.outerStride(), x.rows(), m_head_dim, m_weights->data(), m_stride, u.data(), u.outerStride(),
            m_rows);
  }

  /// dx (R, D) = scale (a (R, m) W): the transpose of `apply`. `a(r, c, n)` gives a register of row r from column c on,
  /// zero from lane n on where n is less than a register.
  template <class Dx, class A>
  void apply_transposed(Dx& dx, T scale, const A& a) const noexcept {
    using P = packet<T>;
    constexpr Eigen::Index together = 4;  // rows of W^T, which stay in L1 while the tokens go by
    const auto rows_from = [&](auto count, Eigen::Index d) LINATTN_INLINE_LAMBDA {
      const T* const w = m_weights->data() + d * m_stride;
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
    };
    Eigen::Index d = 0;
    for (; d + together <= m_head_dim; d += together) rows_from(std::integral_constant<Eigen::Index, together>(), d);
    for (; d < m_head_dim; ++d) rows_from(std::integral_constant<Eigen::Index, 1>(), d);
  }

 private:
  std::shared_ptr<const heap_slab<T>> m_weights;
  Eigen::Index m_head_dim;
  Eigen::Index m_rows;
  Eigen::Index m_stride = 0;
  std::uint64_t m_seed;
};

}  // namespace detail
LINATTN_NAMESPACE_END
