// Tensors from safetensors files and back: the weights of trained models. Not part of linattn.hpp, because it needs
// another library: <nlohmann/json.hpp> (nlohmann-json3-dev on Debian; header-only).
//
//   const auto file = linattn::safetensors_file::open("model.safetensors");
//   linattn::row_matrix<float> w(256, 64);
//   file.copy("layers.0.linear1.weight", w);        // F16, BF16, F32 or F64 in the file, float or double here
//   for (const auto& name : file.names()) std::puts(name.c_str());
//
//   linattn::save_safetensors("model.safetensors", {{"layers.0.linear1.weight", w}}, {{"heads", "8"}});
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/matrix_view.hpp>
#include <linattn/safetensors_tensor.hpp>

#include <Eigen/Core>
#include <cstddef>
#include <filesystem>
#include <iosfwd>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

LINATTN_NAMESPACE_BEGIN

// The format. Eight bytes, little-endian: n, the length of the header. n bytes of header: a JSON object in UTF-8 which
// may end in spaces. The rest is data. The header has an entry for each tensor,
//
//   "name": {"dtype": "F32", "shape": [256, 64], "data_offsets": [0, 65536]}
//
// with the offsets of its first byte and of the one behind its last, counted from where the data begins; and may have
// one, "__metadata__", that maps strings to strings. Elements are little-endian, in row-major order, without gaps. A
// shape [] is one number; a size of 0 makes a tensor without elements.
//
// What is refused. A file is taken as a stranger's. Whatever its bytes, no call of this header reads or writes beyond
// them; memory asked for is the file's size once, and for the header some times its length. std::invalid_argument, with
// a sentence that names the file, the tensor and both sizes, is thrown for
//
//   a header that is longer than the rest of the file or than 100 MB, does not begin with {, or is not JSON,
//   anything in it but the above: other types, other fields, a field or name that is missing or there twice, numbers
//     that are negative, fractions or beyond an Eigen::Index, more than 64 dimensions, a dtype that is no
//     safetensors_dtype,
//   a shape whose number of bytes overflows or is not that between its offsets,
//   offsets that fall or leave the data, tensors that overlap, and bytes of the data that are no tensor's.
//
// Values are not looked at: NaN and infinity are kept.

/// A file, checked and in memory. A value; copies share its bytes, which live as long as any of them.
class safetensors_file {
 public:
  /// Reads a regular file, all of it. Throws for one that cannot be read, and as above.
  static safetensors_file open(const std::filesystem::path& path);

  /// The same from memory. `name` stands for the file in sentences.
  /// Cost: the header once; the bytes are moved, not copied, where they are given away.
  static safetensors_file parse(std::vector<std::byte> bytes, std::string name = {});

  /// "__metadata__"; empty where there is none.
  const safetensors_metadata& metadata() const noexcept { return m_metadata; }

  /// All tensors, and their names, in the order of their data. The second allocates.
  std::span<const safetensors_tensor> tensors() const noexcept { return m_tensors; }
  std::vector<std::string> names() const;

  /// The tensor of that name; null where there is none. O(log of their number).
  const safetensors_tensor* tensor(std::string_view name) const noexcept;

  /// Elements of a tensor into a matrix or view of float or double that has its shape: (r, c) as it is, (n) into (1, n)
  /// or (n, 1), () into (1, 1). Given a name, of the tensor of that name.
  ///
  /// Numerics: exact, but for f64 into float, rounded to nearest, which may overflow to infinity. NaNs stay NaNs.
  /// Errors, before anything is written: no such name; another shape, or one of more than two dimensions; elements that
  /// are not f16, bf16, f32 or f64. Cost: one pass, no allocation.
  template <class Out>
  void copy(const safetensors_tensor& from, Out&& to) const;
  template <class Out>
  void copy(std::string_view name, Out&& to) const;

 private:
  safetensors_file() = default;
  static safetensors_file read(const char* function, std::string name, std::vector<std::byte> bytes);

  std::string m_name;
  std::shared_ptr<const std::vector<std::byte>> m_bytes;
  safetensors_metadata m_metadata;
  std::vector<safetensors_tensor> m_tensors;
  std::vector<std::size_t> m_by_name;
};

/// A tensor to be saved: float or double, from any matrix or view. `shape` is (rows, cols) where it is not given, and
/// may be any of as many elements: {n} for a bias that other programs expect with one dimension.
template <class T = float>
struct safetensors_entry {
  safetensors_entry(std::string name_of_tensor, matrix_view<const T> elements, std::vector<Eigen::Index> sizes = {})
      : name(std::move(name_of_tensor)), values(elements), shape(std::move(sizes)) {}

  std::string name;
  matrix_view<const T> values;
  std::vector<Eigen::Index> shape;
};

/// Writes a file that `open` and others read, to a path, which is replaced, or to a binary stream. Data are in the
/// order of `tensors`; the header is padded with spaces so that they begin at a multiple of 8. The same arguments give
/// the same bytes. For double write save_safetensors<double>.
///
/// storage   f32, f64, f16 or bf16. Values are rounded to nearest even; on the way from double to f16 or bf16 through
///           float. NaN and infinity are kept, NaNs without what else their bits say.
/// Errors, before anything is written: another storage; a finite value that would become infinite; a name twice, or
/// "__metadata__"; names, keys or texts that are not UTF-8; a shape of another number of elements. And where the file
/// or stream does not take the bytes. Cost: the file's size in memory, and one pass.
template <class T = float>
void save_safetensors(std::ostream& to, const std::vector<safetensors_entry<T>>& tensors,
                      const safetensors_metadata& metadata = {}, safetensors_dtype storage = safetensors_dtype::f32);
/// The same, to a path.
template <class T = float>
void save_safetensors(const std::filesystem::path& to, const std::vector<safetensors_entry<T>>& tensors,
                      const safetensors_metadata& metadata = {}, safetensors_dtype storage = safetensors_dtype::f32);

LINATTN_NAMESPACE_END

#include <linattn/detail/safetensors_impl.hpp>
