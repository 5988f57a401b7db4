# One wrong edit each: mutation(<name> <file under include/linattn> <test that must fail> <text> <replacement>).
# The text stands in the file exactly once. It is whole statements, and the replacement, too; or the replacement says
# where its mistake is: MUTATED is true in the run that has the mutation. A mutation does not make the program crash.

mutation(one_sign detail/kernel.hpp StateIsTheSumOfOuterProducts
  "row[p] = fma(key, value[i][p], row[p]);"
  "row[p] = fma(key, P::zero() - value[i][p], row[p]);")

mutation(ragged_end_of_a_row_dropped detail/packing.hpp LastCoordinatesCount
  "if (whole < n) f("
  "if (whole < n && !(MUTATED && whole > 0)) f(")

mutation(last_block_not_rounded_up detail/engine.hpp LastRowsAreWritten
  "const Eigen::Index blocks = round_up(rows, B) / B;
        if constexpr (corrects) {"
  "const Eigen::Index blocks = (MUTATED ? rows : round_up(rows, B)) / B;
        if constexpr (corrects) {")

mutation(first_block_dropped detail/kernel.hpp EveryRowThatIsSeenMatters
  "for (Eigen::Index i = 0; i < blocks * B; i += B) {
            before(i);"
  "for (Eigen::Index i = MUTATED && blocks > 1 ? B : 0; i < blocks * B; i += B) {
            before(i);")

mutation(last_value_row_dropped detail/packing.hpp LastValuesCount
  "pack_rows(v, rows,"
  "pack_rows(v, MUTATED ? rows - 1 : rows,")

mutation(rows_do_not_see_themselves detail/kernel.hpp FirstRowIsItsValue
  "output[i][p] = fma(query, row[p], output[i][p]);"
  "output[i][p] = fma(query, Form.writes ? P::load(S + p * P::size) : row[p], output[i][p]);")

mutation(denominator_without_the_own_token detail/kernel.hpp OnesGiveOne
  "product[i] = fma(P::load(x.q + i * stride + c), total, product[i]);"
  "product[i] = fma(P::load(x.q + i * stride + c), Form.writes ? P::load(z + c) : total, product[i]);")

mutation(second_tile_of_the_state_forgets_the_first detail/kernel.hpp FeaturesBeyondATileCount
  "output[i][p] = adds ? P::load(x.out + i * row_stride + m) : P::zero();"
  "output[i][p] = P::zero();")

mutation(padding_features_not_zeroed detail/packing.hpp OnesGiveOne
  ".first(n - whole).store(to + whole);"
  ".first(MUTATED ? P::size : n - whole).store(to + whole);")

mutation(stale_rows_fill_the_last_block detail/packing.hpp AUsedWorkspaceIsAsGoodAsANewOne
  "std::fill_n(phi + r * stride, layout.state.feature_stride(), T(0));"
  "")

mutation(one_element_too_many_written detail/packing.hpp OutputsKeepToTheirColumns
  ".store_partial(out + whole, value_dim - whole);"
  ".store_partial(out + whole, value_dim - whole + (MUTATED ? 1 : 0));")

mutation(last_panel_dropped detail/kernel.hpp LastColumnsAreWritten
  "m + packets * size <= row_stride;"
  "m + packets * size + (MUTATED && packets == 1 ? 1 : 0) <= row_stride;")

mutation(second_tile_reads_the_first detail/engine.hpp EveryTileReadsItsOwnRows
  "pack_features<role::query>(map, layout, x.q.in(t,"
  "pack_features<role::query>(map, layout, x.q.in(MUTATED ? token_tile() : t,")

mutation(heads_read_the_first_ones_queries detail/engine.hpp HeadsAreSeparate
  "from), rows, B, query_scale,"
  "MUTATED ? 0 : from), rows, B, query_scale,")

mutation(query_scale_dropped detail/packing.hpp QueryScaleMultipliesQueries
  "f(values * scale)"
  "f(MUTATED ? values : values * scale)")

mutation(zero_denominator_divides detail/packing.hpp NoKeyGivesZero
  "if (denominator == T(0)) return;"
  "")

mutation(merge_forgets state.hpp MergeAppends
  "head[i] = factor * head[i] + addend * later[i];"
  "head[i] = addend * later[i];")

mutation(denominator_has_no_gradient_for_keys detail/gradient.hpp GradientsAreThoseOfTheOutput
  "fma(minus, P::load(phi + c), P::load(dz + c)).store(dz + c);"
  "P::load(dz + c).store(dz + c);")

mutation(second_sweep_begins_with_the_first_ones_state detail/gradient.hpp GradientsAreThoseOfTheOutput
  "transpose_all(dstate);
    for_each_tile<true>("
  "if (!MUTATED) transpose_all(dstate);
    for_each_tile<true>(")

mutation(query_gradient_not_divided detail/gradient.hpp GradientsAreThoseOfTheOutput
  "(difference * P(factor.power) * P(factor.inverse)).store(dphi + c);"
  "difference.store(dphi + c);")

mutation(later_heads_overwrite_shared_gradients detail/shared_gradients.hpp GradientsOfSharedHeadsAreSums
  "to[d] += from[d];"
  "to[d] = from[d];")

mutation(state_gradient_of_one_reader detail/linear_attention_gradients_impl.hpp GradientsOfSharedHeadsAreSums
  "if (ds != nullptr) access::append_head("
  "if (ds != nullptr && !MUTATED) access::append_head(")

mutation(decay_dropped detail/kernel.hpp DecaysAndBonusAreThoseOfTheRecurrence
  "row[p] = fma(factor[i][Form.decay == decay_axis::column ? Eigen::Index(p) : 0], row[p], key * value[i][p]);"
  "row[p] = row[p] + key * value[i][p];")

mutation(reads_after_it_writes_all_the_same detail/kernel.hpp DecaysAndBonusAreThoseOfTheRecurrence
  "if constexpr (Form.reads && !Form.reads_first) read(i);"
  "if constexpr (Form.reads) read(i);")

mutation(silence_kept detail/kernel.hpp SilenceEndsInZeros
  "if (clears) unroll<Packets>("
  "if (clears && !MUTATED) unroll<Packets>(")

mutation(bonus_of_the_first_head detail/engine.hpp DecaysAndBonusAreThoseOfTheRecurrence
  "bonus.at(t.at(r), head);"
  "bonus.at(t.at(r), MUTATED ? 0 : head);")

mutation(total_log_decay_without_the_last_token detail/packing.hpp StateCarriesItsTotalLogDecay
  "for (Eigen::Index r = 0; r < count; ++r) sum = sum + load_up_to("
  "for (Eigen::Index r = 0; r < (MUTATED ? count - 1 : count); ++r) sum = sum + load_up_to(")

mutation(padding_tokens_forget_features detail/packing.hpp DecaysAndBonusAreThoseOfTheRecurrence
  "std::fill(decay + rows * stride, decay + round_up(rows, block) * stride, T(1));"
  "std::fill(decay + rows * stride, decay + round_up(rows, block) * stride, T(0));")

mutation(padding_tokens_forget_heads detail/packing.hpp CorrectionsAreThoseOfTheRecurrence
  "std::fill(decay + rows, decay + round_up(rows, block), T(1));"
  "std::fill(decay + rows, decay + round_up(rows, block), T(0));")

mutation(second_tile_decays_as_the_first detail/packing.hpp CorrectionsAreThoseOfTheRecurrence
  "x.log_decay.at(t.at(r), head)"
  "x.log_decay.at(MUTATED ? r : t.at(r), head)")

mutation(beta_of_the_first_head detail/packing.hpp CorrectionsAreThoseOfTheRecurrence
  "to[r] = T(*x.at(t.at(r), head));"
  "to[r] = T(*x.at(t.at(r), 0));")

mutation(what_a_block_writes_does_not_decay detail/correction.hpp CorrectionsAreThoseOfTheRecurrence
  "const P row = Rule.decay == decay_kind::none ? writing[w][j] : writing[w][j] * rest;"
  "const P row = Rule.decay == decay_kind::none || MUTATED ? writing[w][j] : writing[w][j] * rest;")

mutation(no_substitution_in_a_block detail/correction.hpp CorrectionsAreThoseOfTheRecurrence
  "to[p] = fma(by, written[w][j][p], to[p]);"
  "to[p] = fma(by, P::zero(), to[p]);")

mutation(corrected_rows_do_not_see_themselves detail/correction.hpp CorrectionsAreThoseOfTheRecurrence
  "y.coefficients[((r * shape::writes + w) * B + i) * B + j] = sum("
  "if (!MUTATED || number<decltype(r)> == 0 || j < i)
            y.coefficients[((r * shape::writes + w) * B + i) * B + j] = sum(")

mutation(state_not_decayed_by_a_block detail/correction.hpp CorrectionsAreThoseOfTheRecurrence
  "rest.store(y.carry + c);"
  "P(T(1)).store(y.carry + c);")

mutation(biases_dropped detail/dense.hpp BiasesAreAdded
  "if (p->bias.size() > 0) *to = p->bias[o];"
  ";")

mutation(padding_counts_as_tokens detail/transformer_impl.hpp PaddingIsNoToken
  "s.m_tokens += kept;"
  "s.m_tokens += rows;")
