// 06_gradient: fit an attention layer by plain gradient descent, and watch the loss fall.
//
//     teacher:  y = attention(x Wq*, x Wk*, x Wv*)                 student:  out = attention(x Wq, x Wk, x Wv)
//     loss = |out - y|^2 / (2 N)                                   dout = (out - y) / N
//     dq, dk, dv = vjp_causal(q, k, v, dout)                       dWq = x^T dq, dWk = x^T dk, dWv = x^T dv
//
// The gradient is that of the whole operator, map and denominator included, and needs no more memory than a workspace,
// however long the sequence. It is checked against a difference of the loss before the fit begins.

#include <linattn/linattn.hpp>

#include <cmath>
#include <iostream>

namespace {

using matrix = linattn::row_matrix<double>;
constexpr Eigen::Index tokens = 256, width = 8, heads = 2, head_dim = 4;

/// Uniform in (-1, 1), the same everywhere.
matrix random(Eigen::Index rows, Eigen::Index cols, unsigned seed) {
  matrix x(rows, cols);
  for (Eigen::Index i = 0; i < x.size(); ++i) {
    seed = seed * 1664525U + 1013904223U;
    x.data()[i] = seed / 2147483648.0 - 1;
  }
  return x;
}

struct layer {
  using attention = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, double>;

  attention attn{linattn::options{.head_dim = head_dim, .heads = heads}};
  matrix Wq, Wk, Wv;  // (width, H D)

  explicit layer(unsigned seed)
      : Wq(random(width, heads * head_dim, seed)),
        Wk(random(width, heads * head_dim, seed + 1)),
        Wv(random(width, heads * head_dim, seed + 2)) {}

  matrix forward(const matrix& x) const {
    const matrix q = x * Wq, k = x * Wk, v = x * Wv;
    return attn.forward_causal(q, k, v);
  }
  linattn::gradients<double> vjp(const matrix& x, const matrix& dout) const {
    const matrix q = x * Wq, k = x * Wk, v = x * Wv;
    return attn.vjp_causal(q, k, v, dout);
  }
};

double loss_of(const matrix& out, const matrix& y) { return (out - y).squaredNorm() / (2 * tokens); }

}  // namespace

int main() {
  const matrix x = random(tokens, width, 1);  // (N, width)
  const matrix y = layer(10).forward(x);      // (N, H M), what is to be learned
  layer student(20);

  // d loss along one weight: the vjp beside a difference.
  const matrix dWq = x.transpose() * student.vjp(x, (student.forward(x) - y) / tokens).dq;
  constexpr double step = 1e-6;
  layer ahead = student, behind = student;
  ahead.Wq(0, 0) += step;
  behind.Wq(0, 0) -= step;
  const double difference = (loss_of(ahead.forward(x), y) - loss_of(behind.forward(x), y)) / (2 * step);
  std::cout << "d loss / d Wq(0, 0): " << dWq(0, 0) << " by vjp_causal, " << difference << " by a difference\n";
  constexpr double agreement = 1e-7;  // a difference with this step is good to about 1e-9
  bool correct = std::abs(dWq(0, 0) - difference) <= agreement;

  constexpr double rate = 16;
  constexpr int steps = 1000;
  const double first = loss_of(student.forward(x), y);
  double last = first;
  for (int i = 0; i <= steps; ++i) {
    const matrix out = student.forward(x);
    last = loss_of(out, y);
    if (i % 100 == 0) std::cout << "step " << i << ": loss " << last << "\n";
    const linattn::gradients<double> d = student.vjp(x, (out - y) / tokens);
    student.Wq -= rate * (x.transpose() * d.dq);
    student.Wk -= rate * (x.transpose() * d.dk);
    student.Wv -= rate * (x.transpose() * d.dv);
  }
  correct = correct && last < first / 100;
  std::cout << (correct ? "the loss fell below a hundredth\n" : "the loss did not fall as it should\n");
  return correct ? 0 : 1;
}
