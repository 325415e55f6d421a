// Combine: the weighted sum of a token's rows, in float32 and in the order of the token's choices; and its gradients.
#include "moe/common/dtypes.h"
#include "moe/cuda/block.cuh"
#include "moe/cuda/launch.cuh"
#include "moe/cuda/rows.cuh"
#include "ops.h"

namespace moe {
namespace {

// kBatch: rows that a thread loads at the same time. kChoices: choices that a backward block handles in one pass over
// its token's row of the gradient.
constexpr int kBatch = 4, kChoices = 32;

// Least number of blocks per SM; a thread may then use 48 registers.
constexpr int kBlocks = 5;

// For kBatch choices of a token: the row, the weight, and vector `v` of the row (zeros unless `inside`). For a dropped
// choice or a choice past `count`: row -1, weight 0 and zeros.
template <class Vector>
struct Batch {
  int32_t row[kBatch];
  float weight[kBatch];
  Vector piece[kBatch];

  __device__ Batch(const Vector* rows,       // (R, D)
                   int64_t rows_stride,      // vectors from row to row
                   const int32_t* slot_row,  // (count), of one token
                   const float* weights,     // (count), or nullptr: ones
                   int count, int v, bool inside) {
#pragma unroll
    for (int a = 0; a < kBatch; a++) row[a] = a < count ? load(slot_row + a) : -1;
#pragma unroll
    for (int a = 0; a < kBatch; a++) {
      piece[a] = row[a] >= 0 && inside ? load(rows + row[a] * rows_stride + v) : Vector{};
    }
#pragma unroll
    for (int a = 0; a < kBatch; a++) weight[a] = row[a] < 0 ? 0.0f : weights ? load(weights + a) : 1.0f;
  }
};

template <class T, class Vector>
__global__ void __launch_bounds__(kRowThreads, kBlocks)
    combine_kernel(const Vector* rows,       // (R, D)
                   int64_t rows_stride,      // vectors from row to row
                   const float* weights,     // (tokens, K), or nullptr
                   const int32_t* slot_row,  // (tokens, K)
                   Vector* y,                // (tokens, D)
                   int64_t tokens, int k, int vectors) {
  using Elements = Pack<T, Vector>;
  const int64_t token = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= tokens) return;
  slot_row += token * k;
  if (weights) weights += token * k;
  for_pieces(vectors, [&](int v) {
    typename Elements::Floats sums = {};
    for (int i = 0; i < k; i += kBatch) {
      const Batch<Vector> batch(rows, rows_stride, slot_row + i, weights ? weights + i : nullptr, k - i, v, true);
#pragma unroll
      for (int a = 0; a < kBatch; a++) {
        typename Elements::Floats values;
        Elements::unpack(batch.piece[a], values);
#pragma unroll
        for (int d = 0; d < Elements::kElements; d++) sums[d] = __fmaf_rn(batch.weight[a], values[d], sums[d]);
      }
    }
    store_streaming(y + token * vectors + v, Elements::pack(sums));
  });
}

// A block takes one token, kChoices choices at a time. The warps' parts of <row, dy> are added in a fixed order.
template <class T, class Vector>
__global__ void __launch_bounds__(kRowThreads, kBlocks)
    combine_bwd_kernel(const Vector* grad,             // (tokens, D)
                       int64_t grad_stride,            // vectors from token to token
                       const Vector* rows,             // (R, D)
                       int64_t rows_stride,            // vectors from row to row
                       const float* weights,           // (tokens, K)
                       const int32_t* slot_row,        // (tokens, K)
                       const int32_t* expert_offsets,  // (E + 1)
                       Vector* drows,                  // (R, D)
                       float* dweights,                // (tokens, K)
                       int k, int num_experts, uint32_t num_rows, int vectors) {
  using Elements = Pack<T, Vector>;
  __shared__ float partial[kChoices][kRowThreads / kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int64_t token = blockIdx.x;
  grad += token * grad_stride, slot_row += token * k, weights += token * k, dweights += token * k;

  for (int first = 0; first < k; first += kChoices) {
    const int last = min(first + kChoices, k);
    if (first > 0) __syncthreads();
    if (lane < kChoices) partial[lane][warp] = 0.0f;
    __syncwarp();
    for (int start = 0; start < vectors; start += blockDim.x) {
      const int v = start + threadIdx.x;
      const bool inside = v < vectors;
      typename Elements::Floats dy;
      Elements::unpack(inside ? load(grad + v) : Vector{}, dy);
      for (int i = first; i < last; i += kBatch) {
        const Batch<Vector> batch(rows, rows_stride, slot_row + i, weights + i, last - i, v, inside);
#pragma unroll
        for (int a = 0; a < kBatch; a++) {
          if (uint32_t(batch.row[a]) >= num_rows) continue;  // -1, or a row that a stale plan has past the last one
          typename Elements::Floats values, drow;
          Elements::unpack(batch.piece[a], values);
          float dot = 0.0f;
#pragma unroll
          for (int d = 0; d < Elements::kElements; d++) {
            drow[d] = batch.weight[a] * dy[d];
            dot = __fmaf_rn(values[d], dy[d], dot);
          }
          if (inside) store_streaming(drows + batch.row[a] * int64_t(vectors) + v, Elements::pack(drow));
          dot = warp_sum(dot);
          if (lane == 0) partial[i - first + a][warp] += dot;
        }
      }
    }
    __syncthreads();
    for (int i = first + threadIdx.x; i < last; i += blockDim.x) {
      float sum = 0.0f;
      for (int w = 0; w < warps; w++) sum += partial[i - first][w];
      dweights[i] = sum;
    }
  }
  clear_rows(drows, load(expert_offsets + num_experts), num_rows, vectors, token, gridDim.x);
}

struct Forward {
  const void* rows;
  int64_t rows_stride;
  const void* weights;
  const int32_t* slot_row;
  void* y;
  int64_t tokens, k, dim;
};

struct Backward {
  const void* grad;
  int64_t grad_stride;
  const void* rows;
  int64_t rows_stride;
  const void* weights;
  const int32_t *slot_row, *expert_offsets;
  void *drows, *dweights;
  int64_t tokens, k, num_experts, num_rows, dim;
};

template <class T, class Vector>
cudaError_t launch_combine(const Forward& c, cudaStream_t stream) {
  constexpr int kElements = Pack<T, Vector>::kElements;
  const int64_t vectors = c.dim / kElements;
  const RowGrid over(c.tokens, vectors);
  return launch(combine_kernel<T, Vector>, over.grid, over.block, 0, stream, static_cast<const Vector*>(c.rows),
                c.rows_stride / kElements, static_cast<const float*>(c.weights), c.slot_row,
                static_cast<Vector*>(c.y), c.tokens, static_cast<int>(c.k), static_cast<int>(vectors));
}

template <class T, class Vector>
cudaError_t launch_combine(const Backward& c, cudaStream_t stream) {
  constexpr int kElements = Pack<T, Vector>::kElements;
  const int64_t vectors = c.dim / kElements;
  const int warps = (threads_along(vectors) + kWarpSize - 1) / kWarpSize;
  return launch(combine_bwd_kernel<T, Vector>, dim3(static_cast<unsigned>(c.tokens)), dim3(warps * kWarpSize), 0,
                stream, static_cast<const Vector*>(c.grad), c.grad_stride / kElements,
                static_cast<const Vector*>(c.rows), c.rows_stride / kElements, static_cast<const float*>(c.weights),
                c.slot_row, c.expert_offsets, static_cast<Vector*>(c.drows), static_cast<float*>(c.dweights),
                static_cast<int>(c.k), static_cast<int>(c.num_experts), static_cast<uint32_t>(c.num_rows),
                static_cast<int>(vectors));
}

template <class Call>
cudaError_t launch_combine(int dtype, bool vectorized, const Call& call, cudaStream_t stream) {
  return with_unit(dtype, vectorized, [&](auto element, auto unit) {
    return launch_combine<decltype(element), decltype(unit)>(call, stream);
  });
}

bool plausible(int64_t tokens, int64_t k, int64_t num_rows, int64_t dim) {
  return tokens >= 0 && tokens <= INT32_MAX && k >= 0 && num_rows >= 0 && num_rows <= INT32_MAX &&
         dim >= 0 && dim <= kMaxRow;
}

}  // namespace

cudaError_t combine_fwd(int dtype, const void* rows, int64_t rows_stride, const void* weights, const int32_t* slot_row,
                        void* y, int64_t tokens, int64_t k, int64_t num_rows, int64_t dim, cudaStream_t stream) {
  if (!plausible(tokens, k, num_rows, dim)) return cudaErrorInvalidValue;
  if (tokens == 0 || dim == 0) return cudaSuccess;
  const int64_t size = element_size(dtype);
  const bool vectorized = rows_divide(16, dim * size, {rows_stride * size}, {rows, y});
  Forward call{};
  call.rows = rows, call.rows_stride = rows_stride;
  call.weights = weights;
  call.slot_row = slot_row;
  call.y = y;
  call.tokens = tokens, call.k = k, call.dim = dim;
  return launch_combine(dtype, vectorized, call, stream);
}

cudaError_t combine_bwd(int dtype, const void* grad, int64_t grad_stride, const void* rows, int64_t rows_stride,
                        const void* weights, const int32_t* slot_row, const int32_t* expert_offsets, void* drows,
                        void* dweights, int64_t tokens, int64_t k, int64_t num_experts, int64_t num_rows, int64_t dim,
                        cudaStream_t stream) {
  if (!plausible(tokens, k, num_rows, dim) || num_experts < 1) return cudaErrorInvalidValue;
  if (tokens == 0) return cudaSuccess;
  const int64_t size = element_size(dtype);
  const bool vectorized = rows_divide(16, dim * size, {grad_stride * size, rows_stride * size}, {grad, rows, drows});
  Backward call{};
  call.grad = grad, call.grad_stride = grad_stride;
  call.rows = rows, call.rows_stride = rows_stride;
  call.weights = weights;
  call.slot_row = slot_row, call.expert_offsets = expert_offsets;
  call.drows = drows, call.dweights = dweights;
  call.tokens = tokens, call.k = k, call.num_experts = num_experts, call.num_rows = num_rows, call.dim = dim;
  return launch_combine(dtype, vectorized, call, stream);
}

}  // namespace moe
