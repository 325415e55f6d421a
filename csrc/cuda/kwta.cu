// k-winner-take-all: a search for the k-th largest element of each row. A pass counts the row's elements that reach a
// threshold, that is, are at least as large. The first threshold assumes a Gaussian row. Thresholds are keys: integers
// in the order of the values (keys.cuh). A row stays in registers (kwta_row.cuh), but the longest rows (launch_rows)
// are read again in each pass.
#include <algorithm>
#include <cmath>

#include "kwta_row.cuh"
#include "moe/common/dtypes.h"
#include "moe/cuda/launch.cuh"
#include "moe/cuda/special.cuh"
#include "ops.h"

namespace moe {
namespace {

enum Ties { kIndex = 0, kStrict = 1, kAll = 2 };

// Passes before bisection. The last two may try keys 0 and 1, for rows with many zeros.
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
  bool other_values;  // values are not x
  // Whether each row has the same offset modulo 16 bytes in x, values and y, and modulo 4 elements in x and mask.
  bool aligned;
  float z;        // standard normal quantile of 1 - (k - 0.5) / n; 0 if k is 0 or n
  float spacing;  // mean distance between neighbours near z in a sorted row of n standard normal numbers
};

// Winners are the elements with key >= above, and the first `needed` of those with key above - 1.
struct Cut {
  int above, needed, ties;  // ties: number of elements with key above - 1, if needed > 0
};

// Invariant: at least k elements reach key `low`, and at most k reach `high`. At the end high = low + 1, and `low` is
// the k-th largest key unless exactly k elements reach `high`. Rows that share a warp all go on until the last one is
// done; further passes do not change a row's winners.
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
    const int surplus = Team::kShared && row.n == 0 ? 0 : reached - p.k;  // n is 0 past the last row
    if (surplus > 0) {
      low = key, low_count = reached, bottom = here;
    } else {
      high = key, high_count = reached, top = here;
      if (surplus == 0) low = key - 1;
    }
    const float slope = (top - bottom) * reciprocal(static_cast<float>(low_count - high_count));
    guess = here + surplus * (slope < INFINITY ? slope : spacing);
  }
  const int needed = p.k - high_count;
  if (p.ties == kAll && needed > 0) return {low, 0, 0};
  return {high, p.ties == kIndex ? needed : 0, low_count - high_count};
}

// For a row in registers: this thread's winning ties (elements with key Cut::above - 1). The counts of two chunks
// (kwta_row.cuh) share a 32-bit word. A count fits in 16 bits: it is at most 4096, also summed over a row's threads.
template <int CHUNKS>
struct ThreadTies {
  static constexpr int kPairs = (CHUNKS + 1) / 2;
  static_assert(CHUNKS <= 32);

  uint32_t all = 0;  // bit c: all of this thread's ties in chunk c win
  // partly: chunk in which some, but not all, ties of the row's lanes in this warp win. left: the first `left` ties of
  // this thread win there, none if <= 0.
  int partly = -1, left = 0;

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
      const auto of_chunk = [&](const uint32_t (&pairs)[kPairs]) {
        return int(pairs[c / 2] >> (c % 2 * 16) & 0xffffu);
      };
      const int wins = needed - of_chunk(before);
      if (wins >= of_chunk(here)) all |= 1u << c;
      else if (wins > 0) partly = c, left = wins;
      needed -= of_chunk(total);
    }
    int mine = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      if (partly == c) mine = row.count_ties(row.resident[c], above, tied);
    }
    left -= warp_inclusive_sum(mine, team.lane, Team::kLanes) - mine;
    if (partly >= 0 && left >= mine) all |= 1u << partly;
  }
};

__device__ __forceinline__ uint32_t first_flags(uint32_t flags, int count) {
  uint32_t taken = 0;
  for (; flags && count > 0; count--) {
    taken |= flags & -flags;
    flags &= flags - 1;
  }
  return taken;
}

// Sets `chosen` to masks of the winners among this thread's elements of the edges (kwta_frame). Ties of the head win
// first, ties of the tail last. `needed` becomes the number of ties that win after those of the head; none if <= 0.
template <class R, class Team>
__device__ void select_edges(const R& row, Team& team, const Cut& cut, uint32_t above, uint32_t tied, int& needed,
                             uint32_t (&chosen)[R::kEdgeWords]) {
  constexpr int kPerWord = R::kPerWord;
  row.reaching(row.edges, above, chosen);
  if (!team.any(needed > 0)) return;
  uint32_t equal[R::kEdgeWords], here = 0;  // here: number of ties in the head (lower half) and tail (upper half)
  row.reaching(row.edges, tied, equal);
#pragma unroll
  for (int w = 0; w < R::kEdgeWords; w++) {
    equal[w] &= ~chosen[w];
    here += equal[w] & (kPerWord == 2 ? 0x00010001u : 1u << w % 2 * 16);
  }
  const uint32_t all = team.sum(here);
  if (!team.any(all > 0)) return;
  const int wins[2] = {needed, needed - cut.ties + static_cast<int>(all >> 16)};
  needed -= static_cast<int>(all & 0xffffu);
  uint32_t before = 0;
#pragma unroll
  for (int e = 0; e < R::kEdgeWords * kPerWord / 2; e++) {
    const uint32_t mine = (R::element(equal[2 * e / kPerWord], 2 * e) & 1u) |
                          (R::element(equal[(2 * e + 1) / kPerWord], 2 * e + 1) & 1u) << 16;
    const uint32_t through = before + warp_inclusive_sum(static_cast<int>(mine), team.lane, Team::kLanes);
#pragma unroll
    for (int side = 0; side < 2; side++) {
      const int i = 2 * e + side, rank = static_cast<int>((through - mine) >> 16 * side & 0xffffu);
      if (rank < wins[side]) chosen[i / kPerWord] |= equal[i / kPerWord] & R::to_element(~0u, i);
    }
    before += Team::lane_sum(mine);
  }
}

// Writes the edges of y and mask. Returns the winners' flags for `bits`: the head's in .x, the tail's in .y.
template <class R, class Team>
__device__ uint2 write_edges(const R& row, const Team& team, const uint32_t (&chosen)[R::kEdgeWords], int64_t index,
                             const Problem& p) {
  using Bits = typename R::Bits;
  const bool reload = !row.plain || p.other_values;
  uint32_t flags[2] = {};
  row.for_edges([&](int i, int side, int position) {
    const uint32_t wins = R::element(chosen[i / R::kPerWord], i);
    if (p.bits) flags[side] |= team.ballot(wins != 0) << i / 2 * Team::kLanes;
    if (position < 0) return;
    if (p.y) {
      const auto* values = static_cast<const Bits*>(p.values) + index * p.values_stride;
      const uint32_t bits = reload ? load(values + position) : R::element(row.edges[i / R::kPerWord], i);
      static_cast<Bits*>(p.y)[index * p.n + position] = static_cast<Bits>(bits & wins);
    }
    if (p.mask) p.mask[index * p.n + position] = wins & 1;
  });
  return {flags[0], flags[1]};
}

template <int RING, class T, int CHUNKS, int EDGES, class Team>
__device__ void write_row(Row<T, CHUNKS, EDGES>& row, Team& team, Cut cut, int64_t index, uint32_t* shared,
                          const Problem& p) {
  using Order = Key<T>;
  using R = Row<T, CHUNKS, EDGES>;
  using Bits = typename R::Bits;
  constexpr int kVector = R::kVector, kPerWord = R::kPerWord, kWords = R::kWords;
  const bool reload = !row.plain || p.other_values, aligned = !R::kEdges || p.aligned;
  const uint32_t above = row.threshold(cut.above), tied = row.threshold(cut.above - 1);
  const int64_t start = index * p.n + row.frame.head;
  uint32_t* const bits = p.bits ? p.bits + index * ((p.n + 31) / 32) : nullptr;
  int needed = cut.needed;
  ShiftedBits<RING> shifted{shared, 8 - row.frame.head};
  uint2 edges;
  if constexpr (R::kEdges) {
    uint32_t chosen[R::kEdgeWords];
    select_edges(row, team, cut, above, tied, needed, chosen);
    edges = write_edges(row, team, chosen, index, p);
    if (bits) shifted.put_head(edges.x, team);
  }
  ThreadTies<CHUNKS ? CHUNKS : 1> ties;
  if constexpr (R::kResident) {
    if (team.any(needed > 0)) ties.find(row, team, above, tied, needed);
  }

  int first = 0;  // position of chunk c of the row's first thread
#pragma unroll
  for (int c = 0; c < row.chunks(); c++, first += row.size * kVector) {
    if (first >= ((p.n + 31) & ~31)) break;  // flags are written up to the end of the last word of `bits`
    row.recompute_positions();
    const int position = row.position(c);
    uint32_t words[kWords], chosen[kWords];
    row.chunk(c, words);
    uint32_t threshold = above;
    int partly = 0;  // number of this thread's ties that win, if only some win
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
      for (int w = 0; w < kWords; w++) chosen[w] = Order::mask(winners >> (w * kPerWord));
    }
    if (bits) {
      if constexpr (!R::kEdges) {
        write_flags<kVector>(reinterpret_cast<uint8_t*>(bits), winners, position, (row.n + 31) & ~31);
      } else {
        shifted.template put<kVector>(winners, position);
        // With a ring, writes the words whose flags are complete; `finish` writes the others, with the tail's flags.
        const int last = row.frame.head + row.frame.middle;
        if constexpr (RING > 0) shifted.drain(bits, min((first + row.size * kVector) / 32 - 1, last / 32), team);
      }
    }
    if (position >= row.frame.middle) continue;
    if (p.y) {
      uint32_t out[kWords];
      if (reload) {
        const Bits* values = static_cast<const Bits*>(p.values) + index * p.values_stride + row.frame.head;
        read_vector(values, position / kVector, aligned, out);
      } else {
#pragma unroll
        for (int w = 0; w < kWords; w++) out[w] = words[w];
      }
#pragma unroll
      for (int w = 0; w < kWords; w++) out[w] &= chosen[w];
      write_vector(static_cast<Bits*>(p.y) + start, position / kVector, aligned, out);
    }
    if (p.mask) write_mask<kVector>(p.mask + start + position, aligned, winners);
  }
  if constexpr (R::kEdges) {
    if (bits) shifted.finish(bits, first, row.frame.middle, edges.y, row.n, team);
  }
}

template <int RING, class T, int CHUNKS, int EDGES, class Team>
__device__ void kwta_row(int64_t index, Team team, Exchange<float2>* sums, uint32_t* shared, const Problem& p) {
  Row<T, CHUNKS, EDGES> row(static_cast<const T*>(p.x) + index * p.x_stride, index < p.rows ? p.n : 0, team);
  float2 moments = row.read_moments();
  if constexpr (Team::kBlock) {
    int turn = 0;
    moments = exchange_warp_sums(moments, *sums, turn);
  }
  moments = {warp_sum(moments.x, Team::kLanes), warp_sum(moments.y, Team::kLanes)};
  row.plain = !team.any(!(moments.x == moments.x));
  row.convert();
  const Cut cut = find_cut<T>(row, team, moments, p);
  write_row<RING>(row, team, cut, index, shared, p);
}

constexpr int kThreads = 256;       // of a block of kwta_warp_kernel
constexpr int kElements = 32;       // float32 elements that a thread holds in registers
constexpr int kLongest = 16384;     // elements that kMaxThreads threads hold
constexpr int kLongThreads = 1024;  // of a block for a row that does not fit in registers

// Elements that a thread holds, in 32 registers.
template <class T>
constexpr int kMostElements = sizeof(T) == 2 ? 2 * kElements : kElements;
template <class T>
constexpr int kMaxThreads = kLongest / kMostElements<T>;

// Elements of each edge that a thread holds, if THREADS threads share the row.
template <class T, bool WHOLE, int THREADS>
constexpr int kEdgeElements = WHOLE ? 0 : 16 / sizeof(T) > THREADS ? 16 / sizeof(T) / THREADS : 1;

// LANES lanes hold a row, ELEMENTS elements each.
template <class T, bool WHOLE, int ELEMENTS, int LANES>
__global__ void __launch_bounds__(kThreads, 2) kwta_warp_kernel(Problem p) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (thread / kWarpSize * kWarpSize / LANES >= p.rows) return;  // the condition is the same in all lanes of a warp
  uint32_t* flags = nullptr;
  if constexpr (!WHOLE) {
    __shared__ uint32_t words[kThreads / LANES][kBitsWords<ELEMENTS * LANES>];
    flags = words[threadIdx.x / LANES];
  }
  constexpr int kChunks = ELEMENTS * sizeof(T) / 16;
  kwta_row<0, T, kChunks, kEdgeElements<T, WHOLE, LANES>>(thread / LANES, Team<LANES>{}, nullptr, flags, p);
}

template <class T, bool WHOLE, int ELEMENTS, int THREADS>
__global__ void __launch_bounds__(THREADS, THREADS > kMaxThreads<T> ? 1 : sizeof(T) == 2 ? 3 : WHOLE ? 2 : 1)
    kwta_block_kernel(Problem p) {
  constexpr int kChunks = ELEMENTS * sizeof(T) / 16, kRing = kChunks || WHOLE ? 0 : 2 * THREADS / sizeof(T);
  __shared__ Exchange<int> counts;
  __shared__ Exchange<float2> sums;
  __shared__ uint32_t ties[ThreadTies<kChunks ? kChunks : 1>::kPairs][kMaxWarps];
  uint32_t* flags = nullptr;
  if constexpr (!WHOLE) {
    __shared__ uint32_t words[kRing ? kRing : kBitsWords<ELEMENTS * THREADS>];
    flags = words;
  }
  kwta_row<kRing, T, kChunks, kEdgeElements<T, WHOLE, THREADS>>(blockIdx.x, Team<0>{&counts, ties}, &sums, flags, p);
}

template <class T, bool WHOLE, int ELEMENTS, int LANES>
cudaError_t launch_warps(const Problem& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.rows + kThreads / LANES - 1) / (kThreads / LANES)));
  return launch(kwta_warp_kernel<T, WHOLE, ELEMENTS, LANES>, grid, kThreads, 0, stream, p);
}

template <class T, bool WHOLE>
cudaError_t launch_rows(const Problem& p, cudaStream_t stream) {
  constexpr int kMost = kMostElements<T>;
  const int n = p.n & -static_cast<int>(16 / sizeof(T));  // elements of the middle, at most
  if (n <= kMost * 2) return launch_warps<T, WHOLE, kMost, 2>(p, stream);
  if (n <= kMost * 4) return launch_warps<T, WHOLE, kMost, 4>(p, stream);
  if (n <= kMost * 8) return launch_warps<T, WHOLE, kMost, 8>(p, stream);
  if (n <= kMost * 16) return launch_warps<T, WHOLE, kMost, 16>(p, stream);
  if (n <= kMost * kWarpSize) return launch_warps<T, WHOLE, kMost, kWarpSize>(p, stream);
  const dim3 blocks(static_cast<unsigned>(p.rows));
  const int threads = (n + kMost * kWarpSize - 1) / (kMost * kWarpSize) * kWarpSize;
  if (n <= kLongest) {
    return launch(kwta_block_kernel<T, WHOLE, kMost, kMaxThreads<T>>, blocks, threads, 0, stream, p);
  }
  if constexpr (WHOLE || sizeof(T) == 2) {  // float32 with edges needs over 64 registers a thread
    constexpr int kThreadsHeld = 2 * kMaxThreads<T>;
    if (n <= kThreadsHeld * kMost) {
      return launch(kwta_block_kernel<T, WHOLE, kMost, kThreadsHeld>, blocks, threads, 0, stream, p);
    }
  }
  return launch(kwta_block_kernel<T, WHOLE, 0, kLongThreads>, blocks, kLongThreads, 0, stream, p);
}

struct RowLayout {
  const void* first;
  int64_t stride, size;  // elements from row to row, and bytes of an element
};

// Whether each row starts at the same offset from a multiple of `vector` elements in both tensors.
bool same_offset(const RowLayout& a, const RowLayout& b, int64_t vector) {
  const auto start = [](const RowLayout& rows) { return reinterpret_cast<intptr_t>(rows.first) / rows.size; };
  return (start(a) - start(b)) % vector == 0 && (a.stride - b.stride) % vector == 0;
}

template <class T>
cudaError_t launch_rows(Problem p, cudaStream_t stream) {
  constexpr int64_t kSize = sizeof(T), kVector = 16 / kSize;
  const RowLayout x{p.x, p.x_stride, kSize};
  p.aligned = same_offset(x, {p.values, p.values_stride, kSize}, kVector) &&
              (!p.y || same_offset(x, {p.y, p.n, kSize}, kVector)) && (!p.mask || same_offset(x, {p.mask, p.n, 1}, 4));
  const bool whole = p.aligned && is_aligned(p.x, 16) && p.x_stride % kVector == 0 && p.n % kVector == 0;
  return whole ? launch_rows<T, true>(p, stream) : launch_rows<T, false>(p, stream);
}

constexpr int kBackwardThreads = 256, kBackwardVectors = 4;
constexpr int64_t kBackwardBlocks = 1024;  // most blocks for one row

template <class Bits, bool WHOLE>
__global__ void __launch_bounds__(kBackwardThreads)
    kwta_bwd_kernel(const Bits* grad,  // (rows, n)
                    int64_t grad_stride,
                    const uint32_t* bits,  // (rows, ceil(n / 32))
                    Bits* dx,              // (rows, n)
                    int64_t rows, int n,
                    bool aligned) {  // rows of grad and dx have the same offset from a multiple of 16 bytes
  using Order = KeyOrder<8 * sizeof(Bits)>;
  constexpr int kVector = 16 / sizeof(Bits);
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  grad += row * grad_stride, dx += row * n, bits += row * ((n + 31) / 32);
  const Frame<Bits, !WHOLE> frame(dx, n);
#pragma unroll 1
  for (int i = threadIdx.x; !WHOLE && blockIdx.y == 0 && i < 2 * kVector; i += blockDim.x) {
    const int position = frame.edge(i % 2, i / 2);
    if (position >= 0) dx[position] = load(bits + position / 32) >> position % 32 & 1 ? load(grad + position) : 0;
  }
  const int vectors = frame.middle / kVector, stride = kBackwardVectors * blockDim.x;
#pragma unroll 1
  for (int start = blockIdx.y * stride; start < vectors; start += gridDim.y * stride) {
#pragma unroll
    for (int v = 0; v < kBackwardVectors; v++) {
      const int i = start + v * blockDim.x + threadIdx.x;
      if (i >= vectors) continue;
      const unsigned position = frame.head + i * kVector, last = position + kVector - 1;
      uint32_t words[4];
      read_vector(grad + frame.head, i, WHOLE || aligned, words);
      uint32_t flags = load(bits + position / 32) >> position % 32;
      if (!WHOLE && last / 32 > position / 32) flags |= load(bits + last / 32) << (32 - position % 32);
#pragma unroll
      for (int w = 0; w < 4; w++) words[w] &= Order::mask(flags >> (w * Order::kPerWord));
      write_vector(dx + frame.head, i, true, words);
    }
  }
}

template <class Bits, bool WHOLE>
cudaError_t launch_bwd(const Bits* grad, int64_t grad_stride, const uint32_t* bits, Bits* dx, int64_t rows, int n,
                       bool aligned, cudaStream_t stream) {
  const int64_t vectors = std::max<int64_t>(n * sizeof(Bits) / 16, 1);
  unsigned across = 4;  // threads along a row
  while (across < kBackwardThreads && across * kBackwardVectors < vectors) across *= 2;
  const dim3 block(across, kBackwardThreads / across);
  const dim3 grid(static_cast<unsigned>((rows + block.y - 1) / block.y),
                  static_cast<unsigned>(std::min(
                      kBackwardBlocks, (vectors + across * kBackwardVectors - 1) / (across * kBackwardVectors))));
  return launch(kwta_bwd_kernel<Bits, WHOLE>, grid, block, 0, stream, grad, grad_stride, bits, dx, rows, n, aligned);
}

template <class Bits>
cudaError_t launch_bwd(const void* grad, int64_t grad_stride, const int32_t* bits, void* dx, int64_t rows, int64_t n,
                       cudaStream_t stream) {
  constexpr int64_t kSize = sizeof(Bits), kVector = 16 / kSize;
  const bool aligned = same_offset({dx, n, kSize}, {grad, grad_stride, kSize}, kVector);
  const bool whole = aligned && is_aligned(dx, 16) && n % kVector == 0;
  const auto with = whole ? launch_bwd<Bits, true> : launch_bwd<Bits, false>;
  return with(static_cast<const Bits*>(grad), grad_stride, reinterpret_cast<const uint32_t*>(bits),
              static_cast<Bits*>(dx), rows, static_cast<int>(n), aligned, stream);
}

constexpr int64_t kMaxRow = int64_t(1) << 30;  // elements; positions somewhat past the end of a row still fit an int

}  // namespace

cudaError_t kwta_fwd(int dtype, const void* x, int64_t x_stride, const void* values, int64_t values_stride, void* y,
                     int32_t* bits, uint8_t* mask, int64_t rows, int64_t n, int64_t k, int ties, float z,
                     cudaStream_t stream) {
  if (rows < 0 || n < 0 || n > kMaxRow || k < 0 || k > n || ties < kIndex || ties > kAll) return cudaErrorInvalidValue;
  if (rows == 0 || n == 0) return cudaSuccess;
  Problem p{};
  p.x = x, p.x_stride = x_stride;
  p.values = values ? values : x, p.values_stride = values ? values_stride : x_stride;
  p.other_values = p.values != x || p.values_stride != x_stride;
  p.y = y, p.bits = reinterpret_cast<uint32_t*>(bits), p.mask = mask;
  p.rows = rows, p.n = static_cast<int>(n), p.k = static_cast<int>(k), p.ties = ties;
  p.z = z;
  const double density = std::exp(-0.5 * z * z) * 0.3989422804014327;  // of the standard normal distribution at z
  p.spacing = static_cast<float>(1.0 / (density * static_cast<double>(n)));
  return with_element(dtype, [&](auto element) { return launch_rows<decltype(element)>(p, stream); });
}

cudaError_t kwta_bwd(int element_size, const void* grad, int64_t grad_stride, const int32_t* bits, void* dx,
                     int64_t rows, int64_t n, cudaStream_t stream) {
  if (rows < 0 || n < 0 || n > kMaxRow) return cudaErrorInvalidValue;
  if (rows == 0 || n == 0) return cudaSuccess;
  switch (element_size) {
    case 2: return launch_bwd<uint16_t>(grad, grad_stride, bits, dx, rows, n, stream);
    case 4: return launch_bwd<uint32_t>(grad, grad_stride, bits, dx, rows, n, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace moe
