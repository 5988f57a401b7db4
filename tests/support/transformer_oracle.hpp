// The oracle of transformers: their equations in long double from plain weights, whole matrices at a time. Attention
// itself is that of reference.hpp, in double, or a token loop of rule_oracle.hpp.
//
//   const wide_matrix truth = support::transformer_oracle(options, weights, support::rows_of(weights, symbols),
//                                                         support::kernel_oracle(linattn::elu_plus_one(), heads));
#pragma once

#include "support/oracle.hpp"
#include "support/rule_oracle.hpp"

#include <linattn/reference.hpp>
#include <linattn/transformer.hpp>

#include <Eigen/Core>
#include <cmath>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace support {

// ---- what stands between products -----------------------------------------------------------------------------------

template <class X>
wide_matrix wide(const Eigen::DenseBase<X>& x) {
  return x.derived().template cast<long double>();
}

/// x W^T + b.
template <class T>
wide_matrix affine(const wide_matrix& x, const linattn::affine_weights<T>& a) {
  wide_matrix y = x * wide(a.weight).transpose();
  if (a.bias.size() > 0) y.rowwise() += wide_vector(wide(a.bias));
  return y;
}

template <class T>
wide_matrix layer_norm(const wide_matrix& x, const linattn::norm_weights<T>& n, double epsilon) {
  wide_matrix y = x;
  for (Eigen::Index i = 0; i < x.rows(); ++i) {
    wide_vector from_mean = x.row(i).array() - x.row(i).mean();
    from_mean.array() -= from_mean.mean();  // what the rounding of a large mean left
    y.row(i) = from_mean / std::sqrt(from_mean.squaredNorm() / (long double)(x.cols()) + (long double)(epsilon));
  }
  y.array().rowwise() *= wide_vector(wide(n.weight)).array();
  if (n.bias.size() > 0) y.rowwise() += wide_vector(wide(n.bias));
  return y;
}

inline long double gelu(long double x) { return x * std::erfc(-x / std::sqrt(2.0L)) / 2; }

inline wide_matrix activated(const wide_matrix& x, linattn::activation act) {
  if (act == linattn::activation::gelu) return x.unaryExpr([](long double value) { return gelu(value); });
  return x.cwiseMax(0.0L);
}

/// MLP(x) = W2 act(W1 x + b1) + b2.
template <class T>
wide_matrix feed_forward(const wide_matrix& x, const linattn::layer_weights<T>& w, linattn::activation act) {
  return affine(activated(affine(x, w.linear1), act), w.linear2);
}

/// Rows 0 ... N - 1 of P columns: sines of i / 10000^(2 j / P) in columns 2 j, cosines behind each.
inline wide_matrix sinusoids(Eigen::Index tokens, Eigen::Index columns) {
  wide_matrix waves(tokens, columns);
  for (Eigen::Index i = 0; i < tokens; ++i) {
    for (Eigen::Index c = 0; c < columns; ++c) {
      const long double angle =
          (long double)(i) / std::pow(10000.0L, (long double)(c - c % 2) / (long double)(columns));
      waves(i, c) = c % 2 == 0 ? std::sin(angle) : std::cos(angle);
    }
  }
  return waves;
}

/// The rows of the embedding that belong to symbols.
template <class T>
wide_matrix rows_of(const linattn::transformer_weights<T>& w, std::span<const Eigen::Index> symbols) {
  wide_matrix x(Eigen::Index(symbols.size()), w.embedding.cols());
  for (std::size_t i = 0; i < symbols.size(); ++i) x.row(Eigen::Index(i)) = wide(w.embedding.row(symbols[i]));
  return x;
}

/// x (N, E) and what is known of places, (N, F).
template <class T>
wide_matrix with_positions(const wide_matrix& x, const linattn::transformer_options& o,
                           const linattn::transformer_weights<T>& w, Eigen::Index width) {
  wide_matrix y(x.rows(), width);
  switch (o.positions) {
    case linattn::position_encoding::none:
      return x;
    case linattn::position_encoding::sinusoid_added:
      return x + sinusoids(x.rows(), width);
    case linattn::position_encoding::sinusoid_concatenated:
      y << x, sinusoids(x.rows(), width - x.cols());
      return y;
    case linattn::position_encoding::learned:
      return x + wide(w.positions.topRows(x.rows()));
  }
  return x;
}

// ---- attentions -----------------------------------------------------------------------------------------------------

/// What projections make of the rows of a layer.
struct attention_rows {
  wide_matrix q, k, v;          ///< (N, H D), (Nk, Hk D), (Nk, Hv M)
  wide_matrix log_decay, beta;  ///< as projected: before ln sigmoid and sigmoid
};

/// (N, Ho M) from the rows of a layer.
using attention_oracle = std::function<wide_matrix(std::size_t layer, const attention_rows&)>;

/// Heads of q, k and v; neighbours share.
struct oracle_heads {
  Eigen::Index queries = 1, keys = queries, values = keys;
  Eigen::Index outputs() const { return std::max(queries, values); }
};

/// Each of `from` heads for all that use it: `to` heads.
inline wide_matrix shared(const wide_matrix& x, Eigen::Index from, Eigen::Index to) {
  const Eigen::Index dim = x.cols() / from;
  wide_matrix y(x.rows(), to * dim);
  for (Eigen::Index h = 0; h < to; ++h) y.middleCols(h * dim, dim) = x.middleCols(h * from / to * dim, dim);
  return y;
}

/// Eqs. 5 and 9 by pairs of tokens. `map(layer)` is the layer's feature map; the first `keys` tokens are seen, -1: all.
template <class MapOf>
attention_oracle kernel_oracle(const MapOf& map, const oracle_heads& heads, bool causal, Eigen::Index keys = -1,
                               const linattn::denominator_policy& denominator = linattn::denominator_policy::none()) {
  return [=](std::size_t layer, const attention_rows& x) -> wide_matrix {
    const Eigen::Index n = x.k.rows();
    const auto is_key = std::make_unique<bool[]>(std::size_t(n) + 1);
    for (Eigen::Index j = 0; j < n; ++j) is_key[std::size_t(j)] = keys < 0 || j < keys;
    const auto narrow = [](const wide_matrix& y) -> linattn::row_matrix<double> { return y.cast<double>(); };
    return wide(linattn::kernel_attention(map(layer), narrow(shared(x.q, heads.queries, heads.outputs())),
                                          narrow(shared(x.k, heads.keys, heads.outputs())),
                                          narrow(shared(x.v, heads.values, heads.outputs())),
                                          {.heads = heads.outputs(),
                                           .causal = causal,
                                           .denominator = denominator,
                                           .key_mask = {is_key.get(), std::size_t(n)}}));
  };
}

/// A rule on features that are the coordinates. Gates as transformer.hpp has them; where the rule corrects, queries and
/// keys of length 1, to the epsilon of l2_normalize.
inline attention_oracle rule_attention_oracle(rule_kind kind, const oracle_heads& heads) {
  return [=](std::size_t, const attention_rows& x) -> wide_matrix {
    constexpr long double norm_epsilon = 1e-6L;
    const auto unit = [&](wide_matrix y, Eigen::Index count) {
      const Eigen::Index dim = y.cols() / count;
      for (Eigen::Index i = 0; i < y.rows() && traits_of(kind).corrects; ++i) {
        for (Eigen::Index h = 0; h < count; ++h) {
          auto head = y.row(i).segment(h * dim, dim);
          head /= std::sqrt(head.squaredNorm() + norm_epsilon);
        }
      }
      return y;
    };
    const auto sigmoid = [](long double value) { return 1 / (1 + std::exp(-value)); };
    const Eigen::Index outputs = heads.outputs();
    rule_inputs rows{.heads = outputs,
                     .q = shared(unit(x.q, heads.queries), heads.queries, outputs),
                     .k = shared(unit(x.k, heads.keys), heads.keys, outputs),
                     .v = shared(x.v, heads.values, outputs)};
    if (x.log_decay.size() > 0)
      rows.log_decay = shared(x.log_decay.unaryExpr(sigmoid).array().log(), heads.values, outputs);
    if (x.beta.size() > 0) rows.beta = shared(x.beta.unaryExpr(sigmoid), heads.values, outputs);
    return rule_oracle(kind, rows).out;
  };
}

// ---- layers ---------------------------------------------------------------------------------------------------------

/// out_projection(attend(projections)): queries and gates from x, keys and values from `memory`.
template <class T>
wide_matrix multi_head(std::size_t layer, const wide_matrix& x, const wide_matrix& memory,
                       const linattn::multi_head_weights<T>& w, const attention_oracle& attend) {
  attention_rows rows{affine(x, w.query), affine(memory, w.key), affine(memory, w.value), {}, {}};
  if (w.log_decay.weight.size() > 0) rows.log_decay = affine(x, w.log_decay);
  if (w.beta.weight.size() > 0) rows.beta = affine(x, w.beta);
  return affine(attend(layer, rows), w.out);
}

/// The whole model of x (N, E), causal or not as `attend` is. A decoder has `recall` for its cross-attention to
/// `memory`.
template <class T>
wide_matrix transformer_oracle(const linattn::transformer_options& o, const linattn::transformer_weights<T>& w,
                               const wide_matrix& inputs, const attention_oracle& attend,
                               const attention_oracle& recall = {}, const wide_matrix& memory = {}) {
  using linattn::wiring;
  wide_matrix x = with_positions(inputs, o, w, w.layers[0].attention.out.weight.rows());
  const auto join = [&](const linattn::norm_weights<T>& n, const auto& branch) {
    if (o.wiring == wiring::paper) x = x + branch(x);
    if (o.wiring == wiring::post_norm) x = layer_norm(x + branch(x), n, o.norm_epsilon);
    if (o.wiring == wiring::pre_norm) x = x + branch(layer_norm(x, n, o.norm_epsilon));
  };
  for (std::size_t l = 0; l < w.layers.size(); ++l) {
    const linattn::layer_weights<T>& of = w.layers[l];
    join(of.norm_attention,
         [&](const wide_matrix& from) -> wide_matrix { return multi_head(l, from, from, of.attention, attend); });
    if (recall) {
      join(of.norm_cross,
           [&](const wide_matrix& from) -> wide_matrix { return multi_head(l, from, memory, of.cross, recall); });
    }
    if (o.wiring == wiring::paper) {
      x = feed_forward(x, of, o.activation);
    } else {
      join(of.norm_feed_forward,
           [&](const wide_matrix& from) -> wide_matrix { return feed_forward(from, of, o.activation); });
    }
  }
  if (w.norm.weight.size() > 0) x = layer_norm(x, w.norm, o.norm_epsilon);
  return w.predictor.weight.size() > 0 ? affine(x, w.predictor) : x;
}

}  // namespace support
