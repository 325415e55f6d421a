// The instructions ldmatrix, and mma.sync.m16n8k16 on 16-bit inputs with float32 accumulators (sm_80 and later).
//
// The matrices of a warp's mma.m16n8k16 are A, B and C (PTX ISA, "Matrix Fragments for mma.m16n8k16"). With group =
// lane / 4 and pair = lane % 4, element i of a lane's fragment is the following element of the matrix. Registers of A
// and B hold two elements, the one of lower i in the lower half.
//   A (16, 16)  i in 0..7   row group + 8 * (i / 2 % 2), column 2 * pair + i % 2 + 8 * (i / 4)
//   B (16, 8)   i in 0..3   row 2 * pair + i % 2 + 8 * (i / 2), column group
//   C (16, 8)   i in 0..3   row group + 8 * (i / 2), column 2 * pair + i % 2
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "moe/cuda/warp.cuh"

namespace moe {

// Loads four 8 x 8 matrices of 16-bit elements from shared memory. `row` of lane 8 * m + r is the address of row r of
// matrix m, a multiple of 16 bytes. Register m of a lane receives elements (group, 2 * pair) and (group, 2 * pair + 1)
// of matrix m, or of its transpose if TRANSPOSED.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrix(uint32_t (&fragment)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address) : "memory");
  }
}

template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kBf16 || std::is_same_v<T, __half>, "mma_m16n8k16 takes bf16 or fp16");
  if constexpr (kBf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

}  // namespace moe
