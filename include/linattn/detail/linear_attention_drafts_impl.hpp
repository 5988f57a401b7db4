// Bodies of linear_attention.hpp: drafts. No `pragma once`: linear_attention_impl.hpp includes this where it has the
// template heads, and included by itself it goes there first.
#ifndef LINATTN_MEMBER
#include <linattn/linear_attention.hpp>
#else

#include <linattn/detail/draft_engine.hpp>

LINATTN_NAMESPACE_BEGIN

LINATTN_MEMBER
void LINATTN_OPERATOR::require_draft(const char* function, const draft_type& d) const {
  static_assert(!rule.log_scaled,
                "linattn: drafts are not built for feature maps that are kept as logarithms; take a copy of the state "
                "and forward_causal it");
  if (!access::is_empty(d) && d.heads() == value_heads() && d.features() == features() &&
      d.value_dim() == value_dim()) {
    return;
  }
  detail::refuse(function, "the draft is ", d, ", expected ",
                 detail::state_sizes{value_heads(), features(), value_dim()},
                 ": take it from this operator's make_draft()");
}

LINATTN_MEMBER
void LINATTN_OPERATOR::forward_causal(const state_type& s, input q, input k, input v, const inputs& x, output out,
                                      draft_type& d, workspace_type& ws) const {
  require_bulk("forward_causal", q, k, v, out, ws, true);
  require_rule_inputs("forward_causal", x, q.rows());
  require_state("forward_causal", s);
  require_draft("forward_causal", d);
  if (q.rows() > draft_type::capacity) {
    detail::refuse("forward_causal", "a draft has room for ", draft_type::capacity, " tokens, not for ", q.rows());
  }
  const Eigen::Index position = s.first_position() + s.tokens();
  const auto constants = engine();
  const draft_layout_type layout = draft_layout();
  if (q.rows() > 0) {
    detail::draft_engine<FeatureMap, Scalar, layout_type, draft_layout_type>{constants, layout}.forward(
        rows_of(q.rows(), position, q, k, v, x, out), access::data(s), access::data(d), access::slab(ws).data());
  }
  access::set_tokens(d, q.rows(), position);
}

LINATTN_MEMBER
void LINATTN_OPERATOR::forward_causal(const state_type& s, input q, input k, input v, output out, draft_type& d,
                                      workspace_type& ws) const {
  forward_causal(s, q, k, v, no_inputs(), out, d, ws);
}

LINATTN_MEMBER
void LINATTN_OPERATOR::accept(state_type& s, const draft_type& d, Eigen::Index j, workspace_type& ws) const {
  require_state("accept", s);
  require_draft("accept", d);
  require_workspace("accept", ws);
  if (j < 0 || j > d.tokens()) detail::refuse("accept", "the draft holds ", d.tokens(), " tokens, not ", j);
  if (s.first_position() + s.tokens() != d.position()) {
    detail::refuse("accept", "the state's next token is number ", s.first_position() + s.tokens(),
                   ", the draft begins with number ", d.position(),
                   ": it was drafted from another state, or accepted already");
  }
  const auto constants = engine();
  const draft_layout_type layout = draft_layout();
  if (j > 0) {
    detail::draft_engine<FeatureMap, Scalar, layout_type, draft_layout_type>{constants, layout}.accept(
        j, access::data(d), access::data(s), d.position(), access::slab(ws).data());
  }
  access::add_tokens(s, j);
}

LINATTN_NAMESPACE_END

#endif
