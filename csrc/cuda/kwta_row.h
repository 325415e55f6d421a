// What a thread holds of a row of k-winner-take-all, and how it counts: elements as they are in memory, compared as
// floating-point numbers, two of 16 bits an instruction; or as ordered integers (moe/keys.cuh) in rows that hold a NaN.
#pragma once

#include "moe/block.cuh"
#include "moe/halves.cuh"
#include "moe/keys.cuh"
#include "moe/vector.cuh"

namespace moe {
namespace {

// The threads that hold one row: a warp, or a block.
template <bool BLOCK>
struct Team {
  Exchange<int>* counts;
  uint32_t (*slots)[kMaxWarps];  // for `share`
  int turn = 0;
  int rank = BLOCK ? threadIdx.x : threadIdx.x % kWarpSize;
  int lane = threadIdx.x % kWarpSize;
  int size = BLOCK ? blockDim.x : kWarpSize;

  __device__ int sum(int value) {
    if constexpr (!BLOCK) return warp_sum(value);
    return warp_sum(exchange_warp_sums(value, *counts, turn));
  }

  // The sum over the threads before this one; total receives that over all.
  __device__ int sum_before(int value, int& total) {
    const int inclusive = warp_inclusive_sum(value, lane);
    int before = 0;
    if constexpr (BLOCK) {
      const int warp_total = exchange_warp_sums(value, *counts, turn);
      total = warp_sum(warp_total);
      before = warp_sum(lane < rank / kWarpSize ? warp_total : 0);
    } else {
      total = __shfl_sync(kAllLanes, inclusive, kWarpSize - 1);
    }
    return before + inclusive - value;
  }

  // Several values at once: over this warp, over the warps before it, and over all. A team calls it once.
  template <int COUNT>
  __device__ void share(uint32_t (&values)[COUNT], uint32_t (&before)[COUNT], uint32_t (&total)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) total[i] = values[i] = __reduce_add_sync(kAllLanes, values[i]), before[i] = 0;
    if constexpr (BLOCK) {
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
  static constexpr uint32_t kInfinity = 0x7c00u, kMinusInfinity = 0xfc00u;  // what plain rows lie between

  __device__ static uint32_t reaching(uint32_t x, uint32_t threshold) { return half2_reaches(x, threshold); }
  __device__ static uint32_t equal(uint32_t x, uint32_t threshold) { return half2_equals(x, threshold); }
  __device__ static void check(uint32_t word, uint32_t& found) { found = half2_add(found, word); }
  __device__ static bool is_plain(uint32_t found) { return !half2_has_nan(found); }
};

template <>
struct Plain<float> {
  static constexpr uint32_t kInfinity = 0x7f800000u, kMinusInfinity = 0xff800000u;

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
    uint32_t nan[WORDS] = {};
#pragma unroll
    for (int i = 0; i < kVector; i++) {
      const float value = Order::value(element(words[i / kPerWord], i));
      if (value != value) nan[i / kPerWord] |= Order::mask(1u << (i % kPerWord));
    }
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      words[w] = (Order::keys(words[w]) & ~nan[w]) | (Order::in_each(Order::kNaN) & nan[w]);
      if (!inside(first, 0)) words[w] = 0;
    }
    if (kVector == 2 && !inside(first, 1)) words[0] &= 0xffffu;
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
  __device__ uint32_t threshold(uint32_t key) const { return Order::in_each(plain ? Order::bits(key) : key); }

  // total + how many elements of the chunk reach the threshold.
  template <bool PLAIN>
  __device__ static int add_count(const uint32_t (&words)[WORDS], uint32_t threshold, int total) {
    const auto reaches = [&](int w) {
      if constexpr (PLAIN) return Plain<T>::reaching(words[w], threshold);
      return reaches_u16x2(words[w], threshold);
    };
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      if constexpr (kPerWord == 1) {
        if constexpr (PLAIN) total = count_float_reaching(words[w], threshold, total);
        else total = count_reaching(words[w], threshold, total);
      } else if (WORDS == 1) {
        total = count_high_bits(reaches(w), 0, total);
      } else if (w % 2 == 0) {
        total = count_high_bits(reaches(w), reaches(w + 1), total);
      }
    }
    return total;
  }

  // How many of this thread's elements reach `key`.
  template <bool PLAIN>
  __device__ int count(uint32_t threshold) const {
    int total = 0;
#pragma unroll
    for (int c = 0; c < chunks(); c++) {
      uint32_t words[WORDS];
      chunk(c, words);
      total = add_count<PLAIN>(words, threshold, total);
    }
    return total;
  }
  __device__ int count(uint32_t key) const {
    return plain ? count<true>(threshold(key)) : count<false>(threshold(key));
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
    if (!plain) return add_count<false>(words, tied, 0) - add_count<false>(words, above, 0);
    int total = 0;
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      if constexpr (kPerWord == 1) {
        total = count_float_equal(words[w], tied, total);
      } else if (WORDS == 1) {
        total = count_high_bits(Plain<T>::equal(words[w], tied), 0, total);
      } else if (w % 2 == 0) {
        total = count_high_bits(Plain<T>::equal(words[w], tied), Plain<T>::equal(words[w + 1], tied), total);
      }
    }
    return total;
  }
};

}  // namespace
}  // namespace moe
