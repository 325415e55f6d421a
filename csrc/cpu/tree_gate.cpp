// The tree gate on the CPU (definition: python_ref/tree_gate.py; backward: the equations of
// moe_kernels/ops/tree_gate.py).
//
// Forward multiplies probabilities from the root down, level by level; backward adds gradients from the leaves up. In
// heap order the nodes of a level are neighbours, and so are their children, so a level is computed vector by vector.

#include "ops.h"

#include <algorithm>
#include <limits>

#include "moe/cpu/exp.h"
#include "moe/cpu/formats.h"
#include "moe/cpu/lanes.h"
#include "moe/cpu/pages.h"
#include "tree.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int64_t kPad = 16;  // rows are padded to multiples of this

int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

// A thread's buffers for one token. In `split` and `heap`, nodes count from 1: node m has the children 2 m and 2 m + 1.
// descend stores whole vectors: elements of `heap` past the end of a level are overwritten later or not used. The
// padding of `logit`, `prob` and `q` stays 0.
template <class F>
struct TokenBuffers {
  using Key = typename F::Key;
  using Wide = typename F::Wide;
  using V = Vec<Wide>;
  static constexpr int64_t lanes = kLanes<Wide>;
  static constexpr auto every = std::make_index_sequence<lanes>();

  int64_t trees, experts, stride, leaves;  // stride: of a tree in `split`; leaves: of all trees, padded
  Wide* split;                             // (K, stride): pre-activations, which backward replaces by gradients
  Wide *logit, *prob, *q;                  // (K, E), padded to `leaves`; q: softmax terms, then in backward gradients
  Wide* heap;                              // (padded(2 E) + 2 kPad), a tree: p, then p times its gradient

  TokenBuffers(char* room, int64_t trees, int64_t experts)
      : trees(trees), experts(experts), stride(padded(experts)), leaves(padded(trees * experts)) {
    Wide* next = split = reinterpret_cast<Wide*>(room);
    next += trees * stride;
    for (Wide** row : {&logit, &prob, &q}) *row = next, next += leaves;
    heap = next;
    std::fill(split, heap + padded(2 * experts) + 2 * kPad, Wide(0));
  }

  void read(const Key* split_logits, const Key* leaf_logits) const {
    for (int64_t k = 0; k < trees; ++k)
      for (int64_t i = 0; i < experts - 1; ++i)
        split[k * stride + 1 + i] = F::widen(split_logits[k * (experts - 1) + i]);
    for (int64_t i = 0; i < trees * experts; ++i) logit[i] = F::widen(leaf_logits[i]);
  }

  // Computes `prob`, and prefetches logits of the next token.
  void descend(const Step<Wide>& step, const Key* next_split, const Key* next_leaf) const {
    const Leaves order(experts);
    heap[1] = 1;
    for (int64_t k = 0; k < trees; ++k) {
      const Wide* const node = split + k * stride;
      for (int64_t first = 1; first < experts; first *= 2) {
        for (int64_t m = first; m < std::min(2 * first, experts); m += lanes) {
          __builtin_prefetch(next_split + k * experts + m);
          __builtin_prefetch(next_leaf + k * experts + m);
          const V t = load(node + m), reached = load(heap + m), low = step.low(t) * reached, high = reached - low;
          const V left = t < 0 ? low : high, right = t < 0 ? high : low;
          store(heap + 2 * m, zipped<0>(left, right, every));
          store(heap + 2 * m + lanes, zipped<1>(left, right, every));
        }
      }
      order.to_experts(heap, prob + k * experts);
    }
  }

  // Computes q; the softmax over the leaves of all trees is q times the returned scale. Leaves with a probability below
  // `least` are left out; a leaf whose probability is NaN takes part.
  Wide softmax(Wide epsilon, Wide least) const {
    const V none = broadcast(-std::numeric_limits<Wide>::infinity());
    V top = none, sum{};
    for (int64_t i = 0; i < leaves; i += lanes) top = max(load(prob + i) < least ? none : load(logit + i), top);
    const Wide highest = across<Wide>(top, max<V>)[0];
#pragma omp simd
    for (int64_t i = 0; i < leaves; ++i) {
      const bool counts = !(prob[i] < least);
      const Wide mass = (prob[i] + epsilon) * exp(counts ? logit[i] - highest : Wide(0));
      q[i] = counts ? mass : Wide(0);
    }
    for (int64_t i = 0; i < leaves; i += lanes) sum += load(q + i);
    return 1 / across<Wide>(sum, [](V a, V b) { return a + b; })[0];
  }

  // Replaces tree k's pre-activations by their gradients, from the leaves up. Before the call each leaf of `heap` holds
  // p dp: its probability p times the gradient dp of p. Each node of `heap` becomes the sum of its children.
  void ascend(const Step<Wide>& step, int64_t k) const {
    Wide* const node = split + k * stride;
    int64_t first = 1;
    while (2 * first < experts) first *= 2;
    for (; first > 0; first /= 2) {
      const int64_t last = std::min(2 * first, experts);
      for (int64_t m = first; m < last; m += lanes) {
        const V a = load(heap + 2 * m), b = load(heap + 2 * m + lanes);
        const V left = unzipped<0>(a, b, every), right = unzipped<1>(a, b, every);
        // With r = max(1/2 - |t| / gamma, 0), the branches have the probabilities low = r^2 (3 - 2 r) and
        // high = 1 - low. As t moves towards 0, low rises at the rate low' = 6 r (1 - r) / gamma, and high falls as
        // fast. A child's sum contains its branch probability as a factor, so the gradient of t has the terms
        // low' / low and -low' / high times the children's sums. With slope = low' / (low high) these quotients are
        // slope high and slope low.
        const V t = load(node + m), r = step.distance(t), share = r * (3 - 2 * r), high = 1 - r * share;
        const V slope = 6 * step.inverse * (1 - r) * reciprocal(r == 0 ? broadcast(Wide(1)) : share * high);
        const V of_low = (t < 0 ? left : right) * high, of_high = (t < 0 ? right : left) * (r * share);
        const V rise = (t < 0 ? of_low - of_high : of_high - of_low) * slope;
        replace_first(node + m, r == 0 ? V{} : rise, last - m);
        replace_first(heap + m, left + right, last - m);
      }
    }
  }

  // Replaces the first n elements of the vector at `to`, or all if n >= lanes, by those of v.
  static void replace_first(Wide* to, V v, int64_t n) {
    store(to, n < lanes ? (indices(every) < Wide(n) ? v : load(to)) : v);
  }
  template <size_t... lane>
  static V indices(std::index_sequence<lane...>) {
    return V{Wide(lane)...};
  }
};

template <class F>
void forward(const void* split_logits, const void* leaf_logits, void* gates, void* leaf_probs, char* scratch,
             int64_t scratch_stride, int64_t tokens, int64_t trees, int64_t experts, double gamma, double epsilon,
             double least, int threads) {
  using Key = typename F::Key;
  using Wide = typename F::Wide;
  const Step<Wide> step(gamma);
  const int64_t nodes = trees * (experts - 1), leaves = trees * experts;
  expect_pages(gates, tokens * experts * int64_t(sizeof(Wide)));
  expect_pages(leaf_probs, tokens * leaves * int64_t(sizeof(Wide)));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t worker = 0; worker < threads; ++worker) {
    const TokenBuffers<F> row(scratch + worker * scratch_stride, trees, experts);
    for (int64_t t = worker * tokens / threads; t < (worker + 1) * tokens / threads; ++t) {
      const Key *split = static_cast<const Key*>(split_logits) + t * nodes,
                *leaf = static_cast<const Key*>(leaf_logits) + t * leaves;
      row.read(split, leaf);
      row.descend(step, split + nodes, leaf + leaves);
      std::copy(row.prob, row.prob + leaves, static_cast<Wide*>(leaf_probs) + t * leaves);
      const Wide scale = row.softmax(Wide(epsilon), Wide(least));
      Wide* gate = static_cast<Wide*>(gates) + t * experts;
      for (int64_t e = 0; e < experts; ++e) gate[e] = scale * row.q[e];
      for (int64_t k = 1; k < trees; ++k)
        for (int64_t e = 0; e < experts; ++e) gate[e] += scale * row.q[k * experts + e];
    }
  }
}

template <class F>
void backward(const void* grad_gates, const void* grad_leaf_probs, const void* split_logits, const void* leaf_logits,
              void* dsplit, void* dleaf, char* scratch, int64_t scratch_stride, int64_t tokens, int64_t trees,
              int64_t experts, double gamma, double epsilon, double least, int threads) {
  using Key = typename F::Key;
  using Wide = typename F::Wide;
  const Step<Wide> step(gamma);
  const Leaves order(experts);
  const int64_t nodes = trees * (experts - 1), leaves = trees * experts;
  expect_pages(dsplit, tokens * nodes * int64_t(sizeof(Key)));
  expect_pages(dleaf, tokens * leaves * int64_t(sizeof(Key)));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t worker = 0; worker < threads; ++worker) {
    const TokenBuffers<F> row(scratch + worker * scratch_stride, trees, experts);
    for (int64_t t = worker * tokens / threads; t < (worker + 1) * tokens / threads; ++t) {
      const Key *split = static_cast<const Key*>(split_logits) + t * nodes,
                *leaf = static_cast<const Key*>(leaf_logits) + t * leaves;
      row.read(split, leaf);
      row.descend(step, split + nodes, leaf + leaves);
      const Wide scale = row.softmax(Wide(epsilon), Wide(least));
      const Wide* grad = static_cast<const Wide*>(grad_gates) + t * experts;
      Wide mean = 0;
      for (int64_t k = 0; k < trees; ++k) {
        const Wide* q = row.q + k * experts;
#pragma omp simd reduction(+ : mean)
        for (int64_t e = 0; e < experts; ++e) mean += q[e] * scale * grad[e];
      }
      for (int64_t k = 0; k < trees; ++k) {
        const int64_t first = t * leaves + k * experts;
        Wide *q = row.q + k * experts, *prob = row.prob + k * experts;
        Key* out = static_cast<Key*>(dleaf) + first;
        // From left to right: q * scale is at most 1, but scale alone can be 1 / least, and its product overflow.
#pragma omp simd
        for (int64_t e = 0; e < experts; ++e) {
          q[e] = q[e] * scale * (grad[e] - mean);
          out[e] = F::narrow(q[e]);
        }
        // q is now the gradient of the leaf's logit; from here on it becomes p dp (see ascend).
        if (epsilon > 0)
          for (int64_t e = 0; e < experts; ++e) q[e] *= prob[e] / (prob[e] + Wide(epsilon));
        if (grad_leaf_probs != nullptr) {
          const Wide* grad_prob = static_cast<const Wide*>(grad_leaf_probs) + first;
          for (int64_t e = 0; e < experts; ++e) q[e] += prob[e] * grad_prob[e];
        }
        order.to_heap(q, row.heap);
        row.ascend(step, k);
        Key* to = static_cast<Key*>(dsplit) + t * nodes + k * (experts - 1);
        for (int64_t i = 0; i < experts - 1; ++i) to[i] = F::narrow(row.split[k * row.stride + 1 + i]);
      }
    }
  }
}

}  // namespace

void tree_gate_fwd(int dtype, const void* split_logits, const void* leaf_logits, void* gates, void* leaf_probs,
                   void* scratch, int64_t scratch_stride, int64_t tokens, int64_t trees, int64_t experts, double gamma,
                   double epsilon, double least, int threads) {
  with_format(dtype, [&](auto format) {
    forward<decltype(format)>(split_logits, leaf_logits, gates, leaf_probs, static_cast<char*>(scratch), scratch_stride,
                              tokens, trees, experts, gamma, epsilon, least, threads);
  });
}

void tree_gate_bwd(int dtype, const void* grad_gates, const void* grad_leaf_probs, const void* split_logits,
                   const void* leaf_logits, void* dsplit, void* dleaf, void* scratch, int64_t scratch_stride,
                   int64_t tokens, int64_t trees, int64_t experts, double gamma, double epsilon, double least,
                   int threads) {
  with_format(dtype, [&](auto format) {
    backward<decltype(format)>(grad_gates, grad_leaf_probs, split_logits, leaf_logits, dsplit, dleaf,
                               static_cast<char*>(scratch), scratch_stride, tokens, trees, experts, gamma, epsilon,
                               least, threads);
  });
}

}  // namespace MOE_ISA
}  // namespace moe
