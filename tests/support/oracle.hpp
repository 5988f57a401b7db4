// The test oracle: linear attention in long double, from the equations, sharing no code with the library.
//
// Feature maps are closed forms here, sums are plain loops, and the types are this file's own: what the library does
// in packets, blocks and padded slabs, this does with std::function and one token at a time.
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

namespace support {

using wide_matrix = Eigen::Matrix<long double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using wide_vector = Eigen::Matrix<long double, 1, Eigen::Dynamic>;

/// phi: (D) -> (C), of one row, told its position and head; the two differ in asymmetric maps.
struct oracle_map {
  using function = std::function<wide_vector(const wide_vector& x, Eigen::Index position, Eigen::Index head)>;
  function queries, keys;

  explicit oracle_map(function both) : queries(both), keys(std::move(both)) {}
  oracle_map(function for_queries, function for_keys) : queries(std::move(for_queries)), keys(std::move(for_keys)) {}

  /// phi of every row of x (R, D), taken as keys of head 0 from position 0 on.
  template <class X>
  wide_matrix key_features(const Eigen::MatrixBase<X>& x) const {
    wide_matrix phi(x.rows(), keys(wide_vector::Zero(x.cols()), 0, 0).size());  // (R, C)
    for (Eigen::Index i = 0; i < x.rows(); ++i) phi.row(i) = keys(x.row(i).template cast<long double>(), i, 0);
    return phi;
  }
};

namespace detail {

template <class F>
oracle_map elementwise(F f) {
  return oracle_map([f](const wide_vector& x, Eigen::Index, Eigen::Index) -> wide_vector { return x.unaryExpr(f); });
}

}  // namespace detail

inline oracle_map oracle_identity() {
  return detail::elementwise([](long double x) { return x; });
}
/// elu(x) + 1, by its branches: the sum as written cancels.
inline oracle_map oracle_elu_plus_one() {
  return detail::elementwise([](long double x) { return x >= 0 ? x + 1 : std::exp(x); });
}
/// `x < 0 ? 0 : x` and not the other way about, which would turn NaN into 0.
inline oracle_map oracle_relu() {
  return detail::elementwise([](long double x) { return x < 0 ? 0.0L : x; });
}
inline oracle_map oracle_squared_relu() {
  return detail::elementwise([](long double x) { return x < 0 ? 0.0L : x * x; });
}
inline oracle_map oracle_exponential() {
  return detail::elementwise([](long double x) { return std::exp(x); });
}

/// x' = D^(-1/4) x, u = W x' for a projection W (m, D): the common part of the random maps, whose products of features
/// estimate functions of q.k / sqrt(D).
struct projected {
  wide_vector u;            ///< (m)
  long double half_square;  ///< |x'|^2 / 2

  projected(const wide_matrix& w, const wide_vector& x) {
    const wide_vector scaled = x / std::sqrt(std::sqrt(static_cast<long double>(x.size())));
    u = wide_vector::Zero(w.rows());
    half_square = 0;
    for (Eigen::Index d = 0; d < x.size(); ++d) {
      for (Eigen::Index f = 0; f < w.rows(); ++f) u[f] += w(f, d) * scaled[d];
      half_square += scaled[d] * scaled[d] / 2;
    }
  }
};

/// phi_f = exp(u_f - |x'|^2 / 2) / sqrt(m), f < m.
inline oracle_map oracle_positive_random(wide_matrix w) {
  return oracle_map([w](const wide_vector& x, Eigen::Index, Eigen::Index) {
    const projected p(w, x);
    wide_vector phi(w.rows());
    for (Eigen::Index f = 0; f < w.rows(); ++f) {
      phi[f] = std::exp(p.u[f] - p.half_square) / std::sqrt(static_cast<long double>(w.rows()));
    }
    return phi;
  });
}

/// phi = exp(|x'|^2 / 2) / sqrt(m) [cos u_0 ... cos u_(m-1), sin u_0 ... sin u_(m-1)].
inline oracle_map oracle_random_fourier(wide_matrix w) {
  return oracle_map([w](const wide_vector& x, Eigen::Index, Eigen::Index) {
    const projected p(w, x);
    const Eigen::Index m = w.rows();
    const long double size = std::exp(p.half_square) / std::sqrt(static_cast<long double>(m));
    wide_vector phi(2 * m);
    for (Eigen::Index f = 0; f < m; ++f) {
      phi[f] = size * std::cos(p.u[f]);
      phi[m + f] = size * std::sin(p.u[f]);
    }
    return phi;
  });
}

/// What becomes of phi(q).z before it divides.
struct oracle_denominator {
  enum class guard { none, add, clamp } kind = guard::none;
  long double epsilon = 0;

  long double operator()(long double d) const {
    if (kind == guard::add) return d + epsilon;
    if (kind == guard::clamp && d < epsilon) return epsilon;
    return d;
  }
};

struct oracle_options {
  Eigen::Index heads = 1;
  bool causal = false;
  long double query_scale = 1;
  bool normalize = true;
  oracle_denominator denominator = {};
  Eigen::Index first_position = 0;  ///< of the first key given, for maps that know positions
};

/// S (C, M) and z (C) of every head.
struct oracle_state {
  std::vector<wide_matrix> s;
  std::vector<wide_vector> z;
};

struct oracle_result {
  wide_matrix out;           ///< (Nq, H M)
  wide_matrix denominators;  ///< (Nq, H): phi(q).z, before the guard
  oracle_state state;        ///< after the last key
};

namespace detail {

/// One head's features and values, and where its output goes.
struct oracle_head {
  wide_matrix phi_q, phi_k, v;

  template <class Q, class K, class V>
  oracle_head(const oracle_map& map, const Q& q, const K& k, const V& v_all, const oracle_options& o, Eigen::Index h) {
    const Eigen::Index head_dim = q.cols() / o.heads, value_dim = v_all.cols() / o.heads;
    const Eigen::Index first_query = o.first_position + (o.causal ? 0 : k.rows() - q.rows());
    v = v_all.middleCols(h * value_dim, value_dim).template cast<long double>();
    const wide_matrix q_h = q.middleCols(h * head_dim, head_dim).template cast<long double>() * o.query_scale;
    const wide_matrix k_h = k.middleCols(h * head_dim, head_dim).template cast<long double>();
    const Eigen::Index features = map.keys(wide_vector::Zero(head_dim), 0, h).size();
    phi_q.resize(q.rows(), features);
    phi_k.resize(k.rows(), features);
    for (Eigen::Index i = 0; i < q.rows(); ++i) phi_q.row(i) = map.queries(q_h.row(i), first_query + i, h);
    for (Eigen::Index j = 0; j < k.rows(); ++j) phi_k.row(j) = map.keys(k_h.row(j), o.first_position + j, h);
  }
};

inline oracle_result oracle_shapes(Eigen::Index queries, Eigen::Index value_cols, Eigen::Index heads) {
  return {wide_matrix::Zero(queries, value_cols), wide_matrix::Zero(queries, heads), {}};
}

/// out(i, head h) = numerator / guarded denominator, 0 where that is 0.
inline void oracle_divide(oracle_result& result, const oracle_options& o, Eigen::Index i, Eigen::Index h,
                          const wide_vector& numerator, long double denominator) {
  const Eigen::Index value_dim = numerator.size();
  const long double divisor = o.normalize ? o.denominator(denominator) : 1.0L;
  result.denominators(i, h) = denominator;
  for (Eigen::Index m = 0; m < value_dim; ++m) {
    result.out(i, h * value_dim + m) = divisor == 0 ? 0.0L : numerator[m] / divisor;
  }
}

}  // namespace detail

/// Eqs. 16-20, or 5 when not causal: the token loop over S and z, starting from `initial` where one is given.
/// O(N C M) long double operations a head.
template <class Q, class K, class V>
oracle_result oracle_recurrent(const oracle_map& map, const Eigen::MatrixBase<Q>& q, const Eigen::MatrixBase<K>& k,
                               const Eigen::MatrixBase<V>& v, const oracle_options& o,
                               const oracle_state* initial = nullptr) {
  oracle_result result = detail::oracle_shapes(q.rows(), v.cols(), o.heads);
  for (Eigen::Index h = 0; h < o.heads; ++h) {
    const detail::oracle_head head(map, q, k, v, o, h);
    const Eigen::Index features = head.phi_k.cols(), value_dim = head.v.cols();
    // S transposed, (M, C): the read-out then sums along rows, in a register.
    wide_matrix s = wide_matrix::Zero(value_dim, features);
    wide_vector z = wide_vector::Zero(features);
    if (initial) {
      s = initial->s[std::size_t(h)].transpose();
      z = initial->z[std::size_t(h)];
    }
    const auto absorb = [&](Eigen::Index j) {
      for (Eigen::Index m = 0; m < value_dim; ++m) {
        for (Eigen::Index c = 0; c < features; ++c) s(m, c) += head.phi_k(j, c) * head.v(j, m);
      }
      for (Eigen::Index c = 0; c < features; ++c) z[c] += head.phi_k(j, c);
    };
    if (!o.causal) {
      for (Eigen::Index j = 0; j < k.rows(); ++j) absorb(j);
    }
    for (Eigen::Index i = 0; i < q.rows(); ++i) {
      if (o.causal) absorb(i);
      wide_vector numerator(value_dim);
      long double denominator = 0;
      for (Eigen::Index c = 0; c < features; ++c) denominator += head.phi_q(i, c) * z[c];
      for (Eigen::Index m = 0; m < value_dim; ++m) {
        long double sum = 0;
        for (Eigen::Index c = 0; c < features; ++c) sum += head.phi_q(i, c) * s(m, c);
        numerator[m] = sum;
      }
      detail::oracle_divide(result, o, i, h, numerator, denominator);
    }
    result.state.s.push_back(s.transpose());
    result.state.z.push_back(z);
  }
  return result;
}

/// Eqs. 4 and 8: the same by pairs of tokens, sums over j of (phi(q_i).phi(k_j)) v_j, without any state but the initial
/// one. O(N^2 (C + M)) long double operations a head. Its `state` is left empty.
template <class Q, class K, class V>
oracle_result oracle_quadratic(const oracle_map& map, const Eigen::MatrixBase<Q>& q, const Eigen::MatrixBase<K>& k,
                               const Eigen::MatrixBase<V>& v, const oracle_options& o,
                               const oracle_state* initial = nullptr) {
  oracle_result result = detail::oracle_shapes(q.rows(), v.cols(), o.heads);
  for (Eigen::Index h = 0; h < o.heads; ++h) {
    const detail::oracle_head head(map, q, k, v, o, h);
    for (Eigen::Index i = 0; i < q.rows(); ++i) {
      wide_vector numerator = wide_vector::Zero(head.v.cols());
      long double denominator = 0;
      if (initial) {
        for (Eigen::Index c = 0; c < head.phi_q.cols(); ++c) {
          numerator += head.phi_q(i, c) * initial->s[std::size_t(h)].row(c);
          denominator += head.phi_q(i, c) * initial->z[std::size_t(h)][c];
        }
      }
      for (Eigen::Index j = 0; j < (o.causal ? i + 1 : k.rows()); ++j) {
        long double similarity = 0;
        for (Eigen::Index c = 0; c < head.phi_q.cols(); ++c) similarity += head.phi_q(i, c) * head.phi_k(j, c);
        numerator += similarity * head.v.row(j);
        denominator += similarity;
      }
      detail::oracle_divide(result, o, i, h, numerator, denominator);
    }
  }
  return result;
}

}  // namespace support
