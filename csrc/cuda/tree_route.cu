// Finds the likeliest leaf of each tree for each token, and computes the weights of the experts at these leaves. A warp
// searches one tree at a time. It goes from each node to the likelier child, and pushes the other child onto a stack if
// that child's probability is above 0. A node from the stack is visited only if it is at least as likely as the best
// leaf so far. Only the weights of visited nodes and of the best leaf are read.
#include <cfloat>

#include "moe/common/dtypes.h"
#include "moe/cuda/launch.cuh"
#include "moe/cuda/rows.cuh"
#include "moe/cuda/tree.cuh"
#include "moe/cuda/warp.cuh"
#include "ops.h"

namespace moe {
namespace {

constexpr int kWarps = 8;         // of a block
constexpr int kBlocks = 2;        // per SM, at least
constexpr int kMostTrees = 1024;  // largest K

template <class T, class Vector>
struct Products {
  const Vector* x;       // (P)
  const Vector* weight;  // (rows, P)
  const T* bias;         // (rows), or nullptr
  int vectors, lane;

  // <x, weight[row]> + bias[row], rounded to T. All lanes get the result.
  __device__ float operator[](int row) const {
    using Elements = Pack<T, Vector>;
    float sum = 0.0f;
    for (int v = lane; v < vectors; v += kWarpSize) {
      typename Elements::Floats a, b;
      Elements::unpack(load(x + v), a);
      Elements::unpack(load(weight + row * int64_t(vectors) + v), b);
#pragma unroll
      for (int i = 0; i < Elements::kElements; i++) sum = __fmaf_rn(a[i], b[i], sum);
    }
    T rounded;
    narrow(warp_sum(sum) + (bias ? widen(bias[row]) : 0.0f), rounded);
    return widen(rounded);
  }
};

struct Candidate {
  int node;
  float prob;
};

// Lane i holds entry i. 32 entries suffice: each entry is the sibling of a node on the path from the root to the
// current node, and a tree has at most 30 levels below the root.
struct Stack {
  Candidate mine{0, 0.0f};
  int size = 0;

  __device__ void push(Candidate candidate, int lane) {
    if (lane == size) mine = candidate;
    size++;
  }
  __device__ Candidate pop() {
    size--;
    return {__shfl_sync(kAllLanes, mine.node, size), __shfl_sync(kAllLanes, mine.prob, size)};
  }
};

struct Descent {
  Candidate best{INT32_MAX, 0.0f};  // the likeliest leaf so far, the left-most if tied
  int expert = INT32_MAX, visited = 0;
  // Largest probabilities: of visited nodes that are not saturated (|split logit| < gamma / 2), and of visited nodes
  // with a NaN logit.
  float undecided = -1.0f, unknown = -1.0f;

  // At a node whose logit is NaN, the search goes to the left child only.
  template <class Logits>
  __device__ void run(const Logits& split_logits, const Tree& tree, const SmoothStep& step, int lane) {
    Stack stack;
    Candidate here{1, 1.0f};
    for (;;) {
      while (here.node < tree.num_experts && here.prob >= best.prob) {
        float t = split_logits[here.node - 1];
        visited++;
        if (t != t) {
          unknown = fmaxf(unknown, here.prob);
          t = step.half;
        }
        const Split split(t, step);
        if (!split.saturated()) undecided = fmaxf(undecided, here.prob);
        const float left = here.prob * split.left(), right = here.prob * split.right();
        const int side = right > left;
        if (fminf(left, right) > 0.0f) stack.push({2 * here.node + 1 - side, fminf(left, right)}, lane);
        here = {2 * here.node + side, fmaxf(left, right)};
      }
      if (here.node >= tree.num_experts) {
        const int found = tree.expert(here.node);
        if (here.prob > best.prob || (here.prob == best.prob && found < expert)) best = here, expert = found;
      }
      if (stack.size == 0) return;
      here = stack.pop();
    }
  }
};

// A softmax over the logits of the trees' best leaves. If several trees have the same expert, the first gets the sum of
// their weights; the others get weight 0 and expert -1.
__device__ void merge_trees(const float* logits,    // (K)
                            const int32_t* chosen,  // (K)
                            float* weights,         // (K)
                            int32_t* experts,       // (K)
                            int num_trees, int lane) {
  float highest = -FLT_MAX, total = 0.0f;
  for (int j = lane; j < num_trees; j += kWarpSize) highest = fmaxf(highest, logits[j]);
  highest = warp_max(highest);
  for (int j = lane; j < num_trees; j += kWarpSize) total += expf(logits[j] - highest);
  total = warp_sum(total);
  for (int j = lane; j < num_trees; j += kWarpSize) {
    bool first = true;
    float sum = 0.0f;
    for (int other = 0; other < num_trees; other++) {
      if (chosen[other] != chosen[j]) continue;
      first &= other >= j;
      sum += expf(logits[other] - highest);
    }
    weights[j] = first ? sum / total : 0.0f;
    experts[j] = first ? chosen[j] : -1;
  }
}

template <class T, class Vector>
__global__ void __launch_bounds__(kWarps * kWarpSize, kBlocks)
    tree_route_kernel(const Vector* x,             // (tokens, P)
                      int64_t x_stride,            // vectors from token to token
                      const Vector* split_weight,  // (K, E - 1, P)
                      const Vector* leaf_weight,   // (K, E, P)
                      const T* split_bias,         // (K, E - 1), or nullptr
                      const T* leaf_bias,          // (K, E), or nullptr
                      float* weights,              // (tokens, K)
                      int32_t* experts,            // (tokens, K)
                      int32_t* visited,            // (tokens, K)
                      uint8_t* unsaturated,        // (tokens, K)
                      int64_t tokens, int num_trees, Tree tree, SmoothStep step, int vectors) {
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  float* const shared = reinterpret_cast<float*>(dynamic_shared);
  const int lane = threadIdx.x, local_token = threadIdx.z;  // blockDim.y warps share the trees of a token
  float* const logits = shared + local_token * 2 * num_trees;
  int32_t* const chosen = reinterpret_cast<int32_t*>(logits + num_trees);
  const int64_t token = int64_t(blockIdx.x) * blockDim.z + local_token;
  const int64_t first = token * num_trees;
  x += token * x_stride;
  for (int j = threadIdx.y; token < tokens && j < num_trees; j += blockDim.y) {
    const int64_t leaves = int64_t(j) * tree.num_experts, nodes = leaves - j;
    Descent descent;
    descent.run(Products<T, Vector>{x, split_weight + nodes * vectors, split_bias ? split_bias + nodes : nullptr,
                                    vectors, lane},
                tree, step, lane);
    const Products<T, Vector> leaf_logits{x, leaf_weight + leaves * vectors, leaf_bias ? leaf_bias + leaves : nullptr,
                                          vectors, lane};
    const float logit = leaf_logits[descent.expert];
    if (lane > 0) continue;
    logits[j] = descent.unknown >= descent.best.prob ? NAN : logit;
    chosen[j] = descent.expert;
    visited[first + j] = descent.visited;
    unsaturated[first + j] = descent.undecided >= descent.best.prob;
  }
  __syncthreads();
  if (token < tokens && threadIdx.y == 0)
    merge_trees(logits, chosen, weights + first, experts + first, num_trees, lane);
}

struct Call {
  const void* x;
  int64_t x_stride;
  const void *split_weight, *leaf_weight, *split_bias, *leaf_bias;
  float* weights;
  int32_t *experts, *visited;
  uint8_t* unsaturated;
  int64_t tokens, num_trees, num_experts, dim;
  float gamma;
};

template <class T, class Vector>
cudaError_t launch_route(const Call& c, cudaStream_t stream) {
  constexpr int kElements = Pack<T, Vector>::kElements;
  int warps = 1;  // for a token
  while (warps < kWarps && warps < c.num_trees) warps *= 2;
  const int block_tokens = kWarps / warps;
  const dim3 grid(static_cast<unsigned>((c.tokens + block_tokens - 1) / block_tokens));
  return launch(tree_route_kernel<T, Vector>, grid, dim3(kWarpSize, warps, block_tokens),
                block_tokens * c.num_trees * (sizeof(float) + sizeof(int32_t)), stream, static_cast<const Vector*>(c.x),
                c.x_stride / kElements, static_cast<const Vector*>(c.split_weight),
                static_cast<const Vector*>(c.leaf_weight), static_cast<const T*>(c.split_bias),
                static_cast<const T*>(c.leaf_bias), c.weights, c.experts, c.visited, c.unsaturated, c.tokens,
                static_cast<int>(c.num_trees), Tree(c.num_experts), SmoothStep(c.gamma),
                static_cast<int>(c.dim / kElements));
}

}  // namespace

cudaError_t tree_route_fwd(int dtype, const void* x, int64_t x_stride, const void* split_weight,
                           const void* leaf_weight, const void* split_bias, const void* leaf_bias, void* weights,
                           int32_t* experts, int32_t* visited, uint8_t* unsaturated, void* /*scratch*/,
                           int64_t /*scratch_stride*/, int64_t tokens, int64_t dim, int64_t num_trees,
                           int64_t num_experts, float gamma, cudaStream_t stream) {
  if (tokens < 0 || tokens > INT32_MAX || num_trees < 1 || num_trees > kMostTrees || num_experts < 2 ||
      num_experts > kMaxRow || dim < 0 || dim > kMaxRow) {
    return cudaErrorInvalidValue;
  }
  if (tokens == 0) return cudaSuccess;
  const int64_t size = element_size(dtype);
  const bool vectorized = rows_divide(16, dim * size, {x_stride * size}, {x, split_weight, leaf_weight});
  Call call{};
  call.x = x, call.x_stride = x_stride;
  call.split_weight = split_weight, call.leaf_weight = leaf_weight;
  call.split_bias = split_bias, call.leaf_bias = leaf_bias;
  call.weights = static_cast<float*>(weights), call.experts = experts;
  call.visited = visited, call.unsaturated = unsaturated;
  call.tokens = tokens, call.num_trees = num_trees, call.num_experts = num_experts, call.dim = dim;
  call.gamma = gamma;
  return with_unit(dtype, vectorized, [&](auto element, auto unit) {
    return launch_route<decltype(element), decltype(unit)>(call, stream);
  });
}

}  // namespace moe
