// What an operator is made with.
#pragma once

#include <linattn/version.hpp>

#include <Eigen/Core>
#include <cmath>
#include <limits>
#include <optional>

LINATTN_NAMESPACE_BEGIN

/// What becomes of the denominator phi(q).z before it divides. Zero, after the policy, gives output 0.
struct denominator_policy {
  enum class kind { none, add, clamp };

  kind how = kind::none;
  double epsilon = 0;

  /// phi(q).z as it is, and 0/0 = 0: the paper's equation. The default.
  static constexpr denominator_policy none() noexcept { return {kind::none, 0}; }
  /// phi(q).z + eps. 1e-6 is what the paper's public implementation does; it is not neutral: with elu + 1 at
  /// q = k = -10, D = 64, it turns row 0 of a causal output into 0.117 v_0.
  static constexpr denominator_policy add(double eps) noexcept { return {kind::add, eps}; }
  /// max(phi(q).z, eps), for signed features.
  static constexpr denominator_policy clamp(double eps) noexcept { return {kind::clamp, eps}; }

  template <class T>
  constexpr T operator()(T denominator) const noexcept {
    switch (how) {
      case kind::add:
        return denominator + T(epsilon);
      case kind::clamp:
        return denominator < T(epsilon) ? T(epsilon) : denominator;
      default:
        return denominator;
    }
  }

  /// The same policy for denominators that have been divided by exp(log_scale).
  template <class T>
  denominator_policy at_scale(T log_scale) const noexcept {
    return {how, epsilon * std::exp(-double(log_scale))};
  }

  /// Whether the result moves with phi(q).z, as it does unless it is clamped: the derivative, 1 or 0.
  template <class T>
  constexpr bool follows(T denominator) const noexcept {
    return how != kind::clamp || !(denominator < T(epsilon));
  }
};

/// Which heads go together where some are shared. Of n heads shared by m > n, number h of the m uses
///
///     interleaved   floor(h n / m): neighbours share, as grouped-query models and ONNX have it
///     tiled         h mod n: the n heads in turn, over and over
enum class head_sharing { interleaved, tiled };

/// Designators in this order: `{.head_dim = 64, .heads = 8}`. 0 means "not given".
///
/// A state belongs to a value head, and gates and betas with it. Several query heads may read one state (grouped-query:
/// {.heads = 8, .key_heads = 2}; multi-query: .key_heads = 1), several states may be written with one key head and read
/// with one query head (.heads = 4, .value_heads = 8). The output has as many heads as there are queries or states,
/// whichever are more.
struct options {
  Eigen::Index head_dim = 0;     ///< D, coordinates of a query or key of one head; the type's, or required
  Eigen::Index value_dim = 0;    ///< M, coordinates of a value of one head; default D
  Eigen::Index heads = 0;        ///< H, query heads; default the type's, or 1; divides value_heads, or is a multiple
  Eigen::Index key_heads = 0;    ///< default heads; divides value_heads
  Eigen::Index value_heads = 0;  ///< states; default key_heads
  head_sharing sharing = head_sharing::interleaved;
  double query_scale = 1;  ///< multiplies q before the feature map
  std::optional<bool> normalize =
      std::nullopt;  ///< divide by phi(q).z; default: yes where the rule keeps z and the map's kernel is positive
  denominator_policy denominator = denominator_policy::none();  ///< of no effect unless normalized
};

LINATTN_NAMESPACE_END
