// The top-k gate. A warp takes a token and keeps its logits in registers as ordered integers; a choice is the largest
// pair (logit, lower expert first) below the one before it, found by two reductions of the warp. That costs K passes
// over registers, and reads each logit once; nothing is sorted and nothing is marked as taken.
#include <cmath>
#include <type_traits>

#include "moe/dtypes.h"
#include "moe/keys.cuh"
#include "moe/launch.cuh"
#include "moe/rows.cuh"
#include "moe/warp.cuh"
#include "ops.h"

namespace moe {
namespace {

constexpr int kTokens = 8;  // of a block, a warp each

// Ranks order as numbers do, zeros equal and NaN, all equal, on top; 0 is below all of them.
template <class T>
struct Logit {
  using Order = Key<T>;
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;

  __device__ static uint32_t rank(const Bits* logit) {
    const uint32_t bits = load(logit);
    const float value = Order::value(bits);
    return Order::rank(value == value ? Order::key(bits) : Order::kNaN);
  }
  __device__ static float value(uint32_t rank) { return Order::value(Order::bits(Order::key_of_rank(rank))); }
};

// A row's ranks: lane i has those of experts i, i + 32, ... With SLOTS > 0 they stay in registers, with 0 they are read
// again each time.
template <class T, int SLOTS>
struct Ranks {
  using Bits = typename Logit<T>::Bits;

  const Bits* logits;  // (E)
  int num_experts, lane;
  uint32_t resident[SLOTS ? SLOTS : 1];

  __device__ Ranks(const Bits* logits, int num_experts, int lane)
      : logits(logits), num_experts(num_experts), lane(lane) {
#pragma unroll
    for (int s = 0; s < SLOTS; s++) resident[s] = expert(s) < num_experts ? Logit<T>::rank(logits + expert(s)) : 0;
  }
  __device__ int slots() const { return SLOTS ? SLOTS : (num_experts + kWarpSize - 1) / kWarpSize; }
  __device__ int expert(int slot) const { return slot * kWarpSize + lane; }
  __device__ uint32_t operator[](int slot) const {
    if constexpr (SLOTS > 0) return resident[slot];
    return expert(slot) < num_experts ? Logit<T>::rank(logits + expert(slot)) : 0;
  }
};

struct Choice {
  uint32_t rank;
  int expert;
};

// The largest pair below `last`, the same in every lane.
template <class T, int SLOTS>
__device__ Choice next_choice(const Ranks<T, SLOTS>& ranks, Choice last) {
  Choice best{0, INT32_MAX};
#pragma unroll
  for (int s = 0; s < ranks.slots(); s++) {
    const uint32_t rank = ranks[s];
    const bool below = rank < last.rank || (rank == last.rank && ranks.expert(s) > last.expert);
    if (below && rank > best.rank) best = {rank, ranks.expert(s)};
  }
  const uint32_t highest = __reduce_max_sync(kAllLanes, best.rank);
  return {highest, __reduce_min_sync(kAllLanes, best.rank == highest ? best.expert : INT32_MAX)};
}

template <class T, int SLOTS>
__global__ void __launch_bounds__(kTokens * kWarpSize)
    topk_gate_kernel(const typename Logit<T>::Bits* logits,  // (T, E)
                     int64_t stride,                         // elements from token to token
                     float* weights,                         // (T, K)
                     int32_t* experts,                       // (T, K)
                     int64_t tokens, int num_experts, int k, bool softmax_first) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = int64_t(blockIdx.x) * kTokens + threadIdx.x / kWarpSize;
  if (token >= tokens) return;
  const Ranks<T, SLOTS> ranks(logits + token * stride, num_experts, lane);
  weights += token * k, experts += token * k;

  Choice choice{UINT32_MAX, 0};
  float highest = 0.0f, sum = 0.0f;
  for (int i = 0; i < k; i++) {
    choice = next_choice(ranks, choice);
    const float value = Logit<T>::value(choice.rank);
    if (i == 0) highest = value;  // a NaN if there is one, and then every weight is NaN
    const float share = expf(value - highest);
    if (!softmax_first) sum += share;
    if (lane != i % kWarpSize) continue;
    weights[i] = share;
    experts[i] = choice.expert;
  }
  if (softmax_first) {
#pragma unroll
    for (int s = 0; s < ranks.slots(); s++) {
      if (ranks.expert(s) < num_experts) sum += expf(Logit<T>::value(ranks[s]) - highest);
    }
    sum = warp_sum(sum);
  }
  for (int i = lane; i < k; i += kWarpSize) weights[i] /= sum;  // each lane its own
}

template <class T>
__global__ void __launch_bounds__(kTokens * kWarpSize)
    topk_gate_bwd_kernel(const float* grad,       // (T, K)
                         const float* weights,    // (T, K)
                         const int32_t* experts,  // (T, K)
                         const T* logits,         // (T, E), or nullptr: softmax of the chosen alone
                         int64_t stride,          // elements from token to token
                         T* dlogits,              // (T, E)
                         int64_t tokens, int num_experts, int k) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = int64_t(blockIdx.x) * kTokens + threadIdx.x / kWarpSize;
  if (token >= tokens) return;
  grad += token * k, weights += token * k, experts += token * k, dlogits += token * num_experts;
  float mean = 0.0f;
  for (int i = lane; i < k; i += kWarpSize) mean = __fmaf_rn(weights[i], grad[i], mean);
  mean = warp_sum(mean);

  // p_e = w_0 exp(z_e - z_0): the difference of two logits is exact to a rounding however large they are.
  const bool dense = logits && k > 0;
  const float highest = dense ? widen(logits[token * stride + experts[0]]) : 0.0f;
  const float scale = dense ? -mean * weights[0] : 0.0f;
  for (int e = lane; e < num_experts; e += kWarpSize) {
    narrow(dense ? scale * expf(widen(logits[token * stride + e]) - highest) : 0.0f, dlogits[e]);
  }
  __syncwarp();
  for (int i = lane; i < k; i += kWarpSize) narrow(weights[i] * (grad[i] - mean), dlogits[experts[i]]);
}

dim3 blocks(int64_t tokens) { return dim3(static_cast<unsigned>((tokens + kTokens - 1) / kTokens)); }

template <class T>
cudaError_t start(const void* logits, int64_t stride, void* weights, int32_t* experts, int64_t tokens,
                  int64_t num_experts, int64_t k, int softmax_first, cudaStream_t stream) {
  const auto kernel = num_experts <= 4 * kWarpSize    ? topk_gate_kernel<T, 4>
                      : num_experts <= 8 * kWarpSize  ? topk_gate_kernel<T, 8>
                      : num_experts <= 32 * kWarpSize ? topk_gate_kernel<T, 32>
                                                      : topk_gate_kernel<T, 0>;
  return launch(kernel, blocks(tokens), kTokens * kWarpSize, 0, stream,
                static_cast<const typename Logit<T>::Bits*>(logits), stride, static_cast<float*>(weights), experts,
                tokens, static_cast<int>(num_experts), static_cast<int>(k), softmax_first != 0);
}

template <class T>
cudaError_t start_bwd(const void* grad, const void* weights, const int32_t* experts, const void* logits, int64_t stride,
                      void* dlogits, int64_t tokens, int64_t num_experts, int64_t k,
                      cudaStream_t stream) {
  return launch(topk_gate_bwd_kernel<T>, blocks(tokens), kTokens * kWarpSize, 0, stream,
                static_cast<const float*>(grad), static_cast<const float*>(weights), experts,
                static_cast<const T*>(logits), stride, static_cast<T*>(dlogits), tokens, static_cast<int>(num_experts), static_cast<int>(k));
}

bool plausible(int64_t tokens, int64_t num_experts, int64_t k) {
  return tokens >= 0 && tokens <= INT32_MAX && k >= 0 && k <= num_experts && num_experts <= kMaxRow;
}

}  // namespace

cudaError_t topk_gate_fwd(int dtype, const void* logits, int64_t stride, void* weights, int32_t* experts,
                          void* /*scratch*/, int64_t /*scratch_stride*/, int64_t tokens, int64_t num_experts, int64_t k,
                          int softmax_first, cudaStream_t stream) {
  if (!plausible(tokens, num_experts, k)) return cudaErrorInvalidValue;
  if (tokens == 0 || k == 0) return cudaSuccess;
  const auto run = [&](auto element) {
    return start<decltype(element)>(logits, stride, weights, experts, tokens, num_experts, k, softmax_first, stream);
  };
  switch (dtype) {
    case float32: return run(float{});
    case bfloat16: return run(__nv_bfloat16{});
    case float16: return run(__half{});
  }
  return cudaErrorInvalidValue;
}

cudaError_t topk_gate_bwd(int dtype, const void* grad, const void* weights, const int32_t* experts, const void* logits,
                          int64_t stride, void* dlogits, int64_t tokens, int64_t num_experts,
                          int64_t k, cudaStream_t stream) {
  if (!plausible(tokens, num_experts, k)) return cudaErrorInvalidValue;
  if (tokens == 0 || num_experts == 0) return cudaSuccess;
  const auto run = [&](auto element) {
    return start_bwd<decltype(element)>(grad, weights, experts, logits, stride, dlogits, tokens, num_experts,
                                        k, stream);
  };
  switch (dtype) {
    case float32: return run(float{});
    case bfloat16: return run(__nv_bfloat16{});
    case float16: return run(__half{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace moe
