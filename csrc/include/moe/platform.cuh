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

// Makes `value` an unknown number to the compiler, which then computes expressions of `value` again, instead of keeping
// them in registers, but cannot compute `value` itself again.
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
