// Speculative decoding: up to 16 tokens against a state that is only read, and the first j of them written later.
//
// The block form of correction.hpp with a number of tokens that is known at run time. With w_p, x_p the pairs that the
// tokens write (draft.hpp), g_ij the product of the decays over (j, i], and r_i a row that reads,
//
//     r_i S_i = (g_i0 r_i) S_0 + sum_(j<=i) g_ij (r_i.w_j) x_j
//
// A row meets the tokens before it, the latest first, and decays on its way: each meeting is a coefficient, and
// what arrives is read from S_0 by the kernel, rows of keys (or a) and queries in one pass. The first give u token by
// token, the others the outputs. A draft goes on where it ended: its tokens one by one are, bit for bit, those at once.
#pragma once

#include <linattn/detail/draft_layout.hpp>
#include <linattn/detail/engine.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// The tokens of one head in a draft.
template <class T>
struct draft_rows {
  T* writing;    // (pairs, C)
  T* values;     // (pairs, M)
  T* decay;      // (tokens) or (tokens, C)
  T* log_decay;  // likewise
};

template <class T, class Layout>
LINATTN_INLINE draft_rows<T> rows_of(const Layout& layout, T* slab, Eigen::Index head) {
  T* const from = slab + head * layout.head_stride();
  return {from + layout.writing(), from + layout.values(), from + layout.decay(), from + layout.log_decay()};
}

/// What drafting needs beside its arguments: the operator's constants.
template <class Map, class S, class Layout, class DraftLayout>
struct draft_engine {
  using T = accumulator_t<S>;
  using P = packet<T>;
  static constexpr rule_traits rule = decltype(Layout::state)::rule;
  static constexpr Eigen::Index writes = rule.writes();
  static constexpr Eigen::Index pairs = DraftLayout::pairs;
  static constexpr bool decays = rule.decay != decay_kind::none;
  static constexpr bool corrects = rule.corrects != correction::none;

  /// Pairs of a block that `accept` writes, or rows of one that is read, and packets of its panels: their values or
  /// outputs take half of the registers. A state in memory comes the quicker the more of a row is taken at once.
  static constexpr Eigen::Index few_rows = 2;
  static constexpr Eigen::Index more_rows = DraftLayout::pairs_at_once;
  template <Eigen::Index B>
  static constexpr Eigen::Index panel_of = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS / (2 * B);

  using engine_type = engine<Map, S, Layout>;
  static constexpr bool clears_rows = engine_type::clears_rows;
  using rows_type = sequence_rows<S, T, rule>;
  using gates_type = rule_inputs<token_rows<const S>, rule>;

  const engine<Map, S, Layout>& constants;
  const DraftLayout& draft;

  /// Outputs of tokens from the slab `state`, behind the first `first` of the draft `to`, and what they would write
  /// there; <= 16 in all.
  void forward(const rows_type& x, Eigen::Index first, const T* state, T* to, T* scratch) const {
    for (Eigen::Index h = 0; h < layout().state.heads; ++h) {
      const T* const S_h = state + h * layout().state.head_stride();
      constants.prefetch_heads(S_h, h, layout().state.heads);
      const draft_rows<T> y = rows_of(draft, to, h);
      pack_tokens(x, first, h, y, scratch);
      read<corrects>(x, first, h, layout().heads.output_of(h, 0), S_h, y, scratch);
      for (Eigen::Index r = 1; r < layout().heads.readers; ++r) {
        read<false>(x, first, h, layout().heads.output_of(h, r), S_h, y, scratch);
      }
    }
  }

  /// The first `tokens` tokens of a draft into the slab `state`, the first of them at `position`. What has decayed into
  /// silence is cleared as often as steps do it.
  void accept(Eigen::Index tokens, const T* from, T* state, Eigen::Index position, T* scratch) const {
    const bool clears = (decays || corrects) && round_up(position, steps_to_clear) < position + tokens;
    for (Eigen::Index h = 0; h < layout().state.heads; ++h) {
      const draft_rows<const T> y = rows_of(draft, from, h);
      T* const S_h = state + h * layout().state.head_stride();
      constants.prefetch_heads(S_h, h, layout().state.heads);
      if (writes * tokens <= few_rows) {
        write<few_rows>(tokens, y, S_h, clears, scratch);
      } else {
        write<more_rows>(tokens, y, S_h, clears, scratch);
      }
    }
  }

 private:
  const Layout& layout() const noexcept { return constants.layout; }

  /// Pair p of token i stands in row writes i + p of `rows`, `stride` elements long: apart from x, whose rows are one
  /// a token.
  LINATTN_INLINE static void spread(const token_rows<const S>& x, Eigen::Index head, Eigen::Index n,
                                    Eigen::Index tokens, Eigen::Index pair, T* rows, Eigen::Index stride) {
    pack_rows(x.in({}, head), tokens, n, 1, rows + pair * stride, writes * stride);
  }

  /// What does not depend on the state: keys, values and decays.
  LINATTN_INLINE void pack_tokens(const rows_type& x, Eigen::Index first, Eigen::Index head, const draft_rows<T>& y,
                                  T* scratch) const {
    const Eigen::Index tokens = x.tokens;
    const Eigen::Index key_head = layout().heads.key_of(head);
    const Eigen::Index value_dim = layout().state.value_dim;
    const Eigen::Index features = layout().state.features;
    const Eigen::Index stride = layout().state.feature_stride();
    const Eigen::Index row_stride = layout().state.row_stride();
    T* const writing = y.writing + writes * first * stride;
    T* const keys = writes == 1 ? writing : scratch + layout().keys();
    pack_features<role::key>(constants.map, layout(), x.k.in({}, key_head), tokens, 1, T(1),
                             tile_position{x.position, key_head}, scratch + layout().tile(), keys);
    if constexpr (writes == 2) {
      spread(x.gates.b, head, features, tokens, 0, writing, stride);
      for (Eigen::Index i = 0; i < tokens; ++i) {
        std::copy_n(keys + i * stride, stride, writing + (2 * i + 1) * stride);
      }
    }
    spread(x.v, head, value_dim, tokens, writes - 1, y.values + writes * first * row_stride, row_stride);

    T* const log_decay = y.log_decay + first * draft.decay_stride();
    if constexpr (rule.decay == decay_kind::per_head) {
      for (Eigen::Index i = 0; i < tokens; ++i) {
        if constexpr (rule.fixed_decay) {
          log_decay[i] = T(x.gates.fixed_log_decay[head]);
        } else {
          log_decay[i] = T(*x.gates.log_decay.at(i, head));
        }
      }
      std::fill(log_decay + tokens, y.log_decay + draft_tokens, T(0));
      for (Eigen::Index i = 0; i < draft_tokens; i += P::size) exp(P::load(y.log_decay + i)).store(y.decay + i);
    } else if constexpr (decays) {
      const tile_rows<const S> from = x.gates.log_decay.in({}, head);
      pack_rows(from, tokens, features, 1, log_decay, stride);
      transform_rows(from, tokens, features, y.decay + first * stride, stride,
                     [](const P& value) LINATTN_INLINE_LAMBDA { return exp(value); });
    }
  }

  /// row (C) meets tokens `count` - 1 ... 0 and arrives at S_0; coefficients (writes count). On its way from token
  /// `from` it decays; by one factor a token the row itself does so at the end.
  LINATTN_INLINE void meet(Eigen::Index from, Eigen::Index count, const draft_rows<T>& y, T* row,
                           T* coefficients) const {
    constexpr bool per_head = rule.decay == decay_kind::per_head;
    const Eigen::Index stride = layout().state.feature_stride();
    T factor(1);
    for (Eigen::Index i = from; i-- > 0;) {
      for (Eigen::Index p = writes * i; i < count && p < writes * (i + 1); ++p) {
        coefficients[p] = factor * dot<T>(row, y.writing + p * stride, stride);
      }
      if constexpr (per_head) factor *= y.decay[i];
      if constexpr (rule.decay == decay_kind::per_feature) {
        scale(row, [&](Eigen::Index c) LINATTN_INLINE_LAMBDA { return P::load(y.decay + i * stride + c); });
      }
    }
    if constexpr (per_head) scale(row, [&](Eigen::Index) LINATTN_INLINE_LAMBDA { return P(factor); });
  }
  template <class F>
  LINATTN_INLINE void scale(T* row, const F& by) const {
    for (Eigen::Index c = 0; c < layout().state.feature_stride(); c += P::size)
      (P::load(row + c) * by(c)).store(row + c);
  }

  /// to (M) += coefficients (writes count) times what the first `count` tokens write.
  LINATTN_INLINE void add_tokens(Eigen::Index count, const draft_rows<T>& y, const T* coefficients, T* to) const {
    const Eigen::Index row_stride = layout().state.row_stride();
    for (Eigen::Index m = 0; m < row_stride; m += P::size) {
      P total = P::load(to + m);
      for (Eigen::Index p = 0; p < writes * count; ++p) {
        total = fma(P::broadcast(coefficients + p), P::load(y.values + p * row_stride + m), total);
      }
      total.store(to + m);
    }
  }

  /// found (count, M) = rows (count, C) S, both with room for whole blocks.
  LINATTN_INLINE void read_state(Eigen::Index count, T* rows, const T* S_h, T* found) const {
    if (count <= few_rows) {
      read_blocks<few_rows>(count, rows, S_h, found);
    } else if (count <= more_rows) {
      read_blocks<more_rows>(count, rows, S_h, found);
    } else {
      read_blocks<half_block>(count, rows, S_h, found);
    }
  }
  template <Eigen::Index B>
  LINATTN_INLINE void read_blocks(Eigen::Index count, T* rows, const T* S_h, T* found) const {
    const Eigen::Index stride = layout().state.feature_stride();
    const Eigen::Index row_stride = layout().state.row_stride();
    const Eigen::Index blocks = round_up(count, B) / B;
    std::fill(rows + count * stride, rows + blocks * B * stride, T(0));
    for_each_block<B>(
        blocks, S_h,
        [&](auto packets, Eigen::Index n, Eigen::Index c, Eigen::Index m, const T* S_panel, Eigen::Index features)
            LINATTN_INLINE_LAMBDA {
              const head_rows<T> x{rows + n * B * stride + c, nullptr, nullptr, found + n * B * row_stride + m};
              call_micro_block<B, packets, reads_only, T>(x, S_panel, stride, row_stride, features, c > 0, false);
            });
  }

  /// f(packets, n, c, m, panel, rows) for blocks n of B rows and the panels of S (C, M), tile by tile: `rows` features
  /// from c on of the values from m on, which lie at `panel`.
  template <Eigen::Index B, class State, class F>
  LINATTN_INLINE void for_each_block(Eigen::Index blocks, State* S_h, const F& f) const {
    const auto& state = layout().state;
    const Eigen::Index row_stride = state.row_stride();
    for_each_panel<panel_of<B>, T>(row_stride,
                                   [&](auto packets, Eigen::Index m, Eigen::Index, Eigen::Index) LINATTN_INLINE_LAMBDA {
                                     for (Eigen::Index c = 0; c < state.features; c += feature_tile<T>) {
                                       const Eigen::Index rows = std::min(feature_tile<T>, state.features - c);
                                       for (Eigen::Index n = 0; n < blocks; ++n)
                                         f(packets, n, c, m, S_h + c * row_stride + m, rows);
                                     }
                                   });
  }

  /// The rows that correct, one a token, as they arrive at S_0.
  LINATTN_INLINE void pack_corrections(const rows_type& x, Eigen::Index first, Eigen::Index head,
                                       const draft_rows<T>& y, T* rows, T (*coefficients)[pairs]) const {
    const Eigen::Index stride = layout().state.feature_stride();
    if constexpr (rule.corrects == correction::rank_one) {
      pack_rows(x.gates.a.in({}, head), x.tokens, layout().state.features, 1, rows, stride);
    } else {
      std::copy_n(y.writing + first * stride, x.tokens * stride, rows);
    }
    for (Eigen::Index i = 0; i < x.tokens; ++i) {
      const Eigen::Index token = first + i;
      meet(rule.corrects == correction::delta ? token + 1 : token, token, y, rows + i * stride, coefficients[i]);
    }
  }

  /// u of the rules that correct, from what their rows have found in S_0, into its place among the values.
  LINATTN_INLINE void correct(const rows_type& x, Eigen::Index first, Eigen::Index head, const draft_rows<T>& y,
                              const T (*coefficients)[pairs], T* found) const {
    const Eigen::Index row_stride = layout().state.row_stride();
    for (Eigen::Index i = 0; i < x.tokens; ++i) {
      T* const recalled = found + i * row_stride;
      T* const value = y.values + writes * (first + i) * row_stride;
      add_tokens(first + i, y, coefficients[i], recalled);
      for (Eigen::Index m = 0; m < row_stride; m += P::size) {
        P u = P::load(recalled + m);
        if constexpr (rule.corrects == correction::delta)
          u = P(T(*x.gates.beta.at(i, head))) * (P::load(value + m) - u);
        u.store(value + m);
      }
    }
  }

  /// Outputs of the tokens, of one head that reads the state; of the first one, with their corrections.
  template <bool Corrects>
  LINATTN_INLINE void read(const rows_type& x, Eigen::Index first, Eigen::Index head, Eigen::Index output, const T* S_h,
                           const draft_rows<T>& y, T* scratch) const {
    const Eigen::Index tokens = x.tokens;
    const Eigen::Index corrections = Corrects ? tokens : 0;
    const Eigen::Index query_head = layout().heads.query_of(output);
    const Eigen::Index stride = layout().state.feature_stride();
    const Eigen::Index row_stride = layout().state.row_stride();
    T* const rows = scratch + (corrects ? layout().reading() : layout().queries());  // (T + T, C) or (T, C)
    T* const found = scratch + layout().values();               // likewise (M): those of values and outputs
    T* const queries = rows + corrections * stride;             // (T, C)
    T* const outputs = found + corrections * row_stride;        // (T, M)
    T* const denominators = scratch + layout().denominators();  // (T)
    T correcting[Corrects ? draft_tokens : 1][pairs];
    T coefficients[draft_tokens][pairs];
    if constexpr (Corrects) pack_corrections(x, first, head, y, rows, correcting);
    pack_features<role::query>(constants.map, layout(), x.q.in({}, query_head), tokens, 1, constants.query_scale,
                               tile_position{x.position, query_head}, scratch + layout().tile(), queries);
    for (Eigen::Index i = 0; i < tokens; ++i) {
      T* const row = queries + i * stride;
      if constexpr (rule.reads_after_write) {
        meet(first + i + 1, first + i + 1, y, row, coefficients[i]);
      } else {
        coefficients[i][first + i] = own_bonus(x.gates.bonus, i, head, row, y.writing + (first + i) * stride);
        meet(first + i, first + i, y, row, coefficients[i]);
      }
    }
    read_state(corrections + tokens, rows, S_h, found);
    if constexpr (Corrects) correct(x, first, head, y, correcting, found);
    for (Eigen::Index i = 0; i < tokens; ++i) {
      add_tokens(first + i + 1, y, coefficients[i], outputs + i * row_stride);
    }

    S* const to = x.out.at(0, output);
    if (rule.normalizes && constants.normalizes) {
      for (Eigen::Index i = 0; i < tokens; ++i) {
        denominators[i] = dot<T>(queries + i * stride, S_h + layout().state.z_offset(), stride);
        for (Eigen::Index p = 0; p <= first + i; ++p) denominators[i] += coefficients[i][p];
        if (decays) denominators[i] = without_silence(denominators[i]);
      }
      unpack_outputs<true>(layout(), outputs, denominators, constants.policy, to, x.out.row_stride, tokens);
    } else {
      unpack_outputs<false>(layout(), outputs, denominators, constants.policy, to, x.out.row_stride, tokens);
    }
  }

  /// sum_c q[c] bonus[c] k[c]: how a token that is read before it is written sees itself.
  LINATTN_INLINE T own_bonus(const token_rows<const S>& bonus, Eigen::Index token, Eigen::Index head, const T* q,
                             const T* k) const {
    const Eigen::Index features = layout().state.features;
    const S* const weight = bonus.at(token, head);
    P total = P::zero();
    for_each_register<T>(features, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
      total = fma(P::load(q + c) * load_up_to(weight + c, left), P::load(k + c), total);
    });
    return sum(total);
  }

  /// The first tokens of one head into its S and what lies behind it: in blocks of B pairs, each scaled to the end of
  /// its block and padded with zeros, the state's panels read and written once.
  template <Eigen::Index B>
  LINATTN_INLINE void write(Eigen::Index tokens, const draft_rows<const T>& y, T* S_h, bool clears, T* scratch) const {
    constexpr kernel_form form{.writes = true, .decay = decays ? decay_axis::row : decay_axis::none, .once = true};
    constexpr Eigen::Index block = B / writes;  // tokens
    const auto& state = layout().state;
    const Eigen::Index stride = state.feature_stride();
    const Eigen::Index row_stride = state.row_stride();
    const Eigen::Index blocks = round_up(tokens, block) / block;
    T* const writing = scratch + (corrects ? layout().writing() : layout().queries());  // (blocks, B, C)
    T* const values = scratch + layout().values();                                      // (blocks, B, M)
    T* const carry = scratch + layout().keys();                                         // (blocks, C)

    for (Eigen::Index n = 0; n < blocks; ++n) {
      const Eigen::Index last = std::min((n + 1) * block, tokens);
      for (Eigen::Index c = 0; c < stride; c += P::size) {
        P rest(T(1));
        for (Eigen::Index i = last; i-- > n * block;) {
          for (Eigen::Index p = writes * i; p < writes * (i + 1); ++p) {
            const P row = P::load(y.writing + p * stride + c);
            (decays ? row * rest : row).store(writing + p * stride + c);
          }
          if constexpr (rule.decay == decay_kind::per_head) rest = rest * P::broadcast(y.decay + i);
          if constexpr (rule.decay == decay_kind::per_feature) rest = rest * P::load(y.decay + i * stride + c);
        }
        if constexpr (decays) rest.store(carry + n * stride + c);
      }
    }
    std::fill(writing + writes * tokens * stride, writing + blocks * B * stride, T(0));
    std::copy_n(y.values, writes * tokens * row_stride, values);
    std::fill(values + writes * tokens * row_stride, values + blocks * B * row_stride, T(0));

    for_each_block<B>(blocks, S_h,
                      [&](auto packets, Eigen::Index n, Eigen::Index c, Eigen::Index m, T* S_panel,
                          Eigen::Index features) LINATTN_INLINE_LAMBDA {
                        head_rows<T> x{nullptr, writing + n * B * stride + c, values + n * B * row_stride + m, nullptr};
                        if constexpr (decays) x.decay = carry + n * stride + c;
                        call_micro_block<B, packets, form, T>(x, S_panel, stride, row_stride, features, false,
                                                              clears && !clears_rows && n + 1 == blocks);
                      });
    if constexpr (rule.normalizes) {
      T* const z = S_h + state.z_offset();
      for (Eigen::Index c = 0; c < stride; c += P::size) {
        P total = P::load(z + c);
        for (Eigen::Index i = 0; i < tokens; ++i) {
          if (decays && i % block == 0) total = total * P::load(carry + i / block * stride + c);
          total = total + P::load(writing + i * stride + c);
        }
        total.store(z + c);
      }
    }
    if constexpr (engine_type::z_decays) {
      if (clears) clear_silent_features<clears_rows>(state, S_h);
    }
    T* const total = S_h + state.log_decay_offset();
    for (Eigen::Index i = 0; i < tokens; ++i) {
      for (Eigen::Index c = 0; c < state.decays(); ++c) total[c] += y.log_decay[i * draft.decay_stride() + c];
    }
  }
};

}  // namespace detail
LINATTN_NAMESPACE_END
