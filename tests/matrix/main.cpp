#include "matrix.hpp"

#include <linattn/linattn.hpp>

#include <cstdio>
#include <cstring>
#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
#include <stdexcept>
#endif

/// Ends in the sentence of a refused call: caught and printed, or printed by the library, which then aborts.
int refuse() {
  const linattn::linear_attention<linattn::elu_plus_one> attn({.head_dim = 4});
  const linattn::row_matrix<float> q = linattn::row_matrix<float>::Zero(3, 5);
#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
  try {
    attn.forward_causal(q, q, q);
  } catch (const std::invalid_argument& e) {
    std::fprintf(stderr, "%s\n", e.what());
  }
#else
  attn.forward_causal(q, q, q);
#endif
  return 0;
}

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--refuse") == 0) return refuse();
  bool good = matrix::maps();
  good &= matrix::rules();
  good &= matrix::layers();
  good &= matrix::serving();
  return good ? 0 : 1;
}
