// Sinkhorn's iteration on a matrix of scores S in registers, for sinkhorn.cu. The threads that hold a matrix are a
// Team. Scaled (sinkhorn_scaled.cuh) and Potentials (sinkhorn_log.cuh) are the two forms of the iteration.
#pragma once

#include <cmath>

#include "moe/common/cooling.h"
#include "moe/common/dtypes.h"
#include "moe/cuda/rows.cuh"
#include "moe/cuda/warp.cuh"

namespace moe {
namespace {

enum class Form { broken, scaled, logarithmic };  // broken: a score is NaN or +inf, so the result is NaN everywhere

struct Add {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return unfused_sum(a, b);
  }
};

struct Same {
  template <class T>
  __device__ T operator()(T x) const {
    return x;
  }
};

struct Max {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

__device__ __forceinline__ float widened(const void* from, int dtype, int64_t at) {
  if (dtype == float32) return load(static_cast<const float*>(from) + at);
  if (dtype == bfloat16) return widen(static_cast<const __nv_bfloat16*>(from)[at]);
  return widen(static_cast<const __half*>(from)[at]);
}

__device__ __forceinline__ void put(void* to, int dtype, int64_t at, float value) {
  if (dtype == float32) {
    static_cast<float*>(to)[at] = value;
  } else if (dtype == bfloat16) {
    narrow(value, static_cast<__nv_bfloat16*>(to)[at]);
  } else {
    narrow(value, static_cast<__half*>(to)[at]);
  }
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ double finite(double most) { return most > -1e300 ? most : 0.0; }
__device__ __forceinline__ float finite(float most) { return most > -infinity() ? most : 0.0f; }

// Temperatures, and what every thread would otherwise compute from them in double.
struct Temperatures : Cooling {
  double inverse_of_last;

  Temperatures(double first, double last, int64_t iterations)
      : Cooling(first, last, iterations), inverse_of_last(1 / last) {}
  // Whether exp((S - row maximum) / tau) can be computed once and scaled, with 1 / tau in float, and scores in double
  // that are some 2^-127 where they are 0.
  bool scalable() const { return constant() && inverse_of_last > 1e-20 && inverse_of_last < 1e20; }
};

// (B, n, n), last dimension contiguous; strides in elements.
struct Matrices {
  const void* data;
  int64_t stride_batch, stride_row;
  int dtype;

  bool in_vectors(int64_t n) const {
    return dtype == float32 && n % 4 == 0 && stride_batch % 4 == 0 && stride_row % 4 == 0 && is_aligned(data, 16);
  }
};

struct Sums {
  const double *rows, *columns;  // (B, n): prescribed sums; or both null: ones, and `tolerance` must be negative
  double tolerance;              // negative: none
  double *drows, *dcolumns;      // (B, n): gradients to rows and columns, for the backward pass
  int64_t start = 0;             // index in these arrays of the matrix's first sum
  int n = 0;

  __device__ Sums of(int64_t matrix, int n) const {
    Sums of_matrix = *this;
    of_matrix.start = matrix * n, of_matrix.n = n;
    return of_matrix;
  }
  __device__ bool prescribed() const { return rows != nullptr; }
  __device__ double per_row(double x, int i) const { return prescribed() && i < n ? x / rows[start + i] : x; }
  __device__ double per_column(double x, int j) const { return prescribed() && j < n ? x / columns[start + j] : x; }

  // Absolute errors: of the sum of row i, which is `ratio` times the prescribed one; of `total`, the sum of column j.
  __device__ double row_error(double ratio, int i) const { return i < n ? rows[start + i] * fabs(ratio - 1) : 0.0; }
  __device__ double column_error(double total, int j) const { return j < n ? fabs(total - columns[start + j]) : 0.0; }

  // Gradients to the prescribed sums. One thread must make all calls for a row or column.
  __device__ void init_row(int i, double d) const {
    if (prescribed() && i < n) drows[start + i] = d;
  }
  __device__ void init_column(int j, double d) const {
    if (prescribed() && j < n) dcolumns[start + j] = d;
  }
  __device__ void subtract_row(int i, double d) const {
    if (prescribed() && i < n) drows[start + i] -= d;
  }
  __device__ void subtract_column(int j, double d) const {
    if (prescribed() && j < n) dcolumns[start + j] -= d;
  }
};

// ROWS x COLUMNS threads that hold a matrix of up to kN x kN elements in registers; each thread holds a tile of
// TILE_ROWS x TILE_COLUMNS elements.
template <int ROWS, int COLUMNS, int TILE_ROWS, int TILE_COLUMNS>
class Team {
 public:
  static constexpr int kTileRows = TILE_ROWS, kTileColumns = TILE_COLUMNS, kN = ROWS * TILE_ROWS,
                       kThreads = ROWS * COLUMNS;
  static constexpr int kBlock = kThreads <= kWarpSize ? 128 : kThreads, kTeams = kBlock / kThreads;
  static constexpr int kWarps = kThreads <= kWarpSize ? 0 : kThreads / kWarpSize;  // 0 if a team is within one warp
  static constexpr int kExchange = kWarps ? 2 * (kWarps + 1) * kN : 1;
  // Whether the scaled form may stop before the last iteration.
  static constexpr bool kEarly = kN >= 16;
  static_assert(COLUMNS * TILE_COLUMNS == kN && COLUMNS <= kWarpSize);

  using Tile = float[TILE_ROWS][TILE_COLUMNS];

  int64_t matrix;
  int row, column;  // of this thread's first element

  __device__ explicit Team(double* exchange) : exchange_(exchange) {
    const int rank = threadIdx.x % kThreads;
    matrix = int64_t(blockIdx.x) * kTeams + threadIdx.x / kThreads;
    row = rank / COLUMNS * TILE_ROWS, column = rank % COLUMNS * TILE_COLUMNS;
    rank_ = rank, lane_ = threadIdx.x % kWarpSize;
    if constexpr (kThreads < kWarpSize) mask_ = ((1u << kThreads) - 1) << (lane_ / kThreads * kThreads);
  }

  static dim3 blocks(int64_t batch) { return dim3(static_cast<unsigned>((batch + kTeams - 1) / kTeams)); }

  __device__ bool inside(int a, int b, int n) const { return row + a < n && column + b < n; }

  __device__ void sync() const {
    if constexpr (kWarps > 0) {
      __syncthreads();
    } else if constexpr (kThreads > 1) {
      __syncwarp(mask_);
    }
  }

  // along_row combines the values of the threads in this thread's row of the team, along_columns those in its column.
  // All these threads get the result.
  template <class T, class Combine>
  __device__ T along_row(T value, Combine combine) const {
#pragma unroll
    for (int offset = COLUMNS / 2; offset > 0; offset /= 2) {
      value = combine(value, __shfl_xor_sync(mask_, value, offset));
    }
    return value;
  }

  template <int COUNT, class T, class Combine, class Finish = Same>
  __device__ void along_columns(T (&values)[COUNT], Combine combine, Finish finish = {}) {
    if constexpr (kWarps > 0) {
      // Each column is combined by one thread. Calls alternate between two sets of slots, so a call needs no third
      // barrier.
      static_assert(COUNT * COLUMNS <= kThreads && COUNT * COLUMNS <= kN);
      T* const slots = reinterpret_cast<T*>(exchange_ + turn_ * (kWarps + 1) * kN);
      turn_ ^= 1;
      const int first = lane_ % COLUMNS * COUNT;
      int mine = first;
      constexpr int kRows = kWarpSize / COLUMNS, kKept = COUNT % kRows ? COUNT : COUNT / kRows;
      within_warp<COUNT, COLUMNS, kKept>(values, mine, combine);
      if (kKept < COUNT || lane_ < COLUMNS) {
#pragma unroll
        for (int b = 0; b < kKept; b++) slots[(threadIdx.x / kWarpSize + 1) * kN + mine + b] = values[b];
      }
      __syncthreads();
      const int column = threadIdx.x;
      if (column < COUNT * COLUMNS) {
        T all = slots[kN + column];
        for (int warp = 2; warp <= kWarps; warp++) all = combine(all, slots[warp * kN + column]);
        slots[column] = finish(all);
      }
      __syncthreads();
#pragma unroll
      for (int b = 0; b < COUNT; b++) values[b] = slots[first + b];
    } else {
#pragma unroll
      for (int offset = COLUMNS; offset < kThreads; offset *= 2) {
#pragma unroll
        for (int b = 0; b < COUNT; b++) values[b] = combine(values[b], __shfl_xor_sync(mask_, values[b], offset));
      }
#pragma unroll
      for (int b = 0; b < COUNT; b++) values[b] = finish(values[b]);
    }
  }

  // Replaces the values of a thread's rows by finish(their sums along the row).
  template <class T, class Finish>
  __device__ void sum_rows(T (&values)[TILE_ROWS], Finish finish) const {
    if constexpr (COLUMNS >= 4 && TILE_ROWS == 4) {
      sum_four<COLUMNS / 2, COLUMNS / 4>(values, finish);
    } else {
#pragma unroll
      for (int a = 0; a < TILE_ROWS; a++) values[a] = finish(along_row(values[a], Add()));
    }
  }

  // Replaces the values of a thread's columns by finish(their sums along the column).
  template <class T, class Finish>
  __device__ void sum_columns(T (&values)[TILE_COLUMNS], Finish finish) {
    if constexpr (kWarps == 0 && ROWS == 4 && TILE_COLUMNS == 4) {
      sum_four<2 * COLUMNS, COLUMNS>(values, finish);
    } else {
      along_columns(values, Add(), finish);
    }
  }

  __device__ double sum(double value) {
    double total[1] = {along_row(value, Add())};
    along_columns(total, Add());
    return total[0];
  }

  // Whether `value` is true in any column. `value` must be the same in all threads of a column: only the team's threads
  // in this warp vote, and they include threads of every column.
  __device__ bool any(bool value) const { return __any_sync(mask_, value); }

  // Whether |x| is above `bound` in any column; x as `value` above.
  __device__ bool any_above(const float (&x)[TILE_COLUMNS], float bound) const {
    bool above = false;
#pragma unroll
    for (int b = 0; b < TILE_COLUMNS; b++) above |= fabsf(x[b]) > bound;
    return any(above);
  }

  __device__ double largest(double value) {
    double most[1] = {along_row(value, Max())};
    along_columns(most, Max());
    return most[0];
  }

  __device__ void read(const Matrices& from, bool vectorized, int n, float other, Tile& tile) const {
    const int64_t start = matrix * from.stride_batch + row * from.stride_row + column;
#pragma unroll
    for (int a = 0; a < TILE_ROWS; a++) {
#pragma unroll
      for (int b = 0; b < TILE_COLUMNS; b += 4) {
        const int64_t at = start + a * from.stride_row + b;
        if (vectorized) {
          const bool whole = inside(a, b, n);
          const float4 four = whole ? load(reinterpret_cast<const float4*>(static_cast<const float*>(from.data) + at))
                                    : make_float4(other, other, other, other);
          tile[a][b] = four.x, tile[a][b + 1] = four.y, tile[a][b + 2] = four.z, tile[a][b + 3] = four.w;
        } else {
#pragma unroll
          for (int c = 0; c < 4; c++)
            tile[a][b + c] = inside(a, b + c, n) ? widened(from.data, from.dtype, at + c) : other;
        }
      }
    }
  }

  __device__ void write(void* to, int dtype, bool vectorized, int n, const Tile& tile) const {
    const int64_t start = (matrix * n + row) * n + column;
#pragma unroll
    for (int a = 0; a < TILE_ROWS; a++) {
#pragma unroll
      for (int b = 0; b < TILE_COLUMNS; b += 4) {
        const int64_t at = start + a * n + b;
        if (vectorized) {
          if (!inside(a, b, n)) continue;
          const float4 four = {tile[a][b], tile[a][b + 1], tile[a][b + 2], tile[a][b + 3]};
          *reinterpret_cast<float4*>(static_cast<float*>(to) + at) = four;
        } else {
#pragma unroll
          for (int c = 0; c < 4; c++) {
            if (inside(a, b + c, n)) put(to, dtype, at + c, tile[a][b + c]);
          }
        }
      }
    }
  }

  // Broken if a score is NaN or +inf; else scaled if tau is constant and every row of S / tau has a range below
  // `limit`; else logarithmic. `range` receives the largest range.
  __device__ Form form(const Tile& scores, int n, const Temperatures& cooling, double limit, double& range) {
    float maxima[2] = {0.0f, 0.0f};  // the largest range of a row, and 1 if an element is NaN or +inf
#pragma unroll
    for (int a = 0; a < TILE_ROWS; a++) {
      float high = -infinity(), negated_low = -infinity();
#pragma unroll
      for (int b = 0; b < TILE_COLUMNS; b++) {
        if (!inside(a, b, n)) continue;
        high = fmaxf(high, scores[a][b]), negated_low = fmaxf(negated_low, -scores[a][b]);
        if (!(scores[a][b] < infinity())) maxima[1] = 1.0f;
      }
      high = along_row(high, Max()), negated_low = along_row(negated_low, Max());
      // A row with a score of -inf has an infinite range, also if all its scores are -inf.
      const float span = negated_low == infinity() ? negated_low : high + negated_low;
      if (row + a < n) maxima[0] = fmaxf(maxima[0], span);
    }
    maxima[1] = along_row(maxima[1], Max());
    along_columns(maxima, Max());
    if (maxima[1] > 0.0f) return Form::broken;
    range = maxima[0] * cooling.inverse_of_last;
    return cooling.constant() && range < limit ? Form::scaled : Form::logarithmic;
  }

 private:
  // Combines the values of the warp's threads in the same column, in steps. In each step a thread keeps half of its
  // COUNT values, combined with those of the other thread, until it has KEPT, those from index `first` on; or all
  // values, if KEPT is COUNT.
  template <int COUNT, int OFFSET, int KEPT, class T, class Combine>
  __device__ void within_warp(T* values, int& first, Combine combine) const {
    if constexpr (OFFSET < kWarpSize) {
      constexpr int kCount = KEPT < COUNT ? COUNT / 2 : COUNT;
      const bool upper = kCount < COUNT && (lane_ & OFFSET);
      if (upper) first += kCount;
#pragma unroll
      for (int b = 0; b < kCount; b++) {
        const T other = __shfl_xor_sync(mask_, upper ? values[b] : values[COUNT - kCount + b], OFFSET);
        values[b] = combine(upper ? values[kCount + b] : values[b], other);
      }
      within_warp<kCount, 2 * OFFSET, KEPT>(values, first, combine);
    }
  }

  // finish(the sum of each value) over the threads whose ranks differ in FIRST, SECOND and smaller bits of a row (SECOND
  // < COLUMNS) or in FIRST and SECOND alone. Each thread adds up one of the four values, so there are 5 to 8 additions
  // and shuffles of 3 values, where four sums over 16 threads take 16 of both.
  template <int FIRST, int SECOND, class T, class Finish>
  __device__ void sum_four(T (&values)[4], Finish finish) const {
    const bool upper = rank_ & FIRST, odd = rank_ & SECOND;
    T even = upper ? values[2] : values[0], other = upper ? values[3] : values[1];
    even = unfused_sum(even, __shfl_xor_sync(mask_, upper ? values[0] : values[2], FIRST));
    other = unfused_sum(other, __shfl_xor_sync(mask_, upper ? values[1] : values[3], FIRST));
    T mine = unfused_sum(odd ? other : even, __shfl_xor_sync(mask_, odd ? even : other, SECOND));
    if constexpr (SECOND < COLUMNS) {
#pragma unroll
      for (int offset = SECOND / 2; offset > 0; offset /= 2) {
        mine = unfused_sum(mine, __shfl_xor_sync(mask_, mine, offset));
      }
    }
    mine = finish(mine);
    const T second = __shfl_xor_sync(mask_, mine, SECOND);
    even = odd ? second : mine, other = odd ? mine : second;
    const T far_even = __shfl_xor_sync(mask_, even, FIRST), far_other = __shfl_xor_sync(mask_, other, FIRST);
    values[0] = upper ? far_even : even, values[1] = upper ? far_other : other;
    values[2] = upper ? even : far_even, values[3] = upper ? other : far_other;
  }

  double* exchange_;  // (2, kWarps + 1, kN)
  int turn_ = 0, rank_, lane_;
  uint32_t mask_ = kAllLanes;
};

// Two vectors of each iteration, saved for backward: (iterations, 2, B, n), or (iterations, 2, n, B) for teams of few
// threads, so that neighbouring threads have neighbouring elements. Scaled form: u (if Team::kEarly) and v. Logarithmic
// form: column_anchor and column_log, with g = column_anchor + tau column_log (see Potentials).
template <class Team>
class History {
 public:
  __device__ History(double* data, const Team& team, int64_t batch, int n)
      : data_(data + team.matrix * (kFew ? 1 : n)), stride_(kFew ? batch : batch * n), team_(team), n_(n) {}

  __device__ void put(int64_t t, int which, const double (&values)[Team::kTileColumns]) const {
    if (team_.row > 0) return;
#pragma unroll
    for (int b = 0; b < Team::kTileColumns; b++) {
      if (team_.column + b < n_) at(t, which, team_.column + b) = values[b];
    }
  }
  __device__ void put_rows(int64_t t, const double (&values)[Team::kTileRows]) const {
    if (team_.column > 0) return;
#pragma unroll
    for (int a = 0; a < Team::kTileRows; a++) {
      if (team_.row + a < n_) at(t, 0, team_.row + a) = values[a];
    }
  }
  __device__ double get(int64_t t, int which, int b) const {
    return team_.column + b < n_ ? at(t, which, team_.column + b) : 0.0;
  }
  __device__ double get_row(int64_t t, int a) const { return team_.row + a < n_ ? at(t, 0, team_.row + a) : 0.0; }

 private:
  static constexpr bool kFew = Team::kThreads <= 4;

  __device__ double& at(int64_t t, int which, int i) const {
    const int64_t vector = 2 * t + which;
    return data_[kFew ? (vector * n_ + i) * stride_ : vector * stride_ + i];
  }

  double* data_;
  int64_t stride_;  // of elements if kFew, else of vectors
  const Team& team_;
  int n_;
};

}  // namespace
}  // namespace moe
