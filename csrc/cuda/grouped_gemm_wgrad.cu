// The gradients of grouped GEMM to weights and bias, in one launch. Over each expert's rows, dweight is x^T grad, and
// dbias is the sum of the rows of grad, each times its row_weight. The first blocks compute dbias; those that follow take
// the experts in the order of descending numbers of rows, so that no long block is left over at the end.
#include "moe/cuda/block.cuh"
#include "moe/cuda/grouped_gemm.cuh"
#include "moe/cuda/recompute.cuh"
#include "ops.h"

namespace moe {
namespace {

// Replaces LargeTile (gemm.cuh) if large tiles would be fewer than kFewBlocks.
using SmallTile = Tile<64, 64, 32, 2, 2>;
constexpr int64_t kFewBlocks = 2 * 108;  // two for each SM of an A100

template <class T>
struct Gradient {
  const T* x;                     // (R, Din), or (tokens, Din) with x_token
  int64_t x_stride;
  const int32_t* x_token;         // (R), or nullptr
  const T* grad;                  // (R, Dout), or (tokens, Dout) with grad_token
  int64_t grad_stride;
  const int32_t* grad_token;      // (R), or nullptr
  const int32_t* expert_offsets;  // (E + 1)
  const float* row_weight;        // (R), for dbias only; or nullptr: ones
  T* dweight;                     // (E, Din, Dout)
  T* dbias;                       // (E, Dout), or nullptr
  int64_t num_rows, num_experts, din, dout;

  bool vectorized_grad;         // rows of grad may be read in pieces of 16 bytes
  int row_tiles, column_tiles;  // of one expert's dweight, set by `launch_with_tile`
  int bias_tiles;               // blocks for one expert's dbias; 0 without dbias
};

struct Range {
  int64_t first;
  int count;

  __device__ Range(const int32_t* offsets, int expert, int64_t num_rows) {
    first = min(max(int64_t(load(offsets + expert)), int64_t(0)), num_rows);
    count = static_cast<int>(min(max(int64_t(load(offsets + expert + 1)), first), num_rows) - first);
  }
};

// The place of a block's expert in their order, and the first row m and column n of the tile in the expert's dweight.
template <class Tile>
struct Target {
  int place, m, n;

  __device__ Target(int block, int row_tiles, int column_tiles) {
    place = block / (row_tiles * column_tiles);
    const TileIndex tile(block - place * row_tiles * column_tiles, row_tiles, column_tiles);
    m = tile.row * Tile::kM, n = tile.column * Tile::kN;
  }
};

// With more experts than these they are taken in ascending order: a block compares all pairs.
constexpr int kSorted = 256;

// Sets `expert` to the one at `place` in the order of descending numbers of rows, of equal ones the lower first. All
// threads of the block call it.
template <int THREADS>
__device__ void find_by_size(int place, const int32_t* offsets, int num_experts,
                             int* rows,  // (kSorted), in shared memory
                             int& expert) {
  if (num_experts > kSorted) {
    if (threadIdx.x == 0) expert = place;
    __syncthreads();
    return;
  }
  for (int e = threadIdx.x; e < num_experts; e += THREADS) rows[e] = load(offsets + e + 1) - load(offsets + e);
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += THREADS) {
    const int mine = rows[e];
    int rank = 0;
    for (int other = 0; other < num_experts; other++) rank += rows[other] > mine || (rows[other] == mine && other < e);
    if (rank == place) expert = e;
  }
  __syncthreads();
}

// For dbias, a block sums up to 64 columns of an expert's rows of grad. A thread takes kPiece columns of every
// (THREADS / 8)-th row, and loads kBiasBatch rows at the same time. The threads' sums are added in a fixed order.
constexpr int kBiasPieces = 8, kBiasColumns = kBiasPieces * kPiece, kBiasBatch = 4;

template <class T, int THREADS>
__device__ void sum_bias(const Gradient<T>& call, int block,
                         float* partial) {  // (THREADS / 8, 64)
  constexpr int kDown = THREADS / kBiasPieces;
  const int expert = block / call.bias_tiles, dout = static_cast<int>(call.dout);
  const int piece = threadIdx.x % kBiasPieces, down = threadIdx.x / kBiasPieces;
  const int first_column = (block - expert * call.bias_tiles) * kBiasColumns;
  const int left = dout - first_column - piece * kPiece;
  const Range range(call.expert_offsets, expert, call.num_rows);
  Piece sums = {};
  for (int i = down; i < range.count; i += kBiasBatch * kDown) {
    Piece values[kBiasBatch];
    float weight[kBiasBatch];
#pragma unroll
    for (int a = 0; a < kBiasBatch; a++) {
      const bool inside = i + a * kDown < range.count;
      const int64_t at = range.first + i + a * kDown;
      const int64_t row = !inside ? -1 : call.grad_token ? load(call.grad_token + at) : at;
      weight[a] = row >= 0 && call.row_weight ? load(call.row_weight + at) : 1.0f;
      read_piece(call.grad + (row < 0 ? 0 : row * call.grad_stride) + first_column + piece * kPiece, row < 0 ? 0 : left,
                 call.vectorized_grad, values[a]);
    }
#pragma unroll
    for (int a = 0; a < kBiasBatch; a++) {
#pragma unroll
      for (int d = 0; d < kPiece; d++) sums[d] = __fmaf_rn(weight[a], values[a][d], sums[d]);
    }
  }
#pragma unroll
  for (int d = 0; d < kPiece; d++) partial[down * kBiasColumns + piece * kPiece + d] = sums[d];
  __syncthreads();
  const int column = threadIdx.x;
  if (column >= kBiasColumns || first_column + column >= dout) return;
  float sum = 0.0f;
  for (int r = 0; r < kDown; r++) sum += partial[r * kBiasColumns + column];
  narrow(sum, call.dbias[expert * call.dout + first_column + column]);
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 2) grouped_gemm_wgrad_kernel(const Gradient<T> call) {
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  T* const stages = reinterpret_cast<T*>(dynamic_shared);
  int block = blockIdx.x - call.bias_tiles * static_cast<int>(call.num_experts);
  if (block < 0) {
    sum_bias<T, Tile::kThreads>(call, blockIdx.x, reinterpret_cast<float*>(stages));
    return;
  }
  const Target<Tile> from(block, call.row_tiles, call.column_tiles);
  __shared__ int expert;
  find_by_size<Tile::kThreads>(from.place, call.expert_offsets, static_cast<int>(call.num_experts),
                               reinterpret_cast<int*>(stages), expert);
  const Range range(call.expert_offsets, expert, call.num_rows);
  const int din = static_cast<int>(call.din), dout = static_cast<int>(call.dout);
  const auto first_row_of = [&](const T* matrix, int64_t stride, const int32_t* token) {
    return token ? matrix : matrix + range.first * stride;
  };
  const auto tokens_of = [&](const int32_t* token) { return token ? token + range.first : nullptr; };
  GatheredAcrossK<T, Tile, Tile::kM> a(first_row_of(call.x, call.x_stride, call.x_token), call.x_stride,
                                       tokens_of(call.x_token), from.m, din, range.count);
  GatheredAcrossK<T, Tile, Tile::kN> b(first_row_of(call.grad, call.grad_stride, call.grad_token), call.grad_stride,
                                       tokens_of(call.grad_token), from.n, dout, range.count);
  typename Tile::Sums sums = {};
  multiply_tile<T, Tile>(stages, a, b, range.count, sums);

  recompute(block);  // makes the compiler compute `from` again, instead of keeping it in registers during the product
  const auto [place, m, n] = Target<Tile>(block, call.row_tiles, call.column_tiles);
  float* const staged_sums = reinterpret_cast<float*>(stages);
  constexpr int kPieces = Tile::kN / kPiece;
  T* const dweight = call.dweight + expert * call.din * call.dout;
#pragma unroll 1
  for (int part = 0; part < Tile::kWarpsM; part++) {
    stage_sums<Tile>(staged_sums, sums, part);
    for (int i = threadIdx.x; i < Tile::kWarpM * kPieces; i += Tile::kThreads) {
      const int row = i / kPieces, c = i % kPieces * kPiece, to = m + part * Tile::kWarpM + row;
      if (to >= din || n + c >= dout) continue;
      Piece values;
      read_sums(staged_sums + row * Tile::kPitch + c, values);
      write_piece(dweight + int64_t(to) * dout + n + c, kPiece, true, values);
    }
  }
}

template <class T>
int64_t blocks(const Gradient<T>& call, int64_t m, int64_t n) {
  return call.num_experts * ((call.din + m - 1) / m) * ((call.dout + n - 1) / n);
}

template <class T, class Tile>
cudaError_t launch_with_tile(Gradient<T> call, cudaStream_t stream) {
  call.row_tiles = static_cast<int>((call.din + Tile::kM - 1) / Tile::kM);
  call.column_tiles = static_cast<int>((call.dout + Tile::kN - 1) / Tile::kN);
  const int64_t grid = call.num_experts * (int64_t(call.row_tiles) * call.column_tiles + call.bias_tiles);
  if (grid == 0) return cudaSuccess;
  if (grid > INT32_MAX) return cudaErrorInvalidValue;
  return launch(grouped_gemm_wgrad_kernel<T, Tile>, dim3(static_cast<unsigned>(grid)), Tile::kThreads,
                Tile::kSharedBytes, stream, call);
}

template <class T>
cudaError_t launch_wgrad(Gradient<T> call, cudaStream_t stream) {
  constexpr int64_t kSize = sizeof(T);
  call.vectorized_grad = rows_divide(16, 0, {call.grad_stride * kSize}, {call.grad});
  call.bias_tiles = call.dbias ? static_cast<int>((call.dout + kBiasColumns - 1) / kBiasColumns) : 0;
  if (call.din > 0 &&
      !rows_divide(16, call.din * kSize, {call.dout * kSize, call.x_stride * kSize, call.grad_stride * kSize},
                   {call.x, call.grad})) {
    return cudaErrorInvalidValue;
  }
  const bool few = blocks(call, LargeTile::kM, LargeTile::kN) < kFewBlocks;
  return few ? launch_with_tile<T, SmallTile>(call, stream) : launch_with_tile<T, LargeTile>(call, stream);
}

}  // namespace

cudaError_t grouped_gemm_bwd_weight(int dtype, const void* x, int64_t x_stride, const int32_t* x_token,
                                    const void* grad, int64_t grad_stride, const int32_t* grad_token,
                                    const int32_t* expert_offsets, const float* row_weight, void* dweight, void* dbias,
                                    int64_t num_rows, int64_t num_experts, int64_t din, int64_t dout,
                                    cudaStream_t stream) {
  if (!plausible(num_rows, num_experts, din, dout)) return cudaErrorInvalidValue;
  if (dout == 0) return cudaSuccess;
  return with_16_bits(dtype, [&](auto element) {
    using T = decltype(element);
    Gradient<T> call{};
    call.x = static_cast<const T*>(x), call.x_stride = x_stride, call.x_token = x_token;
    call.grad = static_cast<const T*>(grad), call.grad_stride = grad_stride, call.grad_token = grad_token;
    call.expert_offsets = expert_offsets, call.row_weight = row_weight;
    call.dweight = static_cast<T*>(dweight), call.dbias = static_cast<T*>(dbias);
    call.num_rows = num_rows, call.num_experts = num_experts, call.din = din, call.dout = dout;
    return launch_wgrad(call, stream);
  });
}

}  // namespace moe
