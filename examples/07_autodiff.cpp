// 07_autodiff: linear attention on a reverse tape of one's own.
//
//     forward:   x -> q, k, v -> attention -> out -> loss            every step leaves a function on the tape
//     backward:  the functions run in reverse order                  each adds to the gradients of what it read
//
// What a tape needs of an operation is its vector-Jacobian product. Attention keeps nothing for it but its inputs,
// which are on the tape anyway: vjp_causal computes the rest again, in memory that does not depend on N.

#include <linattn/linattn.hpp>

#include <cmath>
#include <functional>
#include <iostream>
#include <memory>
#include <vector>

using matrix = linattn::row_matrix<double>;

/// A value on the tape, and the gradient of the loss with respect to it.
struct node {
  matrix value, gradient;
};
using variable = std::shared_ptr<node>;

variable make(matrix value) {
  const matrix zero = matrix::Zero(value.rows(), value.cols());
  return std::make_shared<node>(node{std::move(value), zero});
}

class tape {
 public:
  variable product(variable a, variable b) {
    const variable c = make(a->value * b->value);
    m_backwards.push_back([=] {
      a->gradient += c->gradient * b->value.transpose();
      b->gradient += a->value.transpose() * c->gradient;
    });
    return c;
  }

  template <class Attention>
  variable attention(const Attention& attn, variable q, variable k, variable v) {
    const variable out = make(attn.forward_causal(q->value, k->value, v->value));
    m_backwards.push_back([=, &attn] {
      const auto d = attn.vjp_causal(q->value, k->value, v->value, out->gradient);
      q->gradient += d.dq;
      k->gradient += d.dk;
      v->gradient += d.dv;
    });
    return out;
  }

  /// |a|^2 / 2
  variable half_square(variable a) {
    const variable c = make(matrix::Constant(1, 1, a->value.squaredNorm() / 2));
    m_backwards.push_back([=] { a->gradient += c->gradient(0, 0) * a->value; });
    return c;
  }

  void run_back(const variable& loss) {
    loss->gradient.setOnes();
    for (auto f = m_backwards.rbegin(); f != m_backwards.rend(); ++f) (*f)();
  }

 private:
  std::vector<std::function<void()>> m_backwards;
};

int main() {
  constexpr Eigen::Index tokens = 50, width = 6, heads = 2, head_dim = 3;
  const linattn::linear_attention<linattn::elu_plus_one, linattn::additive, double> attn(
      {.head_dim = head_dim, .heads = heads});
  const auto waves = [](Eigen::Index rows, Eigen::Index cols, double frequency) {
    matrix x(rows, cols);
    for (Eigen::Index i = 0; i < x.size(); ++i) x.data()[i] = std::sin(frequency * static_cast<double>(i + 1));
    return x;
  };
  const variable x = make(waves(tokens, width, 0.7));
  const variable Wq = make(waves(width, heads * head_dim, 1.1));
  const variable Wk = make(waves(width, heads * head_dim, 1.7));
  const variable Wv = make(waves(width, heads * head_dim, 2.3));

  // Two layers with the same weights: each weight is read twice, and x, too, on several ways.
  const auto loss_on = [&](tape& t) {
    const auto layer = [&](const variable& in) {
      return t.attention(attn, t.product(in, Wq), t.product(in, Wk), t.product(in, Wv));
    };
    return t.half_square(layer(layer(x)));
  };
  tape t;
  const variable loss = loss_on(t);
  t.run_back(loss);
  std::cout << "loss " << loss->value << "\n";

  bool correct = true;
  const auto check = [&](const char* name, const variable& a) {
    constexpr double step = 1e-5;
    constexpr double agreement = 1e-7;  // relative; a central difference with this step is good to about 1e-9
    const double at = a->value(1, 2);
    const auto loss_at = [&](double value) {
      a->value(1, 2) = value;
      tape unused;
      return loss_on(unused)->value(0, 0);
    };
    const double difference = (loss_at(at + step) - loss_at(at - step)) / (2 * step);
    a->value(1, 2) = at;
    std::cout << "d loss / d " << name << "(1, 2): " << a->gradient(1, 2) << " from the tape, " << difference
              << " by a difference\n";
    correct = correct && std::abs(a->gradient(1, 2) - difference) <= agreement * a->gradient.norm();
  };
  check("x", x);
  check("Wq", Wq);
  check("Wk", Wk);
  check("Wv", Wv);
  return correct ? 0 : 1;
}
