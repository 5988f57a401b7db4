// Rules that correct: micro-blocks of B tokens that read the state once, solve for what they write, and write once.
//
// What token i takes back depends on what the tokens before it have written. With g_ij the product of the decays over
// (j, i], S_0 the state before the block, and r_i, w_j rows of C features,
//
//     delta      u_i = beta_i (v_i - e_i)       e_i = g_i0 k_i S_0     + sum_(j<i) g_ij (k_i.k_j) u_j
//     rank one   u_i = e_i                      e_i = g_(i-1)0 a_i S_0 + sum_(j<i) g_(i-1)j ((a_i.b_j) u_j + (a_i.k_j)
//     v_j)
//
//     out_i = g_i0 q_i S_0 + sum_(j<=i) g_ij (q_i.k_j) u_j                               (rank one: b_j u_j + k_j v_j)
//     S     = g_B0 S_0     + sum_j g_Bj k_j u_j^T                                        (likewise)
//
// so a block is two calls of the kernel, one that reads S_0 with the rows g_i0 k_i and g_i0 q_i and one that writes the
// rows g_Bj k_j, and a triangle of B x B coefficients between them. Every decay is a product of factors of single
// tokens: nothing is ever divided, and no exponent is a sum.
#pragma once

#include <linattn/detail/kernel.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Tokens of a block that corrects: it reads two rows a token, in as many accumulators as the reading kernel.
inline constexpr Eigen::Index correction_block = half_block / 2;

/// The scratch of one head: rows of features (C) and values (M) as in head_rows, block by block. A block of B tokens
/// has `reads` B rows that read (those of the corrections, then those of each reader's queries), `writes` B that write
/// (first those of u where there are two), and `carry`, g_B0 (C).
template <rule_traits Rule>
struct correction_shape {
  static constexpr Eigen::Index reads(Eigen::Index readers) { return 1 + readers; }
  static constexpr Eigen::Index writes = Rule.writes();
};

/// One head's packed rows before correction: features (T, C), of its readers' queries (T, R, C), decays (T) or (T, C),
/// beta (T).
template <class T>
struct correction_inputs {
  const T* q = nullptr;
  const T* k = nullptr;
  const T* a = nullptr;  // rank one only
  const T* b = nullptr;  // rank one only
  const T* decay = nullptr;
  const T* beta = nullptr;  // delta only
};

/// What is made of them for the kernel.
template <class T>
struct correction_rows {
  T* reading;       // (blocks, reads B, C)
  T* writing;       // (blocks, writes B, C)
  T* carry;         // (blocks, C)
  T* coefficients;  // (blocks, reads, writes, B, B)
};

/// The rows and coefficients of one block; x points at its first token, y at the block; queries are query_stride apart.
/// Without Reads the rows of the queries, and their coefficients, are left out; without Writes, all others.
template <Eigen::Index B, rule_traits Rule, bool Reads, bool Writes, class T>
LINATTN_INLINE void prepare_block(const correction_inputs<T>& x, const correction_rows<T>& y, Eigen::Index stride,
                                  Eigen::Index query_stride) {
  using P = packet<T>;
  using shape = correction_shape<Rule>;
  constexpr bool rank_one = Rule.corrects == correction::rank_one;
  constexpr Eigen::Index reads = Reads ? 2 : 1;
  P product[reads][shape::writes][B][B];
  unroll<reads>([&](auto r) LINATTN_INLINE_LAMBDA {
    unroll<shape::writes>([&](auto w) LINATTN_INLINE_LAMBDA {
      unroll<B * B>([&](auto ij) LINATTN_INLINE_LAMBDA { product[r][w][ij / B][ij % B] = P::zero(); });
    });
  });
  P factor[B];
  if constexpr (Rule.decay == decay_kind::per_head) {
    unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA { factor[i] = P::broadcast(x.decay + i); });
  }
  for (Eigen::Index c = 0; c < stride; c += P::size) {
    P writing[shape::writes][B];
    unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
      writing[shape::writes - 1][i] = P::load(x.k + i * stride + c);
      if constexpr (rank_one) writing[0][i] = P::load(x.b + i * stride + c);
      if constexpr (Rule.decay == decay_kind::per_feature) factor[i] = P::load(x.decay + i * stride + c);
    });
    const auto decayed = [&](const P& value, auto i) LINATTN_INLINE_LAMBDA {
      if constexpr (Rule.decay == decay_kind::none) return value;
      return value * factor[i];
    };
    // A reading row meets the tokens before it in turn, the latest first, and decays on its way to S_0.
    const auto meet = [&](P value, auto r, auto i, auto first) LINATTN_INLINE_LAMBDA {
      unroll<number<decltype(first)> + 1>([&](auto step) LINATTN_INLINE_LAMBDA {
        constexpr Eigen::Index j = number<decltype(first)> - number<decltype(step)>;
        unroll<shape::writes>([&](auto w) LINATTN_INLINE_LAMBDA {
          product[r][w][i][j] = fma(value, writing[w][j], product[r][w][i][j]);
        });
        value = decayed(value, std::integral_constant<Eigen::Index, j>());
      });
      value.store(y.reading + (r * B + i) * stride + c);
    };
    unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
      using before = std::integral_constant<Eigen::Index, number<decltype(i)> - 1>;
      constexpr auto first = std::integral_constant<Eigen::Index, 0>();
      if constexpr (Writes && rank_one) {
        meet(P::load(x.a + i * stride + c), first, i, before());
      } else if constexpr (Writes) {
        meet(decayed(writing[0][i], i), first, i, before());
      }
      if constexpr (Reads) meet(P::load(x.q + i * query_stride + c), std::integral_constant<Eigen::Index, 1>(), i, i);
    });
    if constexpr (!Writes) continue;
    P rest(T(1));
    unroll<B>([&](auto step) LINATTN_INLINE_LAMBDA {
      constexpr Eigen::Index j = B - 1 - number<decltype(step)>;
      unroll<shape::writes>([&](auto w) LINATTN_INLINE_LAMBDA {
        const P row = Rule.decay == decay_kind::none ? writing[w][j] : writing[w][j] * rest;
        row.store(y.writing + (w * B + j) * stride + c);
      });
      rest = decayed(rest, std::integral_constant<Eigen::Index, j>());
    });
    if constexpr (Rule.decay != decay_kind::none) rest.store(y.carry + c);
  }
  unroll<reads>([&](auto r) LINATTN_INLINE_LAMBDA {
    unroll<shape::writes>([&](auto w) LINATTN_INLINE_LAMBDA {
      unroll<B * B>([&](auto ij) LINATTN_INLINE_LAMBDA {
        constexpr Eigen::Index i = number<decltype(ij)> / B, j = number<decltype(ij)> % B;
        if constexpr (number<decltype(r)> == 0 ? Writes && j < i : j <= i) {
          y.coefficients[((r * shape::writes + w) * B + i) * B + j] = sum(product[r][w][i][j]);
        }
      });
    });
  });
}

/// u_i and out_i of one block in one panel. `read` (reads B, M) is what the reading rows found in S_0; values (writes
/// B, M) hold v in their last B rows, and get u in their first, or without Writes hold it already; out (B, M), its rows
/// out_stride apart.
template <Eigen::Index B, Eigen::Index Packets, rule_traits Rule, bool Reads, bool Writes, class T>
LINATTN_INLINE void substitute(const T* coefficients, const T* beta, const T* read, T* values, T* out,
                               Eigen::Index row_stride, Eigen::Index out_stride) {
  using P = packet<T>;
  using shape = correction_shape<Rule>;
  constexpr Eigen::Index writes = shape::writes;
  constexpr bool rank_one = Rule.corrects == correction::rank_one;
  P written[writes][B][Packets];
  const auto at = [&](auto* x, Eigen::Index i, Eigen::Index p)
                      LINATTN_INLINE_LAMBDA { return x + i * row_stride + p * P::size; };
  unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
    P total[Packets];
    const auto add_earlier = [&](auto r, auto count, auto& to) LINATTN_INLINE_LAMBDA {
      unroll<number<decltype(count)>>([&](auto j) LINATTN_INLINE_LAMBDA {
        unroll<writes>([&](auto w) LINATTN_INLINE_LAMBDA {
          const P by = P::broadcast(coefficients + ((r * writes + w) * B + i) * B + j);
          unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { to[p] = fma(by, written[w][j][p], to[p]); });
        });
      });
    };
    if constexpr (Writes) {
      unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { total[p] = P::load(at(read, i, p)); });
      add_earlier(std::integral_constant<Eigen::Index, 0>(), i, total);
    }
    unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
      if constexpr (!Writes) {
        unroll<writes>([&](auto w) LINATTN_INLINE_LAMBDA { written[w][i][p] = P::load(at(values, w * B + i, p)); });
        return;
      }
      const P value = P::load(at(values, (writes - 1) * B + i, p));
      if constexpr (rank_one) {
        written[0][i][p] = total[p];
        written[1][i][p] = value;
      } else {
        written[0][i][p] = P::broadcast(beta + i) * (value - total[p]);
      }
      written[0][i][p].store(at(values, i, p));
    });
    if constexpr (Reads) {
      unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { total[p] = P::load(at(read, B + i, p)); });
      add_earlier(std::integral_constant<Eigen::Index, 1>(),
                  std::integral_constant<Eigen::Index, number<decltype(i)> + 1>(), total);
      unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { total[p].store(out + i * out_stride + p * P::size); });
    }
  });
}

/// `blocks` blocks of one head against its S (C, M). values (blocks, writes B, M) come with v in the last B rows of a
/// block and leave with u in the first; out (T, R, M); `read` is scratch of one block, (reads B, M). Where `clears`,
/// the last block clears what has decayed into silence.
template <Eigen::Index B, rule_traits Rule, bool Reads, class T, class Layout, class Readers>
LINATTN_INLINE void attend_corrected(const Layout& layout, Eigen::Index blocks, const correction_inputs<T>& x,
                                     const correction_rows<T>& y, T* values, T* read, T* out, T* S, bool clears,
                                     const rows_ahead& next, Readers readers) {
  using shape = correction_shape<Rule>;
  constexpr Eigen::Index writes = shape::writes;
  constexpr Eigen::Index first_reads = Reads ? 2 : 1;  // rows a token that one call of the kernel reads
  constexpr bool shared = Reads && !std::is_same_v<Readers, one_reader>;
  const Eigen::Index reads = shape::reads(readers);
  constexpr bool decays = Rule.decay != decay_kind::none;
  constexpr kernel_form write{
      .writes = true, .decay = decays ? decay_axis::row : decay_axis::none, .once = true, .backwards = B == 1};
  constexpr Eigen::Index size = packet<T>::size;
  const Eigen::Index features = layout.features;
  const Eigen::Index stride = layout.feature_stride();
  const Eigen::Index row_stride = layout.row_stride();
  const auto block_of = [&](Eigen::Index n) LINATTN_INLINE_LAMBDA {
    return correction_rows<T>{y.reading + n * reads * B * stride, y.writing + n * writes * B * stride,
                              y.carry + n * stride, y.coefficients + n * reads * writes * B * B};
  };
  const Eigen::Index decay_stride = Rule.decay == decay_kind::per_feature ? stride : decays ? 1 : 0;
  for (Eigen::Index n = 0; n < blocks; ++n) {
    const Eigen::Index i = n * B * stride;
    correction_inputs<T> block{x.q + i * readers, x.k + i};
    if constexpr (Rule.corrects == correction::rank_one) block.a = x.a + i, block.b = x.b + i;
    if constexpr (decays) block.decay = x.decay + n * B * decay_stride;
    correction_rows<T> rows = block_of(n);
    prepare_block<B, Rule, Reads, true>(block, rows, stride, readers * stride);
    if constexpr (shared) {
      for (Eigen::Index r = 1; r < readers; ++r) {
        block.q += stride;
        rows.reading += B * stride;
        rows.coefficients += writes * B * B;
        prepare_block<B, Rule, true, false>(block, rows, stride, readers * stride);
      }
    }
  }
  for_each_panel<panel_packets<B>, T>(row_stride, [&](auto packets, Eigen::Index m, Eigen::Index panel,
                                                      Eigen::Index panels) LINATTN_INLINE_LAMBDA {
    constexpr Eigen::Index lines = (packets * size + line<T> - 1) / line<T>;
    const rows_ahead::share<B, lines> ahead(next, panel, panels);
    for (Eigen::Index n = 0; n < blocks; ++n) {
      if constexpr (B > 1) ahead.fetch(n * B);
      const correction_rows<T> rows = block_of(n);
      T* const u = values + n * writes * B * row_stride + m;
      const head_rows<T> reading{rows.reading, nullptr, nullptr, read + m};
      call_micro_block<first_reads * B, packets, reads_only, T>(reading, S + m, stride, row_stride, features, false,
                                                                false);
      T* const to = out + n * B * readers * row_stride + m;
      substitute<B, packets, Rule, Reads, true>(rows.coefficients, x.beta + n * B, read + m, u, to, row_stride,
                                                readers * row_stride);
      if constexpr (shared) {
        const auto read_more = [&](auto count, Eigen::Index r) LINATTN_INLINE_LAMBDA {
          const head_rows<T> more{rows.reading + r * B * stride, nullptr, nullptr, read + r * B * row_stride + m};
          call_micro_block<count * B, packets, reads_only, T>(more, S + m, stride, row_stride, features, false, false);
        };
        Eigen::Index r = 2;
        for (; r + 2 <= reads; r += 2) read_more(std::integral_constant<Eigen::Index, 2>(), r);
        if (r < reads) read_more(std::integral_constant<Eigen::Index, 1>(), r);
        // Rows r of the readings are those of reader r - 1; substitute counts from the row of corrections before them.
        for (r = 1; r < readers; ++r) {
          substitute<B, packets, Rule, true, false>(rows.coefficients + r * writes * B * B, x.beta + n * B,
                                                    read + r * B * row_stride + m, u, to + r * row_stride, row_stride,
                                                    readers * row_stride);
        }
      }
      head_rows<T> writing{nullptr, rows.writing, u, nullptr};
      if constexpr (decays) writing.decay = rows.carry;
      call_micro_block<writes * B, packets, write, T>(writing, S + m, stride, row_stride, features, false,
                                                      clears && n + 1 == blocks);
    }
  });
}

}  // namespace detail
LINATTN_NAMESPACE_END
