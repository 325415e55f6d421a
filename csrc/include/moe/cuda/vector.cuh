// Loads and stores of global memory. What store_streaming wrote leaves the caches first.
#pragma once

#include "moe/cuda/platform.cuh"

namespace moe {

template <class T>
__device__ __forceinline__ T load(const T* pointer) {
#ifdef SIMT_HOST
  return *pointer;
#else
  return __ldg(pointer);
#endif
}

template <class T>
__device__ __forceinline__ void store_streaming(T* pointer, T value) {
#ifdef SIMT_HOST
  *pointer = value;
#else
  __stcs(pointer, value);
#endif
}

inline bool is_aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

}  // namespace moe
