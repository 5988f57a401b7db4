// The softmax attention to beat: as careful as the kernels it is held against.
//
//   tiled_softmax     causal, online softmax, without the N x N matrix: linattn::cached_softmax, but for a few tokens
//   blocked_softmax   non-causal, forward and gradients, both without the N x N matrix
//   naive_softmax     non-causal, forward and gradients, the N x N matrix of every head kept in between
//
// Per head, with P = softmax(S), S = Q K^T / sqrt(D), out = P V, dO the gradient with respect to out:
//
//   dV = P^T dO    dP = dO V^T    dS_ij = P_ij (dP_ij - sum_m dO_im out_im)    dQ = dS K / sqrt(D)    dK = dS^T Q /
//   sqrt(D)
//
// Both forms of the gradient are these five products, the blocked one with P computed anew from S and the logarithms of
// the sums of its rows (Dao et al., FlashAttention, 2022). The products are Eigen's.
#pragma once

#include <linattn/matrix_view.hpp>
#include <linattn/softmax_cache.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <vector>

namespace linattn_bench {

using Eigen::Index;
using linattn::row_matrix;

/// out (N, M) = softmax(q k^T / sqrt(D)) v, causal, one head. Made once for a shape; from the second call on nothing
/// allocates. A few tokens are not worth copying into a cache: they go through Eigen's products.
template <class T>
class tiled_softmax {
  using matrix = row_matrix<T>;

 public:
  tiled_softmax(Index tokens, Index head_dim)
      : m_attention({.head_dim = head_dim}, tokens),
        m_cache(m_attention.make_state()),
        m_workspace(m_attention.make_workspace()) {}

  void operator()(const matrix& q, const matrix& k, const matrix& v, matrix& out) {
    if (q.rows() <= few) return attend_few(q, k, v, out);
    m_cache.reset();
    m_attention.forward_causal(m_cache, q, k, v, out, m_workspace);
  }

 private:
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

  linattn::cached_softmax<T> m_attention;
  linattn::softmax_cache<T> m_cache;
  linattn::softmax_workspace<T> m_workspace;
  matrix m_few;  // (N, N) for N <= few
};

/// H heads packed in columns, M = D. Nothing is kept between samples but what has to be: `forward` keeps P of every
/// head where `vjp` follows, of one where not.
template <class T>
class naive_softmax {
  using matrix = row_matrix<T>;

 public:
  naive_softmax(Index tokens, Index head_dim, Index heads, bool differentiates)
      : m_dim(head_dim),
        m_heads(heads),
        m_weights(std::size_t(differentiates ? heads : 1), matrix(tokens, tokens)),
        m_gradient(differentiates ? tokens : 0, differentiates ? tokens : 0) {}

  void forward(const matrix& q, const matrix& k, const matrix& v, matrix& out) {
    for (Index h = 0; h < m_heads; ++h) {
      matrix& p = m_weights[std::size_t(h) % m_weights.size()];  // (N, N)
      p.noalias() = q.middleCols(h * m_dim, m_dim) * k.middleCols(h * m_dim, m_dim).transpose();
      const T scale = T(1) / std::sqrt(T(m_dim));
      for (Index i = 0; i < p.rows(); ++i) {
        auto row = p.row(i).array();
        row = ((row - row.maxCoeff()) * scale).exp();
        row /= row.sum();
      }
      out.middleCols(h * m_dim, m_dim).noalias() = p * v.middleCols(h * m_dim, m_dim);
    }
  }

  void vjp(const matrix& q, const matrix& k, const matrix& v, const matrix& out, const matrix& dout, matrix& dq,
           matrix& dk, matrix& dv) {
    const T scale = T(1) / std::sqrt(T(m_dim));
    for (Index h = 0; h < m_heads; ++h) {
      const auto of = [&](auto& x) { return x.middleCols(h * m_dim, m_dim); };  // (N, D)
      const matrix& p = m_weights[std::size_t(h)];
      of(dv).noalias() = p.transpose() * of(dout);
      m_gradient.noalias() = of(dout) * of(v).transpose();  // dP, then dS / sqrt(D)
      for (Index i = 0; i < p.rows(); ++i) {
        const T mean = of(dout).row(i).dot(of(out).row(i));
        m_gradient.row(i).array() = p.row(i).array() * (m_gradient.row(i).array() - mean) * scale;
      }
      of(dq).noalias() = m_gradient * of(k);
      of(dk).noalias() = m_gradient.transpose() * of(q);
    }
  }

 private:
  Index m_dim, m_heads;
  std::vector<matrix> m_weights;  // (N, N) each
  matrix m_gradient;              // (N, N)
};

/// The same without an N x N matrix: keys and values in a cache, which `forward` reads, and blocks of P in `vjp`. What
/// `forward` leaves for it is (N, H).
template <class T>
class blocked_softmax {
  using matrix = row_matrix<T>;

 public:
  blocked_softmax(Index tokens, Index head_dim, Index heads)
      : m_attention({.head_dim = head_dim, .heads = heads}, tokens),
        m_cache(m_attention.make_state()),
        m_workspace(m_attention.make_workspace()),
        m_log_sums(tokens, heads) {}

  void forward(const matrix& q, const matrix& k, const matrix& v, matrix& out) {
    m_cache.reset();
    m_attention.absorb(m_cache, k, v, m_workspace);
    m_attention.read(m_cache, q, out, m_workspace, m_log_sums);
  }

  void vjp(const matrix& q, const matrix& k, const matrix& v, const matrix& out, const matrix& dout, matrix& dq,
           matrix& dk, matrix& dv) {
    const Index tokens = q.rows(), dim = m_attention.head_dim();
    const T scale = T(1) / std::sqrt(T(dim));
    m_queries.resize(block, dim);
    dq.setZero();
    dk.setZero();
    dv.setZero();
    for (Index h = 0; h < m_attention.heads(); ++h) {
      for (Index i = 0; i < tokens; i += block) {
        const Index rows = std::min(block, tokens - i);
        const auto of_queries = [&](auto& x) { return x.block(i, h * dim, rows, dim); };
        auto queries = m_queries.topRows(rows);
        queries = of_queries(q) * scale;                                           // (rows, D)
        m_means = of_queries(dout).cwiseProduct(of_queries(out)).rowwise().sum();  // (rows, 1)
        const auto log_sums = m_log_sums.col(h).segment(i, rows);
        for (Index j = 0; j < tokens; j += block) {
          const Index columns = std::min(block, tokens - j);
          const auto of_keys = [&](auto& x) { return x.block(j, h * dim, columns, dim); };
          m_weights.noalias() = queries * of_keys(k).transpose();            // S (rows, columns)
          m_gradient.noalias() = of_queries(dout) * of_keys(v).transpose();  // dP (rows, columns)
          for (Index r = 0; r < rows; ++r) {
            auto p = m_weights.row(r).array();
            auto ds = m_gradient.row(r).array();
            p = (p - log_sums(r)).exp();
            ds = p * (ds - m_means(r));
          }
          of_keys(dv).noalias() += m_weights.transpose() * of_queries(dout);
          of_keys(dk).noalias() += m_gradient.transpose() * queries;
          of_queries(dq).noalias() += m_gradient * of_keys(k);
        }
        of_queries(dq) *= scale;
      }
    }
  }

 private:
  /// Queries and keys of a block: both of its matrices in L2, and each product long enough for Eigen's blocking.
  static constexpr Index block = 256;

  linattn::cached_softmax<T> m_attention;
  linattn::softmax_cache<T> m_cache;
  linattn::softmax_workspace<T> m_workspace;
  matrix m_log_sums;                            // (N, H)
  matrix m_queries;                             // (block, D)
  matrix m_weights, m_gradient;                 // (block, block)
  Eigen::Matrix<T, Eigen::Dynamic, 1> m_means;  // (block)
};

}  // namespace linattn_bench
