// Bodies of the gradient verbs of linear_attention.hpp: checks, then one call of a gradient engine.
//
// No `pragma once`: linear_attention_impl.hpp includes this where it has the template heads, and included by itself it
// goes there first.
#ifndef LINATTN_MEMBER
#include <linattn/linear_attention.hpp>
#else

LINATTN_NAMESPACE_BEGIN

LINATTN_MEMBER
auto LINATTN_OPERATOR::gradient_arguments_of(input q, input k, input v, const inputs& x, input dout, output dq,
                                             output dk, output dv, const input_gradients& dx,
                                             parameter_gradient* dmap) const -> gradient_arguments {
  gradient_arguments a{q.rows(),
                       k.rows(),
                       {q, head_dim()},
                       {k, head_dim()},
                       {v, value_dim()},
                       {dout, value_dim()},
                       {dq, head_dim()},
                       {dk, head_dim()},
                       {dv, value_dim()},
                       dmap,
                       gates_of<const Scalar>(x)};
  const auto dgates = gates_of<Scalar>(dx);
  if constexpr (decltype(dgates)::has_log_decay) a.dlog_decay = dgates.log_decay;
  if constexpr (decltype(dgates)::has_beta) a.dbeta = dgates.beta;
  return a;
}

LINATTN_MEMBER
void LINATTN_OPERATOR::require_differentiable() {
  static_assert(detail::has_gradient(rule),
                "linattn: the gradient of this update rule is not built; additive, decay, gated, delta and gated_delta "
                "have one");
  static_assert(!rule.log_scaled || rule.decay == decay_kind::none,
                "linattn: the gradient of a map that writes log phi is not built for a rule that decays; additive has "
                "one");
  static_assert(detail::is_differentiable<FeatureMap, T>,
                "linattn: the feature map has no `vjp` (an elementwise one: no `vjp_packet`), so no gradient can pass "
                "through it; see linattn/feature_map.hpp for what to add");
}

LINATTN_MEMBER
void LINATTN_OPERATOR::require_gradient(const char* function, input q, input k, input v, const inputs& x, input dout,
                                        output dq, output dk, output dv, const input_gradients& dx, workspace_type& ws,
                                        bool causal) const {
  require_differentiable();
  require_inputs(function, q, k, v, causal);
  require_rule_inputs(function, x, k.rows());
  detail::require_shape(function, "dout", dout, q.rows(), output_heads(), value_dim(), "value_dim");
  detail::require_shape(function, "dq", dq, q.rows(), heads(), head_dim(), "head_dim");
  detail::require_shape(function, "dk", dk, k.rows(), key_heads(), head_dim(), "head_dim");
  detail::require_shape(function, "dv", dv, k.rows(), value_heads(), value_dim(), "value_dim");
  output dlog_decay, dbeta;
  if constexpr (requires { dx.log_decay; }) dlog_decay = dx.log_decay;
  if constexpr (requires { dx.beta; }) dbeta = dx.beta;
  if (dlog_decay.data() != nullptr) {
    constexpr bool per_feature = rule.decay == decay_kind::per_feature;
    detail::require_shape(function, "the gradient of log_decay", dlog_decay, k.rows(), value_heads(),
                          per_feature ? features() : 1, per_feature ? "features" : "one decay");
  }
  if (dbeta.data() != nullptr) {
    detail::require_shape(function, "the gradient of beta", dbeta, k.rows(), value_heads(), 1, "one beta");
  }
  require_workspace(function, ws);
  const output outputs[] = {dq, dk, dv, dlog_decay, dbeta};
  for ([[maybe_unused]] const output& to : outputs) {
    const auto apart = [&]([[maybe_unused]] const input& from) {
      LINATTN_ASSERT(!detail::overlap(to, from) && "linattn: a gradient overlaps an input");
    };
    for (const input& from : {q, k, v, dout}) apart(from);
    for_each_input(x, [&](const char*, const input& from, Eigen::Index, const char*) { apart(from); });
    for ([[maybe_unused]] const output* other = &to + 1; other != std::end(outputs); ++other) {
      LINATTN_ASSERT(!detail::overlap(to, *other) && "linattn: two gradients overlap");
    }
  }
}

LINATTN_MEMBER
void LINATTN_OPERATOR::run_vjp(const engine_type& constants, const gradient_arguments& a, workspace_type& ws) const {
  const auto run = [&](const engine_type& of, const gradient_arguments& x, T* dstate) {
    detail::gradient_engine<FeatureMap, T, layout_type>(of, x, access::slab(ws).data())
        .noncausal(dstate, 0, a.keys - a.queries);
  };
  if constexpr (decltype(m_layout.heads)::can_share) {
    if (m_layout.heads.shares) {
      T* const dstate = access::slab(ws).data() + m_layout.own_state();
      return detail::for_each_output_head(
          constants, a, [&](const engine_type& of, const gradient_arguments& x, Eigen::Index s, bool) {
            m_layout.state.clear(dstate, s, s + 1);
            run(of, x, dstate);
          });
    }
  }
  run(constants, a, own_state(ws));
}

/// From nothing, and with nothing behind it, where s0 and ds are null.
LINATTN_MEMBER
void LINATTN_OPERATOR::run_vjp_causal(const engine_type& constants, const gradient_arguments& a, const state_type* s0,
                                      state_type* ds, workspace_type& ws) const {
  T* const scratch = access::slab(ws).data();
  const T* const initial = s0 == nullptr ? nullptr : access::data(*s0);
  const Eigen::Index position = s0 == nullptr ? 0 : s0->first_position() + s0->tokens();
  const auto run = [&](const engine_type& of, const gradient_arguments& x, T* dstate) {
    if constexpr (rule.corrects != correction::none) {
      detail::correction_gradient_engine<FeatureMap, T, layout_type>(of, x, scratch).causal(initial, dstate, position);
    } else {
      detail::gradient_engine<FeatureMap, T, layout_type>(of, x, scratch).causal(initial, dstate, position);
    }
  };
  if constexpr (decltype(m_layout.heads)::can_share) {
    if (m_layout.heads.shares) {
      // The gradient of the final state enters once, with the first reader; what the others make of 0 is added.
      T* const own = scratch + m_layout.own_state();
      return detail::for_each_output_head(
          constants, a, [&](const engine_type& of, const gradient_arguments& x, Eigen::Index s, bool first) {
            if (ds != nullptr && first) return run(of, x, access::data(*ds));
            m_layout.state.clear(own, s, s + 1);
            run(of, x, own);
            if (ds != nullptr) access::append_head(*ds, s, own + s * m_layout.state.head_stride());
          });
    }
  }
  run(constants, a, ds == nullptr ? own_state(ws) : access::data(*ds));
}

LINATTN_MEMBER
auto LINATTN_OPERATOR::make_gradients(input q, input k, input v) const -> gradients<Scalar> {
  return {row_matrix<Scalar>(q.rows(), q.cols()), row_matrix<Scalar>(k.rows(), k.cols()),
          row_matrix<Scalar>(v.rows(), v.cols())};
}

LINATTN_MEMBER
auto LINATTN_OPERATOR::make_gradients(input q, input k, input v, const inputs& x) const -> gradients_with_inputs {
  gradients_with_inputs d{make_gradients(q, k, v), {}};
  if constexpr (requires { x.log_decay; }) d.inputs.log_decay.resize(x.log_decay.rows(), x.log_decay.cols());
  if constexpr (requires { x.beta; }) d.inputs.beta.resize(x.beta.rows(), x.beta.cols());
  return d;
}

LINATTN_MEMBER
void LINATTN_OPERATOR::vjp(input q, input k, input v, input dout, output dq, output dk, output dv, workspace_type& ws,
                           parameter_gradient* dmap) const {
  static_assert(!rule.is_ordered(),
                "linattn: vjp is the gradient of forward, which is not defined for a rule in which the order of the "
                "tokens matters; use vjp_causal");
  require_gradient("vjp", q, k, v, no_inputs(), dout, dq, dk, dv, {}, ws, false);
  const gradient_arguments a = gradient_arguments_of(q, k, v, no_inputs(), dout, dq, dk, dv, {}, dmap);
  run_vjp(engine(), a, ws);
}

LINATTN_MEMBER
void LINATTN_OPERATOR::vjp_causal(const state_type& s0, input q, input k, input v, const inputs& x, input dout,
                                  state_type& ds, output dq, output dk, output dv, const input_gradients& dx,
                                  workspace_type& ws, parameter_gradient* dmap) const {
  require_gradient("vjp_causal", q, k, v, x, dout, dq, dk, dv, dx, ws, true);
  const gradient_arguments a = gradient_arguments_of(q, k, v, x, dout, dq, dk, dv, dx, dmap);
  require_state("vjp_causal", s0);
  require_state("vjp_causal", ds);
  LINATTN_ASSERT(&s0 != &ds && "linattn: the gradient of the state is another state");
  run_vjp_causal(engine(), a, &s0, &ds, ws);
}

LINATTN_MEMBER
void LINATTN_OPERATOR::vjp_causal(input q, input k, input v, const inputs& x, input dout, output dq, output dk,
                                  output dv, const input_gradients& dx, workspace_type& ws,
                                  parameter_gradient* dmap) const {
  require_gradient("vjp_causal", q, k, v, x, dout, dq, dk, dv, dx, ws, true);
  const gradient_arguments a = gradient_arguments_of(q, k, v, x, dout, dq, dk, dv, dx, dmap);
  run_vjp_causal(engine(), a, nullptr, nullptr, ws);
}

LINATTN_MEMBER
auto LINATTN_OPERATOR::vjp_causal(const state_type& s0, input q, input k, input v, const inputs& x, input dout,
                                  state_type& ds) const -> gradients_with_inputs {
  gradients_with_inputs d = make_gradients(q, k, v, x);
  workspace_type ws = make_workspace();
  vjp_causal(s0, q, k, v, x, dout, ds, d.dq, d.dk, d.dv, d.views(), ws);
  return d;
}

LINATTN_MEMBER
auto LINATTN_OPERATOR::vjp_causal(input q, input k, input v, const inputs& x, input dout) const
    -> gradients_with_inputs {
  gradients_with_inputs d = make_gradients(q, k, v, x);
  workspace_type ws = make_workspace();
  vjp_causal(q, k, v, x, dout, d.dq, d.dk, d.dv, d.views(), ws);
  return d;
}

LINATTN_MEMBER
void LINATTN_OPERATOR::vjp_causal(const state_type& s0, input q, input k, input v, input dout, state_type& ds,
                                  output dq, output dk, output dv, workspace_type& ws, parameter_gradient* dmap) const {
  vjp_causal(s0, q, k, v, no_inputs(), dout, ds, dq, dk, dv, {}, ws, dmap);
}

LINATTN_MEMBER
void LINATTN_OPERATOR::vjp_causal(input q, input k, input v, input dout, output dq, output dk, output dv,
                                  workspace_type& ws, parameter_gradient* dmap) const {
  vjp_causal(q, k, v, no_inputs(), dout, dq, dk, dv, {}, ws, dmap);
}

LINATTN_MEMBER
gradients<Scalar> LINATTN_OPERATOR::vjp(input q, input k, input v, input dout) const {
  gradients<Scalar> d = make_gradients(q, k, v);
  workspace_type ws = make_workspace();
  vjp(q, k, v, dout, d.dq, d.dk, d.dv, ws);
  return d;
}

LINATTN_MEMBER
gradients<Scalar> LINATTN_OPERATOR::vjp_causal(const state_type& s0, input q, input k, input v, input dout,
                                               state_type& ds) const {
  return vjp_causal(s0, q, k, v, no_inputs(), dout, ds);
}

LINATTN_MEMBER
gradients<Scalar> LINATTN_OPERATOR::vjp_causal(input q, input k, input v, input dout) const {
  return vjp_causal(q, k, v, no_inputs(), dout);
}

LINATTN_NAMESPACE_END

#endif
