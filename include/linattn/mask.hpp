// Masks of tokens: which of a batch's rows are tokens, and which are padding.
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/sequence_rows.hpp>
#include <linattn/matrix_view.hpp>

#include <Eigen/Core>
#include <cstdint>
#include <span>
#include <type_traits>

LINATTN_NAMESPACE_BEGIN

/// Which tokens of B sequences of N rows count. Masked is deleted: a verb gives, bit for bit, what it gives for the
/// sequences without their masked rows, whatever those hold (NaN, infinities, memory that was never written):
///
///     state, normaliser, total decay   of the tokens that count, whose number is added to the state's tokens()
///     positions                        p_i = p_0 + (number of counted tokens before i)
///     decays                           of the tokens that count: a masked token's own does not decay anything
///     outputs                          row i of the shorter sequence where token i counts, 0 in masked rows
///     gradients                        likewise, and 0 in masked rows, those of log_decay and beta included
///
/// An empty or fully masked sequence leaves its state as it was, and its outputs are 0.
///
/// Made from nothing (every token counts), from a matrix of bool or std::uint8_t (B, N) in row-major order whose
/// elements that are not 0 say which tokens count, or from one number for each sequence:
///
///     token_mask()                        all N rows
///     token_mask(kept)                    row i of sequence b where kept(b, i) != 0
///     token_mask::lengths(n)              rows 0 ... n_b - 1: padding behind (n_b = 0: none)
///     token_mask::left_padding(n)         rows N - n_b ... N - 1: padding before
///
/// Lengths and left padding cost nothing; of a matrix each task reads its sequence's bytes a few times. Masked rows
/// themselves cost nothing: they are passed over, not computed. No allocation. A mask is a view: what it is
/// made from stays the caller's, and must outlive the call. Copying it copies a few words; threads may share it.
///
/// Not for a mask of the attention matrix, (N, N) or (B, N, N), which would say for each query which keys it sees:
/// linear attention never forms that matrix, it sums the keys up before it knows the query. The causal one is
/// forward_causal; documents side by side in one row of a batch are sequences of their own with a state each.
class token_mask {
 public:
  /// Every token counts.
  constexpr token_mask() noexcept = default;

  /// `kept` (B, N): token i of sequence b counts where kept(b, i) is not 0.
  token_mask(const matrix_view<const std::uint8_t>& kept) noexcept  // NOLINT(google-explicit-constructor)
      : m_kind(kind::pattern), m_kept(kept) {}

  /// The same of an Eigen matrix of bool or std::uint8_t; a sequence's elements side by side, as matrix_view has it. A
  /// row vector (N) is the mask of one sequence.
  template <class X>
  requires detail::is_eigen<X> token_mask(const X& kept)  // NOLINT(google-explicit-constructor)
      : m_kind(kind::pattern) {
    using scalar = typename detail::eigen_facts<const X&>::scalar;
    static_assert(std::is_same_v<scalar, bool> || std::is_same_v<scalar, std::uint8_t>,
                  "linattn: a mask of tokens is a matrix of bool or std::uint8_t, not 0 where the token counts; an "
                  "additive mask (0 and -inf) belongs to softmax, store (mask == 0) instead");
    if constexpr (std::is_same_v<scalar, bool>) {
      static_assert(sizeof(bool) == 1);
      const matrix_view<const bool> view(kept);
      m_kept = matrix_view<const std::uint8_t>(reinterpret_cast<const std::uint8_t*>(view.data()), view.rows(),
                                               view.cols(), view.row_stride());
    } else if constexpr (std::is_same_v<scalar, std::uint8_t>) {
      m_kept = matrix_view<const std::uint8_t>(kept);
    }
  }

  /// The first n_b tokens of sequence b count; n (B) are integers of any type, as std::span, std::vector or an Eigen
  /// vector. 0 <= n_b <= N.
  template <class Numbers>
  static token_mask lengths(const Numbers& n) {
    return token_mask(kind::lengths, numbers(n));
  }

  /// The last n_b tokens of sequence b count; n as for `lengths`.
  template <class Numbers>
  static token_mask left_padding(const Numbers& n) {
    return token_mask(kind::left_padding, numbers(n));
  }

  /// Whether nothing is masked, as said by the default constructor.
  constexpr bool is_none() const noexcept { return m_kind == kind::none; }

  /// Throws std::invalid_argument, in the name of `function`, unless this is a mask of `sequences` sequences of
  /// `tokens` rows: a matrix of another shape, another number of lengths, a length outside 0 ... `tokens`. O(B). The
  /// verbs call it before they write anything.
  void check(const char* function, Eigen::Index sequences, Eigen::Index tokens) const {
    if (m_kind == kind::none) return;
    if (m_kind == kind::pattern) return check_shape(function, sequences, tokens);
    const char* const name = m_kind == kind::lengths ? "lengths" : "left_padding";
    if (m_count != sequences) {
      detail::refuse(function, "the mask's ", name, " are ", m_count, ", expected ", sequences,
                     ": one for each sequence");
    }
    for (Eigen::Index b = 0; b < m_count; ++b) {
      const Eigen::Index n = m_number_at(m_numbers, b);
      if (n < 0 || n > tokens) {
        detail::refuse(function, "number ", b, " of the mask's ", name, " is ", n, ", outside 0 ... ", tokens,
                       ", the tokens of a sequence");
      }
    }
  }

  /// The tokens of sequence b that count, of `tokens` rows: a range of rows, and within it a byte for each, or null.
  /// For a mask that `check` accepts. O(1).
  detail::kept_rows of(Eigen::Index b, Eigen::Index tokens) const noexcept {
    switch (m_kind) {
      case kind::pattern:
        return {0, tokens, m_kept.row(b)};
      case kind::lengths:
        return {0, m_number_at(m_numbers, b), nullptr};
      case kind::left_padding:
        return {tokens - m_number_at(m_numbers, b), tokens, nullptr};
      default:
        return {0, tokens, nullptr};
    }
  }

 private:
  enum class kind { none, pattern, lengths, left_padding };

  /// Elements of any integer type.
  struct integers {
    const void* data;
    Eigen::Index count;
    Eigen::Index (*at)(const void*, Eigen::Index);
  };

  token_mask(kind how, const integers& n) noexcept
      : m_kind(how), m_numbers(n.data), m_count(n.count), m_number_at(n.at) {}

  template <class Numbers>
  static integers numbers(const Numbers& n) {
    if constexpr (detail::is_eigen<Numbers>) {
      const vector_view<const typename Numbers::Scalar> view(n);
      return integers_of(view.data(), view.size());
    } else {
      const std::span view(n);
      return integers_of(view.data(), static_cast<Eigen::Index>(view.size()));
    }
  }

  template <class Int>
  static integers integers_of(const Int* data, Eigen::Index count) {
    static_assert(std::is_integral_v<Int> && !std::is_same_v<std::remove_cv_t<Int>, bool>,
                  "linattn: lengths are integers, one for each sequence");
    return {data, count, [](const void* from, Eigen::Index i) {
              return static_cast<Eigen::Index>(static_cast<const Int*>(from)[i]);
            }};
  }

  void check_shape(const char* function, Eigen::Index sequences, Eigen::Index tokens) const {
    const Eigen::Index rows = m_kept.rows();
    if (rows == sequences && m_kept.cols() == tokens) return;
    const detail::shape_text shape{rows, m_kept.cols()};
    if (m_kept.cols() == tokens && (rows == tokens || rows == sequences * tokens)) {
      detail::refuse(function, "the mask is ", shape, ", a mask of the attention matrix, which linear attention never ",
                     "forms; give (sequences, tokens) = ", detail::shape_text{sequences, tokens},
                     " for padding, call forward_causal for the causal mask, and make documents sequences of their ",
                     "own");
    }
    detail::refuse(function, "the mask is ", shape, ", expected ", detail::shape_text{sequences, tokens},
                   ": (sequences, tokens)");
  }

  kind m_kind = kind::none;
  matrix_view<const std::uint8_t> m_kept;  // (B, N)
  const void* m_numbers = nullptr;         // (B)
  Eigen::Index m_count = 0;
  Eigen::Index (*m_number_at)(const void*, Eigen::Index) = nullptr;
};

LINATTN_NAMESPACE_END
