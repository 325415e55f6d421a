// The smooth step and the order of leaves in a tree, for the tree_*.cpp files.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moe {
namespace MOE_ISA {
namespace {

// The smooth step of a pre-activation t: h(t) = u^2 (3 - 2 u) with u = t / gamma + 1/2 clamped to [0, 1]. min(u, 1 - u)
// is computed as (half - |t|) / gamma with half = gamma / 2: near saturation the subtraction is exact, so the smaller
// branch probability keeps its digits. The step is saturated if min(u, 1 - u) is 0.
template <class Wide>
struct Step {
  Wide half, inverse;

  explicit Step(double gamma) : half(Wide(gamma / 2)), inverse(1 / Wide(gamma)) {}
  // min(u, 1 - u). V: one pre-activation or a vector of them.
  template <class V>
  V distance(V t) const {
    const V r = (half - (t < 0 ? -t : t)) * inverse;
    return r < 0 ? V{} : r;  // NaN stays NaN
  }
  // The probability of the less likely branch, h(-|t|); 0 if the step is saturated.
  template <class V>
  V low(V t) const {
    const V r = distance(t);
    return r * r * (3 - 2 * r);
  }
};

// A tree is a heap with root 0: node i has children 2 i + 1 and 2 i + 2. Returns the first node of the level of `node`.
inline int64_t level_of(int64_t node) { return (int64_t(1) << (63 - __builtin_clzll(uint64_t(node) + 1))) - 1; }

// Leaves are nodes E-1 to 2E-2. Experts are the leaves from left to right, so those of the deepest level come first.
struct Leaves {
  int64_t experts, deepest, deep;  // deepest: first node of the deepest level, which has `deep` leaves

  explicit Leaves(int64_t experts)
      : experts(experts), deepest(level_of(2 * experts - 2)), deep(2 * experts - 1 - deepest) {}

  int64_t expert(int64_t node) const { return node >= deepest ? node - deepest : node - (experts - 1) + deep; }

  // Copy the values of the leaves. heap[i + 1] is the value of node i.
  template <class Wide>
  void to_experts(const Wide* heap, Wide* by_expert) const {
    std::copy(heap + deepest + 1, heap + deepest + 1 + deep, by_expert);
    std::copy(heap + experts, heap + deepest + 1, by_expert + deep);
  }
  template <class Wide>
  void to_heap(const Wide* by_expert, Wide* heap) const {
    std::copy(by_expert, by_expert + deep, heap + deepest + 1);
    std::copy(by_expert + deep, by_expert + experts, heap + experts);
  }
};

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
