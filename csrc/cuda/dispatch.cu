// Dispatch: reads each token once and writes it to all of its rows.
#include "moe/cuda/launch.cuh"
#include "moe/cuda/rows.cuh"
#include "ops.h"

namespace moe {
namespace {

template <class Vector>
__global__ void __launch_bounds__(kRowThreads)
    dispatch_kernel(const Vector* x,                // (T, D)
                    int64_t x_stride,               // vectors from token to token
                    const int32_t* slot_row,        // (T, K)
                    const int32_t* expert_offsets,  // (E + 1)
                    Vector* rows,                   // (R, D)
                    int64_t tokens, int k, int num_experts, uint32_t num_rows, int vectors) {
  const int64_t token = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token < tokens) {
    slot_row += token * k;
    x += token * x_stride;
    for_pieces(vectors, [&](int v) {
      const Vector piece = load(x + v);
#pragma unroll 4
      for (int i = 0; i < k; i++) {
        const uint32_t row = load(slot_row + i);  // -1: none. The comparison also keeps a stale plan inside `rows`.
        if (row < num_rows) store_streaming(rows + int64_t(row) * vectors + v, piece);
      }
    });
  }
  clear_rows(rows, load(expert_offsets + num_experts), num_rows, vectors, token, int64_t(gridDim.x) * blockDim.y);
}

template <class Vector>
cudaError_t launch_dispatch(int element_size, const void* x, int64_t x_stride, const int32_t* slot_row,
                            const int32_t* expert_offsets, void* rows, int64_t tokens, int64_t k, int64_t num_experts,
                            int64_t num_rows, int64_t dim, cudaStream_t stream) {
  const int64_t size = sizeof(Vector), vectors = dim * element_size / size;
  const RowGrid over(tokens, vectors);
  return launch(dispatch_kernel<Vector>, over.grid, over.block, 0, stream, static_cast<const Vector*>(x),
                x_stride * element_size / size, slot_row, expert_offsets, static_cast<Vector*>(rows), tokens,
                static_cast<int>(k), static_cast<int>(num_experts), static_cast<uint32_t>(num_rows), static_cast<int>(vectors));
}

}  // namespace

cudaError_t dispatch_fwd(int element_size, const void* x, int64_t x_stride, const int32_t* /*row_token*/,
                         const int32_t* slot_row, const int32_t* expert_offsets, void* rows, int64_t tokens, int64_t k,
                         int64_t num_experts, int64_t num_rows, int64_t dim, cudaStream_t stream) {
  if (tokens < 0 || tokens > INT32_MAX || k < 0 || num_experts < 1 || num_rows < 0 || num_rows > INT32_MAX) return cudaErrorInvalidValue;
  if (dim < 0 || dim > kMaxRow) return cudaErrorInvalidValue;
  if (element_size != 2 && element_size != 4) return cudaErrorInvalidValue;
  if (num_rows == 0 || dim == 0) return cudaSuccess;
  const auto divides = [&](int64_t bytes) {
    return rows_divide(bytes, dim * element_size, {x_stride * element_size}, {x, rows});
  };
  const auto launch_widest = divides(16)  ? launch_dispatch<uint4>
                             : divides(4) ? launch_dispatch<uint32_t>
                                          : launch_dispatch<uint16_t>;
  return launch_widest(element_size, x, x_stride, slot_row, expert_offsets, rows, tokens, k, num_experts, num_rows, dim,
                       stream);
}

}  // namespace moe
