// The oracle of the update rules: each one's recurrence in long double, a token at a time, sharing no code with the
// library. rule_matrix_oracle.hpp has the same sums without a recurrence, rule_gradient_oracle.hpp their gradients.
//
//   support::rule_inputs x{.heads = 2, .q = ..., .k = ..., .v = ..., .log_decay = ..., .beta = ...};
//   const support::rule_result truth = support::rule_oracle(support::rule_kind::gated_delta_per_head, x, &initial);
//
// One loop is every rule; S_0 is the initial state or 0, w_t = exp(log_decay_t) <= 1:
//
//   rule                      S_t                                                     o_t
//   additive                  S + k v^T                                               S_t^T q
//   decay, gated_*            Diag(w) S + k v^T                                       S_t^T q
//   delta                     S + beta k (v - S^T k)^T                                S_t^T q
//   gated_delta_*             S' + beta k (v - S'^T k)^T, S' = Diag(w) S              S_t^T q
//   generalized_delta         Diag(w) S + b (a^T S) + k v^T, a on the undecayed S     S_t^T q
//   gated_bonus               Diag(w) S + k v^T                                       (S_{t-1} + Diag(u) k v^T)^T q
//
// Arithmetic is plain IEEE: a log-decay of -infinity is a factor of exactly 0, which clears a finite state and turns
// infinity or NaN in it into NaN.
#pragma once

#include "support/oracle.hpp"

#include <Eigen/Core>

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

namespace support {

// ---- rules ----------------------------------------------------------------------------------------------------------

enum class rule_kind {
  additive,  ///< without z
  decay,
  gated_per_head,
  gated_per_feature,
  delta,
  gated_delta_per_head,
  gated_delta_per_feature,
  generalized_delta,  ///< RWKV-7
  gated_bonus,        ///< RWKV-6
};

inline constexpr rule_kind all_rules[] = {
    rule_kind::additive,
    rule_kind::decay,
    rule_kind::gated_per_head,
    rule_kind::gated_per_feature,
    rule_kind::delta,
    rule_kind::gated_delta_per_head,
    rule_kind::gated_delta_per_feature,
    rule_kind::generalized_delta,
    rule_kind::gated_bonus,
};

/// What tells one rule from another.
struct rule_traits {
  enum class decay_shape { none, fixed, per_head, per_feature };

  const char* name = "";
  decay_shape decay = decay_shape::none;
  bool corrects = false;     ///< writes beta (v - what S recalls for k), not v
  bool transforms = false;   ///< adds b (a^T S)
  bool reads_first = false;  ///< from S_{t-1}, its own token coming in by the bonus
};

constexpr rule_traits traits_of(rule_kind kind) {
  using shape = rule_traits::decay_shape;
  switch (kind) {
    case rule_kind::additive:
      return {.name = "additive"};
    case rule_kind::decay:
      return {.name = "decay", .decay = shape::fixed};
    case rule_kind::gated_per_head:
      return {.name = "gated_per_head", .decay = shape::per_head};
    case rule_kind::gated_per_feature:
      return {.name = "gated_per_feature", .decay = shape::per_feature};
    case rule_kind::delta:
      return {.name = "delta", .corrects = true};
    case rule_kind::gated_delta_per_head:
      return {.name = "gated_delta_per_head", .decay = shape::per_head, .corrects = true};
    case rule_kind::gated_delta_per_feature:
      return {.name = "gated_delta_per_feature", .decay = shape::per_feature, .corrects = true};
    case rule_kind::generalized_delta:
      return {.name = "generalized_delta", .decay = shape::per_feature, .transforms = true};
    case rule_kind::gated_bonus:
      return {.name = "gated_bonus", .decay = shape::per_feature, .reads_first = true};
  }
  return {};
}

// ---- inputs and results ---------------------------------------------------------------------------------------------

/// q and k are features: phi was applied already (see apply), and C stands for D where phi is the identity. What a rule
/// does not use is left empty.
struct rule_inputs {
  Eigen::Index heads = 1;
  long double query_scale = 1;  ///< multiplies q
  wide_matrix q = {}, k = {};   ///< (N, H C)
  wide_matrix v = {};           ///< (N, H M)
  wide_matrix log_decay = {};   ///< fixed: (1, H); per head: (N, H); per feature: (N, H C)
  wide_matrix beta = {};        ///< (N, H)
  wide_matrix a = {}, b = {};   ///< (N, H C)
  wide_matrix bonus = {};       ///< u, (N, H C), or (1, H C) for all tokens
};

/// S (C, M) of every head.
using rule_state = std::vector<wide_matrix>;

struct rule_result {
  wide_matrix out;   ///< (N, H M)
  rule_state state;  ///< after the last token
};

/// q <- phi(query_scale q) and k <- phi(k), head by head; query_scale is used up.
inline void apply(const oracle_map& map, rule_inputs& x, Eigen::Index first_position = 0) {
  const Eigen::Index head_dim = x.q.cols() / x.heads;
  const auto mapped = [&](const oracle_map::function& phi, const wide_matrix& rows) {
    const Eigen::Index features = phi(wide_vector::Zero(head_dim), first_position, 0).size();
    wide_matrix result(rows.rows(), x.heads * features);
    for (Eigen::Index t = 0; t < rows.rows(); ++t) {
      for (Eigen::Index h = 0; h < x.heads; ++h) {
        result.row(t).segment(h * features, features) =
            phi(rows.row(t).segment(h * head_dim, head_dim), first_position + t, h);
      }
    }
    return result;
  };
  x.q = mapped(map.queries, x.query_scale * x.q);
  x.k = mapped(map.keys, x.k);
  x.query_scale = 1;
}

namespace detail {

/// One head's share of the inputs, its log-decays spread to one per token and feature.
struct rule_head {
  wide_matrix q, k, v, log_decay, a, b, bonus;  ///< (N, C), v (N, M)
  wide_vector beta;                             ///< (N)

  rule_head(rule_kind kind, const rule_inputs& x, Eigen::Index h) {
    const rule_traits rule = traits_of(kind);
    const Eigen::Index n = x.k.rows(), features = x.k.cols() / x.heads, value_dim = x.v.cols() / x.heads;
    const auto part = [&](const wide_matrix& all, const char* name, Eigen::Index rows, Eigen::Index cols) {
      if (all.rows() != rows || all.cols() != x.heads * cols) {
        throw std::invalid_argument(std::string(rule.name) + ": " + name + " is (" + std::to_string(all.rows()) + ", " +
                                    std::to_string(all.cols()) + ") instead of (" + std::to_string(rows) + ", " +
                                    std::to_string(x.heads * cols) + ")");
      }
      return wide_matrix(all.middleCols(h * cols, cols));
    };
    q = part(x.q, "q", n, features) * x.query_scale;
    k = part(x.k, "k", n, features);
    v = part(x.v, "v", n, value_dim);
    using shape = rule_traits::decay_shape;
    switch (rule.decay) {
      case shape::none:
        log_decay = wide_matrix::Zero(n, features);
        break;
      case shape::fixed:
        log_decay = wide_matrix::Constant(n, features, part(x.log_decay, "log_decay", 1, 1)(0, 0));
        break;
      case shape::per_head:
        log_decay = part(x.log_decay, "log_decay", n, 1).replicate(1, features);
        break;
      case shape::per_feature:
        log_decay = part(x.log_decay, "log_decay", n, features);
        break;
    }
    if (rule.corrects) beta = part(x.beta, "beta", n, 1).transpose();
    if (rule.transforms) {
      a = part(x.a, "a", n, features);
      b = part(x.b, "b", n, features);
    }
    if (rule.reads_first) {
      const bool one_for_all = x.bonus.rows() == 1;
      bonus = part(x.bonus, "bonus", one_for_all ? 1 : n, features).replicate(one_for_all ? n : 1, 1);
    }
  }
};

inline wide_matrix rule_initial(const rule_state* initial, const rule_head& head, Eigen::Index h) {
  return initial ? initial->at(std::size_t(h)) : wide_matrix::Zero(head.k.cols(), head.v.cols());
}

/// The state between two tokens, and what a token did to it: all that the gradients ask for.
struct rule_step {
  wide_matrix decayed;   ///< Diag(w) S_{t-1}, (C, M)
  wide_vector recalled;  ///< a^T S_{t-1}, (M), where the rule transforms
  wide_vector written;   ///< what k is written with, (M)
  wide_vector out;       ///< (M)

  rule_step(const rule_traits& rule, const rule_head& x, Eigen::Index t, wide_matrix& s) {
    const wide_vector q = x.q.row(t), k = x.k.row(t), v = x.v.row(t);
    if (rule.reads_first) out = q * s + q.cwiseProduct(x.bonus.row(t)).dot(k) * v;
    if (rule.transforms) recalled = x.a.row(t) * s;
    for (Eigen::Index c = 0; c < s.rows(); ++c) s.row(c) *= std::exp(x.log_decay(t, c));
    decayed = s;
    written = v;
    if (rule.corrects) written = x.beta[t] * (v - k * s);
    s += k.transpose() * written;
    if (rule.transforms) s += x.b.row(t).transpose() * recalled;
    if (!rule.reads_first) out = q * s;
  }
};

}  // namespace detail

/// The token loop, from `initial` where one is given. O(N C M) long double operations a head.
inline rule_result rule_oracle(rule_kind kind, const rule_inputs& x, const rule_state* initial = nullptr) {
  rule_result result{wide_matrix(x.q.rows(), x.v.cols()), {}};
  const Eigen::Index value_dim = x.v.cols() / x.heads;
  for (Eigen::Index h = 0; h < x.heads; ++h) {
    const detail::rule_head head(kind, x, h);
    wide_matrix s = detail::rule_initial(initial, head, h);
    for (Eigen::Index t = 0; t < head.k.rows(); ++t) {
      const detail::rule_step step(traits_of(kind), head, t, s);
      result.out.row(t).segment(h * value_dim, value_dim) = step.out;
    }
    result.state.push_back(s);
  }
  return result;
}

/// What all tokens do to any state: S_N = A S_0 + X, per head A (C, C) and X (C, M). Two segments in a row are
/// (A_2 A_1, A_2 X_1 + X_2).
struct rule_segment {
  rule_state a, x;
};

/// A as the final state of S_0 = I when nothing is written, X as that of S_0 = 0.
inline rule_segment rule_segment_oracle(rule_kind kind, const rule_inputs& x) {
  const Eigen::Index features = x.k.cols() / x.heads;
  rule_inputs nothing_written = x;
  nothing_written.v = wide_matrix::Zero(x.k.rows(), x.heads * features);
  const rule_state identity(std::size_t(x.heads), wide_matrix::Identity(features, features));
  return {rule_oracle(kind, nothing_written, &identity).state, rule_oracle(kind, x).state};
}

}  // namespace support
