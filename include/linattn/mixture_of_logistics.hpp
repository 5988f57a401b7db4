// Distributions of pixel levels as mixtures of logistics: the output head of the paper's image models.
//
//   const linattn::mixture_of_logistics mixture(10);             // K = 10 components, 256 levels
//   linattn::random_stream random(7);
//   const Eigen::Index level = mixture.sample(outputs.row(t), random);
//   const double bits = -mixture.log_likelihood(outputs.row(t), level) / std::log(2.0);
#pragma once

#include <linattn/sampling.hpp>

#include <Eigen/Core>

LINATTN_NAMESPACE_BEGIN

/// A mixture of K discretised logistic distributions over levels 0 ... L - 1. Level i stands for y_i = 2 i / (L - 1) -
/// 1 in [-1, 1]; a row of 3 K parameters, of float or double, holds K logits, then K means m, then K logarithms of
/// scales:
///
///   pi = softmax(logits),   s_k = exp(max(row_k, -7)),   sigma(x) = 1 / (1 + e^-x),   h = 1 / (L - 1)
///   P_k(i) = sigma((y_i + h - m_k) / s_k) - sigma((y_i - h - m_k) / s_k),   for i = 0 without the second term, for
///            i = L - 1 with 1 as the first: the tails count as the outermost levels
///   ln P(i) = ln sum_k pi_k P_k(i)
///
/// As the paper's public code has it, between the outermost levels a P_k of at most 1e-5 is replaced by its density in
/// the middle times the width, 2 h: the difference of two sigmas has no digits there. Where s_k is a few h or less that
/// is not P_k any more, so that probabilities of all levels sum to 1 within 1e-4, not within rounding. The scale of -7
/// is 0.23 of the width of 256 levels.
///
/// `sample` draws from P with the same scales as `log_likelihood`. (The public code takes elu(row) + 1.0001 for a scale
/// there, with which samples are not of the model whose likelihood was reported.)
///
/// Sources: Salimans et al., PixelCNN++, 2017; Katharopoulos et al., Transformers are RNNs, 2020, section 4.2.
class mixture_of_logistics {
 public:
  /// Throws for fewer than 1 component or 2 levels.
  explicit mixture_of_logistics(Eigen::Index components, Eigen::Index levels = 256);

  Eigen::Index components() const noexcept { return m_components; }
  Eigen::Index levels() const noexcept { return m_levels; }
  /// 3 K, the size of a row.
  Eigen::Index parameters() const noexcept { return 3 * m_components; }

  /// ln P(level) in nats. Throws for a row of another size than parameters(), and a level outside 0 ... levels() - 1.
  /// Numerics: in double; a relative error of 1e-11 of P where differences of sigmas cancel, else a few ulp, in the far
  /// tails, too. NaN for a row with a NaN, with logits of +inf or that are all -inf. Cost: 6 exponentials and 4
  /// logarithms a component, no allocation.
  template <class Row>
  double log_likelihood(Row&& row, Eigen::Index level) const;

  /// A level drawn from P, two random numbers: a component k by its pi_k, then m_k + s_k (ln u - ln(1 - u)) to the
  /// nearest level. The same on every machine, as sampling.hpp's draws. Throws, before a random number is used, for a
  /// row of another size or with a NaN, or with logits that are all -inf. Cost: 2 K exponentials, no allocation.
  template <class Row>
  Eigen::Index sample(Row&& row, random_stream& random) const;

 private:
  double log_bin(Eigen::Index level, double mean, double raw_scale) const;
  template <class T>
  vector_view<const T> require_row(const char* function, const vector_view<const T>& row) const;

  Eigen::Index m_components;
  Eigen::Index m_levels;
};

LINATTN_NAMESPACE_END

#include <linattn/detail/mixture_of_logistics_impl.hpp>
