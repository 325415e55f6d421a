// The routing plan in three launches. A request is a token's choice of an expert. Requests are numbered in visiting
// order and split into chunks. The slot of a request is the number of earlier requests to the same expert. A request
// whose slot is below the capacity, and below the expert's limit if there are limits, is kept: its row is the expert's
// first row plus the slot.
//   plan_count_kernel   counts each chunk's requests to each expert
//   plan_scan_kernel    writes `requested`; replaces each count by the sum of the expert's counts over earlier chunks
//   plan_rank_kernel    reads the chunks again, tile by tile, and writes the plan
// Atomics only count, in shared memory: sums of integers do not depend on the order.
#include <algorithm>

#include "moe/cuda/block.cuh"
#include "moe/cuda/launch.cuh"
#include "moe/cuda/vector.cuh"
#include "ops.h"

namespace moe {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
constexpr int kPerThread = 4;                 // requests of a tile that a thread has
constexpr int kTile = kThreads * kPerThread;  // requests that a block reads at a time
constexpr int kWindow = 1024;                 // most experts of a block: 44 KiB of shared memory in plan_rank_kernel
constexpr uint32_t kNoExpert = 0xffffffffu;

template <class Index>
struct Requests {
  const Index* experts;  // (T, K)
  const int64_t* visit;  // (T) tokens in visiting order, or nullptr: 0, 1, ...
  uint32_t tokens, k, num_experts;
  bool by_choice;        // visits all first choices, then all second ones, ...; else token by token
  uint32_t total;        // T * K
  uint32_t chunk;        // requests per chunk, a multiple of kTile

  __device__ uint32_t first() const { return blockIdx.x * chunk; }
  __device__ uint32_t end() const { return min(first() + chunk, total); }

  __device__ void find(uint32_t number, uint32_t& token, uint32_t& choice) const {
    const uint32_t divisor = by_choice ? tokens : k;
    const uint32_t quotient = number / divisor, rest = number - quotient * divisor;
    choice = by_choice ? quotient : rest;
    const uint32_t position = by_choice ? rest : quotient;
    token = visit ? static_cast<uint32_t>(load(visit + position)) : position;
  }

  __device__ int64_t id(uint32_t number) const {
    uint32_t token, choice;
    find(number, token, choice);
    return load(experts + (token * k + choice));
  }
};

struct Window {
  uint32_t first, width;

  __device__ explicit Window(uint32_t num_experts)
      : first(blockIdx.y * kWindow), width(min(num_experts - first, static_cast<uint32_t>(kWindow))) {}
  __device__ uint32_t index(uint32_t expert) const { return expert - first; }  // >= width if not in the window
};

// The requests of a tile, in registers. A warp has kPerThread * 32 consecutive requests; a lane has every 32nd of them.
template <class Index>
struct Tile {
  uint32_t start;  // number of this thread's first request; the next ones are 32 apart
  uint32_t expert[kPerThread];

  __device__ Tile(const Requests<Index>& requests, uint32_t tile)
      : start(tile + threadIdx.x / kWarpSize * (kWarpSize * kPerThread) + threadIdx.x % kWarpSize) {
    int64_t id[kPerThread];  // past the end, the id of the last request
#pragma unroll
    for (int i = 0; i < kPerThread; i++) id[i] = requests.id(min(number(i), requests.total - 1));
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
      const bool valid = number(i) < requests.total && static_cast<uint64_t>(id[i]) < requests.num_experts;
      expert[i] = valid ? static_cast<uint32_t>(id[i]) : kNoExpert;
    }
  }
  __device__ uint32_t number(int i) const { return start + i * kWarpSize; }
};

template <class Index>
__global__ void __launch_bounds__(kThreads) plan_count_kernel(Requests<Index> requests,
                                                              int32_t* counts) {  // (chunks, E)
  __shared__ int32_t count[kWindow];
  const Window window(requests.num_experts);
  for (uint32_t e = threadIdx.x; e < window.width; e += kThreads) count[e] = 0;
  __syncthreads();
  for (uint32_t tile = requests.first(); tile < requests.end(); tile += kTile) {
    const Tile<Index> mine(requests, tile);
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
      const uint32_t e = window.index(mine.expert[i]);
      if (e < window.width) atomicAdd(&count[e], 1);
    }
  }
  __syncthreads();
  counts += int64_t(blockIdx.x) * requests.num_experts + window.first;
  for (uint32_t e = threadIdx.x; e < window.width; e += kThreads) counts[e] = count[e];
}

// A lane takes one expert, a warp consecutive chunks.
__global__ void __launch_bounds__(kMaxWarps * kWarpSize)
    plan_scan_kernel(int32_t* counts,     // (chunks, E)
                     int32_t* requested,  // (E)
                     int chunks, int num_experts) {
  __shared__ int32_t sums[kMaxWarps][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int expert = blockIdx.x * kWarpSize + lane;
  const int first = warp * chunks / warps, last = expert < num_experts ? (warp + 1) * chunks / warps : 0;
  counts += expert;
  int32_t sum = 0;
#pragma unroll 8
  for (int c = first; c < last; c++) sum += counts[int64_t(c) * num_experts];
  sums[warp][lane] = sum;
  __syncthreads();
  int32_t before = 0;
  for (int w = 0; w < warp; w++) before += sums[w][lane];
  if (warp == warps - 1 && expert < num_experts) requested[expert] = before + sum;
#pragma unroll 8
  for (int c = first; c < last; c++) {
    int32_t& count = counts[int64_t(c) * num_experts];
    const int32_t here = count;
    count = before;
    before += here;
  }
}

struct Plan {
  int32_t* expert_offsets;   // (E + 1)
  int32_t* row_token;        // (R)
  int32_t* row_choice;       // (R)
  int32_t* slot_row;         // (T, K)
  const int32_t* requested;  // (E)
  int32_t* kept;             // (E)
  int32_t* dropped;          // ()
  int32_t capacity, rows;    // rows: R
  const int32_t* limit;      // (E); only read if kLimited
};

// Computes the first row of every expert and puts those of the block's window into `offset`, and if kLimited their
// numbers of rows into `room`. Returns the number of rows in use.
template <bool kLimited>
__device__ int32_t scan_experts(const Plan& plan, const Window& window, int num_experts, int32_t* offset,
                                int32_t* room) {
  __shared__ Exchange<int> sums;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const bool writes = blockIdx.x == 0 && blockIdx.y == 0;
  int turn = 0;
  int32_t used = 0, dropped = 0;
  for (int start = 0; start < num_experts; start += kThreads) {
    const int expert = start + threadIdx.x;
    const int32_t requested = expert < num_experts ? plan.requested[expert] : 0;
    int32_t kept = min(requested, plan.capacity);
    if (kLimited) kept = min(kept, expert < num_experts ? max(plan.limit[expert], 0) : 0);
    const int32_t to_here = warp_inclusive_sum(kept, lane);
    const int32_t warp_total = exchange_warp_sums(kept, sums, turn);
    const int32_t first = used + warp_sum(lane < warp ? warp_total : 0) + to_here - kept;
    used += warp_sum(warp_total);
    if (window.index(expert) < window.width) {
      offset[window.index(expert)] = first;
      if (kLimited) room[window.index(expert)] = kept;
    }
    if (!writes) continue;
    dropped += warp_sum(exchange_warp_sums(requested - kept, sums, turn));
    if (expert >= num_experts) continue;
    plan.expert_offsets[expert] = first;
    plan.kept[expert] = kept;
  }
  if (writes && threadIdx.x == 0) {
    plan.expert_offsets[num_experts] = used;
    *plan.dropped = dropped;
  }
  return used;
}

template <class Index, bool kLimited>
__global__ void __launch_bounds__(kThreads)
    plan_rank_kernel(Requests<Index> requests, Plan plan,
                     const int32_t* counts) {  // (chunks, E): requests to each expert in earlier chunks
  const Window window(requests.num_experts);
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  int32_t* const shared = reinterpret_cast<int32_t*>(dynamic_shared);
  int32_t* const slots = shared;                         // (kWarps, width): counts of each warp, then its next slots
  int32_t* const next = shared + kWarps * window.width;  // (width): next slot of each expert
  int32_t* const offset = next + window.width;           // (width): first row of each expert
  int32_t* const room = offset + window.width;           // (width) if kLimited: rows of each expert
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int32_t* const slot = slots + warp * window.width;

  counts += int64_t(blockIdx.x) * requests.num_experts + window.first;
  for (uint32_t e = threadIdx.x; e < window.width; e += kThreads) next[e] = counts[e];
  const int32_t used = scan_experts<kLimited>(plan, window, requests.num_experts, offset, room);
  const int64_t block = int64_t(blockIdx.y) * gridDim.x + blockIdx.x, blocks = int64_t(gridDim.x) * gridDim.y;
#pragma unroll 1
  for (int64_t row = used + block * kThreads + threadIdx.x; row < plan.rows; row += blocks * kThreads) {
    plan.row_token[row] = plan.row_choice[row] = -1;
  }

  for (uint32_t tile = requests.first(); tile < requests.end(); tile += kTile) {
    for (uint32_t e = lane; e < window.width; e += kWarpSize) slot[e] = 0;
    __syncwarp();
    const Tile<Index> mine(requests, tile);
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
      const uint32_t e = window.index(mine.expert[i]);
      if (e < window.width) atomicAdd(&slot[e], 1);
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < window.width; e += kThreads) {
      int32_t before = next[e];
#pragma unroll
      for (int w = 0; w < kWarps; w++) {
        int32_t& count = slots[w * window.width + e];
        const int32_t here = count;
        count = before;
        before += here;
      }
      next[e] = before;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
      const uint32_t e = window.index(mine.expert[i]);
      const bool counted = e < window.width;
      const uint32_t same = __match_any_sync(kAllLanes, e);
      const uint32_t earlier = same & ((1u << lane) - 1);
      const int32_t own = counted ? slot[e] + __popc(earlier) : 0;
      __syncwarp();
      if (counted && same >> lane == 1) slot[e] = own + 1;  // the last lane with this expert
      __syncwarp();
      const bool kept = counted && own < (kLimited ? room[e] : plan.capacity);
      const bool no_expert = mine.expert[i] == kNoExpert && blockIdx.y == 0;
      if (mine.number(i) >= requests.total || !(counted || no_expert)) continue;
      uint32_t token, choice;
      requests.find(mine.number(i), token, choice);
      const int32_t row = kept ? offset[e] + own : -1;
      plan.slot_row[token * requests.k + choice] = row;
      if (!kept) continue;
      plan.row_token[row] = token;
      plan.row_choice[row] = choice;
    }
  }
}

template <class Index>
cudaError_t launch_plan(const Requests<Index>& requests, const Plan& plan, int32_t* requested, int32_t* counts,
                        int chunks, cudaStream_t stream) {
  const int num_experts = static_cast<int>(requests.num_experts);
  const dim3 grid(chunks, (num_experts + kWindow - 1) / kWindow);
  cudaError_t error = launch(plan_count_kernel<Index>, grid, kThreads, 0, stream, requests, counts);
  if (error != cudaSuccess) return error;
  const int groups = (num_experts + kWarpSize - 1) / kWarpSize, warps = std::min(chunks, kMaxWarps);
  error = launch(plan_scan_kernel, groups, warps * kWarpSize, 0, stream, counts, requested, chunks, num_experts);
  if (error != cudaSuccess) return error;
  const size_t width_bytes = sizeof(int32_t) * std::min(num_experts, kWindow);
  if (plan.limit)
    return launch(plan_rank_kernel<Index, true>, grid, kThreads, (kWarps + 3) * width_bytes, stream, requests, plan,
                  counts);
  return launch(plan_rank_kernel<Index, false>, grid, kThreads, (kWarps + 2) * width_bytes, stream, requests, plan,
                counts);
}

constexpr int64_t kMaxIndex = INT32_MAX, kMaxExperts = int64_t(65535) * kWindow, kMaxChunks = 1024;

}  // namespace

cudaError_t make_plan_fwd(int index_size, const void* experts, const int64_t* visit, const int32_t* limit,
                          int32_t* counts, int64_t chunks, int32_t* expert_offsets, int32_t* row_token,
                          int32_t* row_choice, int32_t* slot_row, int32_t* requested, int32_t* kept, int32_t* dropped,
                          int64_t tokens, int64_t k,
                          int64_t num_experts, int64_t capacity, int64_t rows, int by_choice, cudaStream_t stream) {
  if (tokens < 0 || tokens > kMaxIndex || k < 0 || k > kMaxIndex) return cudaErrorInvalidValue;
  if (num_experts < 1 || num_experts > kMaxExperts) return cudaErrorInvalidValue;
  if (tokens * k > kMaxIndex || capacity < 0 || capacity > kMaxIndex) return cudaErrorInvalidValue;
  if (rows < std::min(tokens * k, num_experts * capacity) || rows > tokens * k) return cudaErrorInvalidValue;
  if (chunks < 1 || chunks > kMaxChunks) return cudaErrorInvalidValue;
  Plan plan{};
  plan.expert_offsets = expert_offsets;
  plan.row_token = row_token, plan.row_choice = row_choice, plan.slot_row = slot_row;
  plan.requested = requested, plan.kept = kept, plan.dropped = dropped;
  plan.capacity = static_cast<int32_t>(capacity), plan.rows = static_cast<int32_t>(rows);
  plan.limit = limit;
  const int64_t tiles = (tokens * k + kTile - 1) / kTile;
  const auto run = [&](auto index) {
    Requests<decltype(index)> requests{};
    requests.experts = static_cast<const decltype(index)*>(experts);
    requests.visit = visit;
    requests.tokens = static_cast<uint32_t>(tokens);
    requests.k = static_cast<uint32_t>(k);
    requests.num_experts = static_cast<uint32_t>(num_experts);
    requests.by_choice = by_choice != 0;
    requests.total = static_cast<uint32_t>(tokens * k);
    requests.chunk = static_cast<uint32_t>((tiles + chunks - 1) / chunks * kTile);
    return launch_plan(requests, plan, requested, counts, static_cast<int>(chunks), stream);
  };
  if (index_size == 8) return run(int64_t{});
  return index_size == 4 ? run(int32_t{}) : cudaErrorInvalidValue;
}

}  // namespace moe
