// The O(N^2) references against numbers of independent implementations, and against the equations.
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/oracle_for.hpp"
#include "support/reference_data.hpp"

#include <linattn/reference.hpp>

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using linattn::attention_weights;
using linattn::kernel_attention;
using linattn::reference_options;
using linattn::row_matrix;
using linattn::softmax_attention;
using support::attention_inputs;
using support::tolerance;

constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// sim = exp(q.k), which with q scaled by 1/sqrt(D) is the softmax kernel.
constexpr auto exp_similarity = [](const auto& q, const auto& k) { return std::exp(q.dot(k)); };

/// A key mask of one's own: std::vector<bool> has no bools to take a span of.
class mask {
 public:
  template <class Keep>
  mask(Eigen::Index keys, Keep keep) : m_size(static_cast<std::size_t>(keys)), m_keep(new bool[m_size]) {
    for (Eigen::Index j = 0; j < keys; ++j) m_keep[static_cast<std::size_t>(j)] = keep(j);
  }
  std::span<const bool> span() const { return {m_keep.get(), m_size}; }

 private:
  std::size_t m_size;
  std::unique_ptr<bool[]> m_keep;
};

/// The sentence a call throws.
template <class F>
std::string sentence(F&& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

/// Rows `keep(j)` of x.
template <class X, class Keep>
X compacted(const X& x, Keep keep) {
  X out(0, x.cols());
  for (Eigen::Index j = 0; j < x.rows(); ++j) {
    if (!keep(j)) continue;
    out.conservativeResize(out.rows() + 1, Eigen::NoChange);
    out.row(out.rows() - 1) = x.row(j);
  }
  return out;
}

template <class T>
class Reference : public testing::Test {};
using float_types = testing::Types<float, double>;
TYPED_TEST_SUITE(Reference, float_types);

// ---- other people's numbers
// ------------------------------------------------------------------------------------------

TYPED_TEST(Reference, CausalSoftmaxEqualsPyTorch) {
  using T = TypeParam;
  const auto c = support::reference_case::load("softmax_causal_02_grad");
  const auto heads = static_cast<Eigen::Index>(c.number("H"));
  for (Eigen::Index b = 0; b < static_cast<Eigen::Index>(c.number("B")); ++b) {
    const auto out = softmax_attention<T>(c.tokens<float>("q", b), c.tokens<float>("k", b), c.tokens<float>("v", b),
                                          {.heads = heads, .causal = true});
    EXPECT_TRUE(support::close(out, c.tokens<double>("o", b), tolerance<T>::relative_rms)) << "batch element " << b;
  }
}

TYPED_TEST(Reference, MaskedSoftmaxEqualsPyTorchAndIsZeroWithoutKeys) {
  using T = TypeParam;
  const auto c = support::reference_case::load("softmax_noncausal_07_allmasked_grad");
  const auto heads = static_cast<Eigen::Index>(c.number("H"));
  for (Eigen::Index b = 0; b < static_cast<Eigen::Index>(c.number("B")); ++b) {
    const auto k = c.tokens<float>("k", b);
    const auto length = static_cast<Eigen::Index>(c.array("key_lengths").values[static_cast<std::size_t>(b)]);
    const mask keep(k.rows(), [&](Eigen::Index j) { return j < length; });
    const auto out = softmax_attention<T>(c.tokens<float>("q", b), k, c.tokens<float>("v", b),
                                          {.heads = heads, .scale = c.number("scale"), .key_mask = keep.span()});
    EXPECT_TRUE(support::close(out, c.tokens<double>("o", b), tolerance<T>::relative_rms)) << "batch element " << b;
    if (length == 0) {
      EXPECT_TRUE(support::all_zero(out));
    }
  }
}

TYPED_TEST(Reference, KernelAttentionEqualsFastTransformers) {
  using T = TypeParam;
  for (const char* name : {"ft_causal_03", "ft_noncausal_02", "ft_recurrent_02"}) {
    const auto c = support::reference_case::load(name);
    const auto heads = static_cast<Eigen::Index>(c.number("H"));
    const bool causal = name != std::string("ft_noncausal_02");
    for (Eigen::Index b = 0; b < static_cast<Eigen::Index>(c.number("B")); ++b) {
      const auto k = c.tokens<float>("k", b);
      const auto length = c.has("key_lengths")
                              ? static_cast<Eigen::Index>(c.array("key_lengths").values[static_cast<std::size_t>(b)])
                              : k.rows();
      const mask keep(k.rows(), [&](Eigen::Index j) { return j < length; });
      const auto out = kernel_attention<T>(linattn::elu_plus_one(), c.tokens<float>("q", b), k, c.tokens<float>("v", b),
                                           {.heads = heads,
                                            .causal = causal,
                                            .denominator = linattn::denominator_policy::add(c.number("eps")),
                                            .key_mask = keep.span()});
      EXPECT_TRUE(support::close(out, c.tokens<double>("o", b), tolerance<T>::relative_rms)) << name << ", " << b;
    }
  }
}

TEST(OracleData, EqualsFastTransformersStateIncluded) {
  const auto c = support::reference_case::load("ft_recurrent_02");
  support::oracle_options options;
  options.heads = static_cast<Eigen::Index>(c.number("H"));
  options.causal = true;
  options.denominator = {support::oracle_denominator::guard::add, 1e-6L};
  for (Eigen::Index b = 0; b < static_cast<Eigen::Index>(c.number("B")); ++b) {
    const auto r = support::oracle_recurrent(support::oracle_elu_plus_one(), c.tokens<float>("q", b),
                                             c.tokens<float>("k", b), c.tokens<float>("v", b), options);
    EXPECT_TRUE(support::close(r.out, c.tokens<double>("o", b), tolerance<double>::relative_rms));
    for (Eigen::Index h = 0; h < options.heads; ++h) {
      const auto i = static_cast<std::size_t>(h);
      EXPECT_TRUE(support::close(r.state.s[i], c.head<double>("S", b, h), tolerance<double>::relative_rms));
      EXPECT_TRUE(support::close(r.state.z[i], c.head<double>("Z", b, h), tolerance<double>::relative_rms));
    }
  }
}

// ---- the equations
// ---------------------------------------------------------------------------------------------------

TYPED_TEST(Reference, SoftmaxIsTheExpSimilarity) {  // eqs. 2 and 3
  using T = TypeParam;
  const attention_inputs<T> x(9, 13, 2 * 5, 2 * 3, 1);
  const auto softmax = softmax_attention(x.q, x.k, x.v, {.heads = 2});
  const auto kernel = kernel_attention(exp_similarity, x.q, x.k, x.v, {.heads = 2, .scale = 1 / std::sqrt(5.0)});
  EXPECT_TRUE(support::close(softmax, kernel, tolerance<T>::relative_rms));
}

TYPED_TEST(Reference, CausalIsAnAdditiveMaskOfMinusInfinity) {  // eqs. 8 and 9
  LINATTN_NEEDS_NAN();
  using T = TypeParam;
  constexpr Eigen::Index n = 12, head_dim = 5;
  const attention_inputs<T> x(n, head_dim, 3, 2);
  row_matrix<T> logits = x.q * x.k.transpose() / std::sqrt(T(head_dim));  // (N, N)
  for (Eigen::Index i = 0; i < n; ++i) {
    for (Eigen::Index j = i + 1; j < n; ++j) logits(i, j) += -std::numeric_limits<T>::infinity();
  }
  row_matrix<T> weights = logits.array().exp();
  for (Eigen::Index i = 0; i < n; ++i) weights.row(i) /= weights.row(i).sum();
  const row_matrix<T> expected = weights * x.v;
  EXPECT_TRUE(support::close(softmax_attention(x.q, x.k, x.v, {.causal = true}), expected, tolerance<T>::relative_rms));
  EXPECT_TRUE(support::close(attention_weights(x.q, x.k, {.causal = true}), weights, tolerance<T>::relative_rms));
}

TYPED_TEST(Reference, CausalRowsAreShorterSequences) {
  using T = TypeParam;
  const attention_inputs<T> x(8, 2 * 4, 2 * 3, 3);
  const reference_options causal{.heads = 2, .causal = true}, all{.heads = 2};
  const auto softmax = softmax_attention(x.q, x.k, x.v, causal);
  const auto kernel = kernel_attention(linattn::elu_plus_one(), x.q, x.k, x.v, causal);
  for (Eigen::Index i = 0; i < 8; ++i) {
    const auto q = x.q.middleRows(i, 1);
    const auto k = x.k.topRows(i + 1);
    const auto v = x.v.topRows(i + 1);
    EXPECT_TRUE(support::close(softmax.row(i), softmax_attention(q, k, v, all), tolerance<T>::relative_rms));
    EXPECT_TRUE(support::close(kernel.row(i), kernel_attention(linattn::elu_plus_one(), q, k, v, all),
                               tolerance<T>::relative_rms));
  }
}

TYPED_TEST(Reference, AFeatureMapIsTheSimilarityOfItsFeatures) {  // eq. 4
  using T = TypeParam;
  const attention_inputs<T> x(7, 10, 2 * 5, 2 * 3, 4);
  const auto check = [&](const auto& map) {
    using map_type = std::decay_t<decltype(map)>;
    const reference_options options{.heads = 2, .normalize = !linattn::detail::has_signed_features<map_type>};
    const auto by_map = kernel_attention(map, x.q, x.k, x.v, options);
    const auto by_similarity = kernel_attention(linattn::feature_similarity<map_type>(map), x.q, x.k, x.v, options);
    EXPECT_TRUE(support::close(by_map, by_similarity, tolerance<T>::relative_rms));
    const auto oracle =
        support::oracle_quadratic(support::oracle_for(map), x.q, x.k, x.v, {2, false, 1, options.normalize, {}, 0});
    EXPECT_TRUE(support::close(by_map, oracle.out, tolerance<T>::relative_rms));
  };
  check(linattn::elu_plus_one());
  check(linattn::identity());
  check(linattn::relu());
  check(linattn::squared_relu());
  check(linattn::exponential());
  check(linattn::positive_random<T>(5, 9, 11));
  check(linattn::random_fourier<T>(5, 10, 12));
}

TYPED_TEST(Reference, EqualsTheOracleInEveryOption) {
  using T = TypeParam;
  const attention_inputs<T> x(9, 2 * 4, 2 * 3, 5);
  using policy = linattn::denominator_policy;
  for (const bool causal : {false, true}) {
    for (const bool normalize : {false, true}) {
      for (const policy& guard : {policy::none(), policy::add(0.5), policy::clamp(3)}) {
        const auto out = kernel_attention(
            linattn::elu_plus_one(), x.q, x.k, x.v,
            {.heads = 2, .causal = causal, .scale = 0.75, .normalize = normalize, .denominator = guard});
        const auto oracle = support::oracle_quadratic(support::oracle_elu_plus_one(), x.q, x.k, x.v,
                                                      {2, causal, 0.75L, normalize, support::oracle_for(guard), 0});
        EXPECT_TRUE(support::close(out, oracle.out, tolerance<T>::relative_rms));
      }
    }
  }
}

TYPED_TEST(Reference, WeightsAreRowStochasticAndTimesVIsTheOutput) {
  using T = TypeParam;
  const attention_inputs<T> x(9, 9, 5, 3, 6);
  const mask keep(9, [](Eigen::Index j) { return j % 3 != 1; });
  const auto check = [&](const row_matrix<T>& weights, const row_matrix<T>& out) {
    EXPECT_TRUE(support::close(weights.rowwise().sum(), Eigen::Matrix<T, Eigen::Dynamic, 1>::Ones(9),
                               tolerance<T>::relative_rms));
    EXPECT_GE(weights.minCoeff(), T(0));
    EXPECT_TRUE(support::close(weights * x.v, out, tolerance<T>::relative_rms));
  };
  for (const bool causal : {false, true}) {
    for (const bool masked : {false, true}) {
      const reference_options o{.causal = causal, .key_mask = masked ? keep.span() : std::span<const bool>()};
      check(attention_weights(x.q, x.k, o), softmax_attention(x.q, x.k, x.v, o));
      check(attention_weights(exp_similarity, x.q, x.k, o), kernel_attention(exp_similarity, x.q, x.k, x.v, o));
      check(attention_weights(linattn::elu_plus_one(), x.q, x.k, o),
            kernel_attention(linattn::elu_plus_one(), x.q, x.k, x.v, o));
      if (masked) {
        EXPECT_TRUE(support::all_zero(attention_weights(x.q, x.k, o).col(1)));
      }
      if (causal) {
        const row_matrix<T> above = attention_weights(x.q, x.k, o).template triangularView<Eigen::StrictlyUpper>();
        EXPECT_TRUE(support::all_zero(above));
      }
    }
  }
}

TYPED_TEST(Reference, PackedHeadsAreSeparateHeads) {
  using T = TypeParam;
  constexpr Eigen::Index heads = 3, head_dim = 4, value_dim = 5;
  const attention_inputs<T> x(6, 8, heads * head_dim, heads * value_dim, 7);
  const auto softmax = softmax_attention(x.q, x.k, x.v, {.heads = heads});
  const auto kernel = kernel_attention(linattn::elu_plus_one(), x.q, x.k, x.v, {.heads = heads});
  for (Eigen::Index h = 0; h < heads; ++h) {
    const auto q = x.q.middleCols(h * head_dim, head_dim);
    const auto k = x.k.middleCols(h * head_dim, head_dim);
    const auto v = x.v.middleCols(h * value_dim, value_dim);
    EXPECT_TRUE(support::close(softmax.middleCols(h * value_dim, value_dim), softmax_attention(q, k, v),
                               tolerance<T>::relative_rms));
    EXPECT_TRUE(support::close(kernel.middleCols(h * value_dim, value_dim),
                               kernel_attention(linattn::elu_plus_one(), q, k, v), tolerance<T>::relative_rms));
  }
}

TYPED_TEST(Reference, EvaluatesInTheTypeItIsAskedFor) {
  using T = TypeParam;
  const attention_inputs<float> x(9, 5, 3, 8);
  const auto wide = [](const auto& m) -> row_matrix<T> { return m.template cast<T>(); };
  const auto out = softmax_attention<T>(x.q, x.k, x.v);
  static_assert(std::is_same_v<decltype(out), const row_matrix<T>>);
  EXPECT_TRUE(support::close(out, softmax_attention(wide(x.q), wide(x.k), wide(x.v)), tolerance<T>::relative_rms));
  EXPECT_TRUE(support::close(kernel_attention<T>(linattn::elu_plus_one(), x.q, x.k, x.v),
                             kernel_attention(linattn::elu_plus_one(), wide(x.q), wide(x.k), wide(x.v)),
                             tolerance<T>::relative_rms));
}

TEST(ReferenceTypes, HalfIsEvaluatedInFloat) {
  const attention_inputs<float> x(6, 4, 3, 9);
  const auto half = [](const row_matrix<float>& m) { return row_matrix<Eigen::half>(m.cast<Eigen::half>()); };
  const auto narrow = [&](const row_matrix<float>& m) -> row_matrix<float> { return half(m).cast<float>(); };
  EXPECT_TRUE(support::same_bits(softmax_attention(half(x.q), half(x.k), half(x.v)),
                                 softmax_attention(narrow(x.q), narrow(x.k), narrow(x.v))));
}

TEST(ReferenceTypes, ViewsAndTransposedColumnMajorMatricesAreAccepted) {
  const attention_inputs<float> x(6, 4, 3, 10);
  const auto expected = softmax_attention(x.q, x.k, x.v);
  const Eigen::MatrixXf q = x.q.transpose(), k = x.k.transpose(), v = x.v.transpose();
  EXPECT_TRUE(support::same_bits(softmax_attention(q.transpose(), k.transpose(), v.transpose()), expected));
  const linattn::matrix_view<const float> q_view(x.q), k_view(x.k), v_view(x.v);
  EXPECT_TRUE(support::same_bits(softmax_attention(q_view, k_view, v_view), expected));
}

// ---- stability and special values
// ------------------------------------------------------------------------------------

TYPED_TEST(Reference, LogitsOfTenThousandAreFinite) {
  using T = TypeParam;
  row_matrix<T> q(3, 1), k(4, 1), v(4, 2);
  q << T(1), T(-1), T(0);
  k << T(1e4), T(-1e4), T(1e4), T(0);
  v << T(1), T(10), T(2), T(20), T(3), T(30), T(4), T(40);
  row_matrix<T> expected(3, 2);
  expected << T(2), T(20), T(2), T(20), T(2.5), T(25);  // the mean of rows 0 and 2; row 1 alone; the mean of all
  EXPECT_TRUE(support::close(softmax_attention(q, k, v, {.scale = 1}), expected, tolerance<T>::relative_rms));
  EXPECT_TRUE(support::all_finite(attention_weights(q, k, {.scale = 1})));
}

TYPED_TEST(Reference, AddingAConstantToEveryLogitChangesNothing) {
  using T = TypeParam;
  const attention_inputs<T> x(6, 5, 3, 11);
  row_matrix<T> q(6, 6), k(6, 6);
  q << x.q, row_matrix<T>::Ones(6, 1);
  k << x.k, row_matrix<T>::Constant(6, 1, T(-500));
  // A logit near 500 is known to 2^-15 in float: that error, not the shift, is what the exponential shows.
  const double rounding_of_the_logits = 500 * static_cast<double>(std::numeric_limits<T>::epsilon());
  EXPECT_TRUE(support::close(softmax_attention(q, k, x.v, {.scale = 1}), softmax_attention(x.q, x.k, x.v, {.scale = 1}),
                             rounding_of_the_logits));
}

TYPED_TEST(Reference, ARowThatSeesNoKeyIsZero) {
  using T = TypeParam;
  const attention_inputs<T> x(4, 4, 2 * 3, 2 * 2, 12);
  const mask none(4, [](Eigen::Index) { return false; });
  const mask not_the_first_two(4, [](Eigen::Index j) { return j >= 2; });
  using policy = linattn::denominator_policy;
  EXPECT_TRUE(support::all_zero(softmax_attention(x.q, x.k, x.v, {.heads = 2, .key_mask = none.span()})));
  for (const policy& guard : {policy::none(), policy::add(1e-6), policy::clamp(1e-6)}) {
    EXPECT_TRUE(support::all_zero(kernel_attention(linattn::elu_plus_one(), x.q, x.k, x.v,
                                                   {.heads = 2, .denominator = guard, .key_mask = none.span()})));
  }
  const reference_options o{.heads = 2, .causal = true, .key_mask = not_the_first_two.span()};
  const auto out = softmax_attention(x.q, x.k, x.v, o);
  EXPECT_TRUE(support::all_zero(out.topRows(2)));
  EXPECT_TRUE(support::same_bits(out.row(2), x.v.row(2))) << "the only key it sees";
  EXPECT_TRUE(support::all_zero(kernel_attention(linattn::elu_plus_one(), x.q, x.k, x.v, o).topRows(2)));
}

TYPED_TEST(Reference, MaskedIsDeletedWhateverItHolds) {
  using T = TypeParam;
  const attention_inputs<T> clean(7, 9, 2 * 3, 2 * 2, 13);
  const auto keep = [](Eigen::Index j) { return j != 0 && j != 4 && j != 8; };
  const mask keep_mask(9, keep);
  const row_matrix<T> k = compacted(clean.k, keep), v = compacted(clean.v, keep);
  for (const T garbage : {T(nan), std::numeric_limits<T>::infinity(), T(1e30)}) {
    attention_inputs<T> x = clean;
    for (Eigen::Index j = 0; j < 9; ++j) {
      if (keep(j)) continue;
      x.k.row(j).setConstant(garbage);
      x.v.row(j).setConstant(garbage);
    }
    const reference_options masked{.heads = 2, .key_mask = keep_mask.span()}, deleted{.heads = 2};
    EXPECT_TRUE(support::close(softmax_attention(x.q, x.k, x.v, masked), softmax_attention(x.q, k, v, deleted),
                               tolerance<T>::relative_rms));
    EXPECT_TRUE(support::close(kernel_attention(linattn::elu_plus_one(), x.q, x.k, x.v, masked),
                               kernel_attention(linattn::elu_plus_one(), x.q, k, v, deleted),
                               tolerance<T>::relative_rms));
  }
}

TYPED_TEST(Reference, AZeroDenominatorGivesZero) {
  using T = TypeParam;
  const attention_inputs<T> x(3, 4, 2, 2, 14);
  const row_matrix<T> negative = row_matrix<T>::Constant(3, 2, T(-1));
  EXPECT_TRUE(support::all_zero(kernel_attention(linattn::relu(), negative, x.k, x.v)));
  EXPECT_TRUE(support::all_zero(attention_weights(linattn::relu(), negative, x.k)));
  row_matrix<T> q(1, 2), k(1, 2), v(1, 1);
  q << T(1), T(-1);
  k << T(1), T(1);
  v << T(3);
  EXPECT_TRUE(support::all_zero(kernel_attention(linattn::identity(), q, k, v))) << "a signed denominator of 0";
}

TYPED_TEST(Reference, NaNStaysInTheRowsThatSeeIt) {
  LINATTN_NEEDS_NAN();
  using T = TypeParam;
  const attention_inputs<T> clean(6, 4, 3, 15);
  const reference_options causal{.causal = true};
  const auto both = [&](const attention_inputs<T>& x) {
    return std::array<row_matrix<T>, 2>{softmax_attention(x.q, x.k, x.v, causal),
                                        kernel_attention(linattn::elu_plus_one(), x.q, x.k, x.v, causal)};
  };
  const auto expected = both(clean);
  for (std::size_t which = 0; which < 2; ++which) {
    attention_inputs<T> x = clean;
    x.q(2, 1) = T(nan);
    const auto query = both(x)[which];
    EXPECT_TRUE(support::all_nan(query.row(2)));
    EXPECT_TRUE(support::same_bits(query.topRows(2), expected[which].topRows(2)));
    EXPECT_TRUE(support::same_bits(query.bottomRows(3), expected[which].bottomRows(3)));
    x = clean;
    x.k(3, 0) = T(nan);
    const auto key = both(x)[which];
    EXPECT_TRUE(support::all_nan(key.bottomRows(3)));
    EXPECT_TRUE(support::same_bits(key.topRows(3), expected[which].topRows(3)));
    x = clean;
    x.v(3, 1) = T(nan);
    const auto value = both(x)[which];
    EXPECT_TRUE(support::all_nan(value.col(1).bottomRows(3)));
    EXPECT_TRUE(support::all_finite(value.col(0)));
    EXPECT_TRUE(support::same_bits(value.topRows(3), expected[which].topRows(3)));
  }
}

TYPED_TEST(Reference, EmptyInputsAreDefined) {
  using T = TypeParam;
  const attention_inputs<T> x(3, 4, 2, 2, 16);
  const row_matrix<T> none(0, 2);
  EXPECT_EQ(softmax_attention(none, x.k, x.v).rows(), 0);
  EXPECT_EQ(softmax_attention(none, x.k, x.v).cols(), 2);
  EXPECT_TRUE(support::all_zero(softmax_attention(x.q, none, none)));
  EXPECT_EQ(softmax_attention(x.q, none, none).rows(), 3);
  EXPECT_TRUE(support::all_zero(kernel_attention(linattn::elu_plus_one(), x.q, none, none)));
  EXPECT_EQ(softmax_attention(none, none, none, {.causal = true}).rows(), 0);
  EXPECT_EQ(attention_weights(x.q, none).cols(), 0);
  EXPECT_EQ(kernel_attention(linattn::elu_plus_one(), x.q, x.k, row_matrix<T>(4, 0)).cols(), 0);
}

// ---- maps that ask where a token stands
// ------------------------------------------------------------------------------

/// phi = (1, position + 10 head) for keys, (1, 100 (position + 10 head)) for queries: kernel 1 + 100 p_q p_k.
struct position_map {
  static constexpr Eigen::Index dimension(Eigen::Index) { return 2; }
  template <class T>
  void forward_queries(const linattn::const_tile<T>& x, linattn::tile<T>& phi, linattn::tile_position where) const {
    write(x.rows(), phi, where, T(100));
  }
  template <class T>
  void forward_keys(const linattn::const_tile<T>& x, linattn::tile<T>& phi, linattn::tile_position where) const {
    write(x.rows(), phi, where, T(1));
  }

 private:
  template <class T>
  static void write(Eigen::Index rows, linattn::tile<T>& phi, linattn::tile_position where, T factor) {
    for (Eigen::Index r = 0; r < rows; ++r) {
      phi(r, 0) = T(1);
      phi(r, 1) = factor * static_cast<T>(where.first_position + r + 10 * where.head);
    }
  }
};

TEST(ReferencePositions, QueriesStandWhereTheLastKeysDo) {
  const row_matrix<double> q = row_matrix<double>::Zero(2, 1), k = row_matrix<double>::Zero(3, 1);
  row_matrix<double> expected(2, 3);
  expected << 1, 101, 201, 1, 201, 401;  // queries 1 and 2, keys 0, 1, 2
  EXPECT_TRUE(support::same_bits(attention_weights(position_map(), q, k, {.normalize = false}), expected));
}

TEST(ReferencePositions, MaskedKeysDoNotCount) {
  const row_matrix<double> x = row_matrix<double>::Zero(4, 1);
  const mask keep(4, [](Eigen::Index j) { return j != 1; });
  const auto weights =
      attention_weights(position_map(), x, x, {.causal = true, .normalize = false, .key_mask = keep.span()});
  EXPECT_EQ(weights(3, 3), 401) << "two kept keys stand before it";
  EXPECT_EQ(weights(3, 2), 201);
  EXPECT_EQ(weights(3, 1), 0);
  EXPECT_EQ(weights(2, 2), 101);
}

TEST(ReferencePositions, AMapIsToldItsHead) {
  const row_matrix<double> x = row_matrix<double>::Zero(1, 2);
  row_matrix<double> v(1, 2);
  v << 1, 1;
  const auto out = kernel_attention(position_map(), x, x, v, {.heads = 2, .normalize = false});
  EXPECT_EQ(out(0, 0), 1);
  EXPECT_EQ(out(0, 1), 1 + 100 * 10 * 10);
  EXPECT_EQ(attention_weights(position_map(), x, x, {.normalize = false}, 1)(0, 0), 1 + 100 * 10 * 10);
}

// ---- errors
// ----------------------------------------------------------------------------------------------------------

TEST(ReferenceErrors, SentencesNameTheFunctionAndBothSizes) {
  const attention_inputs<float> x(3, 5, 6, 4, 17);
  const auto map = linattn::elu_plus_one();
  EXPECT_EQ(sentence([&] { softmax_attention(x.q, x.k, x.v, {.causal = true}); }),
            "linattn::softmax_attention: q is (3, 6) but k is (5, 6); causal attention needs as many keys as queries");
  EXPECT_EQ(sentence([&] { kernel_attention(map, x.q, x.k, x.v, {.causal = true}); }),
            "linattn::kernel_attention: q is (3, 6) but k is (5, 6); causal attention needs as many keys as queries");
  EXPECT_EQ(sentence([&] { attention_weights(map, x.q, x.k, {.causal = true}); }),
            "linattn::attention_weights: q is (3, 6) but k is (5, 6); causal attention needs as many keys as queries");
  EXPECT_EQ(sentence([&] { softmax_attention(x.q, x.v, x.v); }),
            "linattn::softmax_attention: k is (5, 4) but q is (3, 6); their columns must agree");
  EXPECT_EQ(sentence([&] { softmax_attention(x.q, x.k, x.v.topRows(4)); }),
            "linattn::softmax_attention: v is (4, 4) but k is (5, 6); their rows must agree");
  EXPECT_EQ(sentence([&] { softmax_attention(x.q, x.k, x.v, {.heads = 4}); }),
            "linattn::softmax_attention: q is (3, 6), whose columns do not divide into 4 heads");
  EXPECT_EQ(sentence([&] { softmax_attention(x.q, x.k, x.v, {.heads = 3}); }),
            "linattn::softmax_attention: v is (5, 4), whose columns do not divide into 3 heads");
  EXPECT_EQ(sentence([&] { softmax_attention(x.q, x.k, x.v, {.heads = 0}); }),
            "linattn::softmax_attention: heads is 0; at least one is needed");
  EXPECT_EQ(sentence([&] { softmax_attention(x.q.leftCols(0), x.k.leftCols(0), x.v); }),
            "linattn::softmax_attention: q is (3, 0); a head needs at least one column");
}

TEST(ReferenceErrors, AMapMadeForOtherHeadsIsRefused) {
  const attention_inputs<float> x(3, 6, 4, 21);
  const linattn::positive_random<float> map(5, 8, 1);
  EXPECT_EQ(sentence([&] { kernel_attention(map, x.q, x.k, x.v); }),
            "linattn::kernel_attention: the feature map was made for head_dim 5 but a head of q has 6 columns");
  EXPECT_EQ(sentence([&] { attention_weights(map, x.q, x.k); }),
            "linattn::attention_weights: the feature map was made for head_dim 5 but a head of q has 6 columns");
  EXPECT_EQ(sentence([&] { attention_weights(linattn::feature_similarity(map), x.q, x.k); }),
            "linattn::feature_similarity: the feature map was made for head_dim 5 but a head of q has 6 columns");
}

TEST(ReferenceErrors, AMaskNeedsOneEntryAKey) {
  const attention_inputs<float> x(3, 5, 6, 4, 18);
  const mask four(4, [](Eigen::Index) { return true; });
  EXPECT_EQ(sentence([&] { softmax_attention(x.q, x.k, x.v, {.key_mask = four.span()}); }),
            "linattn::softmax_attention: key_mask has 4 entries but k is (5, 6); every key needs one");
}

TEST(ReferenceErrors, SoftmaxRefusesWhatItCannotMean) {
  const attention_inputs<float> x(3, 6, 4, 19);
  const std::string reason =
      "softmax weights are always divided by their plain sum; normalize and denominator are for kernel_attention";
  EXPECT_EQ(sentence([&] { softmax_attention(x.q, x.k, x.v, {.normalize = false}); }),
            "linattn::softmax_attention: " + reason);
  EXPECT_EQ(sentence([&] { attention_weights(x.q, x.k, {.denominator = linattn::denominator_policy::add(1e-6)}); }),
            "linattn::attention_weights: " + reason);
}

TEST(ReferenceErrors, WeightsAreThoseOfOneHead) {
  const attention_inputs<float> x(3, 6, 4, 20);
  EXPECT_EQ(sentence([&] { attention_weights(x.q, x.k, {.heads = 2}); }),
            "linattn::attention_weights: these are the weights of one head, but heads is 2; pass "
            "q.middleCols(h * D, D) and k.middleCols(h * D, D)");
}

}  // namespace
