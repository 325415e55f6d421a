// cp.async: copies from global to shared memory that bypass registers (sm_80 and later).
#pragma once

#include <cstdint>

namespace moe {

// Starts a copy of `valid` bytes from global memory at `source` to shared memory, followed by zeros up to BYTES bytes.
// Both addresses are multiples of BYTES. With valid == 0 nothing is read, and `source` may lie outside its matrix.
template <int BYTES>
__device__ __forceinline__ void async_copy(void* destination, const void* source, int valid = BYTES) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(destination));
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(source), "r"(valid) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(source), "n"(BYTES), "r"(valid)
                 : "memory");
  }
}

// Makes a group of this thread's copies since the last call.
__device__ __forceinline__ void async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all groups of this thread except the newest PENDING are finished. Other threads may read the copied data
// only after a later barrier.
template <int PENDING>
__device__ __forceinline__ void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

}  // namespace moe
