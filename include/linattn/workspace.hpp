// Scratch of the verbs: made once, reused for ever.
#pragma once

#include <linattn/detail/correction.hpp>
#include <linattn/detail/layout.hpp>

LINATTN_NAMESPACE_BEGIN

namespace detail {

/// Tokens packed at once: q and k of one head fill half of L1, but no fewer than least_tokens. A function of the shapes
/// alone; it moves no rounding, because the kernel's block is smaller.
template <class T>
constexpr Eigen::Index tokens_per_pass(Eigen::Index feature_stride) noexcept {
  constexpr Eigen::Index budget = Eigen::Index(16 * 1024 / sizeof(T));
  return 2 * feature_stride * most_tokens <= budget ? most_tokens : least_tokens;
}

/// Where the packed rows of `tokens` tokens of one state lie: features and values (T, C or M), outputs, a tile of x for
/// maps that are not elementwise, one number a token (denominators), and a state for the verbs that are called without
/// one. Rules add their decays (T, C), one number a token (beta, or the logarithm of its scale), a and b (T, C), and
/// those that correct what correction.hpp makes of a tile. Gradients add outputs (T, C) and (T, M), a tile of dx, and
/// of every head S^T (M, C) and what there is of z (C), log scales (C) and sums over decays (2, C). Where several heads
/// read a state, their queries, outputs and denominators (T, R, ...) have a place of their own.
template <class T, Eigen::Index HeadDim, Eigen::Index ValueDim, Eigen::Index Features, Eigen::Index Heads,
          bool Gradients, rule_traits Rule = additive::traits>
struct workspace_layout {
  using correction_type = correction_shape<Rule>;
  static constexpr bool corrects = Rule.corrects != correction::none;
  static constexpr bool decays = Rule.decay != decay_kind::none || Rule.log_scaled;

  state_layout<T, Features, ValueDim, Heads, Rule> state;
  extent<HeadDim> head_dim;  // D
  head_map<Heads> heads;

  constexpr Eigen::Index tokens() const noexcept { return tokens_per_pass<T>(state.feature_stride()); }
  constexpr Eigen::Index tile_stride() const noexcept { return round_up(head_dim, line<T>); }

  constexpr Eigen::Index queries() const noexcept { return 0; }
  constexpr Eigen::Index keys() const noexcept { return queries() + lines(state.feature_stride()); }
  constexpr Eigen::Index values() const noexcept { return keys() + lines(state.feature_stride()); }
  /// Behind the values without a gap: a draft takes the rows of both as one.
  constexpr Eigen::Index outputs() const noexcept {
    return values() + (corrects ? correction_type::writes : 1) * lines(state.row_stride());
  }
  constexpr Eigen::Index tile() const noexcept { return outputs() + lines(state.row_stride()); }
  constexpr Eigen::Index denominators() const noexcept { return tile() + lines(tile_stride()); }
  constexpr Eigen::Index decay() const noexcept { return denominators() + lines(1); }
  constexpr Eigen::Index beta() const noexcept { return decay() + (decays ? lines(state.feature_stride()) : 0); }
  constexpr Eigen::Index a() const noexcept {
    return beta() + (Rule.log_scaled ? Eigen::Index(heads.readers) : corrects ? 1 : 0) * lines(1);
  }
  constexpr Eigen::Index b() const noexcept { return a() + (rank_one ? lines(state.feature_stride()) : 0); }
  constexpr Eigen::Index reading() const noexcept { return b() + (rank_one ? lines(state.feature_stride()) : 0); }
  constexpr Eigen::Index writing() const noexcept {
    return reading() + (corrects ? reads() * lines(state.feature_stride()) : 0);
  }
  constexpr Eigen::Index carry() const noexcept {
    return writing() + (corrects ? correction_type::writes * lines(state.feature_stride()) : 0);
  }
  constexpr Eigen::Index coefficients() const noexcept {
    return carry() + (corrects ? lines(state.feature_stride()) : 0);
  }
  constexpr Eigen::Index found() const noexcept {
    return coefficients() + (corrects ? reads() * correction_type::writes * lines(correction_block) : 0);
  }
  constexpr Eigen::Index own_state() const noexcept {
    return found() + (corrects ? round_up(reads() * correction_block * state.row_stride(), line<T>) : 0);
  }
  constexpr Eigen::Index shared_queries() const noexcept { return own_state() + state.size(); }
  constexpr Eigen::Index shared_outputs() const noexcept {
    return shared_queries() + (heads.readers > 1 ? heads.readers * lines(state.feature_stride()) : 0);
  }
  constexpr Eigen::Index shared_denominators() const noexcept {
    return shared_outputs() + (heads.readers > 1 ? heads.readers * lines(state.row_stride()) : 0);
  }
  constexpr Eigen::Index end_of_forward() const noexcept {
    return shared_denominators() + (heads.readers > 1 ? heads.readers * lines(1) : 0);
  }

  constexpr Eigen::Index feature_outputs() const noexcept { return end_of_forward(); }
  constexpr Eigen::Index value_outputs() const noexcept { return feature_outputs() + lines(state.feature_stride()); }
  constexpr Eigen::Index gradient_tile() const noexcept { return value_outputs() + lines(state.row_stride()); }
  constexpr Eigen::Index sums() const noexcept { return gradient_tile() + lines(tile_stride()); }
  constexpr Eigen::Index log_scales() const noexcept {
    return sums() + (Rule.normalizes ? state.heads * sum_stride() : 0);
  }
  constexpr Eigen::Index decay_sums() const noexcept {
    return log_scales() + (Rule.log_scaled ? state.heads * sum_stride() : 0);
  }
  constexpr Eigen::Index own_transposed() const noexcept {
    return decay_sums() + (Rule.decay != decay_kind::none ? 2 : 0) * state.heads * sum_stride();
  }
  constexpr Eigen::Index gradient_correction() const noexcept { return own_transposed() + transposed().size(); }
  constexpr Eigen::Index end_of_gradients() const noexcept {
    return gradient_correction() + (corrects ? gradient_correction_size() : 0);
  }

  constexpr Eigen::Index size() const noexcept { return Gradients ? end_of_gradients() : end_of_forward(); }

  constexpr Eigen::Index sum_stride() const noexcept { return round_up(state.feature_stride(), line<T>); }
  /// Of S^T: features and values in each other's place.
  constexpr state_layout<T, ValueDim, Features, Heads> transposed() const noexcept {
    return {state.value_dim, state.features, state.heads};
  }

  /// What the gradient of a rule that corrects needs besides (gradient_correction.hpp): its states (C, M), two rows a
  /// token of features and twice two of values, and what belongs to a block.
  constexpr Eigen::Index gradient_correction_size() const noexcept {
    return state.size() + 2 * lines(state.feature_stride()) + 4 * lines(state.row_stride()) +
           4 * lines(correction_block) + (4 * correction_block + 1) * round_up(state.feature_stride(), line<T>);
  }

  static constexpr bool is_fixed = state_layout<T, Features, ValueDim, Heads>::is_fixed && HeadDim != Eigen::Dynamic;

 private:
  static constexpr bool rank_one = Rule.corrects == correction::rank_one;

  constexpr Eigen::Index reads() const noexcept { return correction_type::reads(heads.readers); }

  /// Elements of one block of `tokens` rows, in whole cache lines.
  constexpr Eigen::Index lines(Eigen::Index row) const noexcept { return round_up(tokens() * row, line<T>); }
};

}  // namespace detail

/// Scratch for one thread's calls, made by `linear_attention::make_workspace`; its contents mean nothing between calls.
///
/// Its size does not depend on N: one state, H (C M + C) elements, and for one head at a time 16 tokens (32 where
/// C <= 64 in float, 32 in double) of 2 C + 2 M + D elements, rows padded, and C + M more for each further head
/// that reads the same state. Where the map has a gradient, a second state and C + M + D elements a token more, for
/// `vjp` and `vjp_causal`, and of a rule that corrects a third state and 2 C + 4 M elements a token; these allocate
/// what they need besides where heads share. Inline, without heap, where D, C, M and H are compile-time constants. One
/// workspace serves one call at a time; a copy is as good as a new one.
template <class T, Eigen::Index HeadDim, Eigen::Index ValueDim, Eigen::Index Features, Eigen::Index Heads,
          bool Gradients, rule_traits Rule>
class workspace {
  using layout_type = detail::workspace_layout<T, HeadDim, ValueDim, Features, Heads, Gradients, Rule>;

 public:
  workspace() = default;

  /// Bytes of scratch held.
  Eigen::Index bytes() const noexcept { return Eigen::Index(m_slab.size() * sizeof(T)); }

 private:
  friend struct detail::engine_access;

  explicit workspace(const layout_type& layout) : m_layout(layout), m_slab(layout.size()) {}

  static constexpr Eigen::Index slab_size = layout_type::is_fixed ? layout_type().size() : Eigen::Dynamic;

  layout_type m_layout;
  detail::slab<T, slab_size> m_slab;
};

LINATTN_NAMESPACE_END
