// 11_batch_and_masks: many sequences in one call, in whatever layout they lie, with states that stay where they are.
//
//     bnhd     | sequence 0: token 0: head 0 head 1, token 1: ... | sequence 1: ...         (B, N, H, D), (B, N, H D)
//     bhnd     | sequence 0: head 0: token 0 token 1 ..., head 1: ... | sequence 1: ...     (B, H, N, D)
//     packed   | sequence 0: 5 tokens | sequence 1: 12 tokens | sequence 2: 9 tokens |      (tokens, H D)
//              ^ cu_seqlens:  0       ^ 5                     ^ 17                   ^ 26
//
//     masked   | sequence 0: 5 tokens, padding | sequence 1: 12 tokens | ... |              any layout but packed
//
// Views describe where numbers lie; nothing is copied or gathered. Every result below is compared, bit for bit, with
// that of one call for each sequence.

#include <linattn/batch.hpp>
#include <linattn/linattn.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

namespace {

using attention = linattn::linear_attention<linattn::elu_plus_one>;
using matrix = linattn::row_matrix<float>;
using Eigen::Index;

constexpr Index sequences = 3, tokens = 12, heads = 2, dim = 16, width = heads * dim;

matrix waves(Index rows, float frequency) {
  matrix x(rows, width);
  for (Index i = 0; i < x.size(); ++i) x.data()[i] = std::sin(frequency * float(i));
  return x;
}

bool all_same = true;

void compare(const char* what, const matrix& got, const matrix& expected) {
  const bool is_same = got.allFinite() && (got.array() == expected.array()).all();
  std::printf("  %-62s %s\n", what, is_same ? "the same bits" : "DIFFERENT");
  all_same = all_same && is_same;
}

/// (B, N, H, D) -> (B, H, N, D), and back with `tokens` and `heads` swapped.
matrix transposed(const matrix& x, Index outer, Index inner) {
  matrix result(x.rows(), x.cols());
  for (Index b = 0; b < sequences; ++b) {
    const Index first = b * outer * inner * dim;
    for (Index i = 0; i < outer; ++i) {
      for (Index j = 0; j < inner; ++j) {
        std::copy_n(x.data() + first + (i * inner + j) * dim, dim, result.data() + first + (j * outer + i) * dim);
      }
    }
  }
  return result;
}

}  // namespace

int main() {
  const attention attn({.head_dim = dim, .heads = heads});
  auto workspaces = linattn::make_workspaces(attn, 1);  // one for each thread: examples/12_executors.cpp
  const Index rows = sequences * tokens;
  const matrix q = waves(rows, 0.3F), k = waves(rows, 0.7F), v = waves(rows, 1.1F);

  // ---- layouts ------------------------------------------------------------------------------------------------------

  std::printf("%ld sequences of %ld tokens, %ld heads of %ld\n", long(sequences), long(tokens), long(heads), long(dim));
  matrix expected(rows, width);
  for (Index b = 0; b < sequences; ++b) {
    const auto of_sequence = [&](const matrix& x) { return x.middleRows(b * tokens, tokens); };
    expected.middleRows(b * tokens, tokens) = attn.forward_causal(of_sequence(q), of_sequence(k), of_sequence(v));
  }

  matrix out(rows, width);
  const auto bnhd = [](auto& x) { return linattn::bnhd(x.data(), sequences, tokens, heads, dim); };
  linattn::forward_causal(attn, {}, bnhd(q), bnhd(k), bnhd(v), bnhd(out), workspaces);  // {}: no states are kept
  compare("bnhd", out, expected);

  const auto bhnd = [](auto& x) { return linattn::bhnd(x.data(), sequences, tokens, heads, dim); };
  const matrix other_q = transposed(q, tokens, heads), other_k = transposed(k, tokens, heads);
  linattn::forward_causal(attn, {}, bhnd(other_q), bhnd(other_k), bnhd(v), bhnd(out), workspaces);
  compare("bhnd; v in bnhd: every argument may have a layout of its own", transposed(out, heads, tokens), expected);

  // ---- sequences of different lengths, one after the other ----------------------------------------------------------

  const std::vector<std::int32_t> cu_seqlens = {0, 5, 17, 26};
  const auto packed = [&](auto&& x) { return linattn::packed(x, cu_seqlens, heads); };
  const matrix packed_q = q.topRows(26), packed_k = k.topRows(26), packed_v = v.topRows(26);
  matrix packed_out(26, width), packed_expected(26, width);
  auto states = linattn::make_states(attn, sequences);
  std::vector<attention::state_type> own_states;
  auto workspace = attn.make_workspace();
  for (std::size_t b = 0; b < states.size(); ++b) {
    const Index first = cu_seqlens[b], n = cu_seqlens[b + 1] - first;
    own_states.push_back(attn.make_state());
    attn.forward_causal(own_states[b], packed_q.middleRows(first, n), packed_k.middleRows(first, n),
                        packed_v.middleRows(first, n), packed_expected.middleRows(first, n), workspace);
  }
  linattn::forward_causal(attn, states, packed(packed_q), packed(packed_k), packed(packed_v), packed(packed_out),
                          workspaces);
  compare("packed: 5, 12 and 9 tokens", packed_out, packed_expected);
  for (std::size_t b = 0; b < states.size(); ++b) all_same = all_same && states[b].tokens() == own_states[b].tokens();

  // ---- the same sequences, padded to one length: masks --------------------------------------------------------------

  // Masked is deleted: padding takes no part in anything, whatever it holds, and its outputs are 0.
  const auto spread = [&](const matrix& x, float padding, const auto& place) {
    matrix padded = matrix::Constant(rows, width, padding);
    for (Index b = 0; b < sequences; ++b) {
      const Index first = cu_seqlens[std::size_t(b)], n = cu_seqlens[std::size_t(b) + 1] - first;
      for (Index i = 0; i < n; ++i) padded.row(b * tokens + place(i, n)) = x.row(first + i);
    }
    return padded;
  };
  const auto run_padded = [&](const char* what, const linattn::token_mask& mask, const auto& place) {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    const matrix padded_q = spread(packed_q, nan, place), padded_k = spread(packed_k, nan, place);
    const matrix padded_v = spread(packed_v, nan, place);
    out.setConstant(nan);
    linattn::forward_causal(attn, {}, bnhd(padded_q), bnhd(padded_k), bnhd(padded_v), bnhd(out), workspaces,
                            linattn::sequential(), {.mask = mask});
    compare(what, out, spread(packed_expected, 0, place));
  };
  const std::vector<std::int32_t> lengths = {5, 12, 9};
  run_padded("padded behind, by lengths", linattn::token_mask::lengths(lengths), [](Index i, Index) { return i; });
  run_padded("padded before", linattn::token_mask::left_padding(lengths),
             [](Index i, Index n) { return tokens - n + i; });
  linattn::row_matrix<bool> kept(sequences, tokens);  // (B, N), any pattern
  const auto scattered = [](Index i, Index n) { return i == 0 ? 0 : tokens - n + i; };
  kept.setConstant(false);
  for (Index b = 0; b < sequences; ++b) {
    const Index n = lengths[std::size_t(b)];
    for (Index i = 0; i < n; ++i) kept(b, scattered(i, n)) = true;
  }
  run_padded("a hole behind the first token, by a matrix of bool", kept, scattered);

  // ---- a pool of states: serving ------------------------------------------------------------------------------------

  // 8 slots in one block of memory of the program's own, here with room to reach a boundary of state_alignment().
  constexpr std::int32_t slots = 8;
  const Index bytes = attn.state_bytes();
  std::vector<std::byte> memory(std::size_t(slots * bytes) + attention::state_alignment());
  void* aligned = memory.data();
  std::size_t room = memory.size();
  if (std::align(attention::state_alignment(), std::size_t(slots * bytes), aligned, room) == nullptr) return 1;
  linattn::state_pool pool{.memory = aligned, .bytes_per_slot = bytes, .capacity = slots};
  for (std::int32_t slot = 0; slot < slots; ++slot) attn.make_state(pool[slot]);
  std::printf("a pool of %d slots of %ld bytes\n", int(slots), long(bytes));

  const std::int32_t at_first[] = {6, 1, -1};  // -1: what this sequence leaves is not kept
  pool.slots = at_first;
  packed_out.setZero();
  linattn::forward_causal(attn, pool, packed(packed_q), packed(packed_k), packed(packed_v), packed(packed_out),
                          workspaces);
  compare("prompts of three sequences into slots 6, 1 and none", packed_out, packed_expected);

  // Decoding goes on with whoever is left, in any order: one token of each.
  const std::int32_t later[] = {1, 6};
  pool.slots = later;
  const matrix next_q = q.bottomRows(2), next_k = k.bottomRows(2), next_v = v.bottomRows(2);
  matrix next_out(2, width), next_expected(2, width);
  for (const Index row : {0, 1}) {
    attn.step(own_states[row == 0 ? 1 : 0], next_q.row(row), next_k.row(row), next_v.row(row), next_expected.row(row),
              workspace);
  }
  linattn::step(attn, pool, linattn::one_each(next_q, heads), linattn::one_each(next_k, heads),
                linattn::one_each(next_v, heads), linattn::one_each(next_out, heads), workspaces);
  compare("one token more of the second and the first", next_out, next_expected);

  // A slot named twice would be two sequences' state: that is refused, in a sentence, before anything is written.
  const std::int32_t twice[] = {6, 6};
  pool.slots = twice;
  try {
    linattn::step(attn, pool, linattn::one_each(next_q, heads), linattn::one_each(next_k, heads),
                  linattn::one_each(next_v, heads), linattn::one_each(next_out, heads), workspaces);
    all_same = false;
  } catch (const std::invalid_argument& e) {
    std::printf("  %s\n", e.what());
  }
  return all_same ? 0 : 1;
}
