// Base of every other header: the CUDA language itself, or its twin on the host (tests/simt).
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

// Results computed from `value` before this point are not kept in registers for use after it.
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
