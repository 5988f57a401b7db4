// Law 10: <dout, J d> = <vjp(dout), d> for random directions d of every input, initial state and parameter, by central
// differences in double; for every map, causal or not, normalised or not.
#include <linattn/linattn.hpp>

#include "support/compare.hpp"
#include "support/gradient_maps.hpp"
#include "support/inputs.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

namespace {

using Eigen::Index;
using linattn::denominator_policy;
using matrix = linattn::row_matrix<double>;
using support::normal_matrix;

/// Central differences with this step are off by h^2 f''' / 6 = 1e-11 f''' and by u f / h = 1e-11 f.
constexpr double difference_step = 1e-5;
/// Relative to the gradient with respect to all inputs. Differences give 1e-9; a lost token or a wrong factor shows in
/// the first digits.
constexpr double difference_agreement = 1e-7;

constexpr Index B = linattn::detail::causal_block;
/// Around a micro-block, and beyond a tile of 32 tokens.
const std::vector<Index> lengths = {1, 2, 3, B - 1, B, B + 1, 2 * B + 1, 33, 65};

struct mode {
  const char* name;
  bool normalize;
  denominator_policy policy;
};
/// Each clamp holds for some rows of random inputs and not for others.
const std::vector<mode> positive_modes = {{"normalised", true, denominator_policy::none()},
                                          {"eps added", true, denominator_policy::add(0.5)},
                                          {"clamped", true, denominator_policy::clamp(20)},
                                          {"not normalised", false, denominator_policy::none()}};
/// Denominators of signed features come near 0, where differences say little: only where they are kept from it.
const std::vector<mode> signed_modes = {{"clamped", true, denominator_policy::clamp(1)},
                                        {"not normalised", false, denominator_policy::none()}};

/// One operator, its inputs, and the loss <dout, out> + <dS, S_N> + <dz, z_N>.
template <class Map>
class experiment {
 public:
  using attention = linattn::linear_attention<Map, linattn::additive, double>;
  using state = typename attention::state_type;
  static constexpr Index D = 5, M = 3, H = 2;

  experiment(const Map& map, const mode& how, bool causal, Index n)
      : m_how(how),
        m_causal(causal),
        m_attn(make(map)),
        m_q(normal_matrix<double>(n, H * D, 1, 0.7)),
        m_k(normal_matrix<double>(causal ? n : n + 3, H * D, 2, 0.7)),
        m_v(normal_matrix<double>(m_k.rows(), H * M, 3)),
        m_dout(normal_matrix<double>(n, H * M, 4)),
        m_s0(m_attn.make_state(7)),
        m_ds(m_attn.make_state()) {
    if (!causal) return;
    m_attn.absorb(m_s0, normal_matrix<double>(3, H * D, 5, 0.7), normal_matrix<double>(3, H * M, 6));
    for (Index h = 0; h < H; ++h) {
      if constexpr (attention::rule.log_scaled) m_ds.log_scale(h) = normal_matrix<double>(1, m_attn.features(), 18);
      m_ds.kv(h) = normal_matrix<double>(m_attn.features(), M, 7 + std::uint64_t(h));
      m_ds.k_sum(h) = normal_matrix<double>(1, m_attn.features(), 9 + std::uint64_t(h));
    }
  }

  void expect_agreement() {
    auto ws = m_attn.make_workspace();
    matrix dq = m_q, dk = m_k, dv = m_v;
    auto dmap = make_gradient();
    state ds0 = m_ds;
    if (m_causal) {
      m_attn.vjp_causal(m_s0, m_q, m_k, m_v, m_dout, ds0, dq, dk, dv, ws, dmap ? &*dmap : nullptr);
    } else {
      m_attn.vjp(m_q, m_k, m_v, m_dout, dq, dk, dv, ws, dmap ? &*dmap : nullptr);
    }
    m_size = std::sqrt(dq.squaredNorm() + dk.squaredNorm() + dv.squaredNorm());
    const matrix a = normal_matrix<double>(dq.rows(), dq.cols(), 11),
                 b = normal_matrix<double>(dk.rows(), dk.cols(), 12),
                 c = normal_matrix<double>(dv.rows(), dv.cols(), 13);
    compare("q", dq.cwiseProduct(a).sum(), [&](double h) { return loss(m_attn, m_q + h * a, m_k, m_v, m_s0); });
    compare("k", dk.cwiseProduct(b).sum(), [&](double h) { return loss(m_attn, m_q, m_k + h * b, m_v, m_s0); });
    compare("v", dv.cwiseProduct(c).sum(), [&](double h) { return loss(m_attn, m_q, m_k, m_v + h * c, m_s0); });
    if (m_causal) {
      for (Index h = 0; h < H; ++h) {
        const matrix S = normal_matrix<double>(m_attn.features(), M, 14), z = normal_matrix<double>(1, S.rows(), 15);
        compare("S0", (scales(ds0, h).asDiagonal() * ds0.kv(h)).cwiseProduct(S).sum(), [&](double step) {
          state s = m_s0;
          s.kv(h) += step * scales(s, h).cwiseInverse().asDiagonal() * S;
          return loss(m_attn, m_q, m_k, m_v, s);
        });
        compare("z0", (ds0.k_sum(h) * scales(ds0, h).asDiagonal()).cwiseProduct(z).sum(), [&](double step) {
          state s = m_s0;
          s.k_sum(h) += step * z * scales(s, h).cwiseInverse().asDiagonal();
          return loss(m_attn, m_q, m_k, m_v, s);
        });
      }
    }
    if constexpr (linattn::detail::has_parameters<Map>) {
      const Map& map = m_attn.feature_map();
      const Eigen::MatrixXd W = normal_matrix<double>(map.W.rows(), map.W.cols(), 16);
      const Eigen::RowVectorXd bias = normal_matrix<double>(1, map.b.size(), 17);
      m_size = std::sqrt(dmap->W.squaredNorm() + dmap->b.squaredNorm());
      compare("the map's parameters", dmap->W.cwiseProduct(W).sum() + dmap->b.cwiseProduct(bias).sum(), [&](double h) {
        return loss(make(Map{map.W + h * W, map.b + h * bias}), m_q, m_k, m_v, m_s0);
      });
    }
  }

 private:
  attention make(const Map& map) const {
    return attention({.head_dim = D,
                      .value_dim = M,
                      .heads = H,
                      .query_scale = 0.8,
                      .normalize = m_how.normalize,
                      .denominator = m_how.policy},
                     map);
  }
  auto make_gradient() const {
    if constexpr (linattn::detail::has_parameters<Map>) {
      return std::optional(m_attn.feature_map().make_gradient());
    } else {
      return std::optional<linattn::no_parameters>();
    }
  }
  double loss(const attention& attn, const matrix& q, const matrix& k, const matrix& v, const state& s0) const {
    if (!m_causal) return attn.forward(q, k, v).cwiseProduct(m_dout).sum();
    state s = s0;
    double sum = attn.forward_causal(s, q, k, v).cwiseProduct(m_dout).sum();
    for (Index h = 0; h < H; ++h) {
      const Eigen::VectorXd by = scales(s, h).cwiseProduct(scales(m_ds, h));  // (C)
      sum += (by.asDiagonal() * s.kv(h)).cwiseProduct(m_ds.kv(h)).sum();
      sum += (s.k_sum(h) * by.asDiagonal()).cwiseProduct(m_ds.k_sum(h)).sum();
    }
    return sum;
  }
  /// What the rows of one head's state stand for (C): 1, or exp(log_scale).
  Eigen::VectorXd scales(const state& s, Index h) const {
    if constexpr (attention::rule.log_scaled) {
      return s.log_scale(h).transpose().array().exp();
    } else {
      return Eigen::VectorXd::Ones(s.features());
    }
  }

  template <class F>
  void compare(const char* what, double expected, const F& loss_at) const {
    const double difference = (loss_at(difference_step) - loss_at(-difference_step)) / (2 * difference_step);
    EXPECT_LE(std::abs(difference - expected), difference_agreement * m_size) << "with respect to " << what;
  }

  mode m_how;
  bool m_causal;
  attention m_attn;
  matrix m_q, m_k, m_v, m_dout;
  state m_s0, m_ds;
  double m_size = 0;
};

template <class Map>
void expect_law_10(const Map& map, const std::vector<mode>& modes = positive_modes) {
  for (const mode& how : modes) {
    for (const bool causal : {true, false}) {
      for (const Index n : lengths) {
        SCOPED_TRACE(std::string(how.name) + (causal ? ", causal, N = " : ", N = ") + std::to_string(n));
        experiment<Map>(map, how, causal, n).expect_agreement();
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

constexpr Index D = experiment<support::any_map>::D;

TEST(Law10, EluPlusOneInsideTheEngine) { expect_law_10(linattn::elu_plus_one()); }
TEST(Law10, EluPlusOneByTiles) { expect_law_10(support::any_map(linattn::elu_plus_one(), D)); }
TEST(Law10, Exponential) { expect_law_10(support::any_log_map(linattn::exponential(), D)); }
TEST(Law10, Identity) { expect_law_10(support::any_map(linattn::identity(), D), signed_modes); }
TEST(Law10, Relu) { expect_law_10(support::any_map(linattn::relu(), D)); }
TEST(Law10, SquaredRelu) { expect_law_10(support::any_map(linattn::squared_relu(), D)); }
TEST(Law10, PositiveRandom) {
  for (const Index m : {1, 11, 37}) expect_law_10(support::any_log_map(linattn::positive_random<double>(D, m, 1), D));
}
TEST(Law10, RandomFourier) {
  for (const Index m : {1, 5, 18}) {
    expect_law_10(support::any_map(linattn::random_fourier<double>(D, 2 * m, 1), D), signed_modes);
  }
}
TEST(Law10, ParametersOfTheMap) {
  expect_law_10(support::learned_map{normal_matrix<double>(9, D, 21), Eigen::RowVectorXd::Constant(9, 0.4)});
}
TEST(Law10, MapsThatKnowPositionsAndTellQueriesFromKeys) { expect_law_10(support::turning_map()); }

}  // namespace
