// k-winner-take-all. A row is read once and stays in registers as ordered integers; the threshold between its k largest
// elements and the rest is found by counting, from a first guess that takes the row for Gaussian; then the row is
// written. Three to five counting passes find the threshold of Gaussian rows, at most 40 that of any row.
#include <algorithm>
#include <cmath>

#include "moe/block.cuh"
#include "moe/dtypes.h"
#include "moe/keys.cuh"
#include "moe/launch.cuh"
#include "moe/vector.cuh"
#include "ops.h"

namespace moe {
namespace {

enum Ties { kIndex = 0, kStrict = 1, kAll = 2 };

// Passes that guess the next threshold before bisection takes over, and how many of them trust the Gaussian.
constexpr int kGuesses = 8, kGaussianGuesses = 6;

struct Problem {
  const void* x;
  int64_t x_stride;
  const void* values;
  int64_t values_stride;
  void* y;
  uint32_t* bits;
  uint8_t* mask;
  int64_t rows;
  int n, k, ties;
  bool whole_words;  // rows start and end on a multiple of 4 bytes
  float z;           // quantile of 1 - k / n
  float spacing;     // of a standard normal row's elements at z: 1 / (n phi(z))
};

// The threads that hold one row: a warp, or a block.
template <bool BLOCK>
struct Team {
  Exchange<int>* counts;
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
};

// A row, WORDS registers (1 or 4) at a time: chunk c of a thread holds kVector consecutive elements, and the chunks of
// the team's threads follow each other. With CHUNKS > 0 all of a thread's keys stay in registers; with 0 they are read
// again each time.
template <class T, int WORDS, int CHUNKS>
struct Row {
  using Order = Key<T>;
  static constexpr bool kResident = CHUNKS > 0;
  static constexpr int kPerWord = Order::kPerWord, kVector = WORDS * kPerWord;

  const T* x;  // (n)
  int n, rank, size;
  bool whole_words;
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

  // The elements of one chunk as they stand in memory, and zeros for what lies outside the row.
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

  // Turns words into keys; what lies outside the row gets 0, which no threshold is as low as.
  __device__ void make_keys(int first, uint32_t (&words)[WORDS]) const {
#pragma unroll
    for (int w = 0; w < WORDS; w++) words[w] = inside(first, 0) ? Order::keys(words[w]) : 0;
    if (kVector == 2 && !inside(first, 1)) words[0] &= 0xffffu;
  }

  // The same for rows that may hold NaN.
  __device__ void make_canonical_keys(int first, uint32_t (&words)[WORDS]) const {
    uint32_t nan[WORDS] = {};
#pragma unroll
    for (int i = 0; i < kVector; i++) {
      const float value = Order::value(element(words[i / kPerWord], i));
      if (value != value) nan[i / kPerWord] |= Order::mask(1u << (i % kPerWord));
    }
    make_keys(first, words);
#pragma unroll
    for (int w = 0; w < WORDS; w++) words[w] = (words[w] & ~nan[w]) | (Order::in_each(Order::kNaN) & nan[w]);
  }

  __device__ void add_moments(const uint32_t (&words)[WORDS], float2& moments) const {
#pragma unroll
    for (int i = 0; i < kVector; i++) {
      const float value = Order::value(element(words[i / kPerWord], i));
      moments.x += value;
      moments.y = __fmaf_rn(value, value, moments.y);
    }
  }

  // Reads the row: the sums of its elements and of their squares over this thread. Where the first is NaN, and only
  // there, a NaN may be among the elements.
  __device__ float2 enter() {
    float2 moments = {0.0f, 0.0f};
    if constexpr (kResident) {
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) read(x, position(c), resident[c]);
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) add_moments(resident[c], moments);
      forget_positions();
      if (moments.x != moments.x) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
          recompute(resident[c]);
          make_canonical_keys(position(c), resident[c]);
        }
      } else {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) make_keys(position(c), resident[c]);
      }
    } else {
      for (int c = 0; c < chunks(); c++) {
        uint32_t words[WORDS];
        read(x, position(c), words);
        add_moments(words, moments);
      }
    }
    return moments;
  }

  __device__ void keys(int chunk, uint32_t (&words)[WORDS]) const {
    if constexpr (kResident) {
#pragma unroll
      for (int w = 0; w < WORDS; w++) words[w] = resident[chunk][w];
    } else {
      read(x, position(chunk), words);
      make_canonical_keys(position(chunk), words);
    }
  }

  // How many of this thread's keys are at least `key`.
  __device__ int count(uint32_t key) const {
    const uint32_t threshold = Order::in_each(key);
    int total = 0;
#pragma unroll
    for (int c = 0; c < chunks(); c++) {
      uint32_t words[WORDS];
      keys(c, words);
#pragma unroll
      for (int w = 0; w < WORDS; w++) {
        if constexpr (kPerWord == 1) {
          total = count_reaching(words[w], threshold, total);
        } else if (WORDS == 1) {
          total = count_high_bits(reaches_u16x2(words[w], threshold), 0, total);
        } else if (w % 2 == 0) {
          total = count_high_bits(reaches_u16x2(words[w], threshold),
                                  reaches_u16x2(words[(w + 1) % WORDS], threshold), total);
        }
      }
    }
    return total;
  }
};

// Elements with key >= above are winners, and so are the first `needed` of those with tied <= key < above.
struct Cut {
  uint32_t above, tied;
  int needed;
};

// count(key) is the number of the row's keys that reach it. Between `low`, which more than k reach, and `high`, which
// fewer do, thresholds are tried until k reach one or the two are neighbours: the k-th largest then is `low`, and more
// elements than there are places left share it.
template <class Order, class Count>
__device__ Cut find_cut(Count count, float2 moments, const Problem& p) {
  constexpr uint32_t kZero = Order::kZero;
  if (p.k == 0) return {Order::kOnes, Order::kOnes, 0};
  uint32_t low = Order::rank(Order::kMinusInfinity), high = Order::kNaN + 1;
  if (p.k == p.n) return {Order::key_of_rank(low), Order::key_of_rank(low), 0};
  int low_count = p.n, high_count = 0;

  const float mean = moments.x / p.n;
  const float deviation = sqrtf(fmaxf(moments.y / p.n - mean * mean, 0.0f));
  const float spacing = p.spacing * deviation;
  const bool gaussian = spacing > 0.0f && spacing < INFINITY;  // false where anything is NaN, too
  float guess = mean + p.z * deviation;

  for (int pass = 0; high - low > 1; pass++) {
    uint32_t rank = low + (high - low) / 2;
    if (gaussian && pass < kGuesses) {
      rank = pass < kGaussianGuesses ? Order::rank(Order::key(Order::nearest(guess))) : 0;
      if (rank <= low || rank >= high) {
        if (low < kZero && kZero < high) {
          rank = kZero;  // zeros, of which a rectified row has many, against the rest
        } else if (low == kZero) {
          rank = kZero + 1;
        } else if (Order::kPerWord == 2 && pass < kGaussianGuesses) {
          rank = rank <= low ? low + 1 : high - 1;  // 16-bit neighbours hold many elements each
        } else {
          rank = low + static_cast<uint32_t>((high - low) * (float(low_count - p.k) / (low_count - high_count)));
        }
        rank = min(max(rank, low + 1), high - 1);
      }
    }
    const uint32_t key = Order::key_of_rank(rank);
    const int reached = count(key);
    if (reached == p.k) return {key, key, 0};
    if (reached > p.k) {
      low = rank, low_count = reached;
    } else {
      high = rank, high_count = reached;
    }
    guess = Order::value(Order::bits(key)) + (reached - p.k) * spacing;
  }
  const uint32_t above = Order::key_of_rank(high), tied = Order::key_of_rank(low);
  if (p.ties == kAll) return {tied, tied, 0};
  return {above, tied, p.ties == kIndex ? p.k - high_count : 0};
}

// Zeros and ones from flags: byte i of the result is bit i, for four of them.
__device__ __forceinline__ uint32_t spread_flags(uint32_t flags) { return (flags & 0xfu) * 0x00204081u & 0x01010101u; }

template <class T, int WORDS, int CHUNKS, bool BLOCK>
__device__ void write_row(Row<T, WORDS, CHUNKS>& row, Team<BLOCK>& team, Cut cut, bool has_nan, int64_t index,
                          const Problem& p) {
  using Order = Key<T>;
  using R = Row<T, WORDS, CHUNKS>;
  constexpr int kVector = R::kVector, kPerWord = R::kPerWord;
  const bool reload = !R::kResident || has_nan || p.values != p.x;
  const int64_t start = index * p.n, bits_start = index * ((p.n + 31) / 32);
  const uint32_t above = Order::in_each(cut.above), tied = Order::in_each(cut.tied);
  int needed = cut.needed;

#pragma unroll
  for (int c = 0; c < row.chunks(); c++) {
    if (c * row.size * kVector >= p.n) break;
    row.forget_positions();
    const int first = row.position(c);
    uint32_t words[WORDS];
    row.keys(c, words);
    uint32_t chosen[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; w++) chosen[w] = Order::reaching(words[w], above);
    uint32_t winners = Order::flags(chosen);
    if (needed > 0) {
#pragma unroll
      for (int w = 0; w < WORDS; w++) chosen[w] = Order::reaching(words[w], tied);
      uint32_t ties = Order::flags(chosen) & ~winners;
      int total;
      for (int taken = team.sum_before(__popc(ties), total); ties && taken < needed; taken++) {
        winners |= ties & -ties;
        ties &= ties - 1;
      }
      needed -= total;
#pragma unroll
      for (int w = 0; w < WORDS; w++) chosen[w] = Order::mask(winners >> (w * kPerWord));
    }
    if (p.bits) {
      const uint32_t word = warp_pack_bits<kVector>(winners, team.lane);
      if (first % 32 == 0 && first < p.n) p.bits[bits_start + first / 32] = word;
    }
    if (first >= p.n) continue;
    if (p.y) {
      uint32_t out[WORDS];
      if (reload) {
        row.read(static_cast<const T*>(p.values) + index * p.values_stride, first, out);
      } else {
#pragma unroll
        for (int w = 0; w < WORDS; w++) out[w] = Order::words(words[w]);
      }
#pragma unroll
      for (int w = 0; w < WORDS; w++) out[w] &= chosen[w];
      row.write(static_cast<T*>(p.y) + start, first, out);
    }
    if (p.mask) {
      uint8_t* const mask = p.mask + start + first;
      if constexpr (WORDS == 4) {
#pragma unroll
        for (int i = 0; i < kVector; i += 4) *reinterpret_cast<uint32_t*>(mask + i) = spread_flags(winners >> i);
      } else {
#pragma unroll
        for (int i = 0; i < kVector; i++) {
          if (row.inside(first, i)) mask[i] = winners >> i & 1;
        }
      }
    }
  }
}

template <class T, int WORDS, int CHUNKS, bool BLOCK>
__device__ void kwta_row(int64_t index, Team<BLOCK> team, Exchange<float2>* sums, const Problem& p) {
  Row<T, WORDS, CHUNKS> row;
  row.x = static_cast<const T*>(p.x) + index * p.x_stride;
  row.n = p.n, row.rank = team.rank, row.size = team.size, row.whole_words = p.whole_words;
  float2 moments = row.enter();
  const bool has_nan = moments.x != moments.x;
  if constexpr (BLOCK) {
    int turn = 0;
    moments = exchange_warp_sums(moments, *sums, turn);
  }
  moments = warp_sum(moments);
  const auto count = [&](uint32_t key) { return team.sum(row.count(key)); };
  const Cut cut = find_cut<Key<T>>(count, moments, p);
  write_row(row, team, cut, has_nan, index, p);
}

constexpr int kWarpRows = 8;             // rows of a block where a warp holds one
constexpr int kElementsPerThread = 32;   // of a row in registers
constexpr int kSmallElements = 8;        // of a row in registers, for rows up to 8 * 32
constexpr int kMaxThreads = 512;         // times 32 elements: the longest row in registers has 16384
constexpr int kLongThreads = 1024;       // for rows that are read again

template <class T, int WORDS, int ELEMENTS>
__global__ void __launch_bounds__(kWarpRows * kWarpSize) kwta_warp_kernel(Problem p) {
  const int64_t index = int64_t(blockIdx.x) * kWarpRows + threadIdx.x / kWarpSize;
  if (index >= p.rows) return;
  kwta_row<T, WORDS, ELEMENTS / Row<T, WORDS, 0>::kVector>(index, Team<false>{}, nullptr, p);
}

// At 64 registers two blocks fit side by side; element by element, addresses take more.
template <class T, int WORDS, int ELEMENTS>
__global__ void __launch_bounds__(ELEMENTS ? kMaxThreads : kLongThreads, ELEMENTS && WORDS == 4 ? 2 : 1)
    kwta_block_kernel(Problem p) {
  SHARED(Exchange<int>, counts, );
  SHARED(Exchange<float2>, sums, );
  kwta_row<T, WORDS, ELEMENTS / Row<T, WORDS, 0>::kVector>(blockIdx.x, Team<true>{&counts}, &sums, p);
}

template <class T, int WORDS>
cudaError_t start(const Problem& p, cudaStream_t stream) {
  const dim3 row_blocks(static_cast<unsigned>(p.rows));
  const dim3 warp_blocks(static_cast<unsigned>((p.rows + kWarpRows - 1) / kWarpRows));
  const int threads = (p.n + kElementsPerThread * kWarpSize - 1) / (kElementsPerThread * kWarpSize) * kWarpSize;
  if (p.n <= kSmallElements * kWarpSize) {
    return launch(kwta_warp_kernel<T, WORDS, kSmallElements>, warp_blocks, kWarpRows * kWarpSize, 0, stream, p);
  }
  if (p.n <= kElementsPerThread * kWarpSize) {
    return launch(kwta_warp_kernel<T, WORDS, kElementsPerThread>, warp_blocks, kWarpRows * kWarpSize, 0, stream, p);
  }
  if (threads <= kMaxThreads) {
    return launch(kwta_block_kernel<T, WORDS, kElementsPerThread>, row_blocks, threads, 0, stream, p);
  }
  return launch(kwta_block_kernel<T, WORDS, 0>, row_blocks, kLongThreads, 0, stream, p);
}

// Whether every row of every tensor can be taken in pieces of `bytes`, with nothing left over.
bool divides(int64_t bytes, int64_t size, const Problem& p) {
  return p.n * size % bytes == 0 && p.x_stride * size % bytes == 0 && p.values_stride * size % bytes == 0 &&
         is_aligned(p.x, bytes) && is_aligned(p.values, bytes) && is_aligned(p.y, bytes) && is_aligned(p.mask, 4);
}

template <class T>
cudaError_t start(Problem p, cudaStream_t stream) {
  p.whole_words = divides(4, sizeof(T), p);
  return divides(16, sizeof(T), p) ? start<T, 4>(p, stream) : start<T, 1>(p, stream);
}

constexpr int kBackwardThreads = 256, kBackwardVectors = 4;
constexpr int64_t kBackwardBlocks = 1024;  // that share a row, at most: a grid ends at 65535 of them

// A thread takes kBackwardVectors vectors of a row at a time, blockDim.x apart.
template <class Bits, class Vector>
__global__ void __launch_bounds__(kBackwardThreads)
    kwta_bwd_kernel(const Bits* grad,  // (rows, n)
                    int64_t grad_stride,
                    const uint32_t* bits,  // (rows, ceil(n / 32))
                    Bits* dx,              // (rows, n)
                    int64_t rows, int n) {
  constexpr int kVector = sizeof(Vector) / sizeof(Bits);
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  const auto* from = reinterpret_cast<const Vector*>(grad + row * grad_stride);
  auto* to = reinterpret_cast<Vector*>(dx + row * n);
  bits += row * ((n + 31) / 32);
  const auto mask = [&](int i) {
    const Vector value = load(from + i);
    const uint32_t flags = load(bits + i * kVector / 32) >> (i * kVector % 32);
    if constexpr (kVector == 1) {
      store_streaming(to + i, static_cast<Vector>(flags & 1 ? value : 0));
    } else {
      using Order = KeyOrder<8 * sizeof(Bits)>;
      const auto keep = [&](uint32_t word, int w) { return word & Order::mask(flags >> (w * Order::kPerWord)); };
      store_streaming(to + i, make_uint4(keep(value.x, 0), keep(value.y, 1), keep(value.z, 2), keep(value.w, 3)));
    }
  };
  const int vectors = n / kVector, together = kBackwardVectors * blockDim.x;
#pragma unroll 1
  for (int start = blockIdx.y * together; start < vectors; start += gridDim.y * together) {
#pragma unroll
    for (int v = 0; v < kBackwardVectors; v++) {
      const int i = start + v * blockDim.x + threadIdx.x;
      if (i < vectors) mask(i);
    }
  }
}

template <class Bits, class Vector>
cudaError_t start_bwd(const void* grad, int64_t grad_stride, const int32_t* bits, void* dx, int64_t rows, int64_t n,
                      cudaStream_t stream) {
  const int64_t vectors = n * sizeof(Bits) / sizeof(Vector);
  unsigned across = kWarpSize;  // threads along a row: the rest of the block takes further rows
  while (across < kBackwardThreads && across * kBackwardVectors < vectors) across *= 2;
  const dim3 block(across, kBackwardThreads / across);
  const dim3 grid(static_cast<unsigned>((rows + block.y - 1) / block.y),
                  static_cast<unsigned>(std::min(
                      kBackwardBlocks, (vectors + across * kBackwardVectors - 1) / (across * kBackwardVectors))));
  return launch(kwta_bwd_kernel<Bits, Vector>, grid, block, 0, stream, static_cast<const Bits*>(grad), grad_stride,
                reinterpret_cast<const uint32_t*>(bits), static_cast<Bits*>(dx), rows, static_cast<int>(n));
}

template <class Bits>
cudaError_t start_bwd(const void* grad, int64_t grad_stride, const int32_t* bits, void* dx, int64_t rows, int64_t n,
                      cudaStream_t stream) {
  const bool vectors = n * sizeof(Bits) % 16 == 0 && grad_stride * sizeof(Bits) % 16 == 0 && is_aligned(grad, 16) &&
                       is_aligned(dx, 16);
  const auto start = vectors ? start_bwd<Bits, uint4> : start_bwd<Bits, Bits>;
  return start(grad, grad_stride, bits, dx, rows, n, stream);
}

constexpr int64_t kMaxRow = int64_t(1) << 30;  // elements: positions in a row, and a block past its end, are ints

}  // namespace

cudaError_t kwta_fwd(int dtype, const void* x, int64_t x_stride, const void* values, int64_t values_stride, void* y,
                     int32_t* bits, uint8_t* mask, int64_t rows, int64_t n, int64_t k, int ties, float z,
                     cudaStream_t stream) {
  if (rows < 0 || n < 0 || n > kMaxRow || k < 0 || k > n || ties < kIndex || ties > kAll) return cudaErrorInvalidValue;
  if (rows == 0 || n == 0) return cudaSuccess;
  Problem p{};
  p.x = x, p.x_stride = x_stride;
  p.values = values ? values : x, p.values_stride = values ? values_stride : x_stride;
  p.y = y, p.bits = reinterpret_cast<uint32_t*>(bits), p.mask = mask;
  p.rows = rows, p.n = static_cast<int>(n), p.k = static_cast<int>(k), p.ties = ties;
  p.z = z;
  const double density = std::exp(-0.5 * z * z) * 0.3989422804014327;  // of the standard normal distribution at z
  p.spacing = static_cast<float>(1.0 / (density * static_cast<double>(n)));
  switch (dtype) {
    case float32: return start<float>(p, stream);
    case bfloat16: return start<__nv_bfloat16>(p, stream);
    case float16: return start<__half>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t kwta_bwd(int element_size, const void* grad, int64_t grad_stride, const int32_t* bits, void* dx,
                     int64_t rows, int64_t n, cudaStream_t stream) {
  if (rows < 0 || n < 0 || n > kMaxRow) return cudaErrorInvalidValue;
  if (rows == 0 || n == 0) return cudaSuccess;
  switch (element_size) {
    case 2: return start_bwd<uint16_t>(grad, grad_stride, bits, dx, rows, n, stream);
    case 4: return start_bwd<uint32_t>(grad, grad_stride, bits, dx, rows, n, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace moe
