// The tokens of a sequence that count, tile by tile.
#pragma once

#include <linattn/detail/kernel.hpp>
#include <linattn/detail/sequence_rows.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Finds the rows of a sequence's tiles, whose numbers it holds: as many as a tile has, however long the sequence is.
/// Without Masks, and where `kept` is null, tiles are rows side by side.
template <bool Masks = true>
class kept_tokens {
 public:
  explicit kept_tokens(const std::uint8_t* kept) noexcept : m_kept(kept) {}

  /// The next `rows` tokens, of which the first is number `first`. A tile is good until the next one.
  LINATTN_INLINE token_tile next(Eigen::Index first, Eigen::Index rows) noexcept {
    if (m_kept == nullptr) return {first, rows};
    for (Eigen::Index n = 0; n < rows; ++m_row) {
      m_numbers[n] = m_row;
      n += m_kept[m_row] != 0 ? 1 : 0;
    }
    return {first, rows, m_numbers};
  }

  /// Goes behind token number `count` - 1, for `previous`.
  void go_behind(Eigen::Index count) noexcept {
    if (m_kept == nullptr) return;
    for (Eigen::Index passed = 0; passed < count; ++m_row) passed += m_kept[m_row] != 0 ? 1 : 0;
    m_numbers[0] = m_row;
  }

  /// The `rows` tokens before those of the last tile, and behind them the first of that one.
  token_tile previous(Eigen::Index first, Eigen::Index rows) noexcept {
    if (m_kept == nullptr) return {first, rows};
    m_numbers[rows] = m_numbers[0];
    for (Eigen::Index n = rows; n > 0;) {
      m_numbers[n - 1] = --m_row;
      n -= m_kept[m_row] != 0 ? 1 : 0;
    }
    return {first, rows, m_numbers};
  }

 private:
  const std::uint8_t* m_kept;
  Eigen::Index m_row = 0;  // the first one not looked at; backwards the last one looked at
  Eigen::Index m_numbers[most_tokens + 1];
};

template <>
class kept_tokens<false> {
 public:
  explicit constexpr kept_tokens(const std::uint8_t*) noexcept {}
  static constexpr token_tile next(Eigen::Index first, Eigen::Index rows) noexcept { return {first, rows}; }
};

}  // namespace detail
LINATTN_NAMESPACE_END
