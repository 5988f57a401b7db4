// The kernels of softmax attention over cached keys and values (softmax_cache.hpp).
//
// Keys and values of a sequence go by in blocks of tokens that begin at multiples of `block`. A row of the output keeps
// the largest logit mu it has met, the sum l of exp(s - mu) and the values weighted so far; a block that brings a
// larger logit rescales both (online softmax):
//
//     mu' = max(mu, max_j s_j)    e = exp(mu - mu')    p_j = exp(s_j - mu')    l' = e l + sum_j p_j
//     o' = e o + sum_j p_j v_j    out = o / l
//
// Every element is one chain of roundings that its own row, and the numbers of the tokens it sees, determine: how many
// rows are computed together, and in which calls the tokens came, moves no bit.
#pragma once

#include <linattn/detail/layout.hpp>
#include <linattn/matrix_view.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Where everything lies in a cache of some capacity and in a workspace.
///
/// Cache: for each key head panels of panel_tokens tokens, (D, panel_tokens) each, so that a product with a query reads
/// whole registers one after the other; then for each value head rows (tokens, M), padded to whole registers.
template <class T>
struct softmax_layout {
  static constexpr Eigen::Index panel_packets = 4;
  static constexpr Eigen::Index panel_tokens = panel_packets * packet<T>::size;
  /// Tokens between two looks at the largest logit: what a row pays for each, its maximum across lanes and a
  /// rescaling, has to be small beside 2 (D + M) flops a token.
  static constexpr Eigen::Index block = 256;
  static_assert(block % panel_tokens == 0);
  /// Queries that meet a block of keys and values while it is in L1 or L2.
  static constexpr Eigen::Index tile = 64;

  Eigen::Index head_dim = 0;   // D
  Eigen::Index value_dim = 0;  // M
  head_map<Eigen::Dynamic> heads;

  Eigen::Index value_stride() const noexcept { return padded<T>(value_dim); }
  Eigen::Index keys_size(Eigen::Index capacity) const noexcept { return round_up(capacity, panel_tokens) * head_dim; }
  Eigen::Index values_size(Eigen::Index capacity) const noexcept {
    return round_up(capacity, panel_tokens) * value_stride();
  }
  Eigen::Index keys_of(Eigen::Index key_head, Eigen::Index capacity) const noexcept {
    return key_head * keys_size(capacity);
  }
  Eigen::Index values_of(Eigen::Index value_head, Eigen::Index capacity) const noexcept {
    return heads.keys * keys_size(capacity) + value_head * values_size(capacity);
  }
  Eigen::Index cache_size(Eigen::Index capacity) const noexcept { return values_of(heads.states, capacity); }

  Eigen::Index queries() const noexcept { return 0; }                                  // (tile, D)
  Eigen::Index scores() const noexcept { return round_up(tile * head_dim, line<T>); }  // (rows, block)
  Eigen::Index totals() const noexcept { return scores() + rows_together * block; }    // (tile, M)
  Eigen::Index sums() const noexcept { return totals() + tile * value_stride(); }      // (tile, packet)
  Eigen::Index largest() const noexcept { return sums() + tile * packet<T>::size; }    // (tile)
  Eigen::Index scratch_size() const noexcept { return largest() + round_up(tile, line<T>); }

  /// As many chains of fused multiply-adds, two registers a row, as the registers hold beside their operands.
  static constexpr Eigen::Index rows_together = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32 ? 8 : 4;
  static_assert(tile % rows_together == 0);
};

/// Which tokens the rows of a call see: row i the first `first + growth i` of the cache; growth is 1 or 0.
struct visible_tokens {
  Eigen::Index first = 0;
  Eigen::Index growth = 0;
  Eigen::Index of(Eigen::Index row) const noexcept { return first + growth * row; }
  visible_tokens after(Eigen::Index rows) const noexcept { return {of(rows), growth}; }
  /// Of a block that begins with token `begin` and has `size` tokens.
  Eigen::Index in_block(Eigen::Index row, Eigen::Index begin, Eigen::Index size) const noexcept {
    return std::clamp(of(row) - begin, Eigen::Index(0), size);
  }
};

template <class T>
class softmax_engine {
  using P = packet<T>;
  using layout_type = softmax_layout<T>;
  using Index = Eigen::Index;
  static constexpr Index panel_packets = layout_type::panel_packets;
  static constexpr Index panel_tokens = layout_type::panel_tokens;
  static constexpr Index block = layout_type::block;

 public:
  softmax_engine(const layout_type& layout, T scale) noexcept : m_layout(layout), m_scale(scale) {}

  /// Rows of k (N, H D) and v (N, H M) into a cache, as tokens position ... position + N - 1.
  void write(T* cache, Index capacity, Index position, const matrix_view<const T>& k,
             const matrix_view<const T>& v) const noexcept {
    const Index dim = m_layout.head_dim;
    // All heads of a few tokens in turn, so that rows are read as they lie in memory.
    for (Index first = 0; first < k.rows(); first += P::size) {
      const Index last = std::min(first + P::size, k.rows());
      for (Index h = 0; h < m_layout.heads.keys; ++h) {
        T* const keys = cache + m_layout.keys_of(h, capacity);
        for (Index t = first; t < last; ++t) {
          const Index token = position + t;
          T* const column = keys + token / panel_tokens * panel_tokens * dim + token % panel_tokens;
          const T* const key = k.row(t) + h * dim;
          for (Index d = 0; d < dim; ++d) column[d * panel_tokens] = key[d];
        }
      }
    }
    const Index stride = m_layout.value_stride();
    for (Index t = 0; t < v.rows(); ++t) {
      for (Index h = 0; h < m_layout.heads.states; ++h) {
        std::copy_n(v.row(t) + h * m_layout.value_dim, m_layout.value_dim,
                    cache + m_layout.values_of(h, capacity) + (position + t) * stride);
      }
    }
  }

  /// out (N, H M) from q (N, H D) and what each row sees of a cache; log_sums (N, H), where there are any, the
  /// logarithms of the sums of exp(s).
  void read(const T* cache, Index capacity, visible_tokens visible, const matrix_view<const T>& q,
            const matrix_view<T>& out, T* scratch, const matrix_view<T>& log_sums) const noexcept {
    for (Index h = 0; h < m_layout.heads.outputs(); ++h) {
      const Index state = m_layout.heads.state_of(h);
      const T* const keys = cache + m_layout.keys_of(m_layout.heads.key_of(state), capacity);
      const T* const values = cache + m_layout.values_of(state, capacity);
      const Index query = m_layout.heads.query_of(h) * m_layout.head_dim;
      for (Index first = 0; first < q.rows(); first += layout_type::tile) {
        const Index rows = std::min(layout_type::tile, q.rows() - first);
        const visible_tokens seen = visible.after(first);
        begin(scratch, q, first, query, rows);
        for (Index token = 0; token < seen.of(rows - 1); token += block) {
          const T* const key_block = keys + token * m_layout.head_dim;
          const T* const value_block = values + token * m_layout.value_stride();
          Index i = 0;
          for (; i + layout_type::rows_together <= rows; i += layout_type::rows_together) {
            meet<layout_type::rows_together>(scratch, i, token, seen, key_block, value_block);
          }
          for (; i + 2 <= rows; i += 2) meet<2>(scratch, i, token, seen, key_block, value_block);
          for (; i < rows; ++i) meet<1>(scratch, i, token, seen, key_block, value_block);
        }
        for (Index i = 0; i < rows; ++i) {
          finish(scratch, i, seen.of(i) > 0, out.row(first + i) + h * m_layout.value_dim);
          if (log_sums.data() != nullptr) log_sums(first + i, h) = log_sum(scratch, i);
        }
      }
    }
  }

 private:
  /// Rows of a tile before the first key: queries scaled, sums 0, the largest logit the least number there is.
  void begin(T* scratch, const matrix_view<const T>& q, Index first, Index column, Index rows) const noexcept {
    const Index dim = m_layout.head_dim;
    for (Index i = 0; i < rows; ++i) {
      const T* const query = q.row(first + i) + column;
      T* const scaled = scratch + m_layout.queries() + i * dim;
      for (Index d = 0; d < dim; ++d) scaled[d] = query[d] * m_scale;
    }
    std::fill_n(scratch + m_layout.totals(), rows * m_layout.value_stride(), T(0));
    std::fill_n(scratch + m_layout.sums(), rows * P::size, T(0));
    std::fill_n(scratch + m_layout.largest(), rows, std::numeric_limits<T>::lowest());
  }

  /// Rows i ... of the tile and one block of tokens.
  template <Index Rows>
  void meet(T* scratch, Index i, Index token, const visible_tokens& visible, const T* keys,
            const T* values) const noexcept {
    const visible_tokens seen = visible.after(i);
    const Index most = seen.in_block(Rows - 1, token, block);
    if (most == 0) return;
    T* const scores = scratch + m_layout.scores();
    const Index columns = padded<T>(most);
    score<Rows>(scratch + m_layout.queries() + i * m_layout.head_dim, keys, m_layout.head_dim, scores, columns);
    for (Index r = 0; r < Rows; ++r) {
      const Index count = seen.in_block(r, token, block);
      std::fill(scores + r * block + count, scores + r * block + columns, -std::numeric_limits<T>::infinity());
      weigh(scratch, scores + r * block, columns, i + r);
    }
    T* const totals = scratch + m_layout.totals() + i * m_layout.value_stride();
    for_each_panel<Rows>(m_layout.value_stride(), [&](auto packets, Index column) LINATTN_INLINE_LAMBDA {
      add_values<Rows, number<decltype(packets)>>(scores, token, seen, most, values + column, totals + column);
    });
  }

  /// s (Rows, columns) = q (Rows, D) K^T, K^T in panels (D, panel_tokens).
  template <Index Rows>
  static void score(const T* queries, const T* keys, Index dim, T* scores, Index columns) noexcept {
    constexpr Index packets = Rows == 1 ? panel_packets : 2;
    for (Index column = 0; column < columns; column += packets * P::size) {
      const T* key = keys + column / panel_tokens * panel_tokens * dim + column % panel_tokens;
      P total[Rows][packets];
      unroll<Rows>([&](auto r) LINATTN_INLINE_LAMBDA {
        unroll<packets>([&](auto p) LINATTN_INLINE_LAMBDA { total[r][p] = P::zero(); });
      });
      for (Index d = 0; d < dim; ++d, key += panel_tokens) {
        P row[packets];
        unroll<packets>([&](auto p) LINATTN_INLINE_LAMBDA { row[p] = P::load(key + p * P::size); });
        unroll<Rows>([&](auto r) LINATTN_INLINE_LAMBDA {
          const P factor = P::broadcast(queries + r * dim + d);
          unroll<packets>([&](auto p) LINATTN_INLINE_LAMBDA { total[r][p] = fma(factor, row[p], total[r][p]); });
        });
      }
      unroll<Rows>([&](auto r) LINATTN_INLINE_LAMBDA {
        unroll<packets>([&](auto p)
                            LINATTN_INLINE_LAMBDA { total[r][p].store(scores + r * block + column + p * P::size); });
      });
    }
  }

  /// Logits of a block to weights, in place, and the row's largest logit, sum and totals brought up to date.
  void weigh(T* scratch, T* scores, Index columns, Index row) const noexcept {
    T& before = scratch[m_layout.largest() + row];
    T* const sums = scratch + m_layout.sums() + row * P::size;
    // A NaN among the logits is lost here, and shows in its weight.
    P most(before);
    for (Index c = 0; c < columns; c += P::size) most = max(most, P::load(scores + c));
    const T now = largest(most);
    P factor(T(1));
    if (now > before) {
      factor = exp_in_range<true>(P(before) - P(now));
      T* const totals = scratch + m_layout.totals() + row * m_layout.value_stride();
      for (Index m = 0; m < m_layout.value_stride(); m += P::size) (P::load(totals + m) * factor).store(totals + m);
      before = now;
    }
    const P shift(now);
    P sum = P::zero();
    for (Index c = 0; c < columns; c += P::size) {
      const P weights = exp_in_range<true>(P::load(scores + c) - shift);
      weights.store(scores + c);
      sum = sum + weights;
    }
    fma(P::load(sums), factor, sum).store(sums);  // spelled out: where nothing was rescaled it is an addition
  }

  /// f(packets, first column) for panels of M columns; one row has registers for wide ones.
  template <Index Rows, class F>
  static void for_each_panel(Index columns, const F& f) noexcept {
    Index column = 0;
    const auto with = [&](auto packets) LINATTN_INLINE_LAMBDA {
      constexpr Index width = number<decltype(packets)> * P::size;
      for (; column + width <= columns; column += width) f(packets, column);
    };
    if constexpr (Rows == 1) with(std::integral_constant<Index, 8>());
    if constexpr (Rows == 1) with(std::integral_constant<Index, 4>());
    with(std::integral_constant<Index, 2>());
    with(std::integral_constant<Index, 1>());
  }

  /// o_r += sum over the tokens that row r sees of p_rj v_j, for a panel of columns of v.
  template <Index Rows, Index Packets>
  void add_values(const T* weights, Index token, const visible_tokens& seen, Index most, const T* values,
                  T* totals) const noexcept {
    const Index stride = m_layout.value_stride();
    P total[Rows][Packets];
    P row[Packets];
    const auto load_values = [&](Index j) LINATTN_INLINE_LAMBDA {
      unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { row[p] = P::load(values + j * stride + p * P::size); });
    };
    const auto add = [&](auto r, Index j) LINATTN_INLINE_LAMBDA {
      const P weight = P::broadcast(weights + r * block + j);
      unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { total[r][p] = fma(weight, row[p], total[r][p]); });
    };
    unroll<Rows>([&](auto r) LINATTN_INLINE_LAMBDA {
      unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { total[r][p] = P::load(totals + r * stride + p * P::size); });
    });
    const Index fewest = seen.in_block(0, token, block);
    Index j = 0;
    for (; j < fewest; ++j) {
      load_values(j);
      unroll<Rows>([&](auto r) LINATTN_INLINE_LAMBDA { add(r, j); });
    }
    // The diagonal. A weight of 0 would do, but for values that are NaN.
    for (; j < most; ++j) {
      load_values(j);
      unroll<Rows>([&](auto r) LINATTN_INLINE_LAMBDA {
        if (j < seen.in_block(r, token, block)) add(r, j);
      });
    }
    unroll<Rows>([&](auto r) LINATTN_INLINE_LAMBDA {
      unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { total[r][p].store(totals + r * stride + p * P::size); });
    });
  }

  /// out (M) = o / l; 0 for a row that saw no key.
  void finish(T* scratch, Index row, bool saw_keys, T* out) const noexcept {
    T* const total = scratch + m_layout.totals() + row * m_layout.value_stride();
    const Index stride = m_layout.value_stride();
    if (saw_keys) {
      const P divisor(sum(P::load(scratch + m_layout.sums() + row * P::size)));
      for (Index m = 0; m < stride; m += P::size) (P::load(total + m) / divisor).store(total + m);
    }
    std::copy_n(total, m_layout.value_dim, out);
  }

  /// log sum_j exp(s_j) of a row; -inf where it saw no key.
  T log_sum(const T* scratch, Index row) const noexcept {
    return scratch[m_layout.largest() + row] + std::log(sum(P::load(scratch + m_layout.sums() + row * P::size)));
  }

  const layout_type& m_layout;
  T m_scale;
};

}  // namespace detail
LINATTN_NAMESPACE_END
