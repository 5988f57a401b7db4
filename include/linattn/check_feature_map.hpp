// check_feature_map: tests a feature map of your own against the contract of linattn/feature_map.hpp.
#pragma once

#include <linattn/detail/guarded_tile.hpp>
#include <linattn/detail/random.hpp>
#include <linattn/feature_map.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

LINATTN_NAMESPACE_BEGIN

/// What check_feature_map draws: rows from N(0, deviation^2), a pure function of the seed.
struct feature_map_check_options {
  Eigen::Index rows = 512;  ///< N: queries, keys and causal denominators
  double deviation = 1;     ///< standard deviation of a coordinate; take that of your q and k
  std::uint64_t seed = 1;
};

/// What check_feature_map found.
struct feature_map_report {
  bool passed = false;                ///< no problems
  std::vector<std::string> problems;  ///< one sentence each: what the map does wrong, and what to do about it
  Eigen::Index features = 0;          ///< C
  Eigen::Index denominators = 0;      ///< N, each phi(q_i) . sum_{j <= i} phi(k_j)
  Eigen::Index non_positive = 0;      ///< how many of them are <= 0 or NaN: rows that a normaliser cannot divide

  double non_positive_share() const {
    return denominators == 0 ? 0.0 : static_cast<double>(non_positive) / static_cast<double>(denominators);
  }
};

namespace detail {

template <class Map, class T>
class feature_map_checker {
 public:
  feature_map_checker(const Map& map, Eigen::Index head_dim, const feature_map_check_options& options)
      : m_map(map), m_head_dim(head_dim), m_options(options) {}

  feature_map_report run() {
    if (sizes_are_sound()) {
      bool sound = true;
      for (const form which : forms()) sound = check(which) && sound;
      if (sound) check_packet_against_forward();
      if (sound) check_sample();
    }
    m_report.passed = m_report.problems.empty();
    return m_report;
  }

 private:
  /// The ways a map can be called: one function, or a pair, and beside it a register function for elementwise maps.
  enum class form { forward, queries, keys, packet };
  static constexpr bool asymmetric = is_asymmetric<Map, T>;
  static constexpr form query_form = asymmetric ? form::queries : form::forward;
  static constexpr form key_form = asymmetric ? form::keys : form::forward;
  static constexpr Eigen::Index tile_rows = 7;
  static constexpr T sentinels[2] = {T(-54321.125), T(-98765.625)};

  static std::vector<form> forms() {
    std::vector<form> all =
        asymmetric ? std::vector<form>{form::queries, form::keys} : std::vector<form>{form::forward};
    if (has_packet<Map, T>) all.push_back(form::packet);
    return all;
  }

  static const char* name(form which) {
    constexpr const char* names[] = {"forward", "forward_queries", "forward_keys", "packet"};
    return names[static_cast<std::size_t>(which)];
  }

  void complain(form which, const std::string& sentence) {
    m_report.problems.push_back(std::string(name(which)) + ": " + sentence);
  }

  static std::string place(Eigen::Index row, Eigen::Index feature) {
    return "feature " + std::to_string(feature) + " of row " + std::to_string(row);
  }

  static bool same_bits(const T& a, const T& b) { return std::memcmp(&a, &b, sizeof(T)) == 0; }

  static bool same_row(const guarded_tile<T>& a, Eigen::Index row_a, const guarded_tile<T>& b, Eigen::Index row_b) {
    return std::memcmp(a.row(row_a), b.row(row_b), static_cast<std::size_t>(a.cols()) * sizeof(T)) == 0;
  }

  /// The first element where two tiles differ in a bit, as row * C + feature, or -1.
  static Eigen::Index first_difference(const guarded_tile<T>& a, const guarded_tile<T>& b) {
    for (Eigen::Index i = 0; i < a.rows() * a.cols(); ++i) {
      if (!same_bits(a.row(i / a.cols())[i % a.cols()], b.row(i / a.cols())[i % a.cols()])) return i;
    }
    return -1;
  }

  std::string place_of(Eigen::Index difference) const {
    return place(difference / m_report.features, difference % m_report.features);
  }

  /// phi (R, C) in one of the ways, into a tile that held `before`.
  void apply(form which, const Map& map, const guarded_tile<T>& input, guarded_tile<T>& output, T before,
             Eigen::Index position = 0) const {
    const const_tile<T> x = input.view();  // (R, D)
    output.fill(before);
    tile<T> phi = output.view();  // (R, C)
    [[maybe_unused]] const tile_position where{position, 0};
    if (which == form::packet) {
      if constexpr (has_packet<Map, T>) elementwise_forward(map, x, phi);
    } else if constexpr (asymmetric) {
      if (which == form::queries) {
        if constexpr (has_positional_queries<Map, T>) {
          map.forward_queries(x, phi, where);
        } else {
          map.forward_queries(x, phi);
        }
      } else {
        if constexpr (has_positional_keys<Map, T>) {
          map.forward_keys(x, phi, where);
        } else {
          map.forward_keys(x, phi);
        }
      }
    } else if constexpr (has_positional_forward<Map, T>) {
      map.forward(x, phi, where);
    } else {
      map.forward(x, phi);
    }
  }

  /// Rows from N(0, deviation^2); stream tells queries, keys and the small tile apart.
  guarded_tile<T> draw(Eigen::Index rows, std::uint64_t stream, Eigen::Index first = 0) const {
    guarded_tile<T> x(rows, m_head_dim);
    for (Eigen::Index r = 0; r < rows; ++r) {
      for (Eigen::Index d = 0; d < m_head_dim; ++d) {
        const auto index = static_cast<std::uint64_t>((first + r) * m_head_dim + d);
        x.row(r)[d] = static_cast<T>(m_options.deviation * random_normal(m_options.seed, stream, index));
      }
    }
    return x;
  }

  bool sizes_are_sound() {
    const auto complaint = [&](const std::string& sentence) {
      m_report.problems.push_back(sentence);
      return false;
    };
    if (m_head_dim < 1) return complaint("head_dim is " + std::to_string(m_head_dim) + "; check with at least 1.");
    if constexpr (requires { Eigen::Index(m_map.head_dim()); }) {
      if (Eigen::Index(m_map.head_dim()) != m_head_dim) {
        return complaint("the map was made for head_dim " + std::to_string(Eigen::Index(m_map.head_dim())) +
                         ", but is checked with " + std::to_string(m_head_dim) + "; check it with its own.");
      }
    }
    m_report.features = static_cast<Eigen::Index>(m_map.dimension(m_head_dim));
    if (m_report.features < 1) {
      return complaint("dimension(" + std::to_string(m_head_dim) + ") is " + std::to_string(m_report.features) +
                       "; a map has at least one feature.");
    }
    if (has_packet<Map, T> && m_report.features != m_head_dim) {
      return complaint(
          "dimension(" + std::to_string(m_head_dim) + ") is " + std::to_string(m_report.features) +
          ", but the map has packet(x) and so one feature a coordinate; return head_dim, or remove packet.");
    }
    return true;
  }

  /// One way to call the map on a small tile; false where a later check would only repeat the fault.
  bool check(form which) {
    const std::size_t before = m_report.problems.size();
    guarded_tile<T> x = draw(tile_rows, 1);
    std::fill(x.row(3), x.row(3) + m_head_dim, T(0));
    guarded_tile<T> phi(tile_rows, m_report.features);
    guarded_tile<T> other(tile_rows, m_report.features);
    apply(which, m_map, x, phi, sentinels[0]);
    apply(which, m_map, x, other, sentinels[1]);
    if (!phi.surrounded_by(sentinels[0]) || !other.surrounded_by(sentinels[1])) {
      complain(which, "writes outside phi; write rows 0 ... R-1, columns 0 ... C-1 (C = " +
                          std::to_string(m_report.features) + ") and nothing else, not even the padding of a row.");
      return false;
    }
    for (Eigen::Index r = 0; r < tile_rows; ++r) {
      for (Eigen::Index c = 0; c < m_report.features; ++c) {
        if (same_bits(phi.row(r)[c], sentinels[0]) && same_bits(other.row(r)[c], sentinels[1])) {
          complain(which, place(r, c) + " is never written; write all C = " + std::to_string(m_report.features) +
                              " features of every row (dimension says how many there are).");
          return false;
        }
      }
    }
    guarded_tile<T> again(tile_rows, m_report.features);
    apply(which, m_map, x, again, sentinels[0]);
    Eigen::Index difference = first_difference(phi, again);
    if (difference >= 0) {
      complain(which, place_of(difference) + " changes from call to call; a map has no mutable state, and randomness " +
                          "belongs into its constructor.");
      return false;
    }
    difference = first_difference(phi, other);
    if (difference >= 0) {
      complain(which, place_of(difference) + " depends on what phi held before; assign features, do not add to them.");
      return false;
    }
    const Map copy(m_map);
    apply(which, copy, x, again, sentinels[0]);
    difference = first_difference(phi, again);
    if (difference >= 0) {
      complain(which, place_of(difference) + " is another one in a copy of the map; copy every parameter.");
      return false;
    }
    check_reads(which, x, phi);
    check_rows(which, x, phi);
    check_values(which, phi);
    check_nan(which, x, phi);
    return m_report.problems.size() == before;
  }

  /// Nothing but the D coordinates of a row may be read.
  void check_reads(form which, guarded_tile<T> x, const guarded_tile<T>& phi) {
    guarded_tile<T> other(tile_rows, m_report.features);
    x.surround(T(12345.5));
    apply(which, m_map, x, other, sentinels[0]);
    const Eigen::Index difference = first_difference(phi, other);
    if (difference >= 0) {
      complain(which, place_of(difference) +
                          " depends on memory outside x; read rows 0 ... R-1, columns 0 ... D-1 (D = " +
                          std::to_string(m_head_dim) + ") only.");
    }
  }

  /// A row's features must not depend on its tile: alone, and where no position is asked for, in reverse order.
  void check_rows(form which, const guarded_tile<T>& x, const guarded_tile<T>& phi) {
    guarded_tile<T> reversed(tile_rows, m_head_dim);
    guarded_tile<T> backwards(tile_rows, m_report.features);
    for (Eigen::Index r = 0; r < tile_rows; ++r) {
      std::copy(x.row(r), x.row(r) + m_head_dim, reversed.row(tile_rows - 1 - r));
    }
    apply(which, m_map, reversed, backwards, sentinels[0]);
    for (Eigen::Index r = 0; r < tile_rows; ++r) {
      guarded_tile<T> single(1, m_head_dim);
      guarded_tile<T> alone(1, m_report.features);
      std::copy(x.row(r), x.row(r) + m_head_dim, single.row(0));
      apply(which, m_map, single, alone, sentinels[0], r);
      if (!same_row(phi, r, alone, 0) || (!is_positional<Map, T> && !same_row(phi, r, backwards, tile_rows - 1 - r))) {
        complain(which, "row " + std::to_string(r) +
                            " has other features in another tile; compute each row from its own " +
                            "x alone, in an order that depends neither on R nor on the row's place.");
        return;
      }
    }
  }

  /// Finite and, unless the map says otherwise, not negative.
  void check_values(form which, const guarded_tile<T>& phi) {
    for (Eigen::Index r = 0; r < phi.rows(); ++r) {
      for (Eigen::Index c = 0; c < phi.cols(); ++c) {
        const T value = phi.row(r)[c];
        if (!(std::abs(value) <= std::numeric_limits<T>::max())) {
          complain(which, place(r, c) + " is not finite on an input from N(0, " + std::to_string(m_options.deviation) +
                              "^2); bound the map, or check it with the deviation of your inputs.");
          return;
        }
        if (!has_signed_features<Map> && value < T(0)) {
          complain(which, place(r, c) + " is " + std::to_string(value) + "; keep features >= 0, or declare " +
                              "`static constexpr bool signed_features = true` (not normalised by default).");
          return;
        }
      }
    }
  }

  /// A NaN shows in its own row and in no other.
  void check_nan(form which, const guarded_tile<T>& x, const guarded_tile<T>& phi) {
#if !defined(__FINITE_MATH_ONLY__) || !__FINITE_MATH_ONLY__
    constexpr Eigen::Index bad = 2;
    const Eigen::Index step = std::max<Eigen::Index>(1, m_head_dim / 32);
    guarded_tile<T> out(tile_rows, m_report.features);
    for (Eigen::Index back = 0; back < m_head_dim; back += step) {
      const Eigen::Index d = m_head_dim - 1 - back;
      guarded_tile<T> poisoned = x;
      poisoned.row(bad)[d] = std::numeric_limits<T>::quiet_NaN();
      apply(which, m_map, poisoned, out, sentinels[0]);
      if (std::none_of(out.row(bad), out.row(bad) + out.cols(), [](T value) { return std::isnan(value); })) {
        complain(which, "swallows a NaN in coordinate " + std::to_string(d) +
                            "; let it through, e.g. with x as the first " + "argument of max and min.");
        return;
      }
      for (Eigen::Index r = 0; r < tile_rows; ++r) {
        if (r != bad && !same_row(phi, r, out, r)) {
          complain(which, "a NaN in row " + std::to_string(bad) + " changes row " + std::to_string(r) +
                              "; compute each " + "row from its own x alone.");
          return;
        }
      }
    }
#else
    (void)which, (void)x, (void)phi;
#endif
  }

  /// The engine calls packet where the references call forward: one map, two spellings.
  void check_packet_against_forward() {
    if constexpr (has_packet<Map, T>) {
      constexpr T rounding = 64 * std::numeric_limits<T>::epsilon();
      const guarded_tile<T> x = draw(tile_rows, 1);
      guarded_tile<T> fused(tile_rows, m_report.features);
      guarded_tile<T> plain(tile_rows, m_report.features);
      apply(form::packet, m_map, x, fused, sentinels[0]);
      for (const form which : {query_form, key_form}) {
        apply(which, m_map, x, plain, sentinels[0]);
        for (Eigen::Index i = 0; i < tile_rows * m_report.features; ++i) {
          const T a = fused.row(i / fused.cols())[i % fused.cols()];
          const T b = plain.row(i / plain.cols())[i % plain.cols()];
          if (!(std::abs(a - b) <= rounding * std::max(std::abs(a), std::abs(b)))) {
            complain(form::packet, place_of(i) + " is " + std::to_string(a) + ", but " + std::to_string(b) + " from " +
                                       name(which) + "; write " + name(which) +
                                       " as elementwise_forward(*this, x, phi).");
            return;
          }
        }
      }
    }
  }

  /// A longer sequence: values, and the denominators phi(q_i) . sum_{j <= i} phi(k_j), summed in double.
  void check_sample() {
    constexpr Eigen::Index block = 16;
    std::vector<double> z(static_cast<std::size_t>(m_report.features), 0.0);  // (C)
    for (Eigen::Index first = 0; first < m_options.rows; first += block) {
      const Eigen::Index rows = std::min(block, m_options.rows - first);
      guarded_tile<T> phi_q(rows, m_report.features);
      guarded_tile<T> phi_k(rows, m_report.features);
      apply(query_form, m_map, draw(rows, 2, first), phi_q, sentinels[0], first);
      apply(key_form, m_map, draw(rows, 3, first), phi_k, sentinels[0], first);
      const std::size_t before = m_report.problems.size();
      check_values(query_form, phi_q);
      if (m_report.problems.size() == before) check_values(key_form, phi_k);
      if (m_report.problems.size() != before) return;
      for (Eigen::Index r = 0; r < rows; ++r) {
        double denominator = 0;
        for (std::size_t c = 0; c < z.size(); ++c) {
          z[c] += static_cast<double>(phi_k.row(r)[c]);
          denominator += static_cast<double>(phi_q.row(r)[c]) * z[c];
        }
        ++m_report.denominators;
        if (!(denominator > 0)) ++m_report.non_positive;
      }
    }
  }

  const Map& m_map;
  Eigen::Index m_head_dim;
  feature_map_check_options m_options;
  feature_map_report m_report;
};

}  // namespace detail

/// Checks a map against the contract of linattn/feature_map.hpp with heads of head_dim coordinates and features in T:
/// sizes; every feature written, nothing else; nothing else read; the same bits from the same row, whatever its tile
/// and from a copy of the map; features finite, and non-negative unless the map says signed_features; NaN in, NaN out;
/// packet equal to forward; and the share of causal denominators that are <= 0 on random rows, which is counted, not
/// judged: 13 % for relu at head_dim 3, 0.4 % at 8, none at 64; 40 % for random_fourier at 64.
///
///     const auto report = linattn::check_feature_map<float>(my_map(), 64);
///     for (const std::string& problem : report.problems) std::cerr << problem << '\n';
///
/// For tests and for a look at a new map; it allocates, and takes about 2 N + 300 rows through the map. NaN is not
/// checked under -ffast-math.
template <class T = float, class Map>
feature_map_report check_feature_map(const Map& map, Eigen::Index head_dim,
                                     const feature_map_check_options& options = {}) {
  static_assert(detail::check_feature_map_members<Map, T>());
  return detail::feature_map_checker<Map, T>(map, head_dim, options).run();
}

LINATTN_NAMESPACE_END
