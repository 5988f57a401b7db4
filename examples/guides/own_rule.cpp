// An update rule of one's own, and a loop over the tokens that says what it is to compute.
#include <linattn/linattn.hpp>

#include <cmath>
#include <iostream>

/// S_i = Diag(a_i) S_(i-1) + phi(k_i) v_i^T,   z_i = Diag(a_i) z_(i-1) + phi(k_i),   a_i = exp(log_decay_i)
/// out_i = phi(q_i) S_i / phi(q_i) z_i
///
/// an average that forgets: every feature at a rate of its own.
struct forgetting_average {
  static constexpr linattn::rule_traits traits{.decay = linattn::decay_kind::per_feature, .normalizes = true};
  template <class View>
  struct inputs {
    View log_decay;  // (N, H C)
  };
};

using matrix = linattn::row_matrix<float>;

/// The equations above, token by token in double: H = 1, phi = elu + 1.
linattn::row_matrix<double> token_loop(const matrix& q, const matrix& k, const matrix& v, const matrix& log_decay) {
  const auto phi = [](const auto& row) -> Eigen::VectorXd {
    return row.template cast<double>().unaryExpr([](double x) { return x > 0 ? x + 1 : std::exp(x); }).transpose();
  };
  Eigen::MatrixXd S = Eigen::MatrixXd::Zero(k.cols(), v.cols());  // (C, M)
  Eigen::VectorXd z = Eigen::VectorXd::Zero(k.cols());            // (C)
  linattn::row_matrix<double> out(v.rows(), v.cols());            // (N, M)
  for (Eigen::Index i = 0; i < q.rows(); ++i) {
    const Eigen::VectorXd a = log_decay.row(i).cast<double>().array().exp().transpose();
    S = (a.asDiagonal() * S + phi(k.row(i)) * v.row(i).cast<double>()).eval();
    z = a.cwiseProduct(z) + phi(k.row(i));
    out.row(i) = phi(q.row(i)).transpose() * S / phi(q.row(i)).dot(z);
  }
  return out;
}

int main() {
  constexpr Eigen::Index tokens = 300, dim = 16, value_dim = 24;
  const matrix q = matrix::Random(tokens, dim), k = matrix::Random(tokens, dim), v = matrix::Random(tokens, value_dim);
  const matrix log_decay = matrix::Random(tokens, dim).array() - 1;  // <= 0

  const linattn::linear_attention<linattn::elu_plus_one, forgetting_average> attn(
      {.head_dim = dim, .value_dim = value_dim});
  const matrix out = attn.forward_causal(q, k, v, {.log_decay = log_decay});

  const auto expected = token_loop(q, k, v, log_decay);
  const double error = (out.cast<double>() - expected).norm() / expected.norm();
  constexpr double tolerance = 2e-6;  // the library's own for decays in float against their token loop
  std::cout << "the whole sequence against the token loop: " << (error <= tolerance ? "equal" : "DIFFERENT") << "\n";

  auto s = attn.make_state();
  auto ws = attn.make_workspace();
  linattn::row_vector<float> out_t(value_dim);
  for (Eigen::Index i = 0; i < tokens; ++i) {
    attn.step(s, q.row(i), k.row(i), v.row(i), {.log_decay = log_decay.row(i)}, out_t, ws);
  }
  const double step_error = (out_t.cast<double>() - expected.row(tokens - 1)).norm() / expected.row(tokens - 1).norm();
  std::cout << "step by step: " << (step_error <= tolerance ? "equal" : "DIFFERENT") << "\n";

  // A rule that is there, for comparison: keys of length 1, decays and strengths of writing from a layer.
  matrix keys(tokens, dim), beta(tokens, 1);
  linattn::row_matrix<float> g = -matrix::Random(tokens, 1).cwiseAbs();
  keys = k.rowwise().normalized();
  beta.setConstant(0.5F);
  const linattn::linear_attention<linattn::identity, linattn::gated_delta<>> delta_net(
      {.head_dim = dim, .value_dim = value_dim});
  const matrix y = delta_net.forward_causal(q, keys, v, {.log_decay = g, .beta = beta});
  return error <= tolerance && step_error <= tolerance && y.allFinite() ? 0 : 1;
}
