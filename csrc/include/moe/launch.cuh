// Starting a kernel: one call for nvcc and for the host, with the error as its result.
#pragma once

#include <utility>

#include "moe/platform.cuh"

namespace moe {

// Without an opt-in, a launch may ask for at most this much dynamic shared memory.
constexpr int kDefaultSharedBytes = 48 * 1024;

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, Arguments&&... arguments) {
#ifdef SIMT_HOST
  (void)stream;
  simt::launch(grid, block, shared_bytes, [&] { kernel(Parameters(arguments)...); });
  return cudaSuccess;
#else
  if (shared_bytes > kDefaultSharedBytes) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  kernel<<<grid, block, shared_bytes, stream>>>(std::forward<Arguments>(arguments)...);
  return cudaGetLastError();
#endif
}

}  // namespace moe
