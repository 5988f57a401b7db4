// Bodies of batch.hpp: checks, then the engine's passes for each task.
#pragma once

#include <linattn/batch.hpp>
#include <linattn/detail/batch_call.hpp>
#include <linattn/detail/batch_gradients.hpp>
#include <linattn/detail/batch_tasks.hpp>

LINATTN_NAMESPACE_BEGIN

template <class Attention>
std::vector<typename Attention::workspace_type> make_workspaces(const Attention& attn, Eigen::Index n) {
  if (n < 1) detail::refuse("make_workspaces", n, " workspaces are asked for, at least 1 is needed");
  return std::vector<typename Attention::workspace_type>(std::size_t(n), attn.make_workspace());
}

template <class Attention>
std::vector<typename Attention::state_type> make_states(const Attention& attn, Eigen::Index n,
                                                        Eigen::Index first_position) {
  if (n < 0) detail::refuse("make_states", n, " states are asked for");
  return std::vector<typename Attention::state_type>(std::size_t(n), attn.make_state(first_position));
}

template <class Attention, executor Executor>
void forward_causal(const Attention& attn, std::type_identity_t<batch_states<Attention>> states,
                    batch_input<Attention> q, batch_input<Attention> k, batch_input<Attention> v,
                    const batch_inputs<Attention>& x, batch_output<Attention> out, workspaces<Attention> ws,
                    const Executor& executor, const batch_options<Attention>& o) {
  const detail::batch_call<Attention, Executor> call("forward_causal", attn, states, ws, executor, o, q.sequences());
  call.require_queries(q);
  call.require_keys(k, v, q);
  call.require_inputs(x, q);
  call.require_output(out, q);
  call.require_apart(out, {q, k, v});
  call.require_no_query_mask();
  if (!o.segments.empty()) {
    if constexpr (Attention::rule.corrects == correction::none) {
      detail::run_segments(call, o.segments, q, k, v, x, out);
      return call.add_tokens(k);
    } else {
      detail::refuse("forward_causal",
                     "segments of one sequence are for rules whose states merge; of a delta rule they would cost more "
                     "than they save");
    }
  }
  const auto weight = [&](Eigen::Index b) { return call.kept_keys(b, k).tokens() + detail::least_tokens; };
  const auto work = [&](const auto& engine, Eigen::Index b, auto* slab, auto* scratch, Eigen::Index column) {
    call.clear_masked_rows(engine, b, out, call.kept_keys(b, k), column);
    engine.template pass<detail::causal_block, detail::reads_and_writes>(
        detail::from_column(call.all_rows(b, q, k, v, x, out), column), slab, scratch);
  };
  detail::run_tasks<true>(call, weight, work);
  call.add_tokens(k);
}

template <class Attention, executor Executor>
void forward_causal(const Attention& attn, std::type_identity_t<batch_states<Attention>> states,
                    batch_input<Attention> q, batch_input<Attention> k, batch_input<Attention> v,
                    batch_output<Attention> out, workspaces<Attention> ws, const Executor& executor,
                    const batch_options<Attention>& o) {
  static_cast<void>(detail::engine_access::no_inputs<Attention>());
  forward_causal(attn, states, q, k, v, batch_inputs<Attention>(), out, ws, executor, o);
}

template <class Attention, executor Executor>
void forward(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> q,
             batch_input<Attention> k, batch_input<Attention> v, batch_output<Attention> out, workspaces<Attention> ws,
             const Executor& executor, const batch_options<Attention>& o) {
  static_assert(!Attention::rule.is_ordered(),
                "linattn: forward, which lets every query see every key, is not defined for a rule in which the order "
                "of the tokens matters; use forward_causal, or absorb and read");
  const detail::batch_call<Attention, Executor> call("forward", attn, states, ws, executor, o, q.sequences());
  call.require_queries(q);
  call.require_keys(k, v, k);
  call.require_output(out, q);
  call.require_apart(out, {q, k, v});
  call.require_mask(o.query_mask, q);
  call.require_no_segments();
  const auto weight = [&](Eigen::Index b) { return q.tokens(b) + k.tokens(b) + detail::least_tokens; };
  const auto work = [&](const auto& engine, Eigen::Index b, auto* slab, auto* scratch, Eigen::Index column) {
    call.clear_masked_rows(engine, b, out, call.kept_queries(b, q), column);
    engine.template pass<detail::half_block, detail::writes_only>(
        detail::from_column(call.writing_rows(b, k, v, {}), column), slab, scratch);
    engine.template pass<detail::half_block, detail::reads_only>(
        detail::from_column(call.reading_rows(b, q, out, call.kept_keys(b, k).tokens()), column), slab, scratch);
  };
  detail::run_tasks<true>(call, weight, work);
  call.add_tokens(k);
}

template <class Attention, executor Executor>
void step(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> q,
          batch_input<Attention> k, batch_input<Attention> v, const batch_inputs<Attention>& x,
          batch_output<Attention> out, workspaces<Attention> ws, const Executor& executor) {
  const batch_options<Attention> none;
  const detail::batch_call<Attention, Executor> call("step", attn, states, ws, executor, none, q.sequences());
  call.require_one_token(q);
  call.require_queries(q);
  call.require_keys(k, v, q);
  call.require_inputs(x, q);
  call.require_output(out, q);
  call.require_apart(out, {q, k, v});
  const auto weight = [](Eigen::Index) { return Eigen::Index(1); };
  const auto work = [&](const auto& engine, Eigen::Index b, auto* slab, auto* scratch, Eigen::Index column) {
    engine.template pass<1, detail::reads_and_writes>(detail::from_column(call.all_rows(b, q, k, v, x, out), column),
                                                      slab, scratch);
  };
  detail::run_tasks<true>(call, weight, work);
  call.add_tokens(k);
}

template <class Attention, executor Executor>
void step(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> q,
          batch_input<Attention> k, batch_input<Attention> v, batch_output<Attention> out, workspaces<Attention> ws,
          const Executor& executor) {
  static_cast<void>(detail::engine_access::no_inputs<Attention>());
  step(attn, states, q, k, v, batch_inputs<Attention>(), out, ws, executor);
}

template <class Attention, executor Executor>
void absorb(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> k,
            batch_input<Attention> v, const batch_inputs<Attention>& x, workspaces<Attention> ws,
            const Executor& executor, const batch_options<Attention>& o) {
  const detail::batch_call<Attention, Executor> call("absorb", attn, states, ws, executor, o, k.sequences());
  call.require_keys(k, v, k);
  call.require_inputs(x, k);
  call.require_no_query_mask();
  call.require_no_segments();
  const auto weight = [&](Eigen::Index b) { return k.tokens(b) + detail::least_tokens; };
  const auto work = [&](const auto& engine, Eigen::Index b, auto* slab, auto* scratch, Eigen::Index column) {
    engine.template pass<detail::half_block, detail::writes_only>(
        detail::from_column(call.writing_rows(b, k, v, x), column), slab, scratch);
  };
  detail::run_tasks<true>(call, weight, work);
  call.add_tokens(k);
}

template <class Attention, executor Executor>
void absorb(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> k,
            batch_input<Attention> v, workspaces<Attention> ws, const Executor& executor,
            const batch_options<Attention>& o) {
  static_cast<void>(detail::engine_access::no_inputs<Attention>());
  absorb(attn, states, k, v, batch_inputs<Attention>(), ws, executor, o);
}

template <class Attention, executor Executor>
void read(const Attention& attn, std::type_identity_t<batch_states<Attention>> states, batch_input<Attention> q,
          batch_output<Attention> out, workspaces<Attention> ws, const Executor& executor,
          const batch_options<Attention>& o) {
  const detail::batch_call<Attention, Executor> call("read", attn, states, ws, executor, o, q.sequences());
  call.require_queries(q);
  call.require_output(out, q);
  call.require_apart(out, {q});
  call.require_mask(o.query_mask, q);
  call.require_no_mask();
  call.require_no_segments();
  const auto weight = [&](Eigen::Index b) { return q.tokens(b) + detail::least_tokens; };
  const auto work = [&](const auto& engine, Eigen::Index b, auto* slab, auto* scratch, Eigen::Index column) {
    call.clear_masked_rows(engine, b, out, call.kept_queries(b, q), column);
    engine.template pass<detail::half_block, detail::reads_only>(
        detail::from_column(call.reading_rows(b, q, out, 0), column), slab, scratch);
  };
  detail::run_tasks<false>(call, weight, work);
}

template <class Attention, executor Executor>
void vjp(const Attention& attn, batch_input<Attention> q, batch_input<Attention> k, batch_input<Attention> v,
         batch_input<Attention> dout, batch_output<Attention> dq, batch_output<Attention> dk,
         batch_output<Attention> dv, workspaces<Attention> ws, const Executor& executor,
         const batch_options<Attention>& o, std::span<typename Attention::parameter_gradient> dmap) {
  static_assert(!Attention::rule.is_ordered(),
                "linattn: vjp is the gradient of forward, which is not defined for a rule in which the order of the "
                "tokens matters; use vjp_causal");
  const batch_states<Attention> none;
  const detail::batch_call<Attention, Executor> call("vjp", attn, none, ws, executor, o, q.sequences());
  const detail::batch_gradient<Attention> g{q, k, v, {}, dout, dq, dk, dv, {}, dmap, false};
  detail::require_gradient(call, g);
  detail::run_gradients(call, g, [&](const auto& engine, Eigen::Index, const auto& a, auto& own) {
    detail::engine_access::run_vjp(attn, engine, a, own);
  });
}

template <class Attention, executor Executor>
void vjp_causal(const Attention& attn, std::span<const typename Attention::state_type> s0, batch_input<Attention> q,
                batch_input<Attention> k, batch_input<Attention> v, const batch_inputs<Attention>& x,
                batch_input<Attention> dout, std::span<typename Attention::state_type> ds, batch_output<Attention> dq,
                batch_output<Attention> dk, batch_output<Attention> dv, const batch_input_gradients<Attention>& dx,
                workspaces<Attention> ws, const Executor& executor, const batch_options<Attention>& o,
                std::span<typename Attention::parameter_gradient> dmap) {
  const batch_states<Attention> gradients = ds.empty() ? batch_states<Attention>() : batch_states<Attention>(ds);
  const detail::batch_call<Attention, Executor> call("vjp_causal", attn, gradients, ws, executor, o, q.sequences());
  const detail::batch_gradient<Attention> g{q, k, v, x, dout, dq, dk, dv, dx, dmap, true};
  detail::require_gradient(call, g);
  if (s0.size() != ds.size()) {
    detail::refuse("vjp_causal", Eigen::Index(s0.size()), " initial states are given, and gradients of ",
                   Eigen::Index(ds.size()));
  }
  for (const auto& s : s0) detail::engine_access::require_state(attn, "vjp_causal", s);
  LINATTN_ASSERT((s0.empty() || s0.data() != ds.data()) && "linattn: the gradients of the states are other states");
  detail::run_gradients(call, g, [&](const auto& engine, Eigen::Index b, const auto& a, auto& own) {
    detail::engine_access::run_vjp_causal(attn, engine, a, s0.empty() ? nullptr : &s0[std::size_t(b)],
                                          ds.empty() ? nullptr : &ds[std::size_t(b)], own);
  });
}

template <class Attention, executor Executor>
void vjp_causal(const Attention& attn, std::span<const typename Attention::state_type> s0, batch_input<Attention> q,
                batch_input<Attention> k, batch_input<Attention> v, batch_input<Attention> dout,
                std::span<typename Attention::state_type> ds, batch_output<Attention> dq, batch_output<Attention> dk,
                batch_output<Attention> dv, workspaces<Attention> ws, const Executor& executor,
                const batch_options<Attention>& o, std::span<typename Attention::parameter_gradient> dmap) {
  static_cast<void>(detail::engine_access::no_inputs<Attention>());
  vjp_causal(attn, s0, q, k, v, batch_inputs<Attention>(), dout, ds, dq, dk, dv, {}, ws, executor, o, dmap);
}

LINATTN_NAMESPACE_END
