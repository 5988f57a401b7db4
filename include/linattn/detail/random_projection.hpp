// The directions of random feature maps: how they are drawn from a seed, and their projection u = W x.
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/projection.hpp>
#include <linattn/detail/random.hpp>
#include <linattn/random_features.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Draws W (m, D) row by row in double: a pure function of (seed, kind, D), the same bits on every compiler (see
/// random.hpp), orthogonal rows included.
class direction_source {
 public:
  direction_source(std::uint64_t seed, random_rows kind, Eigen::Index head_dim)
      : m_seed(seed), m_kind(kind), m_head_dim(head_dim) {}

  /// f(c, w_c) for c = 0 ... rows - 1; w_c points to D doubles.
  template <class F>
  void for_each(Eigen::Index rows, const F& f) const {
    const bool independent = m_kind == random_rows::independent;
    const Eigen::Index block_rows = independent ? 1 : m_head_dim;
    std::vector<double> block(static_cast<std::size_t>(block_rows * m_head_dim));
    std::vector<double> lengths(static_cast<std::size_t>(block_rows));
    for (Eigen::Index first = 0; first < rows; first += block_rows) {
      const Eigen::Index count = std::min(block_rows, rows - first);
      for (Eigen::Index r = 0; r < count; ++r) {
        double* const w = block.data() + r * m_head_dim;
        for (Eigen::Index d = 0; d < m_head_dim; ++d) {
          const auto index = static_cast<std::uint64_t>((first + r) * m_head_dim + d);
          w[d] = random_normal(m_seed, stream_of_directions, index);
        }
        if (!independent) {
          lengths[static_cast<std::size_t>(r)] = length(w);
          orthonormalize(block.data(), r);
        }
      }
      for (Eigen::Index r = 0; r < count; ++r) {
        double* const w = block.data() + r * m_head_dim;
        if (!independent) scale(w, lengths[static_cast<std::size_t>(r)]);
        f(first + r, w);
      }
    }
  }

 private:
  static constexpr std::uint64_t stream_of_directions = 0;

  double dot(const double* a, const double* b) const {
    double sum = 0;
    for (Eigen::Index d = 0; d < m_head_dim; ++d) sum = std::fma(a[d], b[d], sum);
    return sum;
  }

  void scale(double* w, double factor) const {
    for (Eigen::Index d = 0; d < m_head_dim; ++d) w[d] *= factor;
  }

  /// Row r of the block at right angles to the rows before it, and of length 1. This is Gram and Schmidt's way, whose
  /// rows are uniform in direction: a QR by reflections leaves them signs that depend on the draw, and the estimates
  /// of positive features a bias. The second pass removes what rounding leaves of the first.
  void orthonormalize(double* block, Eigen::Index r) const {
    double* const w = block + r * m_head_dim;
    for (int pass = 0; pass < 2; ++pass) {
      for (Eigen::Index other = 0; other < r; ++other) {
        const double* const unit = block + other * m_head_dim;
        const double along = dot(w, unit);
        for (Eigen::Index d = 0; d < m_head_dim; ++d) w[d] = std::fma(-along, unit[d], w[d]);
      }
      scale(w, 1 / std::sqrt(dot(w, w)));
    }
  }

  /// Of the row as drawn. With a block of normals G = R Q, R lower triangular with a positive diagonal, Q and the rows
  /// of R are independent, so that lengths, those of R's rows, depend on neither the directions nor each other.
  double length(const double* w) const {
    return std::sqrt(m_kind == random_rows::regularized ? static_cast<double>(m_head_dim) : dot(w, w));
  }

  std::uint64_t m_seed;
  random_rows m_kind;
  Eigen::Index m_head_dim;
};

/// W (m, D), m directions as drawn by direction_source: a pure function of (seed, kind, D), of which the first rows do
/// not depend on m.
template <class T>
class random_projection : public projection<T> {
 public:
  random_projection(const char* owner, Eigen::Index head_dim, Eigen::Index rows, std::uint64_t seed,
                    random_rows kind = random_rows::independent)
      : projection<T>(at_least_one(owner, "head_dim", head_dim), at_least_one(owner, "features", rows), 1,
                      [&](Eigen::Index /*set*/, auto weights, auto /*bias*/) {
                        direction_source(seed, kind, head_dim).for_each(rows, [&](Eigen::Index c, const double* w) {
                          for (Eigen::Index d = 0; d < head_dim; ++d) weights(c, d) = static_cast<T>(w[d]);
                        });
                      }),
        m_seed(seed) {}

  /// W as a record holds it, and then the seed.
  random_projection(record_reader& in, Eigen::Index head_dim, Eigen::Index rows)
      : projection<T>(in, head_dim, rows), m_seed(in.number<std::uint64_t>()) {}

  std::uint64_t seed() const noexcept { return m_seed; }

 private:
  static Eigen::Index at_least_one(const char* owner, const char* what, Eigen::Index n) {
    if (n < 1) refuse(owner, what, " is ", n, "; at least 1 is needed");
    return n;
  }

  std::uint64_t m_seed;
};

}  // namespace detail
LINATTN_NAMESPACE_END
