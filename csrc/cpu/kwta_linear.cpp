// A linear layer that computes the winners of each row alone (definition: python_ref/kwta_linear.py).
//
// A block of the weight, kColumns outputs by kDepth inputs, is packed so that it stays in the L2 cache; then each token
// of a chunk takes the dot products of its winners with it, up to kDots at a time. Each product reads a vector of the
// block, so one vector a cycle from L2 is the limit, half of what a dense product does. A sum is taken over lanes, then
// over blocks of inputs in ascending order: its bits do not depend on the other tokens or winners.

#include "ops.h"

#include <algorithm>
#include <atomic>

#include "moe/cpu/elements.h"
#include "moe/cpu/lanes.h"
#include "moe/cpu/pages.h"
#include "moe/cpu/scratch.h"
#include "moe/cpu/simd.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int64_t kTokens = 512;   // most tokens for which a block of the weight is packed once
constexpr int64_t kFew = 128;      // most tokens of a chunk that read the weight in place
constexpr int64_t kColumns = 128;  // outputs of a block, whose places in it fit a byte
template <class T>
constexpr int64_t kDepth = 2048 / sizeof(T);  // inputs of a block: 256 KiB with kColumns
constexpr int kDots = 8;

// Lane c of the result is the sum over the lanes of v[c], for c < count. Each step adds the halves of groups of lanes.
template <class T, int count, int step = kLanes<T> / 2>
inline Vec<T> lane_sums(Vec<T>* v) {
  constexpr std::make_index_sequence<kLanes<T>> lanes;
  if constexpr (step == 0) {
    return v[0];
  } else if constexpr (step >= count) {
    for (int c = 0; c < count; ++c) v[c] += swapped<step>(v[c], lanes);
  } else {
    for (int c = 0; c < step; ++c) {
      exchange<step>(v[c], v[c + step], lanes);
      v[c] += v[c + step];
    }
  }
  if constexpr (step > 0) return lane_sums<T, count, step / 2>(v);
}

// sums[c] (if first) = or += <x, row winner[c] of the block>, for c < C. Rows of the block are `apart` elements apart.
// depth: a multiple of the lanes.
template <int C, class T>
inline void dots(T* sums, const T* x, const T* block, int64_t apart, const uint8_t* winner, int64_t depth, bool first) {
  const T* row[C];
  for (int c = 0; c < C; ++c) row[c] = block + winner[c] * apart;
  Vec<T> sum[kDots] = {};
  for (int64_t k = 0; k < depth; k += kLanes<T>) {
    const Vec<T> in = load(x + k);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[c] += in * load(row[c] + k);
  }
  constexpr int together = std::min(kDots, kLanes<T>);
  for (int c = 0; c < C; c += together) {
    alignas(64) T totals[kLanes<T>];
    store(totals, lane_sums<T, together>(sum + c));
    for (int i = 0; i < std::min(together, C - c); ++i) sums[c + i] = first ? totals[i] : sums[c + i] + totals[i];
  }
}

template <class T>
struct Layer {
  Elements<T> kind;
  const char* x;
  int64_t x_stride;
  const char* weight;
  int64_t weight_stride;
  const char* bias;  // or nullptr
  const int32_t* bits;
  char* y;
  int64_t tokens, din, dout;

  struct Room {
    T *block, *row, *bias, *sums;
    uint8_t* winners;
  };

  void run(int threads) const {
    const int64_t blocks = (dout + kColumns - 1) / kColumns, chunks = (tokens + kTokens - 1) / kTokens;
    const int64_t most = std::min(kTokens, tokens) * kColumns;
    const Scratch<T> block_of(threads, kColumns * kDepth<T>), row_of(threads, std::max(kDepth<T>, kColumns));
    const Scratch<T> bias_of(threads, kColumns), sums_of(threads, most);
    const Scratch<uint8_t> winners_of(threads, most);
    std::atomic<int64_t> next{0};
    expect_pages(y, tokens * dout * kind.size);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int i = 0; i < threads; ++i) {
      const Room room{block_of.of(i), row_of.of(i), bias_of.of(i), sums_of.of(i), winners_of.of(i)};
      for (int64_t j = next++; j < chunks * blocks; j = next++)
        outputs(j / blocks * kTokens, j % blocks * kColumns, room);
    }
  }

  // kColumns outputs, from `column` on, of kTokens tokens.
  void outputs(int64_t token, int64_t column, const Room& room) const {
    const int64_t count = std::min(kTokens, tokens - token), columns = std::min(kColumns, dout - column);
    int32_t ends[kTokens];  // ends[t]: where token t's part of room.winners and room.sums ends
    bool wins[kColumns] = {};
    int32_t used = 0;
    for (int64_t t = 0; t < count; ends[t++] = used)
      each_winner(token + t, column, columns, [&](int64_t j) { wins[room.winners[used++] = uint8_t(j)] = true; });
    if (din == 0) std::fill(room.sums, room.sums + used, T(0));
    for (int64_t k = 0; k < din; k += kDepth<T>) {
      const int64_t depth = std::min(kDepth<T>, din - k), padded = (depth + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
      const int64_t corner = column * weight_stride + k;
      const bool in_place = kind.same_type && depth == padded && count <= kFew;
      const T* const block = in_place ? reinterpret_cast<const T*>(weight) + corner : room.block;
      const int64_t apart = in_place ? weight_stride : kDepth<T>;
      for (int64_t j = 0; j < columns && !in_place; ++j)
        if (wins[j]) copy(room.block + j * kDepth<T>, weight, corner + j * weight_stride, depth, padded);
      for (int64_t t = 0, at = 0; t < count; at = ends[t++]) {
        const int64_t place = (token + t) * x_stride + k;
        const bool copied = !kind.same_type || depth < padded;
        if (copied) copy(room.row, x, place, depth, padded);
        const T* const in = copied ? room.row : reinterpret_cast<const T*>(x) + place;
        multiply(room.sums + at, in, block, apart, room.winners + at, ends[t] - at, padded, k == 0);
      }
    }
    if (bias == nullptr) std::fill(room.bias, room.bias + columns, T(0));
    else copy(room.bias, bias, column, columns, columns);
    for (int64_t t = 0, at = 0; t < count; ++t) {
      std::fill(room.row, room.row + columns, T(0));
      for (; at < ends[t]; ++at) room.row[room.winners[at]] = room.sums[at] + room.bias[room.winners[at]];
      kind.narrow(y + ((token + t) * dout + column) * kind.size, room.row, columns);
    }
  }

  // Calls work(j) for each set bit column + j of a token's mask, j < columns.
  template <class Work>
  void each_winner(int64_t token, int64_t column, int64_t columns, Work work) const {
    const int32_t* const words = bits + token * mask_words(dout) + column / kMaskBits;
    for (int64_t w = 0; w < mask_words(columns); ++w)
      for (uint32_t left = uint32_t(words[w]) & low_bits(columns - w * kMaskBits); left != 0; left &= left - 1)
        work(w * kMaskBits + __builtin_ctz(left));
  }

  // to (padded) = `depth` elements of `from` from `place` on, then zeros.
  void copy(T* to, const char* from, int64_t place, int64_t depth, int64_t padded) const {
    kind.widen(to, 0, from + place * kind.size, 0, nullptr, 1, depth);
    std::fill(to + depth, to + padded, T(0));
  }

  // Groups of equal size: seven and six take less time than eight and five.
  static void multiply(T* sums, const T* in, const T* block, int64_t apart, const uint8_t* winner, int64_t count,
                       int64_t depth, bool first) {
    for (int64_t i = 0, size; i < count; i += size) {
      const int64_t groups = (count - i + kDots - 1) / kDots;
      size = (count - i + groups - 1) / groups;
      switch (size) {
#define MOE_DOTS(C) case C: dots<C>(sums + i, in, block, apart, winner + i, depth, first); break;
        MOE_DOTS(1) MOE_DOTS(2) MOE_DOTS(3) MOE_DOTS(4) MOE_DOTS(5) MOE_DOTS(6) MOE_DOTS(7) MOE_DOTS(8)
#undef MOE_DOTS
      }
    }
  }
};

}  // namespace

void kwta_linear_fwd(int dtype, const void* x, int64_t x_stride, const void* weight, int64_t weight_stride,
                     const void* bias, const int32_t* bits, void* y, int64_t tokens, int64_t din, int64_t dout,
                     int threads) {
  with_wide(dtype, [&](auto zero) {
    using T = decltype(zero);
    Layer<T>{elements_of<T>(dtype),           static_cast<const char*>(x),    x_stride,
             static_cast<const char*>(weight), weight_stride,                  static_cast<const char*>(bias),
             bits,                             static_cast<char*>(y),          tokens,
             din,                              dout}
        .run(threads);
  });
}

}  // namespace MOE_ISA
}  // namespace moe
