// Grouped GEMM: each row of x, sorted (or gathered) by expert, times its expert's weight. An epilogue (in csrc/cuda:
// grouped_gemm.cu, expert_mlp.cu and expert_norms.cu) computes the results from the product. Each block whose tile has
// rows calls the epilogue with its tile of the product in shared memory, kWarpM rows at a time (stage_sums of gemm.cuh).
// gated_columns() of the epilogue returns whether a row of the product holds all gates, then all linear parts.
#pragma once

#include "moe/common/dtypes.h"
#include "moe/cuda/gemm.cuh"
#include "moe/cuda/launch.cuh"
#include "moe/cuda/warp.cuh"

namespace moe {

// With fewer rows per expert on average, FewRowsTile replaces LargeTile.
constexpr int64_t kFewRows = 64;

// Rows of x, and of the weight rows of Dout (of Din if transposed), must start and end at multiples of 16 bytes; if
// columns are gated, also both halves of a row of Dout.
template <class T>
struct GroupedGemm {
  const T* x;                     // (R, Din), or (tokens, Din) with row_token
  int64_t x_stride;               // elements from row to row
  const int32_t* row_token;       // (R), -1 for unused rows; or nullptr
  const T* weight;                // (E, Din, Dout)
  int64_t expert_stride;          // elements from expert to expert
  int64_t weight_stride;          // elements from index to index of Din (Dout if transposed); the other is contiguous
  const int32_t* expert_offsets;  // (E + 1)
  int64_t num_rows, num_experts, din, dout;
  int transposed;

  int row_tiles, column_tiles;  // set by launch_with_tile
};

struct TileRows {
  int expert;  // -1 for unused rows: those from expert_offsets[E] on
  int64_t first;
  int count;  // 0 or negative if the tile has no rows
};

// With at most this many experts, a launch has only tiles with rows.
constexpr int kListed = 255;

// Row tiles of a launch, for any offsets.
inline int64_t row_tiles(int64_t num_rows, int64_t num_experts, int64_t m) {
  return num_experts <= kListed ? std::min(num_rows, num_rows / m + num_experts) + 1 : num_rows / m + num_experts + 1;
}

// The rows of tile `index`. Tiles are those of expert 0, of expert 1, and so on, M rows each but for an expert's last.
// Unused rows count as rows of expert E. A warp sums the numbers of tiles up; with more than kListed experts, it
// searches instead: the first tile of expert e is then offsets[e] / M + e, which leaves enough tiles for its rows.
template <int M>
__device__ TileRows rows_of_tile(int index, const int32_t* offsets, int num_experts, int64_t num_rows) {
  const auto offset = [&](int e) { return min(max(int64_t(load(offsets + e)), int64_t(0)), num_rows); };
  const auto rows_of = [&](int expert, int64_t tile) -> TileRows {
    const int64_t first = offset(expert) + tile * M, end = expert < num_experts ? offset(expert + 1) : num_rows;
    return {expert < num_experts ? expert : -1, first, static_cast<int>(min(end - first, int64_t(M)))};
  };
  const int lane = threadIdx.x % kWarpSize;
  if (num_experts <= kListed) {
    constexpr int kGroups = (kListed + 1) / kWarpSize;
    int tiles[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; g++) {  // all offsets at once
      const int e = g * kWarpSize + lane;
      const int64_t begin = e <= num_experts ? offset(e) : num_rows;
      const int64_t end = e < num_experts ? offset(e + 1) : num_rows;
      tiles[g] = static_cast<int>((max(end - begin, int64_t(0)) + M - 1) / M);
    }
    int before = 0;
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
      int sum = tiles[g];
#pragma unroll
      for (int d = 1; d < kWarpSize; d *= 2) {
        const int below = __shfl_up_sync(kAllLanes, sum, d);
        if (lane >= d) sum += below;
      }
      const unsigned behind = __ballot_sync(kAllLanes, before + sum > index);
      if (behind) {
        const int at = kWarpSize - __popc(behind);  // sums ascend, so all lanes from the first such on are behind
        const int first_tile = before + __shfl_sync(kAllLanes, sum - tiles[g], at);
        return rows_of(g * kWarpSize + at, index - first_tile);
      }
      before += __shfl_sync(kAllLanes, sum, kWarpSize - 1);
    }
    return {-1, num_rows, 0};
  }
  const auto first_tile = [&](int e) { return offset(e) / M + e; };
  int expert = 0;
  for (int candidates = num_experts + 1; candidates > 1;) {
    const int apart = (candidates + kWarpSize - 1) / kWarpSize, probe = lane * apart;
    const bool reached = probe < candidates && first_tile(expert + probe) <= index;
    const int passed = max(__popc(__ballot_sync(kAllLanes, reached)) - 1, 0) * apart;
    expert += passed;
    candidates = min(apart, candidates - passed);
  }
  return rows_of(expert, index - first_tile(expert));
}

// The columns of a tile: N neighbours, or, if gated, N / 2 neighbouring gates and their linear parts. at(c): which
// column of the matrix is column c of the tile. left(c): number of columns from there to the end, or, if gated, to the
// end of the gates or of the linear parts; maybe negative.
template <int N>
struct Columns {
  int first, end;  // end: Dout, or the number of gates; then gate i has its linear part in column end + i
  bool gated;

  __device__ Columns(int tile, int dout, bool gated_)
      : first(tile * (gated_ ? N / 2 : N)), end(gated_ ? dout / 2 : dout), gated(gated_) {}
  __device__ int at(int c) const { return first + c + (gated && c >= N / 2 ? end - N / 2 : 0); }
  __device__ int left(int c) const { return end - first - (gated ? c % (N / 2) : c); }
};

template <class T>
struct Bias {
  const T* values;  // (E, Dout), or nullptr
  int64_t stride;   // elements from expert to expert

  // Adds the bias of up to 8 columns, from `column` on, to `sums`. Does nothing without a bias or for unused rows.
  __device__ void add(int expert, int column, int count, bool vectorized, Piece& sums) const {
    if (!values || expert < 0) return;
    Piece bias;
    read_piece(values + expert * stride + column, count, vectorized, bias);
#pragma unroll
    for (int d = 0; d < kPiece; d++) sums[d] += bias[d];
  }

  __device__ float dot(int expert, int column, int count, bool vectorized, const Piece& with) const {
    Piece bias;
    read_piece(values + expert * stride + column, count, vectorized, bias);
    float sum = 0.0f;
#pragma unroll
    for (int d = 0; d < kPiece; d++) sum = __fmaf_rn(bias[d], with[d], sum);
    return sum;
  }
};

// Sums `value` over the lanes that share a row, and writes the sum to `partial`, at this column tile and row.
template <class Tile>
__device__ void write_row_sum(float value, int row, const TileRows& rows, int column_tile, int64_t num_rows,
                              float* partial) {  // (column tiles, R)
  constexpr int kLanes = Tile::kN / kPiece;
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = unfused_sum(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  if (threadIdx.x % kLanes == 0 && row < rows.count) partial[column_tile * num_rows + rows.first + row] = value;
}

template <class T, class Tile, bool TRANSPOSED, class Epilogue>
__global__ void __launch_bounds__(Tile::kThreads, 2)
    grouped_gemm_kernel(const GroupedGemm<T> gemm, const Epilogue epilogue) {
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  T* const stages = reinterpret_cast<T*>(dynamic_shared);
  const TileIndex tile(blockIdx.x, gemm.row_tiles, gemm.column_tiles);
  __shared__ TileRows rows;
  if (threadIdx.x < kWarpSize) {
    const TileRows found =
        rows_of_tile<Tile::kM>(tile.row, gemm.expert_offsets, static_cast<int>(gemm.num_experts), gemm.num_rows);
    if (threadIdx.x == 0) rows = found;
  }
  __syncthreads();
  if (rows.count <= 0) return;
  const Columns<Tile::kN> columns(tile.column, static_cast<int>(gemm.dout), epilogue.gated_columns());
  typename Tile::Sums sums = {};
  if (rows.expert >= 0) {
    const int num_k = static_cast<int>(gemm.din);
    AlongK<T, Tile, Tile::kM> a(gemm.x, [&](int i) -> const T* {
      if (i >= rows.count) return nullptr;
      const int64_t from = gemm.row_token ? load(gemm.row_token + rows.first + i) : rows.first + i;
      return from < 0 ? nullptr : gemm.x + from * gemm.x_stride;
    });
    const T* const weight = gemm.weight + rows.expert * gemm.expert_stride;
    if constexpr (TRANSPOSED) {
      AlongK<T, Tile, Tile::kN> b(weight, [&](int c) {
        return columns.left(c) > 0 ? weight + columns.at(c) * gemm.weight_stride : nullptr;
      });
      multiply_tile<T, Tile>(stages, a, b, num_k, sums);
    } else {
      AcrossK<T, Tile, Tile::kN> b(weight, gemm.weight_stride, [&](int c) { return columns.at(c); },
                                   [&](int c) { return columns.left(c); });
      multiply_tile<T, Tile>(stages, a, b, num_k, sums);
    }
  }
  float* const staged_sums = reinterpret_cast<float*>(stages);
#pragma unroll 1
  for (int part = 0; part * Tile::kWarpM < rows.count; part++) {
    stage_sums<Tile>(staged_sums, sums, part);
    const int before = part * Tile::kWarpM;
    const TileRows those = {rows.expert, rows.first + before, min(rows.count - before, Tile::kWarpM)};
    epilogue.template operator()<Tile>(staged_sums, those, columns, tile.column);
  }
}

template <class T, class Tile, bool TRANSPOSED, class Epilogue>
cudaError_t launch_with_tile(GroupedGemm<T> gemm, const Epilogue& epilogue, cudaStream_t stream) {
  const int64_t column_parts = epilogue.gated_columns() ? 2 : 1, width = Tile::kN / column_parts;
  // At least one column tile, also if dout is 0: an epilogue may write a result for each row.
  const int64_t column_tiles = std::max<int64_t>((gemm.dout / column_parts + width - 1) / width, 1);
  const int64_t rows = row_tiles(gemm.num_rows, gemm.num_experts, Tile::kM);
  if (rows * column_tiles > INT32_MAX) return cudaErrorInvalidValue;
  gemm.row_tiles = static_cast<int>(rows), gemm.column_tiles = static_cast<int>(column_tiles);
  return launch(grouped_gemm_kernel<T, Tile, TRANSPOSED, Epilogue>,
                dim3(static_cast<unsigned>(rows * column_tiles)), Tile::kThreads, Tile::kSharedBytes, stream,
                gemm, epilogue);
}

template <class T, class Epilogue>
cudaError_t launch_grouped_gemm(const GroupedGemm<T>& gemm, const Epilogue& epilogue, cudaStream_t stream) {
  if (gemm.num_rows == 0) return cudaSuccess;
  constexpr int64_t kSize = sizeof(T);
  const int64_t column_parts = epilogue.gated_columns() ? 2 : 1;
  const int64_t width = gemm.transposed ? 0 : gemm.dout / column_parts;
  if (!rows_divide(16, width * kSize,
                   {gemm.din * kSize, gemm.x_stride * kSize, gemm.weight_stride * kSize, gemm.expert_stride * kSize},
                   {gemm.x, gemm.weight})) {
    return cudaErrorInvalidValue;
  }
  const auto with = [&](auto tile) {
    return gemm.transposed ? launch_with_tile<T, decltype(tile), true>(gemm, epilogue, stream)
                           : launch_with_tile<T, decltype(tile), false>(gemm, epilogue, stream);
  };
  return gemm.num_rows < kFewRows * gemm.num_experts ? with(FewRowsTile{}) : with(LargeTile{});
}

inline bool plausible(int64_t num_rows, int64_t num_experts, int64_t din, int64_t dout) {
  return num_rows >= 0 && num_rows <= INT32_MAX && num_experts >= 1 && num_experts < INT32_MAX && din >= 0 &&
         din <= kMaxRow && dout >= 0 && dout <= kMaxRow;
}

template <class Run>
cudaError_t with_16_bits(int dtype, Run run) {
  switch (dtype) {
    case bfloat16: return run(__nv_bfloat16{});
    case float16: return run(__half{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace moe
