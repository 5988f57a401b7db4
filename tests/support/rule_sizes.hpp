// How large the rounding errors of an update rule may be, element by element: the counterpart of the sums of sizes that
// trial.hpp judges attention by, for `near(actual, value, size, roundings)` there.
//
// Rules without correction add up terms that decay together, so that sums of their sizes do the same:
//
//   A_t = Diag(w) A_{t-1} + |k| |v|^T                the sum of sizes: what roundings of single terms and sums scale
//   with D_t = Diag(w) (D_{t-1} + A_{t-1}) + floor        every decay is rounded anew, the same way where gates are the
//   same
//
// Rules that correct subtract what the state recalls, and sums of sizes would grow where the state does not. Their
// columns are independent of each other, and what one carries on is bounded by the norm of the transition:
//
//   e_t = |T_t| e_{t-1} + |S'| + |beta| |k| (|v| + |k|^T |S'|) + floor        by columns; |T| <= max w max(1, |1 - beta
//   k.k|)
//
// For generalized_delta, with |b| (|a|^T |S|) for the correction, |T| is taken for max w: true for what RWKV-7 feeds it
// on the whole, not for every token.
#pragma once

#include "support/oracle.hpp"
#include "support/rule_oracle.hpp"

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <limits>

namespace support {

namespace detail {

inline rule_result rule_sizes_of_sums(rule_kind kind, const rule_inputs& x, const rule_state* initial,
                                      long double floor) {
  const bool reads_first = traits_of(kind).reads_first;
  rule_result sizes{wide_matrix(x.q.rows(), x.v.cols()), {}};
  const Eigen::Index value_dim = x.v.cols() / x.heads;
  for (Eigen::Index h = 0; h < x.heads; ++h) {
    const rule_head in(kind, x, h);
    wide_matrix terms = rule_initial(initial, in, h).cwiseAbs();         // A, (C, M)
    wide_matrix decays = wide_matrix::Zero(terms.rows(), terms.cols());  // D
    for (Eigen::Index t = 0; t < in.k.rows(); ++t) {
      const wide_vector q = in.q.row(t).cwiseAbs(), k = in.k.row(t).cwiseAbs(), v = in.v.row(t).cwiseAbs();
      auto out = sizes.out.row(t).segment(h * value_dim, value_dim);
      if (reads_first) out = q * (terms + decays) + q.cwiseProduct(in.bonus.row(t).cwiseAbs()).dot(k) * v;
      const wide_vector w = in.log_decay.row(t).array().exp();
      decays = (w.asDiagonal() * (decays + terms)).array() + floor;
      terms = w.asDiagonal() * terms;
      terms += k.transpose() * v;
      if (!reads_first) out = q * (terms + decays);
    }
    sizes.state.push_back(terms + decays);
  }
  return sizes;
}

inline rule_result rule_sizes_of_columns(rule_kind kind, const rule_inputs& x, const rule_state* initial,
                                         long double floor) {
  const rule_traits rule = traits_of(kind);
  rule_result sizes{wide_matrix(x.q.rows(), x.v.cols()), {}};
  const Eigen::Index value_dim = x.v.cols() / x.heads;
  for (Eigen::Index h = 0; h < x.heads; ++h) {
    const rule_head in(kind, x, h);
    wide_matrix s = rule_initial(initial, in, h);        // (C, M)
    wide_vector carried = wide_vector::Zero(value_dim);  // e
    for (Eigen::Index t = 0; t < in.k.rows(); ++t) {
      const wide_vector k = in.k.row(t).cwiseAbs(), v = in.v.row(t).cwiseAbs();
      wide_vector transformed = wide_vector::Zero(value_dim);
      if (rule.transforms) transformed = in.b.row(t).norm() * (in.a.row(t).cwiseAbs() * s.cwiseAbs());
      const rule_step step(rule, in, t, s);
      const long double beta = rule.corrects ? std::abs(in.beta[t]) : 1.0L;
      wide_vector written = v;
      if (rule.corrects) written += k * step.decayed.cwiseAbs();
      const long double turned = rule.corrects ? std::max(1.0L, std::abs(1 - in.beta[t] * k.squaredNorm())) : 1.0L;
      carried *= std::exp(in.log_decay.row(t).maxCoeff()) * turned;
      carried += step.decayed.colwise().norm() + beta * k.norm() * written + transformed;
      carried.array() += floor;
      sizes.out.row(t).segment(h * value_dim, value_dim) =
          in.q.row(t).cwiseAbs() * s.cwiseAbs() + in.q.row(t).norm() * carried;
    }
    sizes.state.push_back(s.cwiseAbs().rowwise() + carried);
  }
  return sizes;
}

}  // namespace detail

/// The size of every element of rule_oracle(kind, x, initial). An implementation that clears entries of the state below
/// `cleared` once a token needs it as size, too: what is lost is counted in roundings of T.
template <class T>
rule_result rule_sizes(rule_kind kind, const rule_inputs& x, const rule_state* initial = nullptr,
                       long double cleared = 0x1p-100L) {
  const rule_traits rule = traits_of(kind);
  const long double floor = std::ldexp(cleared, std::numeric_limits<T>::digits);
  return rule.corrects || rule.transforms ? detail::rule_sizes_of_columns(kind, x, initial, floor)
                                          : detail::rule_sizes_of_sums(kind, x, initial, floor);
}

}  // namespace support
