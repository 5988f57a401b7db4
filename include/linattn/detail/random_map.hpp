// What the random feature maps share: sizes, seed, options, the projection, and the scales of input and features.
#pragma once

#include <linattn/detail/random_projection.hpp>
#include <linattn/detail/serialization.hpp>
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

inline bool is_temperature(double t) { return t >= 0 && t <= std::numeric_limits<double>::max(); }

/// What makes a random map, drawn from a seed or read from a record, which holds
///
///   sizes     D, m
///   payload   kind of rows (integer), temperature as in the options (double), own (double), W (m, D), seed
template <class T>
struct random_parameters {
  random_feature_options options;
  double own;  ///< what the map has beside the options: A of gerf, epsilon of generalized_relu, 0 elsewhere
  random_projection<T> projection;

  random_parameters(const char* owner, Eigen::Index head_dim, Eigen::Index directions, std::uint64_t seed,
                    const random_feature_options& o, double own_parameter = 0)
      : options(o), own(own_parameter), projection(owner, head_dim, directions, seed, o.rows) {
    if (!is_temperature(options.temperature)) {
      refuse(owner, "temperature is ", options.temperature, "; it divides q.k, and 0 stands for the map's own");
    }
  }

  explicit random_parameters(record_reader& in)
      : options(read_options(in)), own(in.number<double>()), projection(in, in.size(0), in.size(1)) {}

  record_writer record(const char* name) const {
    auto out = record_writer::of<T>(name, {projection.head_dim(), projection.rows()});
    out.number(static_cast<std::uint64_t>(options.rows));
    out.number(options.temperature);
    out.number(own);
    projection.write(out, false);
    out.number(projection.seed());
    return out;
  }

 private:
  static random_feature_options read_options(record_reader& in) {
    const auto rows = in.number<std::uint64_t>();
    const auto temperature = in.number<double>();
    if (rows > static_cast<std::uint64_t>(random_rows::regularized)) in.fail("there is no such kind of rows");
    if (!is_temperature(temperature)) in.fail("its temperature is ", temperature);
    return {static_cast<random_rows>(rows), temperature};
  }
};

/// The base of a random map with `per_direction` features of each of m directions, x' = x / sqrt(temperature), each
/// feature with m^(-1/2). A map is immutable and its copies share the matrix.
template <class T>
class random_map {
 public:
  using scalar = T;

  /// C, for the head_dim() the map was made for.
  Eigen::Index dimension(Eigen::Index /*head_dim*/) const noexcept { return m_features; }
  Eigen::Index head_dim() const noexcept { return directions().head_dim(); }
  std::uint64_t seed() const noexcept { return directions().seed(); }
  const random_feature_options& options() const noexcept { return m_parameters.options; }

  /// W (m, D), one direction w_c a row: a view of the map's own memory.
  auto projection() const noexcept { return directions().matrix(); }

 protected:
  using parameters = random_parameters<T>;

  /// own_temperature stands where the options have none; 0 stands for sqrt(D).
  random_map(const parameters& p, Eigen::Index per_direction, double own_temperature = 0)
      : m_parameters(p), m_features(per_direction * p.projection.rows()) {
    const double root = std::sqrt(static_cast<double>(p.projection.head_dim()));
    const double temperature = p.options.temperature > 0 ? p.options.temperature
                               : own_temperature > 0     ? own_temperature
                                                         : root;
    m_input_scale = static_cast<T>(1 / std::sqrt(temperature));
    m_feature_scale = static_cast<T>(1 / std::sqrt(static_cast<double>(p.projection.rows())));
  }

  record_writer record(const char* name) const { return m_parameters.record(name); }
  const random_projection<T>& directions() const noexcept { return m_parameters.projection; }

  /// u (R, m) = x (R, D) W^T into the first m columns of phi, then f(row of x, row of phi), which makes features of u.
  template <class F>
  void project_rows(const const_tile<T>& x, tile<T>& phi, const F& f) const noexcept {
    directions().apply(x, phi);
    for_each_row(x, phi, [&](Eigen::Index /*r*/, const T* in, T* row) LINATTN_INLINE_LAMBDA { f(in, row); });
  }

  /// |x'|^2 / 2 of one row.
  T half_square(const T* x) const noexcept {
    return T(0.5) * m_input_scale * m_input_scale * squared_norm(x, head_dim());
  }

  /// dx (R, D) = scale W^T a + share (phi.dphi) x, the gradient of features f(W x') exp(+-|x'|^2 / 2): `a(r, c, n)`
  /// gives a register of the gradient of u, see projection.
  template <class A>
  void pull_back(const const_tile<T>& x, const const_tile<T>& phi, const const_tile<T>& dphi, tile<T>& dx, T scale,
                 T share, const A& a) const noexcept {
    directions().apply_transposed(dx, scale, a);
    for_each_row(phi, dphi, [&](Eigen::Index r, const T* features, const T* gradient) LINATTN_INLINE_LAMBDA {
      dx.row(r) += (share * dot(features, gradient, phi.cols())) * x.row(r);
    });
  }

  parameters m_parameters;
  Eigen::Index m_features;
  T m_input_scale;    // temperature^(-1/2)
  T m_feature_scale;  // m^(-1/2)
};

}  // namespace detail
LINATTN_NAMESPACE_END
