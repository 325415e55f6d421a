// Bugs round asynchronous copies and ldmatrix, and the probes of the fragment layouts.
#include "moe/async_copy.cuh"
#include "moe/dtypes.h"
#include "moe/launch.cuh"
#include "moe/mma.cuh"
#include "ops.h"

namespace moe {
namespace {

constexpr int kStages = 3, kThreads = 64, kTile = 4 * kThreads;

__device__ void copy_tile(int bug, float* stage, const float* x, int tile, int n) {
  const int at = tile * kTile + 4 * threadIdx.x;
  int valid = min(max(n - at, 0), 4) * 4;
  if (bug == kCopyPastTheEnd && valid == 4) valid = 8;
  async_copy<16>(stage + 4 * threadIdx.x, valid ? x + at : x, valid);
}

__global__ void pipeline_kernel(int bug, const float* x, float* y, int n) {
  SHARED(float4, stages, [kStages][kThreads]);
  const auto stage = [&](int tile) { return reinterpret_cast<float*>(stages[tile % kStages]); };
  const int tiles = (n + kTile - 1) / kTile;
  for (int t = 0; t < kStages; t++) {
    if (t < tiles) copy_tile(bug, stage(t), x, t, n);
    async_commit();
  }
  float sums[4] = {};
  for (int t = 0; t < tiles; t++) {
    if (bug == kWaitOneTooFew) {
      async_wait<kStages>();
    } else {
      async_wait<kStages - 1>();
    }
    if (bug != kNoBarrierAfterWait) __syncthreads();
    for (int i = 0; i < 4; i++) sums[i] += stage(t)[kTile - 1 - 4 * threadIdx.x - i];
    if (bug != kNoBarrierBeforeReuse) __syncthreads();
    if (t + kStages < tiles) copy_tile(bug, stage(t), x, t + kStages, n);
    async_commit();
  }
  if (bug == kPendingAtReturn) copy_tile(bug, stage(0), x, 0, n);
  for (int i = 0; i < 4; i++) y[4 * threadIdx.x + i] = sums[i];
}

template <int COUNT, bool TRANSPOSED>
__global__ void load_rows_kernel(int bug, const uint16_t* x, uint32_t* fragments) {
  SHARED(uint4, rows, [COUNT * 8 + 1]);
  auto* halves = reinterpret_cast<uint16_t*>(rows);
  for (int i = threadIdx.x; i < COUNT * 64; i += kWarpSize) halves[i] = x[i];
  __syncwarp();
  uint32_t fragment[COUNT];
  const int row = threadIdx.x % (COUNT * 8);
  load_matrix<COUNT, TRANSPOSED>(fragment, halves + 8 * row + (bug == kMisalignedRow && row == 3));
  for (int i = 0; i < COUNT; i++) fragments[COUNT * threadIdx.x + i] = fragment[i];
}

template <class T>
__global__ void multiply_kernel(const uint32_t* a, const uint32_t* b, float* c) {
  const int lane = blockIdx.x * kWarpSize + threadIdx.x;
  uint32_t left[4], right[2];
  float sums[4];
  for (int i = 0; i < 4; i++) left[i] = a[4 * lane + i];
  for (int i = 0; i < 2; i++) right[i] = b[2 * lane + i];
  for (int i = 0; i < 4; i++) sums[i] = c[4 * lane + i];
  mma_m16n8k16<T>(sums, left, right);
  for (int i = 0; i < 4; i++) c[4 * lane + i] = sums[i];
}

}  // namespace

cudaError_t pipeline(int bug, const float* x, float* y, int64_t n, cudaStream_t stream) {
  return launch(pipeline_kernel, 1, kThreads, 0, stream, bug, x, y, static_cast<int>(n));
}

cudaError_t load_rows(int bug, int count, int transposed, const uint16_t* x, uint32_t* fragments, cudaStream_t stream) {
  const auto start = [&](auto* kernel) { return launch(kernel, 1, kWarpSize, 0, stream, bug, x, fragments); };
  switch (2 * count + transposed) {
    case 2: return start(load_rows_kernel<1, false>);
    case 3: return start(load_rows_kernel<1, true>);
    case 4: return start(load_rows_kernel<2, false>);
    case 5: return start(load_rows_kernel<2, true>);
    case 8: return start(load_rows_kernel<4, false>);
    case 9: return start(load_rows_kernel<4, true>);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t multiply(int dtype, const uint32_t* a, const uint32_t* b, float* c, int64_t blocks, cudaStream_t stream) {
  const auto kernel = dtype == bfloat16 ? multiply_kernel<__nv_bfloat16> : multiply_kernel<__half>;
  return launch(kernel, static_cast<unsigned>(blocks), kWarpSize, 0, stream, a, b, c);
}

}  // namespace moe
