// Index arrays that come from outside, looked over before anything is read or written by them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moe {
namespace MOE_ISA {
namespace {

// Whether every one of `count` indices is -1, for none, or one of `size`. Null is none at all.
inline bool within(const int32_t* index, int64_t count, int64_t size) {
  int32_t low = 0, high = -1;
#pragma omp simd reduction(min : low) reduction(max : high)
  for (int64_t i = 0; i < (index == nullptr ? 0 : count); ++i) low = std::min(low, index[i]), high = std::max(high, index[i]);
  return low >= -1 && high < size;
}

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
