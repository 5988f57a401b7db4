// The causal product of the 2020 paper as its algorithm 1 states it, token by token: S += k v^T, then out = q S.
//
// What an extension in C++ with OpenMP makes of it: float, one state a head, plain loops that the compiler vectorises,
// heads over threads. Written from the description. It takes features, phi(q) and phi(k), and has no normaliser: around
// it, a framework computes both.
#pragma once

#include <cstddef>
#include <vector>

namespace peers {

/// One head of N tokens: q, k (N, C), v, out (N, M), row-major; S (C, M), which starts as it is.
inline void paper_loop(const float* __restrict q, const float* __restrict k, const float* __restrict v,
                       float* __restrict out, float* __restrict S, std::size_t n, std::size_t c, std::size_t m) {
  for (std::size_t t = 0; t < n; ++t, q += c, k += c, v += m, out += m) {
    for (std::size_t row = 0; row < c; ++row) {
      for (std::size_t col = 0; col < m; ++col) S[row * m + col] += k[row] * v[col];
    }
    for (std::size_t col = 0; col < m; ++col) out[col] = 0;
    for (std::size_t row = 0; row < c; ++row) {
      for (std::size_t col = 0; col < m; ++col) out[col] += q[row] * S[row * m + col];
    }
  }
}

/// H heads one after the other, (H, N, C) and (H, N, M), on so many threads.
inline void paper_loop(const float* q, const float* k, const float* v, float* out, std::size_t h, std::size_t n,
                       std::size_t c, std::size_t m, int threads) {
#pragma omp parallel for num_threads(threads)
  for (std::size_t head = 0; head < h; ++head) {
    std::vector<float> S(c * m, 0.0F);
    const std::size_t keys = head * n * c, values = head * n * m;
    paper_loop(q + keys, k + keys, v + values, out + values, S.data(), n, c, m);
  }
}

}  // namespace peers
