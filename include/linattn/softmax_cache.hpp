// Softmax attention that keeps the keys and values it has seen: the decoder's baseline, with linear_attention's verbs.
//
//   const linattn::cached_softmax<float> attn({.head_dim = 32, .heads = 8}, 784);   // at most 784 tokens a sequence
//   auto s = attn.make_state();
//   auto ws = attn.make_workspace();
//   attn.forward_causal(s, q, k, v, y, ws);                                          // prefill, leaves s ready
//   attn.step(s, q_t, k_t, v_t, y_t, ws);                                            // decode: one token, O(tokens)
//
// Letters: N tokens, D query/key coordinates, M value coordinates, H heads.
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/softmax_engine.hpp>
#include <linattn/matrix_view.hpp>
#include <linattn/options.hpp>

#include <Eigen/Core>
#include <span>
#include <string>
#include <type_traits>

LINATTN_NAMESPACE_BEGIN

template <class Scalar>
class cached_softmax;

/// The keys and values of one sequence, made by `cached_softmax::make_state`: what the state of linear attention
/// replaces, and unlike it growing with every token.
///
/// A value: a copy forks the sequence; assignment between equal capacities does not allocate. A default-made or
/// moved-from one is empty, and refused by every verb with a sentence. Memory: capacity (H D + H M) elements, allocated
/// at once, key heads and value heads counted for themselves; tokens are rounded up to whole panels of 4 registers and
/// values to whole registers. Threads: any number may read one; writing needs exclusive access.
template <class Scalar>
class softmax_cache {
 public:
  using scalar = Scalar;

  softmax_cache() = default;

  Eigen::Index heads() const noexcept { return m_layout.heads.states; }  ///< heads of values
  Eigen::Index head_dim() const noexcept { return m_layout.head_dim; }
  Eigen::Index value_dim() const noexcept { return m_layout.value_dim; }

  /// Keys absorbed since it was made or reset, and how many it has room for; 0 of an empty one.
  Eigen::Index tokens() const noexcept { return m_slab.empty() ? 0 : m_tokens; }
  Eigen::Index capacity() const noexcept { return m_slab.empty() ? 0 : m_capacity; }

  /// Back to one just made, without a pass over its memory: what is not yet written is never read.
  void reset() noexcept { m_tokens = 0; }

  /// "(H heads, D coordinates, M values)" for messages, or that there is nothing.
  std::string sizes() const {
    if (m_slab.empty()) return "empty (default-made or moved from)";
    return detail::sentence("(", heads(), " heads, ", head_dim(), " coordinates, ", value_dim(), " values)");
  }

 private:
  friend class cached_softmax<Scalar>;

  softmax_cache(const detail::softmax_layout<Scalar>& layout, Eigen::Index capacity)
      : m_layout(layout), m_slab(layout.cache_size(capacity)), m_capacity(capacity) {}

  detail::softmax_layout<Scalar> m_layout;
  detail::heap_slab<Scalar> m_slab;
  Eigen::Index m_tokens = 0;
  Eigen::Index m_capacity = 0;
};

/// Scratch of one thread, made by `cached_softmax::make_workspace`: queries, logits and unfinished outputs of 64 rows,
/// whatever the number of tokens. It means nothing between calls.
template <class Scalar>
class softmax_workspace {
 public:
  softmax_workspace() = default;

 private:
  friend class cached_softmax<Scalar>;

  explicit softmax_workspace(const detail::softmax_layout<Scalar>& layout) : m_slab(layout.scratch_size()) {}

  detail::heap_slab<Scalar> m_slab;
};

/// Softmax attention with a cache (eq. 2 of Katharopoulos et al., 2020; their "stateful softmax"). Per head, with
/// s_ij = (query_scale / sqrt(D)) q_i.k_j,
///
///     out_i = sum_j exp(s_ij) v_j / sum_j exp(s_ij)
///
/// j over all keys in `forward` and `read`, over j <= i in `forward_causal` and `step`. The sum over keys cannot be
/// kept instead of the keys: a step reads all of them again.
///
/// Scalar      float or double: inputs, outputs, cache and sums.
/// options     as linear_attention's (options.hpp): head_dim, value_dim, heads, shared heads. query_scale multiplies
/// the
///             usual 1/sqrt(D): sqrt(D) gives exp(q.k), 1 is the default.
///
/// It stands where a transformer takes an attention: the same verbs, argument order, matrices (one token a row, heads
/// side by side) and promises as linear_attention, the operator immutable and shared by threads, a state for each
/// sequence, a workspace for each thread. Calls that take a workspace do not allocate; the others allocate it, the
/// state where they have none, and what they return. Only `make_state` differs: its number is a capacity.
///
/// Laws, bitwise unless said otherwise, and tested:
///   1. step = forward_causal of one row; step of many states = step of each.
///   2. Any split of a causal sequence into calls gives the same.
///   3. forward = absorb, then read; row i of a causal output depends on rows j <= i alone.
///   4. A row's bits do not depend on the rows that are computed with it.
///   5. Equal to softmax_attention (reference.hpp), to rounding.
///
/// Cost. 2 (D + M) flops for each pair of a query and a key it sees, a head. A step streams the cache once,
/// tokens (D + M) elements a head, and of `forward` 64 rows share each pass over it. Query heads that share a key head
/// read it one after the other.
///
/// Numerics. Online softmax (Milakov and Gimelshein, 2018; the blocks are those of FlashAttention, Dao et al., 2022):
/// blocks of 256 tokens that begin at multiples of 256, the largest logit so far subtracted, so finite logits of any
/// size will do. exp is the library's, 2 ulp. An output whose row has seen no key is 0. NaN in row i of q stays in row
/// i; NaN in row j of k or v reaches the rows that see j, and a logit of +inf makes its row NaN. This needs a compiler
/// that honours NaN and infinity: not -ffast-math.
///
/// Errors: std::invalid_argument, with the function's name and both sizes, before anything is written.
template <class Scalar = float>
class cached_softmax {
  static_assert(std::is_same_v<Scalar, float> || std::is_same_v<Scalar, double>,
                "linattn: Scalar must be float or double");

 public:
  using scalar = Scalar;
  using accumulator_type = Scalar;
  using state_type = softmax_cache<Scalar>;
  using workspace_type = softmax_workspace<Scalar>;
  using input = matrix_view<const Scalar>;
  using output = matrix_view<Scalar>;
  using token = vector_view<const Scalar>;

  /// max_tokens is the capacity of the states that make_state() makes; 0: make_state has to be given one. Throws when
  /// head_dim is missing, a size is below 1, head counts do not divide as options.hpp says, query_scale is not finite,
  /// or for normalize = false and denominator policies, which have no meaning here, and where a cache of max_tokens
  /// would be beyond the address space.
  explicit cached_softmax(const options& o, Eigen::Index max_tokens = 0);

  Eigen::Index head_dim() const noexcept { return m_layout.head_dim; }             ///< D
  Eigen::Index value_dim() const noexcept { return m_layout.value_dim; }           ///< M
  Eigen::Index heads() const noexcept { return m_layout.heads.queries; }           ///< H, heads of q
  Eigen::Index key_heads() const noexcept { return m_layout.heads.keys; }          ///< heads of k
  Eigen::Index value_heads() const noexcept { return m_layout.heads.states; }      ///< heads of v
  Eigen::Index output_heads() const noexcept { return m_layout.heads.outputs(); }  ///< heads of out: max(q's, v's)
  Eigen::Index max_tokens() const noexcept { return m_max_tokens; }

  /// A cache that has seen nothing, with room for `capacity` tokens, by default max_tokens. One allocation of
  /// state_bytes(capacity) bytes, which are written: 2 H D 4 bytes a token in float, where M = D. Throws for a capacity
  /// below 1.
  state_type make_state(Eigen::Index capacity) const;
  state_type make_state() const;
  Eigen::Index state_bytes(Eigen::Index capacity) const noexcept {
    return m_layout.cache_size(capacity) * Eigen::Index(sizeof(Scalar));
  }
  Eigen::Index state_bytes() const noexcept { return state_bytes(m_max_tokens); }

  /// Scratch for one thread, of a size that does not depend on N. One allocation.
  workspace_type make_workspace() const { return workspace_type(m_layout); }

  /// Non-causal: out (Nq, H M) from q (Nq, H D), k (Nk, H D), v (Nk, H M): first absorb k, v into the state, then read
  /// q. Throws where the state has not room for Nk more tokens. 2 Nq tokens (D + M) flops a head.
  void forward(state_type& s, input q, input k, input v, output out, workspace_type& ws) const;
  row_matrix<Scalar> forward(state_type& s, input q, input k, input v) const;
  row_matrix<Scalar> forward(input q, input k, input v) const;

  /// Causal: out (N, H M) from q, k (N, H D), v (N, H M), row i seeing what the state holds and rows j <= i, which the
  /// state holds afterwards. Throws where it has not room for N more tokens. N^2 (D + M) flops a head from a fresh
  /// state.
  void forward_causal(state_type& s, input q, input k, input v, output out, workspace_type& ws) const;
  row_matrix<Scalar> forward_causal(state_type& s, input q, input k, input v) const;
  row_matrix<Scalar> forward_causal(input q, input k, input v) const;

  /// Rows of k (N, H D), v (N, H M) into the state, for encoder memories and prefixes. Throws where it has not room for
  /// N more tokens. No flops: a copy.
  void absorb(state_type& s, input k, input v, workspace_type& ws) const;
  void absorb(state_type& s, input k, input v) const;

  /// out (N, H M) = what the queries q (N, H D) see in the state: all of its tokens. 2 N tokens (D + M) flops a head.
  /// log_sums (N, H), optional: log sum_j exp(s_ij), -inf where there are no keys; with them outputs of several caches
  /// can be combined, and gradients need them.
  void read(const state_type& s, input q, output out, workspace_type& ws) const;
  void read(const state_type& s, input q, output out, workspace_type& ws, output log_sums) const;
  row_matrix<Scalar> read(const state_type& s, input q) const;

  /// One token of decoding: q_t, k_t (H D), v_t (H M), out_t (H M). Absorbs, then reads: 2 tokens (D + M) flops a head
  /// and one pass over the cache. Neither allocates nor throws. Sizes, and that the state has room, are
  /// LINATTN_ASSERTed: otherwise undefined behaviour in release builds.
  void step(state_type& s, token q_t, token k_t, token v_t, vector_view<Scalar> out_t,
            workspace_type& ws) const noexcept LINATTN_NONBLOCKING;

  /// One token of each of many sequences, as `step` of each: states (B), q, k (B, H D), v, out (B, H M), row b for
  /// states[b]. No state twice.
  void step(std::span<state_type> states, input q, input k, input v, output out,
            workspace_type& ws) const noexcept LINATTN_NONBLOCKING;

 private:
  detail::softmax_engine<Scalar> engine() const noexcept { return {m_layout, m_scale}; }
  bool fits(const state_type& s) const noexcept;
  void require_keys(const char* function, input k, input v, Eigen::Index rows) const;
  void require_queries(const char* function, input q, output out) const;
  void require_state(const char* function, const state_type& s, Eigen::Index more) const;
  void require_workspace(const char* function, const workspace_type& ws) const;
  void write(state_type& s, input k, input v) const noexcept;
  bool is_countable(Eigen::Index heads, Eigen::Index tokens) const noexcept;

  detail::softmax_layout<Scalar> m_layout;
  Scalar m_scale = 1;
  Eigen::Index m_max_tokens = 0;
};

LINATTN_NAMESPACE_END

#include <linattn/detail/softmax_cache_impl.hpp>
