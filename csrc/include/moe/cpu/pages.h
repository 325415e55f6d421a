#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace moe {
namespace MOE_ISA {

// Requests huge pages (2 MiB), for fewer page faults, in an output that will be written completely.
inline void expect_pages(void* output, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t page = 2 << 20;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(output) + page - 1) / page * page;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(output) + uintptr_t(bytes)) / page * page;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)output, (void)bytes;
#endif
}

}  // namespace MOE_ISA
}  // namespace moe
