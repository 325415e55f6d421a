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

// For kernels that are compiled for float and for double.
__device__ __forceinline__ double reciprocal(double x) { return 1.0 / x; }

// 2^x, with an error of at most two units in the last place; 0 if the result is subnormal.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace moe
