// The softmax attention to beat: causal, online softmax in tiles, as careful as the kernels it is held against.
#pragma once

#include <linattn/detail/layout.hpp>
#include <linattn/matrix_view.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace linattn_bench {

using Eigen::Index;

/// out (N, M) = softmax(q k^T / sqrt(D)) v, causal, one head, without the N x N matrix.
///
/// Keys go by in tiles; a row keeps the largest score mu it has met, the sum l of exp(s - mu) and the outputs weighted
/// so far. A tile that brings a larger score rescales both:
///
///     mu' = max(mu, max_j s_j)    p_j = exp(s_j - mu')    l' = e l + sum_j p_j    o' = e o + sum_j p_j v_j
///     e = exp(mu - mu')           out = o / l
///
/// A tile of queries meets the tiles of keys up to its own diagonal, `rows` queries at a time, so that no more than
/// rows^2 / 2 scores a diagonal are computed in vain. Keys are transposed once, tile by tile. Both products are one
/// kernel, `rows` x 2 packets of accumulators. A few tokens are not worth transposing: they go through Eigen's
/// products. M is a multiple of the packet size. Made once for a shape; from the second call on nothing allocates.
template <class T>
class tiled_softmax {
  using P = linattn::detail::packet<T>;
  using matrix = linattn::row_matrix<T>;

 public:
  /// Queries and keys of a tile, of 32 to 256 by 32 to 512: 0.71, 0.81, 0.81 of the FMA peak with AVX-512 at N = 4096,
  /// D = 32, 64, 128; 64 by 64 gives 0.63, 0.74, 0.77; more queries or keys change less than two runs differ.
  static constexpr Index default_query_tile = 64;
  static constexpr Index default_key_tile = 256;

  tiled_softmax(Index tokens, Index head_dim, Index query_tile = default_query_tile, Index key_tile = default_key_tile)
      : m_query_tile(query_tile),
        m_key_tile(std::min(key_tile, linattn::detail::padded<T>(tokens))),
        m_keys(matrix::Zero(linattn::detail::round_up(tokens, m_key_tile) / m_key_tile * head_dim, m_key_tile)),
        m_queries(query_tile, head_dim),
        m_scores(rows, m_key_tile),
        m_largest(std::size_t(query_tile)),
        m_sum(std::size_t(query_tile)) {
    // So that no tile of keys begins among rows that are computed together.
    eigen_assert(query_tile % rows == 0 && key_tile % rows == 0 && key_tile % P::size == 0);
  }

  void operator()(const matrix& q, const matrix& k, const matrix& v, matrix& out) {
    const Index tokens = q.rows();
    if (tokens <= few) return attend_few(q, k, v, out);
    transpose_keys(k);
    out.setZero();
    for (Index first = 0; first < tokens; first += m_query_tile) {
      const Index queries = std::min(m_query_tile, tokens - first);
      m_queries.topRows(queries) = q.middleRows(first, queries) * (T(1) / std::sqrt(T(q.cols())));  // (queries, D)
      std::fill(m_largest.begin(), m_largest.end(), -std::numeric_limits<T>::infinity());
      std::fill(m_sum.begin(), m_sum.end(), T(0));
      for (Index key = 0; key < first + queries; key += m_key_tile) {
        Index i = 0;
        for (; i + rows <= queries; i += rows) attend<rows>(first, i, key, v, out);
        for (; i + 2 <= queries; i += 2) attend<2>(first, i, key, v, out);
        for (; i < queries; ++i) attend<1>(first, i, key, v, out);
      }
      for (Index i = 0; i < queries; ++i) out.row(first + i) /= m_sum[std::size_t(i)];
    }
  }

 private:
  /// As many chains of fused multiply-adds as the registers hold beside their operands.
  static constexpr Index rows = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32 ? 8 : 4;

  /// Up to here Eigen's products take less time (N = 8, D = 64: 1.35 us against 1.50; N = 32: 6.2 against 5.0).
  static constexpr Index few = 16;

  /// The equation as it is written, one block.
  void attend_few(const matrix& q, const matrix& k, const matrix& v, matrix& out) {
    m_few.noalias() = q * k.transpose();  // (N, N)
    const T scale = T(1) / std::sqrt(T(q.cols()));
    for (Index i = 0; i < q.rows(); ++i) {
      auto seen = m_few.row(i).head(i + 1).array();
      seen = ((seen - seen.maxCoeff()) * scale).exp();
      seen /= seen.sum();
      m_few.row(i).tail(q.rows() - i - 1).setZero();
    }
    out.noalias() = m_few * v;  // (N, M)
  }

  /// k (N, D) to tiles (D, key_tile) below each other, zeros beyond them.
  void transpose_keys(const matrix& k) {
    const Index dim = k.cols();
    for (Index key = 0; key < k.rows(); key += m_key_tile) {
      const Index keys = std::min(m_key_tile, k.rows() - key);
      m_keys.block(key / m_key_tile * dim, 0, dim, keys) = k.middleRows(key, keys).transpose();
    }
  }

  /// Rows i ... of the query tile against the keys of one tile that they may see.
  template <Index Rows>
  void attend(Index first, Index i, Index key, const matrix& v, matrix& out) {
    const Index dim = m_queries.cols();
    const Index seen = std::min(m_key_tile, first + i + Rows - key);  // by the last of the rows
    if (seen <= 0) return;
    const Index columns = linattn::detail::padded<T>(seen);
    product<Rows, false>(&m_queries(i, 0), dim, &m_keys(key / m_key_tile * dim, 0), m_key_tile, m_scores.data(),
                         m_key_tile, dim, columns);
    for (Index r = 0; r < Rows; ++r) {
      const Index visible = std::min(m_key_tile, first + i + r + 1 - key);  // one at least
      T* const scores = &m_scores(r, 0);
      std::fill(scores + visible, scores + columns, -std::numeric_limits<T>::infinity());
      weigh(scores, columns, i + r, out.row(first + i + r));
    }
    product<Rows, true>(m_scores.data(), m_key_tile, &v(key, 0), v.cols(), &out(first + i, 0), out.cols(), seen,
                        v.cols());
  }

  /// Scores to weights, in place, and the row's largest score, sum and outputs brought up to date.
  template <class Row>
  void weigh(T* scores, Index columns, Index row, Row&& out) {
    T& largest = m_largest[std::size_t(row)];
    T& total = m_sum[std::size_t(row)];
    const T tile_largest = Eigen::Map<const Eigen::Array<T, Eigen::Dynamic, 1>>(scores, columns).maxCoeff();
    if (tile_largest > largest) {
      const T factor = std::exp(largest - tile_largest);
      largest = tile_largest;
      total *= factor;
      out *= factor;
    }
    const P shift(largest);
    P sums = P::zero();
    for (Index c = 0; c < columns; c += P::size) {
      const P weights = linattn::detail::exp(P::load(scores + c) - shift);
      weights.store(scores + c);
      sums = sums + weights;
    }
    total += sum(sums);
  }

  /// c (Rows, columns) = a (Rows, inner) b (inner, columns), or += where Adds; columns in whole packets.
  template <Index Rows, bool Adds>
  static void product(const T* a, Index a_stride, const T* b, Index b_stride, T* c, Index c_stride, Index inner,
                      Index columns) {
    const auto panel = [&](auto packets, Index column) LINATTN_INLINE_LAMBDA {
      using linattn::detail::unroll;
      P total[Rows][packets];
      unroll<Rows>([&](auto r) LINATTN_INLINE_LAMBDA {
        unroll<packets>([&](auto p) LINATTN_INLINE_LAMBDA {
          total[r][p] = Adds ? P::load_unaligned(c + r * c_stride + column + p * P::size) : P::zero();
        });
      });
      for (Index x = 0; x < inner; ++x) {
        P row[packets];
        unroll<packets>(
            [&](auto p) LINATTN_INLINE_LAMBDA { row[p] = P::load_unaligned(b + x * b_stride + column + p * P::size); });
        unroll<Rows>([&](auto r) LINATTN_INLINE_LAMBDA {
          const P factor = P::broadcast(a + r * a_stride + x);
          unroll<packets>([&](auto p) LINATTN_INLINE_LAMBDA { total[r][p] = fma(factor, row[p], total[r][p]); });
        });
      }
      unroll<Rows>([&](auto r) LINATTN_INLINE_LAMBDA {
        unroll<packets>([&](auto p) LINATTN_INLINE_LAMBDA {
          total[r][p].store_unaligned(c + r * c_stride + column + p * P::size);
        });
      });
    };
    Index column = 0;
    for (; column + 2 * P::size <= columns; column += 2 * P::size) panel(std::integral_constant<Index, 2>(), column);
    for (; column < columns; column += P::size) panel(std::integral_constant<Index, 1>(), column);
  }

  Index m_query_tile, m_key_tile;
  matrix m_keys;             // (tiles D, key_tile)
  matrix m_queries;          // (query_tile, D), scaled
  matrix m_scores;           // (rows, key_tile)
  std::vector<T> m_largest;  // (query_tile)
  std::vector<T> m_sum;      // (query_tile)
  matrix m_few;              // (N, N) for N <= few
};

}  // namespace linattn_bench
