// Matrix products small enough to live in the caches: a tile of C in registers, a panel of B packed and padded with zeros.
// Sums over k go one by one in order, whatever the tile, so a result depends neither on threads nor on its neighbours.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "moe/elements.h"
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

// Memory that the next product will read, asked for while this one computes: 64 rows through a new 128 x 128 weight take
// half as long again where they wait for it. One request in every step of the inner loop, as a processor has room for a
// dozen and then waits as well.
struct Ahead {
  struct Piece {
    const char* from = nullptr;
    int64_t bytes = 0;
  };
  Piece pieces[2];
  int64_t steps;  // until the next product

  // The first address and the distance to the next one, for some of the steps. No piece left: any address that is mapped.
  Piece take(int64_t some, const void* mapped) {
    Piece& piece = pieces[pieces[0].bytes > 0 ? 0 : 1];
    if (piece.bytes <= 0) return {static_cast<const char*>(mapped), 0};
    const int64_t apart = std::min<int64_t>(64, (pieces[0].bytes + pieces[1].bytes) / steps + 1);
    const Piece taken{piece.from, apart};
    piece = {piece.from + some * apart, piece.bytes - some * apart};
    steps = std::max<int64_t>(steps - some, 1);
    return taken;
  }
};

// c (M, columns) = a b, plus c if `more`. a(m, k) = a[m * a_row + k * a_k]; b (depth, kPanel) packed.
template <int M, class T>
inline void tile(const T* a, int64_t a_row, int64_t a_k, const T* b, int64_t depth, T* c, int64_t c_row, int rows,
                 int64_t columns, bool more, Ahead::Piece ahead) {
  constexpr int lanes = kLanes<T>;
  Vec<T> sum[M][2] = {};
  const T* at[M];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) at[m] = a + std::min(m, rows - 1) * a_row;  // rows that are not there repeat the last one
  for (int64_t k = 0; k < depth; ++k, b += 2 * lanes, ahead.from += ahead.bytes) {
    __builtin_prefetch(ahead.from, 0, 2);
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
                          int64_t rows, int64_t columns, bool more, Ahead& ahead) {
  for (int64_t i = 0; i < rows; i += kTileRows) {
    const int left = int(std::min<int64_t>(kTileRows, rows - i));
    const Ahead::Piece asked = ahead.take(depth, a);
    const auto run = [&](auto size) {
      tile<size.value>(a + i * a_row, a_row, a_k, b, depth, c + i * c_row, c_row, left, columns, more, asked);
    };
    if (left == 1) run(std::integral_constant<int, 1>());
    else if (left == 2) run(std::integral_constant<int, 2>());
    else if (left <= 4) run(std::integral_constant<int, 4>());
    else if (left <= 6) run(std::integral_constant<int, 6>());
    else run(std::integral_constant<int, kTileRows>());
  }
}

// panel (depth, kPanel) of columns `first` on of b (depth, columns), zeros behind the last one; b(k, j) = b[k * b_k + j * b_j],
// of which one stride is 1.
template <class T>
void pack(T* panel, const Elements<T>& kind, const char* b, int64_t b_k, int64_t b_j, int64_t depth, int64_t first,
          int64_t columns) {
  constexpr int width = kPanel<T>, lanes = kLanes<T>;
  const int64_t count = std::min<int64_t>(width, columns - first);
  b += first * b_j * kind.size;
  if (count < width) std::fill(panel, panel + depth * width, T(0));
  if (b_j == 1) return kind.widen(panel, width, b, b_k, nullptr, depth, count);
  for (int64_t j = 0; j < count; j += lanes) {
    const int64_t across = std::min<int64_t>(lanes, count - j);
    for (int64_t k = 0; k < depth; k += lanes) {
      const int64_t down = std::min<int64_t>(lanes, depth - k);
      alignas(64) T square[lanes * lanes];
      kind.widen(square, lanes, b + (k + j * b_j) * kind.size, b_j, nullptr, across, down);
      T* to = panel + k * width + j;
      if (across == lanes && down == lanes) {
        Vec<T> rows[lanes];
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) rows[i] = load(square + i * lanes);
        transpose(rows);
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) store(to + i * width, rows[i]);
      } else {
        for (int64_t i = 0; i < down; ++i)
          for (int64_t l = 0; l < across; ++l) to[i * width + l] = square[l * lanes + i];
      }
    }
  }
}

}  // namespace MOE_ISA
}  // namespace moe
