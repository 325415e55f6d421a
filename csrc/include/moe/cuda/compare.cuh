// Comparisons of numbers of 32 or 16 bits with a threshold. A number reaches a threshold if it is greater or equal.
#pragma once

#include <cstdint>

namespace moe {

__device__ __forceinline__ int count_reaching(uint32_t x, uint32_t y, int count) {
  asm("{ .reg .pred p; setp.ge.u32 p, %1, %2; @p add.s32 %0, %0, 1; }" : "+r"(count) : "r"(x), "r"(y));
  return count;
}

__device__ __forceinline__ int count_float_reaching(uint32_t x, uint32_t y, int count) {
  asm("{ .reg .pred p; setp.ge.f32 p, %1, %2; @p add.s32 %0, %0, 1; }" : "+r"(count) : "r"(x), "r"(y));
  return count;
}

__device__ __forceinline__ int count_float_equal(uint32_t x, uint32_t y, int count) {
  asm("{ .reg .pred p; setp.eq.f32 p, %1, %2; @p add.s32 %0, %0, 1; }" : "+r"(count) : "r"(x), "r"(y));
  return count;
}

__device__ __forceinline__ uint32_t float_reaches(uint32_t x, uint32_t y) {
  uint32_t mask;
  asm("{ .reg .pred p; setp.ge.f32 p, %1, %2; selp.b32 %0, -1, 0, p; }" : "=r"(mask) : "r"(x), "r"(y));
  return mask;
}

constexpr uint32_t kHighBits = 0x80008000u;

// Compares the halves of x and y as unsigned integers. Bit 15 of the result: whether the lower half of x reaches the
// lower half of y; bit 31: the same for the upper halves. The other bits have no meaning. If the high bits of two
// halves differ, the high bits decide, else the low 15 bits. x has its high bits set before the subtraction, so the
// lower half cannot borrow from the upper one.
__device__ __forceinline__ uint32_t reaches_u16x2(uint32_t x, uint32_t y) {
  const uint32_t low = (x | kHighBits) - (y & ~kHighBits);
  return (x & ~y) | (~(x ^ y) & low);
}

// Copies the high bit of each 16-bit half to all bits of the half.
__device__ __forceinline__ uint32_t spread_high_bits(uint32_t x) {
  // Selector digit 8 + i copies the high bit of byte i to a whole byte; __byte_perm does not offer this mode.
  uint32_t spread;
  asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(spread) : "r"(x));
  return spread;
}

// Counts the halves that are all ones in words whose halves are all ones or zero. `sum` is minus the sum of the words.
// If H upper and L lower halves are all ones, `sum` is 65536 (H - L) + L.
__device__ __forceinline__ int count_halves(uint32_t sum) {
  const int high_less_low = static_cast<int32_t>(sum) >> 16, low = static_cast<int>(sum & 0xffffu);
  return high_less_low + 2 * low;
}

}  // namespace moe
