// Sequence parallelism: every rank's rows of the result of one process, however the sequence is cut. Run by mpirun with
// several numbers of ranks; all of them run every test, each expecting its own part.
#include <linattn/feature_maps/cosformer.hpp>
#include <linattn/feature_maps/exponential.hpp>
#include <linattn/feature_maps/identity.hpp>
#include <linattn/mpi.hpp>

#include "support/compare.hpp"
#include "support/rule_calls.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Eigen::Index;
using linattn::decay_kind;
using linattn::row_matrix;
using T = double;
using tokens = support::rule_tokens<T>;

/// Of a scan against one pass: the same sums in another order. Some tens of tokens and a handful of merges leave tens
/// of roundings of 1e-16; a part that is lost, doubled or out of order moves the result by percents.
constexpr double tolerance = support::tolerance<T>::relative_rms;
/// Of gradients of log-decays, which are sums of terms that cancel.
constexpr double cancelling = 10 * tolerance;

const linattn::mpi::ranks* world = nullptr;

/// What the library has handed to MPI, in bytes: see the two functions at the end.
Index handed_over = 0;

// ---- cuts -----------------------------------------------------------------------------------------------------------

/// Tokens of every rank.
using lengths = std::vector<Index>;

std::vector<lengths> all_cuts() {
  const auto p = std::size_t(world->size());
  lengths equal(p, 16), growing(p), every_other(p, 0), first_alone(p, 0), last_alone(p, 0);
  for (std::size_t r = 0; r < p; ++r) {
    growing[r] = Index(1 + 13 * r);
    if (r % 2 == 1) every_other[r] = 21;
  }
  first_alone.front() = last_alone.back() = 37;
  return {equal, growing, every_other, first_alone, last_alone, lengths(p, 0)};
}

Index total(const lengths& cut) {
  Index sum = 0;
  for (const Index n : cut) sum += n;
  return sum;
}

/// This rank's rows.
struct range {
  Index first = 0, count = 0;

  explicit range(const lengths& cut) : count(cut[std::size_t(world->rank())]) {
    for (int r = 0; r < world->rank(); ++r) first += cut[std::size_t(r)];
  }
};

tokens drawn(support::rule_kind kind, Index n) { return {kind, {n, 17, 5, 2}, 11}; }

/// Of as many heads as the operator's: of two, the first.
template <class Attention>
tokens heads_for(const Attention& attn, tokens x) {
  const Index states = attn.value_heads();
  x.k = x.k.leftCols(attn.key_heads() * attn.head_dim()).eval();
  x.v = x.v.leftCols(states * attn.value_dim()).eval();
  x.log_decay = x.log_decay.leftCols(x.log_decay.cols() / 2 * states).eval();
  x.beta = x.beta.leftCols(x.beta.cols() / 2 * states).eval();
  return x;
}

/// What comes before the sequence.
template <class Attention>
typename Attention::state_type initial_state(const Attention& attn, support::rule_kind kind) {
  auto s = attn.make_state(3);
  const tokens x = heads_for(attn, tokens(kind, {9, 17, 5, 2}, 12));
  attn.absorb(s, x.k, x.v, support::inputs_of<Attention>(x));
  return s;
}

/// An argument for the ranks whose own does not count.
template <class Attention>
typename Attention::state_type rubbish(const Attention& attn) {
  auto s = attn.make_state(1000);
  for (Index h = 0; h < s.heads(); ++h) s.kv(h).setConstant(1e6);
  return s;
}

/// One comparison for the compiler, of whatever views.
void expect_close(const row_matrix<T>& actual, const row_matrix<T>& expected, double bound) {
  EXPECT_TRUE(support::close(actual, expected, bound));
}

// ---- verbs ----------------------------------------------------------------------------------------------------------

template <class Attention>
void expect_causal(const Attention& attn, support::rule_kind kind) {
  auto ws = attn.make_workspace();
  for (const lengths& cut : all_cuts()) {
    const range own(cut);
    const tokens x = drawn(kind, total(cut)), part = x.rows(own.first, own.count), before = x.rows(0, own.first);

    auto s = initial_state(attn, kind);
    const row_matrix<T> whole = attn.forward_causal(s, x.q, x.k, x.v, support::inputs_of<Attention>(x));
    auto want = initial_state(attn, kind);
    attn.absorb(want, before.k, before.v, support::inputs_of<Attention>(before));
    attn.absorb(want, part.k, part.v, support::inputs_of<Attention>(part));

    s = world->is_first() ? initial_state(attn, kind) : rubbish(attn);
    row_matrix<T> out = row_matrix<T>::Constant(own.count, whole.cols(), 7);
    linattn::mpi::forward_causal(*world, attn, s, part.q, part.k, part.v, support::inputs_of<Attention>(part), out, ws);
    expect_close(out, whole.middleRows(own.first, own.count), tolerance);
    expect_close(support::contents_of(s), support::contents_of(want), tolerance);
    EXPECT_EQ(s.tokens(), want.tokens());
    EXPECT_EQ(s.first_position(), want.first_position());
  }
}

template <class Attention>
void expect_gradients(const Attention& attn, support::rule_kind kind) {
  auto ws = attn.make_workspace();
  for (const lengths& cut : all_cuts()) {
    const range own(cut);
    const tokens x = heads_for(attn, drawn(kind, total(cut))), part = x.rows(own.first, own.count);
    const row_matrix<T> dout = support::normal_matrix<T>(x.v.rows(), attn.output_heads() * attn.value_dim(), 13);
    const auto s0 = initial_state(attn, kind);
    const auto final_gradient = [&] {
      auto d = attn.make_state();
      for (Index h = 0; h < d.heads(); ++h) {
        d.kv(h) = support::normal_matrix<T>(d.features(), d.value_dim(), 14);
        if constexpr (Attention::rule.normalizes) d.k_sum(h) = support::normal_matrix<T>(1, d.features(), 15);
        if constexpr (Attention::rule.log_scaled) d.log_scale(h).setZero();
      }
      return d;
    };
    auto ds = final_gradient();
    const auto want = attn.vjp_causal(s0, x.q, x.k, x.v, support::inputs_of<Attention>(x), dout, ds);

    auto d = attn.make_state();
    d = world->is_last() ? final_gradient() : rubbish(attn);
    row_matrix<T> dq(own.count, x.q.cols()), dk(own.count, x.k.cols()), dv(own.count, x.v.cols());
    row_matrix<T> dlog_decay(own.count, part.log_decay.cols()), dbeta(own.count, part.beta.cols());
    typename Attention::input_gradients dx;
    if constexpr (requires { dx.log_decay; }) dx.log_decay = dlog_decay;
    if constexpr (requires { dx.beta; }) dx.beta = dbeta;
    linattn::mpi::vjp_causal(*world, attn, world->is_first() ? s0 : rubbish(attn), part.q, part.k, part.v,
                             support::inputs_of<Attention>(part), dout.middleRows(own.first, own.count), d, dq, dk, dv,
                             dx, ws);
    expect_close(dq, want.dq.middleRows(own.first, own.count), tolerance);
    expect_close(dk, want.dk.middleRows(own.first, own.count), tolerance);
    expect_close(dv, want.dv.middleRows(own.first, own.count), tolerance);
    if constexpr (requires { dx.log_decay; }) {
      expect_close(dlog_decay, want.inputs.log_decay.middleRows(own.first, own.count), cancelling);
    }
    if constexpr (requires { dx.beta; }) {
      expect_close(dbeta, want.inputs.beta.middleRows(own.first, own.count), tolerance);
    }
    for (Index h = 0; world->is_first() && h < d.heads(); ++h) {
      expect_close(d.kv(h), ds.kv(h), tolerance);
      if constexpr (Attention::rule.normalizes) {
        expect_close(d.k_sum(h), ds.k_sum(h), tolerance);
      }
    }
  }
}

/// Queries and keys cut differently.
template <class Attention>
void expect_non_causal(const Attention& attn) {
  auto ws = attn.make_workspace();
  std::vector<lengths> cuts = all_cuts();
  for (std::size_t i = 0; i < cuts.size(); ++i) {
    const lengths& query_cut = cuts[(i + 1) % cuts.size()];
    const range keys(cuts[i]), queries(query_cut);
    const tokens x = drawn(support::rule_kind::additive, total(cuts[i]));
    const row_matrix<T> q = support::normal_matrix<T>(total(query_cut), x.q.cols(), 16);
    auto want = initial_state(attn, support::rule_kind::additive);
    const row_matrix<T> whole = attn.forward(want, q, x.k, x.v);

    auto s = world->is_first() ? initial_state(attn, support::rule_kind::additive) : rubbish(attn);
    row_matrix<T> out = row_matrix<T>::Constant(queries.count, whole.cols(), 7);
    linattn::mpi::forward(*world, attn, s, q.middleRows(queries.first, queries.count),
                          x.k.middleRows(keys.first, keys.count), x.v.middleRows(keys.first, keys.count), out, ws);
    expect_close(out, whole.middleRows(queries.first, queries.count), tolerance);
    expect_close(support::contents_of(s), support::contents_of(want), tolerance);
    EXPECT_EQ(s.tokens(), want.tokens());
    EXPECT_EQ(s.first_position(), want.first_position());
  }
}

template <class Map, class Rule>
linattn::linear_attention<Map, Rule, T> operator_of() {
  return support::operator_for<Map, Rule>(drawn(support::rule_kind_of<Rule>(), 1));
}

/// Both query heads read one state.
const linattn::options one_key_head = {.head_dim = 17, .value_dim = 5, .heads = 2, .key_heads = 1};

/// Of a map that knows positions: a rank that has the wrong ones has the wrong features.
using additive_attention = linattn::linear_attention<linattn::cosformer, linattn::additive, T>;

additive_attention additive_operator(Index value_dim = 5) {
  return additive_attention({.head_dim = 17, .value_dim = value_dim, .heads = 2}, linattn::cosformer(200));
}

TEST(Mpi, AdditiveRuleAndPositions) {
  const additive_attention attn = additive_operator();
  expect_causal(attn, support::rule_kind::additive);
  expect_gradients(attn, support::rule_kind::additive);
  expect_non_causal(attn);
}

TEST(Mpi, LogFeatures) {
  const auto attn = operator_of<linattn::exponential, linattn::additive>();
  expect_causal(attn, support::rule_kind::additive);
  expect_gradients(attn, support::rule_kind::additive);
}

TEST(Mpi, FixedDecay) {
  expect_causal(operator_of<linattn::identity, linattn::decay>(), support::rule_kind_of<linattn::decay>());
}

TEST(Mpi, GatesPerHead) {
  using rule = linattn::gated<decay_kind::per_head>;
  expect_causal(operator_of<linattn::identity, rule>(), support::rule_kind_of<rule>());
}

TEST(Mpi, GatesPerFeature) {
  using rule = linattn::gated<decay_kind::per_feature>;
  const auto attn = operator_of<linattn::identity, rule>();
  expect_causal(attn, support::rule_kind_of<rule>());
  expect_gradients(attn, support::rule_kind_of<rule>());
  expect_gradients(linattn::linear_attention<linattn::identity, rule, T>(one_key_head), support::rule_kind_of<rule>());
}

TEST(Mpi, GatedDelta) {
  using rule = linattn::gated_delta<decay_kind::per_feature>;
  const auto attn = operator_of<linattn::identity, rule>();
  expect_causal(attn, support::rule_kind_of<rule>());
  expect_gradients(attn, support::rule_kind_of<rule>());
  expect_gradients(linattn::linear_attention<linattn::identity, rule, T>(one_key_head), support::rule_kind_of<rule>());
}

// ---- traffic and errors ---------------------------------------------------------------------------------------------

Index bytes_for(const additive_attention& attn, Index n) {
  const tokens x = drawn(support::rule_kind::additive, n);
  auto ws = attn.make_workspace();
  row_matrix<T> out(n, x.v.cols());
  handed_over = 0;
  linattn::mpi::forward_causal(*world, attn, x.q, x.k, x.v, out, ws);
  return handed_over;
}

TEST(Mpi, TrafficIsOneStateWhateverTheLength) {
  const additive_attention attn = additive_operator();
  constexpr Index counts_and_flags = 2 * 24;
  const Index want = world->size() == 1 ? 0 : counts_and_flags + linattn::mpi::message_bytes(attn);
  EXPECT_EQ(bytes_for(attn, 1), want);
  EXPECT_EQ(bytes_for(attn, 500), want);
}

/// The sentence that every rank gets: its own where it is the last one, else the number of that one.
template <class F>
void expect_refusal(const F& call, const std::string& own, const std::string& others) {
  try {
    call();
    ADD_FAILURE() << "rank " << world->rank() << " was not told";
  } catch (const std::invalid_argument& error) {
    const std::string& want = world->is_last() ? own : others;
    EXPECT_NE(std::string(error.what()).find(want), std::string::npos) << error.what();
  }
}

TEST(Mpi, WhatOneRankRefusesAllRefuse) {
  const additive_attention attn = additive_operator();
  const tokens x = drawn(support::rule_kind::additive, 4);
  const std::string others = "rank " + std::to_string(world->size() - 1) + " failed";
  auto ws = attn.make_workspace();
  auto s = attn.make_state();
  row_matrix<T> out = row_matrix<T>::Constant(4, x.v.cols(), 7);
  const auto wrong = [](const row_matrix<T>& y) { return row_matrix<T>(world->is_last() ? y.leftCols(3) : y); };

  expect_refusal([&] { linattn::mpi::forward_causal(*world, attn, s, x.q, wrong(x.k), x.v, out, ws); },
                 "forward_causal: k is (4, 3), expected (4, 34)", others);
  expect_refusal([&] { linattn::mpi::forward(*world, attn, s, wrong(x.q), x.k, x.v, out, ws); },
                 "forward: q is (4, 3), expected (4, 34)", others);
  row_matrix<T> narrow = wrong(out);
  expect_refusal([&] { linattn::mpi::forward_causal(*world, attn, s, x.q, x.k, x.v, narrow, ws); },
                 "forward_causal: out is (4, 3), expected (4, 10)", others);
  row_matrix<T> dq = x.q, dk = x.k;
  expect_refusal([&] { linattn::mpi::vjp_causal(*world, attn, x.q, x.k, x.v, x.v, dq, dk, narrow, ws); },
                 "vjp_causal: dv is (4, 3), expected (4, 10)", others);
  additive_attention::workspace_type none = attn.make_workspace(), moved = std::move(none);
  expect_refusal(
      [&] { linattn::mpi::forward_causal(*world, attn, s, x.q, x.k, x.v, out, world->is_last() ? none : moved); },
      "the workspace holds 0 elements", others);
  EXPECT_TRUE((out.array() == 7).all() && (dq.array() == x.q.array()).all());
  EXPECT_EQ(s.tokens(), 0);

  // The ranks are still in step.
  expect_causal(attn, support::rule_kind::additive);
}

TEST(Mpi, OperatorsOfDifferentSizesAreRefused) {
  if (world->size() == 1) GTEST_SKIP() << "nobody to differ from";
  const Index m = world->is_last() ? 64 : 5;
  const additive_attention attn = additive_operator(m);
  const row_matrix<T> q = row_matrix<T>::Ones(4, 2 * 17), v = row_matrix<T>::Ones(4, 2 * m);
  row_matrix<T> out(4, 2 * m);
  auto ws = attn.make_workspace();
  const std::string sentence = "the ranks' operators differ";
  expect_refusal([&] { linattn::mpi::forward_causal(*world, attn, q, q, v, out, ws); }, sentence, sentence);
}

TEST(Mpi, RanksNeedACommunicator) { EXPECT_THROW(linattn::mpi::ranks(MPI_COMM_NULL), std::invalid_argument); }

}  // namespace

// Between the library and MPI, to count what passes.
extern "C" int MPI_Exscan(const void* from, void* to, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  int size = 0;
  PMPI_Type_size(type, &size);
  handed_over += Index(count) * size;
  return PMPI_Exscan(from, to, count, type, op, comm);
}
extern "C" int MPI_Allreduce(const void* from, void* to, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  int size = 0;
  PMPI_Type_size(type, &size);
  handed_over += Index(count) * size;
  return PMPI_Allreduce(from, to, count, type, op, comm);
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  MPI_Init(&argc, &argv);
  int failed = 1;
  {
    const linattn::mpi::ranks ranks(MPI_COMM_WORLD);
    world = &ranks;
    failed = RUN_ALL_TESTS();
  }
  MPI_Finalize();
  return failed;
}
