// k-winner-take-all on the CPU (definition: python_ref/kwta.py).
//
// A row becomes integer keys that order as its values do, held in cache, and its threshold is found by counting the keys
// above a trial value: nothing is sorted and nothing is moved. The first trial comes from the row's mean and variance (a
// normal row needs 3 to 5 counts); key bisection bounds the worst row at about 40.

#include "ops.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "moe/formats.h"
#include "moe/simd.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int64_t kResident = 16384;  // keys of a row kept in cache; a longer row is read again for every count
constexpr int64_t kChunk = 4096;      // keys of a longer row at a time
constexpr int64_t kBlock = 16;        // rows searched together
constexpr int64_t kSampledWords = 16;  // of a row, for its mean and variance
constexpr int kTrials = 8;            // guesses from the shape of the row before plain bisection

enum class Ties : int { index = 0, strict = 1, all = 2 };

// A row's winners: keys above `above`, and of the keys equal to it the first `ties` ones.
template <class F>
struct Winners {
  typename F::Key above;
  int64_t ties;
};

// How many keys are at or above a trial, a key from it up to the next one of the row, and likewise below it.
template <class Key>
struct Count {
  int64_t count;
  Key next, previous;
};

// The keys of one row, in cache; a row longer than that is read again for every pass.
template <class F>
class Keys {
 public:
  using Key = typename F::Key;
  using Stat = typename F::Wide;

  static int64_t span(int64_t n) { return n <= kResident ? words_of(n) * kWord : kChunk; }

  Keys() = default;
  Keys(const Key* x, int64_t n, Key* buffer) : x_(x), n_(n), buffer_(buffer) {
    if (n <= kResident) load(0);
  }

  // Calls pass(first element, keys, how many up to a whole word) for each span of the row.
  template <class Pass>
  void each(Pass pass) const {
    for (int64_t start = 0; start < n_; start += span(n_)) {
      if (n_ > kResident) load(start);
      pass(start, buffer_, words_of(std::min(span(n_), n_ - start)) * kWord);
    }
  }

  // How many keys are at or above t.
  Count<Key> count(Key t) const {
    int64_t count = 0;
    each([&](int64_t, const Key* key, int64_t m) { count += MOE_ISA::count_greater(key, m, Key(t - 1)); });
    return {count, t, Key(t - 1)};
  }

  // The same, with the nearest keys that the row really has: this ends the search where many keys are equal.
  Count<Key> count_and_snap(Key t) const {
    int64_t count = 0;
    Key next = std::numeric_limits<Key>::max(), previous = std::numeric_limits<Key>::min();
    each([&](int64_t, const Key* key, int64_t m) {
#pragma omp simd reduction(min : next) reduction(max : previous) reduction(+ : count)
      for (int64_t i = 0; i < m; ++i) {
        const bool above = key[i] >= t;
        count += above;
        next = std::min(next, above ? key[i] : std::numeric_limits<Key>::max());
        previous = std::max(previous, above ? std::numeric_limits<Key>::min() : key[i]);
      }
    });
    return {count, next, previous};
  }

  // Mean and standard deviation of the finite values; only a seed, so float will do.
  void moments(Stat* mean, Stat* deviation) const {
    const int64_t words = words_of(std::min(n_, span(n_))), skip = std::max(words / kSampledWords, int64_t(1));
    Stat sums[kWord] = {}, square_sums[kWord] = {};  // one a lane: no horizontal sum until the end
    for (int64_t word = 0; word < words; word += skip) {
      const Key* key = buffer_ + word * kWord;
#pragma omp simd
      for (int i = 0; i < kWord; ++i) {
        const Key sign = key[i] >> (8 * sizeof(Key) - 1), magnitude = Key((key[i] ^ sign) - sign);
        // Padding and what is not finite count as zero.
        const Stat size = magnitude < F::inf ? F::decode(magnitude) : Stat(0);
        sums[i] += sign ? -size : size;
        square_sums[i] += size * size;
      }
    }
    Stat sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum, squares)
    for (int i = 0; i < kWord; ++i) sum += sums[i], squares += square_sums[i];
    const Stat seen = Stat(std::min(n_, (words + skip - 1) / skip * kWord));
    *mean = sum / seen;
    *deviation = std::sqrt(std::max(squares / seen - *mean * *mean, Stat(0)));
  }

 private:
  void load(int64_t start) const {
    const int64_t count = std::min(span(n_), n_ - start);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) buffer_[i] = key_of<F>(x_[start + i]);
    // Up to a whole word with keys that never win.
    std::fill(buffer_ + count, buffer_ + words_of(count) * kWord, Key(-F::inf - 2));
  }

  const Key* x_ = nullptr;  // (n,)
  int64_t n_ = 0;
  Key* buffer_ = nullptr;  // (span(n),)
};

// The search for one row's threshold. More than k keys are at or above `low`, fewer than k at or above `high`.
template <class F>
struct Search {
  using Key = typename F::Key;
  using Stat = typename F::Wide;

  Keys<F> keys;
  Key low, high, trial;
  int64_t at_low, at_high;
  Stat bottom, top, deviation;  // values of low and high, spread of the row

  void aim(Stat guess, bool guided) {
    const Key middle = Key(low + (uint64_t(high) - uint64_t(low)) / 2);
    const Key near = std::clamp(key_near<F>(guess), Key(low + 1), Key(high - 1));
    trial = guided && std::abs(guess) < std::numeric_limits<Stat>::max() ? near : middle;
  }
};

// Thresholds of `rows` rows at once: each round counts every row that is still searching, so that the counts of
// different rows overlap and no row waits for the result of its own.
template <class F>
void find(Search<F>* search, int rows, int64_t n, int64_t k, Ties ties, float quantile, Winners<F>* winners) {
  using Key = typename F::Key;
  using Stat = typename F::Wide;
  if (k == 0 || k == n) {
    for (int r = 0; r < rows; ++r) winners[r] = {Key(k == 0 ? F::inf + 1 : -F::inf - 1), 0};
    return;
  }
  // By how much one key too many moves the threshold of a normal row, in standard deviations.
  const Stat step = std::sqrt(2 * 3.14159265f) * std::exp(0.5f * quantile * quantile) / n;
  int live[kBlock], searching = rows;
  for (int r = 0; r < rows; ++r) {
    Search<F>& s = search[r];
    live[r] = r, s.low = -F::inf - 1, s.high = F::inf + 2, s.at_low = n, s.at_high = 0, s.bottom = s.top = 0;
    Stat mean;
    s.keys.moments(&mean, &s.deviation);
    s.aim(mean + quantile * s.deviation, true);
  }
  for (int round = 1; searching > 0; ++round) {
    const bool guided = round < kTrials;
    Count<Key> counts[kBlock];
    for (int i = 0; i < searching; ++i) {
      const Search<F>& s = search[live[i]];
      counts[i] = guided ? s.keys.count(s.trial) : s.keys.count_and_snap(s.trial);
    }
    int left = 0;
    for (int i = 0; i < searching; ++i) {
      const int r = live[i];
      Search<F>& s = search[r];
      const int64_t count = counts[i].count;
      const bool many = count > k;
      const Stat here = value_of<F>(s.trial);
      s.low = many ? counts[i].next : s.low, s.at_low = many ? count : s.at_low, s.bottom = many ? here : s.bottom;
      s.high = many ? s.high : Key(counts[i].previous + 1), s.at_high = many ? s.at_high : count, s.top = many ? s.top : here;
      const bool hit = count == k;
      const Key tied = ties == Ties::all ? Key(s.low - 1) : s.low;
      winners[r] = {hit ? Key(s.trial - 1) : tied, hit || ties != Ties::index ? 0 : k - s.at_high};
      const bool both = s.at_low < n && s.at_high > 0;
      const Stat newton = here + Stat(count - k) * s.deviation * step;
      const Stat chord = s.bottom + (s.top - s.bottom) * (Stat(s.at_low - k) / Stat(s.at_low - s.at_high));
      s.aim(both ? chord : newton, guided);
      live[left] = r;
      left += !(hit || s.high == s.low + 1);
    }
    searching = left;
  }
}

// Calls put(word index, mask word) from left to right.
template <class F, class Put>
void select(const Keys<F>& keys, Winners<F> winners, Put put) {
  using Key = typename F::Key;
  keys.each([&](int64_t start, const Key* key, int64_t m) {
    for (int64_t i = 0; i < m; i += kWord) {
      uint32_t word = greater(key + i, winners.above);
      if (winners.ties > 0) {
        for (uint32_t equal = greater(key + i, Key(winners.above - 1)) & ~word; equal && winners.ties; --winners.ties) {
          word |= equal & -equal;
          equal &= equal - 1;
        }
      }
      put((start + i) / kWord, word);
    }
  });
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
  float quantile;
  int threads;
};

template <class F>
void forward(const Call& c) {
  using Key = typename F::Key;
  const auto* x = static_cast<const Key*>(c.x);
  const auto* values = static_cast<const Key*>(c.values);
  auto* y = static_cast<Key*>(c.y);
  const int64_t span = Keys<F>::span(c.n);
  const int64_t block = std::clamp<int64_t>(kResident / std::max<int64_t>(span, 1), 1, kBlock);
#pragma omp parallel num_threads(c.threads)
  {
    alignas(64) Key buffer[kResident];
    Search<F> search[kBlock];
    Winners<F> winners[kBlock];
#pragma omp for schedule(static)
    for (int64_t first = 0; first < c.rows; first += block) {
      const int rows = int(std::min(block, c.rows - first));
      for (int r = 0; r < rows; ++r) search[r].keys = Keys<F>(x + (first + r) * c.x_stride, c.n, buffer + r * span);
      find(search, rows, c.n, c.k, c.ties, c.quantile, winners);
      for (int r = 0; r < rows; ++r) {
        const int64_t row = first + r;
        select(search[r].keys, winners[r], [&](int64_t w, uint32_t word) {
          const int64_t i = w * kWord, count = std::min(kWord, c.n - i);
          if (y) keep(y + row * c.n + i, values + row * c.values_stride + i, word, count);
          if (c.bits) c.bits[row * words_of(c.n) + w] = int32_t(word);
          if (c.mask) spread(c.mask + row * c.n + i, word, count);
        });
      }
    }
  }
}

template <class Bits>
void backward(const void* grad, int64_t grad_stride, const int32_t* bits, void* dx, int64_t rows, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const Bits* in = static_cast<const Bits*>(grad) + r * grad_stride;
    Bits* out = static_cast<Bits*>(dx) + r * n;
    for (int64_t i = 0; i < n; i += kWord)
      keep(out + i, in + i, uint32_t(bits[r * words_of(n) + i / kWord]), std::min(kWord, n - i));
  }
}

}  // namespace

void kwta_fwd(int dtype, const void* x, int64_t x_stride, const void* values, int64_t values_stride, void* y, int32_t* bits,
              uint8_t* mask, int64_t rows, int64_t n, int64_t k, int ties, float quantile, int threads) {
  const Call call{x,    x_stride, values ? values : x, values ? values_stride : x_stride, y, bits, mask, rows, n, k,
                  Ties(ties), quantile, threads};
  with_format(dtype, [&](auto format) { forward<decltype(format)>(call); });
}

void kwta_bwd(int element_size, const void* grad, int64_t grad_stride, const int32_t* bits, void* dx, int64_t rows, int64_t n,
              int threads) {
  switch (element_size) {
    case 2: return backward<uint16_t>(grad, grad_stride, bits, dx, rows, n, threads);
    case 4: return backward<uint32_t>(grad, grad_stride, bits, dx, rows, n, threads);
    case 8: return backward<uint64_t>(grad, grad_stride, bits, dx, rows, n, threads);
  }
}

}  // namespace MOE_ISA
}  // namespace moe
