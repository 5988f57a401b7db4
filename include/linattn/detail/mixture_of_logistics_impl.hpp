// Bodies of mixture_of_logistics.hpp.
#pragma once

#include <linattn/detail/sampling_impl.hpp>
#include <linattn/mixture_of_logistics.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

LINATTN_NAMESPACE_BEGIN
namespace detail {

constexpr double least_log_scale = -7;
/// Below, a level's probability is its density times its width.
constexpr double least_bin = 1e-5;

inline double clamped_log_scale(double raw) { return raw < least_log_scale ? least_log_scale : raw; }  // keeps NaN

/// ln(1 + e^x).
inline double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// ln sum e^x of numbers that come one by one.
class log_sum {
 public:
  void add(double x) {
    if (x == -std::numeric_limits<double>::infinity()) return;
    if (x > m_largest) {
      m_sum = m_sum * std::exp(m_largest - x) + 1;
      m_largest = x;
    } else {
      m_sum += std::exp(x - m_largest);
    }
  }
  double value() const { return m_largest + std::log(m_sum); }

 private:
  double m_largest = -std::numeric_limits<double>::infinity();
  double m_sum = 0;
};

}  // namespace detail

inline mixture_of_logistics::mixture_of_logistics(Eigen::Index components, Eigen::Index levels)
    : m_components(components), m_levels(levels) {
  if (components < 1 || levels < 2) {
    detail::refuse("mixture_of_logistics", components, " components and ", levels,
                   " levels are asked for, at least 1 and 2 are needed");
  }
}

template <class T>
vector_view<const T> mixture_of_logistics::require_row(const char* function, const vector_view<const T>& row) const {
  if (row.size() != parameters()) {
    detail::refuse(function, "the row has ", row.size(), " parameters, ", m_components, " components have ",
                   parameters());
  }
  return row;
}

/// ln P_k(level).
inline double mixture_of_logistics::log_bin(Eigen::Index level, double mean, double raw_scale) const {
  const double log_scale = detail::clamped_log_scale(raw_scale);
  const double inverse_scale = std::exp(-log_scale);
  const double h = 1 / static_cast<double>(m_levels - 1);
  const double x = static_cast<double>(2 * level) * h - 1 - mean;
  const double upper = (x + h) * inverse_scale;
  const double lower = (x - h) * inverse_scale;
  if (level == 0) return -detail::softplus(-upper);
  if (level == m_levels - 1) return -detail::softplus(lower);
  const double bin = detail::sigmoid(upper) - detail::sigmoid(lower);
  if (bin > detail::least_bin) return std::log(bin);
  const double middle = -std::abs(x * inverse_scale);  // either tail: at infinity, too, one of them is -inf
  return middle - log_scale - 2 * detail::softplus(middle) + std::log(2 * h);
}

template <class Row>
double mixture_of_logistics::log_likelihood(Row&& row, Eigen::Index level) const {
  constexpr const char* function = "mixture_of_logistics::log_likelihood";
  const auto parameters = require_row(function, detail::row_of<Row>(std::forward<Row>(row)));
  if (level < 0 || level >= m_levels) detail::refuse(function, "there is no level ", level, " of ", m_levels);
  const auto at = [&](Eigen::Index i) { return static_cast<double>(parameters.data()[i]); };
  detail::log_sum all;
  detail::log_sum there;
  for (Eigen::Index k = 0; k < m_components; ++k) {
    all.add(at(k));
    there.add(at(k) + log_bin(level, at(m_components + k), at(2 * m_components + k)));
  }
  return there.value() - all.value();
}

template <class Row>
Eigen::Index mixture_of_logistics::sample(Row&& row, random_stream& random) const {
  constexpr const char* function = "mixture_of_logistics::sample";
  const auto parameters = require_row(function, detail::row_of<Row>(std::forward<Row>(row)));
  for (Eigen::Index i = m_components; i < parameters.size(); ++i) {
    if (std::isnan(parameters.data()[i])) detail::refuse(function, "parameter ", i, " is NaN");
  }
  using logits = std::remove_cvref_t<decltype(parameters)>;
  const Eigen::Index best = detail::require_largest(function, logits(parameters.data(), m_components));
  const auto at = [&](Eigen::Index i) { return static_cast<double>(parameters.data()[i]); };
  const auto weight = [&](Eigen::Index k) { return detail::sampling_weight(at(k), at(best), 1); };

  double mass = 0;
  for (Eigen::Index k = 0; k < m_components; ++k) mass += weight(k);
  const double target = random.uniform() * mass;
  double sum = 0;
  Eigen::Index component = best;
  for (Eigen::Index k = 0; k < m_components && sum <= target; ++k) {
    if (weight(k) == 0) continue;
    sum += weight(k);
    component = k;
  }

  const double u = random.uniform();
  const double logistic = detail::natural_logarithm(u) - detail::natural_logarithm(1 - u);
  // Finite, so that with an infinite mean it makes no NaN.
  const double scale =
      std::min(detail::natural_exponential(detail::clamped_log_scale(at(2 * m_components + component))),
               std::numeric_limits<double>::max());
  const double x = std::fma(scale, logistic, at(m_components + component));
  const double highest = static_cast<double>(m_levels - 1);
  const double nearest = std::round((x + 1) * (highest / 2));
  return static_cast<Eigen::Index>(std::clamp(nearest, 0.0, highest));
}

LINATTN_NAMESPACE_END
