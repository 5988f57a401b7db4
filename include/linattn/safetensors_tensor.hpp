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

/// What a tensor's elements are. `copy` converts f16, bf16, f32 and f64; of the others there are the bytes.
enum class safetensors_dtype {
  boolean,  ///< BOOL, one byte
  u8,
  i8,
  u16,
  i16,
  u32,
  i32,
  u64,
  i64,
  f16,   ///< IEEE 754 half precision
  bf16,  ///< bfloat16: the upper half of an f32
  f32,
  f64,
  c64,      ///< two f32
  f8_e4m3,  ///< F8_E4M3; the names of those that follow are likewise
  f8_e5m2,
  f8_e8m0,
  f6_e2m3,  ///< of those with 4 or 6 bits a tensor takes whole bytes
  f6_e3m2,
  f4,
};

/// One tensor of a file. `data` is the file's memory, and need not be aligned.
struct safetensors_tensor {
  std::string name;
  safetensors_dtype dtype = safetensors_dtype::f32;
  std::vector<Eigen::Index> shape;
  std::span<const std::byte> data;
};

/// Text to text: what a file says of itself.
using safetensors_metadata = std::map<std::string, std::string, std::less<>>;

LINATTN_NAMESPACE_END
