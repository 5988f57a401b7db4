// safetensors files: the format byte by byte, round trips in every storage, and refusal of whatever is not one.
#include <gtest/gtest.h>

#include <linattn/safetensors.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/refusal.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using Eigen::Index;
using linattn::row_matrix;
using linattn::row_vector;
using linattn::safetensors_dtype;
using linattn::safetensors_file;
using linattn::safetensors_metadata;
using support::normal_matrix;
using support::refusal;

/// A file of this header and these data, with the right length before them.
std::string file_of(const std::string& header, const std::string& data = {}) {
  std::string bytes;
  for (std::size_t i = 0, n = header.size(); i < 8; ++i, n >>= 8U) bytes += static_cast<char>(n & 0xFFU);
  return bytes + header + data;
}

/// A file of one tensor 'x' with these fields.
std::string tensor_of(const std::string& fields, const std::string& data) {
  return file_of("{\"x\":{" + fields + "}}", data);
}

safetensors_file parse(const std::string& bytes) {
  const auto span = std::as_bytes(std::span(bytes));
  return safetensors_file::parse({span.begin(), span.end()});
}

/// What parse says to a file that it must refuse, behind its own name; empty where it does not.
std::string sentence(const std::string& bytes) {
  const std::string prefix = "linattn::safetensors_file::parse: ";
  const std::string text = refusal([&] { parse(bytes); });
  EXPECT_TRUE(text.empty() || text.starts_with(prefix)) << text;
  return text.substr(std::min(text.size(), prefix.size()));
}

/// A file that is taken is one whose tensors are its data, each once, each with as many bytes as its shape says.
void expect_consistent(const safetensors_file& file) {
  const std::byte* end = nullptr;
  for (const auto& tensor : file.tensors()) {
    EXPECT_TRUE(end == nullptr || tensor.data.data() == end) << tensor.name;
    end = tensor.data.data() + tensor.data.size();
    EXPECT_EQ(file.tensor(tensor.name), &tensor);
    std::size_t bits = linattn::detail::info_of(tensor.dtype).bits;
    for (const Index n : tensor.shape) bits *= std::size_t(n);
    EXPECT_EQ(tensor.data.size() * 8, bits);
  }
}

// ---- the format -----------------------------------------------------------------------------------------------------

const std::string golden_header =
    "{\"__metadata__\":{\"heads\":\"8\"},\"b\":{\"data_offsets\":[24,32],\"dtype\":\"F32\",\"shape\":[2]},"
    "\"w\":{\"data_offsets\":[0,24],\"dtype\":\"F32\",\"shape\":[2,3]}}";
// 1, -2, 0.5, inf, 3, -0; 7, 2^-149
const std::string golden_data("\0\0\x80\x3f\0\0\0\xc0\0\0\0\x3f\0\0\x80\x7f\0\0\x40\x40\0\0\0\x80\0\0\xe0\x40\1\0\0\0",
                              32);

TEST(Safetensors, AreReadByteByByte) {
  const safetensors_file file = parse(file_of(golden_header + "   ", golden_data));
  EXPECT_EQ(file.metadata(), (safetensors_metadata{{"heads", "8"}}));
  EXPECT_EQ(file.names(), (std::vector<std::string>{"w", "b"}));  // in the order of their data
  ASSERT_NE(file.tensor("w"), nullptr);
  EXPECT_EQ(file.tensor("w")->dtype, safetensors_dtype::f32);
  EXPECT_EQ(file.tensor("w")->shape, (std::vector<Index>{2, 3}));
  EXPECT_EQ(file.tensor("w")->data.size(), 24U);
  EXPECT_EQ(file.tensor("a"), nullptr);
  EXPECT_EQ(file.tensor("__metadata__"), nullptr);
  expect_consistent(file);

  row_matrix<float> w(2, 3), expected_w(2, 3);
  expected_w << 1, -2, 0.5F, std::numeric_limits<float>::infinity(), 3, -0.0F;
  file.copy("w", w);
  EXPECT_TRUE(support::same_bits(w, expected_w));
  row_vector<double> b(2), expected_b(2);
  expected_b << 7, 0x1p-149;
  file.copy("b", b);
  EXPECT_TRUE(support::same_bits(b, expected_b));
}

TEST(Safetensors, AreWrittenByteByByte) {
  row_matrix<float> w(2, 3), b(1, 2);
  w << 1, -2, 0.5F, std::numeric_limits<float>::infinity(), 3, -0.0F;
  b << 7, 0x1p-149F;
  std::ostringstream stream;
  linattn::save_safetensors(stream, {{"w", w}, {"b", b, {2}}}, {{"heads", "8"}});
  const std::string padding((8 - golden_header.size() % 8) % 8, ' ');
  EXPECT_EQ(stream.str(), file_of(golden_header + padding, golden_data));
}

TEST(Safetensors, MayHoldNothing) {
  EXPECT_TRUE(parse(file_of("{}")).tensors().empty());
  EXPECT_TRUE(parse(file_of("{\"__metadata__\":{}}")).metadata().empty());
  const safetensors_file file =
      parse(file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[0,3],\"data_offsets\":[4,4]},"
                    "\"b\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
                    "\"c\":{\"dtype\":\"I64\",\"shape\":[0],\"data_offsets\":[0,0]}}",
                    std::string("\0\0\0\x40", 4)));
  EXPECT_EQ(file.names(), (std::vector<std::string>{"c", "b", "a"}));
  row_matrix<float> a(0, 3), b(1, 1);
  file.copy("a", a);
  file.copy("b", b);
  EXPECT_EQ(b(0, 0), 2.0F);
}

TEST(Safetensors, LiveAsLongAsACopyOfTheirFile) {
  auto file = std::make_unique<safetensors_file>(parse(file_of(golden_header, golden_data)));
  const safetensors_file copy = *file;
  file.reset();
  row_matrix<float> w(2, 3);
  copy.copy(*copy.tensor("w"), w);
  EXPECT_EQ(w(1, 1), 3.0F);
}

/// 2^exponent (significand / 2^bits), or what the largest exponent stands for.
double value_of(unsigned pattern, int significand_bits, int exponent_bits) {
  const unsigned significand = pattern & ((1U << significand_bits) - 1);
  const unsigned exponent = pattern >> significand_bits & ((1U << exponent_bits) - 1);
  const double sign = pattern >> 15U != 0 ? -1 : 1;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  if (exponent == (1U << exponent_bits) - 1) {
    return significand != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  const double whole = exponent == 0 ? significand : significand + double(1U << significand_bits);
  return sign * std::ldexp(whole, std::max(int(exponent), 1) - bias - significand_bits);
}

TEST(Safetensors, ConvertEveryHalfAndBfloat16) {
  std::string data;
  for (unsigned pattern = 0; pattern < 65536; ++pattern) {
    data += static_cast<char>(pattern & 0xFFU);
    data += static_cast<char>(pattern >> 8U);
  }
  for (const auto& [dtype, significand, exponent] : {std::tuple("F16", 10, 5), std::tuple("BF16", 7, 8)}) {
    const safetensors_file file = parse(
        tensor_of("\"dtype\":\"" + std::string(dtype) + "\",\"shape\":[65536],\"data_offsets\":[0,131072]", data));
    row_vector<double> doubles(65536), expected(65536);
    row_vector<float> floats(65536);
    file.copy("x", doubles);
    file.copy("x", floats);
    for (Index i = 0; i < 65536; ++i) expected[i] = value_of(unsigned(i), significand, exponent);
    constexpr double exact = 0;
    EXPECT_TRUE(support::within_ulps(doubles, expected, exact)) << dtype;
    EXPECT_TRUE(support::within_ulps(floats, expected, exact)) << dtype;
  }
}

// ---- round trips ----------------------------------------------------------------------------------------------------

template <class T>
std::string saved(const std::vector<linattn::safetensors_entry<T>>& tensors, safetensors_dtype storage,
                  const safetensors_metadata& metadata = {}) {
  std::ostringstream stream;
  linattn::save_safetensors<T>(stream, tensors, metadata, storage);
  return stream.str();
}

/// What T is after it has been Stored.
template <class Stored, class T>
row_matrix<T> stored(const row_matrix<T>& x) {
  if constexpr (sizeof(Stored) == 2) return x.template cast<float>().template cast<Stored>().template cast<T>();
  return x.template cast<Stored>().template cast<T>();
}

template <class T, class Stored>
void expect_round_trip(safetensors_dtype storage) {
  row_matrix<T> w = normal_matrix<T>(5, 12, 1);
  w(0, 0) = std::numeric_limits<T>::quiet_NaN();
  w(1, 1) = -std::numeric_limits<T>::infinity();
  w(2, 2) = T(-0.0);
  w(3, 3) = T(0x1p-20);  // subnormal in half precision
  const row_matrix<T> b = normal_matrix<T>(1, 7, 2);
  const auto part = w.middleCols(3, 4);
  const std::string bytes = saved<T>({{"w", w}, {"part", part}, {"b", b, {7}}, {"none", row_matrix<T>(0, 4)}}, storage,
                                     {{"a \"text\"\n", "\xc3\xa4 \\ \x01"}});
  const safetensors_file file = parse(bytes);
  expect_consistent(file);
  EXPECT_EQ(file.metadata(), (safetensors_metadata{{"a \"text\"\n", "\xc3\xa4 \\ \x01"}}));
  EXPECT_EQ(file.names(), (std::vector<std::string>{"w", "part", "b", "none"}));
  EXPECT_EQ(file.tensor("w")->data.data() - file.tensors()[0].data.data(), 0);
  row_matrix<T> all = row_matrix<T>::Constant(6, 20, T(9));
  file.copy("w", all.block(1, 2, 5, 12));
  EXPECT_TRUE(support::same_bits(all.block(1, 2, 5, 12), stored<Stored>(w)));
  EXPECT_TRUE((all.row(0).array() == T(9)).all() && (all.leftCols(2).array() == T(9)).all() &&
              (all.rightCols(6).array() == T(9)).all());
  row_matrix<T> again(5, 4);
  file.copy("part", again);
  EXPECT_TRUE(support::same_bits(again, stored<Stored>(row_matrix<T>(part))));
  Eigen::Matrix<T, Eigen::Dynamic, 1> column(7);
  file.copy("b", column);
  EXPECT_TRUE(support::same_bits(column.transpose(), stored<Stored>(b)));
  EXPECT_EQ(saved<T>({{"w", w}, {"part", part}, {"b", b, {7}}, {"none", row_matrix<T>(0, 4)}}, storage,
                     {{"a \"text\"\n", "\xc3\xa4 \\ \x01"}}),
            bytes);
}

TEST(Safetensors, ComeBackInEveryStorage) {
  expect_round_trip<float, float>(safetensors_dtype::f32);
  expect_round_trip<float, double>(safetensors_dtype::f64);
  expect_round_trip<float, Eigen::half>(safetensors_dtype::f16);
  expect_round_trip<float, Eigen::bfloat16>(safetensors_dtype::bf16);
  expect_round_trip<double, float>(safetensors_dtype::f32);
  expect_round_trip<double, double>(safetensors_dtype::f64);
  expect_round_trip<double, Eigen::half>(safetensors_dtype::f16);
  expect_round_trip<double, Eigen::bfloat16>(safetensors_dtype::bf16);
}

TEST(Safetensors, GoThroughFiles) {
  const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / "linattn_test_safetensors.safetensors";
  const row_matrix<float> w = normal_matrix<float>(3, 4, 5);
  linattn::save_safetensors(path, {{"longer", normal_matrix<float>(30, 4, 1)}});
  linattn::save_safetensors(path, {{"w", w}}, {{"k", "v"}});  // replaced, not appended to
  const safetensors_file file = safetensors_file::open(path);
  row_matrix<float> again(3, 4);
  file.copy("w", again);
  EXPECT_TRUE(support::same_bits(again, w));
  const std::string name = "'" + path.string() + "': ";
  EXPECT_EQ(refusal([&] { file.copy("v", again); }),
            "linattn::safetensors_file::copy: " + name + "there is no tensor 'v' among its 1");
  std::ofstream(path, std::ios::binary) << "1234567";
  EXPECT_EQ(refusal([&] { safetensors_file::open(path); }),
            "linattn::safetensors_file::open: " + name + "the file has 7 bytes, the length of a header alone takes 8");
  EXPECT_EQ(again(0, 0), w(0, 0));
  std::filesystem::remove(path);
  const std::string cannot = "linattn::safetensors_file::open: " + name + "the file cannot be read: ";
  EXPECT_TRUE(refusal([&] { safetensors_file::open(path); }).starts_with(cannot));
  EXPECT_NE(refusal([&] { safetensors_file::open(testing::TempDir()); }), "");
  EXPECT_EQ(refusal([&] {
              linattn::save_safetensors(path / "below", {{"w", w}});
            }),
            "linattn::save_safetensors: '" + (path / "below").string() + "' does not take the " +
                std::to_string(saved<float>({{"w", w}}, safetensors_dtype::f32).size()) + " bytes");
}

// ---- damage ---------------------------------------------------------------------------------------------------------

TEST(Safetensors, AreRefusedAtEveryLength) {
  const std::string bytes = file_of(golden_header, golden_data);
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_NE(sentence(bytes.substr(0, length)), "") << length << " bytes";
  }
  EXPECT_NE(sentence(bytes + '\0'), "");
  EXPECT_EQ(sentence(bytes), "");
}

TEST(Safetensors, WithAnyByteChangedAreRefusedOrConsistent) {
  const std::string bytes = file_of(golden_header, golden_data);
  const std::size_t data = bytes.size() - golden_data.size();
  Index taken = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (int change = 1; change < 256; ++change) {
      std::string changed = bytes;
      changed[i] = static_cast<char>(changed[i] ^ change);
      if (i >= data) {  // any values will do
        EXPECT_EQ(sentence(changed), "") << "byte " << i;
        continue;
      }
      if (!sentence(changed).empty()) continue;
      expect_consistent(parse(changed));
      ++taken;
    }
  }
  EXPECT_GT(taken, 0);  // names and texts
}

// ---- hostile files --------------------------------------------------------------------------------------------------

TEST(Safetensors, RefuseLengthsThatLie) {
  EXPECT_EQ(sentence(""), "the file has 0 bytes, the length of a header alone takes 8");
  EXPECT_EQ(sentence(std::string("\x0c\0\0\0\0\0\0\0{}", 10)),
            "the header would be 12 bytes long, behind its length there are 2");
  EXPECT_EQ(sentence(std::string("\x01\xe1\xf5\5\0\0\0\0{}", 10)),
            "the header would be 100000001 bytes long, more than the 100000000 allowed");
  EXPECT_EQ(sentence(std::string(8, '\xff') + "{}"),
            "the header would be 18446744073709551615 bytes long, more than the 100000000 allowed");
  EXPECT_EQ(sentence(std::string("\xf8\xff\xff\xff\xff\xff\xff\x7f{}", 10)),
            "the header would be 9223372036854775800 bytes long, more than the 100000000 allowed");
}

TEST(Safetensors, RefuseHeadersThatAreNoObject) {
  const std::string not_json = "the header is not JSON: the error is at byte ";
  EXPECT_EQ(sentence(file_of("{")), not_json + "1 of 1");
  EXPECT_EQ(sentence(file_of("")), "the header does not begin with {");
  EXPECT_EQ(sentence(file_of("[]")), "the header does not begin with {");
  EXPECT_EQ(sentence(file_of(" {}")), "the header does not begin with {");
  EXPECT_EQ(sentence(file_of("\xef\xbb\xbf{}")), "the header does not begin with {");
  EXPECT_TRUE(sentence(file_of("{}{}")).starts_with(not_json));
  EXPECT_TRUE(sentence(file_of("{} x")).starts_with(not_json));
  EXPECT_EQ(sentence(file_of(std::string("{}\0x", 4))), "the header has a byte of 0, which JSON has not");
  EXPECT_TRUE(sentence(file_of("{/**/}")).starts_with(not_json));
  EXPECT_TRUE(sentence(file_of("{\"\xff\":{}}")).starts_with(not_json));
  EXPECT_TRUE(sentence(file_of("{\"\\ud800\":{}}")).starts_with(not_json));
  EXPECT_EQ(sentence(file_of("{\"a\":1}")), "tensor 'a' is a number, expected an object");
  EXPECT_EQ(sentence(file_of("{\"a\":null}")), "tensor 'a' is null, expected an object");
  EXPECT_EQ(sentence(file_of("{\"a\":true}")), "tensor 'a' is a boolean, expected an object");
  EXPECT_EQ(sentence(file_of("{\"a\":\"b\"}")), "tensor 'a' is a string, expected an object");
}

TEST(Safetensors, RefuseDepthWithoutDescending) {
  constexpr std::size_t depth = 1'000'000;
  std::string arrays(depth, '[');
  EXPECT_EQ(sentence(file_of("{\"a\":" + arrays)), "tensor 'a' is an array, expected an object");
  EXPECT_EQ(sentence(tensor_of("\"shape\":" + arrays, "")),
            "tensor 'x': shape holds an array, expected whole numbers from 0 on");
  std::string objects;
  for (std::size_t i = 0; i < depth; ++i) objects += "{\"a\":";
  EXPECT_EQ(sentence(file_of(objects)), "tensor 'a': there is 'a', expected dtype, shape and data_offsets only");
}

TEST(Safetensors, RefuseMetadataThatIsNoText) {
  EXPECT_EQ(sentence(file_of("{\"__metadata__\":[]}")), "tensor '__metadata__' is an array, expected an object");
  EXPECT_EQ(sentence(file_of("{\"__metadata__\":{\"n\":8}}")),
            "the header has a number as the metadata 'n', expected a string");
  EXPECT_EQ(sentence(file_of("{\"__metadata__\":{\"n\":{}}}")),
            "the header has an object as the metadata 'n', expected a string");
  EXPECT_EQ(sentence(file_of("{\"__metadata__\":{\"n\":\"1\",\"n\":\"2\"}}")), "the header has the metadata 'n' twice");
  EXPECT_EQ(sentence(file_of("{\"__metadata__\":{},\"__metadata__\":{}}")), "the header has __metadata__ twice");
}

TEST(Safetensors, RefuseFieldsThatAreNot) {
  const std::string f32 = "\"dtype\":\"F32\"", shape = "\"shape\":[1]", offsets = "\"data_offsets\":[0,4]";
  const std::string data(4, '\0');
  EXPECT_EQ(sentence(tensor_of(f32 + "," + shape + "," + offsets, data)), "");
  EXPECT_EQ(sentence(tensor_of("", data)), "tensor 'x': there is no dtype");
  EXPECT_EQ(sentence(tensor_of(f32 + "," + offsets, data)), "tensor 'x': there is no shape");
  EXPECT_EQ(sentence(tensor_of(f32 + "," + shape, data)), "tensor 'x': there is no data_offsets");
  EXPECT_EQ(sentence(tensor_of(f32 + "," + shape + "," + offsets + "," + shape, data)),
            "tensor 'x': shape is there twice");
  EXPECT_EQ(sentence(tensor_of(f32 + "," + shape + "," + offsets + ",\"strides\":[1]", data)),
            "tensor 'x': there is 'strides', expected dtype, shape and data_offsets only");
  EXPECT_EQ(sentence(file_of("{\"x\":{" + f32 + "," + shape + "," + offsets + "},\"x\":{" + f32 +
                                 ",\"shape\":[0],\"data_offsets\":[4,4]}}",
                             data)),
            "the header has tensor 'x' twice");
  EXPECT_EQ(sentence(tensor_of("\"dtype\":\"f32\"," + shape + "," + offsets, data)),
            "tensor 'x': dtype 'f32' is not known");
  EXPECT_EQ(sentence(tensor_of("\"dtype\":32", data)), "tensor 'x': dtype is a number, expected a string");
  EXPECT_EQ(sentence(tensor_of("\"shape\":1", data)), "tensor 'x': shape is a number, expected an array");
  EXPECT_EQ(sentence(tensor_of("\"shape\":{}", data)), "tensor 'x': shape is an object, expected an array");
  // A stranger's name says nothing to a terminal, nor for ever.
  EXPECT_EQ(sentence(file_of("{\"\\u001b[2J\":1}")), "tensor '?[2J' is a number, expected an object");
  EXPECT_EQ(sentence(file_of("{\"" + std::string(1000, 'a') + "\":1}")),
            "tensor '" + std::string(100, 'a') + "...' is a number, expected an object");
}

TEST(Safetensors, RefuseNumbersThatAreNoSizes) {
  const auto shape = [](const std::string& sizes) {
    return sentence(
        tensor_of("\"dtype\":\"F32\",\"shape\":[" + sizes + "],\"data_offsets\":[0,4]", std::string(4, '\0')));
  };
  const std::string holds = "tensor 'x': shape holds ", expected = ", expected whole numbers from 0 on";
  EXPECT_EQ(shape("1,1,1"), "");
  EXPECT_EQ(shape("-1"), holds + "a number with a sign" + expected);
  EXPECT_EQ(shape("-0"), holds + "a number with a sign" + expected);
  EXPECT_EQ(shape("1.0"), holds + "a number that is a fraction or too large" + expected);
  EXPECT_EQ(shape("1e0"), holds + "a number that is a fraction or too large" + expected);
  EXPECT_EQ(shape("18446744073709551616"), holds + "a number that is a fraction or too large" + expected);
  EXPECT_TRUE(shape("1e999").starts_with("the header is not JSON: the error is at byte "));
  EXPECT_EQ(shape("9223372036854775808"), holds + "9223372036854775808, more than any size");
  EXPECT_EQ(shape("\"1\""), holds + "a string" + expected);
  EXPECT_EQ(shape("null"), holds + "null" + expected);
  const std::string overflow = " has more elements than any memory";
  EXPECT_EQ(shape("4294967296,4294967296"), "tensor 'x': shape (4294967296, 4294967296)" + overflow);
  EXPECT_EQ(shape("4611686018427387904"), "tensor 'x': shape (4611686018427387904)" + overflow);
  // 2^62 elements of 4 bytes are 0 bytes modulo 2^64, and so are 3 * 2^62 elements of 0 bytes.
  EXPECT_EQ(shape("4294967296,4294967296,0"), "tensor 'x': shape (4294967296, 4294967296, 0)" + overflow);
  EXPECT_EQ(shape("0,4294967296,4294967296"), "tensor 'x': shape (0, 4294967296, 4294967296)" + overflow);
  EXPECT_EQ(shape("2"), "tensor 'x': F32 of shape (2) takes 64 bits, between data_offsets [0, 4] there are 32");
  std::string ones = "1";
  for (int i = 1; i < 64; ++i) ones += ",1";
  EXPECT_EQ(shape(ones), "");
  EXPECT_EQ(shape(ones + ",1"), "tensor 'x': shape has more than 64 dimensions");
}

TEST(Safetensors, RefuseOffsetsThatAreNotTheData) {
  const auto offsets = [](const std::string& pair, std::size_t data) {
    return sentence(
        tensor_of("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[" + pair + "]", std::string(data, 'd')));
  };
  EXPECT_EQ(offsets("0,4", 4), "");
  EXPECT_EQ(offsets("4,0", 4), "tensor 'x': data_offsets [4, 0] fall");
  EXPECT_EQ(offsets("0,4", 3), "tensor 'x': data_offsets [0, 4] leave the data, which are 3 bytes");
  EXPECT_EQ(offsets("18446744073709551612,18446744073709551615", 4),
            "tensor 'x': data_offsets [18446744073709551612, 18446744073709551615] leave the data, which are 4 bytes");
  EXPECT_EQ(offsets("1,5", 5), "bytes 0 to 1 of the data, which are 5, belong to no tensor");
  EXPECT_EQ(offsets("0,4", 6), "bytes 4 to 6 of the data, which are 6, belong to no tensor");
  EXPECT_EQ(offsets("0,3", 3), "tensor 'x': U8 of shape (4) takes 32 bits, between data_offsets [0, 3] there are 24");
  EXPECT_EQ(offsets("0", 4), "tensor 'x': data_offsets has 1 numbers, expected 2");
  EXPECT_EQ(offsets("0,4,4", 4), "tensor 'x': data_offsets has more than 2 numbers");
  EXPECT_EQ(offsets("0,-4", 4),
            "tensor 'x': data_offsets holds a number with a sign, expected whole numbers from 0 on");
  const auto two = [](const std::string& a, const std::string& b) {
    return sentence(file_of("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[" + a +
                                "]},\"b\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[" + b + "]}}",
                            std::string(9, 'd')));
  };
  EXPECT_EQ(two("0,4", "0,4"), "tensors 'a' and 'b' overlap: their data_offsets are [0, 4] and [0, 4]");
  EXPECT_EQ(two("3,7", "0,4"), "tensors 'b' and 'a' overlap: their data_offsets are [0, 4] and [3, 7]");
  EXPECT_EQ(two("0,4", "5,9"), "bytes 4 to 5 of the data, which are 9, belong to no tensor");
}

TEST(Safetensors, ListTensorsTheyDoNotConvert) {
  const std::string data(24, '\1');
  for (const auto& info : linattn::detail::safetensors_dtypes) {
    const std::string elements = std::to_string(24 * 8 / info.bits);
    const safetensors_file file = parse(tensor_of(
        "\"dtype\":\"" + std::string(info.name) + "\",\"shape\":[" + elements + "],\"data_offsets\":[0,24]", data));
    const auto* const tensor = file.tensor("x");
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(tensor->dtype, info.dtype);
    EXPECT_EQ(tensor->data.size(), 24U);
    EXPECT_EQ(tensor->data[23], std::byte(1));
    row_vector<float> x = row_vector<float>::Constant(tensor->shape[0], 9);
    const std::string text = refusal([&] { file.copy(*tensor, x); });
    const bool converts = info.name == "F16" || info.name == "BF16" || info.name == "F32" || info.name == "F64";
    EXPECT_EQ(text, converts ? ""
                             : "linattn::safetensors_file::copy: tensor 'x' holds " + std::string(info.name) +
                                   ", expected F16, BF16, F32 or F64");
    EXPECT_EQ(x[0] == 9.0F, !converts);
  }
  EXPECT_EQ(sentence(tensor_of("\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]", "dd")),
            "tensor 'x': F4 of shape (3) takes 12 bits, between data_offsets [0, 2] there are 16");
}

TEST(Safetensors, RefuseMatricesOfOtherShapes) {
  const row_matrix<float> w = normal_matrix<float>(2, 3, 1);
  const safetensors_file file =
      parse(saved<float>({{"w", w}, {"b", w, {6}}, {"t", w, {1, 2, 3}}}, safetensors_dtype::f32));
  const auto text = [&](const char* name, Index rows, Index cols) {
    row_matrix<float> x = row_matrix<float>::Constant(rows, cols, 9);
    const std::string said = refusal([&] { file.copy(name, x); });
    EXPECT_EQ((x.array() == 9).all(), !said.empty());
    return said;
  };
  const std::string prefix = "linattn::safetensors_file::copy: tensor ";
  EXPECT_EQ(text("w", 2, 3), "");
  EXPECT_EQ(text("w", 3, 2), prefix + "'w' is (2, 3), expected (3, 2)");
  EXPECT_EQ(text("w", 1, 6), prefix + "'w' is (2, 3), expected (1, 6)");
  EXPECT_EQ(text("b", 1, 6), "");
  EXPECT_EQ(text("b", 6, 1), "");
  EXPECT_EQ(text("b", 2, 3), prefix + "'b' is (6), expected (2, 3)");
  EXPECT_EQ(text("b", 1, 5), prefix + "'b' is (6), expected (1, 5)");
  EXPECT_EQ(text("t", 2, 3), prefix + "'t' is (1, 2, 3), expected (2, 3)");
}

TEST(Safetensors, AreNotSavedWrong) {
  const row_matrix<float> w = row_matrix<float>::Constant(2, 3, 70000);
  const auto text = [&](const std::vector<linattn::safetensors_entry<float>>& tensors,
                        safetensors_dtype storage = safetensors_dtype::f32, const safetensors_metadata& metadata = {}) {
    std::ostringstream stream;
    const std::string said = refusal([&] { linattn::save_safetensors(stream, tensors, metadata, storage); });
    EXPECT_EQ(stream.str().empty(), !said.empty());
    return said;
  };
  const std::string prefix = "linattn::save_safetensors: ";
  EXPECT_EQ(text({{"w", w}}), "");
  EXPECT_EQ(text({{"w", w}}, safetensors_dtype::i32), prefix + "the storage is I32, expected F16, BF16, F32 or F64");
  EXPECT_EQ(text({{"w", w}}, safetensors_dtype::f16), prefix + "tensor 'w' holds 70000, more than F16 can");
  EXPECT_EQ(text({{"w", w}, {"w", w}}), prefix + "the name 'w' is taken");
  EXPECT_EQ(text({{"__metadata__", w}}), prefix + "the name '__metadata__' is taken");
  EXPECT_EQ(text({{"w\xff", w}}), prefix + "the name 'w\xff' is not UTF-8");
  EXPECT_EQ(text({{"w", w}}, safetensors_dtype::f32, {{"\xc3", ""}}), prefix + "the key '\xc3' is not UTF-8");
  EXPECT_EQ(text({{"w", w}}, safetensors_dtype::f32, {{"k", "\xed\xa0\x80"}}),
            prefix + "the text '\xed\xa0\x80' is not UTF-8");
  EXPECT_EQ(text({{"w", w, {5}}}), prefix + "tensor 'w' is (2, 3), which cannot be saved as (5)");
  EXPECT_EQ(text({{"w", w, {-2, -3}}}), prefix + "tensor 'w' is (2, 3), which cannot be saved as (-2, -3)");
  const row_matrix<double> large = row_matrix<double>::Constant(1, 1, 1e39);
  EXPECT_EQ(refusal([&] {
              saved<double>({{"w", large}}, safetensors_dtype::f32);
            }),
            prefix + "tensor 'w' holds 1e+39, more than F32 can");
}

}  // namespace
