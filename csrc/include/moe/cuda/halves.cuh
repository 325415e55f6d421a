// Comparisons and sums of float16 numbers, two in a 32-bit word.
#pragma once

#include <cstdint>

namespace moe {

// Each 16-bit half of the result is 0xffff if x >= y for the numbers in that half of x and y, else 0; NaN gives 0.
__device__ __forceinline__ uint32_t half2_reaches(uint32_t x, uint32_t y) {
  uint32_t mask;
  asm("set.ge.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(x), "r"(y));
  return mask;
}

__device__ __forceinline__ uint32_t half2_equals(uint32_t x, uint32_t y) {
  uint32_t mask;
  asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(x), "r"(y));
  return mask;
}

__device__ __forceinline__ uint32_t half2_add(uint32_t x, uint32_t y) {
  uint32_t sum;
  asm("add.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
  return sum;
}

__device__ __forceinline__ bool half2_has_nan(uint32_t x) { return half2_equals(x, x) != 0xffffffffu; }

}  // namespace moe
