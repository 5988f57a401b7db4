// The caller's rows as the engine sees them: any layout whose tokens and heads are a stride apart.
#pragma once

#include <linattn/matrix_view.hpp>
#include <linattn/update_rules/rule_traits.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// What token i has for head h begins at data + i * row_stride + h * head_stride, its elements side by side. Packed
/// matrices (N, H D) have heads D apart; heads that are stored one after the other, (H, N, D), rows D apart.
template <class U>
struct token_rows {
  U* data = nullptr;
  Eigen::Index row_stride = 0;
  Eigen::Index head_stride = 0;

  constexpr token_rows() noexcept = default;
  constexpr token_rows(U* first, Eigen::Index stride_of_rows, Eigen::Index stride_of_heads) noexcept
      : data(first), row_stride(stride_of_rows), head_stride(stride_of_heads) {}
  /// A packed matrix of `dim` columns a head.
  constexpr token_rows(const matrix_view<U>& x, Eigen::Index dim) noexcept
      : data(x.data()), row_stride(x.row_stride()), head_stride(dim) {}

  LINATTN_INLINE constexpr U* at(Eigen::Index token, Eigen::Index head) const noexcept {
    return data + token * row_stride + head * head_stride;
  }
};

/// What a rule does not take, in the place of what it would: no memory, and nothing to set up in a decode step.
template <int Place>
struct not_taken {};

/// What a rule takes beside q, k and v, in either form of it (rule_traits.hpp).
template <class View, rule_traits Rule>
struct rule_inputs {
  static constexpr bool has_log_decay = Rule.decay != decay_kind::none && !Rule.fixed_decay;
  static constexpr bool has_beta = Rule.corrects == correction::delta;
  static constexpr bool has_rank_one = Rule.corrects == correction::rank_one;
  static constexpr bool has_bonus = !Rule.reads_after_write;

  template <bool Taken, int Place, class X = View>
  using input = std::conditional_t<Taken, X, not_taken<Place>>;

  [[no_unique_address]] input<has_log_decay, 0> log_decay;                          // (N, H), or (N, H C) per feature
  [[no_unique_address]] input<has_beta, 1> beta;                                    // (N, H)
  [[no_unique_address]] input<has_rank_one, 2> a;                                   // (N, H C)
  [[no_unique_address]] input<has_rank_one, 3> b;                                   // (N, H C)
  [[no_unique_address]] input<has_bonus, 4> bonus;                                  // (N, H C)
  [[no_unique_address]] input<Rule.fixed_decay, 5, const double*> fixed_log_decay;  // (H)
};

/// Whether a member of rule_inputs is one.
template <class X>
inline constexpr bool is_taken = true;
template <int Place>
inline constexpr bool is_taken<not_taken<Place>> = false;

/// The rows of one sequence that a pass runs over, of element type S; those that a verb does not take are empty.
template <class S, class T, rule_traits Rule>
struct sequence_rows {
  Eigen::Index tokens = 0;
  Eigen::Index position = 0;  // of the first token
  token_rows<const S> q;
  token_rows<const S> k;
  token_rows<const S> v;
  rule_inputs<token_rows<const S>, Rule> gates;
  token_rows<S> out;
  token_rows<T> denominators;  // (N, H): q.z before the policy, where its data is not null

  /// f(rows) for everything that has a row a token.
  template <class F>
  constexpr void for_each(const F& f) {
    f(q), f(k), f(v), f(out), f(denominators);
    if constexpr (decltype(gates)::has_log_decay) f(gates.log_decay);
    if constexpr (decltype(gates)::has_beta) f(gates.beta);
    if constexpr (decltype(gates)::has_rank_one) f(gates.a), f(gates.b);
    if constexpr (decltype(gates)::has_bonus) f(gates.bonus);
  }

  /// `count` of the tokens alone, from `first` on.
  constexpr void narrow(Eigen::Index first, Eigen::Index count) {
    tokens = count;
    position += first;
    for_each([&](auto& rows) {
      if (rows.data != nullptr) rows.data += first * rows.row_stride;
    });
  }
};

}  // namespace detail
LINATTN_NAMESPACE_END
