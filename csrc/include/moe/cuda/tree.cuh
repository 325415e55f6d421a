// A binary tree of smooth steps over E experts (definition: python_ref/tree_gate.py). Node 1 is the root, node m has
// children 2m and 2m + 1, nodes 1 to E - 1 are inner nodes, and nodes E to 2E - 1 are leaves.
#pragma once

#include <cstdint>

namespace moe {

struct Tree {
  int num_experts, full, deep;  // full: 2^(levels below the root); deep: leaves on the lowest level, the left-most ones

  explicit Tree(int64_t experts) : num_experts(static_cast<int>(experts)), full(1) {
    while (full < num_experts) full *= 2;
    deep = num_experts - (full - num_experts);
  }
  // leaf: the node of an expert; expert: the expert of a leaf. Experts are the leaves from left to right.
  __device__ int leaf(int expert) const { return expert < deep ? full + expert : num_experts + expert - deep; }
  __device__ int expert(int leaf) const { return leaf >= full ? leaf - full : leaf - num_experts + deep; }
};

__device__ __forceinline__ float most_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float least_or_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

struct SmoothStep {
  float half, slope;  // gamma / 2 and 1 / gamma

  explicit SmoothStep(float gamma) : half(0.5f * gamma), slope(1.0f / gamma) {}

  __device__ float clamp(float t) const { return least_or_nan(most_or_nan(t, -half), half); }

  // 1/2 + t / gamma for clamped t. The relative error is small also near t = -gamma / 2, where t + gamma / 2 is exact.
  // At t = gamma / 2 the result is 1 up to rounding, and its smooth step is 1.
  __device__ float share(float t) const { return (t + half) * slope; }
};

__device__ __forceinline__ float smooth(float u) { return u * u * fmaf(-2.0f, u, 3.0f); }

// The branches of a node with pre-activation t: left has the probability h = u^2 (3 - 2u), right w^2 (3 - 2w), with
// u = 1/2 + t / gamma clamped to [0, 1] and w = 1 - u. The node is saturated if u or w is exactly 0.
struct Split {
  float u, w;

  __device__ Split(float t, const SmoothStep& step) {
    const float inside = step.clamp(t);
    u = step.share(inside), w = step.share(-inside);
  }
  __device__ float left() const { return smooth(u); }
  __device__ float right() const { return smooth(w); }
  __device__ bool saturated() const { return u == 0.0f || w == 0.0f; }

  // The derivative of a h + b (1 - h) by t, for constants a and b, given below_left = a h and below_right = b (1 - h):
  // below_left h' / h - below_right h' / (1 - h), over one denominator, with h' / h = 6 w / (gamma u (3 - 2u)) and
  // h' / (1 - h) = 6 u / (gamma w (3 - 2w)).
  __device__ float derivative(float below_left, float below_right, const SmoothStep& step) const {
    if (saturated()) return 0.0f;
    const float numerator = below_left * right() - below_right * left();
    return 6.0f * step.slope * numerator / (u * w * fmaf(-2.0f, u, 3.0f) * fmaf(-2.0f, w, 3.0f));
  }
};

}  // namespace moe
