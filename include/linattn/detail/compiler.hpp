// What the language lacks and compilers offer: the only file with compiler extensions.
#pragma once

/// On a function: inline it whatever the heuristics say. The kernels are built from many small functions whose
/// registers must not pass through memory.
/// LINATTN_INLINE_LAMBDA: the same for a lambda, between its parameter list and its body.
#if defined(_MSC_VER) && !defined(__clang__)
#define LINATTN_INLINE __forceinline
#define LINATTN_INLINE_LAMBDA
#else
#define LINATTN_INLINE inline __attribute__((always_inline))
#define LINATTN_INLINE_LAMBDA __attribute__((always_inline))
#endif

/// LINATTN_NOINLINE: a function of its own, so that the registers of its loops do not depend on its caller.
#if defined(_MSC_VER) && !defined(__clang__)
#define LINATTN_NOINLINE __declspec(noinline)
#else
#define LINATTN_NOINLINE __attribute__((noinline))
#endif

/// LINATTN_EXPORT: on a function, seen outside its shared object whatever -fvisibility says.
#if defined(_WIN32)
#define LINATTN_EXPORT __declspec(dllexport)
#else
#define LINATTN_EXPORT __attribute__((visibility("default")))
#endif

/// LINATTN_CPU_SUPPORTS(feature): whether this x86-64 processor has it and the system saves its registers. Defined
/// where the compiler has such a question and GCC's <cpuid.h>.
#if defined(__x86_64__) && (!defined(_MSC_VER) || defined(__clang__))
#define LINATTN_CPU_SUPPORTS(feature) (__builtin_cpu_supports(feature) != 0)
#endif

/// A hint to bring the cache line of an address, any address, into L2. A macro: GCC 12 takes an inline function that
/// only prefetches for one without effect, and drops its calls.
#if defined(_MSC_VER) && !defined(__clang__)
#define LINATTN_PREFETCH(address) static_cast<void>(address)
#else
#define LINATTN_PREFETCH(address) __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 2)
#endif

/// LINATTN_VECTOR(bytes): on a typedef of an integer or float, a vector of it that is as long; arithmetic, comparison,
/// LINATTN_CONVERT_VECTOR(x, vector) lane by lane. Not defined where the compiler has none.
#if !defined(_MSC_VER) || defined(__clang__)
#define LINATTN_VECTOR(bytes) __attribute__((vector_size(bytes)))
#define LINATTN_CONVERT_VECTOR(x, vector) __builtin_convertvector(x, vector)
#endif

/// GCC drops the alignment attribute of SIMD types used as template arguments and says so at every use; nothing here
/// depends on that attribute.
#if defined(__GNUC__) && !defined(__clang__)
#define LINATTN_PUSH_SIMD_WARNINGS \
  _Pragma("GCC diagnostic push") _Pragma("GCC diagnostic ignored \"-Wignored-attributes\"")
#define LINATTN_POP_SIMD_WARNINGS _Pragma("GCC diagnostic pop")
#else
#define LINATTN_PUSH_SIMD_WARNINGS
#define LINATTN_POP_SIMD_WARNINGS
#endif

/// On a function, after const and noexcept: it takes bounded time, without heap, locks or system calls. From clang 20
/// on a promise that -Wfunction-effects checks at compile time and -fsanitize=realtime at run time. Only for functions
/// that do not throw: an exception leaves the sanitizer in the real-time context for good. Inline functions without it
/// are checked where they are called. LINATTN_PUSH_EFFECT_WARNINGS: up to the pop, a conversion may add the promise to
/// a function that does not keep it.
#if __has_cpp_attribute(clang::nonblocking)
#define LINATTN_NONBLOCKING [[clang::nonblocking]]
#define LINATTN_PUSH_EFFECT_WARNINGS \
  _Pragma("clang diagnostic push") _Pragma("clang diagnostic ignored \"-Wfunction-effects\"")
#define LINATTN_POP_EFFECT_WARNINGS _Pragma("clang diagnostic pop")
#else
#define LINATTN_NONBLOCKING
#define LINATTN_PUSH_EFFECT_WARNINGS
#define LINATTN_POP_EFFECT_WARNINGS
#endif
