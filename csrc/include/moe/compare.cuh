// Counting the unsigned numbers that reach a threshold: one to a register, or two of 16 bits.
#pragma once

#include "moe/platform.cuh"

namespace moe {

// count + (x >= y). Written as C++ it takes three instructions, here two.
__device__ __forceinline__ int count_reaching(uint32_t x, uint32_t y, int count) {
#ifdef SIMT_HOST
  return count + (x >= y);
#else
  asm("{ .reg .pred p; setp.ge.u32 p, %1, %2; @p add.s32 %0, %0, 1; }" : "+r"(count) : "r"(x), "r"(y));
  return count;
#endif
}

constexpr uint32_t kHighBits = 0x80008000u;

__device__ __forceinline__ uint32_t splat16(uint32_t value) { return value * 0x00010001u; }

// Bits 15 and 31 tell whether the halves of x reach those of y; the other bits mean nothing.
// The low 15 bits are compared by a subtraction that cannot borrow from the next half; where the high bits of x
// and y differ they decide.
__device__ __forceinline__ uint32_t reaches_u16x2(uint32_t x, uint32_t y) {
  const uint32_t low = (x | kHighBits) - (y & ~kHighBits);
  return (x & ~y) | (~(x ^ y) & low);
}

// Four bytes of ones or zeros from the top bits of the halves of a and b, in that order.
__device__ __forceinline__ uint32_t spread_high_bits(uint32_t a, uint32_t b) {
#ifdef SIMT_HOST
  const auto ones = [](uint32_t word, int bit) { return (word >> bit & 1) * 0xffu; };
  return ones(a, 15) | ones(a, 31) << 8 | ones(b, 15) << 16 | ones(b, 31) << 24;
#else
  // Selector digit 8 + i copies the sign of byte i over the whole byte; __byte_perm leaves that mode out.
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, 0xfdb9;" : "=r"(bytes) : "r"(a), "r"(b));
  return bytes;
#endif
}

// count + how many of the four top bits are set.
__device__ __forceinline__ int count_high_bits(uint32_t a, uint32_t b, int count) {
  return __dp4a(static_cast<int>(spread_high_bits(a, b)), -1, count);
}

}  // namespace moe
