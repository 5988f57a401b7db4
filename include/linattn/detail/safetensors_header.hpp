// The header of a safetensors file: read event by event, so that nothing that does not belong there is ever stored, and
// nothing nests.
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/safetensors_tensor.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

LINATTN_NAMESPACE_BEGIN
namespace detail {

constexpr std::size_t safetensors_length_size = 8;
constexpr std::size_t safetensors_most_header = 100'000'000;
constexpr std::size_t safetensors_most_dimensions = 64;
constexpr std::string_view safetensors_metadata_name = "__metadata__";

struct safetensors_dtype_info {
  std::string_view name;
  safetensors_dtype dtype;
  std::uint64_t bits;
};

inline constexpr std::array<safetensors_dtype_info, 20> safetensors_dtypes = {{
    {"BOOL", safetensors_dtype::boolean, 8},    {"U8", safetensors_dtype::u8, 8},
    {"I8", safetensors_dtype::i8, 8},           {"U16", safetensors_dtype::u16, 16},
    {"I16", safetensors_dtype::i16, 16},        {"U32", safetensors_dtype::u32, 32},
    {"I32", safetensors_dtype::i32, 32},        {"U64", safetensors_dtype::u64, 64},
    {"I64", safetensors_dtype::i64, 64},        {"F16", safetensors_dtype::f16, 16},
    {"BF16", safetensors_dtype::bf16, 16},      {"F32", safetensors_dtype::f32, 32},
    {"F64", safetensors_dtype::f64, 64},        {"C64", safetensors_dtype::c64, 64},
    {"F8_E4M3", safetensors_dtype::f8_e4m3, 8}, {"F8_E5M2", safetensors_dtype::f8_e5m2, 8},
    {"F8_E8M0", safetensors_dtype::f8_e8m0, 8}, {"F6_E2M3", safetensors_dtype::f6_e2m3, 6},
    {"F6_E3M2", safetensors_dtype::f6_e3m2, 6}, {"F4", safetensors_dtype::f4, 4},
}};

inline const safetensors_dtype_info& info_of(safetensors_dtype dtype) {
  return *std::find_if(safetensors_dtypes.begin(), safetensors_dtypes.end(),
                       [&](const auto& info) { return info.dtype == dtype; });
}

/// A name for a sentence: in quotes, without control characters, and not without end.
inline std::string in_quotes(std::string_view name) {
  constexpr std::size_t most = 100;
  std::string text = "'";
  for (const char c : name.substr(0, most)) {
    const auto byte = static_cast<unsigned char>(c);
    text += byte < 0x20 || byte == 0x7F ? '?' : c;
  }
  return text + (name.size() > most ? "...'" : "'");
}

inline std::string shape_of(const std::vector<Eigen::Index>& shape) {
  std::string text;
  for (const Eigen::Index n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "(" + text + ")";
}

/// Elements of a shape; nothing where that is no Eigen::Index. Sizes of 0 do not excuse others.
inline std::optional<std::uint64_t> elements_of(const std::vector<Eigen::Index>& shape) {
  constexpr std::uint64_t most = std::numeric_limits<Eigen::Index>::max();
  std::uint64_t product = 1;
  bool empty = false;
  for (const Eigen::Index n : shape) {
    if (n < 0) return {};
    empty = empty || n == 0;
    if (n == 0) continue;
    if (product > most / static_cast<std::uint64_t>(n)) return {};
    product *= static_cast<std::uint64_t>(n);
  }
  return empty ? 0 : product;
}

/// Who speaks in a sentence, and of which file.
struct safetensors_source {
  const char* function;
  std::string name;

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    detail::refuse(function, name.empty() ? name : in_quotes(name) + ": ", parts...);
  }
};

/// Takes the events of the JSON parser and keeps metadata and tensors; refuses, where it happens, whatever has no
/// place.
class safetensors_header {
 public:
  safetensors_header(const safetensors_source& source, std::string_view text) : m_source(source), m_text(text) {
    if (text.empty() || text.front() != '{') fail("does not begin with {");
    // The parser takes a zero for the end of its input, and leaves what is behind it unread.
    if (text.find('\0') != std::string_view::npos) fail("has a byte of 0, which JSON has not");
    nlohmann::json::sax_parse(text.begin(), text.end(), this);
  }

  safetensors_metadata& metadata() { return m_metadata; }

  /// Once, at the end: the tensors in the order of their data, all of which is theirs.
  std::vector<safetensors_tensor> tensors(std::span<const std::byte> data) {
    for (const entry& e : m_entries) require_extent(e, data.size());
    std::stable_sort(m_entries.begin(), m_entries.end(), [](const entry& a, const entry& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    std::uint64_t end = 0;
    const entry* before = nullptr;
    for (const entry& e : m_entries) {
      if (e.begin < end) {
        m_source.fail("tensors ", in_quotes(before->tensor.name), " and ", in_quotes(e.tensor.name),
                      " overlap: their data_offsets are ", extent(*before), " and ", extent(e));
      }
      require_no_hole(end, e.begin, data.size());
      end = e.end;
      before = &e;
    }
    require_no_hole(end, data.size(), data.size());
    std::vector<safetensors_tensor> tensors;
    tensors.reserve(m_entries.size());
    for (entry& e : m_entries) {
      e.tensor.data = data.subspan(static_cast<std::size_t>(e.begin), static_cast<std::size_t>(e.end - e.begin));
      tensors.push_back(std::move(e.tensor));
    }
    return tensors;
  }

  // ---- what the parser calls; a false would end it, but none is ever returned ---------------------------------------

  bool null() { unexpected("null"); }
  bool boolean(bool) { unexpected("a boolean"); }
  bool number_integer(std::int64_t) { unexpected("a number with a sign"); }
  bool number_float(double, const std::string&) { unexpected("a number that is a fraction or too large"); }
  bool binary(std::vector<std::uint8_t>&) { unexpected("binary data"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) {
    fail("is not JSON: the error is at byte ", std::to_string(std::min(position, m_text.size())), " of ",
         std::to_string(m_text.size()));
  }

  bool number_unsigned(std::uint64_t n) {
    if (m_place == place::shape) {
      if (n > std::uint64_t{std::numeric_limits<Eigen::Index>::max()}) {
        fail_tensor("shape holds ", std::to_string(n), ", more than any size");
      }
      std::vector<Eigen::Index>& shape = m_entries.back().tensor.shape;
      if (shape.size() == safetensors_most_dimensions) {
        fail_tensor("shape has more than ", Eigen::Index{safetensors_most_dimensions}, " dimensions");
      }
      shape.push_back(static_cast<Eigen::Index>(n));
    } else if (m_place == place::offsets) {
      if (m_offsets == 2) fail_tensor("data_offsets has more than 2 numbers");
      (m_offsets == 0 ? m_entries.back().begin : m_entries.back().end) = n;
      ++m_offsets;
    } else {
      unexpected("a number");
    }
    return true;
  }

  bool string(std::string& text) {
    if (m_place == place::metadata) {
      m_metadata[m_key] = std::move(text);
    } else if (m_place == place::tensor && m_key == "dtype") {
      const auto* const info = std::find_if(safetensors_dtypes.begin(), safetensors_dtypes.end(),
                                            [&](const auto& known) { return known.name == text; });
      if (info == safetensors_dtypes.end()) fail_tensor("dtype ", in_quotes(text), " is not known");
      m_entries.back().tensor.dtype = info->dtype;
    } else {
      unexpected("a string");
    }
    return true;
  }

  bool start_object(std::size_t) {
    if (m_place == place::outside) {
      m_place = place::file;
    } else if (m_place == place::file && m_key == safetensors_metadata_name) {
      m_place = place::metadata;
    } else if (m_place == place::file) {
      m_place = place::tensor;
      m_entries.emplace_back().tensor.name = m_key;
      m_seen = {};
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool end_object() {
    if (m_place == place::tensor) {
      for (std::size_t i = 0; i < fields.size(); ++i) {
        if (!m_seen[i]) fail_tensor("there is no ", std::string(fields[i]));
      }
    }
    m_place = m_place == place::file ? place::outside : place::file;
    return true;
  }

  bool start_array(std::size_t) {
    if (m_place == place::tensor && m_key == "shape") {
      m_place = place::shape;
    } else if (m_place == place::tensor && m_key == "data_offsets") {
      m_place = place::offsets;
      m_offsets = 0;
    } else {
      unexpected("an array");
    }
    return true;
  }

  bool end_array() {
    if (m_place == place::offsets && m_offsets != 2)
      fail_tensor("data_offsets has ", m_offsets, " numbers, expected 2");
    m_place = place::tensor;
    return true;
  }

  bool key(std::string& name) {
    m_key = std::move(name);
    if (m_place == place::file && m_key == safetensors_metadata_name) {
      if (m_has_metadata) fail("has ", m_key, " twice");
      m_has_metadata = true;
    } else if (m_place == place::metadata && m_metadata.contains(m_key)) {
      fail("has the metadata ", in_quotes(m_key), " twice");
    } else if (m_place == place::tensor) {
      const auto field = static_cast<std::size_t>(std::find(fields.begin(), fields.end(), m_key) - fields.begin());
      if (field == fields.size()) {
        fail_tensor("there is ", in_quotes(m_key), ", expected dtype, shape and data_offsets only");
      }
      if (m_seen[field]) fail_tensor(m_key, " is there twice");
      m_seen[field] = true;
    }
    return true;
  }

 private:
  enum class place { outside, file, metadata, tensor, shape, offsets };
  struct entry {
    safetensors_tensor tensor;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };
  static constexpr std::array<std::string_view, 3> fields = {"dtype", "shape", "data_offsets"};

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    m_source.fail("the header ", parts...);
  }
  template <class... Parts>
  [[noreturn]] void fail_tensor(const Parts&... parts) const {
    m_source.fail("tensor ", in_quotes(m_entries.back().tensor.name), ": ", parts...);
  }
  [[noreturn]] void unexpected(const char* what) const {
    switch (m_place) {
      case place::outside:
        fail("is ", what, ", expected an object");
      case place::file:
        m_source.fail("tensor ", in_quotes(m_key), " is ", what, ", expected an object");
      case place::metadata:
        fail("has ", what, " as the metadata ", in_quotes(m_key), ", expected a string");
      case place::tensor:
        fail_tensor(m_key, " is ", what, ", expected ", m_key == "dtype" ? "a string" : "an array");
      default:
        fail_tensor(m_key, " holds ", what, ", expected whole numbers from 0 on");
    }
  }

  static std::string extent(const entry& e) {
    return "[" + std::to_string(e.begin) + ", " + std::to_string(e.end) + "]";
  }

  void require_extent(const entry& e, std::size_t data_size) const {
    const auto fail_entry = [&](const auto&... parts) {
      m_source.fail("tensor ", in_quotes(e.tensor.name), ": ", parts...);
    };
    if (e.begin > e.end) fail_entry("data_offsets ", extent(e), " fall");
    if (e.end > data_size) {
      fail_entry("data_offsets ", extent(e), " leave the data, which are ", std::to_string(data_size), " bytes");
    }
    const safetensors_dtype_info& info = info_of(e.tensor.dtype);
    const std::optional<std::uint64_t> elements = elements_of(e.tensor.shape);
    if (!elements || *elements > std::numeric_limits<Eigen::Index>::max() / info.bits) {
      fail_entry("shape ", shape_of(e.tensor.shape), " has more elements than any memory");
    }
    if (*elements * info.bits != (e.end - e.begin) * 8) {
      fail_entry(std::string(info.name), " of shape ", shape_of(e.tensor.shape), " takes ",
                 std::to_string(*elements * info.bits), " bits, between data_offsets ", extent(e), " there are ",
                 std::to_string((e.end - e.begin) * 8));
    }
  }

  void require_no_hole(std::uint64_t end, std::uint64_t begin, std::size_t data_size) const {
    if (begin == end) return;
    m_source.fail("bytes ", std::to_string(end), " to ", std::to_string(begin), " of the data, which are ",
                  std::to_string(data_size), ", belong to no tensor");
  }

  const safetensors_source& m_source;
  std::string_view m_text;
  safetensors_metadata m_metadata;
  std::vector<entry> m_entries;
  place m_place = place::outside;
  std::string m_key;
  bool m_has_metadata = false;
  std::array<bool, fields.size()> m_seen{};
  Eigen::Index m_offsets = 0;
};

}  // namespace detail
LINATTN_NAMESPACE_END
