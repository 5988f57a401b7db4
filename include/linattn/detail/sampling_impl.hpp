// Bodies of sampling.hpp, and the exponential they share with mixture_of_logistics.hpp.
#pragma once

#include <linattn/detail/layer_checks.hpp>
#include <linattn/sampling.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// e^x with the same bits everywhere, as random.hpp's functions: x = k ln 2 + r, |r| <= ln 2 / 2, and a polynomial of
/// degree 13, whose first omitted term is 4e-18. 0 below -708, where the result would not be normal; infinity above
/// 709.
inline double natural_exponential(double x) {
  if (x < -708.0) return 0;
  if (x > 709.0) return std::numeric_limits<double>::infinity();
  const double k = std::floor(std::fma(x, 1.4426950408889634, 0.5));
  const double r = std::fma(-k, 2.3190468138462996e-17, std::fma(-k, 0.6931471805599453, x));
  constexpr std::array<double, 14> inverse_factorials = {
      1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
      1.0 / 720,        1.0 / 120,       1.0 / 24,       1.0 / 6,       1.0 / 2,      1.0,         1.0};
  const auto power = std::bit_cast<double>(static_cast<std::uint64_t>(static_cast<std::int64_t>(k) + 1023) << 52U);
  return horner(inverse_factorials, r) * power;  // an exact product: what it is added to may be contracted with it
}

/// Index of the largest logit, the lowest of several.
template <class T>
Eigen::Index require_largest(const char* function, const vector_view<const T>& logits) {
  if (logits.size() == 0) refuse(function, "there are no logits");
  Eigen::Index best = 0;
  for (Eigen::Index i = 0; i < logits.size(); ++i) {
    const T x = logits.data()[i];
    if (std::isnan(x)) refuse(function, "logit ", i, " of ", logits.size(), " is NaN");
    if (x > logits.data()[best]) best = i;
  }
  if (logits.data()[best] == -std::numeric_limits<T>::infinity()) {
    refuse(function, "all of the ", logits.size(), " logits are -inf");
  }
  return best;
}

/// Weight of a logit x beside the largest one: exp((x - largest) / temperature).
inline double sampling_weight(double x, double largest, double temperature) {
  return x == largest ? 1 : natural_exponential((x - largest) / temperature);
}

/// ln p_i of a row of logits, for any i.
class log_probabilities {
 public:
  template <class T>
  log_probabilities(const char* function, const vector_view<const T>& logits) {
    if (logits.size() == 0) refuse(function, "there are no logits");
    const auto x = [&](Eigen::Index i) { return static_cast<double>(logits.data()[i]); };
    m_largest = x(0);
    for (Eigen::Index i = 1; i < logits.size(); ++i) m_largest = x(i) > m_largest ? x(i) : m_largest;
    double sum = 0;
    for (Eigen::Index i = 0; i < logits.size(); ++i) sum += std::exp(above(x(i)));
    m_log_sum = std::log(sum);
  }
  double operator()(double x) const { return above(x) - m_log_sum; }

 private:
  /// x - max, where +inf is 0 above itself. -inf is not: where it is the largest, nothing has a probability.
  double above(double x) const {
    return x == m_largest && x == std::numeric_limits<double>::infinity() ? 0 : x - m_largest;
  }

  double m_largest;
  double m_log_sum;
};

}  // namespace detail

template <class Logits>
Eigen::Index greedy(Logits&& logits) {
  return detail::require_largest("greedy", detail::row_of<Logits>(std::forward<Logits>(logits)));
}

inline sampler::sampler(const sampling_options& options, Eigen::Index symbols)
    : m_options(options), m_random(options.seed) {
  constexpr const char* function = "sampler";
  if (!(options.temperature >= 0) || std::isinf(options.temperature)) {
    detail::refuse(function, "temperature is ", options.temperature, ", expected 0 or a finite number above");
  }
  if (options.top_k < 0) detail::refuse(function, "top_k is ", options.top_k, ", expected 0 for all, or more");
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    detail::refuse(function, "top_p is ", options.top_p, ", expected a share in (0, 1]");
  }
  if (symbols < 0) detail::refuse(function, "room for ", symbols, " symbols is asked for");
  make_room(symbols);
}

inline void sampler::make_room(Eigen::Index symbols) {
  const auto n = static_cast<std::size_t>(symbols);
  m_logits.reserve(n);
  m_weights.reserve(n);
  m_order.reserve(n);
}

template <class Logits>
Eigen::Index sampler::operator()(Logits&& logits) {
  const detail::row_of<Logits> x(std::forward<Logits>(logits));
  const Eigen::Index best = detail::require_largest("sampler", x);
  make_room(x.size());
  m_logits.assign(x.data(), x.data() + x.size());
  return draw(best);
}

inline Eigen::Index sampler::draw(Eigen::Index best) {
  if (m_options.temperature == 0) return best;
  const auto n = static_cast<Eigen::Index>(m_logits.size());
  const double largest = m_logits[static_cast<std::size_t>(best)];
  m_weights.resize(m_logits.size());
  std::transform(m_logits.begin(), m_logits.end(), m_weights.begin(),
                 [&](double x) { return detail::sampling_weight(x, largest, m_options.temperature); });

  m_order.resize(m_logits.size());
  std::iota(m_order.begin(), m_order.end(), Eigen::Index{0});
  Eigen::Index last = n;  // the least probable symbol that is kept; n: all are
  if (m_options.top_k > 0 && m_options.top_k < n) last = last_of_top_k();
  if (m_options.top_p < 1) last = last_of_top_p(last);

  // In the order of symbols, not in that of the selection, which standard libraries may choose.
  const double target = m_random.uniform() * mass(last);
  double sum = 0;
  Eigen::Index symbol = best;
  for (Eigen::Index i = 0; i < n; ++i) {
    const double weight = m_weights[static_cast<std::size_t>(i)];
    if (weight == 0 || before(last, i)) continue;
    sum += weight;
    symbol = i;
    if (sum > target) break;
  }
  return symbol;
}

/// Whether a symbol comes before another one in the order of probabilities. Symbol n comes behind all.
inline bool sampler::before(Eigen::Index a, Eigen::Index b) const {
  const auto n = static_cast<Eigen::Index>(m_logits.size());
  if (a == n || b == n) return a < b;
  const double x = m_logits[static_cast<std::size_t>(a)];
  const double y = m_logits[static_cast<std::size_t>(b)];
  return x > y || (x == y && a < b);
}

/// Sum of the weights down to `last`.
inline double sampler::mass(Eigen::Index last) const {
  double sum = 0;
  for (Eigen::Index i = 0; i < static_cast<Eigen::Index>(m_weights.size()); ++i) {
    if (!before(last, i)) sum += m_weights[static_cast<std::size_t>(i)];
  }
  return sum;
}

inline Eigen::Index sampler::last_of_top_k() {
  const auto k = static_cast<std::size_t>(m_options.top_k);
  const auto last = m_order.begin() + static_cast<std::ptrdiff_t>(k - 1);
  std::nth_element(m_order.begin(), last, m_order.end(), [&](Eigen::Index a, Eigen::Index b) { return before(a, b); });
  const Eigen::Index symbol = *last;
  m_order.resize(k);
  return symbol;
}

inline Eigen::Index sampler::last_of_top_p(Eigen::Index last) {
  const auto behind = [&](Eigen::Index a, Eigen::Index b) { return before(b, a); };
  std::make_heap(m_order.begin(), m_order.end(), behind);
  const double wanted = m_options.top_p * mass(last);
  double sum = 0;
  for (auto end = m_order.end(); end != m_order.begin() && sum < wanted; --end) {
    std::pop_heap(m_order.begin(), end, behind);
    last = *std::prev(end);
    sum += m_weights[static_cast<std::size_t>(last)];
  }
  return last;
}

template <class Logits>
double log_likelihood(Logits&& logits, Eigen::Index symbol) {
  constexpr const char* function = "log_likelihood";
  const detail::row_of<Logits> x(std::forward<Logits>(logits));
  if (symbol < 0 || symbol >= x.size()) {
    detail::refuse(function, "there is no symbol ", symbol, " among ", x.size(), " logits");
  }
  return detail::log_probabilities(function, x)(static_cast<double>(x.data()[symbol]));
}

template <class Logits, class Out>
void log_softmax(Logits&& logits, Out&& out) {
  constexpr const char* function = "log_softmax";
  using T = detail::scalar_of<Out>;
  const detail::row_of<Logits> x(std::forward<Logits>(logits));
  const vector_view<T> y(std::forward<Out>(out));
  detail::require_size(function, "out", y, "the row of logits", x.size());
  const detail::log_probabilities log_p(function, x);
  for (Eigen::Index i = 0; i < x.size(); ++i) y.data()[i] = static_cast<T>(log_p(static_cast<double>(x.data()[i])));
}

LINATTN_NAMESPACE_END
