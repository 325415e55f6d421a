// The top-k gate on the CPU (definition: python_ref/topk_gate.py).

#include "ops.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "moe/cpu/exp.h"
#include "moe/cpu/formats.h"
#include "moe/cpu/indices.h"
#include "moe/cpu/simd.h"

namespace moe {
namespace MOE_ISA {
namespace {

// Up to this k, select_top_k searches the row once for each choice; for larger k it sorts.
constexpr int64_t kPasses = 256;

template <class F>
using Rank = std::conditional_t<sizeof(typename F::Key) == 8, int64_t, int32_t>;

// Writes to `experts` the positions of the k highest of n keys, highest first. Equal keys are ordered by position.
// The length of `key` must be n rounded up to a multiple of kMaskBits, with the lowest integer in the elements after n.
// `key` may be overwritten. order (n): scratch.
template <class Rank>
void select_top_k(Rank* key, int64_t n, int64_t k, int32_t* experts, int32_t* order) {
  if (k > kPasses) {
    for (int64_t i = 0; i < n; ++i) order[i] = int32_t(i);
    std::partial_sort(order, order + k, order + n,
                      [key](int32_t a, int32_t b) { return key[a] > key[b] || (key[a] == key[b] && a < b); });
    std::copy(order, order + k, experts);
    return;
  }
  const int64_t padded = mask_words(n) * kMaskBits;
  for (int64_t choice = 0; choice < k; ++choice) {
    Rank highest = std::numeric_limits<Rank>::min();
    for (int64_t i = 0; i < padded; ++i) highest = key[i] > highest ? key[i] : highest;
    int64_t start = 0;
    uint32_t equal;
    while ((equal = greater(key + start, Rank(highest - 1))) == 0) start += kMaskBits;
    const int64_t expert = start + __builtin_ctz(equal);
    experts[choice] = int32_t(expert);
    key[expert] = std::numeric_limits<Rank>::min();
  }
}

template <class Wide>
Wide sum_of_exponentials(const Wide* value, int64_t n, Wide highest) {
  Wide sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += exp(value[i] - highest);
  return sum;
}

template <class F>
struct Scratch {
  typename F::Wide* value;  // (E)
  Rank<F>* key;             // (E), padded
  int32_t* order;           // (E)

  // `room` has 20 bytes for each key, padding included: 8 + 8 + 4 for float64, which needs most.
  Scratch(char* room, int64_t n) {
    value = reinterpret_cast<typename F::Wide*>(room);
    key = reinterpret_cast<Rank<F>*>(value + n);
    order = reinterpret_cast<int32_t*>(key + mask_words(n) * kMaskBits);
    std::fill(key + n, key + mask_words(n) * kMaskBits, std::numeric_limits<Rank<F>>::min());
  }
};

template <class F>
void forward(const void* logits, int64_t stride, void* weights, int32_t* experts, char* scratch, int64_t scratch_stride,
             int64_t tokens, int64_t num_experts, int64_t k, bool softmax_first, int threads) {
  using Key = typename F::Key;
  using Wide = typename F::Wide;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t worker = 0; worker < threads; ++worker) {
    const Scratch<F> row(scratch + worker * scratch_stride, num_experts);
    for (int64_t t = worker * tokens / threads; t < (worker + 1) * tokens / threads; ++t) {
      const Key* logit = static_cast<const Key*>(logits) + t * stride;
      int32_t* expert = experts + t * k;
#pragma omp simd
      for (int64_t e = 0; e < num_experts; ++e) row.key[e] = key_of<F>(logit[e]);
      select_top_k(row.key, num_experts, k, expert, row.order);
      if (k == 0) continue;
      // The first choice has the highest logit. Keys order NaN above +inf, so a row with a NaN has NaN as `highest`,
      // and all its weights become NaN.
      const Wide highest = F::widen(logit[expert[0]]);
      const int64_t n = softmax_first ? num_experts : k;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) row.value[i] = F::widen(logit[softmax_first ? i : expert[i]]);
      const Wide share = 1 / sum_of_exponentials(row.value, n, highest);
      for (int64_t i = 0; i < k; ++i)
        static_cast<Wide*>(weights)[t * k + i] = exp(F::widen(logit[expert[i]]) - highest) * share;
    }
  }
}

template <class F>
void backward(const void* grad, const void* weights, const int32_t* experts, const void* logits, int64_t stride,
              void* dlogits, int64_t tokens, int64_t num_experts, int64_t k, int threads) {
  using Key = typename F::Key;
  using Wide = typename F::Wide;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < tokens; ++t) {
    const Wide *dw = static_cast<const Wide*>(grad) + t * k, *w = static_cast<const Wide*>(weights) + t * k;
    const int32_t* expert = experts + t * k;
    Key* dz = static_cast<Key*>(dlogits) + t * num_experts;
    Wide mean = 0;
    for (int64_t i = 0; i < k; ++i) mean += w[i] * dw[i];
    if (logits != nullptr) {
      const Key* logit = static_cast<const Key*>(logits) + t * stride;
      // Softmax over all experts: the probability of expert e is w_0 exp(z_e - z_0), with logits z; w_0 and z_0 are
      // the weight and the logit of the first choice.
      const Wide highest = F::widen(logit[expert[0]]), scale = -mean * w[0];
#pragma omp simd
      for (int64_t e = 0; e < num_experts; ++e) dz[e] = F::narrow(scale * exp(F::widen(logit[e]) - highest));
    } else {
      std::fill(dz, dz + num_experts, Key(0));
    }
    for (int64_t i = 0; i < k; ++i) dz[expert[i]] = F::narrow(w[i] * (dw[i] - mean));
  }
}

}  // namespace

void topk_gate_fwd(int dtype, const void* logits, int64_t stride, void* weights, int32_t* experts, void* scratch,
                   int64_t scratch_stride, int64_t tokens, int64_t num_experts, int64_t k, int softmax_first,
                   int threads) {
  with_format(dtype, [&](auto format) {
    forward<decltype(format)>(logits, stride, weights, experts, static_cast<char*>(scratch), scratch_stride, tokens,
                              num_experts, k, softmax_first != 0, threads);
  });
}

// Returns 1 and writes nothing if an expert is out of range, else 0.
int topk_gate_bwd(int dtype, const void* grad, const void* weights, const int32_t* experts, const void* logits,
                  int64_t stride, void* dlogits, int64_t tokens, int64_t num_experts, int64_t k, int threads) {
  if (!within(experts, tokens * k, num_experts, 0)) return 1;
  with_format(dtype, [&](auto format) {
    backward<decltype(format)>(grad, weights, experts, logits, stride, dlogits, tokens, num_experts, k, threads);
  });
  return 0;
}

}  // namespace MOE_ISA
}  // namespace moe
