// Batches: every verb of batch.hpp is that of linear_attention, sequence by sequence, bit for bit, in every layout,
// with any number of workspaces and under any executor; segments move rounding only.
#include <string>

namespace {
std::string failed_assertion;  // the last one; tests that expect none find it empty
}  // namespace
#define LINATTN_ASSERT(condition) ((condition) ? void() : void(failed_assertion = #condition))

#include "support/allocations.hpp"
#include "support/inputs.hpp"
#include "support/refusal.hpp"

#include <linattn/batch.hpp>
#include <linattn/linattn.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

using Eigen::Index;
using linattn::batch_view;
using linattn::row_matrix;

enum class layout { bnhd, bhnd, packed };
constexpr layout all_layouts[] = {layout::bnhd, layout::bhnd, layout::packed};

/// Lengths of the sequences of a batch: equal ones for the layouts that need it.
std::vector<Index> lengths_for(layout how) {
  if (how == layout::packed) return {37, 0, 1, 70, 5};
  return {37, 37, 37};
}

/// One argument of a batch in one of the layouts, from and to a packed matrix (N, H E) a sequence.
template <class T>
class tensor {
 public:
  tensor() = default;
  tensor(layout how, const std::vector<Index>& lengths, Index heads, Index dim)
      : m_how(how), m_lengths(lengths), m_heads(heads), m_dim(dim), m_offsets{0} {
    for (const Index n : lengths) m_offsets.push_back(std::int32_t(m_offsets.back() + n));
    m_data = row_matrix<T>::Zero(m_offsets.back(), heads * dim);
  }
  tensor(layout how, const std::vector<row_matrix<T>>& x, Index heads, Index dim)
      : tensor(how, lengths_of(x), heads, dim) {
    for (std::size_t b = 0; b < x.size(); ++b) set(Index(b), x[b]);
  }

  batch_view<T> view() {
    const Index B = Index(m_lengths.size());
    if (m_how == layout::bnhd) return linattn::bnhd(m_data.data(), B, m_lengths[0], m_heads, m_dim);
    if (m_how == layout::bhnd) return linattn::bhnd(m_data.data(), B, m_lengths[0], m_heads, m_dim);
    return linattn::packed(m_data, m_offsets, m_heads);
  }

  void set(Index b, const row_matrix<T>& x) {
    for_each(b, [&](Index i, Index h, Index e, T& place) { place = x(i, h * m_dim + e); });
  }
  row_matrix<T> get(Index b) {
    row_matrix<T> x(m_lengths[std::size_t(b)], m_heads * m_dim);
    for_each(b, [&](Index i, Index h, Index e, T& place) { x(i, h * m_dim + e) = place; });
    return x;
  }

 private:
  static std::vector<Index> lengths_of(const std::vector<row_matrix<T>>& x) {
    std::vector<Index> lengths;
    for (const auto& one : x) lengths.push_back(one.rows());
    return lengths;
  }
  /// The place of every element, by the layout's own formula, not by batch_view's.
  template <class F>
  void for_each(Index b, const F& f) {
    const Index N = m_lengths[std::size_t(b)];
    for (Index i = 0; i < N; ++i) {
      for (Index h = 0; h < m_heads; ++h) {
        for (Index e = 0; e < m_dim; ++e) {
          const Index row = m_offsets[std::size_t(b)] + i;
          const Index at =
              m_how == layout::bhnd ? ((b * m_heads + h) * N + i) * m_dim + e : (row * m_heads + h) * m_dim + e;
          f(i, h, e, m_data.data()[at]);
        }
      }
    }
  }

  layout m_how = layout::bnhd;
  std::vector<Index> m_lengths;
  Index m_heads = 0;
  Index m_dim = 0;
  std::vector<std::int32_t> m_offsets;
  row_matrix<T> m_data;
};

template <class T>
::testing::AssertionResult same_bits(const T* a, const T* b, Index n, const std::string& what) {
  if (n == 0 || std::memcmp(a, b, std::size_t(n) * sizeof(T)) == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << what << " differs";
}
template <class T>
::testing::AssertionResult same_bits(const row_matrix<T>& a, const row_matrix<T>& b, const std::string& what) {
  if (a.rows() != b.rows() || a.cols() != b.cols())
    return ::testing::AssertionFailure() << what << " has another shape";
  return same_bits(a.data(), b.data(), a.size(), what);
}

/// All bits of two states, those of z and of the scales among them.
template <class Operator, class State = typename Operator::state_type>
::testing::AssertionResult same_state(const Operator& attn, const State& a, const State& b, const std::string& what) {
  if (a.tokens() != b.tokens()) {
    return ::testing::AssertionFailure() << what << " has " << a.tokens() << " tokens, not " << b.tokens();
  }
  using access = linattn::detail::engine_access;
  const auto bytes = [](const State& s) { return reinterpret_cast<const char*>(access::data(s)); };
  return same_bits(bytes(a), bytes(b), attn.state_bytes(), what);
}

/// The inputs of a batch for one operator: q, k, v, and what the rule takes.
template <class Operator>
struct inputs_for {
  using T = typename Operator::scalar;
  std::vector<row_matrix<T>> q, k, v, log_decay, beta, bonus, dout;

  inputs_for(const Operator& attn, const std::vector<Index>& lengths) {
    constexpr bool per_feature = Operator::rule.decay == linattn::decay_kind::per_feature;
    std::uint64_t seed = 1;
    const auto draw = [&](Index rows, Index cols) { return support::normal_matrix<T>(rows, cols, seed++); };
    for (const Index n : lengths) {
      q.push_back(draw(n, attn.heads() * attn.head_dim()));
      k.push_back(draw(n, attn.key_heads() * attn.head_dim()) / T(4));
      v.push_back(draw(n, attn.value_heads() * attn.value_dim()));
      log_decay.push_back(-draw(n, attn.value_heads() * (per_feature ? attn.features() : 1)).cwiseAbs() / T(4));
      beta.push_back(draw(n, attn.value_heads()).cwiseAbs().cwiseMin(T(1)));
      bonus.push_back(draw(n, attn.value_heads() * attn.features()));
      dout.push_back(draw(n, attn.output_heads() * attn.value_dim()));
    }
  }

  typename Operator::inputs rule_inputs(std::size_t b) const {
    typename Operator::inputs x;
    if constexpr (requires { x.log_decay; }) x.log_decay = log_decay[b];
    if constexpr (requires { x.beta; }) x.beta = beta[b];
    if constexpr (requires { x.bonus; }) x.bonus = bonus[b];
    return x;
  }
};

/// The same in a layout.
template <class Operator>
struct batch_for {
  using T = typename Operator::scalar;
  tensor<T> q, k, v, log_decay, beta, bonus, dout, out;
  linattn::batch_inputs<Operator> x;

  batch_for(const Operator& attn, const inputs_for<Operator>& from, layout how)
      : q(how, from.q, attn.heads(), attn.head_dim()),
        k(how, from.k, attn.key_heads(), attn.head_dim()),
        v(how, from.v, attn.value_heads(), attn.value_dim()),
        log_decay(how, from.log_decay, attn.value_heads(), decays(attn)),
        beta(how, from.beta, attn.value_heads(), 1),
        bonus(how, from.bonus, attn.value_heads(), attn.features()),
        dout(how, from.dout, attn.output_heads(), attn.value_dim()),
        out(how, lengths(from), attn.output_heads(), attn.value_dim()) {
    if constexpr (requires { x.log_decay; }) x.log_decay = log_decay.view();
    if constexpr (requires { x.beta; }) x.beta = beta.view();
    if constexpr (requires { x.bonus; }) x.bonus = bonus.view();
  }

 private:
  static Index decays(const Operator& attn) {
    return Operator::rule.decay == linattn::decay_kind::per_feature ? attn.features() : 1;
  }
  static std::vector<Index> lengths(const inputs_for<Operator>& from) {
    std::vector<Index> result;
    for (const auto& one : from.q) result.push_back(one.rows());
    return result;
  }
};

/// Executors of several kinds as one type: the compiler meets every verb once.
struct any_executor {
  enum class kind { sequential, pool, backwards_in_threads } how;
  const linattn::thread_pool* pool;

  template <class F>
  void parallel_for(Index n, const F& f) const {
    const std::function<void(Index)> task = std::cref(f);
    if (how == kind::sequential) linattn::sequential().parallel_for(n, task);
    if (how == kind::pool) pool->parallel_for(n, task);
    if (how == kind::backwards_in_threads) {
      std::vector<std::thread> threads;
      for (Index i = n; i-- > 0;) threads.emplace_back(task, i);
      for (auto& t : threads) t.join();
    }
  }
};

/// f(executor, workspaces) for a few of both, more workspaces than work included.
template <class Operator, class F>
void for_each_width(const Operator& attn, const F& f) {
  const linattn::thread_pool pool(3);
  for (const Index width : {1, 2, 3, 8, 64}) {
    auto ws = linattn::make_workspaces(attn, width);
    const auto trace = "workspaces: " + std::to_string(width);
    SCOPED_TRACE(trace);
    f(any_executor{any_executor::kind::sequential, &pool}, ws);
    f(any_executor{any_executor::kind::pool, &pool}, ws);
    if (width <= 8) f(any_executor{any_executor::kind::backwards_in_threads, &pool}, ws);
  }
}

template <class Operator>
struct operator_under_test {
  static std::vector<Operator> all() { return {Operator({.head_dim = 5, .value_dim = 70, .heads = 3})}; }
};
using plain = linattn::linear_attention<linattn::elu_plus_one>;
/// Sizes: heads that are cut into columns, heads that share.
template <>
struct operator_under_test<plain> {
  static std::vector<plain> all() {
    return {plain({.head_dim = 5, .value_dim = 70, .heads = 3}), plain({.head_dim = 8, .heads = 1}),
            plain({.head_dim = 5, .value_dim = 9, .heads = 4, .key_heads = 1, .value_heads = 2}),
            plain({.head_dim = 5,
                   .value_dim = 40,
                   .heads = 4,
                   .key_heads = 2,
                   .value_heads = 2,
                   .sharing = linattn::head_sharing::tiled})};
  }
};
using gated_delta = linattn::linear_attention<linattn::identity, linattn::gated_delta<>>;
/// Heads that share: a group of four states, every other head of each kind.
template <>
struct operator_under_test<gated_delta> {
  static std::vector<gated_delta> all() {
    return {gated_delta({.head_dim = 5, .value_dim = 70, .heads = 3}),
            gated_delta({.head_dim = 5,
                         .value_dim = 9,
                         .heads = 4,
                         .key_heads = 2,
                         .value_heads = 8,
                         .sharing = linattn::head_sharing::tiled})};
  }
};
/// Of compile-time sizes, whose heads are not cut.
using fixed = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, float, 4, 4, 2>;
template <>
struct operator_under_test<fixed> {
  static std::vector<fixed> all() { return {fixed()}; }
};

template <class Operator>
class Batch : public ::testing::Test {};
using Operators = ::testing::Types<plain, fixed, linattn::linear_attention<linattn::exponential>,
                                   linattn::linear_attention<linattn::identity, linattn::gated_bonus>, gated_delta>;
TYPED_TEST_SUITE(Batch, Operators);

TYPED_TEST(Batch, ForwardCausalIsThatOfEverySequence) {
  for (const TypeParam& attn : operator_under_test<TypeParam>::all()) {
    for (const layout how : all_layouts) {
      SCOPED_TRACE("layout " + std::to_string(int(how)));
      const inputs_for<TypeParam> in(attn, lengths_for(how));
      const std::size_t B = in.q.size();
      auto expected_states = linattn::make_states(attn, Index(B), 3);
      std::vector<row_matrix<float>> expected, expected_alone;
      for (std::size_t b = 0; b < B; ++b) {
        expected_alone.push_back(attn.forward_causal(in.q[b], in.k[b], in.v[b], in.rule_inputs(b)));
        attn.forward_causal(expected_states[b], in.q[b], in.k[b], in.v[b], in.rule_inputs(b));
        expected.push_back(attn.forward_causal(expected_states[b], in.q[b], in.k[b], in.v[b], in.rule_inputs(b)));
      }
      for_each_width(attn, [&](const any_executor& executor, auto& ws) {
        batch_for<TypeParam> x(attn, in, how);
        auto states = linattn::make_states(attn, Index(B), 3);
        for (int time = 0; time < 2; ++time) {
          linattn::forward_causal(attn, states, x.q.view(), x.k.view(), x.v.view(), x.x, x.out.view(), ws, executor);
        }
        for (std::size_t b = 0; b < B; ++b) {
          ASSERT_TRUE(same_bits(x.out.get(Index(b)), expected[b], "sequence " + std::to_string(b)));
          ASSERT_TRUE(same_state(attn, states[b], expected_states[b], "state " + std::to_string(b)));
        }
        linattn::forward_causal(attn, {}, x.q.view(), x.k.view(), x.v.view(), x.x, x.out.view(), ws, executor);
        for (std::size_t b = 0; b < B; ++b) {
          ASSERT_TRUE(same_bits(x.out.get(Index(b)), expected_alone[b], "alone, sequence " + std::to_string(b)));
        }
      });
    }
  }
}

TYPED_TEST(Batch, StepsInPoolSlotsAreThoseOfEverySequence) {
  for (const TypeParam& attn : operator_under_test<TypeParam>::all()) {
    const inputs_for<TypeParam> in(attn, {1, 1, 1, 1});
    const std::size_t B = in.q.size();
    const std::int32_t slots[] = {5, 0, -1, 2};
    std::vector<typename TypeParam::state_type> expected_states(B, attn.make_state(2));
    expected_states[2] = attn.make_state();
    std::vector<row_matrix<float>> expected;
    auto ws1 = attn.make_workspace();
    for (int time = 0; time < 3; ++time) {
      expected.clear();
      expected_states[2].reset();  // the slot that is not kept
      for (std::size_t b = 0; b < B; ++b) {
        row_matrix<float> out(1, attn.output_heads() * attn.value_dim());
        typename TypeParam::token_inputs x;
        if constexpr (requires { x.log_decay; }) x.log_decay = in.log_decay[b].row(0);
        if constexpr (requires { x.beta; }) x.beta = in.beta[b].row(0);
        if constexpr (requires { x.bonus; }) x.bonus = in.bonus[b].row(0);
        attn.step(expected_states[b], in.q[b].row(0), in.k[b].row(0), in.v[b].row(0), x, out.row(0), ws1);
        expected.push_back(out);
      }
    }
    for_each_width(attn, [&](const any_executor& executor, auto& ws) {
      const Index bytes = attn.state_bytes() + 128;  // slots may be larger than states
      std::vector<std::byte> memory(std::size_t(bytes * 6 + 64));
      void* at = memory.data();
      std::size_t space = memory.size();
      std::align(64, std::size_t(bytes * 6), at, space);
      const linattn::state_pool pool{.memory = at, .bytes_per_slot = bytes, .slots = slots, .capacity = 6};
      for (const std::int32_t slot : {0, 1, 2, 3, 4, 5}) {
        if constexpr (std::is_same_v<TypeParam, fixed>) {
          new (pool[slot].data()) typename TypeParam::state_type(attn.make_state(2));
        } else {
          attn.make_state(pool[slot], 2);
        }
      }
      batch_for<TypeParam> x(attn, in, layout::bnhd);
      for (int time = 0; time < 3; ++time) {
        linattn::step(attn, pool, x.q.view(), x.k.view(), x.v.view(), x.x, x.out.view(), ws, executor);
      }
      for (std::size_t b = 0; b < B; ++b) {
        ASSERT_TRUE(same_bits(x.out.get(Index(b)), expected[b], "sequence " + std::to_string(b)));
        if constexpr (!std::is_same_v<TypeParam, fixed>) {
          if (slots[b] >= 0) {
            ASSERT_TRUE(same_state(attn, attn.attach_state(pool[slots[b]]), expected_states[b], "slot"));
            ASSERT_EQ(attn.attach_state(pool[1]).tokens(), 0);
          }
        }
      }
    });
  }
}

TYPED_TEST(Batch, AbsorbAndReadAreThoseOfEverySequence) {
  for (const TypeParam& attn : operator_under_test<TypeParam>::all()) {
    for (const layout how : all_layouts) {
      const inputs_for<TypeParam> in(attn, lengths_for(how));
      const std::size_t B = in.q.size();
      auto expected_states = linattn::make_states(attn, Index(B));
      std::vector<row_matrix<float>> expected;
      for (std::size_t b = 0; b < B; ++b) {
        attn.absorb(expected_states[b], in.k[b], in.v[b], in.rule_inputs(b));
        expected.push_back(attn.read(expected_states[b], in.q[b]));
      }
      for_each_width(attn, [&](const any_executor& executor, auto& ws) {
        batch_for<TypeParam> x(attn, in, how);
        auto states = linattn::make_states(attn, Index(B));
        linattn::absorb(attn, states, x.k.view(), x.v.view(), x.x, ws, executor);
        linattn::read(attn, states, x.q.view(), x.out.view(), ws, executor);
        for (std::size_t b = 0; b < B; ++b) {
          ASSERT_TRUE(same_bits(x.out.get(Index(b)), expected[b], "sequence " + std::to_string(b)));
          ASSERT_TRUE(same_state(attn, states[b], expected_states[b], "state " + std::to_string(b)));
        }
        if constexpr (!TypeParam::rule.is_ordered()) {
          linattn::forward(attn, {}, x.q.view(), x.k.view(), x.v.view(), x.out.view(), ws, executor);
          for (std::size_t b = 0; b < B; ++b) {
            ASSERT_TRUE(same_bits(x.out.get(Index(b)), expected[b], "forward, sequence " + std::to_string(b)));
          }
        }
      });
    }
  }
}

TYPED_TEST(Batch, GradientsAreThoseOfEverySequence) {
  if constexpr (linattn::detail::has_gradient(TypeParam::rule)) {
    for (const TypeParam& attn : operator_under_test<TypeParam>::all()) {
      for (const layout how : all_layouts) {
        const inputs_for<TypeParam> in(attn, lengths_for(how));
        const std::size_t B = in.q.size();
        auto s0 = linattn::make_states(attn, Index(B)), ds0 = s0;
        for (std::size_t b = 0; b < B; ++b) {
          attn.absorb(s0[b], in.k[b], in.v[b], in.rule_inputs(b));
          ds0[b].kv(0).setConstant(0.25F);
        }
        for_each_width(attn, [&](const any_executor& executor, auto& ws) {
          batch_for<TypeParam> x(attn, in, how), d(attn, in, how);
          linattn::batch_input_gradients<TypeParam> dx;
          if constexpr (requires { dx.log_decay; }) dx.log_decay = d.log_decay.view();
          if constexpr (requires { dx.beta; }) dx.beta = d.beta.view();
          auto ds = ds0;
          if constexpr (std::is_empty_v<decltype(dx)>) {
            linattn::vjp_causal(attn, s0, x.q.view(), x.k.view(), x.v.view(), x.dout.view(), ds, d.q.view(), d.k.view(),
                                d.v.view(), ws, executor);
          } else {
            linattn::vjp_causal(attn, s0, x.q.view(), x.k.view(), x.v.view(), x.x, x.dout.view(), ds, d.q.view(),
                                d.k.view(), d.v.view(), dx, ws, executor);
          }
          for (std::size_t b = 0; b < B; ++b) {
            auto ds_b = ds0[b];
            const auto g = attn.vjp_causal(s0[b], in.q[b], in.k[b], in.v[b], in.rule_inputs(b), in.dout[b], ds_b);
            ASSERT_TRUE(same_bits(d.q.get(Index(b)), g.dq, "dq"));
            ASSERT_TRUE(same_bits(d.k.get(Index(b)), g.dk, "dk"));
            ASSERT_TRUE(same_bits(d.v.get(Index(b)), g.dv, "dv"));
            if constexpr (requires { dx.log_decay; }) {
              ASSERT_TRUE(same_bits(d.log_decay.get(Index(b)), g.inputs.log_decay, "dlog_decay"));
            }
            ASSERT_TRUE(same_state(attn, ds[b], ds_b, "ds"));
          }
          if constexpr (!TypeParam::rule.is_ordered()) {
            linattn::vjp(attn, x.q.view(), x.k.view(), x.v.view(), x.dout.view(), d.q.view(), d.k.view(), d.v.view(),
                         ws, executor);
            for (std::size_t b = 0; b < B; ++b) {
              const auto g = attn.vjp(in.q[b], in.k[b], in.v[b], in.dout[b]);
              ASSERT_TRUE(same_bits(d.k.get(Index(b)), g.dk, "dk of vjp"));
            }
          }
        });
      }
    }
  }
}

/// Where rounding alone may differ: sums of some tens of terms, added in another order.
constexpr double segment_tolerance = 2e-6;

TYPED_TEST(Batch, SegmentsMoveRoundingOnlyAndBitsDependOnTheirNumberAlone) {
  if constexpr (TypeParam::rule.corrects == linattn::correction::none) {
    for (const TypeParam& attn : operator_under_test<TypeParam>::all()) {
      const inputs_for<TypeParam> in(attn, {333, 0, 32, 100});
      const std::size_t B = in.q.size();
      for (const Index count : {1, 2, 5}) {
        std::vector<row_matrix<float>> first;
        for_each_width(attn, [&](const any_executor& executor, auto& ws) {
          batch_for<TypeParam> x(attn, in, layout::packed);
          auto states = linattn::make_states(attn, Index(B)),
               scratch = linattn::make_states(attn, Index(B) * (count + 1));
          auto expected_states = states;
          for (int time = 0; time < 2; ++time) {
            linattn::forward_causal(attn, states, x.q.view(), x.k.view(), x.v.view(), x.x, x.out.view(), ws, executor,
                                    {.segments = scratch});
          }
          for (std::size_t b = 0; b < B; ++b) {
            attn.forward_causal(expected_states[b], in.q[b], in.k[b], in.v[b], in.rule_inputs(b));
            const row_matrix<float> expected =
                attn.forward_causal(expected_states[b], in.q[b], in.k[b], in.v[b], in.rule_inputs(b));
            const row_matrix<float> found = x.out.get(Index(b));
            ASSERT_LE((found - expected).norm(), segment_tolerance * (expected.norm() + 1e-30));
            ASSERT_EQ(states[b].tokens(), expected_states[b].tokens());
            ASSERT_LE((states[b].kv(0) - expected_states[b].kv(0)).norm(),
                      segment_tolerance * (expected_states[b].kv(0).norm() + 1e-30));
            if (first.size() < B) first.push_back(found);
            ASSERT_TRUE(same_bits(found, first[b], "sequence " + std::to_string(b)));
          }
        });
      }
    }
  }
}

// ---- masks ----------------------------------------------------------------------------------------------------------

/// A mask with the rows that it keeps, of each of 3 sequences of 37 tokens.
struct mask_case {
  std::string name;
  linattn::token_mask mask;
  std::vector<std::vector<Index>> kept;
};

row_matrix<bool> random_pattern() {
  support::random_bits random(7);
  row_matrix<bool> pattern(3, 37);
  for (Index b = 0; b < 3; ++b) {
    for (Index i = 0; i < 37; ++i) pattern(b, i) = b != 1 && random.below(3) != 0;  // sequence 1: nothing
  }
  return pattern;
}

std::vector<mask_case> mask_cases(const row_matrix<bool>& pattern, const std::vector<std::int32_t>& lengths) {
  std::vector<mask_case> cases = {{"pattern", pattern, {}},
                                  {"lengths", linattn::token_mask::lengths(lengths), {}},
                                  {"left padding", linattn::token_mask::left_padding(lengths), {}}};
  for (mask_case& one : cases) {
    for (Index b = 0; b < 3; ++b) {
      std::vector<Index> rows;
      const Index length = lengths[std::size_t(b)];
      for (Index i = 0; i < 37; ++i) {
        const bool counts = one.name == "pattern"   ? pattern(b, i)
                            : one.name == "lengths" ? i < length
                                                    : i >= 37 - length;
        if (counts) rows.push_back(i);
      }
      one.kept.push_back(rows);
    }
  }
  return cases;
}

/// Rows of x; what is left of x is garbage afterwards.
row_matrix<float> take_rows(row_matrix<float>& x, const std::vector<Index>& rows) {
  row_matrix<float> taken(Index(rows.size()), x.cols());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    taken.row(Index(i)) = x.row(rows[i]);
  }
  for (Index i = 0; i < x.rows(); ++i) {
    if (std::find(rows.begin(), rows.end(), i) == rows.end()) x.row(i).setConstant(3e38F);
  }
  return taken;
}

/// x is `shorter` in these rows, and 0 in the others.
::testing::AssertionResult is_spread(const row_matrix<float>& x, const row_matrix<float>& shorter,
                                     const std::vector<Index>& rows, const std::string& what) {
  row_matrix<float> expected = row_matrix<float>::Zero(x.rows(), x.cols());
  for (std::size_t i = 0; i < rows.size(); ++i) expected.row(rows[i]) = shorter.row(Index(i));
  return same_bits(x, expected, what);
}

TYPED_TEST(Batch, MaskedIsDeleted) {
  const row_matrix<bool> pattern = random_pattern();
  const std::vector<std::int32_t> lengths = {20, 0, 37};
  for (const TypeParam& attn : operator_under_test<TypeParam>::all()) {
    for (const mask_case& one : mask_cases(pattern, lengths)) {
      SCOPED_TRACE(one.name);
      inputs_for<TypeParam> garbage(attn, {37, 37, 37});
      inputs_for<TypeParam> shorter = garbage;
      for (std::size_t b = 0; b < 3; ++b) {
        for (const auto member : {&inputs_for<TypeParam>::q, &inputs_for<TypeParam>::k, &inputs_for<TypeParam>::v,
                                  &inputs_for<TypeParam>::log_decay, &inputs_for<TypeParam>::beta,
                                  &inputs_for<TypeParam>::bonus, &inputs_for<TypeParam>::dout}) {
          (shorter.*member)[b] = take_rows((garbage.*member)[b], one.kept[b]);
        }
      }
      for_each_width(attn, [&](const any_executor& executor, auto& ws) {
        batch_for<TypeParam> x(attn, garbage, layout::bhnd), d(attn, garbage, layout::bhnd);
        auto states = linattn::make_states(attn, 3), expected_states = states;
        const linattn::batch_options<TypeParam> masked{.mask = one.mask};
        linattn::absorb(attn, states, x.k.view(), x.v.view(), x.x, ws, executor, masked);
        linattn::forward_causal(attn, states, x.q.view(), x.k.view(), x.v.view(), x.x, x.out.view(), ws, executor,
                                masked);
        for (std::size_t b = 0; b < 3; ++b) {
          attn.absorb(expected_states[b], shorter.k[b], shorter.v[b], shorter.rule_inputs(b));
          const row_matrix<float> out =
              attn.forward_causal(expected_states[b], shorter.q[b], shorter.k[b], shorter.v[b], shorter.rule_inputs(b));
          ASSERT_TRUE(is_spread(x.out.get(Index(b)), out, one.kept[b], "sequence " + std::to_string(b)));
          ASSERT_TRUE(same_state(attn, states[b], expected_states[b], "state " + std::to_string(b)));
        }
        if constexpr (linattn::detail::has_gradient(TypeParam::rule)) {
          linattn::batch_input_gradients<TypeParam> dx;
          if constexpr (requires { dx.log_decay; }) dx.log_decay = d.log_decay.view();
          if constexpr (requires { dx.beta; }) dx.beta = d.beta.view();
          linattn::vjp_causal(attn, {}, x.q.view(), x.k.view(), x.v.view(), x.x, x.dout.view(), {}, d.q.view(),
                              d.k.view(), d.v.view(), dx, ws, executor, masked);
          for (std::size_t b = 0; b < 3; ++b) {
            const auto g =
                attn.vjp_causal(shorter.q[b], shorter.k[b], shorter.v[b], shorter.rule_inputs(b), shorter.dout[b]);
            ASSERT_TRUE(is_spread(d.q.get(Index(b)), g.dq, one.kept[b], "dq"));
            ASSERT_TRUE(is_spread(d.k.get(Index(b)), g.dk, one.kept[b], "dk"));
            ASSERT_TRUE(is_spread(d.v.get(Index(b)), g.dv, one.kept[b], "dv"));
            if constexpr (requires { dx.beta; }) {
              ASSERT_TRUE(is_spread(d.beta.get(Index(b)), g.inputs.beta, one.kept[b], "dbeta"));
            }
          }
        }
      });
    }
  }
}

TEST(BatchMasks, KeysAndQueriesHaveTheirOwn) {
  const plain attn({.head_dim = 5, .value_dim = 9, .heads = 2});
  auto ws = linattn::make_workspaces(attn, 3);
  inputs_for<plain> in(attn, {37, 37, 37});
  batch_for<plain> x(attn, in, layout::bnhd);
  const std::vector<std::int32_t> keys = {20, 0, 37}, queries = {0, 5, 30};
  linattn::forward(attn, {}, x.q.view(), x.k.view(), x.v.view(), x.out.view(), ws, linattn::sequential(),
                   {.mask = linattn::token_mask::lengths(keys), .query_mask = linattn::token_mask::lengths(queries)});
  for (std::size_t b = 0; b < 3; ++b) {
    const row_matrix<float> out =
        attn.forward(in.q[b].topRows(queries[b]), in.k[b].topRows(keys[b]), in.v[b].topRows(keys[b]));
    std::vector<Index> rows;
    for (Index i = 0; i < queries[b]; ++i) rows.push_back(i);
    EXPECT_TRUE(is_spread(x.out.get(Index(b)), out, rows, "sequence " + std::to_string(b)));
  }
}

// ---- errors ---------------------------------------------------------------------------------------------------------

TEST(BatchErrors, ShapesAreRefusedBeforeAnythingIsWritten) {
  const plain attn({.head_dim = 4, .heads = 2});
  auto ws = linattn::make_workspaces(attn, 2);
  auto states = linattn::make_states(attn, 3);
  std::vector<float> x(3 * 5 * 2 * 4, 1.0F), out(x.size(), 7.0F);
  const auto view = [&](Index B, Index N, Index H, Index D) {
    return linattn::bnhd<const float>(x.data(), B, N, H, D);
  };
  const auto good = view(3, 5, 2, 4);
  const auto to = linattn::bnhd(out.data(), 3, 5, 2, 4);
  const auto run = [&](auto q, auto k, auto v, auto o) {
    return support::refusal([&] { linattn::forward_causal(attn, states, q, k, v, o, ws); });
  };
  EXPECT_EQ(run(good, view(2, 5, 2, 4), good, to),
            "linattn::forward_causal: k has 2 sequences of 2 heads of 4 elements, expected 3 of 2 of 4");
  EXPECT_EQ(run(good, good, view(3, 4, 2, 4), to), "linattn::forward_causal: v has 4 tokens in sequence 0, expected 5");
  EXPECT_EQ(run(view(3, 5, 1, 8), good, good, to),
            "linattn::forward_causal: q has 3 sequences of 1 heads of 8 elements, expected 3 of 2 of 4");
  EXPECT_EQ(run(good, good, good, linattn::bnhd(out.data(), 3, 5, 4, 2)),
            "linattn::forward_causal: out has 3 sequences of 4 heads of 2 elements, expected 3 of 2 of 4");
  states.pop_back();
  EXPECT_EQ(run(good, good, good, to), "linattn::forward_causal: 2 states are given for 3 sequences");
  states.push_back(plain({.head_dim = 8}).make_state());
  EXPECT_EQ(run(good, good, good, to),
            "linattn::forward_causal: the state is (1 heads, 8 features, 8 values), expected (2 heads, 4 features, 4 "
            "values)");
  states.back() = attn.make_state();
  ws.clear();
  EXPECT_EQ(run(good, good, good, to),
            "linattn::forward_causal: no workspaces are given; make_workspaces(attn, n) makes n");
  ws.push_back(plain({.head_dim = 8}).make_workspace());
  EXPECT_NE(run(good, good, good, to).find("take it from this operator's make_workspace()"), std::string::npos);
  ws = linattn::make_workspaces(attn, 1);
  EXPECT_EQ(support::refusal([&] { linattn::step(attn, states, good, good, good, to, ws); }),
            "linattn::step: q has 5 tokens in sequence 0, expected 1");
  auto few = linattn::make_states(attn, 7);
  EXPECT_EQ(support::refusal([&] {
              linattn::forward_causal(attn, states, good, good, good, to, ws, linattn::sequential(), {.segments = few});
            }),
            "linattn::forward_causal: 7 states are given for the segments of 3 sequences; G segments take G + 1 states "
            "for each sequence");
  for (const float one : out) EXPECT_EQ(one, 7.0F);
  for (const auto& s : states) EXPECT_EQ(s.tokens(), 0);
}

TEST(BatchErrors, InputsOfARuleAreAskedFor) {
  const linattn::linear_attention<linattn::identity, linattn::gated_delta<>> attn({.head_dim = 4});
  auto ws = linattn::make_workspaces(attn, 1);
  std::vector<float> x(12, 0.5F), out(12);
  const auto good = linattn::bnhd<const float>(x.data(), 1, 3, 1, 4);
  const auto gate = linattn::bnhd<const float>(x.data(), 1, 3, 1, 1);
  const auto run = [&](const linattn::batch_inputs<std::remove_const_t<decltype(attn)>>& given) {
    return support::refusal(
        [&] { linattn::forward_causal(attn, {}, good, good, good, given, linattn::bnhd(out.data(), 1, 3, 1, 4), ws); });
  };
  EXPECT_NE(run({.log_decay = gate, .beta = {}}).find("beta has 0 sequences"), std::string::npos);
  EXPECT_NE(run({.log_decay = good, .beta = gate})
                .find("log_decay has 1 sequences of 1 heads of 4 elements, expected "
                      "1 of 1 of 1"),
            std::string::npos);
  EXPECT_EQ(run({.log_decay = gate, .beta = gate}), "");
}

TEST(BatchErrors, PoolsWithASlotTwiceAreRefused) {
  const plain attn({.head_dim = 4});
  auto ws = linattn::make_workspaces(attn, 1);
  std::vector<std::byte> memory(std::size_t(attn.state_bytes() * 4 + 64));
  void* at = memory.data();
  std::size_t space = memory.size();
  std::align(64, std::size_t(attn.state_bytes() * 4), at, space);
  const std::int32_t slots[] = {1, 3, 1};
  const linattn::state_pool pool{at, attn.state_bytes(), slots, 4};
  for (const std::int32_t slot : {0, 1, 2, 3}) attn.make_state(pool[slot]);
  row_matrix<float> x = row_matrix<float>::Ones(3, 4), out = x;
  const auto one = [](auto& m) { return linattn::one_each(m, 1); };
  EXPECT_EQ(support::refusal([&] { linattn::step(attn, pool, one(x), one(x), one(x), one(out), ws); }),
            "linattn::step: sequence 2 has slot 1, which an earlier one has, too");
}

TEST(BatchErrors, ViewsRefuseWhatTheyCannotBe) {
  std::vector<float> x(24);
  row_matrix<float> rows(6, 4);
  const std::vector<std::int32_t> falling = {0, 4, 2, 6}, beyond = {0, 7}, none = {};
  EXPECT_EQ(support::refusal([&] { linattn::bnhd(x.data(), -1, 2, 3, 4); }),
            "linattn::batch_view: a size is negative: -1 sequences, 2 tokens, 3 heads, 4 elements");
  EXPECT_EQ(support::refusal([&] { linattn::bnhd(static_cast<float*>(nullptr), 1, 2, 3, 4); }),
            "linattn::batch_view: a null pointer cannot hold 1 sequences of 2 tokens");
  EXPECT_EQ(support::refusal([&] {
              batch_view(x.data(), {2, 3, 1, 4}, {12, 2, 4});
            }),
            "linattn::batch_view: elements of an output overlap: a stride of 2 over 4");
  EXPECT_EQ(support::refusal([&] { batch_view<const float>(x.data(), {2, 3, 1, 4}, {0, 0, 0}); }), "");
  EXPECT_NE(support::refusal([&] { linattn::packed(rows, falling, 1); }).find("has 2 after 4, among 6 rows"),
            std::string::npos);
  EXPECT_NE(support::refusal([&] { linattn::packed(rows, beyond, 1); }).find("has 7 after 0, among 6 rows"),
            std::string::npos);
  EXPECT_NE(support::refusal([&] { linattn::packed(rows, none, 1); }).find("cu_seqlens is empty"), std::string::npos);
  EXPECT_EQ(support::refusal([&] {
              linattn::packed(rows, std::vector<std::int64_t>{0, 6}, 3);
            }),
            "linattn::packed: rows of 4 elements are not 3 heads of one size");
}

TEST(BatchErrors, MasksOfOtherShapesAreRefused) {
  const plain attn({.head_dim = 4});
  auto ws = linattn::make_workspaces(attn, 1);
  std::vector<float> x(24, 0.5F), out(24);
  const auto good = linattn::bnhd<const float>(x.data(), 2, 3, 1, 4);
  const auto run = [&](const linattn::batch_options<plain>& o) {
    return support::refusal([&] {
      linattn::forward_causal(attn, {}, good, good, good, linattn::bnhd(out.data(), 2, 3, 1, 4), ws,
                              linattn::sequential(), o);
    });
  };
  const row_matrix<bool> attention = row_matrix<bool>::Constant(3, 3, true);
  const row_matrix<bool> longer = row_matrix<bool>::Constant(2, 4, true);
  const std::vector<int> three = {1, 2, 3}, beyond = {1, 4};
  EXPECT_NE(run({.mask = attention}).find("a mask of the attention matrix"), std::string::npos);
  EXPECT_NE(run({.mask = longer}).find("the mask is (2, 4), expected (2, 3)"), std::string::npos);
  EXPECT_NE(run({.mask = linattn::token_mask::lengths(three)}).find("are 3, expected 2"), std::string::npos);
  EXPECT_NE(run({.mask = linattn::token_mask::lengths(beyond)}).find("is 4, outside 0 ... 3"), std::string::npos);
  EXPECT_NE(run({.query_mask = linattn::token_mask::lengths(three)}).find("give mask"), std::string::npos);
  const auto none = linattn::bnhd<const float>(x.data(), 0, 3, 1, 4);
  const row_matrix<bool> of_none(0, 3);
  EXPECT_EQ(support::refusal(
                [&] { linattn::absorb(attn, {}, none, none, {}, ws, linattn::sequential(), {.mask = of_none}); }),
            "");
  row_matrix<float> rows(6, 4);
  const std::vector<std::int32_t> offsets = {0, 2, 6};
  const auto ragged = linattn::packed(std::as_const(rows), offsets, 1);
  EXPECT_NE(support::refusal([&] {
              linattn::absorb(attn, {}, ragged, ragged, {}, ws, linattn::sequential(),
                              {.mask = linattn::token_mask::lengths(beyond)});
            }).find("packed sequences"),
            std::string::npos);
}

TEST(BatchErrors, OptionsThatAVerbDoesNotTakeAreRefused) {
  const plain attn({.head_dim = 4});
  auto ws = linattn::make_workspaces(attn, 1);
  auto scratch = linattn::make_states(attn, 4);
  std::vector<float> x(24, 0.5F), out(24), dq(24), dk(24), dv(24);
  const auto of = [](std::vector<float>& data) { return linattn::bnhd(data.data(), 2, 3, 1, 4); };
  const std::vector<int> two = {1, 2};
  const auto mask = linattn::token_mask::lengths(two);
  using options = linattn::batch_options<plain>;
  const auto absorb = [&](const options& o) {
    return support::refusal([&] { linattn::absorb(attn, {}, of(x), of(x), ws, linattn::sequential(), o); });
  };
  const auto read = [&](const options& o) {
    return support::refusal([&] { linattn::read(attn, {}, of(x), of(out), ws, linattn::sequential(), o); });
  };
  const auto forward = [&](const options& o) {
    return support::refusal(
        [&] { linattn::forward(attn, {}, of(x), of(x), of(x), of(out), ws, linattn::sequential(), o); });
  };
  const auto vjp = [&](const options& o) {
    return support::refusal(
        [&] { linattn::vjp(attn, of(x), of(x), of(x), of(x), of(dq), of(dk), of(dv), ws, linattn::sequential(), o); });
  };
  EXPECT_NE(absorb({.query_mask = mask}).find("give mask"), std::string::npos);
  EXPECT_NE(read({.mask = mask}).find("give query_mask"), std::string::npos);
  for (const std::string& said : {absorb({.segments = scratch}), read({.segments = scratch}),
                                  forward({.segments = scratch}), vjp({.segments = scratch})}) {
    EXPECT_NE(said.find("segments are given, which are forward_causal's alone"), std::string::npos) << said;
  }
  EXPECT_EQ(absorb({.mask = mask}), "");
  EXPECT_EQ(read({.query_mask = mask}), "");
}

TEST(BatchErrors, OutputsOverInputsAreAsserted) {
  const plain attn({.head_dim = 4, .heads = 2});
  auto ws = linattn::make_workspaces(attn, 1);
  auto states = linattn::make_states(attn, 2);
  std::vector<float> x(3 * 48, 0.5F);  // q, k and v side by side, and heads of them that are outputs
  const auto part = [&](Index column) { return batch_view<float>(x.data() + column, {2, 3, 2, 4}, {3 * 24, 24, 4}); };
  failed_assertion.clear();
  linattn::forward_causal(attn, states, part(0), part(0), part(8), part(16), ws);
  EXPECT_EQ(failed_assertion, "");  // columns side by side do not overlap
  linattn::forward_causal(attn, states, part(0), part(0), part(8), part(12), ws);
  EXPECT_NE(failed_assertion.find("an output of a batch overlaps an input"), std::string::npos);
  failed_assertion.clear();
  linattn::vjp_causal(attn, states, part(0), part(0), part(0), {}, part(0), states, part(8), part(8), part(8), {}, ws);
  EXPECT_NE(failed_assertion.find("are other states"), std::string::npos);
  failed_assertion.clear();
}

TEST(BatchErrors, SegmentsAmongTheStatesOfTheBatchAreRefused) {
  const plain attn({.head_dim = 4});
  auto ws = linattn::make_workspaces(attn, 1);
  auto all = linattn::make_states(attn, 6);
  std::vector<float> x(24, 0.5F), out(24);
  const auto good = linattn::bnhd<const float>(x.data(), 2, 3, 1, 4);
  EXPECT_EQ(support::refusal([&] {
              linattn::forward_causal(attn, std::span(all).first(2), good, good, good,
                                      linattn::bnhd(out.data(), 2, 3, 1, 4), ws, linattn::sequential(),
                                      {.segments = all});
            }),
            "linattn::forward_causal: the states for the segments are states of the batch; they are scratch, of their "
            "own");
  EXPECT_EQ(all[0].tokens(), 0);
}

TEST(BatchAllocation, IsTheExecutorsAlone) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  const gated_delta attn({.head_dim = 5, .value_dim = 70, .heads = 3});
  for (const Index width : {1, 3, 20}) {
    auto ws = linattn::make_workspaces(attn, width);
    auto states = linattn::make_states(attn, 3);
    const inputs_for<gated_delta> in(attn, {37, 37, 37});
    batch_for<gated_delta> x(attn, in, layout::bnhd), d(attn, in, layout::bnhd);
    const linattn::batch_input_gradients<gated_delta> dx{.log_decay = d.log_decay.view(), .beta = d.beta.view()};
    const any_executor executor{any_executor::kind::sequential, nullptr};
    const support::allocation_count count;
    linattn::forward_causal(attn, states, x.q.view(), x.k.view(), x.v.view(), x.x, x.out.view(), ws, executor);
    linattn::vjp_causal(attn, {}, x.q.view(), x.k.view(), x.v.view(), x.x, x.dout.view(), {}, d.q.view(), d.k.view(),
                        d.v.view(), dx, ws, executor);
    EXPECT_EQ(count.total(), 0) << width;
  }
}

TEST(BatchErrors, SegmentsOfADeltaRuleAreRefused) {
  const linattn::linear_attention<linattn::identity, linattn::delta> attn({.head_dim = 4});
  auto ws = linattn::make_workspaces(attn, 1);
  auto scratch = linattn::make_states(attn, 3);
  std::vector<float> x(12, 0.5F), out(12);
  const auto good = linattn::bnhd<const float>(x.data(), 1, 3, 1, 4);
  const auto beta = linattn::bnhd<const float>(x.data(), 1, 3, 1, 1);
  EXPECT_NE(support::refusal([&] {
              linattn::forward_causal(attn, {}, good, good, good, {.beta = beta}, linattn::bnhd(out.data(), 1, 3, 1, 4),
                                      ws, linattn::sequential(), {.segments = scratch});
            }).find("segments of one sequence are for rules whose states merge"),
            std::string::npos);
}

}  // namespace
