// The short convolution of modern layers: a few taps over the last tokens, channel by channel, before q, k and v.
//
//   const linattn::short_convolution<> conv(weight, bias, linattn::convolution_activation::silu);   // (channels, W)
//   auto s = conv.make_state();
//   conv.forward(s, x, y);          // prefill: x, y (N, channels)
//   conv.step(s, x_t, y_t);         // decode: one token
#pragma once

#include <linattn/detail/layout.hpp>
#include <linattn/matrix_view.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <span>
#include <type_traits>

LINATTN_NAMESPACE_BEGIN

/// What is applied to each output: nothing, or x sigmoid(x), which "swish" names as well.
enum class convolution_activation { none, silu };

template <class Scalar>
class short_convolution;

/// The last W - 1 inputs of one sequence, made by `short_convolution::make_state`, all zero at first.
///
/// A value: a copy is a snapshot to go on from or to roll back to, assignment between equal sizes does not allocate. A
/// default-made or moved-from state is empty, and refused. (W - 1) channels elements, whatever the number of tokens.
template <class Scalar>
class short_convolution_state {
 public:
  using inputs_view = Eigen::Map<row_matrix<Scalar>, Eigen::Unaligned, Eigen::OuterStride<>>;
  using const_inputs_view = Eigen::Map<const row_matrix<Scalar>, Eigen::Unaligned, Eigen::OuterStride<>>;

  short_convolution_state() = default;

  /// The kept inputs (W - 1, channels), the oldest first; writable, to go on from a state that was saved elsewhere.
  inputs_view inputs() { return {m_slab.data(), rows(), m_channels, Eigen::OuterStride<>(m_stride)}; }
  const_inputs_view inputs() const { return {m_slab.data(), rows(), m_channels, Eigen::OuterStride<>(m_stride)}; }

  /// Back to a state just made.
  void reset() noexcept { std::fill(m_slab.begin(), m_slab.end(), Scalar(0)); }

 private:
  friend class short_convolution<Scalar>;

  short_convolution_state(Eigen::Index rows, Eigen::Index channels)
      : m_channels(channels),
        m_stride(detail::padded<Scalar>(channels)),
        m_slab(rows * detail::padded<Scalar>(channels)) {}

  /// Counted in the memory that is there: none after a move.
  Eigen::Index rows() const noexcept { return m_stride == 0 ? 0 : static_cast<Eigen::Index>(m_slab.size()) / m_stride; }

  Eigen::Index m_channels = 0;
  Eigen::Index m_stride = 0;
  detail::heap_slab<Scalar> m_slab;
};

/// A causal depthwise convolution of width W with a state. For channel c of token t,
///
///     y_tc = act(bias_c + w_c0 x_(t-W+1)c + ... + w_c(W-1) x_tc)
///
/// where inputs before the first token are the state's. The last column of the weights meets the token itself.
///
/// The contract is that of ONNX's CausalConvWithState, version 27, with tokens as rows: x (B, channels, L) there is x
/// (N, channels) here, one state a sequence; the weights (channels, 1, W) are (channels, W); past_state and
/// present_state (B, channels, W - 1) are the state's `inputs()`, transposed. Layers use W = 4 with SiLU (Gated
/// DeltaNet, Kimi Delta Attention, Mamba-2). Public layers differ in the state: some keep W inputs, of which the oldest
/// is never used.
///
/// The operator holds the weights and is immutable: one per layer, shared by threads and sequences; a state needs
/// exclusive access. Scalar is float or double.
///
/// Laws: `forward` of N tokens and N times `step` agree to the bit, however the tokens are split into calls. Token t of
/// the output depends on tokens t - W + 1 ... t, bitwise. A token that a mask removes is as if it had not been there.
/// Numerics: the sum runs from the oldest tap to the newest, starting with the bias, in the type of the inputs. NaN and
/// infinities reach W outputs, also where their weight is 0, and are then forgotten.
/// Cost: 2 W flops an output, and about 40 for SiLU. No call allocates, and all run on the calling thread.
template <class Scalar = float>
class short_convolution {
  static_assert(std::is_same_v<Scalar, float> || std::is_same_v<Scalar, double>,
                "linattn: Scalar must be float or double");

 public:
  using scalar = Scalar;
  using state_type = short_convolution_state<Scalar>;
  using input = matrix_view<const Scalar>;
  using output = matrix_view<Scalar>;
  using token = vector_view<const Scalar>;

  /// weight (channels, W) and bias (channels), or no bias where it is empty; both are copied. Throws
  /// std::invalid_argument for a weight without channels or taps, or a bias of another size.
  explicit short_convolution(input weight, token bias = {},
                             convolution_activation activation = convolution_activation::none);

  Eigen::Index channels() const noexcept { return m_channels; }
  Eigen::Index width() const noexcept { return m_width; }  ///< W, taps
  convolution_activation activation() const noexcept { return m_activation; }

  /// A state that has seen nothing. One allocation.
  state_type make_state() const { return {m_width - 1, m_channels}; }

  /// y (N, channels) from x (N, channels) and the state, which then holds the last W - 1 inputs. x and y must not
  /// overlap (asserted in debug builds). Throws std::invalid_argument for a state or view of another size.
  void forward(state_type& s, input x, output y) const;

  /// The same for tokens of which `keep`, one entry a token, is false for padding: those are not read, do not enter the
  /// state, and their outputs are 0. So padding on the left, on the right or between leaves the tokens alone.
  void forward(state_type& s, input x, output y, std::span<const bool> keep) const;

  /// One token: y_t (channels) from x_t (channels). Sizes are asserted in debug builds.
  void step(state_type& s, token x_t, vector_view<Scalar> y_t) const noexcept LINATTN_NONBLOCKING;

 private:
  void check(const char* function, const state_type& s, const input& x, const output& y) const;
  void forward_rows(state_type& s, const input& x, const output& y) const noexcept;
  void convolve(const state_type& s, const Scalar* x, Eigen::Index stride, Eigen::Index t, Scalar* y) const noexcept;
  void push(state_type& s, const Scalar* x, Eigen::Index stride, Eigen::Index n) const noexcept;

  Eigen::Index m_channels;
  Eigen::Index m_width;
  Eigen::Index m_stride;
  detail::heap_slab<Scalar> m_taps;  // (W + 1, channels): a tap a row, the oldest token's first, then the bias
  convolution_activation m_activation;
};

LINATTN_NAMESPACE_END

#include <linattn/detail/short_convolution_impl.hpp>  // IWYU pragma: keep
