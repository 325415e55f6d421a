// For kernels whose threads read and write rows of a matrix in pieces of at most 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "moe/cuda/vector.cuh"

namespace moe {

constexpr int kRowThreads = 256;                // most threads of a block
constexpr int64_t kMaxRow = int64_t(1) << 30;   // most elements of a row: for_pieces counts past it by a stride, in int

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ void narrow(float value, float& to) { to = value; }
__device__ __forceinline__ void narrow(float value, __nv_bfloat16& to) { to = __float2bfloat16(value); }
__device__ __forceinline__ void narrow(float value, __half& to) { to = __float2half(value); }

// Converts between float32 and Vector, a type of at most 16 bytes that holds one or more elements T.
template <class T, class Vector>
struct Pack {
  static constexpr int kElements = sizeof(Vector) / sizeof(T);
  using Floats = float[kElements];

  __device__ static void unpack(const Vector& vector, Floats& values) {
    T elements[kElements];
    memcpy(static_cast<void*>(elements), &vector, sizeof vector);
#pragma unroll
    for (int i = 0; i < kElements; i++) values[i] = widen(elements[i]);
  }

  __device__ static Vector pack(const Floats& values) {
    T elements[kElements];
#pragma unroll
    for (int i = 0; i < kElements; i++) narrow(values[i], elements[i]);
    Vector vector;
    memcpy(&vector, elements, sizeof vector);
    return vector;
  }
};

// Whether rows can be accessed in pieces of `bytes` bytes. `row_bytes` (the length of a row), all `strides` (the bytes
// from row to row of an array) and all `pointers` (the starts of arrays) must be multiples of `bytes`.
inline bool rows_divide(int64_t bytes, int64_t row_bytes, std::initializer_list<int64_t> strides,
                        std::initializer_list<const void*> pointers) {
  return row_bytes % bytes == 0 &&
         std::all_of(strides.begin(), strides.end(), [=](int64_t stride) { return stride % bytes == 0; }) &&
         std::all_of(pointers.begin(), pointers.end(), [=](const void* each) { return is_aligned(each, bytes); });
}

// How many threads of a block share a row of `vectors` pieces: at most kRowThreads, and such that they take the row in
// parts of about equal length. 360 pieces (D = 2880 in bf16) are taken as 180 + 180, not 256 + 104.
inline int threads_along(int64_t vectors) {
  const int64_t passes = std::max<int64_t>(1, (vectors + kRowThreads - 1) / kRowThreads);
  return static_cast<int>(std::max<int64_t>(1, (vectors + passes - 1) / passes));
}

// A grid with a thread for each piece of each row, unless a row needs more than 65535 blocks. In a block, x counts the
// threads along a row and y the rows. In the grid, x counts the blocks over rows and y the blocks along a row.
struct RowGrid {
  dim3 grid, block;

  RowGrid(int64_t rows, int64_t vectors) {
    const int along = threads_along(vectors), down = kRowThreads / along;
    block = dim3(along, down);
    grid = dim3(static_cast<unsigned>((rows + down - 1) / down),
                static_cast<unsigned>(std::min<int64_t>((vectors + along - 1) / along, 65535)));
  }
};

template <class Each>
__device__ __forceinline__ void for_pieces(int vectors, Each each) {
  for (int v = blockIdx.y * blockDim.x + threadIdx.x; v < vectors; v += gridDim.y * blockDim.x) each(v);
}

// Writes zeros to rows [used, num_rows): this thread's pieces of row used + rank and of every ranks-th row after it.
template <class Vector>
__device__ __forceinline__ void clear_rows(Vector* rows,  // (num_rows, vectors)
                                           int64_t used, int64_t num_rows, int vectors, int64_t rank, int64_t ranks) {
  for (int64_t row = max(used, int64_t(0)) + rank; row < num_rows; row += ranks) {
    for_pieces(vectors, [&](int v) { store_streaming(rows + row * vectors + v, Vector{}); });
  }
}

}  // namespace moe
