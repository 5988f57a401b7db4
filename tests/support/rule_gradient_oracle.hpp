// The reverse recurrences of the update rules in long double: gradients of <dout, out> + <dS_N, S_N>, the loop of
// rule_oracle.hpp run backwards over its stored steps.
//
// With dS the gradient of S_t on arrival, S' = Diag(w) S_{t-1}, and u what k is written with (v, or
// beta (v - S'^T k) where the rule corrects), token t gives, from the last to the first:
//
//   read after:     dS += q dout^T                  dq = S_t dout
//   write:          dk = dS u                       du = dS^T k
//   transforms:     db = dS r, dr = dS^T b          da = S_{t-1} dr        r = a^T S_{t-1}
//   corrects:       dbeta = <du, v - S'^T k>        dv = beta du           dk -= S' dv,  dS' = dS - k dv^T
//   else:           dv = du                         dS' = dS
//   decay:          dlog_decay_c = <dS'_c, S'_c>, summed over what shares one log-decay
//   before it:      dS_{t-1} = Diag(w) dS' + a dr^T
//   read before:    dS_{t-1} += q dout^T            dq = S_{t-1} dout + (v.dout) u k, and likewise dk, dv, du
//
// A factor of exactly 0 has the gradient 0: its log-decay is -infinity, and stays there.
#pragma once

#include "support/oracle.hpp"
#include "support/rule_oracle.hpp"

#include <Eigen/Core>

#include <cmath>
#include <utility>
#include <vector>

namespace support {

/// Gradients in the shapes of the inputs; those of inputs that a rule does not have are empty.
struct rule_gradients {
  wide_matrix dq, dk, dv, dlog_decay, dbeta, da, db, dbonus;
  rule_state dinitial;  ///< dS_0
};

namespace detail {

/// Gradients of one head, log-decays still one per token and feature.
struct rule_head_gradients {
  wide_matrix q, k, v, log_decay, a, b, bonus;
  wide_vector beta;
  wide_matrix s;  ///< of the state before the tokens not yet gone through

  rule_head_gradients(const rule_head& x, wide_matrix last)
      : q(wide_matrix::Zero(x.k.rows(), x.k.cols())),
        k(q),
        v(wide_matrix::Zero(x.v.rows(), x.v.cols())),
        log_decay(q),
        a(q),
        b(q),
        bonus(q),
        beta(wide_vector::Zero(x.k.rows())),
        s(std::move(last)) {}

  /// Token t, which turned the state `before` into `after`.
  void reverse(const rule_traits& rule, const rule_head& x, Eigen::Index t, const rule_step& step,
               const wide_matrix& before, const wide_matrix& after, const wide_vector& dout) {
    const wide_vector qt = x.q.row(t), kt = x.k.row(t), vt = x.v.row(t);
    if (!rule.reads_first) {
      q.row(t) = dout * after.transpose();
      s += qt.transpose() * dout;
    }
    k.row(t) = step.written * s.transpose();
    const wide_vector dwritten = kt * s;

    wide_matrix ds = s;  // of S' = Diag(w) S_{t-1}
    if (rule.corrects) {
      const wide_vector dv = x.beta[t] * dwritten;
      beta[t] = dwritten.dot(vt - kt * step.decayed);
      v.row(t) = dv;
      k.row(t) -= dv * step.decayed.transpose();
      ds -= kt.transpose() * dv;
    } else {
      v.row(t) = dwritten;
    }

    wide_matrix dbefore = ds;
    for (Eigen::Index c = 0; c < ds.rows(); ++c) {
      log_decay(t, c) = ds.row(c).dot(step.decayed.row(c));
      dbefore.row(c) *= std::exp(x.log_decay(t, c));
    }
    if (rule.transforms) {
      const wide_vector drecalled = x.b.row(t) * s;
      b.row(t) = step.recalled * s.transpose();
      a.row(t) = drecalled * before.transpose();
      dbefore += x.a.row(t).transpose() * drecalled;
    }
    if (rule.reads_first) {
      const wide_vector u = x.bonus.row(t);
      const long double along_v = vt.dot(dout);
      q.row(t) = dout * before.transpose() + along_v * u.cwiseProduct(kt);
      k.row(t) += along_v * u.cwiseProduct(qt);
      v.row(t) += qt.cwiseProduct(u).dot(kt) * dout;
      bonus.row(t) = along_v * qt.cwiseProduct(kt);
      dbefore += qt.transpose() * dout;
    }
    s = dbefore;
  }
};

}  // namespace detail

/// dout (N, H M); dstate: the gradient of the final state, 0 where none is given. Holds the states of all tokens of a
/// head: O(N C M) long doubles.
inline rule_gradients rule_gradient_oracle(rule_kind kind, const rule_inputs& x, const wide_matrix& dout,
                                           const rule_state* dstate = nullptr, const rule_state* initial = nullptr) {
  const rule_traits rule = traits_of(kind);
  const auto zeros = [](const wide_matrix& like) -> wide_matrix { return wide_matrix::Zero(like.rows(), like.cols()); };
  rule_gradients d{zeros(x.q), zeros(x.k),     zeros(x.v), zeros(x.log_decay), zeros(x.beta), zeros(x.a),
                   zeros(x.b), zeros(x.bonus), {}};
  for (Eigen::Index h = 0; h < x.heads; ++h) {
    const detail::rule_head head(kind, x, h);
    const Eigen::Index features = head.k.cols(), value_dim = head.v.cols();
    std::vector<wide_matrix> states = {detail::rule_initial(initial, head, h)};  // S_0 ... S_N
    std::vector<detail::rule_step> steps;
    for (Eigen::Index t = 0; t < head.k.rows(); ++t) {
      wide_matrix s = states.back();
      steps.emplace_back(rule, head, t, s);
      states.push_back(s);
    }
    detail::rule_head_gradients g(head, detail::rule_initial(dstate, head, h));
    for (Eigen::Index t = head.k.rows(); t-- > 0;) {
      const auto i = static_cast<std::size_t>(t);
      g.reverse(rule, head, t, steps[i], states[i], states[i + 1], dout.row(t).segment(h * value_dim, value_dim));
    }

    const Eigen::Index first = h * features;
    d.dq.middleCols(first, features) = g.q * x.query_scale;
    d.dk.middleCols(first, features) = g.k;
    d.dv.middleCols(h * value_dim, value_dim) = g.v;
    if (rule.decay == rule_traits::decay_shape::fixed) d.dlog_decay(0, h) = g.log_decay.sum();
    if (rule.decay == rule_traits::decay_shape::per_head) d.dlog_decay.col(h) = g.log_decay.rowwise().sum();
    if (rule.decay == rule_traits::decay_shape::per_feature) d.dlog_decay.middleCols(first, features) = g.log_decay;
    if (rule.corrects) d.dbeta.col(h) = g.beta.transpose();
    if (rule.transforms) {
      d.da.middleCols(first, features) = g.a;
      d.db.middleCols(first, features) = g.b;
    }
    if (rule.reads_first) {
      d.dbonus.middleCols(first, features) = x.bonus.rows() == 1 ? wide_matrix(g.bonus.colwise().sum()) : g.bonus;
    }
    d.dinitial.push_back(g.s);
  }
  return d;
}

}  // namespace support
