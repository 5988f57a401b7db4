// Sizes in the type: the same results as sizes at run time, objects without heap, and layouts known to the compiler.
#include <linattn/linattn.hpp>

#include <linattn/feature_maps/positive_random.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using Eigen::Dynamic;
using Eigen::Index;
using linattn::row_matrix;

template <class T, Index D = Dynamic, Index M = D, Index H = (D == Dynamic ? Dynamic : 1)>
using elu = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, T, D, M, H>;

template <class T>
testing::AssertionResult near(const row_matrix<T>& a, const row_matrix<T>& b) {
  return support::close(a, b, support::tolerance<T>::relative_rms);
}

/// All verbs of two operators of the same sizes, one after the other on one state each.
template <class A, class B>
void expect_equal_results(const A& a, const B& b) {
  using T = typename A::scalar;
  ASSERT_EQ(a.head_dim(), b.head_dim());
  ASSERT_EQ(a.value_dim(), b.value_dim());
  ASSERT_EQ(a.heads(), b.heads());
  ASSERT_EQ(a.features(), b.features());
  const Index n = 11, heads = a.heads();
  const support::attention_inputs<T> x(n, heads * a.head_dim(), heads * a.value_dim(), 1);
  EXPECT_TRUE(near(a.forward(x.q, x.k, x.v), b.forward(x.q, x.k, x.v)));
  EXPECT_TRUE(near(a.forward_causal(x.q, x.k, x.v), b.forward_causal(x.q, x.k, x.v)));
  auto ws_a = a.make_workspace();
  auto ws_b = b.make_workspace();
  auto s_a = a.make_state(3);
  auto s_b = b.make_state(3);
  row_matrix<T> y_a(n, heads * a.value_dim()), y_b(n, heads * a.value_dim()), den_a(n, heads), den_b(n, heads);
  a.forward_causal(s_a, x.q, x.k, x.v, y_a, ws_a);
  b.forward_causal(s_b, x.q, x.k, x.v, y_b, ws_b);
  EXPECT_TRUE(near(y_a, y_b));
  for (Index i = 0; i < n; ++i) {
    a.step(s_a, x.q.row(i), x.k.row(i), x.v.row(i), y_a.row(i), ws_a);
    b.step(s_b, x.q.row(i), x.k.row(i), x.v.row(i), y_b.row(i), ws_b);
  }
  EXPECT_TRUE(near(y_a, y_b));
  a.absorb(s_a, x.k, x.v, ws_a);
  b.absorb(s_b, x.k, x.v, ws_b);
  a.read(s_a, x.q, y_a, ws_a, den_a);
  b.read(s_b, x.q, y_b, ws_b, den_b);
  EXPECT_TRUE(near(y_a, y_b));
  EXPECT_TRUE(near(den_a, den_b));
  EXPECT_EQ(s_a.tokens(), s_b.tokens());
  EXPECT_EQ(s_a.first_position(), s_b.first_position());
  for (Index h = 0; h < heads; ++h) {
    EXPECT_TRUE(near<T>(s_a.kv(h), s_b.kv(h)));
    EXPECT_TRUE(near<T>(s_a.k_sum(h), s_b.k_sum(h)));
  }
}

template <class T, Index D, Index M, Index H>
void expect_same_as_dynamic() {
  SCOPED_TRACE(testing::Message() << "D = " << D << ", M = " << M << ", H = " << H);
  expect_equal_results(elu<T, D, M, H>(), elu<T>({.head_dim = D, .value_dim = M, .heads = H}));
}

TEST(FixedSizes, EqualDynamicOnesInFloat) {
  expect_same_as_dynamic<float, 1, 1, 1>();
  expect_same_as_dynamic<float, 3, 7, 2>();
  expect_same_as_dynamic<float, 64, 17, 3>();
}

TEST(FixedSizes, EqualDynamicOnesInDouble) { expect_same_as_dynamic<double, 33, 15, 2>(); }

// Whichever sizes stay open.
TEST(FixedSizes, PartlyFixed) {
  const elu<float> all_open({.head_dim = 12, .value_dim = 5, .heads = 3});
  expect_equal_results(elu<float, 12, 5, Dynamic>({.heads = 3}), all_open);
  expect_equal_results(elu<float, Dynamic, 5, 3>({.head_dim = 12}), all_open);
}

/// One verb only: for operators of which another verb would show nothing more.
template <class A, class B>
void expect_equal_causal(const A& a, const B& b) {
  const support::attention_inputs<typename A::scalar> x(11, a.heads() * a.head_dim(), a.heads() * a.value_dim(), 4);
  EXPECT_EQ(a.features(), b.features());
  EXPECT_TRUE(near(a.forward_causal(x.q, x.k, x.v), b.forward_causal(x.q, x.k, x.v)));
}

// A map whose dimension is a parameter leaves C open in an operator of fixed D, M and H.
TEST(FixedSizes, MapsThatChooseTheirDimension) {
  using map = linattn::positive_random<float>;
  const map features(12, 20, 1);
  const linattn::linear_attention<map, linattn::additive, float, 12, 5, 3> fixed({}, features);
  const linattn::linear_attention<map> open({.head_dim = 12, .value_dim = 5, .heads = 3}, features);
  EXPECT_EQ(fixed.features(), 20);
  expect_equal_causal(fixed, open);
}

TEST(FixedSizes, DefaultsOfTheType) {
  const elu<float, 64> attn;
  EXPECT_EQ(attn.head_dim(), 64);
  EXPECT_EQ(attn.value_dim(), 64);
  EXPECT_EQ(attn.features(), 64);
  EXPECT_EQ(attn.heads(), 1);
  const elu<float, 64, Dynamic, Dynamic> open;
  EXPECT_EQ(open.value_dim(), 64);
  EXPECT_EQ(open.heads(), 1);
  static_assert(
      std::is_same_v<decltype(attn),
                     const linattn::linear_attention<linattn::elu_plus_one, linattn::additive, float, 64, 64, 1>>);
  static_assert(std::is_same_v<elu<float>, linattn::linear_attention<linattn::elu_plus_one>>);
}

// ---- what the compiler knows ----------------------------------------------------------------------------------------

static_assert(linattn::elu_plus_one::dimension(64) == 64 && linattn::identity::dimension(3) == 3 &&
              linattn::relu::dimension(7) == 7 && linattn::squared_relu::dimension(1) == 1 &&
              linattn::exponential::dimension(9) == 9);

/// A map of a dimension of its own, constexpr: phi(x) = [x, 1] squared, C = D + 1.
struct with_constant {
  static constexpr Index dimension(Index head_dim) noexcept { return head_dim + 1; }
  template <class T>
  void forward(const linattn::const_tile<T>& x, linattn::tile<T>& phi) const {
    phi.leftCols(x.cols()) = x.cwiseAbs2();
    phi.rightCols(1).setOnes();
  }
};

TEST(FixedSizes, ConstexprDimensionOfAUsersMap) {
  using fixed = linattn::linear_attention<with_constant, linattn::additive, double, 4, 3, 2>;
  const fixed attn;
  EXPECT_EQ(attn.features(), 5);
  EXPECT_EQ(attn.make_state().kv(1).rows(), 5);
  static_assert(std::is_trivially_copyable_v<fixed::state_type>, "C is part of the type");
  expect_equal_causal(attn, linattn::linear_attention<with_constant, linattn::additive, double>(
                                {.head_dim = 4, .value_dim = 3, .heads = 2}));
}

/// Bytes of H heads of S (C, M) and z (C) without any padding.
template <class T>
constexpr std::size_t payload(Index C, Index M, Index H) {
  return std::size_t(H * (C * M + C)) * sizeof(T);
}

template <class T, Index D, Index M, Index H>
void expect_inline() {
  using state = typename elu<T, D, M, H>::state_type;
  using workspace = typename elu<T, D, M, H>::workspace_type;
  // Nothing that points elsewhere: the bytes are the value.
  static_assert(std::is_trivially_copyable_v<state> && std::is_trivially_destructible_v<state>);
  static_assert(std::is_trivially_copyable_v<workspace> && std::is_trivially_destructible_v<workspace>);
  static_assert(alignof(state) == 64 && alignof(workspace) == 64);
  static_assert(sizeof(state) > payload<T>(D, M, H));
  static_assert(sizeof(workspace) > sizeof(T) * std::size_t(H * (2 * D + M)));
  const elu<T, D, M, H> attn;
  const auto ws = attn.make_workspace();
  EXPECT_LE(ws.bytes(), Index(sizeof(workspace)));
  // It lives in the object.
  auto s = attn.make_state();
  const auto address = reinterpret_cast<std::uintptr_t>(s.kv(H - 1).data());
  EXPECT_GE(address, reinterpret_cast<std::uintptr_t>(&s));
  EXPECT_LT(address, reinterpret_cast<std::uintptr_t>(&s + 1));
}

TEST(FixedSizes, StateAndWorkspaceAreInline) {
  expect_inline<float, 1, 1, 1>();
  expect_inline<float, 17, 9, 3>();
  expect_inline<double, 33, 15, 2>();
  // Where no row needs padding a state is its payload, two counters, and at most two lines to keep it aligned.
  static_assert(sizeof(elu<float, 64, 64, 4>::state_type) <= payload<float>(64, 64, 4) + 2 * 64);
  static_assert(sizeof(elu<double, 32, 16, 2>::state_type) <= payload<double>(32, 16, 2) + 2 * 64);
  // An operator of stateless maps holds no more than its options.
  static_assert(sizeof(elu<float, 64, 64, 4>) <= sizeof(linattn::options));
}

TEST(FixedSizes, StatesOfOpenSizesOwnMemory) {
  static_assert(!std::is_trivially_copyable_v<elu<float>::state_type>);
  static_assert(!std::is_trivially_copyable_v<elu<float, 16, 16, Dynamic>::state_type>);
  static_assert(sizeof(elu<float>::state_type) <= 128, "a handle and its sizes");
}

// ---- alignment ------------------------------------------------------------------------------------------------------

template <class P>
bool on_a_cache_line(const P* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 64 == 0;
}

TEST(Alignment, OfStatesOnStackHeapAndInContainers) {
  using attention = elu<float, 5, 3, 2>;
  using state = attention::state_type;
  const attention attn;
  char shifts_the_stack = 'x';
  state on_stack = attn.make_state();
  EXPECT_EQ(shifts_the_stack, 'x');
  const auto on_heap = std::make_unique<state>(attn.make_state());
  const auto* const raw = new state(attn.make_state());
  const std::vector<state> beams(5, attn.make_state());
  struct holder {
    char shift = 0;
    state held;
  };
  const auto in_a_struct = std::make_unique<holder>();
  std::vector<const state*> all = {&on_stack, on_heap.get(), raw, &in_a_struct->held};
  for (const auto& beam : beams) all.push_back(&beam);
  for (const state* s : all) {
    EXPECT_TRUE(on_a_cache_line(s));
    for (Index h = 0; h < 2; ++h) EXPECT_TRUE(on_a_cache_line(s->kv(h).data())) << h;
  }
  delete raw;
}

TEST(Alignment, OfStatesThatOwnMemory) {
  for (const Index heads : {1, 2, 5}) {
    const elu<double> attn({.head_dim = 5, .value_dim = 3, .heads = heads});
    const auto s = attn.make_state();
    auto copy = s;
    const auto moved = std::move(copy);
    for (Index h = 0; h < heads; ++h) {
      EXPECT_TRUE(on_a_cache_line(s.kv(h).data())) << h;
      EXPECT_TRUE(on_a_cache_line(moved.kv(h).data())) << h;
    }
  }
}

// What a map is given lies on cache lines, whatever the caller's memory looks like.
struct watches_alignment {
  static constexpr Index dimension(Index head_dim) noexcept { return head_dim; }
  template <class T>
  void forward(const linattn::const_tile<T>& x, linattn::tile<T>& phi) const {
    for (Index r = 0; r < x.rows(); ++r) {
      EXPECT_TRUE(on_a_cache_line(&x.coeffRef(r, 0))) << r;
    }
    EXPECT_TRUE(on_a_cache_line(phi.data()));
    phi = x.cwiseAbs();
  }
};

TEST(Alignment, OfTheTilesThatMapsAreGiven) {
  const Index n = 9;
  using open = linattn::linear_attention<watches_alignment>;
  using fixed = linattn::linear_attention<watches_alignment, linattn::additive, float, 5, 3, 2>;
  const support::attention_inputs<float> x(n, 10, 6, 2);
  const open attn({.head_dim = 5, .value_dim = 3, .heads = 2});
  EXPECT_TRUE(near(attn.forward_causal(x.q, x.k, x.v), fixed().forward_causal(x.q, x.k, x.v)));
}

// A workspace copied somewhere else is as good as a new one.
TEST(FixedSizes, CopiedWorkspaces) {
  const support::attention_inputs<float> x(9, 10, 6, 3);
  const auto check = [&](const auto& attn) {
    auto ws = attn.make_workspace();
    row_matrix<float> y(9, 6), z(9, 6);
    attn.forward_causal(x.q, x.k, x.v, y, ws);
    auto copy = ws;
    attn.forward_causal(x.q, x.k, x.v, z, copy);
    EXPECT_TRUE(support::same_bits(y, z));
    const auto moved = std::make_unique<std::remove_const_t<decltype(ws)>>(std::move(copy));
    attn.forward_causal(x.q, x.k, x.v, z, *moved);
    EXPECT_TRUE(support::same_bits(y, z));
  };
  check(elu<float, 5, 3, 2>());
  check(elu<float>({.head_dim = 5, .value_dim = 3, .heads = 2}));
}

}  // namespace
