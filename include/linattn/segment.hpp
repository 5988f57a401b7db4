// What a run of tokens does to any state, for the rules whose states cannot be merged.
//
//   auto part = attn.make_segment();                        // while another thread still works on what comes before
//   attn.absorb(part, k2, v2, {.log_decay = g2, .beta = b2}, ws);
//   s.merge(part);                                          // s, once it has seen k1, v1: as if it had absorbed k2, v2
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/layout.hpp>
#include <linattn/matrix_view.hpp>
#include <linattn/state.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <string>

LINATTN_NAMESPACE_BEGIN

namespace detail {

/// X, and A in blocks of columns that are as wide as X's rows with their padding, so that each block is a state of the
/// operator.
template <class T, Eigen::Index Features, Eigen::Index ValueDim, Eigen::Index Heads, rule_traits Rule>
struct segment_layout {
  state_layout<T, Features, ValueDim, Heads, Rule> state;

  /// 1 where there are no sizes, so that it divides.
  constexpr Eigen::Index block_width() const noexcept { return std::max<Eigen::Index>(state.row_stride(), 1); }
  constexpr Eigen::Index blocks() const noexcept { return (state.features + block_width() - 1) / block_width(); }
  constexpr Eigen::Index size() const noexcept { return (1 + blocks()) * state.size(); }
};

}  // namespace detail

/// The affine map S -> A S + X of every head that a run of tokens is under a rule that corrects, made by
/// `linear_attention::make_segment` and filled by `absorb`.
///
///     delta               A = product of (I - beta_i k_i k_i^T)                  the latest token on the left,
///     gated delta         A = product of (I - beta_i k_i k_i^T) Diag(a_i)        a_i = exp(log_decay_i)
///     generalized delta   A = product of (Diag(a_i) + b_i a_i^T)                 a, b its inputs
///
/// with A (C, C), and X (C, M) the state that the tokens alone leave. Both are the rule itself: X from S = 0, A from
/// S = I with every v = 0. Segments of one sequence can be made independently and merged in order, with each other in
/// any grouping:
///
///     (A_2, X_2) after (A_1, X_1)   =   (A_2 A_1,  A_2 X_1 + X_2)
///
/// A value, as a state is. Memory: H C (M + C) elements of T, C rounded up to whole registers; inline, without heap,
/// where C, M and H are compile-time constants. Threads: any number may read one; writing needs exclusive access.
///
/// Cost: absorbing costs 1 + C / M times what a state's does, a merge 2 C^2 M flops a head into a state and
/// 2 C^2 (C + M) into a segment: worth it where parts run in parallel, not on one thread.
///
/// Numerics: a merge adds a rounding error of a few ulp of |A| |S|. Where |k| = 1 and 0 <= beta <= 2 (and decays <= 1),
/// |A| <= 1: errors are not amplified, and those of a chain of segments are those of stepping. Otherwise A may grow,
/// and they with it. Entries of A that a decay has made smaller than 2^-100 are 0. In half precision a chain drifts:
/// there is none.
template <rule_traits Rule, class T, Eigen::Index Features, Eigen::Index ValueDim, Eigen::Index Heads>
class segment {
  using layout_type = detail::segment_layout<T, Features, ValueDim, Heads, Rule>;
  using const_block_view = Eigen::Map<const row_matrix<T>, Eigen::Unaligned, Eigen::OuterStride<>>;
  using block_view = Eigen::Map<row_matrix<T>, Eigen::Unaligned, Eigen::OuterStride<>>;

 public:
  using scalar = T;
  using const_kv_view = const_block_view;
  using const_log_decay_view = Eigen::Map<const row_vector<T>>;

  /// Empty, and refused by what takes one; fresh where all sizes are compile-time constants.
  segment() { reset(); }

  Eigen::Index heads() const noexcept { return m_layout.state.heads; }
  Eigen::Index features() const noexcept { return m_layout.state.features; }
  Eigen::Index value_dim() const noexcept { return m_layout.state.value_dim; }

  /// Tokens absorbed since the segment was made or reset.
  Eigen::Index tokens() const noexcept { return m_tokens; }
  /// Position of the first of them.
  Eigen::Index first_position() const noexcept { return m_first_position; }

  /// X of one head (C, M): what a new state would hold after these tokens. Throws for a head that is not there.
  const_kv_view kv(Eigen::Index head) const {
    return {head_data(head), features(), value_dim(), Eigen::OuterStride<>(m_layout.state.row_stride())};
  }

  /// A of one head (C, C), a copy: it is kept in pieces. Throws for a head that is not there. Allocates.
  row_matrix<T> transition(Eigen::Index head) const {
    row_matrix<T> a(features(), features());
    const T* const block = head_data(head);
    for (Eigen::Index n = 0; n < m_layout.blocks(); ++n) {
      const Eigen::Index from = n * m_layout.block_width();
      const Eigen::Index width = std::min(m_layout.block_width(), features() - from);
      a.middleCols(from, width) = const_block_view(block + (1 + n) * m_layout.state.size(), features(), width,
                                                   Eigen::OuterStride<>(m_layout.state.row_stride()));
    }
    return a;
  }

  /// The total log-decay of one head: (C) for a decay per feature, (1) for one per head. Throws for a head that is not
  /// there.
  const_log_decay_view log_decay(Eigen::Index head) const {
    static_assert(Rule.decay != decay_kind::none,
                  "linattn: this update rule does not decay, so its segment has no log_decay");
    return {head_data(head) + m_layout.state.log_decay_offset(), m_layout.state.decays()};
  }

  /// Back to no tokens: A = I, X = 0, first_position() kept; no allocation.
  void reset() noexcept {
    std::fill(m_slab.data(), m_slab.data() + m_slab.size(), T(0));
    if (m_slab.size() != 0) {
      for (Eigen::Index h = 0; h < heads(); ++h) {
        for (Eigen::Index c = 0; c < features(); ++c) {
          T* const block = m_slab.data() + (1 + c / m_layout.block_width()) * m_layout.state.size();
          block[h * m_layout.state.head_stride() + c * m_layout.state.row_stride() + c % m_layout.block_width()] = T(1);
        }
      }
    }
    m_tokens = 0;
  }

  /// Appends: what this segment does to a state, then what `later` does. `later` from the same operator, made with
  /// make_segment(first_position() + tokens()) for maps that know positions; may be *this, which appends a copy. Throws
  /// std::invalid_argument if the sizes differ. Allocates 2 C^2 + C M elements.
  void merge(const segment& later) {
    if (m_slab.size() == 0 || m_slab.size() != later.m_slab.size() || heads() != later.heads() ||
        features() != later.features() || value_dim() != later.value_dim()) {
      detail::refuse("segment::merge", "this segment is ", *this, ", the later one ", later);
    }
    const auto& state = m_layout.state;
    for (Eigen::Index h = 0; h < heads(); ++h) {
      const row_matrix<T> a = later.transition(h);
      T* const head = m_slab.data() + h * state.head_stride();
      for (Eigen::Index n = 0; n <= m_layout.blocks(); ++n) {
        block_view block(head + n * state.size(), features(), state.row_stride(),
                         Eigen::OuterStride<>(state.row_stride()));
        const row_matrix<T> product = a * block;
        if (n == 0) {
          block.leftCols(value_dim()) = product.leftCols(value_dim()) + later.kv(h);
        } else {
          block = product;
        }
      }
      for (Eigen::Index c = 0; c < state.decays(); ++c) {
        head[state.log_decay_offset() + c] += later.head_data(h)[state.log_decay_offset() + c];
      }
    }
    m_tokens += later.m_tokens;
  }

  /// "(H heads, C features, M values)" for messages, or that there is nothing.
  std::string sizes() const {
    if (m_slab.size() == 0) return "empty (default-made or moved from)";
    return detail::sentence(detail::state_sizes{heads(), features(), value_dim()});
  }

 private:
  friend struct detail::engine_access;

  segment(const layout_type& layout, Eigen::Index first_position)
      : m_layout(layout), m_slab(layout.size()), m_first_position(first_position) {
    reset();
  }

  void add_tokens(Eigen::Index n) noexcept { m_tokens += n; }
  const T* head_data(Eigen::Index head) const {
    if (m_slab.size() == 0) detail::refuse("segment", "this segment is empty (default-made or moved from)");
    if (head < 0 || head >= heads()) {
      detail::refuse("segment", "head ", head, " of a segment of ", heads(), " heads");
    }
    return m_slab.data() + head * m_layout.state.head_stride();
  }

  static constexpr bool is_fixed = decltype(layout_type::state)::is_fixed;
  static constexpr Eigen::Index slab_size = is_fixed ? layout_type().size() : Eigen::Dynamic;

  layout_type m_layout;
  detail::slab<T, slab_size> m_slab;
  Eigen::Index m_tokens = 0;
  Eigen::Index m_first_position = 0;
};

template <rule_traits Rule, class T, Eigen::Index Features, Eigen::Index ValueDim, Eigen::Index Heads>
void state<Rule, T, Features, ValueDim, Heads>::merge(const segment<Rule, T, Features, ValueDim, Heads>& later) {
  if (m_slab.size() == 0 || heads() != later.heads() || features() != later.features() ||
      value_dim() != later.value_dim()) {
    detail::refuse("state::merge", "this state is ", *this, ", the segment ", later);
  }
  for (Eigen::Index h = 0; h < heads(); ++h) {
    const row_matrix<T> product = later.transition(h) * kv(h);  // (C, M)
    kv(h) = (product + later.kv(h)).unaryExpr([](T x) { return std::abs(x) < detail::silence<T> ? T(0) : x; });
    if constexpr (Rule.decay != decay_kind::none) {
      Eigen::Map<row_vector<T>>(head_data(h) + m_layout.log_decay_offset(), m_layout.decays()) += later.log_decay(h);
    }
  }
  add_tokens(later.tokens());
}

LINATTN_NAMESPACE_END
