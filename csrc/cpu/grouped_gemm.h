// The products of grouped_gemm.cpp: rows, grouped by expert, times the weights of their experts.
#pragma once

#include "dots.h"
#include "groups.h"

#include <algorithm>

#include "moe/cpu/elements.h"
#include "moe/cpu/pairs.h"
#include "moe/cpu/scratch.h"
#include "moe/cpu/tiles.h"

namespace moe {
namespace MOE_ISA {
namespace {

// A sum of many terms is computed in parts. The weights for a part and for the columns of a tile are copied to a panel
// (tiles.h). A part has kDepth terms, so that a panel has at most 32 KB, or kPairDepth pairs of terms and 64 KB for the
// instructions that multiply pairs of bfloat16 (pairs.h).
constexpr int64_t kDepth = 512 / kTileVectors;
constexpr int64_t kPairDepth = 2 * kDepth;

// Row r is x[token[r]], or zeros if token[r] is -1. Without `token` it is x[r]. Rows of x are `stride` elements apart.
template <class T>
struct GatheredRows {
  Elements<T> kind;
  const char* x;
  int64_t stride;
  const int32_t* token;

  // Copies a block of `rows` rows and `count` columns, which starts at row `first` and column `column`, to `to` as T.
  // Rows of `to` are to_row elements apart.
  void copy(T* to, int64_t to_row, int64_t first, int64_t rows, int64_t column, int64_t count) const {
    const int64_t start = token == nullptr ? first * stride : 0;
    kind.widen(to, to_row, x + (start + column) * kind.size, stride, token == nullptr ? nullptr : token + first, rows,
               count);
  }

  // As copy, for bfloat16, but rows 2 i and 2 i + 1 become row i of `to`, whose elements are pairs of theirs (pairs.h).
  void pair(Bf16Pair* to, int64_t to_row, int64_t first, int64_t rows, int64_t column, int64_t count) const {
    const int64_t start = token == nullptr ? first * stride : 0;
    pair_rows(to, to_row, x + 2 * (start + column), stride, token == nullptr ? nullptr : token + first, rows, count);
  }

  void prefetch_pairs(Prefetcher& prefetcher, int at, int64_t first, int64_t column, int64_t count) const {
    if (token == nullptr) prefetcher.prefetch(at, x + 2 * (first * stride + column), 2 * stride, 2 * count, 2);
  }

  Prefetcher::Piece piece(int64_t first, int64_t rows, int64_t dim) const {
    if (token != nullptr || stride != dim) return {};
    return {x + first * dim * kind.size, rows * dim * kind.size};
  }
};

template <class T>
int64_t steps_of(int64_t rows, int64_t depth, int64_t columns) {
  return std::max<int64_t>(1, panels_of(rows, kTileRows) * panels_of(columns, kPanel<T>) * depth);
}

// Computes sums (R, dout): the rows of each expert e times its weight (din, dout), whose element (k, j) is element
// e * stride_e + k * stride_k + j * stride_j of `weight`. If `by_torch` is not null, it holds the sums as computed by
// torch, which may have added the bias.
template <class T>
struct GroupedGemm {
  GatheredRows<T> x;
  const char* weight;
  int64_t stride_e, stride_k, stride_j;
  Elements<T> by_torch_kind;
  char* by_torch;
  Groups groups;
  int64_t din, dout;
  bool may_use_dots;

  // Calls finish(expert, row, sums) for every row of every expert; finish may overwrite the row's dout sums. Where the
  // sums are: without by_torch in sums_out (R, dout), or in scratch if sums_out is null. With by_torch of type T in
  // by_torch. With by_torch of another type in scratch, converted row by row; sums_out must then be null.
  // If `rounded` (R, dout) is not null, it receives the sums in bfloat16, and finish is not called; `rounded` needs
  // products in pairs and no by_torch.
  template <class Finish>
  void run(int threads, T* sums_out, char* rounded, Finish finish) const {
    if (by_torch && by_torch_kind.same_type) sums_out = reinterpret_cast<T*>(by_torch);
    // A span is up to kSpan rows of one expert (groups.h). Scratch: its sums, its rows of x and a panel of the weight;
    // with by_torch one row of sums.
    const Scratch<T> scratch(threads, by_torch ? dout : kSpan * (din + dout) + kPanel<T> * std::min(din, kPairDepth));
    groups.each_span(threads, [&](int thread, Span span, Span later) {
      T* own = scratch.of(thread);
      T* sums = sums_out ? sums_out + span.first * dout : own;
      if (by_torch == nullptr && x.kind.in_pairs) {
        char* const rounded_rows = rounded ? rounded + 2 * span.first * dout : nullptr;
        if constexpr (kPairs<T>)
          multiply_pairs(span, later, sums, rounded_rows, reinterpret_cast<Bf16Pair*>(own + kSpan * dout));
        if (rounded) return;
      } else if (by_torch == nullptr) {
        multiply(span, later, sums, own + kSpan * dout, sums_out != nullptr);
      }
      for (int64_t row = span.first; row < span.first + span.rows; ++row) {
        T* row_sums = sums;
        if (by_torch && !by_torch_kind.same_type)
          by_torch_kind.widen(row_sums, dout, by_torch + row * dout * by_torch_kind.size, 0, nullptr, 1, dout);
        else
          row_sums += (row - span.first) * dout;
        finish(span.expert, row, row_sums);
      }
    });
  }

  // Prefetches the panel after the panel at term k and column j: the next terms of the same columns; after the last
  // term, the next columns; after the last column, the first panel of later.expert if that is another expert (later:
  // the span that this thread will probably take next). rows_of_step: rows of the weight that a step over k reads, 2
  // for pairs, else 1.
  void prefetch_next_panel(Prefetcher& prefetcher, Span span, Span later, int64_t k, int64_t j, int64_t depth,
                           int rows_of_step) const {
    const char* weight = weight_of(span);
    if (k + depth < din) {
      k += depth;
    } else if (j + kPanel<T> < dout) {
      k = 0, j += kPanel<T>;
    } else {
      if (later.rows == 0 || later.expert == span.expert) return;
      weight = weight_of(later), k = j = 0;
    }
    const int64_t size = x.kind.size;
    weight += (k * stride_k + j * stride_j) * size;
    if (stride_j == din && din <= depth)
      prefetcher.prefetch(0, weight, std::min<int64_t>(kPanel<T>, dout - j) * din * size);
    else if (stride_j != 1) prefetcher.prefetch(0, weight, stride_j * size, std::min(depth, din - k) * size);
    else prefetcher.prefetch(0, weight, stride_k * size, std::min<int64_t>(kPanel<T>, dout - j) * size, rows_of_step);
  }

  const char* weight_of(Span of) const { return weight + of.expert * stride_e * x.kind.size; }

  Prefetcher prefetch_next_span(Span span, Span later, int64_t depth, bool fresh) const {
    Prefetcher prefetcher{{x.piece(later.first, later.rows, din), {}}, steps_of<T>(span.rows, depth, dout), fresh};
    const bool another = later.rows > 0 && later.expert != span.expert;
    if (another && stride_j != 1) prefetcher.pieces[1] = {weight_of(later), din * dout * x.kind.size};
    return prefetcher;
  }

  // sums (span.rows, dout) = the span's rows times the weight. panel: scratch for a panel and, after it, a copy of
  // the rows.
  void multiply(Span span, Span later, T* sums, T* panel, bool fresh) const {
    T* rows = panel + kPanel<T> * std::min(din, kDepth);
    const T* a = rows;
    int64_t a_row = din;
    if (x.kind.same_type && x.token == nullptr) {
      a = reinterpret_cast<const T*>(x.x) + span.first * x.stride;
      a_row = x.stride;
    } else {
      x.copy(rows, din, span.first, span.rows, 0, din);
    }
    if (x.kind.same_type && by_dots(span)) {
      const T* columns = reinterpret_cast<const T*>(weight_of(span));
      return multiply_few(sums, a, a_row, span.rows, columns, stride_j, dout, din);
    }
    Prefetcher prefetcher = prefetch_next_span(span, later, din, fresh);
    for (int64_t j = 0; j < dout; j += kPanel<T>) {
      const int64_t columns = std::min<int64_t>(kPanel<T>, dout - j);
      const bool whole = x.kind.same_type && stride_j == 1 && fills_panel<T>(columns, span.rows, stride_k);
      for (int64_t k = 0; k < din || k == 0; k += kDepth) {
        const int64_t depth = std::min(kDepth, din - k);
        const char* const from = weight_of(span) + k * stride_k * x.kind.size;
        const T* b = whole ? reinterpret_cast<const T*>(from) + j : panel;
        prefetch_next_panel(prefetcher, span, later, k, j, kDepth, 1);
        if (!whole) pack<kPanel<T>>(panel, x.kind, from, stride_k, stride_j, depth, j, dout);
        const Left<T> rows_from{a + k, a_row, 1};
        PanelProduct<T>{rows_from, b, stride_k, panel, depth, sums + j, dout, span.rows, columns, k > 0}.run(
            prefetcher);
      }
    }
  }

  // Whether the weight's layout and the number of rows suit multiply_few (dots.h). Rows of the expert are counted, not
  // of the span, so that the bits of a result depend neither on the number of threads nor on other experts.
  bool by_dots(Span span) const {
    return may_use_dots && stride_k == 1 && stride_j != 1 && groups.rows(span.expert) <= kDotRows;
  }

  // As multiply, for bfloat16 in pairs (pairs.h). If `rounded` is not null, it receives the sums in bfloat16,
  // and `sums` is scratch.
  void multiply_pairs(Span span, Span later, T* sums, char* rounded, Bf16Pair* panel) const {
    const int64_t pairs = pairs_of(din);
    Bf16Pair* const rows = panel + kPanel<T> * std::min(pairs, kPairDepth);
    Left<Bf16Pair> a{rows, pairs, 1};
    const char* const from = x.token == nullptr ? x.x + 2 * span.first * x.stride : x.x;
    if (x.token == nullptr && din % 2 == 0 && x.stride % 2 == 0 &&
        reinterpret_cast<uintptr_t>(from) % sizeof(Bf16Pair) == 0)
      a = {reinterpret_cast<const Bf16Pair*>(from), x.stride / 2, 1};
    else
      pair_neighbours(rows, from, x.stride, x.token == nullptr ? nullptr : x.token + span.first, span.rows, din);
    const char* const columns = weight_of(span);
    if (by_dots(span) && din % 2 == 0 && stride_j % 2 == 0 &&
        reinterpret_cast<uintptr_t>(columns) % sizeof(Bf16Pair) == 0) {
      multiply_few(sums, a.at, a.row, span.rows, reinterpret_cast<const Bf16Pair*>(columns), stride_j / 2, dout, pairs);
      if (rounded != nullptr) x.kind.narrow(rounded, sums, span.rows * dout);
      return;
    }
    Prefetcher prefetcher = prefetch_next_span(span, later, pairs, rounded != nullptr);
    for (int64_t j = 0; j < dout; j += kPanel<T>) {
      const int64_t columns = std::min<int64_t>(kPanel<T>, dout - j);
      for (int64_t k = 0; k < pairs || k == 0; k += kPairDepth) {
        const int64_t depth = std::min(kPairDepth, pairs - k);
        prefetch_next_panel(prefetcher, span, later, 2 * k, j, 2 * kPairDepth, 2);
        pack_pairs<kPanel<T>>(panel, weight_of(span) + 4 * k * stride_k, stride_k, stride_j,
                              std::min(2 * depth, din - 2 * k), j, dout);
        const Left<Bf16Pair> left{a.at + k, a.row, 1};
        // The product of the last terms writes rounded sums; products of earlier terms accumulate in `sums`.
        char* const last = rounded != nullptr && k + depth == pairs ? rounded + 2 * j : nullptr;
        PanelProduct<T, Bf16Pair>{left, panel, kPanel<T>, panel, depth, sums + j, dout, span.rows, columns, k > 0, last}
            .run(prefetcher);
      }
    }
  }
};

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
