// CUDA's own functions, under their own names: barriers, warp collectives, atomics, bits. Included by simt.h.
#pragma once

inline void __syncthreads(simt::Where where = simt::Where::here()) { simt::block_barrier(where); }

inline int __syncthreads_count(int predicate, simt::Where where = simt::Where::here()) {
  return simt::block_barrier_count(predicate != 0, where);
}

inline int __syncthreads_or(int predicate, simt::Where where = simt::Where::here()) {
  return simt::block_barrier_count(predicate != 0, where) != 0;
}

inline int __syncthreads_and(int predicate, simt::Where where = simt::Where::here()) {
  return simt::block_barrier_count(predicate == 0, where) == 0;
}

inline void __syncwarp(uint32_t mask = 0xffffffffu, simt::Where where = simt::Where::here()) {
  struct Lane {
  } lane;
  simt::meet("__syncwarp", mask, lane, [](simt::Lanes<Lane>) {}, where);
}

inline void __threadfence() {}
inline void __threadfence_block() {}
uint32_t __activemask() = delete;  // names whichever lanes happen to be together: nothing can be built on it

namespace simt {

template <class T>
struct ShuffleLane {
  T value;
  int source;
};

// A lane that reads outside its segment keeps its own value; one that reads a lane outside the mask has no result.
template <class T>
T shuffle(const char* name, uint32_t mask, T value, int source, bool in_segment, Where where) {
  ShuffleLane<T> lane{value, in_segment ? source : current_lane()};
  if (!(mask >> lane.source & 1)) {
    fail(std::string(name) + " reads lane " + std::to_string(lane.source) + ", which its mask leaves out", where);
  }
  meet(name, mask, lane, [](Lanes<ShuffleLane<T>> lanes) {
    T values[32];
    lanes.each([&](int i, ShuffleLane<T>& each) { values[i] = each.value; });
    lanes.each([&](int, ShuffleLane<T>& each) { each.value = values[each.source]; });
  }, where);
  return lane.value;
}

inline int segment_start(int width) { return current_lane() & ~(width - 1); }

template <class T, class Combine>
T reduce(const char* name, uint32_t mask, T value, Combine combine, Where where) {
  meet(name, mask, value, [&](Lanes<T> lanes) {
    bool first = true;
    T total{};
    lanes.each([&](int, T& each) {
      total = first ? each : combine(total, each);
      first = false;
    });
    lanes.each([&](int, T& each) { each = total; });
  }, where);
  return value;
}

}  // namespace simt

template <class T>
T __shfl_sync(uint32_t mask, T value, int source, int width = 32, simt::Where where = simt::Where::here()) {
  return simt::shuffle("__shfl_sync", mask, value, simt::segment_start(width) + (source & (width - 1)), true, where);
}

template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32, simt::Where where = simt::Where::here()) {
  const int source = simt::current_lane() - static_cast<int>(delta);
  return simt::shuffle("__shfl_up_sync", mask, value, source, source >= simt::segment_start(width), where);
}

template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32, simt::Where where = simt::Where::here()) {
  const int source = simt::current_lane() + static_cast<int>(delta);
  return simt::shuffle("__shfl_down_sync", mask, value, source, source < simt::segment_start(width) + width, where);
}

template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int flip, int width = 32, simt::Where where = simt::Where::here()) {
  const int source = simt::current_lane() ^ flip;
  return simt::shuffle("__shfl_xor_sync", mask, value, source, source < simt::segment_start(width) + width, where);
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate, simt::Where where = simt::Where::here()) {
  uint32_t votes = predicate != 0;
  simt::meet("__ballot_sync", mask, votes, [](simt::Lanes<uint32_t> lanes) {
    uint32_t word = 0;
    lanes.each([&](int i, uint32_t& vote) { word |= vote << i; });
    lanes.each([&](int, uint32_t& vote) { vote = word; });
  }, where);
  return votes;
}

inline int __any_sync(uint32_t mask, int predicate, simt::Where where = simt::Where::here()) {
  return __ballot_sync(mask, predicate, where) != 0;
}

inline int __all_sync(uint32_t mask, int predicate, simt::Where where = simt::Where::here()) {
  return __ballot_sync(mask, predicate, where) == mask;
}

template <class T>
uint32_t __match_any_sync(uint32_t mask, T value, simt::Where where = simt::Where::here()) {
  struct Lane {
    T value;
    uint32_t equals;
  } lane{value, 0};
  simt::meet("__match_any_sync", mask, lane, [](simt::Lanes<Lane> lanes) {
    lanes.each([&](int i, Lane& one) {
      lanes.each([&](int, Lane& other) { other.equals |= uint32_t(other.value == one.value) << i; });
    });
  }, where);
  return lane.equals;
}

template <class T>
T __reduce_add_sync(uint32_t mask, T value, simt::Where where = simt::Where::here()) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4, "redux.sync adds 32-bit integers");
  return simt::reduce("__reduce_add_sync", mask, value, [](T a, T b) { return T(unsigned(a) + unsigned(b)); }, where);
}

template <class T>
T __reduce_min_sync(uint32_t mask, T value, simt::Where where = simt::Where::here()) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4, "redux.sync takes 32-bit integers");
  return simt::reduce("__reduce_min_sync", mask, value, [](T a, T b) { return std::min(a, b); }, where);
}

template <class T>
T __reduce_max_sync(uint32_t mask, T value, simt::Where where = simt::Where::here()) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4, "redux.sync takes 32-bit integers");
  return simt::reduce("__reduce_max_sync", mask, value, [](T a, T b) { return std::max(a, b); }, where);
}

inline uint32_t __reduce_or_sync(uint32_t mask, uint32_t value, simt::Where where = simt::Where::here()) {
  return simt::reduce("__reduce_or_sync", mask, value, [](uint32_t a, uint32_t b) { return a | b; }, where);
}

// Atomics are real ones, so that the race detector recognises them.
namespace simt {
template <class T, class F>
T atomic(T* address, F next, Where where) {
  step(where);
  T old = __atomic_load_n(address, __ATOMIC_RELAXED);
  T desired = next(old);
  while (!__atomic_compare_exchange(address, &old, &desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    desired = next(old);
  }
  return old;
}
}  // namespace simt

template <class T>
T atomicAdd(T* address, T value, simt::Where where = simt::Where::here()) {
  static_assert(std::is_integral_v<T>, "floating-point atomics are not repeatable; no kernel here may use them");
  return simt::atomic(address, [&](T old) { return T(old + value); }, where);
}

template <class T>
T atomicMax(T* address, T value, simt::Where where = simt::Where::here()) {
  return simt::atomic(address, [&](T old) { return std::max(old, value); }, where);
}

template <class T>
T atomicMin(T* address, T value, simt::Where where = simt::Where::here()) {
  return simt::atomic(address, [&](T old) { return std::min(old, value); }, where);
}

template <class T>
T atomicOr(T* address, T value, simt::Where where = simt::Where::here()) {
  return simt::atomic(address, [&](T old) { return T(old | value); }, where);
}

template <class T>
T atomicExch(T* address, T value, simt::Where where = simt::Where::here()) {
  return simt::atomic(address, [&](T) { return value; }, where);
}

template <class T>
T atomicCAS(T* address, T expected, T value, simt::Where where = simt::Where::here()) {
  return simt::atomic(address, [&](T old) { return old == expected ? value : old; }, where);
}

inline int __popc(uint32_t word) { return __builtin_popcount(word); }
inline int __clz(uint32_t word) { return word ? __builtin_clz(word) : 32; }
inline int __ffs(uint32_t word) { return __builtin_ffs(static_cast<int>(word)); }

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

inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += int8_t(a >> 8 * i) * int8_t(b >> 8 * i);
  return c;
}

namespace simt {
template <class To, class From>
To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}
}  // namespace simt

inline uint32_t __float_as_uint(float value) { return simt::bits<uint32_t>(value); }
inline float __uint_as_float(uint32_t value) { return simt::bits<float>(value); }
inline int __float_as_int(float value) { return simt::bits<int>(value); }
inline float __int_as_float(int value) { return simt::bits<float>(value); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __expf(float value) { return std::exp(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
