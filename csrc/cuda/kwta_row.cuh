// A thread's part of a row of k-winner-take-all. A row is plain if no thread gets NaN when it adds its elements (see
// Plain). They are kept as in memory and compared as floating-point numbers. Elements of other rows are converted to
// keys: integers in the order of the values (moe/cuda/keys.cuh). A word is 32 bits, one or two elements.
#pragma once

#include <type_traits>

#include "kwta_frame.cuh"
#include "moe/cuda/block.cuh"
#include "moe/cuda/halves.cuh"
#include "moe/cuda/keys.cuh"
#include "moe/cuda/recompute.cuh"

namespace moe {
namespace {

// The threads that hold one row: LANES lanes of a warp, or a block if LANES is 0. All lanes of a warp must call
// the functions of Team together.
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

  // Whether `here` is true for any row of this warp. `here` must be the same in all threads of a row.
  __device__ static bool any(bool here) {
    if constexpr (kShared) return __any_sync(kAllLanes, here);
    return here;
  }

  // Bit i is the flag of lane i, counted from the first lane of this warp that holds the row.
  __device__ uint32_t ballot(bool flag) const {
    const uint32_t flags = __ballot_sync(kAllLanes, flag);
    return kShared ? flags >> (threadIdx.x % kWarpSize - lane) & ((1u << kLanes % kWarpSize) - 1) : flags;
  }

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

  __device__ static void sync() {
    if constexpr (kBlock) __syncthreads();
    else __syncwarp();
  }

  __device__ int sum(int value) {
    if constexpr (kBlock) value = exchange_warp_sums(value, *counts, turn);
    return lane_sum(value);
  }

  // For LANES = 0: returns the sum over the row's threads before this one. `total` receives the sum over all threads.
  __device__ int sum_before(int value, int& total) {
    const int inclusive = warp_inclusive_sum(value, lane);
    const int warp_total = exchange_warp_sums(value, *counts, turn);
    total = warp_sum(warp_total);
    return warp_sum(lane < rank / kWarpSize ? warp_total : 0) + inclusive - value;
  }

  // Sums several values: over the row's lanes in this warp (`values`), over earlier warps (`before`), and over the row
  // (`total`). May be called once only: a second call could overwrite `slots` too early.
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

// Compares elements of a plain row with a threshold as floating-point numbers: -0 equals 0, and NaN compares as false.
// Bits of bfloat16 are compared as float16: the order is the same up to a magnitude of 2^121, and larger numbers become
// NaN. `check` adds elements to `found`, which becomes NaN by a NaN. Infinities or overflow may make it NaN too: then
// the row counts as not plain, and keys give the same result.
template <class T>
struct Plain {
  static constexpr int kInfinity = 0x7c00;  // the key of a plain row's threshold is between -kInfinity and kInfinity

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

// kwta_frame.cuh divides a row into head, middle (whole vectors) and tail. Chunk c of thread `rank` is vector
// c * size + rank of the middle. With CHUNKS > 0 chunks stay in registers; with 0 they are read again in each pass. A
// thread also holds up to EDGES elements of the head and of the tail.
template <class T, int CHUNKS, int EDGES>
struct Row {
  using Order = Key<T>;
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  static constexpr bool kResident = CHUNKS > 0, kEdges = EDGES > 0;
  static constexpr int kPerWord = Order::kPerWord, kWords = 4, kVector = kWords * kPerWord;
  static constexpr int kEdgeWords = kEdges ? 2 * EDGES / kPerWord : 1;

  const Bits* x;  // (n)
  Frame<Bits, kEdges> frame;
  int n, rank, size;
  // After convert(), registers hold elements, and NaN outside the row, if `plain`; otherwise keys, and 0 outside the
  // row. `plain` is the same for all rows of a warp.
  bool plain = true;
  uint32_t resident[kResident ? CHUNKS : 1][kWords];
  uint32_t edges[kEdgeWords];

  template <class Team>
  __device__ Row(const void* x, int n, const Team& team)
      : x(static_cast<const Bits*>(x)), frame(x, n), n(n), rank(team.rank), size(team.size) {}

  __device__ int chunks() const {
    return kResident ? CHUNKS : (frame.middle + size * kVector - 1) / (size * kVector);
  }
  // The first element of this thread's chunk, counted from the start of the row's middle.
  __device__ int position(int chunk) const { return (chunk * size + rank) * kVector; }
  // Makes the compiler compute positions again, instead of keeping one for each chunk in a register.
  __device__ void recompute_positions() {
    recompute(rank);
    recompute(size);
  }

  __device__ void read(int position, uint32_t (&words)[kWords]) const {
#pragma unroll
    for (int w = 0; w < kWords; w++) words[w] = 0;
    if (position < frame.middle) read_vector(x + frame.head, position / kVector, true, words);
  }

  // Calls each(i, side, position in the row) for i < 2 EDGES; `position` is -1 if this thread has no such element.
  template <class Each>
  __device__ void for_edges(Each each) const {
#pragma unroll
    for (int i = 0; i < 2 * EDGES; i++) each(i, i % 2, frame.edge(i % 2, i / 2 * size + rank));
  }

  __device__ static uint32_t element(uint32_t word, int i) {
    return kPerWord == 1 ? word : word >> 16 * (i % kPerWord) & 0xffffu;
  }

  __device__ static uint32_t to_element(uint32_t bits, int i) {
    return kPerWord == 1 ? bits : (bits & 0xffffu) << 16 * (i % kPerWord);
  }

  // Writes NaN, which reaches no threshold, past the row's middle.
  __device__ void fill_outside(int position, uint32_t (&words)[kWords]) const {
    if (position < frame.middle) return;
#pragma unroll
    for (int w = 0; w < kWords; w++) words[w] = 0xffffffffu;
  }

  __device__ static uint32_t key(uint32_t bits) {
    const float value = Order::value(bits);
    return value == value ? Order::kZero + Order::key(bits) : Order::kNaN;
  }
  // Converts words to keys, with 0, which is below every threshold, past the row's middle.
  __device__ void make_keys(int position, uint32_t (&words)[kWords]) const {
#pragma unroll
    for (int w = 0; w < kWords; w++) {
      uint32_t keys = 0;
#pragma unroll
      for (int i = 0; i < kPerWord; i++) keys |= key(element(words[w], i)) << (32 / kPerWord % 32 * i);
      words[w] = position < frame.middle ? keys : 0;
    }
  }

  // Called only with the first word of each chunk: a sample is enough for the first threshold.
  __device__ static void add_moments(uint32_t word, float2& moments) {
#pragma unroll
    for (int i = 0; i < kPerWord; i++) {
      const float value = Order::value(element(word, i));
      moments.x += value;
      moments.y = __fmaf_rn(value, value, moments.y);
    }
  }
  __device__ int sampled() const { return max(frame.middle / kWords, 1); }  // number of elements in the moments

  // Reads this thread's elements. Returns the sums of a sample and of its squares; the first is NaN if `check` found
  // NaN.
  __device__ float2 read_moments() {
    float2 moments = {0.0f, 0.0f};
    uint32_t found = 0;
    if constexpr (kResident) {
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) read(position(c), resident[c]);
    }
    if constexpr (kEdges) {
#pragma unroll
      for (int w = 0; w < kEdgeWords; w++) edges[w] = 0;
      for_edges([&](int i, int, int position) {
        if (position >= 0) edges[i / kPerWord] |= to_element(load(x + position), i);
      });
#pragma unroll
      for (int w = 0; w < kEdgeWords; w++) Plain<T>::check(edges[w], found);
    }
#pragma unroll
    for (int c = 0; c < chunks(); c++) {
      uint32_t words[kWords];
      if constexpr (kResident) {
#pragma unroll
        for (int w = 0; w < kWords; w++) words[w] = resident[c][w];
      } else {
        read(position(c), words);
      }
      add_moments(words[0], moments);
#pragma unroll
      for (int w = 0; w < kWords; w++) Plain<T>::check(words[w], found);
    }
    if (!Plain<T>::is_plain(found)) moments.x = NAN;
    return moments;
  }

  // Converts registers to the form that `plain` stands for. `plain` must be set before.
  __device__ void convert() {
    if constexpr (kEdges) {
      uint32_t converted[kEdgeWords] = {};
      for_edges([&](int i, int, int position) {
        uint32_t bits = element(edges[i / kPerWord], i);
        if (!plain) bits = position < 0 ? 0 : key(bits);
        else if (position < 0) bits = ~0u;
        converted[i / kPerWord] |= to_element(bits, i);
      });
#pragma unroll
      for (int w = 0; w < kEdgeWords; w++) edges[w] = converted[w];
    }
    if constexpr (!kResident) return;
    recompute_positions();
    if (!plain) {
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        recompute(resident[c]);
        make_keys(position(c), resident[c]);
      }
    } else if (frame.middle < CHUNKS * size * kVector) {
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) fill_outside(position(c), resident[c]);
    }
  }

  __device__ void chunk(int c, uint32_t (&words)[kWords]) const {
    if constexpr (kResident) {
#pragma unroll
      for (int w = 0; w < kWords; w++) words[w] = resident[c][w];
    } else {
      read(position(c), words);
      if (plain) fill_outside(position(c), words);
      else make_keys(position(c), words);
    }
  }

  __device__ uint32_t threshold(int key) const {
    return Order::in_each(plain ? Order::bits(key) : Order::kZero + key);
  }

  // Counts elements that reach the threshold. With two elements in a word, `total` is the negative sum of their masks
  // (0xffff for an element that does), from which `counted` computes the number.
  template <bool PLAIN, int COUNT>
  __device__ static int add_count(const uint32_t (&words)[COUNT], uint32_t threshold, int total) {
#pragma unroll
    for (int w = 0; w < COUNT; w++) {
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

  template <bool PLAIN>
  __device__ int count(uint32_t threshold) const {
    int total = 0, sum = 0;
    if constexpr (kEdges) sum = add_count<PLAIN>(edges, threshold, sum);
#pragma unroll
    for (int c = 0; c < chunks(); c++) {
      uint32_t words[kWords];
      chunk(c, words);
      sum = add_count<PLAIN>(words, threshold, sum);
      if constexpr (!kResident) total += counted(sum), sum = 0;
    }
    return total + counted(sum);
  }
  __device__ int count(uint32_t threshold) const {
    return plain ? count<true>(threshold) : count<false>(threshold);
  }

  template <int COUNT>
  __device__ void reaching(const uint32_t (&words)[COUNT], uint32_t threshold, uint32_t (&masks)[COUNT]) const {
#pragma unroll
    for (int w = 0; w < COUNT; w++) {
      masks[w] = plain ? Plain<T>::reaching(words[w], threshold) : Order::reaching(words[w], threshold);
    }
  }

  // Number of elements of a chunk that reach `tied` but not `above`, the threshold of the next key.
  __device__ int count_ties(const uint32_t (&words)[kWords], uint32_t above, uint32_t tied) const {
    if (!plain) return counted(add_count<false>(words, tied, 0)) - counted(add_count<false>(words, above, 0));
    int total = 0;
#pragma unroll
    for (int w = 0; w < kWords; w++) {
      if constexpr (kPerWord == 2) total -= static_cast<int>(Plain<T>::equal(words[w], tied));
      else total = count_float_equal(words[w], tied, total);
    }
    return counted(total);
  }
};

}  // namespace
}  // namespace moe
