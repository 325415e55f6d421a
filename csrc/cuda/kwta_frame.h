// A row among the 16-byte vectors of memory, in which k-winner-take-all reads and writes it. What it has of vectors that
// lie outside in part are its edges: up to kVector - 1 elements before its middle, the whole vectors, and as many behind.
#pragma once

#include "moe/vector.cuh"
#include "moe/warp.cuh"

namespace moe {
namespace {

// EDGES: whether rows may have edges.
template <class Bits, bool EDGES>
struct Frame {
  static constexpr int kVector = 16 / sizeof(Bits), kPerWord = 4 / sizeof(Bits), kWords = 4;

  int head, middle, tail;  // elements of the three parts

  __device__ Frame(const void* row, int n) : head(0), middle(n), tail(0) {
    if constexpr (EDGES) {
      head = min(static_cast<int>(-reinterpret_cast<uintptr_t>(row) % 16 / sizeof(Bits)), n);
      middle = (n - head) / kVector * kVector;
      tail = n - head - middle;
    }
  }

  // Element i of an edge, 0 for the head and 1 for the tail: its place in the row, or -1 if there is none.
  __device__ int edge(int side, int i) const {
    return side == 0 ? (i < head ? i : -1) : (i < tail ? head + middle + i : -1);
  }
};

// A vector of those that start at `from`. `aligned`: it is one of memory too, which it need not be where tensors lie
// differently.
template <class Bits>
__device__ void read_vector(const Bits* from, int vector, bool aligned, uint32_t (&words)[4]) {
  constexpr int kPerWord = 4 / sizeof(Bits);
  if (aligned) {
    const uint4 four = load(reinterpret_cast<const uint4*>(from) + vector);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  } else {
    from += vector * (4 * kPerWord);
#pragma unroll
    for (int w = 0; w < 4; w++) {
      words[w] = load(from + w * kPerWord);
      if constexpr (kPerWord == 2) words[w] |= static_cast<uint32_t>(load(from + 2 * w + 1)) << 16;
    }
  }
}

template <class Bits>
__device__ void write_vector(Bits* to, int vector, bool aligned, const uint32_t (&words)[4]) {
  constexpr int kPerWord = 4 / sizeof(Bits);
  if (aligned) {
    store_streaming(reinterpret_cast<uint4*>(to) + vector, make_uint4(words[0], words[1], words[2], words[3]));
  } else {
    to += vector * (4 * kPerWord);
#pragma unroll
    for (int i = 0; i < 4 * kPerWord; i++) to[i] = static_cast<Bits>(words[i / kPerWord] >> 16 * (i % kPerWord));
  }
}

// Zeros and ones from flags: byte i of the result is bit i, for four of them.
__device__ __forceinline__ uint32_t spread_flags(uint32_t flags) { return (flags & 0xfu) * 0x00204081u & 0x01010101u; }

// The bytes of a vector's mask. `aligned`: four of them make a word.
template <int VECTOR>
__device__ __forceinline__ void write_mask(uint8_t* to, bool aligned, uint32_t winners) {
#pragma unroll
  for (int i = 0; i < VECTOR; i += 4) {
    const uint32_t four = spread_flags(winners >> i);
    if (aligned) {
      *reinterpret_cast<uint32_t*>(to + i) = four;
    } else {
#pragma unroll
      for (int b = 0; b < 4; b++) to[i + b] = static_cast<uint8_t>(four >> 8 * b);
    }
  }
}

// The bits of a vector's winners, which start at bit `position` of `bytes`. Neighbouring lanes have neighbouring vectors.
template <int VECTOR>
__device__ __forceinline__ void write_flags(uint8_t* bytes, uint32_t winners, unsigned position, unsigned end) {
  if constexpr (VECTOR == 4) winners |= __shfl_down_sync(kAllLanes, winners, 1) << 4;
  if (position % 8 == 0 && position < end) bytes[position / 8] = static_cast<uint8_t>(winners);
}

// For the flags of so many elements and of a head before them, and one word that is read behind them.
template <int ELEMENTS>
constexpr int kBitsWords = (ELEMENTS + 31) / 32 + 2;

// The bits of a row with edges: the flags of its vectors start in byte 1 of shared memory, those of the head end there,
// and words leave it `shift` bits on. There is room for the row, or, in a ring of RING words, for four turns of its threads.
// Each thread moves out the words that it filled.
template <int RING>
struct ShiftedBits {
  uint32_t* words;
  int shift, drained = 0;

  __device__ static unsigned in_ring(unsigned i, int each) { return RING ? i % (RING * each) : i; }
  __device__ uint8_t& byte(int i) { return reinterpret_cast<uint8_t*>(words)[in_ring(i, 4)]; }

  template <class Team>
  __device__ void put_head(uint32_t winners, const Team& team) {
    if (team.rank == 0) byte(0) = static_cast<uint8_t>(winners << shift);
  }

  template <int VECTOR>
  __device__ void put(uint32_t winners, int place) {
    const unsigned position = in_ring(8 + place, 32);
    write_flags<VECTOR>(reinterpret_cast<uint8_t*>(words), winners, position, position + 1);
  }

  // Writes words up to `end`, for which the flags are there.
  template <class Team>
  __device__ void drain(uint32_t* bits, int end, const Team& team) {
    team.sync();
    for (int w = drained + team.rank; w < end; w += team.size) {
      bits[w] = words[in_ring(w, 1)] >> shift | words[in_ring(w + 1, 1)] << (32 - shift);
    }
    drained = end;
  }

  // After the flags of `put` elements: zeros, and in them those of the tail, which lies behind the row's middle.
  template <class Team>
  __device__ void finish(uint32_t* bits, int put, int middle, uint32_t tail, int n, const Team& team) {
    const int end = (n + 31) / 32;
    for (int i = 1 + put / 8 + team.rank; i < 4 * end + 4; i += team.size) byte(i) = 0;
    team.sync();
    if (team.rank == 0) byte(1 + middle / 8) |= static_cast<uint8_t>(tail << middle % 8);
    drain(bits, end, team);
  }
};

}  // namespace
}  // namespace moe
