// Every CPU operation, declared once per instruction set. Arguments are those of the CUDA launcher of the same name
// (csrc/cuda/ops.h), with a number of threads where that one has a stream.
#pragma once

#include <cstdint>

#include "moe/dtypes.h"

// clang-format off
#define MOE_CPU_OPS(X) X(kwta_fwd) X(kwta_bwd)
// clang-format on

#define MOE_DECLARE_CPU_OPS                                                                                         \
  void kwta_fwd(int dtype, const void* x, int64_t x_stride, const void* values, int64_t values_stride, void* y,    \
                int32_t* bits, uint8_t* mask, int64_t rows, int64_t n, int64_t k, int ties, float quantile,        \
                int threads);                                                                                       \
  void kwta_bwd(int element_size, const void* grad, int64_t grad_stride, const int32_t* bits, void* dx,            \
                int64_t rows, int64_t n, int threads);

namespace moe {
namespace base {
MOE_DECLARE_CPU_OPS
}
namespace avx2 {
MOE_DECLARE_CPU_OPS
}
namespace avx512 {
MOE_DECLARE_CPU_OPS
}
}  // namespace moe
