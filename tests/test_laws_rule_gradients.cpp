// Law 10 for the update rules: <dout, J d> = <vjp(dout), d> for random directions d of every input, of the initial
// state and of the map's parameters, by central differences in double.
#include <linattn/linattn.hpp>

#include "support/gradient_maps.hpp"
#include "support/inputs.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>

namespace {

using Eigen::Index;
using linattn::row_matrix;
using support::normal_matrix;

template <class Rule>
constexpr bool has_decays = requires(typename Rule::template inputs<int> x) {
  x.log_decay;
};
template <class Rule>
constexpr bool has_beta = requires(typename Rule::template inputs<int> x) {
  x.beta;
};

/// Central differences with this step are off by h^2 f''' / 6 = 1e-11 f''' and by u f / h = 1e-11 f.
constexpr double difference_step = 1e-5;
/// Relative to the gradient with respect to all inputs. Differences give 1e-9; a lost token or a wrong factor shows in
/// the first digits.
constexpr double difference_agreement = 1e-7;

template <class Rule, class Map, Index M>
class experiment {
  using attention = linattn::linear_attention<Map, Rule, double>;
  using matrix = row_matrix<double>;
  using state = typename attention::state_type;
  static constexpr Index D = 5, H = 2;

 public:
  experiment(const Map& map, Index n)
      : m_map(map),
        m_attn(make(map)),
        m_q(normal_matrix<double>(n, H * D, 1, 0.5)),
        m_k(normal_matrix<double>(n, H * D, 2, 0.3)),
        m_v(normal_matrix<double>(n, H * M, 3)),
        m_log_decay(-0.3 * normal_matrix<double>(n, decays(), 8).cwiseAbs()),
        m_beta(support::uniform_matrix<double>(n, H, 9, 0, 0.2)),
        m_dout(normal_matrix<double>(n, H * M, 4)),
        m_s0(m_attn.make_state(7)),
        m_ds(m_attn.make_state()) {
    for (Index h = 0; h < H; ++h) {
      m_s0.kv(h) = normal_matrix<double>(m_attn.features(), M, 5 + std::uint64_t(h));
      m_ds.kv(h) = normal_matrix<double>(m_attn.features(), M, 7 + std::uint64_t(h));
    }
  }

  void expect_agreement() {
    auto ws = m_attn.make_workspace();
    auto d = linattn::rule_gradients<double, Rule>{{m_q, m_k, m_v}, {}};
    if constexpr (has_decays<Rule>) d.inputs.log_decay = m_log_decay;
    if constexpr (has_beta<Rule>) d.inputs.beta = m_beta;
    state ds0 = m_ds;
    std::optional<typename attention::parameter_gradient> dmap;
    if constexpr (linattn::detail::has_parameters<Map>) dmap = m_map.make_gradient();
    m_attn.vjp_causal(m_s0, m_q, m_k, m_v, inputs(), m_dout, ds0, d.dq, d.dk, d.dv, d.views(), ws,
                      dmap ? &*dmap : nullptr);
    m_size = std::sqrt(d.dq.squaredNorm() + d.dk.squaredNorm() + d.dv.squaredNorm());
    compare("q", m_q, d.dq);
    compare("k", m_k, d.dk);
    compare("v", m_v, d.dv);
    if constexpr (has_decays<Rule>) compare("log_decay", m_log_decay, d.inputs.log_decay);
    if constexpr (has_beta<Rule>) compare("beta", m_beta, d.inputs.beta);
    for (Index h = 0; h < H; ++h) {
      const matrix S = normal_matrix<double>(m_attn.features(), M, 14);
      const matrix at = m_s0.kv(h);
      compare("S0", ds0.kv(h).cwiseProduct(S).sum(), [&](double step) { m_s0.kv(h) = at + step * S; });
    }
    if constexpr (linattn::detail::has_parameters<Map>) {
      const Eigen::MatrixXd W = normal_matrix<double>(m_map.W.rows(), m_map.W.cols(), 16);
      m_size = dmap->W.norm();
      compare("the map's parameters", dmap->W.cwiseProduct(W).sum(), [&](double step) {
        m_attn = make(Map{m_map.W + step * W, m_map.b});
      });
    }
  }

 private:
  static attention make(const Map& map) {
    const linattn::options o = {.head_dim = D, .value_dim = M, .heads = H, .query_scale = 0.8};
    if constexpr (Rule::traits.fixed_decay) {
      return attention(o, map, Rule({-0.1, -0.4}));
    } else {
      return attention(o, map);
    }
  }
  Index decays() const { return Rule::traits.decay == linattn::decay_kind::per_feature ? H * m_attn.features() : H; }
  typename attention::inputs inputs() const {
    typename attention::inputs x;
    if constexpr (has_decays<Rule>) x.log_decay = m_log_decay;
    if constexpr (has_beta<Rule>) x.beta = m_beta;
    return x;
  }
  double loss() const {
    state s = m_s0;
    double sum = m_attn.forward_causal(s, m_q, m_k, m_v, inputs()).cwiseProduct(m_dout).sum();
    for (Index h = 0; h < H; ++h) sum += s.kv(h).cwiseProduct(m_ds.kv(h)).sum();
    return sum;
  }
  void compare(const char* what, matrix& x, const matrix& gradient) {
    const matrix at = x, direction = normal_matrix<double>(x.rows(), x.cols(), 11);
    compare(what, gradient.cwiseProduct(direction).sum(), [&](double step) { x = at + step * direction; });
  }
  template <class Move>
  void compare(const char* what, double expected, const Move& move) const {
    move(difference_step);
    const double above = loss();
    move(-difference_step);
    const double below = loss();
    move(0);
    EXPECT_LE(std::abs((above - below) / (2 * difference_step) - expected), difference_agreement * m_size)
        << "with respect to " << what;
  }

  Map m_map;
  attention m_attn;
  matrix m_q, m_k, m_v, m_log_decay, m_beta, m_dout;
  state m_s0, m_ds;
  double m_size = 0;
};

template <class Rule, Index M = 3, class Map>
void expect_law_10(const Map& map) {
  for (const Index n : {1, 4, 5, 33, 66}) {
    SCOPED_TRACE("N = " + std::to_string(n));
    experiment<Rule, Map, M>(map, n).expect_agreement();
  }
}

constexpr auto feature = linattn::decay_kind::per_feature;
using positions = support::turning_map;  // by tiles, each token with its place, queries unlike keys

TEST(RuleLaw10, Decay) { expect_law_10<linattn::decay>(positions()); }
TEST(RuleLaw10, GatedPerHead) { expect_law_10<linattn::gated<>>(positions()); }
TEST(RuleLaw10, GatedPerFeature) { expect_law_10<linattn::gated<feature>>(positions()); }
TEST(RuleLaw10, Delta) { expect_law_10<linattn::delta>(positions()); }
TEST(RuleLaw10, GatedDeltaPerHead) { expect_law_10<linattn::gated_delta<>>(positions()); }
TEST(RuleLaw10, GatedDeltaPerFeature) { expect_law_10<linattn::gated_delta<feature>>(positions()); }
TEST(RuleLaw10, MapsInsideTheEngine) {
  expect_law_10<linattn::gated<>>(linattn::elu_plus_one());
  expect_law_10<linattn::gated_delta<>>(linattn::elu_plus_one());
}
TEST(RuleLaw10, MapsWithParametersAndMoreFeaturesThanCoordinates) {
  const support::learned_map map{0.4 * normal_matrix<double>(9, 5, 21), Eigen::RowVectorXd::Constant(9, 0.4)};
  expect_law_10<linattn::gated<feature>>(map);
  expect_law_10<linattn::gated_delta<feature>, 7>(map);  // M > D
}

}  // namespace
