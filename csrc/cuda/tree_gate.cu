// The tree gate after its matrix products (formulas: ops/tree_gate.py). In the kernels of this file, 2 to 32 lanes take
// a token and keep one of its trees at a time in shared memory. The kernels of tree_gate_lanes.cuh (forward) and
// tree_gate_warp.cuh (backward) keep a tree in registers; by_lanes and by_leaves choose them for trees of some sizes.
#include <algorithm>
#include <cfloat>
#include <type_traits>

#include "moe/common/dtypes.h"
#include "moe/cuda/launch.cuh"
#include "moe/cuda/rows.cuh"
#include "moe/cuda/tree.cuh"
#include "moe/cuda/warp.cuh"
#include "ops.h"
#include "tree_gate_lanes.cuh"
#include "tree_gate_warp.cuh"

namespace moe {
namespace {

constexpr int kThreads = 128;        // of a block, at most
constexpr int kBlocks = 4;           // per SM, at least
constexpr int kMostExperts = 4096;   // a token takes 48 KB of shared memory in forward

// A token's floats in shared memory: `vectors` arrays of E floats, rounded up to an even number, because children()
// needs every token's heap aligned for float2.
__host__ __device__ inline int room(int vectors, int num_experts) { return (vectors * num_experts + 1) / 2 * 2; }

__device__ float2& children(float* heap, int m) { return reinterpret_cast<float2*>(heap)[m]; }

// The lanes that share a token: `count` neighbours in a warp. index: of this lane among them.
struct Lanes {
  int count, index;

  // Calls each(i) for this lane's i in [first, last). Every lane of the warp must call share: it ends with a barrier.
  template <class Each>
  __device__ void share(int first, int last, Each each) const {
#pragma unroll 1
    for (int i = first + index; i < last; i += count) each(i);
    __syncwarp();
  }
};

// Sets heap[m] to the probability of reaching node m (numbered as in moe/cuda/tree.cuh), for all nodes but the root.
template <class T>
__device__ void reach(float* heap,            // (2E)
                      const T* split_logits,  // (E - 1)
                      const Tree& tree, const SmoothStep& step, const Lanes& lanes) {
  const auto descend = [&](int m, float reached) {
    const Split split(widen(split_logits[m - 1]), step);
    children(heap, m) = {reached * split.left(), reached * split.right()};
  };
  // Nodes 1 to 31: first each child gets the probability of its branch alone, then, level by level, of its whole path.
  const int top = min(kWarpSize, tree.num_experts);
  lanes.share(1, top, [&](int m) { descend(m, 1.0f); });
  for (int first = 4; first < 2 * top; first *= 2) {
    lanes.share(first, min(2 * first, 2 * tree.num_experts), [&](int m) { heap[m] *= heap[m >> 1]; });
  }
  for (int first = kWarpSize; first < tree.num_experts; first *= 2) {
    lanes.share(first, min(2 * first, tree.num_experts), [&](int m) { descend(m, heap[m]); });
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    tree_gate_kernel(const T* split_logits,  // (tokens, K, E - 1)
                     const T* leaf_logits,   // (tokens, K, E)
                     T* gates,               // (tokens, E)
                     T* leaf_probs,          // (tokens, K, E)
                     int64_t tokens, int num_trees, Tree tree, SmoothStep step, Weighing weighing, int lanes_a_token) {
  extern __shared__ __align__(128) float heaps[];
  const int num_experts = tree.num_experts, local_token = threadIdx.x / lanes_a_token;
  const Lanes lanes{lanes_a_token, static_cast<int>(threadIdx.x) % lanes_a_token};
  float *const heap = heaps + local_token * room(3, num_experts), *const sums = heap + 2 * num_experts;
  const int64_t global_token = int64_t(blockIdx.x) * (blockDim.x / lanes_a_token) + local_token;
  const bool in_range = global_token < tokens;  // lanes without a token repeat the last one: barriers need all lanes
  const int64_t token = in_range ? global_token : tokens - 1;
  split_logits += token * num_trees * (num_experts - 1), leaf_logits += token * num_trees * num_experts;
  leaf_probs += token * num_trees * num_experts, gates += token * num_experts;

  // highest: largest logit of this lane's leaves with a probability of at least Weighing::least; `sums` have the factor
  // exp(-highest)
  float highest = -FLT_MAX;
  for (int j = 0; j < num_trees; j++) {
    reach(heap, split_logits + j * (num_experts - 1), tree, step, lanes);
    float higher = highest;
    lanes.share(0, num_experts, [&](int i) {
      const float v = heap[tree.leaf(i)];
      if (in_range) narrow(v, leaf_probs[j * num_experts + i]);
      if (weighing.counts(v)) higher = fmaxf(higher, widen(leaf_logits[j * num_experts + i]));
    });
    const float scale = expf(highest - higher);
    highest = higher;
    lanes.share(0, num_experts, [&](int i) {
      const float v = heap[tree.leaf(i)];
      float sum = j > 0 ? sums[i] * scale : 0.0f;
      if (weighing.counts(v)) sum += (v + weighing.epsilon) * expf(widen(leaf_logits[j * num_experts + i]) - highest);
      sums[i] = sum;
    });
  }
  float total = 0.0f;
  lanes.share(0, num_experts, [&](int i) { total += sums[i]; });
  const float scale = expf(highest - warp_max(highest, lanes_a_token));
  total = warp_sum(total * scale, lanes_a_token);
  lanes.share(0, in_range ? num_experts : 0, [&](int i) { narrow(sums[i] * scale / total, gates[i]); });
}

// Over the added leaves, with term = weight * exp(logit - highest): the largest logit, and the sums of term and of
// term * grad.
struct Softmax {
  float highest = -FLT_MAX, total = 0.0f, dot = 0.0f;

  __device__ void add(float weight, float logit, float grad) {
    const float higher = fmaxf(highest, logit), scale = expf(highest - higher);
    const float term = weight * expf(logit - higher);
    total = total * scale + term;
    dot = dot * scale + term * grad;
    highest = higher;
  }
  __device__ void reduce(int lanes) {
    const float higher = warp_max(highest, lanes), scale = expf(highest - higher);
    total = warp_sum(total * scale, lanes);
    dot = warp_sum(dot * scale, lanes);
    highest = higher;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    tree_gate_bwd_kernel(const T* grad_gates,       // (tokens, E)
                         const T* grad_leaf_probs,  // (tokens, K, E), or nullptr
                         const T* split_logits,     // (tokens, K, E - 1)
                         const T* leaf_logits,      // (tokens, K, E)
                         T* dsplit,                 // (tokens, K, E - 1)
                         T* dleaf,                  // (tokens, K, E)
                         int64_t tokens, int num_trees, Tree tree, SmoothStep step, Weighing weighing,
                         int lanes_a_token) {
  extern __shared__ __align__(128) float heaps[];
  const int num_experts = tree.num_experts, local_token = threadIdx.x / lanes_a_token;
  const Lanes lanes{lanes_a_token, static_cast<int>(threadIdx.x) % lanes_a_token};
  float* const heap = heaps + local_token * 2 * num_experts;
  const int64_t global_token = int64_t(blockIdx.x) * (blockDim.x / lanes_a_token) + local_token;
  const bool in_range = global_token < tokens;
  const int64_t token = in_range ? global_token : tokens - 1, first_leaf = token * num_trees * num_experts;
  split_logits += first_leaf - token * num_trees, dsplit += first_leaf - token * num_trees;
  leaf_logits += first_leaf, dleaf += first_leaf, grad_gates += token * num_experts;
  if (grad_leaf_probs) grad_leaf_probs += first_leaf;

  Softmax softmax;
  for (int j = 0; j < num_trees; j++) {
    reach(heap, split_logits + j * (num_experts - 1), tree, step, lanes);
    lanes.share(0, num_experts, [&](int i) {
      const float v = heap[tree.leaf(i)];
      if (!weighing.counts(v)) return;
      softmax.add(v + weighing.epsilon, widen(leaf_logits[j * num_experts + i]), widen(grad_gates[i]));
    });
  }
  softmax.reduce(lanes_a_token);
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
        // The products begin with v, since share * grad may overflow.
        const float share = expf(widen(leaf_logits[at]) - softmax.highest) / softmax.total;
        const float grad = widen(grad_gates[i]) - mean;
        dlogit = (v + weighing.epsilon) * share * grad;
        below = v * share * grad;
      }
      if (grad_leaf_probs) below += v * widen(grad_leaf_probs[at]);
      if (in_range) narrow(dlogit, dleaf[at]);
    });
    for (int first = tree.full >> 1; first > 0; first >>= 1) {
      lanes.share(first, min(2 * first, num_experts), [&](int m) {
        const float2 below = children(heap, m);
        const Split split(widen(splits[m - 1]), step);
        if (in_range) narrow(split.derivative(below.x, below.y, step), dsplit[j * (num_experts - 1) + m - 1]);
        heap[m] = below.x + below.y;
      });
    }
  }
}

dim3 blocks_of(int64_t tokens, int64_t of_block) {
  return dim3(static_cast<unsigned>((tokens + of_block - 1) / of_block));
}

int lanes_of(const Tree& tree) { return std::min(tree.full, kWarpSize); }

template <class Kernel, class... Arguments>
cudaError_t launch_heaps(Kernel kernel, int vectors, int64_t tokens, int64_t num_trees, int64_t num_experts,
                        const SmoothStep& step, const Weighing& weighing, cudaStream_t stream, Arguments... arguments) {
  const Tree tree(num_experts);
  const int64_t heap_bytes = room(vectors, tree.num_experts) * sizeof(float), limit = shared_memory_limit();
  int threads = kThreads;
  while (threads > kWarpSize && threads / lanes_of(tree) * heap_bytes > limit) threads /= 2;
  const int block_tokens = threads / lanes_of(tree);
  return launch(kernel, blocks_of(tokens, block_tokens), threads, block_tokens * heap_bytes, stream, arguments...,
                tokens, static_cast<int>(num_trees), tree, step, weighing, lanes_of(tree));
}

// Calls with(LEAVES, LANES) if LANES lanes can keep a tree in registers, LEAVES leaves each; else without().
template <class T, class With, class Without>
cudaError_t by_lanes(int64_t num_experts, std::initializer_list<const void*> pointers, With with, Without without) {
  constexpr std::integral_constant<int, 32 / sizeof(T)> leaves;
  const bool divides = rows_divide(16, num_experts * sizeof(T), {}, pointers);
  if (!divides || num_experts <= 4 || num_experts > 1024) return without();
  if (num_experts <= 8) return with(std::integral_constant<int, 8>(), std::integral_constant<int, 1>());
  if (num_experts <= leaves) return with(leaves, std::integral_constant<int, 1>());
  if (num_experts <= leaves * 2) return with(leaves, std::integral_constant<int, 2>());
  if (num_experts <= leaves * 4) return with(leaves, std::integral_constant<int, 4>());
  if (num_experts <= leaves * 8) return with(leaves, std::integral_constant<int, 8>());
  if (num_experts <= leaves * 16) return with(leaves, std::integral_constant<int, 16>());
  if (num_experts <= leaves * 32) return with(leaves, std::integral_constant<int, 32>());
  // LEAVES must divide 2E (see tree_gate_lanes.cuh).
  const std::integral_constant<int, 32> warp;
  if (num_experts <= 512 && num_experts % 8 == 0) return with(std::integral_constant<int, 16>(), warp);
  return num_experts > 512 && num_experts % 16 == 0 ? with(warp, warp) : without();
}

// Calls with(LEAVES) if a warp can keep a tree in registers, LEAVES leaves in each lane; else without().
template <class T, class With, class Without>
cudaError_t by_leaves(int64_t num_experts, std::initializer_list<const void*> pointers, With with, Without without) {
  for (const void* each : pointers) {
    if (!is_aligned(each, 16)) return without();
  }
  switch (num_experts) {
    case 32: return with(std::integral_constant<int, 1>());
    case 64: return with(std::integral_constant<int, 2>());
    case 128: return with(std::integral_constant<int, 4>());
    case 256: return with(std::integral_constant<int, 8>());
    case 512: return with(std::integral_constant<int, 16>());
  }
  return without();
}

template <class Kernel, class... Arguments>
cudaError_t launch_warps(Kernel kernel, int64_t tokens, int64_t num_trees, const SmoothStep& step,
                         const Weighing& weighing, cudaStream_t stream, Arguments... arguments) {
  return launch(kernel, blocks_of(tokens, kWarpTokens), kWarpTokens * kWarpSize, 0, stream, arguments..., tokens,
                static_cast<int>(num_trees), step, weighing);
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
  const SmoothStep step(gamma);
  const Weighing weighing{epsilon, least};
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const auto *const splits = static_cast<const T*>(split_logits), *const leaves = static_cast<const T*>(leaf_logits);
    T *const to = static_cast<T*>(gates), *const probs = static_cast<T*>(leaf_probs);
    return by_lanes<T>(
        num_experts, {leaf_logits, gates, leaf_probs},
        [&](auto each, auto lanes) {
          constexpr int kLeaves = decltype(each)::value, kLanes = decltype(lanes)::value;
          return launch(tree_gate_lanes_kernel<T, kLeaves, kLanes>, blocks_of(tokens, kLaneThreads / kLanes),
                        kLaneThreads, 0, stream, splits, leaves, to, probs, tokens, static_cast<int>(num_trees),
                        static_cast<int>(num_experts), step, weighing);
        },
        [&] {
          return launch_heaps(tree_gate_kernel<T>, 3, tokens, num_trees, num_experts, step, weighing, stream, splits,
                              leaves, to, probs);
        });
  });
}

cudaError_t tree_gate_bwd(int dtype, const void* grad_gates, const void* grad_leaf_probs, const void* split_logits,
                          const void* leaf_logits, void* dsplit, void* dleaf, void* /*scratch*/,
                          int64_t /*scratch_stride*/, int64_t tokens, int64_t num_trees, int64_t num_experts,
                          float gamma, float epsilon, float least, cudaStream_t stream) {
  if (!plausible(tokens, num_trees, num_experts)) return cudaErrorInvalidValue;
  if (tokens == 0) return cudaSuccess;
  const SmoothStep step(gamma);
  const Weighing weighing{epsilon, least};
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const auto* of_gates = static_cast<const T*>(grad_gates);
    const auto* of_probs = static_cast<const T*>(grad_leaf_probs);
    const auto *const splits = static_cast<const T*>(split_logits), *const leaves = static_cast<const T*>(leaf_logits);
    T *const to_splits = static_cast<T*>(dsplit), *const to_leaves = static_cast<T*>(dleaf);
    return by_leaves<T>(
        num_experts, {leaf_logits, grad_gates, grad_leaf_probs, dleaf},
        [&](auto each) {
          return launch_warps(tree_gate_warp_bwd_kernel<T, decltype(each)::value>, tokens, num_trees, step, weighing,
                              stream, of_gates, of_probs, splits, leaves, to_splits, to_leaves);
        },
        [&] {
          return launch_heaps(tree_gate_bwd_kernel<T>, 2, tokens, num_trees, num_experts, step, weighing, stream,
                              of_gates, of_probs, splits, leaves, to_splits, to_leaves);
        });
  });
}

}  // namespace moe
