#pragma once

#include <cstdint>
#include <type_traits>

namespace moe {
namespace MOE_ISA {
namespace {

// Whether each of `count` indices is from -1 (none) to size - 1. True for a null pointer.
template <class Index>
bool within(const Index* index, int64_t count, int64_t size) {
  using Unsigned = std::make_unsigned_t<Index>;
  Unsigned most = 0;  // the largest index + 1, unsigned: an index below -1 becomes huge
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
