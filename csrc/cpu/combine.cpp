// Combine on the CPU (definition: python_ref/combine.py). A token's rows are added in the order of its choices.

#include "ops.h"

#include <algorithm>
#include <cstring>

#include "moe/cpu/formats.h"
#include "moe/cpu/indices.h"
#include "moe/cpu/pages.h"
#include "moe/cpu/plan_rows.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int64_t kSpan = 256;  // elements of a token computed at a time

template <class F>
void forward(const void* rows, int64_t rows_stride, const void* weights, const int32_t* slot_row, void* y,
             int64_t tokens, int64_t k, int64_t dim, int threads) {
  using Key = typename F::Key;
  using Wide = typename F::Wide;
  const auto* weight = static_cast<const Wide*>(weights);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t start = 0; start < dim; start += kSpan) {
      const int64_t count = std::min(kSpan, dim - start);
      alignas(64) Wide sums[kSpan] = {};
      for (int64_t i = t * k; i < (t + 1) * k; ++i) {
        if (slot_row[i] < 0) continue;
        const Key* row = static_cast<const Key*>(rows) + slot_row[i] * rows_stride + start;
        const Wide w = weight ? weight[i] : Wide(1);
#pragma omp simd
        for (int64_t d = 0; d < count; ++d) sums[d] += w * F::widen(row[d]);
      }
      Key* out = static_cast<Key*>(y) + t * dim + start;
#pragma omp simd
      for (int64_t d = 0; d < count; ++d) out[d] = F::narrow(sums[d]);
    }
  }
}

template <class F>
void backward(const void* grad, int64_t grad_stride, const void* rows, int64_t rows_stride, const void* weights,
              const int32_t* slot_row, int64_t used, void* drows, void* dweights, int64_t tokens, int64_t k,
              int64_t num_rows, int64_t dim, int threads) {
  using Key = typename F::Key;
  using Wide = typename F::Wide;
  expect_pages(drows, num_rows * dim * int64_t(sizeof(Key)));
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static) nowait
    for (int64_t t = 0; t < tokens; ++t) {
      const Key* dy = static_cast<const Key*>(grad) + t * grad_stride;
      for (int64_t i = t * k; i < (t + 1) * k; ++i) {
        Wide dw = 0;
        if (slot_row[i] >= 0) {
          const Key* row = static_cast<const Key*>(rows) + slot_row[i] * rows_stride;
          Key* drow = static_cast<Key*>(drows) + slot_row[i] * dim;
          const Wide w = static_cast<const Wide*>(weights)[i];
#pragma omp simd reduction(+ : dw)
          for (int64_t d = 0; d < dim; ++d) {
            const Wide dy_d = F::widen(dy[d]);
            drow[d] = F::narrow(w * dy_d);
            dw += F::widen(row[d]) * dy_d;
          }
        }
        static_cast<Wide*>(dweights)[i] = dw;
      }
    }
#pragma omp for schedule(static)
    for (int64_t r = used; r < (dim > 0 ? num_rows : used); ++r)
      std::memset(static_cast<Key*>(drows) + r * dim, 0, size_t(dim) * sizeof(Key));
  }
}

}  // namespace

// Returns 1 and writes nothing if an index in slot_row other than -1 is out of range, else 0.
int combine_fwd(int dtype, const void* rows, int64_t rows_stride, const void* weights, const int32_t* slot_row, void* y,
                int64_t tokens, int64_t k, int64_t num_rows, int64_t dim, int threads) {
  if (!within(slot_row, tokens * k, num_rows)) return 1;
  with_format(dtype, [&](auto format) {
    forward<decltype(format)>(rows, rows_stride, weights, slot_row, y, tokens, k, dim, threads);
  });
  return 0;
}

// Returns 1 and writes nothing if slot_row does not name each row in use once, else 0.
int combine_bwd(int dtype, const void* grad, int64_t grad_stride, const void* rows, int64_t rows_stride,
                const void* weights, const int32_t* slot_row, const int32_t* expert_offsets, void* drows,
                void* dweights, int64_t tokens, int64_t k, int64_t num_experts, int64_t num_rows, int64_t dim,
                int threads) {
  const int64_t used = expert_offsets[num_experts];
  if (!names_each_row(slot_row, nullptr, nullptr, tokens, k, used, num_rows)) return 1;
  with_format(dtype, [&](auto format) {
    backward<decltype(format)>(grad, grad_stride, rows, rows_stride, weights, slot_row, used, drows, dweights, tokens,
                               k, num_rows, dim, threads);
  });
  return 0;
}

}  // namespace MOE_ISA
}  // namespace moe
