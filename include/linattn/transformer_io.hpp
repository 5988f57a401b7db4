// A transformer's weights from safetensors files and back. Needs <nlohmann/json.hpp>, as safetensors.hpp does.
//
//   const auto file = linattn::load_transformer<float>(linattn::safetensors_file::open("model.safetensors"));
//   const linattn::transformer model(file.options, file.weights,
//                                    linattn::linear_attention<linattn::elu_plus_one>(file.attention));
#pragma once

#include <linattn/safetensors.hpp>
#include <linattn/transformer.hpp>

#include <functional>
#include <string>
#include <vector>

LINATTN_NAMESPACE_BEGIN

/// From a tensor's name in for_each_tensor to its name in a file; empty: the same.
using tensor_names = std::function<std::string(const std::string&)>;

/// What a file tells of a model.
template <class T>
struct loaded_transformer {
  transformer_options options;
  transformer_weights<T> weights;
  linattn::options attention;     ///< sizes and numbers of heads; the rest of it stays what `options` have by default
  std::string attention_name;     ///< "elu_plus_one", "softmax", ...: which operator the weights were trained with
  std::vector<double> log_decay;  ///< those of the operator's rule, one for each value head; empty where it has none
  safetensors_metadata metadata;  ///< all of it
};

/// The weights alone, their sizes read off the tensors: layers as long as there are some of the next number, F and the
/// others from the first layer, and norms, biases, embedding, positions and predictor where there are tensors of them.
///
/// Names are those of state dicts of fast-transformers' TransformerEncoderBuilder and TransformerDecoderBuilder,
/// "layers.0.attention.query_projection.weight", and around them "embedding.weight", "positions.weight",
/// "predictor.weight" and "predictor.bias"; `names` gives others.
///
/// Throws std::invalid_argument with every tensor that is missing, has another shape, holds what is no number of 16, 32
/// or 64 bits of floating point, or belongs to no part of the model, in one message. Costs the file's size once more.
template <class T>
transformer_weights<T> load_transformer_weights(const safetensors_file& file, const tensor_names& names = {});

/// Weights, and what the file's metadata say of the model:
///
/// | key | values | |
/// |---|---|---|
/// | wiring | paper, post_norm, pre_norm | required |
/// | activation | relu, gelu | required |
/// | positions | none, sinusoid_added, sinusoid_concatenated, learned | none where it is missing |
/// | heads, head_dim | numbers from 1 on | required; their product is the rows of the first query projection |
/// | key_heads, value_heads | numbers from 1 on | of shared heads (options.hpp); not given where they are missing |
/// | input_width | a number from 1 on | E of vector inputs; F where it is missing |
/// | norm_epsilon | a number above 0 | 1e-5 where it is missing |
/// | attention | a name | as the file has it; "" where it is missing |
/// | log_decay | a JSON array of numbers <= 0, one for each value head | none where it is missing |
///
/// Throws for other values, and as above.
template <class T>
loaded_transformer<T> load_transformer(const safetensors_file& file, const tensor_names& names = {});

/// Writes what load_transformer reads, elements as `storage`: the weights, what is in the table above, which stands in
/// `options`, `attention`, `attention_name` and `log_decay`, and the other keys of `metadata`. How heads are shared,
/// query_scale, normalize and denominator are not written: who makes the operator has to know them. Throws as
/// save_safetensors does, and for a log_decay that load_transformer would refuse.
template <class T>
void save_transformer(const std::filesystem::path& path, const loaded_transformer<T>& model,
                      safetensors_dtype storage = safetensors_dtype::f32);

LINATTN_NAMESPACE_END

#include <linattn/detail/transformer_io_impl.hpp>  // IWYU pragma: keep
