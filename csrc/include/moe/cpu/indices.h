#pragma once

#include <cstdint>
#include <type_traits>

namespace moe {
namespace MOE_ISA {
namespace {

// Whether each of `count` indices is from `least` (-1: none, or 0) to size - 1. True for a null pointer.
template <class Index>
bool within(const Index* index, int64_t count, int64_t size, Index least = -1) {
  using Unsigned = std::make_unsigned_t<Index>;
  if (index == nullptr || count == 0) return true;
  Unsigned most = 0;  // the largest distance from `least`, unsigned: an index below `least` becomes huge
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < count; ++i) {
    const Unsigned distance = Unsigned(index[i]) - Unsigned(least);
    most = distance > most ? distance : most;
  }
  return uint64_t(most) < uint64_t(size - least);
}

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
