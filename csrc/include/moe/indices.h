// Index arrays that come from outside, looked over before anything is read or written by them.
#pragma once

#include <cstdint>

namespace moe {
namespace MOE_ISA {
namespace {

// Whether every one of `count` indices is -1, for none, or one of `size`. Null is none at all.
inline bool within(const int32_t* index, int64_t count, int64_t size) {
  uint32_t most = 0;  // of index + 1, where what is below -1 is above all others; std::max would not become vectors
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < (index == nullptr ? 0 : count); ++i) {
    const uint32_t next = uint32_t(index[i]) + 1;
    most = next > most ? next : most;
  }
  return int64_t(most) <= size;
}

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
