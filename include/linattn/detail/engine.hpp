// The engine: one pass over the tokens serves every verb.
//
//   reads and writes   causal, and with one token a decode step
//   writes only        absorb: the first half of the non-causal form
//   reads only         read: its second half
//
// Rules without correction run the kernel token by token, with their decays; those that correct, in the blocks of
// correction.hpp.
#pragma once

#include <linattn/detail/engine_access.hpp>
#include <linattn/detail/kept_tokens.hpp>
#include <linattn/detail/packing.hpp>
#include <linattn/detail/shared_kernel.hpp>
#include <linattn/options.hpp>
#include <linattn/state.hpp>
#include <linattn/workspace.hpp>

#include <cmath>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Tokens of a micro-block: of a verb's own number, or for one that corrects of its own.
template <rule_traits Rule, kernel_form Form, Eigen::Index B>
inline constexpr Eigen::Index block_of = Rule.corrects != correction::none&& Form.writes&& B > 1 ? correction_block : B;

/// What a pass needs beside its arguments: the operator's constants.
template <class Map, class S, class Layout>
struct engine {
  static constexpr rule_traits rule = decltype(Layout::state)::rule;
  using T = accumulator_t<S>;
  using rows_type = sequence_rows<S, T, rule>;

  const Map& map;
  const Layout& layout;
  T query_scale;
  denominator_policy policy;
  bool normalizes;
  [[no_unique_address]] state_range<decltype(layout.state.heads)> states{layout.state.heads};  // of a pass
  bool rows_are_far = false;  // those of a batch, where one sequence of it might be taken to be near

  /// `state` is the slab. `layout.tokens()` tokens at a time, state by state; micro-blocks are B tokens, counted from
  /// row 0, and the last one is filled up with zeros: a row's bits do not depend on what follows it. Reading and
  /// writing with B = 1 is a decode step, of one token.
  template <Eigen::Index B, kernel_form Form>
  void pass(const rows_type& x, state_pointer<Form, T> state, T* scratch) const {
    if constexpr (head_map_type::can_share) {
      if (layout.heads.shares) return pass_shared<B, Form>(x, state, scratch);
    }
    pass_with<B, Form>(x, state, scratch, equal_heads());
  }

  /// Whether z decays, and whether S is cleared of silence by the rows where z is, rather than by its entries.
  static constexpr bool z_decays = rule.normalizes && rule.decay != decay_kind::none;
  static constexpr bool clears_rows = z_decays && !has_signed_features<Map>;

  /// Rows of less than this are taken to be in L2 already, where fetching them would cost and save nothing.
  static constexpr Eigen::Index near_bytes = Eigen::Index(1) << 20;
  /// A state of less, stepped again and again, stays in L1, and prefetches of it are lost.
  static constexpr Eigen::Index first_level_bytes = Eigen::Index(1) << 15;
  /// Of a pass of few tokens, before number `turn` of its heads, at S_h: the pages of the next one, and of the first.
  LINATTN_INLINE void prefetch_heads(const T* S_h, Eigen::Index turn, Eigen::Index turns) const {
    if (layout.state.bytes() <= first_level_bytes) return;
    if (turn == 0) prefetch_pages(S_h, layout.state.head_stride());
    if (turn + 1 < turns) prefetch_pages(S_h + layout.state.head_stride(), layout.state.head_stride());
  }
  bool is_far(Eigen::Index tokens) const {
    return tokens * (layout.heads.states + layout.heads.outputs()) * (layout.head_dim + layout.state.value_dim) *
               Eigen::Index(sizeof(S)) >
           near_bytes;
  }

 private:
  using head_map_type = decltype(Layout::heads);
  using gates_type = rule_inputs<token_rows<const S>, rule>;

  /// Apart from the pass of heads that share nothing, whose code it would otherwise weigh on.
  template <Eigen::Index B, kernel_form Form>
  LINATTN_NOINLINE void pass_shared(const rows_type& x, state_pointer<Form, T> state, T* scratch) const {
    if constexpr (Form.reads && Form.writes) {
      if (layout.heads.readers > 1) {
        constexpr Eigen::Index tokens_at_once = rule.corrects == correction::none ? 1 : B;
        return pass_with<tokens_at_once, Form>(x, state, scratch, layout.heads);
      }
    }
    pass_with<B, Form>(x, state, scratch, one_by_one<head_map_type>(layout.heads));
  }

  template <Eigen::Index B, kernel_form Form, class Heads>
  LINATTN_INLINE void pass_with(const rows_type& x, state_pointer<Form, T> state, T* scratch,
                                const Heads& heads) const {
    constexpr Eigen::Index block = block_of<rule, Form, B>;
    // Writing alone has no denominators, whatever the operator's choice. Shared heads compute them always: one pass
    // less for the compiler.
    constexpr bool has_denominators = rule.normalizes && Form.reads;
    if constexpr (!has_denominators || !std::is_same_v<Heads, equal_heads>) {
      pass_rows<block, Form, has_denominators>(x, state, scratch, heads);
    } else if (normalizes || x.denominators.data != nullptr) {
      pass_rows<block, Form, true>(x, state, scratch, heads);
    } else {
      pass_rows<block, Form, false>(x, state, scratch, heads);
    }
  }

  template <Eigen::Index B, kernel_form Form, bool Normalizes, class Heads>
  void pass_rows(const rows_type& x, state_pointer<Form, T> state, T* scratch, const Heads& heads) const {
    constexpr bool corrects = rule.corrects != correction::none && Form.writes;
    const auto& readers = heads.readers;
    constexpr bool shared = !std::is_same_v<std::decay_t<decltype(heads.readers)>, one_reader>;
    T* const queries = scratch + (shared ? layout.shared_queries() : layout.queries());  // (T, R, C)
    T* const keys = scratch + layout.keys();                                             // (T, C)
    T* const values = scratch + layout.values();  // (T, M), two rows a token where two are written
    T* const outputs = scratch + (shared ? layout.shared_outputs() : layout.outputs());                 // (T, R, M)
    T* const denominators = scratch + (shared ? layout.shared_denominators() : layout.denominators());  // (T, R)
    T* const tile = scratch + layout.tile();                                                            // (T, D)
    constexpr bool is_step = B == 1 && Form.reads && Form.writes && !shared;
    const Eigen::Index tokens = is_step ? 1 : x.tokens;  // so that the compiler drops the loops over rows
    // A turn is a state, or where the pass only reads, an output head: those of a state one after the other.
    constexpr bool by_state = Form.writes || std::is_same_v<Heads, equal_heads>;
    const Eigen::Index turns_of_state = by_state ? 1 : Eigen::Index(layout.heads.readers);
    const Eigen::Index turns = states.size() * turns_of_state;
    const auto head_of = [&](Eigen::Index turn) LINATTN_INLINE_LAMBDA {
      if constexpr (by_state) return states.first() + turn;
      return heads.output_of(states.first() + turn / turns_of_state, turn % turns_of_state);
    };
    const Eigen::Index most = layout.tokens();
    const bool prefetches = x.kept == nullptr && (rows_are_far || is_far(tokens));

    kept_tokens<(B > 1 || shared)> kept(x.kept);

    for (Eigen::Index first = 0; first < tokens; first += most) {
      const Eigen::Index rows = std::min(most, tokens - first);
      const token_tile t = kept.next(first, rows);
      for (Eigen::Index turn = 0; turn < turns; ++turn) {
        const Eigen::Index head = head_of(turn);
        const Eigen::Index h = Form.writes ? head : heads.state_of(head);
        const auto output_of = [&](Eigen::Index reader)
                                   LINATTN_INLINE_LAMBDA { return shared ? heads.output_of(h, reader) : head; };
        if constexpr (Form.reads) {
          for (Eigen::Index r = 0; r < readers; ++r) {
            const Eigen::Index from = heads.query_of(output_of(r));
            pack_features<role::query>(map, layout, x.q.in(t, from), rows, B, query_scale,
                                       tile_position{x.position + first, from}, tile,
                                       queries + r * layout.state.feature_stride(), readers);
          }
        }
        if constexpr (Form.writes) {
          const Eigen::Index from = heads.key_of(h);
          pack_features<role::key>(map, layout, x.k.in(t, from), rows, B, T(1), tile_position{x.position + first, from},
                                   tile, keys);
          pack_values(layout, x.v.in(t, h), rows, B, values);
        }
        rows_ahead next;
        if ((shared ? heads.are_neighbours() : B > 1) && prefetches) {
          next = turn + 1 < turns
                     ? ahead<Form>(x, first, rows, head_of(turn + 1), heads)
                     : ahead<Form>(x, first + rows, std::min(most, tokens - first - rows), head_of(0), heads);
        }
        const auto S_h = state + h * layout.state.head_stride();
        if (is_step) prefetch_heads(S_h, turn, turns);
        const bool clears = B > 1 || tokens > 1 || !rule.is_ordered() || (x.position + first) % steps_to_clear == 0;
        const Eigen::Index blocks = round_up(rows, B) / B;
        if constexpr (corrects) {
          attend_corrected<B, Form>(x.gates, t, h, queries, outputs, scratch, S_h, clears, next, readers);
        } else {
          head_rows<T> packed{queries, keys, values, outputs};
          // A running maximum alone takes nothing back; and a row of S may go with its z.
          packed.clears = clears && rule.decay != decay_kind::none && !clears_rows;
          if constexpr (Form.writes && rule.decay != decay_kind::none && !rule.log_scaled) {
            T* const decay = scratch + layout.decay();
            pack_decays<rule>(layout, x.gates, t, h, B, decay, S_h + layout.state.log_decay_offset());
            packed.decay = decay;
          }
          if constexpr (rule.log_scaled) {
            packed.decay = scale_features<Form>(x.gates, t, h, B, queries, scratch, S_h, readers);
          }
          constexpr kernel_form form = with_rule(Form);
          if constexpr (form.reads_first) {
            packed.bonus = pack_bonus(x.gates.bonus, t, h, B, queries, keys, readers, denominators);
          }
          if constexpr (shared) {
            attend_shared<form, Normalizes, T>(at_run_time<rule>(layout.state), rows, readers, packed, S_h,
                                               denominators, next);
          } else {
            attend_head<B, form, Normalizes, T>(layout.state, blocks, packed, S_h, denominators, next);
          }
          if constexpr (Form.writes && z_decays) {
            if (clears) clear_silent_features<clears_rows>(layout.state, S_h);
          }
        }
        if constexpr (Form.reads) {
          const T* const scales = scratch + layout.beta();  // (T, R), logarithms, where the rule is log-scaled
          if (Normalizes && x.denominators.data != nullptr) {
            for (Eigen::Index r = 0; r < rows; ++r) {
              *x.denominators.at(t.at(r), head) =
                  rule.log_scaled ? denominators[r] * std::exp(scales[r]) : denominators[r];
            }
          }
          for (Eigen::Index i = 0; z_decays && !rule.log_scaled && Normalizes && i < rows * readers; ++i) {
            denominators[i] = without_silence(denominators[i]);
          }
          for (Eigen::Index i = 0; rule.log_scaled && Normalizes && normalizes && i < rows * readers; ++i) {
            denominators[i] = policy.at_scale(scales[i])(denominators[i]);
          }
          for (Eigen::Index r = 0; r < readers; ++r) {
            const T* const from = outputs + r * layout.state.row_stride();
            const tile_rows<S> to = x.out.in(t, output_of(r));
            constexpr denominator_policy as_they_are;
            if (rule.log_scaled && Normalizes && normalizes) {
              unpack_outputs<true>(layout, from, denominators + r, as_they_are, to, rows, readers);
            } else if constexpr (rule.log_scaled) {
              unpack_outputs<true, power_of_e>(layout, from, scales + r, as_they_are, to, rows, readers);
            } else if (Normalizes && normalizes) {
              unpack_outputs<true>(layout, from, denominators + r, policy, to, rows, readers);
            } else {
              unpack_outputs<false>(layout, from, denominators + r, policy, to, rows, readers);
            }
          }
        }
      }
    }
  }

  /// A verb's form with what the rule adds to it.
  static constexpr kernel_form with_rule(kernel_form form) {
    if (!form.writes) return form;
    const bool per_feature = rule.decay == decay_kind::per_feature || rule.log_scaled;
    form.decay = per_feature                          ? decay_axis::row
                 : rule.decay == decay_kind::per_head ? decay_axis::token
                                                      : decay_axis::none;
    form.reads_first = form.reads && !rule.reads_after_write;
    return form;
  }

  /// Packed log features to features by the state's running maxima; the decays that these add, and the logarithm of
  /// each query's scale.
  template <kernel_form Form>
  LINATTN_INLINE const T* scale_features(const gates_type& gates, const token_tile& t, Eigen::Index head,
                                         Eigen::Index block, T* queries, T* scratch, state_pointer<Form, T> S_h,
                                         Eigen::Index readers) const {
    using P = packet<T>;
    const Eigen::Index rows = t.rows;
    const Eigen::Index features = layout.state.features;
    const Eigen::Index stride = layout.state.feature_stride();
    T* const decays = scratch + layout.decay();
    T* const scales = scratch + layout.beta();
    const auto mu = S_h + layout.state.log_scale_offset();
    if constexpr (Form.writes) {
      if constexpr (rule.decay != decay_kind::none) {
        T* const log_decays = rule.decay == decay_kind::per_head ? scales : decays;
        pack_decays<rule>(layout, gates, t, head, block, log_decays, S_h + layout.state.log_decay_offset());
      }
      scale_keys<rule, Form.reads>(rows, features, stride, scratch + layout.keys(), queries, scales, decays, mu,
                                   readers);
      std::fill(decays + rows * stride, decays + round_up(rows, block) * stride, T(1));
    } else {
      for (Eigen::Index r = 0; r < rows * readers; ++r) {
        for (Eigen::Index c = 0; c < features; c += P::size) {
          (P::load(queries + r * stride + c) + P::load(mu + c)).store(queries + r * stride + c);
        }
      }
    }
    if constexpr (Form.reads) scale_queries(rows * readers, features, stride, queries, scales);
    return decays;
  }

  /// bonus (rows, R) = sum_c q[c] bonus[c] k[c], of the packed features.
  LINATTN_INLINE const T* pack_bonus(const token_rows<const S>& bonus, const token_tile& t, Eigen::Index head,
                                     Eigen::Index block, const T* queries, const T* keys, Eigen::Index readers,
                                     T* to) const {
    using P = packet<T>;
    const Eigen::Index rows = t.rows;
    const Eigen::Index features = layout.state.features;
    for (Eigen::Index n = 0; n < rows * readers; ++n) {
      const Eigen::Index r = n / readers;
      const S* const weight = bonus.at(t.at(r), head);
      const T* const q = queries + n * layout.state.feature_stride();
      const T* const k = keys + r * layout.state.feature_stride();
      P total = P::zero();
      for_each_register<T>(features, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        total = fma(P::load(q + c) * load_up_to(weight + c, left), P::load(k + c), total);
      });
      to[n] = sum(total);
    }
    std::fill(to + rows * readers, to + round_up(rows, block) * readers, T(0));
    return to;
  }

  /// The packed rows of one head, features and values, through correction.hpp.
  template <Eigen::Index B, kernel_form Form, class Readers>
  LINATTN_INLINE void attend_corrected(const gates_type& gates, const token_tile& t, Eigen::Index head,
                                       const T* queries, T* outputs, T* scratch, T* S_h, bool clears,
                                       const rows_ahead& next, const Readers& readers) const {
    const Eigen::Index rows = t.rows;
    const Eigen::Index stride = layout.state.feature_stride();
    const Eigen::Index row_stride = layout.state.row_stride();
    const Eigen::Index blocks = round_up(rows, B) / B;
    T* const values = scratch + layout.values();
    correction_inputs<T> x{queries, scratch + layout.keys()};
    if constexpr (rule.decay != decay_kind::none) {
      T* const decay = scratch + layout.decay();
      pack_decays<rule>(layout, gates, t, head, B, decay, S_h + layout.state.log_decay_offset());
      x.decay = decay;
    }
    if constexpr (rule.corrects == correction::delta) {
      T* const beta = scratch + layout.beta();
      pack_column(gates.beta, t, head, B, beta);
      x.beta = beta;
    } else {
      const Eigen::Index features = layout.state.features;
      const auto pack = [&](const token_rows<const S>& from, T* to) {
        pack_rows(from.in(t, head), rows, features, B, to, stride);
        return to;
      };
      x.a = pack(gates.a, scratch + layout.a());
      x.b = pack(gates.b, scratch + layout.b());
      // Apart, a block's rows of v behind the place of its rows of u; from the last block on, as they move away.
      for (Eigen::Index n = blocks; n-- > 0;) {
        std::copy_backward(values + n * B * row_stride, values + (n + 1) * B * row_stride,
                           values + (2 * n + 2) * B * row_stride);
      }
    }
    const correction_rows<T> y{scratch + layout.reading(), scratch + layout.writing(), scratch + layout.carry(),
                               scratch + layout.coefficients()};
    detail::attend_corrected<B, rule, Form.reads>(layout.state, blocks, x, y, values, scratch + layout.found(), outputs,
                                                  S_h, clears, next, readers);
  }

  /// The rows of one state's or one output's turn that packing will touch. Those of several readers lie side by side.
  template <kernel_form Form, class Heads>
  LINATTN_INLINE rows_ahead ahead(const rows_type& x, Eigen::Index first, Eigen::Index rows, Eigen::Index turn,
                                  const Heads& heads) const {
    rows_ahead next(rows);
    if (rows <= 0) return next;
    const auto add = [&](const auto& from, Eigen::Index head, Eigen::Index dim, Eigen::Index side_by_side)
                         LINATTN_INLINE_LAMBDA {
                           const bool packed = from.head_stride == dim;
                           next.add(from.at(first, head * side_by_side), from.row_stride,
                                    packed ? dim * side_by_side : dim, head == 0 || !packed);
                         };
    const Eigen::Index readers = heads.readers;
    if constexpr (Form.reads) add(x.q, readers > 1 ? turn : heads.query_of(turn), layout.head_dim, readers);
    if constexpr (Form.writes) {
      add(x.k, heads.key_of(turn), layout.head_dim, 1);
      add(x.v, turn, layout.state.value_dim, 1);
      if constexpr (decltype(x.gates)::has_log_decay && rule.decay == decay_kind::per_feature) {
        add(x.gates.log_decay, turn, layout.state.features, 1);
      }
    }
    if constexpr (Form.reads) add(x.out, turn, layout.state.value_dim, readers);
    return next;
  }
};

}  // namespace detail
LINATTN_NAMESPACE_END
