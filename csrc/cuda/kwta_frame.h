// The 16-byte vectors of memory in which k-winner-take-all reads and writes a row. The middle of a row is its whole
// vectors; its edges are up to kVector - 1 elements before the middle (head) and behind it (tail).
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

  // Element i of an edge, 0 for the head and 1 for the tail: its position in the row, or -1 if there is none.
  __device__ int edge(int side, int i) const {
    return side == 0 ? (i < head ? i : -1) : (i < tail ? head + middle + i : -1);
  }
};

// Reads vector number `vector` of those that start at `from`. `aligned`: `from` is at a multiple of 16 bytes, which need
// not be so if tensors have different offsets.
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

// Writes the bytes of a vector's mask. `aligned`: as words of four bytes.
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

// Writes the flags of a vector's winners from bit `bit` of `bytes` on, unless bit >= end. Neighbouring lanes must have
// neighbouring vectors: if VECTOR is 4, the flags of two fill a byte, which the lower lane writes.
template <int VECTOR>
__device__ __forceinline__ void write_flags(uint8_t* bytes, uint32_t winners, unsigned bit, unsigned end) {
  if constexpr (VECTOR == 4) winners |= __shfl_down_sync(kAllLanes, winners, 1) << 4;
  if (bit % 8 == 0 && bit < end) bytes[bit / 8] = static_cast<uint8_t>(winners);
}

// Number of words for the flags of ELEMENTS elements and of a head before them, and one word that is read behind them.
template <int ELEMENTS>
constexpr int kBitsWords = (ELEMENTS + 31) / 32 + 2;

// The bits of a row with edges, collected in shared memory: the flags of the head are at the end of byte 0, those of the
// vectors start at byte 1. Words of the output start `shift` bits behind the start of shared memory. There is room for
// the row, or, in a ring of RING words, for four turns; in a turn every thread puts one vector. Each thread writes out
// some of the words.
template <int RING>
struct ShiftedBits {
  uint32_t* words;
  int shift, drained = 0;

  // i modulo the size of the ring; each: units of i in a word, such as 4 bytes or 32 bits.
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

  // Writes words up to `end`, whose flags are complete.
  template <class Team>
  __device__ void drain(uint32_t* bits, int end, const Team& team) {
    team.sync();
    for (int w = drained + team.rank; w < end; w += team.size) {
      bits[w] = words[in_ring(w, 1)] >> shift | words[in_ring(w + 1, 1)] << (32 - shift);
    }
    drained = end;
  }

  // After vectors with `put` elements, some of them past the middle: adds zeros behind their flags, and the flags of
  // the tail behind those of the middle. Then writes all words that are left.
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
