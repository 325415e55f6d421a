// A binary tree of smooth steps (paper 001, eqs. 3 and 9), whose nodes count from 1: node m has children 2m and 2m + 1,
// nodes 1 to E - 1 split and E to 2E - 1 are the leaves.
#pragma once

#include "moe/platform.cuh"

namespace moe {

struct Tree {
  int num_experts, full, deep;  // 2^depth, and how many leaves are at that depth: the leftmost

  explicit Tree(int64_t experts) : num_experts(static_cast<int>(experts)), full(1) {
    while (full < num_experts) full *= 2;
    deep = 2 * num_experts - full;
  }
  // Experts are the leaves from left to right.
  __device__ int leaf(int expert) const { return expert < deep ? full + expert : num_experts + expert - deep; }
  __device__ int expert(int leaf) const { return leaf >= full ? leaf - full : leaf - num_experts + deep; }
};

struct SmoothStep {
  float half, slope;  // gamma / 2 and 1 / gamma

  explicit SmoothStep(float gamma) : half(0.5f * gamma), slope(1.0f / gamma) {}

  // clamp(1/2 + t / gamma) to full relative precision: near the clamp t + gamma / 2 is exact. A NaN stays one.
  __device__ float share(float t) const {
    const float inside = (t + half) * slope, below = t <= -half ? 0.0f : inside;  // selected, not branched to
    return t >= half ? 1.0f : below;
  }
};

// A node goes left with probability h = u^2 (3 - 2u) and right with w^2 (3 - 2w), u + w = 1; saturated, one of them is
// exactly 0.
struct Split {
  float u, w;

  __device__ Split(float t, const SmoothStep& step) : u(step.share(t)), w(step.share(-t)) {}
  __device__ float left() const { return u * u * (3.0f - 2.0f * u); }
  __device__ float right() const { return w * w * (3.0f - 2.0f * w); }
  __device__ bool saturated() const { return u == 0.0f || w == 0.0f; }

  // d/dt of a h + b (1 - h), given left = a h and right = b (1 - h): left h' / h - right h' / (1 - h), over one
  // denominator. h' / h is 6 w / (gamma u (3 - 2u)), and left holds the factor u^2.
  __device__ float derivative(float below_left, float below_right, const SmoothStep& step) const {
    if (saturated()) return 0.0f;
    const float numerator = below_left * right() - below_right * left();
    return 6.0f * step.slope * numerator / (u * w * (3.0f - 2.0f * u) * (3.0f - 2.0f * w));
  }
};

}  // namespace moe
