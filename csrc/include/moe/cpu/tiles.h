// Matrix products C = A B that are small enough for the caches. The sums of a tile of C stay in registers. B is read in
// panels, each a few vectors wide: a panel is packed (copied, and padded with zeros) or read in place. The terms of an
// element of C are added in a fixed order, so the element depends neither on the number of threads nor on other rows of
// A. Its rounding depends on the instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "moe/cpu/elements.h"
#include "moe/cpu/lanes.h"
#include "moe/cpu/pairs.h"

namespace moe {
namespace MOE_ISA {

// A tile has kTileRows x kTileVectors vectors: 24 of the 32 registers of AVX-512, 12 of the 16 of AVX2 or SSE.
constexpr int kTileRows = 6;
#if defined(__AVX512F__)
constexpr int kTileVectors = 4;
#else
constexpr int kTileVectors = 2;
#endif
template <class T>
constexpr int kPanel = kTileVectors * kLanes<T>;  // columns of a panel

inline int64_t panels_of(int64_t columns, int64_t panel) { return (columns + panel - 1) / panel; }

// Prefetches, during a product, memory of its next panel and of the next product, at most one cache line in each step
// over k.
struct Prefetcher {
  struct Piece {
    const char* from = nullptr;
    int64_t bytes = 0;
  };
  Piece pieces[2];  // memory of the next product
  int64_t steps;    // steps over k that the tiles of this product still have in all
  bool fresh;       // C is probably in no cache, and is prefetched too
  // Cache lines to prefetch before `pieces`. A tile of n steps over k prefetches one line from each of n rows that are
  // next.bytes apart. If next.bytes is 64, it prefetches n consecutive lines.
  struct Lines {
    Piece next;        // address of the next line in the first row, and bytes from row to row
    int64_t left = 0;  // lines of each row that are still to prefetch
  };
  Lines lines[4] = {};

  // Sets lines[at] to the first `bytes` bytes of each row; rows are `apart` bytes apart. If rows_of_step is 2 (a step
  // over k reads a pair of rows), lines[at] has the even rows and lines[at + 1] the odd rows.
  void prefetch(int at, const char* rows, int64_t apart, int64_t bytes, int rows_of_step = 1) {
    for (int i = 0; i < rows_of_step; ++i)
      lines[at + i] = {{rows + i * apart, rows_of_step * apart}, (bytes + 63) / 64};
  }
  void prefetch(int at, const char* from, int64_t bytes) { lines[at] = {{from, 64}, (bytes + 63) / 64}; }

  // Returns what the next `some` steps prefetch: the first address, and the bytes from one address to the next. If
  // nothing is left to prefetch, all steps get the address `mapped`, which may be any valid address.
  Piece take(int64_t some, const void* mapped) {
    steps = std::max<int64_t>(steps - some, 1);
    for (Lines& line : lines) {
      if (line.left <= 0) continue;
      const Piece taken = line.next;
      const int64_t columns = taken.bytes == 64 ? some : 1;
      line.next.from += 64 * columns;
      line.left -= columns;
      return taken;
    }
    Piece& piece = pieces[pieces[0].bytes > 0 ? 0 : 1];
    if (piece.bytes <= 0) return {static_cast<const char*>(mapped), 0};
    const int64_t apart = std::min<int64_t>(64, (pieces[0].bytes + pieces[1].bytes) / (steps + some) + 1);
    const Piece taken{piece.from, apart};
    piece = {piece.from + some * apart, piece.bytes - some * apart};
    return taken;
  }
};

// Stores the first `columns` elements of `sum`, a row of a tile, to `to`, or adds them to `to` if `more`.
template <class T, int W>
inline void put(T* to, const Vec<T> (&sum)[W], int64_t columns, bool more) {
  constexpr int lanes = kLanes<T>;
  if (columns == W * lanes) {
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) store(to + w * lanes, more ? load(to + w * lanes) + sum[w] : sum[w]);
  } else {
    alignas(64) T padded[W * lanes];
    for (int w = 0; w < W; ++w) store(padded + w * lanes, sum[w]);
    for (int64_t j = 0; j < columns; ++j) to[j] = more ? to[j] + padded[j] : padded[j];
  }
}

// The left side A (rows, depth) of a product, in one of three layouts.
//   step = 1: element (m, k) is at[m * row + k].
//   row = 1, step = kPackRows, packed null: the packed layout, blocks of kPackRows rows, each as (depth, kPackRows).
//   row = 1, packed not null: element (m, k) is at[m + k * step]. Tiles of kTileRows rows are copied to `packed`, in
//   the packed layout, while they are multiplied. The caller has already packed the rows after the last whole tile.
template <class T>
struct Left {
  const T* at;
  int64_t row, step;
  T* packed = nullptr;

  static int64_t packed_at(int64_t m, int64_t depth) { return (m - m % kPackRows) * depth + m % kPackRows; }

  // A from row m on, for a tile that starts there. whole: the tile has kTileRows rows.
  Left from(int64_t m, int64_t depth, bool whole) const {
    if (packed != nullptr && whole) return {at + m, row, step, packed + packed_at(m, depth)};
    if (packed != nullptr) return {packed + packed_at(m, depth), 1, kPackRows};
    return {at + (step == 1 ? m * row : packed_at(m, depth)), row, step};
  }
};

// Whether a product with `rows` rows of A should read a panel of B in place, instead of packing it. `apart`: bytes from
// row to row of B. With one tile, packing cannot help; the other bounds come from measurements.
inline bool reads_in_place(int64_t rows, int64_t apart) {
  return rows <= (kTileVectors == 2 ? 1 : apart <= 2048 ? 16 : 4) * kTileRows;
}

// Whether PanelProduct accepts an unpacked b: its columns fill a panel, or half a panel that is read in place
// (only with AVX-512).
template <class T>
inline bool fills_panel(int64_t columns, int64_t rows, int64_t b_row) {
  return columns == kPanel<T> ||
         (2 * columns == kPanel<T> && kTileVectors > 2 && reads_in_place(rows, b_row * sizeof(T)));
}

// How a tile reads b. packed: from the packed panel; packs: in place, and packs b for later tiles; in_place: in place.
enum class Right { packed, packs, in_place };

// c (rows, columns <= kPanel) = a b, or c += a b if `more`. If b == packed, b is a packed panel (depth, kPanel).
// Otherwise rows of b are b_row elements apart, and the first tile packs b into `packed` unless reads_in_place. In: the
// type of the elements of a and b, T or Bf16Pair (pairs.h).
template <class T, class In = T>
struct PanelProduct {
  Left<In> a;
  const In* b;
  int64_t b_row;
  In* packed;
  int64_t depth;
  T* c;
  int64_t c_row, rows, columns;
  bool more;
  char* rounded = nullptr;  // only with pairs: if not null, results are written there in bfloat16, not to c

  // Computes `left` rows from row i on, M / 2 < left <= M, in two halves. The second half ends with the last row; if
  // left < M, the halves overlap. Row m of the second half is row_of(half) rows after row m of the first half: one
  // pointer, at[m], serves both.
  template <int M, int W, bool packs_a, Right right>
  MOE_MULTIPLIES_PAIRS [[gnu::always_inline]] inline void tile(int64_t i, int left, Prefetcher::Piece lines,
                                                               bool fresh) const {
    constexpr int lanes = kLanes<T>, half = (M + 1) / 2;
    const auto row_of = [&](int m) { return m < half ? m : left - M + m; };
    T* const to = c + i * c_row;
    const auto rounded_to = [&](int64_t at) { return rounded + 2 * (i * c_row + at); };
    if (fresh) {
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w)
          if (rounded == nullptr) __builtin_prefetch(to + row_of(m) * c_row + w * lanes, 1);
          else if (w % 2 == 0) __builtin_prefetch(rounded_to(row_of(m) * c_row + w * lanes), 1);
    }
    Vec<T> sum[M][W] = {};
    const Left<In> from = a.from(i, depth, left == kTileRows);
    const In *at[half], *row = right == Right::packed ? packed : b;
#pragma GCC unroll 3
    for (int m = 0; m < half; ++m) at[m] = from.at + m * from.row;
    int64_t upper = 0, lower = row_of(half) * from.row;
    for (int64_t k = 0; k < depth; ++k, row += right == Right::packed ? kPanel<T> : b_row, lines.from += lines.bytes) {
      __builtin_prefetch(lines.from, 0, 2);
      Vec<In> v[W];
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) {
        v[w] = load(row + w * lanes);
        if constexpr (right != Right::packed) __builtin_prefetch(row + 8 * b_row + w * lanes);
        if constexpr (right == Right::packs) store(packed + k * kPanel<T> + w * lanes, v[w]);
      }
      if constexpr (packs_a) {
        __builtin_prefetch(at[0] + upper + 8 * from.step);
        std::memcpy(from.packed + k * kPackRows, at[0] + upper, M * sizeof(In));
      }
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const Vec<In> x = broadcast(m < half ? at[m][upper] : at[m - half][lower]);
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) {
          if constexpr (std::is_same_v<T, In>) sum[m][w] += x * v[w];
          else sum[m][w] = with_product(sum[m][w], x, v[w]);
        }
      }
      upper += from.step, lower += from.step;
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      if (m >= half && row_of(m) < half) continue;
      const int64_t at = row_of(m) * c_row;
      if constexpr (!std::is_same_v<T, In>) {
        if (rounded != nullptr) {
          put_rounded(rounded_to(at), to + at, sum[m], columns, more);
          continue;
        }
      }
      put(to + at, sum[m], columns, more);
    }
  }

  // Computes rows `first` to last - 1. `own` is a local copy of *this: as stores to c cannot change it, the compiler
  // can keep its members in registers.
  template <int M, int W, bool packs_a, Right right>
  MOE_MULTIPLIES_PAIRS [[gnu::noinline]] void tiles(int64_t first, int64_t last, Prefetcher& prefetcher) const {
    const PanelProduct own = *this;
    for (int64_t i = first; i < last; i += M) {
      const int left = int(std::min<int64_t>(M, last - i));
      own.template tile<M, W, packs_a, right>(i, left, prefetcher.take(depth, a.at), prefetcher.fresh);
    }
  }

  template <int W, Right right>
  void all_tiles(int64_t first, Prefetcher& prefetcher) const {
    int64_t whole = rows - rows % kTileRows;
    // Instead of a last tile of one or two rows, the last 7 or 8 rows become two tiles of up to 4 rows, unless a is
    // packed or being packed: a tile could then cross the end of a packed block.
    if (rows > whole && rows <= whole + 2 && whole > first && a.step == 1) whole -= kTileRows;
    const int64_t left = rows - whole;
    if (a.packed != nullptr) tiles<kTileRows, W, true, right>(first, whole, prefetcher);
    else tiles<kTileRows, W, false, right>(first, whole, prefetcher);
    if (first > whole || left == 0) return;
    if (left == 1) tiles<1, W, false, right>(whole, rows, prefetcher);
    else if (left == 2) tiles<2, W, false, right>(whole, rows, prefetcher);
    else if (left <= 4 || left > kTileRows) tiles<4, W, false, right>(whole, rows, prefetcher);
    else tiles<kTileRows, W, false, right>(whole, rows, prefetcher);
  }

  void run(Prefetcher& prefetcher) const {
    const bool narrow = columns <= kPanel<T> / 2 && kTileVectors > 2;
    if (b != packed && reads_in_place(rows, b_row * sizeof(T))) {
      if (narrow) all_tiles<2, Right::in_place>(0, prefetcher);
      else all_tiles<kTileVectors, Right::in_place>(0, prefetcher);
    } else if (b != packed) {
      if (a.packed != nullptr && rows >= kTileRows)
        tiles<kTileRows, kTileVectors, true, Right::packs>(0, kTileRows, prefetcher);
      else tiles<kTileRows, kTileVectors, false, Right::packs>(0, std::min<int64_t>(rows, kTileRows), prefetcher);
      all_tiles<kTileVectors, Right::packed>(kTileRows, prefetcher);
    } else if (narrow) {
      all_tiles<2, Right::packed>(0, prefetcher);
    } else {
      all_tiles<kTileVectors, Right::packed>(0, prefetcher);
    }
  }
};

// panel (depth, width) = b (depth, columns) from column `first` on, with zeros after b's last column. b_k and b_j are
// the strides of b's rows and columns; one of them is 1.
template <int width, class T>
void pack(T* panel, const Elements<T>& kind, const char* b, int64_t b_k, int64_t b_j, int64_t depth, int64_t first,
          int64_t columns) {
  constexpr int lanes = kLanes<T>;
  const int64_t count = std::min<int64_t>(width, columns - first);
  b += first * b_j * kind.size;
  if (count < width) std::fill(panel, panel + depth * width, T(0));
  if (b_j == 1) return kind.widen(panel, width, b, b_k, nullptr, depth, count);
  for (int64_t j = 0; j < count; j += lanes) {
    const int64_t across = std::min<int64_t>(lanes, count - j);
    for (int64_t k = 0; k < depth; k += lanes) {
      const int64_t down = std::min<int64_t>(lanes, depth - k);
      const bool whole = across == lanes && down == lanes, in_place = kind.same_type && whole;
      const char* from = b + (k + j * b_j) * kind.size;
      alignas(64) T room[lanes * lanes];
      if (!in_place) kind.widen(room, lanes, from, b_j, nullptr, across, down);
      const T* square = in_place ? reinterpret_cast<const T*>(from) : room;
      const int64_t square_row = in_place ? b_j : lanes;
      T* to = panel + k * width + j;
      if (whole) {
        Vec<T> rows[lanes];
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) rows[i] = load(square + i * square_row);
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
