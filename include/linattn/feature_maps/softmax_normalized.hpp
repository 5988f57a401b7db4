// Queries by a softmax over their features, keys by exp: an asymmetric map.
#pragma once

#include <linattn/detail/registers.hpp>
#include <linattn/feature_map.hpp>

#include <Eigen/Core>
#include <algorithm>

LINATTN_NAMESPACE_BEGIN

/// phi_q(x) = softmax over the D coordinates of x,  phi_k(x) = exp(x).  C = D, features > 0.
///
/// Kernel: sum_c exp(q_c + k_c) / sum_c exp(q_c), computed as it stands: an estimate of nothing, and no relation to
/// softmax attention. Normalised, the query's denominator cancels and the output is that of `exponential`, but a query
/// cannot overflow: its largest coordinate is subtracted first. Not normalised (`.normalize = false`), rows are
/// weighted sums of exp(k) v with weights that sum to 1.
///
/// The source's keys are a softmax over all tokens, feature by feature, which is not causal; exp(k) is what remains of
/// it in a causal form. With the operator's normaliser, one denominator serves all features, which is another weighting
/// than the source's one per feature.
///
/// Use it where weights are to sum to 1 without a normaliser. Not where keys are large: k of about 88 in float is inf,
/// and sums from somewhat less on; there take `exponential`, which is the same when normalised, and scales keys.
///
/// Numerics: 2 ulp for keys, some more for queries. NaN is kept, and fills its query's row.
///
/// Cost a token: D exponentials, and 3 D flops more for queries.
/// Source: Shen et al., Efficient attention: attention with linear complexities, 2018.
struct softmax_normalized {
  static constexpr const char* name = "softmax_normalized";  ///< in records of states
  static constexpr Eigen::Index dimension(Eigen::Index head_dim) noexcept { return head_dim; }

  template <class T>
  void forward_queries(const const_tile<T>& x, tile<T>& phi) const noexcept {
    using P = detail::packet<T>;
    detail::for_each_row(x, phi, [&](Eigen::Index /*r*/, const T* in, T* out) LINATTN_INLINE_LAMBDA {
      const P largest(largest_of(in, x.cols()));
      P total = P::zero();
      detail::for_each_register<T>(x.cols(), [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        const P e = exp_of_negative(detail::load_up_to(in + c, left) - largest);
        total = total + (left < P::size ? e.first(left) : e);
        detail::store_up_to(out + c, e, left);
      });
      const P share(T(1) / sum(total));
      detail::transform_in_place(out, x.cols(), [&](const P& e) LINATTN_INLINE_LAMBDA { return e * share; });
    });
  }

  template <class T>
  void forward_keys(const const_tile<T>& x, tile<T>& phi) const noexcept {
    using P = detail::packet<T>;
    detail::for_each_row(x, phi, [&](Eigen::Index /*r*/, const T* in, T* out) LINATTN_INLINE_LAMBDA {
      detail::for_each_register<T>(x.cols(), [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        const P e = exp(detail::load_up_to(in + c, left));
        detail::store_up_to(out + c, e, left);
      });
    });
  }

  /// dx = phi (dphi - phi.dphi).
  template <class T>
  void vjp_queries(const const_tile<T>& /*x*/, const const_tile<T>& phi, const const_tile<T>& dphi,
                   tile<T>& dx) const noexcept {
    using P = detail::packet<T>;
    detail::for_each_row(phi, dphi, dx, [&](Eigen::Index /*r*/, const T* p, const T* g, T* out) LINATTN_INLINE_LAMBDA {
      const P mean(detail::dot(p, g, phi.cols()));
      detail::for_each_register<T>(phi.cols(), [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        detail::store_up_to(out + c, detail::load_up_to(p + c, left) * (detail::load_up_to(g + c, left) - mean), left);
      });
    });
  }

  /// dx = phi dphi.
  template <class T>
  void vjp_keys(const const_tile<T>& /*x*/, const const_tile<T>& phi, const const_tile<T>& dphi,
                tile<T>& dx) const noexcept {
    detail::for_each_row(phi, dphi, dx, [&](Eigen::Index /*r*/, const T* p, const T* g, T* out) LINATTN_INLINE_LAMBDA {
      detail::for_each_register<T>(phi.cols(), [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        detail::store_up_to(out + c, detail::load_up_to(p + c, left) * detail::load_up_to(g + c, left), left);
      });
    });
  }

 private:
  /// A NaN may be lost here; the exponentials have it still.
  template <class T>
  static LINATTN_INLINE T largest_of(const T* x, Eigen::Index n) {
    using P = detail::packet<T>;
    if (n < P::size) return *std::max_element(x, x + n);
    P largest = P::load_unaligned(x + n - P::size);
    for (Eigen::Index c = 0; c + P::size < n; c += P::size) largest = max(P::load_unaligned(x + c), largest);
    return detail::largest_lane(largest);
  }
};

LINATTN_NAMESPACE_END
