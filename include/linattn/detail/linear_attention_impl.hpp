// Bodies of linear_attention.hpp: checks, then one call of the engine. Checks, drafts and gradients are in files of
// their own.
#pragma once

#include <linattn/linear_attention.hpp>

#include <cmath>
#include <memory>

// The template head of every member, once.
#define LINATTN_MEMBER                                                                                     \
  template <class FeatureMap, class UpdateRule, class Scalar, Eigen::Index HeadDim, Eigen::Index ValueDim, \
            Eigen::Index Heads>
#define LINATTN_OPERATOR linear_attention<FeatureMap, UpdateRule, Scalar, HeadDim, ValueDim, Heads>

#include <linattn/detail/linear_attention_checks_impl.hpp>

LINATTN_NAMESPACE_BEGIN

// ---- bulk verbs -----------------------------------------------------------------------------------------------------

LINATTN_MEMBER
void LINATTN_OPERATOR::run_forward(T* slab, Eigen::Index position, input q, input k, input v, output out,
                                   workspace_type& ws) const {
  T* const scratch = access::slab(ws).data();
  static_assert(
      !rule.is_ordered(),
      "linattn: forward, which lets every query see every key, is not defined for a rule in which the order of "
      "the tokens matters; use forward_causal, or absorb and read");
  engine().template pass<detail::half_block, detail::writes_only>(
      rows_of(k.rows(), position, {}, k, v, no_inputs(), {}), slab, scratch);
  engine().template pass<detail::half_block, detail::reads_only>(
      rows_of(q.rows(), position + k.rows() - q.rows(), q, {}, {}, no_inputs(), out), slab, scratch);
}

LINATTN_MEMBER
void LINATTN_OPERATOR::forward(state_type& s, input q, input k, input v, output out, workspace_type& ws) const {
  require_bulk("forward", q, k, v, out, ws, false);
  require_state("forward", s);
  run_forward(access::data(s), s.first_position() + s.tokens(), q, k, v, out, ws);
  access::add_tokens(s, k.rows());
}

LINATTN_MEMBER
void LINATTN_OPERATOR::forward(input q, input k, input v, output out, workspace_type& ws) const {
  require_bulk("forward", q, k, v, out, ws, false);
  run_forward(own_state(ws), 0, q, k, v, out, ws);
}

LINATTN_MEMBER
row_matrix<Scalar> LINATTN_OPERATOR::forward(state_type& s, input q, input k, input v) const {
  row_matrix<Scalar> out(q.rows(), output_heads() * value_dim());
  workspace_type ws = make_workspace();
  forward(s, q, k, v, out, ws);
  return out;
}

LINATTN_MEMBER
row_matrix<Scalar> LINATTN_OPERATOR::forward(input q, input k, input v) const {
  row_matrix<Scalar> out(q.rows(), output_heads() * value_dim());
  workspace_type ws = make_workspace();
  forward(q, k, v, out, ws);
  return out;
}

LINATTN_MEMBER
void LINATTN_OPERATOR::forward_causal(state_type& s, input q, input k, input v, const inputs& x, output out,
                                      workspace_type& ws) const {
  require_bulk("forward_causal", q, k, v, out, ws, true);
  require_rule_inputs("forward_causal", x, q.rows(), out);
  require_state("forward_causal", s);
  engine().template pass<detail::causal_block, detail::reads_and_writes>(
      rows_of(q.rows(), s.first_position() + s.tokens(), q, k, v, x, out), access::data(s), access::slab(ws).data());
  access::add_tokens(s, k.rows());
}

LINATTN_MEMBER
void LINATTN_OPERATOR::forward_causal(input q, input k, input v, const inputs& x, output out,
                                      workspace_type& ws) const {
  require_bulk("forward_causal", q, k, v, out, ws, true);
  require_rule_inputs("forward_causal", x, q.rows(), out);
  engine().template pass<detail::causal_block, detail::reads_and_writes>(rows_of(q.rows(), 0, q, k, v, x, out),
                                                                         own_state(ws), access::slab(ws).data());
}

LINATTN_MEMBER
row_matrix<Scalar> LINATTN_OPERATOR::forward_causal(state_type& s, input q, input k, input v, const inputs& x) const {
  row_matrix<Scalar> out(q.rows(), output_heads() * value_dim());
  workspace_type ws = make_workspace();
  forward_causal(s, q, k, v, x, out, ws);
  return out;
}

LINATTN_MEMBER
row_matrix<Scalar> LINATTN_OPERATOR::forward_causal(input q, input k, input v, const inputs& x) const {
  row_matrix<Scalar> out(q.rows(), output_heads() * value_dim());
  workspace_type ws = make_workspace();
  forward_causal(q, k, v, x, out, ws);
  return out;
}

LINATTN_MEMBER
void LINATTN_OPERATOR::forward_causal(state_type& s, input q, input k, input v, output out, workspace_type& ws) const {
  forward_causal(s, q, k, v, no_inputs(), out, ws);
}

LINATTN_MEMBER
void LINATTN_OPERATOR::forward_causal(input q, input k, input v, output out, workspace_type& ws) const {
  forward_causal(q, k, v, no_inputs(), out, ws);
}

LINATTN_MEMBER
row_matrix<Scalar> LINATTN_OPERATOR::forward_causal(state_type& s, input q, input k, input v) const {
  return forward_causal(s, q, k, v, no_inputs());
}

LINATTN_MEMBER
row_matrix<Scalar> LINATTN_OPERATOR::forward_causal(input q, input k, input v) const {
  return forward_causal(q, k, v, no_inputs());
}

LINATTN_MEMBER
void LINATTN_OPERATOR::absorb(state_type& s, input k, input v, const inputs& x, workspace_type& ws) const {
  require_keys("absorb", k, v, x);
  require_state("absorb", s);
  require_workspace("absorb", ws);
  engine().template pass<detail::half_block, detail::writes_only>(
      rows_of(k.rows(), s.first_position() + s.tokens(), {}, k, v, x, {}), access::data(s), access::slab(ws).data());
  access::add_tokens(s, k.rows());
}

LINATTN_MEMBER
void LINATTN_OPERATOR::absorb(state_type& s, input k, input v, const inputs& x) const {
  workspace_type ws = make_workspace();
  absorb(s, k, v, x, ws);
}

LINATTN_MEMBER
void LINATTN_OPERATOR::absorb(state_type& s, input k, input v, workspace_type& ws) const {
  absorb(s, k, v, no_inputs(), ws);
}

LINATTN_MEMBER
void LINATTN_OPERATOR::absorb(state_type& s, input k, input v) const { absorb(s, k, v, no_inputs()); }

LINATTN_MEMBER
auto LINATTN_OPERATOR::make_segment(Eigen::Index first_position) const -> segment_type {
  static_assert(rule.corrects != correction::none,
                "linattn: segments are for the delta rules; states of this update rule merge: absorb the later tokens "
                "into a make_state(), and merge that");
  return access::make_state<segment_type>(detail::segment_layout<T, Features, ValueDim, Heads, rule>{m_layout.state},
                                          first_position);
}

LINATTN_MEMBER
void LINATTN_OPERATOR::absorb(segment_type& s, input k, input v, const inputs& x, workspace_type& ws) const {
  require_keys("absorb", k, v, x);
  require_state("absorb", s, "segment");
  require_workspace("absorb", ws);
  // X as any state; A, block by block, as the states that begin with columns of the identity and are written no value.
  auto* const zeros = reinterpret_cast<Scalar*>(access::slab(ws).data() + m_layout.own_state());
  std::uninitialized_fill_n(zeros, v.cols(), Scalar(0));
  const input nothing(zeros, k.rows(), v.cols(), 0);
  const Eigen::Index pieces = Eigen::Index(access::slab(s).size()) / m_layout.state.size();
  for (Eigen::Index n = 0; n < pieces; ++n) {
    engine().template pass<detail::half_block, detail::writes_only>(
        rows_of(k.rows(), s.first_position() + s.tokens(), {}, k, n == 0 ? v : nothing, x, {}),
        access::data(s) + n * m_layout.state.size(), access::slab(ws).data());
  }
  access::add_tokens(s, k.rows());
}

LINATTN_MEMBER
void LINATTN_OPERATOR::absorb(segment_type& s, input k, input v, const inputs& x) const {
  workspace_type ws = make_workspace();
  absorb(s, k, v, x, ws);
}

LINATTN_MEMBER
void LINATTN_OPERATOR::require_read(const state_type& s, input q, output out, workspace_type& ws) const {
  detail::require_shape("read", "q", q, q.rows(), heads(), head_dim(), "head_dim");
  detail::require_shape("read", "out", out, q.rows(), output_heads(), value_dim(), "value_dim");
  require_state("read", s);
  require_workspace("read", ws);
  LINATTN_ASSERT(!detail::overlap(out, q) && "linattn: the output overlaps an input");
}

/// What a state that has seen its keys is asked by the rows of q.
LINATTN_MEMBER
auto LINATTN_OPERATOR::reading_rows(const state_type& s, input q, output out) const noexcept -> rows_type {
  rows_type rows;
  rows.tokens = q.rows();
  rows.position = s.first_position() + s.tokens() - q.rows();
  rows.q = {q, head_dim()};
  rows.out = {out, value_dim()};
  return rows;
}

LINATTN_MEMBER
void LINATTN_OPERATOR::read(const state_type& s, input q, output out, workspace_type& ws) const {
  require_read(s, q, out, ws);
  engine().template pass<detail::half_block, detail::reads_only>(reading_rows(s, q, out), access::data(s),
                                                                 access::slab(ws).data());
}

LINATTN_MEMBER
void LINATTN_OPERATOR::read(const state_type& s, input q, output out, workspace_type& ws,
                            matrix_view<accumulator_type> denominators) const {
  static_assert(rule.normalizes, "linattn: this update rule keeps no sum of keys z, so it has no denominators");
  if (denominators.rows() != q.rows() || denominators.cols() != output_heads()) {
    detail::refuse("read", "denominators is ", detail::shape_text{denominators.rows(), denominators.cols()},
                   ", expected ", detail::shape_text{q.rows(), output_heads()}, ": (tokens, heads)");
  }
  require_read(s, q, out, ws);
  LINATTN_ASSERT(!detail::overlap(denominators, q) && !detail::overlap(denominators, out) &&
                 "linattn: the denominators overlap an input or the output");
  rows_type rows = reading_rows(s, q, out);
  rows.denominators = {denominators, 1};
  engine().template pass<detail::half_block, detail::reads_only>(rows, access::data(s), access::slab(ws).data());
}

LINATTN_MEMBER
row_matrix<Scalar> LINATTN_OPERATOR::read(const state_type& s, input q) const {
  row_matrix<Scalar> out(q.rows(), output_heads() * value_dim());
  workspace_type ws = make_workspace();
  read(s, q, out, ws);
  return out;
}

// ---- one token ------------------------------------------------------------------------------------------------------

LINATTN_MEMBER
void LINATTN_OPERATOR::assert_token([[maybe_unused]] const state_type& s, [[maybe_unused]] token q_t,
                                    [[maybe_unused]] token k_t, [[maybe_unused]] token v_t, const token_inputs& x,
                                    [[maybe_unused]] vector_view<Scalar> out_t,
                                    [[maybe_unused]] const workspace_type& ws) const noexcept {
  for_each_input(x, [&]([[maybe_unused]] const char* name, [[maybe_unused]] const token& view,
                        [[maybe_unused]] Eigen::Index columns, const char*) {
    LINATTN_ASSERT(view.size() == value_heads() * columns &&
                   "linattn::step: an input of the update rule is missing or of another size");
    LINATTN_ASSERT(!detail::overlap(detail::as_row(out_t), detail::as_row(view)) &&
                   "linattn::step: out_t overlaps an input of the update rule");
  });
  LINATTN_ASSERT(q_t.size() == heads() * head_dim() && "linattn::step: q_t must have heads * head_dim elements");
  LINATTN_ASSERT(k_t.size() == key_heads() * head_dim() && "linattn::step: k_t must have heads * head_dim elements");
  LINATTN_ASSERT(v_t.size() == value_heads() * value_dim() &&
                 "linattn::step: v_t must have heads * value_dim elements");
  LINATTN_ASSERT(out_t.size() == output_heads() * value_dim() &&
                 "linattn::step: out_t must have heads * value_dim elements");
  LINATTN_ASSERT(fits(s) && "linattn::step: the state is not from this operator's make_state()");
  LINATTN_ASSERT(Eigen::Index(access::slab(ws).size()) == m_layout.size() &&
                 "linattn::step: the workspace is not from this operator's make_workspace()");
  LINATTN_ASSERT(!detail::overlap(detail::as_row(out_t), detail::as_row(q_t)) &&
                 !detail::overlap(detail::as_row(out_t), detail::as_row(k_t)) &&
                 !detail::overlap(detail::as_row(out_t), detail::as_row(v_t)) &&
                 "linattn::step: out_t overlaps an input");
}

LINATTN_MEMBER
void LINATTN_OPERATOR::step(state_type& s, token q_t, token k_t, token v_t, const token_inputs& x,
                            vector_view<Scalar> out_t, workspace_type& ws) const noexcept LINATTN_NONBLOCKING {
  assert_token(s, q_t, k_t, v_t, x, out_t, ws);
  engine().template pass<1, detail::reads_and_writes>(
      rows_of(1, s.first_position() + s.tokens(), detail::as_row(q_t), detail::as_row(k_t), detail::as_row(v_t), x,
              detail::as_row(out_t)),
      access::data(s), access::slab(ws).data());
  access::add_tokens(s, 1);
}

LINATTN_MEMBER
void LINATTN_OPERATOR::step(state_type& s, token q_t, token k_t, token v_t, vector_view<Scalar> out_t,
                            workspace_type& ws) const noexcept LINATTN_NONBLOCKING {
  static_cast<void>(no_inputs());
  step(s, q_t, k_t, v_t, token_inputs(), out_t, ws);
}

LINATTN_MEMBER
void LINATTN_OPERATOR::step(std::span<state_type> states, input q, input k, input v, output out,
                            workspace_type& ws) const noexcept LINATTN_NONBLOCKING {
  step(states, q, k, v, no_inputs(), out, ws);
}

LINATTN_MEMBER
void LINATTN_OPERATOR::step(std::span<state_type> states, input q, input k, input v, const inputs& x, output out,
                            workspace_type& ws) const noexcept LINATTN_NONBLOCKING {
  const auto count = Eigen::Index(states.size());
  LINATTN_ASSERT(q.rows() == count && k.rows() == count && v.rows() == count && out.rows() == count &&
                 "linattn::step: q, k, v and out must have one row for each state");
  for_each_input(x, [&](const char*, [[maybe_unused]] const input& view, Eigen::Index, const char*) {
    LINATTN_ASSERT(view.rows() == count &&
                   "linattn::step: an input of the update rule must have one row for each state");
  });
  LINATTN_ASSERT(!detail::overlap(out, q) && !detail::overlap(out, k) && !detail::overlap(out, v) &&
                 "linattn::step: the output overlaps an input");
  const auto token_of = [](const input& view, Eigen::Index b) { return token(view.row(b), view.cols()); };
  for (Eigen::Index b = 0; b < count; ++b) {
    token_inputs gates;
    if constexpr (requires { x.log_decay; }) gates.log_decay = token_of(x.log_decay, b);
    if constexpr (requires { x.beta; }) gates.beta = token_of(x.beta, b);
    if constexpr (requires { x.a; }) gates.a = token_of(x.a, b);
    if constexpr (requires { x.b; }) gates.b = token_of(x.b, b);
    if constexpr (requires { x.bonus; }) gates.bonus = token_of(x.bonus, b);
    step(states[std::size_t(b)], token_of(q, b), token_of(k, b), token_of(v, b), gates,
         vector_view<Scalar>(out.row(b), out.cols()), ws);
  }
}

LINATTN_NAMESPACE_END

#include <linattn/detail/linear_attention_drafts_impl.hpp>
#include <linattn/detail/linear_attention_gradients_impl.hpp>
#undef LINATTN_MEMBER
#undef LINATTN_OPERATOR
