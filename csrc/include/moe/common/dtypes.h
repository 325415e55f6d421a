// Codes of element types, as in moe_kernels/backends/_addresses.py. Plain C++: CPU and CUDA kernels include this.
#pragma once

#include <cstdint>

namespace moe {

enum DType : int { float32 = 0, bfloat16 = 1, float16 = 2, float64 = 3 };

constexpr int64_t element_size(int dtype) {
  return dtype == float64 ? 8 : dtype == float32 ? 4 : 2;
}

}  // namespace moe
