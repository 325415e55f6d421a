// What a thread holds of a row of k-winner-take-all, and how it counts: elements as they are in memory, compared as
// floating-point numbers, two of 16 bits an instruction; or as ordered integers (moe/keys.cuh) in rows that hold a NaN.
#pragma once

#include "moe/block.cuh"
#include "moe/halves.cuh"
#include "moe/keys.cuh"
#include "moe/vector.cuh"

namespace moe {
namespace {

// The threads that hold one row: LANES of a warp, whose other lanes hold other rows, or a block, for which LANES is 0. All
// lanes of a warp call each function together.
template <int LANES>
struct Team {
  static constexpr bool kBlock = LANES == 0, kShared = LANES > 0 && LANES < kWarpSize;
  static constexpr int kLanes = kBlock ? kWarpSize : LANES;

  Exchange<int>* counts;
  uint32_t (*slots)[kMaxWarps];  // for `share`
  int turn = 0;
  int rank = kBlock ? threadIdx.x : threadIdx.x % kLanes;
  int lane = threadIdx.x % kLanes;
  int size = kBlock ? blockDim.x : LANES;

  // Whether it holds for any row of this warp, given what holds for this row.
  __device__ static bool any(bool here) {
    if constexpr (kShared) return __any_sync(kAllLanes, here);
    return here;
  }

  // Over the lanes of this warp that hold the row.
  template <class T>
  __device__ static T lane_sum(T value) {
    if constexpr (kShared) {
#pragma unroll
      for (int offset = LANES / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
      return value;
    } else {
      return static_cast<T>(__reduce_add_sync(kAllLanes, value));
    }
  }

  __device__ int sum(int value) {
    if constexpr (kBlock) value = exchange_warp_sums(value, *counts, turn);
    return lane_sum(value);
  }

  // The sum over the threads of the row before this one; total receives that over all.
  __device__ int sum_before(int value, int& total) {
    const int inclusive = warp_inclusive_sum(value, lane);
    const int warp_total = exchange_warp_sums(value, *counts, turn);
    total = warp_sum(warp_total);
    return warp_sum(lane < rank / kWarpSize ? warp_total : 0) + inclusive - value;
  }

  // Several values at once: over this warp, over the warps before it, and over all. A team calls it once.
  template <int COUNT>
  __device__ void share(uint32_t (&values)[COUNT], uint32_t (&before)[COUNT], uint32_t (&total)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) total[i] = values[i] = lane_sum(values[i]), before[i] = 0;
    if constexpr (kBlock) {
      const int warp = rank / kWarpSize, warps = size / kWarpSize;
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) slots[i][warp] = values[i];
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        const uint32_t of_warp = lane < warps ? slots[i][lane] : 0;
        total[i] = __reduce_add_sync(kAllLanes, of_warp);
        before[i] = __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0);
      }
    }
  }
};

// How the elements of a register compare with a threshold in each, without being made into keys first: -0
// equals 0, and nothing compares with a NaN. bfloat16 compares as float16 does, bit pattern by bit pattern; of its values
// those from 2^121 on would be NaN there.
template <class T>
struct Plain {
  static constexpr int kInfinity = 0x7c00;  // the key, and its negative, that plain rows lie between

  __device__ static uint32_t reaching(uint32_t x, uint32_t threshold) { return half2_reaches(x, threshold); }
  __device__ static uint32_t equal(uint32_t x, uint32_t threshold) { return half2_equals(x, threshold); }
  __device__ static void check(uint32_t word, uint32_t& found) { found = half2_add(found, word); }
  __device__ static bool is_plain(uint32_t found) { return !half2_has_nan(found); }
};

template <>
struct Plain<float> {
  static constexpr int kInfinity = 0x7f800000;

  __device__ static uint32_t reaching(uint32_t x, uint32_t threshold) { return float_reaches(x, threshold); }
  __device__ static void check(uint32_t word, uint32_t& found) {
    found = __float_as_uint(__uint_as_float(found) + __uint_as_float(word));
  }
  __device__ static bool is_plain(uint32_t found) { return __uint_as_float(found) == __uint_as_float(found); }
};

// A row, WORDS registers (1 or 4) at a time: chunk c of a thread holds kVector consecutive elements, and the chunks of
// the team's threads follow each other. With CHUNKS > 0 all of a thread's elements stay in registers; with 0 they are
// read again each time.
template <class T, int WORDS, int CHUNKS>
struct Row {
  using Order = Key<T>;
  static constexpr bool kResident = CHUNKS > 0;
  static constexpr int kPerWord = Order::kPerWord, kVector = WORDS * kPerWord;

  const T* x;  // (n)
  int n, rank, size;
  bool whole_words;
  bool plain = true;  // the same for the whole row: `resident` holds elements, NaN outside the row; else keys, 0 outside
  uint32_t resident[kResident ? CHUNKS : 1][WORDS];

  __device__ int chunks() const { return kResident ? CHUNKS : (n + size * kVector - 1) / (size * kVector); }
  __device__ int position(int chunk) const { return (chunk * size + rank) * kVector; }
  // Positions take a register each if they are kept from one loop over the chunks to the next.
  __device__ void forget_positions() {
    recompute(rank);
    recompute(size);
  }
  // With four words a chunk lies inside the row or outside as a whole.
  __device__ bool inside(int first, int i) const { return (WORDS == 4 ? first : first + i) < n; }

  // The elements of one chunk as they are in memory, and zeros for what lies outside the row.
  __device__ void read(const T* from, int first, uint32_t (&words)[WORDS]) const {
#pragma unroll
    for (int w = 0; w < WORDS; w++) words[w] = 0;
    if (first >= n) return;
    if constexpr (WORDS == 4) {
      const uint4 vector = load(reinterpret_cast<const uint4*>(from + first));
      words[0] = vector.x, words[1] = vector.y, words[2] = vector.z, words[3] = vector.w;
    } else if (kPerWord == 1 || whole_words) {
      words[0] = load(reinterpret_cast<const uint32_t*>(from + first));
    } else {
      const auto* halves = reinterpret_cast<const uint16_t*>(from + first);
      words[0] = load(halves) | (first + 1 < n ? load(halves + 1) : 0u) << 16;
    }
  }

  __device__ void write(T* to, int first, const uint32_t (&words)[WORDS]) const {
    if constexpr (WORDS == 4) {
      store_streaming(reinterpret_cast<uint4*>(to + first), make_uint4(words[0], words[1], words[2], words[3]));
    } else if (kPerWord == 1 || whole_words) {
      store_streaming(reinterpret_cast<uint32_t*>(to + first), words[0]);
    } else {
      auto* halves = reinterpret_cast<uint16_t*>(to + first);
      halves[0] = static_cast<uint16_t>(words[0]);
      if (first + 1 < n) halves[1] = static_cast<uint16_t>(words[0] >> 16);
    }
  }

  __device__ static uint32_t element(uint32_t word, int i) {
    return kPerWord == 1 ? word : word >> 16 * (i % kPerWord) & 0xffffu;
  }

  // What lies outside the row becomes NaN, which no threshold counts.
  __device__ void fill_outside(int first, uint32_t (&words)[WORDS]) const {
    if (inside(first, kVector - 1)) return;
#pragma unroll
    for (int w = 0; w < WORDS; w++) words[w] |= inside(first, 0) ? 0xffff0000u : 0xffffffffu;
  }

  // Turns words into keys; what lies outside the row gets 0, which no threshold is as low as.
  __device__ void make_keys(int first, uint32_t (&words)[WORDS]) const {
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      uint32_t keys = 0;
#pragma unroll
      for (int i = 0; i < kPerWord; i++) {
        const uint32_t bits = element(words[w], i);
        const float value = Order::value(bits);
        uint32_t key = value == value ? Order::kZero + Order::key(bits) : Order::kNaN;
        if (!inside(first, i)) key = 0;
        keys |= key << (32 / kPerWord % 32 * i);
      }
      words[w] = keys;
    }
  }

  // Sums of the elements of a word and of their squares: of the first of four, as a first guess needs no more.
  __device__ static void add_moments(uint32_t word, float2& moments) {
#pragma unroll
    for (int i = 0; i < kPerWord; i++) {
      const float value = Order::value(element(word, i));
      moments.x += value;
      moments.y = __fmaf_rn(value, value, moments.y);
    }
  }
  __device__ int sampled() const { return n / WORDS; }  // elements that the moments are of

  // Reads the row: the moments of this thread's elements, NaN where the row is not plain.
  __device__ float2 enter() {
    float2 moments = {0.0f, 0.0f};
    uint32_t found = 0;
    if constexpr (kResident) {
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) read(x, position(c), resident[c]);
    }
#pragma unroll
    for (int c = 0; c < chunks(); c++) {
      uint32_t words[WORDS];
      if constexpr (kResident) {
#pragma unroll
        for (int w = 0; w < WORDS; w++) words[w] = resident[c][w];
      } else {
        read(x, position(c), words);
      }
      add_moments(words[0], moments);
#pragma unroll
      for (int w = 0; w < WORDS; w++) Plain<T>::check(words[w], found);
    }
    if (!Plain<T>::is_plain(found)) moments.x = NAN;
    return moments;
  }

  // After the team has agreed on `plain`.
  __device__ void settle() {
    if constexpr (!kResident) return;
    forget_positions();
    if (!plain) {
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        recompute(resident[c]);
        make_keys(position(c), resident[c]);
      }
    } else if (n < CHUNKS * size * kVector) {
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) fill_outside(position(c), resident[c]);
    }
  }

  __device__ void chunk(int c, uint32_t (&words)[WORDS]) const {
    if constexpr (kResident) {
#pragma unroll
      for (int w = 0; w < WORDS; w++) words[w] = resident[c][w];
    } else {
      read(x, position(c), words);
      if (plain) fill_outside(position(c), words);
      else make_keys(position(c), words);
    }
  }

  // A threshold given as a key: each element of a register holds it.
  __device__ uint32_t threshold(int key) const {
    return Order::in_each(plain ? Order::bits(key) : Order::kZero + key);
  }

  // A sum over words from which `counted` tells how many of their elements reach the threshold.
  template <bool PLAIN>
  __device__ static int add_count(const uint32_t (&words)[WORDS], uint32_t threshold, int total) {
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      if constexpr (kPerWord == 2) {
        const uint32_t mask = PLAIN ? Plain<T>::reaching(words[w], threshold) : Order::reaching(words[w], threshold);
        total -= static_cast<int>(mask);
      } else {
        total = PLAIN ? count_float_reaching(words[w], threshold, total) : count_reaching(words[w], threshold, total);
      }
    }
    return total;
  }
  __device__ static int counted(int total) {
    if constexpr (kPerWord == 2) return count_halves(static_cast<uint32_t>(total));
    return total;
  }

  // How many of this thread's elements reach a threshold.
  template <bool PLAIN>
  __device__ int count(uint32_t threshold) const {
    int total = 0, sum = 0;
#pragma unroll
    for (int c = 0; c < chunks(); c++) {
      uint32_t words[WORDS];
      chunk(c, words);
      sum = add_count<PLAIN>(words, threshold, sum);
      if constexpr (!kResident) total += counted(sum), sum = 0;
    }
    return total + counted(sum);
  }
  __device__ int count(uint32_t threshold) const {
    return plain ? count<true>(threshold) : count<false>(threshold);
  }

  // All bits of the elements that reach a threshold.
  __device__ void reaching(const uint32_t (&words)[WORDS], uint32_t threshold, uint32_t (&masks)[WORDS]) const {
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      masks[w] = plain ? Plain<T>::reaching(words[w], threshold) : Order::reaching(words[w], threshold);
    }
  }

  // How many elements of a chunk lie between the thresholds: where they are neighbours, plain ones equal the lower.
  __device__ int count_ties(const uint32_t (&words)[WORDS], uint32_t above, uint32_t tied) const {
    if (!plain) return counted(add_count<false>(words, tied, 0)) - counted(add_count<false>(words, above, 0));
    int total = 0;
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      if constexpr (kPerWord == 2) total -= static_cast<int>(Plain<T>::equal(words[w], tied));
      else total = count_float_equal(words[w], tied, total);
    }
    return counted(total);
  }
};

}  // namespace
}  // namespace moe
