// linattn: exact linear attention on CPUs. MIT licence, see LICENSE.
#pragma once

#include <Eigen/Core>

// The version, once: CMakeLists.txt reads these three numbers.

/// Another one where a program that compiled may not, or may mean something else.
#define LINATTN_VERSION_MAJOR 0
/// Another one where there is something new, and before 1.0 as LINATTN_VERSION_MAJOR, too.
#define LINATTN_VERSION_MINOR 1
/// Another one where mistakes are mended, and nothing else.
#define LINATTN_VERSION_PATCH 0

/// The inline namespace all names live in.
///
/// A state's layout depends on the packet width, which follows the -m flags of the translation unit. The inline
/// namespace carries that width (bytes) beside the version, so that handing a state or an operator between translation
/// units built for different widths is a link error instead of a corrupted state. One set of flags per program, please.
#if defined(EIGEN_DONT_VECTORIZE)
#define LINATTN_ABI_NAMESPACE v0_1_scalar
#elif defined(EIGEN_VECTORIZE_AVX512)
#define LINATTN_ABI_NAMESPACE v0_1_w64
#elif defined(EIGEN_VECTORIZE_AVX)
#define LINATTN_ABI_NAMESPACE v0_1_w32
#elif defined(EIGEN_VECTORIZE)
#define LINATTN_ABI_NAMESPACE v0_1_w16
#else
#define LINATTN_ABI_NAMESPACE v0_1_scalar
#endif

/// What every header opens, and
#define LINATTN_NAMESPACE_BEGIN \
  namespace linattn {           \
  inline namespace LINATTN_ABI_NAMESPACE {
/// what it closes.
#define LINATTN_NAMESPACE_END \
  }                           \
  }
