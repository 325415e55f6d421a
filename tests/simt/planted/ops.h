// For tests/test_simt.py: a launcher of a kernel with a bug, which an argument chooses.
#pragma once

#include <driver_types.h>

#include <cstdint>

namespace moe {

enum Bug : int { kNone, kSharedOverrun, kGlobalOverrun, kCopyPastTheEnd, kOverflow, kSkippedBarrier };

// y[r, i] = x[r, (i + 1) % n] for n up to 32. The kernel copies 4 elements of x at a time with cp.async.
cudaError_t rotate(int bug, const float* x /* (rows, n) */, float* y /* (rows, n) */, int64_t rows, int64_t n,
                   cudaStream_t stream);

}  // namespace moe

#define MOE_CUDA_OPS(X) X(rotate)
