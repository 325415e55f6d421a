// The top-k gate. A warp takes a token and keeps its logits in registers as ordered integers; a choice is the largest
// pair (logit, lower expert first) that is left, found by one or two reductions of the warp. Each logit is read once.
#include <cmath>
#include <type_traits>

#include "moe/dtypes.h"
#include "moe/keys.cuh"
#include "moe/launch.cuh"
#include "moe/rows.cuh"
#include "moe/warp.cuh"
#include "ops.h"

namespace moe {
namespace {

constexpr int kTokens = 8;  // of a block, a warp each

// Ranks order as numbers do, zeros equal (-0 + 0 is +0) and NaN, all equal, on top; 0 is below all of them.
template <class T>
struct Logit {
  using Order = Key<T>;
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;

  __device__ static uint32_t rank(uint32_t bits) {
    const float value = Order::value(bits);
    if constexpr (sizeof(T) == 4) return value == value ? Order::key(__float_as_uint(value + 0.0f)) : Order::kNaN;
    return value == value ? Order::rank(Order::key(bits)) : Order::kNaN;
  }
  __device__ static float value(uint32_t rank) {
    return Order::value(Order::bits(sizeof(T) == 4 ? rank : Order::key_of_rank(rank)));
  }
};

// A row's ranks: lane i has those of experts i, i + 32, ..., or with four SLOTS those of four neighbours. With SLOTS > 0
// they stay in registers, with 0 they are read again each time.
template <class T, int SLOTS>
struct Ranks {
  using Bits = typename Logit<T>::Bits;

  static constexpr bool kNeighbours = SLOTS == 4;
  using Four = std::conditional_t<sizeof(T) == 4, uint4, uint2>;

  const Bits* logits;  // (E), from this lane's first on
  int num_experts, lane;
  uint32_t resident[SLOTS ? SLOTS : 1];

  // wide: of four neighbours either all are there or none, and they may be read together.
  __device__ Ranks(const Bits* logits, int num_experts, int lane, bool wide)
      : logits(logits + (kNeighbours ? SLOTS * lane : lane)), num_experts(num_experts), lane(lane) {
    if constexpr (kNeighbours) {
      if (wide) {
        const bool inside = SLOTS * lane < num_experts;
        const Four four = inside ? load(reinterpret_cast<const Four*>(this->logits)) : Four{};
        const auto* words = reinterpret_cast<const uint32_t*>(&four);
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
          const uint32_t bits = sizeof(T) == 4 ? words[s] : words[s / 2] >> s % 2 * 16 & 0xffffu;
          resident[s] = inside ? Logit<T>::rank(bits) : 0;
        }
        return;
      }
    }
#pragma unroll
    for (int s = 0; s < SLOTS; s++) resident[s] = read(s);
  }
  __device__ int slots() const { return SLOTS ? SLOTS : (num_experts + kWarpSize - 1) / kWarpSize; }
  __device__ int expert(int slot) const { return kNeighbours ? SLOTS * lane + slot : slot * kWarpSize + lane; }
  __device__ uint32_t operator[](int slot) const {
    if constexpr (SLOTS > 0) return resident[slot];
    return read(slot);
  }

 private:
  __device__ uint32_t read(int slot) const {
    const bool inside = expert(slot) < num_experts;
    const uint32_t bits = inside ? load(logits + slot * (kNeighbours ? 1 : kWarpSize)) : 0u;
    const uint32_t rank = Logit<T>::rank(bits);
    return inside ? rank : 0;
  }
};

struct Choice {
  uint32_t rank;
  int expert;
};

// The choices of a row, best first. A lane keeps its own logits in that order, and the warp takes the best of the 32
// heads: a list moves up where its head was taken. next() is what the lane that stands for the choice keeps, and choice()
// what that means.
//
// Two 16-bit halves make a key here: the rank, and after it the expert, the lower the larger. One reduction finds both.
template <class T, int SLOTS>
struct Packed {
  using Kept = uint32_t;
  uint32_t keys[SLOTS];

  __device__ explicit Packed(const Ranks<T, SLOTS>& ranks) {
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      keys[s] = ranks[s] << 16 | (0xffffu - ranks.expert(s));
#pragma unroll
      for (int t = s; t > 0; t--) {
        const uint32_t upper = max(keys[t - 1], keys[t]);
        keys[t] = min(keys[t - 1], keys[t]), keys[t - 1] = upper;
      }
    }
  }
  __device__ Kept next() {
    const uint32_t highest = __reduce_max_sync(kAllLanes, keys[0]);
    const bool taken = keys[0] == highest;
#pragma unroll
    for (int s = 0; s < SLOTS; s++) keys[s] = taken ? (s + 1 < SLOTS ? keys[s + 1] : 0) : keys[s];
    return highest;
  }
  __device__ static Choice choice(Kept key) { return {key >> 16, static_cast<int>(0xffffu - (key & 0xffffu))}; }
};

// Of 32-bit ranks a second reduction finds the expert. A lane's experts, below 128, are bytes of one word.
template <class T>
struct Sorted {
  using Kept = Choice;
  static constexpr int kSlots = 4;
  uint32_t ranks[kSlots], experts = 0;

  __device__ explicit Sorted(const Ranks<T, kSlots>& given) {
    int order[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; s++) {
      ranks[s] = given[s], order[s] = given.expert(s);
#pragma unroll
      for (int t = s; t > 0; t--) {  // equal ones stay as they are: by expert
        const bool swap = ranks[t] > ranks[t - 1];
        const uint32_t upper = max(ranks[t - 1], ranks[t]);
        const int expert = swap ? order[t] : order[t - 1];
        ranks[t] = min(ranks[t - 1], ranks[t]), order[t] = swap ? order[t - 1] : order[t];
        ranks[t - 1] = upper, order[t - 1] = expert;
      }
    }
#pragma unroll
    for (int s = 0; s < kSlots; s++) experts |= static_cast<uint32_t>(order[s]) << 8 * s;
  }
  __device__ Kept next() {
    const uint32_t highest = __reduce_max_sync(kAllLanes, ranks[0]);
    const int head = ranks[0] == highest ? experts & 0xffu : INT32_MAX;
    const int expert = __reduce_min_sync(kAllLanes, head);
    if (head == expert) {
      ranks[0] = ranks[1], ranks[1] = ranks[2], ranks[2] = ranks[3], ranks[3] = 0;
      experts >>= 8;
    }
    return {highest, expert};
  }
  __device__ static Choice choice(Kept kept) { return kept; }
};

// Many logits a lane: the largest pair below the choice before is searched each time.
template <class T, int SLOTS>
struct Searched {
  using Kept = Choice;
  const Ranks<T, SLOTS>& ranks;
  Choice last{UINT32_MAX, 0};

  __device__ explicit Searched(const Ranks<T, SLOTS>& ranks) : ranks(ranks) {}
  __device__ Kept next() {
    Choice best{0, INT32_MAX};
#pragma unroll
    for (int s = 0; s < ranks.slots(); s++) {
      const uint32_t rank = ranks[s];
      const bool below = rank < last.rank || (rank == last.rank && ranks.expert(s) > last.expert);
      if (below && rank > best.rank) best = {rank, ranks.expert(s)};
    }
    const uint32_t highest = __reduce_max_sync(kAllLanes, best.rank);
    last = {highest, __reduce_min_sync(kAllLanes, best.rank == highest ? best.expert : INT32_MAX)};
    return last;
  }
  __device__ static Choice choice(Kept kept) { return kept; }
};

template <class T, int SLOTS>
using Choices = std::conditional_t<sizeof(T) == 2 && SLOTS != 0 && SLOTS <= 8, Packed<T, SLOTS>,
                                   std::conditional_t<SLOTS == 4, Sorted<T>, Searched<T, SLOTS>>>;

template <class T, int SLOTS>
__global__ void __launch_bounds__(kTokens * kWarpSize)
    topk_gate_kernel(const typename Logit<T>::Bits* logits,  // (T, E)
                     int64_t stride,                         // elements from token to token
                     float* weights,                         // (T, K)
                     int32_t* experts,                       // (T, K)
                     int64_t tokens, int num_experts, int k, bool softmax_first, bool wide) {
  const int lane = threadIdx.x % kWarpSize;
  const uint32_t token = blockIdx.x * kTokens + threadIdx.x / kWarpSize;
  if (token >= tokens) return;
  const Ranks<T, SLOTS> ranks(logits + token * stride, num_experts, lane, wide);
  const int64_t start = int64_t(token) * k + lane;
  weights += start, experts += start;

  using List = Choices<T, SLOTS>;
  [[maybe_unused]] constexpr int kUnrolled = SLOTS == 4 ? 8 : 2;  // a look at how many are left costs 3 instructions
  List choices(ranks);
  float highest = 0.0f, sum = 0.0f, share = 0.0f;
  int left = k;  // choices, of 32 of which at a time each lane keeps one
  for (;; left -= kWarpSize, weights += kWarpSize, experts += kWarpSize) {
    typename List::Kept kept{};
    const int count = min(left, kWarpSize);
#pragma unroll kUnrolled
    for (int i = 0; i < count; i++) {
      const auto next = choices.next();
      if (i == lane) kept = next;
    }
    const Choice mine = List::choice(kept);
    const float value = Logit<T>::value(mine.rank);
    if (left == k) highest = __shfl_sync(kAllLanes, value, 0);  // a NaN if there is one, and then every weight is NaN
    share = lane < count ? expf(value - highest) : 0.0f;
    sum += share;
    if (lane < count) *experts = mine.expert;
    if (left <= kWarpSize) break;
    *weights = share;
  }
  if (softmax_first) {
    sum = 0.0f;
#pragma unroll
    for (int s = 0; s < ranks.slots(); s++) {
      if (ranks.expert(s) < num_experts) sum += expf(Logit<T>::value(ranks[s]) - highest);
    }
  }
  sum = warp_sum(sum);
  if (lane < left) *weights = share / sum;
  for (; left < k; left += kWarpSize) weights -= kWarpSize, *weights /= sum;  // each lane its own
}

template <class T>
__global__ void __launch_bounds__(kTokens * kWarpSize)
    topk_gate_bwd_kernel(const float* grad,       // (T, K)
                         const float* weights,    // (T, K)
                         const int32_t* experts,  // (T, K)
                         const T* logits,         // (T, E), or nullptr: softmax of the chosen alone
                         int64_t stride,          // elements from token to token
                         T* dlogits,              // (T, E)
                         int64_t tokens, int num_experts, int k) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = int64_t(blockIdx.x) * kTokens + threadIdx.x / kWarpSize;
  if (token >= tokens) return;
  grad += token * k, weights += token * k, experts += token * k, dlogits += token * num_experts;
  float mean = 0.0f;
  for (int i = lane; i < k; i += kWarpSize) mean = __fmaf_rn(weights[i], grad[i], mean);
  mean = warp_sum(mean);

  // p_e = w_0 exp(z_e - z_0): the difference of two logits is exact to a rounding however large they are.
  const bool dense = logits && k > 0;
  const float highest = dense ? widen(logits[token * stride + experts[0]]) : 0.0f;
  const float scale = dense ? -mean * weights[0] : 0.0f;
  for (int e = lane; e < num_experts; e += kWarpSize) {
    narrow(dense ? scale * expf(widen(logits[token * stride + e]) - highest) : 0.0f, dlogits[e]);
  }
  __syncwarp();
  for (int i = lane; i < k; i += kWarpSize) narrow(weights[i] * (grad[i] - mean), dlogits[experts[i]]);
}

dim3 blocks(int64_t tokens) { return dim3(static_cast<unsigned>((tokens + kTokens - 1) / kTokens)); }

template <class T>
cudaError_t start(const void* logits, int64_t stride, void* weights, int32_t* experts, int64_t tokens,
                  int64_t num_experts, int64_t k, int softmax_first, cudaStream_t stream) {
  const auto kernel = num_experts <= 4 * kWarpSize    ? topk_gate_kernel<T, 4>
                      : num_experts <= 8 * kWarpSize  ? topk_gate_kernel<T, 8>
                      : num_experts <= 32 * kWarpSize ? topk_gate_kernel<T, 32>
                                                      : topk_gate_kernel<T, 0>;
  const int64_t size = sizeof(T);
  const bool wide = rows_divide(4 * size, num_experts * size, {stride * size}, {logits});
  return launch(kernel, blocks(tokens), kTokens * kWarpSize, 0, stream,
                static_cast<const typename Logit<T>::Bits*>(logits), stride, static_cast<float*>(weights), experts,
                tokens, static_cast<int>(num_experts), static_cast<int>(k), softmax_first != 0, wide);
}

template <class T>
cudaError_t start_bwd(const void* grad, const void* weights, const int32_t* experts, const void* logits, int64_t stride,
                      void* dlogits, int64_t tokens, int64_t num_experts, int64_t k,
                      cudaStream_t stream) {
  return launch(topk_gate_bwd_kernel<T>, blocks(tokens), kTokens * kWarpSize, 0, stream,
                static_cast<const float*>(grad), static_cast<const float*>(weights), experts,
                static_cast<const T*>(logits), stride, static_cast<T*>(dlogits), tokens, static_cast<int>(num_experts), static_cast<int>(k));
}

bool plausible(int64_t tokens, int64_t num_experts, int64_t k) {
  return tokens >= 0 && tokens <= INT32_MAX && k >= 0 && k <= num_experts && num_experts <= kMaxRow;
}

}  // namespace

cudaError_t topk_gate_fwd(int dtype, const void* logits, int64_t stride, void* weights, int32_t* experts,
                          void* /*scratch*/, int64_t /*scratch_stride*/, int64_t tokens, int64_t num_experts, int64_t k,
                          int softmax_first, cudaStream_t stream) {
  if (!plausible(tokens, num_experts, k)) return cudaErrorInvalidValue;
  if (tokens == 0 || k == 0) return cudaSuccess;
  const auto run = [&](auto element) {
    return start<decltype(element)>(logits, stride, weights, experts, tokens, num_experts, k, softmax_first, stream);
  };
  switch (dtype) {
    case float32: return run(float{});
    case bfloat16: return run(__nv_bfloat16{});
    case float16: return run(__half{});
  }
  return cudaErrorInvalidValue;
}

cudaError_t topk_gate_bwd(int dtype, const void* grad, const void* weights, const int32_t* experts, const void* logits,
                          int64_t stride, void* dlogits, int64_t tokens, int64_t num_experts,
                          int64_t k, cudaStream_t stream) {
  if (!plausible(tokens, num_experts, k)) return cudaErrorInvalidValue;
  if (tokens == 0 || num_experts == 0) return cudaSuccess;
  const auto run = [&](auto element) {
    return start_bwd<decltype(element)>(grad, weights, experts, logits, stride, dlogits, tokens, num_experts,
                                        k, stream);
  };
  switch (dtype) {
    case float32: return run(float{});
    case bfloat16: return run(__nv_bfloat16{});
    case float16: return run(__half{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace moe
