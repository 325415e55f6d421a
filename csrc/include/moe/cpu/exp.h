// exp of a float as plain arithmetic, so that loops over it vectorise without a math library.
#pragma once

#include <cmath>
#include <cstdint>

#include "moe/cpu/formats.h"

namespace moe {
namespace MOE_ISA {

// exp(x) with an error of at most 2 units in the last place. x = n log 2 + r, where n is x / log 2 rounded to an
// integer; exp(r) is the polynomial of Cephes' expf. 2^n is multiplied as two factors, since n may be out of the range
// of a float's exponent.
// exp(-inf) is 0, exp(inf) is inf, and exp(NaN) is NaN.
inline float exp(float x) {
  const float bounded = x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x;  // the result is 0 or inf beyond
  const float shifted = bounded * 1.44269504088896341f + 12582912.0f;   // 1.5 * 2^23: the sum rounds to an integer
  const float n = shifted - 12582912.0f;
  const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // The low bits of `shifted` are those of the integer n.
  const int32_t exponent = bits_as<int32_t>(shifted) - 0x4b400000, half = exponent >> 1;
  const auto power = [](int32_t e) { return bits_as<float>(uint32_t(e + 127) << 23); };
  return p * power(half) * power(exponent - half);
}

inline double exp(double x) { return std::exp(x); }

}  // namespace MOE_ISA
}  // namespace moe
