// Many sequences in one call: layouts, masks, and who runs the work, which moves no bit.
#include <linattn/batch.hpp>
#include <linattn/linattn.hpp>

#include <iostream>
#include <thread>
#include <vector>

using matrix = linattn::row_matrix<float>;

struct thread_each {  // an executor of one's own: f(0) ... f(n - 1), each once, all done when it returns
  template <class F>
  void parallel_for(Eigen::Index n, const F& f) const {
    std::vector<std::thread> threads;
    for (Eigen::Index i = 0; i < n; ++i) threads.emplace_back([&f, i] { f(i); });
    for (auto& thread : threads) thread.join();
  }
};

int main() {
  constexpr Eigen::Index B = 3, N = 50, H = 4, D = 16, M = 16;
  const matrix q = matrix::Random(B * N, H * D), k = matrix::Random(B * N, H * D), v = matrix::Random(B * N, H * M);
  const std::vector<int> lengths = {50, 7, 31};  // tokens of each sequence; what follows is padding

  const linattn::linear_attention<linattn::elu_plus_one> attn({.head_dim = D, .value_dim = M, .heads = H});
  const auto run = [&](const auto& executor, Eigen::Index at_once) {
    matrix out(B * N, H * M), next(B, H * M);
    auto ws = linattn::make_workspaces(attn, at_once);  // at most so many tasks at once
    auto states = linattn::make_states(attn, B);
    linattn::forward_causal(attn, states, linattn::bnhd(q.data(), B, N, H, D), linattn::bnhd(k.data(), B, N, H, D),
                            linattn::bnhd(v.data(), B, N, H, M), linattn::bnhd(out.data(), B, N, H, M), ws, executor,
                            {.mask = linattn::token_mask::lengths(lengths)});  // padding is as good as deleted

    const matrix q_t = q.topRows(B), k_t = k.topRows(B), v_t = v.topRows(B);  // one token of each sequence
    linattn::step(attn, states, linattn::one_each(q_t, H), linattn::one_each(k_t, H), linattn::one_each(v_t, H),
                  linattn::one_each(next, H), ws, executor);
    matrix both(B * N + B, H * M);
    both << out, next;
    return both;
  };
  const matrix alone = run(linattn::sequential(), 1);
  const matrix pooled = run(linattn::thread_pool(2), 2);
  const matrix own = run(thread_each(), 3);
  const bool same = pooled == alone && own == alone;
  std::cout << "one thread, a pool, threads of its own: " << (same ? "the same bits" : "DIFFERENT") << "\n";

  const matrix sequence = attn.forward_causal(q.middleRows(N, 7), k.middleRows(N, 7), v.middleRows(N, 7));
  const bool masked = alone.middleRows(N, 7) == sequence && alone.middleRows(N + 7, N - 7).isZero(0);
  std::cout << "a padded sequence and the same without padding: " << (masked ? "the same bits" : "DIFFERENT") << "\n";
  return same && masked ? 0 : 1;
}
