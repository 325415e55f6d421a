// cp.async: global to shared memory without passing through registers (sm_80 and later).
#pragma once

#include "moe/shared.cuh"

namespace moe {

// Copies BYTES to shared memory, the first `valid` of them from `source` and zeros for the rest; both addresses are
// aligned to BYTES. With valid == 0 nothing is read, but source must still be an address of global memory.
template <int BYTES>
__device__ __forceinline__ void async_copy(void* destination, const void* source, int valid = BYTES) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
#ifdef SIMT_HOST
  simt::async_copy<BYTES>(destination, source, valid);
#else
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(destination)), "l"(source),
                 "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(destination)), "l"(source),
                 "n"(BYTES), "r"(valid)
                 : "memory");
  }
#endif
}

// Groups the copies that this thread started since the last commit.
__device__ __forceinline__ void async_commit() {
#ifndef SIMT_HOST  // on the host a copy is finished when it returns
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all but the PENDING newest groups of this thread are finished. Other threads see their data only after a
// barrier that follows.
template <int PENDING>
__device__ __forceinline__ void async_wait() {
#ifndef SIMT_HOST
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

}  // namespace moe
