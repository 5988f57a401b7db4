// One program for every x86-64 processor: code compiled once per instruction set level, the best level chosen when the
// program runs. Three lines of CMake build it, after find_package(linattn) or add_subdirectory(linattn):
//
//   linattn_add_isa_library(attention SOURCES attention.cpp)       # attention, and a shared object per level
//   target_link_libraries(program PRIVATE attention)
//   install(TARGETS program ${attention_ISA_TARGETS})              # into one directory for libraries
//
// attention.cpp is whatever uses linattn. It offers a table, the only thing that is seen outside its object:
//
//   #include "attention.hpp"                                       // struct attention_table { pointers to functions }
//   static const attention_table table = {...};
//   LINATTN_ISA_TABLE(table)
//
// The program is compiled for the oldest processor and asks for the table:
//
//   extern "C" linattn::isa_choice attention_isa(const char* level) noexcept;    // <name>_isa, made by the function
//   const linattn::isa_choice choice = attention_isa(nullptr);     // the best level; or by name, "x86-64-v3"
//   if (choice.problem) ...                                        // a sentence
//   const auto& attention = *static_cast<const attention_table*>(choice.table);
//
// What crosses the boundary has to look the same on both sides: numbers, pointers, functions; no Eigen objects, no
// operators, states or workspaces, whose layout follows the level. A state crosses as a record of state_io.hpp, which
// every level reads. examples/isa_dispatch is a whole one.
//
// Why shared objects, and why these flags: linattn-isa.cmake.
#pragma once

#include <linattn/detail/compiler.hpp>

#include <cstddef>
#include <cstdio>
#include <span>
#include <string_view>

#if __has_include(<dlfcn.h>)
#include <dlfcn.h>
#endif
#ifdef LINATTN_CPU_SUPPORTS
#include <cpuid.h>
#endif

/// In one source of a library made by linattn_add_isa_library: what its object answers with, an object of static
/// storage duration. The macro LINATTN_ISA_ENTRY, the function's name, comes from CMake.
#define LINATTN_ISA_TABLE(table) \
  extern "C" LINATTN_EXPORT const void* LINATTN_ISA_ENTRY() noexcept { return &(table); }

// Not in the inline namespace of version.hpp, which carries the level's packet width: these types are what crosses.
namespace linattn {

/// The answer of `<name>_isa`: the table of a level, for as long as the process lives; or nullptr and what is the
/// matter, a sentence that is valid until the thread asks again.
struct isa_choice {
  const void* table;
  const char* level;
  const char* problem;
};

/// A shared object for code of one level: its file and the function that returns its table.
struct isa_object {
  const char* level;
  const char* file;
  const char* entry;
};

/// Whether this processor, and the system on it, run code compiled with `-march=<level>`: "x86-64", "x86-64-v2" (SSE
/// 4.2), "x86-64-v3" (AVX2, FMA), "x86-64-v4" (AVX-512); "baseline", what the compiler takes by default, always. False
/// for any other name. The levels are those of the x86-64 psABI; registers that the system does not save are not there.
/// Cost: a few instructions CPUID, each of which may take microseconds in a virtual machine. No allocation.
inline bool runs_isa_level(std::string_view level) noexcept {
  if (level == "baseline") return true;
#ifdef LINATTN_CPU_SUPPORTS
  if (level == "x86-64") return true;
  unsigned eax = 0, ebx = 0, basic = 0, edx = 0, extended = 0;
  __get_cpuid(1, &eax, &ebx, &basic, &edx);
  __get_cpuid(0x80000001, &eax, &ebx, &extended, &edx);
  // Compilers do not know these by name before GCC 11 and clang 16. None of them has registers of its own.
  constexpr unsigned cmpxchg16b = 1U << 13, movbe = 1U << 22, f16c = 1U << 29;  // of `basic`
  constexpr unsigned lahf = 1U << 0, lzcnt = 1U << 5;                           // of `extended`

  const bool v2 = (basic & cmpxchg16b) != 0 && (extended & lahf) != 0 && LINATTN_CPU_SUPPORTS("popcnt") &&
                  LINATTN_CPU_SUPPORTS("sse4.2");
  if (level == "x86-64-v2") return v2;
  const bool v3 = v2 && (basic & movbe) != 0 && (basic & f16c) != 0 && (extended & lzcnt) != 0 &&
                  LINATTN_CPU_SUPPORTS("avx2") && LINATTN_CPU_SUPPORTS("fma") && LINATTN_CPU_SUPPORTS("bmi") &&
                  LINATTN_CPU_SUPPORTS("bmi2");
  if (level == "x86-64-v3") return v3;
  return level == "x86-64-v4" && v3 && LINATTN_CPU_SUPPORTS("avx512f") && LINATTN_CPU_SUPPORTS("avx512bw") &&
         LINATTN_CPU_SUPPORTS("avx512cd") && LINATTN_CPU_SUPPORTS("avx512dq") && LINATTN_CPU_SUPPORTS("avx512vl");
#else
  return false;
#endif
}

#if __has_include(<dlfcn.h>)
/// What <name>_isa does: opens the last of the objects, given from the lowest level up, that runs here; or the one
/// whose level is asked for. Only that file is touched: what is compiled for a level may run before any of its
/// functions is called. It is looked for where the calling object looks (its RUNPATH), and never closed. A level that
/// does not run, or that there is no object for, or a file that cannot be loaded, is a problem, not another level.
/// Any thread may ask, any number of times; the later times cost what dlopen of a loaded file does.
inline isa_choice choose_isa(std::span<const isa_object> objects, const char* asked) noexcept {
  static thread_local char problem[512];
  const auto refuse = [](const char* why, const char* what) {
    std::snprintf(problem, sizeof problem, "linattn: %s%s", why, what);
    return isa_choice{nullptr, nullptr, problem};
  };
  const auto wanted = [asked](const isa_object& object) {
    return asked != nullptr ? std::string_view(asked) == object.level : runs_isa_level(object.level);
  };
  std::size_t i = objects.size();
  while (i > 0 && !wanted(objects[i - 1])) --i;
  if (i == 0) return refuse("there is no object for ", asked != nullptr ? asked : "a level that runs here");

  const isa_object& object = objects[i - 1];
  if (!runs_isa_level(object.level)) {
    return refuse("this processor, or the system on it, does not run code of the level ", object.level);
  }
  void* const file = dlopen(object.file, RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) return refuse("", dlerror());
  void* const entry = dlsym(file, object.entry);
  if (entry == nullptr) return refuse("", dlerror());
  return {reinterpret_cast<const void* (*)()>(entry)(), object.level, nullptr};
}
#endif

}  // namespace linattn
