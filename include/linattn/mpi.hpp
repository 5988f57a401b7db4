// One sequence over many machines: every MPI rank holds a contiguous segment of it. Not part of linattn.hpp: include it
// where you have MPI, and link MPI::MPI_CXX beside linattn::linattn (CMake: find_package(MPI REQUIRED COMPONENTS CXX)).
//
//   const linattn::mpi::ranks ranks(MPI_COMM_WORLD);              // after MPI_Init; collective, once
//   linattn::mpi::forward_causal(ranks, attn, q, k, v, y, ws);    // q, k, v and y: this rank's rows, in rank order
//
// Segments may be of any lengths, 0 too. A rank needs nothing of the others' tokens but what they leave in a state:
//
//   1. it absorbs its rows into a state of its own; under a rule that corrects, into a segment (segment.hpp)
//   2. an exclusive scan over the ranks gives it the state before its first row: MPI_Exscan with an operation of ours,
//      state::merge or segment::merge, which is associative but does not commute where order matters
//   3. it runs the verb on its rows from there
//
// Traffic: counts and flags of 24 bytes, and one message of message_bytes(attn) a round, however long the sequence:
// H (C M + C) elements with the padding of a state's rows, H C (M + C) under a rule that corrects; for 8 heads of
// D = M = 64 in float 133 KB, and 263 KB for gated_delta. By recursive doubling a scan over P ranks takes ceil(log2 P)
// rounds, each with a message to send, one to receive and up to two merges. Open MPI chooses by itself between that and
// P - 1 rounds in a row; coll_tuned_use_dynamic_rules = 1 with coll_tuned_exscan_algorithm = 2 asks for it.
//
// Time, with n = N / P tokens a rank, and absorb(n) and causal(n) what a rank takes for them alone:
//
//   t(P) = absorb(n) + causal(n) + ceil(log2 P) (3 latency + s),    s = message_bytes / bandwidth + 2 merge
//
// A merge reads and writes a state, or takes 2 C^2 (C + M) flops a head under a rule that corrects. absorb has half of
// causal's flops, or for those rules and C = M as many: beside one rank with all N tokens P ranks win P / 1.5, or
// P / 2, until the last term shows. By the formula, not measured: additive, 8 heads of D = M = 64 in float, n = 8,192
// at 80 GFLOP/s, messages at 2 microseconds and 12.5 GB/s, merges at 10 microseconds make 6.7 + 13.4 + 0.4 ms for the
// 8.4 million tokens of 1,024 ranks, 670 times as quick as one rank. examples/14_sequence_parallel.cpp measures absorb,
// causal, merge and a message, and prints the table from 1 to 1,024 ranks.
#pragma once

#include <linattn/linear_attention.hpp>

#include <mpi.h>

LINATTN_NAMESPACE_BEGIN
namespace mpi {

/// The ranks that share a sequence, in its order: those of `comm`, in theirs. Collective, and dear beside a scan, so
/// made once: it duplicates `comm`, that messages of the library and of the caller never meet, and makes a second one
/// with the order reversed, for gradients. The caller's error handler goes with it; where that returns, what MPI
/// reports is thrown. Throws std::invalid_argument where MPI is not running and for an intercommunicator.
/// Threads: one at a time, and as MPI was initialised.
class ranks {
 public:
  explicit ranks(MPI_Comm comm);
  ~ranks();
  ranks(const ranks&) = delete;
  ranks& operator=(const ranks&) = delete;

  int rank() const noexcept { return m_rank; }  ///< of this process, 0 for the beginning of the sequence
  int size() const noexcept { return m_size; }  ///< P
  bool is_first() const noexcept { return m_rank == 0; }
  bool is_last() const noexcept { return m_rank == m_size - 1; }
  MPI_Comm ascending() const noexcept { return m_ascending; }    ///< in the order of the sequence
  MPI_Comm descending() const noexcept { return m_descending; }  ///< from its end to its beginning

 private:
  MPI_Comm m_ascending = MPI_COMM_NULL;
  MPI_Comm m_descending = MPI_COMM_NULL;
  int m_rank = 0;
  int m_size = 0;
};

// Of every verb below: it is collective, all ranks call it with operators that are alike and each with its own rows.
// Where one rank's arguments are refused, all ranks throw std::invalid_argument, that one with the sentence that the
// single-process verb has, the others with its number, before anything is written; so they do where it runs out of
// memory or a map throws. Ranks whose states differ in size are told so. Beside the verb's own flops and workspace each
// allocates up to five states, or segments where the rule corrects; ranks of size 1 are the verb itself. Results equal
// those of one process to rounding, as merge does (law 4); the association of the scan is MPI's. Heads may share. Maps
// that know positions are told those in the whole sequence.
//
// With a state: what rank 0's s holds comes before the sequence, what the other ranks' holds does not count. It leaves
// as the state after this rank's rows, which on the last rank is the state to go on from.

/// Bytes of one message of a scan: a state, and where the rule corrects A beside it.
template <class Attention>
Eigen::Index message_bytes(const Attention& attn);

/// Causal attention of the whole sequence: out (n, H M) from q, k (n, H D), v (n, H M), n this rank's rows; row i sees
/// all rows of the ranks before it and its own up to i. Flops: 4 n C M a head for the outputs and 2 n C M for the state
/// (1 + C / M times that where the rule corrects).
template <class Attention>
void forward_causal(const ranks& r, const Attention& attn, typename Attention::state_type& s,
                    typename Attention::input q, typename Attention::input k, typename Attention::input v,
                    const typename Attention::inputs& x, typename Attention::output out,
                    typename Attention::workspace_type& ws);
/// The same from no state, and to none.
template <class Attention>
void forward_causal(const ranks& r, const Attention& attn, typename Attention::input q, typename Attention::input k,
                    typename Attention::input v, const typename Attention::inputs& x, typename Attention::output out,
                    typename Attention::workspace_type& ws);
/// The same for a rule that takes no inputs.
template <class Attention>
void forward_causal(const ranks& r, const Attention& attn, typename Attention::state_type& s,
                    typename Attention::input q, typename Attention::input k, typename Attention::input v,
                    typename Attention::output out, typename Attention::workspace_type& ws);
/// The same with neither.
template <class Attention>
void forward_causal(const ranks& r, const Attention& attn, typename Attention::input q, typename Attention::input k,
                    typename Attention::input v, typename Attention::output out,
                    typename Attention::workspace_type& ws);

/// Non-causal attention: every query sees the keys of all ranks; any n_q and n_k on every rank. The states are summed
/// by MPI_Allreduce, and s leaves as that sum on every rank. 2 (n_q + n_k) C M flops a head, those of one process. Not
/// for rules in which order matters, which a sentence at compile time says. Its gradient is not built.
template <class Attention>
void forward(const ranks& r, const Attention& attn, typename Attention::state_type& s, typename Attention::input q,
             typename Attention::input k, typename Attention::input v, typename Attention::output out,
             typename Attention::workspace_type& ws);
/// The same from no state, and to none.
template <class Attention>
void forward(const ranks& r, const Attention& attn, typename Attention::input q, typename Attention::input k,
             typename Attention::input v, typename Attention::output out, typename Attention::workspace_type& ws);

/// Gradients of forward_causal, for the rules and maps that vjp_causal serves. s0 is what s was before that call. The
/// gradient of a state flows from the last rank to the first, by the same scan over the ranks reversed: a rank's part
/// in it is S -> A^T S + R, A its transition (exp of its total log-decay, or a segment's A) and R what its own rows
/// give, which a first run of vjp_causal finds; a second one, from the scanned state, has the gradients. ds comes in
/// on the last rank as the gradient with respect to the state after the sequence (the other ranks' does not count), and
/// leaves as that with respect to the state before this rank's rows: on rank 0, to s0.
/// dmap, where given: this rank's share is added; the sequence's gradient is their sum over the ranks.
///
///   t(P) = absorb(n) + 2 vjp_causal(n) + ceil(log2 P) (5 latency + 2 s)
template <class Attention>
void vjp_causal(const ranks& r, const Attention& attn, const typename Attention::state_type& s0,
                typename Attention::input q, typename Attention::input k, typename Attention::input v,
                const typename Attention::inputs& x, typename Attention::input dout, typename Attention::state_type& ds,
                typename Attention::output dq, typename Attention::output dk, typename Attention::output dv,
                const typename Attention::input_gradients& dx, typename Attention::workspace_type& ws,
                typename Attention::parameter_gradient* dmap = nullptr);
/// The same from no state, and to none.
template <class Attention>
void vjp_causal(const ranks& r, const Attention& attn, typename Attention::input q, typename Attention::input k,
                typename Attention::input v, const typename Attention::inputs& x, typename Attention::input dout,
                typename Attention::output dq, typename Attention::output dk, typename Attention::output dv,
                const typename Attention::input_gradients& dx, typename Attention::workspace_type& ws,
                typename Attention::parameter_gradient* dmap = nullptr);
/// The same for a rule that takes no inputs.
template <class Attention>
void vjp_causal(const ranks& r, const Attention& attn, const typename Attention::state_type& s0,
                typename Attention::input q, typename Attention::input k, typename Attention::input v,
                typename Attention::input dout, typename Attention::state_type& ds, typename Attention::output dq,
                typename Attention::output dk, typename Attention::output dv, typename Attention::workspace_type& ws,
                typename Attention::parameter_gradient* dmap = nullptr);
/// The same with neither.
template <class Attention>
void vjp_causal(const ranks& r, const Attention& attn, typename Attention::input q, typename Attention::input k,
                typename Attention::input v, typename Attention::input dout, typename Attention::output dq,
                typename Attention::output dk, typename Attention::output dv, typename Attention::workspace_type& ws,
                typename Attention::parameter_gradient* dmap = nullptr);

}  // namespace mpi
LINATTN_NAMESPACE_END

#include <linattn/detail/mpi_impl.hpp>
