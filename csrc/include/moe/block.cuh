// Collective operations of the warps of a block.
#pragma once

#include "moe/shared.cuh"
#include "moe/warp.cuh"

namespace moe {

constexpr int kMaxWarps = 32;

// Shared memory in which the warps of a block exchange one value each.
template <class T>
struct Exchange {
  T slots[2][kMaxWarps];
};

// In lane i of every warp, returns the sum over warp i, or zero past the last warp. Every thread calls it; `turn`
// starts at 0 and belongs to one Exchange. Calls alternate between the two sets of slots, so a call needs only one
// barrier.
template <class T>
__device__ __forceinline__ T exchange_warp_sums(T value, Exchange<T>& exchange, int& turn) {
  const int lane = threadIdx.x % kWarpSize;
  T* const slots = exchange.slots[turn];
  turn ^= 1;
  value = warp_sum(value);
  if (lane == 0) slots[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  return lane < static_cast<int>(blockDim.x) / kWarpSize ? slots[lane] : T{};
}

}  // namespace moe
