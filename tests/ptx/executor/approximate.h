// Instructions whose results the PTX ISA does not define exactly. With approximation_seed 0 the result is computed in
// f64 and rounded. With another seed it also gets an error, a hash of the input: equal inputs give equal results, as on
// a GPU.
#pragma once

#include "numbers.h"

extern thread_local u64 approximation_seed;

// A hash of the seed, `input` and the instruction `which`.
inline u64 hashed(u64 input, u32 which) {
  u64 z = (input ^ approximation_seed ^ u64(which) << 56) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 29)) * 0xbf58476d1ce4e5b9ull;
  return z ^ (z >> 32);
}

// A number of either sign with a magnitude in [0.5, 1).
inline f64 signed_error(u64 input, u32 which) {
  const u64 z = hashed(input, which);
  const f64 magnitude = 0.5 + f64(z & 0xffff) / 131072.0;
  return z >> 63 ? -magnitude : magnitude;
}

// `exact` rounded to f32; with a seed it is first changed by up to `bound`, unless the rounded result were further off.
inline f32 displaced(f64 exact, f32 input, f64 bound, u32 which) {
  if (!approximation_seed) return static_cast<f32>(exact);
  const f32 result = static_cast<f32>(exact + bound * signed_error(bits<u32>(input), which));
  return std::fabs(f64(result) - exact) <= bound ? result : static_cast<f32>(exact);
}

// As displaced, with a bound relative to `exact`; zeros, infinities and NaN get no error.
inline f32 approximate(f64 exact, f32 input, f64 bound, u32 which) {
  if (exact == 0 || !std::isfinite(exact)) return static_cast<f32>(exact);
  return displaced(exact, input, bound * std::fabs(exact), which);
}

// `exact` rounded to f32; with a seed, a number 1 to `ulps` steps above or below it. Zeros, infinities and NaN get no
// error.
inline f32 stepped(f64 exact, f32 input, u32 ulps, u32 which) {
  f32 result = static_cast<f32>(exact);
  if (!approximation_seed || result == 0 || !std::isfinite(result)) return result;
  const u64 z = hashed(bits<u32>(input), which);
  const f32 towards = z >> 63 ? 0.0f : std::copysign(INFINITY, result);
  for (u32 k = 0; k <= static_cast<u32>(z & 0xffff) % ulps; k++) result = std::nextafter(result, towards);
  return result;
}

// Largest errors in the PTX ISA (9.1, sections 9.7.3.8 to 9.7.3.22).
// In ulps of the result: 1 for rcp, 2 for ex2, div.full and div.approx. Of ex2 the ISA says that they count from the
// correctly rounded result; here all do.
// Relative: 2^-23 for sqrt, 2^-22.9 for rsqrt, 2^-11 for tanh, and 2^-22 for lg2 outside of (0.5, 2).
// Absolute: 2^-22 for lg2 in (0.5, 2); for sin and cos 2^-20.5 in [-2 pi, 2 pi] and 2^-14.7 in [-100 pi, 100 pi]. The
// ISA gives no bound beyond; here it is 2^-14.7.
constexpr u32 kRcp = 1, kEx2 = 2, kDivide = 2;
constexpr f64 kSqrt = 0x1p-23, kLg2 = 0x1p-22, kTanh = 0x1p-11;
constexpr f64 kRsqrt = 1.277e-7, kSine = 6.743e-7, kWideSine = 3.757e-5;  // 2^-22.9, 2^-20.5, 2^-14.7, rounded down

inline f32 ex2(f32 x) { return x == 0 || std::isinf(x) ? std::exp2(x) : stepped(std::exp2(f64(x)), x, kEx2, 1); }
inline f32 lg2(f32 x) {
  const bool absolute = x >= 0.5f && x <= 2.0f;
  return absolute ? displaced(std::log2(f64(x)), x, kLg2, 2) : approximate(std::log2(f64(x)), x, kLg2, 2);
}
inline f32 rcp(f32 x) { return stepped(1 / f64(x), x, kRcp, 3); }
inline f32 rsqrt(f32 x) { return approximate(1 / std::sqrt(f64(x)), x, kRsqrt, 4); }
inline f32 square_root(f32 x) { return approximate(std::sqrt(f64(x)), x, kSqrt, 5); }
inline f32 hyperbolic_tangent(f32 x) {
  return std::isinf(x) ? std::tanh(x) : approximate(std::tanh(f64(x)), x, kTanh, 6);
}
inline f32 quotient(f32 x, f32 y) { return stepped(f64(x) / f64(y), x + y, kDivide, 7); }

// div.approx computes x * (1 / y). Its bound holds for |y| in [2^-126, 2^126].
inline f32 fast_quotient(f32 x, f32 y) {
  const f32 magnitude = std::fabs(y);
  if (magnitude < 0x1p-126f) return x * rcp(y);
  return magnitude > 0x1p126f && !std::isinf(y) ? x * std::copysign(0.0f, y) : quotient(x, y);
}

inline f64 sine_bound(f32 x) { return std::fabs(x) < 6.2831855f ? kSine : kWideSine; }
inline f32 sine(f32 x) { return x == 0 ? x : displaced(std::sin(f64(x)), x, sine_bound(x), 8); }
inline f32 cosine(f32 x) { return x == 0 ? 1 : displaced(std::cos(f64(x)), x, sine_bound(x), 9); }

// rcp.approx.ftz.f64 uses only the upper 32 bits of its operand; the lower 32 bits of its result are 0. The ISA gives
// no bound of its error.
inline f64 upper_half(f64 x) { return bits<f64>(bits<u64>(x) & 0xffffffff00000000ull); }
inline f64 rcp_upper(f64 x) {
  if (x != x) return bits<f64>(u64(0x7fffffff00000000));
  const f64 exact = flush(1 / flush(upper_half(x)));
  if (!approximation_seed || exact == 0 || !std::isfinite(exact)) return upper_half(exact);
  return upper_half(exact * (1 + 0x1p-22 * signed_error(bits<u64>(upper_half(x)), 10)));
}
