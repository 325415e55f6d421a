// Grouped GEMM with bias and activation in its epilogue, and the backward pass of the activation.
#include "moe/cuda/activation.cuh"
#include "moe/cuda/grouped_gemm.cuh"
#include "ops.h"

namespace moe {
namespace {

// Writes the activation of x W + b to `out`, and x W + b to `pre` if `pre` is not null.
template <class T>
struct Activate {
  Bias<T> bias;
  int activation;
  T* out;  // (R, Dout), or (R, Dout / 2) if gated
  T* pre;  // (R, Dout), or nullptr
  int64_t dout;
  bool vectorized;

  __host__ __device__ bool gated_columns() const { return is_gated(activation); }

  template <class Tile>
  __device__ void operator()(const float* sums, const TileRows& rows, const Columns<Tile::kN>& columns, int) const {
    const int pieces = Tile::kN / kPiece / (gated_columns() ? 2 : 1);
    const auto read = [&](int row, int c, Piece& values) {
      read_sums(sums + row * Tile::kPitch + c, values);
      bias.add(rows.expert, columns.at(c), columns.left(c), vectorized, values);
      if (pre) write_piece(pre + (rows.first + row) * dout + columns.at(c), columns.left(c), vectorized, values);
    };
    for (int i = threadIdx.x; i < rows.count * pieces; i += Tile::kThreads) {
      const int row = i / pieces, c = i % pieces * kPiece;
      if (columns.left(c) <= 0) continue;
      Piece values;
      read(row, c, values);
      with_activation(activation, [&](auto curve) {
#pragma unroll
        for (int d = 0; d < kPiece; d++) values[d] = curve(values[d]).value;
      });
      if (gated_columns()) {
        Piece linear;
        read(row, c + Tile::kN / 2, linear);
#pragma unroll
        for (int d = 0; d < kPiece; d++) values[d] *= linear[d];
      }
      T* const to = out + (rows.first + row) * (gated_columns() ? dout / 2 : dout);
      write_piece(to + columns.at(c), columns.left(c), vectorized, values);
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kRowThreads) activation_bwd_kernel(const T* grad,        // (R, H)
                                                                     int64_t grad_stride,
                                                                     const T* pre,         // (R, H); gated: (R, 2 H)
                                                                     T* dpre,              // like pre
                                                                     int activation, int64_t num_rows, int hidden,
                                                                     bool vectorized) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= num_rows) return;
  const bool gated = is_gated(activation);
  const int64_t start = row * (gated ? 2 : 1) * hidden;
  for_pieces((hidden + kPiece - 1) / kPiece, [&](int piece) {
    const int column = piece * kPiece, left = hidden - column;
    Piece dy, gate, linear = {};
    read_piece(grad + row * grad_stride + column, left, vectorized, dy);
    read_piece(pre + start + column, left, vectorized, gate);
    if (gated) read_piece(pre + start + hidden + column, left, vectorized, linear);
    with_activation(activation, [&](auto curve) {
#pragma unroll
      for (int d = 0; d < kPiece; d++) {
        const Point point = curve(gate[d]);
        gate[d] = gated ? dy[d] * linear[d] * point.slope : dy[d] * point.slope;
        linear[d] = dy[d] * point.value;
      }
    });
    write_piece(dpre + start + column, left, vectorized, gate);
    if (gated) write_piece(dpre + start + hidden + column, left, vectorized, linear);
  });
}

}  // namespace

cudaError_t grouped_gemm_fwd(int dtype, const void* x, int64_t x_stride, const int32_t* row_token, const void* weight,
                             int64_t expert_stride, int64_t weight_stride, int transposed,
                             const int32_t* expert_offsets, const void* bias, int64_t bias_stride, int activation,
                             void* out, void* pre, int64_t num_rows, int64_t num_experts, int64_t din, int64_t dout,
                             cudaStream_t stream) {
  if (!plausible(num_rows, num_experts, din, dout) || !is_activation(activation)) return cudaErrorInvalidValue;
  if (is_gated(activation) && dout % 2 != 0) return cudaErrorInvalidValue;
  return with_16_bits(dtype, [&](auto element) {
    using T = decltype(element);
    const bool gated = is_gated(activation);
    GroupedGemm<T> gemm{};
    gemm.x = static_cast<const T*>(x), gemm.x_stride = x_stride, gemm.row_token = row_token;
    gemm.weight = static_cast<const T*>(weight), gemm.transposed = transposed;
    gemm.expert_stride = expert_stride, gemm.weight_stride = weight_stride;
    gemm.expert_offsets = expert_offsets;
    gemm.num_rows = num_rows, gemm.num_experts = num_experts, gemm.din = din, gemm.dout = dout;
    const int64_t row_bytes = dout / (gated ? 2 : 1) * int64_t(sizeof(T));
    const bool vectorized = rows_divide(16, row_bytes, {bias ? bias_stride * int64_t(sizeof(T)) : 0}, {bias, out, pre});
    Activate<T> epilogue{};
    epilogue.bias = {static_cast<const T*>(bias), bias_stride};
    epilogue.activation = activation;
    epilogue.out = static_cast<T*>(out), epilogue.pre = static_cast<T*>(pre);
    epilogue.dout = dout;
    epilogue.vectorized = vectorized;
    return launch_grouped_gemm(gemm, epilogue, stream);
  });
}

cudaError_t activation_bwd(int dtype, const void* grad, int64_t grad_stride, const void* pre, int activation,
                           void* dpre, int64_t num_rows, int64_t hidden, cudaStream_t stream) {
  if (num_rows < 0 || num_rows > INT32_MAX || hidden < 0 || hidden > kMaxRow) return cudaErrorInvalidValue;
  if (!is_activation(activation)) return cudaErrorInvalidValue;
  if (num_rows == 0 || hidden == 0) return cudaSuccess;
  return with_16_bits(dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t size = sizeof(T);
    const bool vectorized = rows_divide(16, hidden * size, {grad_stride * size}, {grad, pre, dpre});
    const RowGrid over(num_rows, (hidden + kPiece - 1) / kPiece);
    return launch(activation_bwd_kernel<T>, over.grid, over.block, 0, stream, static_cast<const T*>(grad), grad_stride,
                  static_cast<const T*>(pre), static_cast<T*>(dpre), activation, num_rows, static_cast<int>(hidden),
                  vectorized);
  });
}

}  // namespace moe
