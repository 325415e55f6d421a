// Bugs round barriers and plain memory.
#include "moe/block.cuh"
#include "moe/launch.cuh"
#include "ops.h"

namespace moe {
namespace {

constexpr int kBins = 64, kThreads = 128;

__global__ void histogram_kernel(int bug, const int32_t* x, int32_t* counts, int n) {
  SHARED(int32_t, bins, [kBins]);
  const int i = threadIdx.x;
  if (i < kBins) bins[i] = 0;
  if (bug != kNoBarrierAfterZeroing) __syncthreads();
  for (int at = i; at < n; at += kThreads) atomicAdd(&bins[x[at]], 1);
  while (bug == kSpin && atomicAdd(&bins[0], 0) >= 0) {
  }
  if (bug != kNoBarrierBeforeReading) __syncthreads();
  if (i < kBins) counts[i] = bins[i];
}

__global__ void row_sum_kernel(int bug, const float* x, float* y) {
  SHARED(float, sums, [kThreads / kWarpSize]);
  const int i = threadIdx.x;
  const float sum = warp_sum(x[blockIdx.x * kThreads + i]);
  if (bug == kReturnBeforeBarrier && i == 77) return;
  if (i % kWarpSize == 0) sums[i / kWarpSize] = sum;
  if (bug == kDivergentBarrier) {
    if (i < 96) __syncthreads();
  } else if (bug == kTwoBarriers) {
    if (i < 64) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  } else if (bug != kNoBarrierAfterWarpSums) {
    __syncthreads();
  }
  if (i != kThreads - 1) return;
  float total = 0;
  for (float each : sums) total += each;
  y[bug == kTwoBlocksOneWord ? 0 : blockIdx.x] = total;
}

}  // namespace

cudaError_t histogram(int bug, const int32_t* x, int32_t* counts, int64_t n, cudaStream_t stream) {
  return launch(histogram_kernel, 1, kThreads, 0, stream, bug, x, counts, static_cast<int>(n));
}

cudaError_t row_sum(int bug, const float* x, float* y, int64_t rows, cudaStream_t stream) {
  return launch(row_sum_kernel, static_cast<unsigned>(rows), kThreads, 0, stream, bug, x, y);
}

}  // namespace moe
