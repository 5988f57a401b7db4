// check_feature_map: tests a feature map of your own against the contract of linattn/feature_map.hpp.
#pragma once

#include <linattn/detail/feature_map_checker.hpp>
#include <linattn/feature_map.hpp>

#include <Eigen/Core>
#include <cstdint>
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
  bool gradient_checked = false;      ///< false where the map has no vjp, and where a problem was found before
  Eigen::Index denominators = 0;      ///< N, each phi(q_i) . sum_{j <= i} phi(k_j); 0 where a problem was found before
  Eigen::Index non_positive = 0;      ///< how many of them are <= 0 or NaN: rows that a normaliser cannot divide

  double non_positive_share() const {
    return denominators == 0 ? 0.0 : static_cast<double>(non_positive) / static_cast<double>(denominators);
  }
};

/// Checks a map against the contract of linattn/feature_map.hpp, for heads of head_dim coordinates and features in T:
///
///   - sizes: dimension at least 1, head_dim() as asked for, one feature a coordinate where there is a packet;
///   - every feature of every row is written, nothing beside them, and nothing beside x is read;
///   - a row has the same bits in every call, in every tile and place, and in a copy of the map;
///   - features are finite and, unless the map says signed_features, not negative;
///   - NaN in is NaN out, in its row alone (not checked under -ffast-math);
///   - packet equals forward;
///   - vjp, where there is one, writes all of dx and equals differences of the features (1 % in float: check in double,
///     too). Gradients of parameters are not checked;
///
/// and counts the causal denominators that are <= 0 on random rows. That share is reported, not judged: 13 % for relu
/// at head_dim 3, 0.4 % at 8, none at 64; 40 % for random_fourier at 64.
///
///     const auto report = linattn::check_feature_map<float>(my_map(), 64);
///     for (const std::string& problem : report.problems) std::cerr << problem << '\n';
///
/// For tests and for a look at a new map: it allocates, and takes about 2 N + 300 rows through the map. A map without
/// the members it needs is a compile-time sentence instead.
template <class T = float, class Map>
feature_map_report check_feature_map(const Map& map, Eigen::Index head_dim,
                                     const feature_map_check_options& options = {}) {
  static_assert(detail::check_feature_map_members<Map, T>());
  using detail::sentence;
  feature_map_report report;
  if (head_dim < 1) {
    report.problems.push_back(sentence("head_dim is ", head_dim, "; check with at least 1."));
    return report;
  }
  if constexpr (requires { Eigen::Index(map.head_dim()); }) {
    if (Eigen::Index(map.head_dim()) != head_dim) {
      report.problems.push_back(sentence("the map was made for head_dim ", Eigen::Index(map.head_dim()),
                                         ", but is checked with ", head_dim, "; check it with its own."));
      return report;
    }
  }
  report.features = static_cast<Eigen::Index>(map.dimension(head_dim));
  if (report.features < 1) {
    report.problems.push_back(
        sentence("dimension(", head_dim, ") is ", report.features, "; a map has at least one feature."));
    return report;
  }
  if (detail::has_packet<Map, T> && report.features != head_dim) {
    report.problems.push_back(sentence("dimension(", head_dim, ") is ", report.features,
                                       ", but the map has packet(x) and so one feature a coordinate; return head_dim, ",
                                       "or remove packet."));
    return report;
  }
  detail::feature_map_checker<T> checker(detail::describe_map<T>(map, head_dim, report.features), options.deviation,
                                         options.seed);
  checker.run(options.rows);
  report.problems = checker.problems;
  report.denominators = checker.denominators;
  report.non_positive = checker.non_positive;
  report.gradient_checked = checker.gradient_checked;
  report.passed = report.problems.empty();
  return report;
}

LINATTN_NAMESPACE_END
