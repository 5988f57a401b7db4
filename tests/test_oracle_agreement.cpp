// Law 11 over every pair of awkward sizes, many numbers of features, and against the library's own O(N^2) reference.
#include "support/trial.hpp"

#include <gtest/gtest.h>

namespace {

using Eigen::Index;
using support::row_matrix;

template <class T>
class OracleAgreement : public testing::Test {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(OracleAgreement, scalars);

const Index sizes[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 64, 65};

/// forward_causal and step, forward and absorb and read, all against the oracle.
template <class Trial>
testing::AssertionResult agrees(Trial& t, Index queries, Index keys, std::uint64_t seed) {
  using matrix = typename Trial::matrix;
  const auto x = t.inputs(queries, seed);
  const auto e = t.causal(x);
  auto s = t.attn.make_state();
  if (auto r = t.near(t.attn.forward_causal(s, x.q, x.k, x.v), e.out); !r) return r << " (forward_causal)";
  if (auto r = t.near(s, e); !r) return r << " (forward_causal)";
  s.reset();
  matrix stepped = t.empty_out(queries);
  t.fold(s, x, 0, queries, stepped);
  if (auto r = t.near(stepped, e.out); !r) return r << " (step)";
  if (auto r = t.near(s, e); !r) return r << " (step)";

  const auto uneven = t.inputs(queries, keys, seed);
  const auto e_uneven = t.noncausal(uneven);
  s.reset();
  t.attn.absorb(s, uneven.k, uneven.v);
  if (auto r = t.near(s, e_uneven); !r) return r << " (absorb)";
  if (auto r = t.near(t.attn.read(s, uneven.q), e_uneven.out); !r) return r << " (read)";
  if (auto r = t.near(t.attn.forward(uneven.q, uneven.k, uneven.v), e_uneven.out); !r) return r << " (forward)";
  return testing::AssertionSuccess();
}

TYPED_TEST(OracleAgreement, EveryPairOfSizes) {
  using subject = support::subject<linattn::elu_plus_one, TypeParam>;
  const auto modes = subject::modes();
  std::size_t turn = 0;
  for (const Index head_dim : sizes) {
    for (const Index value_dim : sizes) {
      for (const Index heads : {1, 3}) {
        support::trial<subject> t({head_dim, value_dim, heads}, modes[turn % modes.size()]);
        ASSERT_TRUE(agrees(t, 1 + Index(turn * 7 % 11), Index(turn * 5 % 13), turn)) << t.text() << ", turn " << turn;
        ++turn;
      }
    }
  }
}

/// positive_random with any number of features, as an operator under test.
template <class T, Index C>
struct with_features : support::subject<linattn::positive_random<T>, T> {
  static typename with_features::attention make(const support::shape& s, const support::mode& m) {
    return typename with_features::attention({.head_dim = s.head_dim,
                                              .value_dim = s.value_dim,
                                              .heads = s.heads,
                                              .query_scale = m.query_scale,
                                              .normalize = m.normalize,
                                              .denominator = m.denominator},
                                             {s.head_dim, C, 13});
  }
};

template <class T, Index... C>
void check_features() {
  const auto check = [](auto count) {
    for (const Index heads : {1, 3}) {
      support::trial<with_features<T, count>> t({5, 3, heads}, {});
      ASSERT_EQ(t.attn.features(), Index(count));
      ASSERT_TRUE(agrees(t, 9, 10, 18)) << t.text() << ", C = " << Index(count);
    }
  };
  (check(std::integral_constant<Index, C>()), ...);
}

TYPED_TEST(OracleAgreement, AnyNumberOfFeatures) { check_features<TypeParam, 1, 2, 31, 256, 4095, 4096>(); }

// kernel_attention(map, ...) is the quadratic form of the same operator.
template <class T, class Map>
void check_reference() {
  using subject = support::subject<Map, T>;
  for (const support::mode& m : subject::modes()) {
    support::trial<subject> t({9, 7, 3}, m);
    const auto x = t.inputs(33, 19);
    for (const bool causal : {true, false}) {
      const auto reference = linattn::kernel_attention<double>(t.attn.feature_map(), x.q, x.k, x.v,
                                                               {.heads = t.size.heads,
                                                                .causal = causal,
                                                                .scale = m.query_scale,
                                                                .normalize = m.normalize,
                                                                .denominator = m.denominator});
      const auto e = causal ? t.causal(x) : t.noncausal(x);
      const support::expected against = {support::wide(reference), e.out.size};
      EXPECT_TRUE(t.near(causal ? t.attn.forward_causal(x.q, x.k, x.v) : t.attn.forward(x.q, x.k, x.v), against))
          << t.text() << (causal ? ", causal" : ", not causal");
      EXPECT_TRUE(support::near(reference, e.out.value, e.out.size, subject::facts::roundings)) << t.text();
    }
  }
}

TYPED_TEST(OracleAgreement, KernelAttentionIsTheQuadraticForm) { check_reference<TypeParam, linattn::elu_plus_one>(); }

TEST(OracleAgreementInDouble, KernelAttentionIsTheQuadraticFormOfEveryMap) {
  check_reference<double, linattn::identity>();
  check_reference<double, linattn::relu>();
  check_reference<double, linattn::squared_relu>();
  check_reference<double, linattn::exponential>();
  check_reference<double, linattn::positive_random<double>>();
  check_reference<double, linattn::random_fourier<double>>();
}

}  // namespace
