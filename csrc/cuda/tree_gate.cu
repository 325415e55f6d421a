// The tree gate after its matrix products. A few lanes take a token and keep one tree at a time in shared memory: on the
// way down each node's probability, level by level; on the way up, backward, the sum of what its leaves contribute.
#include <algorithm>
#include <cfloat>

#include "moe/dtypes.h"
#include "moe/launch.cuh"
#include "moe/rows.cuh"
#include "moe/shared.cuh"
#include "moe/tree.cuh"
#include "moe/warp.cuh"
#include "ops.h"

namespace moe {
namespace {

constexpr int kThreads = 128;        // of a block
constexpr int kBlocks = 4;           // for one SM: without a number the compiler spills at 56 registers
constexpr int kMostExperts = 4096;   // a heap is 32 KB of shared memory

// What a leaf of probability v weighs in the softmax, apart from exp of its logit: v + epsilon, or nothing.
struct Weighing {
  float epsilon, least;

  __device__ bool counts(float v) const { return !(v < least); }  // a NaN does
};

// The heap's entries 2m and 2m + 1.
__device__ float2& children(float* heap, int m) { return reinterpret_cast<float2*>(heap)[m]; }

// The lanes of a token, neighbours in a warp.
struct Lanes {
  int count, index;

  // Every lane of the warp calls it, so that all of its tokens are at the same step.
  template <class Each>
  __device__ void share(int first, int last, Each each) const {
    for (int i = first + index; i < last; i += count) each(i);
    __syncwarp();
  }
};

// heap[m] = probability of reaching node m, for all but the root.
template <class T>
__device__ void reach(float* heap,            // (2E)
                      const T* split_logits,  // (E - 1)
                      const Tree& tree, const SmoothStep& step, const Lanes& lanes) {
  lanes.share(1, tree.num_experts, [&](int m) {
    const Split split(widen(split_logits[m - 1]), step);
    children(heap, m) = {split.left(), split.right()};
  });
  for (int first = 4; first < 2 * tree.num_experts; first *= 2) {
    lanes.share(first, min(2 * first, 2 * tree.num_experts), [&](int m) { heap[m] *= heap[m / 2]; });
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    tree_gate_kernel(const T* split_logits,  // (T, K, E - 1)
                     const T* leaf_logits,   // (T, K, E)
                     float* gates,           // (T, E)
                     float* leaf_probs,      // (T, K, E)
                     int64_t tokens, int num_trees, Tree tree, SmoothStep step, Weighing weighing, int lanes_a_token) {
  DYNAMIC_SHARED(float, heaps);
  const int num_experts = tree.num_experts, place = threadIdx.x / lanes_a_token;
  const Lanes lanes{lanes_a_token, static_cast<int>(threadIdx.x) % lanes_a_token};
  float* const heap = heaps + place * 2 * num_experts;
  const int64_t wanted = int64_t(blockIdx.x) * (blockDim.x / lanes_a_token) + place;
  const bool real = wanted < tokens;  // past the last token lanes keep their warp company
  const int64_t token = real ? wanted : tokens - 1;
  split_logits += token * num_trees * (num_experts - 1), leaf_logits += token * num_trees * num_experts;
  leaf_probs += token * num_trees * num_experts, gates += token * num_experts;

  float highest = -FLT_MAX;
  for (int j = 0; j < num_trees; j++) {
    reach(heap, split_logits + j * (num_experts - 1), tree, step, lanes);
    lanes.share(0, num_experts, [&](int i) {
      const float v = heap[tree.leaf(i)];
      if (real) leaf_probs[j * num_experts + i] = v;
      if (weighing.counts(v)) highest = fmaxf(highest, widen(leaf_logits[j * num_experts + i]));
    });
  }
  highest = warp_max(highest, lanes_a_token);
  float total = 0.0f;
  lanes.share(0, real ? num_experts : 0, [&](int i) {
    float sum = 0.0f;  // in the order of the trees
    for (int j = 0; j < num_trees; j++) {
      const float v = leaf_probs[j * num_experts + i];  // which this lane has written
      if (!weighing.counts(v)) continue;
      sum += (v + weighing.epsilon) * expf(widen(leaf_logits[j * num_experts + i]) - highest);
    }
    heap[i] = sum;
    total += sum;
  });
  total = warp_sum(total, lanes_a_token);
  lanes.share(0, real ? num_experts : 0, [&](int i) { gates[i] = heap[i] / total; });
}

// Over some of the leaves: the largest logit, and relative to its exponential the sums of weights and of weighted
// gradients.
struct Softmax {
  float highest = -FLT_MAX, total = 0.0f, dot = 0.0f;

  __device__ void add(float weight, float logit, float grad) {
    const float higher = fmaxf(highest, logit), scale = expf(highest - higher);
    const float term = weight * expf(logit - higher);
    total = total * scale + term;
    dot = dot * scale + term * grad;
    highest = higher;
  }
  __device__ void join(int lanes) {
    const float higher = warp_max(highest, lanes), scale = expf(highest - higher);
    total = warp_sum(total * scale, lanes);
    dot = warp_sum(dot * scale, lanes);
    highest = higher;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    tree_gate_bwd_kernel(const float* grad_gates,       // (T, E)
                         const float* grad_leaf_probs,  // (T, K, E), or nullptr
                         const T* split_logits,         // (T, K, E - 1)
                         const T* leaf_logits,          // (T, K, E)
                         T* dsplit,                     // (T, K, E - 1)
                         T* dleaf,                      // (T, K, E)
                         int64_t tokens, int num_trees, Tree tree, SmoothStep step, Weighing weighing,
                         int lanes_a_token) {
  DYNAMIC_SHARED(float, heaps);
  const int num_experts = tree.num_experts, place = threadIdx.x / lanes_a_token;
  const Lanes lanes{lanes_a_token, static_cast<int>(threadIdx.x) % lanes_a_token};
  float* const heap = heaps + place * 2 * num_experts;
  const int64_t wanted = int64_t(blockIdx.x) * (blockDim.x / lanes_a_token) + place;
  const bool real = wanted < tokens;
  const int64_t token = real ? wanted : tokens - 1, first_leaf = token * num_trees * num_experts;
  split_logits += first_leaf - token * num_trees, dsplit += first_leaf - token * num_trees;
  leaf_logits += first_leaf, dleaf += first_leaf, grad_gates += token * num_experts;
  if (grad_leaf_probs) grad_leaf_probs += first_leaf;

  Softmax softmax;
  for (int j = 0; j < num_trees; j++) {
    reach(heap, split_logits + j * (num_experts - 1), tree, step, lanes);
    lanes.share(0, num_experts, [&](int i) {
      const float v = heap[tree.leaf(i)];
      if (!weighing.counts(v)) return;
      softmax.add(v + weighing.epsilon, widen(leaf_logits[j * num_experts + i]), grad_gates[i]);
    });
  }
  softmax.join(lanes_a_token);
  const float mean = softmax.dot / softmax.total;

  for (int j = 0; j < num_trees; j++) {
    const T* const splits = split_logits + j * (num_experts - 1);
    if (num_trees > 1) reach(heap, splits, tree, step, lanes);
    lanes.share(0, num_experts, [&](int i) {
      float& below = heap[tree.leaf(i)];
      const float v = below;
      const int at = j * num_experts + i;
      float dlogit = 0.0f;
      below = 0.0f;
      if (weighing.counts(v)) {
        // What counts is at least the smallest normal number, and so is the total: the quotient is finite. Its product
        // with a gradient need not be, that of its share of v is.
        const float share = expf(widen(leaf_logits[at]) - softmax.highest) / softmax.total, grad = grad_gates[i] - mean;
        dlogit = (v + weighing.epsilon) * share * grad;
        below = v * share * grad;
      }
      if (grad_leaf_probs) below += v * grad_leaf_probs[at];
      if (real) narrow(dlogit, dleaf[at]);
    });
    for (int first = tree.full / 2; first > 0; first /= 2) {
      lanes.share(first, min(2 * first, num_experts), [&](int m) {
        const float2 below = children(heap, m);
        const Split split(widen(splits[m - 1]), step);
        if (real) narrow(split.derivative(below.x, below.y, step), dsplit[j * (num_experts - 1) + m - 1]);
        heap[m] = below.x + below.y;
      });
    }
  }
}

// As many lanes as leaves, up to a warp.
int lanes_of(const Tree& tree) { return std::min(tree.full, kWarpSize); }

template <class Kernel, class... Arguments>
cudaError_t start(Kernel kernel, int64_t tokens, int64_t num_trees, int64_t num_experts, float gamma, float epsilon,
                  float least, cudaStream_t stream, Arguments... arguments) {
  const Tree tree(num_experts);
  const int64_t heap_bytes = 2 * num_experts * sizeof(float), limit = shared_memory_limit();
  int threads = kThreads;
  while (threads > kWarpSize && threads / lanes_of(tree) * heap_bytes > limit) threads /= 2;
  const int together = threads / lanes_of(tree);
  return launch(kernel, dim3(static_cast<unsigned>((tokens + together - 1) / together)), threads,
                together * heap_bytes, stream, arguments..., tokens, static_cast<int>(num_trees),
                tree, SmoothStep(gamma), Weighing{epsilon, least}, lanes_of(tree));
}

bool plausible(int64_t tokens, int64_t num_trees, int64_t num_experts) {
  return tokens >= 0 && tokens <= INT32_MAX && num_trees > 0 && num_experts >= 2 && num_experts <= kMostExperts &&
         num_trees * num_experts <= kMaxRow;
}

}  // namespace

cudaError_t tree_gate_fwd(int dtype, const void* split_logits, const void* leaf_logits, void* gates, void* leaf_probs,
                          void* /*scratch*/, int64_t /*scratch_stride*/, int64_t tokens, int64_t num_trees,
                          int64_t num_experts, float gamma, float epsilon, float least, cudaStream_t stream) {
  if (!plausible(tokens, num_trees, num_experts)) return cudaErrorInvalidValue;
  if (tokens == 0) return cudaSuccess;
  const auto run = [&](auto element) {
    using T = decltype(element);
    return start(tree_gate_kernel<T>, tokens, num_trees, num_experts, gamma, epsilon, least, stream,
                 static_cast<const T*>(split_logits), static_cast<const T*>(leaf_logits), static_cast<float*>(gates),
                 static_cast<float*>(leaf_probs));
  };
  switch (dtype) {
    case float32: return run(float{});
    case bfloat16: return run(__nv_bfloat16{});
    case float16: return run(__half{});
  }
  return cudaErrorInvalidValue;
}

cudaError_t tree_gate_bwd(int dtype, const void* grad_gates, const void* grad_leaf_probs, const void* split_logits,
                          const void* leaf_logits, void* dsplit, void* dleaf, void* /*scratch*/,
                          int64_t /*scratch_stride*/, int64_t tokens, int64_t num_trees, int64_t num_experts,
                          float gamma, float epsilon, float least, cudaStream_t stream) {
  if (!plausible(tokens, num_trees, num_experts)) return cudaErrorInvalidValue;
  if (tokens == 0) return cudaSuccess;
  const auto run = [&](auto element) {
    using T = decltype(element);
    return start(tree_gate_bwd_kernel<T>, tokens, num_trees, num_experts, gamma, epsilon, least, stream,
                 static_cast<const float*>(grad_gates), static_cast<const float*>(grad_leaf_probs),
                 static_cast<const T*>(split_logits), static_cast<const T*>(leaf_logits), static_cast<T*>(dsplit),
                 static_cast<T*>(dleaf));
  };
  switch (dtype) {
    case float32: return run(float{});
    case bfloat16: return run(__nv_bfloat16{});
    case float16: return run(__half{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace moe
