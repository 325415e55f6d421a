// exp of a float as plain arithmetic, so that loops vectorise without a math library.
#pragma once

#include <cmath>
#include <cstdint>

#include "moe/formats.h"

namespace moe {
namespace MOE_ISA {

// exp(x) within 2 units in the last place: x = n log 2 + r with |r| <= log(2) / 2, a polynomial in r (Cephes' expf), and
// 2^n as two factors, so that subnormal and the largest finite results are right too. exp(-inf) is 0, exp(inf) is inf,
// and NaN stays NaN.
inline float exp(float x) {
  const float bounded = x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x;  // beyond: 0 and +inf
  const float shifted = bounded * 1.44269504088896341f + 12582912.0f;   // 1.5 * 2^23: rounds to the nearest integer
  const float n = shifted - 12582912.0f;
  const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // The integer is in the low bits of `shifted`.
  const int32_t exponent = bits_as<int32_t>(shifted) - 0x4b400000, half = exponent >> 1;
  const auto power = [](int32_t e) { return bits_as<float>(uint32_t(e + 127) << 23); };
  return p * power(half) * power(exponent - half);
}

inline double exp(double x) { return std::exp(x); }

}  // namespace MOE_ISA
}  // namespace moe
