// What is refused, with which sentence, and that nothing was written before. Debug assertions are counted here instead
// of ending the program: `step` is noexcept, so that a handler must not throw.
namespace {

struct assertion_log {
  int failures = 0;
  const char* last = "";
  bool exits = false;  // for what cannot go on
};
assertion_log assertions;

void note_failed_assertion(const char* condition);

}  // namespace

#define LINATTN_ASSERT(condition) ((condition) ? void() : note_failed_assertion(#condition))

#include <linattn/linattn.hpp>

#include <linattn/feature_maps/positive_random.hpp>
#include <linattn/feature_maps/random_fourier.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/sentinel.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using Eigen::Index;
using linattn::denominator_policy;
using linattn::matrix_view;
using linattn::row_matrix;
using linattn::row_vector;
using linattn::vector_view;

constexpr int exit_code_of_assertions = 42;

void note_failed_assertion(const char* condition) {
  ++assertions.failures;
  assertions.last = condition;
  if (assertions.exits) {
    std::fputs(condition, stderr);
    std::_Exit(exit_code_of_assertions);
  }
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Expects that `call` fails exactly one assertion, whose condition or sentence contains `part`.
template <class F>
void expect_assertion(const F& call, const std::string& part) {
  assertions = {};
  call();
  EXPECT_EQ(assertions.failures, 1) << part;
  EXPECT_TRUE(contains(assertions.last, part)) << "no '" << part << "' in: " << assertions.last;
  assertions = {};
}

template <class F>
void expect_no_assertion(const F& call) {
  assertions = {};
  call();
  EXPECT_EQ(assertions.failures, 0) << assertions.last;
  assertions = {};
}

/// Expects that `call` throws std::invalid_argument with all `parts` in its text.
template <class F>
void expect_refusal(const F& call, const std::vector<std::string>& parts) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    for (const auto& part : parts) EXPECT_TRUE(contains(text, part)) << "no '" << part << "' in: " << text;
    return;
  }
  std::string all;
  for (const auto& part : parts) all += " '" + part + "'";
  ADD_FAILURE() << "not refused; expected a sentence with" << all;
}

std::string shape(Index rows, Index cols) { return "(" + std::to_string(rows) + ", " + std::to_string(cols) + ")"; }

constexpr Index N = 6;
constexpr Index D = 5;
constexpr Index M = 3;
constexpr Index H = 2;

using dynamic = linattn::linear_attention<linattn::elu_plus_one>;
using fixed = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, double, D, M, H>;

template <class State>
std::vector<row_matrix<typename State::scalar>> contents(const State& s) {
  std::vector<row_matrix<typename State::scalar>> all;
  for (Index h = 0; h < s.heads(); ++h) {
    all.push_back(s.kv(h));
    all.push_back(s.k_sum(h));
  }
  return all;
}

template <class State>
testing::AssertionResult same(const State& a, const State& b) {
  const auto entries_a = contents(a), entries_b = contents(b);
  if (a.tokens() != b.tokens()) return testing::AssertionFailure() << a.tokens() << " and " << b.tokens() << " tokens";
  for (std::size_t i = 0; i < entries_a.size(); ++i) {
    if (const auto r = support::same_bits(entries_a[i], entries_b[i]); !r) return r;
  }
  return testing::AssertionSuccess();
}

// ---- shapes of the bulk verbs ---------------------------------------------------------------------------------------

/// The shapes of one call's arguments.
struct argument_shapes {
  Index q_rows = N, q_cols = H * D;
  Index k_rows = N, k_cols = H * D;
  Index v_rows = N, v_cols = H * M;
  Index out_rows = N, out_cols = H * M;
  Index denominator_rows = N, denominator_cols = H;
};

/// All bulk verbs on arguments of any shapes, with outputs that show every write.
template <class Operator>
class BulkShapes : public testing::Test {
 protected:
  using scalar = typename Operator::scalar;
  using state = typename Operator::state_type;
  using workspace = typename Operator::workspace_type;

  const Operator attn{{.head_dim = D, .value_dim = M, .heads = H}};
  workspace ws = attn.make_workspace();

  state used_state() {
    state s = attn.make_state();
    const support::attention_inputs<scalar> x(3, H * D, H * M, 1);
    attn.absorb(s, x.k, x.v, ws);
    return s;
  }

  enum class bulk_verb {
    forward,
    forward_stateless,
    forward_causal,
    forward_causal_stateless,
    absorb,
    read,
    read_plain
  };

  void call(bulk_verb which, const argument_shapes& a, state& s, workspace& scratch, bool with_scratch,
            matrix_view<scalar> out, matrix_view<scalar> denominators) {
    const auto q = support::normal_matrix<scalar>(a.q_rows, a.q_cols, 2);
    const auto k = support::normal_matrix<scalar>(a.k_rows, a.k_cols, 3);
    const auto v = support::normal_matrix<scalar>(a.v_rows, a.v_cols, 4);
    switch (which) {
      case bulk_verb::forward:
        with_scratch ? attn.forward(s, q, k, v, out, scratch) : void(attn.forward(s, q, k, v));
        break;
      case bulk_verb::forward_stateless:
        with_scratch ? attn.forward(q, k, v, out, scratch) : void(attn.forward(q, k, v));
        break;
      case bulk_verb::forward_causal:
        with_scratch ? attn.forward_causal(s, q, k, v, out, scratch) : void(attn.forward_causal(s, q, k, v));
        break;
      case bulk_verb::forward_causal_stateless:
        with_scratch ? attn.forward_causal(q, k, v, out, scratch) : void(attn.forward_causal(q, k, v));
        break;
      case bulk_verb::absorb:
        with_scratch ? attn.absorb(s, k, v, scratch) : attn.absorb(s, k, v);
        break;
      case bulk_verb::read:
        attn.read(s, q, out, scratch, denominators);
        break;
      case bulk_verb::read_plain:
        with_scratch ? attn.read(s, q, out, scratch) : void(attn.read(s, q));
        break;
    }
  }

  static const char* name(bulk_verb which) {
    switch (which) {
      case bulk_verb::forward:
      case bulk_verb::forward_stateless:
        return "forward";
      case bulk_verb::forward_causal:
      case bulk_verb::forward_causal_stateless:
        return "forward_causal";
      case bulk_verb::absorb:
        return "absorb";
      default:
        return "read";
    }
  }

  /// A refusal with the verb's name and `parts`; outputs and state are as they were.
  void expect_refused(bulk_verb which, const argument_shapes& a, std::vector<std::string> parts,
                      bool with_scratch = true) {
    parts.push_back(std::string("linattn::") + name(which) + ": ");
    support::framed<scalar> out(a.out_rows, a.out_cols), denominators(a.denominator_rows, a.denominator_cols);
    state s = used_state();
    const state before = s;
    expect_refusal([&] { call(which, a, s, ws, with_scratch, out.matrix(), denominators.matrix()); }, parts);
    EXPECT_TRUE(out.untouched()) << name(which);
    EXPECT_TRUE(denominators.untouched()) << name(which);
    EXPECT_TRUE(same(s, before)) << name(which);
  }

  void expect_accepted(bulk_verb which, const argument_shapes& a) {
    support::framed<scalar> out(a.out_rows, a.out_cols), denominators(a.denominator_rows, a.denominator_cols);
    state s = used_state();
    EXPECT_NO_THROW(call(which, a, s, ws, true, out.matrix(), denominators.matrix())) << name(which);
    EXPECT_TRUE(out.frame_intact());
    EXPECT_TRUE(denominators.frame_intact());
  }

  static constexpr bulk_verb with_queries_and_keys[] = {bulk_verb::forward, bulk_verb::forward_stateless,
                                                        bulk_verb::forward_causal, bulk_verb::forward_causal_stateless};
  static constexpr bulk_verb causal[] = {bulk_verb::forward_causal, bulk_verb::forward_causal_stateless};
  static constexpr bulk_verb with_keys[] = {bulk_verb::forward, bulk_verb::forward_stateless, bulk_verb::forward_causal,
                                            bulk_verb::forward_causal_stateless, bulk_verb::absorb};
  static constexpr bulk_verb with_queries[] = {bulk_verb::forward,        bulk_verb::forward_stateless,
                                               bulk_verb::forward_causal, bulk_verb::forward_causal_stateless,
                                               bulk_verb::read,           bulk_verb::read_plain};
};
using bulk_operators = testing::Types<dynamic, fixed>;
TYPED_TEST_SUITE(BulkShapes, bulk_operators);

TYPED_TEST(BulkShapes, AreAcceptedWhenRight) {
  for (const auto which : TestFixture::with_queries) this->expect_accepted(which, {});
  this->expect_accepted(TestFixture::bulk_verb::absorb, {});
}

TYPED_TEST(BulkShapes, WrongColumnsOfQueries) {
  for (const auto which : TestFixture::with_queries) {
    for (const Index cols : {H * D - 1, H * D + 1, D, Index(1), Index(0)}) {
      argument_shapes a;
      a.q_cols = cols;
      this->expect_refused(which, a, {"q is " + shape(N, cols), shape(N, H * D), "head_dim"});
    }
  }
}

TYPED_TEST(BulkShapes, WrongColumnsOfKeys) {
  for (const auto which : TestFixture::with_keys) {
    for (const Index cols : {H * D - 1, H * D + 1, D, Index(1), Index(0)}) {
      argument_shapes a;
      a.k_cols = cols;
      this->expect_refused(which, a, {"k is " + shape(N, cols), shape(N, H * D), "head_dim"});
    }
  }
}

TYPED_TEST(BulkShapes, WrongColumnsOfValues) {
  for (const auto which : TestFixture::with_keys) {
    for (const Index cols : {H * M - 1, H * M + 1, M, H * D, Index(0)}) {
      argument_shapes a;
      a.v_cols = cols;
      this->expect_refused(which, a, {"v is " + shape(N, cols), shape(N, H * M), "value_dim"});
    }
  }
}

TYPED_TEST(BulkShapes, WrongOutputs) {
  for (const auto which : TestFixture::with_queries) {
    for (const Index cols : {H * M - 1, H * M + 1, M, Index(0)}) {
      argument_shapes a;
      a.out_cols = cols;
      this->expect_refused(which, a, {"out is " + shape(N, cols), shape(N, H * M), "value_dim"});
    }
    for (const Index rows : {N - 1, N + 1, Index(1), Index(0)}) {
      argument_shapes a;
      a.out_rows = rows;
      this->expect_refused(which, a, {"out is " + shape(rows, H * M), shape(N, H * M)});
    }
  }
}

TYPED_TEST(BulkShapes, WrongDenominators) {
  using verb = typename TestFixture::bulk_verb;
  for (const auto& [rows, cols] :
       {std::pair<Index, Index>(N - 1, H), {N + 1, H}, {N, H + 1}, {N, 1}, {H, N}, {N, H * M}}) {
    argument_shapes a;
    a.denominator_rows = rows;
    a.denominator_cols = cols;
    this->expect_refused(verb::read, a, {"denominators is " + shape(rows, cols), shape(N, H)});
  }
}

// A matrix that was meant to hold them and never given a size is a mistake; leaving the argument out is not.
TYPED_TEST(BulkShapes, EmptyDenominatorsAreNotNoDenominators) {
  using T = typename TestFixture::scalar;
  auto s = this->used_state();
  const auto q = support::normal_matrix<T>(N, H * D, 5);
  support::framed<T> out(N, H * M);
  row_matrix<T> denominators;
  expect_refusal([&] { this->attn.read(s, q, out.matrix(), this->ws, denominators); }, {"denominators is (0, 0)"});
  EXPECT_TRUE(out.untouched());
}

TYPED_TEST(BulkShapes, CausalNeedsOneKeyForEachQuery) {
  for (const auto which : TestFixture::causal) {
    for (const Index rows : {N - 1, N + 1, Index(1), Index(0)}) {
      argument_shapes fewer_keys;
      fewer_keys.k_rows = fewer_keys.v_rows = rows;
      this->expect_refused(which, fewer_keys, {"k is " + shape(rows, H * D), shape(N, H * D)});
      argument_shapes other_queries;
      other_queries.q_rows = other_queries.out_rows = rows;
      this->expect_refused(which, other_queries, {"k is " + shape(N, H * D), shape(rows, H * D)});
    }
  }
}

TYPED_TEST(BulkShapes, OneValueForEachKey) {
  for (const auto which : TestFixture::with_keys) {
    for (const Index rows : {N - 1, N + 1, Index(1), Index(0)}) {
      argument_shapes a;
      a.v_rows = rows;
      this->expect_refused(which, a, {"v is " + shape(rows, H * M), shape(N, H * M)});
    }
  }
}

// Non-causal attention has as many queries as it likes.
TYPED_TEST(BulkShapes, NonCausalTakesAnyNumberOfQueries) {
  using verb = typename TestFixture::bulk_verb;
  for (const Index queries : {Index(0), Index(1), N - 1, N + 3}) {
    argument_shapes a;
    a.q_rows = a.out_rows = a.denominator_rows = queries;
    for (const auto which : {verb::forward, verb::forward_stateless, verb::read, verb::read_plain}) {
      this->expect_accepted(which, a);
    }
  }
}

// The overloads that allocate refuse with the same sentences.
TYPED_TEST(BulkShapes, ConvenienceOverloadsToo) {
  using verb = typename TestFixture::bulk_verb;
  argument_shapes bad_q, bad_k, bad_v;
  bad_q.q_cols = 7;
  bad_k.k_cols = 7;
  bad_v.v_rows = 7;
  for (const auto which : TestFixture::with_queries_and_keys) {
    this->expect_refused(which, bad_q, {"q is " + shape(N, 7), shape(N, H * D)}, false);
  }
  this->expect_refused(verb::read_plain, bad_q, {"q is " + shape(N, 7), shape(N, H * D)}, false);
  for (const auto which : TestFixture::with_keys) {
    this->expect_refused(which, bad_k, {"k is " + shape(N, 7), shape(N, H * D)}, false);
    this->expect_refused(which, bad_v, {"v is " + shape(7, H * M), shape(N, H * M)}, false);
  }
}

// ---- states and workspaces of other operators -----------------------------------------------------------------------

const linattn::options other_sizes[] = {{.head_dim = D + 1, .value_dim = M, .heads = H},
                                        {.head_dim = D, .value_dim = M + 1, .heads = H},
                                        {.head_dim = D, .value_dim = M, .heads = H + 1},
                                        {.head_dim = M, .value_dim = D, .heads = H}};

/// The verbs that take a state, on right shapes.
template <class Operator, class State>
void expect_all_refuse(const Operator& attn, State& s, typename Operator::workspace_type& ws,
                       std::vector<std::string> parts) {
  using T = typename Operator::scalar;
  const support::attention_inputs<T> x(N, attn.heads() * attn.head_dim(), attn.heads() * attn.value_dim(), 6);
  support::framed<T> y(N, attn.heads() * attn.value_dim()), denominators(N, attn.heads());
  const State before = s;
  const std::pair<const char*, std::function<void()>> calls[] = {
      {"forward", [&] { attn.forward(s, x.q, x.k, x.v, y.matrix(), ws); }},
      {"forward_causal", [&] { attn.forward_causal(s, x.q, x.k, x.v, y.matrix(), ws); }},
      {"absorb", [&] { attn.absorb(s, x.k, x.v, ws); }},
      {"read", [&] { attn.read(s, x.q, y.matrix(), ws); }},
      {"read", [&] { attn.read(s, x.q, y.matrix(), ws, denominators.matrix()); }}};
  for (const auto& [name, call] : calls) {
    auto all = parts;
    all.push_back(std::string("linattn::") + name + ": ");
    expect_refusal(call, all);
    EXPECT_TRUE(y.untouched()) << name;
    EXPECT_TRUE(denominators.untouched()) << name;
    EXPECT_TRUE(same(s, before)) << name;
  }
}

TEST(Refusals, StateOfAnotherOperator) {
  const dynamic attn({.head_dim = D, .value_dim = M, .heads = H});
  auto ws = attn.make_workspace();
  for (const auto& sizes : other_sizes) {
    const dynamic other(sizes);
    auto s = other.make_state();
    s.kv(0).setConstant(3);
    expect_all_refuse(attn, s, ws, {"the state is " + s.sizes(), attn.make_state().sizes()});
  }
  // Another operator of the same sizes may continue it: a state belongs to its sizes and its map.
  auto s = dynamic({.head_dim = D, .value_dim = M, .heads = H}).make_state();
  const support::attention_inputs<float> x(N, H * D, H * M, 13);
  EXPECT_NO_THROW(attn.absorb(s, x.k, x.v, ws));
}

TEST(Refusals, WorkspaceOfAnotherOperator) {
  const dynamic attn({.head_dim = D, .value_dim = M, .heads = H});
  auto s = attn.make_state();
  s.kv(0).setConstant(3);
  const auto size = [](const auto& ws) { return std::to_string(ws.bytes() / Index(sizeof(float))); };
  const std::string own = size(attn.make_workspace());
  for (const auto& sizes : {linattn::options{.head_dim = 3 * D, .value_dim = M, .heads = H},
                            linattn::options{.head_dim = D, .value_dim = 9 * M, .heads = H},
                            linattn::options{.head_dim = D, .value_dim = M, .heads = H - 1}}) {
    auto ws = dynamic(sizes).make_workspace();
    ASSERT_NE(size(ws), own);
    expect_all_refuse(attn, s, ws, {"workspace", size(ws), own, "make_workspace()"});
  }
  dynamic::workspace_type empty;
  expect_all_refuse(attn, s, empty, {"workspace", "holds 0", own});
  // Where no state is given, too.
  const support::attention_inputs<float> x(N, H * D, H * M, 7);
  support::framed<float> y(N, H * M);
  expect_refusal([&] { attn.forward(x.q, x.k, x.v, y.matrix(), empty); }, {"linattn::forward: ", "holds 0", own});
  expect_refusal([&] { attn.forward_causal(x.q, x.k, x.v, y.matrix(), empty); },
                 {"linattn::forward_causal: ", "holds 0", own});
  EXPECT_TRUE(y.untouched());
}

// ---- gradients ------------------------------------------------------------------------------------------------------

struct gradient_call {
  Index dout_rows = N, dout_cols = H * M;
  Index dq_rows = N, dq_cols = H * D;
  Index dk_rows = N, dk_cols = H * D;
  Index dv_rows = N, dv_cols = H * M;
  linattn::options s0 = {.head_dim = D, .value_dim = M, .heads = H};
  linattn::options ds = s0;
};

/// Every gradient verb refuses the call with the parts, and writes nothing.
void expect_gradients_refused(const gradient_call& a, const std::vector<std::string>& parts,
                              bool stateful_only = false) {
  const dynamic attn({.head_dim = D, .value_dim = M, .heads = H});
  const support::attention_inputs<float> x(N, H * D, H * M, 6);
  const row_matrix<float> dout = support::normal_matrix<float>(a.dout_rows, a.dout_cols, 9);
  support::framed<float> dq(a.dq_rows, a.dq_cols), dk(a.dk_rows, a.dk_cols), dv(a.dv_rows, a.dv_cols);
  auto ws = attn.make_workspace();
  const auto s0 = dynamic(a.s0).make_state();
  auto ds = dynamic(a.ds).make_state();
  ds.kv(0).setConstant(3);
  const auto before = ds;
  const auto with = [&](const char* name) {
    auto all = parts;
    all.push_back(std::string("linattn::") + name + ": ");
    return all;
  };
  expect_refusal([&] { attn.vjp_causal(s0, x.q, x.k, x.v, dout, ds, dq.matrix(), dk.matrix(), dv.matrix(), ws); },
                 with("vjp_causal"));
  if (!stateful_only) {
    expect_refusal([&] { attn.vjp_causal(x.q, x.k, x.v, dout, dq.matrix(), dk.matrix(), dv.matrix(), ws); },
                   with("vjp_causal"));
    expect_refusal([&] { attn.vjp(x.q, x.k, x.v, dout, dq.matrix(), dk.matrix(), dv.matrix(), ws); }, with("vjp"));
  }
  EXPECT_TRUE(dq.untouched());
  EXPECT_TRUE(dk.untouched());
  EXPECT_TRUE(dv.untouched());
  EXPECT_TRUE(same(ds, before));
}

TEST(Gradients, WrongShapesAndStates) {
  expect_gradients_refused({.dout_rows = N - 1}, {"dout is " + shape(N - 1, H * M), shape(N, H * M)});
  expect_gradients_refused({.dout_cols = M}, {"dout is " + shape(N, M), shape(N, H * M)});
  expect_gradients_refused({.dq_rows = N + 1}, {"dq is " + shape(N + 1, H * D), shape(N, H * D)});
  expect_gradients_refused({.dk_cols = H * M}, {"dk is " + shape(N, H * M), shape(N, H * D)});
  expect_gradients_refused({.dv_cols = H * D}, {"dv is " + shape(N, H * D), shape(N, H * M)});
  for (const auto& sizes : other_sizes) {
    expect_gradients_refused({.s0 = sizes}, {"the state is "}, true);
    expect_gradients_refused({.ds = sizes}, {"the state is "}, true);
  }
}

TEST(Gradients, CausalNeedsOneKeyForEachQuery) {
  const dynamic attn({.head_dim = D, .value_dim = M, .heads = H});
  const support::attention_inputs<float> x(N, N + 1, H * D, H * M, 6);
  const row_matrix<float> dout = support::normal_matrix<float>(N, H * M, 9);
  expect_refusal([&] { attn.vjp_causal(x.q, x.k, x.v, dout); },
                 {"linattn::vjp_causal: ", "k is " + shape(N + 1, H * D), shape(N, H * D)});
  EXPECT_NO_THROW(attn.vjp(x.q, x.k, x.v, dout));
}

TEST(Gradients, WorkspaceOfAnotherOperator) {
  const dynamic attn({.head_dim = D, .value_dim = M, .heads = H});
  const support::attention_inputs<float> x(N, H * D, H * M, 6);
  row_matrix<float> dq = x.q, dk = x.k, dv = x.v;
  dynamic::workspace_type empty;
  expect_refusal([&] { attn.vjp(x.q, x.k, x.v, x.v, dq, dk, dv, empty); }, {"linattn::vjp: ", "holds 0"});
  expect_refusal([&] { attn.vjp_causal(x.q, x.k, x.v, x.v, dq, dk, dv, empty); }, {"vjp_causal: ", "holds 0"});
}

// ---- options --------------------------------------------------------------------------------------------------------

template <class Operator>
void expect_options_refused(const linattn::options& o, std::vector<std::string> parts) {
  parts.emplace_back("linattn::linear_attention: ");
  expect_refusal([&] { Operator attn(o); }, parts);
}

TEST(Options, MissingSizes) {
  expect_refusal([] { dynamic attn; }, {"linattn::linear_attention: ", "head_dim", "at least 1"});
  expect_options_refused<dynamic>({.value_dim = 3}, {"head_dim is not given"});
  expect_options_refused<dynamic>({.heads = 3}, {"head_dim is not given"});
}

TEST(Options, Defaults) {
  const dynamic attn({.head_dim = 7});
  EXPECT_EQ(attn.head_dim(), 7);
  EXPECT_EQ(attn.value_dim(), 7);
  EXPECT_EQ(attn.features(), 7);
  EXPECT_EQ(attn.heads(), 1);
  EXPECT_TRUE(attn.normalizes());
  EXPECT_FALSE(linattn::linear_attention<linattn::identity>({.head_dim = 7}).normalizes());
  EXPECT_FALSE(linattn::linear_attention<linattn::random_fourier<float>>({.head_dim = 7}, {7, 4, 1}).normalizes());
  EXPECT_TRUE(linattn::linear_attention<linattn::positive_random<float>>({.head_dim = 7}, {7, 4, 1}).normalizes());
  EXPECT_TRUE(linattn::linear_attention<linattn::identity>({.head_dim = 7, .normalize = true}).normalizes());
  EXPECT_FALSE(dynamic({.head_dim = 7, .normalize = false}).normalizes());
  EXPECT_EQ(dynamic({.head_dim = 7, .heads = 4, .key_heads = 4, .value_heads = 4}).heads(), 4);
}

TEST(Options, SizesBelowOne) {
  for (const Index bad : {Index(-1), Index(-64), std::numeric_limits<Index>::min()}) {
    const std::string text = std::to_string(bad);
    expect_options_refused<dynamic>({.head_dim = bad}, {"head_dim is " + text, "at least 1"});
    expect_options_refused<dynamic>({.head_dim = 4, .value_dim = bad}, {"value_dim is " + text, "at least 1"});
    expect_options_refused<dynamic>({.head_dim = 4, .heads = bad}, {"heads is " + text, "at least 1"});
    expect_options_refused<dynamic>({.head_dim = 4, .heads = 2, .key_heads = bad}, {"key_heads is " + text});
    expect_options_refused<dynamic>({.head_dim = 4, .heads = 2, .value_heads = bad}, {"value_heads is " + text});
    expect_options_refused<fixed>({.head_dim = bad}, {"head_dim is " + text});
  }
}

TEST(Options, OtherSizesThanTheType) {
  expect_options_refused<fixed>({.head_dim = D + 1}, {"head_dim", std::to_string(D + 1), std::to_string(D), "type"});
  expect_options_refused<fixed>({.value_dim = 8}, {"value_dim", "8", std::to_string(M), "type"});
  expect_options_refused<fixed>({.heads = 9}, {"heads", "9", std::to_string(H), "type"});
  EXPECT_NO_THROW(fixed());
  EXPECT_NO_THROW(fixed({.head_dim = D, .value_dim = M, .heads = H}));
  using one_head = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, float, D>;
  expect_options_refused<one_head>({.heads = 2}, {"heads", "2", "1", "type"});
}

TEST(Options, UnequalHeadCounts) {
  expect_options_refused<dynamic>({.head_dim = 4, .heads = 4, .key_heads = 3, .value_heads = 3},
                                  {"key_heads is 3", "value_heads is 3", "4"});
  expect_options_refused<dynamic>({.head_dim = 4, .heads = 4, .key_heads = 3}, {"key_heads is 3", "4"});
  expect_options_refused<dynamic>({.head_dim = 4, .heads = 4, .value_heads = 6}, {"value_heads is 6", "4"});
}

TEST(Options, MapsOfAnotherHeadDim) {
  using random = linattn::linear_attention<linattn::positive_random<float>>;
  using fourier = linattn::linear_attention<linattn::random_fourier<double>, linattn::additive, double>;
  expect_refusal([] { random attn({.head_dim = 9}, linattn::positive_random<float>(8, 16, 1)); },
                 {"linattn::linear_attention: ", "head_dim 8", "head_dim 9"});
  expect_refusal([] { fourier attn({.head_dim = 9}, linattn::random_fourier<double>(8, 16, 1)); },
                 {"linattn::linear_attention: ", "head_dim 8", "head_dim 9"});
  EXPECT_NO_THROW(random({.head_dim = 8}, linattn::positive_random<float>(8, 16, 1)));
  expect_refusal([] { linattn::positive_random<float>(0, 16, 1); }, {"positive_random"});
  expect_refusal([] { linattn::positive_random<float>(8, 0, 1); }, {"positive_random"});
  expect_refusal([] { linattn::random_fourier<float>(8, 15, 1); }, {"random_fourier", "15"});
}

struct half_as_many {
  static constexpr Index dimension(Index head_dim) noexcept { return head_dim / 2; }
  template <class T>
  void forward(const linattn::const_tile<T>& x, linattn::tile<T>& phi) const {
    phi = x.leftCols(x.cols() / 2);
  }
};

TEST(Options, MapsWithoutFeatures) {
  using halves = linattn::linear_attention<half_as_many>;
  expect_options_refused<halves>({.head_dim = 1}, {"dimension(1) = 0", "at least 1"});
  EXPECT_EQ(halves({.head_dim = 3}).features(), 1);
}

TEST(Options, Epsilons) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  for (const double bad : {0.0, -1e-6, nan, inf, -inf}) {
    expect_options_refused<dynamic>({.head_dim = 4, .denominator = denominator_policy::add(bad)}, {"epsilon"});
    expect_options_refused<dynamic>({.head_dim = 4, .denominator = denominator_policy::clamp(bad)}, {"epsilon"});
  }
  EXPECT_NO_THROW(dynamic({.head_dim = 4, .denominator = denominator_policy::add(1e-6)}));
  EXPECT_NO_THROW(dynamic({.head_dim = 4, .denominator = denominator_policy::clamp(1e-30)}));
}

TEST(Options, QueryScales) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  for (const double bad : {nan, inf, -inf}) {
    expect_options_refused<dynamic>({.head_dim = 4, .query_scale = bad}, {"query_scale"});
  }
  EXPECT_NO_THROW(dynamic({.head_dim = 4, .query_scale = -0.5}));
}

// Numbers that double holds and the accumulator does not: an epsilon that would be 0 or infinite there, a scale that
// would be infinite.
TEST(Options, NumbersBeyondTheAccumulator) {
  for (const double bad : {1e-60, 1e60}) {
    expect_options_refused<dynamic>({.head_dim = 4, .denominator = denominator_policy::add(bad)}, {"epsilon"});
    expect_options_refused<dynamic>({.head_dim = 4, .denominator = denominator_policy::clamp(bad)}, {"epsilon"});
    EXPECT_NO_THROW(fixed({.denominator = denominator_policy::add(bad)}));
  }
  expect_options_refused<dynamic>({.head_dim = 4, .query_scale = 1e60}, {"query_scale"});
  EXPECT_NO_THROW(fixed({.query_scale = 1e60}));
}

// Signed maps are not normalised by default: a policy for a division that does not take place is a misunderstanding.
TEST(Options, DenominatorPolicyOfASignedMap) {
  using signed_map = linattn::linear_attention<linattn::identity>;
  expect_options_refused<signed_map>({.head_dim = 4, .denominator = denominator_policy::add(1e-6)}, {"normalize"});
  for (const bool normalize : {true, false}) {
    EXPECT_NO_THROW(signed_map({.head_dim = 4, .normalize = normalize, .denominator = denominator_policy::add(1e-6)}));
  }
}

struct one_feature {
  static constexpr Index dimension(Index) noexcept { return 1; }
  template <class T>
  void forward(const linattn::const_tile<T>& x, linattn::tile<T>& phi) const {
    phi = x.leftCols(1);
  }
};

// Sizes whose products do not fit an Index, or a state no address space: refused before they are computed.
TEST(Options, AbsurdSizes) {
  constexpr Index most = std::numeric_limits<Index>::max();
  expect_options_refused<dynamic>({.head_dim = most}, {std::to_string(most)});
  expect_options_refused<dynamic>({.head_dim = 4, .value_dim = most}, {std::to_string(most)});
  expect_options_refused<dynamic>({.head_dim = 4, .heads = most}, {std::to_string(most)});
  expect_options_refused<dynamic>({.head_dim = Index(1) << 31, .heads = Index(1) << 31},
                                  {std::to_string(Index(1) << 31)});
  expect_options_refused<dynamic>({.head_dim = Index(1) << 32}, {std::to_string(Index(1) << 32)});
  // A map with few features leaves the state small; packed rows of heads * head_dim still have to be countable.
  using narrow = linattn::linear_attention<one_feature>;
  expect_options_refused<narrow>({.head_dim = most, .value_dim = 1}, {std::to_string(most)});
  expect_options_refused<narrow>({.head_dim = most / 2, .value_dim = 1, .heads = 4}, {std::to_string(most / 2)});
}

// ---- nothing to do --------------------------------------------------------------------------------------------------

template <class Operator>
class Empty : public testing::Test {};
TYPED_TEST_SUITE(Empty, bulk_operators);

TYPED_TEST(Empty, NoTokensNoKeysNoQueries) {
  using T = typename TypeParam::scalar;
  const TypeParam attn({.head_dim = D, .value_dim = M, .heads = H});
  auto ws = attn.make_workspace();
  const row_matrix<T> no_q(0, H * D), no_v(0, H * M);
  const support::attention_inputs<T> x(N, H * D, H * M, 8);
  support::framed<T> nothing(0, H * M);

  auto s = attn.make_state();
  attn.absorb(s, x.k, x.v, ws);
  const auto before = s;
  attn.forward_causal(s, no_q, no_q, no_v, nothing.matrix(), ws);
  attn.forward(s, no_q, no_q, no_v, nothing.matrix(), ws);
  attn.absorb(s, no_q, no_v, ws);
  attn.read(s, no_q, nothing.matrix(), ws);
  attn.forward_causal(no_q, no_q, no_v, nothing.matrix(), ws);
  EXPECT_TRUE(nothing.untouched());
  EXPECT_TRUE(same(s, before));
  EXPECT_EQ(attn.forward_causal(no_q, no_q, no_v).rows(), 0);
  EXPECT_EQ(attn.forward_causal(no_q, no_q, no_v).cols(), H * M);
  EXPECT_EQ(attn.forward(no_q, x.k, x.v).rows(), 0);

  // Keys without queries are absorbed; queries without keys see what there is, and 0 where there is nothing.
  attn.forward(s, no_q, x.k, x.v, nothing.matrix(), ws);
  EXPECT_EQ(s.tokens(), before.tokens() + N);
  auto read_only = before;
  EXPECT_TRUE(support::same_bits(attn.forward(read_only, x.q, no_q, no_v), attn.read(before, x.q)));
  EXPECT_TRUE(same(read_only, before));
  EXPECT_TRUE(support::all_zero(attn.forward(x.q, no_q, no_v)));
  const auto fresh = attn.make_state();
  support::framed<T> y(N, H * M), denominators(N, H);
  attn.read(fresh, x.q, y.matrix(), ws, denominators.matrix());
  EXPECT_TRUE(support::all_zero(y.matrix()));
  EXPECT_TRUE(support::all_zero(denominators.matrix()));
  EXPECT_TRUE(y.frame_intact());
}

TEST(NoKeys, GiveZeroUnderEveryPolicy) {
  const row_matrix<float> q = support::normal_matrix<float>(N, H * D, 9), no_k(0, H * D), no_v(0, H * M);
  for (const auto policy :
       {denominator_policy::none(), denominator_policy::add(1e-6), denominator_policy::clamp(1e-6)}) {
    for (const bool normalize : {true, false}) {
      const linattn::linear_attention<linattn::exponential> attn(
          {.head_dim = D, .value_dim = M, .heads = H, .normalize = normalize, .denominator = policy});
      EXPECT_TRUE(support::all_zero(attn.forward(q, no_k, no_v)));
      EXPECT_TRUE(support::all_zero(attn.read(attn.make_state(), q)));
    }
  }
}

// ---- debug assertions -----------------------------------------------------------------------------------------------

// The memory behind every view is large enough: only what the views say is wrong.
TEST(Assertions, SizesInStep) {
  const dynamic attn({.head_dim = D, .value_dim = M, .heads = H});
  auto ws = attn.make_workspace();
  auto s = attn.make_state();
  std::vector<float> memory(64, 0.5F);
  std::vector<float> results(64);
  const auto step = [&](Index q, Index k, Index v, Index out) {
    attn.step(s, vector_view<const float>(memory.data(), q), vector_view<const float>(memory.data(), k),
              vector_view<const float>(memory.data(), v), vector_view<float>(results.data(), out), ws);
  };
  expect_no_assertion([&] { step(H * D, H * D, H * M, H * M); });
  for (const Index off : {-1, 1}) {
    expect_assertion([&] { step(H * D + off, H * D, H * M, H * M); }, "q_t must have heads * head_dim elements");
    expect_assertion([&] { step(H * D, H * D + off, H * M, H * M); }, "k_t must have heads * head_dim elements");
    expect_assertion([&] { step(H * D, H * D, H * M + off, H * M); }, "v_t must have heads * value_dim elements");
    expect_assertion([&] { step(H * D, H * D, H * M, H * M + off); }, "out_t must have heads * value_dim elements");
  }
}

TEST(Assertions, StatesAndWorkspacesOfOtherOperatorsInStep) {
  const dynamic attn({.head_dim = D, .value_dim = M, .heads = H});
  const dynamic larger({.head_dim = 4 * D, .value_dim = 9 * M, .heads = 2 * H});
  auto ws = attn.make_workspace();
  auto s = attn.make_state();
  auto larger_ws = larger.make_workspace();
  auto larger_s = larger.make_state();
  const row_vector<float> q = row_vector<float>::Ones(H * D), v = row_vector<float>::Ones(H * M);
  row_vector<float> y(H * M);
  expect_no_assertion([&] { attn.step(s, q, q, v, y, ws); });
  expect_assertion([&] { attn.step(larger_s, q, q, v, y, ws); }, "the state is not from this operator's make_state()");
  expect_assertion([&] { attn.step(s, q, q, v, y, larger_ws); },
                   "the workspace is not from this operator's make_workspace()");
}

TEST(AssertionsDeathTest, EmptyStatesInStep) {
  const dynamic attn({.head_dim = D, .value_dim = M, .heads = H});
  auto ws = attn.make_workspace();
  dynamic::state_type default_made;
  const row_vector<float> q = row_vector<float>::Ones(H * D), v = row_vector<float>::Ones(H * M);
  row_vector<float> y(H * M);
  assertions = {};
  EXPECT_EXIT(
      {
        assertions.exits = true;
        attn.step(default_made, q, q, v, y, ws);
      },
      testing::ExitedWithCode(exit_code_of_assertions), "the state is not from this operator's make_state");
}

TEST(Assertions, OutputsThatOverlapInputs) {
  const Index both = H * (D + M);
  const dynamic attn({.head_dim = D, .value_dim = M, .heads = H});
  auto ws = attn.make_workspace();
  auto s = attn.make_state();
  row_matrix<float> packed = support::normal_matrix<float>(N, 2 * both, 10);
  const auto q = packed.leftCols(H * D), k = packed.middleCols(H * D, H * D);
  const auto v = packed.middleCols(2 * H * D, H * M);
  auto out = packed.rightCols(H * M);
  // Side by side in one matrix is how packed projections lie: no overlap.
  expect_no_assertion([&] {
    attn.forward(s, q, k, v, out, ws);
    attn.forward(q, k, v, out, ws);
    attn.forward_causal(s, q, k, v, out, ws);
    attn.forward_causal(q, k, v, out, ws);
    attn.read(s, q, out, ws);
  });
  const Index columns_of_overlap[] = {0, H * D, 2 * H * D, H * D - 1, 2 * H * D + H * M - 1};
  for (const Index column : columns_of_overlap) {
    auto overlapping = packed.middleCols(column, H * M);
    const char* const sentence = "overlaps an input";
    expect_assertion([&] { attn.forward(s, q, k, v, overlapping, ws); }, sentence);
    expect_assertion([&] { attn.forward(q, k, v, overlapping, ws); }, sentence);
    expect_assertion([&] { attn.forward_causal(s, q, k, v, overlapping, ws); }, sentence);
    expect_assertion([&] { attn.forward_causal(q, k, v, overlapping, ws); }, sentence);
    if (column < H * D) expect_assertion([&] { attn.read(s, q, overlapping, ws); }, sentence);
  }
  // One row too many.
  row_matrix<float> tall = support::normal_matrix<float>(2 * N, H * M, 11);
  expect_no_assertion([&] { attn.forward(q, k, tall.topRows(N), tall.bottomRows(N), ws); });
  expect_assertion([&] { attn.forward(q, k, tall.topRows(N), tall.middleRows(N - 1, N), ws); }, "overlaps an input");
}

TEST(Assertions, StepsOfManyStates) {
  const linattn::linear_attention<linattn::elu_plus_one> attn({.head_dim = 4});
  auto ws = attn.make_workspace();
  std::vector states(2, attn.make_state());
  row_matrix<float> x = support::normal_matrix<float>(3, 4, 1), out(2, 4);
  const row_matrix<float> k = support::normal_matrix<float>(2, 4, 2), short_k = k.topRows(1);
  expect_no_assertion([&] { attn.step(states, x.topRows(2), k, k, out, ws); });
  // Row 0 of the output is row 1 of the queries.
  expect_assertion([&] { attn.step(states, x.topRows(2), k, k, x.bottomRows(2), ws); }, "overlaps an input");
  std::vector one(1, attn.make_state());
  expect_assertion([&] { attn.step(one, x.topRows(1), k, short_k, out.topRows(1), ws); }, "one row for each state");
}

// "Outputs must not overlap inputs" holds for the other outputs, too.
TEST(Assertions, DenominatorsThatOverlap) {
  const dynamic attn({.head_dim = D, .value_dim = M, .heads = H});
  auto ws = attn.make_workspace();
  auto s = attn.make_state();
  row_matrix<float> q = support::normal_matrix<float>(N, H * D, 12);
  row_matrix<float> y(N, H * M), denominators(N, H);
  expect_no_assertion([&] { attn.read(s, q, y, ws, denominators); });
  expect_assertion([&] { attn.read(s, q, y, ws, q.leftCols(H)); }, "overlap");
  expect_assertion([&] { attn.read(s, q, y, ws, y.rightCols(H)); }, "overlap");
}

TEST(Assertions, GradientsThatOverlap) {
  const dynamic attn({.head_dim = D, .value_dim = D, .heads = H});
  auto ws = attn.make_workspace();
  auto ds = attn.make_state();
  row_matrix<float> x[4], d[3];
  for (auto& a : x) a = support::normal_matrix<float>(N, H * D, 8);
  for (auto& a : d) a.setZero(N, H * D);
  const auto call = [&](row_matrix<float>& dq, row_matrix<float>& dk, row_matrix<float>& dv) {
    return [&] { attn.vjp(x[0], x[1], x[2], x[3], dq, dk, dv, ws); };
  };
  expect_no_assertion(call(d[0], d[1], d[2]));
  for (auto& input : x) {
    expect_assertion(call(input, d[1], d[2]), "a gradient overlaps an input");
    expect_assertion(call(d[0], input, d[2]), "a gradient overlaps an input");
    expect_assertion(call(d[0], d[1], input), "a gradient overlaps an input");
  }
  expect_assertion(call(d[0], d[0], d[2]), "two gradients overlap");
  expect_assertion(call(d[0], d[1], d[0]), "two gradients overlap");
  expect_assertion(call(d[0], d[1], d[1]), "two gradients overlap");
  expect_assertion([&] { attn.vjp_causal(ds, x[0], x[1], x[2], x[3], ds, d[0], d[1], d[2], ws); }, "another state");
}

TEST(Assertions, OutputsThatOverlapInputsInStep) {
  const dynamic attn({.head_dim = D, .value_dim = M, .heads = H});
  auto ws = attn.make_workspace();
  auto s = attn.make_state();
  std::vector<float> memory(64, 0.5F);
  const auto at = [&](Index first, Index size) { return vector_view<float>(memory.data() + first, size); };
  const auto q = at(0, H * D), k = at(H * D, H * D), v = at(2 * H * D, H * M);
  expect_no_assertion([&] { attn.step(s, q, k, v, at(2 * H * D + H * M, H * M), ws); });
  for (const Index first : {Index(0), H * D - 1, H * D, 2 * H * D, 2 * H * D + H * M - 1}) {
    expect_assertion([&] { attn.step(s, q, k, v, at(first, H * M), ws); }, "overlaps an input");
  }
}

// ---- what the types promise -----------------------------------------------------------------------------------------

template <class Operator>
constexpr bool is_as_documented() {
  using T = typename Operator::scalar;
  using state = typename Operator::state_type;
  using workspace = typename Operator::workspace_type;
  const auto step_is_noexcept = [](const Operator& attn, state& s, row_vector<T>& x, workspace& ws) {
    return std::bool_constant<noexcept(attn.step(s, x, x, x, x, ws))>();
  };
  static_assert(decltype(step_is_noexcept(std::declval<const Operator&>(), std::declval<state&>(),
                                          std::declval<row_vector<T>&>(), std::declval<workspace&>()))::value,
                "step is noexcept, the conversions to its views included");
  static_assert(std::is_copy_constructible_v<Operator> && std::is_copy_assignable_v<Operator> &&
                std::is_nothrow_move_constructible_v<Operator>);
  static_assert(std::is_copy_constructible_v<state> && std::is_copy_assignable_v<state> &&
                std::is_nothrow_move_constructible_v<state> && std::is_default_constructible_v<state>);
  static_assert(std::is_copy_constructible_v<workspace> && std::is_copy_assignable_v<workspace> &&
                std::is_nothrow_move_constructible_v<workspace> && std::is_nothrow_move_assignable_v<workspace> &&
                std::is_default_constructible_v<workspace>);
  static_assert(noexcept(std::declval<state&>().reset()));
  static_assert(!std::is_convertible_v<linattn::options, Operator>, "the constructor is explicit");
  return true;
}
static_assert(is_as_documented<dynamic>());
static_assert(is_as_documented<fixed>());
static_assert(is_as_documented<linattn::linear_attention<linattn::positive_random<float>>>());

}  // namespace
