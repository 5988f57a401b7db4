// Reads the cases under tests/data: numbers that independent implementations gave for fixed inputs.
//
// A case is a folder. `manifest.txt` has a line per array, `name dtype dim0 dim1 ... file`: raw little-endian f32 or
// f64 in C order, packed as [batch, position, head, dim]. `case.txt` has `key=value` lines: source, licence, formula.
#pragma once

#include <Eigen/Core>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace support {

struct reference_array {
  std::vector<Eigen::Index> shape;
  std::vector<double> values;  ///< f32 values are exact in double
};

class reference_case {
 public:
  /// Reads all of a folder; throws std::runtime_error with the file's name for anything missing or of the wrong size.
  explicit reference_case(const std::string& folder) : m_folder(folder) {
    std::ifstream manifest(folder + "/manifest.txt");
    if (!manifest) fail("manifest.txt", "cannot be read");
    for (std::string line; std::getline(manifest, line);) {
      if (line.find_first_not_of(" \t\r") != std::string::npos) read_array(line);
    }
    if (m_arrays.empty()) fail("manifest.txt", "names no array");
    std::ifstream text(folder + "/case.txt");
    if (!text) fail("case.txt", "cannot be read");
    for (std::string line; std::getline(text, line);) {
      const std::size_t equals = line.find('=');
      if (equals != std::string::npos) m_facts[line.substr(0, equals)] = line.substr(equals + 1);
    }
  }

#ifdef LINATTN_TEST_DATA_DIR
  /// A case of tests/data by its name.
  static reference_case load(const std::string& name) { return reference_case(LINATTN_TEST_DATA_DIR "/" + name); }
#endif

  bool has(const std::string& name) const { return m_arrays.count(name) != 0; }

  const reference_array& array(const std::string& name) const {
    const auto found = m_arrays.find(name);
    if (found == m_arrays.end()) fail("manifest.txt", "has no array '" + name + "'");
    return found->second;
  }

  /// What a line of case.txt has after `key=`.
  const std::string& text(const std::string& key) const {
    const auto found = m_facts.find(key);
    if (found == m_facts.end()) fail("case.txt", "has no line '" + key + "='");
    return found->second;
  }

  /// The number that a line of case.txt begins with after `key=`.
  double number(const std::string& key) const {
    const std::string& line = text(key);
    char* end = nullptr;
    const double value = std::strtod(line.c_str(), &end);
    if (end == line.c_str()) fail("case.txt", "'" + key + "=' is not followed by a number");
    return value;
  }

  /// Batch element b of an array [B, N, ...], the rest packed: (N, H D) for [B, N, H, D], (N, H) for [B, N, H].
  template <class T>
  Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> packed(const std::string& name,
                                                                           Eigen::Index b) const {
    const reference_array& a = array(name);
    if (a.shape.size() != 3 && a.shape.size() != 4) {
      fail("manifest.txt", "array '" + name + "' is not [batch, position, columns] or [batch, position, head, dim]");
    }
    return slice<T>(name, b, a.shape[0], a.shape[1], a.shape[2] * (a.shape.size() == 4 ? a.shape[3] : 1));
  }

  /// An array without positions as one row, (1, count).
  template <class T>
  Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> row(const std::string& name) const {
    return slice<T>(name, 0, 1, 1, static_cast<Eigen::Index>(array(name).values.size()));
  }

  /// Batch element b of a [B, N, H, D] array as the packed matrix (N, H D).
  template <class T>
  Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> tokens(const std::string& name,
                                                                           Eigen::Index b) const {
    const reference_array& a = array(name);
    if (a.shape.size() != 4) fail("manifest.txt", "array '" + name + "' is not [batch, position, head, dim]");
    return slice<T>(name, b, a.shape[0], a.shape[1], a.shape[2] * a.shape[3]);
  }

  /// Entry (b, h) of a [B, H, C, M] array as a matrix (C, M), of a [B, H, C] array as a row (1, C).
  template <class T>
  Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> head(const std::string& name, Eigen::Index b,
                                                                         Eigen::Index h) const {
    const reference_array& a = array(name);
    if (a.shape.size() != 3 && a.shape.size() != 4) {
      fail("manifest.txt", "array '" + name + "' is not [batch, head, rows, columns] or [batch, head, columns]");
    }
    const bool matrix = a.shape.size() == 4;
    if (h < 0 || h >= a.shape[1]) fail("manifest.txt", "array '" + name + "' has no head " + std::to_string(h));
    return slice<T>(name, b * a.shape[1] + h, a.shape[0] * a.shape[1], matrix ? a.shape[2] : 1, a.shape.back());
  }

 private:
  [[noreturn]] void fail(const std::string& file, const std::string& what) const {
    throw std::runtime_error(m_folder + "/" + file + " " + what);
  }

  void read_array(const std::string& line) {
    std::istringstream fields(line);
    const std::vector<std::string> words(std::istream_iterator<std::string>(fields), {});
    if (words.size() < 4) fail("manifest.txt", "has a line that is not 'name dtype dim0 ... file': " + line);
    const bool single = words[1] == "f32";
    if (!single && words[1] != "f64") fail("manifest.txt", "has the dtype '" + words[1] + "', not f32 or f64");
    reference_array a;
    std::size_t count = 1;
    for (std::size_t i = 2; i + 1 < words.size(); ++i) {
      char* end = nullptr;
      const long long size = std::strtoll(words[i].c_str(), &end, 10);
      if (*end != '\0' || size < 0) fail("manifest.txt", "has the dimension '" + words[i] + "', not a number");
      a.shape.push_back(static_cast<Eigen::Index>(size));
      count *= static_cast<std::size_t>(size);
    }
    std::ifstream file(m_folder + "/" + words.back(), std::ios::binary);
    if (!file) fail(words.back(), "cannot be read");
    const std::string bytes(std::istreambuf_iterator<char>(file), {});
    const std::size_t width = single ? 4 : 8;
    if (bytes.size() != count * width) {
      fail(words.back(),
           "holds " + std::to_string(bytes.size()) + " bytes, its manifest says " + std::to_string(count * width));
    }
    a.values.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      std::uint64_t bits = 0;
      for (std::size_t b = width; b-- > 0;) bits = bits << 8 | static_cast<unsigned char>(bytes[i * width + b]);
      a.values.push_back(single ? static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits)))
                                : std::bit_cast<double>(bits));
    }
    m_arrays[words[0]] = a;
  }

  template <class T>
  Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> slice(const std::string& name, Eigen::Index index,
                                                                          Eigen::Index count, Eigen::Index rows,
                                                                          Eigen::Index cols) const {
    if (index < 0 || index >= count) fail("manifest.txt", "array '" + name + "' does not reach that far");
    Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> out(rows, cols);
    const double* from = array(name).values.data() + index * rows * cols;
    for (Eigen::Index i = 0; i < rows * cols; ++i) out.data()[i] = static_cast<T>(from[i]);
    return out;
  }

  std::string m_folder;
  std::map<std::string, reference_array> m_arrays;
  std::map<std::string, std::string> m_facts;
};

}  // namespace support
