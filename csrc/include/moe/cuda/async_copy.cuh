// cp.async: copies from global to shared memory that bypass registers (sm_80 and later).
#pragma once

#include <cstdint>

namespace moe {

// Starts a copy of `valid` bytes from global memory at `source` to shared memory, followed by zeros up to 16 bytes.
// Both addresses are multiples of 16 bytes. With valid == 0 nothing is read, and `source` may lie outside its matrix.
__device__ __forceinline__ void async_copy(void* destination, const void* source, int valid) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(destination));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(source), "r"(valid) : "memory");
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
