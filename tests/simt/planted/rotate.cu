#include "moe/cuda/async_copy.cuh"
#include "moe/cuda/launch.cuh"
#include "ops.h"

namespace moe {
namespace {

__global__ void rotate_kernel(int bug, const float* x, float* y, int n) {
  DYNAMIC_SHARED(float, row);
  const int i = threadIdx.x, left = bug == kCopyPastTheEnd ? 4 : min(n - 4 * i, 4);
  x += int64_t(blockIdx.x) * n;
  y += int64_t(blockIdx.x) * n;
  if (4 * i < n) async_copy<16>(row + 4 * i, x + 4 * i, 4 * left);
  async_commit();
  async_wait<0>();
  if (bug != kSkippedBarrier || i != 5) __syncthreads();
  const int next = bug == kOverflow ? i + INT32_MAX : i + 1;
  if (i < n) y[i] = row[bug == kSharedOverrun ? i + 1 : next % n];
  if (bug == kGlobalOverrun && i == n) y[i] = 0;
}

}  // namespace

cudaError_t rotate(int bug, const float* x, float* y, int64_t rows, int64_t n, cudaStream_t stream) {
  const size_t bytes = bug == kSharedOverrun ? n * sizeof(float) : (n + 3) / 4 * 16;
  return launch(rotate_kernel, static_cast<unsigned>(rows), 32, bytes, stream, bug, x, y, static_cast<int>(n));
}

}  // namespace moe
