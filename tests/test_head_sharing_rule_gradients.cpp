// Gradients where heads share, of the rules: against the reverse recurrences in long double of the same attention with
// separate heads, one for each head of the output, whose gradients are added up. test_head_sharing_gradients.cpp has
// maps, denominators and parameters; test_batch.cpp masks and threads, by bits.
#include <linattn/feature_maps/identity.hpp>
#include <linattn/linear_attention.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/rule_for.hpp"
#include "support/rule_gradient_oracle.hpp"
#include "support/sentinel.hpp"
#include "support/shared_heads.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <type_traits>
#include <vector>

namespace {

using Eigen::Index;
using linattn::head_sharing;
using linattn::row_matrix;
using support::wide_matrix;

/// Two tiles of tokens or more, and a ragged block; neither dimension a multiple of a register.
constexpr Index tokens = 37, D = 5;
/// Grouped and multi-query; several states of one query and key head; of few queries and many keys, of both, and where
/// neither number divides the other; and none shared.
const std::vector<support::head_counts> all_counts = {{2, 1, 1}, {6, 2, 2}, {3, 1, 1}, {1, 1, 3}, {2, 2, 6}, {4, 2, 4},
                                                      {8, 2, 4}, {2, 4, 4}, {2, 1, 4}, {3, 2, 6}, {3, 3, 3}};

/// As in test_rule_gradients.cpp, times the roundings of a few additions.
template <class T>
constexpr double bound = std::is_same_v<T, float> ? 4e-6 : 4e-13;

template <class R, class S, Index Values>
struct subject {
  using Rule = R;
  using T = S;
  static constexpr Index M = Values;
};

template <class Subject>
class SharedRuleGradients : public testing::Test {
 public:
  using Rule = typename Subject::Rule;
  using T = typename Subject::T;
  using attention = linattn::linear_attention<linattn::identity, Rule, T>;
  using state = typename attention::state_type;
  static constexpr Index M = Subject::M;
  static constexpr Index decays = Rule::traits.decay == linattn::decay_kind::per_feature ? D : 1;
  static constexpr double query_scale = 0.75;

  struct problem {
    support::head_counts n;
    head_sharing how;
    row_matrix<T> q, k, v, log_decay, beta, dout;
    attention attn;
    state s0, ds;

    problem(const support::head_counts& counts, head_sharing sharing)
        : n(counts),
          how(sharing),
          q(support::normal_matrix<T>(tokens, n.queries * D, 1)),
          k(support::normal_matrix<T>(tokens, n.keys * D, 2, 1 / std::sqrt(double(D)))),
          v(support::normal_matrix<T>(tokens, n.values * M, 3)),
          log_decay(support::uniform_matrix<T>(tokens, n.values * decays, 4, -0.5, 0)),
          beta(support::uniform_matrix<T>(tokens, n.values, 5)),
          dout(support::normal_matrix<T>(tokens, n.outputs() * M, 6)),
          attn(make()),
          s0(attn.make_state()),
          ds(attn.make_state()) {
      for (Index h = 0; h < n.values; ++h) {
        s0.kv(h) = support::normal_matrix<T>(D, M, 7 + std::uint64_t(h));
        ds.kv(h) = support::normal_matrix<T>(D, M, 27 + std::uint64_t(h));
      }
    }

    attention make() const {
      Rule rule;
      if constexpr (Rule::traits.fixed_decay) {
        for (Index s = 0; s < n.values; ++s) rule.log_decay.push_back(double(log_decay(0, s)));
      }
      return attention({.head_dim = D,
                        .value_dim = M,
                        .heads = n.queries,
                        .key_heads = n.keys,
                        .value_heads = n.values,
                        .sharing = how,
                        .query_scale = query_scale},
                       {}, rule);
    }
    typename attention::inputs inputs() const {
      typename attention::inputs x;
      if constexpr (requires { x.log_decay; }) x.log_decay = log_decay;
      if constexpr (requires { x.beta; }) x.beta = beta;
      return x;
    }

    /// Of separate heads, and what goes together of them added up.
    support::rule_gradients expected(bool with_states) const {
      const Index all = n.outputs();
      const auto state_of = [&](Index h) { return n.state_of(how, h); };
      const auto query_of = [&](Index h) { return n.query_of(how, h); };
      const auto key_of = [&](Index h) { return n.key_of(how, h); };
      const auto repeated = [&](const row_matrix<T>& x, Index dim, const auto& from) -> wide_matrix {
        return support::heads_of(x, all, dim, from).template cast<long double>();
      };
      support::rule_inputs x;
      x.heads = all;
      x.query_scale = query_scale;
      x.q = repeated(q, D, query_of);
      x.k = repeated(k, D, key_of);
      x.v = repeated(v, M, state_of);
      x.log_decay = repeated(log_decay, decays, state_of);
      if (Rule::traits.fixed_decay) x.log_decay = wide_matrix(x.log_decay.topRows(1));
      x.beta = repeated(beta, 1, state_of);
      support::rule_state initial, last;
      std::vector<bool> counted(std::size_t(n.values), false);
      for (Index h = 0; h < all; ++h) {
        const Index s = state_of(h);
        initial.push_back(s0.kv(s).template cast<long double>());
        last.push_back(ds.kv(s).template cast<long double>());
        // One state, whose gradient comes in once.
        if (counted[std::size_t(s)]) last.back().setZero();
        counted[std::size_t(s)] = true;
      }
      support::rule_gradients g =
          support::rule_gradient_oracle(support::rule_kind_of<Rule>(), x, dout.template cast<long double>(),
                                        with_states ? &last : nullptr, with_states ? &initial : nullptr);
      g.dq = support::sums_of_heads(g.dq, n.queries, D, query_of);
      g.dk = support::sums_of_heads(g.dk, n.keys, D, key_of);
      g.dv = support::sums_of_heads(g.dv, n.values, M, state_of);
      g.dlog_decay = support::sums_of_heads(g.dlog_decay, n.values, decays, state_of);
      g.dbeta = support::sums_of_heads(g.dbeta, n.values, 1, state_of);
      support::rule_state sums(std::size_t(n.values), wide_matrix::Zero(D, M));
      for (Index h = 0; h < all; ++h) sums[std::size_t(state_of(h))] += g.dinitial[std::size_t(h)];
      g.dinitial = sums;
      return g;
    }
  };

  template <class F>
  static void for_each(const F& f) {
    for (const support::head_counts& n : all_counts) {
      for (const head_sharing how : {head_sharing::interleaved, head_sharing::tiled}) {
        SCOPED_TRACE(n.name(how));
        f(problem(n, how));
        if (testing::Test::HasFailure()) return;
      }
    }
  }
};

using gated_feature = linattn::gated<linattn::decay_kind::per_feature>;
/// Both scalars of both engines; M below and above D, of which the delta rules do different things.
using subjects = testing::Types<subject<linattn::decay, float, 7>, subject<linattn::gated<>, float, 7>,
                                subject<gated_feature, double, 3>, subject<linattn::delta, float, 3>,
                                subject<linattn::gated_delta<>, double, 7>>;
TYPED_TEST_SUITE(SharedRuleGradients, subjects);

TYPED_TEST(SharedRuleGradients, AreTheSumsOfThoseOfSeparateHeads) {
  using fixture = TestFixture;
  using scalar = typename fixture::T;
  for (const bool with_states : {true, false}) {
    SCOPED_TRACE(with_states ? "with states" : "without states");
    fixture::for_each([&](const auto& p) {
      support::framed<scalar> dq(tokens, p.q.cols()), dk(tokens, p.k.cols()), dv(tokens, p.v.cols()),
          dlog_decay(tokens, p.log_decay.cols()), dbeta(tokens, p.beta.cols());
      auto mq = dq.matrix(), mk = dk.matrix(), mv = dv.matrix(), mg = dlog_decay.matrix(), mb = dbeta.matrix();
      typename fixture::attention::input_gradients dx;
      if constexpr (requires { dx.log_decay; }) dx.log_decay = mg;
      if constexpr (requires { dx.beta; }) dx.beta = mb;
      auto ws = p.attn.make_workspace();
      auto ds = p.ds;
      if (with_states) {
        p.attn.vjp_causal(p.s0, p.q, p.k, p.v, p.inputs(), p.dout, ds, mq, mk, mv, dx, ws);
      } else {
        p.attn.vjp_causal(p.q, p.k, p.v, p.inputs(), p.dout, mq, mk, mv, dx, ws);
      }
      const support::rule_gradients e = p.expected(with_states);
      EXPECT_TRUE(support::close(mq, e.dq, bound<scalar>)) << "dq";
      EXPECT_TRUE(support::close(mk, e.dk, bound<scalar>)) << "dk";
      EXPECT_TRUE(support::close(mv, e.dv, bound<scalar>)) << "dv";
      if constexpr (requires { dx.log_decay; }) {
        EXPECT_TRUE(support::close(mg, e.dlog_decay, bound<scalar>)) << "dlog_decay";
      }
      if constexpr (requires { dx.beta; }) {
        EXPECT_TRUE(support::close(mb, e.dbeta, bound<scalar>)) << "dbeta";
      }
      for (Index h = 0; with_states && h < p.n.values; ++h) {
        EXPECT_TRUE(support::close(ds.kv(h), e.dinitial[std::size_t(h)], bound<scalar>)) << "dS_0 of head " << h;
      }
      for (const auto* output : {&dq, &dk, &dv, &dlog_decay, &dbeta}) EXPECT_TRUE(output->frame_intact());

      row_matrix<scalar> q_alone = p.q, k_alone = p.k, v_alone = p.v;
      ds = p.ds;
      if (!with_states) return;
      p.attn.vjp_causal(p.s0, p.q, p.k, p.v, p.inputs(), p.dout, ds, q_alone, k_alone, v_alone, {}, ws);
      EXPECT_TRUE(support::bitwise_equal(q_alone, row_matrix<scalar>(mq))) << "dq, gradients of the inputs left out";
      EXPECT_TRUE(support::bitwise_equal(k_alone, row_matrix<scalar>(mk))) << "dk, gradients of the inputs left out";
      EXPECT_TRUE(support::bitwise_equal(v_alone, row_matrix<scalar>(mv))) << "dv, gradients of the inputs left out";
    });
  }
}

}  // namespace
