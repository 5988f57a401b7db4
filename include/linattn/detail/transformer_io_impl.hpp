// The bodies of transformer_io.hpp.
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/transformer_io.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// The tensors of a file by the names of for_each_tensor.
class named_tensors {
 public:
  named_tensors(const safetensors_file& file, const tensor_names& names) : m_file(file), m_names(names) {}

  std::string name(const std::string& ours) const { return m_names ? m_names(ours) : ours; }
  const safetensors_tensor* find(const std::string& ours) const { return m_file.tensor(name(ours)); }
  /// Size number `dim` of a tensor; 0 where there is none.
  Eigen::Index size(const std::string& ours, std::size_t dim) const {
    const safetensors_tensor* const t = find(ours);
    return t != nullptr && dim < t->shape.size() ? t->shape[dim] : 0;
  }

  transformer_sizes sizes() const {
    const std::string layer = "layers.0.";
    const bool is_decoder = find(layer + "self_attention.query_projection.weight") != nullptr;
    const std::string attention = is_decoder ? ".self_attention." : ".attention.";
    transformer_sizes n;
    while (find("layers." + std::to_string(n.layers) + attention + "query_projection.weight") != nullptr) ++n.layers;
    const std::string of = "layers.0" + attention;
    n.width = size(of + "query_projection.weight", 1);
    n.query_width = size(of + "query_projection.weight", 0);
    n.key_width = size(of + "key_projection.weight", 0);
    n.value_width = size(of + "value_projection.weight", 0);
    n.output_width = size(of + "out_projection.weight", 1);
    n.log_decays = size(of + "log_decay_projection.weight", 0);
    n.betas = size(of + "beta_projection.weight", 0);
    n.feed_forward = size(layer + "linear1.weight", 0);
    n.symbols = size("embedding.weight", 0);
    n.embedding = size("embedding.weight", 1);
    n.positions = size("positions.weight", 0);
    n.outputs = size("predictor.weight", 0);
    n.memory_width = is_decoder ? size(layer + "cross_attention.key_projection.weight", 1) : 0;
    n.norms = find(layer + "norm1.weight") != nullptr;
    n.final_norm = find("norm.weight") != nullptr;
    n.biases = find(layer + "linear1.bias") != nullptr;
    return n;
  }

 private:
  const safetensors_file& m_file;
  const tensor_names& m_names;
};

inline bool is_floating(safetensors_dtype type) {
  using enum safetensors_dtype;
  return type == f16 || type == bf16 || type == f32 || type == f64;
}

/// The words of metadata, in the order of the enumerators.
inline constexpr std::array<std::string_view, 3> wiring_words{"paper", "post_norm", "pre_norm"};
inline constexpr std::array<std::string_view, 2> activation_words{"relu", "gelu"};
inline constexpr std::array<std::string_view, 4> position_words{"none", "sinusoid_added", "sinusoid_concatenated",
                                                                "learned"};

/// For messages: as much of a text as a reader wants to see.
inline std::string quoted(const std::string& text) {
  constexpr std::size_t most = 100;
  return "'" + text.substr(0, most) + (text.size() > most ? "...'" : "'");
}

inline const std::string& metadata_text(const safetensors_metadata& metadata, std::string_view key) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) refuse("load_transformer", "the metadata have no '", std::string(key), "'");
  return found->second;
}

template <class Enum, std::size_t N>
Enum metadata_word(const safetensors_metadata& metadata, std::string_view key,
                   const std::array<std::string_view, N>& words) {
  const std::string& text = metadata_text(metadata, key);
  const auto found = std::find(words.begin(), words.end(), text);
  if (found == words.end()) {
    std::string all;
    for (const std::string_view word : words) all += " " + std::string(word);
    refuse("load_transformer", "the metadata say ", std::string(key), " = ", quoted(text), ", which is none of", all);
  }
  return static_cast<Enum>(found - words.begin());
}

inline Eigen::Index metadata_number(const safetensors_metadata& metadata, std::string_view key) {
  const std::string& text = metadata_text(metadata, key);
  Eigen::Index number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 1) {
    refuse("load_transformer", "the metadata say ", std::string(key), " = ", quoted(text),
           ", which is no number from 1 on");
  }
  return number;
}

/// A number above 0, as JSON has them: the same in every locale.
inline double metadata_positive(const safetensors_metadata& metadata, std::string_view key) {
  const std::string& text = metadata_text(metadata, key);
  const nlohmann::json number = nlohmann::json::parse(text, nullptr, false);
  if (!number.is_number() || !(number.get<double>() > 0)) {
    refuse("load_transformer", "the metadata say ", std::string(key), " = ", quoted(text),
           ", which is no number above 0");
  }
  return number.get<double>();
}

inline Eigen::Index value_heads_of(const linattn::options& o) {
  return o.value_heads > 0 ? o.value_heads : o.key_heads > 0 ? o.key_heads : o.heads;
}

/// As many numbers <= 0 as there are heads.
inline std::vector<double> metadata_decays(const safetensors_metadata& metadata, std::string_view key,
                                           Eigen::Index heads) {
  const std::string& text = metadata_text(metadata, key);
  const nlohmann::json list = nlohmann::json::parse(text, nullptr, false);
  const auto decays = [](const nlohmann::json& x) { return x.is_number() && x.get<double>() <= 0; };
  if (!list.is_array() || Eigen::Index(list.size()) != heads || !std::all_of(list.begin(), list.end(), decays)) {
    refuse("load_transformer", "the metadata say ", std::string(key), " = ", quoted(text), ", which is no array of ",
           heads, " numbers <= 0, one for each value head");
  }
  return list.get<std::vector<double>>();
}

}  // namespace detail

template <class T>
transformer_weights<T> load_transformer_weights(const safetensors_file& file, const tensor_names& names) {
  constexpr const char* function = "load_transformer_weights";
  const detail::named_tensors tensors(file, names);
  const transformer_sizes sizes = tensors.sizes();
  if (sizes.layers == 0) {
    detail::refuse(function, "there is no layer: no tensor '",
                   tensors.name("layers.0.attention.query_projection.weight"), "'");
  }
  // Compared before anything is allocated: the sizes are the file's word.
  transformer_weights<T> w;
  w.layers.resize(static_cast<std::size_t>(sizes.layers));
  std::string faults;
  std::set<std::string, std::less<>> used;
  detail::visit_tensors(w, sizes, [&](const std::string& ours, auto& tensor, Eigen::Index rows, Eigen::Index cols) {
    if (rows == 0) return;
    constexpr bool is_vector = std::remove_reference_t<decltype(tensor)>::IsVectorAtCompileTime;
    const std::string name = tensors.name(ours);
    const safetensors_tensor* const found = file.tensor(name);
    used.insert(name);
    const std::vector<Eigen::Index> shape = is_vector ? std::vector{cols} : std::vector{rows, cols};
    if (found == nullptr) {
      faults += "\n  missing: " + name;
    } else if (found->shape != shape) {
      faults += "\n  misshapen: " + name + " is " + detail::shape_of(found->shape) + ", but should be " +
                detail::shape_of(shape);
    } else if (!detail::is_floating(found->dtype)) {
      faults += "\n  no floating-point numbers: " + name;
    }
  });
  for (const safetensors_tensor& tensor : file.tensors()) {
    if (!used.contains(tensor.name)) faults += "\n  superfluous: " + tensor.name;
  }
  if (!faults.empty()) detail::refuse(function, "the tensors are not those of a transformer:", faults);

  detail::visit_tensors(w, sizes, [&](const std::string& ours, auto& tensor, Eigen::Index rows, Eigen::Index cols) {
    detail::clear_tensor(tensor, rows, cols);
    if (rows > 0) file.copy(tensors.name(ours), tensor);
  });
  return w;
}

template <class T>
loaded_transformer<T> load_transformer(const safetensors_file& file, const tensor_names& names) {
  loaded_transformer<T> model;
  model.metadata = file.metadata();
  const safetensors_metadata& of = model.metadata;
  model.options.wiring = detail::metadata_word<wiring>(of, "wiring", detail::wiring_words);
  model.options.activation = detail::metadata_word<activation>(of, "activation", detail::activation_words);
  if (of.contains("positions")) {
    model.options.positions = detail::metadata_word<position_encoding>(of, "positions", detail::position_words);
  }
  if (of.contains("input_width")) model.options.input_width = detail::metadata_number(of, "input_width");
  model.attention.heads = detail::metadata_number(of, "heads");
  model.attention.head_dim = detail::metadata_number(of, "head_dim");
  if (of.contains("key_heads")) model.attention.key_heads = detail::metadata_number(of, "key_heads");
  if (of.contains("value_heads")) model.attention.value_heads = detail::metadata_number(of, "value_heads");
  if (of.contains("norm_epsilon")) model.options.norm_epsilon = detail::metadata_positive(of, "norm_epsilon");
  if (of.contains("attention")) model.attention_name = detail::metadata_text(of, "attention");
  model.weights = load_transformer_weights<T>(file, names);
  const transformer_sizes sizes = detail::sizes_of(model.weights);
  linattn::options& attention = model.attention;
  if (sizes.query_width % attention.heads != 0 || sizes.query_width / attention.heads != attention.head_dim) {
    detail::refuse("load_transformer", "the metadata say heads = ", attention.heads,
                   " and head_dim = ", attention.head_dim, ", but the first query projection has ", sizes.query_width,
                   " rows");
  }
  const Eigen::Index value_heads = detail::value_heads_of(attention);
  if (sizes.value_width % value_heads == 0) attention.value_dim = sizes.value_width / value_heads;
  if (of.contains("log_decay")) model.log_decay = detail::metadata_decays(of, "log_decay", value_heads);
  return model;
}

template <class T>
void save_transformer(const std::filesystem::path& path, const loaded_transformer<T>& model,
                      safetensors_dtype storage) {
  const Eigen::Index heads = detail::value_heads_of(model.attention);
  if (const auto decays = Eigen::Index(model.log_decay.size()); decays != 0 && decays != heads) {
    detail::refuse("save_transformer", "log_decay has ", decays, " numbers, expected one for each of ", heads,
                   " value heads, or none");
  }
  for (const double x : model.log_decay) {
    if (!(x <= 0 && std::isfinite(x))) {
      detail::refuse("save_transformer", "log_decay has ", x, ", expected finite numbers <= 0, which JSON can hold");
    }
  }
  std::vector<safetensors_entry<T>> entries;
  for_each_tensor(model.weights, [&](const std::string& name, const auto& tensor) {
    std::vector<Eigen::Index> shape;
    if (tensor.IsVectorAtCompileTime) shape = {tensor.size()};
    entries.push_back({name, tensor, shape});
  });
  safetensors_metadata metadata = model.metadata;
  const auto word = [](const auto& words, auto value) { return std::string(words[static_cast<std::size_t>(value)]); };
  metadata["wiring"] = word(detail::wiring_words, model.options.wiring);
  metadata["activation"] = word(detail::activation_words, model.options.activation);
  metadata["positions"] = word(detail::position_words, model.options.positions);
  const auto number_if = [&](bool is_given, const char* key, const auto& value) {
    metadata.erase(key);
    if (is_given) metadata[key] = nlohmann::json(value).dump();
  };
  number_if(model.options.input_width > 0, "input_width", model.options.input_width);
  number_if(model.options.norm_epsilon != transformer_options().norm_epsilon, "norm_epsilon",
            model.options.norm_epsilon);
  number_if(model.attention.key_heads > 0, "key_heads", model.attention.key_heads);
  number_if(model.attention.value_heads > 0, "value_heads", model.attention.value_heads);
  number_if(!model.log_decay.empty(), "log_decay", model.log_decay);
  metadata["heads"] = std::to_string(model.attention.heads);
  metadata["head_dim"] = std::to_string(model.attention.head_dim);
  metadata["attention"] = model.attention_name;
  save_safetensors<T>(path, entries, metadata, storage);
}

LINATTN_NAMESPACE_END
