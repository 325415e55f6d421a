// The gradients of grouped GEMM to weights and bias: for every expert the product of its rows of x, transposed, and of
// grad, where k runs over its rows; and the sum of its rows of grad. Both may be gathered.
#include "moe/block.cuh"
#include "moe/grouped_gemm.cuh"
#include "ops.h"

namespace moe {
namespace {

// For experts that a tile of 128 x 128 would leave few blocks: fewer than the two that each SM of an A100 has room for.
using SmallTile = Tile<64, 64, 32, 2, 2, 16>;
using SmallEvenTile = Tile<64, 64, 32, 2, 2, 4>;
using SmallUnalignedTile = Tile<64, 64, 32, 2, 2, 2>;
constexpr int64_t kFewBlocks = 2 * 108;

template <class T>
struct Gradient {
  const T* x;                     // (R, Din), or (T, Din) with x_token
  int64_t x_stride;               // elements from row to row
  const int32_t* x_token;         // (R), or nullptr
  const T* grad;                  // (R, Dout), or (T, Dout) with grad_token
  int64_t grad_stride;            // elements from row to row
  const int32_t* grad_token;      // (R), or nullptr
  const int32_t* expert_offsets;  // (E + 1)
  T* dweight;                     // (E, Din, Dout)
  T* dbias;                       // (E, Dout), or nullptr
  int64_t num_rows, num_experts, din, dout;

  int row_tiles, column_tiles;  // of one expert's Din x Dout, set by `start_tile`
};

// The rows of an expert.
struct Range {
  int64_t first;
  int count;

  __device__ Range(const int32_t* offsets, int expert, int64_t num_rows) {
    first = min(max(int64_t(load(offsets + expert)), int64_t(0)), num_rows);
    count = static_cast<int>(min(max(int64_t(load(offsets + expert + 1)), first), num_rows) - first);
  }
};

// Where a block's tile lies in which expert's gradient.
template <class Tile>
struct Target {
  int expert, m, n;

  __device__ Target(int block, int row_tiles, int column_tiles) {
    expert = block / (row_tiles * column_tiles);
    const Place place(block - expert * row_tiles * column_tiles, row_tiles, column_tiles);
    m = place.row * Tile::kM, n = place.column * Tile::kN;
  }
};

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 2) grouped_gemm_wgrad_kernel(const Gradient<T> call) {
  DYNAMIC_SHARED(T, stages);
  int block = blockIdx.x;
  const Target<Tile> from(block, call.row_tiles, call.column_tiles);
  const Range range(call.expert_offsets, from.expert, call.num_rows);
  const int din = static_cast<int>(call.din), dout = static_cast<int>(call.dout);
  const auto rows_of = [&](const T* matrix, int64_t stride, const int32_t* token) {
    return token ? matrix : matrix + range.first * stride;
  };
  const auto list_of = [&](const int32_t* token) { return token ? token + range.first : nullptr; };
  GatheredAcrossK<T, Tile, Tile::kM> a(rows_of(call.x, call.x_stride, call.x_token), call.x_stride,
                                       list_of(call.x_token), from.m, din, range.count);
  GatheredAcrossK<T, Tile, Tile::kN> b(rows_of(call.grad, call.grad_stride, call.grad_token), call.grad_stride,
                                       list_of(call.grad_token), from.n, dout, range.count);
  typename Tile::Sums sums = {};
  multiply<T, Tile>(stages, a, b, range.count, sums);

  recompute(block);  // its registers are worth more to the product
  const auto [expert, m, n] = Target<Tile>(block, call.row_tiles, call.column_tiles);
  float* const staged_sums = reinterpret_cast<float*>(stages);
  stage_sums<Tile>(staged_sums, sums);
  constexpr int kPieces = Tile::kN / kPiece;
  const bool wide = dout % kPiece == 0;
  T* const dweight = call.dweight + expert * call.din * call.dout;
  for (int i = threadIdx.x; i < Tile::kM * kPieces; i += Tile::kThreads) {
    const int row = i / kPieces, c = i % kPieces * kPiece;
    if (m + row >= din || n + c >= dout) continue;
    Piece values;
    read_sums(staged_sums + row * Tile::kPitch + c, values);
    write_piece(dweight + int64_t(m + row) * dout + n + c, dout - n - c, wide, values);
  }
}

// A block adds up 64 columns of an expert's rows of grad: 8 threads along the columns and 32 down the rows, which meet
// once, in the order of the threads.
constexpr int kBiasThreads = 256, kBiasPieces = 8, kBiasColumns = kBiasPieces * kPiece;
constexpr int kBiasRows = kBiasThreads / kBiasPieces;
constexpr int kBiasBlocks = 5;  // for one SM: left to itself the compiler makes room for 8 and spills

template <class T>
__global__ void __launch_bounds__(kBiasThreads, kBiasBlocks)
    grouped_gemm_bias_kernel(const Gradient<T> call, bool wide) {
  SHARED(float, partial, [kBiasRows][kBiasColumns]);
  const int tiles = call.column_tiles, expert = blockIdx.x / tiles, dout = static_cast<int>(call.dout);
  const int piece = threadIdx.x % kBiasPieces, down = threadIdx.x / kBiasPieces;
  const int first_column = (blockIdx.x - expert * tiles) * kBiasColumns, left = dout - first_column - piece * kPiece;
  const Range range(call.expert_offsets, expert, call.num_rows);
  Piece sums = {};
  for (int i = down; i < range.count; i += kBiasRows) {
    const int64_t row = call.grad_token ? load(call.grad_token + range.first + i) : range.first + i;
    if (row < 0) continue;
    Piece values;
    read_piece(call.grad + row * call.grad_stride + first_column + piece * kPiece, left, wide, values);
#pragma unroll
    for (int d = 0; d < kPiece; d++) sums[d] += values[d];
  }
#pragma unroll
  for (int d = 0; d < kPiece; d++) partial[down][piece * kPiece + d] = sums[d];
  __syncthreads();
  const int column = threadIdx.x;
  if (column >= kBiasColumns || first_column + column >= dout) return;
  float sum = 0.0f;
  for (int r = 0; r < kBiasRows; r++) sum += partial[r][column];
  narrow(sum, call.dbias[expert * call.dout + first_column + column]);
}

template <class T>
int64_t blocks(const Gradient<T>& call, int64_t m, int64_t n) {
  return call.num_experts * ((call.din + m - 1) / m) * ((call.dout + n - 1) / n);
}

template <class T, class Tile>
cudaError_t start_tile(Gradient<T> call, cudaStream_t stream) {
  const int64_t grid = blocks(call, Tile::kM, Tile::kN);
  if (grid > INT32_MAX) return cudaErrorInvalidValue;
  call.row_tiles = static_cast<int>((call.din + Tile::kM - 1) / Tile::kM);
  call.column_tiles = static_cast<int>((call.dout + Tile::kN - 1) / Tile::kN);
  return launch(grouped_gemm_wgrad_kernel<T, Tile>, dim3(static_cast<unsigned>(grid)), Tile::kThreads,
                Tile::kSharedBytes, stream, call);
}

template <class T>
cudaError_t start(Gradient<T> call, cudaStream_t stream) {
  constexpr int64_t kSize = sizeof(T);
  const bool wide_grad = rows_divide(16, 0, {call.grad_stride * kSize}, {call.grad});
  if (call.din > 0) {
    const auto divides = [&](int64_t bytes) {  // where rows start and end
      return rows_divide(bytes, call.din * kSize, {call.dout * kSize, call.x_stride * kSize, call.grad_stride * kSize},
                         {call.x, call.grad});
    };
    const bool few = blocks(call, LargeTile::kM, LargeTile::kN) < kFewBlocks;
    const cudaError_t error = !divides(4)    ? start_tile<T, SmallUnalignedTile>(call, stream)
                              : !divides(16) ? start_tile<T, SmallEvenTile>(call, stream)
                              : few          ? start_tile<T, SmallTile>(call, stream)
                                             : start_tile<T, LargeTile>(call, stream);
    if (error != cudaSuccess) return error;
  }
  if (!call.dbias) return cudaSuccess;
  const int64_t grid = call.num_experts * ((call.dout + kBiasColumns - 1) / kBiasColumns);
  if (grid > INT32_MAX) return cudaErrorInvalidValue;
  call.column_tiles = static_cast<int>(grid / call.num_experts);
  return launch(grouped_gemm_bias_kernel<T>, dim3(static_cast<unsigned>(grid)), kBiasThreads, 0, stream, call,
                wide_grad);
}

}  // namespace

cudaError_t grouped_gemm_bwd_weight(int dtype, const void* x, int64_t x_stride, const int32_t* x_token,
                                    const void* grad, int64_t grad_stride, const int32_t* grad_token,
                                    const int32_t* expert_offsets, void* dweight, void* dbias, int64_t num_rows,
                                    int64_t num_experts, int64_t din, int64_t dout, cudaStream_t stream) {
  if (!plausible(num_rows, num_experts, din, dout)) return cudaErrorInvalidValue;
  if (dout == 0) return cudaSuccess;
  return with_16_bits(dtype, [&](auto element) {
    using T = decltype(element);
    return start(Gradient<T>{static_cast<const T*>(x), x_stride, x_token, static_cast<const T*>(grad), grad_stride,
                             grad_token, expert_offsets, static_cast<T*>(dweight), static_cast<T*>(dbias), num_rows,
                             num_experts, din, dout, 0, 0}, stream);
  });
}

}  // namespace moe
