// The packing pass: from the caller's rows of one head to aligned scratch, through the feature map, and back.
#pragma once

#include <linattn/detail/differentiable.hpp>
#include <linattn/detail/layout.hpp>
#include <linattn/detail/registers.hpp>
#include <linattn/detail/sequence_rows.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// to (rows, padded n) = [f(x) 0] of x (rows, n), whole registers: padding is zero, not f(0). Nothing is read past a
/// row. `to` is aligned, x need not be.
template <class S, class T, class F>
LINATTN_INLINE void transform_rows(const S* x, Eigen::Index x_stride, Eigen::Index rows, Eigen::Index n, T* to,
                                   Eigen::Index to_stride, const F& f) {
  using P = packet<T>;
  if (x_stride == n && to_stride == n) n *= rows, rows = 1;  // one long row: short ones cost as much as what they hold
  const Eigen::Index whole = n / P::size * P::size;
  for (; rows > 0; --rows, x += x_stride, to += to_stride) {
    for (Eigen::Index c = 0; c < whole; c += P::size) f(P::load_unaligned(x + c)).store(to + c);
    if (whole < n) f(P::load_partial(x + whole, n - whole)).first(n - whole).store(to + whole);
  }
}

/// The same of a tile's rows.
template <class S, class T, class F>
LINATTN_INLINE void transform_rows(const tile_rows<const S>& x, Eigen::Index rows, Eigen::Index n, T* to,
                                   Eigen::Index to_stride, const F& f) {
  x.for_each_run(
      rows, [&](Eigen::Index r, const S* from, Eigen::Index stride, Eigen::Index count)
                LINATTN_INLINE_LAMBDA { transform_rows(from, stride, count, n, to + r * to_stride, to_stride, f); });
}

/// phi (rows, C) of x (rows, D), for queries of query_scale x. Rows of phi are feature_stride apart and zero beyond C;
/// rows up to the next multiple of `block` are zeroed, so that the kernel may run whole micro-blocks. `where` is the
/// position and head of row 0. Of several readers, each takes one of `readers` rows of a token.
template <role Role, class Map, class S, class T, class Layout>
LINATTN_INLINE void pack_features(const Map& map, const Layout& layout, const tile_rows<const S>& x, Eigen::Index rows,
                                  Eigen::Index block, T query_scale, const tile_position& where, T* tile_scratch,
                                  T* phi, Eigen::Index readers = 1) {
  using P = packet<T>;
  const Eigen::Index head_dim = layout.head_dim;
  const Eigen::Index stride = readers * layout.state.feature_stride();
  const auto transform = [&](T* to, Eigen::Index to_stride, const auto& f) LINATTN_INLINE_LAMBDA {
    if (Role == role::query && query_scale != T(1)) {
      const P scale(query_scale);
      transform_rows(x, rows, head_dim, to, to_stride,
                     [&](const P& values) LINATTN_INLINE_LAMBDA { return f(values * scale); });
    } else {
      transform_rows(x, rows, head_dim, to, to_stride, f);
    }
  };

  if constexpr (has_packet<Map, T>) {
    transform(phi, stride, [&](const P& values) LINATTN_INLINE_LAMBDA { return P(map.packet(values)); });
  } else {
    const Eigen::Index tile_stride = layout.tile_stride();
    transform(tile_scratch, tile_stride, [](const P& values) LINATTN_INLINE_LAMBDA { return values; });
    const const_tile<T> in(tile_scratch, rows, head_dim, Eigen::OuterStride<>(tile_stride));  // (R, D)
    tile<T> out(phi, rows, layout.state.features, Eigen::OuterStride<>(stride));              // (R, C)
    if constexpr (Role == role::query && has_positional_queries<Map, T>) {
      map.forward_queries(in, out, where);
    } else if constexpr (Role == role::query && has_forward_queries<Map, T>) {
      map.forward_queries(in, out);
    } else if constexpr (Role == role::key && has_positional_keys<Map, T>) {
      map.forward_keys(in, out, where);
    } else if constexpr (Role == role::key && has_forward_keys<Map, T>) {
      map.forward_keys(in, out);
    } else if constexpr (has_positional_forward<Map, T>) {
      map.forward(in, out, where);
    } else {
      map.forward(in, out);
    }
  }
  for (Eigen::Index r = rows; r < round_up(rows, block); ++r) {
    std::fill_n(phi + r * stride, layout.state.feature_stride(), T(0));
  }
}

/// to (rows, n) of x (rows, n), zero-padded like features; rows `stride` apart.
template <class S, class T>
LINATTN_INLINE void pack_rows(const tile_rows<const S>& x, Eigen::Index rows, Eigen::Index n, Eigen::Index block, T* to,
                              Eigen::Index stride) {
  transform_rows(x, rows, n, to, stride, [](const packet<T>& value) LINATTN_INLINE_LAMBDA { return value; });
  std::fill(to + rows * stride, to + round_up(rows, block) * stride, T(0));
}

/// values (rows, M) of v (rows, M), zero-padded like features.
template <class S, class T, class Layout>
LINATTN_INLINE void pack_values(const Layout& layout, const tile_rows<const S>& v, Eigen::Index rows,
                                Eigen::Index block, T* values) {
  pack_rows(v, rows, Eigen::Index(layout.state.value_dim), block, values, layout.state.row_stride());
}

/// decay (rows) or (rows, C) = exp(log_decay) of one head, or where the rule is log-scaled log_decay itself, and its
/// sum over the tile's rows added to `total`, (1) or (C). Rows up to the next multiple of `block` have decay 1.
template <rule_traits Rule, class S, class T, class Layout>
LINATTN_INLINE void pack_decays(const Layout& layout, const rule_inputs<token_rows<const S>, Rule>& x,
                                const token_tile& t, Eigen::Index head, Eigen::Index block, T* decay, T* total) {
  using P = packet<T>;
  const Eigen::Index rows = t.rows;
  if constexpr (Rule.decay == decay_kind::per_head) {
    T sum(0);
    for (Eigen::Index r = 0; r < rows; ++r) {
      if constexpr (Rule.fixed_decay) {
        decay[r] = T(x.fixed_log_decay[head]);
      } else {
        decay[r] = T(*x.log_decay.at(t.at(r), head));
      }
      sum += decay[r];
    }
    *total += sum;
    if constexpr (!Rule.log_scaled) {
      std::fill(decay + rows, decay + round_up(rows, std::max(block, P::size)), T(0));
      for (Eigen::Index r = 0; r < rows; r += P::size) exp(P::load(decay + r)).store(decay + r);
      std::fill(decay + rows, decay + round_up(rows, block), T(1));
    }
  } else {
    const Eigen::Index features = layout.state.features;
    const Eigen::Index stride = layout.state.feature_stride();
    const tile_rows<const S> log_decay = x.log_decay.in(t, head);
    transform_rows(log_decay, rows, features, decay, stride, [](const P& value) LINATTN_INLINE_LAMBDA {
      if constexpr (Rule.log_scaled) return value;
      return exp(value);
    });
    std::fill(decay + rows * stride, decay + round_up(rows, block) * stride, T(1));
    for_each_register<T>(features, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
      P sum = P::load(total + c);
      log_decay.for_each_run(
          rows, [&](Eigen::Index, const S* from, Eigen::Index apart, Eigen::Index count) LINATTN_INLINE_LAMBDA {
            for (Eigen::Index r = 0; r < count; ++r) sum = sum + load_up_to(from + r * apart + c, left);
          });
      sum.store(total + c);
    });
  }
}

/// Log features of keys to keys by the running maximum mu (C) of each, token by token: with g the log-decay, 0 where
/// the rule has none,
///
///     mu_i = max(mu_(i-1) + g_i, log k_i)     a_i = exp(mu_(i-1) + g_i - mu_i)     k_i = exp(log k_i - mu_i)
///
/// of which one is exp(0) and the other takes the one exp there is. S, z scaled by exp(-mu) then follow S = a S + k
/// v^T, and no exponent is ever positive. mu begins at lowest(), and stays there while all log features are -inf.
/// Queries, where the pass reads, become w_i = log q_i + mu_i. `decays` are log-decays (rows) or (rows, C) and become a
/// (rows, C).
template <rule_traits Rule, bool Reads, class T>
LINATTN_INLINE void scale_keys(Eigen::Index rows, Eigen::Index features, Eigen::Index stride, T* keys, T* queries,
                               const T* head_decays, T* decays, T* mu, Eigen::Index readers = 1) {
  using P = packet<T>;
  const P lowest(std::numeric_limits<T>::lowest());
  for_each_register<T>(features, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
    P total = P::load(mu + c);
    for (Eigen::Index r = 0; r < rows; ++r) {
      T* const key = keys + r * stride + c;
      T* const decay = decays + r * stride + c;
      if constexpr (Rule.decay == decay_kind::per_head) total = total + P(head_decays[r]);
      if constexpr (Rule.decay == decay_kind::per_feature) total = total + P::load(decay);
      if constexpr (Rule.decay != decay_kind::none) total = max(total, lowest);
      const P rise = P::load(key) - total;
      const P smaller = exp(select_positive(rise, P::zero() - rise, rise));  // exp(-|rise|)
      const P one(T(1));
      const auto store = [&](T* to, const P& value)
                             LINATTN_INLINE_LAMBDA { (left < P::size ? value.first(left) : value).store(to); };
      total = max(P::load(key), total);
      store(decay, select_positive(rise, smaller, one));
      store(key, select_positive(rise, one, smaller));
      for (Eigen::Index i = 0; Reads && i < readers; ++i) {
        T* const query = queries + (r * readers + i) * stride + c;
        (P::load(query) + total).store(query);
      }
    }
    (left < P::size ? total.first(left) : total).store(mu + c);
  });
}

/// Queries w_i = log q_i + mu (rows, C) to exp(w_i - m_i), m_i (rows) the largest of them, which cancels where the
/// operator normalises.
template <class T>
LINATTN_INLINE void scale_queries(Eigen::Index rows, Eigen::Index features, Eigen::Index stride, T* queries,
                                  T* scales) {
  using P = packet<T>;
  constexpr T lowest = std::numeric_limits<T>::lowest();
  for (Eigen::Index r = 0; r < rows; ++r) {
    T* const query = queries + r * stride;
    P most(lowest);
    const Eigen::Index whole = features / P::size * P::size;
    for (Eigen::Index c = 0; c < whole; c += P::size) most = max(P::load(query + c), most);
    T scale = largest(most);
    for (Eigen::Index c = whole; c < features; ++c) scale = query[c] > scale ? query[c] : scale;
    scales[r] = scale;
    const P shift(scale);
    for_each_register<T>(features, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
      const P value = exp(P::load(query + c) - shift);
      (left < P::size ? value.first(left) : value).store(query + c);
    });
  }
}

/// to (rows) = what x has for `head`, one number a token, zero up to the next multiple of `block`.
template <class S, class T>
LINATTN_INLINE void pack_column(const token_rows<const S>& x, const token_tile& t, Eigen::Index head,
                                Eigen::Index block, T* to) {
  for (Eigen::Index r = 0; r < t.rows; ++r) to[r] = T(*x.at(t.at(r), head));
  std::fill(to + t.rows, to + round_up(t.rows, block), T(0));
}

/// Two factors whose product is 1 / denominator, none of them subnormal or infinite: power, a power of two, is 1 unless
/// the denominator is near an end of T's range, where 1 / denominator alone would overflow or lose its bits. A zero
/// denominator gives zero factors: 0/0 = 0.
template <class T>
struct reciprocal {
  T power = T(0);
  T inverse = T(0);

  LINATTN_INLINE explicit reciprocal(T denominator) {
    constexpr int range = std::numeric_limits<T>::max_exponent;  // 128, 1024
    constexpr T small = std::numeric_limits<T>::min() * T(4);
    constexpr T large = two_to(range - range / 4);
    if (denominator == T(0)) return;
    const T size = denominator < T(0) ? -denominator : denominator;
    power = size < small ? two_to(range / 2) : size > large ? T(1) / two_to(range / 4) : T(1);
    inverse = T(1) / (denominator * power);
  }

 private:
  static constexpr T two_to(int exponent) {
    T result(1);
    for (int i = 0; i < exponent; ++i) result *= T(2);
    return result;
  }
};

/// e^x as two factors, which are in range where e^x is not: what is multiplied by it may still be.
template <class T>
struct power_of_e {
  T power;
  T inverse;
  LINATTN_INLINE explicit power_of_e(T x) : power(std::exp(x / 2)), inverse(power) {}
};

/// out (rows, M) from outputs (rows, M), times the two Factors of the denominators (rows) where Normalizes; of several
/// readers, one of `readers` rows of a token. Only the rows' own elements are written.
template <bool Normalizes, template <class> class Factors = reciprocal, class T, class Layout, class Policy, class S>
LINATTN_INLINE void unpack_outputs(const Layout& layout, const T* outputs, const T* denominators, const Policy& policy,
                                   S* out, Eigen::Index out_stride, Eigen::Index rows, Eigen::Index readers = 1) {
  using P = packet<T>;
  const Eigen::Index value_dim = layout.state.value_dim;
  const Eigen::Index whole = value_dim / P::size * P::size;
  for (Eigen::Index r = 0; r < rows; ++r, outputs += readers * layout.state.row_stride(), out += out_stride) {
    const auto write = [&](const auto& f) LINATTN_INLINE_LAMBDA {
      for (Eigen::Index m = 0; m < whole; m += P::size) f(P::load(outputs + m)).store_unaligned(out + m);
      if (whole < value_dim) f(P::load(outputs + whole)).store_partial(out + whole, value_dim - whole);
    };
    if constexpr (Normalizes) {
      const Factors<T> factor(policy(denominators[r * readers]));
      const P power(factor.power);
      const P inverse(factor.inverse);
      write([&](const P& x) LINATTN_INLINE_LAMBDA { return x * power * inverse; });
    } else {
      write([](const P& x) LINATTN_INLINE_LAMBDA { return x; });
    }
  }
}

/// The same to a tile's rows.
template <bool Normalizes, template <class> class Factors = reciprocal, class T, class Layout, class Policy, class S>
LINATTN_INLINE void unpack_outputs(const Layout& layout, const T* outputs, const T* denominators, const Policy& policy,
                                   const tile_rows<S>& out, Eigen::Index rows, Eigen::Index readers = 1) {
  out.for_each_run(rows, [&](Eigen::Index r, S* to, Eigen::Index stride, Eigen::Index count) LINATTN_INLINE_LAMBDA {
    unpack_outputs<Normalizes, Factors>(layout, outputs + r * readers * layout.state.row_stride(),
                                        denominators + r * readers, policy, to, stride, count, readers);
  });
}

}  // namespace detail
LINATTN_NAMESPACE_END
