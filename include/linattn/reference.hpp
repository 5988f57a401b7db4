// The O(N^2) references: softmax attention, and attention with any similarity, as the equations are written.
#pragma once

#include <linattn/detail/reference_rows.hpp>
#include <linattn/feature_map.hpp>
#include <linattn/matrix_view.hpp>
#include <linattn/options.hpp>

#include <Eigen/Core>
#include <optional>
#include <span>
#include <utility>

LINATTN_NAMESPACE_BEGIN

// What everything else is measured against: a few plain loops over pairs of tokens, without blocks, prefix sums or
// packets. Slow on purpose.
//
//   eq. 2   V'_i = sum_j softmax_j(q_i.k_j / sqrt(D)) v_j                          softmax_attention
//   eq. 3   V'_i = sum_j sim(q_i, k_j) v_j / sum_j sim(q_i, k_j),   sim >= 0       kernel_attention
//
// equal when sim = exp(q.k / sqrt(D)). Source: Katharopoulos, Vyas, Pappas and Fleuret, Transformers are RNNs, 2020.
//
// Shapes.     Packed as everywhere: q (Nq, H*D), k (Nk, H*D), v (Nk, H*M) give (Nq, H*M); head h in columns h*D ... and
//             h*M ... . Anything a matrix_view accepts. Defined when empty: no queries, no rows; no keys, rows of 0.
// Precision.  The first template argument is the type that everything is evaluated and returned in; by default the
//             inputs' own (float for half and bfloat16). softmax_attention<double>(q, k, v) of float matrices is the
//             double reference of that float input.
// Numerics.   A row that sees no key, or whose denominator is 0, is exactly 0. Keys and values hidden by a mask take no
//             part: they may hold NaN. A NaN in a query makes its own row NaN; one in a key or value, the rows that see
//             it. Sums run over j in order, in the type of evaluation. Maps that write log phi are evaluated as phi,
//             which may overflow where the operator does not: logits of more than 88 in float, 709 in double.
// Cost.       O(H Nq Nk (D + M)) time, O(Nk) memory beside inputs, output and one head's converted rows. Allocates.
// Errors.     std::invalid_argument naming both sizes, before anything is computed.

/// What a reference is asked for: designators in this order.
struct reference_options {
  Eigen::Index heads = 1;            ///< H, packed side by side in the columns
  bool causal = false;               ///< row i sees keys 0 ... i (eq. 8); needs as many keys as queries
  std::optional<double> scale = {};  ///< multiplies q before the similarity; default 1/sqrt(D) for softmax, else 1
  bool normalize = true;             ///< divide by the sum of the weights; kernel_attention only
  denominator_policy denominator = denominator_policy::none();  ///< what guards that sum; kernel_attention only
  std::span<const bool> key_mask = {};  ///< one entry a key, for all heads: true = keep; empty = keep all
};

/// Eq. 2: out_i = sum_j p_ij v_j, p_ij = exp(s_ij) / sum_j exp(s_ij), s_ij = scale q_i.k_j.
///
/// Row-stable: the row's largest logit is subtracted first, so that logits of any finite size will do; an infinite one
/// makes its row NaN. Throws for normalize = false or a denominator policy, which have no meaning here.
template <class Eval = void, detail::matrix_like Q, detail::matrix_like K, detail::matrix_like V>
row_matrix<detail::evaluated_in<Eval, Q>> softmax_attention(const Q& q, const K& k, const V& v,
                                                            const reference_options& options = {}) {
  detail::check_softmax_options("softmax_attention", options);
  return detail::attend<detail::evaluated_in<Eval, Q>>("softmax_attention", detail::softmax_similarity(),
                                                       detail::reference_view(q), detail::reference_view(k),
                                                       detail::reference_view(v), options);
}

/// Eq. 3: out_i = sum_j sim(q_i, k_j) v_j / sum_j sim(q_i, k_j); the sum over j guarded as options.denominator says, or
/// no division at all (normalize = false).
///
/// `similarity` is any callable on two row vectors (1, D) in the type of evaluation,
///
///   kernel_attention([](const auto& q, const auto& k) { return std::exp(q.dot(k)); }, q, k, v)
///
/// and must be >= 0 for the weights to be an average; that is not checked. A feature map may stand in its place: then
/// sim(q, k) = phi(q).phi(k), phi computed once a row by the map itself. This is the quadratic form that the verbs of
/// linear_attention equal in linear time.
template <class Eval = void, class Similarity, detail::matrix_like Q, detail::matrix_like K, detail::matrix_like V>
row_matrix<detail::evaluated_in<Eval, Q>> kernel_attention(const Similarity& similarity, const Q& q, const K& k,
                                                           const V& v, const reference_options& options = {}) {
  detail::check_similarity<Similarity, detail::evaluated_in<Eval, Q>>();
  return detail::attend<detail::evaluated_in<Eval, Q>>("kernel_attention", similarity, detail::reference_view(q),
                                                       detail::reference_view(k), detail::reference_view(v), options);
}

/// The (Nq, Nk) weights p_ij of softmax attention, one head: rows sum to 1, or are 0 where a row sees no key.
/// softmax_attention(q, k, v) = attention_weights(q, k) v.
template <class Eval = void, detail::matrix_like Q, detail::matrix_like K>
row_matrix<detail::evaluated_in<Eval, Q>> attention_weights(const Q& q, const K& k,
                                                            const reference_options& options = {}) {
  detail::check_softmax_options("attention_weights", options);
  return detail::weights<detail::evaluated_in<Eval, Q>>("attention_weights", detail::softmax_similarity(),
                                                        detail::reference_view(q), detail::reference_view(k), options,
                                                        0);
}

/// The (Nq, Nk) weights of a similarity or a feature map, one head: for a map, the matrix that linear attention never
/// forms. A map that asks for its head's number is given `head`.
template <class Eval = void, class Similarity, detail::matrix_like Q, detail::matrix_like K>
row_matrix<detail::evaluated_in<Eval, Q>> attention_weights(const Similarity& similarity, const Q& q, const K& k,
                                                            const reference_options& options = {},
                                                            Eigen::Index head = 0) {
  detail::check_similarity<Similarity, detail::evaluated_in<Eval, Q>>();
  return detail::weights<detail::evaluated_in<Eval, Q>>("attention_weights", similarity, detail::reference_view(q),
                                                        detail::reference_view(k), options, head);
}

/// Eq. 4 as a similarity: sim(q, k) = phi(q).phi(k), a function of two row vectors of D coordinates. Both are mapped at
/// every call, which allocates. Not for maps that ask for the token's position: pass those themselves.
template <class Map>
class feature_similarity {
 public:
  explicit feature_similarity(Map map = Map()) : m_map(std::move(map)) {}

  template <class Q, class K>
  typename Q::Scalar operator()(const Q& q, const K& k) const {
    using T = typename Q::Scalar;
    static_assert(!detail::is_positional<Map, T>,
                  "linattn: a similarity of two vectors has no position to give to this feature map; pass the map "
                  "itself to kernel_attention or attention_weights");
    detail::check_feature_map_members<Map, T>();
    const row_vector<T> x_q = q;                                                        // (1, D)
    const row_vector<T> x_k = k;                                                        // (1, D)
    row_vector<T> phi_q(detail::features_of("feature_similarity", m_map, x_q.size()));  // (1, C)
    row_vector<T> phi_k(phi_q.size());                                                  // (1, C)
    detail::map_row<true>(m_map, x_q.data(), x_q.size(), phi_q.data(), phi_q.size(), {});
    detail::map_row<false>(m_map, x_k.data(), x_k.size(), phi_k.data(), phi_k.size(), {});
    return detail::row_dot(phi_q.data(), phi_k.data(), phi_q.size());
  }

 private:
  Map m_map;
};

LINATTN_NAMESPACE_END
