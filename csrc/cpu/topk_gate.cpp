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
  // Of scored choices only:
  Rank<F>* group;  // (E), padded: keys of groups
  int32_t* best;   // (E): the best groups, then the experts that fill free positions

  // `room` has 32 bytes for each key, padding included: 8 + 8 + 4 + 8 + 4 for float64, which needs most. Without
  // `group` and `best` it has 20.
  Scratch(char* room, int64_t n) {
    const int64_t padded = mask_words(n) * kMaskBits;
    value = reinterpret_cast<typename F::Wide*>(room);
    key = reinterpret_cast<Rank<F>*>(value + padded);
    order = reinterpret_cast<int32_t*>(key + padded);
    group = reinterpret_cast<Rank<F>*>(order + padded);
    best = reinterpret_cast<int32_t*>(group + padded);
    std::fill(key + n, key + padded, std::numeric_limits<Rank<F>>::min());
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

// The arguments of scored choices, as in ops.h. Rule is the order, or sigmoid for both.
enum Rule : int { kTopKSoftmax, kSoftmaxTopK, kSigmoid };

struct Scored {
  int rule;
  const void* bias;  // float64 if logits are, else float32
  int64_t num_groups, kept_groups;  // num_groups is 0 without groups
  bool renormalise;
  double scale;
  const void* forced;
  int forced_size;  // bytes of an element

  bool by_score() const { return bias != nullptr || num_groups > 0; }
  int64_t forced_at(int64_t i) const {
    if (forced_size == 2) return static_cast<const int16_t*>(forced)[i];
    if (forced_size == 4) return static_cast<const int32_t*>(forced)[i];
    return static_cast<const int64_t*>(forced)[i];
  }
  bool forced_within(int64_t count, int64_t size) const {
    // int16 distances are compared without a sign: with more experts, negative values would seem to be in range.
    if (forced_size == 2) return within(static_cast<const int16_t*>(forced), count, std::min<int64_t>(size, 1 << 15));
    if (forced_size == 4) return within(static_cast<const int32_t*>(forced), count, size);
    return within(static_cast<const int64_t*>(forced), count, size);
  }
};

template <class Wide>
using Format = std::conditional_t<sizeof(Wide) == 8, Float64, Float32>;

template <class Wide>
auto key_of_value(Wide value) {
  return key_of<Format<Wide>>(Format<Wide>::narrow(value));
}

// NaN is not the highest value: exp(NaN - highest) is NaN anyway.
template <class Wide>
Wide highest_of(const Wide* value, int64_t n) {
  Wide highest = -std::numeric_limits<Wide>::infinity();
#pragma omp simd reduction(max : highest)
  for (int64_t i = 0; i < n; ++i) highest = value[i] > highest ? value[i] : highest;
  return highest;
}

template <class Wide>
Wide sigmoid(Wide z) {
  return 1 / (1 + exp(-z));
}

// value (n): logits, which become softmax or sigmoid scores.
template <class Wide>
void to_scores(Wide* value, int64_t n, bool by_sigmoid) {
  if (by_sigmoid) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) value[i] = sigmoid(value[i]);
    return;
  }
  const Wide highest = highest_of(value, n), share = 1 / sum_of_exponentials(value, n, highest);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) value[i] = exp(value[i] - highest) * share;
}

// Writes the best groups to row.best. row.value: the experts' scores plus bias.
template <class F>
void find_best_groups(const Scratch<F>& row, int64_t num_experts, const Scored& scored) {
  const int64_t size = num_experts / scored.num_groups;
  for (int64_t g = 0; g < scored.num_groups; ++g) {
    int64_t first = g * size, second = -1;
    for (int64_t e = first + 1; e < (g + 1) * size; ++e) {
      if (row.key[e] > row.key[first]) {
        second = first, first = e;
      } else if (second < 0 || row.key[e] > row.key[second]) {
        second = e;
      }
    }
    row.group[g] = key_of_value(second < 0 ? row.value[first] : row.value[first] + row.value[second]);
  }
  std::fill(row.group + scored.num_groups, row.group + mask_words(scored.num_groups) * kMaskBits,
            std::numeric_limits<Rank<F>>::min());
  select_top_k(row.group, scored.num_groups, scored.kept_groups, row.best, row.order);
}

// Lowers the keys of experts outside of row.best. Sorts row.best.
template <class F>
void keep_best_groups(const Scratch<F>& row, int64_t num_experts, const Scored& scored) {
  const int64_t size = num_experts / scored.num_groups;
  std::sort(row.best, row.best + scored.kept_groups);
  int64_t end = 0;
  for (int64_t i = 0; i <= scored.kept_groups; ++i) {
    const int64_t next = i < scored.kept_groups ? row.best[i] * size : num_experts;
    std::fill(row.key + end, row.key + next, std::numeric_limits<Rank<F>>::min());
    end = next + size;
  }
}

// Returns false if an expert is forced twice.
template <class F>
bool choose_scored(const Scratch<F>& row, int64_t first, int32_t* expert, int64_t num_experts, int64_t k,
                   const Scored& scored) {
  constexpr Rank<F> kLowest = std::numeric_limits<Rank<F>>::min();
  int64_t left = k;
  bool distinct = true;
  if (scored.num_groups > 0) find_best_groups(row, num_experts, scored);
  for (int64_t i = 0; scored.forced != nullptr && i < k; ++i) {
    const int64_t e = scored.forced_at(first + i);
    expert[i] = int32_t(e);
    if (e < 0) continue;
    distinct = distinct && row.key[e] != kLowest;
    row.key[e] = kLowest;
    --left;
  }
  if (scored.num_groups > 0) keep_best_groups(row, num_experts, scored);
  if (!distinct) return false;
  select_top_k(row.key, num_experts, left, scored.forced == nullptr ? expert : row.best, row.order);
  const int32_t* free = row.best;
  for (int64_t i = 0; scored.forced != nullptr && i < k; ++i) expert[i] = expert[i] < 0 ? *free++ : expert[i];
  return true;
}

// Writes the weights of the k choices before renormalisation. value: scratch for E elements.
template <class F, class Weight>
void unscaled_weights(const typename F::Key* logit, const int32_t* expert, typename F::Wide* value, int64_t num_experts,
                      int64_t k, int rule, Weight* weight) {
  using Wide = typename F::Wide;
  if (rule == kSigmoid) {
    for (int64_t i = 0; i < k; ++i) weight[i] = sigmoid(F::widen(logit[expert[i]]));
    return;
  }
  const bool all = rule == kSoftmaxTopK;
  const int64_t n = all ? num_experts : k;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) value[i] = F::widen(logit[all ? i : expert[i]]);
  const Wide highest = highest_of(value, n), share = 1 / sum_of_exponentials(value, n, highest);
  for (int64_t i = 0; i < k; ++i) weight[i] = exp(F::widen(logit[expert[i]]) - highest) * share;
}

// Returns whether no expert is forced twice in a row.
template <class F>
bool forward_scored(const void* logits, int64_t stride, void* weights, int32_t* experts, char* scratch,
                    int64_t scratch_stride, int64_t tokens, int64_t num_experts, int64_t k, const Scored& scored,
                    int threads) {
  using Key = typename F::Key;
  using Wide = typename F::Wide;
  bool distinct = true;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(&& : distinct)
  for (int64_t worker = 0; worker < threads; ++worker) {
    const Scratch<F> row(scratch + worker * scratch_stride, num_experts);
    for (int64_t t = worker * tokens / threads; t < (worker + 1) * tokens / threads; ++t) {
      const Key* logit = static_cast<const Key*>(logits) + t * stride;
      if (scored.by_score()) {
#pragma omp simd
        for (int64_t e = 0; e < num_experts; ++e) row.value[e] = F::widen(logit[e]);
        to_scores(row.value, num_experts, scored.rule == kSigmoid);
        for (int64_t e = 0; e < num_experts; ++e) {
          if (scored.bias != nullptr) row.value[e] += static_cast<const Wide*>(scored.bias)[e];
          row.key[e] = key_of_value(row.value[e]);
        }
      } else {
#pragma omp simd
        for (int64_t e = 0; e < num_experts; ++e) row.key[e] = key_of<F>(logit[e]);
      }
      int32_t* expert = experts + t * k;
      if (!choose_scored<F>(row, t * k, expert, num_experts, k, scored)) {
        distinct = false;
        continue;
      }
      Wide* weight = static_cast<Wide*>(weights) + t * k;
      unscaled_weights<F>(logit, expert, row.value, num_experts, k, scored.rule, weight);
      Wide sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += weight[i];
      const Wide scale = scored.renormalise ? Wide(scored.scale) / (sum + Wide(1e-20)) : Wide(scored.scale);
      for (int64_t i = 0; i < k; ++i) weight[i] *= scale;
    }
  }
  return distinct;
}

// With u the weights before renormalisation and c the scale, w = c u, or c u / (sum of u + 1e-20); du is the gradient
// to u. "topk_softmax": dz = u (du - <u, du>) at the choices; "softmax_topk": -p <u, du>, plus u du at the choices, with
// p the softmax; sigmoid: u (1 - u) du at the choices.
template <class F>
void backward_scored(const void* grad, const int32_t* experts, const void* logits, int64_t stride, void* dlogits,
                     char* scratch, int64_t scratch_stride, int64_t tokens, int64_t num_experts, int64_t k, int rule,
                     bool renormalise, double scale, int threads) {
  using Key = typename F::Key;
  using Wide = typename F::Wide;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t worker = 0; worker < threads; ++worker) {
    Wide *value = reinterpret_cast<Wide*>(scratch + worker * scratch_stride), *u = value + num_experts, *du = u + k;
    for (int64_t t = worker * tokens / threads; t < (worker + 1) * tokens / threads; ++t) {
      const Wide* dw = static_cast<const Wide*>(grad) + t * k;
      const Key* logit = static_cast<const Key*>(logits) + t * stride;
      const int32_t* expert = experts + t * k;
      Key* dz = static_cast<Key*>(dlogits) + t * num_experts;
      unscaled_weights<F>(logit, expert, value, num_experts, k, rule, u);
      Wide sum = 0, mean = 0;
      for (int64_t i = 0; i < k; ++i) sum += u[i], mean += u[i] * dw[i];
      const Wide factor = renormalise ? Wide(scale) / (sum + Wide(1e-20)) : Wide(scale);
      mean = renormalise ? mean / (sum + Wide(1e-20)) : 0;
      Wide common = 0;  // <u, du>
      for (int64_t i = 0; i < k; ++i) du[i] = factor * (dw[i] - mean), common += u[i] * du[i];
      if (rule == kSoftmaxTopK) {
        const Wide highest = highest_of(value, num_experts);
        const Wide slope = -common / sum_of_exponentials(value, num_experts, highest);
#pragma omp simd
        for (int64_t e = 0; e < num_experts; ++e) dz[e] = F::narrow(slope * exp(value[e] - highest));
      } else {
        std::fill(dz, dz + num_experts, Key(0));
      }
      for (int64_t i = 0; i < k; ++i) {
        Wide slope = u[i] * (du[i] - common);
        if (rule == kSigmoid) slope = u[i] * sigmoid(-F::widen(logit[expert[i]])) * du[i];
        dz[expert[i]] = F::narrow(slope);
      }
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

// Returns 1 if an expert is forced that is out of range, or twice in a row, else 0.
int topk_gate_fwd(int dtype, const void* logits, int64_t stride, void* weights, int32_t* experts, void* scratch,
                  int64_t scratch_stride, int64_t tokens, int64_t num_experts, int64_t k, int rule, const void* bias,
                  int64_t num_groups, int64_t kept_groups, int renormalise, double scale, const void* forced,
                  int forced_size, int threads) {
  const Scored scored{rule, bias, num_groups, kept_groups, renormalise != 0, scale, forced, forced_size};
  const bool plain = rule != kSigmoid && !scored.by_score() && !scored.renormalise && scale == 1 && forced == nullptr;
  if (forced != nullptr && !scored.forced_within(tokens * k, num_experts)) return 1;
  bool distinct = true;
  with_format(dtype, [&](auto format) {
    using F = decltype(format);
    char* room = static_cast<char*>(scratch);
    if (plain) {
      forward<F>(logits, stride, weights, experts, room, scratch_stride, tokens, num_experts, k, rule == kSoftmaxTopK,
                 threads);
    } else {
      distinct = forward_scored<F>(logits, stride, weights, experts, room, scratch_stride, tokens, num_experts, k,
                                   scored, threads);
    }
  });
  return !distinct;
}

// Returns 1 and writes nothing if an expert is out of range, else 0.
int topk_gate_bwd(int dtype, const void* grad, const void* weights, const int32_t* experts, const void* logits,
                  int64_t stride, void* dlogits, void* scratch, int64_t scratch_stride, int64_t tokens,
                  int64_t num_experts, int64_t k, int rule, int renormalise, double scale, int threads) {
  if (!within(experts, tokens * k, num_experts, 0)) return 1;
  with_format(dtype, [&](auto format) {
    using F = decltype(format);
    if (rule < 0) {
      backward<F>(grad, weights, experts, logits, stride, dlogits, tokens, num_experts, k, threads);
    } else {
      backward_scored<F>(grad, experts, logits, stride, dlogits, static_cast<char*>(scratch), scratch_stride, tokens,
                         num_experts, k, rule, renormalise != 0, scale, threads);
    }
  });
  return 0;
}

}  // namespace MOE_ISA
}  // namespace moe
