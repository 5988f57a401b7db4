// DLPack tensors, the form in which frameworks lend each other their memory, as views: without a copy, and without
// DLPack's header.
//
//   DLManagedTensor* q = ...;       // by <dlpack/dlpack.h>, your framework's or your own
//   attn.forward_causal(linattn::from_dlpack<const float>(*q), ...);
//   q->deleter(q);                  // after the last use of the view
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/mdspan.hpp>
#include <linattn/matrix_view.hpp>

#include <Eigen/Core>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// A struct with the members of DLTensor.
template <class X>
concept dlpack_tensor = requires(const X& t) {
  { t.data } -> std::convertible_to<const void*>;
  { t.ndim } -> std::convertible_to<std::int64_t>;
  { t.dtype.code } -> std::convertible_to<int>;
  { t.dtype.bits } -> std::convertible_to<int>;
  { t.dtype.lanes } -> std::convertible_to<int>;
  { t.shape } -> std::convertible_to<const std::int64_t*>;
  { t.strides } -> std::convertible_to<const std::int64_t*>;
  { t.byte_offset } -> std::convertible_to<std::uint64_t>;
  {static_cast<int>(t.device.device_type)};
};

/// One that has such a member: DLManagedTensor, DLManagedTensorVersioned.
template <class X>
concept dlpack_managed_tensor = requires(const X& t) {
  { t.dl_tensor } -> dlpack_tensor;
};

/// Numbers that DLPack fixes for good.
namespace dlpack {
inline constexpr int cpu = 1;
inline constexpr int integer = 0, unsigned_integer = 1, real = 2, bfloat = 4, complex = 5;
inline constexpr std::uint64_t read_only = 1;  // bit of the flags of DLManagedTensorVersioned
inline constexpr std::int64_t major_version = 1;
}  // namespace dlpack

/// "float32", "int8", "bfloat16", "float32 x 4", "type 17 of 8 bits".
inline std::string dlpack_type_text(int code, int bits, int lanes) {
  const char* const name = code == dlpack::integer            ? "int"
                           : code == dlpack::unsigned_integer ? "uint"
                           : code == dlpack::real             ? "float"
                           : code == dlpack::bfloat           ? "bfloat"
                           : code == dlpack::complex          ? "complex"
                                                              : nullptr;
  const Eigen::Index width = bits;
  const std::string text =
      name != nullptr ? sentence(name, width) : sentence("type ", Eigen::Index(code), " of ", width, " bits");
  return lanes == 1 ? text : sentence(text, " x ", Eigen::Index(lanes));
}

/// All that does not depend on the number of dimensions; the address of the first element.
template <class T, class Tensor>
T* dlpack_data(const char* function, const Tensor& t, std::int64_t ndim) {
  using scalar = std::remove_const_t<T>;
  static_assert(std::is_same_v<scalar, float> || std::is_same_v<scalar, double> ||
                    std::is_same_v<scalar, Eigen::half> || std::is_same_v<scalar, Eigen::bfloat16>,
                "linattn: a tensor is read as float, double, Eigen::half or Eigen::bfloat16: from_dlpack<const float>");
  constexpr int code = std::is_same_v<scalar, Eigen::bfloat16> ? dlpack::bfloat : dlpack::real;
  constexpr int bits = 8 * int(sizeof(scalar));
  if (int(t.device.device_type) != dlpack::cpu) {
    refuse(function, "the tensor is on a device of type ", Eigen::Index(t.device.device_type),
           ", not in the memory of the CPU (type 1); copy it there first");
  }
  if (int(t.dtype.code) != code || int(t.dtype.bits) != bits || int(t.dtype.lanes) != 1) {
    refuse(function, "the tensor holds ", dlpack_type_text(t.dtype.code, t.dtype.bits, t.dtype.lanes),
           ", asked for is ", dlpack_type_text(code, bits, 1));
  }
  if (t.ndim != ndim) {
    refuse(function, "the tensor has ", Eigen::Index(t.ndim), " dimensions, asked for are ", Eigen::Index(ndim));
  }
  if (t.shape == nullptr) refuse(function, "the tensor has no shape");
  bool is_empty = false;
  for (std::int64_t i = 0; i < ndim; ++i) {
    if (t.shape[i] < 0) refuse(function, "size ", Eigen::Index(t.shape[i]), " of the tensor is negative");
    index_of(function, t.shape[i]);
    if (t.strides != nullptr) index_of(function, t.strides[i]);
    is_empty = is_empty || t.shape[i] == 0;
  }
  if (is_empty) return nullptr;
  if (t.data == nullptr) refuse(function, "the tensor has elements, but its data pointer is null");
  const auto address = reinterpret_cast<std::uintptr_t>(t.data);
  const std::uint64_t offset = t.byte_offset;
  if (offset > std::uintptr_t(PTRDIFF_MAX) || (address + std::uintptr_t(offset)) % alignof(T) != 0) {
    refuse(function, "byte_offset ", std::to_string(offset), " does not lead to an aligned ",
           dlpack_type_text(code, bits, 1));
  }
  // A tensor's data are void, whoever may write them.
  auto* const bytes = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(t.data)));
  return reinterpret_cast<T*>(bytes + offset);
}

/// A managed tensor's own promises, then the tensor in it.
template <class T, class Tensor>
const auto& dlpack_unmanaged(const char* function, const Tensor& t) {
  if constexpr (dlpack_managed_tensor<Tensor>) {
    if constexpr (requires { t.version.major; }) {
      if (std::int64_t(t.version.major) != dlpack::major_version) {
        refuse(function, "the tensor follows DLPack ", Eigen::Index(t.version.major), ", known is version ",
               Eigen::Index(dlpack::major_version));
      }
    }
    if constexpr (requires { t.flags; }) {
      if (!std::is_const_v<T> && (std::uint64_t(t.flags) & dlpack::read_only) != 0) {
        refuse(function, "the tensor is read-only; only a view of const elements may show it");
      }
    }
    return t.dl_tensor;
  } else {
    return t;
  }
}

}  // namespace detail

/// A tensor of tokens, shape (N, H D), as a matrix_view; T is float, double, Eigen::half or Eigen::bfloat16, const for
/// inputs, mutable for outputs: from_dlpack<const float>(t). Takes DLTensor and whatever has its members, and
/// DLManagedTensor or DLManagedTensorVersioned, whose owner stays who it was: no deleter is called here, and the view
/// is of use as long as the tensor's memory.
///
/// Throws std::invalid_argument, with a sentence, for another device than the CPU, another type, ndim other than 2, no
/// shape, a negative size, rows that are not contiguous (strides[1] other than 1; strides may be null, which is
/// row-major), a null pointer to something, a byte_offset to an address that does not suit T, sizes and strides beyond
/// what pointers reach, a version that is not 1; of outputs also read-only tensors and rows that overlap.
/// Cost: a few comparisons; allocates nothing but a refusal's sentence.
template <class T, class Tensor>
requires(detail::dlpack_tensor<Tensor> ||
         detail::dlpack_managed_tensor<Tensor>) matrix_view<T> from_dlpack(const Tensor& tensor) {
  const auto& t = detail::dlpack_unmanaged<T>("from_dlpack", tensor);
  T* const data = detail::dlpack_data<T>("from_dlpack", t, 2);
  const auto rows = Eigen::Index(t.shape[0]), cols = Eigen::Index(t.shape[1]);
  // Of a dimension with one index, or none, a stride says nothing.
  const Eigen::Index row_stride = t.strides == nullptr || rows <= 1 ? cols : Eigen::Index(t.strides[0]);
  if (data != nullptr && t.strides != nullptr && cols > 1 && t.strides[1] != 1) {
    detail::refuse("from_dlpack", "the tensor ", detail::shape_text{rows, cols}, " has strides ",
                   detail::shape_text{Eigen::Index(t.strides[0]), Eigen::Index(t.strides[1])},
                   ", but a row must be contiguous: the second must be 1");
  }
  if (!detail::is_addressable(rows, cols, row_stride, sizeof(T))) {
    detail::refuse("from_dlpack", "no memory holds a tensor ", detail::shape_text{rows, cols}, " with row stride ",
                   row_stride);
  }
  return matrix_view<T>(data, rows, cols, row_stride);
}

/// One token, shape (H D), as a vector_view, as `step` takes it; all else as above.
template <class T, class Tensor>
requires(detail::dlpack_tensor<Tensor> ||
         detail::dlpack_managed_tensor<Tensor>) vector_view<T> token_from_dlpack(const Tensor& tensor) {
  const auto& t = detail::dlpack_unmanaged<T>("token_from_dlpack", tensor);
  T* const data = detail::dlpack_data<T>("token_from_dlpack", t, 1);
  const auto size = Eigen::Index(t.shape[0]);
  if (size > 1 && t.strides != nullptr && t.strides[0] != 1) {
    detail::refuse("token_from_dlpack", "the elements are ", Eigen::Index(t.strides[0]),
                   " apart, but a token must be contiguous");
  }
  if (!detail::is_addressable(1, size, size, sizeof(T))) {
    detail::refuse("token_from_dlpack", "no memory holds a tensor of ", size, " elements");
  }
  return vector_view<T>(data, size);
}

LINATTN_NAMESPACE_END
