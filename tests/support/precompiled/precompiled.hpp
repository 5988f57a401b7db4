// What nearly every test program includes, parsed once, and the verbs of the operators that many of them use, compiled
// once: where a test is compiled with this before it (see CMakeLists.txt). Test files include what they use all the
// same, and the presets that build few of them compile them without this.
#pragma once

#include <linattn/linattn.hpp>
#include <linattn/update_rules/decay.hpp>
#include <linattn/update_rules/delta.hpp>
#include <linattn/update_rules/gated.hpp>

#include <gtest/gtest.h>

// The members below which the engine is; what calls them is compiled where it is used. `word` is `extern template` or
// `template`.
#define LINATTN_TEST_VERBS(word, ...)                                                                             \
  word void __VA_ARGS__::forward_causal(state_type&, input, input, input, const inputs&, output, workspace_type&) \
      const;                                                                                                      \
  word void __VA_ARGS__::forward_causal(input, input, input, const inputs&, output, workspace_type&) const;       \
  word void __VA_ARGS__::absorb(state_type&, input, input, const inputs&, workspace_type&) const;                 \
  word void __VA_ARGS__::read(const state_type&, input, output, workspace_type&) const;                           \
  word void __VA_ARGS__::step(state_type&, token, token, token, const token_inputs&, vector_view<scalar>,         \
                              workspace_type&) const noexcept;
#define LINATTN_TEST_UNORDERED(word, ...) \
  LINATTN_TEST_VERBS(word, __VA_ARGS__)   \
  word void __VA_ARGS__::run_forward(T*, Eigen::Index, input, input, input, output, workspace_type&) const;

#define LINATTN_TEST_MAPS(word, Scalar)                                                                     \
  LINATTN_TEST_UNORDERED(word, linattn::linear_attention<linattn::elu_plus_one, linattn::additive, Scalar>) \
  LINATTN_TEST_UNORDERED(word, linattn::linear_attention<linattn::exponential, linattn::additive, Scalar>)  \
  LINATTN_TEST_UNORDERED(word, linattn::linear_attention<linattn::identity, linattn::additive, Scalar>)
#define LINATTN_TEST_RULES(word, Scalar)                                                                            \
  LINATTN_TEST_VERBS(word, linattn::linear_attention<linattn::identity, linattn::decay, Scalar>)                    \
  LINATTN_TEST_VERBS(word, linattn::linear_attention<linattn::identity, linattn::gated<>, Scalar>)                  \
  LINATTN_TEST_VERBS(                                                                                               \
      word, linattn::linear_attention<linattn::identity, linattn::gated<linattn::decay_kind::per_feature>, Scalar>) \
  LINATTN_TEST_VERBS(word, linattn::linear_attention<linattn::identity, linattn::gated_bonus, Scalar>)              \
  LINATTN_TEST_VERBS(word, linattn::linear_attention<linattn::identity, linattn::delta, Scalar>)                    \
  LINATTN_TEST_VERBS(word, linattn::linear_attention<linattn::identity, linattn::gated_delta<>, Scalar>)            \
  LINATTN_TEST_VERBS(                                                                                               \
      word,                                                                                                         \
      linattn::linear_attention<linattn::identity, linattn::gated_delta<linattn::decay_kind::per_feature>, Scalar>) \
  LINATTN_TEST_VERBS(word, linattn::linear_attention<linattn::identity, linattn::generalized_delta, Scalar>)

LINATTN_TEST_MAPS(extern template, float)
LINATTN_TEST_MAPS(extern template, double)
LINATTN_TEST_RULES(extern template, float)
LINATTN_TEST_RULES(extern template, double)
