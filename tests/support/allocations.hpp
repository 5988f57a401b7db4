// Counts what reaches the heap: malloc, calloc, realloc, aligned_alloc, posix_memalign, memalign, free, and operator
// new and delete, which the standard library builds on these.
//
//   const support::allocation_count count;
//   attn.step(s, q, k, v, y, ws);
//   EXPECT_EQ(count.total(), 0);
//
// Including this header puts the program's own definitions of these functions in front of the C library's. They are
// weak, so that any number of source files may include it. Needs GCC or clang and glibc; a sanitizer that brings an
// allocator of its own switches it off. Tests begin with LINATTN_NEEDS_ALLOCATION_COUNT(), which skips them there.
#pragma once

#include <Eigen/Core>  // first: clang's intrinsics headers declare posix_memalign, and not as a definition may follow
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LINATTN_COUNTS_ALLOCATIONS 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define LINATTN_COUNTS_ALLOCATIONS 0
#endif
#endif
#if !defined(LINATTN_COUNTS_ALLOCATIONS)
#if defined(__GLIBC__) && defined(__GNUC__)
#define LINATTN_COUNTS_ALLOCATIONS 1
#else
#define LINATTN_COUNTS_ALLOCATIONS 0
#endif
#endif

#define LINATTN_NEEDS_ALLOCATION_COUNT()                                                                       \
  if (!support::allocation_count::available) {                                                                 \
    GTEST_SKIP() << "counting allocations is not available here: it needs glibc and no sanitizer's allocator"; \
  }                                                                                                            \
  static_assert(true)

namespace support {
namespace detail {

inline std::atomic<long> allocations_seen{0};
inline std::atomic<long> frees_seen{0};

}  // namespace detail

/// Calls by any thread since it was made.
class allocation_count {
 public:
  static constexpr bool available = LINATTN_COUNTS_ALLOCATIONS != 0;

  /// Calls that ask for memory; realloc is one.
  long allocations() const { return detail::allocations_seen.load() - m_allocations; }
  /// Calls that give memory back, free(nullptr) not among them.
  long frees() const { return detail::frees_seen.load() - m_frees; }
  long total() const { return allocations() + frees(); }

 private:
  long m_allocations = detail::allocations_seen.load();
  long m_frees = detail::frees_seen.load();
};

}  // namespace support

#if LINATTN_COUNTS_ALLOCATIONS

extern "C" {

void* __libc_malloc(std::size_t) noexcept;
void* __libc_calloc(std::size_t, std::size_t) noexcept;
void* __libc_realloc(void*, std::size_t) noexcept;
void* __libc_memalign(std::size_t, std::size_t) noexcept;
void __libc_free(void*) noexcept;

__attribute__((weak)) void* malloc(std::size_t size) noexcept {
  ++support::detail::allocations_seen;
  return __libc_malloc(size);
}

__attribute__((weak)) void* calloc(std::size_t count, std::size_t size) noexcept {
  ++support::detail::allocations_seen;
  return __libc_calloc(count, size);
}

__attribute__((weak)) void* realloc(void* memory, std::size_t size) noexcept {
  ++support::detail::allocations_seen;
  return __libc_realloc(memory, size);
}

__attribute__((weak)) void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept {
  ++support::detail::allocations_seen;
  return __libc_memalign(alignment, size);
}

__attribute__((weak)) void* memalign(std::size_t alignment, std::size_t size) noexcept {
  ++support::detail::allocations_seen;
  return __libc_memalign(alignment, size);
}

__attribute__((weak)) int posix_memalign(void** memory, std::size_t alignment, std::size_t size) noexcept {
  ++support::detail::allocations_seen;
  if (alignment % sizeof(void*) != 0 || alignment == 0 || (alignment & (alignment - 1)) != 0) return EINVAL;
  void* const got = __libc_memalign(alignment, size);
  if (got == nullptr) return ENOMEM;
  *memory = got;
  return 0;
}

__attribute__((weak)) void free(void* memory) noexcept {
  if (memory != nullptr) ++support::detail::frees_seen;
  __libc_free(memory);
}

}  // extern "C"

#endif
