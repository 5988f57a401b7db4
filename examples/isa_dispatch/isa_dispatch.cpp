// One program for every processor: the best level that runs here, or the one asked for, opened by name.
//
//     isa_dispatch [best | <level> [save | load <file>]]
//
// Compares the level's numbers with the equation, and goes on from states that the other levels saved; or writes a
// state to a file, or goes on from one that was written on another processor. Exit code 1 for wrong numbers, 2 for a
// level that does not run.

#include "check.hpp"

#include <cstdio>
#include <fstream>
#include <string_view>

namespace {

bool report(const char* what, const char* level, double error) {
  std::printf("%s %s: largest error %.1e, tolerance %.1e\n", what, level, error, tolerance);
  return error <= tolerance;
}

const attention_table& table_of(const linattn::isa_choice& choice) {
  return *static_cast<const attention_table*>(choice.table);
}

}  // namespace

int main(int argc, char** argv) {
  const char* const asked = argc > 1 && argv[1] != std::string_view("best") ? argv[1] : nullptr;
  const std::string_view mode = argc == 4 ? argv[2] : "";
  const linattn::isa_choice choice = attention_isa(asked);
  if (choice.problem != nullptr) {
    std::fprintf(stderr, "%s\n", choice.problem);
    return 2;
  }
  const attention_table& level = table_of(choice);
  std::printf("level %s, registers of %d bytes\n", choice.level, level.packet_bytes());
  bool right = report("prompt and steps of", choice.level, worst_error(level));

  std::vector<std::byte> record = record_of_prompt(level);
  if (mode == "save") {
    right = std::ofstream(argv[3], std::ios::binary)
                .write(reinterpret_cast<const char*>(record.data()), static_cast<std::streamsize>(record.size()))
                .flush()
                .good() &&
            right;
  } else if (mode == "load") {
    std::ifstream(argv[3], std::ios::binary)
        .read(reinterpret_cast<char*>(record.data()), static_cast<std::streamsize>(record.size()));
    right = report("steps from the file, by", choice.level, worst_error_after(level, record)) && right;
  } else {
    for (const char* name : {"x86-64", "x86-64-v3", "x86-64-v4"}) {
      const linattn::isa_choice other = attention_isa(name);
      if (other.problem != nullptr || other.table == choice.table) continue;
      const auto others_record = record_of_prompt(table_of(other));
      right = report("steps from this level's state, by", name, worst_error_after(table_of(other), record)) && right;
      right = report("steps from the state of", name, worst_error_after(level, others_record)) && right;
    }
  }
  std::printf("%s: %s\n", choice.level, right ? "correct" : "WRONG");
  return right ? 0 : 1;
}
