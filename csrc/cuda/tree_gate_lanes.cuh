// The forward pass of the tree gate for E experts, 8 to 1024, if by_lanes (tree_gate.cu) finds LEAVES and LANES. LANES
// lanes take a token. A lane keeps in registers the subtree of LEAVES neighbouring leaves whose root is node LANES +
// lane (numbered as in moe/cuda/tree.cuh).
//
// If E is not a power of two, the tree has deep leaves and, one level above, shallow ones. A shallow leaf becomes a
// node that always goes left, to a leaf with the expert; the leaf on the right has none. A lane has only deep or only
// shallow leaves, since by_lanes chooses a LEAVES that divides 2E and so the number of deep leaves,
// 2E - LEAVES * LANES.
#pragma once

#include <cfloat>
#include <cmath>

#include "moe/cuda/special.cuh"
#include "tree_gate_warp.cuh"

namespace moe {
namespace {

// exp(-x) for x >= 0, or 0 if that is subnormal; NaN for NaN. With a 16-bit T its relative error may reach 5e-6.
template <class T>
__device__ __forceinline__ float decay(float x) {
  if constexpr (sizeof(T) == 2) return power_of_two(x * -1.44269504f);
  const float least = least_or_nan(x, 200.0f), exponent = least * -1.44269502f, power = power_of_two(exponent);
  const float missing = fmaf(least, 1.92596299e-8f, fmaf(least, 1.44269502f, exponent));
  return fmaf(power * missing, -0.693147181f, power);
}

constexpr int depth_of(int leaves) { return leaves == 1 ? 0 : 1 + depth_of(leaves / 2); }

// A lane's subtree, at the same place in every tree. In it, the root is node 1, and leaf i is node LEAVES + i.
template <class T, int LEAVES, int LANES>
struct Branch {
  static constexpr int kFull = LEAVES * LANES, kAbove = depth_of(LANES);

  const SmoothStep& step;
  int root;       // the subtree's root, as a node of the tree
  int first;      // expert of the first leaf
  bool shallow;   // only every second leaf has an expert
  float sign[kAbove + 1];  // for each ancestor of `root`, parent first: 1 if `root` is in its left subtree, else -1

  __device__ Branch(const SmoothStep& step, int lane, int num_experts) : step(step), root(LANES + lane) {
    const int deep = 2 * num_experts - kFull;
    shallow = lane * LEAVES >= deep;
    first = shallow ? (lane * LEAVES + deep) / 2 : lane * LEAVES;
#pragma unroll
    for (int i = 0; i < kAbove; i++) sign[i] = root >> i & 1 ? -1.0f : 1.0f;
  }

  __device__ void descend(const T* split_logits,  // (E - 1)
                          float (&leaves)[LEAVES]) const {
    float above[kAbove + 1], logit[LEAVES];
#pragma unroll
    for (int i = 0; i < kAbove; i++) above[i] = widen(split_logits[(root >> (i + 1)) - 1]);
#pragma unroll
    for (int m = 1; m < LEAVES / 2; m++) logit[m] = widen(split_logits[split_index(m)]);
#pragma unroll
    for (int m = LEAVES / 2; m < LEAVES; m++) logit[m] = FLT_MAX;
    if (!shallow) {
#pragma unroll
      for (int m = LEAVES / 2; m < LEAVES; m++) logit[m] = widen(split_logits[split_index(m)]);
    }
    float prob[2 * LEAVES];  // probabilities of reaching the subtree's nodes
    prob[1] = 1.0f;
#pragma unroll
    for (int i = kAbove - 1; i >= 0; i--) prob[1] *= smooth(step.share(step.clamp(above[i]) * sign[i]));
#pragma unroll
    for (int m = 1; m < LEAVES; m++) {
      const Split node(logit[m], step);
      prob[2 * m] = prob[m] * node.left();
      prob[2 * m + 1] = prob[m] * node.right();
    }
#pragma unroll
    for (int i = 0; i < LEAVES; i++) leaves[i] = prob[LEAVES + i];
  }

 private:
  __device__ int split_index(int m) const {
    const int level = m < 2 ? 1 : m < 4 ? 2 : m < 8 ? 4 : m < 16 ? 8 : 16;  // the first node of m's level
    return root * level + m - level - 1;
  }
};

// Reads and writes the elements of a lane's experts. Leaves without an expert are read as 0 and not written.
template <class T, int LEAVES>
struct LeafRow {
  using Half = Neighbours<T, LEAVES / 2>;
  static constexpr int kHalf = LEAVES / 2;

  __device__ static void read(const T* from, bool shallow, float (&values)[LEAVES]) {
    if (shallow) {
      float some[kHalf];
      Half::read(from, some);
#pragma unroll
      for (int i = 0; i < kHalf; i++) values[2 * i] = some[i], values[2 * i + 1] = 0.0f;
    } else {
      Neighbours<T, LEAVES>::read(from, values);
    }
  }
  __device__ static void write(T* to, bool shallow, const float (&values)[LEAVES]) {
    if (shallow) {
      float some[kHalf];
#pragma unroll
      for (int i = 0; i < kHalf; i++) some[i] = values[2 * i];
      Half::write(to, some);
    } else {
      Neighbours<T, LEAVES>::write(to, values);
    }
  }
};

constexpr int kLaneThreads = 128;  // of a block
// The least number of blocks per SM; 0: no bound.
constexpr int lane_blocks(int leaves) { return leaves == 32 ? 3 : 0; }

template <class T, int LEAVES, int LANES>
__global__ void __launch_bounds__(kLaneThreads, lane_blocks(LEAVES))
    tree_gate_lanes_kernel(const T* split_logits,  // (tokens, K, E - 1) for K trees
                           const T* leaf_logits,   // (tokens, K, E)
                           T* gates,               // (tokens, E)
                           T* leaf_probs,          // (tokens, K, E)
                           int64_t tokens, int num_trees, int num_experts, SmoothStep step, Weighing weighing) {
  using Row = LeafRow<T, LEAVES>;
  const Branch<T, LEAVES, LANES> branch(step, threadIdx.x % LANES, num_experts);
  const int64_t global_token = int64_t(blockIdx.x) * (kLaneThreads / LANES) + threadIdx.x / LANES;
  const bool in_range = global_token < tokens;  // lanes without a token repeat the last one: shuffles need all lanes
  const int64_t token = in_range ? global_token : tokens - 1,
                first_leaf = token * num_trees * num_experts + branch.first;
  split_logits += token * num_trees * (num_experts - 1);
  leaf_logits += first_leaf, leaf_probs += first_leaf, gates += token * num_experts + branch.first;

  // highest: largest logit of this lane's leaves that are in the softmax (Weighing in tree_gate_warp.cuh); `sums` have
  // the factor exp(-highest)
  float highest = -FLT_MAX, sums[LEAVES] = {};
  for (int j = 0; j < num_trees; j++) {
    float prob[LEAVES], logit[LEAVES];
    Row::read(leaf_logits, branch.shallow, logit);
    branch.descend(split_logits, prob);
    if (in_range) Row::write(leaf_probs, branch.shallow, prob);
    float higher = highest;
#pragma unroll
    for (int i = 0; i < LEAVES; i++) {
      logit[i] = weighing.counts(prob[i]) ? logit[i] : -INFINITY;
      higher = fmaxf(higher, logit[i]);
    }
    if (j > 0) {
      const float scale = decay<T>(higher - highest);
#pragma unroll
      for (int i = 0; i < LEAVES; i++) sums[i] *= scale;
    }
    highest = higher;
#pragma unroll
    for (int i = 0; i < LEAVES; i++) {
      sums[i] += (prob[i] + weighing.epsilon) * decay<T>(highest - logit[i]);
    }
    split_logits += num_experts - 1, leaf_logits += num_experts, leaf_probs += num_experts;
  }
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < LEAVES; i++) total += sums[i];
  const float scale = decay<T>(warp_max(highest, LANES) - highest);
  const float share = scale * (1.0f / warp_sum(total * scale, LANES));
#pragma unroll
  for (int i = 0; i < LEAVES; i++) sums[i] *= share;
  if (in_range) Row::write(gates, branch.shallow, sums);
}

}  // namespace
}  // namespace moe
