// What a safetensors file holds: tensors, and texts about them.
#pragma once

#include <linattn/version.hpp>

#include <Eigen/Core>
#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

LINATTN_NAMESPACE_BEGIN

/// What a tensor's elements are; a file has the name in capitals. safetensors_file::copy converts f16, bf16, f32 and
/// f64; of the others there are the bytes, which is enough for labels and images.
enum class safetensors_dtype {
  boolean,  ///< BOOL: one byte, 0 or 1
  u8,       ///< unsigned integers, of 8 bits
  i8,       ///< signed ones, two's complement
  u16,
  i16,
  u32,
  i32,
  u64,
  i64,
  f16,      ///< IEEE 754 half precision: 5 bits of exponent, 10 of significand
  bf16,     ///< bfloat16: the upper half of an f32
  f32,      ///< IEEE 754 single precision
  f64,      ///< IEEE 754 double precision
  c64,      ///< complex: two f32, the real part first
  f8_e4m3,  ///< floats of 8 bits: so many of exponent and of significand
  f8_e5m2,
  f8_e8m0,  ///< an exponent alone: the scale of a block
  f6_e2m3,  ///< of 6 bits; a tensor of these and of f4 takes whole bytes
  f6_e3m2,
  f4,  ///< of 4 bits
};

/// One tensor of a file.
struct safetensors_tensor {
  std::string name;                                  ///< any UTF-8 but "__metadata__"
  safetensors_dtype dtype = safetensors_dtype::f32;  ///< of every element
  std::vector<Eigen::Index> shape;                   ///< none is below 0; their product, times the bits of one, / 8 ...
  std::span<const std::byte> data;                   ///< ... is the size of this: the file's memory, not aligned
};

/// Text to text: what a file says of itself.
using safetensors_metadata = std::map<std::string, std::string, std::less<>>;

LINATTN_NAMESPACE_END
