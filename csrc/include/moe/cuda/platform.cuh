// Includes CUDA's headers, or the emulation of CUDA on the host (tests/simt) if SIMT_HOST is defined.
#pragma once

#include <cstdint>

#ifdef SIMT_HOST
#include "simt.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

namespace moe {

// Hides the origin of `value` from the compiler, which then can neither reuse earlier results computed from `value` nor
// compute `value` itself again.
template <class T>
__device__ __forceinline__ void recompute(T& value) {
  static_assert(sizeof(T) == 4);
#ifdef SIMT_HOST
  (void)value;
#else
  asm volatile("" : "+r"(value));
#endif
}

template <class T, int N>
__device__ __forceinline__ void recompute(T (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) recompute(values[i]);
}

}  // namespace moe
