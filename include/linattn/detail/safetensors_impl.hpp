// Bodies of safetensors.hpp.
#pragma once

#include <linattn/detail/safetensors_header.hpp>
#include <linattn/detail/serialization.hpp>
#include <linattn/safetensors.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <numeric>
#include <ostream>
#include <set>
#include <system_error>
#include <type_traits>
#include <utility>

LINATTN_NAMESPACE_BEGIN
namespace detail {

inline std::vector<std::byte> bytes_of_file(const safetensors_source& source, const std::filesystem::path& path) {
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (error) source.fail("the file cannot be read: ", error.message());
  std::ifstream stream(path, std::ios::binary);
  if (!stream) source.fail("the file cannot be opened");
  std::vector<std::byte> bytes(static_cast<std::size_t>(size));
  stream.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  const auto got = static_cast<std::uintmax_t>(stream.gcount());
  if (got != size) source.fail("of ", std::to_string(size), " bytes only ", std::to_string(got), " can be read");
  return bytes;
}

/// The text of the header, once its length has been found to make sense.
inline std::string_view header_text(const safetensors_source& source, std::string_view bytes) {
  if (bytes.size() < safetensors_length_size) {
    source.fail("the file has ", std::to_string(bytes.size()), " bytes, the length of a header alone takes ",
                std::to_string(safetensors_length_size));
  }
  const auto length = number_at<std::uint64_t>(bytes.data());
  const std::string_view rest = bytes.substr(safetensors_length_size);
  if (length > safetensors_most_header) {
    source.fail("the header would be ", std::to_string(length), " bytes long, more than the ",
                std::to_string(safetensors_most_header), " allowed");
  }
  if (length > rest.size()) {
    source.fail("the header would be ", std::to_string(length), " bytes long, behind its length there are ",
                std::to_string(rest.size()));
  }
  return rest.substr(0, static_cast<std::size_t>(length));
}

// ---- elements -------------------------------------------------------------------------------------------------------

/// A float of two bytes, lowest first.
template <class Half>
Half half_at(const char* bytes) {
  const auto low = static_cast<unsigned char>(bytes[0]);
  const auto high = static_cast<unsigned char>(bytes[1]);
  return std::bit_cast<Half>(static_cast<std::uint16_t>(low | high << 8U));
}

/// The element at `bytes`, as T.
template <class T, class Stored>
T element_at(const char* bytes) {
  if constexpr (sizeof(Stored) == 2) {
    return static_cast<T>(static_cast<float>(half_at<Stored>(bytes)));
  } else {
    return static_cast<T>(number_at<Stored>(bytes));
  }
}

/// f(an element type), for the dtypes that have one here. Returns whether there is.
template <class F>
bool with_element_type(safetensors_dtype dtype, const F& f) {
  switch (dtype) {
    case safetensors_dtype::f16:
      f(std::type_identity<Eigen::half>());
      return true;
    case safetensors_dtype::bf16:
      f(std::type_identity<Eigen::bfloat16>());
      return true;
    case safetensors_dtype::f32:
      f(std::type_identity<float>());
      return true;
    case safetensors_dtype::f64:
      f(std::type_identity<double>());
      return true;
    default:
      return false;
  }
}

template <class T>
void copy_tensor(const safetensors_source& source, const safetensors_tensor& from, const matrix_view<T>& to) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>,
                "linattn: tensors are converted to float or double");
  const auto& shape = from.shape;
  const bool fits = shape.size() == 2 ? shape[0] == to.rows() && shape[1] == to.cols()
                                      : shape.size() < 2 && (to.rows() == 1 || to.cols() == 1) &&
                                            to.rows() * to.cols() == (shape.empty() ? 1 : shape[0]);
  if (!fits) {
    source.fail("tensor ", in_quotes(from.name), " is ", shape_of(shape), ", expected ",
                shape_text{to.rows(), to.cols()});
  }
  const bool converted = with_element_type(from.dtype, [&]<class Stored>(std::type_identity<Stored>) {
    const char* element = reinterpret_cast<const char*>(from.data.data());
    for (Eigen::Index i = 0; i < to.rows(); ++i) {
      for (Eigen::Index j = 0; j < to.cols(); ++j, element += sizeof(Stored)) to(i, j) = element_at<T, Stored>(element);
    }
  });
  if (!converted) {
    source.fail("tensor ", in_quotes(from.name), " holds ", std::string(info_of(from.dtype).name),
                ", expected F16, BF16, F32 or F64");
  }
}

// ---- saving ---------------------------------------------------------------------------------------------------------

constexpr const char* save_safetensors_name = "save_safetensors";

/// Refuses text that a JSON file cannot hold.
inline void require_utf8(const char* what, const std::string& text) {
  using nlohmann::json;
  // What is not UTF-8 is replaced on the way out, so that it does not come back.
  const std::string written = json(text).dump(-1, ' ', false, json::error_handler_t::replace);
  if (json::parse(written, nullptr, false) != json(text)) {
    refuse(save_safetensors_name, what, " ", in_quotes(text), " is not UTF-8");
  }
}

template <class Stored, class T>
void append_elements(std::string& data, const safetensors_entry<T>& entry, const char* storage) {
  for (Eigen::Index i = 0; i < entry.values.rows(); ++i) {
    for (Eigen::Index j = 0; j < entry.values.cols(); ++j) {
      const T x = entry.values(i, j);
      const auto stored = static_cast<Stored>(sizeof(Stored) == 2 ? static_cast<float>(x) : x);
      if (std::isfinite(x) && !std::isfinite(static_cast<T>(stored))) {
        refuse(save_safetensors_name, "tensor ", in_quotes(entry.name), " holds ", static_cast<double>(x),
               ", more than ", storage, " can");
      }
      if constexpr (sizeof(Stored) == 2) {
        const auto bits = std::bit_cast<std::uint16_t>(stored);
        data += static_cast<char>(bits & 0xFFU);
        data += static_cast<char>(bits >> 8U);
      } else {
        append_number(data, stored);
      }
    }
  }
}

/// The whole file.
template <class T>
std::string safetensors_bytes(const std::vector<safetensors_entry<T>>& tensors, const safetensors_metadata& metadata,
                              safetensors_dtype storage) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>, "linattn: float or double can be saved");
  const std::string storage_name(info_of(storage).name);
  if (!with_element_type(storage, [](auto) {})) {
    refuse(save_safetensors_name, "the storage is ", storage_name, ", expected F16, BF16, F32 or F64");
  }
  nlohmann::json header = nlohmann::json::object();
  for (const auto& [key, text] : metadata) {
    require_utf8("the key", key);
    require_utf8("the text", text);
    header[std::string(safetensors_metadata_name)][key] = text;
  }
  std::string data;
  for (const safetensors_entry<T>& entry : tensors) {
    const matrix_view<const T>& values = entry.values;
    const std::vector<Eigen::Index> shape =
        entry.shape.empty() ? std::vector<Eigen::Index>{values.rows(), values.cols()} : entry.shape;
    require_utf8("the name", entry.name);
    if (entry.name == safetensors_metadata_name || header.contains(entry.name)) {
      refuse(save_safetensors_name, "the name ", in_quotes(entry.name), " is taken");
    }
    const auto elements = elements_of(shape);
    if (shape.size() > safetensors_most_dimensions || !elements ||
        *elements != static_cast<std::uint64_t>(values.rows() * values.cols())) {
      refuse(save_safetensors_name, "tensor ", in_quotes(entry.name), " is ", shape_text{values.rows(), values.cols()},
             ", which cannot be saved as ", shape_of(shape));
    }
    const std::size_t begin = data.size();
    with_element_type(storage, [&]<class Stored>(std::type_identity<Stored>) {
      append_elements<Stored>(data, entry, storage_name.c_str());
    });
    header[entry.name] = {{"dtype", storage_name}, {"shape", shape}, {"data_offsets", {begin, data.size()}}};
  }
  std::string text = header.dump();
  constexpr std::size_t alignment = 8;
  text.append((alignment - text.size() % alignment) % alignment, ' ');
  std::string bytes;
  bytes.reserve(safetensors_length_size + text.size() + data.size());
  append_number(bytes, std::uint64_t{text.size()});
  return bytes + text + data;
}

}  // namespace detail

inline safetensors_file safetensors_file::read(const char* function, std::string name, std::vector<std::byte> bytes) {
  const detail::safetensors_source source{function, name};
  safetensors_file file;
  file.m_name = std::move(name);
  file.m_bytes = std::make_shared<const std::vector<std::byte>>(std::move(bytes));
  const std::span<const std::byte> all(*file.m_bytes);
  const std::string_view text =
      detail::header_text(source, std::string_view(reinterpret_cast<const char*>(all.data()), all.size()));
  detail::safetensors_header header(source, text);
  file.m_tensors = header.tensors(all.subspan(detail::safetensors_length_size + text.size()));
  file.m_metadata = std::move(header.metadata());

  file.m_by_name.resize(file.m_tensors.size());
  std::iota(file.m_by_name.begin(), file.m_by_name.end(), std::size_t{0});
  const auto name_of = [&](std::size_t i) -> const std::string& { return file.m_tensors[i].name; };
  std::sort(file.m_by_name.begin(), file.m_by_name.end(),
            [&](std::size_t a, std::size_t b) { return name_of(a) < name_of(b); });
  const auto twice = std::adjacent_find(file.m_by_name.begin(), file.m_by_name.end(),
                                        [&](std::size_t a, std::size_t b) { return name_of(a) == name_of(b); });
  if (twice != file.m_by_name.end())
    source.fail("the header has tensor ", detail::in_quotes(name_of(*twice)), " twice");
  return file;
}

inline safetensors_file safetensors_file::open(const std::filesystem::path& path) {
  constexpr const char* function = "safetensors_file::open";
  return read(function, path.string(), detail::bytes_of_file({function, path.string()}, path));
}

inline safetensors_file safetensors_file::parse(std::vector<std::byte> bytes, std::string name) {
  return read("safetensors_file::parse", std::move(name), std::move(bytes));
}

inline std::vector<std::string> safetensors_file::names() const {
  std::vector<std::string> names;
  names.reserve(m_tensors.size());
  for (const safetensors_tensor& tensor : m_tensors) names.push_back(tensor.name);
  return names;
}

inline const safetensors_tensor* safetensors_file::tensor(std::string_view name) const noexcept {
  const auto found = std::lower_bound(m_by_name.begin(), m_by_name.end(), name,
                                      [&](std::size_t i, std::string_view n) { return m_tensors[i].name < n; });
  return found == m_by_name.end() || m_tensors[*found].name != name ? nullptr : &m_tensors[*found];
}

template <class Out>
void safetensors_file::copy(const safetensors_tensor& from, Out&& to) const {
  using T = typename std::remove_cvref_t<Out>::value_type;
  detail::copy_tensor<T>({"safetensors_file::copy", m_name}, from, matrix_view<T>(std::forward<Out>(to)));
}

template <class Out>
void safetensors_file::copy(std::string_view name, Out&& to) const {
  const safetensors_tensor* const from = tensor(name);
  if (from == nullptr) {
    detail::safetensors_source{"safetensors_file::copy", m_name}.fail(
        "there is no tensor ", detail::in_quotes(name), " among its ", static_cast<Eigen::Index>(m_tensors.size()));
  }
  copy(*from, std::forward<Out>(to));
}

template <class T>
void save_safetensors(std::ostream& to, const std::vector<safetensors_entry<T>>& tensors,
                      const safetensors_metadata& metadata, safetensors_dtype storage) {
  const std::string bytes = detail::safetensors_bytes(tensors, metadata, storage);
  to.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!to.flush()) {
    detail::refuse(detail::save_safetensors_name, "the stream does not take the ",
                   static_cast<Eigen::Index>(bytes.size()), " bytes");
  }
}

template <class T>
void save_safetensors(const std::filesystem::path& to, const std::vector<safetensors_entry<T>>& tensors,
                      const safetensors_metadata& metadata, safetensors_dtype storage) {
  const std::string bytes = detail::safetensors_bytes(tensors, metadata, storage);
  std::ofstream stream(to, std::ios::binary);
  stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!stream.flush()) {
    detail::refuse(detail::save_safetensors_name, detail::in_quotes(to.string()), " does not take the ",
                   static_cast<Eigen::Index>(bytes.size()), " bytes");
  }
}

LINATTN_NAMESPACE_END
