// From seeded inputs of a rule to calls of the operator.
//
//   const support::rule_tokens<T> x(support::rule_kind_of<Rule>(), shape, seed);
//   const auto attn = support::operator_for<linattn::identity, Rule>(x);
//   attn.forward_causal(s, x.q, x.k, x.v, support::inputs_of<decltype(attn)>(x), out, ws);
#pragma once

#include "support/inputs.hpp"
#include "support/rule_for.hpp"
#include "support/rule_inputs.hpp"

#include <linattn/linear_attention.hpp>

#include <Eigen/Core>

#include <type_traits>

namespace support {

/// An operator of the inputs' sizes, with their decays where these are the operator's.
template <class Map, class Rule, class T>
linattn::linear_attention<Map, Rule, T> operator_for(const rule_tokens<T>& x,
                                                     linattn::options o = {.query_scale = 0.5}) {
  o.head_dim = x.shape.features;
  o.value_dim = x.shape.value_dim;
  o.heads = x.shape.heads;
  Rule rule;
  if constexpr (Rule::traits.fixed_decay) {
    for (Eigen::Index h = 0; h < x.shape.heads; ++h) rule.log_decay.push_back(static_cast<double>(x.log_decay(0, h)));
  }
  return linattn::linear_attention<Map, Rule, T>(o, Map(), rule);
}

/// The rule's inputs, of all tokens.
template <class Operator, class T>
auto inputs_of(const rule_tokens<T>& x) {
  typename std::remove_cvref_t<Operator>::inputs result;
  if constexpr (requires { result.log_decay; }) result.log_decay = x.log_decay;
  if constexpr (requires { result.beta; }) result.beta = x.beta;
  if constexpr (requires { result.a; }) result.a = x.a;
  if constexpr (requires { result.b; }) result.b = x.b;
  if constexpr (requires { result.bonus; }) {
    result.bonus = linattn::matrix_view<const T>(x.bonus.data(), x.shape.tokens, x.bonus.cols(), 0);
  }
  return result;
}

/// The rule's inputs of token t.
template <class Operator, class T>
typename Operator::token_inputs token_inputs_of(const rule_tokens<T>& x, Eigen::Index t) {
  const auto all = inputs_of<Operator>(x);
  const auto row = [t](const auto& view) { return linattn::vector_view<const T>(view.row(t), view.cols()); };
  typename Operator::token_inputs token;
  if constexpr (requires { token.log_decay; }) token.log_decay = row(all.log_decay);
  if constexpr (requires { token.beta; }) token.beta = row(all.beta);
  if constexpr (requires { token.a; }) token.a = row(all.a);
  if constexpr (requires { token.b; }) token.b = row(all.b);
  if constexpr (requires { token.bonus; }) token.bonus = row(all.bonus);
  return token;
}

/// `step` over all tokens; out (N, H M). With a draft their writes are put off.
template <class Operator, class T, class... Draft>
row_matrix<T> step_over(const Operator& attn, typename Operator::state_type& s, const rule_tokens<T>& x,
                        Draft&... draft) {
  row_matrix<T> out(x.shape.tokens, x.v.cols());
  auto ws = attn.make_workspace();
  for (Eigen::Index t = 0; t < x.shape.tokens; ++t) {
    attn.step(s, x.q.row(t), x.k.row(t), x.v.row(t), token_inputs_of<Operator>(x, t), out.row(t), draft..., ws);
  }
  return out;
}

/// All that a state holds, head below head: S (C, M), its z and its total log-decay in one row each.
template <linattn::rule_traits Rule, class T, Eigen::Index Features, Eigen::Index ValueDim, Eigen::Index Heads>
row_matrix<T> contents_of(const linattn::state<Rule, T, Features, ValueDim, Heads>& s) {
  const Eigen::Index c = s.features(), m = s.value_dim();
  row_matrix<T> all = row_matrix<T>::Zero(s.heads() * (c + 2), c > m ? c : m);
  for (Eigen::Index h = 0; h < s.heads(); ++h) {
    all.block(h * (c + 2), 0, c, m) = s.kv(h);
    if constexpr (Rule.normalizes) all.block(h * (c + 2) + c, 0, 1, c) = s.k_sum(h);
    if constexpr (Rule.decay != linattn::decay_kind::none) {
      const auto total = s.log_decay(h);
      all.block(h * (c + 2) + c + 1, 0, 1, total.size()) = total;
    }
  }
  return all;
}

}  // namespace support
