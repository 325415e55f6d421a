// Launchers of kernels with a planted bug each: `bug` chooses it, and 0 is the corrected twin. Then the probes, which
// show how the tensor-core instructions lay out their fragments, here as on a GPU.
#pragma once

#include <driver_types.h>

#include <cstdint>

namespace moe {

enum Bug : int {
  kNone = 0,
  // histogram
  kNoBarrierAfterZeroing = 1,
  kNoBarrierBeforeReading = 2,
  kSpin = 21,
  // row_sum
  kNoBarrierAfterWarpSums = 4,
  kDivergentBarrier = 5,
  kReturnBeforeBarrier = 6,
  kTwoBarriers = 7,
  kTwoBlocksOneWord = 8,
  // rotate
  kNoSyncwarp = 9,
  kLaneSkipsCollective = 10,
  kLaneReturned = 11,
  kShuffleFromOutside = 12,
  kSharedOverrun = 13,
  kGlobalOverrun = 14,
  // pipeline
  kWaitOneTooFew = 15,
  kNoBarrierAfterWait = 16,
  kNoBarrierBeforeReuse = 17,
  kCopyPastTheEnd = 18,
  kPendingAtReturn = 19,
  // load_rows
  kMisalignedRow = 20,
};

// counts[v] = how often v in 0..63 occurs in x.
cudaError_t histogram(int bug, const int32_t* x /* (n) */, int32_t* counts /* (64) */, int64_t n, cudaStream_t stream);

// y[r] = sum of row r.
cudaError_t row_sum(int bug, const float* x /* (rows, 128) */, float* y /* (rows) */, int64_t rows,
                    cudaStream_t stream);

// Each row of up to 32 elements moved one place to the left, the first to the end.
cudaError_t rotate(int bug, const float* x /* (rows, n) */, float* y /* (rows, n) */, int64_t rows, int64_t n,
                   cudaStream_t stream);

// y[i] = sum over t of x[256 t + 255 - i], of which x has only the first n elements.
cudaError_t pipeline(int bug, const float* x /* (n) */, float* y /* (256) */, int64_t n, cudaStream_t stream);

// The fragments that ldmatrix makes of `count` 8 x 8 matrices, whose rows follow each other in x.
cudaError_t load_rows(int bug, int count, int transposed, const uint16_t* x /* (count * 8, 8) */,
                      uint32_t* fragments /* (32, count) */, cudaStream_t stream);

// One mma.m16n8k16 a block. dtype: bfloat16 or float16.
cudaError_t multiply(int dtype, const uint32_t* a /* (blocks, 32, 4) */, const uint32_t* b /* (blocks, 32, 2) */,
                     float* c /* (blocks, 32, 4): added to */, int64_t blocks, cudaStream_t stream);

// Every warp collective once, on half warps; y (32, 8).
cudaError_t collectives(const int32_t* x /* (32) */, int32_t* y, cudaStream_t stream);

}  // namespace moe

#define MOE_CUDA_OPS(X) X(histogram) X(row_sum) X(rotate) X(pipeline) X(load_rows) X(multiply) X(collectives)
