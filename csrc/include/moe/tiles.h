// Matrix products small enough to live in the caches: a tile of C in registers, a panel of B packed and padded with zeros.
// Sums over k go one by one in order, whatever the tile, so a result depends neither on threads nor on its neighbours.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "moe/formats.h"
#include "moe/lanes.h"

namespace moe {
namespace MOE_ISA {

// A tile is kTileRows x two vectors: 24 accumulators of AVX-512's 32 registers, 12 of the 16 of the others.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif
template <class T>
constexpr int kPanel = 2 * kLanes<T>;  // columns of a panel

inline int64_t panels_of(int64_t columns, int panel) { return (columns + panel - 1) / panel; }

// c (M, columns) = a b, plus c if `more`. a(m, k) = a[m * a_row + k * a_k]; b (depth, kPanel) packed.
template <int M, class T>
inline void tile(const T* a, int64_t a_row, int64_t a_k, const T* b, int64_t depth, T* c, int64_t c_row, int rows,
                 int64_t columns, bool more) {
  constexpr int lanes = kLanes<T>;
  Vec<T> sum[M][2] = {};
  const T* at[M];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) at[m] = a + std::min(m, rows - 1) * a_row;  // rows that are not there repeat the last one
  for (int64_t k = 0; k < depth; ++k, b += 2 * lanes) {
    const Vec<T> b0 = load(b), b1 = load(b + lanes);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const Vec<T> x = broadcast(at[m][k * a_k]);
      sum[m][0] += x * b0;
      sum[m][1] += x * b1;
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    if (m >= rows) break;
    T* out = c + m * c_row;
    if (columns == 2 * lanes) {
      store(out, more ? load(out) + sum[m][0] : sum[m][0]);
      store(out + lanes, more ? load(out + lanes) + sum[m][1] : sum[m][1]);
    } else {
      alignas(64) T padded[2 * lanes];
      store(padded, sum[m][0]);
      store(padded + lanes, sum[m][1]);
      for (int64_t j = 0; j < columns; ++j) out[j] = more ? out[j] + padded[j] : padded[j];
    }
  }
}

// c (rows, columns <= kPanel) = a b, plus c if `more`, tile by tile. Not inline: every caller would carry five tiles.
template <class T>
[[gnu::noinline]] void panel_product(const T* a, int64_t a_row, int64_t a_k, const T* b, int64_t depth, T* c, int64_t c_row,
                          int64_t rows, int64_t columns, bool more) {
  for (int64_t i = 0; i < rows; i += kTileRows) {
    const int left = int(std::min<int64_t>(kTileRows, rows - i));
    const auto run = [&](auto size) {
      tile<size.value>(a + i * a_row, a_row, a_k, b, depth, c + i * c_row, c_row, left, columns, more);
    };
    if (left == 1) run(std::integral_constant<int, 1>());
    else if (left == 2) run(std::integral_constant<int, 2>());
    else if (left <= 4) run(std::integral_constant<int, 4>());
    else if (left <= 6) run(std::integral_constant<int, 6>());
    else run(std::integral_constant<int, kTileRows>());
  }
}

// to[i] = from[i], widened. Most rows have `usual` elements, and a loop of a known length is a few instructions.
template <class F, int64_t usual = 0>
inline void widen_row(typename F::Wide* to, const typename F::Key* from, int64_t count) {
  if (usual > 0 && count == usual) {
#pragma omp simd
    for (int64_t i = 0; i < usual; ++i) to[i] = F::widen(from[i]);
    return;
  }
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = F::widen(from[i]);
}

// panel (depth, kPanel) of columns `first` on of b (depth, columns), zeros behind the last one; b(k, j) = b[k * b_k + j * b_j],
// of which one stride is 1.
template <class F>
inline void pack(typename F::Wide* panel, const typename F::Key* b, int64_t b_k, int64_t b_j, int64_t depth,
                 int64_t first, int64_t columns) {
  using T = typename F::Wide;
  constexpr int width = kPanel<T>, lanes = kLanes<T>;
  const int64_t count = std::min<int64_t>(width, columns - first);
  b += first * b_j;
  if (b_j == 1) {
    for (int64_t k = 0; k < depth; ++k, panel += width) {
      widen_row<F, width>(panel, b + k * b_k, count);
      std::fill(panel + count, panel + width, T(0));
    }
    return;
  }
  if (count < width) std::fill(panel, panel + depth * width, T(0));
  int64_t j = 0;
  for (; j + lanes <= count; j += lanes) {
    int64_t k = 0;
    for (; b_k == 1 && k + lanes <= depth; k += lanes) {
      Vec<T> square[lanes];
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) {
        alignas(64) T row[lanes];
        widen_row<F, lanes>(row, b + (j + i) * b_j + k, lanes);
        square[i] = load(row);
      }
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) store(panel + (k + i) * width + j, square[i]);
    }
    for (; k < depth; ++k)
      for (int i = 0; i < lanes; ++i) panel[k * width + j + i] = F::widen(b[k * b_k + (j + i) * b_j]);
  }
  for (; j < count; ++j)
    for (int64_t k = 0; k < depth; ++k) panel[k * width + j] = F::widen(b[k * b_k + j * b_j]);
}

}  // namespace MOE_ISA
}  // namespace moe
