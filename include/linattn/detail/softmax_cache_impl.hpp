// Bodies of softmax_cache.hpp.
#pragma once

#include <linattn/softmax_cache.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// A size from the options: `given`, or `fallback` where that is 0.
inline Eigen::Index softmax_size(const char* name, Eigen::Index given, Eigen::Index fallback) {
  const Eigen::Index size = given == 0 ? fallback : given;
  if (size < 1) refuse("cached_softmax", name, " is ", size, ", it must be at least 1");
  return size;
}

}  // namespace detail

template <class Scalar>
cached_softmax<Scalar>::cached_softmax(const options& o, Eigen::Index max_tokens) : m_max_tokens(max_tokens) {
  const char* const name = "cached_softmax";
  const Eigen::Index head_dim = detail::softmax_size("head_dim", o.head_dim, 0);
  const Eigen::Index value_dim = detail::softmax_size("value_dim", o.value_dim, head_dim);
  const Eigen::Index heads = detail::softmax_size("heads", o.heads, 1);
  const Eigen::Index key_heads = detail::softmax_size("key_heads", o.key_heads, heads);
  const Eigen::Index value_heads = detail::softmax_size("value_heads", o.value_heads, key_heads);
  if (value_heads % key_heads != 0 || (heads % value_heads != 0 && value_heads % heads != 0)) {
    detail::refuse(name, "heads is ", heads, ", key_heads is ", key_heads, " and value_heads is ", value_heads,
                   ": key_heads must divide value_heads, and one of heads and value_heads the other");
  }
  if (!(std::abs(o.query_scale) <= double(std::numeric_limits<Scalar>::max()))) {
    detail::refuse(name, "query_scale is ", o.query_scale, ", not a finite number of the operator's type");
  }
  if (!o.normalize.value_or(true) || o.denominator.how != denominator_policy::kind::none) {
    detail::refuse(name,
                   "softmax weights are always divided by their plain sum: neither normalize = false nor a "
                   "denominator policy has a meaning here");
  }
  if (max_tokens < 0) detail::refuse(name, "max_tokens is ", max_tokens, ", it must not be negative");
  m_layout.head_dim = head_dim;
  m_layout.value_dim = value_dim;
  if (!is_countable(std::max(heads, value_heads), std::max(max_tokens, Eigen::Index(1)))) {
    detail::refuse(name, std::max(heads, value_heads), " heads of ", head_dim, " coordinates and ", value_dim,
                   " values are beyond the address space, for max_tokens ", max_tokens);
  }
  m_layout.heads = detail::head_map<Eigen::Dynamic>(heads, key_heads, value_heads, o.sharing);
  m_scale = Scalar(o.query_scale / std::sqrt(double(head_dim)));
}

/// Whether the bytes of so many tokens, or of a workspace, are an Eigen::Index.
template <class Scalar>
bool cached_softmax<Scalar>::is_countable(Eigen::Index heads, Eigen::Index tokens) const noexcept {
  const double padded_tokens = double(tokens) + double(detail::softmax_layout<Scalar>::tile);
  const double elements = double(heads) * (double(head_dim()) + double(value_dim()) + 64) * padded_tokens;
  return elements <= double(std::numeric_limits<Eigen::Index>::max()) / 64;
}

template <class Scalar>
auto cached_softmax<Scalar>::make_state(Eigen::Index capacity) const -> state_type {
  if (capacity < 1) {
    detail::refuse("make_state", "the capacity is ", capacity,
                   ", it must be at least 1: make_state(tokens), or cached_softmax<...> attn({...}, max_tokens)");
  }
  if (!is_countable(value_heads(), capacity)) {
    detail::refuse("make_state", "a capacity of ", capacity, " tokens is beyond the address space");
  }
  return state_type(m_layout, capacity);
}

template <class Scalar>
auto cached_softmax<Scalar>::make_state() const -> state_type {
  return make_state(m_max_tokens);
}

// ---- checks ---------------------------------------------------------------------------------------------------------

template <class Scalar>
bool cached_softmax<Scalar>::fits(const state_type& s) const noexcept {
  return s.m_slab.size() != 0 && s.m_layout.head_dim == head_dim() && s.m_layout.value_dim == value_dim() &&
         s.m_layout.heads.keys == key_heads() && s.m_layout.heads.states == value_heads();
}

template <class Scalar>
void cached_softmax<Scalar>::require_keys(const char* function, input k, input v, Eigen::Index rows) const {
  detail::require_shape(function, "k", k, rows, key_heads(), head_dim(), "head_dim");
  detail::require_shape(function, "v", v, rows, value_heads(), value_dim(), "value_dim");
}

template <class Scalar>
void cached_softmax<Scalar>::require_queries(const char* function, input q, output out) const {
  detail::require_shape(function, "q", q, q.rows(), heads(), head_dim(), "head_dim");
  detail::require_shape(function, "out", out, q.rows(), output_heads(), value_dim(), "value_dim");
  LINATTN_ASSERT(!detail::overlap(out, q) && "linattn: the output overlaps an input");
}

template <class Scalar>
void cached_softmax<Scalar>::require_state(const char* function, const state_type& s, Eigen::Index more) const {
  if (!fits(s)) {
    detail::refuse(function, "the state is ", s, ", expected (", value_heads(), " heads, ", head_dim(),
                   " coordinates, ", value_dim(), " values) of ", key_heads(), " key heads");
  }
  if (more > s.m_capacity - s.m_tokens) {
    detail::refuse(function, "the state holds ", s.m_tokens, " tokens and has room for ", s.m_capacity, ", but ", more,
                   " more are to be absorbed: make_state(capacity)");
  }
}

template <class Scalar>
void cached_softmax<Scalar>::require_workspace(const char* function, const workspace_type& ws) const {
  const auto size = Eigen::Index(ws.m_slab.size());
  if (size == m_layout.scratch_size()) return;
  detail::refuse(function, "the workspace holds ", size, " elements, expected ", m_layout.scratch_size(),
                 ": take it from this operator's make_workspace()");
}

// ---- bulk verbs -----------------------------------------------------------------------------------------------------

template <class Scalar>
void cached_softmax<Scalar>::write(state_type& s, input k, input v) const noexcept {
  engine().write(s.m_slab.data(), s.m_capacity, s.m_tokens, k, v);
  s.m_tokens += k.rows();
}

template <class Scalar>
void cached_softmax<Scalar>::forward(state_type& s, input q, input k, input v, output out, workspace_type& ws) const {
  require_keys("forward", k, v, k.rows());
  require_queries("forward", q, out);
  require_state("forward", s, k.rows());
  require_workspace("forward", ws);
  LINATTN_ASSERT(!detail::overlap(out, k) && !detail::overlap(out, v) && "linattn: the output overlaps an input");
  write(s, k, v);
  engine().read(s.m_slab.data(), s.m_capacity, {s.m_tokens, 0}, q, out, ws.m_slab.data(), {});
}

template <class Scalar>
row_matrix<Scalar> cached_softmax<Scalar>::forward(state_type& s, input q, input k, input v) const {
  row_matrix<Scalar> out(q.rows(), output_heads() * value_dim());
  workspace_type ws = make_workspace();
  forward(s, q, k, v, out, ws);
  return out;
}

template <class Scalar>
row_matrix<Scalar> cached_softmax<Scalar>::forward(input q, input k, input v) const {
  state_type s = make_state(std::max(k.rows(), Eigen::Index(1)));
  return forward(s, q, k, v);
}

template <class Scalar>
void cached_softmax<Scalar>::forward_causal(state_type& s, input q, input k, input v, output out,
                                            workspace_type& ws) const {
  require_keys("forward_causal", k, v, q.rows());
  require_queries("forward_causal", q, out);
  require_state("forward_causal", s, k.rows());
  require_workspace("forward_causal", ws);
  LINATTN_ASSERT(!detail::overlap(out, k) && !detail::overlap(out, v) && "linattn: the output overlaps an input");
  const Eigen::Index before = s.m_tokens;
  write(s, k, v);
  engine().read(s.m_slab.data(), s.m_capacity, {before + 1, 1}, q, out, ws.m_slab.data(), {});
}

template <class Scalar>
row_matrix<Scalar> cached_softmax<Scalar>::forward_causal(state_type& s, input q, input k, input v) const {
  row_matrix<Scalar> out(q.rows(), output_heads() * value_dim());
  workspace_type ws = make_workspace();
  forward_causal(s, q, k, v, out, ws);
  return out;
}

template <class Scalar>
row_matrix<Scalar> cached_softmax<Scalar>::forward_causal(input q, input k, input v) const {
  state_type s = make_state(std::max(k.rows(), Eigen::Index(1)));
  return forward_causal(s, q, k, v);
}

template <class Scalar>
void cached_softmax<Scalar>::absorb(state_type& s, input k, input v, workspace_type& ws) const {
  require_keys("absorb", k, v, k.rows());
  require_state("absorb", s, k.rows());
  require_workspace("absorb", ws);
  write(s, k, v);
}

template <class Scalar>
void cached_softmax<Scalar>::absorb(state_type& s, input k, input v) const {
  require_keys("absorb", k, v, k.rows());
  require_state("absorb", s, k.rows());
  write(s, k, v);
}

template <class Scalar>
void cached_softmax<Scalar>::read(const state_type& s, input q, output out, workspace_type& ws) const {
  require_queries("read", q, out);
  require_state("read", s, 0);
  require_workspace("read", ws);
  engine().read(s.m_slab.data(), s.m_capacity, {s.m_tokens, 0}, q, out, ws.m_slab.data(), {});
}

template <class Scalar>
void cached_softmax<Scalar>::read(const state_type& s, input q, output out, workspace_type& ws, output log_sums) const {
  require_queries("read", q, out);
  require_state("read", s, 0);
  require_workspace("read", ws);
  detail::require_shape("read", "log_sums", log_sums, q.rows(), output_heads(), 1, "one sum");
  LINATTN_ASSERT(!detail::overlap(log_sums, q) && !detail::overlap(log_sums, out) &&
                 "linattn: log_sums overlaps an input or the output");
  engine().read(s.m_slab.data(), s.m_capacity, {s.m_tokens, 0}, q, out, ws.m_slab.data(), log_sums);
}

template <class Scalar>
row_matrix<Scalar> cached_softmax<Scalar>::read(const state_type& s, input q) const {
  row_matrix<Scalar> out(q.rows(), output_heads() * value_dim());
  workspace_type ws = make_workspace();
  read(s, q, out, ws);
  return out;
}

// ---- one token ------------------------------------------------------------------------------------------------------

template <class Scalar>
void cached_softmax<Scalar>::step(state_type& s, token q_t, token k_t, token v_t, vector_view<Scalar> out_t,
                                  workspace_type& ws) const noexcept LINATTN_NONBLOCKING {
  LINATTN_ASSERT(q_t.size() == heads() * head_dim() && "linattn::step: q_t must have heads * head_dim elements");
  LINATTN_ASSERT(k_t.size() == key_heads() * head_dim() && "linattn::step: k_t must have heads * head_dim elements");
  LINATTN_ASSERT(v_t.size() == value_heads() * value_dim() &&
                 "linattn::step: v_t must have heads * value_dim elements");
  LINATTN_ASSERT(out_t.size() == output_heads() * value_dim() &&
                 "linattn::step: out_t must have heads * value_dim elements");
  LINATTN_ASSERT(fits(s) && "linattn::step: the state is not from this operator's make_state()");
  LINATTN_ASSERT(s.m_tokens < s.m_capacity && "linattn::step: the state has no room for another token");
  LINATTN_ASSERT(Eigen::Index(ws.m_slab.size()) == m_layout.scratch_size() &&
                 "linattn::step: the workspace is not from this operator's make_workspace()");
  const input q(q_t.data(), 1, q_t.size()), k(k_t.data(), 1, k_t.size()), v(v_t.data(), 1, v_t.size());
  const output out(out_t.data(), 1, out_t.size());
  LINATTN_ASSERT(!detail::overlap(out, q) && !detail::overlap(out, k) && !detail::overlap(out, v) &&
                 "linattn::step: out_t overlaps an input");
  write(s, k, v);
  engine().read(s.m_slab.data(), s.m_capacity, {s.m_tokens, 0}, q, out, ws.m_slab.data(), {});
}

template <class Scalar>
void cached_softmax<Scalar>::step(std::span<state_type> states, input q, input k, input v, output out,
                                  workspace_type& ws) const noexcept LINATTN_NONBLOCKING {
  const auto count = Eigen::Index(states.size());
  LINATTN_ASSERT(q.rows() == count && k.rows() == count && v.rows() == count && out.rows() == count &&
                 "linattn::step: q, k, v and out must have one row for each state");
  for (Eigen::Index b = 0; b < count; ++b) {
    step(states[std::size_t(b)], token(q.row(b), q.cols()), token(k.row(b), k.cols()), token(v.row(b), v.cols()),
         vector_view<Scalar>(out.row(b), out.cols()), ws);
  }
}

LINATTN_NAMESPACE_END
