// For kernels in which computing a value again is cheaper than keeping it in a register.
#pragma once

namespace moe {

// Hides the origin of `value` from the compiler, which then can neither reuse earlier results computed from `value` nor
// compute `value` itself again.
template <class T>
__device__ __forceinline__ void recompute(T& value) {
  static_assert(sizeof(T) == 4);
  asm volatile("" : "+r"(value));
}

template <class T, int N>
__device__ __forceinline__ void recompute(T (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) recompute(values[i]);
}

}  // namespace moe
