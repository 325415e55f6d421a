// k-winner-take-all on the CPU (definition: python_ref/kwta.py).
//
// A row is converted to integer keys that order as its values do. Its threshold, which separates the k largest keys, is
// found by counting the keys at or above trial keys. The first trial comes from the row's mean and variance, the next
// ones from interpolation or extrapolation, and after the first 8 trials from bisection. A row takes at most 8 more
// trials than a key has bits. Up to 32 rows are searched together: their trials are computed in vectors.

#include "ops.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "moe/cpu/formats.h"
#include "moe/cpu/pages.h"
#include "moe/cpu/scratch.h"
#include "moe/cpu/simd.h"

namespace moe {
namespace MOE_ISA {
namespace {

// Size of a thread's buffer, in keys. The rows that are searched together share it. A longer row is converted again for
// every pass over it.
constexpr int64_t kResident = 16384;
constexpr int64_t kChunk = 4096;      // keys of a longer row in the buffer at a time
constexpr int64_t kPrefetchLength = 512;  // longest row that is prefetched
constexpr int kRows = 32;             // most rows searched together: one bit of a uint32_t for each
constexpr int64_t kSampledBlocks = 16;  // blocks of 32 keys in a sample (moments), at least, if there are as many
constexpr int kTrials = 8;            // trials before bisection, the first of them from mean and variance

enum class Ties : int { index = 0, strict = 1, all = 2 };

// A row's winners: all keys greater than `above`, and the first `ties` of the keys equal to `above`.
template <class F>
struct Winners {
  typename F::Key above;
  int64_t ties;
};

// count: number of a row's keys at or above a trial value. nearest: the search's next bound. If count > k, a value from
// the trial on, and `count` keys are at or above it; otherwise a value below the trial, and `count` keys are above it.
template <class Key>
struct Count {
  int64_t count;
  Key nearest;
};

// The least key[i] ^ flip that is at least `from`; if there is none, the greatest number of type Key.
template <class Key>
Key least_from(const Key* key, int64_t n, Key from, Key flip) {
  Key least = std::numeric_limits<Key>::max();
#pragma omp simd reduction(min : least)
  for (int64_t i = 0; i < n; ++i) {
    const Key flipped = key[i] ^ flip;
    least = std::min(least, flipped >= from ? flipped : std::numeric_limits<Key>::max());
  }
  return least;
}

template <class F>
class Keys {
 public:
  using Key = typename F::Key;
  using Stat = typename F::Wide;

  // Number of keys, of a row of n elements, that are in the buffer at a time, with padding.
  static int64_t span(int64_t n) { return n <= kResident ? mask_words(n) * kMaskBits : kChunk; }

  Keys() = default;
  Keys(const Key* x, int64_t n, Key* buffer) : x_(x), n_(n), buffer_(buffer) { load(0); }

  // Calls pass(index of the first element, keys, number of keys with padding) for each part of the row.
  template <class Pass>
  void each(Pass pass) const {
    if (n_ <= kResident) return pass(int64_t(0), buffer_, mask_words(n_) * kMaskBits);
    for (int64_t start = 0; start < n_; start += span(n_)) {
      load(start);
      pass(start, buffer_, mask_words(std::min(span(n_), n_ - start)) * kMaskBits);
    }
  }

  // nearest: t if count > k, else t - 1. Neither need be a key of the row.
  Count<Key> count(Key t, int64_t k) const {
    int64_t count = 0;
    each([&](int64_t, const Key* key, int64_t m) { count += count_greater(key, m, Key(t - 1)); });
    return {count, Key(count > k ? t : t - 1)};
  }

  // nearest: if count > k, the row's least key from t on, else its greatest key below t. Bisection then skips the gaps
  // between keys.
  Count<Key> count_and_snap(Key t, int64_t k) const {
    const Count<Key> plain = count(t, k);
    // If count > k, flip is 0 and changes nothing. Otherwise it flips all bits, which reverses the order: the greatest
    // key up to t - 1 becomes the least one from ~(t - 1) on.
    const Key flip = plain.count > k ? 0 : -1, from = plain.nearest ^ flip;
    Key least = std::numeric_limits<Key>::max();
    each([&](int64_t, const Key* key, int64_t m) { least = std::min(least, least_from(key, m, from, flip)); });
    return {plain.count, Key(least ^ flip)};
  }

  // Sums the values and their squares over a sample of the row; values that are not finite count as 0. Returns the size
  // of the sample. The sums need not be exact, since they only guide the search.
  int64_t moments(Stat* sum, Stat* square_sum) const {
    const int64_t blocks = std::max(std::min(n_, span(n_)) / kMaskBits, int64_t(1));
    const int64_t skip = std::max(blocks / kSampledBlocks, int64_t(1));
    Stat sums[kMaskBits] = {}, squares[kMaskBits] = {};  // one for each lane; lanes are added at the end
    int64_t seen = 0;
    for (int64_t block = 0; block < blocks; block += skip, seen += kMaskBits) {
      const Key* key = buffer_ + block * kMaskBits;
#pragma omp simd
      for (int i = 0; i < kMaskBits; ++i) {
        const Stat value = finite_or_zero<F>(key[i]);
        sums[i] += value;
        squares[i] += value * value;
      }
    }
    *sum = sum_of(sums);
    *square_sum = sum_of(squares);
    return std::min(n_, seen);
  }

 private:
  void load(int64_t start) const {
    const Key* x = x_ + start;
    const int64_t count = std::min(span(n_), n_ - start), whole = count / kMaskBits * kMaskBits;
    if (whole < count) std::fill_n(buffer_ + whole, kMaskBits, Key(-F::inf - 2));  // padding: below every key of x
    const auto convert = [&](int64_t from, int64_t m) {
#pragma omp simd
      for (int64_t i = from; i < from + m; ++i) buffer_[i] = key_of<F>(x[i]);
    };
    convert(0, whole);
    // The last elements are converted as a block of 32 that overlaps the block before it.
    if (whole < count && whole > 0) {
      convert(count - kMaskBits, kMaskBits);
    } else {
      convert(whole, count - whole);
    }
  }

  const Key* x_ = nullptr;  // (n,)
  int64_t n_ = 0;
  Key* buffer_ = nullptr;  // (span(n),)
};

// The search for the thresholds of up to kRows rows, one lane per row. While a row is unfinished, more than k of its
// keys are at or above low_, and at most k at or above high_. A row is finished if high_ = low_ + 1. A trial with a
// count of exactly k finishes it: update then sets low_ = nearest and high_ = nearest + 1, and exactly k keys are at or
// above high_.
template <class F, class Int>
class Search {
 public:
  using Key = typename F::Key;
  using Stat = typename F::Wide;
  using Unsigned = std::make_unsigned_t<Int>;

  void run(const Keys<F>* keys, int rows, int64_t n, int64_t k, Stat quantile) {
    n_ = Int(n), k_ = Int(k);
    if (k == 0 || k == n) {
      for (int r = 0; r < rows; ++r) low_[r] = k == 0 ? F::inf + 1 : -F::inf - 1, at_high_[r] = k_;
      return;
    }
    start(keys, rows, quantile);
    for (int round = 1; uint32_t live = greater(live_, Int(0)); ++round) {
      const bool guided = round < kTrials;
      for (; live; live &= live - 1) {
        const int r = __builtin_ctz(live);
        const Key trial = Key(trial_[r]);
        const Count<Key> count = guided ? keys[r].count(trial, k) : keys[r].count_and_snap(trial, k);
        count_[r] = Int(count.count), nearest_[r] = count.nearest;
      }
      update(guided);
    }
  }

  Winners<F> winners(int r, Ties ties) const {
    const bool hit = at_high_[r] == k_;
    return {Key(ties == Ties::all && !hit ? low_[r] - 1 : low_[r]), ties == Ties::index ? k_ - at_high_[r] : 0};
  }

 private:
  void start(const Keys<F>* keys, int rows, Stat quantile) {
    int64_t seen = 1;
    for (int r = 0; r < rows; ++r) seen = keys[r].moments(&bottom_[r], &top_[r]);
    const Stat share = 1 / Stat(seen);
    // slope_ is the expected gap between neighbouring sorted values at the threshold. For normal values it is their
    // standard deviation times `step`.
    const Stat step = std::sqrt(Stat(2 * 3.14159265)) * std::exp(Stat(0.5) * quantile * quantile) / Stat(n_);
#pragma omp simd
    for (int r = 0; r < kRows; ++r) {
      const bool used = r < rows;
      const Stat mean = used ? bottom_[r] * share : Stat(0), square = used ? top_[r] * share : Stat(0);
      const Stat deviation = std::sqrt(std::max(square - mean * mean, Stat(0)));
      low_[r] = used ? -F::inf - 1 : 0, high_[r] = used ? F::inf + 2 : 1;
      at_low_[r] = n_, at_high_[r] = 0, count_[r] = 0, nearest_[r] = 0;
      slope_[r] = deviation * step;
      set_trial(r, mean + quantile * deviation, true);
    }
  }

  void update(bool guided) {
    const Int n = n_, k = k_;
#pragma omp simd
    for (int r = 0; r < kRows; ++r) {
      const Int count = count_[r];
      const bool live = live_[r] != 0, above = live && count > k, below = live && count <= k;
      const Stat here = value_of<F>(Key(trial_[r]));
      low_[r] = live && count >= k ? nearest_[r] : low_[r];
      high_[r] = below ? nearest_[r] + 1 : high_[r];
      const Int at_low = above ? count : at_low_[r], at_high = below ? count : at_high_[r];
      const Stat bottom = above ? here : bottom_[r], top = below ? here : top_[r];
      at_low_[r] = at_low, at_high_[r] = at_high, bottom_[r] = bottom, top_[r] = top;
      const Stat newton = here + Stat(count - k) * slope_[r];
      const Stat chord = bottom + (top - bottom) * (Stat(at_low - k) / Stat(at_low - at_high));
      set_trial(r, at_low < n && at_high > 0 ? chord : newton, guided);
    }
  }

  void set_trial(int r, Stat guess, bool guided) {
    const Int low = low_[r], high = high_[r];
    const Unsigned apart = Unsigned(high) - Unsigned(low);
    const Int middle = Int(low + Int(apart / 2));
    const Int near = std::min(std::max(Int(key_near<F>(guess)), Int(low + 1)), Int(high - 1));
    trial_[r] = guided && std::abs(guess) < std::numeric_limits<Stat>::max() ? near : middle;
    live_[r] = apart > 1;
  }

  Int n_, k_;
  alignas(64) Int low_[kRows], high_[kRows], trial_[kRows], at_low_[kRows], at_high_[kRows];
  Int live_[kRows], count_[kRows], nearest_[kRows];
  // Value of the last trial with count > k, and of the last with count <= k. At first, the sums of `moments`.
  Stat bottom_[kRows], top_[kRows];
  Stat slope_[kRows];  // change of value per key, for Newton's steps
};

// Calls put(index, word) for each word of the row's mask, from left to right.
template <class F, class Put>
void select(const Keys<F>& keys, Winners<F> winners, Put put) {
  using Key = typename F::Key;
  keys.each([&](int64_t start, const Key* key, int64_t m) {
    for (int64_t i = 0; i < m; i += kMaskBits) {
      uint32_t word = greater(key + i, winners.above);
      if (winners.ties > 0) {
        for (uint32_t equal = greater(key + i, Key(winners.above - 1)) & ~word; equal && winners.ties; --winners.ties) {
          word |= equal & -equal;
          equal &= equal - 1;
        }
      }
      put((start + i) / kMaskBits, word);
    }
  });
}

template <class Key>
void prefetch_row(const Key* row, int64_t n) {
  constexpr int64_t line = 64 / sizeof(Key);
  for (int64_t i = 0; i < n; i += line) __builtin_prefetch(row + i, 0, 2);
}

struct Call {
  const void* x;
  int64_t x_stride;
  const void* values;
  int64_t values_stride;
  void* y;
  int32_t* bits;
  uint8_t* mask;
  int64_t rows, n, k;
  Ties ties;
  float quantile;  // normal_quantile of moe_kernels/backends/_seed.py
  int threads;
};

template <class F, class Int>
void forward(const Call& c) {
  using Key = typename F::Key;
  const auto* x = static_cast<const Key*>(c.x);
  const auto* values = static_cast<const Key*>(c.values);
  auto* y = static_cast<Key*>(c.y);
  const int64_t span = Keys<F>::span(c.n);
  const int64_t block = std::clamp<int64_t>(kResident / std::max<int64_t>(span, 1), 1, kRows);
  const Scratch<Key> buffers(c.threads, block * span);  // not on the stack: OpenMP's threads may have 128 KB
  const int64_t blocks = (c.rows + block - 1) / block;
#pragma omp parallel for num_threads(c.threads) schedule(static)
  for (int thread = 0; thread < c.threads; ++thread) {
    Key* const buffer = buffers.of(thread);
    Keys<F> keys[kRows];
    Search<F, Int> search;
    for (int64_t b = thread * blocks / c.threads; b < (thread + 1) * blocks / c.threads; ++b) {
      const int64_t first = b * block;
      const int rows = int(std::min(block, c.rows - first));
      for (int r = 0; r < rows; ++r) {
        const Key* row = x + (first + r) * c.x_stride;
        if (c.n <= kPrefetchLength && first + block + r < c.rows) prefetch_row(row + block * c.x_stride, c.n);
        keys[r] = Keys<F>(row, c.n, buffer + r * span);
      }
      search.run(keys, rows, c.n, c.k, c.quantile);
      for (int r = 0; r < rows; ++r) {
        const int64_t row = first + r;
        select(keys[r], search.winners(r, c.ties), [&](int64_t w, uint32_t word) {
          const int64_t i = w * kMaskBits, count = std::min(kMaskBits, c.n - i);
          if (y) keep(y + row * c.n + i, values + row * c.values_stride + i, word, count);
          if (c.bits) c.bits[row * mask_words(c.n) + w] = int32_t(word);
          if (c.mask) spread(c.mask + row * c.n + i, word, count);
        });
      }
    }
  }
}

template <class Bits>
void backward(const void* grad, int64_t grad_stride, const int32_t* bits, void* dx, int64_t rows, int64_t n,
              int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const Bits* in = static_cast<const Bits*>(grad) + r * grad_stride;
    Bits* out = static_cast<Bits*>(dx) + r * n;
    for (int64_t i = 0; i < n; i += kMaskBits)
      keep(out + i, in + i, uint32_t(bits[r * mask_words(n) + i / kMaskBits]), std::min(kMaskBits, n - i));
  }
}

}  // namespace

void kwta_fwd(int dtype, const void* x, int64_t x_stride, const void* values, int64_t values_stride, void* y,
              int32_t* bits, uint8_t* mask, int64_t rows, int64_t n, int64_t k, int ties, float quantile, int threads) {
  const Call call{
      x,        x_stride, values ? values : x, values ? values_stride : x_stride, y, bits, mask, rows, n, k, Ties(ties),
      quantile, threads};
  with_format(dtype, [&](auto format) {
    using F = decltype(format);
    if (y) expect_pages(y, rows * n * int64_t(sizeof(typename F::Key)));
    if constexpr (sizeof(typename F::Wide) == 4) {
      if (n <= std::numeric_limits<int32_t>::max()) return forward<F, int32_t>(call);
    }
    forward<F, int64_t>(call);
  });
}

void kwta_bwd(int element_size, const void* grad, int64_t grad_stride, const int32_t* bits, void* dx, int64_t rows,
              int64_t n, int threads) {
  expect_pages(dx, rows * n * element_size);
  switch (element_size) {
    case 2: return backward<uint16_t>(grad, grad_stride, bits, dx, rows, n, threads);
    case 4: return backward<uint32_t>(grad, grad_stride, bits, dx, rows, n, threads);
    case 8: return backward<uint64_t>(grad, grad_stride, bits, dx, rows, n, threads);
  }
}

}  // namespace MOE_ISA
}  // namespace moe
