// LINATTN_UNDER_SANITIZER is defined where AddressSanitizer is on, which takes the compiler half a minute an operator.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define LINATTN_UNDER_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LINATTN_UNDER_SANITIZER 1
#endif
#endif
