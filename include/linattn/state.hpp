// The recurrent state of one sequence: S and z of every head.
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/layout.hpp>
#include <linattn/detail/state_storage.hpp>
#include <linattn/matrix_view.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>

LINATTN_NAMESPACE_BEGIN

template <rule_traits Rule, class T, Eigen::Index Features, Eigen::Index ValueDim, Eigen::Index Heads>
class segment;

/// S (C, M) and z (C) for every head of ONE sequence, made by `linear_attention::make_state`.
///
///   S = sum_j phi(k_j) v_j^T,   z = sum_j phi(k_j)                                          (eqs. 10, 11, 18, 19)
///
/// A value: a copy forks the sequence (beam search, prefix caches, snapshots to roll back to), assignment between equal
/// sizes does not allocate. A moved-from or default-made state is empty, and refused by every verb with a sentence;
/// with compile-time sizes there is no empty state: default-made is fresh, and moving copies. Memory: H (C M + C)
/// elements of T plus padding, whatever the number of tokens. Threads: any number may read one state; writing needs
/// exclusive access.
///
/// All of it is one block of state_bytes() bytes, 64-byte aligned: [head][C][M] with rows padded to whole packets, and
/// a trailer with the token count and the first position. A copy of the bytes is a copy of the state, also in memory
/// that is shared between processes of one build; files and other builds take `save` (state_io.hpp).
///   compile-time C, M, H   the object itself: sizeof(state), trivially copyable
///   make_state(), copies   on the heap
///   attached               memory of the caller's, which must outlive the state (make_state(memory), attach_state).
///                          A copy of such a state is on the heap. Assigning to it, from whatever state, writes into
///                          its memory, and throws std::invalid_argument for one of other sizes. Constructed by a
///                          move, or moved into a state that is not attached, it stays attached. Two states attached
///                          to one memory are one state.
///
/// Entries are sums that never forget under the additive rule: a float entry stops growing at 2^24 additions of one.
template <rule_traits Rule, class T, Eigen::Index Features, Eigen::Index ValueDim, Eigen::Index Heads>
class state : detail::state_storage<T, detail::state_layout<T, Features, ValueDim, Heads, Rule>> {
  using layout_type = detail::state_layout<T, Features, ValueDim, Heads, Rule>;
  using storage = detail::state_storage<T, layout_type>;
  using storage::m_layout;
  using storage::m_slab;

 public:
  using scalar = T;
  using kv_view = Eigen::Map<row_matrix<T>, Eigen::Unaligned, Eigen::OuterStride<>>;
  using const_kv_view = Eigen::Map<const row_matrix<T>, Eigen::Unaligned, Eigen::OuterStride<>>;
  using k_sum_view = Eigen::Map<row_vector<T>>;
  using const_k_sum_view = Eigen::Map<const row_vector<T>>;

  state() {
    if constexpr (layout_type::is_fixed) m_layout.begin(m_slab.data(), 0);
  }

  Eigen::Index heads() const noexcept { return m_layout.heads; }
  Eigen::Index features() const noexcept { return m_layout.features; }
  Eigen::Index value_dim() const noexcept { return m_layout.value_dim; }

  /// Keys absorbed since the state was made or reset.
  Eigen::Index tokens() const noexcept { return trailer_number(detail::trailer::tokens); }
  /// Position of the first key; key number n stands at first_position() + n.
  Eigen::Index first_position() const noexcept { return trailer_number(detail::trailer::first_position); }

  /// S of one head (C, M): an unpadded view, writable on a mutable state. Throws for a head that is not there.
  kv_view kv(Eigen::Index head) {
    return {head_data(head), features(), value_dim(), Eigen::OuterStride<>(m_layout.row_stride())};
  }
  const_kv_view kv(Eigen::Index head) const {
    return {head_data(head), features(), value_dim(), Eigen::OuterStride<>(m_layout.row_stride())};
  }

  /// z of one head (C): the sum of its key features. Throws for a head that is not there.
  k_sum_view k_sum(Eigen::Index head) {
    static_assert(Rule.normalizes, "linattn: this update rule keeps no sum of keys z, so its state has no k_sum");
    return {head_data(head) + m_layout.z_offset(), features()};
  }
  const_k_sum_view k_sum(Eigen::Index head) const {
    static_assert(Rule.normalizes, "linattn: this update rule keeps no sum of keys z, so its state has no k_sum");
    return {head_data(head) + m_layout.z_offset(), features()};
  }

  /// The total log-decay of one head since the state was made or reset: (C) for a decay per feature, (1) for one per
  /// head. Throws for a head that is not there.
  const_k_sum_view log_decay(Eigen::Index head) const {
    static_assert(Rule.decay != decay_kind::none,
                  "linattn: this update rule does not decay, so its state has no log_decay");
    return {head_data(head) + m_layout.log_decay_offset(), m_layout.decays()};
  }

  /// log of the scale of each row of one head (C), for maps that write log phi: S = Diag(exp(log_scale)) kv, and z
  /// likewise. It is the largest log feature of each seen so far (decayed, where the rule decays),
  /// numeric_limits<T>::lowest() before the first. Throws for a head that is not there.
  k_sum_view log_scale(Eigen::Index head) {
    static_assert(Rule.log_scaled, "linattn: the map of this state's operator does not write log phi: no log_scale");
    return {head_data(head) + m_layout.log_scale_offset(), features()};
  }
  const_k_sum_view log_scale(Eigen::Index head) const {
    static_assert(Rule.log_scaled, "linattn: the map of this state's operator does not write log phi: no log_scale");
    return {head_data(head) + m_layout.log_scale_offset(), features()};
  }

  /// Back to a state just made, bit for bit, first_position() kept; no allocation. An empty one stays empty.
  void reset() noexcept {
    if (m_slab.size() != 0) m_layout.begin(m_slab.data(), first_position());
  }

  /// Appends: what this state has absorbed, then what `later` has.
  ///
  ///     S = exp(G_later) S + S_later,   z = exp(G_later) z + z_later,   G = G + G_later
  ///
  /// with G the total log-decay (0 without decay), and scales brought to the larger one where the map writes log phi;
  /// equal to absorbing both parts in turn, to rounding, silent entries cleared as there; both states from one
  /// operator, and for maps that know positions `later` made with make_state(first_position() + tokens()). May be
  /// *this, which appends a copy. Rules that correct have no merge of states: what a later part takes back depends on
  /// what came before it. Throws std::invalid_argument if the sizes differ. H (C M + C) flops.
  void merge(const state& later) {
    static_assert(
        Rule.corrects == correction::none,
        "linattn: states of a delta rule cannot be merged, because what the later tokens take back depends on "
        "the earlier state; absorb the later tokens into this state, or into a make_segment() and merge that");
    if (m_slab.size() == 0 || m_slab.size() != later.m_slab.size() || heads() != later.heads() ||
        features() != later.features() || value_dim() != later.value_dim()) {
      detail::refuse("state::merge", "this state is ", *this, ", the later one ", later);
    }
    for (Eigen::Index h = 0; h < heads(); ++h) {
      append_head(m_slab.data() + h * m_layout.head_stride(), later.m_slab.data() + h * m_layout.head_stride());
    }
    add_tokens(later.tokens());
  }

  /// Appends what a segment holds, for the rules that correct (segment.hpp): S = A S + X; to rounding, absorbing its
  /// tokens. For maps that know positions it was made with make_segment(first_position() + tokens()). Throws
  /// std::invalid_argument if the sizes differ. 2 H C^2 M flops; allocates C^2 + C M elements.
  void merge(const segment<Rule, T, Features, ValueDim, Heads>& later);

  /// "(H heads, C features, M values)" for messages, or that there is nothing.
  std::string sizes() const {
    if (m_slab.size() == 0) return "empty (default-made or moved from)";
    return detail::sentence(detail::state_sizes{heads(), features(), value_dim()});
  }

 private:
  friend struct detail::engine_access;

  state(const layout_type& layout, Eigen::Index first_position) : storage(layout) {
    m_layout.begin(m_slab.data(), first_position);
  }
  /// Attached to memory that holds a state.
  state(const layout_type& layout, T* memory) noexcept : storage(layout, memory) {}

  Eigen::Index trailer_number(detail::trailer which) const noexcept {
    return m_slab.size() == 0 ? 0 : Eigen::Index(m_layout.number(m_slab.data(), which));
  }
  void add_tokens(Eigen::Index n) noexcept { m_layout.add_tokens(m_slab.data(), n); }

  const T* head_data(Eigen::Index head) const {
    if (m_slab.size() == 0) detail::refuse("state", "this state is empty (default-made or moved from)");
    if (head < 0 || head >= heads()) {
      detail::refuse("state", "head ", head, " of a state of ", heads(), " heads");
    }
    return m_slab.data() + head * m_layout.head_stride();
  }
  void append_head(T* head, const T* later) {
    const Eigen::Index decays = m_layout.log_decay_offset(), scales = m_layout.log_scale_offset();
    constexpr bool decays_away = Rule.decay != decay_kind::none || Rule.log_scaled;
    for (Eigen::Index c = 0; c < features(); ++c) {
      T log_factor(0), addend(1);
      if constexpr (Rule.decay != decay_kind::none) log_factor = later[decays + (m_layout.decays() == 1 ? 0 : c)];
      if constexpr (Rule.log_scaled) {
        const T before = std::max(head[scales + c] + log_factor, std::numeric_limits<T>::lowest());
        const T scale = std::max(before, later[scales + c]);
        log_factor = before - scale;
        addend = std::exp(later[scales + c] - scale);
        head[scales + c] = scale;
      }
      const T factor = log_factor == T(0) ? T(1) : std::exp(log_factor);
      const auto append = [&](Eigen::Index i) {
        head[i] = factor * head[i] + addend * later[i];
        if (decays_away && std::abs(head[i]) < detail::silence<T>) head[i] = T(0);
      };
      for (Eigen::Index m = 0; m < value_dim(); ++m) append(c * m_layout.row_stride() + m);
      if constexpr (Rule.normalizes) append(m_layout.z_offset() + c);
    }
    for (Eigen::Index c = 0; c < m_layout.decays(); ++c) head[decays + c] += later[decays + c];
  }

  T* head_data(Eigen::Index head) { return const_cast<T*>(std::as_const(*this).head_data(head)); }
};

LINATTN_NAMESPACE_END
