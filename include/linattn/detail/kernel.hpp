// The micro-block kernel: B tokens x a panel of packets against a state panel.
//
// For tokens i = 0 ... B-1 of a micro-block, in turn,
//
//     S = S + k_i v_i^T          o_i = q_i S          z = z + k_i          denominator_i = q_i . z
//
// One pass over the rows c of S does it for the whole block: load the panel of row c once; for each token add k_i[c]
// v_i to the row and q_i[c] times the row to its output; store the row once. A row's tokens are a chain of additions,
// but rows are independent of each other, so the processor overlaps them. Reading alone (Writes = false) and writing
// alone (Reads = false) are the two halves of the non-causal form; B = 1 is a decode step. An element of S and of an
// output is the same chain of roundings whatever B is.
#pragma once

#include <linattn/detail/layout.hpp>
#include <linattn/detail/rows_ahead.hpp>

#include <algorithm>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Tokens of a micro-block, by what `bench_roofline --benchmark_filter=kernel` shows, shares of the FMA peak at
/// C = M = 32 to 256 on Zen 4 with GCC 12:
///
///              AVX-512 (32 registers)                 AVX2 (16)
///     B        1       2         4         8          2         4         8
///     causal   .60-.77 .83-.91   .92-.96   .86-.97    .82-.96   .91-.94   .71-.75
///     absorb   .31-.43 .58-.77   .90-.97   .92-.96    .25-.81   .80-.97   .85-.89
///     read     .48-.67 .69-.72   .70-.71   .92-.95    .49-.60   .87-.89   .50-.58
///
/// Causal, 4 tokens by 2 packets are 16 accumulators and values; reading alone needs 8 by 2 chains to hide the latency
/// of an addition where there are registers for them. With C = 1024 or 4096 tiles of S keep causal at .86 to .94. SSE2
/// has nothing to fuse: causal is at .55 to .66 of its peak with 2, 4 or 8. NEON, with 32 registers, is a forecast only
/// (benchmarks/mca.py).
inline constexpr Eigen::Index causal_block = 4;
inline constexpr Eigen::Index half_block = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32 ? 8 : 4;
inline constexpr Eigen::Index widest_block = 8;

/// Packets of a panel. A decode step has registers for four, and moves most with 128 bytes a row: 2 packets of 64
/// bytes, 4 of 32 or less. Change it here and run `bench_roofline --benchmark_filter=kernel_causal/B:1` to see the
/// others.
template <class T, Eigen::Index B>
inline constexpr Eigen::Index panel_packets = B == 1 && packet<T>::size * sizeof(T) <= 32 ? 4 : 2;

/// Tokens of one packing pass: multiples of every block.
inline constexpr Eigen::Index least_tokens = 16;
inline constexpr Eigen::Index most_tokens = 32;

/// A pass that only reads leaves the state const.
template <bool Writes, class T>
using state_pointer = std::conditional_t<Writes, T*, const T*>;

/// The packed rows of one head: token i has q + i * feature_stride (C), k likewise, v + i * row_stride (M), out
/// likewise.
template <class T>
struct head_rows {
  const T* q;
  const T* k;
  const T* v;
  T* out;
};

/// One micro-block against `rows` rows of `Packets` packets of value columns. q, k (B, rows) have rows feature_stride
/// apart; v, out (B, Packets) and S (rows, Packets) row_stride. Outputs are set, or added to where `adds`. Pointers
/// move with the row of S: addresses computed from its index would cost more than the arithmetic of a short block.
template <Eigen::Index B, Eigen::Index Packets, bool Reads, bool Writes, class T>
LINATTN_INLINE void micro_block(const T* q, const T* k, const T* v, T* out, state_pointer<Writes, T> S,
                                Eigen::Index feature_stride, Eigen::Index row_stride, Eigen::Index rows, bool adds) {
  using P = packet<T>;
  P value[B][Packets];   // (B, Packets)
  P output[B][Packets];  // (B, Packets)
  unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
    unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
      if constexpr (Writes) value[i][p] = P::load(v + i * row_stride + p * P::size);
      if constexpr (Reads) output[i][p] = adds ? P::load(out + i * row_stride + p * P::size) : P::zero();
    });
  });
  for (; rows > 0; --rows, ++q, ++k, S += row_stride) {
    P row[Packets];
    unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { row[p] = P::load(S + p * P::size); });
    unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
      if constexpr (Writes) {
        const P key = P::broadcast(k + i * feature_stride);
        unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { row[p] = fma(key, value[i][p], row[p]); });
      }
      if constexpr (Reads) {
        const P query = P::broadcast(q + i * feature_stride);
        unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { output[i][p] = fma(query, row[p], output[i][p]); });
      }
    });
    if constexpr (Writes) unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { row[p].store(S + p * P::size); });
  }
  if constexpr (Reads) {
    unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
      unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { output[i][p].store(out + i * row_stride + p * P::size); });
    });
  }
}

/// micro_block as a function of its own: its registers do not depend on what surrounds a call, and it is compiled once
/// per scalar, shape and form for every layout.
template <Eigen::Index B, Eigen::Index Packets, bool Reads, bool Writes, class T>
LINATTN_NOINLINE void call_micro_block(const T* q, const T* k, const T* v, T* out, state_pointer<Writes, T> S,
                                       Eigen::Index feature_stride, Eigen::Index row_stride, Eigen::Index rows,
                                       bool adds) {
  micro_block<B, Packets, Reads, Writes, T>(q, k, v, out, S, feature_stride, row_stride, rows, adds);
}

/// The normaliser's half of a micro-block: z (C) and, where Normalizes, one denominator a token. q, k (B, C) and z are
/// padded with zeros to whole packets, `stride` elements.
template <Eigen::Index B, bool Normalizes, bool Writes, class T>
LINATTN_INLINE void normalizer_block(const T* q, const T* k, Eigen::Index stride, state_pointer<Writes, T> z,
                                     T* denominators) {
  using P = packet<T>;
  P product[B];  // (B)
  unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA { product[i] = P::zero(); });
  for (Eigen::Index c = 0; c < stride; c += P::size) {
    P total = P::load(z + c);
    unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
      if constexpr (Writes) total = total + P::load(k + i * stride + c);
      if constexpr (Normalizes) product[i] = fma(P::load(q + i * stride + c), total, product[i]);
    });
    if constexpr (Writes) total.store(z + c);
  }
  if constexpr (Normalizes) {
    unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA { denominators[i] = sum(product[i]); });
  }
}

/// Rows of S that the blocks of a pass run over before the next ones: a panel of them stays in L1 beside the features.
template <class T>
inline constexpr Eigen::Index feature_tile = (16 * 1024) / (2 * packet<T>::size * Eigen::Index(sizeof(T)));

/// A state so small, and known to the compiler, that a call would cost as much as the work.
template <class Layout>
inline constexpr bool is_small = Layout::is_fixed&& Layout().size() <= 1024;

/// `blocks` micro-blocks of one head against its S (C, M), without the normaliser. Panel by panel and tile by tile, so
/// that a piece of the state stays in L1 while the blocks go by.
template <Eigen::Index B, bool Reads, bool Writes, class T, class Layout>
LINATTN_INLINE void attend_panels(const Layout& layout, Eigen::Index blocks, const head_rows<T>& x,
                                  state_pointer<Writes, T> S, const rows_ahead& next) {
  constexpr Eigen::Index size = packet<T>::size;
  constexpr Eigen::Index widest = panel_packets<T, B>;
  const Eigen::Index features = layout.features;
  const Eigen::Index feature_stride = layout.feature_stride();
  const Eigen::Index row_stride = layout.row_stride();
  const Eigen::Index panels = (row_stride + widest * size - 1) / (widest * size);
  const auto panel = [&](auto packets, Eigen::Index m) LINATTN_INLINE_LAMBDA {
    const auto blocks_of = [&](Eigen::Index c, const auto& before) LINATTN_INLINE_LAMBDA {
      const Eigen::Index rows = std::min(feature_tile<T>, features - c);
      for (Eigen::Index i = 0; i < blocks * B; i += B) {
        before(i);
        const T* const q = x.q + i * feature_stride + c;
        const T* const k = x.k + i * feature_stride + c;
        const T* const v = x.v + i * row_stride + m;
        T* const out = x.out + i * row_stride + m;
        const auto state = S + c * row_stride + m;
        if constexpr (B == 1 && is_small<Layout>) {
          micro_block<B, packets, Reads, Writes, T>(q, k, v, out, state, feature_stride, row_stride, rows, c > 0);
        } else {
          call_micro_block<B, packets, Reads, Writes, T>(q, k, v, out, state, feature_stride, row_stride, rows, c > 0);
        }
      }
    };
    if constexpr (B == 1) {
      blocks_of(0, [](Eigen::Index) LINATTN_INLINE_LAMBDA {});
    } else {
      constexpr Eigen::Index lines = (packets * size + line<T> - 1) / line<T>;
      const rows_ahead::share<B, lines> ahead(next, m / (widest * size), panels);
      blocks_of(0, [&](Eigen::Index i) LINATTN_INLINE_LAMBDA { ahead.fetch(i); });
    }
    for (Eigen::Index c = feature_tile<T>; c < features; c += feature_tile<T>) {
      blocks_of(c, [](Eigen::Index) LINATTN_INLINE_LAMBDA {});
    }
  };
  Eigen::Index m = 0;
  for (; m + widest * size <= row_stride; m += widest * size) panel(std::integral_constant<Eigen::Index, widest>(), m);
  if constexpr (widest > 2) {
    for (; m + 2 * size <= row_stride; m += 2 * size) panel(std::integral_constant<Eigen::Index, 2>(), m);
  }
  for (; m < row_stride; m += size) panel(std::integral_constant<Eigen::Index, 1>(), m);
}

/// `blocks` micro-blocks of one head against its S (C, M) and the z (C) behind it; denominators one a token.
template <Eigen::Index B, bool Reads, bool Writes, bool Normalizes, class T, class Layout>
LINATTN_INLINE void attend_head(const Layout& layout, Eigen::Index blocks, const head_rows<T>& x,
                                state_pointer<Writes, T> S, T* denominators, const rows_ahead& next) {
  if constexpr (Writes || Normalizes) {
    const Eigen::Index stride = layout.feature_stride();
    for (Eigen::Index i = 0; i < blocks * B; i += B) {
      normalizer_block<B, Normalizes, Writes>(x.q + i * stride, x.k + i * stride, stride, S + layout.z_offset(),
                                              denominators + i);
    }
  }
  attend_panels<B, Reads, Writes, T>(layout, blocks, x, S, next);
}

}  // namespace detail
LINATTN_NAMESPACE_END
