// Pairs of bfloat16 numbers, the first one in the lower half of 32 bits. An instruction of AVX512-BF16 multiplies two
// vectors of pairs and adds two products to each lane of a vector of float32 sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "moe/cpu/lanes.h"
#include "moe/cpu/simd.h"

namespace moe {
namespace MOE_ISA {

using Bf16Pair = int32_t;

inline int64_t pairs_of(int64_t elements) { return (elements + 1) / 2; }

// kPairs<T>: whether the code of this instruction set (MOE_ISA) can multiply pairs and add the products to sums of T.
// multiplies_pairs(): whether kPairs<float> holds and this processor has AVX512-BF16.
#if defined(__AVX512F__)
template <class T>
constexpr bool kPairs = std::is_same_v<T, float>;

inline bool multiplies_pairs() {
  static const bool found = __builtin_cpu_supports("avx512bf16");
  return found;
}

// Functions that use AVX512-BF16 compile only with this attribute.
#define MOE_MULTIPLIES_PAIRS [[gnu::target("avx512bf16")]]
#else
template <class T>
constexpr bool kPairs = false;

inline bool multiplies_pairs() { return false; }

#define MOE_MULTIPLIES_PAIRS
#endif

// to = from in bfloat16, rounded to nearest even. The conversion of AVX512-BF16 flushes subnormal numbers to zero, so
// exact(to, from, count) converts blocks of 32 numbers with a subnormal one, and also the last count % 32 numbers.
template <class Exact>
MOE_MULTIPLIES_PAIRS void narrow_to_bf16(void* to, const float* from, int64_t count, Exact exact);

// In each lane, `sum` plus both products of the pairs x and y, each product added with one rounding. Subnormal inputs
// and sums become zero.
MOE_MULTIPLIES_PAIRS inline Vec<float> with_product(Vec<float> sum, Vec<Bf16Pair> x, Vec<Bf16Pair> y);

// Writes `sum`, or c + sum if `more`, to the first `columns` elements of `to`, in bfloat16. Subnormals become zero.
template <int W>
MOE_MULTIPLIES_PAIRS inline void put_rounded(char* to, const float* c, Vec<float> (&sum)[W], int64_t columns,
                                             bool more);

// Row i of `to` (pairs_of(rows), count) pairs each element of input row 2 i with that below it in row 2 i + 1, or with
// zero after the last row. Input row r is row r of `from` if `token` is null, else row token[r], or zeros if token[r]
// is -1. Rows of `from` are `stride` elements apart, rows of `to` are to_row pairs apart.
inline void pair_rows(Bf16Pair* to, int64_t to_row, const char* from, int64_t stride, const int32_t* token,
                      int64_t rows, int64_t count);

// to (rows, pairs_of(count)): the pairs of neighbours in each input row (see pair_rows); if `count` is odd, the last
// element is paired with zero.
inline void pair_neighbours(Bf16Pair* to, const char* from, int64_t stride, const int32_t* token, int64_t rows,
                            int64_t count) {
  const int64_t pairs = pairs_of(count);
  for (int64_t r = 0; r < rows; ++r, to += pairs) {
    const int64_t row = token == nullptr ? r : token[r];
    if (row < 0 || count % 2 != 0) std::fill(to, to + pairs, 0);
    if (row >= 0) std::memcpy(to, from + 2 * row * stride, size_t(2 * count));
  }
}

// panel (pairs_of(depth), width) = the pairs of rows (pair_rows) of b (depth, columns), from column `first` on, padded
// with zeros. b_k and b_j are the strides of b's rows and columns; one of them is 1.
template <int width>
void pack_pairs(Bf16Pair* panel, const char* b, int64_t b_k, int64_t b_j, int64_t depth, int64_t first,
                int64_t columns);

#if defined(__AVX512F__)

template <class Exact>
MOE_MULTIPLIES_PAIRS void narrow_to_bf16(void* to, const float* from, int64_t count, Exact exact) {
  constexpr int subnormal = 0x20;
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const Vec<float> low = load(from + i), high = load(from + i + 16);
    int16_t* const target = static_cast<int16_t*>(to) + i;
    if (_mm512_fpclass_ps_mask(low, subnormal) | _mm512_fpclass_ps_mask(high, subnormal)) exact(target, from + i, 32);
    else _mm512_storeu_si512(target, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  if (i < count) exact(static_cast<int16_t*>(to) + i, from + i, count - i);
}

MOE_MULTIPLIES_PAIRS inline Vec<float> with_product(Vec<float> sum, Vec<Bf16Pair> x, Vec<Bf16Pair> y) {
  return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
}

template <int W>
MOE_MULTIPLIES_PAIRS inline void put_rounded(char* to, const float* c, Vec<float> (&sum)[W], int64_t columns,
                                             bool more) {
#pragma GCC unroll 2
  for (int w = 0; w < W; w += 2) {
    const uint32_t some = low_bits(std::max<int64_t>(columns - 16 * w, 0));
    if (more) {
      sum[w] += (Vec<float>)_mm512_maskz_loadu_ps(uint16_t(some), c + 16 * w);
      sum[w + 1] += (Vec<float>)_mm512_maskz_loadu_ps(uint16_t(some >> 16), c + 16 * w + 16);
    }
    const auto both = (__m512i)_mm512_cvtne2ps_pbh(sum[w + 1], sum[w]);
    if (some == low_bits(32)) _mm512_storeu_si512(to + 32 * w, both);
    else _mm512_mask_storeu_epi16(to + 32 * w, some, both);
  }
}

inline void pair_rows(Bf16Pair* to, int64_t to_row, const char* from, int64_t stride, const int32_t* token,
                      int64_t rows, int64_t count) {
  // Indices that interleave two vectors from element `first` on. Element i of the second vector has index 32 + i.
  const auto interleaved = [](int first) {
    typename VecOf<int16_t>::type at;
    for (int i = 0; i < 32; ++i) at[i] = int16_t(first + i / 2 + i % 2 * 32);
    return (__m512i)at;
  };
  const __m512i lower = interleaved(0), upper = interleaved(16);
  const auto row_at = [&](int64_t r) -> const char* {
    const int64_t row = r >= rows ? -1 : token == nullptr ? r : token[r];
    return row < 0 ? nullptr : from + 2 * row * stride;
  };
  for (int64_t r = 0; r < rows; r += 2, to += to_row) {
    const char *const above = row_at(r), *const below = row_at(r + 1);
    for (int64_t i = 0; i < count; i += 32) {
      const uint32_t some = low_bits(count - i);
      const __m512i a = above ? _mm512_maskz_loadu_epi16(some, above + 2 * i) : _mm512_setzero_si512();
      const __m512i b = below ? _mm512_maskz_loadu_epi16(some, below + 2 * i) : _mm512_setzero_si512();
      _mm512_mask_storeu_epi32(to + i, uint16_t(some), _mm512_permutex2var_epi16(a, lower, b));
      if (some >> 16 == 0) continue;
      _mm512_mask_storeu_epi32(to + i + 16, uint16_t(some >> 16), _mm512_permutex2var_epi16(a, upper, b));
    }
  }
}

template <int width>
void pack_pairs(Bf16Pair* panel, const char* b, int64_t b_k, int64_t b_j, int64_t depth, int64_t first,
                int64_t columns) {
  constexpr int lanes = kLanes<Bf16Pair>;
  const int64_t count = std::min<int64_t>(width, columns - first), pairs = pairs_of(depth);
  b += 2 * first * b_j;
  if (count < width) std::fill(panel, panel + pairs * width, 0);
  if (b_j == 1) return pair_rows(panel, width, b, b_k, nullptr, depth, count);
  for (int64_t j = 0; j < count; j += lanes) {
    for (int64_t k = 0; k < pairs; k += lanes) {
      const uint32_t some = low_bits(depth - 2 * k);
      Vec<Bf16Pair> square[lanes] = {};
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i)
        if (j + i < count) square[i] = (Vec<Bf16Pair>)_mm512_maskz_loadu_epi16(some, b + 2 * ((j + i) * b_j + 2 * k));
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i)
        if (k + i < pairs) store(panel + (k + i) * width + j, square[i]);
    }
  }
}

#endif

}  // namespace MOE_ISA
}  // namespace moe
