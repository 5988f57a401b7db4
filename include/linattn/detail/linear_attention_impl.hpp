// Bodies of linear_attention.hpp: checks, then one call of the engine. Those of the gradients are in a file of their
// own.
#pragma once

#include <linattn/linear_attention.hpp>

#include <cmath>
#include <memory>

// The template head of every member, once.
#define LINATTN_MEMBER                                                                                     \
  template <class FeatureMap, class UpdateRule, class Scalar, Eigen::Index HeadDim, Eigen::Index ValueDim, \
            Eigen::Index Heads>
#define LINATTN_OPERATOR linear_attention<FeatureMap, UpdateRule, Scalar, HeadDim, ValueDim, Heads>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// The size an option and the type together say: `given` (0: not given), the type's constant, else `fallback`.
inline Eigen::Index agree(const char* name, Eigen::Index given, Eigen::Index constant, Eigen::Index fallback) {
  if (given < 0) refuse("linear_attention", name, " is ", given, ", it must be at least 1");
  if (constant != Eigen::Dynamic && given != 0 && given != constant) {
    refuse("linear_attention", name, " is ", given, " in the options, but ", constant, " in the type");
  }
  if (constant != Eigen::Dynamic) return constant;
  const Eigen::Index size = given == 0 ? fallback : given;
  if (size < 1) {
    refuse("linear_attention", name, " is not given, it must be at least 1: linear_attention<...> attn({.", name,
           " = 64})");
  }
  return size;
}

/// One token as a matrix of one row.
template <class T>
matrix_view<T> as_row(const vector_view<T>& x) noexcept {
  return matrix_view<T>(x.data(), 1, x.size());
}

}  // namespace detail

LINATTN_MEMBER
LINATTN_OPERATOR::linear_attention(const options& o, FeatureMap map, UpdateRule given_rule)
    : m_map(std::move(map)),
      m_rule(std::move(given_rule)),
      m_policy(o.denominator),
      m_normalizes(o.normalize.value_or(rule.normalizes && detail::has_positive_denominators<FeatureMap>)) {
  const char* const name = "linear_attention";
  const Eigen::Index head_dim = detail::agree("head_dim", o.head_dim, HeadDim, 0);
  const Eigen::Index value_dim = detail::agree("value_dim", o.value_dim, ValueDim, head_dim);
  const Eigen::Index heads = detail::agree("heads", o.heads, Heads, 1);
  const Eigen::Index key_heads = detail::agree("key_heads", o.key_heads, Heads, heads);
  const Eigen::Index value_heads = detail::agree("value_heads", o.value_heads, Heads, key_heads);
  if (value_heads % key_heads != 0 || (heads % value_heads != 0 && value_heads % heads != 0)) {
    detail::refuse(name, "heads is ", heads, ", key_heads is ", key_heads, " and value_heads is ", value_heads,
                   ": key_heads must divide value_heads, and one of heads and value_heads the other");
  }
  if constexpr (requires { m_map.head_dim(); }) {
    if (m_map.head_dim() != head_dim) {
      detail::refuse(name, "the feature map was made for head_dim ", Eigen::Index(m_map.head_dim()),
                     ", the operator has head_dim ", head_dim);
    }
  }
  if constexpr (requires { m_map.heads(); }) {
    if (m_map.heads() != 1 && m_map.heads() != heads) {
      detail::refuse(name, "the feature map has parameters for ", Eigen::Index(m_map.heads()),
                     " heads, the operator has heads ", heads, "; give one set for each head, or one for all");
    }
  }
  const Eigen::Index features = Features != Eigen::Dynamic ? Features : Eigen::Index(m_map.dimension(head_dim));
  if (features < 1) {
    detail::refuse(name, "the feature map has dimension(", head_dim, ") = ", features, ", it must be at least 1");
  }
  // As they will be used, in the accumulator's type: finite, and epsilon not 0.
  constexpr double largest = double(std::numeric_limits<T>::max());
  if (!(std::abs(o.query_scale) <= largest)) {
    detail::refuse(name, "query_scale is ", o.query_scale, ", not a finite number of the operator's type");
  }
  m_query_scale = T(o.query_scale);
  if (o.denominator.how != denominator_policy::kind::none) {
    const double epsilon = o.denominator.epsilon;
    if (!(epsilon >= double(std::numeric_limits<T>::min()) && epsilon <= largest)) {
      detail::refuse(name, "the denominator's epsilon is ", epsilon, ", not a positive number of the operator's type");
    }
    if (!m_normalizes && !o.normalize.has_value()) {
      detail::refuse(name,
                     "a denominator policy is given, but with this map the operator does not normalize; say "
                     ".normalize = true");
    }
  }
  if (m_normalizes && !rule.normalizes) {
    detail::refuse(name, ".normalize = true, but this update rule keeps no sum of keys z to divide by");
  }
  if constexpr (rule.fixed_decay) {
    if (Eigen::Index(m_rule.log_decay.size()) != value_heads) {
      detail::refuse(name, "the decay rule has ", Eigen::Index(m_rule.log_decay.size()), " log-decays for ",
                     value_heads, " heads");
    }
    for (const double value : m_rule.log_decay) {
      if (!(value <= largest)) detail::refuse(name, "a log-decay of the decay rule is ", value, ", not a number");
    }
  }
  // Every entry of a state, and every column of the packed rows, must be countable.
  const double most_heads = double(std::max(heads, value_heads));
  const double entries = most_heads * (double(features) + 64) * (double(value_dim) + 64);
  const double columns = most_heads * (double(head_dim) + 64);
  if (std::max(entries, columns) > double(std::numeric_limits<Eigen::Index>::max()) / 64) {
    detail::refuse(name, "a state of ", detail::state_sizes{value_heads, features, value_dim}, " for head_dim ",
                   head_dim, " is beyond the address space");
  }
  m_layout.head_dim = detail::extent<HeadDim>(head_dim);
  m_layout.state.features = detail::extent<Features>(features);
  m_layout.state.value_dim = detail::extent<ValueDim>(value_dim);
  m_layout.state.heads = detail::extent<Heads>(value_heads);
  m_layout.heads = detail::head_map<Heads>(heads, key_heads, value_heads, o.sharing);
}

LINATTN_MEMBER
auto LINATTN_OPERATOR::make_state(Eigen::Index first_position) const -> state_type {
  return access::make_state<state_type>(m_layout.state, first_position);
}

LINATTN_MEMBER
auto LINATTN_OPERATOR::make_state(std::span<std::byte> memory, Eigen::Index first_position) const -> state_type {
  T* const slab = state_memory("make_state", memory);
  m_layout.state.begin(slab, first_position);
  return access::attach_state<state_type>(m_layout.state, slab);
}

LINATTN_MEMBER
auto LINATTN_OPERATOR::attach_state(std::span<std::byte> memory) const -> state_type {
  T* const slab = state_memory("attach_state", memory);
  if (!m_layout.state.holds_state(slab)) {
    detail::refuse("attach_state", "the memory holds no state of ", detail::sizes_of(m_layout.state),
                   " and this operator's rule and scalar; make_state(memory) begins one there");
  }
  return access::attach_state<state_type>(m_layout.state, slab);
}

// ---- checks ---------------------------------------------------------------------------------------------------------

LINATTN_MEMBER
void LINATTN_OPERATOR::require(const char* function, const char* name, Eigen::Index rows, Eigen::Index cols,
                               Eigen::Index want_rows, Eigen::Index count, Eigen::Index dim,
                               const char* dim_name) const {
  if (rows == want_rows && cols == count * dim) return;
  detail::refuse(function, name, " is ", detail::shape_text{rows, cols}, ", expected ",
                 detail::shape_text{want_rows, count * dim}, ": (tokens, heads * ", dim_name, " = ", count, " * ", dim,
                 ")");
}

LINATTN_MEMBER
bool LINATTN_OPERATOR::fits(const state_type& s) const noexcept {
  return !access::is_empty(s) && s.heads() == value_heads() && s.features() == features() &&
         s.value_dim() == value_dim();
}

LINATTN_MEMBER
auto LINATTN_OPERATOR::state_memory(const char* function, std::span<std::byte> memory) const -> T* {
  static_assert(!decltype(layout_type::state)::is_fixed,
                "linattn: a state of compile-time sizes is its own memory and attaches to none; construct it where it "
                "shall be: new (memory) state_type(attn.make_state())");
  return detail::state_memory<T>(function, m_layout.state, memory.data(), Eigen::Index(memory.size()));
}

LINATTN_MEMBER
void LINATTN_OPERATOR::require_state(const char* function, const state_type& s) const {
  if (fits(s)) return;
  detail::refuse(function, "the state is ", s, ", expected ",
                 detail::state_sizes{value_heads(), features(), value_dim()});
}

LINATTN_MEMBER
void LINATTN_OPERATOR::require_workspace(const char* function, workspace_type& ws) const {
  const auto size = Eigen::Index(access::slab(ws).size());
  if (size == m_layout.size()) return;
  detail::refuse(function, "the workspace holds ", size, " elements, expected ", m_layout.size(),
                 ": take it from this operator's make_workspace()");
}

LINATTN_MEMBER
void LINATTN_OPERATOR::require_inputs(const char* function, input q, input k, input v, bool causal) const {
  require(function, "q", q.rows(), q.cols(), q.rows(), heads(), head_dim(), "head_dim");
  require(function, "k", k.rows(), k.cols(), causal ? q.rows() : k.rows(), key_heads(), head_dim(), "head_dim");
  require(function, "v", v.rows(), v.cols(), k.rows(), value_heads(), value_dim(), "value_dim");
}

LINATTN_MEMBER
void LINATTN_OPERATOR::require_bulk(const char* function, input q, input k, input v, output out, workspace_type& ws,
                                    bool causal) const {
  require_inputs(function, q, k, v, causal);
  require(function, "out", out.rows(), out.cols(), q.rows(), output_heads(), value_dim(), "value_dim");
  require_workspace(function, ws);
  LINATTN_ASSERT(!detail::overlap(out, q) && !detail::overlap(out, k) && !detail::overlap(out, v) &&
                 "linattn: the output overlaps an input");
}

/// What a rule without inputs is given.
LINATTN_MEMBER
auto LINATTN_OPERATOR::no_inputs() -> inputs {
  static_assert(std::is_empty_v<inputs>,
                "linattn: this update rule takes inputs beside q, k and v; write them behind v, e.g. "
                "forward_causal(s, q, k, v, {.log_decay = g, .beta = b}, out, ws)");
  return {};
}

LINATTN_MEMBER
template <class Inputs>
auto LINATTN_OPERATOR::rows_of(Eigen::Index tokens, Eigen::Index position, input q, input k, input v, const Inputs& x,
                               output out) const noexcept -> rows_type {
  rows_type rows;
  rows.tokens = tokens;
  rows.position = position;
  rows.q = {q, head_dim()};
  rows.k = {k, head_dim()};
  rows.v = {v, value_dim()};
  rows.gates = gates_of<const Scalar>(x);
  rows.out = {out, value_dim()};
  return rows;
}

/// The rule's inputs, or their gradients.
LINATTN_MEMBER
template <class U, class Inputs>
auto LINATTN_OPERATOR::gates_of(const Inputs& x) const noexcept -> detail::rule_inputs<detail::token_rows<U>, rule> {
  using result_type = detail::rule_inputs<detail::token_rows<U>, rule>;
  constexpr bool per_feature = rule.decay == decay_kind::per_feature;
  result_type gates;
  const auto rows = [](const auto& view, Eigen::Index columns) {
    if constexpr (requires { view.rows(); }) {
      return detail::token_rows<U>(view, columns);
    } else {
      return detail::token_rows<U>(detail::as_row(view), columns);
    }
  };
  if constexpr (result_type::has_log_decay) gates.log_decay = rows(x.log_decay, per_feature ? features() : 1);
  if constexpr (result_type::has_beta) gates.beta = rows(x.beta, 1);
  if constexpr (result_type::has_rank_one) gates.a = rows(x.a, features());
  if constexpr (result_type::has_rank_one) gates.b = rows(x.b, features());
  if constexpr (result_type::has_bonus) gates.bonus = rows(x.bonus, features());
  if constexpr (rule.fixed_decay) gates.fixed_log_decay = m_rule.log_decay.data();
  return gates;
}

/// f(name, view, columns a head, what they are) for what the rule takes.
LINATTN_MEMBER
template <class Inputs, class F>
void LINATTN_OPERATOR::for_each_input(const Inputs& x, const F& f) const {
  constexpr bool per_feature = rule.decay == decay_kind::per_feature;
  if constexpr (requires { x.log_decay; }) {
    f("log_decay", x.log_decay, per_feature ? features() : 1, per_feature ? "features" : "one decay");
  }
  if constexpr (requires { x.beta; }) f("beta", x.beta, 1, "one beta");
  if constexpr (requires { x.a; }) f("a", x.a, features(), "features");
  if constexpr (requires { x.b; }) f("b", x.b, features(), "features");
  if constexpr (requires { x.bonus; }) f("bonus", x.bonus, features(), "features");
}

LINATTN_MEMBER
void LINATTN_OPERATOR::require_rule_inputs(const char* function, const inputs& x, Eigen::Index tokens,
                                           [[maybe_unused]] output out) const {
  for_each_input(x, [&](const char* name, const input& view, Eigen::Index columns, const char* columns_name) {
    if (view.data() == nullptr && tokens > 0) {
      detail::refuse(function, "the update rule's input ", name, " is not given");
    }
    require(function, name, view.rows(), view.cols(), tokens, value_heads(), columns, columns_name);
    LINATTN_ASSERT(!detail::overlap(out, view) && "linattn: the output overlaps an input of the update rule");
  });
}

LINATTN_MEMBER
auto LINATTN_OPERATOR::own_state(workspace_type& ws) const noexcept -> T* {
  T* const slab = access::slab(ws).data() + m_layout.own_state();
  m_layout.state.clear(slab);
  return slab;
}

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
  require("absorb", "k", k.rows(), k.cols(), k.rows(), key_heads(), head_dim(), "head_dim");
  require("absorb", "v", v.rows(), v.cols(), k.rows(), value_heads(), value_dim(), "value_dim");
  require_rule_inputs("absorb", x, k.rows());
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
  require("absorb", "k", k.rows(), k.cols(), k.rows(), key_heads(), head_dim(), "head_dim");
  require("absorb", "v", v.rows(), v.cols(), k.rows(), value_heads(), value_dim(), "value_dim");
  require_rule_inputs("absorb", x, k.rows());
  if (access::is_empty(s) || s.heads() != m_layout.state.heads || s.features() != features() ||
      s.value_dim() != value_dim()) {
    detail::refuse("absorb", "the segment is ", s, ", expected ",
                   detail::state_sizes{m_layout.state.heads, features(), value_dim()});
  }
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
  require("read", "q", q.rows(), q.cols(), q.rows(), heads(), head_dim(), "head_dim");
  require("read", "out", out.rows(), out.cols(), q.rows(), output_heads(), value_dim(), "value_dim");
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
void LINATTN_OPERATOR::step(state_type& s, token q_t, token k_t, token v_t, const token_inputs& x,
                            vector_view<Scalar> out_t, workspace_type& ws) const noexcept LINATTN_NONBLOCKING {
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
