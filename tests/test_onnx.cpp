// The ONNX operator: the reference evaluator's and ONNX Runtime's cases, odd shapes against a token loop in double,
// narrow types, and what is refused.
#include <linattn/onnx.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/reference_data.hpp"
#include "support/sanitizer.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace {

namespace onnx = linattn::onnx;
using Eigen::Index;
using support::row_matrix;

template <class T, std::size_t Rank>
struct array {
  std::array<Index, Rank> shape = {};
  std::vector<T> values;

  array() = default;
  explicit array(const std::array<Index, Rank>& dims, T fill = T(0)) : shape(dims) {
    Index size = 1;
    for (const Index n : dims) size *= n;
    values.assign(std::size_t(size), fill);
  }
  onnx::tensor<const T, Rank> in() const { return {values.data(), shape}; }
  onnx::tensor<T, Rank> out() { return {values.data(), shape}; }
  template <class U>
  array<U, Rank> cast() const {
    array<U, Rank> to(shape);
    for (std::size_t i = 0; i < values.size(); ++i) to.values[i] = static_cast<U>(values[i]);
    return to;
  }
  /// As one column, for comparisons.
  row_matrix<T> column() const { return Eigen::Map<const row_matrix<T>>(values.data(), Index(values.size()), 1); }
};

/// One call's inputs, and its outputs once it has been made.
template <class T, class State = T>
struct call {
  onnx::attributes attributes;
  array<T, 3> query, key, value, decay, beta;
  array<State, 4> past_state;
  bool has_past = false, has_decay = false, has_beta = false;
  array<T, 3> output;
  array<State, 4> present_state;

  void make_outputs() {
    const Index hq = attributes.q_num_heads, hkv = attributes.kv_num_heads;
    const Index dk = query.shape[2] / hq, dv = value.shape[2] / hkv;
    output = array<T, 3>({query.shape[0], query.shape[1], std::max(hq, hkv) * dv}, T(7));
    present_state = array<State, 4>({query.shape[0], hkv, dk, dv}, State(7));
  }
  onnx::inputs<T, State> inputs() const {
    onnx::inputs<T, State> x{.query = query.in(), .key = key.in(), .value = value.in()};
    if (has_past) x.past_state = past_state.in();
    if (has_decay) x.decay = decay.in();
    if (has_beta) x.beta = beta.in();
    return x;
  }
  void run() { onnx::linear_attention<T, State>(attributes, inputs(), {output.out(), present_state.out()}); }

  template <class U, class V = U>
  call<U, V> cast() const {
    call<U, V> to;
    to.attributes = attributes;
    to.query = query.template cast<U>(), to.key = key.template cast<U>(), to.value = value.template cast<U>();
    to.decay = decay.template cast<U>(), to.beta = beta.template cast<U>();
    to.past_state = past_state.template cast<V>();
    to.has_past = has_past, to.has_decay = has_decay, to.has_beta = has_beta;
    to.make_outputs();
    return to;
  }
};

/// The operator's definition, token by token.
struct expectation {
  row_matrix<double> output, present_state;
};
expectation token_loop(const call<double>& x) {
  const Index B = x.query.shape[0], T = x.query.shape[1];
  const Index hq = x.attributes.q_num_heads, hkv = x.attributes.kv_num_heads, heads = std::max(hq, hkv);
  const Index dk = x.query.shape[2] / hq, dv = x.value.shape[2] / hkv, hk = x.key.shape[2] / dk;
  const double scale = x.attributes.scale == 0 ? 1 / std::sqrt(double(dk)) : double(x.attributes.scale);
  const auto at = [T](const array<double, 3>& a, Index b, Index t, Index column) {
    return a.values[std::size_t((b * T + t) * a.shape[2] + column)];
  };
  call<double> y = x;
  y.make_outputs();
  for (Index b = 0; b < B; ++b) {
    for (Index s = 0; s < hkv; ++s) {
      row_matrix<double> S = row_matrix<double>::Zero(dk, dv);
      const std::size_t place = std::size_t((b * hkv + s) * dk * dv);
      if (x.has_past) S = Eigen::Map<const row_matrix<double>>(x.past_state.values.data() + place, dk, dv);
      for (Index t = 0; t < T; ++t) {
        Eigen::VectorXd k(dk), v(dv);
        for (Index c = 0; c < dk; ++c) k[c] = at(x.key, b, t, s * hk / hkv * dk + c);
        for (Index m = 0; m < dv; ++m) v[m] = at(x.value, b, t, s * dv + m);
        for (Index c = 0; x.has_decay && c < dk; ++c) {
          S.row(c) *= std::exp(at(x.decay, b, t, x.decay.shape[2] == hkv ? s : s * dk + c));
        }
        if (x.has_beta) v = at(x.beta, b, t, x.beta.shape[2] == 1 ? 0 : s) * (v - S.transpose() * k).eval();
        S += k * v.transpose();
        for (Index h = 0; h < heads; ++h) {
          if (h * hkv / heads != s) continue;
          for (Index m = 0; m < dv; ++m) {
            double sum = 0;
            for (Index c = 0; c < dk; ++c) sum += at(x.query, b, t, h * hq / heads * dk + c) * S(c, m);
            y.output.values[std::size_t(((b * T + t) * heads + h) * dv + m)] = scale * sum;
          }
        }
      }
      Eigen::Map<row_matrix<double>>(y.present_state.values.data() + place, dk, dv) = S;
    }
  }
  return {y.output.column(), y.present_state.column()};
}

/// Rounding of chains of 65 tokens and fewer, as the reference cases have them, in float and in double; inputs that are
/// wrong anywhere move outputs by a part in a hundred.
template <class T>
constexpr double allowed = support::tolerance<T>::relative_rms;

template <class T, class State>
void expect_close(const call<T, State>& x, const expectation& want) {
  EXPECT_TRUE(support::close(x.output.column(), want.output, allowed<T>));
  EXPECT_TRUE(support::close(x.present_state.column(), want.present_state, allowed<T>));
}

// ---- reference cases ------------------------------------------------------------------------------------------------

template <std::size_t Rank>
array<double, Rank> read(const support::reference_case& data, const std::string& name) {
  const support::reference_array& from = data.array(name);
  array<double, Rank> to;
  EXPECT_EQ(from.shape.size(), Rank);
  std::copy(from.shape.begin(), from.shape.end(), to.shape.begin());
  to.values = from.values;
  return to;
}

class OnnxCases : public testing::TestWithParam<const char*> {};

TEST_P(OnnxCases, GiveTheirOutputsAndStates) {
  const auto data = support::reference_case::load(GetParam());
  call<double> x;
  const std::string& named = data.text("update_rule");
  x.attributes = {.q_num_heads = Index(data.number("q_num_heads")),
                  .kv_num_heads = Index(data.number("kv_num_heads")),
                  .update_rule = onnx::rule_of(named.substr(0, named.find(' ')))};
  if (data.text("scale").find("default") == std::string::npos) x.attributes.scale = float(data.number("scale"));
  x.query = read<3>(data, "query"), x.key = read<3>(data, "key"), x.value = read<3>(data, "value");
  if ((x.has_past = data.has("past_state"))) x.past_state = read<4>(data, "past_state");
  if ((x.has_decay = data.has("decay"))) x.decay = read<3>(data, "decay");
  if ((x.has_beta = data.has("beta"))) x.beta = read<3>(data, "beta");
  const expectation want = {read<3>(data, "output").column(), read<4>(data, "present_state").column()};
  auto narrow = x.cast<float>();
  narrow.run();
  expect_close(narrow, want);
  x.make_outputs();
  x.run();
  expect_close(x, want);
}
INSTANTIATE_TEST_SUITE_P(all, OnnxCases,
                         testing::Values("onnx_delta", "onnx_gated", "onnx_gated_delta", "onnx_gated_delta_gqa",
                                         "onnx_linear", "onnx_prefill_with_past", "ort_delta_gqa_past",
                                         "ort_gated_dim_mha_past", "ort_gated_head_mha", "ort_gateddelta_head_mha_past",
                                         "ort_linear_mha_past"),
                         [](const auto& name) { return std::string(name.param); });

// ---- shapes ---------------------------------------------------------------------------------------------------------

struct shape {
  Index batch, tokens, q_heads, kv_heads, key_heads, dk, dv;
};

/// Seeded inputs of a rule. Keys have length 1 or less, betas lie in (0, 1), decays in (0.6, 1).
call<double> make(const shape& n, onnx::rule rule, bool per_feature, bool one_beta, bool past, std::uint64_t seed) {
  call<double> x;
  x.attributes = {.q_num_heads = n.q_heads, .kv_num_heads = n.kv_heads, .update_rule = rule};
  seed *= 8;
  const auto draw = [&](Index columns, double low, double high) {
    array<double, 3> a({n.batch, n.tokens, columns});
    const auto drawn = support::uniform_matrix<double>(n.batch * n.tokens, columns, seed++, low, high);
    // Of few bits, so that the same numbers are exact in every type: then narrow types differ by what they compute.
    for (std::size_t i = 0; i < a.values.size(); ++i) a.values[i] = std::round(drawn.data()[i] * 64) / 64;
    return a;
  };
  x.query = draw(n.q_heads * n.dk, -1, 1);
  const double longest = 1 / std::sqrt(double(n.dk));
  x.key = draw(n.key_heads * n.dk, -longest, longest);
  x.value = draw(n.kv_heads * n.dv, -1, 1);
  if ((x.has_decay = rule == onnx::rule::gated || rule == onnx::rule::gated_delta)) {
    x.decay = draw(per_feature ? n.kv_heads * n.dk : n.kv_heads, -0.5, 0);
  }
  if ((x.has_beta = rule == onnx::rule::delta || rule == onnx::rule::gated_delta)) {
    x.beta = draw(one_beta ? 1 : n.kv_heads, 0, 1);
  }
  if ((x.has_past = past)) {
    const auto drawn = support::uniform_matrix<double>(n.batch * n.kv_heads, n.dk * n.dv, seed, -1, 1);
    x.past_state = array<double, 4>({n.batch, n.kv_heads, n.dk, n.dv});
    std::transform(drawn.data(), drawn.data() + drawn.size(), x.past_state.values.begin(),
                   [](double value) { return std::round(value * 64) / 64; });
  }
  x.make_outputs();
  return x;
}

constexpr onnx::rule all_rules[] = {onnx::rule::linear, onnx::rule::gated, onnx::rule::delta, onnx::rule::gated_delta};

/// f(inputs) for all rules and odd shapes: grouped, multi-query, shared keys, fewer queries than states.
void for_each_shape(const std::function<void(const call<double>&)>& f) {
  const std::vector<shape> shapes = {{1, 1, 1, 1, 1, 1, 1},  {2, 5, 3, 1, 1, 7, 3},    {3, 17, 6, 2, 2, 5, 33},
                                     {1, 33, 5, 5, 1, 9, 2}, {2, 19, 2, 4, 2, 17, 5},  {1, 40, 1, 3, 3, 3, 19},
                                     {1, 9, 24, 3, 3, 8, 8}, {2, 12, 4, 4, 4, 16, 16}, {2, 1, 6, 2, 1, 5, 33},
                                     {3, 1, 2, 4, 2, 17, 5}};
  std::uint64_t seed = 0;
  for (const shape& n : shapes) {
    for (const onnx::rule rule : all_rules) {
      for (const bool per_feature : {false, true}) {
        ++seed;
        SCOPED_TRACE("seed " + std::to_string(seed));
        f(make(n, rule, per_feature, seed % 3 == 0, seed % 2 == 0, seed));
      }
    }
  }
}

TEST(Onnx, OddShapesAreTheTokenLoop) {
  for_each_shape([](const call<double>& given) {
    const expectation want = token_loop(given);
    call<double> x = given;
    x.run();
    expect_close(x, want);
    auto narrow = given.cast<float>();
    narrow.run();
    expect_close(narrow, want);
    auto wide_state = given.cast<float, double>();
    wide_state.run();
    EXPECT_EQ(wide_state.output.values, narrow.output.values);
    EXPECT_EQ(wide_state.present_state.values, narrow.present_state.cast<double>().values);
  });
}

// Narrow types are storage: inputs that they hold exactly give what float gives, each output rounded once.
template <class T>
class OnnxNarrow : public testing::Test {};
#if defined(LINATTN_UNDER_SANITIZER)
using narrow_types = testing::Types<Eigen::bfloat16>;
#else
using narrow_types = testing::Types<Eigen::half, Eigen::bfloat16>;
#endif
TYPED_TEST_SUITE(OnnxNarrow, narrow_types);

TYPED_TEST(OnnxNarrow, AreFloatWithOneRounding) {
  for_each_shape([](const call<double>& given) {
    auto x = given.cast<float>();
    auto narrow = given.cast<TypeParam, float>();
    x.run();
    narrow.run();
    const auto rounded = x.output.template cast<TypeParam>();
    for (std::size_t i = 0; i < rounded.values.size(); ++i) {
      ASSERT_EQ(float(narrow.output.values[i]), float(rounded.values[i]));
    }
    EXPECT_EQ(narrow.present_state.values, x.present_state.values);
    auto narrow_state = given.cast<TypeParam, TypeParam>();
    narrow_state.run();
    for (std::size_t i = 0; i < x.present_state.values.size(); ++i) {
      ASSERT_EQ(float(narrow_state.present_state.values[i]), float(TypeParam(x.present_state.values[i])));
    }
  });
}

TEST(Onnx, ScaleMultipliesQueriesAndZeroStandsForTheDefault) {
  call<double> x = make({1, 6, 2, 2, 2, 16, 4}, onnx::rule::linear, false, false, false, 1);
  x.run();
  auto quarter = x;
  quarter.attributes.scale = 0.25F;  // 1/sqrt(16)
  quarter.run();
  EXPECT_EQ(x.output.values, quarter.output.values);
  auto twice = x;
  twice.attributes.scale = 0.5F;
  twice.attributes.chunk_size = 1;
  twice.run();
  EXPECT_EQ((2 * x.output.column()).eval(), twice.output.column());
}

TEST(Onnx, PrefillInTwoCallsAndInPlace) {
  const call<double> all = make({2, 12, 4, 2, 2, 5, 3}, onnx::rule::gated_delta, true, false, false, 2);
  const expectation want = token_loop(all);
  call<double> x = all;
  const auto halve = [](const array<double, 3>& a, bool second) {
    array<double, 3> half({a.shape[0], a.shape[1] / 2, a.shape[2]});
    const Index size = half.shape[1] * half.shape[2];
    for (Index b = 0; b < a.shape[0]; ++b) {
      std::copy_n(a.values.begin() + (2 * b + second) * size, size, half.values.begin() + b * size);
    }
    return half;
  };
  x.present_state = array<double, 4>(all.present_state.shape);
  for (const bool second : {false, true}) {
    x.query = halve(all.query, second), x.key = halve(all.key, second), x.value = halve(all.value, second);
    x.decay = halve(all.decay, second), x.beta = halve(all.beta, second);
    x.output = halve(all.output, second);
    auto in = x.inputs();
    if (second) in.past_state = onnx::tensor<const double, 4>{x.present_state.values.data(), x.present_state.shape};
    onnx::linear_attention<double, double>(x.attributes, in, {x.output.out(), x.present_state.out()});
  }
  EXPECT_TRUE(support::close(x.present_state.column(), want.present_state, allowed<double>));
}

TEST(Onnx, NoTokensHandTheStateOnAndNoBatchIsNothing) {
  call<double> x = make({2, 0, 4, 2, 2, 5, 3}, onnx::rule::delta, false, false, true, 3);
  x.run();
  EXPECT_EQ(x.present_state.values, x.past_state.values);
  x.has_past = false;
  x.run();
  EXPECT_EQ(x.present_state.values, std::vector<double>(x.past_state.values.size(), 0.0));
  call<double> none = make({0, 4, 4, 2, 2, 5, 3}, onnx::rule::gated, false, false, true, 3);
  EXPECT_NO_THROW(none.run());
}

// ---- refusals -------------------------------------------------------------------------------------------------------

using edit = std::function<void(call<double>&)>;

/// The edited call is refused with these parts in its sentence, and writes nothing.
void expect_refusal(onnx::rule rule, const edit& change, const std::vector<std::string>& parts) {
  call<double> x = make({2, 3, 6, 2, 2, 5, 4}, rule, false, false, true, 4);
  change(x);
  const auto output = x.output.values, state = x.present_state.values;
  try {
    x.run();
    ADD_FAILURE() << "not refused: " << parts.back();
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text << " lacks " << part;
    EXPECT_EQ(text.find("linattn::onnx::linear_attention: "), 0U) << text;
  }
  EXPECT_EQ(x.output.values, output);
  EXPECT_EQ(x.present_state.values, state);
}

TEST(OnnxRefusals, MissingAndSuperfluousGates) {
  for (const onnx::rule rule : all_rules) {
    const bool gated = rule == onnx::rule::gated || rule == onnx::rule::gated_delta;
    const bool delta = rule == onnx::rule::delta || rule == onnx::rule::gated_delta;
    expect_refusal(rule,
                   [&](call<double>& x) {
                     x.decay = array<double, 3>({2, 3, 2});
                     x.has_decay = !gated;
                   },
                   {gated ? "requires" : "forbids", "decay"});
    expect_refusal(rule,
                   [&](call<double>& x) {
                     x.beta = array<double, 3>({2, 3, 2});
                     x.has_beta = !delta;
                   },
                   {delta ? "requires" : "forbids", "beta"});
  }
}

TEST(OnnxRefusals, HeadCounts) {
  const auto heads = [](Index q, Index kv) {
    return [q, kv](call<double>& x) { x.attributes.q_num_heads = q, x.attributes.kv_num_heads = kv; };
  };
  for (const auto& [q, kv] : std::vector<std::pair<Index, Index>>{{0, 2}, {6, 0}, {-6, 2}, {6, -2}, {6, 4}, {3, 2}}) {
    expect_refusal(onnx::rule::gated_delta, heads(q, kv),
                   {"q_num_heads is " + std::to_string(q), "kv_num_heads is " + std::to_string(kv)});
  }
}

TEST(OnnxRefusals, Shapes) {
  const auto rule = onnx::rule::gated_delta;
  const auto reshape = [](auto member, std::size_t dimension, Index size) {
    return [=](call<double>& x) { (x.*member).shape[dimension] = size; };
  };
  using C = call<double>;
  expect_refusal(rule, reshape(&C::query, 2, 31), {"query", "31", "q_num_heads = 6"});
  expect_refusal(rule, reshape(&C::query, 2, 0), {"query", "0", "q_num_heads = 6"});
  expect_refusal(rule, reshape(&C::query, 2, 12), {"key"});
  expect_refusal(rule, reshape(&C::query, 0, -1), {"query", "(-1, 3, 30)"});
  expect_refusal(rule, reshape(&C::key, 2, 9), {"key", "9", "2 * 5"});
  expect_refusal(rule, reshape(&C::key, 2, 15), {"key", "15", "2 * 5"});
  expect_refusal(rule, reshape(&C::key, 0, 1), {"key is (1, 3, 10)", "(2, 3, 10)"});
  expect_refusal(rule, reshape(&C::key, 1, 4), {"key is (2, 4, 10)", "(2, 3, 10)"});
  expect_refusal(rule, reshape(&C::value, 2, 7), {"value", "7", "kv_num_heads = 2"});
  expect_refusal(rule, reshape(&C::value, 1, 2), {"value is (2, 2, 8)", "(2, 3, 8)"});
  expect_refusal(rule, reshape(&C::decay, 2, 5), {"decay is 5", "2", "10"});
  expect_refusal(rule, reshape(&C::decay, 1, 1), {"decay is (2, 1, 2)", "(2, 3, 2)"});
  expect_refusal(rule, reshape(&C::beta, 2, 6), {"beta is 6", "2"});
  expect_refusal(rule, reshape(&C::beta, 0, 1), {"beta is (1, 3, 2)", "(2, 3, 2)"});
  expect_refusal(rule, reshape(&C::past_state, 2, 4), {"past_state is (2, 2, 4, 4)", "(2, 2, 5, 4)"});
  expect_refusal(rule, reshape(&C::output, 2, 8), {"output is (2, 3, 8)", "(2, 3, 24)"});
  expect_refusal(rule, reshape(&C::present_state, 1, 6), {"present_state is (2, 6, 5, 4)", "(2, 2, 5, 4)"});
  expect_refusal(rule, [](C& x) { x.key.values.clear(), x.key.values.shrink_to_fit(); }, {"key is a null pointer"});
}

TEST(OnnxRefusals, NamesOfRules) {
  EXPECT_EQ(onnx::rule_of("linear"), onnx::rule::linear);
  EXPECT_EQ(onnx::rule_of("gated_delta"), onnx::rule::gated_delta);
  for (const char* const name : {"", "additive", "Gated", "gated_delta "}) {
    EXPECT_THROW(onnx::rule_of(name), std::invalid_argument);
  }
}

}  // namespace
