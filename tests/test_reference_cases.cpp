// Outputs, gradients and states of an independent implementation (tests/data/ft_*, their case.txt says which) for fixed
// inputs.
//
// Its arrays are [batch, position, head, dim] in C order: a batch element is a packed (N, H D) matrix as it lies in
// memory, and is read where it is.
#include <linattn/linattn.hpp>

#include "support/compare.hpp"
#include "support/reference_data.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace {

using Eigen::Index;
using linattn::row_matrix;

/// A [batch, position, head, dim] array in the scalar under test.
template <class T>
class batched {
 public:
  batched(const support::reference_case& data, const std::string& name)
      : m_shape(data.array(name).shape), m_values(data.array(name).values.begin(), data.array(name).values.end()) {}

  Index batch() const { return m_shape.at(0); }
  Index positions() const { return m_shape.at(1); }
  Index heads() const { return m_shape.at(2); }
  Index dim() const { return m_shape.at(3); }

  /// Positions 0 ... rows - 1 of batch element b: (rows, H dim), a view.
  linattn::matrix_view<const T> tokens(Index b, Index rows) const {
    return linattn::matrix_view<const T>(m_values.data() + b * positions() * heads() * dim(), rows, heads() * dim());
  }
  linattn::matrix_view<const T> tokens(Index b) const { return tokens(b, positions()); }
  linattn::vector_view<const T> token(Index b, Index position) const {
    return linattn::vector_view<const T>(tokens(b).row(position), heads() * dim());
  }

 private:
  std::vector<Index> m_shape;
  std::vector<T> m_values;
};

template <class T>
struct ReferenceCases : testing::Test {
  using attention = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, T>;

  static attention make(const support::reference_case& data, const batched<T>& q, const batched<T>& v) {
    return attention({.head_dim = q.dim(),
                      .value_dim = v.dim(),
                      .heads = q.heads(),
                      .denominator = linattn::denominator_policy::add(data.number("eps"))});
  }

  /// A gradient is a difference: a few roundings more than an output, where it is not rounding alone. That is the case
  /// where one key is seen: the gradients of q and k are then of the size of eps, and are judged beside those of v.
  static testing::AssertionResult close_gradient(const row_matrix<T>& actual, const row_matrix<double>& expected,
                                                 const row_matrix<double>& size) {
    constexpr double roundings = 5;
    const double error = (actual.template cast<double>() - expected).norm();
    const double allowed = roundings * support::tolerance<T>::relative_rms * std::max(expected.norm(), size.norm());
    if (error <= allowed) return testing::AssertionSuccess();
    return testing::AssertionFailure() << "off by " << error << ", allowed " << allowed;
  }

  static testing::AssertionResult close(const row_matrix<T>& actual, const row_matrix<double>& expected) {
    return support::close(actual, expected, support::tolerance<T>::relative_rms);
  }
};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(ReferenceCases, scalars);

TYPED_TEST(ReferenceCases, Causal) {
  const auto data = support::reference_case::load("ft_causal_03");
  const batched<TypeParam> q(data, "q"), k(data, "k"), v(data, "v");
  const auto attn = TestFixture::make(data, q, v);
  for (Index b = 0; b < q.batch(); ++b) {
    EXPECT_TRUE(this->close(attn.forward_causal(q.tokens(b), k.tokens(b), v.tokens(b)), data.tokens<double>("o", b)))
        << "batch element " << b;
  }
}

// Keys from key_lengths on are masked there; here they are not passed.
TYPED_TEST(ReferenceCases, NoncausalWithKeyLengths) {
  const auto data = support::reference_case::load("ft_noncausal_02");
  const batched<TypeParam> q(data, "q"), k(data, "k"), v(data, "v");
  const auto attn = TestFixture::make(data, q, v);
  for (Index b = 0; b < q.batch(); ++b) {
    const auto keys = static_cast<Index>(data.array("key_lengths").values.at(static_cast<std::size_t>(b)));
    ASSERT_LE(keys, k.positions());
    EXPECT_TRUE(
        this->close(attn.forward(q.tokens(b), k.tokens(b, keys), v.tokens(b, keys)), data.tokens<double>("o", b)))
        << "batch element " << b << ", " << keys << " keys";
  }
}

// The loss is the sum of w o: w is dout.
TYPED_TEST(ReferenceCases, CausalGradients) {
  const auto data = support::reference_case::load("ft_causal_03");
  const batched<TypeParam> q(data, "q"), k(data, "k"), v(data, "v"), w(data, "w");
  const auto attn = TestFixture::make(data, q, v);
  for (Index b = 0; b < q.batch(); ++b) {
    SCOPED_TRACE("batch element " + std::to_string(b));
    const auto d = attn.vjp_causal(q.tokens(b), k.tokens(b), v.tokens(b), w.tokens(b));
    const auto dv = data.tokens<double>("dv", b);
    EXPECT_TRUE(this->close_gradient(d.dq, data.tokens<double>("dq", b), dv)) << "dq";
    EXPECT_TRUE(this->close_gradient(d.dk, data.tokens<double>("dk", b), dv)) << "dk";
    EXPECT_TRUE(this->close_gradient(d.dv, dv, dv)) << "dv";
  }
}

TYPED_TEST(ReferenceCases, NoncausalGradientsWithKeyLengths) {
  const auto data = support::reference_case::load("ft_noncausal_02");
  const batched<TypeParam> q(data, "q"), k(data, "k"), v(data, "v"), w(data, "w");
  const auto attn = TestFixture::make(data, q, v);
  for (Index b = 0; b < q.batch(); ++b) {
    const auto keys = static_cast<Index>(data.array("key_lengths").values.at(static_cast<std::size_t>(b)));
    SCOPED_TRACE("batch element " + std::to_string(b) + ", " + std::to_string(keys) + " keys");
    const auto d = attn.vjp(q.tokens(b), k.tokens(b, keys), v.tokens(b, keys), w.tokens(b));
    const row_matrix<double> dv = data.tokens<double>("dv", b).topRows(keys);
    EXPECT_TRUE(this->close_gradient(d.dq, data.tokens<double>("dq", b), dv)) << "dq";
    EXPECT_TRUE(this->close_gradient(d.dk, data.tokens<double>("dk", b).topRows(keys), dv)) << "dk";
    EXPECT_TRUE(this->close_gradient(d.dv, dv, dv)) << "dv";
    EXPECT_TRUE(support::all_zero(data.tokens<double>("dk", b).bottomRows(k.positions() - keys)));
  }
}

TYPED_TEST(ReferenceCases, RecurrentStepByStepAndInOneCall) {
  const auto data = support::reference_case::load("ft_recurrent_02");
  const batched<TypeParam> q(data, "q"), k(data, "k"), v(data, "v");
  const auto attn = TestFixture::make(data, q, v);
  auto ws = attn.make_workspace();
  for (Index b = 0; b < q.batch(); ++b) {
    SCOPED_TRACE("batch element " + std::to_string(b));
    const row_matrix<double> expected = data.tokens<double>("o", b);
    auto stepped = attn.make_state();
    row_matrix<TypeParam> out(q.positions(), attn.heads() * attn.value_dim());
    for (Index t = 0; t < q.positions(); ++t) {
      attn.step(stepped, q.token(b, t), k.token(b, t), v.token(b, t), out.row(t), ws);
    }
    EXPECT_TRUE(this->close(out, expected));
    auto whole = attn.make_state();
    EXPECT_TRUE(this->close(attn.forward_causal(whole, q.tokens(b), k.tokens(b), v.tokens(b)), expected));
    for (Index h = 0; h < attn.heads(); ++h) {
      for (const auto* s : {&stepped, &whole}) {
        EXPECT_TRUE(this->close(s->kv(h), data.head<double>("S", b, h))) << "S of head " << h;
        EXPECT_TRUE(this->close(s->k_sum(h), data.head<double>("Z", b, h))) << "z of head " << h;
      }
    }
  }
}

}  // namespace
