// The micro-blocks of the delta rules' gradient: those of correction.hpp that keep what a block solves for, those that
// go backwards, and those of transposed states.
//
// A block of B tokens reads a state once and writes it once; between its tokens stand triangles of coefficients, as in
// the forward pass. Where features are the columns of the state, decays multiply what was read instead of what reads.
#pragma once

#include <linattn/detail/correction.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// f(packets, column, block) for the panels of a tile and the blocks of each, the caller's next rows fetched meanwhile.
template <Eigen::Index B, class T, class F>
LINATTN_INLINE void for_each_panel_block(Eigen::Index row_stride, Eigen::Index blocks, const rows_ahead& next,
                                         const F& f) {
  for_each_panel<2, T>(
      row_stride, [&](auto packets, Eigen::Index m, Eigen::Index panel, Eigen::Index panels) LINATTN_INLINE_LAMBDA {
        constexpr Eigen::Index lines = (packets * packet<T>::size + line<T> - 1) / line<T>;
        const rows_ahead::share<B, lines> ahead(next, panel, panels);
        for (Eigen::Index n = 0; n < blocks; ++n) {
          if constexpr (B > 1) ahead.fetch(n * B);
          f(packets, m, n);
        }
      });
}

/// A form that writes a block at once, decaying S by the block's decay.
constexpr kernel_form writes_block(const rule_traits& rule, decay_axis axis) {
  return {.writes = true, .decay = rule.decay != decay_kind::none ? axis : decay_axis::none, .once = true};
}

/// The first sweep's blocks of one head: S (C, M) as the rule writes it, values (T, M) from v to w, and u (T, M).
template <Eigen::Index B, rule_traits Rule, class T, class Layout>
LINATTN_INLINE void attend_residuals(const Layout& layout, Eigen::Index blocks, const correction_inputs<T>& x,
                                     const correction_rows<T>& y, T* values, T* u, T* read, T* S,
                                     const rows_ahead& next) {
  using P = packet<T>;
  constexpr bool decays = Rule.decay != decay_kind::none;
  constexpr kernel_form write = writes_block(Rule, decay_axis::row);
  const Eigen::Index features = layout.features, stride = layout.feature_stride(), row_stride = layout.row_stride();
  const auto block_of = [&](Eigen::Index n) LINATTN_INLINE_LAMBDA {
    return correction_rows<T>{y.reading + n * B * stride, y.writing + n * B * stride, y.carry + n * stride,
                              y.coefficients + n * B * B};
  };
  for (Eigen::Index n = 0; n < blocks; ++n) {
    correction_inputs<T> block{nullptr, x.k + n * B * stride};
    if constexpr (decays) block.decay = x.decay + n * B * (Rule.decay == decay_kind::per_feature ? stride : 1);
    prepare_block<B, Rule, false, true>(block, block_of(n), stride, stride);
  }
  const auto solve = [&](auto packets, const T* coefficients, const T* beta, const T* found, T* residuals,
                         T* written) LINATTN_INLINE_LAMBDA {
    constexpr Eigen::Index Packets = packets;
    P by[B][Packets];  // u
    unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
      P total[Packets];
      unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { total[p] = P::load(found + i * row_stride + p * P::size); });
      unroll<number<decltype(i)>>([&](auto j) LINATTN_INLINE_LAMBDA {
        const P coefficient = P::broadcast(coefficients + i * B + j);
        unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { total[p] = fma(coefficient, by[j][p], total[p]); });
      });
      unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
        const Eigen::Index at = i * row_stride + p * P::size;
        const P residual = P::load(residuals + at) - total[p];
        by[i][p] = P::broadcast(beta + i) * residual;
        residual.store(residuals + at);
        by[i][p].store(written + at);
      });
    });
  };
  for_each_panel_block<B, T>(
      row_stride, blocks, next, [&](auto packets, Eigen::Index m, Eigen::Index n) LINATTN_INLINE_LAMBDA {
        const correction_rows<T> rows = block_of(n);
        const Eigen::Index at = n * B * row_stride + m;
        call_micro_block<B, packets, reads_only, T>({rows.reading, nullptr, nullptr, read + m}, S + m, stride,
                                                    row_stride, features, false, false);
        solve(packets, rows.coefficients, x.beta + n * B, read + m, values + at, u + at);
        call_micro_block<B, packets, write, T>({nullptr, rows.writing, u + at, nullptr, decays ? rows.carry : nullptr},
                                               S + m, stride, row_stride, features, false, n + 1 == blocks);
      });
}

/// The second sweep's blocks of one head: R (C, M), tokens from the last to the first, decays those before each token.
/// written (blocks, 2 B, M): behind B rows for -dv, those of dout. found (T, M) gets R_t^T k_t.
template <Eigen::Index B, rule_traits Rule, class T, class Layout>
LINATTN_INLINE void attend_backwards(const Layout& layout, Eigen::Index blocks, const correction_inputs<T>& x,
                                     const correction_rows<T>& y, T* written, T* found, T* read, T* R,
                                     const rows_ahead& next) {
  using P = packet<T>;
  // A token writes q dout^T, is read with k, and writes -k dv^T: two rows written, as by the rule of rank one. Of its
  // reading rows those that see their own token are k here, and what they are to -k dv^T of that token is not used.
  constexpr rule_traits two_rows{.decay = Rule.decay, .corrects = correction::rank_one};
  using shape = correction_shape<two_rows>;
  constexpr Eigen::Index reads = shape::reads(1);
  constexpr bool decays = Rule.decay != decay_kind::none;
  constexpr kernel_form write = writes_block(Rule, decay_axis::row);
  const Eigen::Index features = layout.features, stride = layout.feature_stride(), row_stride = layout.row_stride();
  const auto block_of = [&](Eigen::Index n) LINATTN_INLINE_LAMBDA {
    return correction_rows<T>{y.reading + n * reads * B * stride, y.writing + n * shape::writes * B * stride,
                              y.carry + n * stride, y.coefficients + n * reads * shape::writes * B * B};
  };
  for (Eigen::Index n = 0; n < blocks; ++n) {
    const T* const k = x.k + n * B * stride;
    correction_inputs<T> block{k, x.q + n * B * stride, k, k};
    if constexpr (decays) block.decay = x.decay + n * B * (Rule.decay == decay_kind::per_feature ? stride : 1);
    prepare_block<B, two_rows, true, true>(block, block_of(n), stride, stride);
  }
  const auto solve = [&](auto packets, const T* coefficients, const T* beta, const T* before, T* rows, T* result)
                         LINATTN_INLINE_LAMBDA {
                           constexpr Eigen::Index Packets = packets;
                           P by[B][Packets], dout[B][Packets];  // -dv
                           const auto add = [&](const T* coefficient, const P* addend, P* total) LINATTN_INLINE_LAMBDA {
                             unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
                               total[p] = fma(P::broadcast(coefficient), addend[p], total[p]);
                             });
                           };
                           unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
                             P total[Packets];
                             unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
                               total[p] = P::load(before + i * row_stride + p * P::size);
                               dout[i][p] = P::load(rows + (B + i) * row_stride + p * P::size);
                             });
                             const T* const of_k = coefficients + (shape::writes * B + i) * B;
                             const T* const of_q = of_k + B * B;
                             unroll<number<decltype(i)>>([&](auto j) LINATTN_INLINE_LAMBDA {
                               add(of_k + j, by[j], total);
                               add(of_q + j, dout[j], total);
                             });
                             add(of_q + i, dout[i], total);
                             const P factor = P::zero() - P::broadcast(beta + i);
                             unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
                               const Eigen::Index at = i * row_stride + p * P::size;
                               by[i][p] = factor * total[p];
                               by[i][p].store(rows + at);
                               total[p].store(result + at);
                             });
                           });
                         };
  for_each_panel_block<B, T>(
      row_stride, blocks, next, [&](auto packets, Eigen::Index m, Eigen::Index n) LINATTN_INLINE_LAMBDA {
        const correction_rows<T> rows = block_of(n);
        T* const values = written + n * shape::writes * B * row_stride + m;
        call_micro_block<B, packets, reads_only, T>({rows.reading + B * stride, nullptr, nullptr, read + m}, R + m,
                                                    stride, row_stride, features, false, false);
        solve(packets, rows.coefficients, x.beta + n * B, read + m, values, found + n * B * row_stride + m);
        call_micro_block<shape::writes * B, packets, write, T>(
            {nullptr, rows.writing, values, nullptr, decays ? rows.carry : nullptr}, R + m, stride, row_stride,
            features, false, n + 1 == blocks);
      });
}

/// The packed rows of one head against a transposed state (M, C), block by block: `readers` (blocks, Reads B, M) read
/// it, and `features` (T, C) are written to it under `keys` (blocks, Writes B, M). out[r] (T, C) is what reader r
/// finds: the first one after its token has written its last row, before the others; all of them after its decay.
template <Eigen::Index Reads, Eigen::Index Writes, class T>
struct transposed_rows {
  const T* readers;
  const T* keys;
  const T* features[Writes];
  const T* decay;
  T* out[Reads];
};

/// Scratch of attend_transposed.
template <class T>
struct transposed_scratch {
  T* coefficients;  // (blocks, Reads, Writes, B, B)
  T* found;         // (Reads B, C)
  T* writing;       // (Writes B, C)
  T* carry;         // (C)
};

/// layout is that of the transposed state, its "features" M and its "values" C.
template <Eigen::Index B, rule_traits Rule, Eigen::Index Reads, Eigen::Index Writes, class T, class Layout>
LINATTN_INLINE void attend_transposed(const Layout& layout, Eigen::Index blocks,
                                      const transposed_rows<Reads, Writes, T>& x, const transposed_scratch<T>& y, T* S,
                                      const rows_ahead& next) {
  using P = packet<T>;
  constexpr kernel_form write = writes_block(Rule, decay_axis::column);
  const Eigen::Index rows = layout.features, key_stride = layout.feature_stride(), row_stride = layout.row_stride();
  const auto sees_own = [](auto r, auto w) { return number<decltype(r)> == 0 && number<decltype(w)> == Writes - 1; };
  const auto coefficients_of = [&](Eigen::Index n, Eigen::Index r, Eigen::Index w) LINATTN_INLINE_LAMBDA {
    return y.coefficients + ((n * Reads + r) * Writes + w) * B * B;
  };
  for (Eigen::Index n = 0; n < blocks; ++n) {
    unroll<Reads>([&](auto r) LINATTN_INLINE_LAMBDA {
      unroll<Writes>([&](auto w) LINATTN_INLINE_LAMBDA {
        const T* const reader = x.readers + (n * Reads + r) * B * key_stride;
        const T* const key = x.keys + (n * Writes + w) * B * key_stride;
        P product[B][B];
        unroll<B * B>([&](auto ij) LINATTN_INLINE_LAMBDA { product[ij / B][ij % B] = P::zero(); });
        for (Eigen::Index m = 0; m < key_stride; m += P::size) {
          unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
            const P value = P::load(reader + i * key_stride + m);
            unroll<number<decltype(i)> + 1>([&](auto j) LINATTN_INLINE_LAMBDA {
              product[i][j] = fma(value, P::load(key + j * key_stride + m), product[i][j]);
            });
          });
        }
        T* const to = coefficients_of(n, r, w);
        unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
          unroll<number<decltype(i)> + (sees_own(r, w) ? 1 : 0)>(
              [&](auto j) LINATTN_INLINE_LAMBDA { to[i * B + j] = sum(product[i][j]); });
        });
      });
    });
  }
  const auto combine = [&](auto packets, Eigen::Index c, Eigen::Index n) LINATTN_INLINE_LAMBDA {
    constexpr Eigen::Index Packets = packets;
    P before[Packets];              // what S has decayed by
    P written[Writes][B][Packets];  // likewise decayed
    unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { before[p] = P(T(1)); });
    unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
      if constexpr (Rule.decay != decay_kind::none) {
        unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
          const P factor = Rule.decay == decay_kind::per_feature
                               ? P::load(x.decay + (n * B + i) * row_stride + c + p * P::size)
                               : P::broadcast(x.decay + n * B + i);
          before[p] = before[p] * factor;
          unroll<Writes>([&](auto w) LINATTN_INLINE_LAMBDA {
            unroll<number<decltype(i)>>([&](auto j)
                                            LINATTN_INLINE_LAMBDA { written[w][j][p] = written[w][j][p] * factor; });
          });
        });
      }
      unroll<Writes>([&](auto w) LINATTN_INLINE_LAMBDA {
        unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
          written[w][i][p] = P::load(x.features[w] + (n * B + i) * row_stride + c + p * P::size);
        });
      });
      unroll<Reads>([&](auto r) LINATTN_INLINE_LAMBDA {
        P total[Packets];
        unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
          total[p] = P::load(y.found + (r * B + i) * row_stride + c + p * P::size);
          if constexpr (Rule.decay != decay_kind::none) total[p] = total[p] * before[p];
        });
        unroll<Writes>([&](auto w) LINATTN_INLINE_LAMBDA {
          const T* const coefficients = coefficients_of(n, r, w) + i * B;
          unroll<number<decltype(i)> + (sees_own(r, w) ? 1 : 0)>([&](auto j) LINATTN_INLINE_LAMBDA {
            const P by = P::broadcast(coefficients + j);
            unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { total[p] = fma(by, written[w][j][p], total[p]); });
          });
        });
        unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
          total[p].store(x.out[r] + (n * B + i) * row_stride + c + p * P::size);
        });
      });
    });
    unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
      unroll<Writes * B>([&](auto wj) LINATTN_INLINE_LAMBDA {
        written[wj / B][wj % B][p].store(y.writing + wj * row_stride + c + p * P::size);
      });
      before[p].store(y.carry + c + p * P::size);
    });
  };
  for_each_panel_block<B, T>(row_stride, blocks, next,
                             [&](auto packets, Eigen::Index c, Eigen::Index n) LINATTN_INLINE_LAMBDA {
                               call_micro_block<Reads * B, packets, reads_only, T>(
                                   {x.readers + n * Reads * B * key_stride, nullptr, nullptr, y.found + c}, S + c,
                                   key_stride, row_stride, rows, false, false);
                               combine(packets, c, n);
                               call_micro_block<Writes * B, packets, write, T>(
                                   {nullptr, x.keys + n * Writes * B * key_stride, y.writing + c, nullptr, y.carry + c},
                                   S + c, key_stride, row_stride, rows, false, n + 1 == blocks);
                             });
}

}  // namespace detail
LINATTN_NAMESPACE_END
