// The GEMM of one tile on the tensor cores of sm_80, for bf16 and fp16. cp.async copies both factors to shared memory,
// ldmatrix loads fragments of the factors, and mma.sync adds products of fragments to float32 sums in registers. Shared
// memory is a ring of stages; a stage holds both factors for some consecutive k.
//
// Every row of a factor starts and ends at a multiple of 16 bytes.
//
// Each factor has an outer index and the common index k. A factor that is contiguous along k is staged with a row for
// each outer index (AlongK). A factor that is contiguous along the outer index is staged with a row for each k
// (AcrossK), and ldmatrix transposes it. Elements past the end of a row or column are staged as zeros.
#pragma once

#include "moe/cuda/async_copy.cuh"
#include "moe/cuda/mma.cuh"
#include "moe/cuda/rows.cuh"

namespace moe {

constexpr int kPiece = 8;  // elements in 16 bytes: a copy of cp.async, and a row of an ldmatrix matrix

// A block computes M x N sums; a stage holds the factors of K terms of each sum. A piece is kPiece neighbouring
// elements of a row, inside or outside of the row as a whole.
template <int M, int N, int K, int WARPS_M, int WARPS_N>
struct Tile {
  static constexpr int kM = M, kN = N, kK = K, kStages = M > 32 && N > 64 ? 3 : 4, kWarpsM = WARPS_M;
  static constexpr int kWarpM = M / WARPS_M, kWarpN = N / WARPS_N, kThreads = WARPS_M * WARPS_N * kWarpSize;
  static constexpr int kStage = (M + N) * K;  // elements of a stage
  // Floats from row to row of the sums in shared memory. With N + 8, stage_sums writes them without bank conflicts. The
  // sums of kWarpM rows are there at once.
  static constexpr int kPitch = N + 8;
  static constexpr int kSharedBytes = std::max(kStages * kStage * 2, kWarpM * kPitch * 4);
  static_assert(2 * (kSharedBytes + 1024 + 128) <= 100 * 1024,
                "two blocks, with CUDA's 1 KB and static variables, fit in an SM of compute capability 8.6 or 8.9");
  using Sums = float[kWarpM / 16][kWarpN / 8][4];
};

using LargeTile = Tile<128, 128, 32, 2, 2>;
using FewRowsTile = Tile<32, 128, 32, 1, 4>;

// The offset, in elements, of a piece in a staged matrix with COLUMNS columns. ldmatrix reads 8 rows at once, of each
// row the piece with the same number. To avoid bank conflicts, these 8 pieces must be in different 16-byte parts of
// the 128 bytes of all banks. Therefore piece p is stored at the place of piece p ^ (row % 8), or p ^ (row / 2 % 4) if
// rows have 64 bytes.
template <int COLUMNS>
__device__ __forceinline__ int staged_offset(int row, int piece) {
  constexpr int kPieces = COLUMNS / kPiece, kMask = kPieces < 8 ? kPieces - 1 : 7;
  static_assert(kPieces == 4 || kPieces % 8 == 0);
  return row * COLUMNS + (piece ^ (row / (kPieces < 8 ? 2 : 1) & kMask)) * kPiece;
}

// OUTER rows of a matrix that is contiguous along k; some may be rows of zeros instead. Each thread copies one
// piece of each of kRows rows. For a row of zeros and past num_k nothing is read, and the address may be outside of the
// matrix.
template <class T, class Tile, int OUTER>
class AlongK {
  static constexpr int kPieces = Tile::kK / kPiece, kRowsAtOnce = Tile::kThreads / kPieces;
  static constexpr int kRows = OUTER / kRowsAtOnce;

  const T* rows_[kRows];
  uint32_t inside_ = 0;  // bit i is 0 if row i of this thread is a row of zeros

 public:
  static constexpr bool kAlong = true;
  static constexpr int kColumns = Tile::kK;

  // row_at(i) returns the start of row i, or nullptr for a row of zeros.
  template <class RowAt>
  __device__ AlongK(const T* anywhere, RowAt row_at) {
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const T* const row = row_at(static_cast<int>(threadIdx.x) / kPieces + i * kRowsAtOnce);
      inside_ |= uint32_t(row != nullptr) << i;
      rows_[i] = row ? row : anywhere;
    }
  }

  __device__ void copy(T* stage, int k, int num_k) {
    const int piece = threadIdx.x % kPieces, column = k + piece * kPiece;
    const uint32_t inside = column < num_k ? inside_ : 0;
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const int row = threadIdx.x / kPieces + i * kRowsAtOnce;
      // Moves bit i of `inside` to bit 4: the result is 16 or 0.
      const int bytes = (i < 4 ? inside << (4 - i) : inside >> (i - 4)) & 16;
      async_copy(stage + staged_offset<kColumns>(row, piece), rows_[i] + column, bytes);
    }
  }
};

// OUTER columns of a matrix that is contiguous along the outer index, with one row for each k. Past num_k nothing is
// read, and an address may be past the matrix's end.
template <class T, class Tile, int OUTER>
class AcrossK {
  static constexpr int kPieces = OUTER / kPiece, kRowsAtOnce = Tile::kThreads / kPieces;
  static constexpr int kRows = Tile::kK / kRowsAtOnce;

  const T* next_;  // the piece that this thread copies next
  int64_t apart_;  // elements from one of this thread's rows to its next row
  int bytes_;      // 16, or 0 if this thread's piece is outside of a row

  __device__ static int row(int i) { return threadIdx.x / kPieces + i * kRowsAtOnce; }

 public:
  static constexpr bool kAlong = false;
  static constexpr int kColumns = OUTER;

  // column_at(i): which column of the matrix is column i of the OUTER columns. columns_left(i): number of columns from
  // there on that may be read; maybe negative.
  template <class ColumnAt, class ColumnsLeft>
  __device__ AcrossK(const T* matrix, int64_t stride, ColumnAt column_at, ColumnsLeft columns_left)
      : apart_(kRowsAtOnce * stride) {
    const int column = threadIdx.x % kPieces * kPiece;
    next_ = matrix + row(0) * stride + column_at(column);
    bytes_ = columns_left(column) > 0 ? 16 : 0;
  }

  __device__ void copy(T* stage, int k, int num_k) {
#pragma unroll
    for (int i = 0; i < kRows; i++, next_ += apart_) {
      async_copy(stage + staged_offset<kColumns>(row(i), threadIdx.x % kPieces), next_,
                 k + row(i) < num_k ? bytes_ : 0);
    }
  }
};

// As AcrossK, with gathered rows: the row for k is row index[k] of the matrix, or zeros if index[k] is negative; the
// address then lies before the matrix. If `index` is nullptr, the row for k is row k.
template <class T, class Tile, int OUTER>
class GatheredAcrossK {
  static constexpr int kPieces = OUTER / kPiece, kRowsAtOnce = Tile::kThreads / kPieces;
  static constexpr int kRows = Tile::kK / kRowsAtOnce;

  const T* columns_;  // this thread's piece of row 0
  int64_t stride_;
  const int32_t* index_;
  int bytes_;
  int32_t next_[kRows];  // indices of the rows that the next call of `copy` copies

  __device__ static int row(int i) { return threadIdx.x / kPieces + i * kRowsAtOnce; }

  __device__ void look_up(int k, int num_k) {
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const int at = k + row(i);
      next_[i] = at >= num_k ? -1 : index_ ? load(index_ + at) : at;
    }
  }

 public:
  static constexpr bool kAlong = false;
  static constexpr int kColumns = OUTER;

  __device__ GatheredAcrossK(const T* matrix, int64_t stride, const int32_t* index, int first_column, int num_columns,
                             int num_k)
      : stride_(stride), index_(index) {
    const int column = first_column + threadIdx.x % kPieces * kPiece;
    columns_ = matrix + column;
    bytes_ = column < num_columns ? 16 : 0;
    look_up(0, num_k);
  }

  __device__ void copy(T* stage, int k, int num_k) {
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      async_copy(stage + staged_offset<kColumns>(row(i), threadIdx.x % kPieces), columns_ + next_[i] * stride_,
                 next_[i] >= 0 ? bytes_ : 0);
    }
    look_up(k + Tile::kK, num_k);
  }
};

// A warp's operands of mma.sync: its rows of A and its columns of B, for 16 consecutive k.
template <class T, class Tile, class A, class B>
struct Fragments {
  uint32_t a[Tile::kWarpM / 16][4];
  uint32_t b[Tile::kWarpN / 8][2];

  // Loads 16 outer indices x 16 indices k as four 8 x 8 matrices, in the order of mma.sync's operands. The second
  // matrix has the next 8 outer indices for A, the next 8 indices k for B.
  template <class Factor, bool IS_B>
  __device__ static void load_16x16(uint32_t (&fragment)[4], const T* matrix, int outer, int k) {
    const int lane = threadIdx.x % kWarpSize, low = lane / 8 % 2 * 8, high = lane / 16 * 8;
    outer += IS_B ? high : low;
    k += IS_B ? low : high;
    const int row = (Factor::kAlong ? outer : k) + lane % 8, column = Factor::kAlong ? k : outer;
    load_matrix<!Factor::kAlong>(fragment, matrix + staged_offset<Factor::kColumns>(row, column / kPiece));
  }

  __device__ void load(const T* stage, int m, int n, int k) {
#pragma unroll
    for (int i = 0; i < Tile::kWarpM / 16; i++) load_16x16<A, false>(a[i], stage, m + 16 * i, k);
#pragma unroll
    for (int j = 0; j < Tile::kWarpN / 16; j++) {
      uint32_t two[4];
      load_16x16<B, true>(two, stage + Tile::kM * Tile::kK, n + 16 * j, k);
      b[2 * j][0] = two[0], b[2 * j][1] = two[1], b[2 * j + 1][0] = two[2], b[2 * j + 1][1] = two[3];
    }
  }

  __device__ void multiply(typename Tile::Sums& sums) const {
#pragma unroll
    for (int i = 0; i < Tile::kWarpM / 16; i++) {
#pragma unroll
      for (int j = 0; j < Tile::kWarpN / 8; j++) mma_m16n8k16<T>(sums[i][j], a[i], b[j]);
    }
  }
};

// The first row and the first column of this warp's part of the tile.
template <class Tile>
__device__ __forceinline__ int warp_m() {
  return threadIdx.x / kWarpSize % Tile::kWarpsM * Tile::kWarpM;
}
template <class Tile>
__device__ __forceinline__ int warp_n() {
  return threadIdx.x / kWarpSize / Tile::kWarpsM * Tile::kWarpN;
}

// sums += A B over k in [0, num_k). A stage takes one barrier, before the products of its last 16 indices k, whose
// fragments are in registers by then. After the barrier, all warps may read the next stage and refill the present one.
template <class T, class Tile, class A, class B>
__device__ __forceinline__ void multiply_tile(T* stages, A& a, B& b, int num_k, typename Tile::Sums& sums) {
  constexpr int kStages = Tile::kStages, kSteps = Tile::kK / 16;
  const int turns = (num_k + Tile::kK - 1) / Tile::kK;
  const auto stage = [&](int place) { return stages + place * Tile::kStage; };
  const auto copy = [&](int turn, int place) {
    if (turn < turns) {
      a.copy(stage(place), turn * Tile::kK, num_k);
      b.copy(stage(place) + Tile::kM * Tile::kK, turn * Tile::kK, num_k);
    }
    async_commit();
  };
  if (turns == 0) return;
  for (int turn = 0; turn < kStages - 1; turn++) copy(turn, turn);
  async_wait<kStages - 2>();
  __syncthreads();
  const int m = warp_m<Tile>(), n = warp_n<Tile>();
  Fragments<T, Tile, A, B> fragments[2];
  fragments[0].load(stage(0), m, n, 0);
  for (int turn = 0, place = 0; turn < turns; turn++) {  // place: the stage of this turn
    const int next = place + 1 == kStages ? 0 : place + 1;
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      const bool last = step == kSteps - 1;
      if (last) {
        async_wait<kStages - 2>();
        __syncthreads();
      }
      // The last step of the last turn loads fragments that are not used.
      fragments[(step + 1) % 2].load(stage(last ? next : place), m, n, last ? 0 : 16 * (step + 1));
      if (step == 0) copy(turn + kStages - 1, place == 0 ? kStages - 1 : place - 1);
      fragments[step % 2].multiply(sums);
    }
    place = next;
  }
  async_wait<0>();
}

// Writes part `part` of the block's sums, of kWarpM rows, to shared memory, over the stages and over an earlier part: row
// r of the part, column c at [r * kPitch + c].
template <class Tile>
__device__ __forceinline__ void stage_sums(float* staged_sums, const typename Tile::Sums& sums, int part) {
  const int lane = threadIdx.x % kWarpSize;
  __syncthreads();
  if (warp_m<Tile>() == part * Tile::kWarpM) {
#pragma unroll
    for (int i = 0; i < Tile::kWarpM / 16; i++) {
#pragma unroll
      for (int j = 0; j < Tile::kWarpN / 8; j++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = 16 * i + 8 * half + lane / 4, column = warp_n<Tile>() + 8 * j + lane % 4 * 2;
          *reinterpret_cast<float2*>(staged_sums + row * Tile::kPitch + column) = {sums[i][j][2 * half],
                                                                                   sums[i][j][2 * half + 1]};
        }
      }
    }
  }
  __syncthreads();
}

using Piece = float[kPiece];

__device__ __forceinline__ void read_sums(const float* from, Piece& values) {
  const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
  values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
  values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

// Converts the first `count` of the 8 elements at `from` to float32; the other values become 0. `vectorized`: `from` is
// aligned to 16 bytes.
template <class T>
__device__ __forceinline__ void read_piece(const T* from, int count, bool vectorized, Piece& values) {
  if (vectorized && count >= kPiece) {
    Pack<T, uint4>::unpack(load(reinterpret_cast<const uint4*>(from)), values);
    return;
  }
#pragma unroll
  for (int d = 0; d < kPiece; d++) values[d] = d < count ? widen(from[d]) : 0.0f;
}

template <class T>
__device__ __forceinline__ void write_piece(T* to, int count, bool vectorized, const Piece& values) {
  if (vectorized && count >= kPiece) {
    *reinterpret_cast<uint4*>(to) = Pack<T, uint4>::pack(values);
    return;
  }
#pragma unroll
  for (int d = 0; d < kPiece; d++) {
    if (d < count) narrow(values[d], to[d]);
  }
}

// The tile of block `index` among rows x columns tiles. Blocks take groups of up to eight rows of tiles, column by
// column, so that blocks that run at the same time share the rows and columns of the factors in the L2 cache.
struct TileIndex {
  int row, column;

  __device__ TileIndex(int index, int rows, int columns) {
    constexpr int kGroupRows = 8;
    const int first = index / (kGroupRows * columns) * kGroupRows, group_rows = min(kGroupRows, rows - first);
    row = first + (index - first * columns) % group_rows;
    column = (index - first * columns) / group_rows;
  }
};

}  // namespace moe
