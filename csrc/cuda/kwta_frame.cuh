// The parts of a row of k-winner-take-all. The middle consists of all whole vectors of 16 bytes that start at multiples
// of 16 bytes. The edges are the head and the tail: fewer than kVector elements before and after the middle.
#pragma once

#include "moe/cuda/vector.cuh"
#include "moe/cuda/warp.cuh"

namespace moe {
namespace {

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

  // The position in the row of element i of the head (side 0) or tail (side 1); -1 if there is none.
  __device__ int edge(int side, int i) const {
    return side == 0 ? (i < head ? i : -1) : (i < tail ? head + middle + i : -1);
  }
};

// Reads vector number `vector`, counted from `from`. `aligned`: `from` is at a multiple of 16 bytes.
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

// Bytes of 0 or 1: byte i of the result is bit i of flags, for i < 4.
__device__ __forceinline__ uint32_t spread_flags(uint32_t flags) { return (flags & 0xfu) * 0x00204081u & 0x01010101u; }

// Writes the mask of a vector, a byte for each element. `aligned`: `to` is at a multiple of 4 bytes.
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

// Writes the flags of a vector's winners from bit `bit` of `bytes` on, unless bit >= end. If VECTOR is 4, a byte has
// the flags of two vectors: neighbouring lanes must have neighbouring vectors, and the lower lane writes.
template <int VECTOR>
__device__ __forceinline__ void write_flags(uint8_t* bytes, uint32_t winners, unsigned bit, unsigned end) {
  if constexpr (VECTOR == 4) winners |= __shfl_down_sync(kAllLanes, winners, 1) << 4;
  if (bit % 8 == 0 && bit < end) bytes[bit / 8] = static_cast<uint8_t>(winners);
}

// Words for a byte with the head's flags and the flags of ELEMENTS elements, and one word more: `drain` shifts a word
// and its successor together.
template <int ELEMENTS>
constexpr int kBitsWords = (ELEMENTS + 31) / 32 + 2;

// The winners' flags of a row with edges, collected in shared memory. The head's flags are the last bits of byte 0, and
// the flags of the middle start at byte 1. So the row starts at bit `shift`. With RING = 0 `words` holds the flags
// of the whole row, else it is a ring of RING words.
template <int RING>
struct ShiftedBits {
  uint32_t* words;
  int shift, drained = 0;

  // Index i, modulo the size of the ring if there is one. each: number of indices in a word (4 for bytes, 32 for bits,
  // 1 for words).
  __device__ static unsigned in_ring(unsigned i, int each) { return RING ? i % (RING * each) : i; }
  __device__ uint8_t& byte(int i) { return reinterpret_cast<uint8_t*>(words)[in_ring(i, 4)]; }

  template <class Team>
  __device__ void put_head(uint32_t winners, const Team& team) {
    if (team.rank == 0) byte(0) = static_cast<uint8_t>(winners << shift);
  }

  template <int VECTOR>
  __device__ void put(uint32_t winners, int position) {
    const unsigned bit = in_ring(8 + position, 32);
    write_flags<VECTOR>(reinterpret_cast<uint8_t*>(words), winners, bit, bit + 1);
  }

  // Writes the words of `bits` from `drained` to end - 1; their flags must be complete.
  template <class Team>
  __device__ void drain(uint32_t* bits, int end, const Team& team) {
    team.sync();
    for (int w = drained + team.rank; w < end; w += team.size) {
      bits[w] = words[in_ring(w, 1)] >> shift | words[in_ring(w + 1, 1)] << (32 - shift);
    }
    drained = end;
  }

  // Appends the tail's flags to those of the middle, and zeros after them. Writes the words of `bits` that `drain` has
  // not written. put: number of positions, from the start of the middle, whose flags are in `words` already.
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
