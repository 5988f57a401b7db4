// The second oracle of the update rules: no recurrence, but matrices over all pairs of tokens, and for the rules that
// correct or transform one triangular system. rule_oracle.hpp is the first, and tells what each rule is.
//
// With decay(j, i) the product of the factors of tokens j + 1 ... i, feature by feature, and lower(X, Y)_ij =
// sum_c X_ic decay(j, i)_c Y_jc for j <= i (0 above the diagonal), X*_i = X_i decayed from the initial state to token
// i:
//
//   out = Q* S_0 + lower(Q, K) V + lower(Q, B) R        S_N = decay(-1, N - 1) S_0 + K_last^T V + B_last^T R
//
// where the rows of K_last and B_last are decayed up to the last token. V and R depend on the rule:
//
//   corrects:    V <- U with (I + Diag(beta) below(K, K)) U = Diag(beta) (V - K* S_0),  below = lower without diagonal
//   transforms:  (I - before(A, B)) R = A- S_0 + before(A, K) V,  where tokens are seen before the decay of token i:
//                before(X, Y)_ij uses decay(j, i - 1), j < i, and A- is A decayed from the initial state to token i - 1
//   reads first: out = Q- S_0 + (before(Q, K) + Diag(sum_c Q u K)) V
//
// Every decay is the exponential of a sum of its own log-decays, never a quotient or a difference: -infinity and -90
// are as good here as any other.
#pragma once

#include "support/oracle.hpp"
#include "support/rule_oracle.hpp"

#include <Eigen/Core>
#include <Eigen/Dense>

namespace support {

namespace detail {

/// Sums over pairs of tokens under one head's log-decays g (N, C). A token sees what earlier ones left either with its
/// own decay (lag 0) or before it (lag 1).
struct rule_pairs {
  const wide_matrix& g;

  /// sum_c X_ic Y_jc decay(j, i - lag)_c for j <= i - lag: (N, N).
  wide_matrix operator()(const wide_matrix& x, const wide_matrix& y, Eigen::Index lag) const {
    wide_matrix p = wide_matrix::Zero(x.rows(), y.rows());
    for (Eigen::Index j = 0; j < y.rows(); ++j) {
      wide_vector log_decay = wide_vector::Zero(g.cols());
      for (Eigen::Index i = j + lag; i < x.rows(); ++i) {
        if (i > j + lag) log_decay += g.row(i - lag);
        for (Eigen::Index c = 0; c < g.cols(); ++c) p(i, j) += x(i, c) * y(j, c) * std::exp(log_decay[c]);
      }
    }
    return p;
  }

  /// The rows of x, decayed from the initial state to token i - lag: (N, C).
  wide_matrix from_initial(const wide_matrix& x, Eigen::Index lag) const {
    wide_matrix decayed = x;
    wide_vector log_decay = wide_vector::Zero(g.cols());
    for (Eigen::Index i = 0; i < x.rows(); ++i) {
      if (i >= lag) log_decay += g.row(i - lag);
      for (Eigen::Index c = 0; c < g.cols(); ++c) decayed(i, c) *= std::exp(log_decay[c]);
    }
    return decayed;
  }

  /// The rows of y, decayed from token j to the last: (N, C).
  wide_matrix to_last(const wide_matrix& y) const {
    wide_matrix decayed = y;
    wide_vector log_decay = wide_vector::Zero(g.cols());
    for (Eigen::Index j = y.rows(); j-- > 0;) {
      for (Eigen::Index c = 0; c < g.cols(); ++c) decayed(j, c) *= std::exp(log_decay[c]);
      log_decay += g.row(j);
    }
    return decayed;
  }
};

/// (I + L) X = Y, L below the diagonal.
inline wide_matrix solve_unit_lower(const wide_matrix& l, const wide_matrix& y) {
  return l.triangularView<Eigen::UnitLower>().solve(y);
}

}  // namespace detail

/// The closed form of `kind`, from `initial` where one is given. O(N^2 (C + M)) long double operations and
/// exponentials a head.
inline rule_result rule_matrix_oracle(rule_kind kind, const rule_inputs& x, const rule_state* initial = nullptr) {
  const rule_traits rule = traits_of(kind);
  rule_result result{wide_matrix(x.q.rows(), x.v.cols()), {}};
  const Eigen::Index value_dim = x.v.cols() / x.heads;
  for (Eigen::Index h = 0; h < x.heads; ++h) {
    const detail::rule_head in(kind, x, h);
    const detail::rule_pairs pairs{in.log_decay};
    const wide_matrix s0 = detail::rule_initial(initial, in, h);
    const Eigen::Index lag = rule.reads_first ? 1 : 0;

    wide_matrix v = in.v;  // what each key is written with, (N, M)
    if (rule.corrects) {
      const wide_matrix seen = in.beta.asDiagonal() * pairs(in.k, in.k, 0);  // (N, N); its diagonal is not looked at
      v = detail::solve_unit_lower(seen, in.beta.asDiagonal() * (in.v - pairs.from_initial(in.k, 0) * s0));
    }
    wide_matrix out = pairs.from_initial(in.q, lag) * s0 + pairs(in.q, in.k, lag) * v;  // (N, M)
    if (rule.reads_first) out += in.q.cwiseProduct(in.bonus).cwiseProduct(in.k).rowwise().sum().asDiagonal() * v;

    wide_matrix s = pairs.to_last(in.k).transpose() * v;  // (C, M)
    for (Eigen::Index c = 0; c < s.rows(); ++c) s.row(c) += std::exp(in.log_decay.col(c).sum()) * s0.row(c);
    if (rule.transforms) {
      const wide_matrix r = detail::solve_unit_lower(
          -pairs(in.a, in.b, 1), pairs.from_initial(in.a, 1) * s0 + pairs(in.a, in.k, 1) * v);  // a^T S_{t-1}, (N, M)
      out += pairs(in.q, in.b, 0) * r;
      s += pairs.to_last(in.b).transpose() * r;
    }
    result.out.middleCols(h * value_dim, value_dim) = out;
    result.state.push_back(s);
  }
  return result;
}

}  // namespace support
