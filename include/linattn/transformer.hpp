// The transformer of the paper, run from trained weights: a whole sequence at once, or token by token as the recurrent
// network that it is.
//
//   using attention = linattn::linear_attention<linattn::elu_plus_one>;
//   const linattn::transformer<attention> model({.wiring = linattn::wiring::pre_norm}, weights,
//                                               attention({.head_dim = 32, .heads = 8}));
//   auto ws = model.make_workspace(64);                      // of up to 64 tokens at once
//   auto s = model.make_state();
//   model.forward_causal(s, prompt, logits, ws);             // prefill: symbols (N) to logits (N, outputs) or (1, ...)
//   model.step(s, symbol, logits_t, ws);                     // then a token in constant time and memory
//   model.step(std::span(states), symbols, logits, ws);      // a token of each of many sequences, as one batch
//
// Attention is any operator of the library, or cached_softmax (softmax_cache.hpp): the same weights, the same calls.
#pragma once

#include <linattn/detail/attention_inputs.hpp>
#include <linattn/detail/dense.hpp>
#include <linattn/linear_attention.hpp>
#include <linattn/transformer_weights.hpp>

#include <Eigen/Core>
#include <memory>
#include <span>
#include <string>
#include <vector>

LINATTN_NAMESPACE_BEGIN

/// How attention A, the feed-forward map MLP and the norms of a layer are joined; x is the layer's input, y its output.
enum class wiring {
  paper,      ///< eq. 1: y = MLP(A(x) + x), no norms
  post_norm,  ///< u = LN1(x + A(x)), y = LN2(u + MLP(u)): the paper's public implementation
  pre_norm,   ///< u = x + A(LN1(x)), y = u + MLP(LN2(u))
};

/// Between the two affine maps of MLP(x) = W2 act(W1 x + b1) + b2. gelu is x Phi(x), not its tanh form.
enum class activation { relu, gelu };

/// What is known of a token's place i in its sequence. Sinusoids: sin(i / 10000^(2 j / P)) in columns 2 j of P, and the
/// cosines beside them.
enum class position_encoding {
  none,
  sinusoid_added,         ///< to the embedding, P = F
  sinusoid_concatenated,  ///< behind the embedding, P = F - E
  learned,                ///< row i of `positions`, added
};

/// Designators in this order.
struct transformer_options {
  linattn::wiring wiring = linattn::wiring::post_norm;
  linattn::activation activation = linattn::activation::relu;
  position_encoding positions = position_encoding::none;
  double norm_epsilon = 1e-5;    ///< added to the variance in a layer normalisation
  Eigen::Index input_width = 0;  ///< E of inputs that are vectors; 0: F. Of symbols it is the embedding's
};

template <class Attention, class CrossAttention>
class transformer;

/// One sequence in a transformer: a state of its attention for every layer, and the number of its tokens. A value: a
/// copy is a snapshot, or a second sequence with the same beginning; assignment between equal sizes does not allocate.
template <class Attention, class CrossAttention = Attention>
class transformer_state {
 public:
  transformer_state() = default;

  /// Those that had keys, since it was made or reset; 0 of a default-made or moved-from one, which no call accepts.
  Eigen::Index tokens() const noexcept { return m_layers.empty() ? 0 : m_tokens; }
  /// Back to a sequence without tokens; of a decoder, without a memory, too.
  void reset() noexcept {
    for (auto& s : m_layers) s.reset();
    for (auto& s : m_memories) s.reset();
    m_tokens = 0;
  }
  /// The attention's state in a layer, and what it remembers of an encoder's output.
  std::span<typename Attention::state_type> layers() noexcept { return m_layers; }
  std::span<const typename Attention::state_type> layers() const noexcept { return m_layers; }
  std::span<const typename CrossAttention::state_type> memories() const noexcept { return m_memories; }

 private:
  friend class transformer<Attention, CrossAttention>;

  std::vector<typename Attention::state_type> m_layers;
  std::vector<typename CrossAttention::state_type> m_memories;
  Eigen::Index m_tokens = 0;
};

/// Scratch for one thread, of up to rows() tokens at once; meaningless between calls.
template <class Attention, class CrossAttention = Attention>
class transformer_workspace {
 public:
  Eigen::Index rows() const noexcept { return m_rows; }

 private:
  friend class transformer<Attention, CrossAttention>;
  using T = typename Attention::scalar;

  transformer_workspace(Eigen::Index rows, const Attention& attn)
      : m_rows(rows), m_attention(attn.make_workspace()), m_state(attn.make_state()) {}

  /// A matrix (rows, cols) whose rows begin on cache lines.
  struct buffer {
    buffer() = default;
    buffer(Eigen::Index rows, Eigen::Index n)
        : cols(n), stride(detail::round_up(n, detail::line<T>)), slab(rows * stride) {}
    bool has(Eigen::Index n) const noexcept { return cols == n && !slab.empty(); }  // not moved from, either
    matrix_view<T> top(Eigen::Index rows) { return top(rows, cols); }
    matrix_view<T> top(Eigen::Index rows, Eigen::Index n) { return matrix_view<T>(slab.data(), rows, n, stride); }

    Eigen::Index cols = 0;
    Eigen::Index stride = 0;
    detail::heap_slab<T> slab;
  };

  Eigen::Index m_rows;
  buffer m_x;        // (R, F): what the layers pass on
  buffer m_branch;   // (R, F): a norm of it, or what is added to it
  buffer m_inputs;   // (R, H D + Hk D + Hv M + gates): q, k, v, log-decays, betas side by side
  buffer m_outputs;  // (R, Ho M)
  buffer m_hidden;   // (R, feed-forward)
  typename Attention::workspace_type m_attention;
  typename Attention::state_type m_state;                        // of `forward`
  std::vector<typename CrossAttention::workspace_type> m_cross;  // one, of a decoder
};

/// A stack of L layers of multi-head attention and a feed-forward map, with an embedding or vector inputs before it and
/// a final norm and an output head behind it, each where its weights are there (Katharopoulos et al., 2020, eqs. 1,
/// 16-20; Vaswani et al., 2017).
///
/// A layer's attention is out_projection(attn(x Wq + bq, x Wk + bk, x Wv + bv)), heads in the order of the rows of the
/// weights. Rules with inputs take them from the same x: log_decay = ln sigmoid(x W + b), beta = sigmoid(x W + b);
/// under rules that correct, queries and keys are first brought to length 1, as their models do. A decoder, whose
/// layers have a `cross` attention, joins that to x in the same way between the two others, with queries from x and
/// keys and values from the memory, which `absorb_memory` reads once.
///
/// The model holds a packed copy of the weights, shared by copies of it, and is immutable: any number of sequences and
/// threads run from one. Scalar is the attention's, float or double.
///
/// Laws, to rounding; each is a test: `step` over the tokens = `forward_causal`, however it is split, = the composition
/// of the equations in double. A sequence of a batch is computed as if it were alone, bitwise.
///
/// Cost: 2 flops a weight and token, plus the attention's, and one reading of the weights a call, of forward_causal for
/// every ws.rows() tokens. No call with a workspace allocates; one thread each.
/// Errors: std::invalid_argument with both sizes, before anything is written, but of `step`, whose arguments are
/// asserted in debug builds: shapes, symbols, learned positions, and room in a softmax cache.
template <class Attention, class CrossAttention = Attention>
class transformer {
 public:
  using scalar = typename Attention::scalar;
  using attention_type = Attention;
  using state_type = transformer_state<Attention, CrossAttention>;
  using workspace_type = transformer_workspace<Attention, CrossAttention>;
  using input = matrix_view<const scalar>;
  using output = matrix_view<scalar>;
  using symbols = std::span<const Eigen::Index>;

  static_assert(std::is_same_v<scalar, float> || std::is_same_v<scalar, double>,
                "linattn: a transformer's Scalar must be float or double");

  /// One operator for all layers, or one for each: feature maps of their own, with the same sizes. A decoder takes
  /// those of its cross-attentions, too. Throws where weights and operators do not fit, with every tensor that does
  /// not.
  transformer(const transformer_options& o, const transformer_weights<scalar>& weights, const Attention& attn);
  transformer(const transformer_options& o, const transformer_weights<scalar>& weights, const Attention& attn,
              const CrossAttention& cross);
  transformer(const transformer_options& o, const transformer_weights<scalar>& weights, std::vector<Attention> attn,
              std::vector<CrossAttention> cross = {});

  Eigen::Index layers() const noexcept { return static_cast<Eigen::Index>(m_layers.size()); }  ///< L
  Eigen::Index width() const noexcept { return m_sizes.width; }                                ///< F
  Eigen::Index input_width() const noexcept { return m_input_width; }                          ///< E
  Eigen::Index outputs() const noexcept { return m_sizes.outputs > 0 ? m_sizes.outputs : m_sizes.width; }
  const transformer_options& options() const noexcept { return m_options; }
  const transformer_sizes& sizes() const noexcept { return m_sizes; }
  const Attention& attention(Eigen::Index layer) const { return m_layers[std::size_t(layer)].attention; }
  /// Bytes of the packed weights that a token reads.
  Eigen::Index weight_bytes() const noexcept;

  /// A sequence without tokens: state_bytes() of the attention for each layer, one allocation each, and in a decoder of
  /// the cross-attention. Softmax needs its max_tokens for it.
  state_type make_state() const;
  /// For calls of up to `rows` tokens at once: `step` of so many sequences, `forward` of so long ones. forward_causal
  /// takes any number of tokens, `rows` after `rows`. 2 F + H D + Hk D + Hv M + Ho M + feed-forward elements a row, and
  /// a workspace and a state of the attention. Throws for less than 1 row.
  workspace_type make_workspace(Eigen::Index rows = 1) const;

  // Inputs x are symbols (N) of the embedding, or vectors (N, E). Outputs (N, outputs()), or (1, outputs()): the last
  // token's alone, which saves the head's product for the others. Of N tokens the first `keys` have keys and values;
  // the others, padding of a batch, see those and are seen by none. -1: all.

  /// Causal, from the state on, which is left behind the last token that has a key: prefill. Vectors x may be `out`,
  /// row for row; otherwise the two have to be apart (asserted).
  void forward_causal(state_type& s, symbols x, output out, workspace_type& ws, Eigen::Index keys = -1) const {
    run_causal(s, x, out, ws, keys);
  }
  void forward_causal(state_type& s, input x, output out, workspace_type& ws, Eigen::Index keys = -1) const {
    run_causal(s, x, out, ws, keys);
  }
  row_matrix<scalar> forward_causal(symbols x) const { return causal_of(x); }
  row_matrix<scalar> forward_causal(input x) const { return causal_of(x); }

  /// Bidirectional: every token sees all that have keys. N <= ws.rows(). Of attentions whose rule has a `forward`; not
  /// of a decoder, whose tokens come one by one.
  void forward(symbols x, output out, workspace_type& ws, Eigen::Index keys = -1) const {
    run_bidirectional(x, out, ws, keys);
  }
  void forward(input x, output out, workspace_type& ws, Eigen::Index keys = -1) const {
    run_bidirectional(x, out, ws, keys);
  }
  row_matrix<scalar> forward(symbols x) const { return bidirectional_of(x); }
  row_matrix<scalar> forward(input x) const { return bidirectional_of(x); }

  /// The next token of each of B sequences, no state twice: x (B), out (B, outputs()), B <= ws.rows(). The products are
  /// of all B rows. Sequences may differ in their tokens so far, and come and go between calls.
  void step(std::span<state_type> states, symbols x, output out, workspace_type& ws) const noexcept {
    run_step(states, x, out, ws);
  }
  void step(std::span<state_type> states, input x, output out, workspace_type& ws) const noexcept {
    run_step(states, x, out, ws);
  }
  /// Of one.
  void step(state_type& s, Eigen::Index x, vector_view<scalar> out, workspace_type& ws) const noexcept {
    run_step({&s, 1}, symbols(&x, 1), output(out.data(), 1, out.size()), ws);
  }
  void step(state_type& s, vector_view<const scalar> x, vector_view<scalar> out, workspace_type& ws) const noexcept {
    run_step({&s, 1}, input(x.data(), 1, x.size()), output(out.data(), 1, out.size()), ws);
  }

  /// Of a decoder: the rows of an encoder's output (N, memory width) into the memory of a sequence, of all layers. More
  /// may follow; `reset` forgets them.
  void absorb_memory(state_type& s, input memory, workspace_type& ws) const;

 private:
  using attention_inputs = detail::attention_inputs<Attention>;
  struct norm {
    row_vector<scalar> weight, bias;
  };
  struct tables {
    row_matrix<scalar> embedding, positions;
  };
  struct self_layer {
    Attention attention;
    detail::dense<scalar> inputs, out, linear1, linear2;  // inputs: q, k, v and gates side by side
    norm of_attention, of_feed_forward;
  };
  struct cross_layer {
    CrossAttention attention;
    detail::dense<scalar> query, memory, out;  // memory: k, v
    norm before;
  };

  void check_sizes(const transformer_weights<scalar>& weights) const;
  Eigen::Index most_inputs() const noexcept;
  bool fits(const state_type& s) const noexcept;
  bool fits(const workspace_type& ws) const noexcept;
  bool fits(symbols x, Eigen::Index row) const noexcept {
    return x[std::size_t(row)] >= 0 && x[std::size_t(row)] < m_tables->embedding.rows();
  }
  bool fits(const input& x, Eigen::Index /*row*/) const noexcept { return x.cols() == m_input_width; }
  void check_state(const char* function, const state_type& s) const;
  void check_workspace(const char* function, const workspace_type& ws) const;
  template <class X>
  Eigen::Index check_call(const char* function, const X& x, Eigen::Index first, const output& out,
                          Eigen::Index keys) const;
  template <class X>
  void run_causal(state_type& s, const X& x, output out, workspace_type& ws, Eigen::Index keys) const;
  template <class X>
  void run_bidirectional(const X& x, output out, workspace_type& ws, Eigen::Index keys) const;
  template <class X>
  row_matrix<scalar> causal_of(const X& x) const;
  template <class X>
  row_matrix<scalar> bidirectional_of(const X& x) const;
  static Eigen::Index count(symbols x) noexcept { return static_cast<Eigen::Index>(x.size()); }
  static Eigen::Index count(const input& x) noexcept { return x.rows(); }
  template <class X>
  void run_step(std::span<state_type> states, const X& x, output out, workspace_type& ws) const noexcept;
  void embed(symbols x, Eigen::Index row, scalar* to, Eigen::Index position) const noexcept;
  void embed(const input& x, Eigen::Index row, scalar* to, Eigen::Index position) const noexcept;
  void add_position(scalar* row, Eigen::Index position) const noexcept;
  template <class Attend, class Recall>
  void run_layers(Eigen::Index rows, workspace_type& ws, const Attend& attend, const Recall& recall) const;
  template <class Branch>
  void join(matrix_view<scalar> x, matrix_view<scalar> scratch, const norm& n, const Branch& branch) const;
  void normalize(const norm& n, matrix_view<const scalar> x, matrix_view<scalar> y) const noexcept;
  void predict(matrix_view<scalar> x, output out) const noexcept;

  transformer_options m_options;
  transformer_sizes m_sizes;
  Eigen::Index m_input_width = 0;
  std::shared_ptr<const tables> m_tables;
  std::vector<double> m_frequencies;  // of the sinusoids
  std::vector<self_layer> m_layers;
  std::vector<cross_layer> m_cross;  // of a decoder, one a layer
  norm m_norm;
  detail::dense<scalar> m_predictor;
};

LINATTN_NAMESPACE_END

#include <linattn/detail/transformer_checks_impl.hpp>  // IWYU pragma: keep
#include <linattn/detail/transformer_impl.hpp>         // IWYU pragma: keep
