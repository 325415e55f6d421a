// Backward pass of an expert MLP's hidden units, in the epilogue of a grouped GEMM.
#include "moe/cuda/activation.cuh"
#include "moe/cuda/grouped_gemm.cuh"
#include "ops.h"

namespace moe {
namespace {

// Forward computed h = act(pre), or act(gate) * linear if gated, and y, the sum of w (h W_out + b_out) over a token's
// rows with row weights w. The GEMM computes a = dy W_out^T. The epilogue stores dpre (the gradient to pre), weighted
// (w h), and partial: partial sums of dw = <h, a> + <b_out, dy>.
template <class T>
struct Hidden {
  const T* grad;             // (tokens, D), or (R, D) without row_token: dy
  int64_t grad_stride;
  const int32_t* row_token;  // (R), or nullptr
  Bias<T> b_out;             // (E, D)
  int64_t dim;
  const float* row_weight;  // (R)
  const T* pre;             // (R, H), or (R, 2 H) if gated: all gates, then all linear parts
  int activation;
  T* dpre;         // like pre
  T* weighted;     // (R, H): w h
  float* partial;  // (column tiles, R)
  int64_t num_rows, hidden;
  bool vectorized, vectorized_bias;

  __host__ __device__ static constexpr bool gated_columns() { return false; }

  // This lane's part of <b_out, dy> for a row, where LANES lanes share the row.
  template <int LANES>
  __device__ float bias_share(const TileRows& rows, int row) const {
    const int64_t token = row_token ? load(row_token + rows.first + row) : rows.first + row;
    if (token < 0) return 0.0f;
    float dot = 0.0f;
    for (int d = threadIdx.x % LANES * kPiece; d < dim; d += LANES * kPiece) {
      Piece dy;
      read_piece(grad + token * grad_stride + d, static_cast<int>(dim) - d, vectorized_bias, dy);
      dot += b_out.dot(rows.expert, d, static_cast<int>(dim) - d, vectorized_bias, dy);
    }
    return dot;
  }

  template <class Tile>
  __device__ void operator()(const float* sums, const TileRows& rows, const Columns<Tile::kN>& columns,
                             int column_tile) const {
    constexpr int kPieces = Tile::kN / kPiece;
    const bool gated = is_gated(activation);
    for (int i = threadIdx.x; i < Tile::kM * kPieces; i += Tile::kThreads) {
      const int row = i / kPieces, c = i % kPieces * kPiece, left = row < rows.count ? columns.left(c) : 0;
      const int64_t at = (rows.first + row) * (gated ? 2 : 1) * hidden + columns.at(c);
      Piece a = {}, gate = {}, linear = {};
      float dot = 0.0f;
      if (b_out.values && column_tile == 0 && row < rows.count && rows.expert >= 0)
        dot = bias_share<kPieces>(rows, row);
      if (left > 0 && rows.expert >= 0) {
        const float weight = load(row_weight + rows.first + row);
        read_sums(sums + row * Tile::kPitch + c, a);
        read_piece(pre + at, left, vectorized, gate);
        if (gated) read_piece(pre + at + hidden, left, vectorized, linear);
        with_activation(activation, [&](auto curve) {
#pragma unroll
          for (int d = 0; d < kPiece; d++) {
            const Point point = curve(gate[d]);
            const float h = gated ? point.value * linear[d] : point.value, da = weight * a[d];
            if (d < left) dot = __fmaf_rn(h, a[d], dot);
            gate[d] = gated ? da * linear[d] * point.slope : da * point.slope;
            linear[d] = da * point.value;
            a[d] = weight * h;
          }
        });
      }
      if (left > 0) {
        write_piece(weighted + (rows.first + row) * hidden + columns.at(c), left, vectorized, a);
        write_piece(dpre + at, left, vectorized, gate);
        if (gated) write_piece(dpre + at + hidden, left, vectorized, linear);
      }
      write_row_sum<Tile>(dot, row, rows, column_tile, num_rows, partial);
    }
  }
};

}  // namespace

cudaError_t expert_mlp_bwd_hidden(int dtype, const void* grad, int64_t grad_stride, const int32_t* row_token,
                                  const void* weight, int64_t expert_stride, int64_t weight_stride, int transposed,
                                  const int32_t* expert_offsets, const float* row_weight, const void* b_out,
                                  int64_t b_out_stride, const void* pre, int activation, void* dpre, void* weighted,
                                  float* partial, int64_t num_rows, int64_t num_experts, int64_t dim, int64_t hidden,
                                  cudaStream_t stream) {
  if (!plausible(num_rows, num_experts, dim, hidden) || !is_activation(activation)) return cudaErrorInvalidValue;
  return with_16_bits(dtype, [&](auto element) {
    using T = decltype(element);
    GroupedGemm<T> gemm{};
    gemm.x = static_cast<const T*>(grad), gemm.x_stride = grad_stride, gemm.row_token = row_token;
    gemm.weight = static_cast<const T*>(weight), gemm.transposed = transposed;
    gemm.expert_stride = expert_stride, gemm.weight_stride = weight_stride;
    gemm.expert_offsets = expert_offsets;
    gemm.num_rows = num_rows, gemm.num_experts = num_experts, gemm.din = dim, gemm.dout = hidden;
    const int64_t size = sizeof(T);
    Hidden<T> epilogue{};
    epilogue.grad = gemm.x, epilogue.grad_stride = grad_stride, epilogue.row_token = row_token;
    epilogue.b_out = {static_cast<const T*>(b_out), b_out_stride};
    epilogue.row_weight = row_weight;
    epilogue.pre = static_cast<const T*>(pre), epilogue.activation = activation;
    epilogue.dpre = static_cast<T*>(dpre), epilogue.weighted = static_cast<T*>(weighted), epilogue.partial = partial;
    epilogue.num_rows = num_rows, epilogue.dim = dim, epilogue.hidden = hidden;
    epilogue.vectorized = rows_divide(16, hidden * size, {}, {pre, dpre, weighted});
    epilogue.vectorized_bias =
        rows_divide(16, 0, {grad_stride * size, b_out ? b_out_stride * size : 0}, {grad, b_out});
    return launch_grouped_gemm(gemm, epilogue, stream);
  });
}

}  // namespace moe
