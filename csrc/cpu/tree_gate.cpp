// The tree gate on the CPU (definition: python_ref/tree_gate.py; backward: the equations of ops/tree_gate.py).
//
// A token's trees are worked on together: steps and exponentials in one loop over all of their nodes and leaves, then
// the products down each tree level by level, in heap order, where the children of a level lie side by side.

#include "ops.h"

#include <algorithm>
#include <limits>

#include "moe/exp.h"
#include "moe/formats.h"
#include "tree.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int64_t kPad = 16;  // elements; loops over whole vectors have no remainder

int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

// A thread's rows. Padding is written once, and never read for a result.
template <class F>
struct Rows {
  using Wide = typename F::Wide;

  int64_t trees, experts, nodes, leaves;  // nodes and leaves: of all trees, padded
  Wide *split, *left, *right;             // (nodes): pre-activations, then h(s) and h(-s); backward: h'/h of both sides
  Wide *logit, *prob, *q;                 // (leaves), experts in order
  Wide *heap;                             // (2 E - 1) of one tree

  Rows(char* room, int64_t trees, int64_t experts)
      : trees(trees), experts(experts), nodes(padded(trees * (experts - 1))), leaves(padded(trees * experts)) {
    Wide* next = reinterpret_cast<Wide*>(room);
    for (Wide** row : {&split, &left, &right}) *row = next, next += nodes;
    for (Wide** row : {&logit, &prob, &q}) *row = next, next += leaves;
    heap = next;
    std::fill(reinterpret_cast<Wide*>(room), heap, Wide(0));
  }

  void read(const typename F::Key* split_logits, const typename F::Key* leaf_logits) const {
    for (int64_t i = 0; i < trees * (experts - 1); ++i) split[i] = F::widen(split_logits[i]);
    for (int64_t i = 0; i < trees * experts; ++i) logit[i] = F::widen(leaf_logits[i]);
  }

  // Probabilities of the leaves.
  void descend(const Step<Wide>& step) const {
#pragma omp simd
    for (int64_t i = 0; i < nodes; ++i) {
      const Wide low = step.low(split[i]), high = 1 - low;
      left[i] = split[i] < 0 ? low : high;
      right[i] = split[i] < 0 ? high : low;
    }
    const Leaves order(experts);
    for (int64_t k = 0; k < trees; ++k) {
      const Wide *to_left = left + k * (experts - 1), *to_right = right + k * (experts - 1);
      heap[0] = 1;
      for (int64_t first = 0; first < experts - 1; first = 2 * first + 1) {
        const int64_t last = std::min(2 * first + 1, experts - 1);
#pragma omp simd
        for (int64_t node = first; node < last; ++node) {
          heap[2 * node + 1] = heap[node] * to_left[node];
          heap[2 * node + 2] = heap[node] * to_right[node];
        }
      }
      order.to_experts(heap, prob + k * experts);
    }
  }

  // The joint softmax; a leaf counts whose probability is not below `least`, as a NaN never is. Others take exp(0) and
  // drop it: exp(-inf) is as slow as a subnormal result, an assist of 150 cycles a vector.
  void softmax(Wide epsilon, Wide least) const {
    Wide highest = -std::numeric_limits<Wide>::infinity(), sum = 0;
#pragma omp simd reduction(max : highest)
    for (int64_t i = 0; i < leaves; ++i)
      highest = !(prob[i] < least) && logit[i] > highest ? logit[i] : highest;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < leaves; ++i) {
      const bool counts = !(prob[i] < least);
      const Wide mass = (prob[i] + epsilon) * exp(counts ? logit[i] - highest : Wide(0));
      sum += q[i] = counts ? mass : Wide(0);
    }
    const Wide share = 1 / sum;
#pragma omp simd
    for (int64_t i = 0; i < leaves; ++i) q[i] *= share;
  }

  // h'/h of the branch to the left into `left`, of the one to the right into `right`.
  void slopes(const Step<Wide>& step) const {
#pragma omp simd
    for (int64_t i = 0; i < nodes; ++i) {
      const Wide r = step.distance(split[i]), low = r * r * (3 - 2 * r), slope = 6 * (1 - r) * step.inverse;
      const Wide of_low = r == 0 ? Wide(0) : slope / (r * (3 - 2 * r)), of_high = slope * r / (1 - low);
      left[i] = split[i] < 0 ? of_low : of_high;
      right[i] = split[i] < 0 ? of_high : of_low;
    }
  }
};

template <class F>
void forward(const void* split_logits, const void* leaf_logits, void* gates, void* leaf_probs, char* scratch,
             int64_t scratch_stride, int64_t tokens, int64_t trees, int64_t experts, double gamma, double epsilon,
             double least, int threads) {
  using Key = typename F::Key;
  using Wide = typename F::Wide;
  const Step<Wide> step(gamma);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t worker = 0; worker < threads; ++worker) {
    const Rows<F> row(scratch + worker * scratch_stride, trees, experts);
    for (int64_t t = worker * tokens / threads; t < (worker + 1) * tokens / threads; ++t) {
      row.read(static_cast<const Key*>(split_logits) + t * trees * (experts - 1),
               static_cast<const Key*>(leaf_logits) + t * trees * experts);
      row.descend(step);
      std::copy(row.prob, row.prob + trees * experts, static_cast<Wide*>(leaf_probs) + t * trees * experts);
      row.softmax(Wide(epsilon), Wide(least));
      Wide* gate = static_cast<Wide*>(gates) + t * experts;
      std::copy(row.q, row.q + experts, gate);
      for (int64_t k = 1; k < trees; ++k)
        for (int64_t e = 0; e < experts; ++e) gate[e] += row.q[k * experts + e];
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
  const bool parity = epsilon > 0;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t worker = 0; worker < threads; ++worker) {
    const Rows<F> row(scratch + worker * scratch_stride, trees, experts);
    for (int64_t t = worker * tokens / threads; t < (worker + 1) * tokens / threads; ++t) {
      row.read(static_cast<const Key*>(split_logits) + t * trees * (experts - 1),
               static_cast<const Key*>(leaf_logits) + t * trees * experts);
      row.descend(step);
      row.softmax(Wide(epsilon), Wide(least));
      row.slopes(step);
      const Wide* grad = static_cast<const Wide*>(grad_gates) + t * experts;
      Wide mean = 0;
      for (int64_t k = 0; k < trees; ++k) {
        const Wide* q = row.q + k * experts;
#pragma omp simd reduction(+ : mean)
        for (int64_t e = 0; e < experts; ++e) mean += q[e] * grad[e];
      }
      for (int64_t k = 0; k < trees; ++k) {
        const int64_t first = (t * trees + k) * experts;
        Wide *q = row.q + k * experts, *prob = row.prob + k * experts;
        Key* out = static_cast<Key*>(dleaf) + first;
#pragma omp simd
        for (int64_t e = 0; e < experts; ++e) {
          q[e] *= grad[e] - mean;
          out[e] = F::narrow(q[e]);
        }
        if (parity)
          for (int64_t e = 0; e < experts; ++e) q[e] *= prob[e] / (prob[e] + Wide(epsilon));
        if (grad_leaf_probs != nullptr) {
          const Wide* grad_prob = static_cast<const Wide*>(grad_leaf_probs) + first;
          for (int64_t e = 0; e < experts; ++e) q[e] += prob[e] * grad_prob[e];
        }
        order.to_heap(q, row.heap);
        const Wide *left = row.left + k * (experts - 1), *right = row.right + k * (experts - 1);
        Wide* to = row.split + k * (experts - 1);
        for (int64_t bottom = experts - 1; bottom > 0;) {
          const int64_t top = level_of(bottom - 1);
#pragma omp simd
          for (int64_t node = top; node < bottom; ++node) {
            const Wide below_left = row.heap[2 * node + 1], below_right = row.heap[2 * node + 2];
            row.heap[node] = below_left + below_right;
            to[node] = below_left * left[node] - below_right * right[node];
          }
          bottom = top;
        }
      }
      Key* out = static_cast<Key*>(dsplit) + t * trees * (experts - 1);
      for (int64_t i = 0; i < trees * (experts - 1); ++i) out[i] = F::narrow(row.split[i]);
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
