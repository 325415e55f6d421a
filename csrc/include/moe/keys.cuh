// Floating-point numbers as unsigned integers, their keys, that order as the numbers do: of a negative number all bits
// are flipped, of any other the sign bit is set. Two adjustments make the order total: every NaN takes the key kNaN,
// above +inf, and where -0 and +0 are to be one, keys are counted in ranks, and both have the same.
#pragma once

#include "moe/compare.cuh"

namespace moe {

template <int BITS>
struct KeyOrder {
  static constexpr uint32_t kZero = 1u << (BITS - 1), kOnes = 2 * kZero - 1;
  static constexpr int kPerWord = 32 / BITS;

  __device__ static uint32_t key(uint32_t bits) { return keys(bits) & kOnes; }
  __device__ static uint32_t bits(uint32_t key) { return words(key) & kOnes; }
  __device__ static uint32_t rank(uint32_t key) { return key < kZero ? key + 1 : key; }
  __device__ static uint32_t key_of_rank(uint32_t rank) { return rank > kZero ? rank : rank - 1; }

  // The same for all elements of a register at once.
  __device__ static uint32_t keys(uint32_t word) { return word ^ (spread_signs(word) | in_each(kZero)); }
  __device__ static uint32_t words(uint32_t keys) { return keys ^ (~spread_signs(keys) | in_each(kZero)); }
  __device__ static constexpr uint32_t in_each(uint32_t element) {
    return BITS == 32 ? element : element | element << 16;
  }
  // All bits of the elements that reach the threshold, which is in each.
  __device__ static uint32_t reaching(uint32_t keys, uint32_t threshold) {
    if constexpr (BITS == 32) return keys >= threshold ? kOnes : 0;
    return spread_high_bits(reaches_u16x2(keys, threshold));
  }
  // One bit an element of such masks, and back again.
  template <int WORDS>
  __device__ static uint32_t flags(const uint32_t (&masks)[WORDS]) {
    if constexpr (WORDS == 4) {  // a byte of each mask, and of it one bit; bytes add up in one instruction
      uint32_t bits;
      if constexpr (BITS == 32) {
        bits = __byte_perm(__byte_perm(masks[0], masks[1], 0x0040), __byte_perm(masks[2], masks[3], 0x0040), 0x5410) &
               0x08040201u;
      } else {
        bits = (__byte_perm(masks[0], masks[1], 0x6420) & 0x08040201u) |
               (__byte_perm(masks[2], masks[3], 0x6420) & 0x80402010u);
      }
      return __dp4a(bits, 0x01010101u, 0u);
    }
    uint32_t flags = 0;
#pragma unroll
    for (int w = 0; w < WORDS; w++) flags |= masks[w] & (BITS == 32 ? 1u << w : 0x00020001u << (2 * w));
    return BITS == 32 ? flags : (flags | flags >> 16) & 0xffu;
  }
  __device__ static uint32_t mask(uint32_t flags) {
    if constexpr (BITS == 32) return flags & 1 ? kOnes : 0;
    return (flags & 1) * 0xffffu | (flags >> 1 & 1) * 0xffff0000u;
  }

 private:
  __device__ static uint32_t spread_signs(uint32_t word) {
    if constexpr (BITS == 32) return static_cast<uint32_t>(static_cast<int32_t>(word) >> 31);
    return spread_high_bits(word);
  }
};

template <class T>
struct Key;  // of float, __nv_bfloat16 and __half

template <>
struct Key<float> : KeyOrder<32> {
  static constexpr uint32_t kNaN = 0xff800001u, kMinusInfinity = 0x007fffffu;
  __device__ static float value(uint32_t bits) { return __uint_as_float(bits); }
  __device__ static uint32_t nearest(float value) { return __float_as_uint(value); }
};

template <>
struct Key<__nv_bfloat16> : KeyOrder<16> {
  static constexpr uint32_t kNaN = 0xff81u, kMinusInfinity = 0x007fu;
  __device__ static float value(uint32_t bits) { return __uint_as_float(bits << 16); }
  __device__ static uint32_t nearest(float value) { return __bfloat16_as_ushort(__float2bfloat16(value)); }
};

template <>
struct Key<__half> : KeyOrder<16> {
  static constexpr uint32_t kNaN = 0xfc01u, kMinusInfinity = 0x03ffu;
  __device__ static float value(uint32_t bits) { return __half2float(__ushort_as_half(bits)); }
  __device__ static uint32_t nearest(float value) { return __half_as_ushort(__float2half(value)); }
};

}  // namespace moe
