// Seeded inputs for the update rules, in the scalar under test, and the same numbers for the oracle.
//
//   for (const support::gate_set& gates : support::gate_sets()) {
//     const support::rule_tokens<float> x(kind, {.tokens = 65, .features = 17, .value_dim = 9}, seed, {gates});
//     ... x.q, x.k, x.v, x.log_decay, x.beta give what support::rule_oracle(kind, x.wide()) says
#pragma once

#include "support/inputs.hpp"
#include "support/rule_oracle.hpp"

#include <Eigen/Core>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace support {

/// Where log-decays come from.
struct gate_set {
  std::string name = "realistic";
  std::vector<double> values = {};  ///< none: -|N(0, 1)| / 4, as a model has them
  bool in_turn = false;             ///< token by token; else each log-decay is drawn
};

/// Realistic gates and extreme ones: none, next to none, all that float can hold at once, wiping, and mixtures. Where
/// infinities may be assumed away there are none.
inline std::vector<gate_set> gate_sets() {
  std::vector<gate_set> sets = {{},
                                {"zero", {0}},
                                {"minus_1e_8", {-1e-8}},
                                {"minus_5", {-5}},
                                {"minus_20", {-20}},
                                {"minus_90", {-90}},
                                {"zero_and_minus_90_in_turn", {0, -90}, true},
                                {"mixed", {0, -1e-8, -0.1, -5, -20, -90}}};
#if !defined(__FAST_MATH__)
  constexpr double infinity = std::numeric_limits<double>::infinity();
  sets.push_back({"minus_infinity", {-infinity}});
  sets.push_back({"minus_1e_8_and_minus_infinity_in_turn", {-1e-8, -1e-8, -infinity}, true});
  sets.push_back({"mixed_with_infinity", {0, -1e-8, -0.1, -0.1, -5, -20, -90, -infinity}});
#endif
  return sets;
}

enum class key_pattern {
  distinct,
  repeated,  ///< all of a head's tokens have one key
  two,       ///< even tokens one key, odd ones another
  zeros,     ///< every third key is 0
};

inline constexpr key_pattern all_key_patterns[] = {key_pattern::distinct, key_pattern::repeated, key_pattern::two,
                                                   key_pattern::zeros};

enum class beta_pattern {
  up_to_one,  ///< uniform in (0, 1)
  up_to_two,  ///< uniform in (0, 2): eigenvalues of I - beta k k^T in (-1, 1)
  corners,    ///< 0, 1 and 2, drawn
};

inline constexpr beta_pattern all_beta_patterns[] = {beta_pattern::up_to_one, beta_pattern::up_to_two,
                                                     beta_pattern::corners};

struct rule_shape {
  Eigen::Index tokens = 0, features = 0, value_dim = 0, heads = 1;
};

struct rule_patterns {
  gate_set gates = {};
  key_pattern keys = key_pattern::distinct;
  beta_pattern betas = beta_pattern::up_to_one;
};

/// The inputs that a rule has; the others are empty. q, v, u ~ N(0, 1). Keys of rules that correct have length 1, as
/// these rules need; a = -kappa and b = kappa * U(0, 1), |kappa| = 1, as in RWKV-7. Other keys ~ N(0, 1).
template <class T>
struct rule_tokens {
  rule_kind kind = rule_kind::additive;
  rule_shape shape;
  row_matrix<T> q, k;       ///< (N, H C)
  row_matrix<T> v;          ///< (N, H M)
  row_matrix<T> log_decay;  ///< fixed: (1, H); per head: (N, H); per feature: (N, H C)
  row_matrix<T> beta;       ///< (N, H)
  row_matrix<T> a, b;       ///< (N, H C)
  row_matrix<T> bonus;      ///< (1, H C)
  double query_scale = 1;   ///< for the oracle; a multiple of 1/4 is the same number in every type

  rule_tokens(rule_kind rule, const rule_shape& size, std::uint64_t seed, const rule_patterns& patterns = {})
      : kind(rule), shape(size) {
    const rule_traits traits = traits_of(kind);
    const Eigen::Index n = size.tokens, features = size.heads * size.features;
    std::uint64_t stream = 16 * seed;
    q = normal_matrix<T>(n, features, stream++);
    k = keys(stream++, patterns.keys, traits.corrects);
    v = normal_matrix<T>(n, size.heads * size.value_dim, stream++);
    using decays = rule_traits::decay_shape;
    if (traits.decay != decays::none) {
      log_decay = draw_gates(traits.decay == decays::fixed ? 1 : n,
                             traits.decay == decays::per_feature ? features : size.heads, stream++, patterns.gates);
    }
    if (traits.corrects) beta = draw_betas(stream++, patterns.betas);
    if (traits.transforms) {
      const row_matrix<T> kappa = keys(stream++, patterns.keys, true);
      a = -kappa;
      b = kappa.cwiseProduct(uniform_matrix<T>(n, features, stream++));
    }
    if (traits.reads_first) bonus = normal_matrix<T>(1, features, stream++);
  }

  /// The same numbers for the oracle.
  rule_inputs wide() const {
    const auto cast = [](const row_matrix<T>& x) -> wide_matrix { return x.template cast<long double>(); };
    return {shape.heads, static_cast<long double>(query_scale),
            cast(q),     cast(k),
            cast(v),     cast(log_decay),
            cast(beta),  cast(a),
            cast(b),     cast(bonus)};
  }

  /// Tokens first ... first + count - 1.
  rule_tokens rows(Eigen::Index first, Eigen::Index count) const {
    rule_tokens part = *this;
    part.shape.tokens = count;
    for (const auto member : per_token()) {
      if ((this->*member).size() > 0) part.*member = (this->*member).middleRows(first, count);
    }
    return part;
  }

  /// Makes token t the one that leaves every state as it is: k = v = a = b = 0, log_decay = 0, beta = 0. A fixed decay
  /// has no such token.
  void pad(Eigen::Index t) {
    for (const auto member : per_token()) {
      if (member != &rule_tokens::q && (this->*member).size() > 0) (this->*member).row(t).setZero();
    }
  }

  /// The tokens t with kept[t], alone.
  rule_tokens where(const std::vector<bool>& kept) const {
    rule_tokens part = *this;
    Eigen::Index count = 0;
    for (Eigen::Index t = 0; t < shape.tokens; ++t) {
      if (!kept.at(static_cast<std::size_t>(t))) continue;
      for (const auto member : per_token()) {
        if ((this->*member).size() > 0) (part.*member).row(count) = (this->*member).row(t);
      }
      ++count;
    }
    return part.rows(0, count);
  }

 private:
  /// The inputs with a row per token.
  std::vector<row_matrix<T> rule_tokens::*> per_token() const {
    std::vector<row_matrix<T> rule_tokens::*> members = {&rule_tokens::q,    &rule_tokens::k, &rule_tokens::v,
                                                         &rule_tokens::beta, &rule_tokens::a, &rule_tokens::b};
    if (traits_of(kind).decay != rule_traits::decay_shape::fixed) members.push_back(&rule_tokens::log_decay);
    return members;
  }

  row_matrix<T> keys(std::uint64_t seed, key_pattern pattern, bool unit) const {
    row_matrix<double> x = normal_matrix<double>(shape.tokens, shape.heads * shape.features, seed);
    for (Eigen::Index t = 0; t < shape.tokens; ++t) {
      if (pattern == key_pattern::repeated) x.row(t) = x.row(0).eval();
      if (pattern == key_pattern::two) x.row(t) = x.row(t % 2).eval();
      for (Eigen::Index h = 0; h < shape.heads; ++h) {
        auto key = x.row(t).segment(h * shape.features, shape.features);
        // |k| <= 1 after rounding to T, too: at beta = 2 a longer key would grow the state.
        if (unit && key.norm() > 0) key /= key.norm() * (1 + double(std::numeric_limits<T>::epsilon()));
      }
      if (pattern == key_pattern::zeros && t % 3 == 1) x.row(t).setZero();
    }
    return x.template cast<T>();
  }

  static row_matrix<T> draw_gates(Eigen::Index rows, Eigen::Index cols, std::uint64_t seed, const gate_set& gates) {
    random_bits random(seed);
    row_matrix<T> g(rows, cols);
    const auto count = static_cast<Eigen::Index>(gates.values.size());
    for (Eigen::Index t = 0; t < rows; ++t) {
      for (Eigen::Index j = 0; j < cols; ++j) {
        if (count == 0) {
          g(t, j) = static_cast<T>(-0.25 * std::abs(random.normal()));
        } else {
          // A fixed decay has one row: there "in turn" goes over the heads.
          const Eigen::Index turn = rows == 1 ? j : t;
          const Eigen::Index which = gates.in_turn ? turn % count : random.below(count);
          g(t, j) = static_cast<T>(gates.values[static_cast<std::size_t>(which)]);
        }
      }
    }
    return g;
  }

  row_matrix<T> draw_betas(std::uint64_t seed, beta_pattern pattern) const {
    const double high = pattern == beta_pattern::up_to_one ? 1 : 2;
    row_matrix<T> drawn = uniform_matrix<T>(shape.tokens, shape.heads, seed, 0, high);
    if (pattern == beta_pattern::corners) {
      random_bits random(seed);
      drawn = drawn.unaryExpr([&](T) { return static_cast<T>(random.below(3)); }).eval();
    }
    return drawn;
  }
};

/// S_0 of every head, (C, M), N(0, 1).
template <class T>
std::vector<row_matrix<T>> rule_initial_state(const rule_shape& shape, std::uint64_t seed) {
  std::vector<row_matrix<T>> s;
  for (Eigen::Index h = 0; h < shape.heads; ++h) {
    s.push_back(normal_matrix<T>(shape.features, shape.value_dim, 1000 * seed + static_cast<std::uint64_t>(h)));
  }
  return s;
}

/// A state of any scalar for the oracle.
template <class T>
rule_state wide(const std::vector<row_matrix<T>>& s) {
  rule_state result;
  for (const auto& head : s) result.push_back(head.template cast<long double>());
  return result;
}

}  // namespace support
