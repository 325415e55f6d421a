// Squared norms of the rows of x W + b: the epilogue of a grouped GEMM stores only the sum of squares over each tile's
// columns.
#include "moe/cuda/grouped_gemm.cuh"
#include "ops.h"

namespace moe {
namespace {

template <class T>
struct Norms {
  Bias<T> bias;
  float* partial;  // (column tiles, R)
  int64_t num_rows;
  bool vectorized;

  __host__ __device__ static constexpr bool gated_columns() { return false; }

  template <class Tile>
  __device__ void operator()(const float* sums, const TileRows& rows, const Columns<Tile::kN>& columns,
                             int column_tile) const {
    constexpr int kPieces = Tile::kN / kPiece;
    for (int i = threadIdx.x; i < Tile::kM * kPieces; i += Tile::kThreads) {
      const int row = i / kPieces, c = i % kPieces * kPiece, left = row < rows.count ? columns.left(c) : 0;
      float square = 0.0f;
      if (left > 0) {
        Piece values;
        read_sums(sums + row * Tile::kPitch + c, values);
        bias.add(rows.expert, columns.at(c), left, vectorized, values);
#pragma unroll
        for (int d = 0; d < kPiece; d++) {  // past the last column, values are x times zeros: NaN if x is infinite
          if (d < left) square = __fmaf_rn(values[d], values[d], square);
        }
      }
      write_row_sum<Tile>(square, row, rows, column_tile, num_rows, partial);
    }
  }
};

}  // namespace

cudaError_t grouped_gemm_norms(int dtype, const void* rows, int64_t rows_stride, const void* weight,
                               int64_t expert_stride, int64_t weight_stride, int transposed,
                               const int32_t* expert_offsets, const void* bias, int64_t bias_stride, float* partial,
                               int64_t num_rows, int64_t num_experts, int64_t din, int64_t dout, cudaStream_t stream) {
  if (!plausible(num_rows, num_experts, din, dout)) return cudaErrorInvalidValue;
  return with_16_bits(dtype, [&](auto element) {
    using T = decltype(element);
    GroupedGemm<T> gemm{};
    gemm.x = static_cast<const T*>(rows), gemm.x_stride = rows_stride, gemm.row_token = nullptr;
    gemm.weight = static_cast<const T*>(weight), gemm.transposed = transposed;
    gemm.expert_stride = expert_stride, gemm.weight_stride = weight_stride;
    gemm.expert_offsets = expert_offsets;
    gemm.num_rows = num_rows, gemm.num_experts = num_experts, gemm.din = din, gemm.dout = dout;
    const bool vectorized = rows_divide(16, 0, {bias ? bias_stride * int64_t(sizeof(T)) : 0}, {bias});
    const Norms<T> epilogue{{static_cast<const T*>(bias), bias_stride}, partial, num_rows, vectorized};
    return launch_grouped_gemm(gemm, epilogue, stream);
  });
}

}  // namespace moe
