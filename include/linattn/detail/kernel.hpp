// The micro-block kernel: B tokens x a panel of packets against a state panel.
//
// For tokens i = 0 ... B-1 of a micro-block, with the state S_0 (C, M) as it was before the block,
//
//     o_i = q_i S_0 + sum_{j <= i} (q_i . k_j) v_j        S = S_0 + sum_j k_j v_j^T
//
// One pass over the rows c of S does both: load the panel of row c once, B fused multiply-adds of q_i[c] into the
// outputs, B of k_i[c] v_i into the row, store the row once. What the block owes itself is the B x B lower triangle of
// products P_ij = q_i . k_j, computed before. Reading alone (Writes = false) and writing alone (Reads = false) are the
// two halves of the non-causal form; B = 1 is a decode step.
#pragma once

#include <linattn/detail/layout.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Tokens of a micro-block. Causal: 4 tokens by 2 packets are 16 accumulators and values, which is what 16 registers
/// with memory operands, or 32 without, sustain: 0.94 to 0.98 of the FMA peak at C = M = 64 to 256 with AVX-512, 0.92
/// to 0.94 with AVX2; 8 by 1 falls to 0.67 there. Reading or writing alone leaves room for 8 where there are 32
/// registers: 0.95 to 0.97 against 0.72 (reading, too few chains to hide the latency) and 0.95 (writing).
inline constexpr Eigen::Index causal_block = 4;
inline constexpr Eigen::Index half_block = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32 ? 8 : 4;
inline constexpr Eigen::Index widest_block = 8;

/// Tokens of one packing pass at most.
inline constexpr Eigen::Index most_tokens = 32;

/// A pass that only reads leaves the state const.
template <bool Writes, class T>
using state_pointer = std::conditional_t<Writes, T*, const T*>;

/// The packed rows of one head: token i has q + i * feature_stride (C), k likewise, v + i * value_stride (M).
template <class T>
struct head_block {
  const T* q;
  const T* k;
  T* v;  ///< values in, outputs out
};

/// One micro-block against `Packets` packets of value columns. S (C, Packets) with rows `layout.row_stride()` apart;
/// products (B, B), lower triangle; values are read from, and outputs written to, rows of v `value_stride` apart.
template <Eigen::Index B, Eigen::Index Packets, bool Reads, bool Writes, class T, class Layout>
LINATTN_INLINE void micro_block(const Layout& layout, const head_block<T>& block, const T* products,
                                state_pointer<Writes, T> S) {
  using P = packet<T>;
  const Eigen::Index feature_stride = layout.feature_stride();
  const Eigen::Index row_stride = layout.row_stride();
  const T* const q = block.q;
  const T* const k = block.k;
  T* const v = block.v;

  P value[B][Packets];   // (B, Packets)
  P output[B][Packets];  // (B, Packets)
  unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
    unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
      if constexpr (Writes) value[i][p] = P::load(v + i * row_stride + p * P::size);
      if constexpr (Reads) output[i][p] = P::zero();
    });
  });
  for (Eigen::Index c = 0; c < layout.features; ++c) {
    P row[Packets];
    const auto address = S + c * row_stride;
    unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { row[p] = P::load(address + p * P::size); });
    if constexpr (Reads) {
      unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
        const P feature = P::broadcast(q + i * feature_stride + c);
        unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { output[i][p] = fma(feature, row[p], output[i][p]); });
      });
    }
    if constexpr (Writes) {
      unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
        const P feature = P::broadcast(k + i * feature_stride + c);
        unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { row[p] = fma(feature, value[i][p], row[p]); });
      });
      unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { row[p].store(address + p * P::size); });
    }
  }
  if constexpr (Reads) {
    unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
      if constexpr (Writes) {
        unroll<i + 1>([&](auto j) LINATTN_INLINE_LAMBDA {
          const P product = P::broadcast(products + i * B + j);
          unroll<Packets>([&](auto p)
                              LINATTN_INLINE_LAMBDA { output[i][p] = fma(product, value[j][p], output[i][p]); });
        });
      }
      unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { output[i][p].store(v + i * row_stride + p * P::size); });
    });
  }
}

/// What a micro-block owes itself, and its normaliser. For i = 0 ... B-1, with z_0 (C) as it was before the block,
///
///     products_ij = q_i . k_j  (j <= i)     denominator_i = q_i . z_0 + sum_{j <= i} products_ij     z = z_0 + sum_j
///     k_j
///
/// q, k (B, C) are padded with zeros to whole packets. Denominators are left alone unless Normalizes.
template <Eigen::Index B, bool Normalizes, class T, class Layout>
LINATTN_INLINE void block_products(const Layout& layout, const head_block<T>& block, T* z, T* products,
                                   T* denominators) {
  using P = packet<T>;
  const Eigen::Index stride = layout.feature_stride();
  P product[B][B];  // (B, B), lower triangle
  P read[B];        // (B)
  unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
    unroll<i + 1>([&](auto j) LINATTN_INLINE_LAMBDA { product[i][j] = P::zero(); });
    read[i] = P::zero();
  });
  for (Eigen::Index c = 0; c < stride; c += P::size) {
    const P before = P::load(z + c);
    P after = before;
    P key[B];
    unroll<B>([&](auto j) LINATTN_INLINE_LAMBDA {
      key[j] = P::load(block.k + j * stride + c);
      after = after + key[j];
    });
    after.store(z + c);
    unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
      const P query = P::load(block.q + i * stride + c);
      if constexpr (Normalizes) read[i] = fma(query, before, read[i]);
      unroll<i + 1>([&](auto j) LINATTN_INLINE_LAMBDA { product[i][j] = fma(query, key[j], product[i][j]); });
    });
  }
  unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
    T denominator = Normalizes ? sum(read[i]) : T(0);
    unroll<i + 1>([&](auto j) LINATTN_INLINE_LAMBDA {
      products[i * B + j] = sum(product[i][j]);
      denominator += products[i * B + j];
    });
    if constexpr (Normalizes) denominators[i] = denominator;
  });
}

/// q . z of one token, C padded to whole packets.
template <class T>
LINATTN_INLINE T dot(Eigen::Index padded_size, const T* q, const T* z) {
  using P = packet<T>;
  P total = P::zero();
  for (Eigen::Index c = 0; c < padded_size; c += P::size) total = fma(P::load(q + c), P::load(z + c), total);
  return sum(total);
}

/// z += k of one token, C padded to whole packets.
template <class T>
LINATTN_INLINE void accumulate(Eigen::Index padded_size, const T* k, T* z) {
  using P = packet<T>;
  for (Eigen::Index c = 0; c < padded_size; c += P::size) (P::load(z + c) + P::load(k + c)).store(z + c);
}

/// `Blocks` micro-blocks against all value columns of a head, panel by panel, so that the state panel stays in L1 while
/// the blocks go by. products: B x B of each block in turn.
template <Eigen::Index B, bool Reads, bool Writes, class T, class Layout>
LINATTN_INLINE void head_pass(const Layout& layout, Eigen::Index blocks, const head_block<T>& head, const T* products,
                              state_pointer<Writes, T> S) {
  constexpr Eigen::Index size = packet<T>::size;
  constexpr Eigen::Index widest = B == 1 ? 4 : 2;  // packets: a decode step has the registers for four
  const auto panel = [&](auto packets, Eigen::Index m) LINATTN_INLINE_LAMBDA {
    for (Eigen::Index b = 0; b < blocks; ++b) {
      const head_block<T> block{head.q + b * B * layout.feature_stride(), head.k + b * B * layout.feature_stride(),
                                head.v + b * B * layout.row_stride() + m};
      micro_block<B, packets, Reads, Writes>(layout, block, products + b * B * B, S + m);
    }
  };
  const Eigen::Index columns = layout.row_stride();
  Eigen::Index m = 0;
  for (; m + widest * size <= columns; m += widest * size) panel(std::integral_constant<Eigen::Index, widest>(), m);
  if constexpr (widest > 2) {
    for (; m + 2 * size <= columns; m += 2 * size) panel(std::integral_constant<Eigen::Index, 2>(), m);
  }
  for (; m < columns; m += size) panel(std::integral_constant<Eigen::Index, 1>(), m);
}

/// `blocks` micro-blocks of one head against its S (C, M) and the z (C) behind it; denominators one a token.
/// Instantiated per scalar, shape and form, never per feature map.
template <Eigen::Index B, bool Reads, bool Writes, bool Normalizes, class T, class Layout>
void attend_head(const Layout& layout, Eigen::Index blocks, const head_block<T>& head, state_pointer<Writes, T> S,
                 T* denominators) {
  alignas(slab_alignment) T products[most_tokens * B];  // B x B a block
  const auto z = S + layout.z_offset();
  const Eigen::Index stride = layout.feature_stride();
  for (Eigen::Index b = 0; b < blocks; ++b) {
    const head_block<T> block{head.q + b * B * stride, head.k + b * B * stride, nullptr};
    if constexpr (Reads && Writes) {
      block_products<B, Normalizes>(layout, block, z, products + b * B * B, denominators + b * B);
    } else {
      for (Eigen::Index i = 0; i < B; ++i) {
        if constexpr (Writes) accumulate(stride, block.k + i * stride, z);
        if constexpr (Reads && Normalizes) denominators[b * B + i] = dot(stride, block.q + i * stride, z);
      }
    }
  }
  head_pass<B, Reads, Writes>(layout, blocks, head, products, S);
}

}  // namespace detail
LINATTN_NAMESPACE_END
