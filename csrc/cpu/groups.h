// Rows grouped by expert, and their distribution over threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "moe/cpu/indices.h"
#include "moe/cpu/tiles.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int64_t kSpan = 192;  // most rows of a Span
constexpr int64_t kMinRows = 4 * kTileRows;  // fewest rows of a share (share_of); equals LEAST in grouped_gemm_cpu.py

// The share: how many of `rows` rows a thread takes at a time. It is `most` for one thread, else kMinRows to `most`.
// Each of several threads takes about four shares, for balance: fewer if a share would have under 2 * kMinRows rows,
// more if it would have over `most`.
inline int64_t share_of(int64_t rows, int64_t most, int threads) {
  if (threads == 1) return most;
  const int64_t each = panels_of(rows, threads);
  const int64_t turns = std::max({panels_of(each, most), std::min<int64_t>(each / (2 * kMinRows), 4), int64_t{1}});
  return std::clamp<int64_t>(panels_of(panels_of(each, turns), kTileRows) * kTileRows, kMinRows, most);
}

// Consecutive rows of one expert. rows = 0: no span is left.
struct Span {
  int64_t expert, first, rows = 0;
};

struct Groups {
  const int32_t* offsets;
  int64_t num_experts;

  int64_t first(int64_t e) const { return offsets[e]; }
  int64_t rows(int64_t e) const { return offsets[e + 1] - offsets[e]; }
  int64_t used() const { return offsets[num_experts]; }
  bool fit(int64_t most) const {
    return offsets[0] == 0 && used() <= most && std::is_sorted(offsets, offsets + num_experts + 1);
  }

  // Calls work(thread, span, later) for every span. later: the span that this thread will probably take next.
  template <class Work>
  void each_span(int threads, Work work) const {
    const int64_t span = share_of(used(), kSpan, threads);
    std::atomic<int64_t> next{0};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; ++thread) {
      int64_t e = 0, before = 0;  // before: number of spans of the experts before e
      // Returns span i, or one without rows if i is too large. Moves e and `before` to the expert of span i.
      const auto at = [&](int64_t i, int64_t& e, int64_t& before) -> Span {
        for (int64_t spans; e < num_experts && i >= before + (spans = panels_of(rows(e), span)); ++e) before += spans;
        if (e == num_experts) return {};
        const int64_t row = (i - before) * span;
        return {e, first(e) + row, std::min(span, rows(e) - row)};
      };
      for (int64_t i = next++;; i = next++) {
        const Span now = at(i, e, before);
        if (now.rows == 0) break;
        int64_t later_e = e, later_before = before;
        work(thread, now, at(i + threads, later_e, later_before));
      }
    }
  }
};

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
