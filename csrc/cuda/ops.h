// Every launcher of csrc/cuda. A launcher starts its kernels on `stream` and returns what the launch said; it waits for
// nothing and allocates nothing. Arguments are pointers, int64_t, int and float, and the stream comes last: the Python
// module and the host build (tests/simt) make their tables from MOE_CUDA_OPS at the end.
#pragma once

#include <driver_types.h>

#include <cstdint>

namespace moe {

// k-winner-take-all: y = values where x is among the k largest of its row, else +0.
cudaError_t kwta_fwd(int dtype,
                     const void* x,  // (rows, n), last dimension contiguous
                     int64_t x_stride,    // elements from row to row
                     const void* values,  // (rows, n) like x, or nullptr: x itself
                     int64_t values_stride,
                     void* y,        // (rows, n) contiguous, or nullptr
                     int32_t* bits,  // (rows, ceil(n / 32)): bit i of word w for element 32 w + i; or nullptr
                     uint8_t* mask,  // (rows, n) of 0 and 1, or nullptr
                     int64_t rows, int64_t n, int64_t k,
                     int ties,  // 0 index, 1 strict, 2 all
                     float z,   // standard normal quantile of 1 - k / n, where the search for the threshold starts
                     cudaStream_t stream);

// dx = grad where the bit is set, else +0: whatever stands in grad there.
cudaError_t kwta_bwd(int element_size,      // 2 or 4 bytes
                     const void* grad,      // (rows, n), last dimension contiguous
                     int64_t grad_stride,   // elements from row to row
                     const int32_t* bits,   // (rows, ceil(n / 32))
                     void* dx,              // (rows, n) contiguous
                     int64_t rows, int64_t n, cudaStream_t stream);

}  // namespace moe

#define MOE_CUDA_OPS(X) X(kwta_fwd) X(kwta_bwd)
