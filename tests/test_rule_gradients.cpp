// Gradients of the update rules: against the reverse recurrences in long double and published implementations, and what
// must hold exactly. test_laws_rule_gradients.cpp has law 10.
#include <linattn/linattn.hpp>

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/rule_for.hpp"
#include "support/rule_gradient_oracle.hpp"
#include "support/rule_inputs.hpp"
#include "support/rule_reference.hpp"
#include "support/sanitizer.hpp"
#include "support/sentinel.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using Eigen::Index;
using linattn::row_matrix;
using support::normal_matrix;
using support::wide_matrix;

using gated = linattn::gated<>;
using gated_feature = linattn::gated<linattn::decay_kind::per_feature>;
using gated_delta = linattn::gated_delta<>;
using kimi_delta = linattn::gated_delta<linattn::decay_kind::per_feature>;

template <class Rule, class T>
using operator_of = linattn::linear_attention<linattn::identity, Rule, T>;

/// A gradient is a difference of terms that may be larger than itself: a few times the rounding of the forward pass
/// (support::tolerance). A lost token moves rows by 1/N and more.
template <class T>
constexpr double bound = std::is_same_v<T, float> ? 2e-6 : 2e-13;
/// Of the terms that the gradient of a log-decay sums up.
template <class T>
constexpr double decay_bound = std::is_same_v<T, float> ? 1e-6 : 1e-13;

template <class Rule>
constexpr bool has_decays = requires(typename Rule::template inputs<int> x) {
  x.log_decay;
};
template <class Rule>
constexpr bool has_beta = requires(typename Rule::template inputs<int> x) {
  x.beta;
};

/// A rule, its operator's arguments, and the loss <dout, out> + <dS, S_N>.
template <class Rule, class Attention>
struct problem {
  using T = typename Attention::scalar;
  using tokens = support::rule_tokens<T>;
  using state = typename Attention::state_type;
  static constexpr support::rule_kind kind = support::rule_kind_of<Rule>();

  tokens x;
  Attention attn;
  row_matrix<T> dout;
  state s0, ds;

  explicit problem(const support::rule_shape& shape, const support::rule_patterns& patterns = {})
      : x(kind, shape, 3, patterns),
        attn(make(shape)),
        dout(normal_matrix<T>(shape.tokens, shape.heads * shape.value_dim, 4)),
        s0(attn.make_state()),
        ds(attn.make_state()) {
    x.query_scale = 0.75;
    const auto initial = support::rule_initial_state<T>(shape, 3), last = support::rule_initial_state<T>(shape, 4);
    for (Index h = 0; h < shape.heads; ++h) {
      s0.kv(h) = initial[std::size_t(h)];
      ds.kv(h) = last[std::size_t(h)];
    }
  }

  Attention make(const support::rule_shape& shape) const {
    const linattn::options o = {
        .head_dim = shape.features, .value_dim = shape.value_dim, .heads = shape.heads, .query_scale = 0.75};
    if constexpr (Rule::traits.fixed_decay) {
      std::vector<double> constants;
      for (Index h = 0; h < shape.heads; ++h) constants.push_back(double(x.log_decay(0, h)));
      return Attention(o, {}, Rule(constants));
    } else {
      return Attention(o);
    }
  }

  typename Attention::inputs inputs() const { return inputs_of(x); }
  static typename Attention::inputs inputs_of(const tokens& from) {
    typename Attention::inputs views;
    if constexpr (has_decays<Rule>) views.log_decay = from.log_decay;
    if constexpr (has_beta<Rule>) views.beta = from.beta;
    return views;
  }

  static support::rule_state wide(const state& s) {
    support::rule_state result;
    for (Index h = 0; h < s.heads(); ++h) result.push_back(s.kv(h).template cast<long double>());
    return result;
  }
  support::rule_gradients expected(bool with_states = true) const {
    const support::rule_state initial = wide(s0), last = wide(ds);
    return support::rule_gradient_oracle(kind, x.wide(), dout.template cast<long double>(),
                                         with_states ? &last : nullptr, with_states ? &initial : nullptr);
  }

  /// Per head, what the sum behind dlog_decay_t has gone through: |q||dq| + |k|(|dk| + |S| |dv|) from t on.
  wide_matrix sizes_of_decay_sums(const support::rule_gradients& e) const {
    const support::rule_shape& n = x.shape;
    const support::rule_state initial = wide(s0), last = wide(ds);
    const auto end = support::rule_oracle(kind, x.wide(), &initial).state;
    wide_matrix sizes = wide_matrix::Zero(n.tokens, n.heads);
    for (Index h = 0; h < n.heads; ++h) {
      const auto norm = [&](const auto& matrix, Index t, Index columns) {
        return static_cast<long double>(matrix.row(t).segment(h * columns, columns).norm());
      };
      const long double largest = initial[std::size_t(h)].norm() + end[std::size_t(h)].norm() + x.v.norm();
      long double sum = end[std::size_t(h)].norm() * last[std::size_t(h)].norm();
      for (Index t = n.tokens; t-- > 0;) {
        const long double again = has_beta<Rule> ? largest * norm(e.dv, t, n.value_dim) : 0;
        sum += norm(x.q, t, n.features) * norm(e.dq, t, n.features) +
               norm(x.k, t, n.features) * (norm(e.dk, t, n.features) + again);
        sizes(t, h) = sum;
      }
    }
    return sizes;
  }
};

template <class Rule, class T>
using dynamic_problem = problem<Rule, operator_of<Rule, T>>;

/// |actual - expected| <= bound (|expected| + size), element by element in no matrix, but in none of them NaN.
template <class A>
testing::AssertionResult near(const A& actual, const wide_matrix& expected, double relative, long double size) {
  if (actual.rows() != expected.rows() || actual.cols() != expected.cols()) {
    return testing::AssertionFailure() << support::detail::shapes(actual, expected);
  }
  if (auto finite = support::all_finite(actual); !finite) return finite;
  const long double error = (actual.template cast<long double>() - expected).norm();
  if (error <= relative * (expected.norm() + size)) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "off by " << error << " of " << expected.norm() << " + " << size;
}

template <class T>
testing::AssertionResult decays_near(const row_matrix<T>& actual, const wide_matrix& expected,
                                     const wide_matrix& sizes) {
  if (actual.rows() != expected.rows() || actual.cols() != expected.cols()) {
    return testing::AssertionFailure() << support::detail::shapes(actual, expected);
  }
  const Index columns = actual.cols() / sizes.cols();
  for (Index i = 0; i < actual.rows(); ++i) {
    for (Index j = 0; j < actual.cols(); ++j) {
      const long double error = std::abs(static_cast<long double>(actual(i, j)) - expected(i, j));
      if (error <= decay_bound<T> * sizes(i, j / columns)) continue;
      return testing::AssertionFailure() << "off by " << error << " of terms " << sizes(i, j / columns) << ' '
                                         << support::detail::element(i, j, actual(i, j), expected(i, j));
    }
  }
  return testing::AssertionSuccess();
}

/// The call into framed outputs, from and to states or without; gradients of all sizes beside each other are judged by
/// the largest, `size` being that of the loss's own factors.
template <class Problem>
void expect_oracle(const Problem& p, bool with_states, bool extreme) {
  using T = typename Problem::T;
  const support::rule_gradients e = p.expected(with_states);
  support::framed<T> dq(p.x.q.rows(), p.x.q.cols()), dk(p.x.k.rows(), p.x.k.cols()), dv(p.x.v.rows(), p.x.v.cols()),
      dlog_decay(p.x.log_decay.rows(), p.x.log_decay.cols()), dbeta(p.x.beta.rows(), p.x.beta.cols());
  auto mq = dq.matrix(), mk = dk.matrix(), mv = dv.matrix(), mg = dlog_decay.matrix(), mb = dbeta.matrix();
  auto ws = p.attn.make_workspace();
  auto ds = p.ds;
  typename std::remove_cvref_t<decltype(p.attn)>::input_gradients dx;
  if constexpr (requires { dx.log_decay; }) dx.log_decay = mg;
  if constexpr (requires { dx.beta; }) dx.beta = mb;
  if (with_states) {
    p.attn.vjp_causal(p.s0, p.x.q, p.x.k, p.x.v, p.inputs(), p.dout, ds, mq, mk, mv, dx, ws);
  } else {
    p.attn.vjp_causal(p.x.q, p.x.k, p.x.v, p.inputs(), p.dout, mq, mk, mv, dx, ws);
  }
  const long double size = extreme ? p.dout.template cast<long double>().norm() : 0;
  EXPECT_TRUE(near(mq, e.dq, bound<T>, size)) << "dq";
  EXPECT_TRUE(near(mk, e.dk, bound<T>, size)) << "dk";
  EXPECT_TRUE(near(mv, e.dv, bound<T>, size)) << "dv";
  if constexpr (requires { dx.beta; }) {
    EXPECT_TRUE(near(mb, e.dbeta, bound<T>, size)) << "dbeta";
  }
  if constexpr (requires { dx.log_decay; }) {
    auto from = p;
    if (!with_states) {
      from.s0.reset();
      from.ds.reset();
    }
    EXPECT_TRUE(decays_near(row_matrix<T>(mg), e.dlog_decay, from.sizes_of_decay_sums(e))) << "dlog_decay";
    for (Index i = 0; i < mg.size(); ++i) {
      const T decay = std::exp(p.x.log_decay.data()[i]);
      if (decay == T(0)) {
        EXPECT_EQ(mg(i / mg.cols(), i % mg.cols()), T(0)) << "behind a decay of 0";
      }
    }
  }
  for (Index h = 0; with_states && h < ds.heads(); ++h) {
    EXPECT_TRUE(near(ds.kv(h), e.dinitial[std::size_t(h)], bound<T>, size)) << "dS_0 of head " << h;
  }
  for (const auto* output : {&dq, &dk, &dv, &dlog_decay, &dbeta}) EXPECT_TRUE(output->frame_intact());
}

template <class Types>
struct RuleGradients : testing::Test {};

template <class R, class S>
struct subject {
  using Rule = R;
  using T = S;
};
/// Both scalars of both engines; the published cases below add others in double.
#if defined(LINATTN_UNDER_SANITIZER)
using subjects = testing::Types<subject<gated_feature, double>, subject<kimi_delta, float>>;
#else
using subjects = testing::Types<subject<linattn::decay, float>, subject<gated, float>, subject<gated_feature, float>,
                                subject<gated_feature, double>, subject<linattn::delta, float>,
                                subject<gated_delta, double>, subject<kimi_delta, float>>;
#endif
TYPED_TEST_SUITE(RuleGradients, subjects);

std::string text(const support::rule_shape& n) {
  return "N = " + std::to_string(n.tokens) + ", C = " + std::to_string(n.features) +
         ", M = " + std::to_string(n.value_dim) + ", H = " + std::to_string(n.heads);
}

TYPED_TEST(RuleGradients, EqualTheReverseRecurrence) {
  using problem_type = dynamic_problem<typename TypeParam::Rule, typename TypeParam::T>;
  // Around blocks of 2, 4 and 8, tiles of 16 and 32, panels of up to 32.
  for (const Index tokens : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65, 100}) {
    for (const bool with_states : {true, false}) {
      SCOPED_TRACE(text({tokens, 5, 3, 2}) + (with_states ? "" : ", no states"));
      expect_oracle(problem_type({tokens, 5, 3, 2}), with_states, false);
      if (testing::Test::HasFailure()) return;
    }
  }
  for (const support::rule_shape& shape : {support::rule_shape{40, 33, 18, 1}, {40, 16, 64, 2}, {40, 140, 70, 1}}) {
    SCOPED_TRACE(text(shape));
    expect_oracle(problem_type(shape), true, false);
  }
}

TYPED_TEST(RuleGradients, EqualTheReverseRecurrenceForRepeatedKeysAndBetasOf0And1And2) {
  using problem_type = dynamic_problem<typename TypeParam::Rule, typename TypeParam::T>;
  for (const auto keys : support::all_key_patterns) {
    for (const auto betas : {support::beta_pattern::up_to_two, support::beta_pattern::corners}) {
      SCOPED_TRACE("keys " + std::to_string(int(keys)) + ", betas " + std::to_string(int(betas)));
      expect_oracle(problem_type({37, 5, 3, 2}, {.keys = keys, .betas = betas}), true, false);
    }
  }
}

TYPED_TEST(RuleGradients, AreFiniteAndRightAtExtremeGates) {
  using problem_type = dynamic_problem<typename TypeParam::Rule, typename TypeParam::T>;
  if constexpr (problem_type::kind == support::rule_kind::delta) GTEST_SKIP() << "has no gates";
  for (const support::gate_set& gates : support::gate_sets()) {
    SCOPED_TRACE(gates.name);
    expect_oracle(problem_type({37, 5, 3, 2}, {.gates = gates}), true, true);
  }
}

template <class Rule, class T>
void expect_same(const linattn::rule_gradients<T, Rule>& a, const linattn::rule_gradients<T, Rule>& b) {
  EXPECT_TRUE(support::close(a.dq, b.dq, bound<T>)) << "dq";
  EXPECT_TRUE(support::close(a.dk, b.dk, bound<T>)) << "dk";
  EXPECT_TRUE(support::close(a.dv, b.dv, bound<T>)) << "dv";
  if constexpr (has_decays<Rule>) {
    EXPECT_TRUE(support::close(a.inputs.log_decay, b.inputs.log_decay, 5 * bound<T>)) << "dlog_decay";
  }
  if constexpr (has_beta<Rule>) {
    EXPECT_TRUE(support::close(a.inputs.beta, b.inputs.beta, bound<T>)) << "dbeta";
  }
}

TYPED_TEST(RuleGradients, OfSegmentsAreThoseOfTheWhole) {
  using T = typename TypeParam::T;
  using Rule = typename TypeParam::Rule;
  dynamic_problem<Rule, T> p({103, 5, 3, 2});
  auto ds = p.ds, ds_of_segments = p.ds;
  const auto whole = p.attn.vjp_causal(p.s0, p.x.q, p.x.k, p.x.v, p.inputs(), p.dout, ds);

  auto joined = whole;
  const std::vector<Index> starts = {0, 1, 38, 38, 70, 103};
  std::vector states = {p.s0};  // before each segment
  const auto segment = [&](std::size_t i) { return p.x.rows(starts[i], starts[i + 1] - starts[i]); };
  for (std::size_t i = 0; i + 1 < starts.size(); ++i) {
    states.push_back(states.back());
    const auto part = segment(i);
    p.attn.absorb(states.back(), part.k, part.v, p.inputs_of(part));
  }
  for (std::size_t i = starts.size() - 1; i-- > 0;) {
    const auto part = segment(i);
    const Index rows = part.q.rows();
    const auto d = p.attn.vjp_causal(states[i], part.q, part.k, part.v, p.inputs_of(part),
                                     p.dout.middleRows(starts[i], rows), ds_of_segments);
    joined.dq.middleRows(starts[i], rows) = d.dq;
    joined.dk.middleRows(starts[i], rows) = d.dk;
    joined.dv.middleRows(starts[i], rows) = d.dv;
    if constexpr (has_decays<Rule>) joined.inputs.log_decay.middleRows(starts[i], rows) = d.inputs.log_decay;
    if constexpr (has_beta<Rule>) joined.inputs.beta.middleRows(starts[i], rows) = d.inputs.beta;
  }
  expect_same<Rule>(joined, whole);
  for (Index h = 0; h < 2; ++h) EXPECT_TRUE(support::close(ds_of_segments.kv(h), ds.kv(h), bound<T>));
}

TYPED_TEST(RuleGradients, OfInputsLeftOutAreNotComputed) {
  using Rule = typename TypeParam::Rule;
  dynamic_problem<Rule, typename TypeParam::T> p({40, 5, 3, 2});
  const auto all = p.attn.vjp_causal(p.x.q, p.x.k, p.x.v, p.inputs(), p.dout);
  auto some = all;
  some.dq.setZero(), some.dk.setZero(), some.dv.setZero();
  auto ws = p.attn.make_workspace();
  p.attn.vjp_causal(p.x.q, p.x.k, p.x.v, p.inputs(), p.dout, some.dq, some.dk, some.dv, {}, ws);
  EXPECT_TRUE(support::same_bits(some.dq, all.dq));
  EXPECT_TRUE(support::same_bits(some.dk, all.dk));
  EXPECT_TRUE(support::same_bits(some.dv, all.dv));
}

TYPED_TEST(RuleGradients, OfNothingAreNothing) {
  dynamic_problem<typename TypeParam::Rule, typename TypeParam::T> p({0, 5, 3, 2});
  auto ds = p.ds;
  EXPECT_EQ(p.attn.vjp_causal(p.s0, p.x.q, p.x.k, p.x.v, p.inputs(), p.dout, ds).dq.rows(), 0);
  for (Index h = 0; h < 2; ++h) EXPECT_TRUE(support::same_bits(ds.kv(h), p.ds.kv(h)));
}

TYPED_TEST(RuleGradients, DoNotDependOnWhatTheWorkspaceWasUsedFor) {
  dynamic_problem<typename TypeParam::Rule, typename TypeParam::T> p({70, 5, 3, 2});
  const auto fresh = p.attn.vjp_causal(p.x.q, p.x.k, p.x.v, p.inputs(), p.dout);
  auto ws = p.attn.make_workspace();
  auto d = fresh;
  using T = typename TypeParam::T;
  const row_matrix<T> other = normal_matrix<T>(70, 6, 11, 1e6);
  p.attn.vjp_causal(p.x.q, p.x.k, other, p.inputs(), other, d.dq, d.dk, d.dv, d.views(), ws);
  const auto rows = [](const auto& x) { return x.topRows(21); };
  auto part = p.x.rows(0, 21);
  auto of_part = p.attn.vjp_causal(part.q, part.k, part.v, p.inputs_of(part), rows(p.dout));
  auto again = of_part;
  p.attn.vjp_causal(part.q, part.k, part.v, p.inputs_of(part), rows(p.dout), again.dq, again.dk, again.dv,
                    again.views(), ws);
  EXPECT_TRUE(support::same_bits(again.dq, of_part.dq));
  EXPECT_TRUE(support::same_bits(again.dk, of_part.dk));
  EXPECT_TRUE(support::same_bits(again.dv, of_part.dv));
}

TYPED_TEST(RuleGradients, DoNotAllocate) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  dynamic_problem<typename TypeParam::Rule, typename TypeParam::T> p({70, 5, 3, 2});
  auto d = p.attn.vjp_causal(p.x.q, p.x.k, p.x.v, p.inputs(), p.dout);
  auto ws = p.attn.make_workspace();
  auto ds = p.ds;
  const support::allocation_count count;
  p.attn.vjp_causal(p.x.q, p.x.k, p.x.v, p.inputs(), p.dout, d.dq, d.dk, d.dv, d.views(), ws);
  p.attn.vjp_causal(p.s0, p.x.q, p.x.k, p.x.v, p.inputs(), p.dout, ds, d.dq, d.dk, d.dv, d.views(), ws);
  const long seen = count.total();
  EXPECT_EQ(seen, 0);
}

TYPED_TEST(RuleGradients, RefuseWrongShapesBeforeAnythingIsWritten) {
  using Rule = typename TypeParam::Rule;
  using T = typename TypeParam::T;
  dynamic_problem<Rule, T> p({9, 5, 3, 2});
  support::framed<T> dq(9, 10), dk(9, 10), dv(9, 6), dg(p.x.log_decay.rows(), p.x.log_decay.cols()), db(9, 2);
  auto mq = dq.matrix(), mk = dk.matrix(), mv = dv.matrix(), mg = dg.matrix(), mb = db.matrix();
  auto ws = p.attn.make_workspace();
  const auto before = p.ds;
  const auto expect_refusal = [&](const auto& x, const auto& dx, const std::string& fragment) {
    try {
      p.attn.vjp_causal(p.s0, p.x.q, p.x.k, p.x.v, x, p.dout, p.ds, mq, mk, mv, dx, ws);
      ADD_FAILURE() << "not refused: " << fragment;
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find("linattn::vjp_causal: "), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(fragment), std::string::npos) << error.what();
    }
    for (const auto* output : {&dq, &dk, &dv, &dg, &db}) EXPECT_TRUE(output->untouched());
    for (Index h = 0; h < 2; ++h) EXPECT_TRUE(support::same_bits(p.ds.kv(h), before.kv(h)));
  };
  const row_matrix<T> wrong_input(8, 2);
  row_matrix<T> wrong(9, 3);
  auto x = p.inputs();
  typename operator_of<Rule, T>::input_gradients dx;
  if constexpr (has_decays<Rule>) {
    auto bad = x;
    bad.log_decay = {};
    expect_refusal(bad, dx, "log_decay is not given");
    bad.log_decay = wrong_input;
    expect_refusal(bad, dx, "log_decay is (8, 2)");
    dx.log_decay = wrong;
    expect_refusal(x, dx, "the gradient of log_decay is (9, 3)");
    dx.log_decay = mg;
  }
  if constexpr (has_beta<Rule>) {
    auto bad = x;
    bad.beta = {};
    expect_refusal(bad, dx, "beta is not given");
    bad.beta = wrong_input;
    expect_refusal(bad, dx, "beta is (8, 2)");
    dx.beta = wrong;
    expect_refusal(x, dx, "the gradient of beta is (9, 3)");
    dx.beta = mb;
  }
  ws = {};
  expect_refusal(x, dx, "the workspace holds 0");
}

// ---- published implementations --------------------------------------------------------------------------------------

template <class Rule>
void expect_reference(const support::rule_reference& c) {
  using matrix = row_matrix<double>;
  const auto narrow = [](const wide_matrix& x) -> matrix { return x.cast<double>(); };
  const Index heads = c.inputs.heads;
  const operator_of<Rule, double> attn({.head_dim = c.inputs.k.cols() / heads,
                                        .value_dim = c.inputs.v.cols() / heads,
                                        .heads = heads,
                                        .query_scale = double(c.inputs.query_scale)});
  const matrix q = narrow(c.inputs.q), k = narrow(c.inputs.k), v = narrow(c.inputs.v),
               log_decay = narrow(c.inputs.log_decay), beta = narrow(c.inputs.beta), dout = narrow(c.gradients->dout);
  typename operator_of<Rule, double>::inputs x;
  if constexpr (has_decays<Rule>) x.log_decay = log_decay;
  if constexpr (has_beta<Rule>) x.beta = beta;
  auto s0 = attn.make_state(), ds = attn.make_state();
  for (Index h = 0; h < heads; ++h) {
    s0.kv(h) = narrow(c.initial[std::size_t(h)]);
    ds.kv(h) = narrow(c.gradients->dstate[std::size_t(h)]);
  }
  const auto d = attn.vjp_causal(s0, q, k, v, x, dout, ds);
  const support::rule_gradients& e = c.gradients->expected;
  EXPECT_TRUE(support::close(d.dq, e.dq, bound<double>)) << "dq";
  EXPECT_TRUE(support::close(d.dk, e.dk, bound<double>)) << "dk";
  EXPECT_TRUE(support::close(d.dv, e.dv, bound<double>)) << "dv";
  if constexpr (has_decays<Rule>) {
    EXPECT_TRUE(support::close(d.inputs.log_decay, e.dlog_decay, bound<double>)) << "dlog_decay";
  }
  if constexpr (has_beta<Rule>) {
    EXPECT_TRUE(support::close(d.inputs.beta, e.dbeta, bound<double>)) << "dbeta";
  }
  for (Index h = 0; h < heads; ++h) {
    EXPECT_TRUE(support::close(ds.kv(h), e.dinitial[std::size_t(h)], bound<double>)) << "dS_0";
  }
}

TEST(RuleGradientReferences, AreTheirs) {
  int seen = 0;
  for (const support::rule_reference& c : support::rule_references()) {
    if (!c.gradients) continue;
    SCOPED_TRACE(c.name);
    using support::rule_kind;
    ++seen;
    if (c.kind == rule_kind::gated_per_feature) {
      expect_reference<gated_feature>(c);
    } else if (c.kind == rule_kind::delta) {
      expect_reference<linattn::delta>(c);
    } else if (c.kind == rule_kind::gated_delta_per_head) {
      expect_reference<gated_delta>(c);
    } else if (c.kind == rule_kind::gated_delta_per_feature) {
      expect_reference<kimi_delta>(c);
    } else {
      --seen;  // of rules that have no gradient here
    }
  }
  EXPECT_EQ(seen, 8);  // four cases of two batch elements
}

// ---- sizes in the type ----------------------------------------------------------------------------------------------

template <class Rule, class T>
void expect_fixed_sizes() {
  using attention = linattn::linear_attention<linattn::identity, Rule, T, 8, 3, 2>;
  expect_oracle(problem<Rule, attention>({37, 8, 3, 2}), true, false);
}

TEST(RuleGradientsOfFixedSizes, EqualTheReverseRecurrence) {
  expect_fixed_sizes<gated_feature, float>();
  expect_fixed_sizes<kimi_delta, float>();
  expect_fixed_sizes<linattn::delta, double>();
}

TEST(RuleGradientOfLogDecay, ANaNAmongTheDecaysShows) {
#if defined(__FAST_MATH__)
  GTEST_SKIP() << "promised for compilers that honour NaN";
#endif
  dynamic_problem<gated_feature, float> p({40, 5, 3, 2});
  constexpr Index token = 21, feature = 3;
  p.x.log_decay(token, feature) = std::numeric_limits<float>::quiet_NaN();
  const auto d = p.attn.vjp_causal(p.x.q, p.x.k, p.x.v, p.inputs(), p.dout);
  EXPECT_TRUE(support::all_nan(d.inputs.log_decay.col(feature).head(token + 1))) << "it and the tokens before it";
  EXPECT_TRUE(support::all_finite(d.inputs.log_decay.col(feature + 1))) << "another feature";
}

// Sums beyond 2^24 do not lose the ones that are added to them.
TEST(RuleGradientOfLogDecay, IsSummedInTwiceThePrecisionOfFloat) {
#if defined(__FAST_MATH__)
  GTEST_SKIP() << "what a sum rounds away may be taken for 0";
#endif
  constexpr Index N = 1000;
  constexpr float large = 0x1p25F;
  const operator_of<gated, float> attn({.head_dim = 1});
  const row_matrix<float> ones = row_matrix<float>::Ones(N, 1), zeros = row_matrix<float>::Zero(N, 1);
  auto s0 = attn.make_state(), ds = attn.make_state();
  s0.kv(0)(0, 0) = 1;
  ds.kv(0)(0, 0) = large;
  // S stays 1, so q dq = 1, and S_N dS_N = 2^25.
  const auto d = attn.vjp_causal(s0, ones, zeros, zeros, {.log_decay = zeros}, ones, ds);
  for (const Index t : {Index(0), N / 2, N - 4}) EXPECT_EQ(d.inputs.log_decay(t, 0), large + static_cast<float>(N - t));
}

}  // namespace
