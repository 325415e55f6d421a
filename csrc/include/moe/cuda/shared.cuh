// Macros with which kernels declare all their shared memory. In the emulation on the host (tests/simt) each variable is
// a heap block of its own, filled with 0xFF again for each block of threads, so that tests can find overruns and reads
// of unwritten elements.
//
//   SHARED(float, tile, [16][17]);           __shared__ float tile[16][17];
//   DYNAMIC_SHARED(uint4, stage);            uint4* stage, which points to the bytes that the launch requested
#pragma once

#include "moe/cuda/platform.cuh"

#ifdef SIMT_HOST
#define SHARED(T, name, dims)                  \
  typedef T simt_shared_type_##name dims;      \
  static const char simt_shared_key_##name{};  \
  simt_shared_type_##name& name = simt::shared_variable<simt_shared_type_##name>(&simt_shared_key_##name)
#define DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(simt::dynamic_shared())
#else
#define SHARED(T, name, dims) __shared__ T name dims
#define DYNAMIC_SHARED(T, name)                                          \
  extern __shared__ __align__(128) unsigned char moe_dynamic_shared[];   \
  T* const name = reinterpret_cast<T*>(moe_dynamic_shared)
#endif

#ifndef SIMT_HOST
namespace moe {

// The 32-bit shared-memory address that PTX instructions take.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace moe
#endif
