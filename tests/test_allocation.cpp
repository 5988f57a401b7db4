// The promise of the production calls: nothing allocates after make_workspace and make_state, and with all sizes in the
// type nothing ever does.
#include <linattn/linattn.hpp>

#include <linattn/feature_maps/positive_random.hpp>
#include <linattn/feature_maps/random_fourier.hpp>

#include "support/allocations.hpp"
#include "support/inputs.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <type_traits>
#include <utility>

namespace {

using Eigen::Index;
using linattn::row_matrix;
using linattn::row_vector;
using support::allocation_count;

/// What a use of the operator asks of the heap.
struct sizes {
  Index tokens, head_dim, value_dim, heads, features;
};

/// An operator for these sizes; maps with parameters are made for them.
template <class Map, class T>
auto make_operator(const sizes& n) {
  using attention = linattn::linear_attention<Map, linattn::additive, T>;
  const linattn::options o = {.head_dim = n.head_dim, .value_dim = n.value_dim, .heads = n.heads, .normalize = true};
  if constexpr (std::is_constructible_v<Map, Index, Index, std::uint64_t>) {
    return attention(o, Map(n.head_dim, n.features, 1));
  } else {
    return attention(o);
  }
}

/// Every verb that takes state and workspace, twice: a first call must not be a special one.
template <class Operator>
void expect_no_allocation(const Operator& attn, Index tokens) {
  using T = typename Operator::scalar;
  const support::attention_inputs<T> x(tokens, attn.heads() * attn.head_dim(), attn.heads() * attn.value_dim(), 1);
  row_matrix<T> y(tokens, attn.heads() * attn.value_dim()), denominators(tokens, attn.heads());
  auto ws = attn.make_workspace();
  auto s = attn.make_state();
  auto other = attn.make_state(7);
  const auto expect_none = [](const char* what, const auto& call) {
    for (int time = 0; time < 2; ++time) {
      const allocation_count count;
      call();
      const long seen = count.total();
      EXPECT_EQ(seen, 0) << what;
    }
  };
  expect_none("forward", [&] { attn.forward(x.q, x.k, x.v, y, ws); });
  expect_none("forward with a state", [&] { attn.forward(s, x.q, x.k, x.v, y, ws); });
  expect_none("forward_causal", [&] { attn.forward_causal(x.q, x.k, x.v, y, ws); });
  expect_none("forward_causal with a state", [&] { attn.forward_causal(s, x.q, x.k, x.v, y, ws); });
  expect_none("absorb", [&] { attn.absorb(s, x.k, x.v, ws); });
  expect_none("read", [&] { attn.read(s, x.q, y, ws); });
  expect_none("read with denominators", [&] { attn.read(s, x.q, y, ws, denominators); });
  expect_none("step", [&] {
    for (Index i = 0; i < std::min(tokens, Index(3)); ++i) {
      attn.step(s, x.q.row(i), x.k.row(i), x.v.row(i), y.row(i), ws);
    }
  });
  expect_none("assignment between equal sizes", [&] { other = s; });
  expect_none("merge", [&] { s.merge(other); });
  expect_none("views", [&] { s.kv(0)(0, 0) += s.k_sum(0)[0]; });
  expect_none("reset", [&] { s.reset(); });
  expect_none("moving", [&] {
    auto moved = std::move(s);
    s = std::move(moved);
  });
}

// ---- the counter itself ---------------------------------------------------------------------------------------------

/// Keeps the compiler from leaving out an allocation nobody looks at.
void look_at(const void* memory) { asm volatile("" : : "g"(memory) : "memory"); }

template <class F>
void expect_seen(const char* what, const F& call) {
  const allocation_count count;
  call();
  const long allocations = count.allocations(), frees = count.frees();
  EXPECT_EQ(allocations, 1) << what;
  EXPECT_EQ(frees, 1) << what;
}

TEST(AllocationCount, SeesEveryWayToTheHeap) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  const auto take = [](void* memory) {
    look_at(memory);
    std::free(memory);
  };
  expect_seen("malloc", [&] { take(std::malloc(100)); });
  expect_seen("calloc", [&] { take(std::calloc(10, 10)); });
  expect_seen("realloc", [&] { take(std::realloc(nullptr, 100)); });
  expect_seen("aligned_alloc", [&] { take(std::aligned_alloc(64, 128)); });
  expect_seen("posix_memalign", [&] {
    void* memory = nullptr;
    ASSERT_EQ(posix_memalign(&memory, 64, 100), 0);
    take(memory);
  });
  expect_seen("new", [] { look_at(std::make_unique<int>(1).get()); });
  expect_seen("new of an over-aligned type", [] {
    struct alignas(64) line {
      char bytes[64];
    };
    look_at(std::make_unique<line>().get());
  });
  expect_seen("new[]", [] { look_at(std::make_unique<float[]>(100).get()); });
  expect_seen("Eigen", [] { look_at(row_matrix<float>(10, 10).data()); });
}

// Eigen's own product asks for memory when a packed operand exceeds 128 KiB; no documented path may depend on it.
TEST(AllocationCount, SeesAnEigenProduct) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  const row_matrix<float> a = row_matrix<float>::Ones(512, 512), b = row_matrix<float>::Ones(512, 64);
  row_matrix<float> c(512, 64);
  const allocation_count count;
  c.noalias() = a * b;
  EXPECT_GT(count.allocations(), 0);
}

TEST(AllocationCount, SeesWhatMakesAndWhatConvenienceCosts) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  const auto attn = make_operator<linattn::elu_plus_one, float>({0, 5, 3, 2, 5});
  const support::attention_inputs<float> x(6, 10, 6, 1);
  auto s = attn.make_state();
  expect_seen("make_state", [&] { look_at(attn.make_state().kv(0).data()); });
  expect_seen("make_workspace", [&] { EXPECT_GT(attn.make_workspace().bytes(), 0); });
  expect_seen("copying a state", [&] {
    const auto copy = s;
    look_at(copy.kv(0).data());
  });
  const allocation_count count;
  const row_matrix<float> y = attn.forward_causal(s, x.q, x.k, x.v);
  EXPECT_EQ(count.allocations(), 2) << "the result and a workspace";
  EXPECT_EQ(y.rows(), 6);
}

// ---- sizes known at run time ----------------------------------------------------------------------------------------

template <class Map, class Scalar>
struct with {
  using map = Map;
  using scalar = Scalar;
};

template <class Case>
class Allocation : public testing::Test {};
using cases =
    testing::Types<with<linattn::elu_plus_one, float>, with<linattn::elu_plus_one, double>,
                   with<linattn::identity, float>, with<linattn::relu, double>, with<linattn::squared_relu, float>,
                   with<linattn::exponential, float>, with<linattn::exponential, double>,
                   with<linattn::positive_random<float>, float>, with<linattn::positive_random<double>, double>,
                   with<linattn::random_fourier<float>, float>, with<linattn::random_fourier<double>, double>>;
TYPED_TEST_SUITE(Allocation, cases);

TYPED_TEST(Allocation, NoneAtSmallSizes) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  using map = typename TypeParam::map;
  using T = typename TypeParam::scalar;
  for (const sizes n : {sizes{1, 1, 1, 1, 2}, sizes{7, 5, 3, 2, 6}, sizes{70, 9, 17, 3, 30}, sizes{0, 5, 3, 2, 6}}) {
    expect_no_allocation(make_operator<map, T>(n), n.tokens);
  }
}

// Far beyond the 128 KiB from which stack scratch of Eigen's would move to the heap.
TYPED_TEST(Allocation, NoneAtLargeSizes) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  using map = typename TypeParam::map;
  using T = typename TypeParam::scalar;
  for (const sizes n : {sizes{5, 1024, 130, 1, 1024}, sizes{5, 64, 130, 16, 1024}}) {
    expect_no_allocation(make_operator<map, T>(n), n.tokens);
  }
}

// ---- gradients ------------------------------------------------------------------------------------------------------

/// Beside inputs and outputs there is the workspace, and it was made without knowing N.
template <class Map, class T>
void expect_no_allocation_by_gradients(const sizes& n) {
  const auto attn = make_operator<Map, T>(n);
  const support::attention_inputs<T> x(n.tokens, n.heads * n.head_dim, n.heads * n.value_dim, 1);
  row_matrix<T> dout = x.v, dq = x.q, dk = x.k, dv = x.v;
  const auto s0 = attn.make_state();
  auto ds = attn.make_state();
  auto ws = attn.make_workspace();
  const allocation_count count;
  attn.vjp(x.q, x.k, x.v, dout, dq, dk, dv, ws);
  attn.vjp_causal(x.q, x.k, x.v, dout, dq, dk, dv, ws);
  attn.vjp_causal(s0, x.q, x.k, x.v, dout, ds, dq, dk, dv, ws);
  EXPECT_EQ(count.total(), 0) << n.tokens << " tokens";
}

TEST(GradientAllocation, NoneWhateverTheNumberOfTokens) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  for (const Index tokens : {1, 70, 1024, 262144}) {
    expect_no_allocation_by_gradients<linattn::elu_plus_one, float>({tokens, 5, 3, 2, 5});
  }
  for (const Index tokens : {7, 300}) {
    expect_no_allocation_by_gradients<linattn::positive_random<double>, double>({tokens, 64, 130, 2, 1024});
  }
}

TEST(GradientAllocation, ConvenienceCostsTheResultsAndAWorkspace) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  const auto attn = make_operator<linattn::elu_plus_one, float>({0, 5, 3, 2, 5});
  const support::attention_inputs<float> x(6, 10, 6, 1);
  const allocation_count count;
  const auto d = attn.vjp_causal(x.q, x.k, x.v, x.v);
  EXPECT_EQ(count.allocations(), 4);
  EXPECT_EQ(d.dq.rows(), 6);
}

/// relu without its derivative.
struct inference_only {
  static constexpr Index dimension(Index head_dim) { return head_dim; }
  template <class U>
  void forward(const linattn::const_tile<U>& x, linattn::tile<U>& phi) const {
    phi = x.cwiseMax(U(0));
  }
};

TEST(GradientAllocation, AWorkspaceWithoutGradientsIsSmaller) {
  const sizes n{0, 64, 64, 8, 64};
  const auto without = make_operator<inference_only, float>(n);
  const auto with_gradients = make_operator<linattn::relu, float>(n);
  EXPECT_LT(without.make_workspace().bytes(), with_gradients.make_workspace().bytes());
}

// ---- sizes in the type ----------------------------------------------------------------------------------------------

template <class T>
class FixedAllocation : public testing::Test {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(FixedAllocation, scalars);

TYPED_TEST(FixedAllocation, NoneFromTheVeryStart) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  using T = TypeParam;
  constexpr Index D = 16, M = 8, H = 4;
  const support::attention_inputs<T> x(20, H * D, H * M, 2);
  row_matrix<T> y(20, H * M);

  const allocation_count count;
  const linattn::linear_attention<linattn::elu_plus_one, linattn::additive, T, D, M, H> attn;
  auto ws = attn.make_workspace();
  auto s = attn.make_state();
  attn.forward_causal(s, x.q, x.k, x.v, y, ws);
  attn.step(s, x.q.row(0), x.k.row(0), x.v.row(0), y.row(0), ws);
  attn.absorb(s, x.k, x.v, ws);
  attn.absorb(s, x.k, x.v);  // its own workspace lives on the stack
  attn.read(s, x.q, y, ws);
  attn.forward(x.q, x.k, x.v, y, ws);
  auto fork = s;
  fork.merge(s);
  s = fork;
  auto moved = std::move(fork);
  moved.reset();
  const long seen = count.total();
  EXPECT_EQ(seen, 0);

  const allocation_count of_convenience;
  const row_matrix<T> result = attn.forward_causal(x.q, x.k, x.v);
  EXPECT_EQ(of_convenience.allocations(), 1) << "the result alone";
  EXPECT_EQ(result.rows(), 20);
}

// One size open is enough to move state and workspace to the heap, and the promise to after they are made.
TYPED_TEST(FixedAllocation, NoneAfterMakingPartlyFixedSizes) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  using T = TypeParam;
  using map = linattn::elu_plus_one;
  expect_no_allocation(linattn::linear_attention<map, linattn::additive, T, 16, 8, Eigen::Dynamic>({.heads = 3}), 9);
  expect_no_allocation(linattn::linear_attention<map, linattn::additive, T, 16, Eigen::Dynamic, 2>({.value_dim = 5}),
                       9);
}

}  // namespace
