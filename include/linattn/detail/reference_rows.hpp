// The loops behind reference.hpp: rows of weights, one query at a time. `Options` is its reference_options.
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/layout.hpp>
#include <linattn/feature_map.hpp>
#include <linattn/matrix_view.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

LINATTN_NAMESPACE_BEGIN
namespace detail {

template <class X>
inline constexpr bool is_matrix_view = false;
template <class T>
inline constexpr bool is_matrix_view<matrix_view<T>> = true;

/// What the references take as a matrix; which Eigen objects do is for matrix_view's sentences to say.
template <class X>
concept matrix_like = is_eigen<X> || is_matrix_view<X>;

template <matrix_like X>
auto reference_view(const X& x) {
  if constexpr (is_eigen<X>) {
    return matrix_view<const typename X::Scalar>(x);
  } else {
    return matrix_view<const typename X::value_type>(x);
  }
}

/// The type of evaluation: Eval, or, where that is void, the one in which an operator on X's scalars would compute.
template <class Eval, class X>
struct evaluation {
  using type = Eval;
};
template <class X>
struct evaluation<void, X> {
  using type = accumulator_t<typename decltype(reference_view(std::declval<const X&>()))::value_type>;
};
template <class Eval, class X>
using evaluated_in = typename evaluation<Eval, X>::type;

/// All the sentences about shapes; a caller without values passes k in their place.
template <class Q, class K, class V, class Options>
void check_reference(const char* function, const Q& q, const K& k, const V& v, const Options& options) {
  const auto shape = [](const char* name, const auto& x) {
    return sentence(name, " is ", shape_text{x.rows(), x.cols()});
  };
  const Eigen::Index heads = options.heads;
  const auto entries = static_cast<Eigen::Index>(options.key_mask.size());
  if (heads < 1) refuse(function, "heads is ", heads, "; at least one is needed");
  if (q.cols() < 1) refuse(function, shape("q", q), "; a head needs at least one column");
  if (q.cols() % heads != 0) refuse(function, shape("q", q), ", whose columns do not divide into ", heads, " heads");
  if (k.cols() != q.cols()) refuse(function, shape("k", k), " but ", shape("q", q), "; their columns must agree");
  if (v.rows() != k.rows()) refuse(function, shape("v", v), " but ", shape("k", k), "; their rows must agree");
  if (v.cols() % heads != 0) refuse(function, shape("v", v), ", whose columns do not divide into ", heads, " heads");
  if (options.causal && q.rows() != k.rows()) {
    refuse(function, shape("q", q), " but ", shape("k", k), "; causal attention needs as many keys as queries");
  }
  if (entries != 0 && entries != k.rows()) {
    refuse(function, "key_mask has ", entries, " entries but ", shape("k", k), "; every key needs one");
  }
}

/// C of a map for heads of head_dim coordinates, or a sentence.
template <class Map>
Eigen::Index features_of(const char* function, const Map& map, Eigen::Index head_dim) {
  if constexpr (requires { map.head_dim(); }) {
    if (map.head_dim() != head_dim) {
      refuse(function, "the feature map was made for head_dim ", Eigen::Index(map.head_dim()), " but a head of q has ",
             head_dim, " columns");
    }
  }
  const auto features = static_cast<Eigen::Index>(map.dimension(head_dim));
  if (features < 1) {
    refuse(function, "the feature map has dimension(", head_dim, ") = ", features, "; it must be at least 1");
  }
  return features;
}

/// Stands where a similarity goes and means eq. 2.
struct softmax_similarity {};

/// What a similarity must be, as sentences.
template <class Similarity, class Eval>
constexpr void check_similarity() {
  using row = Eigen::Map<const row_vector<Eval>>;
  if constexpr (has_dimension<Similarity>) {
    check_feature_map_members<Similarity, Eval>();
  } else {
    static_assert(
        std::is_invocable_v<const Similarity&, const row&, const row&>,
        "linattn: the first argument must be a similarity, callable on two row vectors of D coordinates as in "
        "[](const auto& q, const auto& k) { return std::exp(q.dot(k)); }, or a feature map");
  }
}

template <class Options>
void check_softmax_options(const char* function, const Options& options) {
  using policy = decltype(options.denominator);
  if (!options.normalize || options.denominator.how != policy::kind::none) {
    refuse(function,
           "softmax weights are always divided by their plain sum; normalize and denominator are for kernel_attention");
  }
}

template <class Options>
bool keeps(const Options& options, Eigen::Index j) {
  return options.key_mask.empty() || options.key_mask[static_cast<std::size_t>(j)];
}

/// Whether row i sees key j.
template <class Options>
bool sees(const Options& options, Eigen::Index i, Eigen::Index j) {
  return (!options.causal || j <= i) && keeps(options, j);
}

/// Head h of H, converted and scaled.
template <class Eval, class T>
row_matrix<Eval> one_head(const matrix_view<const T>& x, Eigen::Index h, Eigen::Index heads, Eval scale) {
  const Eigen::Index cols = x.cols() / heads;
  row_matrix<Eval> out(x.rows(), cols);  // (R, D)
  for (Eigen::Index i = 0; i < x.rows(); ++i) {
    for (Eigen::Index c = 0; c < cols; ++c) out(i, c) = static_cast<Eval>(x(i, h * cols + c)) * scale;
  }
  return out;
}

template <class Eval>
Eval row_dot(const Eval* a, const Eval* b, Eigen::Index n) {
  Eval sum(0);
  for (Eigen::Index c = 0; c < n; ++c) sum += a[c] * b[c];
  return sum;
}

/// phi (C), not its logarithm, of one row x (D), by the map's own member and in aligned memory, as the contract
/// promises a map.
template <bool Queries, class Map, class T>
void map_row(const Map& map, const T* x, Eigen::Index head_dim, T* phi, Eigen::Index features, tile_position where) {
  const Eigen::Index in_stride = round_up(head_dim, line<T>);
  const Eigen::Index out_stride = round_up(features, line<T>);
  slab<T, Eigen::Dynamic> in(in_stride);
  slab<T, Eigen::Dynamic> out(out_stride);
  std::copy(x, x + head_dim, in.data());
  const const_tile<T> source(in.data(), 1, head_dim, Eigen::OuterStride<>(in_stride));  // (1, D)
  tile<T> target(out.data(), 1, features, Eigen::OuterStride<>(out_stride));            // (1, C)
  if constexpr (is_asymmetric<Map, T> && Queries) {
    if constexpr (has_positional_queries<Map, T>) {
      map.forward_queries(source, target, where);
    } else {
      map.forward_queries(source, target);
    }
  } else if constexpr (is_asymmetric<Map, T>) {
    if constexpr (has_positional_keys<Map, T>) {
      map.forward_keys(source, target, where);
    } else {
      map.forward_keys(source, target);
    }
  } else if constexpr (has_positional_forward<Map, T>) {
    map.forward(source, target, where);
  } else {
    map.forward(source, target);
  }
  std::copy(out.data(), out.data() + features, phi);
  if constexpr (has_log_features<Map>)
    std::transform(phi, phi + features, phi, [](T log_phi) { return std::exp(log_phi); });
}

/// phi of every row of one head. A key's position is the number of kept keys before it. A query's is its own key's
/// where rows correspond (causal); else the queries are the last rows of the sequence of keys.
template <bool Queries, class Map, class Eval, class Options>
row_matrix<Eval> map_head(const Map& map, const row_matrix<Eval>& x, Eigen::Index features, Eigen::Index head,
                          Eigen::Index keys, const Options& options) {
  const bool last_rows = Queries && !options.causal;
  Eigen::Index position = last_rows ? -x.rows() : 0;
  for (Eigen::Index j = 0; last_rows && j < keys; ++j) position += keeps(options, j) ? 1 : 0;
  row_matrix<Eval> phi(x.rows(), features);  // (R, C)
  for (Eigen::Index i = 0; i < x.rows(); ++i) {
    map_row<Queries>(map, x.data() + i * x.cols(), x.cols(), phi.data() + i * phi.cols(), phi.cols(), {position, head});
    position += last_rows || keeps(options, i) ? 1 : 0;
  }
  return phi;
}

/// Calls row(h, i, w) for every head and query: w (1, Nk), the weights before division, 0 where the row sees no key.
template <class Eval, class Similarity, class Q, class K, class Options, class Row>
void for_each_row(const char* function, const Similarity& similarity, const Q& q, const K& k, const Options& options,
                  Eigen::Index first_head, Row&& row) {
  constexpr bool softmax = std::is_same_v<Similarity, softmax_similarity>;
  const Eigen::Index head_dim = q.cols() / options.heads;
  const Eval default_scale = softmax ? Eval(1) / std::sqrt(Eval(head_dim)) : Eval(1);
  const Eval scale = options.scale ? static_cast<Eval>(*options.scale) : default_scale;
  row_vector<Eval> w(k.rows());  // (1, Nk)
  for (Eigen::Index h = 0; h < options.heads; ++h) {
    row_matrix<Eval> q_h = one_head<Eval>(q, h, options.heads, scale);    // (Nq, D), then (Nq, C)
    row_matrix<Eval> k_h = one_head<Eval>(k, h, options.heads, Eval(1));  // (Nk, D), then (Nk, C)
    if constexpr (has_dimension<Similarity>) {
      const Eigen::Index features = features_of(function, similarity, head_dim);
      q_h = map_head<true>(similarity, q_h, features, first_head + h, k.rows(), options);
      k_h = map_head<false>(similarity, k_h, features, first_head + h, k.rows(), options);
    }
    const Eigen::Index n = q_h.cols();
    for (Eigen::Index i = 0; i < q.rows(); ++i) {
      w.setZero();
      Eval largest = std::numeric_limits<Eval>::lowest();
      for (Eigen::Index j = 0; j < k.rows(); ++j) {
        if (!sees(options, i, j)) continue;
        const Eval* q_i = q_h.data() + i * n;
        const Eval* k_j = k_h.data() + j * n;
        if constexpr (softmax || has_dimension<Similarity>) {
          w[j] = row_dot(q_i, k_j, n);
        } else {
          using row_map = Eigen::Map<const row_vector<Eval>>;
          w[j] = static_cast<Eval>(similarity(row_map(q_i, n), row_map(k_j, n)));
        }
        if (w[j] > largest) largest = w[j];
      }
      if constexpr (softmax) {
        for (Eigen::Index j = 0; j < k.rows(); ++j) {
          if (sees(options, i, j)) w[j] = std::exp(w[j] - largest);
        }
      }
      row(h, i, w);
    }
  }
}

/// What a row of weights is divided by: its guarded sum, or 1.
template <class Eval, class Options>
Eval denominator_of(const row_vector<Eval>& w, const Options& options) {
  if (!options.normalize) return Eval(1);
  Eval sum(0);
  for (Eigen::Index j = 0; j < w.size(); ++j) sum += w[j];
  return options.denominator(sum);
}

template <class Eval, class Similarity, class Q, class K, class V, class Options>
row_matrix<Eval> attend(const char* function, const Similarity& similarity, const Q& q, const K& k, const V& v,
                        const Options& options) {
  check_reference(function, q, k, v, options);
  const Eigen::Index value_dim = v.cols() / options.heads;
  row_matrix<Eval> out = row_matrix<Eval>::Zero(q.rows(), v.cols());  // (Nq, H*M)
  for_each_row<Eval>(function, similarity, q, k, options, 0,
                     [&](Eigen::Index h, Eigen::Index i, const row_vector<Eval>& w) {
                       const Eval denominator = denominator_of(w, options);
                       if (denominator == Eval(0)) return;
                       for (Eigen::Index column = h * value_dim; column < (h + 1) * value_dim; ++column) {
                         for (Eigen::Index j = 0; j < k.rows(); ++j) {
                           if (sees(options, i, j)) out(i, column) += w[j] * static_cast<Eval>(v(j, column));
                         }
                         out(i, column) /= denominator;
                       }
                     });
  return out;
}

template <class Eval, class Similarity, class Q, class K, class Options>
row_matrix<Eval> weights(const char* function, const Similarity& similarity, const Q& q, const K& k,
                         const Options& options, Eigen::Index head) {
  check_reference(function, q, k, k, options);
  if (options.heads != 1) {
    refuse(function, "these are the weights of one head, but heads is ", options.heads,
           "; pass q.middleCols(h * D, D) and k.middleCols(h * D, D)");
  }
  row_matrix<Eval> out = row_matrix<Eval>::Zero(q.rows(), k.rows());  // (Nq, Nk)
  for_each_row<Eval>(function, similarity, q, k, options, head,
                     [&](Eigen::Index, Eigen::Index i, const row_vector<Eval>& w) {
                       const Eval denominator = denominator_of(w, options);
                       if (denominator != Eval(0)) out.row(i) = w / denominator;
                     });
  return out;
}

}  // namespace detail
LINATTN_NAMESPACE_END
