// What check_feature_map does, for any map.
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/guarded_tile.hpp>
#include <linattn/detail/map_under_test.hpp>
#include <linattn/detail/random.hpp>
#include <linattn/feature_map.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Runs the checks; what is wrong goes to `problems`, one sentence each.
template <class T>
class feature_map_checker {
 public:
  std::vector<std::string> problems;
  Eigen::Index denominators = 0;
  Eigen::Index non_positive = 0;
  bool gradient_checked = false;

  feature_map_checker(map_under_test<T> map, double deviation, std::uint64_t seed)
      : m_map(std::move(map)), m_deviation(deviation), m_seed(seed) {}

  void run(Eigen::Index rows) {
    for (const map_form<T>& form : m_map.forms) check(form);
    for (const map_form<T>& form : m_map.fused) check(form);
    if (problems.empty()) check_packet_against_forward();
    if (problems.empty()) check_sample(rows);
  }

 private:
  static constexpr Eigen::Index tile_rows = 7;
  static constexpr T sentinels[2] = {T(-54321.125), T(-98765.625)};

  template <class... Parts>
  void complain(const map_form<T>& form, const Parts&... parts) {
    problems.push_back(sentence(form.name, ": ", parts...));
  }

  /// Element i of a tile of features, in words.
  std::string place(Eigen::Index i) const {
    return sentence("feature ", i % m_map.features, " of row ", i / m_map.features);
  }

  static bool same_bits(const T& a, const T& b) {
    return std::memcmp(&a, &b, sizeof(T)) == 0;  // NOLINT(bugprone-suspicious-memory-comparison): -0 is not 0 here
  }

  static bool same_row(const guarded_tile<T>& a, Eigen::Index row_a, const guarded_tile<T>& b, Eigen::Index row_b) {
    return std::memcmp(a.row(row_a), b.row(row_b), static_cast<std::size_t>(a.cols()) * sizeof(T)) == 0;
  }

  /// The first element, in row-major order, where two tiles differ in a bit; -1 where none does.
  static Eigen::Index first_difference(const guarded_tile<T>& a, const guarded_tile<T>& b) {
    for (Eigen::Index i = 0; i < a.size(); ++i) {
      if (!same_bits(a[i], b[i])) return i;
    }
    return -1;
  }

  /// phi (R, C) of x (R, D), into a tile that holds `before` and is surrounded by it.
  guarded_tile<T> apply(const typename map_form<T>::function& map, const guarded_tile<T>& x, T before = sentinels[0],
                        Eigen::Index position = 0) const {
    guarded_tile<T> output(x.rows(), m_map.features);
    output.fill(before);
    tile<T> phi = output.view();
    map(x.view(), phi, tile_position{position, 0});
    return output;
  }

  /// Rows from N(0, deviation^2); stream tells the small tile, queries and keys apart.
  guarded_tile<T> draw(Eigen::Index rows, std::uint64_t stream, Eigen::Index first = 0) const {
    return draw(rows, m_map.head_dim, stream, first);
  }
  guarded_tile<T> draw(Eigen::Index rows, Eigen::Index cols, std::uint64_t stream, Eigen::Index first) const {
    guarded_tile<T> x(rows, cols);
    for (Eigen::Index r = 0; r < rows; ++r) {
      for (Eigen::Index d = 0; d < cols; ++d) {
        const auto index = static_cast<std::uint64_t>((first + r) * cols + d);
        x.row(r)[d] = static_cast<T>(m_deviation * random_normal(m_seed, stream, index));
      }
    }
    return x;
  }

  /// One form on a small tile. Faults that would show again in what follows end it.
  void check(const map_form<T>& form) {
    guarded_tile<T> x = draw(tile_rows, 1);
    std::fill(x.row(3), x.row(3) + m_map.head_dim, T(0));
    const guarded_tile<T> phi = apply(form.original, x, sentinels[0]);
    const guarded_tile<T> other = apply(form.original, x, sentinels[1]);
    if (!phi.surrounded_by(sentinels[0]) || !other.surrounded_by(sentinels[1])) {
      return complain(form, "writes outside phi; write rows 0 ... R-1, columns 0 ... C-1 (C = ", m_map.features,
                      ") and nothing else, not even the padding of a row.");
    }
    const Eigen::Index changed = first_difference(phi, apply(form.original, x, sentinels[0]));
    if (changed >= 0) {
      return complain(form, place(changed), " changes from call to call; a map has no mutable state, and randomness ",
                      "belongs into its constructor.");
    }
    Eigen::Index unwritten = -1;
    for (Eigen::Index i = 0; i < phi.size(); ++i) {
      if (same_bits(phi[i], other[i])) continue;
      if (!same_bits(phi[i], sentinels[0]) || !same_bits(other[i], sentinels[1])) {
        return complain(form, place(i), " depends on what phi held before; assign features, do not add to them.");
      }
      if (unwritten < 0) unwritten = i;
    }
    if (unwritten >= 0) {
      return complain(form, place(unwritten), " is never written; write all C = ", m_map.features,
                      " features of every row (dimension says how many there are).");
    }
    const Eigen::Index miscopied = first_difference(phi, apply(form.copy, x));
    if (miscopied >= 0) {
      complain(form, place(miscopied), " is another one in a copy of the map; copy every parameter.");
    }
    check_reads(form, x, phi);
    check_rows(form, x, phi);
    check_values(form, phi);
    check_nan(form, x, phi);
    if (form.vjp && problems.empty()) {
      check_vjp(form, x, phi);
      gradient_checked = true;
    }
  }

  /// Nothing but the D coordinates of a row may be read.
  void check_reads(const map_form<T>& form, guarded_tile<T> x, const guarded_tile<T>& phi) {
    x.surround(T(12345.5));
    const Eigen::Index difference = first_difference(phi, apply(form.original, x));
    if (difference >= 0) {
      complain(form, place(difference),
               " depends on memory outside x; read rows 0 ... R-1, columns 0 ... D-1 (D = ", m_map.head_dim, ") only.");
    }
  }

  /// A row's features must not depend on its tile: alone, and where no position is asked for, in reverse order.
  void check_rows(const map_form<T>& form, const guarded_tile<T>& x, const guarded_tile<T>& phi) {
    guarded_tile<T> reversed(tile_rows, m_map.head_dim);
    for (Eigen::Index r = 0; r < tile_rows; ++r) {
      std::copy(x.row(r), x.row(r) + m_map.head_dim, reversed.row(tile_rows - 1 - r));
    }
    const guarded_tile<T> backwards = apply(form.original, reversed);
    for (Eigen::Index r = 0; r < tile_rows; ++r) {
      guarded_tile<T> single(1, m_map.head_dim);
      std::copy(x.row(r), x.row(r) + m_map.head_dim, single.row(0));
      const guarded_tile<T> alone = apply(form.original, single, sentinels[0], r);
      if (!same_row(phi, r, alone, 0) || (!m_map.is_positional && !same_row(phi, r, backwards, tile_rows - 1 - r))) {
        return complain(form, "row ", r,
                        " has other features in another tile; compute each row from its own x alone, in ",
                        "an order that depends neither on R nor on the row's place.");
      }
    }
  }

  /// Finite and, unless the map says otherwise, not negative.
  void check_values(const map_form<T>& form, const guarded_tile<T>& phi) {
    for (Eigen::Index i = 0; i < phi.size(); ++i) {
      if (!(std::abs(phi[i]) <= std::numeric_limits<T>::max())) {
        return complain(form, place(i), " is not finite on an input from N(0, ", m_deviation, "^2); bound the map, or ",
                        "check it with the deviation of your inputs.");
      }
      if (!m_map.is_signed && !m_map.writes_log && phi[i] < T(0)) {
        return complain(form, place(i), " is ", static_cast<double>(phi[i]), "; keep features >= 0, or declare ",
                        "`static constexpr bool signed_features = true` (not normalised by default).");
      }
    }
  }

  /// A NaN shows in its own row and in no other. At most 32 coordinates are tried, the last one first.
  void check_nan([[maybe_unused]] const map_form<T>& form, [[maybe_unused]] const guarded_tile<T>& x,
                 [[maybe_unused]] const guarded_tile<T>& phi) {
#if !defined(__FINITE_MATH_ONLY__) || !__FINITE_MATH_ONLY__
    constexpr Eigen::Index bad = 2;
    const Eigen::Index step = m_map.head_dim / 32 + 1;
    for (Eigen::Index d = m_map.head_dim - 1; d >= 0; d -= step) {
      guarded_tile<T> poisoned = x;
      poisoned.row(bad)[d] = std::numeric_limits<T>::quiet_NaN();
      const guarded_tile<T> out = apply(form.original, poisoned);
      if (std::none_of(out.row(bad), out.row(bad) + out.cols(), [](T value) { return std::isnan(value); })) {
        return complain(form, "swallows a NaN in coordinate ", d,
                        "; let it through, e.g. with x as the first argument of ", "max and min.");
      }
      for (Eigen::Index r = 0; r < tile_rows; ++r) {
        if (r != bad && !same_row(phi, r, out, r)) {
          return complain(form, "a NaN in row ", bad, " changes row ", r, "; compute each row from its own x alone.");
        }
      }
    }
#endif
  }

  /// dx against differences of the features, one coordinate of all rows at a time, at most 32 of them. At a feature's
  /// kink any value between the derivatives on its sides will do; where features jump, there is none to compare with.
  void check_vjp(const map_form<T>& form, const guarded_tile<T>& x, const guarded_tile<T>& phi) {
    constexpr double step = std::is_same_v<T, float> ? 0x1p-7 : 0x1p-17;
    // Of the features that move: their rounding, and the step's own error.
    constexpr double slack = 64 * double(std::numeric_limits<T>::epsilon()) / step + 16 * step * step;
    constexpr double rounding = 64 * double(std::numeric_limits<T>::epsilon());  // of dx, where its terms cancel
    const guarded_tile<T> dphi = draw(tile_rows, m_map.features, 4, 0);
    const auto gradient = [&](T before) {
      guarded_tile<T> dx(tile_rows, m_map.head_dim);
      dx.fill(before);
      tile<T> out = dx.view();
      form.vjp(x.view(), phi.view(), dphi.view(), out, tile_position{0, 0});
      return dx;
    };
    const guarded_tile<T> dx = gradient(sentinels[0]);
    if (!dx.surrounded_by(sentinels[0])) {
      return complain(form, "its vjp writes outside dx; write rows 0 ... R-1, columns 0 ... D-1 (D = ", m_map.head_dim,
                      ") and nothing else.");
    }
    if (first_difference(dx, gradient(sentinels[1])) >= 0) {
      return complain(form, "its vjp leaves something of dx unwritten, or adds to what was there; assign all of it.");
    }
    for (Eigen::Index d = 0; d < m_map.head_dim; d += m_map.head_dim / 32 + 1) {
      const auto moved_by = [&](double by) {
        guarded_tile<T> moved = x;
        for (Eigen::Index r = 0; r < tile_rows; ++r) moved.row(r)[d] += T(by);
        return moved;
      };
      const guarded_tile<T> ahead = moved_by(step), behind = moved_by(-step);
      const guarded_tile<T> phi_ahead = apply(form.original, ahead), phi_behind = apply(form.original, behind);
      const guarded_tile<T> phi_half_way = apply(form.original, moved_by(step / 2));
      for (Eigen::Index r = 0; r < tile_rows; ++r) {
        double low = 0, high = 0, tolerance = 0, change = 0, half_way = 0, sizes = 0;
        for (Eigen::Index c = 0; c < m_map.features; ++c) {
          const double w = double(dphi.row(r)[c]), f = double(phi.row(r)[c]);
          const double a = double(phi_ahead.row(r)[c]), b = double(phi_behind.row(r)[c]);
          const double right = w * (a - f) / (double(ahead.row(r)[d]) - double(x.row(r)[d]));
          const double left = w * (f - b) / (double(x.row(r)[d]) - double(behind.row(r)[d]));
          low += std::min(left, right);
          high += std::max(left, right);
          if (a != b) tolerance += slack * std::abs(w) * (std::abs(a) + std::abs(b) + std::abs(a - b) / step);
          tolerance += rounding * std::abs(w) * (std::abs(a) + std::abs(b));
          change += std::abs(a - f);
          half_way += std::abs(double(phi_half_way.row(r)[c]) - f);
          sizes += std::abs(a) + std::abs(f);
        }
        if (change > 0.01 * sizes && half_way > 0.75 * change) continue;  // a jump; half of it would be a slope
        const double found = double(dx.row(r)[d]);
        if (found >= low - tolerance && found <= high + tolerance) continue;
        return complain(form, "its vjp gives ", found, " for coordinate ", d, " of row ", r,
                        ", where differences give ", (low + high) / 2,
                        "; return dphi times the derivative of the features at x.");
      }
    }
  }

  /// The engine calls packet where the references call forward: one map, two spellings.
  void check_packet_against_forward() {
    constexpr T rounding = 64 * std::numeric_limits<T>::epsilon();
    const guarded_tile<T> x = draw(tile_rows, 1);
    for (const map_form<T>& packet : m_map.fused) {
      const guarded_tile<T> fused = apply(packet.original, x);
      for (const map_form<T>& form : m_map.forms) {
        const guarded_tile<T> plain = apply(form.original, x);
        for (Eigen::Index i = 0; i < plain.size(); ++i) {
          if (!(std::abs(fused[i] - plain[i]) <= rounding * std::max(std::abs(fused[i]), std::abs(plain[i])))) {
            return complain(packet, place(i), " is ", static_cast<double>(fused[i]), ", but ",
                            static_cast<double>(plain[i]), " from ", form.name, "; write ", form.name,
                            " as elementwise_forward(*this, x, phi).");
          }
        }
      }
    }
  }

  /// A feature from what the map writes.
  double value(T written) const { return m_map.writes_log ? std::exp(double(written)) : double(written); }

  /// A longer sequence: values, and the denominators phi(q_i) . sum_{j <= i} phi(k_j), summed in double.
  void check_sample(Eigen::Index total) {
    constexpr Eigen::Index block = 16;
    const map_form<T>& queries = m_map.forms.front();
    const map_form<T>& keys = m_map.forms.back();
    std::vector<double> z(static_cast<std::size_t>(m_map.features), 0.0);  // (C)
    for (Eigen::Index first = 0; first < total; first += block) {
      const Eigen::Index rows = std::min(block, total - first);
      const guarded_tile<T> phi_q = apply(queries.original, draw(rows, 2, first), sentinels[0], first);
      const guarded_tile<T> phi_k = apply(keys.original, draw(rows, 3, first), sentinels[0], first);
      check_values(queries, phi_q);
      if (problems.empty()) check_values(keys, phi_k);
      if (!problems.empty()) return;
      for (Eigen::Index r = 0; r < rows; ++r) {
        double denominator = 0;
        for (std::size_t c = 0; c < z.size(); ++c) {
          z[c] += value(phi_k.row(r)[c]);
          denominator += value(phi_q.row(r)[c]) * z[c];
        }
        ++denominators;
        if (!(denominator > 0)) ++non_positive;
      }
    }
  }

  map_under_test<T> m_map;
  double m_deviation;
  std::uint64_t m_seed;
};

}  // namespace detail
LINATTN_NAMESPACE_END
