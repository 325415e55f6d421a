// 1 / x of normal x > 0, to a unit in the last place.
#pragma once

#include "moe/platform.cuh"

namespace moe {

__device__ __forceinline__ float reciprocal(float x) {
#ifdef SIMT_HOST
  return 1.0f / x;
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

__device__ __forceinline__ double reciprocal(double x) { return 1.0 / x; }

}  // namespace moe
