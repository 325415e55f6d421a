// A masked layer on the CPU except its matrix products (definition: python_ref/masked_mlp.py), in place and in one pass.
// Forward: bias, activation and mask. Backward: the gradient of the pre-activations, and its sum over the rows (dbias).

#include "ops.h"

#include <algorithm>

#include "moe/activations.h"
#include "moe/formats.h"
#include "moe/simd.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int64_t kColumns = 4 * kWord;  // columns of a block: their sums are 8 vectors of 16 floats
constexpr int64_t kSpan = 128;           // rows summed one by one; such sums are then added up

// `count` columns of a row, at most 32. Inlined, so that whole words have a constant count: 4 times as fast.
template <Activation act, bool biased, class F>
inline __attribute__((always_inline)) void forward_word(typename F::Key* values, const typename F::Key* bias, uint32_t word,
                                                        int count) {
  using Key = typename F::Key;
#pragma omp simd
  for (int i = 0; i < count; ++i) {
    auto a = F::widen(values[i]);
    if constexpr (biased) a += F::widen(bias[i]);
    values[i] = F::narrow(value_of<act>(a)) & Key(-Key(word >> i & 1u));
  }
}

// Bit masks: row r uses mask sample[r], or mask r if `sample` is null.
struct Masks {
  const int32_t* bits;  // (num_samples, words_of(n))
  const int64_t* sample;
  int64_t num_samples, n;

  const int32_t* of(int64_t row) const { return bits + (sample ? sample[row] : row) * words_of(n); }

  // Whether every row has a mask. Also prefetches them, since they lie anywhere (a layer of 32 rows takes only 10 us).
  bool of_all(int64_t rows) const {
    if (sample == nullptr) return true;
    for (int64_t r = 0; r < rows; ++r) {
      if (sample[r] < 0 || sample[r] >= num_samples) return false;
      __builtin_prefetch(of(r));
    }
    return true;
  }
};

template <Activation act, bool biased, class F>
void forward(void* values, const void* bias, Masks masks, int64_t rows, int64_t n, int threads) {
  using Key = typename F::Key;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t* bits = masks.of(r);
    for (int64_t i = 0; i < n; i += kWord) {
      const uint32_t word = uint32_t(bits[i / kWord]);
      Key* v = static_cast<Key*>(values) + r * n + i;
      const Key* b = biased ? static_cast<const Key*>(bias) + i : nullptr;
      if (n - i >= kWord) {
        forward_word<act, biased, F>(v, b, word, int(kWord));
      } else {
        forward_word<act, biased, F>(v, b, word, int(n - i));
      }
    }
  }
}

// The gradient times the slope of the activation, computed from its value.
template <Activation act, class T>
inline T sloped_by(T grad, T value) {
  if constexpr (act == Activation::relu) return value <= 0 ? T(0) : grad;
  if constexpr (act == Activation::tanh) return grad * (T(1) - value * value);
  return grad;
}

template <Activation act, class F>
inline __attribute__((always_inline)) void backward_word(typename F::Key* grad, const typename F::Key* value, uint32_t word,
                                                         typename F::Wide* sum, int count) {
  using Key = typename F::Key;
#pragma omp simd
  for (int i = 0; i < count; ++i) {
    auto g = F::widen(grad[i]);
    if constexpr (act != Activation::none) g = sloped_by<act>(g, F::widen(value[i]));
    const Key kept = F::narrow(g) & Key(-Key(word >> i & 1u));
    grad[i] = kept;
    sum[i] += F::widen(kept);
  }
}

// Each thread has columns of its own, so that sums do not depend on the number of threads.
template <Activation act, class F>
void backward(void* grad, const void* value, Masks masks, void* dbias, int64_t rows, int64_t n, int threads) {
  using Key = typename F::Key;
  using Wide = typename F::Wide;
  auto* gradients = static_cast<Key*>(grad);
  const auto* values = static_cast<const Key*>(value);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t first = 0; first < n; first += kColumns) {
    const int64_t last = std::min(first + kColumns, n);
    Wide total[kColumns] = {};
    for (int64_t start = 0; start < rows; start += kSpan) {
      Wide sum[kColumns] = {};
      for (int64_t r = start; r < std::min(start + kSpan, rows); ++r) {
        const int32_t* bits = masks.of(r);
        for (int64_t i = first; i < last; i += kWord) {
          const uint32_t word = uint32_t(bits[i / kWord]);
          Key* g = gradients + r * n + i;
          const Key* v = act == Activation::none ? nullptr : values + r * n + i;
          if (last - i >= kWord) {
            backward_word<act, F>(g, v, word, sum + (i - first), int(kWord));
          } else {
            backward_word<act, F>(g, v, word, sum + (i - first), int(last - i));
          }
        }
      }
      for (int64_t i = 0; i < kColumns; ++i) total[i] += sum[i];
    }
    for (int64_t i = first; i < last; ++i) static_cast<Key*>(dbias)[i] = F::narrow(total[i - first]);
  }
}

// Calls work(format, activation) for the format of a dtype and one of the activations whose slope follows from their value.
template <class Work>
void with_layer(int dtype, int activation, Work work) {
  with_format(dtype, [&](auto format) {
    switch (Activation(activation)) {
      case Activation::relu: return work(format, std::integral_constant<Activation, Activation::relu>());
      case Activation::tanh: return work(format, std::integral_constant<Activation, Activation::tanh>());
      default: return work(format, std::integral_constant<Activation, Activation::none>());
    }
  });
}

}  // namespace

int masked_mlp_fwd(int dtype, void* values, const void* bias, const int32_t* bits, const int64_t* sample, int64_t num_samples,
                   int activation, int64_t rows, int64_t n, int threads) {
  const Masks masks{bits, sample, num_samples, n};
  if (!masks.of_all(rows)) return 1;
  with_layer(dtype, activation, [&](auto format, auto act) {
    const auto run = bias ? forward<act.value, true, decltype(format)> : forward<act.value, false, decltype(format)>;
    run(values, bias, masks, rows, n, threads);
  });
  return 0;
}

int masked_mlp_bwd(int dtype, void* grad, const void* value, const int32_t* bits, const int64_t* sample, int64_t num_samples,
                   int activation, void* dbias, int64_t rows, int64_t n, int threads) {
  const Masks masks{bits, sample, num_samples, n};
  if (!masks.of_all(rows)) return 1;
  with_layer(dtype, activation, [&](auto format, auto act) {
    backward<act.value, decltype(format)>(grad, value, masks, dbias, rows, n, threads);
  });
  return 0;
}

}  // namespace MOE_ISA
}  // namespace moe
