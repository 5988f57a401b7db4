// The micro-block kernel: B tokens x a panel of packets against a state panel.
//
// For tokens i = 0 ... B-1 of a micro-block, in turn,
//
//     S = a_i S + k_i v_i^T          o_i = q_i S          z = a_i z + k_i          denominator_i = q_i . z
//
// with a_i the decay, where there is one: of the token, of its rows (features) or of its columns (values). One pass
// over the rows c of S does it for the whole block: load the panel of row c once; for each token add k_i[c] v_i to the
// row and q_i[c] times the row to its output; store the row once. A row's tokens are a chain of additions, but rows are
// independent of each other, so the processor overlaps them. Reading alone and writing alone are the two halves of the
// non-causal form, and of the rules that correct (correction.hpp); B = 1 is a decode step. An element of S and of an
// output is the same chain of roundings whatever B is.
#pragma once

#include <linattn/detail/layout.hpp>
#include <linattn/detail/rows_ahead.hpp>

#include <algorithm>
#include <bit>

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

/// Packets of a panel. A decode step takes as much of a row at once as a quarter of the registers hold, 512 bytes with
/// AVX-512: a state in L3 or memory then comes in half the time that 128 bytes of each row take. One that stays in L2
/// takes a fifth longer under the additive rule, and a fifth less under the delta rules. Change it here and run
/// `bench_step`, `bench_rules` and `bench_batch_step` to see others.
template <Eigen::Index B>
inline constexpr Eigen::Index panel_packets = B == 1 ? EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS / 4 : 2;

/// Tokens of one packing pass: multiples of every block.
inline constexpr Eigen::Index least_tokens = 16;
inline constexpr Eigen::Index most_tokens = 32;

/// Along what a token's decay varies: not at all, one factor; along the rows of S, a factor a feature; along its
/// columns (the transposed state of a gradient).
enum class decay_axis { none, token, row, column };

/// What a kernel does. `once`: it writes what a rule that corrects has solved for; a decay belongs to the block's first
/// token, and the others have none. `reads_first`: a token is read before it is written, and its output begins as
/// bonus_i v_i. `backwards`: from the last row of S to the first, so that a pass begins with what the one before
/// it has left in the cache.
struct kernel_form {
  bool reads = false;
  bool writes = false;
  decay_axis decay = decay_axis::none;
  bool once = false;
  bool reads_first = false;
  bool backwards = false;
};
inline constexpr kernel_form reads_only{.reads = true};
inline constexpr kernel_form writes_only{.writes = true};
inline constexpr kernel_form reads_and_writes{.reads = true, .writes = true};

/// A pass that only reads leaves the state const.
template <kernel_form Form, class T>
using state_pointer = std::conditional_t<Form.writes, T*, const T*>;

/// The packed rows of one head: token i has q + i * feature_stride (C), k likewise, v + i * row_stride (M), out
/// likewise; a decay of its own, decay[i], or a row of them as long as its k (row) or its v (column); and bonus[i].
template <class T>
struct head_rows {
  const T* q = nullptr;
  const T* k = nullptr;
  const T* v = nullptr;
  T* out = nullptr;
  const T* decay = nullptr;
  const T* bonus = nullptr;
  bool clears = true;  // what has decayed into silence, with the last block
};

/// Whether a form can leave its state in silence: where nothing decays or is taken back, nothing vanishes.
template <kernel_form Form>
inline constexpr bool may_clear = Form.decay != decay_axis::none || Form.once;

/// Tokens after which a decode step clears: often enough that only decays below 1/3 leave subnormal numbers in between.
inline constexpr Eigen::Index steps_to_clear = 16;

/// One micro-block against `rows` rows of `Packets` packets of value columns. q, k (B, rows) have rows feature_stride
/// apart; v, out (B, Packets) and S (rows, Packets) row_stride. Outputs are set, or added to where `adds`; entries of S
/// below `silence` are cleared where `clears`. Pointers move with the row of S: addresses computed from its index would
/// cost more than the arithmetic of a short block.
template <Eigen::Index B, Eigen::Index Packets, kernel_form Form, class T>
LINATTN_INLINE void micro_block(head_rows<T> x, state_pointer<Form, T> S, Eigen::Index feature_stride,
                                Eigen::Index row_stride, Eigen::Index rows, bool adds, bool clears) {
  using P = packet<T>;
  constexpr Eigen::Index decays = Form.once ? 1 : B;
  constexpr Eigen::Index next = Form.backwards ? -1 : 1;
  if constexpr (Form.backwards) {
    S += (rows - 1) * row_stride;
    if constexpr (Form.reads) x.q += rows - 1;
    if constexpr (Form.writes) x.k += rows - 1;
    if constexpr (Form.decay == decay_axis::row) x.decay += rows - 1;
  }
  P value[B][Packets];        // (B, Packets)
  P output[B][Packets];       // (B, Packets)
  P factor[decays][Packets];  // (B), or (B, Packets) along the columns
  unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
    if constexpr (Form.decay == decay_axis::token && number<decltype(i)> < decays) {
      factor[i][0] = P::broadcast(x.decay + i);
    }
    unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
      constexpr Eigen::Index m = number<decltype(p)> * P::size;
      if constexpr (Form.writes) value[i][p] = P::load(x.v + i * row_stride + m);
      if constexpr (Form.decay == decay_axis::column && number<decltype(i)> < decays) {
        factor[i][p] = P::load(x.decay + i * row_stride + m);
      }
      if constexpr (Form.reads_first) {
        output[i][p] =
            adds ? P::load(x.out + i * row_stride + m) : P::broadcast(x.bonus + i) * P::load(x.v + i * row_stride + m);
      } else if constexpr (Form.reads) {
        output[i][p] = adds ? P::load(x.out + i * row_stride + m) : P::zero();
      }
    });
  });
  for (; rows > 0; --rows, S += next * row_stride) {
    P row[Packets];
    unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { row[p] = P::load(S + p * P::size); });
    const auto read = [&](auto i) LINATTN_INLINE_LAMBDA {
      const P query = P::broadcast(x.q + i * feature_stride);
      unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { output[i][p] = fma(query, row[p], output[i][p]); });
    };
    unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
      if constexpr (Form.reads_first) read(i);
      if constexpr (Form.writes && Form.decay != decay_axis::none && number<decltype(i)> < decays) {
        const P key = P::broadcast(x.k + i * feature_stride);
        if constexpr (Form.decay == decay_axis::row) factor[i][0] = P::broadcast(x.decay + i * feature_stride);
        unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
          row[p] = fma(factor[i][Form.decay == decay_axis::column ? Eigen::Index(p) : 0], row[p], key * value[i][p]);
        });
      } else if constexpr (Form.writes) {
        const P key = P::broadcast(x.k + i * feature_stride);
        unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { row[p] = fma(key, value[i][p], row[p]); });
      }
      if constexpr (Form.reads && !Form.reads_first) read(i);
    });
    if constexpr (may_clear<Form>) {
      if (clears) unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { row[p] = zero_below(row[p], silence<T>); });
    }
    if constexpr (Form.writes) unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { row[p].store(S + p * P::size); });
    if constexpr (Form.reads) x.q += next;
    if constexpr (Form.writes) x.k += next;
    if constexpr (Form.decay == decay_axis::row) x.decay += next;
  }
  if constexpr (Form.reads) {
    unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
      unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { output[i][p].store(x.out + i * row_stride + p * P::size); });
    });
  }
}

/// micro_block as a function of its own: its registers do not depend on what surrounds a call, and it is compiled once
/// per scalar, shape and form for every layout.
template <Eigen::Index B, Eigen::Index Packets, kernel_form Form, class T>
LINATTN_NOINLINE void call_micro_block(const head_rows<T>& x, state_pointer<Form, T> S, Eigen::Index feature_stride,
                                       Eigen::Index row_stride, Eigen::Index rows, bool adds, bool clears) {
  micro_block<B, Packets, Form, T>(x, S, feature_stride, row_stride, rows, adds, clears);
}

/// The decay of a packet of features, the first of them `feature` behind those of the block's first token.
template <kernel_form Form, class T>
LINATTN_INLINE packet<T> decay_of(const head_rows<T>& x, Eigen::Index feature, Eigen::Index token) {
  if constexpr (Form.decay == decay_axis::row) return packet<T>::load(x.decay + feature);
  return packet<T>::broadcast(x.decay + token);
}

/// 0 for what has decayed into silence.
template <class T>
constexpr T without_silence(T x) noexcept {
  return x < silence<T> && -silence<T> < x ? T(0) : x;
}

/// z (C) without what has decayed into silence, and with Rows the same rows of S (C, M): where features have one sign
/// these say no more than z does, and one without the other would make other means. Of columns alone, as of all.
template <bool Rows, class T, class Layout>
LINATTN_NOINLINE void clear_silent_features(const Layout& layout, T* S) {
  T* const z = S + layout.z_offset();
  for (Eigen::Index c = 0; c < layout.features; ++c) {
    z[c] = without_silence(z[c]);
    if (Rows && z[c] == T(0)) std::fill_n(S + c * layout.row_stride(), layout.row_stride(), T(0));
  }
}

/// The normaliser's half of a micro-block: z (C) and, where Normalizes, one denominator a token. q, k (B, C) and z are
/// padded with zeros to whole packets, `stride` elements.
template <Eigen::Index B, bool Normalizes, kernel_form Form, class T>
LINATTN_INLINE void normalizer_block(const head_rows<T>& x, Eigen::Index stride, state_pointer<Form, T> z,
                                     T* denominators) {
  static_assert(Form.decay != decay_axis::column);
  using P = packet<T>;
  P product[B];  // (B)
  unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA { product[i] = P::zero(); });
  for (Eigen::Index c = 0; c < stride; c += P::size) {
    P total = P::load(z + c);
    unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA {
      if constexpr (Form.writes && Form.decay != decay_axis::none) {
        total = fma(decay_of<Form>(x, i * stride + c, i), total, P::load(x.k + i * stride + c));
      } else if constexpr (Form.writes) {
        total = total + P::load(x.k + i * stride + c);
      }
      if constexpr (Normalizes) product[i] = fma(P::load(x.q + i * stride + c), total, product[i]);
    });
    if constexpr (Form.writes) total.store(z + c);
  }
  if constexpr (Normalizes) {
    unroll<B>([&](auto i) LINATTN_INLINE_LAMBDA { denominators[i] = sum(product[i]); });
  }
}

/// Rows of S that the blocks of a pass run over before the next ones: a panel of two packets of them takes half of L1,
/// and leaves the rest to the features.
template <class T>
inline constexpr Eigen::Index feature_tile = (16 * 1024) / (2 * packet<T>::size * Eigen::Index(sizeof(T)));

/// A state so small, and known to the compiler, that a call would cost as much as the work.
template <class Layout>
inline constexpr bool is_small = Layout::is_fixed&& Layout().size() <= 1024;

/// f(packets, m, panel number, panels) for the panels of `widest` packets of a row, a power of two, from its column m
/// on, and for what is left at its end in panels of half as many, and so on.
template <Eigen::Index widest, class T, class F>
LINATTN_INLINE void for_each_panel(Eigen::Index row_stride, const F& f) {
  constexpr Eigen::Index size = packet<T>::size;
  const Eigen::Index panels = (row_stride + widest * size - 1) / (widest * size);
  Eigen::Index m = 0;
  unroll<std::bit_width(std::size_t(widest))>([&](auto halvings) LINATTN_INLINE_LAMBDA {
    constexpr Eigen::Index packets = widest >> number<decltype(halvings)>;
    for (; m + packets * size <= row_stride; m += packets * size) {
      f(std::integral_constant<Eigen::Index, packets>(), m, m / (widest * size), panels);
    }
  });
}

/// `blocks` micro-blocks of one head against its S (C, M), without the normaliser. Panel by panel and tile by tile, so
/// that a piece of the state stays in L1 while the blocks go by. The last block clears what has decayed into silence.
template <Eigen::Index B, kernel_form Form, class T, class Layout>
LINATTN_INLINE void inline_attend_panels(const Layout& layout, Eigen::Index blocks, const head_rows<T>& x,
                                         state_pointer<Form, T> S, const rows_ahead& next) {
  constexpr Eigen::Index size = packet<T>::size;
  const Eigen::Index features = layout.features;
  const Eigen::Index feature_stride = layout.feature_stride();
  const Eigen::Index row_stride = layout.row_stride();
  for_each_panel<panel_packets<B>, T>(
      row_stride, [&](auto packets, Eigen::Index m, Eigen::Index panel, Eigen::Index panels) LINATTN_INLINE_LAMBDA {
        const auto blocks_of = [&](Eigen::Index c, const auto& before) LINATTN_INLINE_LAMBDA {
          const Eigen::Index rows = std::min(feature_tile<T>, features - c);
          for (Eigen::Index i = 0; i < blocks * B; i += B) {
            before(i);
            head_rows<T> block{x.q + i * feature_stride + c, x.k + i * feature_stride + c, x.v + i * row_stride + m,
                               x.out + i * row_stride + m};
            if constexpr (Form.decay == decay_axis::token) block.decay = x.decay + i;
            if constexpr (Form.decay == decay_axis::row) block.decay = x.decay + i * feature_stride + c;
            if constexpr (Form.decay == decay_axis::column) block.decay = x.decay + i * row_stride + m;
            if constexpr (Form.reads_first) block.bonus = x.bonus + i;
            const auto state = S + c * row_stride + m;
            const bool clears = may_clear<Form> && x.clears && i + B == blocks * B;
            if constexpr (B == 1 && is_small<Layout>) {
              micro_block<B, packets, Form, T>(block, state, feature_stride, row_stride, rows, c > 0, clears);
            } else {
              call_micro_block<B, packets, Form, T>(block, state, feature_stride, row_stride, rows, c > 0, clears);
            }
          }
        };
        if constexpr (B == 1) {
          blocks_of(0, [](Eigen::Index) LINATTN_INLINE_LAMBDA {});
        } else {
          constexpr Eigen::Index lines = (packets * size + line<T> - 1) / line<T>;
          const rows_ahead::share<B, lines> ahead(next, panel, panels);
          blocks_of(0, [&](Eigen::Index i) LINATTN_INLINE_LAMBDA { ahead.fetch(i); });
        }
        for (Eigen::Index c = feature_tile<T>; c < features; c += feature_tile<T>) {
          blocks_of(c, [](Eigen::Index) LINATTN_INLINE_LAMBDA {});
        }
      });
}

/// inline_attend_panels as a function of its own, compiled once for all maps, sizes and verbs.
template <Eigen::Index B, kernel_form Form, class T, class Layout>
LINATTN_NOINLINE void call_attend_panels(const Layout& layout, Eigen::Index blocks, const head_rows<T>& x,
                                         state_pointer<Form, T> S, const rows_ahead& next) {
  inline_attend_panels<B, Form, T>(layout, blocks, x, S, next);
}

/// One or the other: a decode step gains by what the compiler knows of the sizes, more tokens hide a call.
template <Eigen::Index B, kernel_form Form, class T, class Layout>
LINATTN_INLINE void attend_panels(const Layout& layout, Eigen::Index blocks, const head_rows<T>& x,
                                  state_pointer<Form, T> S, const rows_ahead& next) {
  if constexpr (B == 1) {
    inline_attend_panels<B, Form, T>(layout, blocks, x, S, next);
  } else {
    call_attend_panels<B, Form, T>(at_run_time<additive::traits>(layout), blocks, x, S, next);
  }
}

/// The normaliser's half of `blocks` micro-blocks; denominators one a token.
template <Eigen::Index B, kernel_form Form, bool Normalizes, class T>
LINATTN_INLINE void inline_normalize(Eigen::Index stride, Eigen::Index blocks, const head_rows<T>& x,
                                     state_pointer<Form, T> z, T* denominators) {
  for (Eigen::Index i = 0; i < blocks * B; i += B) {
    head_rows<T> block{x.q + i * stride, x.k + i * stride};
    if constexpr (Form.decay == decay_axis::token) block.decay = x.decay + i;
    if constexpr (Form.decay == decay_axis::row) block.decay = x.decay + i * stride;
    normalizer_block<B, Normalizes, Form>(block, stride, z, denominators + i);
  }
}
template <Eigen::Index B, kernel_form Form, bool Normalizes, class T>
LINATTN_NOINLINE void call_normalize(Eigen::Index stride, Eigen::Index blocks, const head_rows<T>& x,
                                     state_pointer<Form, T> z, T* denominators) {
  inline_normalize<B, Form, Normalizes>(stride, blocks, x, z, denominators);
}

/// `blocks` micro-blocks of one head against its S (C, M) and, where the layout keeps one, the z (C) behind it;
/// denominators one a token.
template <Eigen::Index B, kernel_form Form, bool Normalizes, class T, class Layout>
LINATTN_INLINE void attend_head(const Layout& layout, Eigen::Index blocks, const head_rows<T>& x,
                                state_pointer<Form, T> S, T* denominators, const rows_ahead& next) {
  if constexpr (Layout::rule.normalizes && (Form.writes || Normalizes)) {
    const auto z = S + layout.z_offset();
    if constexpr (B == 1) {
      inline_normalize<B, Form, Normalizes>(layout.feature_stride(), blocks, x, z, denominators);
    } else {
      call_normalize<B, Form, Normalizes>(layout.feature_stride(), blocks, x, z, denominators);
    }
  }
  attend_panels<B, Form, T>(layout, blocks, x, S, next);
}

}  // namespace detail
LINATTN_NAMESPACE_END
