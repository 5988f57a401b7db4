// What the verbs of batch.hpp are given beside rows: states, and by name what else there is to say.
#pragma once

#include <linattn/batch_view.hpp>
#include <linattn/linear_attention.hpp>
#include <linattn/mask.hpp>
#include <linattn/state_pool.hpp>

#include <span>
#include <vector>

LINATTN_NAMESPACE_BEGIN

/// The states of a batch, one a sequence: a span of them, a pool (state_pool.hpp), or none, `{}`: then each sequence
/// starts from nothing at position 0, and what it leaves is not kept. Each sequence has a state of its own: two in one
/// memory would be written by two tasks at once.
template <class Attention>
class batch_states {
 public:
  using state_type = typename Attention::state_type;

  constexpr batch_states() noexcept = default;
  constexpr batch_states(std::span<state_type> states) noexcept  // NOLINT(google-explicit-constructor)
      : m_kind(kind::states), m_states(states) {}
  batch_states(std::vector<state_type>& states) noexcept  // NOLINT(google-explicit-constructor)
      : batch_states(std::span<state_type>(states)) {}
  constexpr batch_states(const state_pool& pool) noexcept  // NOLINT(google-explicit-constructor)
      : m_kind(kind::pool), m_pool(pool) {}

 private:
  friend struct detail::engine_access;
  enum class kind { none, states, pool };

  kind m_kind = kind::none;
  std::span<state_type> m_states;
  state_pool m_pool;
};

/// What a call on a batch may be told, by name.
template <class Attention>
struct batch_options {
  /// Which tokens count; the others are as good as deleted. Of k, v and the rule's inputs, and in the causal forms of q
  /// and out as well. For views whose sequences have one number of tokens: packed ones need no padding.
  token_mask mask = {};
  /// The same of q and out, where queries are not the keys' tokens: forward, read and vjp.
  token_mask query_mask = {};
  /// forward_causal only: states to cut each sequence's tokens into G segments with, G + 1 for each of B sequences, of
  /// make_states(attn, B (G + 1)) and none of the batch's own; G is a matter of the caller's, so that results do not
  /// depend on threads. All segments but the last are absorbed at once, their states added up in turn, and all of them
  /// run at once from there: 6 instead of 4 flops for each entry of the state, worth it for few heads and long
  /// sequences. For rules whose states merge.
  std::span<typename Attention::state_type> segments = {};
};

/// What the verbs of batch.hpp read rows from.
template <class Attention>
using batch_input = batch_view<const typename Attention::scalar>;
/// What they write them to.
template <class Attention>
using batch_output = batch_view<typename Attention::scalar>;
/// What the rule takes beside q, k and v.
template <class Attention>
using batch_inputs = typename Attention::update_rule_type::template inputs<batch_input<Attention>>;
/// Where gradients with respect to that go.
template <class Attention>
using batch_input_gradients = typename Attention::update_rule_type::template inputs<batch_output<Attention>>;
/// As many as tasks may run at once.
template <class Attention>
using workspaces = std::span<typename Attention::workspace_type>;

LINATTN_NAMESPACE_END
