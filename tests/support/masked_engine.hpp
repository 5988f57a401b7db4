// The engine with masks of tokens, beneath the operator: sequences with masked rows, and the same without them.
#pragma once

#include <linattn/detail/engine.hpp>
#include <linattn/mask.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace support {

/// Which of n tokens count: all, none, one, ranges, in turn, and drawn.
struct mask_pattern {
  std::string name;
  std::vector<std::uint8_t> kept;

  Eigen::Index count() const {
    Eigen::Index n = 0;
    for (const auto k : kept) n += k != 0 ? 1 : 0;
    return n;
  }
};

inline std::vector<mask_pattern> mask_patterns(Eigen::Index n) {
  std::vector<mask_pattern> all;
  const auto add = [&](const std::string& name, const auto& keeps) {
    mask_pattern p{name, {}};
    for (Eigen::Index i = 0; i < n; ++i) p.kept.push_back(keeps(i) ? 1 : 0);
    all.push_back(p);
  };
  add("all", [](Eigen::Index) { return true; });
  add("none", [](Eigen::Index) { return false; });
  add("one", [n](Eigen::Index i) { return i == n / 2; });
  add("first", [n](Eigen::Index i) { return i < n - 7; });
  add("last", [](Eigen::Index i) { return i >= 41; });
  add("in turn", [](Eigen::Index i) { return i % 2 == 0; });
  add("a hole longer than a tile", [](Eigen::Index i) { return i < 30 || i > 66; });
  for (const double share : {0.1, 0.5, 0.9}) {
    random_bits random(17);
    add("drawn " + std::to_string(share), [&](Eigen::Index) { return random.uniform() < share; });
  }
  for (auto& k : all.back().kept) k = static_cast<std::uint8_t>(k * 0x80);  // not 0 is what counts
  return all;
}

struct masked_shape {
  Eigen::Index tokens, head_dim, value_dim;
  Eigen::Index query_heads = 2, key_heads = 2, value_heads = 2;
  linattn::head_sharing sharing = linattn::head_sharing::interleaved;
};

/// One sequence with everything that a rule may take; columns for each of its heads.
template <class T>
struct masked_sequence {
  using matrix = row_matrix<T>;
  matrix q, k, v, log_decay, beta, a, b, bonus;

  masked_sequence(const masked_shape& s, Eigen::Index features, Eigen::Index decays, std::uint64_t seed) {
    const Eigen::Index n = s.tokens;
    q = normal_matrix<T>(n, s.query_heads * s.head_dim, seed++);
    k = normal_matrix<T>(n, s.key_heads * s.head_dim, seed++) / T(std::sqrt(double(s.head_dim)));
    v = normal_matrix<T>(n, s.value_heads * s.value_dim, seed++);
    log_decay = uniform_matrix<T>(n, s.value_heads * decays, seed++, -0.5, 0);
    beta = uniform_matrix<T>(n, s.value_heads, seed++);
    a = normal_matrix<T>(n, s.value_heads * features, seed++) / T(2 * features);
    b = normal_matrix<T>(n, s.value_heads * features, seed++) / T(2 * features);
    bonus = normal_matrix<T>(n, s.value_heads * features, seed++);
  }

  Eigen::Index tokens() const { return q.rows(); }

  static std::vector<matrix masked_sequence::*> members() {
    return {&masked_sequence::q,    &masked_sequence::k, &masked_sequence::v, &masked_sequence::log_decay,
            &masked_sequence::beta, &masked_sequence::a, &masked_sequence::b, &masked_sequence::bonus};
  }
  /// The tokens that count, alone.
  masked_sequence where(const std::vector<std::uint8_t>& kept) const {
    masked_sequence part = *this;
    for (const auto member : members()) part.*member = rows_where(this->*member, kept);
    return part;
  }
  /// Whatever memory may hold in the rows of the others.
  masked_sequence spoilt(const std::vector<std::uint8_t>& kept) const {
    constexpr T rubbish[] = {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity(),
                             -std::numeric_limits<T>::infinity(), std::numeric_limits<T>::max()};
    masked_sequence result = *this;
    for (const auto member : members()) {
      matrix& x = result.*member;
      for (Eigen::Index i = 0; i < x.rows(); ++i) {
        if (kept[std::size_t(i)] == 0) x.row(i).setConstant(rubbish[i % 4]);
      }
    }
    return result;
  }

  static matrix rows_where(const matrix& x, const std::vector<std::uint8_t>& kept, bool counted = true) {
    matrix part(x.rows(), x.cols());
    Eigen::Index n = 0;
    for (Eigen::Index i = 0; i < x.rows(); ++i) {
      if ((kept[std::size_t(i)] != 0) == counted) part.row(n++) = x.row(i);
    }
    return part.topRows(n);
  }
};

/// The engine's passes over such sequences, from a state that has seen some tokens. Heads that are a constant share
/// nothing, and take less time to compile.
template <class Map, class Rule, class T, Eigen::Index Heads = Eigen::Dynamic, bool Gradients = false>
class masked_engine {
 public:
  static constexpr Eigen::Index Dynamic = Eigen::Dynamic;
  static constexpr linattn::rule_traits rule = linattn::detail::rule_with<Map, Rule::traits>;
  using layout_type = linattn::detail::workspace_layout<T, Dynamic, Dynamic, Dynamic, Heads, Gradients, rule>;
  using engine_type = linattn::detail::engine<Map, T, layout_type>;
  using rows_type = typename engine_type::rows_type;
  using slab = linattn::detail::slab<T, Dynamic>;
  using sequence = masked_sequence<T>;
  using matrix = row_matrix<T>;
  static constexpr Eigen::Index tokens_before = 5;

  masked_engine(const masked_shape& s, Map map, bool normalizes = rule.normalizes)
      : m_shape(s), m_map(std::move(map)), m_normalizes(normalizes) {
    m_layout.head_dim = linattn::detail::extent<Dynamic>(s.head_dim);
    m_layout.state.features = linattn::detail::extent<Dynamic>(m_map.dimension(s.head_dim));
    m_layout.state.value_dim = linattn::detail::extent<Dynamic>(s.value_dim);
    m_layout.state.heads = linattn::detail::extent<Heads>(s.value_heads);
    m_layout.heads = {s.query_heads, s.key_heads, s.value_heads, s.sharing};
  }

  const layout_type& layout() const { return m_layout; }
  engine_type engine() const { return {m_map, m_layout, T(0.75), linattn::denominator_policy::none(), m_normalizes}; }
  sequence inputs(std::uint64_t seed) const { return inputs(m_shape.tokens, seed); }
  sequence inputs(Eigen::Index tokens, std::uint64_t seed) const {
    masked_shape s = m_shape;
    s.tokens = tokens;
    constexpr bool per_feature = rule.decay == linattn::decay_kind::per_feature;
    return sequence(s, m_layout.state.features, per_feature ? Eigen::Index(m_layout.state.features) : 1, seed);
  }
  Eigen::Index output_columns() const { return m_layout.heads.outputs() * m_shape.value_dim; }

  /// The state that a sequence meets.
  matrix initial() const {
    matrix state = matrix::Zero(1, m_layout.state.size());
    slab begun(m_layout.state.size()), scratch(m_layout.size());
    m_layout.state.clear(begun.data());
    const sequence x = inputs(tokens_before, 90);
    rows_type rows = rows_of(x, nullptr, tokens_before);
    rows.position = 0;
    engine().template pass<linattn::detail::half_block, linattn::detail::writes_only>(rows, begun.data(),
                                                                                      scratch.data());
    std::copy_n(begun.data(), state.size(), state.data());
    return state;
  }

  struct result {
    matrix out, denominators, state;
  };

  /// With `mask` null all tokens count. In `parts` passes, as segments of a sequence are.
  template <linattn::detail::kernel_form Form>
  result run(const sequence& x, const mask_pattern* mask, const matrix& state, T untouched,
             Eigen::Index parts = 1) const {
    constexpr bool causal = Form.reads && Form.writes;
    constexpr Eigen::Index block = causal ? linattn::detail::causal_block : linattn::detail::half_block;
    result y{matrix::Constant(x.tokens(), output_columns(), untouched),
             matrix::Constant(x.tokens(), m_layout.heads.outputs(), untouched), state};
    slab slab_of_state(m_layout.state.size()), scratch(m_layout.size());
    std::fill_n(scratch.data(), m_layout.size(), T(77));  // a used workspace
    std::copy_n(state.data(), state.size(), slab_of_state.data());
    rows_type rows =
        rows_of(x, mask != nullptr ? mask->kept.data() : nullptr, mask != nullptr ? mask->count() : x.tokens());
    rows.out = {linattn::matrix_view<T>(y.out), m_shape.value_dim};
    if constexpr (rule.normalizes) rows.denominators = {linattn::matrix_view<T>(y.denominators), 1};
    for (Eigen::Index part = 0; part < parts; ++part) {
      const Eigen::Index first = rows.tokens * part / parts, last = rows.tokens * (part + 1) / parts;
      rows_type some = rows;
      some.narrow(first, last - first);
      engine().template pass<block, Form>(some, slab_of_state.data(), scratch.data());
    }
    std::copy_n(slab_of_state.data(), state.size(), y.state.data());
    return y;
  }

  rows_type rows_of(const sequence& x, const std::uint8_t* kept, Eigen::Index count) const {
    const auto rows = [](const matrix& from, Eigen::Index dim) {
      return linattn::detail::token_rows<const T>(linattn::matrix_view<const T>(from), dim);
    };
    const Eigen::Index features = m_layout.state.features;
    rows_type all;
    all.tokens = count;
    all.kept = kept;
    all.position = tokens_before;
    all.q = rows(x.q, m_shape.head_dim);
    all.k = rows(x.k, m_shape.head_dim);
    all.v = rows(x.v, m_shape.value_dim);
    all.gates = gates_of<const T>(x, rows, features);
    return all;
  }

  template <class U, class Rows>
  static auto gates_of(const sequence& x, const Rows& rows, Eigen::Index features) {
    linattn::detail::rule_inputs<linattn::detail::token_rows<U>, rule> gates;
    constexpr bool per_feature = rule.decay == linattn::decay_kind::per_feature;
    if constexpr (gates.has_log_decay) gates.log_decay = rows(x.log_decay, per_feature ? features : 1);
    if constexpr (gates.has_beta) gates.beta = rows(x.beta, 1);
    if constexpr (gates.has_rank_one) gates.a = rows(x.a, features);
    if constexpr (gates.has_rank_one) gates.b = rows(x.b, features);
    if constexpr (gates.has_bonus) gates.bonus = rows(x.bonus, features);
    static constexpr double fixed[] = {-0.01, -0.3, -0.002, -0.07};
    if constexpr (rule.fixed_decay) gates.fixed_log_decay = fixed;
    return gates;
  }

 private:
  masked_shape m_shape;
  layout_type m_layout;
  Map m_map;
  bool m_normalizes;
};

}  // namespace support
