// The transformer against numbers that an independent implementation gave for a whole model (tests/data/ft_model_*, its
// case.txt says which).
#include <linattn/linattn.hpp>
#include <linattn/transformer.hpp>

#include "support/compare.hpp"
#include "support/reference_data.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using Eigen::Index;
using linattn::row_matrix;
using linattn::wiring;

template <class T>
using attention_of = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, T>;

/// Its parameters by their names, its numbers for fixed inputs.
template <class T>
class WholeModel : public testing::Test {
 protected:
  const support::reference_case data = support::reference_case::load("ft_model_relu_2x2");
  const linattn::transformer<attention_of<T>> model = make();
  /// Two layers of it, to rounding: the peer in float is off by 1.7e-7 of the largest output.
  static constexpr double float_bound = 1e-6;
  static constexpr double bound = std::is_same_v<T, float> ? float_bound : 1e-12;

  Index size(const std::string& name) const { return Index(data.number(name)); }
  Index batch() const { return size("B"); }
  Index keys(Index b) const { return Index(data.array("key_lengths").values.at(std::size_t(b))); }

  linattn::transformer<attention_of<T>> make() const {
    const Index heads = size("n_heads"), dim = size("query_dimensions"), values = size("value_dimensions");
    auto weights = linattn::make_transformer_weights<T>({.layers = size("n_layers"),
                                                         .width = size("model_dimensions"),
                                                         .query_width = heads * dim,
                                                         .value_width = heads * values,
                                                         .feed_forward = size("feed_forward_dimensions"),
                                                         .final_norm = true});
    linattn::for_each_tensor(weights, [&](const std::string& name, auto& tensor) {
      const support::reference_array& a = data.array("param:" + name);
      ASSERT_EQ(a.values.size(), std::size_t(tensor.size())) << name;
      std::copy(a.values.begin(), a.values.end(), tensor.data());
    });
    return {{.wiring = wiring::post_norm, .norm_epsilon = data.number("layernorm_eps")},
            weights,
            attention_of<T>({.head_dim = dim,
                             .value_dim = values,
                             .heads = heads,
                             .denominator = linattn::denominator_policy::add(data.number("eps"))})};
  }

  void expect_close(const row_matrix<T>& y, const std::string& name, Index b) const {
    EXPECT_TRUE(support::close(y, data.template packed<double>(name, b), name.ends_with("_f32") ? float_bound : bound))
        << name << ", batch element " << b;
  }
  void expect_states(const typename linattn::transformer<attention_of<T>>::state_type& s, Index b) const {
    for (std::size_t l = 0; l < s.layers().size(); ++l) {
      const std::string layer = std::to_string(l);
      for (Index h = 0; h < s.layers()[l].heads(); ++h) {
        EXPECT_TRUE(support::close(s.layers()[l].kv(h), data.template head<double>("S_" + layer, b, h), bound));
        EXPECT_TRUE(support::close(s.layers()[l].k_sum(h), data.template head<double>("Z_" + layer, b, h), bound));
      }
    }
  }
};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(WholeModel, scalars);

TYPED_TEST(WholeModel, EveryParameterHasItsPlace) {
  std::size_t parameters = 0;
  auto weights = linattn::make_transformer_weights<TypeParam>(this->model.sizes());
  linattn::for_each_tensor(weights,
                           [&](const std::string& name, auto&) { parameters += this->data.has("param:" + name); });
  EXPECT_EQ(parameters, 34u) << "16 a layer and 2 of the final norm";
}

TYPED_TEST(WholeModel, Causal) {
  for (Index b = 0; b < this->batch(); ++b) {
    const row_matrix<TypeParam> x = this->data.template packed<TypeParam>("x", b);
    this->expect_close(this->model.forward_causal(x), "y_causal", b);
    auto s = this->model.make_state();
    auto ws = this->model.make_workspace(7);
    row_matrix<TypeParam> y(x.rows(), this->model.outputs());
    this->model.forward_causal(s, x, y, ws);
    this->expect_close(y, "y_causal", b);
    this->expect_states(s, b);
  }
}

TYPED_TEST(WholeModel, CausalWithKeyLengths) {
  for (const Index rows : {4, 64}) {
    auto ws = this->model.make_workspace(rows);
    for (Index b = 0; b < this->batch(); ++b) {
      const row_matrix<TypeParam> x = this->data.template packed<TypeParam>("x", b);
      row_matrix<TypeParam> y(x.rows(), this->model.outputs());
      auto s = this->model.make_state();
      this->model.forward_causal(s, x, y, ws, this->keys(b));
      this->expect_close(y, "y_causal_keylen", b);
      EXPECT_EQ(s.tokens(), this->keys(b));
    }
  }
}

TYPED_TEST(WholeModel, Noncausal) {
  auto ws = this->model.make_workspace(64);
  for (Index b = 0; b < this->batch(); ++b) {
    const row_matrix<TypeParam> x = this->data.template packed<TypeParam>("x", b);
    this->expect_close(this->model.forward(x), "y_noncausal", b);
    row_matrix<TypeParam> y(x.rows(), this->model.outputs());
    this->model.forward(x, y, ws, this->keys(b));
    this->expect_close(y, "y_noncausal_keylen", b);
  }
}

TYPED_TEST(WholeModel, StepByStepAsOneBatch) {
  std::vector<row_matrix<TypeParam>> x, y;
  std::vector<typename linattn::transformer<attention_of<TypeParam>>::state_type> states;
  for (Index b = 0; b < this->batch(); ++b) {
    x.push_back(this->data.template packed<TypeParam>("x", b));
    y.emplace_back(x[0].rows(), this->model.outputs());
    states.push_back(this->model.make_state());
  }
  auto ws = this->model.make_workspace(this->batch());
  row_matrix<TypeParam> x_t(this->batch(), x[0].cols()), y_t(this->batch(), this->model.outputs());
  for (Index t = 0; t < x[0].rows(); ++t) {
    for (Index b = 0; b < this->batch(); ++b) x_t.row(b) = x[std::size_t(b)].row(t);
    this->model.step(std::span(states), x_t, y_t, ws);
    for (Index b = 0; b < this->batch(); ++b) y[std::size_t(b)].row(t) = y_t.row(b);
  }
  for (Index b = 0; b < this->batch(); ++b) {
    this->expect_close(y[std::size_t(b)], "y_causal", b);
    this->expect_close(y[std::size_t(b)], "y_recurrent_f32", b);
    this->expect_states(states[std::size_t(b)], b);
  }
}

}  // namespace
