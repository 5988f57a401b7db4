// Maps with trained parameters: hedgehog and learned_linear. Values against closed forms in long double, sets for all
// heads and for each, gradients of rows and of parameters, alone and through the operator.
#include <gtest/gtest.h>

#include <linattn/check_feature_map.hpp>
#include <linattn/linattn.hpp>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/map_probe.hpp"
#include "support/oracle.hpp"

namespace {

using Eigen::Index;
using linattn::hedgehog;
using linattn::learned_linear;
using support::features;
using support::normal_matrix;
using support::row_matrix;
using support::wide_matrix;
using support::wide_vector;
using support::written;

/// Less than a register, whole registers, and one element more, for every packet width.
constexpr Index awkward_sizes[] = {1, 3, 7, 8, 9, 16, 17, 33, 65};

/// The absolute error of an exponent, a sum of D <= 65 terms whose partial sums reach about 3, twice that at the lowest
/// temperature, is the relative error of the exponential.
template <class T>
constexpr double exponential_rms = 16 * std::numeric_limits<T>::epsilon();

/// Central differences in double: 1e-9 of their own, and what is wrong is wrong by 1e-3 at least.
constexpr double difference_step = 1e-5;
constexpr double difference_rms = 1e-7;

/// Parameters of `heads` heads, of a size that keeps W x + b near N(0, 1.25).
template <class T>
struct parameters {
  row_matrix<T> W;
  linattn::row_vector<T> b;

  parameters(Index heads, Index rows, Index head_dim, std::uint64_t seed)
      : W(normal_matrix<T>(heads * rows, head_dim, seed, 1 / std::sqrt(double(head_dim)))),
        b(normal_matrix<T>(1, heads * rows, seed + 1, 0.5)) {}

  /// W x + b of one head, in long double.
  wide_vector affine(const wide_vector& x, Index head, Index heads) const {
    const Index rows = W.rows() / heads;
    const wide_matrix w = W.middleRows(head * rows, rows).template cast<long double>();
    return x * w.transpose() + b.segment(head * rows, rows).template cast<long double>();
  }
};

wide_vector softmax_of_both(const wide_vector& u, long double temperature) {
  wide_vector e(2 * u.size());
  e << (u / temperature).array().exp(), (-u / temperature).array().exp();
  return e / e.sum();
}

template <class T>
struct LearnedMaps : testing::Test {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(LearnedMaps, scalars);

// ---- values

/// Each head of the map against closed_form(u), u = W x + b of the head's set.
template <class T, class Map, class F>
void expect_closed_form(const Map& map, const parameters<T>& p, Index operator_heads, const F& closed_form) {
  const auto x = normal_matrix<T>(5, map.head_dim(), 40);
  for (Index head = 0; head < operator_heads; ++head) {
    wide_matrix exact(x.rows(), map.dimension(map.head_dim()));
    for (Index r = 0; r < x.rows(); ++r) {
      const wide_vector row = x.row(r).template cast<long double>();
      exact.row(r) = closed_form(p.affine(row, head % map.heads(), map.heads()));
    }
    EXPECT_TRUE(support::close(features(map, x, 0, head), exact, exponential_rms<T>))
        << map.name << ", D = " << map.head_dim() << ", C = " << exact.cols() << ", head " << head;
  }
}

TYPED_TEST(LearnedMaps, EqualTheirClosedForms) {
  using T = TypeParam;
  for (const Index d : awkward_sizes) {
    for (const Index m : awkward_sizes) {
      for (const Index heads : {1, 3}) {
        const parameters<T> p(heads, m, d, std::uint64_t(100 * d + m));
        expect_closed_form(hedgehog<T>(p.W, p.b, heads), p, 3,
                           [](const wide_vector& u) { return softmax_of_both(u, 1); });
        expect_closed_form(hedgehog<T>(p.W, p.b, heads, 0.5), p, 3,
                           [](const wide_vector& u) { return softmax_of_both(u, 0.5L); });
        expect_closed_form(learned_linear<T>(p.W, p.b, heads), p, 3,
                           [](const wide_vector& u) -> wide_vector { return u.cwiseMax(0); });
        expect_closed_form(learned_linear<T, linattn::exponential>(p.W, p.b, heads), p, 3,
                           [](const wide_vector& u) -> wide_vector { return u.array().exp(); });
        expect_closed_form(
            learned_linear<T, linattn::elu_plus_one>(p.W, p.b, heads), p, 3,
            [](const wide_vector& u) -> wide_vector { return (u.array() < 0).select(u.array().exp(), u.array() + 1); });
      }
    }
  }
}

TYPED_TEST(LearnedMaps, HedgehogBeginsWithTheIdentity) {
  using T = TypeParam;
  for (const Index d : awkward_sizes) {
    const auto x = normal_matrix<T>(4, d, 3);
    wide_matrix exact(4, 2 * d);
    for (Index r = 0; r < 4; ++r) exact.row(r) = softmax_of_both(x.row(r).template cast<long double>(), 0.75L);
    EXPECT_TRUE(support::close(features(hedgehog<T>(d, 0.75), x), exact, exponential_rms<T>)) << "D = " << d;
  }
}

TYPED_TEST(LearnedMaps, HedgehogTakesInputsThatExpCannot) {
  using T = TypeParam;
  row_matrix<T> x(2, 2);
  x << T(1e4), T(-1e4), T(0), T(-1e30);
  row_matrix<T> exact(2, 4);
  exact << T(0.5), T(0), T(0), T(0.5), T(0), T(0), T(0), T(1);
  EXPECT_EQ(features(hedgehog<T>(2), x), exact);
}

TYPED_TEST(LearnedMaps, TakeParametersInAnyStorageOrder) {
  using T = TypeParam;
  const parameters<T> p(2, 5, 7, 4);
  const Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic> by_columns = p.W;
  const Eigen::Matrix<T, Eigen::Dynamic, 1> column = p.b.transpose();
  const auto x = normal_matrix<T>(3, 7, 5);
  EXPECT_TRUE(support::same_bits(features(hedgehog<T>(by_columns, column.transpose(), 2), x, 0, 1),
                                 features(hedgehog<T>(p.W, p.b, 2), x, 0, 1)));
}

TYPED_TEST(LearnedMaps, GiveTheirParametersBack) {
  using T = TypeParam;
  const parameters<T> p(3, 9, 17, 6);
  const auto all = hedgehog<T>(p.W, p.b, 3).parameters();
  EXPECT_TRUE(support::same_bits(row_matrix<T>(all.weights), p.W));
  EXPECT_TRUE(support::same_bits(row_matrix<T>(all.bias), row_matrix<T>(p.b)));
}

// ---- heads

TYPED_TEST(LearnedMaps, HeadsOfAnOperatorUseTheirOwnSet) {
  using T = TypeParam;
  constexpr Index H = 2, D = 6, M = 3, N = 37;
  const parameters<T> p(H, 5, D, 7);
  const support::attention_inputs<T> in(N, H * D, H * M, 8);
  const hedgehog<T> each(p.W, p.b, H);
  const linattn::linear_attention<hedgehog<T>, linattn::additive, T> together(
      {.head_dim = D, .value_dim = M, .heads = H}, each);
  const row_matrix<T> out = together.forward_causal(in.q, in.k, in.v);
  auto s = together.make_state();
  auto ws = together.make_workspace();
  row_matrix<T> streamed(N, H * M);
  for (Index i = 0; i < N; ++i) together.step(s, in.q.row(i), in.k.row(i), in.v.row(i), streamed.row(i), ws);
  const auto exact =
      support::oracle_recurrent(support::oracle_map([&](const wide_vector& x, Index /*position*/, Index head) {
                                  return softmax_of_both(p.affine(x, head, H), 1);
                                }),
                                in.q, in.k, in.v, {.heads = H, .causal = true});
  EXPECT_TRUE(support::close(out, exact.out, support::tolerance<T>::relative_rms));
  EXPECT_TRUE(support::close(streamed, exact.out, support::tolerance<T>::relative_rms));

  const hedgehog<T> second(p.W.bottomRows(5), p.b.tail(5));
  const linattn::linear_attention<hedgehog<T>, linattn::additive, T> alone({.head_dim = D, .value_dim = M}, second);
  const row_matrix<T> q = in.q.rightCols(D), k = in.k.rightCols(D), v = in.v.rightCols(M);
  EXPECT_TRUE(support::same_bits(alone.forward_causal(q, k, v), row_matrix<T>(out.rightCols(M))));
}

// ---- the contract

TYPED_TEST(LearnedMaps, KeepTheContract) {
  using T = TypeParam;
  const auto check = [](const auto& map) {
    static_assert(linattn::detail::is_differentiable<std::remove_cvref_t<decltype(map)>, T>);
    const auto report = linattn::check_feature_map<T>(map, map.head_dim(), {.rows = 16});
    EXPECT_TRUE(report.passed) << map.name << ", D = " << map.head_dim() << ": "
                               << (report.passed ? "" : report.problems.front());
  };
  for (const Index d : awkward_sizes) {
    const parameters<T> p(2, 9, d, 9);
    check(hedgehog<T>(d));
    check(hedgehog<T>(p.W, p.b, 2, 0.5));
    check(learned_linear<T>(p.W, p.b, 2));
    check(learned_linear<T, linattn::exponential>(p.W, p.b, 2));
    check(learned_linear<T, linattn::elu_plus_one>(p.W, p.b, 2));
  }
}

TEST(Learned, NeitherForwardNorVjpAllocates) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  constexpr Index D = 33, rows = 40;
  const parameters<float> p(2, D, D, 10);
  linattn::detail::guarded_tile<float> in(rows, D), pairs(rows, 2 * D), out(rows, D), dx_memory(rows, D);
  const auto run = [&](const auto& map, auto& phi_memory) {
    const auto x = std::as_const(in).view();
    auto phi = phi_memory.view();
    auto dx = dx_memory.view();
    auto gradient = map.make_gradient();
    const support::allocation_count allocations;
    map.forward(x, phi, {0, 1});
    map.vjp(x, std::as_const(phi_memory).view(), std::as_const(phi_memory).view(), dx, {0, 1}, &gradient);
    EXPECT_EQ(allocations.total(), 0) << map.name;
  };
  run(hedgehog<float>(p.W, p.b, 2), pairs);
  run(learned_linear<float>(p.W, p.b, 2), out);
}

// ---- gradients

/// dx and the gradient of the parameters of one head, by differences in double; and in float what they are in double.
template <template <class> class Map>
void check_gradients() {
  // In float the double's gradient is met to the rounding of sums of at most 70 terms.
  constexpr double float_rms = 64 * std::numeric_limits<float>::epsilon();
  constexpr Index rows = 37, heads = 2, head = 1;  // more rows than are taken at a time
  for (const Index d : {1, 5, 16, 33}) {
    for (const Index m : {1, 9, 32, 35}) {
      const parameters<float> in_float(heads, m, d, std::uint64_t(50 + d));
      parameters<double> p(heads, m, d, 1);
      p.W = in_float.W.cast<double>();
      p.b = in_float.b.cast<double>();
      const auto make = [&](const auto& parameters) {
        return Map<typename std::remove_cvref_t<decltype(parameters.W)>::Scalar>(parameters.W, parameters.b, heads);
      };
      const auto map = make(p);
      const row_matrix<double> x = normal_matrix<float>(rows, d, 11).cast<double>();
      const row_matrix<double> dphi = normal_matrix<float>(rows, map.dimension(d), 12).template cast<double>();
      const std::string at = std::string(map.name) + ", D = " + std::to_string(d) + ", m = " + std::to_string(m);

      auto gradient = map.make_gradient();
      const auto dx = support::gradient(map, x, dphi, 0, head, &gradient);
      EXPECT_TRUE(support::close(dx, support::differences(map, x, dphi, 0, head), difference_rms)) << at;
      EXPECT_TRUE(support::same_bits(support::gradient(map, x, dphi, 0, head), dx)) << at << ", without parameters";

      parameters<double> expected = p;
      const auto difference = [&](double& parameter) {
        const double here = parameter;
        const auto loss = [&](double by) {
          parameter = here + by;
          return written(make(p), x, 0, head).cwiseProduct(dphi).sum();
        };
        const double result = (loss(difference_step) - loss(-difference_step)) / (2 * difference_step);
        parameter = here;
        return result;
      };
      for (Index c = 0; c < p.W.rows(); ++c) {
        for (Index i = 0; i < d; ++i) expected.W(c, i) = difference(p.W(c, i));
        expected.b[c] = difference(p.b[c]);
      }
      EXPECT_TRUE(support::close(row_matrix<double>(gradient.weights), expected.W, difference_rms)) << at;
      EXPECT_TRUE(support::close(row_matrix<double>(gradient.bias), row_matrix<double>(expected.b), difference_rms))
          << at;
      EXPECT_TRUE(gradient.weights.topRows(m).isZero(0)) << at << ": head 0 has no rows";

      const auto once = gradient;
      support::gradient(map, x, dphi, 0, head, &gradient);
      EXPECT_TRUE(support::close(row_matrix<double>(gradient.weights), row_matrix<double>(2 * once.weights),
                                 support::tolerance<double>::relative_rms))
          << at << ": a second call adds";

      const auto map_in_float = make(in_float);
      auto gradient_in_float = map_in_float.make_gradient();
      const auto dx_in_float = support::gradient(map_in_float, row_matrix<float>(x.cast<float>()),
                                                 row_matrix<float>(dphi.cast<float>()), 0, head, &gradient_in_float);
      EXPECT_TRUE(support::close(dx_in_float, dx, float_rms)) << at;
      EXPECT_TRUE(
          support::close(row_matrix<float>(gradient_in_float.weights), row_matrix<double>(once.weights), float_rms))
          << at;
    }
  }
}

template <class T>
using relu_map = learned_linear<T>;
template <class T>
using exp_map = learned_linear<T, linattn::exponential>;
template <class T>
using elu_map = learned_linear<T, linattn::elu_plus_one>;

TEST(Learned, GradientsOfHedgehog) { check_gradients<hedgehog>(); }
TEST(Learned, GradientsOfLearnedLinear) { check_gradients<relu_map>(); }
TEST(Learned, GradientsOfLearnedLinearWithExp) { check_gradients<exp_map>(); }
TEST(Learned, GradientsOfLearnedLinearWithElu) { check_gradients<elu_map>(); }

/// Law 10 for the parameters of one set a head, in random directions: the loss is <dout, out>.
template <template <class> class Map>
void check_through_the_operator() {
  constexpr Index H = 2, D = 5, M = 3;
  const parameters<double> p(H, 7, D, 20), direction(H, 7, D, 22);
  const auto make = [&](double step) {
    return linattn::linear_attention<Map<double>, linattn::additive, double>(
        {.head_dim = D,
         .value_dim = M,
         .heads = H,
         .query_scale = 0.8,
         .denominator = linattn::denominator_policy::add(0.5)},
        Map<double>(p.W + step * direction.W, p.b + step * direction.b, H));
  };
  const auto attn = make(0);
  for (const Index n : {1, 2, 33, 65}) {
    const support::attention_inputs<double> in(n, H * D, H * M, 24);
    const auto dout = normal_matrix<double>(n, H * M, 25);
    for (const bool causal : {true, false}) {
      const auto loss = [&](const auto& with) {
        return (causal ? with.forward_causal(in.q, in.k, in.v) : with.forward(in.q, in.k, in.v))
            .cwiseProduct(dout)
            .sum();
      };
      row_matrix<double> dq = in.q, dk = in.k, dv = in.v;
      auto gradient = attn.feature_map().make_gradient();
      auto ws = attn.make_workspace();
      if (causal) {
        auto ds = attn.make_state();
        attn.vjp_causal(attn.make_state(), in.q, in.k, in.v, dout, ds, dq, dk, dv, ws, &gradient);
      } else {
        attn.vjp(in.q, in.k, in.v, dout, dq, dk, dv, ws, &gradient);
      }
      const double along =
          gradient.weights.cwiseProduct(direction.W).sum() + gradient.bias.cwiseProduct(direction.b).sum();
      const double differences = (loss(make(difference_step)) - loss(make(-difference_step))) / (2 * difference_step);
      const double size = std::sqrt(gradient.weights.squaredNorm() + gradient.bias.squaredNorm());
      EXPECT_GT(size, 0);
      EXPECT_LE(std::abs(along - differences), difference_rms * size)
          << attn.feature_map().name << ", N = " << n << (causal ? ", causal" : "");
    }
  }
}

TEST(Learned, GradientsOfParametersThroughTheOperator) {
  check_through_the_operator<hedgehog>();
  check_through_the_operator<relu_map>();
  check_through_the_operator<exp_map>();
}

// ---- refusals

template <class F>
void expect_refusal(const F& call, const std::string& text) {
  try {
    call();
    FAIL() << "nothing was refused: " << text;
  } catch (const std::invalid_argument& error) {
    EXPECT_EQ(error.what(), text);
  }
}

TEST(Learned, RefuseSizesThatDoNotFit) {
  const parameters<float> p(1, 6, 4, 30);
  const row_matrix<float> nothing(0, 0);
  expect_refusal([&] { hedgehog<float>(nothing, p.b); },
                 "linattn::hedgehog: the weights are (0, 0) for 1 heads; needed is (heads * rows, head_dim) with at "
                 "least one row a head");
  expect_refusal(
      [&] { learned_linear<float>(p.W, p.b, 4); },
      "linattn::learned_linear<relu>: the weights are (6, 4) for 4 heads; needed is (heads * rows, head_dim) "
      "with at least one row a head");
  expect_refusal([&] { hedgehog<float>(p.W, p.b, 0); },
                 "linattn::hedgehog: heads is 0; at least 1 is needed, which all heads of an operator share");
  expect_refusal([&] { hedgehog<float>(p.W, p.b.head(5)); },
                 "linattn::hedgehog: the bias has 5 elements, expected 6, one for each row of the weights");
  expect_refusal([] { hedgehog<float>(0); }, "linattn::hedgehog: head_dim is 0; at least 1 is needed");
}

TEST(Learned, RefuseAnOperatorOfOtherHeads) {
  const parameters<float> p(3, 6, 4, 30);
  using attention = linattn::linear_attention<hedgehog<float>>;
  expect_refusal(
      [&] { attention({.head_dim = 4, .heads = 2}, hedgehog<float>(p.W, p.b, 3)); },
      "linattn::linear_attention: the feature map has parameters for 3 heads, the operator has heads 2; give "
      "one set for each head, or one for all");
  EXPECT_EQ(attention({.head_dim = 4, .heads = 2}, hedgehog<float>(4)).features(), 8) << "one set serves any heads";
}

TEST(Learned, RefuseATemperatureThatIsNone) {
  expect_refusal([] { hedgehog<float>(4, 0.0); },
                 "linattn::hedgehog: temperature is 0; it divides W x + b, and must be positive");
  expect_refusal([] { hedgehog<float>(4, -1.0); },
                 "linattn::hedgehog: temperature is -1; it divides W x + b, and must be positive");
}

TEST(Learned, RefuseTheGradientOfAnotherMap) {
  const row_matrix<double> x = normal_matrix<double>(3, 4, 31), dphi = normal_matrix<double>(3, 8, 32);
  auto other = hedgehog<double>(5).make_gradient();
  expect_refusal([&] { support::gradient(hedgehog<double>(4), x, dphi, 0, 0, &other); },
                 "linattn::hedgehog: the gradient is (5, 5) and 5, expected (4, 4) and 4; take one from make_gradient");
}

}  // namespace
