// How the kernels of topk_gate.cu choose: the ranks of a row's logits or keys, and lists that give the best ones first.
#pragma once

#include <type_traits>

#include "moe/cuda/keys.cuh"
#include "moe/cuda/recompute.cuh"
#include "moe/cuda/rows.cuh"
#include "moe/cuda/warp.cuh"

namespace moe {
namespace {

constexpr int kTokens = 4;  // tokens of a block, a warp for each

// The rank of a logit: an integer, larger for a larger logit. -0 and +0 have the same rank; all NaNs have the highest.
template <class T>
struct Logit {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  static constexpr uint32_t kSign = Key<T>::kZero;
  static constexpr int32_t kInfinity = static_cast<int32_t>(Key<T>::kNaN - kSign - 1);
  static constexpr uint32_t kMinusInfinity = kSign + kInfinity;

  __device__ static int32_t rank(uint32_t bits) {
    const int32_t sign = static_cast<int32_t>(bits << (32 - 8 * sizeof(T))) >> 31;
    const int32_t magnitude = static_cast<int32_t>(bits & (kSign - 1));
    return magnitude > kInfinity ? kInfinity + 1 : (magnitude ^ sign) - sign;
  }
  __device__ static float value(int32_t rank) {
    const int32_t sign = rank >> 31;
    return Key<T>::value(static_cast<uint32_t>((rank ^ sign) - sign) | (static_cast<uint32_t>(sign) & kSign));
  }
};
constexpr int32_t kLowest = INT32_MIN;  // below all ranks, and below all keys of Packed

// The ranks of a row. A lane has SLOTS neighbouring experts if SLOTS is 4 or 8, else every 32nd expert. With SLOTS > 0
// ranks stay in registers; with SLOTS = 0 each choice reads the logits again. Experts past the end of the row have
// the rank of -inf. They are never chosen: of equal logits the lower expert comes first, and K <= E.
template <class T, int SLOTS>
struct Ranks {
  using Bits = typename Logit<T>::Bits;
  static constexpr bool kNeighbours = SLOTS == 4 || SLOTS == 8;
  using Four = std::conditional_t<sizeof(T) == 4, uint4, uint2>;

  const Bits* logits;  // from this lane's first logit on
  int num_experts, lane;
  int32_t resident[SLOTS ? SLOTS : 1];

  // vectorized: four neighbouring logits may be read as one vector.
  __device__ Ranks(const Bits* logits, int num_experts, int lane, bool vectorized)
      : logits(logits + (kNeighbours ? SLOTS * lane : lane)), num_experts(num_experts), lane(lane) {
    if constexpr (kNeighbours) {
      if (vectorized) {
#pragma unroll
        for (int first = 0; first < SLOTS; first += 4) read_four(first);
        return;
      }
    }
#pragma unroll
    for (int s = 0; s < SLOTS; s++) resident[s] = read(s);
  }
  __device__ int slots() const { return SLOTS ? SLOTS : (num_experts + kWarpSize - 1) / kWarpSize; }
  __device__ int expert(int slot) const { return kNeighbours ? SLOTS * lane + slot : slot * kWarpSize + lane; }
  __device__ int32_t operator[](int slot) const {
    if constexpr (SLOTS > 0) return resident[slot];
    return read(slot);
  }

 private:
  __device__ void read_four(int first) {
    constexpr uint32_t kPast = sizeof(T) == 4 ? Logit<T>::kMinusInfinity : Logit<T>::kMinusInfinity * 0x10001u;
    uint32_t words[sizeof(T)];
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(T)); w++) words[w] = kPast;
    if (expert(first) < num_experts) {
      const Four four = load(reinterpret_cast<const Four*>(logits + first));
      words[0] = four.x, words[1] = four.y;
      if constexpr (sizeof(T) == 4) words[2] = four.z, words[3] = four.w;
    }
#pragma unroll
    for (int s = 0; s < 4; s++) {
      const uint32_t bits = sizeof(T) == 4 ? words[s] : words[s / 2] >> s % 2 * 16 & 0xffffu;
      resident[first + s] = Logit<T>::rank(bits);
    }
  }
  __device__ int32_t read(int slot) const {
    const bool inside = expert(slot) < num_experts;
    return Logit<T>::rank(inside ? load(logits + slot * (kNeighbours ? 1 : kWarpSize)) : Logit<T>::kMinusInfinity);
  }
};

struct alignas(8) Choice {
  int32_t rank;
  int expert;
};

// Packed, Sorted and Searched give the choices of a row, best first: next() writes the next choice as a Kept, which
// choice() decodes. In Packed and Sorted each lane sorts its own logits into a list, best first. next() takes the best
// head of the 32 lists, and removes this head from its list.
//
// Packed is for 16-bit logits. The key of a logit has its rank in the upper half and 0xffff - expert in the lower half,
// so no two logits of a row have equal keys.
template <class Ranks, int SLOTS>
struct Packed {
  using Kept = int32_t;
  static constexpr int kUnrolled = 4;
  struct Shared {};
  int32_t keys[SLOTS];

  __device__ Packed(const Ranks& ranks, Shared&) {
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      keys[s] = static_cast<int32_t>(static_cast<uint32_t>(ranks[s]) << 16 | (0xffffu - ranks.expert(s)));
#pragma unroll
      for (int t = s; t > 0; t--) {
        const int32_t upper = max(keys[t - 1], keys[t]);
        keys[t] = min(keys[t - 1], keys[t]), keys[t - 1] = upper;
      }
    }
  }
  __device__ void next(Kept* kept) {
    const bool taken = keys[0] == __reduce_max_sync(kAllLanes, keys[0]);
    if (taken) *kept = keys[0];
#pragma unroll
    for (int s = 0; s < SLOTS; s++) keys[s] = taken ? (s + 1 < SLOTS ? keys[s + 1] : kLowest) : keys[s];
  }
  __device__ static Choice choice(Kept key) { return {key >> 16, static_cast<int>(0xffffu - (key & 0xffffu))}; }
};

// For 32-bit logits. Of heads with equal ranks, next() takes that of the lowest lane.
template <class Ranks, int SLOTS>
struct Sorted {
  using Kept = Choice;
  static constexpr int kUnrolled = 4;
  struct Shared {
    Choice lists[kWarpSize][SLOTS];  // the list without its head, then kLowest
  };
  Choice head;
  const Choice* rest;
  uint32_t here, lanes_to_here;

  __device__ Sorted(const Ranks& ranks, Shared& shared) : rest(shared.lists[ranks.lane]) {
    Choice sorted[SLOTS];
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      sorted[s] = {ranks[s], ranks.expert(s)};
#pragma unroll
      for (int t = s; t > 0; t--) {  // equal ranks are not swapped, so they stay in the order of experts
        const Choice upper = sorted[t - 1], lower = sorted[t];
        const bool swap = lower.rank > upper.rank;
        sorted[t - 1] = {max(upper.rank, lower.rank), swap ? lower.expert : upper.expert};
        sorted[t] = {min(upper.rank, lower.rank), swap ? upper.expert : lower.expert};
      }
    }
    head = sorted[0];
    Choice* list = shared.lists[ranks.lane];
#pragma unroll
    for (int s = 1; s < SLOTS; s++) list[s - 1] = sorted[s];
    list[SLOTS - 1] = {kLowest, 0};
    here = 1u << ranks.lane, lanes_to_here = 2 * here - 1;
    recompute(here), recompute(lanes_to_here);
  }
  __device__ void next(Kept* kept) {
    const uint32_t highest = __ballot_sync(kAllLanes, head.rank == __reduce_max_sync(kAllLanes, head.rank));
    if ((highest & lanes_to_here) != here) return;
    *kept = head;
    head = *rest++;
  }
  __device__ static Choice choice(Kept kept) { return kept; }
};

// For more than 8 logits a lane: next() searches all logits for the best one that comes after the previous choice.
template <class Ranks, int SLOTS>
struct Searched {
  using Kept = Choice;
  static constexpr int kUnrolled = 1;
  struct Shared {};
  const Ranks& ranks;
  Choice last{INT32_MAX, 0};

  __device__ Searched(const Ranks& ranks, Shared&) : ranks(ranks) {}
  __device__ void next(Kept* kept) {
    Choice best{kLowest, 0};  // the loop leaves `lane` out of best.expert
    const int last_expert = last.expert - ranks.lane;
#pragma unroll
    for (int s = 0; s < ranks.slots(); s++) {
      const int32_t rank = ranks[s];
      const bool below = rank < last.rank || (rank == last.rank && s * kWarpSize > last_expert);
      if (below && rank > best.rank) best = {rank, s * kWarpSize};
    }
    best.expert += ranks.lane;
    const int32_t highest = __reduce_max_sync(kAllLanes, best.rank);
    last = {highest, __reduce_min_sync(kAllLanes, best.rank == highest ? best.expert : INT32_MAX)};
    if (best.expert == last.expert) *kept = last;
  }
  __device__ static Choice choice(Kept kept) { return kept; }
};

// Writes the next `count` choices to `to`.
template <class List>
__device__ __forceinline__ void take(List& choices, typename List::Kept* to, int count) {
  constexpr int kUnrolled = List::kUnrolled;  // calls of next() in a pass of the loop
  recompute(count);
#pragma unroll 1
  for (; count >= kUnrolled; count -= kUnrolled, to += kUnrolled) {
#pragma unroll
    for (int i = 0; i < kUnrolled; i++) choices.next(to + i);
  }
#pragma unroll 1
  for (; count > 0; count--) choices.next(to++);
}

}  // namespace
}  // namespace moe
