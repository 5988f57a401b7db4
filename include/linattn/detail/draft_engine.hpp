// Speculative decoding: up to 16 tokens against a state that is only read, and the first j of them written later.
//
// The block form of correction.hpp with a number of tokens that is known at run time. With w_p, x_p the pairs that the
// tokens write (draft.hpp), g_ij the product of the decays over (j, i], and r_i a row that reads,
//
//     r_i S_i = (g_i0 r_i) S_0 + sum_(j<=i) g_ij (r_i.w_j) x_j
//
// A row meets the tokens before it in turn, the latest first, and decays on its way: each meeting is a coefficient, and
// what arrives is read from S_0 by the kernel. First rows of keys (or a), which give u token by token; then queries.
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

  /// Pairs of a block that `accept` writes, and packets of its panels: their values take half of the registers. A state
  /// in memory comes the quicker the more of a row is taken at once.
  static constexpr Eigen::Index few_pairs = 2;
  static constexpr Eigen::Index many_pairs = 4;
  template <Eigen::Index B>
  static constexpr Eigen::Index written_packets = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS / (2 * B);

  using engine_type = engine<Map, S, Layout>;
  static constexpr bool clears_rows = engine_type::clears_rows;
  using rows_type = sequence_rows<S, T, rule>;
  using gates_type = rule_inputs<token_rows<const S>, rule>;

  const engine<Map, S, Layout>& constants;
  const DraftLayout& draft;

  /// Outputs of <= 16 tokens from the slab `state`, and what they would write to `to`.
  void forward(const rows_type& x, const T* state, T* to, T* scratch) const {
    for (Eigen::Index h = 0; h < layout().state.heads; ++h) {
      const T* const S_h = state + h * layout().state.head_stride();
      const draft_rows<T> y = rows_of(draft, to, h);
      pack_tokens(x, h, y, scratch);
      if constexpr (corrects) correct(x, h, S_h, y, scratch);
      for (Eigen::Index r = 0; r < layout().heads.readers; ++r) {
        read(x, h, layout().heads.output_of(h, r), S_h, y, scratch);
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
      if (writes * tokens <= few_pairs) {
        write<few_pairs>(tokens, y, S_h, clears, scratch);
      } else {
        write<many_pairs>(tokens, y, S_h, clears, scratch);
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
  LINATTN_INLINE void pack_tokens(const rows_type& x, Eigen::Index head, const draft_rows<T>& y, T* scratch) const {
    const Eigen::Index tokens = x.tokens;
    const Eigen::Index key_head = layout().heads.key_of(head);
    const Eigen::Index value_dim = layout().state.value_dim;
    const Eigen::Index features = layout().state.features;
    const Eigen::Index stride = layout().state.feature_stride();
    T* const keys = writes == 1 ? y.writing : scratch + layout().keys();
    pack_features<role::key>(constants.map, layout(), x.k.in({}, key_head), tokens, 1, T(1),
                             tile_position{x.position, key_head}, scratch + layout().tile(), keys);
    if constexpr (writes == 2) {
      spread(x.gates.b, head, features, tokens, 0, y.writing, stride);
      for (Eigen::Index i = 0; i < tokens; ++i) {
        std::copy_n(keys + i * stride, stride, y.writing + (2 * i + 1) * stride);
      }
    }
    spread(x.v, head, value_dim, tokens, writes - 1, y.values, layout().state.row_stride());

    if constexpr (rule.decay == decay_kind::per_head) {
      for (Eigen::Index i = 0; i < tokens; ++i) {
        if constexpr (rule.fixed_decay) {
          y.log_decay[i] = T(x.gates.fixed_log_decay[head]);
        } else {
          y.log_decay[i] = T(*x.gates.log_decay.at(i, head));
        }
      }
      std::fill(y.log_decay + tokens, y.log_decay + draft_tokens, T(0));
      for (Eigen::Index i = 0; i < draft_tokens; i += P::size) exp(P::load(y.log_decay + i)).store(y.decay + i);
    } else if constexpr (decays) {
      const tile_rows<const S> from = x.gates.log_decay.in({}, head);
      pack_rows(from, tokens, features, 1, y.log_decay, stride);
      transform_rows(from, tokens, features, y.decay, stride,
                     [](const P& value) LINATTN_INLINE_LAMBDA { return exp(value); });
    }
  }

  /// row (C) = row decayed by token i.
  LINATTN_INLINE void decay_by(Eigen::Index i, const draft_rows<T>& y, T* row) const {
    if constexpr (decays) {
      const T* const factor = y.decay + i * draft.decay_stride();
      for (Eigen::Index c = 0; c < layout().state.feature_stride(); c += P::size) {
        const P by = rule.decay == decay_kind::per_head ? P::broadcast(factor) : P::load(factor + c);
        (P::load(row + c) * by).store(row + c);
      }
    }
  }

  /// row (C) meets tokens `count` - 1 ... 0 and arrives at S_0; coefficients (writes count).
  LINATTN_INLINE void meet(Eigen::Index count, const draft_rows<T>& y, T* row, T* coefficients) const {
    const Eigen::Index stride = layout().state.feature_stride();
    for (Eigen::Index j = count; j-- > 0;) {
      for (Eigen::Index p = writes * j; p < writes * (j + 1); ++p) {
        coefficients[p] = dot<T>(row, y.writing + p * stride, stride);
      }
      decay_by(j, y, row);
    }
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

  /// found (rows, M) = rows (rows, C) S, rows rounded up to whole blocks.
  LINATTN_INLINE void read_state(Eigen::Index tokens, const T* rows, const T* S_h, T* found) const {
    const head_rows<T> x{rows, rows, found, found};
    attend_panels<half_block, reads_only, T>(layout().state, round_up(tokens, half_block) / half_block, x, S_h,
                                             rows_ahead());
  }

  /// u of the rules that correct, into its place among the values.
  LINATTN_INLINE void correct(const rows_type& x, Eigen::Index head, const T* S_h, const draft_rows<T>& y,
                              T* scratch) const {
    const Eigen::Index tokens = x.tokens;
    const Eigen::Index features = layout().state.features;
    const Eigen::Index stride = layout().state.feature_stride();
    const Eigen::Index row_stride = layout().state.row_stride();
    T* const reading = scratch + layout().reading();  // (T, C)
    T* const found = scratch + layout().outputs();    // (T, M)
    T coefficients[draft_tokens][pairs];
    if constexpr (rule.corrects == correction::rank_one) {
      pack_rows(x.gates.a.in({}, head), tokens, features, half_block, reading, stride);
    } else {
      std::copy_n(y.writing, tokens * stride, reading);
      std::fill(reading + tokens * stride, reading + round_up(tokens, half_block) * stride, T(0));
    }
    for (Eigen::Index i = 0; i < tokens; ++i) {
      T* const row = reading + i * stride;
      if constexpr (rule.corrects == correction::delta) decay_by(i, y, row);
      meet(i, y, row, coefficients[i]);
    }
    read_state(tokens, reading, S_h, found);
    for (Eigen::Index i = 0; i < tokens; ++i) {
      T* const recalled = found + i * row_stride;
      T* const value = y.values + writes * i * row_stride;
      add_tokens(i, y, coefficients[i], recalled);
      for (Eigen::Index m = 0; m < row_stride; m += P::size) {
        P u = P::load(recalled + m);
        if constexpr (rule.corrects == correction::delta)
          u = P(T(*x.gates.beta.at(i, head))) * (P::load(value + m) - u);
        u.store(value + m);
      }
    }
  }

  /// Outputs of the tokens, of one head that reads the state.
  LINATTN_INLINE void read(const rows_type& x, Eigen::Index head, Eigen::Index output, const T* S_h,
                           const draft_rows<T>& y, T* scratch) const {
    const Eigen::Index tokens = x.tokens;
    const Eigen::Index query_head = layout().heads.query_of(output);
    const Eigen::Index stride = layout().state.feature_stride();
    const Eigen::Index row_stride = layout().state.row_stride();
    T* const queries = scratch + layout().queries();            // (T, C)
    T* const outputs = scratch + layout().outputs();            // (T, M)
    T* const denominators = scratch + layout().denominators();  // (T)
    T coefficients[draft_tokens][pairs];
    pack_features<role::query>(constants.map, layout(), x.q.in({}, query_head), tokens, half_block,
                               constants.query_scale, tile_position{x.position, query_head}, scratch + layout().tile(),
                               queries);
    for (Eigen::Index i = 0; i < tokens; ++i) {
      T* const row = queries + i * stride;
      if constexpr (rule.reads_after_write) {
        meet(i + 1, y, row, coefficients[i]);
      } else {
        coefficients[i][i] = own_bonus(x.gates.bonus, i, head, row, y.writing + i * stride);
        meet(i, y, row, coefficients[i]);
      }
    }
    read_state(tokens, queries, S_h, outputs);
    for (Eigen::Index i = 0; i < tokens; ++i) add_tokens(i + 1, y, coefficients[i], outputs + i * row_stride);

    S* const to = x.out.at(0, output);
    if (rule.normalizes && constants.normalizes) {
      for (Eigen::Index i = 0; i < tokens; ++i) {
        denominators[i] = dot<T>(queries + i * stride, S_h + layout().state.z_offset(), stride);
        for (Eigen::Index p = 0; p <= i; ++p) denominators[i] += coefficients[i][p];
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

    for_each_panel<written_packets<B>, T>(
        row_stride, [&](auto packets, Eigen::Index m, Eigen::Index, Eigen::Index) LINATTN_INLINE_LAMBDA {
          for (Eigen::Index c = 0; c < state.features; c += feature_tile<T>) {
            const Eigen::Index rows = std::min(feature_tile<T>, state.features - c);
            for (Eigen::Index n = 0; n < blocks; ++n) {
              head_rows<T> x{nullptr, writing + n * B * stride + c, values + n * B * row_stride + m, nullptr};
              if constexpr (decays) x.decay = carry + n * stride + c;
              call_micro_block<B, packets, form, T>(x, S_h + c * row_stride + m, stride, row_stride, rows, false,
                                                    clears && !clears_rows && n + 1 == blocks);
            }
          }
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
