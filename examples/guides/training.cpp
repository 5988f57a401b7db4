// Gradients by the library, the chain rule around them by hand; one check against a difference, and a fit.
#include <linattn/linattn.hpp>

#include <cmath>
#include <iostream>

using matrix = linattn::row_matrix<double>;
using attention = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, double>;

int main() {
  constexpr Eigen::Index tokens = 64, width = 8;
  const attention attn({.head_dim = 4, .heads = 2});
  const matrix x = matrix::Random(tokens, width), y = matrix::Random(tokens, width);
  matrix Wq = matrix::Identity(width, width), Wk = Wq, Wv = Wq;

  const auto loss_of = [&](const matrix& out) { return (out - y).squaredNorm() / (2 * tokens); };
  const auto loss_at = [&] {
    const matrix q = x * Wq, k = x * Wk, v = x * Wv;
    return loss_of(attn.forward_causal(q, k, v));
  };
  const double first = loss_at();
  double by_vjp = 0;
  for (int i = 0; i < 200; ++i) {
    const matrix q = x * Wq, k = x * Wk, v = x * Wv;
    const matrix out = attn.forward_causal(q, k, v);
    const matrix dout = (out - y) / tokens;  // of the loss with respect to out

    const auto [dq, dk, dv] = attn.vjp_causal(q, k, v, dout);  // of the shapes of q, k and v
    const matrix dWq = x.transpose() * dq;
    if (i == 0) by_vjp = dWq(0, 0);
    Wq -= 0.5 * dWq;
    Wk -= 0.5 * (x.transpose() * dk);
    Wv -= 0.5 * (x.transpose() * dv);
  }
  const double last = loss_at();

  Wq = Wk = Wv = matrix::Identity(width, width);
  constexpr double h = 1e-6;
  Wq(0, 0) += h;
  const double ahead = loss_at();
  Wq(0, 0) -= 2 * h;
  const double difference = (ahead - loss_at()) / (2 * h);
  const bool agrees = std::abs(by_vjp - difference) < 1e-8;  // rounding of two losses, divided by 2 h: about 1e-10
  std::cout << "vjp and a difference " << (agrees ? "agree" : "DIFFER") << "\n";

  // A sequence too long to be held at once: segments from the last to the first, each from the state before it.
  const matrix q = x * Wq, dout = y;
  const auto whole = attn.vjp_causal(q, q, q, dout);
  constexpr Eigen::Index half = tokens / 2;
  const matrix q1 = q.topRows(half), q2 = q.bottomRows(half), dout1 = dout.topRows(half), dout2 = dout.bottomRows(half);
  auto ws = attn.make_workspace();
  const auto before_1 = attn.make_state();
  auto before_2 = before_1;
  attn.absorb(before_2, q1, q1, ws);
  matrix dq1(half, width), dk1(half, width), dv1(half, width), dq2(half, width), dk2(half, width), dv2(half, width);
  auto ds = attn.make_state();  // the gradient with respect to the final state: zero
  attn.vjp_causal(before_2, q2, q2, q2, dout2, ds, dq2, dk2, dv2, ws);
  attn.vjp_causal(before_1, q1, q1, q1, dout1, ds, dq1, dk1, dv1, ws);  // ds: with respect to the initial state
  const bool same = dk1.isApprox(whole.dk.topRows(half), 1e-12) && dq2.isApprox(whole.dq.bottomRows(half), 1e-12);
  std::cout << "in two segments " << (same ? "the same gradients" : "OTHER GRADIENTS") << "\n";
  return agrees && same && last < 0.9 * first ? 0 : 1;
}
