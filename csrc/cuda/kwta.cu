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

// Elements with key >= above are winners, and so are the first `needed` of those with tied <= key < above.
struct Cut {
  uint32_t above, tied;
  int needed;
};

// count(key) is the number of the row's keys that reach it. Between `low`, which more than k reach, and `high`, which
// fewer do, thresholds are tried until k reach one or the two are neighbours: the k-th largest then is `low`, and more
// elements than there are places left share it.
template <class T, class Count>
__device__ Cut find_cut(Count count, bool plain, float2 moments, int sampled, const Problem& p) {
  using Order = Key<T>;
  constexpr uint32_t kZero = Order::kZero;
  if (p.k == 0) return {Order::kOnes, Order::kOnes, 0};
  uint32_t low = Order::rank(Order::kMinusInfinity), high = Order::kNaN + 1;
  if (plain) {
    low = Order::rank(Order::key(Plain<T>::kMinusInfinity)), high = Order::rank(Order::key(Plain<T>::kInfinity)) + 1;
  }
  if (p.k == p.n) return {Order::key_of_rank(low), Order::key_of_rank(low), 0};
  int low_count = p.n, high_count = 0;

  const float inv_sampled = reciprocal(static_cast<float>(sampled)), mean = moments.x * inv_sampled;
  const float deviation = square_root(fmaxf(moments.y * inv_sampled - mean * mean, 0.0f));
  const float spacing = p.spacing * deviation;
  const bool gaussian = spacing > 0.0f && spacing < INFINITY;  // false where anything is NaN, too
  float guess = mean + p.z * deviation;

  for (int pass = 0; high - low > 1; pass++) {
    uint32_t rank = low + (high - low) / 2;
    if (gaussian && pass < kGuesses) {
      rank = pass < kGaussianGuesses ? Order::rank(Order::key(Order::nearest(guess))) : 0;
      if (rank <= low || rank >= high) {
        if (low < kZero && kZero < high) {
          rank = kZero;  // zeros (a rectified row has many) against the rest
        } else if (low == kZero) {
          rank = kZero + 1;
        } else if (Order::kPerWord == 2 && pass < kGaussianGuesses) {
          rank = rank <= low ? low + 1 : high - 1;  // 16-bit neighbours hold many elements each
        } else {
          const float share = float(low_count - p.k) * reciprocal(static_cast<float>(low_count - high_count));
          rank = low + static_cast<uint32_t>((high - low) * share);
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

// Which ties of a resident row win, for the chunks of this warp, after one exchange of the team. Two chunks share a word:
// a row has at most 16384 elements.
template <int CHUNKS>
struct WarpTies {
  static constexpr int kPairs = (CHUNKS + 1) / 2;
  static_assert(CHUNKS <= 32);

  uint32_t all = 0;           // bit c: those of chunk c all win
  int partly = -1, left = 0;  // the one chunk of which some win, if any, and how many

  template <class Row, bool BLOCK>
  __device__ void find(const Row& row, Team<BLOCK>& team, uint32_t above, uint32_t tied, int needed) {
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

template <class T, int WORDS, int CHUNKS, bool BLOCK>
__device__ void write_row(Row<T, WORDS, CHUNKS>& row, Team<BLOCK>& team, Cut cut, int64_t index, const Problem& p) {
  using Order = Key<T>;
  using R = Row<T, WORDS, CHUNKS>;
  constexpr int kVector = R::kVector, kPerWord = R::kPerWord;
  const bool reload = !row.plain || p.values != p.x;
  const int64_t start = index * p.n;
  const uint32_t above = row.threshold(cut.above), tied = row.threshold(cut.tied);
  int needed = cut.needed;
  WarpTies<CHUNKS ? CHUNKS : 1> ties;
  if (R::kResident && needed > 0) ties.find(row, team, above, tied, needed);

#pragma unroll
  for (int c = 0; c < row.chunks(); c++) {
    if (c * row.size * kVector >= p.n) break;
    row.forget_positions();
    const int first = row.position(c);
    uint32_t words[WORDS], chosen[WORDS];
    row.chunk(c, words);
    uint32_t threshold = above;
    int partly = 0;  // ties of this thread that win, where others of the chunk do not
    if (needed > 0) {
      if constexpr (R::kResident) {
        if (ties.all >> c & 1) threshold = tied;
        if (ties.partly == c) {
          const int mine = row.count_ties(words, above, tied);
          partly = ties.left - (warp_inclusive_sum(mine, team.lane) - mine);
          if (partly >= mine) threshold = tied;
        }
      } else {
        const int mine = row.count_ties(words, above, tied);
        int total;
        partly = needed - team.sum_before(mine, total);
        if (partly >= mine) threshold = tied;
        needed -= total;
      }
    }
    row.reaching(words, threshold, chosen);
    uint32_t winners = Order::flags(chosen);
    if (partly > 0 && threshold == above) {
      row.reaching(words, tied, chosen);
      winners |= first_flags(Order::flags(chosen) & ~winners, partly);
#pragma unroll
      for (int w = 0; w < WORDS; w++) chosen[w] = Order::mask(winners >> (w * kPerWord));
    }
    if (p.bits) write_bits<WORDS, kVector>(p.bits + index * ((p.n + 31) / 32), winners, first, p.n, team.lane);
    if (first >= p.n) continue;
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

template <class T, int WORDS, int CHUNKS, bool BLOCK>
__device__ void kwta_row(int64_t index, Team<BLOCK> team, Exchange<float2>* sums, const Problem& p) {
  Row<T, WORDS, CHUNKS> row;
  row.x = static_cast<const T*>(p.x) + index * p.x_stride;
  row.n = p.n, row.rank = team.rank, row.size = team.size, row.whole_words = p.whole_words;
  float2 moments = row.enter();
  if constexpr (BLOCK) {
    int turn = 0;
    moments = exchange_warp_sums(moments, *sums, turn);
  }
  moments = warp_sum(moments);
  row.plain = moments.x == moments.x;
  row.settle();
  const auto count = [&](uint32_t key) { return team.sum(row.count(key)); };
  const Cut cut = find_cut<T>(count, row.plain, moments, row.sampled(), p);
  write_row(row, team, cut, index, p);
}

constexpr int kWarpRows = 8;        // rows of a block where a warp holds one
constexpr int kElements = 32;       // of a row in a thread's registers; fewer for shorter rows of a warp
constexpr int kLongest = 16384;      // longer rows are read again
constexpr int kLongThreads = 1024;  // for these

// Of a long row in a thread's registers: 32 of them in either case. Pairs of halves with an address each take more.
template <class T, int WORDS>
constexpr int kMostElements = sizeof(T) == 2 && WORDS == 4 ? 2 * kElements : kElements;
template <class T, int WORDS>
constexpr int kMaxThreads = kLongest / kMostElements<T, WORDS>;

template <class T, int WORDS, int ELEMENTS>
__global__ void __launch_bounds__(kWarpRows * kWarpSize) kwta_warp_kernel(Problem p) {
  const int64_t index = int64_t(blockIdx.x) * kWarpRows + threadIdx.x / kWarpSize;
  if (index >= p.rows) return;
  kwta_row<T, WORDS, ELEMENTS / Row<T, WORDS, 0>::kVector>(index, Team<false>{}, nullptr, p);
}

// At 64 registers two blocks of 512 threads fit side by side, at 85 three of 256; element by element, addresses take more.
template <class T, int WORDS, int ELEMENTS>
__global__ void __launch_bounds__(ELEMENTS ? kMaxThreads<T, WORDS> : kLongThreads,
                                  ELEMENTS && WORDS == 4 ? (sizeof(T) == 2 ? 3 : 2) : 1)
    kwta_block_kernel(Problem p) {
  SHARED(Exchange<int>, counts, );
  SHARED(Exchange<float2>, sums, );
  constexpr int kChunks = ELEMENTS / Row<T, WORDS, 0>::kVector;
  SHARED(uint32_t, ties, [WarpTies<kChunks ? kChunks : 1>::kPairs][kMaxWarps]);
  kwta_row<T, WORDS, kChunks>(blockIdx.x, Team<true>{&counts, ties}, &sums, p);
}

template <class T, int WORDS>
cudaError_t start(const Problem& p, cudaStream_t stream) {
  constexpr int kMost = kMostElements<T, WORDS>;
  const dim3 row_blocks(static_cast<unsigned>(p.rows));
  const dim3 warp_blocks(static_cast<unsigned>((p.rows + kWarpRows - 1) / kWarpRows));
  const int threads = (p.n + kMost * kWarpSize - 1) / (kMost * kWarpSize) * kWarpSize;
  if (p.n <= kMost * kWarpSize) {
    const auto kernel = p.n <= 8 * kWarpSize           ? kwta_warp_kernel<T, WORDS, 8>
                        : p.n <= 16 * kWarpSize        ? kwta_warp_kernel<T, WORDS, 16>
                        : p.n <= kElements * kWarpSize ? kwta_warp_kernel<T, WORDS, kElements>
                                                       : kwta_warp_kernel<T, WORDS, kMost>;
    return launch(kernel, warp_blocks, kWarpRows * kWarpSize, 0, stream, p);
  }
  if (p.n <= kLongest) return launch(kwta_block_kernel<T, WORDS, kMost>, row_blocks, threads, 0, stream, p);
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
