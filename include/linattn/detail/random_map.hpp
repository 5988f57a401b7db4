// What the random feature maps share: sizes, seed, options, the projection, and the scales of input and features.
#pragma once

#include <linattn/detail/random_projection.hpp>
#include <linattn/feature_map.hpp>

#include <Eigen/Core>
#include <cmath>
#include <cstdint>
#include <limits>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// m of a map with two features a direction, C = 2 m.
inline Eigen::Index directions_of_pairs(const char* owner, Eigen::Index features, const char* what) {
  if (features < 1) refuse(owner, "features is ", features, "; at least 2 are needed");
  if (features % 2 != 0) {
    refuse(owner, "features is ", features, "; ", what, " come in pairs, so it must be even");
  }
  return features / 2;
}

/// The base of a random map with C features from m directions, x' = x / sqrt(temperature), each feature with m^(-1/2).
/// A map is immutable and its copies share the matrix.
template <class T>
class random_map {
 public:
  using scalar = T;

  /// C, for the head_dim() the map was made for.
  Eigen::Index dimension(Eigen::Index /*head_dim*/) const noexcept { return m_features; }
  Eigen::Index head_dim() const noexcept { return m_projection.head_dim(); }
  std::uint64_t seed() const noexcept { return m_projection.seed(); }
  const random_feature_options& options() const noexcept { return m_options; }

  /// W (m, D), one direction w_c a row: a view of the map's own memory.
  auto projection() const noexcept { return m_projection.matrix(); }

 protected:
  random_map(const char* owner, Eigen::Index head_dim, Eigen::Index features, Eigen::Index directions,
             std::uint64_t seed, const random_feature_options& options, double own_temperature)
      : m_projection(owner, head_dim, directions, seed, options.rows), m_options(options), m_features(features) {
    if (!(options.temperature >= 0 && options.temperature <= std::numeric_limits<double>::max())) {
      refuse(owner, "temperature is ", options.temperature, "; it divides q.k, and 0 stands for the map's own");
    }
    const double temperature = options.temperature > 0 ? options.temperature : own_temperature;
    m_input_scale = static_cast<T>(1 / std::sqrt(temperature));
    m_feature_scale = static_cast<T>(1 / std::sqrt(static_cast<double>(directions)));
  }

  static double root(Eigen::Index head_dim) { return std::sqrt(static_cast<double>(head_dim)); }

  /// u (R, m) = x (R, D) W^T into the first m columns of phi, then f(row of x, row of phi), which makes features of u.
  template <class F>
  void project_rows(const const_tile<T>& x, tile<T>& phi, const F& f) const noexcept {
    m_projection.apply(x, phi);
    for (Eigen::Index r = 0; r < x.rows(); ++r) f(x.data() + r * x.outerStride(), phi.data() + r * phi.outerStride());
  }

  /// |x'|^2 / 2 of one row.
  T half_square(const T* x) const noexcept {
    return T(0.5) * m_input_scale * m_input_scale * squared_norm(x, head_dim());
  }

  /// dx (R, D) = scale W^T a + share (phi.dphi) x, the gradient of features f(W x') exp(+-|x'|^2 / 2): `a(r, c, n)`
  /// gives a register of the gradient of u, see random_projection.
  template <class A>
  void pull_back(const const_tile<T>& x, const const_tile<T>& phi, const const_tile<T>& dphi, tile<T>& dx, T scale,
                 T share, const A& a) const noexcept {
    m_projection.apply_transposed(dx, scale, a);
    for (Eigen::Index r = 0; r < x.rows(); ++r) {
      const T total = dot(phi.data() + r * phi.outerStride(), dphi.data() + r * dphi.outerStride(), phi.cols());
      dx.row(r) += (share * total) * x.row(r);
    }
  }

  random_projection<T> m_projection;
  random_feature_options m_options;
  Eigen::Index m_features;
  T m_input_scale;    // temperature^(-1/2)
  T m_feature_scale;  // m^(-1/2)
};

}  // namespace detail
LINATTN_NAMESPACE_END
