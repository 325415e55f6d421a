// CUDA C++ on the host: with this header a C++ compiler compiles a .cu file, and simt.cpp runs it. Each CUDA thread is
// a fiber, which runs until it ends or waits at a rendezvous (a barrier or a warp collective).
//
// Code that accesses a kernel's memory belongs here, not in simt.cpp: the .cu files, which include this header, are
// compiled with the sanitizers, simt.cpp without.
#pragma once

// CUDA headers that were included before may have defined these macros; those included below do not define them again.
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
#define __shared__ use the macro SHARED of moe/cuda/shared.cuh for shared memory

#include <vector_functions.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <driver_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#ifndef __forceinline__
#define __forceinline__ inline __attribute__((always_inline))
#endif

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

using std::max;
using std::min;

namespace simt {

[[noreturn]] void fail(const char* message);  // ends the process

// Bytes that a block can have: 227 KiB, as on sm_90.
size_t shared_memory_limit();

void launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel);

// Barrier of all threads of a block; returns how many of them passed true.
int barrier(bool vote);

void* shared_variable(const void* key, size_t bytes);
void* dynamic_shared();

template <class T>
T& shared_variable(const void* key) {
  return *static_cast<T*>(shared_variable(key, sizeof(T)));
}

int current_lane();

template <class Lane>
struct Lanes {
  void* const* lane;
  uint32_t mask;
  Lane& operator[](int i) const { return *static_cast<Lane*>(lane[i]); }
  template <class F>
  void each(F f) const {
    for (int i = 0; i < 32; i++) {
      if (mask >> i & 1) f(i, (*this)[i]);
    }
  }
};

// Rendezvous of the lanes in `mask`. The last of them to arrive calls `apply` with the operands of all of them.
using Operation = void (*)(const void* context, void* const* lanes, uint32_t mask);
void meet(uint32_t mask, void* operand, Operation apply, const void* context);

template <class Lane, class F>
void meet(uint32_t mask, Lane& lane, const F& f) {
  const Operation apply = [](const void* context, void* const* lanes, uint32_t members) {
    (*static_cast<const F*>(context))(Lanes<Lane>{lanes, members});
  };
  meet(mask, &lane, apply, &f);
}

// in_segment: whether CUDA's argument `width` lets the lane read `source`. If not, the lane keeps its value.
template <class T>
T shuffle(uint32_t mask, T value, int source, bool in_segment) {
  struct Lane {
    T value;
    int source;
  } lane{value, in_segment ? source : current_lane()};
  if (!(mask >> lane.source & 1)) fail("a shuffle reads a lane outside its mask");
  meet(mask, lane, [](Lanes<Lane> lanes) {
    T values[32];
    lanes.each([&](int i, Lane& each) { values[i] = each.value; });
    lanes.each([&](int, Lane& each) { each.value = values[each.source]; });
  });
  return lane.value;
}

inline int segment_start(int width) { return current_lane() & ~(width - 1); }

template <class T, class Combine>
T reduce(uint32_t mask, T value, Combine combine) {
  meet(mask, value, [&](Lanes<T> lanes) {
    T total = lanes[__builtin_ctz(lanes.mask)];
    lanes.each([&](int i, T& each) { total = i == __builtin_ctz(lanes.mask) ? each : combine(total, each); });
    lanes.each([&](int, T& each) { each = total; });
  });
  return value;
}

template <class To, class From>
To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

}  // namespace simt

inline void __syncthreads() { simt::barrier(false); }
inline int __syncthreads_or(int predicate) { return simt::barrier(predicate != 0) != 0; }

inline void __syncwarp(uint32_t mask = 0xffffffffu) {
  struct Lane {
  } lane;
  simt::meet(mask, lane, [](simt::Lanes<Lane>) {});
}

template <class T>
T __shfl_sync(uint32_t mask, T value, int source, int width = 32) {
  return simt::shuffle(mask, value, simt::segment_start(width) + (source & (width - 1)), true);
}

template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32) {
  const int source = simt::current_lane() - static_cast<int>(delta);
  return simt::shuffle(mask, value, source, source >= simt::segment_start(width));
}

template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32) {
  const int source = simt::current_lane() + static_cast<int>(delta);
  return simt::shuffle(mask, value, source, source < simt::segment_start(width) + width);
}

template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int flip, int width = 32) {
  const int source = simt::current_lane() ^ flip;
  return simt::shuffle(mask, value, source, source < simt::segment_start(width) + width);
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
  uint32_t votes = predicate != 0;
  simt::meet(mask, votes, [](simt::Lanes<uint32_t> lanes) {
    uint32_t word = 0;
    lanes.each([&](int i, uint32_t& vote) { word |= vote << i; });
    lanes.each([&](int, uint32_t& vote) { vote = word; });
  });
  return votes;
}

inline int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

template <class T>
uint32_t __match_any_sync(uint32_t mask, T value) {
  struct Lane {
    T value;
    uint32_t equals;
  } lane{value, 0};
  simt::meet(mask, lane, [](simt::Lanes<Lane> lanes) {
    lanes.each([&](int i, Lane& one) {
      lanes.each([&](int, Lane& other) { other.equals |= uint32_t(other.value == one.value) << i; });
    });
  });
  return lane.equals;
}

template <class T>
T __reduce_add_sync(uint32_t mask, T value) {
  return simt::reduce(mask, value, [](T a, T b) { return T(unsigned(a) + unsigned(b)); });
}

template <class T>
T __reduce_min_sync(uint32_t mask, T value) {
  return simt::reduce(mask, value, [](T a, T b) { return std::min(a, b); });
}

template <class T>
T __reduce_max_sync(uint32_t mask, T value) {
  return simt::reduce(mask, value, [](T a, T b) { return std::max(a, b); });
}

template <class T>
T atomicAdd(T* address, T value) {
  static_assert(std::is_integral_v<T>, "floating-point atomics are not repeatable; no kernel here may use them");
  const T old = *address;
  *address = old + value;
  return old;
}

inline int __popc(uint32_t word) { return __builtin_popcount(word); }

inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 4; i++) c += uint32_t(uint8_t(a >> 8 * i)) * uint8_t(b >> 8 * i);
  return c;
}

inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) result |= uint32_t(uint8_t(bytes >> 8 * (selector >> 4 * i & 7))) << 8 * i;
  return result;
}

inline uint32_t __float_as_uint(float value) { return simt::bits<uint32_t>(value); }
inline float __uint_as_float(uint32_t value) { return simt::bits<float>(value); }
inline float __int_as_float(int value) { return simt::bits<float>(value); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

namespace simt {

template <int BYTES>
void async_copy(void* destination, const void* source, int valid) {
  for (int i = 0; i < BYTES; i++) {
    static_cast<char*>(destination)[i] = i < valid ? static_cast<const char*>(source)[i] : 0;
  }
}

// ldmatrix.x4: lane 8 m + r reads row r of matrix m at its own address, then the lanes exchange elements.
template <bool TRANSPOSED>
void load_matrix(uint32_t (&fragment)[4], const void* row) {
  struct Lane {
    uint16_t row[8];
    uint32_t fragment[4];
  } lane{};
  std::memcpy(lane.row, row, sizeof lane.row);
  meet(0xffffffffu, lane, [](Lanes<Lane> lanes) {
    lanes.each([&](int i, Lane& to) {
      for (int m = 0; m < 4; m++) {
        uint32_t halves[2];
        for (int h = 0; h < 2; h++) {
          const int r = i / 4, c = i % 4 * 2 + h;
          halves[h] = TRANSPOSED ? lanes[8 * m + c].row[r] : lanes[8 * m + r].row[c];
        }
        to.fragment[m] = halves[0] | halves[1] << 16;
      }
    });
  });
  std::memcpy(fragment, lane.fragment, sizeof fragment);
}

float float_of_half(uint16_t bits);

template <bool BF16>
float float_of_16(uint32_t word, int half) {
  const uint16_t element = static_cast<uint16_t>(word >> 16 * half);
  if constexpr (BF16) return bits<float>(uint32_t(element) << 16);
  return float_of_half(element);
}

// Adds the products in the order of k, in float32. A GPU may add in another order and round differently.
template <bool BF16>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Lane {
    float c[4];
    uint32_t a[4], b[2];
  } lane;
  std::memcpy(lane.c, c, sizeof c);
  std::memcpy(lane.a, a, sizeof a);
  std::memcpy(lane.b, b, sizeof b);
  meet(0xffffffffu, lane, [](Lanes<Lane> lanes) {
    float left[16][16], right[8][16];
    lanes.each([&](int i, Lane& from) {
      const int group = i / 4, pair = i % 4;
      for (int e = 0; e < 8; e++) {
        left[group + 8 * (e / 2 % 2)][2 * pair + e % 2 + 8 * (e / 4)] = float_of_16<BF16>(from.a[e / 2], e % 2);
      }
      for (int e = 0; e < 4; e++) {
        right[group][2 * pair + e % 2 + 8 * (e / 2)] = float_of_16<BF16>(from.b[e / 2], e % 2);
      }
    });
    lanes.each([&](int i, Lane& to) {
      for (int e = 0; e < 4; e++) {
        const int row = i / 4 + 8 * (e / 2), column = i % 4 * 2 + e % 2;
        for (int k = 0; k < 16; k++) to.c[e] += left[row][k] * right[column][k];
      }
    });
  });
  std::memcpy(c, lane.c, sizeof c);
}

}  // namespace simt
