// The boundary types: every layout they accept is seen where it lies, and no result depends on where that is.
#include <linattn/linattn.hpp>

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/refusal.hpp"
#include "support/sentinel.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Eigen::Index;
using linattn::matrix_view;
using linattn::row_matrix;
using linattn::row_vector;
using linattn::vector_view;

template <class T>
using column_major = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::ColMajor>;
template <class T>
using column_vector = Eigen::Matrix<T, Eigen::Dynamic, 1>;

/// Pointer, sizes and stride: that the pointer is the caller's shows that nothing was copied.
template <class T>
testing::AssertionResult is(const matrix_view<T>& view, const std::remove_const_t<T>* data, Index rows, Index cols,
                            Index row_stride) {
  if (view.data() == data && view.rows() == rows && view.cols() == cols && view.row_stride() == row_stride) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "a view of (" << view.rows() << ", " << view.cols() << "), row stride "
                                     << view.row_stride() << ", " << view.data() - data << " elements from the data";
}

template <class T>
testing::AssertionResult is(const vector_view<T>& view, const std::remove_const_t<T>* data, Index size) {
  if (view.data() == data && view.size() == size) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "a view of " << view.size() << ", " << view.data() - data
                                     << " elements from the data";
}

/// What the view shows, as an own matrix.
template <class T>
row_matrix<std::remove_const_t<T>> contents(const matrix_view<T>& view) {
  row_matrix<std::remove_const_t<T>> x(view.rows(), view.cols());
  for (Index i = 0; i < view.rows(); ++i) {
    for (Index j = 0; j < view.cols(); ++j) x(i, j) = view(i, j);
  }
  return x;
}

using support::refusal;

// Both through a parameter, so that the conversion is the implicit one of a call.
template <class T>
matrix_view<const T> in(matrix_view<const T> view) {
  return view;
}
template <class T>
matrix_view<T> out(matrix_view<T> view) {
  return view;
}
template <class T>
vector_view<const T> token_in(vector_view<const T> view) {
  return view;
}
template <class T>
vector_view<T> token_out(vector_view<T> view) {
  return view;
}

template <class T>
class MatrixView : public testing::Test {};
template <class T>
class VectorView : public testing::Test {};
template <class T>
class Layouts : public testing::Test {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(MatrixView, scalars);
TYPED_TEST_SUITE(VectorView, scalars);
TYPED_TEST_SUITE(Layouts, scalars);

// ---- what is accepted -----------------------------------------------------------------------------------------------

TYPED_TEST(MatrixView, OfMatrices) {
  using T = TypeParam;
  row_matrix<T> x(6, 10);
  const row_matrix<T>& constant = x;
  EXPECT_TRUE(is(in<T>(x), x.data(), 6, 10, 10));
  EXPECT_TRUE(is(in<T>(constant), x.data(), 6, 10, 10));
  EXPECT_TRUE(is(out<T>(x), x.data(), 6, 10, 10));

  Eigen::Matrix<T, 3, 4, Eigen::RowMajor> fixed;
  EXPECT_TRUE(is(in<T>(fixed), fixed.data(), 3, 4, 4));
  EXPECT_TRUE(is(out<T>(fixed), fixed.data(), 3, 4, 4));

  Eigen::Array<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> array(5, 2);
  EXPECT_TRUE(is(in<T>(array), array.data(), 5, 2, 2));

  row_matrix<T> narrow(6, 1);  // one column at run time only
  EXPECT_TRUE(is(in<T>(narrow), narrow.data(), 6, 1, 1));
  row_matrix<T> no_columns(4, 0);
  EXPECT_EQ(in<T>(no_columns).rows(), 4);
  EXPECT_EQ(out<T>(no_columns).cols(), 0);
}

// An input may be a temporary: it lives until the call is over.
TYPED_TEST(MatrixView, OfATemporaryInput) {
  using T = TypeParam;
  const auto first = [](matrix_view<const T> x) { return x(0, 0); };
  EXPECT_EQ(first(row_matrix<T>(row_matrix<T>::Constant(2, 3, T(7)))), T(7));
}

TYPED_TEST(MatrixView, OfPartsOfAMatrix) {
  using T = TypeParam;
  row_matrix<T> x(6, 10);
  const row_matrix<T>& constant = x;
  EXPECT_TRUE(is(in<T>(x.block(1, 2, 3, 4)), &x(1, 2), 3, 4, 10));
  EXPECT_TRUE(is(out<T>(x.block(1, 2, 3, 4)), &x(1, 2), 3, 4, 10));
  EXPECT_TRUE(is(in<T>(constant.block(1, 2, 3, 4)), &x(1, 2), 3, 4, 10));
  EXPECT_TRUE(is(in<T>(x.middleCols(3, 5)), &x(0, 3), 6, 5, 10));
  EXPECT_TRUE(is(out<T>(x.middleCols(3, 5)), &x(0, 3), 6, 5, 10));
  EXPECT_TRUE(is(in<T>(x.middleRows(2, 3)), &x(2, 0), 3, 10, 10));
  EXPECT_TRUE(is(out<T>(x.middleRows(2, 3)), &x(2, 0), 3, 10, 10));
  EXPECT_TRUE(is(in<T>(x.template leftCols<3>()), &x(0, 0), 6, 3, 10));
  EXPECT_TRUE(is(in<T>(x.bottomRows(2).rightCols(1)), &x(4, 9), 2, 1, 10));
  EXPECT_TRUE(is(in<T>(x.row(3)), &x(3, 0), 1, 10, 10));
  EXPECT_TRUE(is(out<T>(x.row(3)), &x(3, 0), 1, 10, 10));

  auto named = x.middleCols(1, 2);  // a named block is an lvalue
  EXPECT_TRUE(is(out<T>(named), &x(0, 1), 6, 2, 10));
}

TYPED_TEST(MatrixView, OfMapsAndRefs) {
  using T = TypeParam;
  std::vector<T> memory(200);
  T* const data = memory.data() + 1;  // no Map below promises alignment
  const T* const constant = data;
  using strided = Eigen::OuterStride<>;

  Eigen::Map<row_matrix<T>> plain(data, 4, 5);
  EXPECT_TRUE(is(in<T>(plain), data, 4, 5, 5));
  EXPECT_TRUE(is(out<T>(plain), data, 4, 5, 5));
  EXPECT_TRUE(is(out<T>(Eigen::Map<row_matrix<T>>(data, 4, 5)), data, 4, 5, 5));
  EXPECT_TRUE(is(in<T>(Eigen::Map<const row_matrix<T>>(constant, 4, 5)), data, 4, 5, 5));
  EXPECT_TRUE(is(in<T>(Eigen::Map<row_matrix<T>, Eigen::Unaligned, strided>(data, 4, 5, strided(9))), data, 4, 5, 9));
  EXPECT_TRUE(is(out<T>(Eigen::Map<row_matrix<T>, Eigen::Unaligned, strided>(data, 4, 5, strided(9))), data, 4, 5, 9));
  EXPECT_TRUE(
      is(out<T>(Eigen::Map<row_matrix<T>, Eigen::Unaligned, Eigen::OuterStride<8>>(data, 4, 5)), data, 4, 5, 8));
  // One row for every token, as an input.
  EXPECT_TRUE(
      is(in<T>(Eigen::Map<const row_matrix<T>, Eigen::Unaligned, strided>(data, 4, 5, strided(0))), data, 4, 5, 0));

  row_matrix<T> x(6, 10);
  const row_matrix<T>& y = x;
  Eigen::Ref<row_matrix<T>> ref(x);
  EXPECT_TRUE(is(in<T>(ref), x.data(), 6, 10, 10));
  EXPECT_TRUE(is(out<T>(ref), x.data(), 6, 10, 10));
  Eigen::Ref<row_matrix<T>> ref_of_block(x.middleCols(2, 3));
  EXPECT_TRUE(is(out<T>(ref_of_block), &x(0, 2), 6, 3, 10));
  const Eigen::Ref<const row_matrix<T>> const_ref(y.middleCols(2, 3));
  EXPECT_TRUE(is(in<T>(const_ref), &x(0, 2), 6, 3, 10));
  EXPECT_TRUE(is(in<T>(const_ref.middleRows(1, 2)), &x(1, 2), 2, 3, 10));
}

TYPED_TEST(MatrixView, OfTheTransposeOfAColumnMajorMatrix) {
  using T = TypeParam;
  column_major<T> x(10, 6);  // one token a column
  const column_major<T>& constant = x;
  EXPECT_TRUE(is(in<T>(x.transpose()), x.data(), 6, 10, 10));
  EXPECT_TRUE(is(in<T>(constant.transpose()), x.data(), 6, 10, 10));
  EXPECT_TRUE(is(out<T>(x.transpose()), x.data(), 6, 10, 10));
  EXPECT_TRUE(is(in<T>(x.middleRows(2, 3).transpose()), &x(2, 0), 6, 3, 10));
  EXPECT_TRUE(is(out<T>(x.middleCols(2, 3).transpose()), &x(0, 2), 3, 10, 10));
  EXPECT_TRUE(is(in<T>(x.transpose().middleCols(2, 3)), &x(2, 0), 6, 3, 10));
}

// A type with one column is (n, 1) whatever its storage order: one token a row, D = 1.
TYPED_TEST(MatrixView, OfColumnsAndRows) {
  using T = TypeParam;
  column_vector<T> tokens(7);
  EXPECT_TRUE(is(in<T>(tokens), tokens.data(), 7, 1, 1));
  EXPECT_TRUE(is(out<T>(tokens), tokens.data(), 7, 1, 1));
  EXPECT_TRUE(is(out<T>(tokens.segment(2, 3)), &tokens(2), 3, 1, 1));
  Eigen::Matrix<T, 5, 1> fixed;
  EXPECT_TRUE(is(out<T>(fixed), fixed.data(), 5, 1, 1));
  Eigen::Matrix<T, 1, 1> single;
  EXPECT_TRUE(is(out<T>(single), single.data(), 1, 1, 1));

  row_matrix<T> x(6, 10);
  EXPECT_TRUE(is(in<T>(x.col(4)), &x(0, 4), 6, 1, 10));
  EXPECT_TRUE(is(out<T>(x.col(4)), &x(0, 4), 6, 1, 10));
  EXPECT_TRUE(is(out<T>(x.middleRows(1, 3).col(4)), &x(1, 4), 3, 1, 10));
  column_major<T> y(6, 10);
  EXPECT_TRUE(is(in<T>(y.col(4)), &y(0, 4), 6, 1, 1));
  EXPECT_TRUE(is(out<T>(y.col(4)), &y(0, 4), 6, 1, 1));
  Eigen::Matrix<T, Eigen::Dynamic, 1> memory(20);
  Eigen::Map<column_vector<T>, Eigen::Unaligned, Eigen::InnerStride<>> every_third(memory.data(), 6,
                                                                                   Eigen::InnerStride<>(3));
  EXPECT_TRUE(is(in<T>(every_third), memory.data(), 6, 1, 3));

  row_vector<T> token(8);
  EXPECT_TRUE(is(in<T>(token), token.data(), 1, 8, token.outerStride()));
  EXPECT_TRUE(is(in<T>(tokens.transpose()), tokens.data(), 1, 7, tokens.transpose().outerStride()));
  EXPECT_TRUE(is(out<T>(token.segment(1, 4)), &token(1), 1, 4, token.segment(1, 4).outerStride()));
}

TYPED_TEST(MatrixView, OfRawMemory) {
  using T = TypeParam;
  T memory[24];
  for (int i = 0; i < 24; ++i) memory[i] = static_cast<T>(i);
  const T* const constant = memory;
  EXPECT_TRUE(is(matrix_view<const T>(constant, 3, 4), memory, 3, 4, 4));
  EXPECT_TRUE(is(matrix_view<T>(memory, 3, 4, 7), memory, 3, 4, 7));
  EXPECT_EQ((matrix_view<T>(memory, 3, 4, 7)(2, 1)), T(15));
  EXPECT_EQ((matrix_view<T>(memory, 3, 4, 7).row(2)), memory + 14);

  // Row stride 0: one row for every token. Rows may also slide along a signal. Inputs only.
  row_matrix<T> repeated(3, 2);
  repeated << 5, 6, 5, 6, 5, 6;
  EXPECT_TRUE(support::same_bits(contents(matrix_view<const T>(constant + 5, 3, 2, 0)), repeated));
  row_matrix<T> sliding(3, 2);
  sliding << 5, 6, 6, 7, 7, 8;
  EXPECT_TRUE(support::same_bits(contents(matrix_view<const T>(constant + 5, 3, 2, 1)), sliding));

  // A negative one walks backwards.
  row_matrix<T> backwards(3, 2);
  backwards << 20, 21, 15, 16, 10, 11;
  EXPECT_TRUE(support::same_bits(contents(matrix_view<T>(memory + 20, 3, 2, -5)), backwards));
  EXPECT_TRUE(support::same_bits(contents(in<T>(Eigen::Map<const row_matrix<T>, Eigen::Unaligned, Eigen::OuterStride<>>(
                                     constant + 20, 3, 2, Eigen::OuterStride<>(-5)))),
                                 backwards));
}

TYPED_TEST(MatrixView, IsAValue) {
  using T = TypeParam;
  row_matrix<T> x(3, 4);
  const matrix_view<T> view(x);
  const matrix_view<const T> reading = view;  // a write view reads, too
  EXPECT_TRUE(is(reading, x.data(), 3, 4, 4));
  static_assert(!std::is_convertible_v<matrix_view<const T>, matrix_view<T>>, "a read view must not write");
  static_assert(std::is_trivially_copyable_v<matrix_view<T>> && sizeof(matrix_view<T>) == 4 * sizeof(Index));
  static_assert(!std::is_convertible_v<T*, matrix_view<T>>);
  const matrix_view<T> nothing;
  EXPECT_TRUE(is<T>(nothing, nullptr, 0, 0, 0));
}

TYPED_TEST(VectorView, OfVectors) {
  using T = TypeParam;
  column_vector<T> column(7);
  row_vector<T> row(7);
  Eigen::Matrix<T, 7, 1> fixed;
  const column_vector<T>& constant = column;
  EXPECT_TRUE(is(token_in<T>(column), column.data(), 7));
  EXPECT_TRUE(is(token_in<T>(constant), column.data(), 7));
  EXPECT_TRUE(is(token_out<T>(column), column.data(), 7));
  EXPECT_TRUE(is(token_out<T>(row), row.data(), 7));
  EXPECT_TRUE(is(token_out<T>(fixed), fixed.data(), 7));
  EXPECT_TRUE(is(token_out<T>(column.segment(2, 3)), &column(2), 3));
  EXPECT_TRUE(is(token_in<T>(column.transpose()), column.data(), 7));
  EXPECT_TRUE(is(token_out<T>(row.transpose()), row.data(), 7));

  row_matrix<T> x(6, 10);
  EXPECT_TRUE(is(token_in<T>(x.row(2)), &x(2, 0), 10));
  EXPECT_TRUE(is(token_out<T>(x.row(2)), &x(2, 0), 10));
  EXPECT_TRUE(is(token_out<T>(x.row(2).segment(3, 4)), &x(2, 3), 4));
  EXPECT_TRUE(is(token_out<T>(x.middleCols(2, 5).row(1)), &x(1, 2), 5));
  column_major<T> y(6, 10);
  EXPECT_TRUE(is(token_out<T>(y.col(2)), &y(0, 2), 6));
  EXPECT_TRUE(is(token_in<T>(y.transpose().row(2)), &y(0, 2), 6));

  T memory[24];
  EXPECT_TRUE(is(token_out<T>(Eigen::Map<row_vector<T>>(memory + 1, 5)), memory + 1, 5));
  EXPECT_TRUE(is(token_in<T>(Eigen::Map<const column_vector<T>>(memory + 1, 5)), memory + 1, 5));
  Eigen::Ref<row_vector<T>> ref(row);
  EXPECT_TRUE(is(token_out<T>(ref), row.data(), 7));
}

TYPED_TEST(VectorView, OfSpansAndRawMemory) {
  using T = TypeParam;
  T memory[24];
  const std::span<T> writable(memory + 1, 5);
  const std::span<const T> readable(memory + 1, 5);
  EXPECT_TRUE(is(token_out<T>(writable), memory + 1, 5));
  EXPECT_TRUE(is(token_in<T>(readable), memory + 1, 5));
  EXPECT_TRUE(is(vector_view<T>(memory, 3), memory, 3));
  EXPECT_TRUE(is(vector_view<const T>(memory, 3), memory, 3));
  const vector_view<const T> reading = vector_view<T>(memory, 3);
  EXPECT_TRUE(is(reading, memory, 3));

  // What holds an activation is seldom const; reading it must not ask for a cast.
  EXPECT_TRUE((std::is_convertible_v<std::span<T>, vector_view<const T>>));
  EXPECT_TRUE((std::is_convertible_v<std::span<T, 5>, vector_view<T>>));
  static_assert(!std::is_convertible_v<std::span<const T>, vector_view<T>>);
  static_assert(!std::is_convertible_v<vector_view<const T>, vector_view<T>>);
  static_assert(std::is_nothrow_constructible_v<vector_view<T>, std::span<T>> &&
                std::is_nothrow_constructible_v<vector_view<T>, column_vector<T>&>);
}

// ---- what is refused at run time ------------------------------------------------------------------------------------

TYPED_TEST(MatrixView, RefusesNegativeSizes) {
  using T = TypeParam;
  T memory[24];
  for (const auto& text :
       {refusal([&] { matrix_view<T>(memory, -1, 4); }), refusal([&] { matrix_view<const T>(memory, -1, 4, 4); })}) {
    EXPECT_NE(text.find("linattn::matrix_view"), std::string::npos) << text;
    EXPECT_NE(text.find("(-1, 4)"), std::string::npos) << text;
  }
  EXPECT_NE(refusal([&] { matrix_view<T>(memory, 3, -4); }).find("(3, -4)"), std::string::npos);
}

TYPED_TEST(MatrixView, RefusesNullPointersToSomething) {
  using T = TypeParam;
  T* const null = nullptr;
  const std::string text = refusal([&] { matrix_view<const T>(null, 3, 4); });
  EXPECT_NE(text.find("null"), std::string::npos) << text;
  EXPECT_NE(text.find("(3, 4)"), std::string::npos) << text;
  EXPECT_NE(refusal([&] { matrix_view<T>(null, 1, 1, 1); }), "");
  EXPECT_EQ(refusal([&] { matrix_view<T>(null, 0, 4); }), "");
  EXPECT_EQ(refusal([&] { matrix_view<T>(null, 4, 0); }), "");
  EXPECT_EQ(refusal([&] { in<T>(row_matrix<T>()); }), "");
}

TYPED_TEST(MatrixView, RefusesOutputsWhoseRowsOverlap) {
  using T = TypeParam;
  T memory[24];
  using map = Eigen::Map<row_matrix<T>, Eigen::Unaligned, Eigen::OuterStride<>>;
  for (const Index stride : {Index(0), Index(1), Index(3), Index(-3)}) {
    const std::string text = refusal([&] { matrix_view<T>(memory + 12, 3, 4, stride); });
    EXPECT_NE(text.find("overlap"), std::string::npos) << text;
    EXPECT_NE(text.find("row stride " + std::to_string(stride)), std::string::npos) << text;
    EXPECT_NE(text.find("4 columns"), std::string::npos) << text;
    EXPECT_EQ(refusal([&] { matrix_view<const T>(memory + 12, 3, 4, stride); }), "");
    EXPECT_EQ(refusal([&] { matrix_view<T>(memory + 12, 1, 4, stride); }), "") << "one row overlaps with nothing";
    EXPECT_NE(refusal([&] { out<T>(map(memory + 12, 3, 4, Eigen::OuterStride<>(stride))); }), "");
  }
  for (const Index stride : {Index(4), Index(-4), Index(5), Index(-6)}) {
    EXPECT_EQ(refusal([&] { matrix_view<T>(memory + 12, 3, 4, stride); }), "");
  }
}

// ---- aliasing -------------------------------------------------------------------------------------------------------

template <class T>
std::set<const T*> addresses(const matrix_view<T>& view) {
  std::set<const T*> result;
  for (Index i = 0; i < view.rows(); ++i) {
    for (Index j = 0; j < view.cols(); ++j) result.insert(&view(i, j));
  }
  return result;
}

template <class T>
bool disjoint(const std::set<const T*>& a, const std::set<const T*>& b) {
  for (const T* p : a) {
    if (b.count(p) != 0) return false;
  }
  return true;
}

/// A random view inside `memory`: up to 4 rows and 5 columns, any row stride in -8 ... 8 that fits.
template <class T>
matrix_view<const T> random_view(support::random_bits& random, const std::vector<T>& memory) {
  const auto size = static_cast<Index>(memory.size());
  for (;;) {
    const Index rows = random.below(5), cols = random.below(6), stride = random.below(17) - 8;
    const Index first = random.below(size), last = first + (rows > 0 ? rows - 1 : 0) * stride;
    if (last < 0 || std::max(first, last) + cols > size) continue;
    return matrix_view<const T>(memory.data() + first, rows, cols, stride);
  }
}

// Exact, whatever the strides.
TYPED_TEST(MatrixView, OverlapAgainstSetsOfAddresses) {
  using T = TypeParam;
  support::random_bits random(7);
  const std::vector<T> memory(40);
  constexpr int trials = 30000;
  int sharing = 0, interleaved = 0, interleaved_otherwise = 0;
  for (int trial = 0; trial < trials; ++trial) {
    const auto a = random_view(random, memory);
    auto b = random_view(random, memory);
    if (trial % 2 == 0) {  // half of the pairs with equal strides, which are rare otherwise
      const Index first = b.data() - memory.data(), last = first + (b.rows() - 1) * a.row_stride();
      if (b.rows() == 0 || last < 0 || std::max(first, last) + b.cols() > Index(memory.size())) continue;
      b = matrix_view<const T>(b.data(), b.rows(), b.cols(), a.row_stride());
    }
    const bool shares = !disjoint(addresses(a), addresses(b));
    const bool found = linattn::detail::overlap(a, b);
    const auto text = [&](const char* what) {
      return std::string(what) + ": (" + std::to_string(a.rows()) + ", " + std::to_string(a.cols()) + ") stride " +
             std::to_string(a.row_stride()) + " and (" + std::to_string(b.rows()) + ", " + std::to_string(b.cols()) +
             ") stride " + std::to_string(b.row_stride()) + ", " + std::to_string(b.data() - a.data()) + " apart";
    };
    ASSERT_EQ(found, linattn::detail::overlap(b, a)) << text("not symmetric");
    ASSERT_EQ(found, shares) << text(shares ? "missed" : "false alarm");
    const auto last = [](const auto& x) { return std::max(x.row(0), x.row(x.rows() - 1)) + x.cols(); };
    const auto first = [](const auto& x) { return std::min(x.row(0), x.row(x.rows() - 1)); };
    if (shares) {
      ++sharing;
    } else if (a.rows() > 1 && b.rows() > 1 && first(a) < last(b) && first(b) < last(a)) {
      ++(a.row_stride() == b.row_stride() ? interleaved : interleaved_otherwise);
    }
  }
  // That the trials were about something.
  EXPECT_GT(sharing, trials / 10);
  EXPECT_GT(interleaved, trials / 200);
  EXPECT_GT(interleaved_otherwise, trials / 200);
}

TYPED_TEST(MatrixView, OverlapOfPartsOfOneMatrix) {
  using T = TypeParam;
  using linattn::detail::overlap;
  row_matrix<T> x(6, 10);
  column_major<T> y(10, 6);
  const auto overlaps = [](matrix_view<T> a, matrix_view<const T> b) { return overlap(a, b); };
  // Column blocks interleave in memory and share nothing.
  EXPECT_FALSE(overlaps(x.middleCols(0, 4), x.middleCols(4, 6)));
  EXPECT_FALSE(overlaps(x.middleCols(4, 6), x.middleCols(0, 4)));
  EXPECT_FALSE(overlaps(x.block(1, 0, 3, 4), x.block(2, 4, 3, 6)));
  EXPECT_FALSE(overlaps(y.topRows(4).transpose(), y.bottomRows(6).transpose()));
  EXPECT_FALSE(overlaps(x.topRows(3), x.bottomRows(3)));
  EXPECT_TRUE(overlaps(x.middleCols(0, 5), x.middleCols(4, 6)));
  EXPECT_TRUE(overlaps(x.block(1, 0, 3, 5), x.block(3, 4, 3, 6)));
  EXPECT_FALSE(overlaps(x.block(1, 0, 2, 5), x.block(3, 4, 3, 6)));
  EXPECT_TRUE(overlaps(x, x));
  EXPECT_TRUE(overlaps(x, x.row(5)));
  EXPECT_TRUE(overlaps(x.col(3), x.row(2)));
  EXPECT_FALSE(overlaps(x, y.transpose()));
  EXPECT_FALSE(overlaps(x.topRows(0), x));
  EXPECT_FALSE(overlaps(x.leftCols(0), x));
  // Walked backwards they lie where they lay.
  const matrix_view<T> backwards(&x(5, 0), 6, 4, -10);
  EXPECT_TRUE(overlaps(backwards, x.middleCols(3, 2)));
}

// ---- the operator on every layout -----------------------------------------------------------------------------------

/// A copy of a matrix in an own heap buffer without a byte to spare, `offset` elements in, rows `stride` apart; a
/// negative stride puts the last row first.
template <class T>
class placed {
 public:
  placed(const row_matrix<T>& x, Index stride, Index offset)
      : m_rows(x.rows()), m_cols(x.cols()), m_stride(stride), m_offset(offset) {
    const Index reach = m_rows == 0 ? 0 : (m_rows - 1) * std::abs(stride) + m_cols;
    m_memory.reset(new T[std::size_t(offset + reach)]());
    for (Index i = 0; i < m_rows; ++i) {
      for (Index j = 0; j < m_cols; ++j) first()[i * stride + j] = x(i, j);
    }
  }
  matrix_view<const T> input() const { return matrix_view<const T>(first(), m_rows, m_cols, m_stride); }
  matrix_view<T> output() { return matrix_view<T>(first(), m_rows, m_cols, m_stride); }
  vector_view<const T> token() const { return vector_view<const T>(first(), m_cols); }
  vector_view<T> token_output() { return vector_view<T>(first(), m_cols); }
  row_matrix<T> contents() const { return ::contents(input()); }

 private:
  T* first() const { return m_memory.get() + m_offset + (m_stride < 0 && m_rows > 0 ? (m_rows - 1) * -m_stride : 0); }

  Index m_rows, m_cols, m_stride, m_offset;
  std::unique_ptr<T[]> m_memory;
};

/// Everything the bulk verbs and step give for one set of inputs.
template <class T>
struct results {
  row_matrix<T> causal, full, read, denominators, stepped, causal_kv, absorbed_kv, stepped_kv, z;

  testing::AssertionResult same_bits_as(const results& other) const {
    const struct {
      const char* name;
      const row_matrix<T>&a, &b;
    } pairs[] = {{"forward_causal", causal, other.causal},
                 {"forward", full, other.full},
                 {"read", read, other.read},
                 {"denominators", denominators, other.denominators},
                 {"step", stepped, other.stepped},
                 {"S after forward_causal", causal_kv, other.causal_kv},
                 {"S after absorb", absorbed_kv, other.absorbed_kv},
                 {"S after step", stepped_kv, other.stepped_kv},
                 {"z", z, other.z}};
    for (const auto& pair : pairs) {
      if (const auto same = support::same_bits(pair.a, pair.b); !same) {
        return testing::AssertionFailure() << pair.name << ": " << same.message();
      }
    }
    return testing::AssertionSuccess();
  }
};

/// The verbs on copies of the inputs that lie as told; rows of different arguments are `stretch` and more apart.
template <class T, class Operator>
results<T> run(const Operator& attn, const support::attention_inputs<T>& x, Index sign, Index stretch, Index offset) {
  const Index n = x.q.rows(), value_cols = x.v.cols();
  const auto place = [&](const row_matrix<T>& matrix, Index extra) {
    return placed<T>(matrix, sign * (matrix.cols() + stretch * extra), offset + (stretch > 0 ? extra : 0));
  };
  const placed<T> q = place(x.q, 1), k = place(x.k, 2), v = place(x.v, 3);
  const auto output = [&] { return place(row_matrix<T>::Zero(n, value_cols), 1); };
  auto ws = attn.make_workspace();
  results<T> result;

  auto causal = output(), full = output(), read = output(), stepped = output();
  auto denominators = place(row_matrix<T>::Zero(n, attn.heads()), 2);
  auto s = attn.make_state();
  attn.forward_causal(s, q.input(), k.input(), v.input(), causal.output(), ws);
  result.causal = causal.contents();
  result.causal_kv = s.kv(attn.heads() - 1);
  result.z = s.k_sum(attn.heads() - 1);

  attn.forward(q.input(), k.input(), v.input(), full.output(), ws);
  result.full = full.contents();

  s.reset();
  attn.absorb(s, k.input(), v.input(), ws);
  attn.read(s, q.input(), read.output(), ws, denominators.output());
  result.read = read.contents();
  result.denominators = denominators.contents();
  result.absorbed_kv = s.kv(0);

  s.reset();
  result.stepped.resize(n, value_cols);
  for (Index i = 0; i < n; ++i) {
    const placed<T> q_t(x.q.row(i), x.q.cols(), offset), k_t(x.k.row(i), x.k.cols(), offset + 1),
        v_t(x.v.row(i), x.v.cols(), offset + 2);
    placed<T> out_t(row_matrix<T>::Zero(1, value_cols), value_cols, offset + 1);
    attn.step(s, q_t.token(), k_t.token(), v_t.token(), out_t.token_output(), ws);
    result.stepped.row(i) = out_t.contents();
  }
  result.stepped_kv = s.kv(0);
  return result;
}

template <class T>
using elu = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, T>;

// 11 tokens are two micro-blocks and a ragged one; 5 and 3 coordinates leave every packet ragged.
TYPED_TEST(Layouts, GiveTheSameBits) {
  using T = TypeParam;
  const elu<T> attn({.head_dim = 5, .value_dim = 3, .heads = 2});
  const support::attention_inputs<T> x(11, 10, 6, 1);
  const results<T> plain = run<T>(attn, x, 1, 0, 0);
  for (const Index sign : {1, -1}) {
    for (const Index stretch : {0, 1, 4}) {
      for (const Index offset : {0, 1, 2, 3, 5}) {
        EXPECT_TRUE(run<T>(attn, x, sign, stretch, offset).same_bits_as(plain))
            << "row strides of sign " << sign << " stretched by " << stretch << ", " << offset << " elements off";
      }
    }
  }
}

// The map that is not fused into packing reads the caller's rows by another way.
TYPED_TEST(Layouts, GiveTheSameBitsForMapsWithoutPackets) {
  using T = TypeParam;
  struct absolute_value {
    static constexpr Index dimension(Index head_dim) noexcept { return head_dim; }
    void forward(const linattn::const_tile<T>& x, linattn::tile<T>& phi) const { phi = x.cwiseAbs(); }
  };
  const linattn::linear_attention<absolute_value, linattn::additive, T> attn(
      {.head_dim = 5, .value_dim = 3, .heads = 2});
  const support::attention_inputs<T> x(11, 10, 6, 2);
  const results<T> plain = run<T>(attn, x, 1, 0, 0);
  for (const Index offset : {1, 2, 3}) EXPECT_TRUE(run<T>(attn, x, -1, 1, offset).same_bits_as(plain)) << offset;
}

// Every tail of a packet, in buffers that end with their last element: AddressSanitizer sees one element too many.
TYPED_TEST(Layouts, ExactlySizedBuffersOfAwkwardSizes) {
  using T = TypeParam;
  for (const Index head_dim : {1, 2, 3, 7, 8, 9, 15, 16, 17}) {
    for (const Index value_dim : {1, 3, 7, 8, 9, 16, 17}) {
      const elu<T> attn({.head_dim = head_dim, .value_dim = value_dim, .heads = 2});
      for (const Index n : {1, 5}) {
        const support::attention_inputs<T> x(n, 2 * head_dim, 2 * value_dim, 3);
        const results<T> exact = run<T>(attn, x, 1, 0, 1);
        EXPECT_TRUE(exact.same_bits_as(run<T>(attn, x, 1, 1, 0))) << head_dim << ", " << value_dim << ", " << n;
        EXPECT_TRUE(support::all_finite(exact.causal));
      }
    }
  }
}

// Eigen's own expressions, as a caller writes them: q, k and v packed side by side, outputs beside them.
TYPED_TEST(Layouts, PackedQkvAndTransposedOutputs) {
  using T = TypeParam;
  const Index n = 9, qk = 10, vo = 6;
  const elu<T> attn({.head_dim = 5, .value_dim = 3, .heads = 2});
  const support::attention_inputs<T> x(n, qk, vo, 4);
  const row_matrix<T> expected = attn.forward_causal(x.q, x.k, x.v);
  const row_matrix<T> expected_full = attn.forward(x.q, x.k, x.v);
  auto ws = attn.make_workspace();

  row_matrix<T> packed(n, 2 * qk + 2 * vo);
  packed << x.q, x.k, x.v, row_matrix<T>::Zero(n, vo);
  attn.forward_causal(packed.leftCols(qk), packed.middleCols(qk, qk), packed.middleCols(2 * qk, vo),
                      packed.rightCols(vo), ws);
  EXPECT_TRUE(support::same_bits(packed.rightCols(vo), expected));
  EXPECT_TRUE(support::same_bits(packed.leftCols(qk), x.q));
  EXPECT_TRUE(support::same_bits(packed.middleCols(qk, qk), x.k));
  EXPECT_TRUE(support::same_bits(packed.middleCols(2 * qk, vo), x.v));

  const column_major<T> q = x.q.transpose(), k = x.k.transpose(), v = x.v.transpose();  // (H D, N)
  column_major<T> y(vo, n);
  attn.forward(q.transpose(), k.transpose(), v.transpose(), y.transpose(), ws);
  EXPECT_TRUE(support::same_bits(y.transpose(), expected_full));
  EXPECT_TRUE(support::same_bits(attn.forward_causal(q.transpose(), x.k, v.transpose()), expected));

  const Eigen::Ref<const row_matrix<T>> q_ref(packed.leftCols(qk));
  EXPECT_TRUE(support::same_bits(attn.forward_causal(q_ref, x.k, x.v), expected));

  // A token as column, row, row of a matrix, span.
  auto s = attn.make_state();
  auto by_row = attn.make_state();
  column_vector<T> y_t(vo);
  row_vector<T> z_t(vo);
  std::vector<T> v_t(std::size_t(vo), T(0));
  for (Index i = 0; i < n; ++i) {
    for (Index j = 0; j < vo; ++j) v_t[std::size_t(j)] = x.v(i, j);
    attn.step(s, column_vector<T>(x.q.row(i)), k.col(i), std::span<const T>(v_t), y_t, ws);
    attn.step(by_row, x.q.row(i), x.k.row(i), x.v.row(i), z_t, ws);
    ASSERT_TRUE(support::same_bits(y_t.transpose(), z_t));
  }
}

// One head and one coordinate: a VectorXf is a sequence of N tokens.
TYPED_TEST(Layouts, VectorsAsSequencesOfOneCoordinate) {
  using T = TypeParam;
  const elu<T> attn({.head_dim = 1});
  const support::attention_inputs<T> x(10, 1, 1, 5);
  const row_matrix<T> expected = attn.forward_causal(x.q, x.k, x.v);
  const column_vector<T> q = x.q, k = x.k;
  row_matrix<T> columns(10, 3);
  columns << x.v, x.v, x.v;
  columns.col(2).setZero();
  auto ws = attn.make_workspace();
  attn.forward_causal(q, k, columns.col(1), columns.col(2), ws);
  EXPECT_TRUE(support::same_bits(columns.col(2), expected));
  EXPECT_TRUE(support::same_bits(columns.col(0), x.v));
}

// An input whose rows are one row, or slide along a signal, reads like the matrix that it describes.
TYPED_TEST(Layouts, BroadcastAndSlidingInputs) {
  using T = TypeParam;
  const Index n = 11;
  const elu<T> attn({.head_dim = 4, .value_dim = 3});
  const row_matrix<T> signal = support::normal_matrix<T>(1, n + 3, 6);
  const row_matrix<T> value = support::normal_matrix<T>(1, 3, 7);
  const matrix_view<const T> windows(signal.data(), n, 4, 1);
  const matrix_view<const T> constant(value.data(), n, 3, 0);
  const row_matrix<T> q = contents(windows), v = contents(constant);
  EXPECT_TRUE(support::same_bits(attn.forward_causal(windows, windows, constant), attn.forward_causal(q, q, v)));
  EXPECT_TRUE(support::same_bits(attn.forward(windows, windows, constant), attn.forward(q, q, v)));
}

TYPED_TEST(Layouts, SentinelsAroundOutputsSurvive) {
  using T = TypeParam;
  for (const Index value_dim : {1, 3, 4, 8, 9, 17}) {
    for (const Index n : {1, 4, 6}) {
      const elu<T> attn({.head_dim = 3, .value_dim = value_dim, .heads = 2});
      const support::attention_inputs<T> x(n, 6, 2 * value_dim, 8);
      auto ws = attn.make_workspace();
      auto s = attn.make_state();
      for (const Index margin : {1, 2}) {
        support::framed<T> causal(n, 2 * value_dim, margin), full(n, 2 * value_dim, margin),
            read(n, 2 * value_dim, margin), denominators(n, 2, margin), stepped(n, 2 * value_dim, margin);
        attn.forward_causal(x.q, x.k, x.v, causal.matrix(), ws);
        attn.forward(s, x.q, x.k, x.v, full.matrix(), ws);
        attn.read(s, x.q, read.matrix(), ws, denominators.matrix());
        for (Index i = 0; i < n; ++i) {
          attn.step(s, x.q.row(i), x.k.row(i), x.v.row(i), stepped.matrix().row(i), ws);
        }
        EXPECT_TRUE(causal.frame_intact());
        EXPECT_TRUE(full.frame_intact());
        EXPECT_TRUE(read.frame_intact());
        EXPECT_TRUE(denominators.frame_intact());
        EXPECT_TRUE(stepped.frame_intact());
        EXPECT_TRUE(support::same_bits(causal.matrix(), attn.forward_causal(x.q, x.k, x.v)));
      }
    }
  }
}

}  // namespace
