// For tests/machine/test_simt.py: the launcher of a kernel into which the argument `bug` puts a bug.
#pragma once

#include <driver_types.h>

#include <cstdint>

namespace moe {

enum Bug : int { kNone, kSharedOverrun, kGlobalOverrun, kCopyPastTheEnd, kOverflow, kSkippedBarrier };

// y[r, i] = x[r, (i + 1) % n] for n up to 32.
cudaError_t rotate(int bug, const float* x /* (rows, n) */, float* y /* (rows, n) */, int64_t rows, int64_t n,
                   cudaStream_t stream);

}  // namespace moe

#define MOE_CUDA_OPS(X) X(rotate)
