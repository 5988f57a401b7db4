// General exponential random features: positive, with a parameter that fits them to the data.
#pragma once

#include <linattn/detail/exponential_map.hpp>
#include <linattn/matrix_view.hpp>

#include <Eigen/Core>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>

LINATTN_NAMESPACE_BEGIN

/// phi_c(x) = m^(-1/2) (1 - 4 A)^(D/4) exp(A |w_c|^2 + sqrt(1 - 4 A) w_c.x' - |x'|^2 / 2),  x' = D^(-1/4) x,  C = m,
/// features > 0.  A < 1/8; A = 0 is `positive_random`.
///
/// Kernel: phi(q).phi(k) is an unbiased estimate of exp(q.k / sqrt(D)), the numerator of softmax attention, over draws
/// w_c of N(0, I), for every A.
///
/// Variance: with z = q' + k' the second moment of an estimate is, but for a term of softmax's own,
///
///   (1 - 4 A)^D (1 - 8 A)^(-D/2) exp(2 |z|^2 (1 - 4 A) / (1 - 8 A) - |q'|^2 - |k'|^2) / m.
///
/// A = 0 has it at exp(2 |z|^2 ...), A < 0 bends the exponent towards |z|^2. `gerf::optimal` gives the A that is best
/// for the mean of |z|^2 over given queries and keys. An A far below that costs variance, too.
///
/// Use it as the positive map of choice once sample data are at hand: with orthogonal directions and D = 16, standard
/// deviation 0.5 and C >= 256 about 0.7 of the error of `positive_random`. Queries and keys must share one
/// map, so the statistics have to be fixed before the first token. Not with regularised directions, which have no
/// |w_c|^2 to weigh.
///
/// Numerics: written as log phi, which the engine scales by the largest of each feature so far: normalised, nothing
/// overflows or underflows while |x'|^2 fits. For a given input A < 0 bounds features over all directions. NaN is kept.
///
/// Cost a token: 2 C D flops and C exponentials. What all random maps share: random_features.hpp.
/// Source: Likhosherstov et al., Chefs' random tables, 2022; the scalar
/// case of FAVOR#, 2023.
template <class T = float>
class gerf : public detail::exponential_map<T, 1>, public detail::storable<gerf<T>> {
  using base = detail::exponential_map<T, 1>;
  using P = detail::packet<T>;

 public:
  static constexpr const char* name = "gerf";  ///< in messages and records

  /// C = features for heads of D = head_dim coordinates, and A = a. Throws std::invalid_argument for sizes below 1,
  /// a >= 1/8 and regularised directions.
  gerf(Eigen::Index head_dim, Eigen::Index features, std::uint64_t seed, double a,
       const random_feature_options& options = {})
      : gerf(typename base::parameters(name, head_dim, features, seed, options, a)) {}

  /// The A <= 0 of least variance for the mean of |q' + k'|^2 over all pairs of rows of q (Nq, H D) and k (Nk, H D),
  /// each head with its own: A = (1 - 2 rho - sqrt((2 rho + 1)^2 + 8 rho)) / 16, rho = mean |q' + k'|^2 / D. Give the
  /// temperature of the options, if any. Throws std::invalid_argument for empty or mismatched matrices.
  static double optimal(const matrix_view<const T>& q, const matrix_view<const T>& k, Eigen::Index heads = 1,
                        double temperature = 0) {
    if (q.rows() < 1 || k.rows() < 1 || heads < 1 || q.cols() != k.cols() || q.cols() < 1 || q.cols() % heads != 0) {
      detail::refuse("gerf::optimal", "q is ", detail::shape_text{q.rows(), q.cols()}, ", k is ",
                     detail::shape_text{k.rows(), k.cols()}, ", heads is ", heads,
                     "; needed are (Nq, H D) and (Nk, H D) with at least one row each");
    }
    const auto n = static_cast<double>(heads);
    const Eigen::Index head_dim = q.cols() / heads;
    double squares = 0;  // summed over heads: mean |q|^2 + mean |k|^2 + 2 mean q . mean k = mean |q + k|^2
    for (Eigen::Index d = 0; d < q.cols(); ++d) {
      const column_moments of_q(q, d);
      const column_moments of_k(k, d);
      squares += of_q.square + of_k.square + 2 * of_q.mean * of_k.mean;
    }
    const double divisor = temperature > 0 ? temperature : std::sqrt(static_cast<double>(head_dim));
    const double rho = squares / (n * divisor * static_cast<double>(head_dim));
    return (1 - 2 * rho - std::sqrt((2 * rho + 1) * (2 * rho + 1) + 8 * rho)) / 16;
  }

  /// The map of the same sizes and A with another seed.
  gerf redraw(std::uint64_t seed) const { return {this->head_dim(), this->m_features, seed, a(), this->options()}; }

  double a() const noexcept { return this->m_parameters.own; }

  /// log phi (R, C) from x (R, D).
  void forward(const const_tile<T>& x, tile<T>& log_phi) const noexcept {
    const T* const offsets = m_offsets->data();
    this->exponents(x, log_phi, [&](const P& half_norm, Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
      return detail::load_up_to(offsets + c, left) + half_norm;
    });
  }

 private:
  friend class detail::storable<gerf>;

  explicit gerf(const typename base::parameters& p) : base(p, static_cast<T>(std::sqrt(1 - 4 * p.own))) {
    if (!(a() < 0.125)) detail::refuse(name, "A is ", a(), "; it must be below 1/8, where the variance is infinite");
    if (!(a() >= -1e6)) detail::refuse(name, "A is ", a(), "; take one from gerf::optimal");
    if (p.options.rows == random_rows::regularized) {
      detail::refuse(name, "directions of one length are not weighed by A; use independent or orthogonal ones");
    }
    const auto w = this->projection();
    const double normalizer = 0.25 * static_cast<double>(w.cols()) * std::log1p(-4 * a());
    detail::heap_slab<T> offsets(w.rows());
    for (Eigen::Index c = 0; c < w.rows(); ++c) {
      const double squares = w.row(c).template cast<double>().squaredNorm();
      offsets.data()[c] = static_cast<T>(a() * squares + normalizer);
    }
    m_offsets = std::make_shared<const detail::heap_slab<T>>(std::move(offsets));
  }

  explicit gerf(detail::record_reader& in) : gerf(typename base::parameters(in)) {}

  struct column_moments {
    double mean = 0;
    double square = 0;

    column_moments(const matrix_view<const T>& x, Eigen::Index column) {
      const auto n = static_cast<double>(x.rows());
      for (Eigen::Index r = 0; r < x.rows(); ++r) {
        const auto value = static_cast<double>(x.data()[r * x.row_stride() + column]);
        mean += value / n;
        square += value * value / n;
      }
    }
  };

  std::shared_ptr<const detail::heap_slab<T>> m_offsets;  // A |w_c|^2 + (D / 4) log(1 - 4 A), (m)
};

LINATTN_NAMESPACE_END
