// Operations over the lanes of a warp. All 32 lanes must call them together.
#pragma once

#include <cstdint>

namespace moe {

constexpr int kWarpSize = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ int warp_sum(int value) { return __reduce_add_sync(kAllLanes, value); }

// a + b, which no compiler may fuse with a product before it: sums over lanes then have the same bits under all of them.
__device__ __forceinline__ float unfused_sum(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double unfused_sum(double a, double b) { return __dadd_rn(a, b); }

// The sum over each group of `lanes` neighbouring lanes (a power of two). The order of additions is fixed: all lanes of
// a group get the same bits, in every run.
__device__ __forceinline__ float warp_sum(float value, int lanes = kWarpSize) {
#pragma unroll
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    value = unfused_sum(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

__device__ __forceinline__ float2 warp_sum(float2 value) { return {warp_sum(value.x), warp_sum(value.y)}; }

__device__ __forceinline__ float warp_max(float value, int lanes = kWarpSize) {
#pragma unroll
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

// The sum over this lane and all lower lanes of its group of `lanes` neighbours. lane: this lane's index in the group.
__device__ __forceinline__ int warp_inclusive_sum(int value, int lane, int lanes = kWarpSize) {
#pragma unroll
  for (int offset = 1; offset < lanes; offset *= 2) {
    const int below = __shfl_up_sync(kAllLanes, value, offset);
    if (lane >= offset) value += below;
  }
  return value;
}

}  // namespace moe
