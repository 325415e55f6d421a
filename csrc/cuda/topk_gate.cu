// The top-k gate. A warp takes a token. Each choice is the remaining expert whose logit has the largest rank (see
// Logit); of equal ranks, the expert with the lowest index.
#include <cmath>
#include <type_traits>

#include "moe/common/dtypes.h"
#include "moe/cuda/launch.cuh"
#include "ops.h"
#include "topk_gate_choices.cuh"
#include "topk_gate_scored.cuh"

namespace moe {
namespace {

template <class T, int SLOTS>
using Choices = std::conditional_t<!Ranks<T, SLOTS>::kNeighbours, Searched<Ranks<T, SLOTS>, SLOTS>,
                                   std::conditional_t<sizeof(T) == 2, Packed<Ranks<T, SLOTS>, SLOTS>, Sorted<Ranks<T, SLOTS>, SLOTS>>>;

template <class T, int SLOTS>
__global__ void __launch_bounds__(kTokens * kWarpSize, SLOTS == 8 ? 12 : 0)
    topk_gate_kernel(const typename Logit<T>::Bits* logits,  // (tokens, E)
                     int64_t stride,
                     float* weights,                         // (tokens, K)
                     int32_t* experts,                       // (tokens, K)
                     int64_t tokens, int num_experts, int k, bool softmax_first, bool vectorized) {
  using List = Choices<T, SLOTS>;
  __shared__ typename List::Shared shared[kTokens];
  __shared__ typename List::Kept found[kTokens][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const uint32_t token = blockIdx.x * kTokens + warp;
  if (token >= tokens) return;
  const Ranks<T, SLOTS> ranks(logits + token * stride, num_experts, lane, vectorized);
  const int64_t start = int64_t(token) * k + lane;
  weights += start, experts += start;

  List choices(ranks, shared[warp]);
  typename List::Kept* const kept = found[warp];  // 32 choices at a time: lane i computes the weight of choice i
  float highest = 0.0f, sum = 0.0f, share = 0.0f;
  int left = k;
  for (;; left -= kWarpSize, weights += kWarpSize, experts += kWarpSize) {
    const int count = min(left, kWarpSize);
    take(choices, kept, count);
    __syncwarp();
    if (left == k) highest = Logit<T>::value(List::choice(*kept).rank);  // NaN if any logit is NaN
    if (lane < count) {
      const Choice mine = List::choice(kept[lane]);
      share = expf(Logit<T>::value(mine.rank) - highest);
      sum += share;
      *experts = mine.expert;
    }
    if (left <= kWarpSize) break;
    *weights = share;
    __syncwarp();
  }
  if (softmax_first) {
    sum = 0.0f;
#pragma unroll
    for (int s = 0; s < ranks.slots(); s++) {
      if (ranks.expert(s) < num_experts) sum += expf(Logit<T>::value(ranks[s]) - highest);
    }
  }
  sum = warp_sum(sum);
  if (lane < left) *weights = share / sum;
  for (; left < k; left += kWarpSize) weights -= kWarpSize, *weights /= sum;  // weights that this lane wrote
}

template <class T>
__global__ void __launch_bounds__(kTokens * kWarpSize)
    topk_gate_bwd_kernel(const float* grad,       // (tokens, K)
                         const float* weights,    // (tokens, K)
                         const int32_t* experts,  // (tokens, K)
                         const T* logits,         // (tokens, E), or nullptr: softmax of the chosen logits only
                         int64_t stride,
                         T* dlogits,              // (tokens, E)
                         int64_t tokens, int num_experts, int k) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = int64_t(blockIdx.x) * kTokens + threadIdx.x / kWarpSize;
  if (token >= tokens) return;
  grad += token * k, weights += token * k, experts += token * k, dlogits += token * num_experts;
  float mean = 0.0f;
  for (int i = lane; i < k; i += kWarpSize) mean = __fmaf_rn(weights[i], grad[i], mean);
  mean = warp_sum(mean);

  // If dense, expert e has the probability w_0 exp(z_e - z_0), with z_0 and w_0 the logit and weight of choice 0.
  const bool dense = logits != nullptr;  // requires k > 0
  const float highest = dense ? widen(logits[token * stride + experts[0]]) : 0.0f;
  const float scale = dense ? -mean * weights[0] : 0.0f;
  for (int e = lane; e < num_experts; e += kWarpSize) {
    narrow(dense ? scale * expf(widen(logits[token * stride + e]) - highest) : 0.0f, dlogits[e]);
  }
  __syncwarp();
  for (int i = lane; i < k; i += kWarpSize) {
    const int e = experts[i];
    if (uint32_t(e) < uint32_t(num_experts)) narrow(weights[i] * (grad[i] - mean), dlogits[e]);
  }
}

dim3 blocks(int64_t tokens) { return dim3(static_cast<unsigned>((tokens + kTokens - 1) / kTokens)); }

template <class T>
cudaError_t launch_gate(const void* logits, int64_t stride, void* weights, int32_t* experts, int64_t tokens,
                        int64_t num_experts, int64_t k, bool softmax_first, cudaStream_t stream) {
  const auto kernel = num_experts <= 4 * kWarpSize    ? topk_gate_kernel<T, 4>
                      : num_experts <= 8 * kWarpSize  ? topk_gate_kernel<T, 8>
                      : num_experts <= 32 * kWarpSize ? topk_gate_kernel<T, 32>
                                                      : topk_gate_kernel<T, 0>;
  const int64_t size = sizeof(T);
  const bool vectorized = rows_divide(4 * size, num_experts * size, {stride * size}, {logits});
  return launch(kernel, blocks(tokens), kTokens * kWarpSize, 0, stream,
                static_cast<const typename Logit<T>::Bits*>(logits), stride, static_cast<float*>(weights), experts,
                tokens, static_cast<int>(num_experts), static_cast<int>(k), softmax_first, vectorized);
}

template <class T>
cudaError_t launch_scored(const void* logits, int64_t stride, void* weights, int32_t* experts, void* scratch,
                          int64_t tokens, int64_t num_experts, int64_t k, const Scored& scored, cudaStream_t stream) {
  const auto kernel = num_experts <= 4 * kWarpSize   ? topk_gate_scored_kernel<T, 4>
                      : num_experts <= 8 * kWarpSize ? topk_gate_scored_kernel<T, 8>
                                                     : topk_gate_scored_kernel<T, 0>;
  const int64_t size = sizeof(T);
  const bool vectorized = rows_divide(4 * size, num_experts * size, {stride * size}, {logits}) &&
                          is_aligned(scored.bias, sizeof(float4));
  return launch(kernel, blocks(tokens), kTokens * kWarpSize, 0, stream, static_cast<const T*>(logits), stride,
                static_cast<float*>(weights), experts, static_cast<int32_t*>(scratch), tokens,
                static_cast<int>(num_experts), static_cast<int>(k), vectorized, scored);
}

template <class T>
cudaError_t launch_gate_bwd(const void* grad, const void* weights, const int32_t* experts, const void* logits,
                            int64_t stride, void* dlogits, int64_t tokens, int64_t num_experts, int64_t k,
                            cudaStream_t stream) {
  return launch(topk_gate_bwd_kernel<T>, blocks(tokens), kTokens * kWarpSize, 0, stream,
                static_cast<const float*>(grad), static_cast<const float*>(weights), experts,
                static_cast<const T*>(logits), stride, static_cast<T*>(dlogits), tokens,
                static_cast<int>(num_experts), static_cast<int>(k));
}

template <class T>
cudaError_t launch_scored_bwd(const void* grad, const int32_t* experts, const void* logits, int64_t stride,
                              void* dlogits, int64_t tokens, int64_t num_experts, int64_t k, int rule,
                              bool renormalise, float scale, cudaStream_t stream) {
  return launch(topk_gate_scored_bwd_kernel<T>, blocks(tokens), kTokens * kWarpSize, 0, stream,
                static_cast<const float*>(grad), experts, static_cast<const T*>(logits), stride,
                static_cast<T*>(dlogits), tokens, static_cast<int>(num_experts), static_cast<int>(k), rule,
                renormalise, scale);
}

bool plausible(int64_t tokens, int64_t num_experts, int64_t k) {
  return tokens >= 0 && tokens <= INT32_MAX && k >= 0 && k <= num_experts && num_experts <= kMaxRow;
}

}  // namespace

cudaError_t topk_gate_fwd(int dtype, const void* logits, int64_t stride, void* weights, int32_t* experts,
                          void* scratch, int64_t /*scratch_stride*/, int64_t tokens, int64_t num_experts, int64_t k,
                          int rule, const float* bias, int64_t num_groups, int64_t kept_groups, int renormalise,
                          double scale, const void* forced, int forced_size, cudaStream_t stream) {
  const bool grouped = num_groups > 0;
  if (!plausible(tokens, num_experts, k)) return cudaErrorInvalidValue;
  if (grouped && (num_experts % num_groups != 0 || kept_groups * (num_experts / num_groups) < k))
    return cudaErrorInvalidValue;
  if (tokens == 0 || k == 0) return cudaSuccess;
  const bool plain = rule != kSigmoid && bias == nullptr && !grouped && !renormalise && scale == 1 && forced == nullptr;
  if (!plain && num_experts > 8 * kWarpSize && scratch == nullptr) return cudaErrorInvalidValue;
  const int64_t slots = num_experts <= 4 * kWarpSize ? 4 : 8, size = grouped ? num_experts / num_groups : 0;
  const bool by_lanes = size % slots == 0 && (size / slots & (size / slots - 1)) == 0;
  const Scored scored{rule, bias, static_cast<int>(num_groups), static_cast<int>(kept_groups),
                      static_cast<int>(by_lanes ? size / slots : 0), renormalise != 0, static_cast<float>(scale),
                      forced, forced_size};
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    if (plain)
      return launch_gate<T>(logits, stride, weights, experts, tokens, num_experts, k, rule == kSoftmaxTopK, stream);
    return launch_scored<T>(logits, stride, weights, experts, scratch, tokens, num_experts, k, scored, stream);
  });
}

cudaError_t topk_gate_bwd(int dtype, const void* grad, const void* weights, const int32_t* experts, const void* logits,
                          int64_t stride, void* dlogits, void* /*scratch*/, int64_t /*scratch_stride*/, int64_t tokens,
                          int64_t num_experts, int64_t k, int rule, int renormalise, double scale,
                          cudaStream_t stream) {
  if (!plausible(tokens, num_experts, k)) return cudaErrorInvalidValue;
  if (tokens == 0 || num_experts == 0) return cudaSuccess;
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    if (rule < 0)
      return launch_gate_bwd<T>(grad, weights, experts, logits, stride, dlogits, tokens, num_experts, k, stream);
    return launch_scored_bwd<T>(grad, experts, logits, stride, dlogits, tokens, num_experts, k, rule,
                                renormalise != 0, static_cast<float>(scale), stream);
  });
}

}  // namespace moe
