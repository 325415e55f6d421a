// Arithmetic of PTX for which C++ has no operator.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "types.h"

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline f32 from_bf16(u16 x) { return bits<f32>(static_cast<u32>(x) << 16); }
inline u16 to_bf16(f32 f) {
  if (f != f) return 0x7fff;
  const u32 v = bits<u32>(f);
  return static_cast<u16>((v + 0x7fff + ((v >> 16) & 1)) >> 16);
}
inline f32 from_f16(u16 x) { return static_cast<f32>(bits<_Float16>(x)); }
inline u16 to_f16(f32 f) { return f != f ? u16(0x7fff) : bits<u16>(static_cast<_Float16>(f)); }

// Replaces subnormal numbers by zero of the same sign.
template <class T>
inline T flush(T x) {
  return std::fabs(x) < std::numeric_limits<T>::min() ? std::copysign(T(0), x) : x;
}

// min and max: the result for a NaN and a number is the number; -0 is less than +0.
template <class T>
inline T least(T x, T y) {
  if (x != x) return y != y ? std::numeric_limits<T>::quiet_NaN() : y;
  if (y != y) return x;
  if (x == y) return std::signbit(x) ? x : y;
  return x < y ? x : y;
}
template <class T>
inline T greatest(T x, T y) {
  if (x != x) return y != y ? std::numeric_limits<T>::quiet_NaN() : y;
  if (y != y) return x;
  if (x == y) return std::signbit(x) ? y : x;
  return x > y ? x : y;
}
// min.NaN and max.NaN: NaN if x or y is NaN, else `otherwise`.
template <class T>
inline T or_nan(T x, T y, T otherwise) {
  return x != x || y != y ? std::numeric_limits<T>::quiet_NaN() : otherwise;
}

// For add, sub, mul, div and fma: every NaN result in f32 gets the same bits.
inline f32 one_nan(f32 x) { return x != x ? std::numeric_limits<f32>::quiet_NaN() : x; }
inline f64 one_nan(f64 x) { return x; }

// Float to integer: a value out of range becomes the nearest limit. NaN becomes 0 or, if F or I has 64 bits, the
// integer in which only the highest bit is set.
template <class I, class F>
inline I saturated(F x) {
  constexpr F low = static_cast<F>(std::numeric_limits<I>::min());
  constexpr F high = static_cast<F>(std::numeric_limits<I>::max() / 2 + 1) * 2;
  if (x != x) return sizeof(F) == 8 || sizeof(I) == 8 ? static_cast<I>(u64(1) << (8 * sizeof(I) - 1)) : 0;
  if (x <= low) return std::numeric_limits<I>::min();
  if (x >= high) return std::numeric_limits<I>::max();
  return static_cast<I>(x);
}

// prmt, bfe, bfi and brev.
inline u32 permuted(u32 a, u32 b, u32 selector) {
  const u64 pair = static_cast<u64>(b) << 32 | a;
  u32 result = 0;
  for (u32 i = 0; i < 4; i++) {
    const u32 nibble = selector >> (4 * i) & 15;
    u32 byte = static_cast<u32>(pair >> (8 * (nibble & 7))) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}

inline u32 field_u32(u32 a, u32 position, u32 length) {
  position &= 255, length &= 255;
  if (!length || position > 31) return 0;
  const u64 mask = (u64(1) << std::min(length, 32u)) - 1;
  return static_cast<u32>((static_cast<u64>(a) >> position) & mask);
}
inline s32 field_s32(s32 a, u32 position, u32 length) {
  position &= 255, length &= 255;
  if (!length) return 0;
  const u32 sign = static_cast<u32>(a) >> std::min(position + length - 1, 31u) & 1;
  u32 result = 0;
  for (u32 i = 0; i < 32; i++) {
    const bool inside = i < length && position + i <= 31;
    result |= (inside ? static_cast<u32>(a) >> (position + i) & 1 : sign) << i;
  }
  return static_cast<s32>(result);
}
inline u32 inserted(u32 a, u32 b, u32 position, u32 length) {
  position &= 255, length &= 255;
  for (u32 i = 0; i < length && position + i < 32; i++) {
    b = (b & ~(1u << (position + i))) | (a >> i & 1) << (position + i);
  }
  return b;
}
inline u32 reversed(u32 x) {
  u32 result = 0;
  for (u32 k = 0; k < 32; k++) result |= (x >> k & 1) << (31 - k);
  return result;
}
// dp4a: `sum` plus the products of the four bytes of x, of type A, with those of y, of type B.
template <class A, class B>
inline s32 dot_bytes(u32 x, u32 y, s32 sum) {
  for (u32 k = 0; k < 4; k++) sum += s32(static_cast<A>(x >> (8 * k))) * s32(static_cast<B>(y >> (8 * k)));
  return sum;
}

// a * b + c rounded down. The product is exact in f64; `error` is the rounding error of the sum (two-sum algorithm).
inline f32 fma_down(f32 a, f32 b, f32 c) {
  const f64 product = f64(a) * b, sum = product + c;
  const f64 of_c = sum - product, error = (product - (sum - of_c)) + (f64(c) - of_c);
  if (sum == 0 && error == 0) return product == 0 && std::signbit(product) == std::signbit(c) ? c : -0.0f;
  const f32 result = static_cast<f32>(sum);
  const bool above = f64(result) > sum || (f64(result) == sum && error < 0);
  return above ? std::nextafter(result, -INFINITY) : result;
}
