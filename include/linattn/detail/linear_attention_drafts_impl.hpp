// Bodies of linear_attention.hpp: drafts. No `pragma once`: linear_attention_impl.hpp includes this where it has the
// template heads, and included by itself it goes there first.
#ifndef LINATTN_MEMBER
#include <linattn/linear_attention.hpp>
#else

#include <linattn/detail/draft_engine.hpp>

LINATTN_NAMESPACE_BEGIN

LINATTN_MEMBER
constexpr void LINATTN_OPERATOR::require_drafts_are_built() noexcept {
  static_assert(!rule.log_scaled,
                "linattn: drafts are not built for feature maps that are kept as logarithms; take a copy of the state "
                "and forward_causal it");
}

LINATTN_MEMBER
bool LINATTN_OPERATOR::fits(const draft_type& d) const noexcept {
  return !access::is_empty(d) && d.heads() == value_heads() && d.features() == features() &&
         d.value_dim() == value_dim();
}

LINATTN_MEMBER
void LINATTN_OPERATOR::require_draft(const char* function, const draft_type& d) const {
  require_drafts_are_built();
  if (fits(d)) return;
  detail::refuse(function, "the draft is ", d, ", expected ",
                 detail::state_sizes{value_heads(), features(), value_dim()},
                 ": take it from this operator's make_draft()");
}

/// The tokens x behind those that d holds.
LINATTN_MEMBER
void LINATTN_OPERATOR::run_draft(const rows_type& x, const state_type& s, draft_type& d, workspace_type& ws) const {
  const auto constants = engine();
  const draft_layout_type layout = draft_layout();
  detail::draft_engine<FeatureMap, Scalar, layout_type, draft_layout_type>{constants, layout}.forward(
      x, d.tokens(), access::data(s), access::data(d), access::slab(ws).data());
}

LINATTN_MEMBER
void LINATTN_OPERATOR::run_accept(state_type& s, const draft_type& d, Eigen::Index j, workspace_type& ws) const {
  const auto constants = engine();
  const draft_layout_type layout = draft_layout();
  detail::draft_engine<FeatureMap, Scalar, layout_type, draft_layout_type>{constants, layout}.accept(
      j, access::data(d), access::data(s), d.position(), access::slab(ws).data());
  access::add_tokens(s, j);
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
  d.clear();
  if (q.rows() > 0) run_draft(rows_of(q.rows(), position, q, k, v, x, out), s, d, ws);
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
  if (d.tokens() > 0 && s.first_position() + s.tokens() != d.position()) {
    detail::refuse("accept", "the state's next token is number ", s.first_position() + s.tokens(),
                   ", the draft begins with number ", d.position(),
                   ": it was drafted from another state, or accepted already");
  }
  if (j > 0) run_accept(s, d, j, ws);
}

LINATTN_MEMBER
void LINATTN_OPERATOR::accept(state_type& s, draft_type& d, workspace_type& ws) const {
  accept(s, d, d.tokens(), ws);
  d.clear();
}

LINATTN_MEMBER
void LINATTN_OPERATOR::step(state_type& s, token q_t, token k_t, token v_t, const token_inputs& x,
                            vector_view<Scalar> out_t, draft_type& d,
                            workspace_type& ws) const noexcept LINATTN_NONBLOCKING {
  require_drafts_are_built();
  assert_token(s, q_t, k_t, v_t, x, out_t, ws);
  LINATTN_ASSERT(fits(d) && "linattn::step: the draft is not from this operator's make_draft()");
  LINATTN_ASSERT((d.tokens() == 0 || d.position() == s.first_position() + s.tokens()) &&
                 "linattn::step: the draft is of another state, or was accepted by number: clear() it");
  if (d.tokens() >= draft_type::steps_at_once) {
    run_accept(s, d, d.tokens(), ws);
    d.clear();
  }
  const Eigen::Index pending = d.tokens();
  const Eigen::Index position = s.first_position() + s.tokens();
  run_draft(rows_of(1, position + pending, detail::as_row(q_t), detail::as_row(k_t), detail::as_row(v_t), x,
                    detail::as_row(out_t)),
            s, d, ws);
  access::set_tokens(d, pending + 1, position);
}

LINATTN_MEMBER
void LINATTN_OPERATOR::step(state_type& s, token q_t, token k_t, token v_t, vector_view<Scalar> out_t, draft_type& d,
                            workspace_type& ws) const noexcept LINATTN_NONBLOCKING {
  static_cast<void>(no_inputs());
  step(s, q_t, k_t, v_t, token_inputs(), out_t, d, ws);
}

LINATTN_NAMESPACE_END

#endif
