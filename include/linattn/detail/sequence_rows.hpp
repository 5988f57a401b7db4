// The caller's rows as the engine sees them: any layout whose tokens and heads are a stride apart, and of these the
// tokens that count.
//
// Masked tokens are passed over where rows are packed and unpacked: nothing behind that knows of them, so that a pass
// computes, bit for bit, what it computes of the sequence without them. Tokens are counted without them, too.
#pragma once

#include <linattn/matrix_view.hpp>
#include <linattn/update_rules/rule_traits.hpp>

#include <algorithm>
#include <cstdint>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Some tokens that a pass takes at once: number `first` of those that count, and the following ones.
struct token_tile {
  Eigen::Index first = 0;
  Eigen::Index rows = 0;
  const Eigen::Index* numbers = nullptr;  // (rows), rising: where they stand in the sequence; null: where they count

  LINATTN_INLINE constexpr Eigen::Index at(Eigen::Index r) const noexcept {
    return numbers != nullptr ? numbers[r] : first + r;
  }
  /// `count` tokens from the second one on; the last of them may be the one after the tile, where that is known.
  constexpr token_tile shifted(Eigen::Index count) const noexcept {
    return {first + 1, count, numbers != nullptr ? numbers + 1 : nullptr};
  }
};

/// What one head has of a tile, in the order of the tokens or backwards.
template <class U>
struct tile_rows {
  U* data = nullptr;  // row 0, or with numbers that of token 0
  Eigen::Index stride = 0;
  Eigen::Index size = 0;  // elements of a row, where somebody asks
  const Eigen::Index* numbers = nullptr;
  Eigen::Index direction = 1;  // in `numbers`

  LINATTN_INLINE constexpr U* row(Eigen::Index r) const noexcept {
    return data + (numbers != nullptr ? numbers[r * direction] : r) * stride;
  }
  /// From row r on.
  LINATTN_INLINE constexpr tile_rows from(Eigen::Index r) const noexcept {
    if (numbers != nullptr) return {data, stride, size, numbers + r * direction, direction};
    return {data + r * stride, stride, size};
  }
  /// `rows` rows, the last one first.
  LINATTN_INLINE constexpr tile_rows reversed(Eigen::Index rows) const noexcept {
    if (numbers != nullptr) return {data, stride, size, numbers + (rows - 1) * direction, -direction};
    return {data + (rows - 1) * stride, -stride, size};
  }

  /// f(r, row r, stride, count) for runs of `count` rows from r on that stand a stride apart, `rows` > 0 in all.
  /// Without numbers these are all rows, and there is no loop.
  template <class F>
  LINATTN_INLINE void for_each_run(Eigen::Index rows, const F& f) const {
    Eigen::Index r = 0, count = rows;
    do {
      if (numbers != nullptr) {
        count = 1;
        while (r + count < rows && numbers[(r + count) * direction] == numbers[r * direction] + count * direction) {
          ++count;
        }
      }
      f(r, row(r), direction * stride, count);
      r += count;
    } while (numbers != nullptr && r < rows);
  }
};

/// What token i has for head h begins at data + i * row_stride + h * head_stride, its elements side by side. Packed
/// matrices (N, H D) have heads D apart; heads that are stored one after the other, (H, N, D), rows D apart.
template <class U>
struct token_rows {
  U* data = nullptr;
  Eigen::Index row_stride = 0;
  Eigen::Index head_stride = 0;

  constexpr token_rows() noexcept = default;
  constexpr token_rows(U* first, Eigen::Index stride_of_rows, Eigen::Index stride_of_heads) noexcept
      : data(first), row_stride(stride_of_rows), head_stride(stride_of_heads) {}
  /// A packed matrix of `dim` columns a head.
  constexpr token_rows(const matrix_view<U>& x, Eigen::Index dim) noexcept
      : data(x.data()), row_stride(x.row_stride()), head_stride(dim) {}

  LINATTN_INLINE constexpr U* at(Eigen::Index token, Eigen::Index head) const noexcept {
    return data + token * row_stride + head * head_stride;
  }
  /// What `head` has of a tile, rows of `dim` elements.
  LINATTN_INLINE constexpr tile_rows<U> in(const token_tile& t, Eigen::Index head,
                                           Eigen::Index dim = 0) const noexcept {
    return {at(t.numbers != nullptr ? 0 : t.first, head), row_stride, dim, t.numbers};
  }
};

/// What a rule does not take, in the place of what it would: no memory, and nothing to set up in a decode step.
template <int Place>
struct not_taken {};

/// What a rule takes beside q, k and v, in either form of it (rule_traits.hpp).
template <class View, rule_traits Rule>
struct rule_inputs {
  static constexpr bool has_log_decay = Rule.decay != decay_kind::none && !Rule.fixed_decay;
  static constexpr bool has_beta = Rule.corrects == correction::delta;
  static constexpr bool has_rank_one = Rule.corrects == correction::rank_one;
  static constexpr bool has_bonus = !Rule.reads_after_write;

  template <bool Taken, int Place, class X = View>
  using input = std::conditional_t<Taken, X, not_taken<Place>>;

  [[no_unique_address]] input<has_log_decay, 0> log_decay;                          // (N, H), or (N, H C) per feature
  [[no_unique_address]] input<has_beta, 1> beta;                                    // (N, H)
  [[no_unique_address]] input<has_rank_one, 2> a;                                   // (N, H C)
  [[no_unique_address]] input<has_rank_one, 3> b;                                   // (N, H C)
  [[no_unique_address]] input<has_bonus, 4> bonus;                                  // (N, H C)
  [[no_unique_address]] input<Rule.fixed_decay, 5, const double*> fixed_log_decay;  // (H)
};

/// The tokens of a sequence that count: of rows [first, last) those whose `kept`, which begins with row `first`, is not
/// 0; null: all.
struct kept_rows {
  Eigen::Index first = 0;
  Eigen::Index last = 0;
  const std::uint8_t* kept = nullptr;

  /// Their number.
  Eigen::Index tokens() const noexcept {
    const Eigen::Index rows = last - first;
    return kept == nullptr ? rows : rows - std::count(kept, kept + rows, std::uint8_t(0));
  }
};

/// Rows from the first on that hold `tokens` of those that count.
constexpr Eigen::Index rows_with(Eigen::Index tokens, const std::uint8_t* kept) {
  if (kept == nullptr) return tokens;
  Eigen::Index rows = 0;
  for (Eigen::Index passed = 0; passed < tokens; ++rows) passed += kept[rows] != 0 ? 1 : 0;
  return rows;
}

/// The rows of one sequence that a pass runs over, of element type S; those that a verb does not take are empty. With
/// `kept` `tokens` are the nonzero ones among as many of its elements as hold them, and rows of the others are neither
/// read nor written. Steps take no mask.
template <class S, class T, rule_traits Rule>
struct sequence_rows {
  Eigen::Index tokens = 0;
  Eigen::Index position = 0;  // of the first token
  token_rows<const S> q;
  token_rows<const S> k;
  token_rows<const S> v;
  rule_inputs<token_rows<const S>, Rule> gates;
  token_rows<S> out;
  token_rows<T> denominators;          // (N, H): q.z before the policy, where its data is not null
  const std::uint8_t* kept = nullptr;  // null: all

  /// f(rows) for everything that has a row a token.
  template <class F>
  constexpr void for_each(const F& f) {
    f(q), f(k), f(v), f(out), f(denominators);
    if constexpr (decltype(gates)::has_log_decay) f(gates.log_decay);
    if constexpr (decltype(gates)::has_beta) f(gates.beta);
    if constexpr (decltype(gates)::has_rank_one) f(gates.a), f(gates.b);
    if constexpr (decltype(gates)::has_bonus) f(gates.bonus);
  }

  /// These of its rows alone.
  void keep(const kept_rows& rows_kept) {
    tokens = rows_kept.tokens();
    kept = rows_kept.kept;
    for_each([&](auto& rows) {
      if (rows.data != nullptr) rows.data += rows_kept.first * rows.row_stride;
    });
  }

  /// `count` of the tokens alone, from `first` on.
  constexpr void narrow(Eigen::Index first, Eigen::Index count) {
    tokens = count;
    position += first;
    const Eigen::Index row = rows_with(first, kept);
    if (kept != nullptr) kept += row;
    for_each([&](auto& rows) {
      if (rows.data != nullptr) rows.data += row * rows.row_stride;
    });
  }
};

/// What `head` has of the other ones among `rows` rows, `dim` elements each, is set to 0: outputs and gradients of
/// masked tokens, which no pass writes.
template <class U>
void clear_masked(const token_rows<U>& x, Eigen::Index rows, const kept_rows& kept, Eigen::Index head,
                  Eigen::Index dim) {
  const auto clear = [&](Eigen::Index i) { std::fill_n(x.at(i, head), dim, U(0)); };
  for (Eigen::Index i = 0; i < kept.first; ++i) clear(i);
  for (Eigen::Index i = kept.first; kept.kept != nullptr && i < kept.last; ++i) {
    if (kept.kept[i - kept.first] == 0) clear(i);
  }
  for (Eigen::Index i = kept.last; i < rows; ++i) clear(i);
}

}  // namespace detail
LINATTN_NAMESPACE_END
