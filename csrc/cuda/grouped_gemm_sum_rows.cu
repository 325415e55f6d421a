// The gradient of a gather: for each token the sum of its rows, in float32 and in the order of by_token. A token's rows
// are not split among threads: that would change the order of the sum.
#include "moe/common/dtypes.h"
#include "moe/cuda/launch.cuh"
#include "moe/cuda/rows.cuh"
#include "ops.h"

namespace moe {
namespace {

// kBatch: rows that a thread loads at the same time. kBlocks: least number of blocks per SM.
constexpr int kBatch = 4, kBlocks = 5;

template <class T, class Vector>
__global__ void __launch_bounds__(kRowThreads, kBlocks)
    token_sums_kernel(const Vector* rows,            // (R, D)
                      int64_t rows_stride,           // vectors from row to row
                      const int32_t* by_token,       // (R): row numbers sorted by token
                      const int32_t* token_offsets,  // (T + 1): where each token's rows start in by_token
                      Vector* out,                   // (tokens, D)
                      int64_t tokens, int vectors) {
  using Elements = Pack<T, Vector>;
  const int64_t token = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= tokens) return;
  const int first = load(token_offsets + token), count = load(token_offsets + token + 1) - first;
  for_pieces(vectors, [&](int v) {
    typename Elements::Floats sums = {};
    const int32_t* next = by_token + first;
    for (int left = count; left > 0; left -= kBatch, next += kBatch) {
      int32_t row[kBatch];
      Vector piece[kBatch];
#pragma unroll
      for (int a = 0; a < kBatch; a++) row[a] = a < left ? load(next + a) : -1;
#pragma unroll
      for (int a = 0; a < kBatch; a++) piece[a] = row[a] >= 0 ? load(rows + row[a] * rows_stride + v) : Vector{};
#pragma unroll
      for (int a = 0; a < kBatch; a++) {
        typename Elements::Floats values;
        Elements::unpack(piece[a], values);
#pragma unroll
        for (int d = 0; d < Elements::kElements; d++) sums[d] += values[d];
      }
    }
    store_streaming(out + token * vectors + v, Elements::pack(sums));
  });
}

template <class T, class Vector>
cudaError_t launch_sums(const void* rows, int64_t rows_stride, const int32_t* by_token, const int32_t* token_offsets,
                        void* out, int64_t tokens, int64_t dim, cudaStream_t stream) {
  constexpr int kElements = Pack<T, Vector>::kElements;
  const int64_t vectors = dim / kElements;
  const RowGrid over(tokens, vectors);
  return launch(token_sums_kernel<T, Vector>, over.grid, over.block, 0, stream, static_cast<const Vector*>(rows),
                rows_stride / kElements, by_token, token_offsets, static_cast<Vector*>(out), tokens,
                static_cast<int>(vectors));
}

}  // namespace

cudaError_t grouped_gemm_sum_rows(int dtype, const void* rows, int64_t rows_stride, const int32_t* by_token,
                                  const int32_t* token_offsets, void* out, int64_t tokens, int64_t dim,
                                  cudaStream_t stream) {
  if (tokens < 0 || tokens > INT32_MAX || dim < 0 || dim > kMaxRow) return cudaErrorInvalidValue;
  if (tokens == 0 || dim == 0) return cudaSuccess;
  const int64_t size = element_size(dtype);
  const bool vectorized = rows_divide(16, dim * size, {rows_stride * size}, {rows, out});
  return with_unit(dtype, vectorized, [&](auto element, auto unit) {
    return launch_sums<decltype(element), decltype(unit)>(rows, rows_stride, by_token, token_offsets, out, tokens, dim,
                                                          stream);
  });
}

}  // namespace moe
