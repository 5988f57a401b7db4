// Law 5, the internal half: the size of the engine's micro-blocks moves rounding only. The operator has two sizes built
// in; here the engine is run with others on the same inputs.
#include "support/trial.hpp"

#include <linattn/detail/engine.hpp>

#include <gtest/gtest.h>

#include <algorithm>

namespace {

using Eigen::Index;

template <class T, class Map>
class Blocks {
 public:
  static constexpr Index Dynamic = Eigen::Dynamic;
  using layout_type = linattn::detail::workspace_layout<T, Dynamic, Dynamic, Dynamic, Dynamic, false>;
  using engine_type = linattn::detail::engine<Map, T, layout_type>;
  using slab_type = linattn::detail::slab<T, Dynamic>;
  using matrix = support::row_matrix<T>;
  using trial_type = support::trial<support::subject<Map, T>>;

  Blocks(const trial_type& t, const support::tokens<T>& x) : m_trial(t), m_x(x) {
    m_layout.head_dim = linattn::detail::extent<Dynamic>(t.size.head_dim);
    m_layout.state.features = linattn::detail::extent<Dynamic>(t.attn.features());
    m_layout.state.value_dim = linattn::detail::extent<Dynamic>(t.size.value_dim);
    m_layout.state.heads = linattn::detail::extent<Dynamic>(t.size.heads);
    m_layout.heads = {t.size.heads, t.size.heads, t.size.heads, linattn::head_sharing::interleaved};
  }

  /// Causal with blocks of B tokens, its [out] and [S z] one below the other.
  template <Index B>
  matrix causal() const {
    slab_type state(m_layout.state.size()), scratch(m_layout.size());
    matrix out = m_trial.empty_out(m_x.q.rows());
    engine().template pass<B, linattn::detail::reads_and_writes>(all_rows(m_x.q.rows(), out), state.data(),
                                                                 scratch.data());
    return with_state(out, state);
  }

  template <Index Writing, Index Reading>
  matrix noncausal() const {
    slab_type state(m_layout.state.size()), scratch(m_layout.size());
    matrix out = m_trial.empty_out(m_x.q.rows());
    engine().template pass<Writing, linattn::detail::writes_only>(all_rows(m_x.k.rows(), out), state.data(),
                                                                  scratch.data());
    engine().template pass<Reading, linattn::detail::reads_only>(all_rows(m_x.q.rows(), out), state.data(),
                                                                 scratch.data());
    return with_state(out, state);
  }

  /// Where [out] and [S z] are expected.
  support::expected expected(const support::expectation& e) const {
    support::expected all = {support::wide_matrix::Zero(rows(), cols()), support::wide_matrix::Zero(rows(), cols())};
    all.value.topLeftCorner(e.out.value.rows(), e.out.value.cols()) = e.out.value;
    all.size.topLeftCorner(e.out.value.rows(), e.out.value.cols()) = e.out.size;
    const Index C = m_trial.attn.features();
    const Index M = m_trial.size.value_dim;
    for (Index h = 0; h < m_trial.size.heads; ++h) {
      const auto head = static_cast<std::size_t>(h);
      const Index first = m_x.q.rows() + h * C;
      all.value.block(first, 0, C, M) = e.state.value.s[head];
      all.size.block(first, 0, C, M) = e.state.size.s[head];
      all.value.block(first, M, C, 1) = e.state.value.z[head].transpose();
      all.size.block(first, M, C, 1) = e.state.size.z[head].transpose();
    }
    return all;
  }

 private:
  typename engine_type::rows_type all_rows(Index tokens, matrix& out) const {
    typename engine_type::rows_type rows;
    rows.tokens = tokens;
    rows.q = {m_x.q, m_trial.size.head_dim};
    rows.k = {m_x.k, m_trial.size.head_dim};
    rows.v = {m_x.v, m_trial.size.value_dim};
    rows.out = {out, m_trial.size.value_dim};
    return rows;
  }
  Index rows() const { return m_x.q.rows() + m_trial.size.heads * m_trial.attn.features(); }
  Index cols() const { return std::max(m_trial.out_cols(), m_trial.size.value_dim + 1); }

  engine_type engine() const {
    return {m_trial.attn.feature_map(), m_layout, static_cast<T>(m_trial.how.query_scale), m_trial.how.denominator,
            m_trial.how.normalize};
  }

  matrix with_state(const matrix& out, const slab_type& state) const {
    matrix all = matrix::Zero(rows(), cols());
    all.topLeftCorner(out.rows(), out.cols()) = out;
    const Index C = m_trial.attn.features();
    const Index M = m_trial.size.value_dim;
    for (Index h = 0; h < m_trial.size.heads; ++h) {
      const T* S = state.data() + h * m_layout.state.head_stride();
      for (Index c = 0; c < C; ++c) {
        for (Index m = 0; m < M; ++m) all(out.rows() + h * C + c, m) = S[c * m_layout.state.row_stride() + m];
        all(out.rows() + h * C + c, M) = S[m_layout.state.z_offset() + c];
      }
    }
    return all;
  }

  const trial_type& m_trial;
  const support::tokens<T>& m_x;
  layout_type m_layout;
};

template <class T>
class LawBlocks : public testing::Test {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(LawBlocks, scalars);

/// Every block size against the oracle, and each twice for its bits.
template <class T, class Map>
void check() {
  using subject = support::subject<Map, T>;
  const std::vector<support::mode> modes = {subject::modes()[0], subject::modes()[1]};
  support::for_each_trial<subject>(subject::few_shapes(), modes, [](auto& t) {
    for (const Index n : {1, 3, 7, 8, 9, 31, 33, 65}) {
      SCOPED_TRACE("N = " + std::to_string(n));
      const auto x = t.inputs(n, 17);
      const Blocks<T, Map> blocks(t, x);
      const auto causal = blocks.expected(t.causal(x));
      ASSERT_TRUE(t.near(blocks.template causal<2>(), causal));
      ASSERT_TRUE(t.near(blocks.template causal<4>(), causal));
      ASSERT_TRUE(t.near(blocks.template causal<8>(), causal));
      const auto noncausal = blocks.expected(t.noncausal(x));
      ASSERT_TRUE((t.near(blocks.template noncausal<1, 4>(), noncausal)));
      ASSERT_TRUE((t.near(blocks.template noncausal<2, 8>(), noncausal)));
      ASSERT_TRUE((t.near(blocks.template noncausal<4, 1>(), noncausal)));
      ASSERT_TRUE((t.near(blocks.template noncausal<8, 2>(), noncausal)));
      ASSERT_TRUE(support::same_bits(blocks.template causal<2>(), blocks.template causal<2>()));
      ASSERT_TRUE(support::same_bits(blocks.template causal<8>(), blocks.template causal<8>()));
    }
  });
}

TYPED_TEST(LawBlocks, MoveRoundingOnlyInAnElementwiseMap) { check<TypeParam, linattn::elu_plus_one>(); }
/// Rows in the cache and rows fetched ahead from memory take different turns through the kernel, not different sums.
TYPED_TEST(LawBlocks, LongSequencesGiveTheBitsOfTheirParts) {
  using T = TypeParam;
  using matrix = support::row_matrix<T>;
  constexpr Index D = 20, M = 9, H = 2, N = 9000, part = 1000;  // N rows are more than 1 MiB, a part is less
  const linattn::linear_attention<linattn::elu_plus_one, linattn::additive, T> attn(
      {.head_dim = D, .value_dim = M, .heads = H});
  const support::attention_inputs<T> x(N, H * D, H * M, 21);
  auto ws = attn.make_workspace();
  auto whole = attn.make_state();
  auto parts = attn.make_state();
  matrix expected(N, H * M), out(N, H * M);
  attn.forward_causal(whole, x.q, x.k, x.v, out, ws);
  for (Index i = 0; i < N; i += part) {
    const Index rows = std::min(part, N - i);
    attn.forward_causal(parts, x.q.middleRows(i, rows), x.k.middleRows(i, rows), x.v.middleRows(i, rows),
                        expected.middleRows(i, rows), ws);
  }
  EXPECT_TRUE(support::same_bits(out, expected));
  for (Index h = 0; h < H; ++h) EXPECT_TRUE(support::same_bits(whole.kv(h), parts.kv(h)));
  attn.forward(x.q, x.k, x.v, out, ws);
  for (Index i = 0; i < N; i += part) {
    const Index rows = std::min(part, N - i);
    attn.read(whole, x.q.middleRows(i, rows), expected.middleRows(i, rows), ws);
  }
  EXPECT_TRUE(support::same_bits(out, expected));
}

TYPED_TEST(LawBlocks, MoveRoundingOnlyInAMapOfTiles) { check<TypeParam, linattn::random_fourier<TypeParam>>(); }

}  // namespace
