// The top-k gate with scores, a bias, groups of experts, forced experts or scaled weights. A warp takes a token.
#pragma once

#include <cmath>

#include "topk_gate_choices.cuh"

namespace moe {
namespace {

enum Rule : int { kTopKSoftmax, kSoftmaxTopK, kSigmoid };

struct Scored {
  int rule;
  const float* bias;  // (E), or nullptr
  int num_groups, kept_groups;  // num_groups is 0 without groups
  int lanes;  // if the experts of a group are all those of neighbouring lanes, a power of two: their number; else 0
  bool renormalise;
  float scale;
  const void* forced;  // (tokens, K), or nullptr
  int forced_size;     // bytes of an element: 2, 4 or 8

  // The forced expert, or -1; what a kernel without a check makes of another value is not defined.
  __device__ int forced_at(int64_t i, int num_experts) const {
    int64_t e;
    if (forced_size == 2) {
      e = static_cast<const int16_t*>(forced)[i];
    } else if (forced_size == 4) {
      e = static_cast<const int32_t*>(forced)[i];
    } else {
      e = static_cast<const int64_t*>(forced)[i];
    }
    return uint64_t(e) < uint64_t(num_experts) ? static_cast<int>(e) : e < 0 ? -1 : num_experts - 1;
  }
};

__device__ __forceinline__ int32_t rank_of(float value) { return Logit<float>::rank(__float_as_uint(value)); }
// An error of 2 units in the last place. A division that rounds calls a function, and a call in a loop needs stack.
__device__ __forceinline__ float sigmoid(float z) { return __fdividef(1.0f, 1.0f + expf(-z)); }

// The keys of a row of at most 32 * SLOTS experts, in registers: a lane has SLOTS neighbours. With SLOTS = 0 they are in
// `memory`, and a lane has every 32nd.
template <int SLOTS>
struct Keys {
  static constexpr bool kNeighbours = SLOTS > 0;
  int num_experts, lane;
  int32_t* memory;  // (E) keys, and behind them one for each group
  int32_t resident[SLOTS ? SLOTS : 1];

  __device__ int slots() const { return SLOTS ? SLOTS : (num_experts + kWarpSize - 1) / kWarpSize; }
  __device__ int expert(int slot) const { return kNeighbours ? SLOTS * lane + slot : slot * kWarpSize + lane; }
  __device__ int32_t operator[](int slot) const {
    if constexpr (SLOTS > 0) return resident[slot];
    return expert(slot) < num_experts ? memory[expert(slot)] : kLowest;
  }
  __device__ void write() const {
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      if (expert(s) < num_experts) memory[expert(s)] = resident[s];
    }
  }
  __device__ void read() {
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      if (expert(s) < num_experts) resident[s] = memory[expert(s)];
    }
  }
};

__device__ __forceinline__ int32_t score_of_group(int32_t first, int32_t second) {
  float score = Logit<float>::value(first);
  if (second != kLowest) score += Logit<float>::value(second);
  return rank_of(score);
}

// Lowers the keys in `row` (E) of experts outside of the best groups. group: room for a key of each group.
__device__ __forceinline__ void keep_best_groups(int32_t* row, int32_t* group, int num_experts, int num_groups,
                                                 int kept_groups, int lane) {
  constexpr int32_t kKept = INT32_MAX;
  const int size = num_experts / num_groups;
  for (int g = lane; g < num_groups; g += kWarpSize) {
    int32_t first = kLowest, second = kLowest;
    for (int e = g * size; e < (g + 1) * size; e++) {
      second = max(second, min(first, row[e]));
      first = max(first, row[e]);
    }
    group[g] = score_of_group(first, second);
  }
  for (int i = 0; i < kept_groups; i++) {  // each lane reads and writes its own groups
    int32_t best = kLowest;
    int at = INT32_MAX;
    for (int g = lane; g < num_groups; g += kWarpSize) {
      if (group[g] > best && group[g] != kKept) best = group[g], at = g;
    }
    const int32_t highest = __reduce_max_sync(kAllLanes, best);
    const int winner = __reduce_min_sync(kAllLanes, best == highest ? at : INT32_MAX);
    if (winner % kWarpSize == lane) group[winner] = kKept;
  }
  for (int g = lane; g < num_groups; g += kWarpSize) {
    if (group[g] == kKept) continue;
    for (int e = g * size; e < (g + 1) * size; e++) row[e] = kLowest;
  }
}

// Whether this lane's experts are in one of the best groups, where each group is the experts of `lanes` neighbouring
// lanes, a power of two. first, second: the lane's largest keys; lanes without experts have kLowest.
__device__ __forceinline__ bool in_best_groups(int32_t first, int32_t second, int lanes, int kept_groups, int lane) {
  const bool inside = first != kLowest;
#pragma unroll 1
  for (int offset = 1; offset < lanes; offset *= 2) {
    const int32_t other = __shfl_xor_sync(kAllLanes, first, offset);
    second = max(max(second, __shfl_xor_sync(kAllLanes, second, offset)), min(first, other));
    first = max(first, other);
  }
  int32_t score = inside ? score_of_group(first, second) : kLowest;
  const uint32_t own = 1u << (lane & -lanes), to_own = 2 * own - 1;
#pragma unroll 2
  for (int i = 0; i < kept_groups; i++) {
    const uint32_t highest = __ballot_sync(kAllLanes, score == __reduce_max_sync(kAllLanes, score));
    if ((highest & to_own) == own) score = kLowest;
  }
  return score == kLowest;
}

// The weight of a choice before renormalisation, from its logit.
struct Weight {
  int rule;
  float highest, share;  // of the logits that the softmax covers: the largest, and 1 / (sum of exp(logit - largest))

  __device__ float operator()(float logit) const {
    return rule == kSigmoid ? sigmoid(logit) : expf(logit - highest) * share;
  }
};

// The softmax over the logits that each(i) returns for i < n.
template <class Each>
__device__ __forceinline__ Weight softmax_over(int n, int lane, Each each) {
  float highest = -INFINITY, total = 0.0f;
#pragma unroll 1
  for (int i = lane; i < n; i += kWarpSize) highest = fmaxf(highest, each(i));
  highest = warp_max(highest);
#pragma unroll 1
  for (int i = lane; i < n; i += kWarpSize) total += expf(each(i) - highest);  // NaN if a logit is NaN
  return {kSoftmaxTopK, highest, 1.0f / warp_sum(total)};
}

template <class T>
__device__ __forceinline__ float logit_of(const T* logits, int expert, int num_experts) {
  return uint32_t(expert) < uint32_t(num_experts) ? widen(logits[expert]) : 0.0f;
}

// Under a rule with logits (E) of a row and its k experts, which this lane wrote or any earlier kernel.
template <class T>
__device__ __forceinline__ Weight weight_of(const T* logits, const int32_t* experts, int num_experts, int k, int rule,
                                            int lane) {
  if (rule == kSigmoid) return {kSigmoid, 0.0f, 0.0f};
  if (rule == kSoftmaxTopK) return softmax_over(num_experts, lane, [=](int e) { return widen(logits[e]); });
  return softmax_over(k, lane, [=](int i) { return logit_of(logits, experts[i], num_experts); });
}

// Logits of experts that are neighbours become keys.
template <int N>
__device__ __forceinline__ void to_keys(float (&z)[N], const float (&bias)[N], bool by_score, const Weight& weight,
                                        int32_t* keys) {
  if (by_score) {
    // These scores may differ from weights in the last places, as fast exponentials do.
    if (weight.rule == kSigmoid) {
#pragma unroll
      for (int i = 0; i < N; i++) z[i] = bias[i] + __fdividef(1.0f, 1.0f + __expf(-z[i]));
    } else {
#pragma unroll
      for (int i = 0; i < N; i++) z[i] = bias[i] + __expf(z[i] - weight.highest) * weight.share;
    }
  }
#pragma unroll
  for (int i = 0; i < N; i++) keys[i] = rank_of(z[i]);
}

template <class T, int SLOTS>
__global__ void __launch_bounds__(kTokens* kWarpSize)
    topk_gate_scored_kernel(const T* logits,  // (tokens, E)
                            int64_t stride,
                            float* weights,    // (tokens, K)
                            int32_t* experts,  // (tokens, K)
                            int32_t* scratch,  // (tokens, E + num_groups) if SLOTS is 0
                            int64_t tokens, int num_experts, int k, bool vectorized, const Scored scored) {
  using Row = Keys<SLOTS>;
  using List = std::conditional_t<(SLOTS > 0), Sorted<Row, SLOTS>, Searched<Row, SLOTS>>;
  using Four = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
  __shared__ typename List::Shared shared[kTokens];
  __shared__ Choice found[kTokens][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const uint32_t token = blockIdx.x * kTokens + warp;
  if (token >= tokens) return;
  logits += token * stride;

  const bool by_score = scored.bias != nullptr || scored.num_groups > 0, by_choices = scored.rule == kTopKSoftmax;
  Weight weight{kSigmoid, 0.0f, 1.0f};  // of softmax, that over all experts
  if (scored.rule == kSoftmaxTopK || (by_choices && by_score)) {
    weight = softmax_over(num_experts, lane, [=](int e) { return widen(logits[e]); });
  }
  Row keys{num_experts, lane};
  if constexpr (SLOTS > 0) {
    static_assert(sizeof shared[warp] >= 2 * SLOTS * kWarpSize * sizeof(int32_t), "keys of experts and groups fit");
    keys.memory = reinterpret_cast<int32_t*>(&shared[warp]);  // until the list is built there
    constexpr int kStep = 4;
#pragma unroll
    for (int first = 0; first < SLOTS; first += kStep) {
      const int e = keys.expert(first);
      float z[kStep] = {}, bias[kStep] = {};
      if (vectorized && e < num_experts) {
        Pack<T, Four>::unpack(load(reinterpret_cast<const Four*>(logits + e)), z);
        if (scored.bias != nullptr) Pack<float, uint4>::unpack(load(reinterpret_cast<const uint4*>(scored.bias + e)), bias);
      } else if (!vectorized) {
#pragma unroll
        for (int i = 0; i < kStep; i++) {
          if (e + i >= num_experts) break;
          z[i] = widen(logits[e + i]);
          if (scored.bias != nullptr) bias[i] = scored.bias[e + i];
        }
      }
      to_keys(z, bias, by_score, weight, keys.resident + first);
#pragma unroll
      for (int i = 0; i < kStep; i++) {
        if (e + (vectorized ? 0 : i) >= num_experts) keys.resident[first + i] = kLowest;
      }
    }
  } else {
    keys.memory = scratch + token * int64_t(num_experts + scored.num_groups);
    for (int e = lane; e < num_experts; e += kWarpSize) {
      float z[1] = {widen(logits[e])};
      const float bias[1] = {scored.bias == nullptr ? 0.0f : scored.bias[e]};
      to_keys(z, bias, by_score, weight, keys.memory + e);
    }
    __syncwarp();
  }

  const bool forced = scored.forced != nullptr, by_lanes = SLOTS > 0 && scored.lanes > 0 && !forced;
  const int64_t start = int64_t(token) * k + lane;
  if (forced || (scored.num_groups > 0 && !by_lanes)) {
    keys.write();
    __syncwarp();
    if (scored.num_groups > 0) {
      keep_best_groups(keys.memory, keys.memory + num_experts, num_experts, scored.num_groups, scored.kept_groups, lane);
      __syncwarp();
    }
    for (int i = lane; forced && i < k; i += kWarpSize) {
      const int e = scored.forced_at(start + i - lane, num_experts);
      if (e >= 0) keys.memory[e] = kLowest;
    }
    __syncwarp();
    keys.read();
    __syncwarp();
  }

  List choices(keys, shared[warp]);
  if constexpr (SLOTS > 0) {
    if (by_lanes &&
        !in_best_groups(choices.head.rank, choices.rest->rank, scored.lanes, scored.kept_groups, lane)) {
      choices.head.rank = kLowest;
    }
  }
  Choice* const kept = found[warp];  // 32 choices at a time
  weights += start, experts += start;
  float scale = scored.scale, sum = 0.0f;
  int left = k - lane;  // of this lane's choices, each 32nd, and those between
#pragma unroll 1
  for (int first = 0; first < k; first += kWarpSize) {
    int expert = -1, open = min(k - first, kWarpSize), place = lane;
    if (forced) {
      if (first < left) expert = scored.forced_at(start + first, num_experts);
      const uint32_t free = __ballot_sync(kAllLanes, first < left && expert < 0);
      open = __popc(free), place = __popc(free & ((1u << lane) - 1));
    }
    take(choices, kept, open);
    __syncwarp();
    if (first < left) {
      if (expert < 0) expert = kept[place].expert;
      experts[first] = expert;
      if (!by_choices) {
        const float u = weight(widen(logits[expert]));
        weights[first] = scale * u, sum += u;
      }
    }
    __syncwarp();
  }
  if (by_choices) {
    weight = weight_of(logits, experts - lane, num_experts, k, kTopKSoftmax, lane);
    sum = 1.0f;
#pragma unroll 1
    for (int i = 0; i < left; i += kWarpSize) weights[i] = scale * weight(widen(logits[experts[i]]));
  }
  if (!scored.renormalise) return;
  if (!by_choices) sum = warp_sum(sum);
  scale = 1.0f / (sum + 1e-20f);
#pragma unroll 1
  for (int i = 0; i < left; i += kWarpSize) weights[i] *= scale;
}

// See ops/topk_gate.py for the gradients. u: weights before renormalisation and scale; du: their gradient.
template <class T>
__global__ void __launch_bounds__(kTokens* kWarpSize)
    topk_gate_scored_bwd_kernel(const float* grad,       // (tokens, K)
                                const int32_t* experts,  // (tokens, K)
                                const T* logits,         // (tokens, E)
                                int64_t stride,
                                T* dlogits,              // (tokens, E)
                                int64_t tokens, int num_experts, int k, int rule, bool renormalise, float scale) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = int64_t(blockIdx.x) * kTokens + threadIdx.x / kWarpSize;
  if (token >= tokens) return;
  logits += token * stride, grad += token * k, experts += token * k, dlogits += token * num_experts;
  const Weight weight = weight_of(logits, experts, num_experts, k, rule, lane);
  const auto u = [&](int i) { return weight(logit_of(logits, experts[i], num_experts)); };
  float mean = 0.0f;
  if (renormalise) {
    float sum = 0.0f;
#pragma unroll 1
    for (int i = lane; i < k; i += kWarpSize) {
      const float each = u(i);
      sum += each, mean = __fmaf_rn(each, grad[i], mean);
    }
    sum = warp_sum(sum) + 1e-20f;
    mean = warp_sum(mean) / sum, scale /= sum;
  }
  float common = 0.0f;  // <u, du>
  if (rule != kSigmoid) {
#pragma unroll 1
    for (int i = lane; i < k; i += kWarpSize) common = __fmaf_rn(u(i), scale * (grad[i] - mean), common);
    common = warp_sum(common);
  }
  for (int e = lane; e < num_experts; e += kWarpSize) {
    narrow(rule == kSoftmaxTopK ? -common * weight(widen(logits[e])) : 0.0f, dlogits[e]);
  }
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < k; i += kWarpSize) {
    const float z = logit_of(logits, experts[i], num_experts), du = scale * (grad[i] - mean);
    const float slope = rule == kSigmoid ? sigmoid(z) * sigmoid(-z) * du : weight(z) * (du - common);
    if (uint32_t(experts[i]) < uint32_t(num_experts)) narrow(slope, dlogits[experts[i]]);
  }
}

}  // namespace
}  // namespace moe
