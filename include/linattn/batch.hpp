// Many sequences in one call: their heads, their columns of values and their segments are work for many threads.
//
//   auto ws = linattn::make_workspaces(attn, pool.threads());             // one for each thread
//   auto states = linattn::make_states(attn, B);
//   linattn::forward_causal(attn, states, q, k, v, out, ws, pool);        // prefill, batch_views (B, N, H, D)
//   linattn::step(attn, states, q_t, k_t, v_t, out_t, ws, pool);          // decode: one token of each sequence
//
// Every verb is that of linear_attention, for each sequence of a batch, with the same arguments in the same order;
// after the workspaces, an executor (executors.hpp) and options. q, k, v, outputs and inputs of the rule are
// batch_views (batch_view.hpp): of one number of sequences and, sequence by sequence, of tokens.
//
// Parallel width is the number W of workspaces: the executor is asked for at most W tasks at once, and task w uses
// workspace w. Work is cut by the shapes and W: into sequences and, within them, ranges of heads; where there are fewer
// heads in all than W, each head's columns of values are cut, too. Neither moves a bit: the same shapes give the same
// bits for every W, executor and number of threads. Cutting a sequence along its tokens does move rounding, and is
// asked for (batch_options::segments).
//
// Throws std::invalid_argument for shapes that do not agree, before anything is written; what a feature map throws in a
// task reaches the caller, and leaves the outputs and states of that call in part written. Nothing here allocates but
// the executor, and gradients where heads share.
#pragma once

#include <linattn/batch_options.hpp>
#include <linattn/batch_view.hpp>
#include <linattn/executors.hpp>
#include <linattn/linear_attention.hpp>

#include <type_traits>
#include <vector>

LINATTN_NAMESPACE_BEGIN

/// n workspaces, for calls of parallel width n.
template <class Attention>
std::vector<typename Attention::workspace_type> make_workspaces(const Attention& attn, Eigen::Index n);

/// n states that have seen nothing.
template <class Attention>
std::vector<typename Attention::state_type> make_states(const Attention& attn, Eigen::Index n,
                                                        Eigen::Index first_position = 0);

// Shapes: q (B, N, H, D), k (B, N, Hk, D), v (B, N, Hv, M), out (B, N, Ho, M), inputs of the rule (B, N, Hv, 1 or C),
// in any layout, N of each sequence's own; H, Hk, Hv and Ho are heads(), key_heads(), value_heads() and output_heads().
// Outputs are overwritten and must not overlap inputs (asserted in debug builds). Flops and numerics are those of
// linear_attention's verbs.

/// Causal attention of every sequence from its state, which is left behind its last token: linear_attention's
/// forward_causal, B times. 4 N C M flops a head, 6 with segments.
template <class Attention, executor Executor = sequential>
void forward_causal(const Attention& attn, std::type_identity_t<batch_states<Attention>> states,
                    batch_input<Attention> q, batch_input<Attention> k, batch_input<Attention> v,
                    const batch_inputs<Attention>& x, batch_output<Attention> out, workspaces<Attention> ws,
                    const Executor& executor = {}, const batch_options<Attention>& o = {});
/// The same for a rule that takes no inputs.
template <class Attention, executor Executor = sequential>
void forward_causal(const Attention& attn, std::type_identity_t<batch_states<Attention>> states,
                    batch_input<Attention> q, batch_input<Attention> k, batch_input<Attention> v,
                    batch_output<Attention> out, workspaces<Attention> ws, const Executor& executor = {},
                    const batch_options<Attention>& o = {});

/// Non-causal attention: every sequence's keys into its state, then its queries from there; any numbers of queries and
/// of keys. 2 (Nq + Nk) C M flops a head.
template <class Attention, executor Executor = sequential>
void forward(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> q,
             batch_input<Attention> k, batch_input<Attention> v, batch_output<Attention> out, workspaces<Attention> ws,
             const Executor& executor = {}, const batch_options<Attention>& o = {});

/// One token of every sequence: q, k, v, out of one token each, as one_each(matrix, heads) makes them. Unlike
/// linear_attention::step it throws for wrong shapes, and it may throw what the executor does. 4 C M flops a head.
template <class Attention, executor Executor = sequential>
void step(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> q,
          batch_input<Attention> k, batch_input<Attention> v, const batch_inputs<Attention>& x,
          batch_output<Attention> out, workspaces<Attention> ws, const Executor& executor = {});
/// The same for a rule that takes no inputs.
template <class Attention, executor Executor = sequential>
void step(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> q,
          batch_input<Attention> k, batch_input<Attention> v, batch_output<Attention> out, workspaces<Attention> ws,
          const Executor& executor = {});

/// The keys' half of `forward`, into states. 2 N C M flops a head.
template <class Attention, executor Executor = sequential>
void absorb(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> k,
            batch_input<Attention> v, const batch_inputs<Attention>& x, workspaces<Attention> ws,
            const Executor& executor = {}, const batch_options<Attention>& o = {});
/// The same for a rule that takes no inputs.
template <class Attention, executor Executor = sequential>
void absorb(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> k,
            batch_input<Attention> v, workspaces<Attention> ws, const Executor& executor = {},
            const batch_options<Attention>& o = {});
/// The queries' half of `forward`, out of states. 2 N C M flops a head.
template <class Attention, executor Executor = sequential>
void read(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> q,
          batch_output<Attention> out, workspaces<Attention> ws, const Executor& executor = {},
          const batch_options<Attention>& o = {});

/// Gradients of `forward` without states: linear_attention's vjp, B times. 10 N C M flops a head. Where the map
/// has parameters, dmap may hold a gradient for each sequence, which is added to, and tasks are then whole sequences;
/// the sum of them is the gradient of the batch. Where heads share, those that share with each other are one task, so
/// that there are gcd(H, Hk) in a sequence (one, of multi-query heads), and each task allocates as linear_attention's
/// vjp does.
template <class Attention, executor Executor = sequential>
void vjp(const Attention& attn, batch_input<Attention> q, batch_input<Attention> k, batch_input<Attention> v,
         batch_input<Attention> dout, batch_output<Attention> dq, batch_output<Attention> dk,
         batch_output<Attention> dv, workspaces<Attention> ws, const Executor& executor = {},
         const batch_options<Attention>& o = {}, std::span<typename Attention::parameter_gradient> dmap = {});

/// Gradients of `forward_causal`, from the states s0 that the sequences began with and with the gradients ds of those
/// that they left, which become those of s0: both of B states, or both empty, and not the same ones. 12 N C M flops a
/// head. Parameters and heads that share are as in vjp.
template <class Attention, executor Executor = sequential>
void vjp_causal(const Attention& attn, std::span<const typename Attention::state_type> s0, batch_input<Attention> q,
                batch_input<Attention> k, batch_input<Attention> v, const batch_inputs<Attention>& x,
                batch_input<Attention> dout, std::span<typename Attention::state_type> ds, batch_output<Attention> dq,
                batch_output<Attention> dk, batch_output<Attention> dv, const batch_input_gradients<Attention>& dx,
                workspaces<Attention> ws, const Executor& executor = {}, const batch_options<Attention>& o = {},
                std::span<typename Attention::parameter_gradient> dmap = {});
/// The same for a rule that takes no inputs.
template <class Attention, executor Executor = sequential>
void vjp_causal(const Attention& attn, std::span<const typename Attention::state_type> s0, batch_input<Attention> q,
                batch_input<Attention> k, batch_input<Attention> v, batch_input<Attention> dout,
                std::span<typename Attention::state_type> ds, batch_output<Attention> dq, batch_output<Attention> dk,
                batch_output<Attention> dv, workspaces<Attention> ws, const Executor& executor = {},
                const batch_options<Attention>& o = {}, std::span<typename Attention::parameter_gradient> dmap = {});

/// One token for each of B sequences, rows of x (B, H D): what `step` takes.
template <class X>
auto one_each(X&& x, Eigen::Index heads) {
  using element = std::remove_pointer_t<decltype(x.data())>;
  const matrix_view<element> rows(x);
  if (heads < 1 || rows.cols() % heads != 0) {
    detail::refuse("one_each", "rows of ", rows.cols(), " elements are not ", heads, " heads of one size");
  }
  const Eigen::Index dim = rows.cols() / heads;
  return batch_view<element>(rows.data(), {rows.rows(), 1, heads, dim}, {rows.row_stride(), 0, dim});
}

LINATTN_NAMESPACE_END

#include <linattn/detail/batch_impl.hpp>
