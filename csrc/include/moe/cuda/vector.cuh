// Loads and stores of global memory. What store_streaming wrote leaves the caches first.
#pragma once

#include <cstdint>

namespace moe {

template <class T>
__device__ __forceinline__ T load(const T* pointer) {
  return __ldg(pointer);
}

template <class T>
__device__ __forceinline__ void store_streaming(T* pointer, T value) {
  __stcs(pointer, value);
}

inline bool is_aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

}  // namespace moe
