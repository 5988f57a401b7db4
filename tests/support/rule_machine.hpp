// An operator with an update rule, its workspace and one state behind one interface: the compiler meets each operator
// once, and every law once for all of them.
//
//   for (const support::rule_subject<float>& subject : support::rule_subjects<float>()) {
//     const support::rule_tokens<float> x(subject.kind, {.tokens = 65, .features = 17, .value_dim = 9}, seed);
//     const auto m = subject.make(x, {});
//     m->forward_causal(support::rule_views<float>(x), out);
//     ... m->s(h), m->log_decay(h)
#pragma once

#include <linattn/feature_maps/identity.hpp>
#include <linattn/linear_attention.hpp>
#include <linattn/update_rules/decay.hpp>
#include <linattn/update_rules/delta.hpp>
#include <linattn/update_rules/gated.hpp>

#include "support/rule_for.hpp"
#include "support/rule_inputs.hpp"
#include "support/sanitizer.hpp"

#include <Eigen/Core>

#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace support {

/// All that any rule takes, as an operator sees it.
template <class T>
struct rule_views {
  using view = linattn::matrix_view<const T>;
  view q, k, v, log_decay, beta, a, b, bonus;

  rule_views() = default;
  explicit rule_views(const rule_tokens<T>& x)
      : q(x.q), k(x.k), v(x.v), log_decay(x.log_decay), beta(x.beta), a(x.a), b(x.b), bonus(x.bonus) {
    // One row for all tokens.
    if (bonus.rows() == 1) bonus = view(bonus.data(), q.rows(), bonus.cols(), 0);
  }

  /// Tokens first ... first + count - 1.
  rule_views rows(Eigen::Index first, Eigen::Index count) const {
    const auto part = [&](const view& x) {
      return x.rows() == 0 ? x : view(x.row(first), count, x.cols(), x.row_stride());
    };
    rule_views result;
    for (const auto member : members()) result.*member = part(this->*member);
    return result;
  }

  static std::vector<view rule_views::*> members() {
    return {&rule_views::q,    &rule_views::k, &rule_views::v, &rule_views::log_decay,
            &rule_views::beta, &rule_views::a, &rule_views::b, &rule_views::bonus};
  }
};

/// Its state is fresh. Sizes, map and rule belong to what made it.
template <class T>
struct rule_machine {
  using output = linattn::matrix_view<T>;
  using block = Eigen::Map<linattn::row_matrix<T>, Eigen::Unaligned, Eigen::OuterStride<>>;

  virtual ~rule_machine() = default;
  /// The same operator, a copy of the state, and a workspace of its own.
  virtual std::unique_ptr<rule_machine> fork() const = 0;

  virtual void forward_causal(const rule_views<T>& x, output out) = 0;
  /// From a state of zeros; the own one is left alone.
  virtual void forward_causal_alone(const rule_views<T>& x, output out) = 0;
  virtual void absorb(const rule_views<T>& x) = 0;
  virtual void read(linattn::matrix_view<const T> q, output out) = 0;
  /// Token 0 of x.
  virtual void step(const rule_views<T>& x, linattn::vector_view<T> out) = 0;
  /// A token of each of `all`, machines of one operator, by the verb for many states.
  virtual void step_all(const std::vector<rule_machine*>& all, const rule_views<T>& x, output out) = 0;
  virtual void reset() = 0;
  /// Of rules that do not correct.
  virtual void merge(const rule_machine& later) = 0;

  virtual Eigen::Index heads() const = 0;
  virtual Eigen::Index tokens() const = 0;
  virtual block s(Eigen::Index head) = 0;
  /// Of rules that decay; without columns for the others.
  virtual row_matrix<T> log_decay(Eigen::Index head) const = 0;

  /// step over the rows of x.
  void fold(const rule_views<T>& x, output out) {
    for (Eigen::Index t = 0; t < x.q.rows(); ++t) step(x.rows(t, 1), linattn::vector_view<T>(out.row(t), out.cols()));
  }
  void set_state(const std::vector<row_matrix<T>>& initial) {
    for (Eigen::Index h = 0; h < heads(); ++h) s(h) = initial.at(std::size_t(h));
  }
};

/// A rule from the log-decays that belong to its operator, (1, H), where they do.
template <class Rule, class T>
Rule rule_with(const row_matrix<T>& log_decays) {
  Rule rule;
  if constexpr (Rule::traits.fixed_decay) {
    for (Eigen::Index h = 0; h < log_decays.cols(); ++h) rule.log_decay.push_back(double(log_decays(0, h)));
  }
  return rule;
}

template <class Operator>
class machine_of : public rule_machine<typename Operator::scalar> {
  using T = typename Operator::scalar;
  using base = rule_machine<T>;
  using output = typename base::output;

 public:
  explicit machine_of(Operator attn, Eigen::Index first_position = 0)
      : m_attn(std::move(attn)), m_s(m_attn.make_state(first_position)), m_ws(m_attn.make_workspace()) {}

  std::unique_ptr<base> fork() const override {
    auto copy = std::make_unique<machine_of>(m_attn);
    copy->m_s = m_s;
    return copy;
  }
  void forward_causal(const rule_views<T>& x, output out) override {
    m_attn.forward_causal(m_s, x.q, x.k, x.v, of_rows(x), out, m_ws);
  }
  void forward_causal_alone(const rule_views<T>& x, output out) override {
    m_attn.forward_causal(x.q, x.k, x.v, of_rows(x), out, m_ws);
  }
  void absorb(const rule_views<T>& x) override { m_attn.absorb(m_s, x.k, x.v, of_rows(x), m_ws); }
  void read(linattn::matrix_view<const T> q, output out) override { m_attn.read(m_s, q, out, m_ws); }
  void step(const rule_views<T>& x, linattn::vector_view<T> out) override {
    m_attn.step(m_s, token_of(x.q), token_of(x.k), token_of(x.v), of_token(x), out, m_ws);
  }
  void step_all(const std::vector<base*>& all, const rule_views<T>& x, output out) override {
    std::vector<typename Operator::state_type> states;
    for (base* const one : all) states.push_back(static_cast<machine_of*>(one)->m_s);
    m_attn.step(std::span(states), x.q, x.k, x.v, of_rows(x), out, m_ws);
    for (std::size_t i = 0; i < all.size(); ++i) static_cast<machine_of*>(all[i])->m_s = states[i];
  }
  void reset() override { m_s.reset(); }
  void merge(const base& later) override {
    if constexpr (Operator::rule.corrects == linattn::correction::none) {
      m_s.merge(static_cast<const machine_of&>(later).m_s);
    }
  }
  Eigen::Index heads() const override { return m_attn.heads(); }
  Eigen::Index tokens() const override { return m_s.tokens(); }
  typename base::block s(Eigen::Index head) override { return m_s.kv(head); }
  row_matrix<T> log_decay([[maybe_unused]] Eigen::Index head) const override {
    if constexpr (Operator::rule.decay != linattn::decay_kind::none) {
      return std::as_const(m_s).log_decay(head);
    } else {
      return row_matrix<T>(1, 0);
    }
  }

 private:
  static linattn::vector_view<const T> token_of(const linattn::matrix_view<const T>& x) {
    return linattn::vector_view<const T>(x.data(), x.cols());
  }
  template <class Inputs, class F>
  static Inputs select(const rule_views<T>& x, const F& as) {
    Inputs inputs;
    if constexpr (requires { inputs.log_decay; }) inputs.log_decay = as(x.log_decay);
    if constexpr (requires { inputs.beta; }) inputs.beta = as(x.beta);
    if constexpr (requires { inputs.a; }) inputs.a = as(x.a);
    if constexpr (requires { inputs.b; }) inputs.b = as(x.b);
    if constexpr (requires { inputs.bonus; }) inputs.bonus = as(x.bonus);
    return inputs;
  }
  static auto of_rows(const rule_views<T>& x) {
    return select<typename Operator::inputs>(x, [](const auto& view) { return view; });
  }
  static auto of_token(const rule_views<T>& x) { return select<typename Operator::token_inputs>(x, token_of); }

  Operator m_attn;
  typename Operator::state_type m_s;
  typename Operator::workspace_type m_ws;
};

/// An operator type with the identity map, by name.
template <class T>
struct rule_subject {
  std::string name;
  rule_kind kind = rule_kind::additive;
  rule_shape fixed = {};  ///< the type's sizes; 0 features: the inputs'
  std::unique_ptr<rule_machine<T>> (*make_for)(const rule_tokens<T>& x) = nullptr;

  /// For x: its sizes, query_scale and fixed decays.
  std::unique_ptr<rule_machine<T>> make(const rule_tokens<T>& x) const { return make_for(x); }
  /// The shapes that it may be asked for: its own, or all.
  std::vector<rule_shape> of(const std::vector<rule_shape>& shapes) const {
    if (fixed.features == 0) return shapes;
    std::vector<rule_shape> own;
    for (const rule_shape& shape : shapes) {
      if (own.empty() || own.back().tokens != shape.tokens)
        own.push_back({shape.tokens, fixed.features, fixed.value_dim, fixed.heads});
    }
    return own;
  }

  friend std::ostream& operator<<(std::ostream& out, const rule_subject& x) { return out << x.name; }
};

template <class Rule, class T, Eigen::Index D = Eigen::Dynamic, Eigen::Index M = D,
          Eigen::Index H = (D == Eigen::Dynamic ? D : 1)>
std::unique_ptr<rule_machine<T>> make_machine(const rule_tokens<T>& x) {
  using attention = linattn::linear_attention<linattn::identity, Rule, T, D, M, H>;
  return std::make_unique<machine_of<attention>>(attention({.head_dim = x.shape.features,
                                                            .value_dim = x.shape.value_dim,
                                                            .heads = x.shape.heads,
                                                            .query_scale = x.query_scale},
                                                           {}, rule_with<Rule>(x.log_decay)));
}

/// Every rule with sizes known at run time, and each kind of kernel in one of the two scalars with fixed ones: an
/// operator takes the compiler three seconds. Sanitizers see one of each kind of kernel.
template <class T>
std::vector<rule_subject<T>> rule_subjects() {
  std::vector<rule_subject<T>> all;
  const auto add = [&]<class Rule>(const Rule&) {
    constexpr rule_kind kind = rule_kind_of<Rule>();
    all.push_back({traits_of(kind).name, kind, {}, make_machine<Rule, T>});
  };
  const auto add_fixed = [&]<class Rule>(const Rule&) {
    constexpr rule_kind kind = rule_kind_of<Rule>();
    constexpr Eigen::Index D = 7, M = 9, H = 2;
    if constexpr (std::is_same_v<T, float> == (Rule::traits.decay == linattn::decay_kind::per_feature)) {
      all.push_back({traits_of(kind).name + std::string("_fixed"), kind, {0, D, M, H}, make_machine<Rule, T, D, M, H>});
    }
  };
  using linattn::decay_kind;
  add(linattn::decay());
  add(linattn::gated_bonus());
  add(linattn::gated_delta<decay_kind::per_head>());
  add(linattn::generalized_delta());
  add_fixed(linattn::gated_delta<decay_kind::per_feature>());
#if !defined(LINATTN_UNDER_SANITIZER)
  add(linattn::additive());
  add(linattn::gated<decay_kind::per_head>());
  add(linattn::gated<decay_kind::per_feature>());
  add(linattn::delta());
  add(linattn::gated_delta<decay_kind::per_feature>());
  add_fixed(linattn::decay());
  add_fixed(linattn::gated<decay_kind::per_head>());
  add_fixed(linattn::gated_bonus());
  add_fixed(linattn::delta());
  add_fixed(linattn::generalized_delta());
#endif
  return all;
}

}  // namespace support
