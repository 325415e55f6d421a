// Base of the other headers: CUDA, or its emulation on the host (tests/simt).
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

// Makes the compiler compute what depends on `value` again after this point, instead of keeping it in registers.
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
