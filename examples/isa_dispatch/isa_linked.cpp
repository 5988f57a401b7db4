// All levels linked into one program instead of opened: whatever their order, each answers with its own code.
//
// They are loaded before main, also those that do not run here: which is right only as long as nothing in their sources
// runs by itself (objects with constructors at namespace scope, <iostream>). isa_dispatch has no such condition.

#include "check.hpp"

#include <cstdio>

extern "C" const void* attention_x86_64() noexcept;
extern "C" const void* attention_x86_64_v3() noexcept;
extern "C" const void* attention_x86_64_v4() noexcept;

int main() {
  struct linked_level {
    const char* name;
    const void* (*entry)() noexcept;
    int packet_bytes;
  };
  constexpr linked_level levels[] = {
      {"x86-64", attention_x86_64, 16},
      {"x86-64-v3", attention_x86_64_v3, 32},
      {"x86-64-v4", attention_x86_64_v4, 64},
  };
  bool right = true;
  for (const auto& [name, entry, packet_bytes] : levels) {
    if (!linattn::runs_isa_level(name)) {
      std::printf("%s: does not run here\n", name);
      continue;
    }
    const auto& level = *static_cast<const attention_table*>(entry());
    const double error = worst_error(level);
    std::printf("%s: registers of %d bytes, largest error %.1e\n", name, level.packet_bytes(), error);
    right = right && level.packet_bytes() == packet_bytes && error <= tolerance;
  }
  return right ? 0 : 1;
}
