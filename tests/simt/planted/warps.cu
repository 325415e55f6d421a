// Bugs inside a warp and at the ends of rows.
#include "moe/launch.cuh"
#include "moe/shared.cuh"
#include "moe/warp.cuh"
#include "ops.h"

namespace moe {
namespace {

__global__ void rotate_kernel(int bug, const float* x, float* y, int n) {
  DYNAMIC_SHARED(float, row);
  const int i = threadIdx.x;
  x += int64_t(blockIdx.x) * n;
  y += int64_t(blockIdx.x) * n;

  const int end = bug == kSharedOverrun ? n + 1 : n;
  if (i < end) row[i] = x[i < n ? i : 0];
  __syncwarp();
  const float next = i < n ? row[(i + 1) % n] : 0;
  if (bug != kNoSyncwarp) __syncwarp();
  if (i < n) row[i] = next;
  __syncwarp();

  // The same once more from registers, to be compared.
  const uint32_t members = 0xffffu << (i & 16);
  float again = 0;
  if (bug == kLaneReturned && i == 5) return;
  if (bug != kLaneSkipsCollective || i != 5) {
    again = __shfl_sync(members, next, bug == kShuffleFromOutside ? i ^ 16 : i, bug == kShuffleFromOutside ? 32 : 16);
  }
  if (i < n && again == row[i]) y[i] = again;
  if (bug == kGlobalOverrun && i == n) y[i] = 0;
}

__global__ void collectives_kernel(const int32_t* x, int32_t* y) {
  const int lane = threadIdx.x;
  const uint32_t half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  const int value = x[lane];
  y += 8 * lane;
  // The halves arrive in different orders: two meetings are under way in one warp.
  if (lane < 16) y[0] = __reduce_add_sync(half, value);
  y[1] = static_cast<int>(__ballot_sync(half, value & 1));
  y[2] = __shfl_up_sync(half, value, 3, 16);
  y[3] = __shfl_down_sync(half, value, 3, 16);
  y[4] = __shfl_xor_sync(half, value, 5, 16);
  y[5] = static_cast<int>(__match_any_sync(half, value));
  y[6] = __reduce_max_sync(half, value);
  y[7] = __any_sync(half, value == 7) * 2 + __all_sync(half, value < 100);
  if (lane >= 16) y[0] = __reduce_add_sync(half, value);
}

}  // namespace

cudaError_t rotate(int bug, const float* x, float* y, int64_t rows, int64_t n, cudaStream_t stream) {
  return launch(rotate_kernel, static_cast<unsigned>(rows), kWarpSize, n * sizeof(float), stream, bug, x, y,
                static_cast<int>(n));
}

cudaError_t collectives(const int32_t* x, int32_t* y, cudaStream_t stream) {
  return launch(collectives_kernel, 1, kWarpSize, 0, stream, x, y);
}

}  // namespace moe
