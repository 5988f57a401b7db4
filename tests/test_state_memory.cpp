// A state is one block of memory: its bytes are all of it, wherever they lie, and many lie in a pool.
#include <linattn/linattn.hpp>
#include <linattn/state_pool.hpp>

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/refusal.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using Eigen::Index;
using linattn::row_matrix;

constexpr Index D = 5, M = 3, H = 2, N = 9;
constexpr linattn::options sizes{.head_dim = D, .value_dim = M, .heads = H};

using additive = linattn::linear_attention<linattn::elu_plus_one>;
using log_scaled = linattn::linear_attention<linattn::exponential, linattn::additive, double>;
using fixed = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, float, D, M, H>;

/// `states` blocks for states of an operator, all bytes 0xA5 at first.
class memory {
 public:
  explicit memory(Index bytes_each, Index states = 1)
      : m_bytes(bytes_each), m_lines(std::size_t((bytes_each * states + 63) / 64)) {
    std::memset(m_lines.data(), 0xA5, m_lines.size() * sizeof(line));
  }
  std::span<std::byte> operator[](Index n) {
    return {m_lines.front().bytes.data() + n * m_bytes, std::size_t(m_bytes)};
  }

 private:
  struct alignas(64) line {
    std::array<std::byte, 64> bytes;
  };
  Index m_bytes;
  std::vector<line> m_lines;
};

void copy_bytes(std::span<const std::byte> from, std::span<std::byte> to) {
  std::memcpy(to.data(), from.data(), from.size());
}

bool same_bytes(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

bool lies_in(const void* p, std::span<const std::byte> bytes) {
  return p >= bytes.data() && p < bytes.data() + bytes.size();
}

template <class Operator>
struct setup {
  using T = typename Operator::scalar;
  using state = typename Operator::state_type;

  const Operator attn{sizes};
  typename Operator::workspace_type ws = attn.make_workspace();
  const support::attention_inputs<T> x{N, H* D, H* M, 1};

  row_matrix<T> rows(state& s, Index first, Index n) {
    row_matrix<T> y(n, H * M);
    attn.forward_causal(s, x.q.middleRows(first, n), x.k.middleRows(first, n), x.v.middleRows(first, n), y, ws);
    return y;
  }
  row_matrix<T> steps(state& s, Index first, Index n) {
    row_matrix<T> y(n, H * M);
    for (Index i = 0; i < n; ++i) {
      attn.step(s, x.q.row(first + i), x.k.row(first + i), x.v.row(first + i), y.row(i), ws);
    }
    return y;
  }
};

using support::refusal;

// ---- attached states ------------------------------------------------------------------------------------------------

template <class Operator>
class AttachedState : public testing::Test {};
using operators = testing::Types<additive, log_scaled>;
TYPED_TEST_SUITE(AttachedState, operators);

TYPED_TEST(AttachedState, DoesWhatOneOnTheHeapDoes) {
  setup<TypeParam> use;
  memory block(use.attn.state_bytes());
  auto s = use.attn.make_state(block[0], 7);
  auto own = use.attn.make_state(7);
  EXPECT_EQ(s.tokens(), 0);
  EXPECT_EQ(s.first_position(), 7);
  for (Index h = 0; h < H; ++h) EXPECT_TRUE(lies_in(s.kv(h).data(), block[0]));
  EXPECT_TRUE(support::same_bits(use.rows(s, 0, 5), use.rows(own, 0, 5)));
  EXPECT_TRUE(support::same_bits(use.steps(s, 5, 4), use.steps(own, 5, 4)));
  EXPECT_EQ(s.tokens(), N);
  s.merge(own);
  own.merge(own);
  EXPECT_EQ(s.tokens(), 2 * N);
  for (Index h = 0; h < H; ++h) EXPECT_TRUE(support::same_bits(s.kv(h), own.kv(h)));
  s.reset();
  EXPECT_EQ(s.tokens(), 0);
  EXPECT_EQ(s.first_position(), 7);
  EXPECT_TRUE(support::same_bits(s.kv(1), use.attn.make_state().kv(1)));
}

// Nothing of it is elsewhere: another handle on the memory, or on a copy of its bytes, is the state.
TYPED_TEST(AttachedState, IsItsBytes) {
  setup<TypeParam> use;
  memory blocks(use.attn.state_bytes(), 2);
  {
    auto s = use.attn.make_state(blocks[0], -4);
    use.rows(s, 0, 4);
  }
  copy_bytes(blocks[0], blocks[1]);
  auto again = use.attn.attach_state(blocks[0]);
  EXPECT_EQ(again.tokens(), 4);
  EXPECT_EQ(again.first_position(), -4);
  const auto y = use.steps(again, 4, 3);
  auto copy = use.attn.attach_state(blocks[1]);
  EXPECT_EQ(copy.tokens(), 4);
  EXPECT_FALSE(same_bytes(blocks[0], blocks[1]));
  EXPECT_TRUE(support::same_bits(use.steps(copy, 4, 3), y));
  EXPECT_TRUE(same_bytes(blocks[0], blocks[1]));
}

TYPED_TEST(AttachedState, RollsBackInOneCopy) {
  setup<TypeParam> use;
  memory blocks(use.attn.state_bytes(), 2);
  auto s = use.attn.make_state(blocks[0]);
  use.rows(s, 0, 4);
  copy_bytes(blocks[0], blocks[1]);  // the snapshot
  const auto y = use.steps(s, 4, 5);
  copy_bytes(blocks[1], blocks[0]);
  EXPECT_EQ(s.tokens(), 4);
  EXPECT_TRUE(support::same_bits(use.steps(s, 4, 5), y));
}

TYPED_TEST(AttachedState, CopiesAreOnTheHeap) {
  setup<TypeParam> use;
  memory block(use.attn.state_bytes());
  auto s = use.attn.make_state(block[0]);
  use.rows(s, 0, 4);
  auto copy = s;
  EXPECT_FALSE(lies_in(copy.kv(0).data(), block[0]));
  EXPECT_EQ(copy.tokens(), 4);
  EXPECT_TRUE(support::same_bits(use.steps(copy, 4, 3), use.steps(s, 4, 3)));
  typename TypeParam::state_type target;
  target = s;
  EXPECT_FALSE(lies_in(target.kv(0).data(), block[0]));
}

TYPED_TEST(AttachedState, AssignmentWritesIntoItsMemory) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  setup<TypeParam> use;
  memory block(use.attn.state_bytes());
  auto s = use.attn.make_state(block[0]);
  auto source = use.attn.make_state(3);
  use.rows(source, 0, 4);
  const auto expect_written = [&](const auto& from) {
    EXPECT_TRUE(lies_in(s.kv(0).data(), block[0]));
    const auto seen = use.attn.attach_state(block[0]);
    EXPECT_EQ(seen.tokens(), 4);
    EXPECT_EQ(seen.first_position(), 3);
    for (Index h = 0; h < H; ++h) EXPECT_TRUE(support::same_bits(seen.kv(h), from.kv(h)));
  };
  const support::allocation_count count;
  s = source;
  const long allocations = count.allocations();
  EXPECT_EQ(allocations, 0);
  expect_written(source);
  s.reset();
  auto moved = source;
  s = std::move(moved);
  expect_written(source);
  EXPECT_NE(refusal([&] { moved.kv(0); }), "");  // NOLINT(bugprone-use-after-move)
  auto& itself = s;
  s = itself;
  expect_written(source);
  s = std::move(itself);
  expect_written(source);
}

TYPED_TEST(AttachedState, MovingMovesTheAttachment) {
  setup<TypeParam> use;
  memory blocks(use.attn.state_bytes(), 2);
  auto a = use.attn.make_state(blocks[0]);
  use.rows(a, 0, 4);
  auto b = std::move(a);
  EXPECT_TRUE(lies_in(b.kv(0).data(), blocks[0]));
  EXPECT_EQ(a.tokens(), 0);                  // NOLINT(bugprone-use-after-move)
  EXPECT_NE(refusal([&] { a.kv(0); }), "");  // NOLINT(bugprone-use-after-move)
  a.reset();
  EXPECT_EQ(b.tokens(), 4);
  auto own = use.attn.make_state();
  own = std::move(b);
  EXPECT_TRUE(lies_in(own.kv(0).data(), blocks[0]));
  auto other = use.attn.make_state(blocks[1]);
  std::swap(own, other);
  EXPECT_TRUE(lies_in(own.kv(0).data(), blocks[1]));
  EXPECT_TRUE(lies_in(other.kv(0).data(), blocks[0]));
  EXPECT_EQ(own.tokens(), 0);
  EXPECT_EQ(other.tokens(), 4);
  static_assert(std::is_nothrow_move_constructible_v<typename TypeParam::state_type>);
}

TYPED_TEST(AttachedState, RefusesAStateOfOtherSizes) {
  setup<TypeParam> use;
  memory block(use.attn.state_bytes());
  auto s = use.attn.make_state(block[0]);
  use.rows(s, 0, 4);
  const auto before = s;
  auto more_heads = TypeParam({.head_dim = D, .value_dim = M, .heads = H + 1}).make_state();
  // Of as many bytes, where packets have four elements or more.
  auto wider = TypeParam({.head_dim = D, .value_dim = M + 1, .heads = H}).make_state();
  const std::string prefix =
      "linattn::state::operator=: this state is attached to memory for (2 heads, 5 features, 3 values), the other one "
      "is ";
  EXPECT_EQ(refusal([&] { s = more_heads; }), prefix + "(3 heads, 5 features, 3 values)");
  EXPECT_EQ(refusal([&] { s = std::move(more_heads); }), prefix + "(3 heads, 5 features, 3 values)");
  EXPECT_EQ(more_heads.heads(), H + 1);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(refusal([&] { s = wider; }), prefix + "(2 heads, 5 features, 4 values)");
  EXPECT_EQ(refusal([&] { s = typename TypeParam::state_type(); }), prefix + "empty (default-made or moved from)");
  EXPECT_TRUE(lies_in(s.kv(0).data(), block[0]));
  EXPECT_EQ(s.tokens(), 4);
  EXPECT_TRUE(support::same_bits(s.kv(1), before.kv(1)));
}

TYPED_TEST(AttachedState, RefusesMemoryThatWillNotDo) {
  setup<TypeParam> use;
  const auto& attn = use.attn;
  const Index bytes = attn.state_bytes();
  memory block(bytes + 64);
  const auto untouched = std::vector<std::byte>(block[0].begin(), block[0].end());
  const std::string small = "linattn::make_state: the memory has " + std::to_string(bytes - 1) +
                            " bytes, a state of (2 heads, 5 features, 3 values) takes " + std::to_string(bytes);
  EXPECT_EQ(refusal([&] { attn.make_state(block[0].first(std::size_t(bytes - 1))); }), small);
  EXPECT_NE(refusal([&] { attn.attach_state(block[0].first(std::size_t(bytes - 1))); }), "");
  EXPECT_NE(refusal([&] { attn.make_state(std::span<std::byte>()); }), "");
  for (const std::size_t offset : {1U, 4U, 32U, 63U}) {
    EXPECT_EQ(refusal([&] { attn.make_state(block[0].subspan(offset)); }),
              "linattn::make_state: the memory begins " + std::to_string(offset) +
                  " bytes behind a boundary of 64 bytes, where a state must begin");
  }
  EXPECT_EQ(refusal([&] { attn.attach_state(block[0]); }),
            "linattn::attach_state: the memory holds no state of (2 heads, 5 features, 3 values) and this operator's "
            "rule and scalar; make_state(memory) begins one there");
  EXPECT_TRUE(same_bytes(block[0], untouched));
  EXPECT_EQ(refusal([&] { attn.make_state(block[0].first(std::size_t(bytes))); }), "");
}

TEST(StateMemory, RefusesAStateOfAnotherOperator) {
  setup<additive> use;
  memory block(2 * use.attn.state_bytes());
  use.attn.make_state(block[0]);
  const additive other({.head_dim = D, .value_dim = M + 1, .heads = H});
  ASSERT_LE(other.state_bytes(), Index(block[0].size()));
  EXPECT_NE(refusal([&] { other.attach_state(block[0]); }), "");
  using unlike = linattn::linear_attention<linattn::elu_plus_one, linattn::gated<>>;
  EXPECT_NE(refusal([&] { unlike(sizes).attach_state(block[0]); }), "");
  EXPECT_EQ(refusal([&] { use.attn.attach_state(block[0]); }), "");
}

TYPED_TEST(AttachedState, AsksNothingOfTheHeap) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  setup<TypeParam> use;
  memory block(use.attn.state_bytes());
  const support::allocation_count count;
  auto s = use.attn.make_state(block[0]);
  auto again = use.attn.attach_state(block[0]);
  auto moved = std::move(again);
  s.reset();
  EXPECT_EQ(count.total(), 0);
}

// ---- compile-time sizes ---------------------------------------------------------------------------------------------

TEST(StateMemory, OfCompileTimeSizesIsTheObject) {
  setup<fixed> use;
  static_assert(std::is_trivially_copyable_v<fixed::state_type> && std::is_standard_layout_v<fixed::state_type>);
  static_assert(alignof(fixed::state_type) == std::size_t(fixed::state_alignment()));
  EXPECT_EQ(use.attn.state_bytes(), Index(sizeof(fixed::state_type)));
  EXPECT_EQ(use.attn.state_bytes(), additive(sizes).state_bytes());
  memory blocks(use.attn.state_bytes(), 2);
  auto* const s = new (blocks[0].data()) fixed::state_type(use.attn.make_state(2));
  use.rows(*s, 0, 4);
  copy_bytes(blocks[0], blocks[1]);
  auto* const copy = std::launder(reinterpret_cast<fixed::state_type*>(blocks[1].data()));
  EXPECT_EQ(copy->tokens(), 4);
  EXPECT_EQ(copy->first_position(), 2);
  EXPECT_TRUE(support::same_bits(use.steps(*copy, 4, 3), use.steps(*s, 4, 3)));
  // Known sizes move no byte: the run-time operator reads the same block.
  EXPECT_EQ(additive(sizes).attach_state(blocks[0]).tokens(), 7);
}

// ---- pools ----------------------------------------------------------------------------------------------------------

using layout = linattn::detail::state_layout<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::Dynamic>;
constexpr Index capacity = 6;

layout layout_of(const additive& attn) {
  layout l;
  l.features = linattn::detail::extent<Eigen::Dynamic>(attn.features());
  l.value_dim = linattn::detail::extent<Eigen::Dynamic>(attn.value_dim());
  l.heads = linattn::detail::extent<Eigen::Dynamic>(attn.value_heads());
  return l;
}

struct pool_setup {
  const additive attn{sizes};
  const Index stride = attn.state_bytes() + 64;
  memory slots{stride, capacity};
  linattn::state_pool pool{.memory = slots[0].data(), .bytes_per_slot = stride, .capacity = capacity};

  pool_setup() {
    for (std::int32_t n = 0; n < capacity; ++n) attn.make_state(pool[n], n);
  }
  std::string text(const linattn::state_pool& p) const {
    return refusal([&] { linattn::detail::require_pool<float>("step", p, layout_of(attn)); });
  }
  std::string text(std::span<const std::int32_t> numbers) const {
    auto p = pool;
    p.slots = numbers;
    return text(p);
  }
};

TEST(StatePool, SlotsAreStates) {
  static_assert(std::is_trivially_copyable_v<linattn::state_pool>);
  pool_setup use;
  const std::int32_t numbers[] = {4, -1, 0};
  use.pool.slots = numbers;
  EXPECT_EQ(use.pool.size(), 3);
  EXPECT_EQ(use.pool.address(4), use.slots[4].data());
  EXPECT_EQ(linattn::detail::slab_of<float>(use.pool, 0), use.pool.address(4));
  EXPECT_EQ(linattn::detail::slab_of<float>(use.pool, 1), nullptr);
  EXPECT_EQ(use.attn.attach_state(use.pool[4]).first_position(), 4);
  EXPECT_EQ(use.text(use.pool), "");
}

// The bytes of slots are as they were, whatever was found.
TEST(StatePool, RefusesASlotTwice) {
  pool_setup use;
  const auto before = std::vector<std::byte>(use.slots[0].data(), use.slots[0].data() + capacity * use.stride);
  const auto expect = [&](const std::vector<std::int32_t>& numbers, const std::string& text) {
    EXPECT_EQ(use.text(numbers), text);
    EXPECT_TRUE(same_bytes(before, {use.slots[0].data(), before.size()}));
  };
  expect({}, "");
  expect({5, 4, 3, 2, 1, 0}, "");
  expect({0, -1, 1, -1, -7, 2}, "");
  expect({3, 3}, "linattn::step: sequence 1 has slot 3, which an earlier one has, too");
  expect({0, 5, 2, -1, 0, 2}, "linattn::step: sequence 4 has slot 0, which an earlier one has, too");
}

// Marks that a call left behind, or that came with a copy of the bytes, neither accuse nor hide.
TEST(StatePool, BelievesNoMarkOfBefore) {
  pool_setup use;
  const layout l = layout_of(use.attn);
  for (const std::int64_t mark : {-1, 0, 1, 2, 3, 1000}) {
    for (std::int32_t n = 0; n < capacity; ++n) {
      l.set_number(static_cast<float*>(use.pool.address(n)), linattn::detail::trailer::mark, mark);
    }
    EXPECT_EQ(use.text(std::vector<std::int32_t>{0, 1, 2, 3, 4}), "") << mark;
  }
  for (std::int32_t n = 0; n < capacity; ++n) {
    l.set_number(static_cast<float*>(use.pool.address(n)), linattn::detail::trailer::mark, 1);
  }
  EXPECT_NE(use.text(std::vector<std::int32_t>{0, 1, 2, 1}), "");
}

TEST(StatePool, RefusesWhatIsNoPoolOfTheOperator) {
  pool_setup use;
  const std::vector<std::int32_t> numbers = {2, 0};
  use.pool.slots = numbers;
  const std::string bytes = std::to_string(use.attn.state_bytes());
  auto p = use.pool;
  p.memory = nullptr;
  EXPECT_EQ(use.text(p), "linattn::step: the pool has no memory");
  p = use.pool;
  p.memory = static_cast<std::byte*>(p.memory) + 16;
  EXPECT_EQ(use.text(p),
            "linattn::step: the memory begins 16 bytes behind a boundary of 64 bytes, where a state must begin");
  for (const Index stride : {Index(0), Index(-64), use.attn.state_bytes() - 64, use.stride - 8}) {
    p = use.pool;
    p.bytes_per_slot = stride;
    EXPECT_EQ(use.text(p), "linattn::step: the pool has " + std::to_string(stride) +
                               " bytes per slot; a state of (2 heads, 5 features, 3 values) takes " + bytes +
                               ", and each begins at a multiple of 64");
  }
  EXPECT_EQ(use.text(std::vector<std::int32_t>{0, 6}), "linattn::step: sequence 1 has slot 6 of a pool of 6 slots");
  std::memset(use.pool.address(3), 0xA5, std::size_t(use.stride));
  EXPECT_EQ(use.text(std::vector<std::int32_t>{0, -1, 3}),
            "linattn::step: slot 3, of sequence 2, holds no state of (2 heads, 5 features, 3 values) and this "
            "operator's rule and scalar; make_state(pool[slot]) begins one there");
}

TEST(StatePool, IsLookedThroughWithoutTheHeap) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  pool_setup use;
  const std::vector<std::int32_t> numbers = {2, 0, 5};
  use.pool.slots = numbers;
  const layout l = layout_of(use.attn);
  const support::allocation_count count;
  linattn::detail::require_pool<float>("step", use.pool, l);
  EXPECT_EQ(count.total(), 0);
}

}  // namespace
