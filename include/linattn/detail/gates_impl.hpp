// The loops behind the gates of gates.hpp: registers of a row, with constants by column.
#pragma once

#include <linattn/detail/activations.hpp>
#include <linattn/detail/layer_checks.hpp>
#include <linattn/detail/registers.hpp>
#include <linattn/matrix_view.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

LINATTN_NAMESPACE_BEGIN
namespace detail {

// ---- loops ---------------------------------------------------------------------------------------------------------

/// out_ic = f(x_ic), registers of f at a time.
template <class T, class F>
void map_registers(const matrix_view<const T>& x, const matrix_view<T>& out, const F& f) {
  for (Eigen::Index i = 0; i < x.rows(); ++i) {
    for_each_register<T>(x.cols(), [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
      store_up_to(out.row(i) + c, f(load_up_to(x.row(i) + c, left)), left);
    });
  }
}

/// Checks, then out_ic = f(x_ic).
template <class T, class F>
void elementwise_gate(const char* function, const matrix_view<const T>& x, const matrix_view<T>& out, const F& f) {
  require_shape(function, "the output", out, "the input", x.rows(), x.cols());
  assert_apart_or_same(x, out);
  map_registers(x, out, f);
}

/// apply(row, column, lanes left, constants) for every register of a (rows, cols) gate, its constants being the packets
/// that prepare(column) gave for its columns: once a call, not once a row, and on the stack.
template <Eigen::Index Constants, class T, class Prepare, class Apply>
void for_each_gate_register(Eigen::Index rows, Eigen::Index cols, const Prepare& prepare, const Apply& apply) {
  constexpr Eigen::Index block = 256;  // columns whose constants are kept at a time
  alignas(slab_alignment) T kept[Constants][block];
  for (Eigen::Index first = 0; first < cols; first += block) {
    const Eigen::Index n = std::min(block, cols - first);
    for (Eigen::Index c = 0; c < n; ++c) {
      const std::array<T, std::size_t(Constants)> values = prepare(first + c);
      for (Eigen::Index j = 0; j < Constants; ++j) kept[j][c] = values[std::size_t(j)];
    }
    for (Eigen::Index i = 0; i < rows; ++i) {
      for_each_register<T>(n, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        std::array<packet<T>, std::size_t(Constants)> constants;
        unroll<Constants>([&](auto j) LINATTN_INLINE_LAMBDA {
          constants[std::size_t(j.value)] = load_up_to(kept[j.value] + c, left);
        });
        apply(i, first + c, left, constants);
      });
    }
  }
}

/// The gates that have a rate e^A_log for each of H heads and a bias for each of H D columns:
/// apply(row, column, left, {rate, bias}).
template <class T, class Apply>
void for_each_rated_register(const char* function, const char* name, const matrix_view<const T>& x,
                             const vector_view<const T>& a_log, const vector_view<const T>& dt_bias,
                             const Apply& apply) {
  require_size(function, "dt_bias", dt_bias, name, x.cols());
  const Eigen::Index width = require_heads(function, name, x.cols(), a_log.size());
  T rate = T(0);
  for_each_gate_register<2, T>(
      x.rows(), x.cols(),
      [&](Eigen::Index c) {
        if (c % width == 0) rate = std::exp(a_log.data()[c / width]);
        return std::array<T, 2>{rate, dt_bias.data()[c]};
      },
      apply);
}

/// log_decay = -e^A_log softplus(x + dt_bias): per head where A_log has an entry a column, else per feature.
template <class T>
void softplus_decay(const char* function, const char* name, const matrix_view<const T>& x,
                    const vector_view<const T>& a_log, const vector_view<const T>& dt_bias,
                    const matrix_view<T>& log_decay) {
  require_shape(function, "log_decay", log_decay, name, x.rows(), x.cols());
  assert_apart_or_same(x, log_decay);
  for_each_rated_register(function, name, x, a_log, dt_bias,
                          [&](Eigen::Index i, Eigen::Index c, Eigen::Index left, const auto& constants)
                              LINATTN_INLINE_LAMBDA {
                                const packet<T> delta = softplus(load_up_to(x.row(i) + c, left) + constants[1]);
                                store_up_to(log_decay.row(i) + c, packet<T>::zero() - constants[0] * delta, left);
                              });
}

/// gates.hpp, kimi_delta_safe_gate.
template <class T>
void bounded_decay(const matrix_view<const T>& f, const vector_view<const T>& a_log,
                   const vector_view<const T>& dt_bias, const matrix_view<T>& log_decay, double lower_bound) {
  constexpr const char* function = "kimi_delta_safe_gate";
  if (!(lower_bound < 0)) refuse(function, "the lower bound is ", lower_bound, ", not below 0");
  require_shape(function, "log_decay", log_decay, "f", f.rows(), f.cols());
  assert_apart_or_same(f, log_decay);
  const packet<T> bound(static_cast<T>(lower_bound));
  for_each_rated_register(function, "f", f, a_log, dt_bias,
                          [&](Eigen::Index i, Eigen::Index c, Eigen::Index left, const auto& constants)
                              LINATTN_INLINE_LAMBDA {
                                const packet<T> x = constants[0] * (load_up_to(f.row(i) + c, left) + constants[1]);
                                store_up_to(log_decay.row(i) + c, sigmoid(x) * bound, left);
                              });
}

/// gates.hpp, mamba2_gate.
template <class T>
void mamba2_registers(const matrix_view<const T>& dt, const vector_view<const T>& a_log,
                      const vector_view<const T>& dt_bias, const matrix_view<T>& log_decay, const matrix_view<T>& delta,
                      double low, double high) {
  constexpr const char* function = "mamba2_gate";
  if (!(low >= 0 && low <= high)) refuse(function, "the limits are ", low, " and ", high, ", not 0 <= low <= high");
  require_size(function, "a_log", a_log, "dt", dt.cols());
  require_shape(function, "log_decay", log_decay, "dt", dt.rows(), dt.cols());
  require_shape(function, "delta", delta, "dt", dt.rows(), dt.cols());
  assert_apart_or_same(dt, log_decay);
  assert_apart_or_same(dt, delta);
  assert_apart(delta, log_decay);
  const packet<T> least(static_cast<T>(low));
  const packet<T> most(static_cast<T>(high));
  for_each_rated_register(
      function, "dt", dt, a_log, dt_bias,
      [&](Eigen::Index i, Eigen::Index c, Eigen::Index left, const auto& constants) LINATTN_INLINE_LAMBDA {
        const packet<T> step = min(max(softplus(load_up_to(dt.row(i) + c, left) + constants[1]), least), most);
        store_up_to(delta.row(i) + c, step, left);
        store_up_to(log_decay.row(i) + c, packet<T>::zero() - constants[0] * step, left);
      });
}

/// gates.hpp, hgrn2_gate. With p = e^min(f, 0) and n = e^min(-f, 0), of which one is 1 and the other e^-|f|,
///
///   alpha = (p + b n) / (p + n)        1 - alpha = (1 - b) n / (p + n)
///   ln alpha = -ln(1 + t),  t = (1 - b) n / (p + b n)                 for t <= 1: all terms positive, nothing cancels
///            = larger + ln(1 + e^-|difference|) of ln b and ln(1 - b) + ln sigmoid(f)    beyond, where alpha < 1/2
///
/// t > 1 needs f < 0, so that ln sigmoid(f) = f - ln(1 + p) there.
template <class T>
void hgrn2_registers(const matrix_view<const T>& f, const vector_view<const T>& lower_bound,
                     const matrix_view<T>& log_decay, const matrix_view<T>& key) {
  using P = packet<T>;
  constexpr const char* function = "hgrn2_gate";
  require_size(function, "lower_bound", lower_bound, "f", f.cols());
  require_shape(function, "log_decay", log_decay, "f", f.rows(), f.cols());
  require_shape(function, "key", key, "f", f.rows(), f.cols());
  for (Eigen::Index c = 0; c < lower_bound.size(); ++c) {
    const T bound = lower_bound.data()[c];
    if (bound < T(0) || bound > T(1)) {
      refuse(function, "lower_bound ", c, " is ", static_cast<double>(bound), ", not in [0, 1]");
    }
  }
  assert_apart_or_same(f, log_decay);
  assert_apart_or_same(f, key);
  assert_apart(key, log_decay);
  const P one(T(1));
  for_each_gate_register<4, T>(
      f.rows(), f.cols(),
      [&](Eigen::Index c) {
        const T bound = lower_bound.data()[c];
        const T log_bound = bound == T(0) ? std::numeric_limits<T>::lowest() : std::log(bound);
        return std::array<T, 4>{bound, T(1) - bound, log_bound, std::log1p(-bound)};
      },
      [&](Eigen::Index i, Eigen::Index c, Eigen::Index left, const auto& constants) LINATTN_INLINE_LAMBDA {
        const P x = load_up_to(f.row(i) + c, left);
        const P p = exp_of_negative(x);
        const P n = exp_of_negative(P::zero() - x);
        const P rest = constants[1] * n;
        store_up_to(key.row(i) + c, rest / (p + n), left);

        const P t = rest / fma(constants[0], n, p);
        const P near_one = P::zero() - log1p_of_unit(min(t, one));
        const P gated = constants[3] + (x - log1p_of_unit(p));
        const P difference = gated - constants[2];
        const P far_from_one = max(gated, constants[2]) + log1p_of_unit(exp_of_negative(minus_magnitude(difference)));
        const P far = where_positive(t - one, far_from_one);  // 0 elsewhere, and for a NaN
        store_up_to(log_decay.row(i) + c, far + (near_one - where_positive(t - one, near_one)), left);
      });
}

/// gates.hpp, hgrn2_lower_bounds.
template <class T>
void accumulated_softmax(const matrix_view<const T>& learned, const matrix_view<T>& bounds) {
  constexpr const char* function = "hgrn2_lower_bounds";
  require_shape(function, "lower_bounds", bounds, "learned", learned.rows(), learned.cols());
  assert_apart(learned, bounds);
  for (Eigen::Index c = 0; c < learned.cols(); ++c) {
    T largest = std::numeric_limits<T>::lowest();
    for (Eigen::Index l = 0; l < learned.rows(); ++l) largest = std::max(largest, learned(l, c));
    T total = T(0);
    for (Eigen::Index l = 0; l < learned.rows(); ++l) total += std::exp(learned(l, c) - largest);
    T sum = T(0);
    for (Eigen::Index l = 0; l < learned.rows(); ++l) {
      if (l > 0) sum += std::exp(learned(l, c) - largest) / total;
      bounds(l, c) = std::min(sum, T(1));  // not above where the first layer's share rounds away
    }
  }
}

// ---- schedules -----------------------------------------------------------------------------------------------------

/// 2^(-8 (h + 1) / H).
inline double geometric_slope(Eigen::Index h, Eigen::Index heads) {
  return std::exp2(-8.0 * static_cast<double>(h + 1) / static_cast<double>(heads));
}

/// ALiBi's slope of head h: as above for the first p heads, p the largest power of two that H reaches; the others take
/// every second slope of 2 p heads, from the first on.
inline double alibi_slope(Eigen::Index h, Eigen::Index heads) {
  Eigen::Index p = 1;
  while (2 * p <= heads) p *= 2;
  return h < p ? geometric_slope(h, p) : geometric_slope(2 * (h - p), 2 * p);
}

}  // namespace detail
LINATTN_NAMESPACE_END
