// k-winner-take-all. A row is read once and stays in registers (kwta_row.h); the threshold between its k largest elements
// and the rest is found by counting, from a first guess that takes the row for Gaussian; then the row is written. Three to
// five counting passes find the threshold of Gaussian rows, at most 40 that of any row.
#include <algorithm>
#include <cmath>

#include "kwta_row.h"
#include "moe/dtypes.h"
#include "moe/launch.cuh"
#include "moe/special.cuh"
#include "ops.h"

namespace moe {
namespace {

enum Ties { kIndex = 0, kStrict = 1, kAll = 2 };

// Passes that guess the next threshold before bisection takes over. The last two are for rows that are not normal, and have
// many zeros.
constexpr int kGuesses = 8;

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

// Elements with key >= above are winners, and so are the first `needed` of those with the key before it.
struct Cut {
  int above, needed;
};

// count(threshold) is the number of the row's elements that reach it. Between `low`, which at least k reach, and `high`,
// which at most k do, thresholds are tried until the two are neighbours: the k-th largest then is `low`, unless exactly k
// reach `high`. Rows of a warp are searched together; one that is done keeps its bracket.
template <class T, class R, class Team>
__device__ Cut find_cut(const R& row, Team& team, float2 moments, const Problem& p) {
  using Order = Key<T>;
  constexpr int kInfinity = static_cast<int>(Order::kNaN - Order::kZero) - 1;
  const int lowest = row.plain ? -Plain<T>::kInfinity : -kInfinity;
  int low = lowest, high = kInfinity + 2, low_count = row.n, high_count = 0;
  if (p.k == 0) low = high - 1;
  if (p.k == p.n || row.n == 0) high = lowest, low = lowest - 1, high_count = p.k;
  const float inv_sampled = reciprocal(static_cast<float>(row.sampled())), mean = moments.x * inv_sampled;
  const float deviation = square_root(fmaxf(moments.y * inv_sampled - mean * mean, 0.0f));
  const float spacing = p.spacing * deviation;
  float guess = mean + p.z * deviation, bottom = -INFINITY, top = INFINITY;

  const auto apart = [&] { return static_cast<uint32_t>(high) - static_cast<uint32_t>(low) > 1; };
#pragma unroll 1
  for (int pass = guess == guess ? 0 : kGuesses; team.any(apart()); pass++) {
    int key = Order::key(Order::nearest(guess));
    if (pass >= kGuesses - 2) {
      if (pass >= kGuesses) key = (low >> 1) + (high >> 1) + (low & high & 1);
      else if (pass == kGuesses - 2 && low < 0 && high > 0) key = 0;
      else if (low == 0) key = 1;
    }
    key = min(max(key, low + 1), high - 1);
    const int reached = team.sum(row.count(row.threshold(key)));
    const float here = Order::value(Order::bits(key));
    const int surplus = Team::kShared && row.n == 0 ? 0 : reached - p.k;  // beside the last row may lie none
    if (surplus > 0) {
      low = key, low_count = reached, bottom = here;
    } else {
      high = key, high_count = reached, top = here;
      if (surplus == 0) low = key - 1;
    }
    const float slope = (top - bottom) * reciprocal(static_cast<float>(low_count - high_count));
    guess = here + surplus * (slope < INFINITY ? slope : spacing);
  }
  const int ties = p.k - high_count;
  if (p.ties == kAll && ties > 0) return {low, 0};
  return {high, p.ties == kIndex ? ties : 0};
}

// Zeros and ones from flags: byte i of the result is bit i, for four of them.
__device__ __forceinline__ uint32_t spread_flags(uint32_t flags) { return (flags & 0xfu) * 0x00204081u & 0x01010101u; }

// Which ties of a resident row win, for the chunks of this thread, after one exchange of the team. Two chunks share a word:
// all threads' parts of one have at most 8192 elements.
template <int CHUNKS>
struct ThreadTies {
  static constexpr int kPairs = (CHUNKS + 1) / 2;
  static_assert(CHUNKS <= 32);

  uint32_t all = 0;           // bit c: those of chunk c all win
  int partly = -1, left = 0;  // the one chunk of which some win, if any, and how many

  template <class Row, class Team>
  __device__ void find(const Row& row, Team& team, uint32_t above, uint32_t tied, int needed) {
    uint32_t here[kPairs] = {}, before[kPairs], total[kPairs];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      here[c / 2] |= static_cast<uint32_t>(row.count_ties(row.resident[c], above, tied)) << (c % 2 * 16);
    }
    team.template share<kPairs>(here, before, total);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const auto of_chunk = [&](const uint32_t (&pairs)[kPairs]) { return int(pairs[c / 2] >> (c % 2 * 16) & 0xffffu); };
      const int wins = needed - of_chunk(before);
      if (wins >= of_chunk(here)) all |= 1u << c;
      else if (wins > 0) partly = c, left = wins;
      needed -= of_chunk(total);
    }
    int mine = 0;  // counted again: all chunks' counts would take registers
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      if (partly == c) mine = row.count_ties(row.resident[c], above, tied);
    }
    left -= warp_inclusive_sum(mine, team.lane, Team::kLanes) - mine;
    if (partly >= 0 && left >= mine) all |= 1u << partly;
  }
};

// Of the ties of a chunk, as flags, the first `count`.
__device__ __forceinline__ uint32_t first_flags(uint32_t flags, int count) {
  uint32_t taken = 0;
  for (; flags && count > 0; count--) {
    taken |= flags & -flags;
    flags &= flags - 1;
  }
  return taken;
}

// bits[i / 32], bit i % 32, for the elements of this thread's chunk; `winners` has a flag for each.
template <int WORDS, int VECTOR>
__device__ __forceinline__ void write_bits(uint32_t* bits,  // (ceil(n / 32))
                                           uint32_t winners, int first, int n, int lane) {
  const int end = (n + 31) & ~31;
  if constexpr (WORDS == 4) {  // byte by byte; neighbouring lanes have neighbouring bytes
    auto* const bytes = reinterpret_cast<uint8_t*>(bits) + first / 8;
    if constexpr (VECTOR == 4) winners |= __shfl_down_sync(kAllLanes, winners, 1) << 4;
    if (first % 8 == 0 && first < end) *bytes = static_cast<uint8_t>(winners);
  } else {
    const uint32_t word = warp_pack_bits<VECTOR>(winners, lane);
    if (first % 32 == 0 && first < n) bits[first / 32] = word;
  }
}

template <class T, int WORDS, int CHUNKS, class Team>
__device__ void write_row(Row<T, WORDS, CHUNKS>& row, Team& team, Cut cut, int64_t index, const Problem& p) {
  using Order = Key<T>;
  using R = Row<T, WORDS, CHUNKS>;
  constexpr int kVector = R::kVector, kPerWord = R::kPerWord;
  const bool reload = !row.plain || p.values != p.x;
  const int64_t start = index * p.n;
  const uint32_t above = row.threshold(cut.above), tied = row.threshold(cut.above - 1);
  int needed = cut.needed;
  ThreadTies<CHUNKS ? CHUNKS : 1> ties;
  if constexpr (R::kResident) {
    if (team.any(needed > 0)) ties.find(row, team, above, tied, needed);
  }

#pragma unroll
  for (int c = 0; c < row.chunks(); c++) {
    if (c * row.size * kVector >= p.n) break;
    row.forget_positions();
    const int first = row.position(c);
    uint32_t words[WORDS], chosen[WORDS];
    row.chunk(c, words);
    uint32_t threshold = above;
    int partly = 0;  // ties of this thread that win, where others of the chunk do not
    if constexpr (R::kResident) {
      if (ties.all >> c & 1) threshold = tied;
      else if (ties.partly == c) partly = ties.left;
    } else if (needed > 0) {
      const int mine = row.count_ties(words, above, tied);
      int total;
      partly = needed - team.sum_before(mine, total);
      if (partly >= mine) threshold = tied;
      needed -= total;
    }
    row.reaching(words, threshold, chosen);
    uint32_t winners = Order::flags(chosen);
    if (partly > 0 && threshold == above) {
      row.reaching(words, tied, chosen);
      winners |= first_flags(Order::flags(chosen) & ~winners, partly);
#pragma unroll
      for (int w = 0; w < WORDS; w++) chosen[w] = Order::mask(winners >> (w * kPerWord));
    }
    if (p.bits) write_bits<WORDS, kVector>(p.bits + index * ((p.n + 31) / 32), winners, first, row.n, team.lane);
    if (first >= row.n) continue;
    if (p.y) {
      uint32_t out[WORDS];
      if (reload) {
        row.read(static_cast<const T*>(p.values) + index * p.values_stride, first, out);
      } else {
#pragma unroll
        for (int w = 0; w < WORDS; w++) out[w] = words[w];
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

template <class T, int WORDS, int CHUNKS, class Team>
__device__ void kwta_row(int64_t index, Team team, Exchange<float2>* sums, const Problem& p) {
  Row<T, WORDS, CHUNKS> row;
  row.x = static_cast<const T*>(p.x) + index * p.x_stride;
  row.n = index < p.rows ? p.n : 0, row.rank = team.rank, row.size = team.size, row.whole_words = p.whole_words;
  float2 moments = row.enter();
  if constexpr (Team::kBlock) {
    int turn = 0;
    moments = exchange_warp_sums(moments, *sums, turn);
  }
  moments = {warp_sum(moments.x, Team::kLanes), warp_sum(moments.y, Team::kLanes)};
  row.plain = !team.any(!(moments.x == moments.x));
  row.settle();
  const Cut cut = find_cut<T>(row, team, moments, p);
  write_row(row, team, cut, index, p);
}

constexpr int kThreads = 256;       // of a block where a warp or a part of it holds a row
constexpr int kElements = 32;       // of a row in a thread's registers; fewer for shorter rows
constexpr int kLongest = 16384;     // in blocks of which several fit side by side
constexpr int kLongThreads = 1024;  // of the one block for longer rows; those that it cannot hold are read again

// Of a long row in a thread's registers: 32 of them in either case. Pairs of halves with an address each take more.
template <class T, int WORDS>
constexpr int kMostElements = sizeof(T) == 2 && WORDS == 4 ? 2 * kElements : kElements;
template <class T, int WORDS>
constexpr int kMaxThreads = kLongest / kMostElements<T, WORDS>;

// LANES threads hold a row, in as many registers as a long one: few of them pay what a pass costs beside counting.
template <class T, int WORDS, int ELEMENTS, int LANES>
__global__ void __launch_bounds__(kThreads) kwta_warp_kernel(Problem p) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (thread / kWarpSize * kWarpSize / LANES >= p.rows) return;  // with all of its warp
  kwta_row<T, WORDS, ELEMENTS / Row<T, WORDS, 0>::kVector>(thread / LANES, Team<LANES>{}, nullptr, p);
}

// At 64 registers two blocks of 512 threads fit side by side, at 85 three of 256; element by element, addresses take more.
template <class T, int WORDS, int ELEMENTS, int THREADS>
__global__ void __launch_bounds__(THREADS, THREADS < kLongThreads && WORDS == 4 ? (sizeof(T) == 2 ? 3 : 2) : 1)
    kwta_block_kernel(Problem p) {
  SHARED(Exchange<int>, counts, );
  SHARED(Exchange<float2>, sums, );
  constexpr int kChunks = ELEMENTS / Row<T, WORDS, 0>::kVector;
  SHARED(uint32_t, ties, [ThreadTies<kChunks ? kChunks : 1>::kPairs][kMaxWarps]);
  kwta_row<T, WORDS, kChunks>(blockIdx.x, Team<0>{&counts, ties}, &sums, p);
}

template <class T, int WORDS, int ELEMENTS, int LANES>
cudaError_t start_warps(const Problem& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.rows + kThreads / LANES - 1) / (kThreads / LANES)));
  return launch(kwta_warp_kernel<T, WORDS, ELEMENTS, LANES>, grid, kThreads, 0, stream, p);
}

template <class T, int WORDS>
cudaError_t start(const Problem& p, cudaStream_t stream) {
  constexpr int kMost = kMostElements<T, WORDS>;
  if constexpr (WORDS == 4) {
    if (p.n <= kMost * 2) return start_warps<T, WORDS, kMost / 4, 8>(p, stream);
    if (p.n <= kMost * 8) return start_warps<T, WORDS, kMost, 8>(p, stream);
    if (p.n <= kMost * 16) return start_warps<T, WORDS, kMost, 16>(p, stream);
  } else {  // a word of bits is that of a whole warp
    if (p.n <= 8 * kWarpSize) return start_warps<T, WORDS, 8, kWarpSize>(p, stream);
    if (p.n <= 16 * kWarpSize) return start_warps<T, WORDS, 16, kWarpSize>(p, stream);
  }
  if (p.n <= kMost * kWarpSize) return start_warps<T, WORDS, kMost, kWarpSize>(p, stream);
  const dim3 blocks(static_cast<unsigned>(p.rows));
  const int threads = (p.n + kMost * kWarpSize - 1) / (kMost * kWarpSize) * kWarpSize;
  if (p.n <= kLongest) {
    return launch(kwta_block_kernel<T, WORDS, kMost, kMaxThreads<T, WORDS>>, blocks, threads, 0, stream, p);
  }
  constexpr int kHeld = sizeof(T) == 4 && WORDS == 4 ? kElements : 0;
  if (p.n <= kHeld * kLongThreads) {
    return launch(kwta_block_kernel<T, WORDS, kHeld, kLongThreads>, blocks, threads, 0, stream, p);
  }
  return launch(kwta_block_kernel<T, WORDS, 0, kLongThreads>, blocks, kLongThreads, 0, stream, p);
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
