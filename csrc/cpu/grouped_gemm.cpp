// Grouped products on the CPU (definition: python_ref/grouped_gemm.py), and kernels of the backward pass.

#include "ops.h"
#include "grouped_gemm.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "moe/cpu/activations.h"
#include "moe/cpu/pages.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int64_t kSumRows = 64;  // most rows in a partial sum of dbias (column_sums)
constexpr int64_t kChunk = 256;  // columns of a row converted at a time, in a buffer on the stack
constexpr int64_t kPairedRows = 8;  // rows of x that WeightGradient pairs at a time
constexpr int64_t kBlock = 132;  // most rows of dW in a block: a multiple of kTileRows

void clear(void* out, int64_t used, int64_t rows, int64_t bytes) {
  if (out != nullptr && bytes > 0 && rows > used)
    std::memset(static_cast<char*>(out) + used * bytes, 0, size_t((rows - used) * bytes));
}

template <class T>
void forward(const GroupedGemm<T>& gemm, const char* bias, int activation, char* out, char* pre, int64_t rows,
             int threads) {
  const Elements<T>& kind = gemm.x.kind;
  const ActivationRow<T> act = activation_of<T>(activation);
  const int64_t dout = gemm.dout, width = act.gated ? dout / 2 : dout;
  const int64_t out_bytes = width * kind.size, pre_bytes = dout * kind.size;
  expect_pages(out, rows * out_bytes);
  if (pre) expect_pages(pre, rows * pre_bytes);
  // If elements are of type T, the sums are computed in `pre` if it is not null, else in `out` if out = sums + bias.
  const bool plain = Activation(activation) == Activation::none && !pre;
  T* sums_out = kind.same_type && (plain || pre) ? reinterpret_cast<T*>(plain ? out : pre) : nullptr;
  char* const rounded = plain && !bias && kind.in_pairs && !gemm.by_torch ? out : nullptr;
  gemm.run(threads, sums_out, rounded, [&](int64_t e, int64_t row, T* p) {
    if (bias) kind.add(p, bias + e * pre_bytes, dout);
    if (plain && sums_out) return;
    if (pre && !sums_out) kind.narrow(pre + row * pre_bytes, p, dout);
    char* to = out + row * out_bytes;
    if (kind.same_type) {
      act.value(reinterpret_cast<T*>(to), p, p + width, width);
    } else {
      if (!plain) act.value(p, p, p + width, width);
      kind.narrow(to, p, width);
    }
  });
  clear(out, gemm.groups.used(), rows, out_bytes);
  clear(pre, gemm.groups.used(), rows, pre_bytes);
}

// dW_e = x_e^T grad_e, up to kBlock rows of dW_e at a time; dbias_e = sum of row_weight_r grad_r over the rows r of e.
template <class T>
struct WeightGradient {
  GatheredRows<T> x, grad;
  Groups groups;
  const T* row_weight;  // (R), or nullptr for ones
  char *dweight, *dbias;
  int64_t din, dout;

  void run(int threads) const {
    const Elements<T>& kind = x.kind;
    const int64_t block_rows = share_of(groups.num_experts * din, kBlock, threads);
    const int64_t blocks = std::max<int64_t>(1, panels_of(din, block_rows));
    expect_pages(dweight, groups.num_experts * din * dout * kind.size);
    // Scratch: a panel of rows (or pairs of rows) of grad, kBlock columns of the same rows of x, and kBlock rows of dW.
    const int64_t depth = kind.in_pairs ? kPairDepth : kDepth;
    const Scratch<T> scratch(threads, depth * (kPanel<T> + kBlock) + kBlock * dout);
    std::atomic<int64_t> next{0};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; ++thread) {
      T *panel = scratch.of(thread), *block = panel + depth * kPanel<T>, *scratch_sums = block + depth * kBlock;
      for (int64_t i = next++; i < groups.num_experts * blocks; i = next++) {
        const int64_t e = i / blocks, start = i % blocks * block_rows, count = std::min(block_rows, din - start);
        char* to = dweight + (e * din + start) * dout * kind.size;
        if (kind.in_pairs) {
          if constexpr (kPairs<T>)
            multiply_pairs(e, start, count, to, scratch_sums, reinterpret_cast<Bf16Pair*>(panel),
                           reinterpret_cast<Bf16Pair*>(block));
        } else {
          multiply(e, start, count, kind.same_type ? reinterpret_cast<T*>(to) : scratch_sums, panel, block);
        }
        if (!kind.same_type && !kind.in_pairs) kind.narrow(to, scratch_sums, count * dout);
        if (dbias != nullptr && start == 0) column_sums(e, scratch_sums);
      }
    }
  }

  void multiply(int64_t e, int64_t start, int64_t count, T* sums, T* panel, T* block) const {
    const int64_t rows = groups.rows(e);
    if (rows == 0) std::fill(sums, sums + count * dout, T(0));
    // If in place, the tiles of the first panel pack x into block.
    const bool in_place = x.kind.same_type && x.token == nullptr;
    for (int64_t k = 0; k < rows && count > 0; k += kDepth) {
      const int64_t depth = std::min(kDepth, rows - k), row = groups.first(e) + k, next = row + depth;
      const int64_t more = std::min(kDepth, groups.used() - next);
      Prefetcher prefetcher{
          {grad.piece(next, more, dout)}, steps_of<T>(count, depth, dout), x.kind.same_type && k == 0};
      if (in_place && k + depth < rows) {  // columns [start, start + count) of the next rows
        const int64_t size = x.kind.size;
        prefetcher.prefetch(0, x.x + (next * x.stride + start) * size, x.stride * size, count * size + 64);
      } else {
        prefetcher.pieces[1] = x.piece(next, more, din);
      }
      for (int64_t i = in_place ? count - count % kTileRows : 0; i < count; i += kPackRows - i % kPackRows)
        x.copy(block + (i - i % kPackRows) * depth + i % kPackRows, kPackRows, row, depth, start + i,
               std::min<int64_t>(kPackRows - i % kPackRows, count - i));
      for (int64_t j = 0; j < dout; j += kPanel<T>) {
        const int64_t columns = std::min<int64_t>(kPanel<T>, dout - j);
        const bool whole = grad.kind.same_type && grad.token == nullptr && fills_panel<T>(columns, count, grad.stride);
        const T* b = whole ? reinterpret_cast<const T*>(grad.x) + row * grad.stride + j : panel;
        if (!whole && columns < kPanel<T>) std::fill(panel, panel + depth * kPanel<T>, T(0));
        if (!whole) grad.copy(panel, kPanel<T>, row, depth, j, columns);
        const Left<T> packed{block, 1, kPackRows};
        const Left<T> unpacked{reinterpret_cast<const T*>(x.x) + row * x.stride + start, 1, x.stride, block};
        const Left<T>& left = in_place && j == 0 ? unpacked : packed;
        PanelProduct<T>{left, b, grad.stride, panel, depth, sums + j, dout, count, columns, k > 0}.run(prefetcher);
      }
    }
  }

  // As multiply, for bfloat16, two rows at a time (pairs.h). `to` receives dW in bfloat16; `sums` is scratch.
  void multiply_pairs(int64_t e, int64_t start, int64_t count, char* to, T* sums, Bf16Pair* panel,
                      Bf16Pair* block) const {
    const int64_t rows = groups.rows(e), pairs = pairs_of(rows);
    if (rows == 0 && count > 0) std::memset(to, 0, size_t(2 * count * dout));
    for (int64_t k = 0; k < pairs && count > 0; k += kPairDepth) {
      const int64_t depth = std::min(kPairDepth, pairs - k), row = groups.first(e) + 2 * k;
      const int64_t used_rows = std::min(2 * depth, rows - 2 * k), next = row + used_rows;
      const int64_t more = std::min(2 * kPairDepth, groups.used() - next);
      const bool last = k + depth == pairs;
      Prefetcher prefetcher{
          {grad.piece(next, more, dout), x.piece(next, more, din)}, steps_of<T>(count, depth, dout), last};
      if (!last) x.prefetch_pairs(prefetcher, 2, next, start, count + 32);
      else x.prefetch_pairs(prefetcher, 2, groups.first(e), start + count, count + 32);  // for the next block of dW
      for (int64_t r = 0; r < used_rows; r += kPairedRows)
        for (int64_t i = 0; i < count; i += kPackRows)
          x.pair(block + i * depth + r / 2 * kPackRows, kPackRows, row + r, std::min(kPairedRows, used_rows - r),
                 start + i, std::min<int64_t>(kPackRows, count - i));
      for (int64_t j = 0; j < dout; j += kPanel<T>) {
        const int64_t columns = std::min<int64_t>(kPanel<T>, dout - j);
        if (columns < kPanel<T>) std::fill(panel, panel + depth * kPanel<T>, 0);
        grad.pair(panel, kPanel<T>, row, used_rows, j, columns);
        if (j + columns < dout) grad.prefetch_pairs(prefetcher, 0, row, j + columns, kPanel<T>);
        const Left<Bf16Pair> left{block, 1, kPackRows};
        char* const rounded = last ? to + 2 * j : nullptr;
        PanelProduct<T, Bf16Pair>{left, panel, kPanel<T>, panel, depth, sums + j, dout, count, columns, k > 0, rounded}
            .run(prefetcher);
      }
    }
  }

  // dbias_e as a sum of partial sums, of up to kSumRows rows: one running sum would have a larger rounding error.
  void column_sums(int64_t e, T* sums) const {
    T* const partial = sums + dout;
    std::fill(sums, sums + dout, T(0));
    for (int64_t start = groups.first(e); start < groups.first(e + 1); start += kSumRows) {
      std::fill(partial, partial + dout, T(0));
      for (int64_t i = start; i < std::min<int64_t>(start + kSumRows, groups.first(e + 1)); ++i) {
        const int64_t row = grad.token == nullptr ? i : grad.token[i];
        if (row < 0) continue;
        const char* const from = grad.x + row * grad.stride * grad.kind.size;
        if (row_weight == nullptr) grad.kind.add(partial, from, dout);
        else add_times(row_weight[i], partial, from);
      }
      for (int64_t j = 0; j < dout; ++j) sums[j] += partial[j];
    }
    x.kind.narrow(dbias + e * dout * x.kind.size, sums, dout);
  }

  void add_times(T weight, T* sums, const char* from) const {
    alignas(64) T room[kChunk];
    for (int64_t j = 0; j < dout; j += kChunk) {
      const int64_t count = std::min(kChunk, dout - j);
      const T* const values = grad.kind.read(from + j * grad.kind.size, room, count);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) sums[j + i] += weight * values[i];
    }
  }
};

// Columns [j, j + count) of a row of pre. With a gated activation, a row is `width` gates, then `width` linear parts.
template <class T>
struct Chunk {
  const Elements<T>& kind;
  const ActivationRow<T>& act;
  int64_t j, width, count;
  alignas(64) T room[2][kChunk];
  const T *gate, *up;

  Chunk(const Elements<T>& kind, const ActivationRow<T>& act, const char* pre, int64_t width, int64_t j)
      : kind(kind), act(act), j(j), width(width), count(std::min(kChunk, width - j)) {
    gate = kind.read(pre + j * kind.size, room[0], count);
    up = act.gated ? kind.read(pre + (width + j) * kind.size, room[1], count) : nullptr;
  }

  void backward(const T* grad, char* dpre) {
    char *to = dpre + j * kind.size, *to_up = to + width * kind.size;
    if (kind.same_type) return act.slope(reinterpret_cast<T*>(to), reinterpret_cast<T*>(to_up), grad, gate, up, count);
    act.slope(room[0], room[1], grad, gate, up, count);
    kind.narrow(to, room[0], count);
    if (act.gated) kind.narrow(to_up, room[1], count);
  }
};

template <class T>
T dot_of(const GatheredRows<T>& x, int64_t row, const char* with, int64_t dim) {
  const int64_t from = x.token == nullptr ? row : x.token[row];
  if (from < 0) return 0;
  T dot = 0;
  for (int64_t j = 0; j < dim; j += kChunk) {
    const int64_t count = std::min(kChunk, dim - j);
    alignas(64) T room[2][kChunk];
    const T* const a = x.kind.read(x.x + (from * x.stride + j) * x.kind.size, room[0], count);
    const T* const b = x.kind.read(with + j * x.kind.size, room[1], count);
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < count; ++i) dot += a[i] * b[i];
  }
  return dot;
}

// For each row, with h = act(pre), w = row_weight, dy = the row of gemm.x and a = dy W_out^T: dpre = w a act'(pre),
// weighted = w h, drow_weight = <h, a> + <b_out, dy>.
template <class T>
void hidden_backward(const GroupedGemm<T>& gemm, const T* row_weight, const char* b_out, const char* pre,
                     int activation, char* dpre, char* weighted, T* drow_weight, int64_t rows, int threads) {
  const Elements<T>& kind = gemm.x.kind;
  const ActivationRow<T> act = activation_of<T>(activation);
  const int64_t hidden = gemm.dout, bytes = hidden * kind.size, pre_bytes = act.gated ? 2 * bytes : bytes;
  gemm.run(threads, nullptr, nullptr, [&](int64_t e, int64_t row, T* a) {
    const T w = row_weight[row];
    T dot = b_out == nullptr ? T(0) : dot_of(gemm.x, row, b_out + e * gemm.din * kind.size, gemm.din);
    for (int64_t j = 0; j < hidden; j += kChunk, a += kChunk) {
      Chunk<T> chunk(kind, act, pre + row * pre_bytes, hidden, j);
      alignas(64) T h[kChunk];
      act.value(h, chunk.gate, chunk.up, chunk.count);
#pragma omp simd reduction(+ : dot)
      for (int64_t i = 0; i < chunk.count; ++i) {
        dot += h[i] * a[i];
        h[i] *= w;
        a[i] *= w;
      }
      chunk.backward(a, dpre + row * pre_bytes);
      kind.narrow(weighted + row * bytes + j * kind.size, h, chunk.count);  // last: `weighted` may be the memory of `a`
    }
    drow_weight[row] = dot;
  });
  clear(dpre, gemm.groups.used(), rows, pre_bytes);
  clear(weighted, gemm.groups.used(), rows, bytes);
  clear(drow_weight, gemm.groups.used(), rows, sizeof(T));
}

// out (rows) = the sums of squares of the results, and `kept` (rows, dout), unless it is null, the results.
template <class T>
void norms(const GroupedGemm<T>& gemm, const char* bias, T* out, char* kept, int64_t rows, int threads) {
  const Elements<T>& kind = gemm.x.kind;
  const int64_t bytes = gemm.dout * kind.size;
  if (kept) expect_pages(kept, rows * bytes);
  gemm.run(threads, nullptr, nullptr, [&](int64_t e, int64_t row, T* y) {
    if (bias) kind.add(y, bias + e * bytes, gemm.dout);
    if (kept) kind.narrow(kept + row * bytes, y, gemm.dout);
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < gemm.dout; ++j) sum += y[j] * y[j];
    out[row] = sum;
  });
  clear(out, gemm.groups.used(), rows, sizeof(T));
  clear(kept, gemm.groups.used(), rows, bytes);
}

// out (tokens, dim) = the sum of each token's rows, added in ascending order. A thread computes up to `share` columns.
// Its scratch has a byte for each token, 1 once a row of the token was added. If elements are not of type T, the sums
// are in scratch too.
template <class T>
void sum_rows(const Elements<T>& kind, const char* rows, const int32_t* token, char* out, int64_t num_rows,
              int64_t tokens, int64_t dim, int threads) {
  const int64_t share = ((dim + threads - 1) / threads + 15) / 16 * 16;
  const Scratch<char> seen_of(threads, (tokens + 63) / 64 * 64);
  const Scratch<T> sums_of(threads, kind.same_type ? 0 : tokens * share);
  expect_pages(out, tokens * dim * kind.size);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int thread = 0; thread < threads; ++thread) {
    const int64_t first = thread * share, count = std::min(share, dim - first);
    if (count <= 0) continue;
    char* seen = seen_of.of(thread);
    T* const sums = kind.same_type ? reinterpret_cast<T*>(out) + first : sums_of.of(thread);
    const int64_t apart = kind.same_type ? dim : share;
    std::memset(seen, 0, size_t(tokens));
    for (int64_t r = 0; r < num_rows; ++r) {
      const int64_t t = token[r];
      if (t < 0) continue;
      T* const sum = sums + t * apart;
      if (r + 1 < num_rows && token[r + 1] >= 0) {
        const T* next = sums + token[r + 1] * apart;
        for (int64_t j = 0; j < count; j += 64 / sizeof(T)) __builtin_prefetch(next + j, 1);
      }
      if (!seen[t]) std::fill(sum, sum + count, T(0)), seen[t] = 1;
      kind.add(sum, rows + (r * dim + first) * kind.size, count);
    }
    for (int64_t t = 0; t < tokens; ++t) {
      T* const sum = sums + t * apart;
      if (!seen[t]) std::fill(sum, sum + count, T(0));
      if (!kind.same_type) kind.narrow(out + (t * dim + first) * kind.size, sum, count);
    }
  }
}

#define MOE_GROUPED_GEMM(T)                                                                                         \
  GroupedGemm<T> {                                                                                                  \
    {elements_of<T>(dtype), static_cast<const char*>(x), x_stride, row_token}, static_cast<const char*>(weight), \
        stride_e, stride_k, stride_j, elements_of<T>(by_torch_dtype), static_cast<char*>(by_torch),                 \
        {expert_offsets, num_experts}, din, dout, by_dots != 0                                                  \
  }

}  // namespace

// x has `tokens` rows. Returns 1 and writes nothing if expert_offsets does not ascend from 0 to at most `rows`, or an
// index in row_token other than -1 is out of range; else 0.
int grouped_gemm_fwd(MOE_GROUPED_GEMM_ARGS, const void* bias, int activation, void* out, void* pre, int64_t rows,
                     int64_t tokens, int threads) {
  if (!Groups{expert_offsets, num_experts}.fit(rows) || !within(row_token, rows, tokens)) return 1;
  with_wide(dtype, [&](auto zero) {
    using T = decltype(zero);
    forward(MOE_GROUPED_GEMM(T), static_cast<const char*>(bias), activation, static_cast<char*>(out),
            static_cast<char*>(pre), rows, threads);
  });
  return 0;
}

// x has x_rows rows, grad grad_rows; x_token and grad_token have `rows` elements. Returns as grouped_gemm_fwd.
int grouped_gemm_bwd_weight(int dtype, const void* x, int64_t x_stride, const int32_t* x_token, int64_t x_rows,
                            const void* grad, int64_t grad_stride, const int32_t* grad_token, int64_t grad_rows,
                            const int32_t* expert_offsets, int64_t num_experts, const void* row_weight, void* dweight,
                            void* dbias, int64_t din, int64_t dout, int64_t rows, int threads) {
  if (!Groups{expert_offsets, num_experts}.fit(rows)) return 1;
  if (!within(x_token, rows, x_rows) || !within(grad_token, rows, grad_rows)) return 1;
  with_wide(dtype, [&](auto zero) {
    using T = decltype(zero);
    const Elements<T> kind = elements_of<T>(dtype);
    const WeightGradient<T> work{{kind, static_cast<const char*>(x), x_stride, x_token},
                                 {kind, static_cast<const char*>(grad), grad_stride, grad_token},
                                 {expert_offsets, num_experts},
                                 static_cast<const T*>(row_weight),
                                 static_cast<char*>(dweight),
                                 static_cast<char*>(dbias),
                                 din,
                                 dout};
    work.run(threads);
  });
  return 0;
}

// Returns 1 and writes nothing if an index in `token` other than -1 is out of range, else 0.
int grouped_gemm_sum_rows(int dtype, const void* rows, const int32_t* token, void* out, int64_t num_rows,
                          int64_t tokens, int64_t dim, int threads) {
  if (!within(token, num_rows, tokens)) return 1;
  with_wide(dtype, [&](auto zero) {
    sum_rows(elements_of<decltype(zero)>(dtype), static_cast<const char*>(rows), token, static_cast<char*>(out),
             num_rows, tokens, dim, threads);
  });
  return 0;
}

void activation_bwd(int dtype, const void* grad, int64_t grad_stride, const void* pre, int activation, void* dpre,
                    int64_t rows, int64_t width, int threads) {
  with_wide(dtype, [&](auto zero) {
    using T = decltype(zero);
    const Elements<T> kind = elements_of<T>(dtype);
    const ActivationRow<T> act = activation_of<T>(activation);
    const int64_t bytes = (act.gated ? 2 : 1) * width * kind.size;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
      const char* from = static_cast<const char*>(grad) + r * grad_stride * kind.size;
      for (int64_t j = 0; j < width; j += kChunk) {
        Chunk<T> chunk(kind, act, static_cast<const char*>(pre) + r * bytes, width, j);
        alignas(64) T room[kChunk];
        chunk.backward(kind.read(from + j * kind.size, room, chunk.count), static_cast<char*>(dpre) + r * bytes);
      }
    }
  });
}

// x, the gradient, has `tokens` rows. Returns as grouped_gemm_fwd.
int expert_mlp_bwd_hidden(MOE_GROUPED_GEMM_ARGS, const void* row_weight, const void* b_out, const void* pre,
                          int activation, void* dpre, void* weighted, void* drow_weight, int64_t rows, int64_t tokens,
                          int threads) {
  if (!Groups{expert_offsets, num_experts}.fit(rows) || !within(row_token, rows, tokens)) return 1;
  with_wide(dtype, [&](auto zero) {
    using T = decltype(zero);
    hidden_backward(MOE_GROUPED_GEMM(T), static_cast<const T*>(row_weight), static_cast<const char*>(b_out),
                    static_cast<const char*>(pre), activation, static_cast<char*>(dpre), static_cast<char*>(weighted),
                    static_cast<T*>(drow_weight), rows, threads);
  });
  return 0;
}

// Returns as grouped_gemm_fwd.
int grouped_gemm_norms(MOE_GROUPED_GEMM_ARGS, const void* bias, void* out, void* kept, int64_t rows, int threads) {
  if (!Groups{expert_offsets, num_experts}.fit(rows)) return 1;
  with_wide(dtype, [&](auto zero) {
    using T = decltype(zero);
    norms(MOE_GROUPED_GEMM(T), static_cast<const char*>(bias), static_cast<T*>(out), static_cast<char*>(kept), rows,
          threads);
  });
  return 0;
}

#undef MOE_GROUPED_GEMM

}  // namespace MOE_ISA
}  // namespace moe
