// Many sequences: batches by threads, masks, a pool of states, segments.
#include "matrix.hpp"

#include "support/inputs.hpp"

#include <linattn/batch.hpp>
#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/feature_maps/identity.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace matrix::of_serving {

using row_matrix = linattn::row_matrix<float>;
using attention = linattn::linear_attention<linattn::elu_plus_one>;
constexpr Index B = 3, N = 11, D = 4, H = 2;

const row_matrix q = support::normal_matrix<float>(B * N, H* D, 1);
const row_matrix k = support::normal_matrix<float>(B * N, H* D, 2);
const row_matrix v = support::normal_matrix<float>(B * N, H* D, 3);

auto batch(auto& x) { return linattn::bnhd(x.data(), B, N, H, D); }

bool batches() {
  const attention attn({.head_dim = D, .heads = H});
  auto ws = linattn::make_workspaces(attn, 2);
  row_matrix out(B * N, H * D), expected(B * N, H * D);
  for (Index b = 0; b < B; ++b) {
    expected.middleRows(b * N, N) =
        attn.forward_causal(q.middleRows(b * N, N), k.middleRows(b * N, N), v.middleRows(b * N, N));
  }
  const linattn::thread_pool pool(2);
  linattn::forward_causal(attn, {}, batch(q), batch(k), batch(v), batch(out), ws, pool);
  bool good = check(close(out, expected), "batch", "thread_pool");

  const std::vector<std::int32_t> lengths = {N, 5, 1};
  linattn::forward_causal(attn, {}, batch(q), batch(k), batch(v), batch(out), ws, linattn::sequential(),
                          {.mask = linattn::token_mask::lengths(lengths)});
  good &= check(close(out.middleRows(N, 5), expected.middleRows(N, 5)) && out.row(N + 5).isZero(0), "batch", "lengths");

  const Index bytes = attn.state_bytes();
  std::vector<std::byte> memory(std::size_t(B * bytes + attention::state_alignment()));
  void* aligned = memory.data();
  std::size_t room = memory.size();
  std::align(std::size_t(attention::state_alignment()), std::size_t(B * bytes), aligned, room);
  const std::int32_t slots[] = {2, 0, 1};
  const linattn::state_pool states{.memory = aligned, .bytes_per_slot = bytes, .slots = slots, .capacity = B};
  for (const std::int32_t slot : slots) attn.make_state(states[slot]);
  linattn::forward_causal(attn, states, batch(q), batch(k), batch(v), batch(out), ws);
  const auto s = attn.attach_state(states[0]);
  const row_matrix read = attn.read(s, q.middleRows(N, 1));
  good &=
      check(s.tokens() == N && close(read, attn.forward(q.middleRows(N, 1), k.middleRows(N, N), v.middleRows(N, N))),
            "state_pool", "slot");
  return good;
}

bool segments() {
  const linattn::linear_attention<linattn::identity, linattn::delta> attn({.head_dim = D, .heads = H});
  const row_matrix keys = 0.3F * k, beta = support::uniform_matrix<float>(B * N, H, 4);
  auto whole = attn.make_state();
  auto merged = attn.make_state();
  auto later = attn.make_segment(N);
  attn.absorb(whole, keys, v, {.beta = beta});
  attn.absorb(merged, keys.topRows(N), v.topRows(N), {.beta = beta.topRows(N)});
  attn.absorb(later, keys.bottomRows(B * N - N), v.bottomRows(B * N - N), {.beta = beta.bottomRows(B * N - N)});
  merged.merge(later);
  return check(close(merged.kv(1), whole.kv(1)), "segment", "merge");
}

}  // namespace matrix::of_serving

bool matrix::serving() {
  bool good = of_serving::batches();
  good &= of_serving::segments();
  return good;
}
