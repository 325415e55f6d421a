// Rows in pieces of 16 bytes or less: conversion to float32, and a grid with a thread for each piece.
#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "moe/vector.cuh"

namespace moe {

constexpr int kRowThreads = 256;                // threads of a block
constexpr int64_t kMaxRow = int64_t(1) << 30;   // most elements of a row: an index one grid step further fits an int

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ void narrow(float value, float& to) { to = value; }
__device__ __forceinline__ void narrow(float value, __nv_bfloat16& to) { to = __float2bfloat16(value); }
__device__ __forceinline__ void narrow(float value, __half& to) { to = __float2half(value); }

// Converts between float32 and a Vector of elements T: 16 bytes, or one element.
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

// Whether rows can be accessed in pieces of `bytes` bytes. The rows have `row_bytes` bytes; `pointers` are the starts
// of all arrays, `strides` the bytes from row to row in each.
inline bool rows_divide(int64_t bytes, int64_t row_bytes, std::initializer_list<int64_t> strides,
                        std::initializer_list<const void*> pointers) {
  return row_bytes % bytes == 0 &&
         std::all_of(strides.begin(), strides.end(), [=](int64_t stride) { return stride % bytes == 0; }) &&
         std::all_of(pointers.begin(), pointers.end(), [=](const void* each) { return is_aligned(each, bytes); });
}

// The number of threads that share a row of `vectors` pieces: at most kRowThreads, and such that all passes over the
// row are about equally long. 360 pieces (D = 2880 in bf16) take two passes of 180 threads, not 256 and then 104.
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
__device__ __forceinline__ void clear_rows(Vector* rows,  // (R, D)
                                           int64_t used, int64_t num_rows, int vectors, int64_t rank, int64_t ranks) {
  for (int64_t row = used + rank; row < num_rows; row += ranks) {
    for_pieces(vectors, [&](int v) { store_streaming(rows + row * vectors + v, Vector{}); });
  }
}

}  // namespace moe
