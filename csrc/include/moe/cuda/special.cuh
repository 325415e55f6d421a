// Functions of float32 by instructions of the special function unit, faster than CUDA's division, sqrtf and exp2f.
#pragma once

namespace moe {

// 1 / x for normal x > 0, with an error of at most a unit in the last place. A GPU returns 0 for a subnormal result.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The square root of x >= 0, with a relative error of at most 2^-23. A GPU returns 0 for a subnormal x.
__device__ __forceinline__ float square_root(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x for normal x > 0 with a normal result, with an error of about a unit in the last place. The estimate y has a
// relative error of some 2^-20, so that y (1 + e + e^2) with e = 1 - x y is off by some 2^-60 before rounding.
__device__ __forceinline__ double reciprocal(double x) {
  double y;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
  const double error = fma(-x, y, 1.0);
  return fma(y, fma(error, error, error), y);
}

// 2^x, with an error of at most two units in the last place; 0 if the result is subnormal.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace moe
