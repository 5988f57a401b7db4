// One operator under test beside the oracle for it, and how its results are judged.
//
// Rounding errors are proportional to the sum of the absolute values of what is added up, not to the sum. That sum of
// sizes is computed beside the true value, by the oracle, and bounds every element on its own:
//
//   |actual - true| <= roundings * u * size            u = 2^-digits, the relative error of one rounding
//
// so that signed maps, cancelling values and single elements are all judged fairly. size = 0 means exactly equal.
#pragma once

#include <linattn/feature_maps/positive_random.hpp>
#include <linattn/feature_maps/random_fourier.hpp>
#include <linattn/linattn.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/oracle.hpp"
#include "support/oracle_for.hpp"
#include "support/sanitizer.hpp"

#include <gtest/gtest.h>
#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace support {

using Eigen::Index;

// ---- feature maps ---------------------------------------------------------------------------------------------------

/// Roundings that an element may be off by.
/// Elementwise maps: 2 ulp = 4 roundings in each feature at most, and the sums over N <= 173 tokens and C <= 65
/// features in float: 11 at worst were seen. A dropped token moves an element by 1/N, more than 1e4 roundings.
inline constexpr double elementwise_roundings = 40;
/// Random maps: the exponent |u| <= 10 is a sum of D products, and its absolute error is the feature's relative error.
/// 36 at worst were seen.
inline constexpr double random_roundings = 120;

template <class Map>
struct map_facts {
  static constexpr bool elementwise = true;
  static constexpr double roundings = elementwise_roundings;
  static constexpr double sigma = 1;  ///< of q and k
  static Map make(Index /*head_dim*/) { return Map(); }
  /// What the error of each feature is proportional to.
  static wide_vector feature_sizes(const wide_vector& phi) { return phi.cwiseAbs(); }
};
template <class T>
struct map_facts<linattn::positive_random<T>> {
  static constexpr bool elementwise = false;
  static constexpr double roundings = random_roundings;
  static constexpr double sigma = 0.5;
  static linattn::positive_random<T> make(Index head_dim) {
    return {head_dim, std::min<Index>(2 * head_dim + 1, 37), 11};
  }
  static wide_vector feature_sizes(const wide_vector& phi) { return phi.cwiseAbs(); }
};
template <class T>
struct map_facts<linattn::random_fourier<T>> {
  static constexpr bool elementwise = false;
  static constexpr double roundings = random_roundings;
  static constexpr double sigma = 0.5;
  static linattn::random_fourier<T> make(Index head_dim) {
    return {head_dim, std::min<Index>(2 * head_dim + 4, 38), 12};
  }
  /// A sine's error is not proportional to the sine, but to the amplitude.
  static wide_vector feature_sizes(const wide_vector& phi) {
    const Index m = phi.size() / 2;
    wide_vector sizes(2 * m);
    for (Index f = 0; f < 2 * m; ++f) sizes[f] = std::hypot(phi[f % m], phi[f % m + m]);
    return sizes;
  }
};

// ---- operators ------------------------------------------------------------------------------------------------------

struct shape {
  Index head_dim, value_dim, heads;
};

/// The options that are not sizes.
struct mode {
  bool normalize = true;
  linattn::denominator_policy denominator = linattn::denominator_policy::none();
  double query_scale = 1;  ///< here a multiple of 1/4, so that it is the same number in every type
};

/// An operator type under test, and how its objects are made.
template <class Map, class T, Index D = Eigen::Dynamic, Index M = D, Index H = (D == Eigen::Dynamic ? D : 1)>
struct subject {
  using map = Map;
  using scalar = T;
  using facts = map_facts<Map>;
  using attention = linattn::linear_attention<Map, linattn::additive, T, D, M, H>;
  static constexpr bool dynamic = D == Eigen::Dynamic;

  static attention make(const shape& s, const mode& m) {
    return attention({.head_dim = s.head_dim,
                      .value_dim = s.value_dim,
                      .heads = s.heads,
                      .query_scale = m.query_scale,
                      .normalize = m.normalize,
                      .denominator = m.denominator},
                     facts::make(s.head_dim));
  }

  /// Every size of {1, 2, 3, 7, 8, 9, 15, 16, 17, 64, 65} as D and as M, never the same for both.
  static std::vector<shape> shapes() {
    if (!dynamic) return {{D, M, H == Eigen::Dynamic ? 2 : H}};
    return {{1, 8, 3},   {2, 9, 1},  {3, 15, 3}, {7, 16, 1}, {8, 17, 3}, {9, 64, 1},
            {15, 65, 3}, {16, 1, 1}, {17, 2, 3}, {64, 3, 1}, {65, 7, 3}};
  }
  /// Enough to meet every kind of tail, for laws that need many calls.
  static std::vector<shape> few_shapes() {
    if (!dynamic) return shapes();
    return {{1, 2, 1}, {3, 7, 3}, {17, 9, 1}, {8, 16, 3}};
  }
  /// For the oracle alone: other pairs, and one for which fewer tokens are packed at once.
  static std::vector<shape> more_shapes() {
    std::vector<shape> all = shapes();
    if (!dynamic) return all;
    const shape others[] = {{1, 16, 1}, {2, 17, 3}, {3, 64, 1}, {7, 65, 3},  {8, 1, 1},   {9, 2, 3}, {15, 3, 1},
                            {16, 7, 3}, {17, 8, 1}, {64, 9, 1}, {65, 15, 1}, {64, 65, 8}, {4, 4, 2}};
    all.insert(all.end(), std::begin(others), std::end(others));
    return all;
  }

  static std::vector<mode> modes() {
    using policy = linattn::denominator_policy;
    if (linattn::detail::has_signed_features<Map>) {  // their denominators cross 0, so only a clamped one divides well
      return {{false}, {false, policy::none(), 0.75}, {true, policy::clamp(1)}};
    }
    return {{}, {true, policy::add(0.25), 0.75}, {true, policy::clamp(2), 1.25}, {false, policy::none(), 0.5}};
  }

  static std::string name() {
    const auto size = [](Index n) { return n == Eigen::Dynamic ? std::string("n") : std::to_string(n); };
    const std::string type = std::is_same_v<T, float> ? "float" : "double";
    return dynamic ? type + "_dynamic" : type + "_" + size(D) + "x" + size(M) + "x" + size(H);
  }
};

struct subject_names {
  template <class Subject>
  static std::string GetName(int) {
    return Subject::name();
  }
};

/// Sanitizers take the compiler half a minute an operator: they see these two of the four, and between the maps both
/// scalars, dynamic and fixed sizes.
#if defined(LINATTN_UNDER_SANITIZER)
template <class A, class B, class...>
using subjects = testing::Types<A, B>;
#else
template <class... All>
using subjects = testing::Types<All...>;
#endif

// ---- inputs and what is expected of them ----------------------------------------------------------------------------

template <class X>
wide_matrix wide(const Eigen::MatrixBase<X>& x) {
  return x.template cast<long double>();
}

/// q (Nq, H D), k (Nk, H D), v (Nk, H M).
template <class T>
struct tokens {
  row_matrix<T> q, k, v;

  tokens(const shape& s, Index queries, Index keys, double sigma, std::uint64_t seed)
      : q(normal_matrix<T>(queries, s.heads * s.head_dim, 3 * seed, sigma)),
        k(normal_matrix<T>(keys, s.heads * s.head_dim, 3 * seed + 1, sigma)),
        v(normal_matrix<T>(keys, s.heads * s.value_dim, 3 * seed + 2)) {}

  /// Coordinates in (0.1, 0.6), for which phi(q).phi(k) > 0.1 with every map: all weights count.
  static tokens positive(const shape& s, Index queries, Index keys, std::uint64_t seed) {
    tokens x(s, queries, keys, 1, seed);
    x.q = uniform_matrix<T>(queries, x.q.cols(), 3 * seed, 0.1, 0.6);
    x.k = uniform_matrix<T>(keys, x.k.cols(), 3 * seed + 1, 0.1, 0.6);
    return x;
  }
};

/// A true value and the sum of sizes that its rounding errors are proportional to.
struct expected {
  wide_matrix value, size;
};

/// S and z of every head, and the sums of sizes behind them.
struct expected_state {
  oracle_state value, size;
};

/// What one call is to give.
struct expectation {
  expected out;           ///< (Nq, H M)
  expected denominators;  ///< (Nq, H)
  expected_state state;
};

/// `sizes` gives the sizes of a vector of features.
inline expectation expect(const oracle_map& map, const oracle_map& sizes, const wide_matrix& q, const wide_matrix& k,
                          const wide_matrix& v, const oracle_options& options, const expected_state* initial) {
  oracle_options undivided = options;
  undivided.normalize = false;
  const oracle_result truth = oracle_recurrent(map, q, k, v, options, initial ? &initial->value : nullptr);
  const oracle_result terms =
      oracle_recurrent(sizes, q, k, wide_matrix(v.cwiseAbs()), undivided, initial ? &initial->size : nullptr);

  expectation e = {{truth.out, terms.out}, {truth.denominators, terms.denominators}, {truth.state, terms.state}};
  const Index value_dim = v.cols() / options.heads;
  for (Index i = 0; options.normalize && i < truth.out.rows(); ++i) {
    for (Index j = 0; j < truth.out.cols(); ++j) {
      // d(n / d) = dn / d - (n / d) dd / d
      const Index h = j / value_dim;
      const long double divisor = std::abs(options.denominator(truth.denominators(i, h)));
      long double& size = e.out.size(i, j);
      size += std::abs(truth.out(i, j)) * terms.denominators(i, h);
      size = divisor == 0 ? 0.0L : size / divisor;
    }
  }
  return e;
}

/// |actual - true| <= roundings u size, element by element.
template <class A>
testing::AssertionResult near(const Eigen::MatrixBase<A>& actual_expression, const wide_matrix& value,
                              const wide_matrix& size, double roundings) {
  using T = typename A::Scalar;
  const row_matrix<T> actual = actual_expression;
  if (actual.rows() != value.rows() || actual.cols() != value.cols()) {
    return testing::AssertionFailure() << detail::shapes(actual, value);
  }
  const long double u = std::ldexp(1.0L, -std::numeric_limits<T>::digits);
  for (Index i = 0; i < actual.rows(); ++i) {
    for (Index j = 0; j < actual.cols(); ++j) {
      const long double error = std::abs(static_cast<long double>(actual(i, j)) - value(i, j));
      if (finite(classify(actual(i, j))) && finite(classify(value(i, j))) && error <= roundings * u * size(i, j)) {
        continue;
      }
      return testing::AssertionFailure() << error / (u * size(i, j)) << " roundings of the terms' size " << size(i, j)
                                         << ", allowed are " << roundings << "; "
                                         << detail::element(i, j, actual(i, j), value(i, j));
    }
  }
  return testing::AssertionSuccess();
}

/// One operator, its workspace, and the oracle for it.
template <class Subject>
struct trial {
  using T = typename Subject::scalar;
  using facts = typename Subject::facts;
  using attention = typename Subject::attention;
  using state_type = typename attention::state_type;
  using matrix = row_matrix<T>;

  shape size;
  mode how;
  attention attn;
  typename attention::workspace_type ws;
  oracle_map oracle;
  oracle_map oracle_sizes;  ///< the sizes of its features
  oracle_options truth;

  trial(const shape& s, const mode& m)
      : size(s),
        how(m),
        attn(Subject::make(s, m)),
        ws(attn.make_workspace()),
        oracle(oracle_for(attn.feature_map())),
        oracle_sizes(sizes_of(oracle.queries), sizes_of(oracle.keys)) {
    truth.heads = s.heads;
    truth.query_scale = static_cast<long double>(m.query_scale);
    truth.normalize = m.normalize;
    truth.denominator = oracle_for(m.denominator);
  }

  std::string text() const {
    std::ostringstream out;
    out << "D = " << size.head_dim << ", M = " << size.value_dim << ", H = " << size.heads
        << (how.normalize ? ", normalised" : ", not normalised") << ", denominator policy "
        << static_cast<int>(how.denominator.how) << ", query_scale " << how.query_scale;
    return out.str();
  }

  tokens<T> inputs(Index queries, Index keys, std::uint64_t seed) const {
    return tokens<T>(size, queries, keys, facts::sigma, seed);
  }
  tokens<T> inputs(Index n, std::uint64_t seed) const { return inputs(n, n, seed); }
  tokens<T> positive_inputs(Index n, std::uint64_t seed) const { return tokens<T>::positive(size, n, n, seed); }

  Index out_cols() const { return size.heads * size.value_dim; }
  matrix empty_out(Index rows) const { return matrix::Constant(rows, out_cols(), T(-99)); }

  expectation causal(const tokens<T>& x, const expected_state* initial = nullptr) const {
    return expect_of(x, true, initial);
  }
  expectation noncausal(const tokens<T>& x, const expected_state* initial = nullptr) const {
    return expect_of(x, false, initial);
  }

  testing::AssertionResult near(const Eigen::Ref<const matrix>& actual, const expected& e) const {
    return support::near(actual, e.value, e.size, facts::roundings);
  }
  /// Two computed results: each may be off.
  testing::AssertionResult agree(const Eigen::Ref<const matrix>& a, const Eigen::Ref<const matrix>& b,
                                 const expected& e) const {
    return support::near(a, wide(b), e.size, 2 * facts::roundings);
  }
  /// Rows (C) of a state as they are meant, whatever they are scaled by.
  template <class X>
  static matrix unscaled(const state_type& s, Index head, const X& rows) {
    matrix x = rows;
    if constexpr (attention::rule.log_scaled) {
      for (Index c = 0; c < x.rows(); ++c) {
        const T scale = std::exp(s.log_scale(head)[c]);  // 0 before the first key
        x.row(c) *= scale;
      }
    }
    return x;
  }
  testing::AssertionResult near(const state_type& s, const expectation& e) const {
    for (Index h = 0; h < size.heads; ++h) {
      const auto head = static_cast<std::size_t>(h);
      if (const auto kv = near(unscaled(s, h, s.kv(h)), {e.state.value.s[head], e.state.size.s[head]}); !kv) {
        return testing::AssertionFailure() << "S of head " << h << ": " << kv.message();
      }
      if (const auto z = near(matrix(unscaled(s, h, s.k_sum(h).transpose()).transpose()),
                              {e.state.value.z[head], e.state.size.z[head]});
          !z) {
        return testing::AssertionFailure() << "z of head " << h << ": " << z.message();
      }
    }
    return testing::AssertionSuccess();
  }

  /// S_0 and z_0 for the oracle, written into `s` through its views. z_0 > 0 where the denominator is to be positive.
  expected_state random_initial(state_type& s, std::uint64_t seed) const {
    expected_state initial;
    const bool any_sign = linattn::detail::has_signed_features<typename Subject::map>;
    for (Index h = 0; h < size.heads; ++h) {
      const auto head_seed = 100 * seed + static_cast<std::uint64_t>(h);
      s.kv(h) = normal_matrix<T>(attn.features(), size.value_dim, head_seed);
      if constexpr (attention::rule.log_scaled) s.log_scale(h).setZero();
      s.k_sum(h) = any_sign ? normal_matrix<T>(1, attn.features(), head_seed + 50)
                            : uniform_matrix<T>(1, attn.features(), head_seed + 50, 0.5, 1.5);
      initial.value.s.push_back(wide(s.kv(h)));
      initial.value.z.push_back(wide(s.k_sum(h)));
      initial.size.s.push_back(wide(s.kv(h)).cwiseAbs());
      initial.size.z.push_back(wide(s.k_sum(h)).cwiseAbs());
    }
    return initial;
  }

  /// step over the rows of x, into out.
  void fold(state_type& s, const tokens<T>& x, Index first, Index rows, matrix& out) {
    for (Index t = first; t < first + rows; ++t) attn.step(s, x.q.row(t), x.k.row(t), x.v.row(t), out.row(t), ws);
  }

 private:
  expectation expect_of(const tokens<T>& x, bool is_causal, const expected_state* initial) const {
    oracle_options options = truth;
    options.causal = is_causal;
    return expect(oracle, oracle_sizes, wide(x.q), wide(x.k), wide(x.v), options, initial);
  }

  static oracle_map::function sizes_of(oracle_map::function phi) {
    return [phi](const wide_vector& x, Index position, Index head) -> wide_vector {
      return facts::feature_sizes(phi(x, position, head));
    };
  }
};

/// Micro-blocks are of 4 or 8 tokens, and 8 to 32 are packed at once: next to those numbers, and to twice those, is
/// where blocks begin and end.
inline const std::vector<Index>& awkward_lengths() {
  static const std::vector<Index> lengths = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65};
  return lengths;
}

/// f(trial) for every shape and mode, named in failures, until the first failure.
template <class Subject, class F>
void for_each_trial(const std::vector<shape>& shapes, const std::vector<mode>& modes, const F& f) {
  for (const shape& s : shapes) {
    for (const mode& m : modes) {
      trial<Subject> t(s, m);
      SCOPED_TRACE(t.text());
      f(t);
      if (testing::Test::HasFailure()) return;
    }
  }
}

}  // namespace support
