// Index arrays that come from outside, looked over before anything is read or written by them.
#pragma once

#include <cstdint>
#include <type_traits>

namespace moe {
namespace MOE_ISA {
namespace {

// Whether every one of `count` indices is -1, for none, or one of `size`. Null is none at all.
template <class Index>
bool within(const Index* index, int64_t count, int64_t size) {
  using Unsigned = std::make_unsigned_t<Index>;
  Unsigned most = 0;  // of index + 1, where what is below -1 is above all others; std::max would not become vectors
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < (index == nullptr ? 0 : count); ++i) {
    const Unsigned next = Unsigned(index[i]) + 1;
    most = next > most ? next : most;
  }
  return uint64_t(most) <= uint64_t(size);
}

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
