// Masks of tokens in the gradients, law 9: those of a sequence with masked rows have the bits of those of the sequence
// without them, whatever the masked rows hold.
#include "support/masked_engine.hpp"

#include <linattn/detail/gradient.hpp>
#include <linattn/detail/gradient_correction.hpp>
#include <linattn/feature_maps/cosformer.hpp>
#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/feature_maps/exponential.hpp>
#include <linattn/feature_maps/identity.hpp>
#include <linattn/update_rules/decay.hpp>
#include <linattn/update_rules/delta.hpp>
#include <linattn/update_rules/gated.hpp>

#include <gtest/gtest.h>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using Eigen::Index;
using support::mask_pattern;
using support::masked_shape;
using matrix = linattn::row_matrix<float>;

constexpr float untouched = -99;
constexpr Index H = 2;

/// Of 90 tokens, three tiles or more; D beside M below and above it.
const std::vector<masked_shape> shapes = {{90, 5, 6}, {90, 20, 9}};

struct gradients {
  matrix dq, dk, dv, dlog_decay, dbeta, dstate;

  std::vector<std::pair<const char*, matrix gradients::*>> rows() const {
    return {{"dq", &gradients::dq},
            {"dk", &gradients::dk},
            {"dv", &gradients::dv},
            {"dlog_decay", &gradients::dlog_decay},
            {"dbeta", &gradients::dbeta}};
  }
};

template <class Map, class Rule>
class problem {
 public:
  using engine_type = support::masked_engine<Map, Rule, float, H, true>;
  using layout_type = typename engine_type::layout_type;
  using sequence = typename engine_type::sequence;
  using slab = typename engine_type::slab;
  static constexpr linattn::rule_traits rule = engine_type::rule;
  using gradient_engine = std::conditional_t<rule.corrects == linattn::correction::none,
                                             linattn::detail::gradient_engine<Map, float, layout_type>,
                                             linattn::detail::correction_gradient_engine<Map, float, layout_type>>;

  problem(const masked_shape& shape, const Map& map) : m_shape(shape), m_engine(shape, map) {}

  const engine_type& engine() const { return m_engine; }

  /// q and k of one mask, from a state and with the gradient of the last one.
  gradients causal(const sequence& x, const matrix& dout, const mask_pattern* mask) const {
    return run(x, x, dout, mask, mask, true);
  }
  /// Queries and keys of masks of their own, from nothing.
  gradients noncausal(const sequence& queries, const sequence& keys, const matrix& dout, const mask_pattern* of_queries,
                      const mask_pattern* of_keys) const {
    return run(queries, keys, dout, of_queries, of_keys, false);
  }

 private:
  gradients run(const sequence& queries, const sequence& keys, const matrix& dout, const mask_pattern* of_queries,
                const mask_pattern* of_keys, bool causal) const {
    const auto same = [](const matrix& x) { return matrix::Constant(x.rows(), x.cols(), untouched).eval(); };
    gradients d{same(queries.q),      same(keys.k),    same(keys.v),
                same(keys.log_decay), same(keys.beta), matrix::Zero(1, m_engine.layout().state.size())};
    const auto rows = [](auto& from, Index dim) {
      using element = std::remove_pointer_t<decltype(from.data())>;
      return linattn::detail::token_rows<element>(linattn::matrix_view<element>(from), dim);
    };
    const auto of_input = m_engine.rows_of(keys, nullptr, keys.tokens());
    linattn::detail::gradient_arguments<float, rule, typename linattn::detail::gradient_of<Map>::type> a;
    a.queries = of_queries != nullptr ? of_queries->count() : queries.tokens();
    a.keys = of_keys != nullptr ? of_keys->count() : keys.tokens();
    a.kept_queries = of_queries != nullptr ? of_queries->kept.data() : nullptr;
    a.kept_keys = of_keys != nullptr ? of_keys->kept.data() : nullptr;
    a.q = rows(queries.q, m_shape.head_dim);
    a.k = of_input.k;
    a.v = of_input.v;
    a.gates = of_input.gates;
    a.dout = rows(dout, m_shape.value_dim);
    a.dq = rows(d.dq, m_shape.head_dim);
    a.dk = rows(d.dk, m_shape.head_dim);
    a.dv = rows(d.dv, m_shape.value_dim);
    a.dlog_decay = rows(d.dlog_decay, d.dlog_decay.cols() / H);
    a.dbeta = rows(d.dbeta, 1);

    slab initial(m_engine.layout().state.size()), dstate(m_engine.layout().state.size()),
        scratch(m_engine.layout().size());
    m_engine.layout().state.clear(dstate.data());
    std::fill_n(scratch.data(), m_engine.layout().size(), 77.0F);  // a used workspace
    const auto forward = m_engine.engine();
    const gradient_engine engine(forward, a, scratch.data());
    if (causal) {
      const matrix state = m_engine.initial();
      std::copy_n(state.data(), state.size(), initial.data());
      if constexpr (!rule.log_scaled) std::copy_n(state.data(), state.size(), dstate.data());
      engine.causal(initial.data(), dstate.data(), engine_type::tokens_before);
    } else if constexpr (!rule.is_ordered()) {
      engine.noncausal(dstate.data(), 0, a.keys - a.queries);
    }
    std::copy_n(dstate.data(), d.dstate.size(), d.dstate.data());
    return d;
  }

  masked_shape m_shape;
  engine_type m_engine;
};

/// Rows that count are those of the gradient without the others; the others are left alone.
template <class Sequence>
void expect_rows(const matrix& masked, const matrix& alone, const mask_pattern& mask) {
  EXPECT_TRUE(support::same_bits(Sequence::rows_where(masked, mask.kept), alone));
  const matrix others = Sequence::rows_where(masked, mask.kept, false);
  EXPECT_TRUE(support::same_bits(others, matrix::Constant(others.rows(), others.cols(), untouched)));
}

template <class Map, class Rule>
void masked_is_deleted(const Map& map) {
  using problem_type = problem<Map, Rule>;
  using sequence = typename problem_type::sequence;
  for (const masked_shape& shape : shapes) {
    SCOPED_TRACE("D = " + std::to_string(shape.head_dim));
    const problem_type p(shape, map);
    const sequence x = p.engine().inputs(1);
    sequence dout = p.engine().inputs(2);
    dout.q = dout.v;  // the gradient of the outputs, in the place of what has as many columns
    const std::vector<mask_pattern> masks = support::mask_patterns(shape.tokens);
    for (std::size_t i = 0; i < masks.size(); ++i) {
      const mask_pattern& mask = masks[i];
      SCOPED_TRACE("tokens that count: " + mask.name);
      const gradients masked = p.causal(x.spoilt(mask.kept), dout.spoilt(mask.kept).v, &mask);
      const gradients alone = p.causal(x.where(mask.kept), dout.where(mask.kept).v, nullptr);
      for (const auto& [name, member] : masked.rows()) {
        SCOPED_TRACE(name);
        expect_rows<sequence>(masked.*member, alone.*member, mask);
      }
      EXPECT_TRUE(support::same_bits(masked.dstate, alone.dstate));

      if constexpr (!problem_type::rule.is_ordered()) {
        const mask_pattern& of_keys = masks[(i + 4) % masks.size()];
        SCOPED_TRACE("not causal, keys that count: " + of_keys.name);
        const gradients both =
            p.noncausal(x.spoilt(mask.kept), x.spoilt(of_keys.kept), dout.spoilt(mask.kept).v, &mask, &of_keys);
        const gradients both_alone =
            p.noncausal(x.where(mask.kept), x.where(of_keys.kept), dout.where(mask.kept).v, nullptr, nullptr);
        expect_rows<sequence>(both.dq, both_alone.dq, mask);
        expect_rows<sequence>(both.dk, both_alone.dk, of_keys);
        expect_rows<sequence>(both.dv, both_alone.dv, of_keys);
      }
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(MaskedGradients, AreThoseOfTheNormalizedForm) {
  masked_is_deleted<linattn::elu_plus_one, linattn::additive>(linattn::elu_plus_one());
}
TEST(MaskedGradients, AreThoseOfLogFeatures) {
  masked_is_deleted<linattn::exponential, linattn::additive>(linattn::exponential());
}
TEST(MaskedGradients, AreThoseOfPositionalFeaturesThatDecay) {
  using rule = linattn::gated<linattn::decay_kind::per_feature>;
  masked_is_deleted<linattn::cosformer, rule>(linattn::cosformer(200));
}
TEST(MaskedGradients, AreThoseOfTheDeltaRuleThatDecays) {
  masked_is_deleted<linattn::identity, linattn::gated_delta<>>(linattn::identity());
}

}  // namespace
