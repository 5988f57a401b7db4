// The bodies of short_convolution: row t of the output is a sum over the W rows that end with row t of
//
//     state (W - 1, channels)   the oldest first
//     x     (N, channels)
//
// one below the other, and the last W - 1 rows of that pile are the state afterwards.
#pragma once

#include <linattn/detail/activations.hpp>
#include <linattn/detail/layer_checks.hpp>
#include <linattn/detail/registers.hpp>
#include <linattn/short_convolution.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cstddef>
#include <span>

LINATTN_NAMESPACE_BEGIN

template <class Scalar>
short_convolution<Scalar>::short_convolution(input weight, token bias, convolution_activation activation)
    : m_channels(weight.rows()),
      m_width(weight.cols()),
      m_stride(detail::padded<Scalar>(weight.rows())),
      m_taps((weight.cols() + 1) * detail::padded<Scalar>(weight.rows())),
      m_activation(activation) {
  constexpr const char* function = "short_convolution";
  if (m_channels < 1 || m_width < 1) {
    detail::refuse(function, "a weight of ", detail::shape_text{m_channels, m_width},
                   " has no channels (rows) or no taps (columns)");
  }
  if (bias.size() != 0) detail::require_size(function, "bias", bias, "the weight", m_channels);
  for (Eigen::Index c = 0; c < m_channels; ++c) {
    for (Eigen::Index j = 0; j < m_width; ++j) m_taps[std::size_t(j * m_stride + c)] = weight(c, j);
    if (bias.size() != 0) m_taps[std::size_t(m_width * m_stride + c)] = bias.data()[c];
  }
}

template <class Scalar>
void short_convolution<Scalar>::forward(state_type& s, input x, output y) const {
  check("short_convolution::forward", s, x, y);
  forward_rows(s, x, y);
}

template <class Scalar>
void short_convolution<Scalar>::forward(state_type& s, input x, output y, std::span<const bool> keep) const {
  check("short_convolution::forward", s, x, y);
  if (static_cast<Eigen::Index>(keep.size()) != x.rows()) {
    detail::refuse("short_convolution::forward", "keep has ", static_cast<Eigen::Index>(keep.size()), " entries for x ",
                   detail::shape_text{x.rows(), x.cols()});
  }
  for (Eigen::Index first = 0; first < x.rows();) {  // runs of tokens that are kept, or are not
    const bool kept = keep[std::size_t(first)];
    Eigen::Index end = first + 1;
    while (end < x.rows() && keep[std::size_t(end)] == kept) ++end;
    if (kept) {
      forward_rows(s, input(x.row(first), end - first, m_channels, x.row_stride()),
                   output(y.row(first), end - first, m_channels, y.row_stride()));
    } else {
      for (Eigen::Index t = first; t < end; ++t) std::fill(y.row(t), y.row(t) + m_channels, Scalar(0));
    }
    first = end;
  }
}

template <class Scalar>
void short_convolution<Scalar>::step(state_type& s, token x_t,
                                     vector_view<Scalar> y_t) const noexcept LINATTN_NONBLOCKING {
  LINATTN_ASSERT(s.rows() == m_width - 1 && s.m_channels == m_channels);
  LINATTN_ASSERT(x_t.size() == m_channels && y_t.size() == m_channels);
  convolve(s, x_t.data(), 0, 0, y_t.data());
  push(s, x_t.data(), 0, 1);
}

template <class Scalar>
void short_convolution<Scalar>::check(const char* function, const state_type& s, const input& x,
                                      const output& y) const {
  if (s.rows() != m_width - 1 || s.m_channels != m_channels) {
    detail::refuse(function, "the state is ", detail::shape_text{s.rows(), s.m_channels}, ", but the weight asks for ",
                   detail::shape_text{m_width - 1, m_channels});
  }
  detail::require_shape(function, "x", x, "the weight", x.rows(), m_channels);
  detail::require_shape(function, "y", y, "x", x.rows(), m_channels);
  detail::assert_apart(x, y);
}

template <class Scalar>
void short_convolution<Scalar>::forward_rows(state_type& s, const input& x, const output& y) const noexcept {
  for (Eigen::Index t = 0; t < x.rows(); ++t) convolve(s, x.data(), x.row_stride(), t, y.row(t));
  if (x.rows() > 0) push(s, x.data(), x.row_stride(), x.rows());
}

/// y = act(bias + sum_j w_j x_(t-W+1+j)), row t of the tokens at x; rows before its first are the state's.
template <class Scalar>
void short_convolution<Scalar>::convolve(const state_type& s, const Scalar* x, Eigen::Index stride, Eigen::Index t,
                                         Scalar* y) const noexcept {
  using P = detail::packet<Scalar>;
  const Eigen::Index kept = std::max(m_width - 1 - t, Eigen::Index(0));  // taps that meet the state
  const Scalar* const past = s.m_slab.data() + (m_width - 1 - kept) * m_stride;
  const Scalar* const recent = x + (t - (m_width - 1) + kept) * stride;
  const bool activated = m_activation == convolution_activation::silu;
  detail::for_each_register<Scalar>(m_channels, [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
    const Scalar* const taps = m_taps.data() + c;
    P sum = P::load(taps + m_width * m_stride);
    for (Eigen::Index j = 0; j < kept; ++j) {
      sum = fma(P::load(taps + j * m_stride), P::load(past + j * m_stride + c), sum);
    }
    for (Eigen::Index j = kept; j < m_width; ++j) {
      const P value = detail::load_up_to(recent + (j - kept) * stride + c, left);
      sum = fma(P::load(taps + j * m_stride), value, sum);
    }
    detail::store_up_to(y + c, activated ? silu(sum) : sum, left);
  });
}

/// Appends n > 0 tokens, of which the state keeps the last W - 1.
template <class Scalar>
void short_convolution<Scalar>::push(state_type& s, const Scalar* x, Eigen::Index stride,
                                     Eigen::Index n) const noexcept {
  const Eigen::Index rows = m_width - 1;
  const Eigen::Index fresh = std::min(n, rows);
  Scalar* const kept = s.m_slab.data();
  std::copy(kept + fresh * m_stride, kept + rows * m_stride, kept);
  for (Eigen::Index i = 0; i < fresh; ++i) {
    const Scalar* const from = x + (n - fresh + i) * stride;
    std::copy(from, from + m_channels, kept + (rows - fresh + i) * m_stride);
  }
}

LINATTN_NAMESPACE_END
