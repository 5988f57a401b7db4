// The loops behind gates.hpp and gated_rms_norm.hpp that work head by head.
#pragma once

#include <linattn/detail/activations.hpp>
#include <linattn/detail/layer_checks.hpp>
#include <linattn/detail/registers.hpp>
#include <linattn/matrix_view.hpp>

#include <Eigen/Core>
#include <cmath>
#include <utility>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// gates.hpp, scale_heads.
template <class T>
void scale_head_rows(const matrix_view<const T>& v, const matrix_view<const T>& scale, const matrix_view<T>& out) {
  constexpr const char* function = "scale_heads";
  const Eigen::Index width = require_heads(function, "v", v.cols(), scale.cols());
  require_shape(function, "scale", scale, "v", v.rows(), scale.cols());
  require_shape(function, "out", out, "v", v.rows(), v.cols());
  assert_apart_or_same(v, out);
  assert_apart(scale, out);
  for (Eigen::Index i = 0; i < v.rows(); ++i) {
    for (Eigen::Index h = 0; h < scale.cols(); ++h) {
      const packet<T> factor(scale(i, h));
      for_each_register<T>(width, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        const Eigen::Index at = h * width + c;
        store_up_to(out.row(i) + at, load_up_to(v.row(i) + at, left) * factor, left);
      });
    }
  }
}

/// 1 / sqrt(sum + epsilon).
template <class T>
T inverse_root(T sum, double epsilon) {
  return T(1) / std::sqrt(sum + T(epsilon));
}

/// gates.hpp, l2_normalize.
template <class T>
void normalize_head_rows(const matrix_view<const T>& x, Eigen::Index heads, const matrix_view<T>& out, double epsilon) {
  constexpr const char* function = "l2_normalize";
  const Eigen::Index width = require_heads(function, "x", x.cols(), heads);
  require_shape(function, "out", out, "x", x.rows(), x.cols());
  assert_apart_or_same(x, out);
  for (Eigen::Index i = 0; i < x.rows(); ++i) {
    for (Eigen::Index h = 0; h < heads; ++h) {
      const T* const in = x.row(i) + h * width;
      T* const result = out.row(i) + h * width;
      const packet<T> factor(inverse_root(squared_norm(in, width), epsilon));
      for_each_register<T>(width, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        store_up_to(result + c, load_up_to(in + c, left) * factor, left);
      });
    }
  }
}

/// gates.hpp, rwkv7_keys.
template <class T>
void rwkv7_key_rows(const matrix_view<const T>& k, const matrix_view<const T>& x, const vector_view<const T>& removal,
                    const vector_view<const T>& replacement, Eigen::Index heads, const matrix_view<T>& key,
                    const matrix_view<T>& a, const matrix_view<T>& b, double epsilon) {
  using P = packet<T>;
  constexpr const char* function = "rwkv7_keys";
  const Eigen::Index width = require_heads(function, "k", k.cols(), heads);
  require_shape(function, "x", x, "k", k.rows(), k.cols());
  require_size(function, "removal", removal, "k", k.cols());
  require_size(function, "replacement", replacement, "k", k.cols());
  for (const auto& [name, out] : {std::pair("key", key), std::pair("a", a), std::pair("b", b)}) {
    require_shape(function, name, out, "k", k.rows(), k.cols());
    assert_apart(x, out);
  }
  assert_apart_or_same(k, key);
  assert_apart(k, a);
  assert_apart(k, b);
  assert_apart(a, b);
  assert_apart(key, a);
  assert_apart(key, b);
  for (Eigen::Index i = 0; i < k.rows(); ++i) {
    for (Eigen::Index first = 0; first < k.cols(); first += width) {
      const auto removed = [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        return load_up_to(k.row(i) + first + c, left) * load_up_to(removal.data() + first + c, left);
      };
      P squares = P::zero();
      for_each_register<T>(width, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        const P kappa = removed(c, left);
        squares = fma(kappa, kappa, squares);
      });
      const P factor(inverse_root(sum(squares), epsilon));
      for_each_register<T>(width, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        const Eigen::Index at = first + c;
        const P kappa = removed(c, left) * factor;
        const P written = load_up_to(k.row(i) + at, left);
        const P iota = sigmoid(load_up_to(x.row(i) + at, left));
        const P change = (iota - P(T(1))) * load_up_to(replacement.data() + at, left);
        store_up_to(key.row(i) + at, fma(change, written, written), left);
        store_up_to(a.row(i) + at, P::zero() - kappa, left);
        store_up_to(b.row(i) + at, kappa * iota, left);
      });
    }
  }
}

/// gated_rms_norm.hpp.
template <class T>
void gated_norm_rows(const matrix_view<const T>& x, const matrix_view<const T>& gate,
                     const vector_view<const T>& weight, const matrix_view<T>& y, Eigen::Index heads, double epsilon,
                     bool swish, bool gate_first) {
  using P = packet<T>;
  constexpr const char* function = "gated_rms_norm";
  const Eigen::Index width = require_heads(function, "x", x.cols(), heads);
  require_shape(function, "gate", gate, "x", x.rows(), x.cols());
  require_shape(function, "out", y, "x", x.rows(), x.cols());
  if (weight.size() != 0 && weight.size() != x.cols()) {
    require_size(function, "weight", weight, "a head of x", width);
  }
  if (!(epsilon >= 0)) refuse(function, "epsilon is ", epsilon, ", below 0");
  assert_apart_or_same(x, y);
  assert_apart_or_same(gate, y);

  const T share = width > 0 ? T(1) / static_cast<T>(width) : T(0);
  for (Eigen::Index i = 0; i < x.rows(); ++i) {
    for (Eigen::Index first = 0; first < x.cols(); first += width) {
      const T* const in = x.row(i) + first;
      const T* const weights = weight.data() + (weight.size() == x.cols() ? first : 0);
      T* const result = y.row(i) + first;
      const auto gate_at = [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        const P g = load_up_to(gate.row(i) + first + c, left);
        return swish ? silu(g) : sigmoid(g);
      };
      const T* normed = in;
      if (gate_first) {
        for_each_register<T>(width, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
          store_up_to(result + c, load_up_to(in + c, left) * gate_at(c, left), left);
        });
        normed = result;
      }
      const P factor(inverse_root(squared_norm(normed, width) * share, epsilon));
      for_each_register<T>(width, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        P value = load_up_to(normed + c, left) * factor;
        if (weight.size() != 0) value = value * load_up_to(weights + c, left);
        if (!gate_first) value = value * gate_at(c, left);
        store_up_to(result + c, value, left);
      });
    }
  }
}

}  // namespace detail
LINATTN_NAMESPACE_END
