// Gradients of attention by pairs of tokens, as the chain rule gives them: what vjp and vjp_causal are compared with.
#pragma once

#include <linattn/options.hpp>

#include <Eigen/Core>

namespace support {

/// One head, from features: phi_q (Nq, C), phi_k (Nk, C), v (Nk, M), G = dout (Nq, M), in double.
///
///   A = phi_q phi_k^T, lower triangle where causal     num = A v + phi_q S_0     den = A 1 + phi_q z_0
///
/// The loss is <G, out> + <dS, S_N> + <dz, z_N>.
struct gradient_oracle {
  using matrix = Eigen::MatrixXd;
  using vector = Eigen::VectorXd;

  gradient_oracle(bool is_causal, bool normalizes, const linattn::denominator_policy& p)
      : causal(is_causal), normalize(normalizes), policy(p) {}

  bool causal;
  bool normalize;
  linattn::denominator_policy policy;
  matrix S0, dS;  // (C, M): the initial S; the gradient with respect to the final one
  vector z0, dz;  // (C)

  matrix dphi_q, dphi_k, dv, dS0;  // results
  vector dz0;

  void run(const matrix& phi_q, const matrix& phi_k, const matrix& v, const matrix& G) {
    matrix A = phi_q * phi_k.transpose();  // (Nq, Nk)
    if (causal) A = matrix(A.triangularView<Eigen::Lower>());
    const vector raw = A.rowwise().sum() + phi_q * z0;
    vector inverse = vector::Ones(raw.size());
    vector c = vector::Zero(raw.size());
    if (normalize) {
      const matrix num = A * v + phi_q * S0;
      for (Eigen::Index i = 0; i < raw.size(); ++i) {
        const double den = policy(raw[i]);
        inverse[i] = den == 0 ? 0 : 1 / den;
        const bool clamped = policy.how == linattn::denominator_policy::kind::clamp && raw[i] < policy.epsilon;
        c[i] = clamped ? 0 : G.row(i).dot(num.row(i)) * inverse[i];
      }
    }
    const matrix scaled = inverse.asDiagonal() * G;  // (Nq, M)
    const vector shares = inverse.cwiseProduct(c);   // (Nq)
    matrix dA = scaled * v.transpose();              // (Nq, Nk)
    dA.colwise() -= shares;
    if (causal) dA = matrix(dA.triangularView<Eigen::Lower>());
    dphi_q = dA * phi_k + scaled * S0.transpose() - shares * z0.transpose();
    dphi_k = dA.transpose() * phi_q + v * dS.transpose();
    dphi_k.rowwise() += dz.transpose();
    dv = A.transpose() * scaled + phi_k * dS;
    dS0 = phi_q.transpose() * scaled + dS;
    dz0 = dz - phi_q.transpose() * shares;
  }
};

}  // namespace support
