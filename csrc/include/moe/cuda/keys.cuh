// Keys: signed integers that order as floating-point numbers do. The key of a number is its bits without the sign,
// negated for a negative number; -0 and +0 have the same key. A stored key is unsigned: the key plus kZero. NaN is
// stored as kNaN, the number after the stored key of +inf. A 32-bit word holds one stored key of 32 bits or two of 16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "moe/cuda/compare.cuh"

namespace moe {

template <int BITS>
struct KeyOrder {
  static constexpr uint32_t kZero = 1u << (BITS - 1), kOnes = 2 * kZero - 1;
  static constexpr int kPerWord = 32 / BITS;

  __device__ static int key(uint32_t bits) {
    const int magnitude = static_cast<int>(bits & (kZero - 1));
    return bits & kZero ? -magnitude : magnitude;
  }
  __device__ static uint32_t bits(int key) { return key < 0 ? kZero - key : key; }

  __device__ static constexpr uint32_t in_each(uint32_t element) {
    return BITS == 32 ? element : element | element << 16;
  }
  // A mask: an element is all ones if the stored key in `keys` is at least that in `threshold`, else 0.
  __device__ static uint32_t reaching(uint32_t keys, uint32_t threshold) {
    if constexpr (BITS == 32) return keys >= threshold ? kOnes : 0;
    return spread_high_bits(reaches_u16x2(keys, threshold));
  }
  // Bit i of the result is 1 if element i of the four masks is all ones, else 0. Each bit of the result is set in at
  // most one byte of `bits`, and __dp4a adds the bytes.
  __device__ static uint32_t flags(const uint32_t (&masks)[4]) {
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
  // The mask of one word: element i is all ones if bit i of `flags` is 1, else 0.
  __device__ static uint32_t mask(uint32_t flags) {
    if constexpr (BITS == 32) return flags & 1 ? kOnes : 0;
    return (flags & 1) * 0xffffu | (flags >> 1 & 1) * 0xffff0000u;
  }
};

template <class T>
struct Key;

template <>
struct Key<float> : KeyOrder<32> {
  static constexpr uint32_t kNaN = 0xff800001u;
  __device__ static float value(uint32_t bits) { return __uint_as_float(bits); }
  __device__ static uint32_t nearest(float value) { return __float_as_uint(value); }
};

template <>
struct Key<__nv_bfloat16> : KeyOrder<16> {
  static constexpr uint32_t kNaN = 0xff81u;
  __device__ static float value(uint32_t bits) { return __uint_as_float(bits << 16); }
  __device__ static uint32_t nearest(float value) { return __bfloat16_as_ushort(__float2bfloat16(value)); }
};

template <>
struct Key<__half> : KeyOrder<16> {
  static constexpr uint32_t kNaN = 0xfc01u;
  __device__ static float value(uint32_t bits) { return __half2float(__ushort_as_half(bits)); }
  __device__ static uint32_t nearest(float value) { return __half_as_ushort(__float2half(value)); }
};

}  // namespace moe
