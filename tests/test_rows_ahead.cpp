// Prefetching has no result to compare: here its addresses are recorded instead. Every line of the rows ahead is
// fetched, whatever the shares of the panels, and no other.
#include <linattn/detail/compiler.hpp>

#include <cstdint>
#include <set>

namespace {
std::set<std::uintptr_t> fetched;  // lines
}
#undef LINATTN_PREFETCH
#define LINATTN_PREFETCH(address) fetched.insert((address) / 64)

#include <linattn/detail/rows_ahead.hpp>

#include <gtest/gtest.h>

namespace {

using Eigen::Index;
using linattn::detail::rows_ahead;

/// Lines of `rows` rows of `size` floats; where rows begin inside a line, that line only with `leading`.
std::set<std::uintptr_t> lines_of(const float* first, Index stride, Index rows, Index size, bool leading) {
  std::set<std::uintptr_t> lines;
  for (Index r = 0; r < rows; ++r) {
    const auto begin = reinterpret_cast<std::uintptr_t>(first + r * stride);
    const auto end = reinterpret_cast<std::uintptr_t>(first + r * stride + size);
    for (std::uintptr_t line = begin / 64; line * 64 < end; ++line) {
      if (leading || line * 64 >= begin) lines.insert(line);
    }
  }
  return lines;
}

template <Index B, Index PanelLines>
void expect_every_line() {
  constexpr Index rows = 16, widest = 640;
  alignas(64) static float memory[rows * widest + 64];
  for (const Index size : {1, 16, 17, 32, 64, 80, 96, 128, 256, 600}) {
    for (const Index panels : {1, 2, 3, 4, 5, 6, 8, 10, 16, 19}) {
      for (const Index before : {0, 4}) {
        for (const bool leading : {true, false}) {
          rows_ahead ahead(rows);
          ahead.add(memory + before, widest, size, leading);
          fetched.clear();
          for (Index panel = 0; panel < panels; ++panel) {
            const rows_ahead::share<B, PanelLines> share(ahead, panel, panels);
            for (Index i = 0; i < rows; i += B) share.fetch(i);
          }
          ASSERT_EQ(fetched, lines_of(memory + before, widest, rows, size, leading))
              << "B = " << B << ", lines of a panel " << PanelLines << ", size " << size << ", panels " << panels
              << ", rows begin at " << before << (leading ? ", leading" : "");
        }
      }
    }
  }
}

TEST(RowsAhead, EveryLineIsFetchedAndNoOther) {
  expect_every_line<4, 1>();
  expect_every_line<4, 2>();
  expect_every_line<8, 1>();
  expect_every_line<8, 2>();
}

TEST(RowsAhead, NothingIsFetchedPastTheLastWholeBlock) {
  alignas(64) static float memory[8 * 64];
  rows_ahead ahead(6);
  ahead.add(memory, 64, 64, true);
  fetched.clear();
  const rows_ahead::share<4, 2> share(ahead, 0, 1);
  share.fetch(0);
  share.fetch(4);
  EXPECT_EQ(fetched, lines_of(memory, 64, 4, 64, true));
}

}  // namespace
