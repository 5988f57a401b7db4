// Bodies of mpi.hpp: local work, an agreement that nobody failed, a scan, and the verb of one process.
#pragma once

#include <linattn/detail/mpi_scan.hpp>
#include <linattn/mpi.hpp>

#include <array>
#include <cstdint>
#include <exception>
#include <type_traits>

LINATTN_NAMESPACE_BEGIN
namespace mpi {

inline ranks::ranks(MPI_Comm comm) {
  using mpi_detail::require_success;
  int running = 0, ended = 0, between_groups = 0;
  MPI_Initialized(&running);
  MPI_Finalized(&ended);
  if (running == 0 || ended != 0) {
    detail::refuse("mpi::ranks", "MPI is not running; ranks are made after MPI_Init and before MPI_Finalize");
  }
  if (comm == MPI_COMM_NULL) detail::refuse("mpi::ranks", "the communicator is MPI_COMM_NULL");
  require_success("MPI_Comm_test_inter", MPI_Comm_test_inter(comm, &between_groups));
  if (between_groups != 0) detail::refuse("mpi::ranks", "an intercommunicator has no order of all its ranks");
  require_success("MPI_Comm_rank", MPI_Comm_rank(comm, &m_rank));
  require_success("MPI_Comm_size", MPI_Comm_size(comm, &m_size));
  require_success("MPI_Comm_dup", MPI_Comm_dup(comm, &m_ascending));
  require_success("MPI_Comm_split", MPI_Comm_split(comm, 0, -m_rank, &m_descending));
}

inline ranks::~ranks() {
  int ended = 0;
  MPI_Finalized(&ended);
  if (ended != 0) return;  // which has freed them
  MPI_Comm_free(&m_descending);
  MPI_Comm_free(&m_ascending);
}

namespace mpi_detail {

/// What a rank hands to a scan: the state that its tokens alone leave, or the segment that they are.
template <class Attention>
inline constexpr bool corrects = Attention::rule.corrects != correction::none;
template <class Attention>
using part_of =
    std::conditional_t<corrects<Attention>, typename Attention::segment_type, typename Attention::state_type>;

template <class Attention>
part_of<Attention> make_part(const Attention& attn, Eigen::Index first_position) {
  if constexpr (corrects<Attention>) {
    return attn.make_segment(first_position);
  } else {
    return attn.make_state(first_position);
  }
}

/// The part that leaves `s`, whatever comes before it: the first one of a scan.
template <class Attention>
part_of<Attention> part_from(const Attention& attn, const typename Attention::state_type& s) {
  part_of<Attention> part = make_part(attn, s.first_position());
  copy_contents(s, s, part);
  return part;
}

// ---- counts and flags -----------------------------------------------------------------------------------------------

/// Of a state, and of the queries that go with it.
struct counts {
  std::int64_t first_position = 0;
  std::int64_t tokens = 0;
  std::int64_t queries = 0;
};

/// What this rank adds to them: its rows, and on rank 0 what `s` holds already.
template <class State>
counts counts_of(const ranks& r, const State& s, Eigen::Index keys, Eigen::Index queries) {
  if (r.is_first()) return {s.first_position(), s.tokens() + keys, queries};
  return {0, keys, queries};
}

/// Their sum over the lower ranks, and on rank 0 what `s` holds.
template <class State>
counts counts_before(const ranks& r, const State& s, const counts& mine) {
  counts before;
  require_success("MPI_Exscan", MPI_Exscan(&mine, &before, 3, MPI_INT64_T, MPI_SUM, r.ascending()));
  if (r.is_first()) return {s.first_position(), s.tokens(), 0};
  return before;
}

inline counts counts_of_all(const ranks& r, const counts& mine) {
  counts all;
  require_success("MPI_Allreduce", MPI_Allreduce(&mine, &all, 3, MPI_INT64_T, MPI_SUM, r.ascending()));
  return all;
}

/// Runs `local`, and throws on every rank where it throws on one, or where messages are not of one size.
template <class F>
void together(const ranks& r, const char* function, Eigen::Index bytes, const F& local) {
#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
  std::exception_ptr mine;
  try {
    local();
  } catch (...) {
    mine = std::current_exception();
  }
  const bool failed = mine != nullptr;
#else
  local();  // a refusal has ended the process, and MPI ends the others
  const bool failed = false;
#endif
  std::array<std::int64_t, 3> worst = {failed ? r.rank() : -1, bytes, -bytes};
  require_success("MPI_Allreduce", MPI_Allreduce(MPI_IN_PLACE, worst.data(), 3, MPI_INT64_T, MPI_MAX, r.ascending()));
#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
  if (failed) std::rethrow_exception(mine);
#endif
  if (worst[0] >= 0) {
    detail::refuse(function, "rank ", Eigen::Index(worst[0]), " failed, this is rank ", Eigen::Index(r.rank()));
  }
  if (worst[1] != -worst[2]) {
    detail::refuse(function, "the ranks' operators differ: their messages have from ", Eigen::Index(-worst[2]), " to ",
                   Eigen::Index(worst[1]), " bytes");
  }
}

// ---- checks: of what the local work does not look at, with the sentences of the verbs -------------------------------

template <class Attention>
void require_tokens(const char* function, const Attention& attn, typename Attention::input q,
                    typename Attention::input k, typename Attention::input v, bool causal) {
  detail::require_shape(function, "q", q, q.rows(), attn.heads(), attn.head_dim(), "head_dim");
  detail::require_shape(function, "k", k, causal ? q.rows() : k.rows(), attn.key_heads(), attn.head_dim(), "head_dim");
  detail::require_shape(function, "v", v, k.rows(), attn.value_heads(), attn.value_dim(), "value_dim");
}

template <class Attention>
void require_input_gradients(const char* function, const Attention& attn, const typename Attention::input_gradients& dx,
                             Eigen::Index tokens) {
  if constexpr (requires { dx.log_decay; }) {
    constexpr bool per_feature = Attention::rule.decay == decay_kind::per_feature;
    if (dx.log_decay.data() != nullptr) {
      detail::require_shape(function, "the gradient of log_decay", dx.log_decay, tokens, attn.value_heads(),
                            per_feature ? attn.features() : 1, per_feature ? "features" : "one decay");
    }
  }
  if constexpr (requires { dx.beta; }) {
    if (dx.beta.data() != nullptr) {
      detail::require_shape(function, "the gradient of beta", dx.beta, tokens, attn.value_heads(), 1, "one beta");
    }
  }
}

// ---- the scan -------------------------------------------------------------------------------------------------------

/// This rank's tokens by themselves, rank 0's behind s.
template <class Attention>
part_of<Attention> absorbed(const ranks& r, const Attention& attn, const typename Attention::state_type& s,
                            const counts& before, typename Attention::input k, typename Attention::input v,
                            const typename Attention::inputs& x, typename Attention::workspace_type& ws) {
  if (r.is_first()) {
    typename Attention::state_type first = s;
    attn.absorb(first, k, v, x, ws);
    return part_from(attn, first);
  }
  part_of<Attention> part = make_part(attn, before.first_position + before.tokens);
  attn.absorb(part, k, v, x, ws);
  return part;
}

/// The state that the ranks before this one in `comm` leave together; `first` where there are none.
template <class Attention>
typename Attention::state_type scanned(MPI_Comm comm, bool is_first, const Attention& attn,
                                       const part_of<Attention>& mine, const typename Attention::state_type& first,
                                       const counts& before) {
  part_of<Attention> received = make_part(attn, 0);
  append_operation<part_of<Attention>>(mine).exclusive_scan(comm, mine, received);
  if (is_first) return first;
  typename Attention::state_type s = attn.make_state(before.first_position);
  copy_contents(s, received, s);
  set_tokens(s, before.tokens);
  return s;
}

/// The gradient with respect to a final state that nothing follows, 0, with the total log-decay of this rank's tokens:
/// what vjp_causal leaves of it is then appended to others' by state::merge, S -> exp(G) S + R.
template <class Attention>
typename Attention::state_type zero_gradient(const Attention& attn, const part_of<Attention>& mine) {
  typename Attention::state_type d = attn.make_state();
  if constexpr (!corrects<Attention> && Attention::rule.decay != decay_kind::none) {
    copy_contents(d, mine, d);
    for (Eigen::Index h = 0; h < d.heads(); ++h) {
      d.kv(h).setZero();
      if constexpr (Attention::rule.normalizes) d.k_sum(h).setZero();
    }
  }
  return d;
}

/// What this rank's tokens do to the gradient of a state, from their end to their beginning; d: what they make of 0.
template <class Attention>
part_of<Attention> backwards(const Attention& attn, const part_of<Attention>& mine,
                             const typename Attention::state_type& d) {
  part_of<Attention> part = part_from(attn, d);
  if constexpr (corrects<Attention>) transpose_transition(d, mine, part);
  return part;
}

}  // namespace mpi_detail

// ---- verbs ----------------------------------------------------------------------------------------------------------

template <class Attention>
Eigen::Index message_bytes(const Attention& attn) {
  return Eigen::Index(mpi_detail::bytes_of(mpi_detail::make_part(attn, 0)));
}

template <class Attention>
void forward_causal(const ranks& r, const Attention& attn, typename Attention::state_type& s,
                    typename Attention::input q, typename Attention::input k, typename Attention::input v,
                    const typename Attention::inputs& x, typename Attention::output out,
                    typename Attention::workspace_type& ws) {
  if (r.size() == 1) return attn.forward_causal(s, q, k, v, x, out, ws);
  constexpr const char* name = "mpi::forward_causal";
  const auto before = mpi_detail::counts_before(r, s, mpi_detail::counts_of(r, s, k.rows(), q.rows()));
  auto mine = mpi_detail::make_part(attn, 0);
  mpi_detail::together(r, name, Eigen::Index(mpi_detail::bytes_of(mine)), [&] {
    mpi_detail::require_tokens(name, attn, q, k, v, true);
    detail::require_shape(name, "out", out, q.rows(), attn.output_heads(), attn.value_dim(), "value_dim");
    mine = mpi_detail::absorbed(r, attn, s, before, k, v, x, ws);
  });
  s = mpi_detail::scanned(r.ascending(), r.is_first(), attn, mine, s, before);
  attn.forward_causal(s, q, k, v, x, out, ws);
}

template <class Attention>
void forward(const ranks& r, const Attention& attn, typename Attention::state_type& s, typename Attention::input q,
             typename Attention::input k, typename Attention::input v, typename Attention::output out,
             typename Attention::workspace_type& ws) {
  static_assert(!Attention::rule.is_ordered(),
                "linattn: mpi::forward, which lets every query see every key, is not defined for a rule in which the "
                "order of the tokens matters; use mpi::forward_causal");
  if constexpr (!Attention::rule.is_ordered()) {
    if (r.size() == 1) return attn.forward(s, q, k, v, out, ws);
    constexpr const char* name = "mpi::forward";
    const auto added = mpi_detail::counts_of(r, s, k.rows(), q.rows());
    const auto before = mpi_detail::counts_before(r, s, added);
    const auto all = mpi_detail::counts_of_all(r, added);
    auto mine = mpi_detail::make_part(attn, 0);
    mpi_detail::together(r, name, Eigen::Index(mpi_detail::bytes_of(mine)), [&] {
      mpi_detail::require_tokens(name, attn, q, k, v, false);
      detail::require_shape(name, "out", out, q.rows(), attn.output_heads(), attn.value_dim(), "value_dim");
      mine = mpi_detail::absorbed(r, attn, s, before, k, v, {}, ws);
    });
    s = attn.make_state(all.first_position);
    mpi_detail::append_operation(mine).all_reduce(r.ascending(), mine, s);
    // `read` takes its rows for the last ones absorbed: so many queries come after these.
    mpi_detail::set_tokens(s, all.tokens - (all.queries - before.queries - q.rows()));
    attn.read(s, q, out, ws);
    mpi_detail::set_tokens(s, all.tokens);
  }
}

template <class Attention>
void vjp_causal(const ranks& r, const Attention& attn, const typename Attention::state_type& s0,
                typename Attention::input q, typename Attention::input k, typename Attention::input v,
                const typename Attention::inputs& x, typename Attention::input dout, typename Attention::state_type& ds,
                typename Attention::output dq, typename Attention::output dk, typename Attention::output dv,
                const typename Attention::input_gradients& dx, typename Attention::workspace_type& ws,
                typename Attention::parameter_gradient* dmap) {
  if (r.size() == 1) return attn.vjp_causal(s0, q, k, v, x, dout, ds, dq, dk, dv, dx, ws, dmap);
  constexpr const char* name = "mpi::vjp_causal";
  const auto before = mpi_detail::counts_before(r, s0, mpi_detail::counts_of(r, s0, k.rows(), q.rows()));
  auto mine = mpi_detail::make_part(attn, 0);
  const auto bytes = Eigen::Index(mpi_detail::bytes_of(mine));
  mpi_detail::together(r, name, bytes, [&] {
    mpi_detail::require_tokens(name, attn, q, k, v, true);
    detail::require_shape(name, "dout", dout, q.rows(), attn.output_heads(), attn.value_dim(), "value_dim");
    detail::require_shape(name, "dq", dq, q.rows(), attn.heads(), attn.head_dim(), "head_dim");
    detail::require_shape(name, "dk", dk, q.rows(), attn.key_heads(), attn.head_dim(), "head_dim");
    detail::require_shape(name, "dv", dv, q.rows(), attn.value_heads(), attn.value_dim(), "value_dim");
    mpi_detail::require_input_gradients(name, attn, dx, q.rows());
    mine = mpi_detail::absorbed(r, attn, s0, before, k, v, x, ws);
  });
  const auto s = mpi_detail::scanned(r.ascending(), r.is_first(), attn, mine, s0, before);

  auto d = r.is_last() ? ds : mpi_detail::zero_gradient(attn, mine);
  mpi_detail::together(r, name, bytes, [&] {
    attn.vjp_causal(s, q, k, v, x, dout, d, dq, dk, dv, dx, ws, r.is_last() ? dmap : nullptr);
    mine = mpi_detail::backwards(attn, mine, d);
  });
  ds = mpi_detail::scanned(r.descending(), r.is_last(), attn, mine, d, {});
  if (!r.is_last()) attn.vjp_causal(s, q, k, v, x, dout, ds, dq, dk, dv, dx, ws, dmap);
}

// ---- without a state, without inputs of the rule --------------------------------------------------------------------

template <class Attention>
void forward_causal(const ranks& r, const Attention& attn, typename Attention::input q, typename Attention::input k,
                    typename Attention::input v, const typename Attention::inputs& x, typename Attention::output out,
                    typename Attention::workspace_type& ws) {
  auto s = attn.make_state();
  forward_causal(r, attn, s, q, k, v, x, out, ws);
}
template <class Attention>
void forward_causal(const ranks& r, const Attention& attn, typename Attention::state_type& s,
                    typename Attention::input q, typename Attention::input k, typename Attention::input v,
                    typename Attention::output out, typename Attention::workspace_type& ws) {
  forward_causal(r, attn, s, q, k, v, detail::engine_access::no_inputs<Attention>(), out, ws);
}
template <class Attention>
void forward_causal(const ranks& r, const Attention& attn, typename Attention::input q, typename Attention::input k,
                    typename Attention::input v, typename Attention::output out,
                    typename Attention::workspace_type& ws) {
  forward_causal(r, attn, q, k, v, detail::engine_access::no_inputs<Attention>(), out, ws);
}
template <class Attention>
void forward(const ranks& r, const Attention& attn, typename Attention::input q, typename Attention::input k,
             typename Attention::input v, typename Attention::output out, typename Attention::workspace_type& ws) {
  auto s = attn.make_state();
  forward(r, attn, s, q, k, v, out, ws);
}

template <class Attention>
void vjp_causal(const ranks& r, const Attention& attn, typename Attention::input q, typename Attention::input k,
                typename Attention::input v, const typename Attention::inputs& x, typename Attention::input dout,
                typename Attention::output dq, typename Attention::output dk, typename Attention::output dv,
                const typename Attention::input_gradients& dx, typename Attention::workspace_type& ws,
                typename Attention::parameter_gradient* dmap) {
  const auto s0 = attn.make_state();
  auto ds = attn.make_state();
  vjp_causal(r, attn, s0, q, k, v, x, dout, ds, dq, dk, dv, dx, ws, dmap);
}
template <class Attention>
void vjp_causal(const ranks& r, const Attention& attn, const typename Attention::state_type& s0,
                typename Attention::input q, typename Attention::input k, typename Attention::input v,
                typename Attention::input dout, typename Attention::state_type& ds, typename Attention::output dq,
                typename Attention::output dk, typename Attention::output dv, typename Attention::workspace_type& ws,
                typename Attention::parameter_gradient* dmap) {
  vjp_causal(r, attn, s0, q, k, v, detail::engine_access::no_inputs<Attention>(), dout, ds, dq, dk, dv, {}, ws, dmap);
}
template <class Attention>
void vjp_causal(const ranks& r, const Attention& attn, typename Attention::input q, typename Attention::input k,
                typename Attention::input v, typename Attention::input dout, typename Attention::output dq,
                typename Attention::output dk, typename Attention::output dv, typename Attention::workspace_type& ws,
                typename Attention::parameter_gradient* dmap) {
  vjp_causal(r, attn, q, k, v, detail::engine_access::no_inputs<Attention>(), dout, dq, dk, dv, {}, ws, dmap);
}

}  // namespace mpi
LINATTN_NAMESPACE_END
