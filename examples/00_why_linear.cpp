// 00_why_linear: section 3 of "Transformers are RNNs" (Katharopoulos et al., 2020) as a program. Each line is one
// equation: its number, its two sides, the last entry of both, and the largest difference anywhere.
//
// Rows. A token is a row: x (N, F), q and k (N, D), v (N, M). The paper writes phi(Q_i)^T S with columns; here
//
//     a = phi(q_i) (1, C),   b = phi(k_j) (1, C),   v_j (1, M):   a b^T is a number,   b^T v_j is a (C, M) matrix,
//
// and everything below comes from (a b^T) v_j = a (b^T v_j), summed over j.
//
// Why sim must be an inner product. Equation 3 allows any sim >= 0: non-negative, so that the weights average. But in
// sim(q_i, k_j) = exp(q_i.k_j) every j meets every i, N^2 times. Where sim(q, k) = phi(q) phi(k)^T for some features
// phi, and only there, q_i can be taken out of the sum over j; what stays behind, S = sum_j phi(k_j)^T v_j, knows
// nothing of i and is shared by all queries. (exp(q.k) is an inner product, too, but of infinitely many features.)
//
// The receptive field of out_i is the set of tokens it depends on: all, or with the causal mask all j <= i. Making
// attention linear does not shorten it, as windows do: phi > 0 gives every one of them a weight > 0. What is given up
// is sharpness: S is (C, M) however long the sequence, a sum in which many keys share C directions.

#include <linattn/linattn.hpp>
#include <linattn/reference.hpp>

#include <cmath>
#include <cstdio>
#include <limits>

namespace {

using matrix = linattn::row_matrix<double>;
using Eigen::Index;

// Largest difference between the two sides, relative to the largest entry above 1: each side rounds up to
// N C = 1,600 additions at 2^-53 = 1e-16, in an order of its own.
constexpr double rounding = 1e-12;
int failures = 0;

void print_equation(const char* number, const char* text, const matrix& left, const matrix& right) {
  const double difference = (left - right).cwiseAbs().maxCoeff<Eigen::PropagateNaN>();
  const bool equal = std::isfinite(difference) && difference <= rounding * std::fmax(1, right.cwiseAbs().maxCoeff());
  failures += equal ? 0 : 1;
  std::printf("%-9s%-76s%12.6f%12.6f%10.1e%s\n", number, text, left(left.rows() - 1, left.cols() - 1),
              right(right.rows() - 1, right.cols() - 1), difference, equal ? "" : "  WRONG");
}

matrix waves(Index rows, Index cols, double frequency) {
  matrix x(rows, cols);
  for (Index i = 0; i < x.size(); ++i) x.data()[i] = std::sin(frequency * static_cast<double>(i * i % 7919 + i));
  return x;
}

/// Eq. 7: phi(x) = elu(x) + 1, C = D.
matrix phi(const matrix& x) {
  return x.unaryExpr([](double value) { return value > 0 ? value + 1 : std::exp(value); });
}

/// a b (R, M), counting.
matrix product(const matrix& a, const matrix& b, long long& multiplications) {
  multiplications += static_cast<long long>(a.rows() * a.cols() * b.cols());
  return a * b;
}

/// Row i divided by the sum of row i of the weights.
matrix divided(const matrix& numerators, const matrix& weights) {
  return numerators.array().colwise() / weights.rowwise().sum().array();
}

}  // namespace

int main() {
  constexpr Index N = 200, F = 12, D = 8, M = F;
  const matrix x = waves(N, F, 0.37);
  const matrix q = x * waves(F, D, 1.1), k = x * waves(F, D, 1.3), v = x * waves(F, M, 1.7);
  const matrix A = phi(q), B = phi(k);  // (N, C)

  std::printf("%-9s%-76s%12s%12s%10s\n", "equation", "left = right", "left", "right", "differ by");

  const auto exp_similarity = [](const auto& a, const auto& b) { return std::exp(a.dot(b) / std::sqrt(double(D))); };
  const auto phi_similarity = [](const auto& a, const auto& b) { return phi(a).row(0).dot(phi(b).row(0)); };
  print_equation("2 = 3", "softmax_j(q_i.k_j / sqrt D) v_j = sum_j sim v_j / sum_j sim, sim = exp(...)",
                 linattn::softmax_attention(q, k, v), linattn::kernel_attention(exp_similarity, q, k, v));
  print_equation("3", "sum_j (sim_ij / sum_l sim_il) v_j = (sum_j sim_ij v_j) / sum_l sim_il",
                 linattn::attention_weights(phi_similarity, q, k) * v,
                 linattn::kernel_attention(phi_similarity, q, k, v));

  // Equation 5 in small: one query, one key; one query, all keys; one entry of the result; the whole of it.
  const matrix a = A.row(N - 1), b = B.row(0), v_0 = v.row(0);  // (1, C), (1, C), (1, M)
  print_equation("4 -> 5", "(a b^T) v_j = a (b^T v_j)                      one query a, one key b",
                 (a * b.transpose()) * v_0, a * (b.transpose() * v_0));
  print_equation("5", "(a B^T) V = a (B^T V)                          one query, all keys", (a * B.transpose()) * v,
                 a * (B.transpose() * v));
  matrix by_pairs = matrix::Zero(1, 1), by_features = matrix::Zero(1, 1);
  for (Index j = 0; j < N; ++j) {
    double similarity = 0;
    for (Index c = 0; c < D; ++c) similarity += A(N - 1, c) * B(j, c);
    by_pairs(0, 0) += similarity * v(j, M - 1);
  }
  for (Index c = 0; c < D; ++c) {
    double s = 0;
    for (Index j = 0; j < N; ++j) s += B(j, c) * v(j, M - 1);
    by_features(0, 0) += A(N - 1, c) * s;
  }
  print_equation("6", "sum_j (sum_c A_ic B_jc) V_jm = sum_c A_ic (sum_j B_jc V_jm)      one entry", by_pairs,
                 by_features);
  long long pairs_first = 0, features_first = 0;
  const matrix quadratic = product(product(A, B.transpose(), pairs_first), v, pairs_first);     // (N, N), (N, M)
  const matrix linear = product(A, product(B.transpose(), v, features_first), features_first);  // (C, M), (N, M)
  print_equation("6", "(A B^T) V = A (B^T V)                          all queries, all keys", quadratic, linear);
  std::printf("%-9sN = %lld: N^2 (C + M) = %lld multiplications on the left, 2 N C M = %lld on the right\n", "",
              static_cast<long long>(N), pairs_first, features_first);

  // The same, divided and in one call: what the library computes.
  const linattn::linear_attention<linattn::elu_plus_one, linattn::additive, double> attention(
      {.head_dim = D, .value_dim = M});
  print_equation("4 = 5", "kernel_attention(phi.phi, q, k, v) = linear_attention::forward(q, k, v)",
                 linattn::kernel_attention(phi_similarity, q, k, v), attention.forward(q, k, v));

  // Causal: row i sees j <= i. As a mask of minus infinity on the logits, or as the lower triangle of the weights.
  matrix logits = q * k.transpose() / std::sqrt(double(D));  // (N, N)
  for (Index i = 0; i < N; ++i) logits.row(i).tail(N - 1 - i).array() += -std::numeric_limits<double>::infinity();
  const matrix masked = logits.array().exp();
  print_equation("8", "softmax(logits + mask) v, mask -inf above the diagonal = sum over j <= i",
                 divided(masked * v, masked), linattn::softmax_attention(q, k, v, {.causal = true}));
  const matrix triangle = (A * B.transpose()).triangularView<Eigen::Lower>();  // (N, N)
  const matrix causal = attention.forward_causal(q, k, v);
  print_equation("8 = 9", "lower triangle of (A B^T), times V, divided = forward_causal(q, k, v)",
                 divided(triangle * v, triangle), causal);

  // Prefix sums: S_i and Z_i differ from S_(i-1) and Z_(i-1) by one term.
  matrix S = matrix::Zero(D, M), Z = matrix::Zero(1, D);  // (C, M), (1, C)
  matrix by_prefix(N, M);
  for (Index i = 0; i < N; ++i) {
    S += B.row(i).transpose() * v.row(i);
    Z += B.row(i);
    by_prefix.row(i) = A.row(i) * S / A.row(i).dot(Z.row(0));
  }
  print_equation("10-12", "phi(q_i) S_i / phi(q_i) Z_i, prefix sums S_i, Z_i = forward_causal", by_prefix, causal);

  // The RNN: S and Z are its hidden state, and a layer is f(attention(x) + x), f a two-layer network (eq. 1).
  const matrix w_1 = waves(F, 4 * F, 2.3), w_2 = waves(4 * F, F, 2.9);
  const auto f = [&](const matrix& rows) -> matrix { return (rows * w_1).cwiseMax(0.0) * w_2; };
  auto state = attention.make_state();
  auto workspace = attention.make_workspace();
  linattn::row_vector<double> attended(M);
  matrix y(N, F);
  for (Index i = 0; i < N; ++i) {
    attention.step(state, q.row(i), k.row(i), v.row(i), attended, workspace);
    y.row(i) = f(attended + x.row(i));
  }
  matrix hidden(D, M + 1), sums(D, M + 1);
  hidden << state.kv(0), state.k_sum(0).transpose();
  sums << S, Z.transpose();
  print_equation("16-19", "[s_N, z_N] after N steps = [S_N, Z_N] of the prefix sums", hidden, sums);
  print_equation("1 = 20", "y_i = f(phi(q_i) s_i / phi(q_i) z_i + x_i) = f(forward_causal(q, k, v) + x)", y,
                 f(causal + x));
  std::printf("%-9sthe state holds %lld numbers after %lld tokens, and held as many after one\n", "",
              static_cast<long long>(state.kv(0).size() + state.k_sum(0).size()),
              static_cast<long long>(state.tokens()));
  return failures == 0 ? 0 : 1;
}
