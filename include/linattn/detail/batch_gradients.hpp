// Gradients of a batch: checks, rows, and tasks of sequences and heads.
#pragma once

#include <linattn/detail/batch_call.hpp>
#include <linattn/detail/batch_slices.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// The arguments of a vjp; of the causal form, whose queries are the keys' tokens, or not.
template <class Attention>
struct batch_gradient {
  batch_input<Attention> q, k, v;
  batch_inputs<Attention> x;
  batch_input<Attention> dout;
  batch_output<Attention> dq, dk, dv;
  batch_input_gradients<Attention> dx;
  std::span<typename Attention::parameter_gradient> dmap;
  bool causal;
};

template <class Call, class Attention>
void require_gradient(const Call& call, const batch_gradient<Attention>& g) {
  engine_access::require_differentiable<Attention>();
  const Attention& attn = call.attn;
  call.require_queries(g.q);
  call.require_keys(g.k, g.v, g.causal ? g.q : g.k);
  call.require_inputs(g.x, g.k);
  call.require("dout", g.dout, g.q, attn.output_heads(), attn.value_dim());
  call.require("dq", g.dq, g.q, attn.heads(), attn.head_dim());
  call.require("dk", g.dk, g.k, attn.key_heads(), attn.head_dim());
  call.require("dv", g.dv, g.k, attn.value_heads(), attn.value_dim());
  engine_access::for_each_input(attn, g.dx, [&](const char* name, const auto& view, Eigen::Index columns, const char*) {
    if (view.data() == nullptr) return;
    call.require(name, view, g.k, attn.value_heads(), columns, "the gradient of ");
  });
  call.require_no_segments();
  if (g.causal) {
    call.require_no_query_mask();
  } else {
    call.require_mask(call.options.query_mask, g.q);
  }
  for (const auto& to : {g.dq, g.dk, g.dv}) call.require_apart(to, {g.q, g.k, g.v, g.dout});
  if (!g.dmap.empty() && Eigen::Index(g.dmap.size()) != call.sequences) {
    refuse(call.function, Eigen::Index(g.dmap.size()), " gradients of the map's parameters are given for ",
           call.sequences, " sequences");
  }
}

/// What a task of these groups has of sequence b. Masked rows of its gradients are set to 0.
template <class Call, class Attention>
auto gradient_rows(const Call& call, const batch_gradient<Attention>& g, const group_range& groups, Eigen::Index b) {
  using S = typename Attention::scalar;
  const kept_rows keys = call.kept_keys(b, g.k);
  const kept_rows queries = g.causal ? keys : call.kept_queries(b, g.q);
  const auto from = [](auto rows, const kept_rows& kept) {
    rows.data += kept.first * rows.row_stride;
    return rows;
  };
  const auto to = [&](const batch_view<S>& view, const kept_rows& kept) {
    for (Eigen::Index h = 0; h < view.heads(); ++h) {
      if (!groups.contains(call.layout.heads.group_of(h, view.heads()))) continue;
      clear_masked(view.rows(b), view.tokens(b), kept, h, view.dim());
    }
    return from(view.rows(b), kept);
  };
  gradient_arguments<S, Attention::rule, typename Attention::parameter_gradient> a;
  a.queries = queries.tokens();
  a.keys = keys.tokens();
  a.kept_queries = queries.kept;
  a.kept_keys = keys.kept;
  a.q = from(g.q.rows(b), queries);
  a.k = from(g.k.rows(b), keys);
  a.v = from(g.v.rows(b), keys);
  a.dout = from(g.dout.rows(b), queries);
  a.dq = to(g.dq, queries);
  a.dk = to(g.dk, keys);
  a.dv = to(g.dv, keys);
  a.groups = groups;
  a.gradient = g.dmap.empty() ? nullptr : &g.dmap[std::size_t(b)];
  a.gates = call.template gates<const S>(g.x, b);
  if constexpr (decltype(a.gates)::has_log_decay) {
    a.gates.log_decay = from(a.gates.log_decay, keys);
    if (g.dx.log_decay.data() != nullptr) a.dlog_decay = to(g.dx.log_decay, keys);
  }
  if constexpr (decltype(a.gates)::has_beta) {
    a.gates.beta = from(a.gates.beta, keys);
    if (g.dx.beta.data() != nullptr) a.dbeta = to(g.dx.beta, keys);
  }
  return a;
}

/// work(engine, b, arguments, workspace) for every sequence, in tasks of some heads (where heads share, of some
/// groups), or in one task where all heads add to one gradient of parameters.
template <class Call, class Attention, class Work>
void run_gradients(const Call& call, const batch_gradient<Attention>& g, const Work& work) {
  const Eigen::Index parts = Call::cuts_heads && g.dmap.empty() ? call.layout.heads.groups() : 1;
  const Eigen::Index width = std::min(Eigen::Index(call.ws.size()), call.sequences * parts);
  if (width == 0) return;
  const auto weight = [&](Eigen::Index b) { return g.q.tokens(b) + g.k.tokens(b) + least_tokens; };
  const batch_slices<decltype(weight)> slices(call.sequences, parts, width, weight);
  call.executor.parallel_for(width, [&](Eigen::Index w) {
    slices.for_each(w, [&](Eigen::Index b, Eigen::Index first, Eigen::Index last) {
      auto engine = engine_access::engine(call.attn);
      group_range groups;
      if constexpr (Call::cuts_heads) {
        if (g.dmap.empty()) {
          groups = {first, last};
          if (!call.layout.heads.shares) engine.states = {first, last};  // a group is a state then
        }
      }
      work(engine, b, gradient_rows(call, g, groups, b), call.ws[std::size_t(w)]);
    });
  });
}

}  // namespace detail
LINATTN_NAMESPACE_END
