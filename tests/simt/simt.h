// CUDA C++ on the host: what a .cu file needs in order to compile with a plain C++ compiler and run under the
// executor in simt.cpp. Each CUDA thread is a fiber that runs until a rendezvous (a barrier, a warp collective) or
// its end; which fiber runs next is decided by the seed. Misuse raises simt::Error.
//
// Code here is compiled together with the kernels, hence with the sanitizers of their build: a kernel's own memory
// accesses belong here and the bookkeeping in simt.cpp, which is always compiled without.
#pragma once

// CUDA's headers leave these alone where they are defined, and may have come first.
#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __shared__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __launch_bounds__(...)
#define __shared__ use the macro SHARED of moe/shared.cuh for shared memory

#include <vector_functions.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <driver_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

#ifndef __forceinline__
#define __forceinline__ inline __attribute__((always_inline))
#endif

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
constexpr int warpSize = 32;

using std::max;
using std::min;

namespace simt {

// The place of a call in a kernel, taken by a default argument.
struct Where {
  const char* file;
  int line;
  static Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// 0 runs threads and blocks in order, 1 in reverse; even seeds pick any thread that can run; odd ones give every warp
// a random priority.
void set_seed(int seed);

// The most shared memory of a block, as an sm_90 would report it: 227 KiB.
size_t shared_memory_limit();

void launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel);

[[noreturn]] void fail(const std::string& message, Where where);

// A kernel with a loop that waits for another thread comes here through its atomics.
void step(Where where);

void block_barrier(Where where);
int block_barrier_count(bool predicate, Where where);
void named_barrier(int barrier, int threads, Where where = Where::here());

void* shared_variable(const void* key, size_t bytes, size_t alignment);
void* dynamic_shared();
bool is_shared(const void* pointer, size_t bytes);

template <class T>
T& shared_variable(const void* key) {
  return *static_cast<T*>(shared_variable(key, sizeof(T), alignof(T)));
}

// The lanes of `mask` meet: the last to arrive applies the operation to what all of them brought.
using Operation = void (*)(const void* context, void* const* lanes, uint32_t mask);
void meet(const char* name, uint32_t mask, void* brought, Operation apply, const void* context, Where where);
int current_lane();

template <class Lane>
struct Lanes {
  void* const* lane;
  uint32_t mask;
  bool has(int i) const { return i >= 0 && i < 32 && (mask >> i & 1); }
  Lane& operator[](int i) const { return *static_cast<Lane*>(lane[i]); }
  template <class F>
  void each(F f) const {
    for (int i = 0; i < 32; i++) {
      if (has(i)) f(i, (*this)[i]);
    }
  }
};

template <class Lane, class F>
void meet(const char* name, uint32_t mask, Lane& lane, const F& f, Where where) {
  const Operation apply = [](const void* context, void* const* lanes, uint32_t members) {
    (*static_cast<const F*>(context))(Lanes<Lane>{lanes, members});
  };
  meet(name, mask, &lane, apply, &f, where);
}

}  // namespace simt

#include "simt_cuda.h"
#include "simt_sm80.h"
