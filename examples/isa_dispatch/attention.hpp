// The boundary between the program and the levels: numbers, pointers and functions, which look the same to all of them.
#pragma once

#include <linattn/isa.hpp>

#include <cstddef>
#include <cstdint>

struct attention_session;  // one sequence and all it needs, as the level that made it sees fit

struct attention_table {
  int (*packet_bytes)() noexcept;  // the longest registers of the level

  attention_session* (*open)(std::int64_t head_dim, std::int64_t heads);
  void (*close)(attention_session*) noexcept;
  // q, k, v, out: (tokens, heads * head_dim), contiguous rows. Causal, after all tokens so far.
  void (*forward)(attention_session*, const float* q, const float* k, const float* v, float* out, std::int64_t tokens);

  std::size_t (*saved_bytes)(const attention_session*);
  void (*save)(const attention_session*, std::byte* to);
  bool (*load)(attention_session*, const std::byte* from, std::size_t bytes);  // false: no record of this session's
};

// Made by linattn_add_isa_library(attention ...).
extern "C" linattn::isa_choice attention_isa(const char* level) noexcept;
