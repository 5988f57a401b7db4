// Matrices that are not Eigen's: what has the interface of std::mdspan, and DLPack tensors, by structs of our own and,
// if they are there, by the real ones. Seen where they lie, or refused with a sentence.
#include <linattn/dlpack.hpp>
#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/linear_attention.hpp>

#include "support/refusal.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#endif
#if __has_include(<mdspan>)
#include <mdspan>
#endif

namespace {

using Eigen::Index;
using linattn::from_dlpack;
using linattn::matrix_view;
using linattn::row_matrix;
using linattn::token_from_dlpack;
using linattn::vector_view;
using support::refusal;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

constexpr Index most = std::numeric_limits<Index>::max();
constexpr Index least = std::numeric_limits<Index>::min();

// Through a parameter, so that the conversion is the implicit one of a call.
template <class T>
matrix_view<T> matrix(matrix_view<T> view) {
  return view;
}
template <class T>
vector_view<T> token(vector_view<T> view) {
  return view;
}

// ---- mdspan
// ----------------------------------------------------------------------------------------------------------

/// As much of std::mdspan as is asked for.
template <class T, std::size_t Rank = 2, class Int = std::size_t, bool Exhaustive = true>
struct span_of {
  using element_type = T;
  using reference = T&;
  T* data = nullptr;
  std::array<Int, Rank> sizes{};
  std::array<Int, Rank> strides{};

  static constexpr std::size_t rank() noexcept { return Rank; }
  static constexpr bool is_always_exhaustive() noexcept { return Exhaustive; }
  constexpr T* data_handle() const noexcept { return data; }
  constexpr Int extent(std::size_t d) const noexcept { return sizes[d]; }
  constexpr Int stride(std::size_t d) const noexcept { return strides[d]; }
};

TEST(Mdspan, IsSeenWhereItLies) {
  std::vector<float> memory(20);
  const span_of<float> x{memory.data() + 1, {3, 4}, {6, 1}};
  for (const matrix_view<const float>& view :
       {matrix<const float>(x), matrix<const float>(span_of<float>(x)), matrix_view<const float>(matrix<float>(x)),
        matrix<const float>(span_of<const float>{x.data, x.sizes, x.strides})}) {
    EXPECT_EQ(view.data(), memory.data() + 1);
    EXPECT_EQ(view.rows(), 3);
    EXPECT_EQ(view.cols(), 4);
    EXPECT_EQ(view.row_stride(), 6);
  }
}

TEST(Mdspan, AnyIndexTypeWillDo) {
  std::vector<double> memory(12);
  const auto is_seen = [&](auto number) {
    using Int = decltype(number);
    const auto view = matrix<double>(span_of<double, 2, Int>{memory.data(), {3, 4}, {4, 1}});
    return view.data() == memory.data() && view.rows() == 3 && view.cols() == 4 && view.row_stride() == 4;
  };
  EXPECT_TRUE(is_seen((signed char)(0)) && is_seen((unsigned char)(0)) && is_seen(short(0)) && is_seen(0u));
  EXPECT_TRUE(is_seen(0ll) && is_seen(0ull) && is_seen(std::ptrdiff_t(0)));
}

TEST(Mdspan, TheOperatorTakesIt) {
  const linattn::linear_attention<linattn::elu_plus_one> attention({.head_dim = 2, .heads = 2});
  const row_matrix<float> x = row_matrix<float>::Random(3, 4);
  const row_matrix<float> expected = attention.forward_causal(x, x, x);
  const span_of<const float> q{x.data(), {3, 4}, {4, 1}};
  EXPECT_TRUE(attention.forward_causal(q, q, q) == expected);

  std::vector<float> memory(21, 7.f);
  auto state = attention.make_state();
  auto workspace = attention.make_workspace();
  attention.forward_causal(state, q, q, q, span_of<float>{memory.data(), {3, 4}, {7, 1}}, workspace);
  for (Index i = 0; i < 3; ++i) {
    for (Index j = 0; j < 7; ++j) EXPECT_EQ(memory[std::size_t(7 * i + j)], j < 4 ? expected(i, j) : 7.f);
  }

  state.reset();
  const span_of<const float, 1> row{x.data(), {4}, {1}};
  attention.step(state, row, row, row, span_of<float, 1>{memory.data(), {4}, {1}}, workspace);
  for (Index j = 0; j < 4; ++j) EXPECT_NEAR(memory[std::size_t(j)], x(0, j), 1e-6f);  // causal row 0 is v_0
}

TEST(Mdspan, TokensAreSeenWhereTheyLie) {
  std::vector<float> memory(5);
  const auto view = token<const float>(span_of<float, 1>{memory.data() + 1, {4}, {1}});
  EXPECT_EQ(view.data(), memory.data() + 1);
  EXPECT_EQ(view.size(), 4);
  EXPECT_EQ(token<float>(span_of<float, 1, int>{memory.data(), {5}, {1}}).size(), 5);
}

TEST(Mdspan, RowsThatAreNotContiguousAreRefused) {
  std::vector<float> memory(24);
  const std::string why = refusal([&] { matrix<const float>(span_of<float>{memory.data(), {3, 4}, {1, 3}}); });
  EXPECT_TRUE(contains(why, "linattn::matrix_view: the mdspan (3, 4) has strides (1, 3)")) << why;
  EXPECT_TRUE(contains(why, "the second must be 1")) << why;
  EXPECT_NE(refusal([&] { matrix<float>(span_of<float>{memory.data(), {3, 4}, {8, 2}}); }), "");
  EXPECT_NE(refusal([&] { matrix<float>(span_of<float, 2, int>{memory.data() + 3, {3, 4}, {4, -1}}); }), "");
  EXPECT_NE(refusal([&] { matrix<float>(span_of<float>{memory.data(), {3, 4}, {4, 0}}); }), "");
  // The stride of a dimension that is not walked says nothing.
  EXPECT_EQ(matrix<float>(span_of<float>{memory.data(), {3, 1}, {4, 9}}).row_stride(), 4);
  EXPECT_EQ(matrix<float>(span_of<float>{memory.data(), {0, 4}, {1, 9}}).rows(), 0);
}

TEST(Mdspan, SizesThatNoMemoryHasAreRefused) {
  float x[4] = {};
  const auto why = [&](auto sizes, auto strides) {
    using Int = typename decltype(sizes)::value_type;
    return refusal([&] { matrix<const float>(span_of<float, 2, Int>{x, sizes, strides}); });
  };
  using wide = std::array<std::size_t, 2>;
  using narrow = std::array<Index, 2>;
  EXPECT_TRUE(contains(why(wide{std::size_t(most) + 1, 4}, wide{4, 1}), "does not fit Eigen::Index"));
  EXPECT_TRUE(contains(why(wide{2, std::size_t(-1)}, wide{4, 1}), "does not fit Eigen::Index"));
  EXPECT_TRUE(contains(why(wide{2, 2}, wide{std::size_t(-4), 1}), "does not fit Eigen::Index"));
  EXPECT_TRUE(contains(why(narrow{-2, 2}, narrow{2, 1}), "a size is negative"));
  EXPECT_TRUE(contains(why(narrow{2, -2}, narrow{2, 1}), "a size is negative"));
  EXPECT_TRUE(contains(why(narrow{2, most}, narrow{0, 1}), "no memory holds the mdspan"));
  EXPECT_TRUE(contains(why(narrow{1, most}, narrow{0, 1}), "no memory holds the mdspan"));
  EXPECT_TRUE(contains(why(narrow{3, 2}, narrow{most / 4, 1}), "no memory holds the mdspan"));
  EXPECT_TRUE(contains(why(narrow{2, 2}, narrow{most / 4 - 1, 1}), "no memory holds the mdspan"));
  EXPECT_EQ(why(narrow{2, 2}, narrow{most / 4 - 2, 1}), "");  // the last that does
  EXPECT_TRUE(contains(why(narrow{3, 2}, narrow{least, 1}), "no memory holds the mdspan"));
  EXPECT_TRUE(contains(why(narrow{most / 8, 2}, narrow{4, 1}), "no memory holds the mdspan"));
  EXPECT_EQ(why(narrow{most, 2}, narrow{0, 1}), "");  // one row for every token
  EXPECT_EQ(why(narrow{1, 4}, narrow{most, 1}), "");  // of one row a stride says nothing
  x[0] = 1;
  EXPECT_TRUE(contains(refusal([] { matrix<const float>(span_of<float>{nullptr, {1, 1}, {1, 1}}); }), "null pointer"));
  EXPECT_EQ(refusal([] { matrix<const float>(span_of<float>{nullptr, {0, 4}, {4, 1}}); }), "");
}

TEST(Mdspan, OutputsMustNotOverlap) {
  std::vector<float> memory(12);
  const span_of<float> x{memory.data(), {3, 4}, {2, 1}};
  EXPECT_EQ(refusal([&] { matrix<const float>(x); }), "");
  EXPECT_TRUE(contains(refusal([&] { matrix<float>(x); }), "rows of an output overlap"));
}

#if defined(__cpp_lib_mdspan)
TEST(Mdspan, StdMdspan) {
  std::vector<float> memory(12);
  const std::mdspan<float, std::dextents<int, 2>> x(memory.data(), 3, 4);
  EXPECT_EQ(matrix<float>(x).row(2), memory.data() + 8);
  EXPECT_EQ(matrix<const float>(std::mdspan<const float, std::extents<std::size_t, 3, 4>>(memory.data())).cols(), 4);
  const std::mdspan<float, std::dextents<int, 2>, std::layout_left> columns(memory.data(), 3, 4);
  EXPECT_TRUE(contains(refusal([&] { matrix<float>(columns); }), "strides (1, 3)"));
  EXPECT_EQ(token<float>(std::mdspan<float, std::dextents<int, 1>>(memory.data(), 12)).size(), 12);
}
#endif

// ---- DLPack
// ----------------------------------------------------------------------------------------------------------

struct device_of_ours {
  int device_type = 1, device_id = 0;
};
struct type_of_ours {
  std::uint8_t code = 2, bits = 32;
  std::uint16_t lanes = 1;
};
struct tensor_of_ours {
  void* data = nullptr;
  device_of_ours device{};
  std::int32_t ndim = 2;
  type_of_ours dtype{};
  std::int64_t* shape = nullptr;
  std::int64_t* strides = nullptr;
  std::uint64_t byte_offset = 0;
};
struct managed_of_ours {
  tensor_of_ours dl_tensor;
  void* manager_ctx = nullptr;
  void (*deleter)(managed_of_ours*) = nullptr;
};
struct version_of_ours {
  std::uint32_t major = 1, minor = 1;
};
struct versioned_of_ours {
  version_of_ours version;
  void* manager_ctx = nullptr;
  void (*deleter)(versioned_of_ours*) = nullptr;
  std::uint64_t flags = 0;
  tensor_of_ours dl_tensor;
};

class Dlpack : public testing::Test {
 protected:
  tensor_of_ours t() {
    tensor_of_ours x;
    x.data = memory.data();
    x.shape = shape;
    x.strides = strides;
    return x;
  }
  /// Why it is refused as an input.
  template <class Edit>
  std::string why(const Edit& edit) {
    tensor_of_ours x = t();
    edit(x);
    return refusal([&] { from_dlpack<const float>(x); });
  }

  std::vector<float> memory = std::vector<float>(24);
  std::int64_t shape[2] = {3, 4};
  std::int64_t strides[2] = {6, 1};
};

TEST_F(Dlpack, IsSeenWhereItLies) {
  tensor_of_ours x = t();
  x.byte_offset = 8;
  const matrix_view<const float> view = from_dlpack<const float>(x);
  EXPECT_EQ(view.data(), memory.data() + 2);
  EXPECT_EQ(view.rows(), 3);
  EXPECT_EQ(view.cols(), 4);
  EXPECT_EQ(view.row_stride(), 6);
  const matrix_view<float> output = from_dlpack<float>(x);
  EXPECT_EQ(output.data(), memory.data() + 2);

  x.strides = nullptr;  // row-major
  EXPECT_EQ(from_dlpack<float>(x).row_stride(), 4);
}

TEST_F(Dlpack, TokensAreSeenWhereTheyLie) {
  tensor_of_ours x = t();
  x.ndim = 1;
  x.strides = nullptr;
  EXPECT_EQ(token_from_dlpack<float>(x).data(), memory.data());
  EXPECT_EQ(token_from_dlpack<const float>(x).size(), 3);
  x.strides = strides + 1;
  EXPECT_EQ(token_from_dlpack<const float>(x).size(), 3);
  x.strides = strides;
  const std::string sentence = refusal([&] { token_from_dlpack<const float>(x); });
  EXPECT_TRUE(contains(sentence, "linattn::token_from_dlpack: the elements are 6 apart")) << sentence;
  x.strides = nullptr;
  shape[0] = most;
  EXPECT_TRUE(contains(refusal([&] { token_from_dlpack<const float>(x); }), "no memory holds"));
  x.ndim = 2;
  EXPECT_TRUE(contains(refusal([&] { token_from_dlpack<const float>(x); }), "has 2 dimensions, asked for are 1"));
}

TEST_F(Dlpack, TheOperatorTakesIt) {
  const linattn::linear_attention<linattn::elu_plus_one> attention({.head_dim = 2, .heads = 2});
  row_matrix<float> x = row_matrix<float>::Random(3, 4);
  tensor_of_ours q = t();
  q.data = x.data();
  q.strides = nullptr;
  const auto view = from_dlpack<const float>(q);
  EXPECT_TRUE(attention.forward_causal(view, view, view) == attention.forward_causal(x, x, x));
}

TEST_F(Dlpack, TypesAreNotConverted) {
  const auto type = [&](std::uint8_t code, std::uint8_t bits, std::uint16_t lanes = 1) {
    return why([&](auto& x) { x.dtype = {code, bits, lanes}; });
  };
  EXPECT_EQ(type(2, 64), "linattn::from_dlpack: the tensor holds float64, asked for is float32");
  EXPECT_TRUE(contains(type(0, 32), "holds int32"));
  EXPECT_TRUE(contains(type(1, 32), "holds uint32"));
  EXPECT_TRUE(contains(type(4, 16), "holds bfloat16"));
  EXPECT_TRUE(contains(type(5, 64), "holds complex64"));
  EXPECT_TRUE(contains(type(17, 8), "holds type 17 of 8 bits"));
  EXPECT_TRUE(contains(type(2, 32, 4), "holds float32 x 4"));
  tensor_of_ours x = t();
  x.dtype = {2, 64, 1};
  strides[0] = 4;
  EXPECT_EQ(from_dlpack<const double>(x).rows(), 3);
  x.dtype = {2, 16, 1};
  EXPECT_EQ(from_dlpack<const Eigen::half>(x).rows(), 3);
  EXPECT_TRUE(
      contains(refusal([&] { from_dlpack<const Eigen::bfloat16>(x); }), "holds float16, asked for is bfloat16"));
  x.dtype = {4, 16, 1};
  EXPECT_EQ(from_dlpack<Eigen::bfloat16>(x).rows(), 3);
}

TEST_F(Dlpack, OtherDevicesAreRefused) {
  const std::string sentence = why([](auto& x) { x.device.device_type = 2; });
  EXPECT_TRUE(contains(sentence, "on a device of type 2, not in the memory of the CPU")) << sentence;
}

TEST_F(Dlpack, ShapesAndStridesAreChecked) {
  EXPECT_TRUE(contains(why([](auto& x) { x.ndim = 3; }), "has 3 dimensions, asked for are 2"));
  EXPECT_TRUE(contains(why([](auto& x) { x.ndim = 0; }), "has 0 dimensions"));
  EXPECT_TRUE(contains(why([](auto& x) { x.ndim = -1; }), "has -1 dimensions"));
  EXPECT_TRUE(contains(why([](auto& x) { x.shape = nullptr; }), "has no shape"));
  EXPECT_TRUE(contains(why([](auto& x) { x.data = nullptr; }), "data pointer is null"));
  EXPECT_EQ(why([this](auto&) { shape[0] = -3; }), "linattn::from_dlpack: size -3 of the tensor is negative");
  shape[0] = 3;
  EXPECT_TRUE(contains(why([this](auto&) { shape[1] = least; }), "is negative"));
  shape[1] = 4;
  EXPECT_TRUE(contains(why([this](auto&) { strides[1] = 2; }), "(3, 4) has strides (6, 2)"));
  EXPECT_TRUE(contains(why([this](auto&) { strides[1] = 0; }), "the second must be 1"));
  EXPECT_TRUE(contains(why([this](auto&) { strides[1] = -1; }), "the second must be 1"));
  strides[1] = 1;
  for (const std::int64_t stride : {most, most / 4, least, -(most / 4)}) {
    EXPECT_TRUE(contains(why([&](auto&) { strides[0] = stride; }), "no memory holds")) << stride;
  }
  strides[0] = 6;
  EXPECT_TRUE(contains(why([this](auto&) { shape[0] = most; }), "no memory holds"));
  EXPECT_TRUE(contains(why([this](auto& x) { shape[0] = shape[1] = most, x.strides = nullptr; }), "no memory holds"));
}

TEST_F(Dlpack, StridesOfWhatIsNotWalkedSayNothing) {
  shape[0] = 1;
  strides[0] = least;
  EXPECT_EQ(from_dlpack<float>(t()).cols(), 4);
  shape[1] = 1;
  strides[1] = most;
  EXPECT_EQ(from_dlpack<float>(t()).cols(), 1);
  shape[0] = 0;
  tensor_of_ours x = t();
  x.data = nullptr;
  EXPECT_EQ(from_dlpack<float>(x).rows(), 0);
}

TEST_F(Dlpack, OffsetsMustLeadToAnElement) {
  const std::string sentence = why([](auto& x) { x.byte_offset = 2; });
  EXPECT_EQ(sentence, "linattn::from_dlpack: byte_offset 2 does not lead to an aligned float32");
  EXPECT_TRUE(contains(why([](auto& x) { x.byte_offset = std::uint64_t(-4); }), "byte_offset"));
  // Both misaligned, the sum is not.
  EXPECT_EQ(why([](auto& x) { x.data = static_cast<char*>(x.data) + 1, x.byte_offset = 3; }), "");
}

TEST_F(Dlpack, OutputsMustNotOverlap) {
  strides[0] = 2;
  EXPECT_EQ(refusal([&] { from_dlpack<const float>(t()); }), "");
  EXPECT_TRUE(contains(refusal([&] { from_dlpack<float>(t()); }), "rows of an output overlap"));
}

TEST_F(Dlpack, ManagedTensorsStayTheirOwners) {
  managed_of_ours x{t(), nullptr, [](managed_of_ours*) { FAIL() << "deleted"; }};
  EXPECT_EQ(from_dlpack<float>(x).data(), memory.data());
  versioned_of_ours y;
  y.dl_tensor = t();
  EXPECT_EQ(from_dlpack<float>(y).data(), memory.data());
  y.flags = 1;
  EXPECT_EQ(from_dlpack<const float>(y).data(), memory.data());
  EXPECT_TRUE(contains(refusal([&] { from_dlpack<float>(y); }), "read-only"));
  y.version.major = 2;
  EXPECT_TRUE(contains(refusal([&] { from_dlpack<const float>(y); }), "follows DLPack 2, known is version 1"));
}

#if defined(DLPACK_VERSION)
TEST_F(Dlpack, RealHeader) {
  DLManagedTensor x{};
  x.dl_tensor.data = memory.data();
  x.dl_tensor.device = {kDLCPU, 0};
  x.dl_tensor.ndim = 2;
  x.dl_tensor.dtype = {kDLFloat, 32, 1};
  x.dl_tensor.shape = shape;
  x.dl_tensor.strides = strides;
  EXPECT_EQ(from_dlpack<float>(x).row_stride(), 6);
  EXPECT_EQ(from_dlpack<const float>(x.dl_tensor).data(), memory.data());
  x.dl_tensor.device.device_type = kDLCUDA;
  EXPECT_TRUE(contains(refusal([&] { from_dlpack<const float>(x); }), "device of type 2"));
}
#endif

}  // namespace
