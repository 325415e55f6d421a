// Dispatch on the CPU (definition: python_ref/dispatch.py).

#include "ops.h"

#include <algorithm>
#include <cstring>

#include "moe/cpu/indices.h"
#include "moe/cpu/pages.h"
#include "moe/cpu/plan_rows.h"
#include "moe/cpu/simd.h"

namespace moe {
namespace MOE_ISA {

// Returns 1 and writes nothing if an index in row_token is out of range, or if slot_row does not name each row in use
// once, at its token; else 0.
int dispatch_fwd(int element_size, const void* x, int64_t x_stride, const int32_t* row_token, const int32_t* slot_row,
                 const int32_t* expert_offsets, void* rows, int64_t tokens, int64_t k, int64_t num_experts,
                 int64_t num_rows, int64_t dim, int threads) {
  const int64_t bytes = dim * element_size, used = expert_offsets[num_experts];
  const auto* from = static_cast<const char*>(x);
  auto* to = static_cast<char*>(rows);
  if (!within(row_token, num_rows, tokens)) return 1;
  if (!names_each_row(slot_row, row_token, nullptr, tokens, k, used, num_rows)) return 1;
  if (bytes == 0) return 0;
  expect_pages(to, num_rows * bytes);
#pragma omp parallel num_threads(threads)
  {
    const RowCopy copy(bytes, num_rows * bytes);
#pragma omp for schedule(static) nowait
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = t * k; i < (t + 1) * k; ++i)
        if (slot_row[i] >= 0) copy(to + slot_row[i] * bytes, from + t * x_stride * element_size);
#pragma omp for schedule(static)
    for (int64_t r = used; r < num_rows; ++r) std::memset(to + r * bytes, 0, size_t(bytes));
  }
  return 0;
}

}  // namespace MOE_ISA
}  // namespace moe
