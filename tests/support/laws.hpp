// The laws of linear_attention.hpp as a typed test suite, instantiated per feature map by tests/test_laws_<map>.cpp:
//
//   using types = testing::Types<support::subject<linattn::relu, float>, support::subject<linattn::relu, double, 8,
//   3>>; INSTANTIATE_TYPED_TEST_SUITE_P(relu, Laws, types, support::subject_names);
//
// trial.hpp says how results are compared.
#pragma once

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/sentinel.hpp"
#include "support/trial.hpp"

#include <gtest/gtest.h>
#include <Eigen/Core>

#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace support {

/// Rows from `first` on hold nothing but `value`.
template <class T>
void spoil_rows(row_matrix<T>& x, Index first, T value) {
  x.bottomRows(x.rows() - first).setConstant(value);
}

}  // namespace support

template <class Subject>
class Laws : public testing::Test {
 public:
  using scalar = typename Subject::scalar;
  static constexpr scalar nan = std::numeric_limits<scalar>::quiet_NaN();

  /// What may stand in rows that are not looked at. -ffast-math promises nothing about NaN and infinity.
  static std::vector<scalar> garbage() {
#if defined(__FAST_MATH__)
    return {scalar(7), scalar(1e30)};
#else
    constexpr scalar infinity = std::numeric_limits<scalar>::infinity();
    return {nan, infinity, -infinity, scalar(7)};
#endif
  }

  template <class F>
  static void all(const F& f) {
    support::for_each_trial<Subject>(Subject::shapes(), Subject::modes(), f);
  }
  template <class F>
  static void few(const F& f) {
    support::for_each_trial<Subject>(Subject::few_shapes(), Subject::modes(), f);
  }
  /// One mode, the first, where a law has nothing to do with them.
  template <class F>
  static void plain(const F& f) {
    support::for_each_trial<Subject>(Subject::few_shapes(), {Subject::modes().front()}, f);
  }
};
TYPED_TEST_SUITE_P(Laws);

#define LINATTN_LAW_TYPES                          \
  using Law = Laws<TypeParam>;                     \
  using T [[maybe_unused]] = typename Law::scalar; \
  using matrix [[maybe_unused]] = support::row_matrix<T>

// Law 1. step = absorb of one row, then read of one row.
TYPED_TEST_P(Laws, Law1StepIsAbsorbThenRead) {
  LINATTN_LAW_TYPES;
  Law::all([](auto& t) {
    const Eigen::Index n = 11;
    const auto x = t.inputs(n, 1);
    const auto e = t.causal(x);
    auto stepped = t.attn.make_state();
    auto halved = t.attn.make_state();
    matrix out_step = t.empty_out(n);
    matrix out_read = t.empty_out(n);
    t.fold(stepped, x, 0, n, out_step);
    for (Eigen::Index i = 0; i < n; ++i) {
      t.attn.absorb(halved, x.k.row(i), x.v.row(i), t.ws);
      t.attn.read(halved, x.q.row(i), out_read.row(i), t.ws);
    }
    EXPECT_TRUE(t.agree(out_step, out_read, e.out));
    EXPECT_TRUE(t.near(stepped, e));
    EXPECT_TRUE(t.near(halved, e));
    EXPECT_EQ(stepped.tokens(), n);
    EXPECT_EQ(halved.tokens(), n);
  });
}

// Law 2. forward_causal = step over the rows.
TYPED_TEST_P(Laws, Law2CausalIsTheFoldOfStep) {
  LINATTN_LAW_TYPES;
  Law::all([](auto& t) {
    const Eigen::Index n = 37;
    const auto x = t.inputs(n, 2);
    const auto e = t.causal(x);
    auto bulk = t.attn.make_state();
    auto folded = t.attn.make_state();
    matrix out = t.empty_out(n);
    matrix out_step = t.empty_out(n);
    t.attn.forward_causal(bulk, x.q, x.k, x.v, out, t.ws);
    t.fold(folded, x, 0, n, out_step);
    EXPECT_TRUE(t.near(out, e.out));
    EXPECT_TRUE(t.near(out_step, e.out));
    EXPECT_TRUE(t.near(bulk, e));
    EXPECT_TRUE(t.near(folded, e));
    EXPECT_EQ(bulk.tokens(), n);
  });
}

// Law 2. A sequence may be split anywhere: prefill then prefill, prefill then decode, decode then prefill.
TYPED_TEST_P(Laws, Law2EverySplitGivesTheSame) {
  LINATTN_LAW_TYPES;
  Law::plain([](auto& t) {
    const Eigen::Index n = 67;
    const auto x = t.inputs(n, 3);
    const auto e = t.causal(x);
    for (Eigen::Index split = 0; split <= n; ++split) {
      SCOPED_TRACE("split at " + std::to_string(split));
      const Eigen::Index rest = n - split;
      for (int kind = 0; kind < 3; ++kind) {
        auto s = t.attn.make_state();
        matrix out = t.empty_out(n);
        const auto part = [&](bool bulk, Eigen::Index first, Eigen::Index rows) {
          if (bulk) {
            t.attn.forward_causal(s, x.q.middleRows(first, rows), x.k.middleRows(first, rows),
                                  x.v.middleRows(first, rows), out.middleRows(first, rows), t.ws);
          } else {
            t.fold(s, x, first, rows, out);
          }
        };
        part(kind != 2, 0, split);
        part(kind != 1, split, rest);
        ASSERT_TRUE(t.near(out, e.out)) << "kind " << kind;
        ASSERT_TRUE(t.near(s, e)) << "kind " << kind;
        ASSERT_EQ(s.tokens(), n);
      }
    }
  });
}

// Law 2. Segments of awkward lengths, an empty one among them.
TYPED_TEST_P(Laws, Law2SegmentsGiveTheSame) {
  LINATTN_LAW_TYPES;
  Law::few([](auto& t) {
    const Eigen::Index lengths[] = {1, 7, 64, 1, 0, 100};
    const Eigen::Index n = 173;
    const auto x = t.inputs(n, 4);
    const auto e = t.causal(x);
    auto s = t.attn.make_state();
    matrix out = t.empty_out(n);
    Eigen::Index first = 0;
    for (const Eigen::Index rows : lengths) {
      t.attn.forward_causal(s, x.q.middleRows(first, rows), x.k.middleRows(first, rows), x.v.middleRows(first, rows),
                            out.middleRows(first, rows), t.ws);
      first += rows;
    }
    EXPECT_TRUE(t.near(out, e.out));
    EXPECT_TRUE(t.near(s, e));
    EXPECT_EQ(s.tokens(), n);
  });
}

// Law 3. forward = absorb everything, then read everything, for any numbers of queries and keys.
TYPED_TEST_P(Laws, Law3ForwardIsAbsorbThenRead) {
  LINATTN_LAW_TYPES;
  Law::all([](auto& t) {
    for (const auto& [queries, keys] :
         {std::pair<Eigen::Index, Eigen::Index>{9, 33}, {33, 9}, {5, 1}, {1, 5}, {3, 0}}) {
      SCOPED_TRACE(std::to_string(queries) + " queries, " + std::to_string(keys) + " keys");
      const auto x = t.inputs(queries, keys, 5);
      const auto e = t.noncausal(x);
      auto s = t.attn.make_state();
      matrix out = t.empty_out(queries);
      matrix out_read = t.empty_out(queries);
      t.attn.forward(x.q, x.k, x.v, out, t.ws);
      t.attn.absorb(s, x.k, x.v, t.ws);
      t.attn.read(s, x.q, out_read, t.ws);
      ASSERT_TRUE(t.agree(out, out_read, e.out));
      ASSERT_TRUE(t.near(out, e.out));
      ASSERT_TRUE(t.near(s, e));
    }
  });
}

// Law 3. The order of the keys does not matter.
TYPED_TEST_P(Laws, Law3TheOrderOfKeysDoesNotMatter) {
  LINATTN_LAW_TYPES;
  Law::few([](auto& t) {
    const Eigen::Index n = 41;
    const auto x = t.inputs(6, n, 6);
    const auto e = t.noncausal(x);
    auto shuffled = x;
    for (Eigen::Index j = 0; j < n; ++j) {
      shuffled.k.row(j) = x.k.row((j * 17 + 5) % n);
      shuffled.v.row(j) = x.v.row((j * 17 + 5) % n);
    }
    auto s = t.attn.make_state();
    auto s_shuffled = t.attn.make_state();
    EXPECT_TRUE(t.agree(t.attn.forward(s, x.q, x.k, x.v),
                        t.attn.forward(s_shuffled, shuffled.q, shuffled.k, shuffled.v), e.out));
    EXPECT_TRUE(t.near(s_shuffled, e));
  });
}

// Law 4. absorb(A), absorb(B) = absorb(A stacked on B) = a.merge(b).
TYPED_TEST_P(Laws, Law4PartsMayBeAbsorbedInTurnOrMerged) {
  LINATTN_LAW_TYPES;
  Law::few([](auto& t) {
    const Eigen::Index n = 45;
    const auto x = t.inputs(n, 7);
    const auto e = t.noncausal(x);
    for (const Eigen::Index split : {0, 1, 4, 17, 44, 45}) {
      SCOPED_TRACE("split at " + std::to_string(split));
      const Eigen::Index rest = n - split;
      auto whole = t.attn.make_state();
      auto in_turn = t.attn.make_state();
      auto merged = t.attn.make_state();
      auto later = t.attn.make_state();
      t.attn.absorb(whole, x.k, x.v, t.ws);
      t.attn.absorb(in_turn, x.k.topRows(split), x.v.topRows(split), t.ws);
      t.attn.absorb(in_turn, x.k.bottomRows(rest), x.v.bottomRows(rest), t.ws);
      t.attn.absorb(merged, x.k.topRows(split), x.v.topRows(split), t.ws);
      t.attn.absorb(later, x.k.bottomRows(rest), x.v.bottomRows(rest), t.ws);
      merged.merge(later);
      for (const auto* s : {&whole, &in_turn, &merged}) {
        ASSERT_TRUE(t.near(*s, e));
        ASSERT_EQ(s->tokens(), n);
        ASSERT_TRUE(t.near(t.attn.read(*s, x.q), e.out));
      }
    }
  });
}

// Law 5. The same shapes give the same bits: again, in another workspace, from and to other addresses and strides.
TYPED_TEST_P(Laws, Law5TheSameCallGivesTheSameBits) {
  LINATTN_LAW_TYPES;
  Law::all([](auto& t) {
    const Eigen::Index n = 38;
    const auto x = t.inputs(n, 8);
    auto s = t.attn.make_state();
    auto s_again = t.attn.make_state();
    matrix causal = t.empty_out(n);
    matrix noncausal = t.empty_out(n);
    t.attn.forward_causal(s, x.q, x.k, x.v, causal, t.ws);
    t.attn.forward(x.q, x.k, x.v, noncausal, t.ws);

    support::exact_buffer<T> q(x.q, 3, 1), k(x.k, 1, 3), v(x.v, 2, 5);
    support::framed<T> out(n, t.out_cols());
    auto ws = t.attn.make_workspace();
    t.attn.forward_causal(s_again, q.matrix(), k.matrix(), v.matrix(), out.matrix(), ws);
    EXPECT_TRUE(support::same_bits(out.matrix(), causal));
    for (Eigen::Index h = 0; h < t.size.heads; ++h) {
      EXPECT_TRUE(support::same_bits(s_again.kv(h), s.kv(h)));
      EXPECT_TRUE(support::same_bits(s_again.k_sum(h), s.k_sum(h)));
    }
    t.attn.forward(q.matrix(), k.matrix(), v.matrix(), out.matrix(), ws);
    EXPECT_TRUE(support::same_bits(out.matrix(), noncausal));
    EXPECT_TRUE(out.frame_intact());

    EXPECT_TRUE(support::same_bits(t.attn.forward_causal(x.q, x.k, x.v), causal));
    EXPECT_TRUE(support::same_bits(t.attn.forward(x.q, x.k, x.v), noncausal));
  });
}

// Law 6. Rows after i, whatever they hold, leave row i bitwise alone.
TYPED_TEST_P(Laws, Law6LaterRowsLeaveEarlierBitsAlone) {
  LINATTN_LAW_TYPES;
  Law::few([](auto& t) {
    const Eigen::Index n = 38;
    const auto x = t.inputs(n, 9);
    auto before = t.attn.make_state();
    t.random_initial(before, 9);
    auto s = before;
    const matrix out = t.attn.forward_causal(s, x.q, x.k, x.v);
    for (const Eigen::Index kept : {0, 1, 2, 3, 4, 5, 7, 8, 9, 30, 31, 32, 33, 37}) {
      for (const T garbage : Law::garbage()) {
        auto changed = x;
        support::spoil_rows(changed.q, kept, garbage);
        support::spoil_rows(changed.k, kept, garbage);
        support::spoil_rows(changed.v, kept, garbage);
        s = before;
        const matrix out_changed = t.attn.forward_causal(s, changed.q, changed.k, changed.v);
        ASSERT_TRUE(support::same_bits(out_changed.topRows(kept), out.topRows(kept)))
            << kept << " rows kept, then " << garbage;
      }
    }
  });
}

// Law 6. A shorter call gives the same bits for the rows it has.
TYPED_TEST_P(Laws, Law6AShorterCallGivesTheSameBits) {
  LINATTN_LAW_TYPES;
  Law::few([](auto& t) {
    const Eigen::Index n = 67;
    const auto x = t.inputs(n, 10);
    auto before = t.attn.make_state();
    t.random_initial(before, 10);
    auto s = before;
    const matrix out = t.attn.forward_causal(s, x.q, x.k, x.v);
    const matrix out_read = t.attn.read(before, x.q);
    for (Eigen::Index rows = 0; rows < n; ++rows) {
      s = before;
      ASSERT_TRUE(support::same_bits(t.attn.forward_causal(s, x.q.topRows(rows), x.k.topRows(rows), x.v.topRows(rows)),
                                     out.topRows(rows)))
          << rows << " rows, causal";
      ASSERT_TRUE(support::same_bits(t.attn.read(before, x.q.topRows(rows)), out_read.topRows(rows)))
          << rows << " rows, read";
    }
  });
}

// Law 6, the other direction: NaN is not swallowed. In row i of q it makes row i NaN and no other; in row j of k the
// rows that see j, of its head; in one element of v the rows that see it, of its column.
TYPED_TEST_P(Laws, Law6NaNReachesTheRowsThatSeeItAndNoOthers) {
  LINATTN_LAW_TYPES;
#if defined(__FAST_MATH__)
  GTEST_SKIP() << "-ffast-math promises nothing about NaN";
#endif
  Law::plain([](auto& t) {
    const Eigen::Index n = 38;
    const Eigen::Index D = t.size.head_dim;
    const Eigen::Index M = t.size.value_dim;
    const Eigen::Index head = t.size.heads - 1;
    const auto x = t.inputs(n, 11);
    const matrix causal = t.attn.forward_causal(x.q, x.k, x.v);
    const matrix noncausal = t.attn.forward(x.q, x.k, x.v);
    /// Everything in rows [first, first + rows), columns [col, col + cols) is NaN, all else as it was.
    const auto nan_exactly = [](const matrix& out, const matrix& was, Eigen::Index first, Eigen::Index rows,
                                Eigen::Index col, Eigen::Index cols) {
      if (const auto r = support::all_nan(out.block(first, col, rows, cols)); !r) return r;
      matrix rest = out;
      rest.block(first, col, rows, cols) = was.block(first, col, rows, cols);
      return support::same_bits(rest, was);
    };
    for (const Eigen::Index j : {0, 1, 3, 4, 6, 31, 32, 37}) {
      SCOPED_TRACE("NaN in row " + std::to_string(j));
      auto changed = x;
      changed.q(j, head * D + D - 1) = Law::nan;
      ASSERT_TRUE(nan_exactly(t.attn.forward_causal(changed.q, x.k, x.v), causal, j, 1, head * M, M)) << "q, causal";
      ASSERT_TRUE(nan_exactly(t.attn.forward(changed.q, x.k, x.v), noncausal, j, 1, head * M, M)) << "q, forward";
      changed.k(j, head * D + D - 1) = Law::nan;
      ASSERT_TRUE(nan_exactly(t.attn.forward_causal(x.q, changed.k, x.v), causal, j, n - j, head * M, M))
          << "k, causal";
      ASSERT_TRUE(nan_exactly(t.attn.forward(x.q, changed.k, x.v), noncausal, 0, n, head * M, M)) << "k, forward";
      changed.v(j, head * M + M - 1) = Law::nan;
      ASSERT_TRUE(nan_exactly(t.attn.forward_causal(x.q, x.k, changed.v), causal, j, n - j, head * M + M - 1, 1))
          << "v, causal";
      ASSERT_TRUE(nan_exactly(t.attn.forward(x.q, x.k, changed.v), noncausal, 0, n, head * M + M - 1, 1))
          << "v, forward";
    }
  });
}

// Law 6, the receptive field: with positive weights every row that a row sees changes it, in every head and column.
TYPED_TEST_P(Laws, Law6EveryRowThatIsSeenMatters) {
  LINATTN_LAW_TYPES;
  Law::few([](auto& t) {
    const Eigen::Index n = 38;
    const auto x = t.positive_inputs(n, 12);
    const matrix causal = t.attn.forward_causal(x.q, x.k, x.v);
    const matrix noncausal = t.attn.forward(x.q, x.k, x.v);
    for (Eigen::Index j = 0; j < n; ++j) {
      auto changed = x;
      changed.v.row(j).array() += T(1);
      const matrix moved = t.attn.forward_causal(changed.q, changed.k, changed.v) - causal;
      const matrix moved_noncausal = t.attn.forward(changed.q, changed.k, changed.v) - noncausal;
      ASSERT_TRUE(support::all_zero(moved.topRows(j))) << "v row " << j << " changed";
      ASSERT_GT(moved.bottomRows(n - j).minCoeff(), T(0)) << "v row " << j << " changed";
      ASSERT_GT(moved_noncausal.minCoeff(), T(0)) << "v row " << j << " changed";
    }
  });
}

// Law 7. Weights are an average: V = 1 gives 1, row 0 is v_0, outputs stay within the values. With an epsilon that is
// added, V = 1 gives den / (den + eps).
TYPED_TEST_P(Laws, Law7OutputsAreAveragesOfValues) {
  LINATTN_LAW_TYPES;
  using policy = linattn::denominator_policy;
  support::for_each_trial<TypeParam>(TypeParam::few_shapes(), {{true}}, [](auto& t) {
    const Eigen::Index n = 38;
    auto x = t.positive_inputs(n, 13);
    const auto e = t.causal(x);
    const matrix out = t.attn.forward_causal(x.q, x.k, x.v);
    EXPECT_TRUE(support::near(out.topRows(1), support::wide(x.v.topRows(1)), e.out.size.topRows(1),
                              TypeParam::facts::roundings));
    const matrix noncausal = t.attn.forward(x.q, x.k, x.v);
    // By how much an average of numbers up to 5 may leave their range.
    const T slack = static_cast<T>(5 * TypeParam::facts::roundings) * std::numeric_limits<T>::epsilon();
    for (Eigen::Index c = 0; c < out.cols(); ++c) {
      for (Eigen::Index i = 0; i < n; ++i) {
        EXPECT_GE(out(i, c), x.v.col(c).head(i + 1).minCoeff() - slack);
        EXPECT_LE(out(i, c), x.v.col(c).head(i + 1).maxCoeff() + slack);
      }
      EXPECT_GE(noncausal.col(c).minCoeff(), x.v.col(c).minCoeff() - slack);
      EXPECT_LE(noncausal.col(c).maxCoeff(), x.v.col(c).maxCoeff() + slack);
    }
    x.v.setOnes();
    const auto ones = t.causal(x);
    EXPECT_TRUE(support::near(t.attn.forward_causal(x.q, x.k, x.v), support::wide(x.v), ones.out.size,
                              TypeParam::facts::roundings));
    auto s = t.attn.make_state();
    matrix stepped = t.empty_out(n);
    t.fold(s, x, 0, n, stepped);
    EXPECT_TRUE(support::near(stepped, support::wide(x.v), ones.out.size, TypeParam::facts::roundings));
    EXPECT_TRUE(t.agree(t.attn.forward(x.q, x.k, x.v), x.v, t.noncausal(x).out));

    support::trial<TypeParam> with_epsilon(t.size, {true, policy::add(0.5)});
    matrix denominators(n, t.size.heads);
    matrix damped = t.empty_out(n);
    with_epsilon.attn.read(s, x.q, damped, t.ws, denominators);
    for (Eigen::Index c = 0; c < damped.cols(); ++c) {
      for (Eigen::Index i = 0; i < n; ++i) {
        const T denominator = denominators(i, c / t.size.value_dim);
        EXPECT_GT(denominator, T(0));
        EXPECT_NEAR(damped(i, c), denominator / (denominator + T(0.5)), slack);
      }
    }
  });
}

// Law 8. The un-normalised output for [V, 1], divided by its last column, is the normalised output.
TYPED_TEST_P(Laws, Law8ANormaliserIsOneMoreValueOfOnes) {
  LINATTN_LAW_TYPES;
  using dynamic = support::subject<typename TypeParam::map, T>;
  support::for_each_trial<TypeParam>(TypeParam::few_shapes(), {{true}}, [](auto& t) {
    const Eigen::Index n = 38;
    const Eigen::Index M = t.size.value_dim;
    const Eigen::Index H = t.size.heads;
    const auto x = t.positive_inputs(n, 14);
    support::trial<dynamic> wider({t.size.head_dim, M + 1, H}, {false});
    matrix with_ones(n, H * (M + 1));
    for (Eigen::Index h = 0; h < H; ++h) {
      with_ones.middleCols(h * (M + 1), M) = x.v.middleCols(h * M, M);
      with_ones.col(h * (M + 1) + M).setOnes();
    }
    for (const bool causal : {true, false}) {
      const matrix undivided =
          causal ? wider.attn.forward_causal(x.q, x.k, with_ones) : wider.attn.forward(x.q, x.k, with_ones);
      matrix quotient(n, H * M);
      for (Eigen::Index h = 0; h < H; ++h) {
        quotient.middleCols(h * M, M) =
            undivided.middleCols(h * (M + 1), M).array().colwise() / undivided.col(h * (M + 1) + M).array();
      }
      const auto e = causal ? t.causal(x) : t.noncausal(x);
      EXPECT_TRUE(
          t.agree(causal ? t.attn.forward_causal(x.q, x.k, x.v) : t.attn.forward(x.q, x.k, x.v), quotient, e.out));
    }
  });
}

// Law 11. Every verb equals the oracle: from a state just made and from any S_0 and z_0, at awkward lengths, into
// outputs whose surroundings must survive.
TYPED_TEST_P(Laws, Law11EveryVerbEqualsTheOracle) {
  LINATTN_LAW_TYPES;
  const auto& lengths = support::awkward_lengths();
  const auto modes = TypeParam::modes();
  const auto shapes = TypeParam::more_shapes();
  // Fixed sizes meet every length in every mode, dynamic shapes three of each, in turn.
  const std::size_t rounds = TypeParam::dynamic ? 3 : lengths.size() * modes.size();
  std::size_t turn = 0;
  for (const support::shape& shape : shapes) {
    for (std::size_t round = 0; round < rounds; ++round, ++turn) {
      support::trial<TypeParam> t(shape, modes[turn % modes.size()]);
      const std::size_t length = TypeParam::dynamic ? turn * 5 : turn / modes.size();
      const Eigen::Index n = lengths[length % lengths.size()];
      const Eigen::Index keys = lengths[(length + 7) % lengths.size()];
      SCOPED_TRACE(t.text() + ", N = " + std::to_string(n) + ", keys " + std::to_string(keys));
      const auto x = t.inputs(n, 15 + turn);
      const auto uneven = t.inputs(n, keys, 15 + turn);

      auto fresh = t.attn.make_state();
      auto before = t.attn.make_state();
      const auto initial = t.random_initial(before, turn);
      for (const bool started : {false, true}) {
        const support::expected_state* known = started ? &initial : nullptr;
        const auto& from = started ? before : fresh;
        const auto e = t.causal(x, known);
        const auto e_uneven = t.noncausal(uneven, known);
        support::framed<T> out(n, t.out_cols());

        auto s = from;
        t.attn.forward_causal(s, x.q, x.k, x.v, out.matrix(), t.ws);
        ASSERT_TRUE(t.near(out.matrix(), e.out)) << "forward_causal with a state";
        ASSERT_TRUE(t.near(s, e)) << "forward_causal with a state";
        if (!started) {
          t.attn.forward_causal(x.q, x.k, x.v, out.matrix(), t.ws);
          ASSERT_TRUE(t.near(out.matrix(), e.out)) << "forward_causal";
        }

        s = from;
        matrix stepped = t.empty_out(n);
        t.fold(s, x, 0, n, stepped);
        ASSERT_TRUE(t.near(stepped, e.out)) << "step";
        ASSERT_TRUE(t.near(s, e)) << "step";

        s = from;
        t.attn.forward(s, uneven.q, uneven.k, uneven.v, out.matrix(), t.ws);
        ASSERT_TRUE(t.near(out.matrix(), e_uneven.out)) << "forward with a state";
        ASSERT_TRUE(t.near(s, e_uneven)) << "forward with a state";
        if (!started) {
          t.attn.forward(uneven.q, uneven.k, uneven.v, out.matrix(), t.ws);
          ASSERT_TRUE(t.near(out.matrix(), e_uneven.out)) << "forward";
        }

        s = from;
        support::framed<T> denominators(n, t.size.heads);
        t.attn.absorb(s, uneven.k, uneven.v, t.ws);
        ASSERT_TRUE(t.near(s, e_uneven)) << "absorb";
        t.attn.read(s, uneven.q, out.matrix(), t.ws, denominators.matrix());
        ASSERT_TRUE(t.near(out.matrix(), e_uneven.out)) << "read";
        ASSERT_TRUE(t.near(denominators.matrix(), e_uneven.denominators)) << "read's denominators";
        ASSERT_TRUE(t.near(s, e_uneven)) << "read must not write";
        ASSERT_TRUE(denominators.frame_intact());
        ASSERT_TRUE(out.frame_intact());
      }
    }
  }
}

// Law 11, the bar: 4096 tokens. Every element within the roundings of its terms. With N(0, 1) inputs, D = 64 and a
// positive elementwise map the relative RMS error is within tolerance<T>::relative_rms. That is a property of sums over
// many features, whose roundings average out: one feature alone leaves 1.7e-6 in float.
TYPED_TEST_P(Laws, Law11FourThousandTokens) {
  LINATTN_LAW_TYPES;
  constexpr bool any_sign = linattn::detail::has_signed_features<typename TypeParam::map>;
  const Eigen::Index n = 4096;
  const support::shape own = TypeParam::shapes().front();
  support::trial<TypeParam> t(TypeParam::dynamic ? support::shape{64, 24, 1} : own, {!any_sign});
  const auto x = t.inputs(n, 16);
  const matrix causal = t.attn.forward_causal(x.q, x.k, x.v);
  const matrix noncausal = t.attn.forward(x.q, x.k, x.v);

  // Some rows: for each in turn the keys since the last one are added to the true state, then its query is asked.
  const Eigen::Index rows[] = {0,   1,   3,   4,   7,   8,    31,   32,   33,   63,   64,   100,  255,
                               256, 511, 777, 800, 999, 1024, 1500, 2047, 2048, 3000, 3500, 4094, 4095};
  const auto count = static_cast<Eigen::Index>(std::size(rows));
  matrix queries(count, x.q.cols());
  matrix sampled(count, t.out_cols());
  matrix sampled_noncausal(count, t.out_cols());
  support::expected truth = {support::wide(sampled), support::wide(sampled)};
  support::expected_state state;
  Eigen::Index seen = 0;
  for (Eigen::Index i = 0; i < count; ++i) {
    const Eigen::Index fresh = rows[i] + 1 - seen;
    const auto e = support::expect(t.oracle, t.oracle_sizes, support::wide(x.q.row(rows[i])),
                                   support::wide(x.k.middleRows(seen, fresh)),
                                   support::wide(x.v.middleRows(seen, fresh)), t.truth, seen == 0 ? nullptr : &state);
    state = e.state;
    seen += fresh;
    truth.value.row(i) = e.out.value;
    truth.size.row(i) = e.out.size;
    queries.row(i) = x.q.row(rows[i]);
    sampled.row(i) = causal.row(rows[i]);
    sampled_noncausal.row(i) = noncausal.row(rows[i]);
  }
  const auto all =
      support::expect(t.oracle, t.oracle_sizes, support::wide(queries), support::wide_matrix(0, x.k.cols()),
                      support::wide_matrix(0, x.v.cols()), t.truth, &state);
  EXPECT_TRUE(t.near(sampled, truth));
  EXPECT_TRUE(t.near(sampled_noncausal, all.out));
  if (TypeParam::dynamic && TypeParam::facts::elementwise && !any_sign) {
    EXPECT_TRUE(support::close(sampled, truth.value, support::tolerance<T>::relative_rms));
    EXPECT_TRUE(support::close(sampled_noncausal, all.out.value, support::tolerance<T>::relative_rms));
  }
}

REGISTER_TYPED_TEST_SUITE_P(Laws, Law1StepIsAbsorbThenRead, Law2CausalIsTheFoldOfStep, Law2EverySplitGivesTheSame,
                            Law2SegmentsGiveTheSame, Law3ForwardIsAbsorbThenRead, Law3TheOrderOfKeysDoesNotMatter,
                            Law4PartsMayBeAbsorbedInTurnOrMerged, Law5TheSameCallGivesTheSameBits,
                            Law6LaterRowsLeaveEarlierBitsAlone, Law6AShorterCallGivesTheSameBits,
                            Law6NaNReachesTheRowsThatSeeItAndNoOthers, Law6EveryRowThatIsSeenMatters,
                            Law7OutputsAreAveragesOfValues, Law8ANormaliserIsOneMoreValueOfOnes,
                            Law11EveryVerbEqualsTheOracle, Law11FourThousandTokens);
