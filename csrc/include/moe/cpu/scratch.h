// Memory that lives as long as one call.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace moe {
namespace MOE_ISA {
namespace {

// Uninitialised memory: `count` elements for each thread, rounded up to a multiple of 16 (a cache line of float).
template <class T>
class Scratch {
 public:
  Scratch(int threads, int64_t count)
      : stride_((count + 15) / 16 * 16), memory_(static_cast<T*>(::operator new(bytes(threads * stride_), kLine))) {}
  T* of(int thread) const { return memory_.get() + thread * stride_; }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(T* memory) const { ::operator delete(memory, kLine); }
  };
  static size_t bytes(int64_t count) { return size_t(count) * sizeof(T); }

  int64_t stride_;
  std::unique_ptr<T[], Free> memory_;
};

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
