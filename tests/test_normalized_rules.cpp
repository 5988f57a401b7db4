// normalized<Rule>: z is a column of S that a value of 1 writes, so that every result follows from Rule's with M + 1
// values, in double.
#include <linattn/batch.hpp>
#include <linattn/linattn.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <type_traits>
#include <vector>

namespace {

using Eigen::Index;
using linattn::row_matrix;
using support::normal_matrix;

using linattn::decay;
using gated = linattn::gated<>;
using gated_feature = linattn::gated<linattn::decay_kind::per_feature>;

constexpr Index H = 3;

/// Of the largest entry: sums of some hundred terms, in forward passes of a weighted mean.
template <class T>
constexpr double tolerance = std::is_same_v<T, float> ? 4e-6 : 4e-14;

struct shape {
  Index tokens, head_dim, value_dim;
};
constexpr shape shapes[] = {{1, 1, 1}, {37, 5, 3}, {70, 16, 17}, {133, 33, 40}};

/// One log-decay a head, for `decay`, and for `gated` the same of every token.
const std::vector<double> log_decays = {-0.7, -0.01, 0};

/// The arguments, in the scalar of the operator that is tested, and what Rule makes of them with a value of 1 more.
template <class Rule, class T>
struct problem {
  using tested_type = linattn::linear_attention<linattn::elu_plus_one, linattn::normalized<Rule>, T>;
  using plain_rule = std::conditional_t<Rule::traits.fixed_decay, gated, Rule>;
  using plain_type = linattn::linear_attention<linattn::elu_plus_one, plain_rule, double>;
  static constexpr bool is_gated = !Rule::traits.fixed_decay;

  shape size;
  row_matrix<T> q, k, v, g, dout;
  tested_type tested;
  plain_type plain;

  explicit problem(const shape& s)
      : size(s),
        q(normal_matrix<T>(s.tokens, H * s.head_dim, 1)),
        k(normal_matrix<T>(s.tokens, H * s.head_dim, 2)),
        v(normal_matrix<T>(s.tokens, H * s.value_dim, 3)),
        g(-normal_matrix<T>(s.tokens, H * (Rule::traits.decay == linattn::decay_kind::per_feature ? s.head_dim : 1), 4)
               .cwiseAbs()),
        dout(normal_matrix<T>(s.tokens, H * s.value_dim, 5)),
        tested({.head_dim = s.head_dim, .value_dim = s.value_dim, .heads = H}, {}, rule()),
        plain({.head_dim = s.head_dim, .value_dim = s.value_dim + 1, .heads = H, .normalize = false}) {
    for (Index h = 0; h < H && !is_gated; ++h) g.col(h).setConstant(T(log_decays[std::size_t(h)]));
  }

  static linattn::normalized<Rule> rule() {
    if constexpr (!is_gated) return {decay(log_decays)};
    return {};
  }

  template <class Operator, class U>
  typename Operator::inputs inputs_of(const row_matrix<U>& decays) const {
    typename Operator::inputs x;
    if constexpr (requires { x.log_decay; }) x.log_decay = decays;
    return x;
  }
  row_matrix<double> with_ones(const row_matrix<double>& x) const {
    row_matrix<double> all = row_matrix<double>::Ones(x.rows(), H * (size.value_dim + 1));
    for (Index h = 0; h < H; ++h) all.middleCols(h * (size.value_dim + 1), size.value_dim) = head(x, h, size.value_dim);
    return all;
  }
  static row_matrix<double> head(const row_matrix<double>& x, Index h, Index dim) { return x.middleCols(h * dim, dim); }

  /// A state that has seen the tokens once already.
  template <class Operator>
  typename Operator::state_type initial_of(const Operator& attention) const {
    using U = typename Operator::scalar;
    auto s = attention.make_state();
    auto ws = attention.make_workspace();
    const row_matrix<U> decays = g.template cast<U>();
    row_matrix<U> values = v.template cast<U>();
    if constexpr (std::is_same_v<Operator, plain_type>) values = with_ones(values);
    attention.absorb(s, row_matrix<U>(k.template cast<U>()), values, inputs_of<Operator>(decays), ws);
    return s;
  }

  /// (N, H (M + 1)): numerators and, last, denominators; from the initial state, or from nothing.
  row_matrix<double> sums(bool from_initial = false) const {
    const row_matrix<double> decays = g.template cast<double>(), values = with_ones(v.template cast<double>());
    row_matrix<double> all(values.rows(), values.cols());
    auto s = from_initial ? initial_of(plain) : plain.make_state();
    auto ws = plain.make_workspace();
    plain.forward_causal(s, row_matrix<double>(q.template cast<double>()),
                         row_matrix<double>(k.template cast<double>()), values, inputs_of<plain_type>(decays), all, ws);
    return all;
  }
  row_matrix<double> expected() const {
    const row_matrix<double> all = sums();
    row_matrix<double> out(size.tokens, H * size.value_dim);
    for (Index h = 0; h < H; ++h) {
      const row_matrix<double> part = head(all, h, size.value_dim + 1);
      out.middleCols(h * size.value_dim, size.value_dim) =
          part.leftCols(size.value_dim).array().colwise() / part.rightCols(1).col(0).array();
    }
    return out;
  }
};

template <class A, class B>
double largest_difference(const A& a, const B& b) {
  const double scale = std::max(1.0, b.cwiseAbs().maxCoeff());
  const double difference = (a.template cast<double>() - b).cwiseAbs().maxCoeff();
  return std::isfinite(difference) ? difference / scale : std::numeric_limits<double>::infinity();
}

template <class Rule, class T>
void check_forward() {
  for (const shape& size : shapes) {
    SCOPED_TRACE(testing::Message() << size.tokens << " tokens, D " << size.head_dim << ", M " << size.value_dim);
    const problem<Rule, T> p(size);
    const auto expected = p.expected();
    const auto x = p.template inputs_of<typename problem<Rule, T>::tested_type>(p.g);
    EXPECT_LE(largest_difference(p.tested.forward_causal(p.q, p.k, p.v, x), expected), tolerance<T>);

    // Step by step, in two parts that are merged, and read after.
    auto ws = p.tested.make_workspace();
    auto stepped = p.tested.make_state();
    row_matrix<T> out(size.tokens, H * size.value_dim);
    for (Index i = 0; i < size.tokens; ++i) {
      typename problem<Rule, T>::tested_type::inputs of_token;
      const row_matrix<T> g_i = p.g.row(i);
      if constexpr (problem<Rule, T>::is_gated) of_token.log_decay = g_i;
      p.tested.step({&stepped, 1}, p.q.row(i), p.k.row(i), p.v.row(i), of_token, out.row(i), ws);
    }
    EXPECT_LE(largest_difference(out, expected), tolerance<T>);
    const Index half = size.tokens / 2;
    auto first = p.tested.make_state(), later = p.tested.make_state();
    const auto absorb = [&](auto& s, Index from, Index count) {
      typename problem<Rule, T>::tested_type::inputs of_part;
      const row_matrix<T> g_part = p.g.middleRows(from, count);
      if constexpr (problem<Rule, T>::is_gated) of_part.log_decay = g_part;
      p.tested.absorb(s, p.k.middleRows(from, count), p.v.middleRows(from, count), of_part, ws);
    };
    absorb(first, 0, half);
    absorb(later, half, size.tokens - half);
    first.merge(later);
    row_matrix<T> last(1, H * size.value_dim);
    p.tested.read(first, p.q.bottomRows(1), last, ws);
    EXPECT_LE(largest_difference(last, expected.bottomRows(1)), tolerance<T>);
    for (Index h = 0; h < H; ++h) {
      EXPECT_LE(largest_difference(stepped.k_sum(h), first.k_sum(h).template cast<double>()), tolerance<T>);
    }
  }
}

TEST(NormalizedRules, AreTheRuleDividedByItsSumsOfWeights) {
  check_forward<decay, double>();
  check_forward<gated, float>();
  check_forward<gated_feature, double>();
}

/// The gradients; ds, with respect to the final state, becomes that of the initial one.
template <class Attention, class T>
auto vjp(const Attention& attn, const typename Attention::state_type& s0, const row_matrix<T>& q,
         const row_matrix<T>& k, const row_matrix<T>& v, const row_matrix<T>& g, const row_matrix<T>& dout,
         typename Attention::state_type& ds) {
  typename Attention::inputs x;
  if constexpr (requires { x.log_decay; }) {
    x.log_decay = g;
    return attn.vjp_causal(s0, q, k, v, x, dout, ds);
  } else {
    return attn.vjp_causal(s0, q, k, v, dout, ds);
  }
}

/// d/d(n_1 ... n_M, den) of <dout, n / den> is (dout, -dout.out) / den.
template <class Rule>
void check_gradients() {
  using T = double;
  for (const shape& size : shapes) {
    SCOPED_TRACE(testing::Message() << size.tokens << " tokens, D " << size.head_dim << ", M " << size.value_dim);
    const problem<Rule, T> p(size);
    const Index M = size.value_dim;
    const row_matrix<double> all = p.sums(true);
    row_matrix<double> dall(size.tokens, H * (M + 1));
    for (Index h = 0; h < H; ++h) {
      const auto n = all.middleCols(h * (M + 1), M).array();
      const Eigen::ArrayXd den = all.col(h * (M + 1) + M).array();
      const auto dn = p.dout.middleCols(h * M, M).array().colwise() / den;
      dall.middleCols(h * (M + 1), M) = dn;
      dall.col(h * (M + 1) + M) = -(dn * n).rowwise().sum() / den;
    }
    const auto values = p.with_ones(p.v);
    auto ds = p.tested.make_state();
    auto dall_of_state = p.plain.make_state();
    for (Index h = 0; h < H; ++h) {
      ds.kv(h) = normal_matrix<T>(size.head_dim, M, std::uint64_t(6 + h));
      ds.k_sum(h) = normal_matrix<T>(1, size.head_dim, std::uint64_t(16 + h));
      dall_of_state.kv(h).leftCols(M) = ds.kv(h);
      dall_of_state.kv(h).rightCols(1) = ds.k_sum(h).transpose();
    }
    const auto expected = vjp(p.plain, p.initial_of(p.plain), p.q, p.k, values, p.g, dall, dall_of_state);
    const auto found = vjp(p.tested, p.initial_of(p.tested), p.q, p.k, p.v, p.g, p.dout, ds);
    constexpr double bound = 20 * tolerance<T>;  // differences of terms that are larger than themselves
    EXPECT_LE(largest_difference(found.dq, expected.dq), bound);
    EXPECT_LE(largest_difference(found.dk, expected.dk), bound);
    for (Index h = 0; h < H; ++h) {
      EXPECT_LE(
          largest_difference(found.dv.middleCols(h * M, M), row_matrix<double>(expected.dv.middleCols(h * (M + 1), M))),
          bound);
      const row_matrix<double> dS = dall_of_state.kv(h);
      EXPECT_LE(largest_difference(ds.kv(h), row_matrix<double>(dS.leftCols(M))), bound);
      EXPECT_LE(largest_difference(ds.k_sum(h), row_matrix<double>(dS.rightCols(1).transpose())), bound);
    }
    if constexpr (problem<Rule, T>::is_gated) {
      EXPECT_LE(largest_difference(found.inputs.log_decay, expected.inputs.log_decay), bound);
    }
  }
}

TEST(NormalizedRules, HaveTheGradientsOfTheQuotient) {
  check_gradients<decay>();
  check_gradients<gated>();
  check_gradients<gated_feature>();
}

TEST(NormalizedRules, ReadSharedStatesAsTheirOwn) {
  using attention = linattn::linear_attention<linattn::elu_plus_one, linattn::normalized<gated>, float>;
  const Index N = 50, D = 9, M = 12, readers = 5;
  const attention shared({.head_dim = D, .value_dim = M, .heads = readers, .key_heads = 1, .value_heads = 1});
  const attention own({.head_dim = D, .value_dim = M, .heads = readers});
  const auto q = normal_matrix<float>(N, readers * D, 1), k = normal_matrix<float>(N, D, 2);
  const auto v = normal_matrix<float>(N, M, 3);
  const row_matrix<float> g = -normal_matrix<float>(N, 1, 4).cwiseAbs();
  const row_matrix<float> ks = k.replicate(1, readers), vs = v.replicate(1, readers), gs = g.replicate(1, readers);
  const row_matrix<float> expected = own.forward_causal(q, ks, vs, {.log_decay = gs});
  EXPECT_LE(largest_difference(shared.forward_causal(q, k, v, {.log_decay = g}), expected.cast<double>().eval()),
            tolerance<float>);
}

TEST(NormalizedRules, AcceptDraftsAsTheyStep) {
  const problem<gated_feature, double> p({13, 7, 11});
  auto s = p.initial_of(p.tested);
  auto stepped = s;
  auto ws = p.tested.make_workspace();
  auto d = p.tested.make_draft();
  row_matrix<double> out(13, H * 11), expected(13, H * 11);
  p.tested.forward_causal(s, p.q, p.k, p.v, {.log_decay = p.g}, out, d, ws);
  p.tested.forward_causal(stepped, p.q, p.k, p.v, {.log_decay = p.g}, expected, ws);
  EXPECT_LE(largest_difference(out, expected), tolerance<double>);
  p.tested.accept(s, d, 13, ws);
  for (Index h = 0; h < H; ++h) {
    EXPECT_LE(largest_difference(s.k_sum(h), stepped.k_sum(h).eval()), tolerance<double>);
    EXPECT_LE(largest_difference(s.kv(h), row_matrix<double>(stepped.kv(h))), tolerance<double>);
  }

  // Silent tokens, accepted until nothing is left.
  const row_matrix<double> silent = row_matrix<double>::Constant(13, H * 7, -1000);
  const row_matrix<double> g = row_matrix<double>::Constant(13, H * 7, -1);
  for (int i = 0; i < 12; ++i) {
    p.tested.forward_causal(s, p.q, silent, p.v, {.log_decay = g}, out, d, ws);
    p.tested.accept(s, d, 13, ws);
  }
  for (Index h = 0; h < H; ++h) {
    EXPECT_EQ(s.k_sum(h).cwiseAbs().maxCoeff(), 0);
    EXPECT_EQ(s.kv(h).cwiseAbs().maxCoeff(), 0);
  }
}

TEST(NormalizedRules, EndInZerosAfterSilence) {
  const linattn::linear_attention<linattn::elu_plus_one, linattn::normalized<decay>, double> attn(
      {.head_dim = 8, .value_dim = 8}, {}, {decay({std::log(0.97)})});
  auto s = attn.make_state();
  auto ws = attn.make_workspace();
  const row_matrix<double> one = row_matrix<double>::Ones(1, 8), none = row_matrix<double>::Zero(1000, 8);
  const row_matrix<double> featureless = row_matrix<double>::Constant(1000, 8, -1000);  // exp(-1000) is 0
  attn.absorb(s, one, one, ws);
  for (int i = 0; i < 100; ++i) attn.absorb(s, featureless, none, ws);
  EXPECT_EQ(s.k_sum(0).cwiseAbs().maxCoeff(), 0) << "not cleared";
  EXPECT_EQ(s.kv(0).cwiseAbs().maxCoeff(), 0);
  row_matrix<double> out(1, 8);
  attn.absorb(s, one, one, ws);
  for (int i = 0; i < 100000; ++i) attn.step(s, none.row(0), featureless.row(0), none.row(0), out.row(0), ws);
  EXPECT_EQ(s.k_sum(0).cwiseAbs().maxCoeff(), 0) << "not cleared by steps";
}

/// What has decayed below 2^-100 is silence, for outputs and gradients alike: 0, and never 1 / 0.
TEST(NormalizedRules, GradientsOfSilenceAreZero) {
  using attention = linattn::linear_attention<linattn::elu_plus_one, linattn::normalized<gated>, float>;
  const attention attn({.head_dim = 2, .value_dim = 1});
  const float none = -1000;  // exp(-1000) is 0
  row_matrix<float> q(2, 2), k(2, 2), v(2, 1), g(2, 1), dout(2, 1);
  q << 0, none, 0, none;
  k << 0, none, none, 0;
  v << 3, 5;
  dout << 0, 1;
  g << 0, -60;
  EXPECT_NEAR(attn.forward_causal(q, k, v, {.log_decay = g})(1), 3, 3 * tolerance<float>);
  EXPECT_NEAR(attn.vjp_causal(q, k, v, {.log_decay = g}, dout).dv(0), 1, tolerance<float>);
  for (const float log_decay : {-70.0F, -87.0F, -90.0F, -104.0F}) {
    g(1) = log_decay;
    EXPECT_EQ(attn.forward_causal(q, k, v, {.log_decay = g})(1), 0) << log_decay;
    const auto d = attn.vjp_causal(q, k, v, {.log_decay = g}, dout);
    EXPECT_TRUE(d.dq.isZero(0) && d.dk.isZero(0) && d.dv.isZero(0) && d.inputs.log_decay.isZero(0)) << log_decay;
  }
}

/// S goes with its z: a mean stays between the values, and a step finds what a pass does.
TEST(NormalizedRules, MeansOfSmallFeaturesStayMeans) {
  using attention = linattn::linear_attention<linattn::elu_plus_one, linattn::normalized<gated>, float>;
  const attention attn({.head_dim = 4, .value_dim = 1});
  constexpr Index n = 64;
  const row_matrix<float> q = row_matrix<float>::Zero(n, 4), g = row_matrix<float>::Constant(n, 1, -0.01F);
  const row_matrix<float> v = Eigen::VectorXf::LinSpaced(n, 0, n - 1);
  auto ws = attn.make_workspace();
  for (const float feature : {-60.0F, -67.0F, -69.0F, -71.0F, -75.0F}) {
    const row_matrix<float> k = row_matrix<float>::Constant(n, 4, feature);
    const row_matrix<float> out = attn.forward_causal(q, k, v, {.log_decay = g});
    row_matrix<float> stepped(n, 1);
    auto s = attn.make_state();
    for (Index i = 0; i < n; ++i) {
      attn.step(s, q.row(i), k.row(i), v.row(i), {.log_decay = g.row(i)}, stepped.row(i), ws);
    }
    EXPECT_LE(out.maxCoeff(), n - 1) << feature;
    EXPECT_LE(stepped.maxCoeff(), n - 1) << feature;
    if (feature > -69.3F) {
      EXPECT_LE(largest_difference(stepped, out.cast<double>().eval()), tolerance<float>);
    }
  }
}

}  // namespace
