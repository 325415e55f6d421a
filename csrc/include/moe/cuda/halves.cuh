// Comparisons and sums of float16 numbers, two in a 32-bit word.
#pragma once

#include "moe/cuda/platform.cuh"

namespace moe {

#ifdef SIMT_HOST
template <class Compare>
uint32_t half2_compare(uint32_t x, uint32_t y, Compare compare) {
  const auto value = [](uint32_t bits) { return __half2float(__ushort_as_half(static_cast<uint16_t>(bits))); };
  return (compare(value(x), value(y)) ? 0xffffu : 0) | (compare(value(x >> 16), value(y >> 16)) ? 0xffff0000u : 0);
}
#endif

// Each 16-bit half of the result is 0xffff if x >= y for the numbers in that half of x and y, else 0; NaN gives 0.
__device__ __forceinline__ uint32_t half2_reaches(uint32_t x, uint32_t y) {
#ifdef SIMT_HOST
  return half2_compare(x, y, [](float a, float b) { return a >= b; });
#else
  uint32_t mask;
  asm("set.ge.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(x), "r"(y));
  return mask;
#endif
}

__device__ __forceinline__ uint32_t half2_equals(uint32_t x, uint32_t y) {
#ifdef SIMT_HOST
  return half2_compare(x, y, [](float a, float b) { return a == b; });
#else
  uint32_t mask;
  asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(x), "r"(y));
  return mask;
#endif
}

__device__ __forceinline__ uint32_t half2_add(uint32_t x, uint32_t y) {
#ifdef SIMT_HOST
  const auto sum = [](uint32_t a, uint32_t b) -> uint32_t {
    const auto value = [](uint32_t bits) { return __half2float(__ushort_as_half(static_cast<uint16_t>(bits))); };
    return __half_as_ushort(__float2half(value(a) + value(b)));
  };
  return sum(x, y) | sum(x >> 16, y >> 16) << 16;
#else
  uint32_t sum;
  asm("add.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
  return sum;
#endif
}

__device__ __forceinline__ bool half2_has_nan(uint32_t x) { return half2_equals(x, x) != 0xffffffffu; }

}  // namespace moe
