// What an attention takes of one row of a layer: q, k, v and the inputs of its rule, side by side.
#pragma once

#include <linattn/detail/activations.hpp>
#include <linattn/detail/checks.hpp>
#include <linattn/detail/registers.hpp>
#include <linattn/gates.hpp>
#include <linattn/matrix_view.hpp>
#include <linattn/update_rules/rule_traits.hpp>

#include <Eigen/Core>
#include <type_traits>

LINATTN_NAMESPACE_BEGIN
namespace detail {

template <class Attention>
concept has_rule = requires {
  Attention::rule;
};
template <class Attention>
concept takes_log_decay = requires(const typename Attention::inputs& x) {
  x.log_decay;
};
template <class Attention>
concept takes_beta = requires(const typename Attention::inputs& x) {
  x.beta;
};

/// Room for n more tokens, where a state has room for so many only.
template <class State>
void check_room(const char* function, const State& s, Eigen::Index n) {
  if constexpr (requires { s.capacity(); }) {
    if (n > s.capacity() - s.tokens()) {
      refuse(function, n, " tokens behind ", s.tokens(), " in a state with room for ", s.capacity());
    }
  }
}

/// Rows of (q, k, v, log-decays, betas), and the calls of an operator on them.
template <class Attention>
class attention_inputs {
 public:
  using T = typename Attention::scalar;
  static constexpr bool has_gates = takes_log_decay<Attention> || takes_beta<Attention>;

  static constexpr bool is_supported() {
    if constexpr (has_rule<Attention>) {
      constexpr rule_traits rule = Attention::rule;
      return rule.reads_after_write && rule.corrects != correction::rank_one;
    } else {
      return true;
    }
  }
  static_assert(is_supported(),
                "linattn: a transformer projects log_decay and beta, not the inputs of gated_bonus or "
                "generalized_delta; take additive, decay, gated, delta or gated_delta");

  /// Log-decays and betas of a token.
  static Eigen::Index log_decays(const Attention& attn) {
    if constexpr (takes_log_decay<Attention>) {
      return attn.value_heads() * (Attention::rule.decay == decay_kind::per_feature ? attn.features() : 1);
    }
    return 0;
  }
  static Eigen::Index betas(const Attention& attn) { return takes_beta<Attention> ? attn.value_heads() : 0; }

  attention_inputs(const Attention& attn, matrix_view<T> rows)
      : m_attn(attn),
        q(columns(rows, 0, attn.heads() * attn.head_dim())),
        k(columns(rows, q.cols(), attn.key_heads() * attn.head_dim())),
        v(columns(rows, q.cols() + k.cols(), attn.value_heads() * attn.value_dim())),
        m_log_decay(columns(rows, q.cols() + k.cols() + v.cols(), log_decays(attn))),
        m_beta(columns(rows, q.cols() + k.cols() + v.cols() + m_log_decay.cols(), betas(attn))) {}

  /// From what the projections gave to what the rule takes.
  void activate() const {
    for (Eigen::Index r = 0; r < q.rows(); ++r) {
      transform_in_place(m_log_decay.row(r), m_log_decay.cols(), [](const packet<T>& x) { return log_sigmoid(x); });
      transform_in_place(m_beta.row(r), m_beta.cols(), [](const packet<T>& x) { return sigmoid(x); });
    }
    if constexpr (has_rule<Attention>) {
      if constexpr (Attention::rule.corrects != correction::none) {
        l2_normalize(q, m_attn.heads(), q);
        l2_normalize(k, m_attn.key_heads(), k);
      }
    }
  }

  /// The first `keys` rows as tokens, the others as queries alone.
  void forward_causal(typename Attention::state_type& s, Eigen::Index keys, matrix_view<T> out,
                      typename Attention::workspace_type& ws) const {
    if constexpr (has_gates) {
      m_attn.forward_causal(s, rows(q, 0, keys), rows(k, 0, keys), rows(v, 0, keys), gates(keys), rows(out, 0, keys),
                            ws);
    } else {
      m_attn.forward_causal(s, rows(q, 0, keys), rows(k, 0, keys), rows(v, 0, keys), rows(out, 0, keys), ws);
    }
    const Eigen::Index others = q.rows() - keys;
    if (others > 0) m_attn.read(s, rows(q, keys, others), rows(out, keys, others), ws);
  }

  void forward(typename Attention::state_type& s, Eigen::Index keys, matrix_view<T> out,
               typename Attention::workspace_type& ws) const {
    m_attn.forward(s, q, rows(k, 0, keys), rows(v, 0, keys), out, ws);
  }

  /// Row b, a token of s.
  void step(typename Attention::state_type& s, Eigen::Index b, matrix_view<T> out,
            typename Attention::workspace_type& ws) const noexcept {
    if constexpr (has_gates) {
      typename Attention::token_inputs x;
      if constexpr (takes_log_decay<Attention>) x.log_decay = token(m_log_decay, b);
      if constexpr (takes_beta<Attention>) x.beta = token(m_beta, b);
      m_attn.step(s, token(q, b), token(k, b), token(v, b), x, vector_view<T>(out.row(b), out.cols()), ws);
    } else {
      m_attn.step(s, token(q, b), token(k, b), token(v, b), vector_view<T>(out.row(b), out.cols()), ws);
    }
  }

 private:
  static matrix_view<T> columns(const matrix_view<T>& x, Eigen::Index first, Eigen::Index n) {
    return matrix_view<T>(x.data() + first, x.rows(), n, x.row_stride());
  }
  static matrix_view<T> rows(const matrix_view<T>& x, Eigen::Index first, Eigen::Index n) {
    return matrix_view<T>(x.row(first), n, x.cols(), x.row_stride());
  }
  static vector_view<const T> token(const matrix_view<T>& x, Eigen::Index b) {
    return vector_view<const T>(x.row(b), x.cols());
  }
  auto gates(Eigen::Index n) const {
    typename Attention::inputs x;
    if constexpr (takes_log_decay<Attention>) x.log_decay = rows(m_log_decay, 0, n);
    if constexpr (takes_beta<Attention>) x.beta = rows(m_beta, 0, n);
    return x;
  }

  const Attention& m_attn;

 public:
  const matrix_view<T> q, k, v;

 private:
  const matrix_view<T> m_log_decay, m_beta;
};

}  // namespace detail
LINATTN_NAMESPACE_END
