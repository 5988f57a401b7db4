// Bodies of linear_attention.hpp: what an operator is made with, states in memory, and the checks of the verbs. No
// `pragma once`: linear_attention_impl.hpp includes this where it has the template heads, and included by itself it
// goes there first.
#ifndef LINATTN_MEMBER
#include <linattn/linear_attention.hpp>
#else

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
template <class State>
bool LINATTN_OPERATOR::fits(const State& s) const noexcept {
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
template <class State>
void LINATTN_OPERATOR::require_state(const char* function, const State& s, const char* what) const {
  if (fits(s)) return;
  detail::refuse(function, "the ", what, " is ", s, ", expected ",
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
  detail::require_shape(function, "q", q, q.rows(), heads(), head_dim(), "head_dim");
  detail::require_shape(function, "k", k, causal ? q.rows() : k.rows(), key_heads(), head_dim(), "head_dim");
  detail::require_shape(function, "v", v, k.rows(), value_heads(), value_dim(), "value_dim");
}

LINATTN_MEMBER
void LINATTN_OPERATOR::require_keys(const char* function, input k, input v, const inputs& x) const {
  detail::require_shape(function, "k", k, k.rows(), key_heads(), head_dim(), "head_dim");
  detail::require_shape(function, "v", v, k.rows(), value_heads(), value_dim(), "value_dim");
  require_rule_inputs(function, x, k.rows());
}

LINATTN_MEMBER
void LINATTN_OPERATOR::require_bulk(const char* function, input q, input k, input v, output out, workspace_type& ws,
                                    bool causal) const {
  require_inputs(function, q, k, v, causal);
  detail::require_shape(function, "out", out, q.rows(), output_heads(), value_dim(), "value_dim");
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
    detail::require_shape(function, name, view, tokens, value_heads(), columns, columns_name);
    LINATTN_ASSERT(!detail::overlap(out, view) && "linattn: the output overlaps an input of the update rule");
  });
}

LINATTN_MEMBER
auto LINATTN_OPERATOR::own_state(workspace_type& ws) const noexcept -> T* {
  T* const slab = access::slab(ws).data() + m_layout.own_state();
  m_layout.state.clear(slab);
  return slab;
}

LINATTN_NAMESPACE_END

#endif
