// Gradients where heads share, through maps, denominators and parameters: those of the same attention with separate
// heads in double, one for each head of the output, added up. test_head_sharing_rule_gradients.cpp has the rules.
#include <linattn/batch.hpp>
#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/feature_maps/exponential.hpp>
#include <linattn/linear_attention.hpp>

#include "support/compare.hpp"
#include "support/gradient_maps.hpp"
#include "support/inputs.hpp"
#include "support/refusal.hpp"
#include "support/sentinel.hpp"
#include "support/shared_heads.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using Eigen::Index;
using linattn::head_sharing;
using linattn::row_matrix;
using support::normal_matrix;
using matrix = row_matrix<double>;

constexpr Index D = 5, M = 7, queries = 41, keys = 37;
const std::vector<support::head_counts> all_counts = {{2, 1, 1}, {6, 2, 2}, {3, 1, 1}, {1, 1, 3}, {2, 2, 6}, {4, 2, 4},
                                                      {8, 2, 4}, {2, 4, 4}, {2, 1, 4}, {3, 2, 6}, {3, 3, 3}};

/// The operators' roundings, a few times that of the forward pass (support::tolerance), and those of the sums.
template <class T>
constexpr double bound = std::is_same_v<T, float> ? 5e-6 : 4e-13;

/// phi(x) = f relu(W x + b): parameters, and factors that tell queries from keys and know their positions and heads. An
/// operator of separate heads is given the numbers of those in whose place its heads are.
struct placed_map {
  using scalar = double;
  using gradient = support::learned_map::gradient;
  using input = linattn::const_tile<double>;
  using output = linattn::tile<double>;
  using position = linattn::tile_position;

  support::learned_map map;
  std::vector<Index> query_heads = {}, key_heads = {};

  Index dimension(Index head_dim) const { return map.dimension(head_dim); }
  Index head_dim() const { return map.head_dim(); }
  gradient make_gradient() const { return map.make_gradient(); }
  void forward_queries(const input& x, output& phi, position where) const {
    map.forward(x, phi);
    phi = matrix(factors(where, query_heads, 1.5, x.rows()).asDiagonal() * phi);
  }
  void forward_keys(const input& x, output& phi, position where) const {
    map.forward(x, phi);
    phi = matrix(factors(where, key_heads, 1.2, x.rows()).asDiagonal() * phi);
  }
  void vjp_queries(const input& x, const input& phi, const input& dphi, output& dx, position where, gradient* g) const {
    vjp(factors(where, query_heads, 1.5, x.rows()), x, phi, dphi, dx, g);
  }
  void vjp_keys(const input& x, const input& phi, const input& dphi, output& dx, position where, gradient* g) const {
    vjp(factors(where, key_heads, 1.2, x.rows()), x, phi, dphi, dx, g);
  }

 private:
  static Eigen::VectorXd factors(position where, const std::vector<Index>& heads, double mean, Index rows) {
    const Index head = heads.empty() ? where.head : heads[std::size_t(where.head)];
    Eigen::VectorXd f(rows);
    for (Index r = 0; r < rows; ++r) f[r] = mean + std::sin(double(where.first_position + r + 3 * head));
    return f;
  }
  void vjp(const Eigen::VectorXd& f, const input& x, const input& phi, const input& dphi, output& dx,
           gradient* g) const {
    const matrix du = (phi.array() > 0).select(matrix(f.asDiagonal() * dphi), 0);  // (R, C)
    dx = du * map.W;
    if (g == nullptr) return;
    g->W += du.transpose() * x;
    g->b += du.colwise().sum();
  }
};

struct mode {
  const char* name;
  bool normalize;
  linattn::denominator_policy policy;
};
const std::vector<mode> modes = {{"normalised", true, linattn::denominator_policy::none()},
                                 {"clamped", true, linattn::denominator_policy::clamp(20)},
                                 {"not normalised", false, linattn::denominator_policy::none()}};

/// q, k, v and dout of T as an operator has them, or repeated for separate heads in double.
template <class Map, class T>
struct problem {
  using shared_operator = linattn::linear_attention<Map, linattn::additive, T>;
  using separate_operator = linattn::linear_attention<Map, linattn::additive, double>;
  using gradient = typename separate_operator::parameter_gradient;
  static constexpr bool log_scaled = shared_operator::rule.log_scaled;

  support::head_counts n;
  head_sharing how;
  bool causal;
  row_matrix<T> q, k, v, dout;
  shared_operator attn;
  separate_operator all;
  typename shared_operator::state_type s0, ds;

  problem(const Map& map, const support::head_counts& counts, head_sharing sharing, bool is_causal, const mode& m)
      : n(counts),
        how(sharing),
        causal(is_causal),
        q(normal_matrix<T>(causal ? keys : queries, n.queries * D, 1, 0.7)),
        k(normal_matrix<T>(keys, n.keys * D, 2, 0.7)),
        v(normal_matrix<T>(keys, n.values * M, 3)),
        dout(normal_matrix<T>(q.rows(), n.outputs() * M, 4)),
        attn(make<shared_operator>(map, n, how, m)),
        all(make<separate_operator>(renamed(map), {n.outputs(), n.outputs(), n.outputs()}, how, m)),
        s0(attn.make_state(3)),
        ds(attn.make_state()) {
    for (Index h = 0; h < n.values; ++h) {
      const auto seed = std::uint64_t(10 * h);
      s0.kv(h) = normal_matrix<T>(attn.features(), M, 5 + seed);
      s0.k_sum(h) = normal_matrix<T>(1, attn.features(), 6 + seed).cwiseAbs();
      ds.kv(h) = normal_matrix<T>(attn.features(), M, 7 + seed);
      ds.k_sum(h) = normal_matrix<T>(1, attn.features(), 8 + seed);
      if constexpr (log_scaled) {
        s0.log_scale(h) = normal_matrix<T>(1, attn.features(), 9 + seed);
        ds.log_scale(h) = normal_matrix<T>(1, attn.features(), 10 + seed);
      }
    }
  }

  template <class Operator>
  static Operator make(const Map& map, const support::head_counts& n, head_sharing how, const mode& m) {
    return Operator({.head_dim = D,
                     .value_dim = M,
                     .heads = n.queries,
                     .key_heads = n.keys,
                     .value_heads = n.values,
                     .sharing = how,
                     .query_scale = 0.8,
                     .normalize = m.normalize,
                     .denominator = m.policy},
                    map);
  }
  Map renamed(Map map) const {
    if constexpr (requires { map.query_heads; }) {
      for (Index h = 0; h < n.outputs(); ++h) {
        map.query_heads.push_back(n.query_of(how, h));
        map.key_heads.push_back(n.key_of(how, h));
      }
    }
    return map;
  }

  /// S (C, M) and z (1, C) of a head, side by side and without a scale.
  template <class State>
  static matrix plain(const State& s, Index h) {
    matrix x(s.features(), M + 1);
    x << s.kv(h).template cast<double>(), s.k_sum(h).transpose().template cast<double>();
    if constexpr (log_scaled) {
      x = matrix(s.log_scale(h).transpose().template cast<double>().array().exp().matrix().asDiagonal() * x);
    }
    return x;
  }
  /// Of separate heads, and what goes together of them added up.
  struct sums {
    matrix dq, dk, dv;
    std::vector<matrix> dstate;
    gradient dmap;
  };
  sums expected(gradient dmap) const {
    const auto state_of = [&](Index h) { return n.state_of(how, h); };
    const auto query_of = [&](Index h) { return n.query_of(how, h); };
    const auto key_of = [&](Index h) { return n.key_of(how, h); };
    const Index outputs = n.outputs();
    const matrix q_all = support::heads_of(matrix(q.template cast<double>()), outputs, D, query_of);
    const matrix k_all = support::heads_of(matrix(k.template cast<double>()), outputs, D, key_of);
    const matrix v_all = support::heads_of(matrix(v.template cast<double>()), outputs, M, state_of);
    const matrix dout_all = dout.template cast<double>();
    auto initial = all.make_state(3), last = all.make_state();
    std::vector<bool> counted(std::size_t(n.values), false);
    for (Index h = 0; h < outputs; ++h) {
      const Index s = state_of(h);
      const auto copy = [&](const auto& from, auto& to) {
        to.kv(h) = from.kv(s).template cast<double>();
        to.k_sum(h) = from.k_sum(s).template cast<double>();
        if constexpr (log_scaled) to.log_scale(h) = from.log_scale(s).template cast<double>();
      };
      copy(s0, initial);
      if (!counted[std::size_t(s)]) copy(ds, last);  // one state, whose gradient comes in once
      counted[std::size_t(s)] = true;
    }
    matrix dq = q_all, dk = k_all, dv = v_all;
    auto ws = all.make_workspace();
    if (causal) {
      all.vjp_causal(initial, q_all, k_all, v_all, dout_all, last, dq, dk, dv, ws, &dmap);
    } else {
      all.vjp(q_all, k_all, v_all, dout_all, dq, dk, dv, ws, &dmap);
    }
    sums e{support::sums_of_heads(dq, n.queries, D, query_of), support::sums_of_heads(dk, n.keys, D, key_of),
           support::sums_of_heads(dv, n.values, M, state_of),
           std::vector<matrix>(std::size_t(n.values), matrix::Zero(all.features(), M + 1)), dmap};
    for (Index h = 0; h < outputs; ++h) e.dstate[std::size_t(state_of(h))] += plain(last, h);
    return e;
  }
};

template <class T, class Map>
void expect_sums(const Map& map, const std::vector<mode>& all_modes = modes) {
  using problem_type = problem<Map, T>;
  for (const support::head_counts& n : all_counts) {
    for (const head_sharing how : {head_sharing::interleaved, head_sharing::tiled}) {
      for (const mode& m : all_modes) {
        for (const bool causal : {true, false}) {
          SCOPED_TRACE(n.name(how) + ", " + m.name + (causal ? ", causal" : ""));
          const problem_type p(map, n, how, causal, m);
          support::framed<T> dq(p.q.rows(), p.q.cols()), dk(keys, p.k.cols()), dv(keys, p.v.cols());
          auto mq = dq.matrix(), mk = dk.matrix(), mv = dv.matrix();
          typename problem_type::gradient dmap{}, zero{};
          if constexpr (requires { dmap.W; }) zero = dmap = map.make_gradient();
          auto ws = p.attn.make_workspace();
          auto ds = p.ds;
          if (causal) {
            p.attn.vjp_causal(p.s0, p.q, p.k, p.v, p.dout, ds, mq, mk, mv, ws, &dmap);
          } else {
            p.attn.vjp(p.q, p.k, p.v, p.dout, mq, mk, mv, ws, &dmap);
          }
          const auto e = p.expected(zero);
          EXPECT_TRUE(support::close(mq, e.dq, bound<T>)) << "dq";
          EXPECT_TRUE(support::close(mk, e.dk, bound<T>)) << "dk";
          EXPECT_TRUE(support::close(mv, e.dv, bound<T>)) << "dv";
          for (Index h = 0; causal && h < n.values; ++h) {
            EXPECT_TRUE(support::close(p.plain(ds, h), e.dstate[std::size_t(h)], bound<T>)) << "dS, dz of head " << h;
          }
          if constexpr (requires { dmap.W; }) {
            EXPECT_TRUE(support::close(dmap.W, e.dmap.W, bound<T>)) << "dW";
            EXPECT_TRUE(support::close(dmap.b, e.dmap.b, bound<T>)) << "db";
          }
          for (const auto* output : {&dq, &dk, &dv}) EXPECT_TRUE(output->frame_intact());
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

const placed_map placed{{normal_matrix<double>(9, D, 21), Eigen::RowVectorXd::Constant(9, 0.4)}};

TEST(SharedGradients, AreSumsOfSeparateHeadsInFloat) { expect_sums<float>(linattn::elu_plus_one()); }
TEST(SharedGradients, AreSumsOfSeparateHeadsInDouble) { expect_sums<double>(linattn::elu_plus_one()); }
TEST(SharedGradients, AreSumsOfLogFeatures) { expect_sums<double>(linattn::exponential(), {modes[0]}); }
TEST(SharedGradients, AreSumsOfAMapWithParametersThatKnowsHeads) { expect_sums<double>(placed); }

// Tasks of a batch are whole sequences where they add to one gradient of parameters.
TEST(SharedGradients, OfParametersOfABatchAreThoseOfEverySequence) {
  using problem_type = problem<placed_map, double>;
  for (const head_sharing how : {head_sharing::interleaved, head_sharing::tiled}) {
    const problem_type p(placed, {4, 2, 4}, how, true, modes[0]);
    const std::vector<std::int32_t> offsets = {0, 20, 20, 37};
    const auto of = [&](auto& x, Index heads) { return linattn::packed(x, offsets, heads); };
    std::vector<problem_type::gradient> dmap(3, placed.make_gradient()), expected = dmap;
    matrix dq = p.q, dk = p.k, dv = p.v;
    auto ws = linattn::make_workspaces(p.attn, 4);
    linattn::vjp_causal(p.attn, {}, of(p.q, 4), of(p.k, 2), of(p.v, 4), of(p.dout, 4), {}, of(dq, 4), of(dk, 2),
                        of(dv, 4), ws, linattn::sequential(), {}, dmap);
    for (std::size_t b = 0; b < 3; ++b) {
      const Index first = offsets[b], rows = offsets[b + 1] - first;
      const auto in = [&](const matrix& x) -> matrix { return x.middleRows(first, rows); };
      matrix q = in(p.q), k = in(p.k), v = in(p.v);
      p.attn.vjp_causal(in(p.q), in(p.k), in(p.v), in(p.dout), q, k, v, ws[0], &expected[b]);
      EXPECT_TRUE(support::bitwise_equal(in(dq), q));
      EXPECT_TRUE(support::bitwise_equal(in(dk), k));
      EXPECT_TRUE(support::bitwise_equal(in(dv), v));
      EXPECT_EQ(dmap[b].W, expected[b].W);
    }
  }
}

TEST(SharedGradients, OfOtherShapesAreRefusedBeforeAnythingIsWritten) {
  const problem<linattn::elu_plus_one, float> p(linattn::elu_plus_one(), {8, 2, 4}, head_sharing::interleaved, true,
                                                modes[0]);
  using rows = row_matrix<float>;
  const rows dq = rows::Constant(keys, 8 * D, 7), dk = rows::Constant(keys, 2 * D, 7),
             dv = rows::Constant(keys, 4 * M, 7);
  const auto said = [&](const rows& dout, rows q, rows k, rows v) {
    auto ws = p.attn.make_workspace();
    std::string sentence = support::refusal([&] { p.attn.vjp(p.q, p.k, p.v, dout, q, k, v, ws); });
    for (const rows* x : {&q, &k, &v}) EXPECT_TRUE((x->array() == 7).all());
    return sentence;
  };
  EXPECT_NE(said(p.dout, dk, dk, dv).find("dq is (37, 10), expected (37, 40)"), std::string::npos);
  EXPECT_NE(said(p.dout, dq, dq, dv).find("dk is (37, 40), expected (37, 10)"), std::string::npos);
  EXPECT_NE(said(p.dout, dq, dk, dq).find("dv is (37, 40), expected (37, 28)"), std::string::npos);
  EXPECT_NE(said(p.v, dq, dk, dv).find("dout is (37, 28), expected (37, 56)"), std::string::npos);
}

}  // namespace
