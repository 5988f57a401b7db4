// The parameters of a transformer: plain Eigen matrices by name, to be filled, loaded (transformer_io.hpp) or trained.
//
//   auto w = linattn::make_transformer_weights<float>({.layers = 2, .width = 256, .query_width = 256,
//                                                      .value_width = 256, .output_width = 256, .feed_forward = 1024});
//   linattn::for_each_tensor(w, [](const std::string& name, auto& tensor) { tensor.setRandom(); });
#pragma once

#include <linattn/matrix_view.hpp>

#include <Eigen/Core>
#include <string>
#include <vector>

LINATTN_NAMESPACE_BEGIN

/// y = x weight^T + bias, as torch.nn.Linear keeps it: weight (out, in), bias (out) or empty.
template <class T>
struct affine_weights {
  row_matrix<T> weight;
  row_vector<T> bias;
};

/// Of a layer normalisation: weight (F) and bias (F).
template <class T>
struct norm_weights {
  row_vector<T> weight;
  row_vector<T> bias;
};

/// Of one attention: rows of query belong to heads in their order, D each, and so on.
template <class T>
struct multi_head_weights {
  affine_weights<T> query;      ///< (H D, F)
  affine_weights<T> key;        ///< (Hk D, F), of a cross-attention (Hk D, width of the memory)
  affine_weights<T> value;      ///< (Hv M, F), likewise
  affine_weights<T> out;        ///< (F, Ho M)
  affine_weights<T> log_decay;  ///< (Hv or Hv C, F), of rules that take one: log_decay = ln sigmoid(x weight^T + bias)
  affine_weights<T> beta;       ///< (Hv, F), of rules that take one: beta = sigmoid(x weight^T + bias)
};

/// Of one layer, in the order in which they are used; wirings are those of transformer.hpp.
template <class T>
struct layer_weights {
  multi_head_weights<T> attention;
  multi_head_weights<T> cross;     ///< of a decoder: from its tokens to the memory of an encoder
  affine_weights<T> linear1;       ///< (feed-forward, F)
  affine_weights<T> linear2;       ///< (F, feed-forward)
  norm_weights<T> norm_attention;  ///< empty with wiring::paper, as all norms of a layer
  norm_weights<T> norm_cross;
  norm_weights<T> norm_feed_forward;
};

/// Of a whole model. What is empty is not there.
template <class T>
struct transformer_weights {
  row_matrix<T> embedding;  ///< (symbols, E); empty where inputs are vectors
  row_matrix<T> positions;  ///< (longest sequence, F), of positions::learned
  std::vector<layer_weights<T>> layers;
  norm_weights<T> norm;         ///< after the last layer
  affine_weights<T> predictor;  ///< (outputs, F)
};

/// Sizes of all of that; 0 where a part is not there. Designators in this order.
struct transformer_sizes {
  Eigen::Index layers = 0;        ///< L
  Eigen::Index width = 0;         ///< F
  Eigen::Index query_width = 0;   ///< H D
  Eigen::Index key_width = 0;     ///< Hk D; 0: as query_width
  Eigen::Index value_width = 0;   ///< Hv M
  Eigen::Index output_width = 0;  ///< Ho M; 0: as value_width
  Eigen::Index feed_forward = 0;  ///< hidden units
  Eigen::Index symbols = 0;       ///< of the embedding
  Eigen::Index embedding = 0;     ///< E; 0: as width
  Eigen::Index positions = 0;     ///< learned ones
  Eigen::Index outputs = 0;       ///< of the predictor
  Eigen::Index log_decays = 0;    ///< a token and layer
  Eigen::Index betas = 0;
  Eigen::Index memory_width = 0;  ///< of the encoder's output, in a decoder
  bool norms = true;              ///< in the layers
  bool final_norm = false;
  bool biases = true;  ///< of all affine maps
};

namespace detail {

/// f(name, tensor, rows, cols) for every tensor that weights of these sizes have, or, with (0, 0), do not have. Vectors
/// are rows. The names are those of fast-transformers' encoders and, where there is a memory, decoders.
template <class Weights, class F>
void visit_tensors(Weights& w, const transformer_sizes& n, const F& f) {
  const auto matrix = [&](const std::string& name, auto& tensor, Eigen::Index rows, Eigen::Index cols) {
    const bool is_there = rows > 0 && cols > 0;
    f(name, tensor, is_there ? rows : 0, is_there ? cols : 0);
  };
  const auto affine = [&](const std::string& name, auto& a, Eigen::Index out, Eigen::Index in) {
    matrix(name + ".weight", a.weight, out, in);
    matrix(name + ".bias", a.bias, n.biases && in > 0 ? 1 : 0, out);
  };
  const auto norm = [&](const std::string& name, auto& a, bool is_there) {
    matrix(name + ".weight", a.weight, is_there, n.width);
    matrix(name + ".bias", a.bias, is_there, n.width);
  };
  const Eigen::Index key_width = n.key_width > 0 ? n.key_width : n.query_width;
  const Eigen::Index output_width = n.output_width > 0 ? n.output_width : n.value_width;
  const auto attention = [&](const std::string& name, auto& a, Eigen::Index memory_width, bool has_gates) {
    const bool is_there = memory_width > 0;
    affine(name + ".query_projection", a.query, n.query_width, is_there ? n.width : 0);
    affine(name + ".key_projection", a.key, key_width, memory_width);
    affine(name + ".value_projection", a.value, n.value_width, memory_width);
    affine(name + ".out_projection", a.out, is_there ? n.width : 0, output_width);
    affine(name + ".log_decay_projection", a.log_decay, n.log_decays, has_gates ? n.width : 0);
    affine(name + ".beta_projection", a.beta, n.betas, has_gates ? n.width : 0);
  };
  const bool is_decoder = n.memory_width > 0;

  matrix("embedding.weight", w.embedding, n.symbols, n.embedding > 0 ? n.embedding : n.width);
  matrix("positions.weight", w.positions, n.positions, n.width);
  for (std::size_t l = 0; l < w.layers.size(); ++l) {
    const std::string layer = "layers." + std::to_string(l) + ".";
    auto& of = w.layers[l];
    attention(layer + (is_decoder ? "self_attention" : "attention"), of.attention, n.width, true);
    attention(layer + "cross_attention", of.cross, n.memory_width, false);
    affine(layer + "linear1", of.linear1, n.feed_forward, n.width);
    affine(layer + "linear2", of.linear2, n.width, n.feed_forward);
    norm(layer + "norm1", of.norm_attention, n.norms);
    norm(layer + (is_decoder ? "norm2" : "norm_cross"), of.norm_cross, n.norms && is_decoder);
    norm(layer + (is_decoder ? "norm3" : "norm2"), of.norm_feed_forward, n.norms);
  }
  norm("norm", w.norm, n.final_norm);
  affine("predictor", w.predictor, n.outputs, n.outputs > 0 ? n.width : 0);
}

/// A tensor of (rows, cols), all 0; (0, 0) makes it empty.
template <class Tensor>
void clear_tensor(Tensor& tensor, Eigen::Index rows, Eigen::Index cols) {
  if constexpr (Tensor::IsVectorAtCompileTime) {
    tensor.setZero(rows > 0 ? cols : 0);
  } else {
    tensor.setZero(rows, cols);
  }
}

/// The sizes that weights have, as far as they agree; what does not is found by comparing.
template <class T>
transformer_sizes sizes_of(const transformer_weights<T>& w) {
  transformer_sizes n;
  n.layers = static_cast<Eigen::Index>(w.layers.size());
  n.symbols = w.embedding.rows();
  n.embedding = w.embedding.cols();
  n.positions = w.positions.rows();
  n.outputs = w.predictor.weight.rows();
  n.final_norm = w.norm.weight.size() > 0;
  if (w.layers.empty()) return n;
  const layer_weights<T>& first = w.layers.front();
  n.width = first.attention.out.weight.rows() > 0 ? first.attention.out.weight.rows() : first.linear1.weight.cols();
  n.query_width = first.attention.query.weight.rows();
  n.key_width = first.attention.key.weight.rows();
  n.value_width = first.attention.value.weight.rows();
  n.output_width = first.attention.out.weight.cols();
  n.feed_forward = first.linear1.weight.rows() > 0 ? first.linear1.weight.rows() : first.linear2.weight.cols();
  n.log_decays = first.attention.log_decay.weight.rows();
  n.betas = first.attention.beta.weight.rows();
  n.memory_width = first.cross.key.weight.cols();
  n.norms = first.norm_attention.weight.size() > 0;
  n.biases = first.linear1.bias.size() > 0;
  return n;
}

}  // namespace detail

/// Weights of these sizes, all 0: one allocation a tensor.
template <class T>
transformer_weights<T> make_transformer_weights(const transformer_sizes& n) {
  transformer_weights<T> w;
  w.layers.resize(static_cast<std::size_t>(n.layers));
  detail::visit_tensors(w, n, [](const std::string&, auto& tensor, Eigen::Index rows, Eigen::Index cols) {
    detail::clear_tensor(tensor, rows, cols);
  });
  return w;
}

/// f(name, tensor) for every tensor that is there, matrices (row_matrix) and vectors (row_vector), in the order and
/// with the names of the file: "layers.0.attention.query_projection.weight".
template <class Weights, class F>
void for_each_tensor(Weights& w, const F& f) {
  detail::visit_tensors(w, detail::sizes_of(w), [&](const std::string& name, auto& tensor, Eigen::Index, Eigen::Index) {
    if (tensor.size() > 0) f(name, tensor);
  });
}

LINATTN_NAMESPACE_END
