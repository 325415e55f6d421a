// Products of a few rows with a weight whose columns are contiguous, such as the transposed view of an nn.Linear's
// weight: one dot product for each row and column.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "moe/cpu/lanes.h"
#include "moe/cpu/pairs.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int64_t kDotRows = 4;  // most rows of an expert for which dot products are used
constexpr int kDots = 8;         // columns at a time

// to[c] = sum over k < depth of a[k] * columns[c * apart + k], for c < C. In: T or Bf16Pair (pairs.h).
template <int C, class T, class In>
MOE_MULTIPLIES_PAIRS inline void dots(T* to, const In* a, const In* columns, int64_t apart, int64_t depth) {
  constexpr int lanes = kLanes<T>;
  Vec<T> sums[C] = {};
  int64_t k = 0;
  for (; k + lanes <= depth; k += lanes) {
    const Vec<In> x = load(a + k);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      if constexpr (std::is_same_v<T, In>) sums[c] += x * load(columns + c * apart + k);
      else sums[c] = with_product(sums[c], x, load(columns + c * apart + k));
    }
  }
  if (k < depth) {  // the last terms, padded with zeros
    alignas(64) In rest[lanes] = {}, column[lanes] = {};
    std::memcpy(rest, a + k, size_t(depth - k) * sizeof(In));
    for (int c = 0; c < C; ++c) {
      std::memcpy(column, columns + c * apart + k, size_t(depth - k) * sizeof(In));
      if constexpr (std::is_same_v<T, In>) sums[c] += load(rest) * load(column);
      else sums[c] = with_product(sums[c], load(rest), load(column));
    }
  }
  for (int c = 0; c < C; ++c) to[c] = across<T>(sums[c], [](Vec<T> x, Vec<T> y) { return x + y; })[0];
}

// to (rows, count) = a (rows, depth) times the transpose of columns (count, depth). Rows of a are a_row elements
// apart; rows of `columns` are `apart` elements apart.
template <class T, class In>
MOE_MULTIPLIES_PAIRS void multiply_few(T* to, const In* a, int64_t a_row, int64_t rows, const In* columns,
                                       int64_t apart, int64_t count, int64_t depth) {
  int64_t j = 0;
  for (; j + kDots <= count; j += kDots)
    for (int64_t i = 0; i < rows; ++i)
      dots<kDots>(to + i * count + j, a + i * a_row, columns + j * apart, apart, depth);
  for (; j < count; ++j)
    for (int64_t i = 0; i < rows; ++i) dots<1>(to + i * count + j, a + i * a_row, columns + j * apart, apart, depth);
}

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
