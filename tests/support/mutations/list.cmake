# One wrong edit each: mutation(<name> <file under include/linattn> <test that must fail> <text> <replacement>).
# The text stands in the file exactly once. A mutation compiles, and does not make the program crash.

mutation(one_sign detail/kernel.hpp StateIsTheSumOfOuterProducts
  "row[p] = fma(feature, value[i][p], row[p]);"
  "row[p] = fma(feature, P::zero() - value[i][p], row[p]);")

mutation(ragged_end_of_a_row_dropped detail/packing.hpp LastCoordinatesCount
  "if (whole < n) {"
  "if (whole < n && whole == 0) {")

mutation(last_block_not_rounded_up detail/engine.hpp LastRowsAreWritten
  "round_up(rows, B) / B"
  "rows / B")

mutation(first_block_dropped detail/kernel.hpp EveryRowThatIsSeenMatters
  "for (Eigen::Index b = 0; b < blocks; ++b) {
      const head_block<T> block{head.q"
  "for (Eigen::Index b = blocks > 1 ? 1 : 0; b < blocks; ++b) {
      const head_block<T> block{head.q")

mutation(last_value_row_dropped detail/packing.hpp LastValuesCount
  "const T* token = v.row(first + r);"
  "if (r + 1 == rows) break;
    const T* token = v.row(first + r);")

mutation(rows_do_not_see_themselves detail/kernel.hpp FirstRowIsItsValue
  "unroll<i + 1>([&](auto j) LINATTN_INLINE_LAMBDA {
          const P product"
  "unroll<i>([&](auto j) LINATTN_INLINE_LAMBDA {
          const P product")

mutation(denominator_without_the_own_token detail/kernel.hpp OnesGiveOne
  "denominator += products[i * B + j];"
  "if (j < i) denominator += products[i * B + j];")

mutation(padding_features_not_zeroed detail/packing.hpp OnesGiveOne
  "std::fill(lanes + (n - whole), lanes + P::size, T(0));"
  "")

mutation(stale_rows_fill_the_last_block detail/packing.hpp AUsedWorkspaceIsAsGoodAsANewOne
  "T* head = phi + h * head_stride;
    std::fill(head + rows * stride, head + round_up(rows, block) * stride, T(0));"
  "")

mutation(one_element_too_many_written detail/packing.hpp OutputsKeepToTheirColumns
  "for (Eigen::Index m = whole; m < value_dim; ++m) to[m]"
  "for (Eigen::Index m = whole; m <= value_dim; ++m) to[m]")

mutation(last_panel_dropped detail/kernel.hpp LastColumnsAreWritten
  "for (; m < columns; m += size) panel("
  "for (; m + size < columns; m += size) panel(")

mutation(second_tile_reads_the_first detail/packing.hpp EveryTileReadsItsOwnRows
  "const T* token = x.row(first + r);"
  "const T* token = x.row(r);")

mutation(one_denominator_for_all_heads detail/packing.hpp HeadsAreSeparate
  "policy(denominators[h * layout.tokens() + r])"
  "policy(denominators[r])")

mutation(query_scale_dropped detail/packing.hpp QueryScaleMultipliesQueries
  "Role == role::query ? values * scale : values"
  "Role == role::query ? values : values")

mutation(zero_denominator_divides detail/packing.hpp NoKeyGivesZero
  "if (denominator == T(0)) return;"
  "")

mutation(merge_forgets state.hpp MergeAppends
  "sum[i] += addend[i]"
  "sum[i] = addend[i]")
