// linear_attention: softmax attention's O(N^2) replaced by a state of constant size. Start here.
//
//   const linattn::linear_attention<linattn::elu_plus_one> attn({.head_dim = 64, .heads = 8});
//   linattn::row_matrix<float> y = attn.forward_causal(q, k, v);   // first contact: q, k, v (N, H D) give (N, H M)
//
//   auto ws = attn.make_workspace();                               // production: nothing allocates from here on
//   auto s = attn.make_state();
//   attn.forward_causal(s, q, k, v, y, ws);                        // prefill, leaves s ready
//   attn.step(s, q_t, k_t, v_t, y_t, ws);                          // decode: one token, constant time and memory
//
//   const auto [dq, dk, dv] = attn.vjp_causal(q, k, v, dout);      // gradients, from the inputs alone
//
// Letters, the paper's: N tokens, D query/key coordinates, M value coordinates, C features, H heads.
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/gradient.hpp>
#include <linattn/detail/gradient_correction.hpp>
#include <linattn/detail/shared_gradients.hpp>
#include <linattn/draft.hpp>
#include <linattn/feature_map.hpp>
#include <linattn/matrix_view.hpp>
#include <linattn/options.hpp>
#include <linattn/segment.hpp>
#include <linattn/state.hpp>
#include <linattn/update_rules/additive.hpp>
#include <linattn/update_rules/decay.hpp>
#include <linattn/update_rules/delta.hpp>
#include <linattn/update_rules/gated.hpp>
#include <linattn/update_rules/normalized.hpp>
#include <linattn/workspace.hpp>

#include <concepts>
#include <cstddef>
#include <span>

LINATTN_NAMESPACE_BEGIN

/// What the gradient verbs that allocate return.
template <class Scalar>
struct gradients {
  row_matrix<Scalar> dq;  ///< (Nq, H D)
  row_matrix<Scalar> dk;  ///< (Nk, H D)
  row_matrix<Scalar> dv;  ///< (Nk, H M)
};

/// The same with those of the rule's inputs, each of the shape of its input: d.inputs.log_decay, d.inputs.beta.
template <class Scalar, class UpdateRule>
struct rule_gradients : gradients<Scalar> {
  typename UpdateRule::template inputs<row_matrix<Scalar>> inputs;

  /// Where the verbs write them.
  auto views() {
    typename UpdateRule::template inputs<matrix_view<Scalar>> v;
    if constexpr (requires { v.log_decay; }) v.log_decay = inputs.log_decay;
    if constexpr (requires { v.beta; }) v.beta = inputs.beta;
    return v;
  }
};

/// Linear attention (Katharopoulos et al., 2020): attention whose similarity is an inner product of features, so that
/// the sums over keys can be kept instead of the keys. Per head, with phi the feature map and s = query_scale,
///
///     out_i = phi(s q_i)^T S / phi(s q_i)^T z      S = sum_j phi(k_j) v_j^T (C, M)      z = sum_j phi(k_j) (C)
///
/// j over all keys in `forward` (eq. 5), over j <= i in `forward_causal` (eq. 9) and `step` (eqs. 16-20). Without
/// `normalize` the division is left out.
///
/// FeatureMap  the policy phi (feature_map.hpp).   UpdateRule  how a token enters the state (update_rules/).
/// Scalar      float, double, Eigen::half or Eigen::bfloat16: what q, k, v, gates and outputs hold. With the latter
/// two,
///             features, state and all sums are float: they are widened where rows are packed, each output is rounded
///             once, to nearest even, and what lies between is what a float operator would compute, bit for bit. Beyond
///             65,504 a half output is infinite. The gradient verbs take float and double only.
/// HeadDim, ValueDim, Heads   compile-time D, M, H, or Eigen::Dynamic. With all of them known, and a map whose
///             dimension is constexpr, state and workspace live inline and nothing ever touches the heap.
///
/// The operator is immutable: one per layer, shared by threads and sequences. A `state` belongs to one sequence, a
/// `workspace` to one thread. Matrices are packed, one token per row, head h in columns h D ... (h + 1) D - 1. Where
/// heads share (options.hpp), H is the matrix's own: q has heads(), k key_heads(), v, gates and the state
/// value_heads(), out and denominators output_heads() of them, and flops are 2 C M for each state that is written and
/// each head of out. Arguments: subject (state), inputs, outputs, scratch. Outputs are overwritten; they must not
/// overlap inputs (asserted in debug builds). Calls that take a workspace do not allocate and may stand in a
/// [[clang::nonblocking]] function (refusing wrong arguments does allocate, and so do gradients where heads share); the
/// others allocate it, and what they return.
///
/// Laws, to rounding where not said otherwise; each is a property test:
///   1. step = absorb of one row, then read of one row; for gated_bonus read, the bonus, then absorb.
///   2. forward_causal = step over the rows; any split of a sequence into calls gives the same.
///   3. forward = absorb everything, then read everything; the order of the keys does not matter. Rules for which it
///   does have no `forward`.
///   4. absorb(A), absorb(B) = absorb(A stacked on B) = a.merge(b), b a segment where the rule corrects.
///   5. The same shapes and splits give the same bits; internal block sizes move rounding only.
///   6. Row i of a causal output depends on rows j <= i, bitwise: what follows, NaN or infinite, leaves it alone.
///   7. normalised, denominator none and not 0, positive map: V = 1 gives 1, causal row 0 is v_0, outputs lie within
///   [min V, max V].
///   8. The un-normalised output for [V, 1], divided by its last column, is the normalised output.
///   9. A masked token (batch.hpp) is as good as deleted, bitwise, whatever its row holds.
///   10. <dout, J d> = <vjp(dout), d> for every direction d of every input, initial state and parameter; the gradients
///   of a causal sequence are the same however it is split.
///   11. Every path equals the O(N^2) reference (N <= 4096, N(0, 1), elementwise positive maps): relative RMS <= 1e-13
///   in double, <= 1e-6 in float from D = 16 on; up to 2e-6 below that, for positive_random, and for the rules with
///   decay and delta (against their token loop, |k| = 1, beta in [0, 1]).
///
/// Errors: wrong types are one-sentence static_asserts. Options and shapes of bulk calls throw std::invalid_argument
/// with the function's name and both sizes, before anything is written (printed, then abort, without exceptions).
/// N = 0 and no keys are fine: an output for which no key was seen, or whose denominator is 0, is 0, unless a feature
/// of the query, or a value seen, is NaN or infinite, which shows. NaN in row i of q stays in row i; NaN in row j of k
/// or v reaches the rows that see j, and the state. These promises need a compiler that honours NaN: not -ffast-math.
template <class FeatureMap, class UpdateRule = additive, class Scalar = float, Eigen::Index HeadDim = Eigen::Dynamic,
          Eigen::Index ValueDim = HeadDim, Eigen::Index Heads = (HeadDim == Eigen::Dynamic ? Eigen::Dynamic : 1)>
class linear_attention {
  static_assert(std::is_same_v<Scalar, float> || std::is_same_v<Scalar, double> || detail::is_narrow<Scalar>,
                "linattn: Scalar must be float, double, Eigen::half or Eigen::bfloat16");
  static_assert(
      requires {
        { UpdateRule::traits } -> std::convertible_to<rule_traits>;
      },
      "linattn: the second template argument must be an update rule, such as linattn::additive; Scalar is the third");
  static_assert(detail::check_feature_map_members<FeatureMap, accumulator_t<Scalar>>());
  static_assert(!detail::has_log_features<FeatureMap> ||
                    (UpdateRule::traits.corrects == correction::none && UpdateRule::traits.reads_after_write),
                "linattn: a map that writes log phi serves rules that add after their decay: additive, decay, gated");
  static constexpr Eigen::Index Features = detail::features_at_compile_time<FeatureMap, HeadDim>;

 public:
  using scalar = Scalar;
  using accumulator_type = accumulator_t<Scalar>;
  using feature_map_type = FeatureMap;
  using update_rule_type = UpdateRule;
  using input = matrix_view<const Scalar>;
  using output = matrix_view<Scalar>;
  using token = vector_view<const Scalar>;
  static constexpr rule_traits rule = detail::rule_with<FeatureMap, UpdateRule::traits>;
  static_assert(rule.is_served(),
                "linattn: no engine for these traits: a rule that corrects, or reads before it writes, "
                "keeps no z; one that corrects reads after it writes; decays of the operator are one per head");
  using state_type = state<rule, accumulator_type, Features, ValueDim, Heads>;
  using workspace_type = workspace<accumulator_type, HeadDim, ValueDim, Features, Heads,
                                   detail::is_differentiable<FeatureMap, accumulator_type>, rule>;
  using segment_type = segment<rule, accumulator_type, Features, ValueDim, Heads>;
  using draft_type = draft<rule, accumulator_type, Features, ValueDim, Heads>;
  /// What the rule takes beside q, k and v, for rows of tokens and for one token: {.log_decay = g, .beta = b}.
  using inputs = typename UpdateRule::template inputs<input>;
  using token_inputs = typename UpdateRule::template inputs<token>;
  /// Where gradients with respect to them go.
  using input_gradients = typename UpdateRule::template inputs<output>;
  using gradients_with_inputs = rule_gradients<Scalar, UpdateRule>;
  /// What the map keeps the gradient of its parameters in; no_parameters where it has none.
  using parameter_gradient = typename detail::gradient_of<FeatureMap>::type;

  /// Throws std::invalid_argument when a dynamic size is missing or below 1, a given size differs from the type's or
  /// the map's, head counts do not divide as options.hpp says, query_scale is not finite, epsilon is not positive and
  /// finite, a fixed decay has not one log-decay for each value head, `normalize` is asked of a rule that keeps no z,
  /// or a denominator policy meets an operator that does not normalize by default and `normalize` is not given. With
  /// .normalize = false a policy has no effect.
  explicit linear_attention(const options& o = {}, FeatureMap map = FeatureMap(), UpdateRule rule = UpdateRule());

  Eigen::Index head_dim() const noexcept { return m_layout.head_dim; }          ///< D
  Eigen::Index value_dim() const noexcept { return m_layout.state.value_dim; }  ///< M
  Eigen::Index features() const noexcept { return m_layout.state.features; }    ///< C
  Eigen::Index heads() const noexcept { return m_layout.heads.queries; }        ///< H, heads of q
  Eigen::Index key_heads() const noexcept { return m_layout.heads.keys; }       ///< heads of k
  Eigen::Index value_heads() const noexcept { return m_layout.heads.states; }   ///< heads of v, of gates and of a state
  Eigen::Index output_heads() const noexcept { return m_layout.heads.outputs(); }  ///< heads of out: max(q's, v's)
  bool normalizes() const noexcept { return m_normalizes; }
  const FeatureMap& feature_map() const noexcept { return m_map; }
  const UpdateRule& update_rule() const noexcept { return m_rule; }

  /// A state that has seen nothing, its first key to stand at first_position. Memory: H (C M + C) accumulators; one
  /// allocation, none with fixed sizes.
  state_type make_state(Eigen::Index first_position = 0) const;

  /// The same in memory of the caller's, which must outlive it: at least state_bytes() on a boundary of
  /// state_alignment(); else throws std::invalid_argument. No allocation. What such a state is: state.hpp.
  /// attach_state takes what the memory holds: a state that was made there, or the bytes of one, copied; other contents
  /// throw. With compile-time sizes neither is there: sizeof(state_type) is state_bytes(), and a state is made in
  /// place by new (memory) state_type(attn.make_state()).
  state_type make_state(std::span<std::byte> memory, Eigen::Index first_position = 0) const;
  state_type attach_state(std::span<std::byte> memory) const;
  Eigen::Index state_bytes() const noexcept { return m_layout.state.bytes(); }
  static constexpr Eigen::Index state_alignment() noexcept { return Eigen::Index(detail::slab_alignment); }

  /// Scratch for one thread, of a size that does not depend on N. One allocation, none with fixed sizes.
  workspace_type make_workspace() const { return detail::engine_access::make_workspace<workspace_type>(m_layout); }

  /// Non-causal attention (eqs. 5, 6): out (Nq, H M) from q (Nq, H D), k (Nk, H D), v (Nk, H M); any Nq and Nk. With a
  /// state: first absorb k, v into it, then read q. 2 (Nq + Nk) C M flops a head, plus the map.
  void forward(state_type& s, input q, input k, input v, output out, workspace_type& ws) const;
  void forward(input q, input k, input v, output out, workspace_type& ws) const;
  row_matrix<Scalar> forward(state_type& s, input q, input k, input v) const;
  row_matrix<Scalar> forward(input q, input k, input v) const;

  /// Causal attention (eqs. 9-12): out (N, H M) from q, k (N, H D), v (N, H M), row i seeing what the state has seen
  /// and rows j <= i; leaves the state after row N - 1. 4 N C M flops a head, plus the map.
  /// Of a rule with inputs, they stand behind v, here and in every verb:
  /// attn.forward_causal(s, q, k, v, {.log_decay = g, .beta = b}, out, ws).
  void forward_causal(state_type& s, input q, input k, input v, const inputs& x, output out, workspace_type& ws) const;
  void forward_causal(input q, input k, input v, const inputs& x, output out, workspace_type& ws) const;
  row_matrix<Scalar> forward_causal(state_type& s, input q, input k, input v, const inputs& x) const;
  row_matrix<Scalar> forward_causal(input q, input k, input v, const inputs& x) const;
  void forward_causal(state_type& s, input q, input k, input v, output out, workspace_type& ws) const;
  void forward_causal(input q, input k, input v, output out, workspace_type& ws) const;
  row_matrix<Scalar> forward_causal(state_type& s, input q, input k, input v) const;
  row_matrix<Scalar> forward_causal(input q, input k, input v) const;

  /// S += phi(k_j) v_j^T, z += phi(k_j) for the rows of k (N, H D), v (N, H M): the keys' half of `forward`, for
  /// encoder memories, shared prefixes and parts of a sequence to be merged. 2 N C M flops a head, plus the map.
  void absorb(state_type& s, input k, input v, const inputs& x, workspace_type& ws) const;
  void absorb(state_type& s, input k, input v, const inputs& x) const;
  void absorb(state_type& s, input k, input v, workspace_type& ws) const;
  void absorb(state_type& s, input k, input v) const;

  /// For the rules that correct, whose states do not merge: a segment that has seen nothing (segment.hpp), and the rows
  /// of k and v with the rule's inputs into it. s.merge(segment) is then absorbing its tokens into s, to rounding. As
  /// costly as 1 + C / M times absorb.
  segment_type make_segment(Eigen::Index first_position = 0) const;
  void absorb(segment_type& s, input k, input v, const inputs& x, workspace_type& ws) const;
  void absorb(segment_type& s, input k, input v, const inputs& x) const;

  /// out (N, H M) = what the queries q (N, H D) see in the state: the queries' half of `forward`. For maps that know
  /// positions the rows stand where the last N absorbed keys do. 2 N C M flops a head, plus the map.
  /// denominators (N, H), optional: phi(s q).z before the denominator policy, the weight of evidence behind each
  /// output. Of maps that write log phi it may be 0 or infinite where the output is neither.
  void read(const state_type& s, input q, output out, workspace_type& ws) const;
  void read(const state_type& s, input q, output out, workspace_type& ws,
            matrix_view<accumulator_type> denominators) const;
  row_matrix<Scalar> read(const state_type& s, input q) const;

  /// One token of decoding (eqs. 18-20): q_t, k_t (H D), v_t (H M), out_t (H M). Absorbs, then reads. 4 C M flops and
  /// one read and write of the state a head. Neither allocates nor throws; a map that does either is reported by
  /// -Wfunction-effects and -fsanitize=realtime (clang >= 20). Sizes are LINATTN_ASSERTed: wrong ones are undefined
  /// behaviour in release builds.
  void step(state_type& s, token q_t, token k_t, token v_t, const token_inputs& x, vector_view<Scalar> out_t,
            workspace_type& ws) const noexcept LINATTN_NONBLOCKING;
  void step(state_type& s, token q_t, token k_t, token v_t, vector_view<Scalar> out_t,
            workspace_type& ws) const noexcept LINATTN_NONBLOCKING;

  /// One token of each of many sequences, as `step` of each: states (B), q, k (B, H D), v, out (B, H M), row b for
  /// states[b]. No state twice. Cost and promises are those of `step`, B times.
  void step(std::span<state_type> states, input q, input k, input v, const inputs& x, output out,
            workspace_type& ws) const noexcept LINATTN_NONBLOCKING;
  void step(std::span<state_type> states, input q, input k, input v, output out,
            workspace_type& ws) const noexcept LINATTN_NONBLOCKING;

  /// Room for tokens that are not written yet (draft.hpp). One allocation, none with fixed sizes.
  draft_type make_draft() const { return detail::engine_access::make_workspace<draft_type>(draft_layout()); }

  /// Speculative decoding: `forward_causal` of N <= 16 proposed tokens from a state that stays as it is, bit for bit;
  /// what they would write goes to `d`. Throws for more tokens. One read of the state, and one more for each further
  /// head of out that reads it. 2 C M flops a row, of which a token has one for each such head and, where the rule
  /// corrects, one for its correction; whole blocks of 2, 4 or 8 rows are computed. Beside these N^2 (C + M) for every
  /// row of a token, twice that for diagonal plus rank one.
  void forward_causal(const state_type& s, input q, input k, input v, const inputs& x, output out, draft_type& d,
                      workspace_type& ws) const;
  void forward_causal(const state_type& s, input q, input k, input v, output out, draft_type& d,
                      workspace_type& ws) const;

  /// The first j tokens of a draft into the state it was drafted from, or a copy: to rounding, j steps, for one read
  /// and write of the state and 2 j C M flops a head, twice that for diagonal plus rank one. j = 0 leaves the state as
  /// it is. Throws for j outside 0 ... d.tokens(), a draft of another operator's sizes, or a state that has moved on
  /// since.
  void accept(state_type& s, const draft_type& d, Eigen::Index j, workspace_type& ws) const;
  /// All of them, which leaves the draft empty: after steps whose writes were put off s is whole again.
  void accept(state_type& s, draft_type& d, workspace_type& ws) const;

  /// `step` with its write put off: the token is the next one behind those of d, and goes to d. All that d holds is
  /// accepted first where that is steps_at_once or more: 4 tokens, 2 for diagonal plus rank one. So the state is read
  /// once a token, and read and written once in steps_at_once. A rule that corrects reads a state beyond L1 twice in
  /// `step`; put off, a token takes about 0.7 of the time of `step` where the state lies in L2. Where it comes from
  /// memory `step` is the quicker one (`bench_draft --benchmark_filter=put_off`). s and d belong together until this
  /// `accept`: s.tokens() counts what s holds itself, a copy of s goes on with a copy of d, and d.clear() goes with a
  /// reset of s, or behind `accept` of j, which leaves d as it is. Equal to `step` to rounding; the tokens between two
  /// writes, bit for bit to drafting them together. Promises are those of `step`.
  void step(state_type& s, token q_t, token k_t, token v_t, const token_inputs& x, vector_view<Scalar> out_t,
            draft_type& d, workspace_type& ws) const noexcept LINATTN_NONBLOCKING;
  void step(state_type& s, token q_t, token k_t, token v_t, vector_view<Scalar> out_t, draft_type& d,
            workspace_type& ws) const noexcept LINATTN_NONBLOCKING;

  // Gradients: vector-Jacobian products of the whole operator, map, query scale, denominator and its policy included.
  // They recompute what they need from the inputs: nothing is kept from the forward pass, and beside inputs and outputs
  // there is the workspace, of a size that does not depend on N. dout is the gradient of a loss with respect to out;
  // dq, dk and dv, of the shapes of q, k and v, are overwritten with those with respect to q, k and v. An output that
  // is 0 because its denominator is has gradient 0. A map with parameters adds theirs to `dmap` where it is given
  // (feature_map().make_gradient() is a zero to begin with). A map without `vjp` serves the other verbs, and is refused
  // here at compile time.
  //
  // Where heads share, gradients with respect to rows, states and gates that several heads of out use are the sums of
  // what each of these heads gives, added in a fixed order in Scalar. Flops are those of separate heads, one for each
  // head of out; and the calls allocate rows of one head for each gradient that is such a sum, N D elements for dk (and
  // dq, where several states share a query head), and where several heads read a state N M for dv and N (1 or C) for
  // those of gates.

  /// Of `forward`: any Nq and Nk. (4 Nq + 6 Nk) C M flops a head, plus the map and its derivative.
  void vjp(input q, input k, input v, input dout, output dq, output dk, output dv, workspace_type& ws,
           parameter_gradient* dmap = nullptr) const;
  gradients<Scalar> vjp(input q, input k, input v, input dout) const;

  /// Of `forward_causal` from the state s0, which is what it was before row 0. ds comes in as the gradient with respect
  /// to the state after row N - 1 (dS in kv, dz in k_sum; make_state() where nothing follows) and leaves as that with
  /// respect to s0: a long sequence is differentiated segment by segment, from the last to the first, each from a copy
  /// of the state before it. 12 N C M flops a head, of which 10 are the equations', plus the map and its derivative.
  void vjp_causal(const state_type& s0, input q, input k, input v, input dout, state_type& ds, output dq, output dk,
                  output dv, workspace_type& ws, parameter_gradient* dmap = nullptr) const;
  void vjp_causal(input q, input k, input v, input dout, output dq, output dk, output dv, workspace_type& ws,
                  parameter_gradient* dmap = nullptr) const;
  gradients<Scalar> vjp_causal(const state_type& s0, input q, input k, input v, input dout, state_type& ds) const;
  gradients<Scalar> vjp_causal(input q, input k, input v, input dout) const;

  /// The same of a rule with inputs x: dx are views for the gradients with respect to them, of their shapes; those left
  /// out are not computed:
  ///
  ///     attn.vjp_causal(s0, q, k, v, {.log_decay = g, .beta = b}, dout, ds, dq, dk, dv,
  ///                     {.log_decay = dg, .beta = db}, ws);
  ///
  /// Built for delta and gated_delta, for gated and, without inputs, decay (whose constants get no gradient), these two
  /// also normalized; where the map writes log phi, for additive only. The rules that correct go forwards, back, and
  /// forwards again: the workspace does not depend on N, nothing is stored for every token or segment, and the
  /// recurrence is never inverted. Flops a head: gated 15 N C M, of which 12 are the equations'; delta and gated_delta
  /// 22 N C M, or 26 where M > D, of which 16 and 18 are.
  ///
  /// Numerics: the gradient of a log-decay is a sum over the tokens that follow, of terms that cancel where decays are
  /// strong. It is summed in twice the precision of Scalar, so its error is that of its terms, a few roundings of
  /// |phi(q_j)| |dphi(q_j)| + |phi(k_j)| |dphi(k_j)|, j >= i, however small it is itself. Where exp(log_decay) is 0 it
  /// is exactly 0. The total log-decay that ds carries is left as it is. Entries of the gradient with respect to a
  /// state that fall below 2^-100 are cleared where the rule decays, as those of the state are.
  void vjp_causal(const state_type& s0, input q, input k, input v, const inputs& x, input dout, state_type& ds,
                  output dq, output dk, output dv, const input_gradients& dx, workspace_type& ws,
                  parameter_gradient* dmap = nullptr) const;
  void vjp_causal(input q, input k, input v, const inputs& x, input dout, output dq, output dk, output dv,
                  const input_gradients& dx, workspace_type& ws, parameter_gradient* dmap = nullptr) const;
  gradients_with_inputs vjp_causal(const state_type& s0, input q, input k, input v, const inputs& x, input dout,
                                   state_type& ds) const;
  gradients_with_inputs vjp_causal(input q, input k, input v, const inputs& x, input dout) const;

 private:
  friend struct detail::engine_access;
  using T = accumulator_type;
  using layout_type =
      detail::workspace_layout<T, HeadDim, ValueDim, Features, Heads, detail::is_differentiable<FeatureMap, T>, rule>;
  using rows_type = detail::sequence_rows<Scalar, T, rule>;
  using gradient_arguments = detail::gradient_arguments<Scalar, rule, parameter_gradient>;
  using access = detail::engine_access;

  using draft_layout_type = detail::draft_layout<T, Features, ValueDim, Heads, rule>;

  draft_layout_type draft_layout() const noexcept { return {m_layout.state}; }
  void require_draft(const char* function, const draft_type& d) const;
  static constexpr void require_drafts_are_built() noexcept;
  bool fits(const draft_type& d) const noexcept;
  void run_draft(const rows_type& x, const state_type& s, draft_type& d, workspace_type& ws) const;
  void run_accept(state_type& s, const draft_type& d, Eigen::Index j, workspace_type& ws) const;
  void assert_token(const state_type& s, token q_t, token k_t, token v_t, const token_inputs& x,
                    vector_view<Scalar> out_t, const workspace_type& ws) const noexcept;
  detail::engine<FeatureMap, Scalar, layout_type> engine() const noexcept {
    return {m_map, m_layout, m_query_scale, m_policy, m_normalizes};
  }
  void require_inputs(const char* function, input q, input k, input v, bool causal) const;
  void require_keys(const char* function, input k, input v, const inputs& x) const;
  void require_bulk(const char* function, input q, input k, input v, output out, workspace_type& ws, bool causal) const;
  void require_read(const state_type& s, input q, output out, workspace_type& ws) const;
  static inputs no_inputs();
  template <class Inputs>
  rows_type rows_of(Eigen::Index tokens, Eigen::Index position, input q, input k, input v, const Inputs& x,
                    output out) const noexcept;
  rows_type reading_rows(const state_type& s, input q, output out) const noexcept;
  template <class U, class Inputs>
  detail::rule_inputs<detail::token_rows<U>, rule> gates_of(const Inputs& x) const noexcept;
  template <class Inputs, class F>
  void for_each_input(const Inputs& x, const F& f) const;
  void require_rule_inputs(const char* function, const inputs& x, Eigen::Index tokens, output out = {}) const;
  template <class State>
  void require_state(const char* function, const State& s, const char* what = "state") const;
  void require_workspace(const char* function, workspace_type& ws) const;
  void require_gradient(const char* function, input q, input k, input v, const inputs& x, input dout, output dq,
                        output dk, output dv, const input_gradients& dx, workspace_type& ws, bool causal) const;
  gradient_arguments gradient_arguments_of(input q, input k, input v, const inputs& x, input dout, output dq, output dk,
                                           output dv, const input_gradients& dx, parameter_gradient* dmap) const;
  gradients<Scalar> make_gradients(input q, input k, input v) const;
  gradients_with_inputs make_gradients(input q, input k, input v, const inputs& x) const;
  static void require_differentiable();
  using engine_type = detail::engine<FeatureMap, Scalar, layout_type>;
  void run_vjp(const engine_type& constants, const gradient_arguments& a, workspace_type& ws) const;
  void run_vjp_causal(const engine_type& constants, const gradient_arguments& a, const state_type* s0, state_type* ds,
                      workspace_type& ws) const;
  template <class State>
  bool fits(const State& s) const noexcept;
  T* state_memory(const char* function, std::span<std::byte> memory) const;
  T* own_state(workspace_type& ws) const noexcept;
  void run_forward(T* slab, Eigen::Index position, input q, input k, input v, output out, workspace_type& ws) const;

  FeatureMap m_map;
  [[no_unique_address]] UpdateRule m_rule;
  layout_type m_layout;
  T m_query_scale;
  denominator_policy m_policy;
  bool m_normalizes;
};

LINATTN_NAMESPACE_END

#include <linattn/detail/linear_attention_impl.hpp>
