// An exchange between the warps of a block.
#pragma once

#include "moe/cuda/warp.cuh"

namespace moe {

constexpr int kMaxWarps = 32;

template <class T>
struct Exchange {
  T slots[2][kMaxWarps];
};

// Returns, in lane i of every warp, the sum of `value` over warp i; zero if the block has no warp i. All threads of the
// block must call this function. Each thread keeps a `turn`, initially 0, for each Exchange. Consecutive calls use the
// two rows of slots in turn, so that one barrier a call is enough.
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
