// Launches kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "moe/common/dtypes.h"

namespace moe {

// Without an opt-in, a block has at most kDefaultSharedBytes of shared memory, static and dynamic together. A kernel
// has at most kStaticSharedBytes of static shared memory, as tests/machine/test_machine_code_cuda.py checks.
constexpr int kDefaultSharedBytes = 48 * 1024, kStaticSharedBytes = 16 * 1024;

// The most bytes of shared memory, static and dynamic together, that a block can have on the current device.
inline int64_t shared_memory_limit() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    cudaGetLastError();
  }
  return std::max(bytes, kDefaultSharedBytes);
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, Arguments&&... arguments) {
  if (shared_bytes > kDefaultSharedBytes - kStaticSharedBytes) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) {
      cudaGetLastError();  // clears the error; otherwise the next launch of this thread would report it
      return error;
    }
  }
  kernel<<<grid, block, shared_bytes, stream>>>(std::forward<Arguments>(arguments)...);
  return cudaGetLastError();
}

// Returns run(T{}) for the element type T of `dtype`, or cudaErrorInvalidValue for float64.
template <class Run>
cudaError_t with_element(int dtype, Run run) {
  switch (dtype) {
    case float32: return run(float{});
    case bfloat16: return run(__nv_bfloat16{});
    case float16: return run(__half{});
  }
  return cudaErrorInvalidValue;
}

// Returns run(T{}, Unit{}). Unit is the type in which the kernel accesses rows of T: 16 bytes if `vectorized`, else one
// element.
template <class Run>
cudaError_t with_unit(int dtype, bool vectorized, Run run) {
  return with_element(dtype, [&](auto element) {
    using One = std::conditional_t<sizeof(element) == 2, uint16_t, uint32_t>;
    return vectorized ? run(element, uint4{}) : run(element, One{});
  });
}

}  // namespace moe
