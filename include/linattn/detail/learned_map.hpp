// What learned feature maps share: W and b, one set for all heads or one for each, and their gradients.
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/projection.hpp>
#include <linattn/detail/serialization.hpp>
#include <linattn/feature_map.hpp>

#include <Eigen/Core>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// W (H m, D) and b (H m) of a learned map, the sets of its H heads below each other; or their gradients.
template <class T>
struct affine_parameters {
  Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic> weights;
  Eigen::Matrix<T, 1, Eigen::Dynamic> bias;
};

/// The base of a map of u = W x + b. A record holds
///
///   sizes     H, D, m
///   payload   own (double), and for each head W (m, D) and b (m)
template <class T>
class learned_map {
 public:
  using scalar = T;
  using gradient = affine_parameters<T>;
  using weights_view = Eigen::Ref<const row_matrix<T>>;
  using bias_view = Eigen::Ref<const row_vector<T>>;

  Eigen::Index head_dim() const noexcept { return m_projection.head_dim(); }

  /// H, the number of sets; 1 where all heads share one. Head h of an operator uses set h modulo H.
  Eigen::Index heads() const noexcept { return m_projection.sets(); }

  /// Copies of W (H m, D) and b (H m).
  affine_parameters<T> parameters() const {
    affine_parameters<T> all = make_gradient();
    for (Eigen::Index h = 0; h < heads(); ++h) {
      all.weights.middleRows(h * rows(), rows()) = m_projection.matrix(h);
      all.bias.segment(h * rows(), rows()) = m_projection.bias(h);
    }
    return all;
  }

  /// Zeros of the shapes of `parameters()`, which vjp adds to. One thread at a time may use it.
  gradient make_gradient() const {
    const Eigen::Index all = heads() * rows();
    return {decltype(gradient::weights)::Zero(all, head_dim()), decltype(gradient::bias)::Zero(all)};
  }

 protected:
  learned_map(const char* name, const weights_view& weights, const bias_view& bias, Eigen::Index heads, double own = 0)
      : m_own(own),
        m_projection(weights.cols(), rows_of_a_head(name, weights, bias, heads), heads,
                     [&](Eigen::Index set, auto W, auto b) {
                       W = weights.middleRows(set * W.rows(), W.rows());
                       b = bias.segment(set * W.rows(), W.rows());
                     }) {}

  explicit learned_map(record_reader& in)
      : m_own(in.number<double>()), m_projection(in, in.size(1), in.size(2), in.size(0), true) {}

  record_writer record(const char* name) const {
    auto out = record_writer::of<T>(name, {heads(), head_dim(), rows()});
    out.number(m_own);
    m_projection.write(out, true);
    return out;
  }

  Eigen::Index rows() const noexcept { return m_projection.rows(); }  // m
  double own() const noexcept { return m_own; }

  /// The first m columns of u (R, >= m) = x (R, D) W^T + b.
  void project(const const_tile<T>& x, tile<T>& u, const tile_position& where) const noexcept {
    m_projection.apply(x, u, set_of(where));
  }

  /// dx (R, D) = du W; and, where there is a gradient, dW += du^T x and db += the sum of du's rows. `du(r, c, n)` gives
  /// a register of du (R, m), see projection.
  template <class X, class Dx, class Du>
  void pull_back(const X& x, Dx& dx, const tile_position& where, const Du& du, gradient* g) const {
    m_projection.apply_transposed(dx, T(1), du, set_of(where));
    if (g == nullptr) return;
    const Eigen::Index first = set_of(where) * rows();
    m_projection.add_gradient(x, du, g->weights.data() + first, g->weights.rows(), g->bias.data() + first);
  }

  /// Refuses a gradient that another map made.
  void check(const char* name, const gradient* g) const {
    const Eigen::Index all = heads() * rows();
    if (g == nullptr) return;
    if (g->weights.rows() == all && g->weights.cols() == head_dim() && g->bias.size() == all) return;
    refuse(name, "the gradient is ", shape_text{g->weights.rows(), g->weights.cols()}, " and ", g->bias.size(),
           ", expected ", shape_text{all, head_dim()}, " and ", all, "; take one from make_gradient");
  }

 private:
  static Eigen::Index rows_of_a_head(const char* name, const weights_view& weights, const bias_view& bias,
                                     Eigen::Index heads) {
    if (heads < 1) refuse(name, "heads is ", heads, "; at least 1 is needed, which all heads of an operator share");
    if (weights.rows() < 1 || weights.cols() < 1 || weights.rows() % heads != 0) {
      refuse(name, "the weights are ", shape_text{weights.rows(), weights.cols()}, " for ", heads,
             " heads; needed is (heads * rows, head_dim) with at least one row a head");
    }
    if (bias.size() != weights.rows()) {
      refuse(name, "the bias has ", bias.size(), " elements, expected ", weights.rows(), ", one for each row of the ",
             "weights");
    }
    return weights.rows() / heads;
  }

  Eigen::Index set_of(const tile_position& where) const noexcept { return where.head % heads(); }

  double m_own;  // what the map has beside W and b: the temperature of hedgehog, 0 elsewhere
  projection<T> m_projection;
};

}  // namespace detail
LINATTN_NAMESPACE_END
