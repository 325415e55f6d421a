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

// Returns the sum over warp i in lane i of every warp, or zero past the last warp. Every thread calls it; `turn` starts
// at 0 and belongs to one Exchange. Consecutive calls use the two sets of slots in turn, so a call needs one barrier:
// before a set is overwritten, all threads have passed the barrier of the call in between, after they read that set.
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
