// The backward pass of the tree gate for trees of 32, 64, 128, 256 or 512 leaves. A warp takes a token. A lane holds
// the subtree of LEAVES leaves whose root is node 32 + lane (numbered as in tree.cuh). Lanes 1 to 31 also hold node
// `lane`, above the subtrees.
#pragma once

#include <cfloat>
#include <type_traits>

#include "moe/cuda/rows.cuh"
#include "moe/cuda/tree.cuh"
#include "moe/cuda/warp.cuh"

namespace moe {
namespace {

// A leaf's term in the softmax is weight * exp(logit), with weight v + epsilon for probability v, or 0 if v < least.
struct Weighing {
  float epsilon, least;

  __device__ bool counts(float v) const { return !(v < least); }  // a NaN counts
};

// Converts two numbers to 16 bits each; the first is in the low half.
template <class T>
__device__ __forceinline__ uint32_t narrow_pair(float first, float second) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
}

// Reads and writes COUNT neighbouring elements as vectors of up to 16 bytes, at addresses that are multiples of
// sizeof(Vector).
template <class T, int COUNT>
struct Neighbours {
  static constexpr int kBytes = COUNT * sizeof(T);
  using Vector = std::conditional_t<
      kBytes % 16 == 0, uint4,
      std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;
  using Piece = Pack<T, Vector>;
  static constexpr int kPieces = kBytes / sizeof(Vector);

  __device__ static void read(const T* from, float (&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      typename Piece::Floats some;
      Piece::unpack(load(reinterpret_cast<const Vector*>(from) + i), some);
#pragma unroll
      for (int e = 0; e < Piece::kElements; e++) values[i * Piece::kElements + e] = some[e];
    }
  }
  __device__ static void write(T* to, const float (&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      const float* const some = values + i * Piece::kElements;
      Vector vector;
      if constexpr (sizeof(T) == 2 && Piece::kElements > 1) {
        uint32_t pairs[Piece::kElements / 2];
#pragma unroll
        for (int e = 0; e < Piece::kElements / 2; e++) pairs[e] = narrow_pair<T>(some[2 * e], some[2 * e + 1]);
        memcpy(&vector, pairs, sizeof vector);
      } else {
        T elements[Piece::kElements];
#pragma unroll
        for (int e = 0; e < Piece::kElements; e++) narrow(some[e], elements[e]);
        memcpy(&vector, elements, sizeof vector);
      }
      store_streaming(reinterpret_cast<Vector*>(to) + i, vector);
    }
  }
};

__device__ __forceinline__ float from_lane(float value, int lane) { return __shfl_sync(kAllLanes, value, lane); }

// A lane's part of one tree of one token. In its subtree, the root is node 1, and leaf i is node LEAVES + i.
template <class T, int LEAVES>
struct Subtree {
  const SmoothStep& step;
  int lane;
  float top;               // split logit of node `lane`; not used in lane 0, as there is no node 0
  float logit[LEAVES];     // split logits of the subtree's nodes
  float prob[2 * LEAVES];  // probabilities of reaching the subtree's nodes

  __device__ Subtree(const SmoothStep& step, int lane) : step(step), lane(lane) {}

  __device__ int split_index(int m) const {
    const int level = m < 2 ? 1 : m < 4 ? 2 : m < 8 ? 4 : 8;  // the first node of m's level
    return (32 + lane) * level + m - level - 1;
  }

  __device__ void read(const T* split_logits) {  // (E - 1)
    top = widen(split_logits[max(lane, 1) - 1]);
#pragma unroll
    for (int m = 1; m < LEAVES; m++) logit[m] = widen(split_logits[split_index(m)]);
  }

  __device__ void descend() {
    const Split split(top, step);
    const float left = split.left(), right = split.right();
    // given(parent): probability of the branch from `parent` to its left child if `lane` is even, else to its right
    // child. reached: the probability of the last branch on the path to node `lane`, then of the last two branches
    // together, then of all (at most four).
    const auto given = [&](int parent) {
      const float a = from_lane(left, parent), b = from_lane(right, parent);
      return lane & 1 ? b : a;
    };
    float reached = given(lane / 2);
    if (lane < 2) reached = 1.0f;
    reached *= from_lane(reached, lane / 2);
    reached *= from_lane(reached, lane / 4);
    const int parent = 16 + lane / 2;
    prob[1] = given(parent) * from_lane(reached, parent);
#pragma unroll
    for (int m = 1; m < LEAVES; m++) {
      const Split node(logit[m], step);
      prob[2 * m] = prob[m] * node.left();
      prob[2 * m + 1] = prob[m] * node.right();
    }
  }
  __device__ float leaf(int i) const { return prob[LEAVES + i]; }

  // Writes the gradients to the split logits of the lane's nodes. Before the call, sums[LEAVES + i] must be the
  // gradient to the probability of the lane's leaf i, times this probability.
  __device__ void ascend(float (&sums)[2 * LEAVES], T* dsplit) const {  // (E - 1)
#pragma unroll
    for (int m = LEAVES - 1; m > 0; m--) {
      narrow(Split(logit[m], step).derivative(sums[2 * m], sums[2 * m + 1], step), dsplit[split_index(m)]);
      sums[m] = sums[2 * m] + sums[2 * m + 1];
    }
    // Lane n adds the sums of the children of node n. The children of nodes 16 to 31 are the roots of the 32 subtrees.
    float mine = sums[1], left = 0.0f, right = 0.0f;
#pragma unroll
    for (int first = 16; first > 0; first /= 2) {
      const int child = 2 * lane & 31;
      const float a = from_lane(mine, child), b = from_lane(mine, child + 1);
      if (lane >= first && lane < 2 * first) left = a, right = b, mine = a + b;
    }
    if (lane > 0) narrow(Split(top, step).derivative(left, right, step), dsplit[lane - 1]);
  }
};

constexpr int kWarpTokens = 4;  // tokens of a block

template <class T, int LEAVES>
__global__ void __launch_bounds__(kWarpTokens * kWarpSize)
    tree_gate_warp_bwd_kernel(const T* grad_gates,       // (tokens, E)
                              const T* grad_leaf_probs,  // (tokens, K, E), or nullptr
                              const T* split_logits,     // (tokens, K, E - 1)
                              const T* leaf_logits,      // (tokens, K, E)
                              T* dsplit,                 // (tokens, K, E - 1)
                              T* dleaf,                  // (tokens, K, E)
                              int64_t tokens, int num_trees, SmoothStep step, Weighing weighing) {
  using Leaves = Neighbours<T, LEAVES>;
  constexpr int kExperts = 32 * LEAVES;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = int64_t(blockIdx.x) * kWarpTokens + threadIdx.x / kWarpSize;
  if (token >= tokens) return;
  const int64_t first_split = token * num_trees * (kExperts - 1),
                first_leaf = token * num_trees * kExperts + lane * LEAVES;
  split_logits += first_split, dsplit += first_split, leaf_logits += first_leaf, dleaf += first_leaf;
  if (grad_leaf_probs) grad_leaf_probs += first_leaf;
  float grad[LEAVES], logit[LEAVES] = {};
  Leaves::read(grad_gates + token * kExperts + lane * LEAVES, grad);

  // Over this lane's leaves that count, with term = weight * exp(logit - highest): the largest logit, and the sums of
  // term and of term * grad.
  Subtree<T, LEAVES> tree(step, lane);
  float highest = -FLT_MAX, total = 0.0f, dot = 0.0f;
  for (int j = 0; j < num_trees; j++) {
    tree.read(split_logits + j * (kExperts - 1));
    Leaves::read(leaf_logits + j * kExperts, logit);
    tree.descend();
    float higher = highest;
#pragma unroll
    for (int i = 0; i < LEAVES; i++) higher = weighing.counts(tree.leaf(i)) ? fmaxf(higher, logit[i]) : higher;
    const float scale = expf(highest - higher);
    total *= scale, dot *= scale, highest = higher;
#pragma unroll
    for (int i = 0; i < LEAVES; i++) {
      if (!weighing.counts(tree.leaf(i))) continue;
      const float term = (tree.leaf(i) + weighing.epsilon) * expf(logit[i] - highest);
      total += term, dot += term * grad[i];
    }
  }
  const float most = warp_max(highest), scale = expf(highest - most);
  total = warp_sum(total * scale), dot = warp_sum(dot * scale);
  const float mean = dot / total;

  for (int j = 0; j < num_trees; j++) {
    if (num_trees > 1) {
      tree.read(split_logits + j * (kExperts - 1));
      Leaves::read(leaf_logits + j * kExperts, logit);
      tree.descend();
    }
    float sums[2 * LEAVES], given[LEAVES] = {};
    if (grad_leaf_probs) Leaves::read(grad_leaf_probs + j * kExperts, given);
#pragma unroll
    for (int i = 0; i < LEAVES; i++) {
      const float v = tree.leaf(i);
      float dlogit = 0.0f, sum = 0.0f;
      if (weighing.counts(v)) {
        // The products begin with v, since share * centred may overflow.
        const float share = expf(logit[i] - most) / total, centred = grad[i] - mean;
        dlogit = (v + weighing.epsilon) * share * centred;
        sum = v * share * centred;
      }
      if (grad_leaf_probs) sum += v * given[i];
      logit[i] = dlogit, sums[LEAVES + i] = sum;
    }
    Leaves::write(dleaf + j * kExperts, logit);
    tree.ascend(sums, dsplit + j * (kExperts - 1));
  }
}

}  // namespace
}  // namespace moe
