// Routing plans on the CPU (definitions: python_ref/plan.py).
//
// make_plan_fwd finds the position of each request (a token's choice of an expert) among the requests to the same
// expert. Tokens in visiting order are split into chunks. A first pass counts the requests of each chunk to every
// expert (separately for each choice, if all first choices come before all second ones). A scan over the counts turns
// each into the first row of the counted requests, and a second pass assigns the rows.

#include "ops.h"

#include <algorithm>
#include <limits>

#include "moe/cpu/formats.h"
#include "moe/cpu/indices.h"
#include "moe/cpu/simd.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int64_t kColumns = 16;  // plan_expert_choice: experts at a time
constexpr int64_t kVisitBlock = 256;  // tokens in a block of Requests::walk with by_choice
constexpr int64_t kPrefetchRows = 16;  // prefetch distance in rows
constexpr int64_t kTile = 1024;   // plan_expert_choice: tokens at a time

// The arrays of a RoutingPlan (moe_kernels/plan.py).
struct Plan {
  int32_t *expert_offsets, *row_token, *row_choice, *slot_row, *requested, *kept, *dropped;
};

// The most rows of each expert.
struct Room {
  int64_t capacity;
  const int32_t* limit;  // (E), or nullptr: the capacity alone

  int64_t of(int64_t e) const { return limit ? std::clamp<int64_t>(limit[e], 0, capacity) : capacity; }
};

struct Requests {
  const void* experts;       // (T, K)
  const int64_t* visit;      // (T) tokens in visiting order, or nullptr: 0, 1, ...
  int64_t tokens, k, num_experts;
  bool by_choice;            // all first choices before all second ones
  int32_t* counts;           // (chunks, K if by_choice else 1, E)
  int64_t chunks;

  int64_t segments() const { return by_choice ? k : 1; }
  int32_t* count(int64_t chunk, int64_t segment) const { return counts + (chunk * segments() + segment) * num_experts; }

  // Calls each(token, choice, request, expert) for every choice of a chunk's tokens; request = token * K + choice. With
  // by_choice each choice has its own counts, so only the order of tokens within a choice matters.
  template <class Index, class Each>
  void walk(int64_t chunk, Each each) const {
    const auto* expert = static_cast<const Index*>(experts);
    const auto visit_request = [&](int64_t p, int64_t choice) {
      const int64_t token = visit ? visit[p] : p, request = token * k + choice;
      each(token, choice, request, int64_t(expert[request]));
    };
    const int64_t first = chunk * tokens / chunks, end = (chunk + 1) * tokens / chunks;
    if (!by_choice) {
      for (int64_t p = first; p < end; ++p)
        for (int64_t choice = 0; choice < k; ++choice) visit_request(p, choice);
      return;
    }
    for (int64_t start = first; start < end; start += kVisitBlock)
      for (int64_t choice = 0; choice < k; ++choice)
        for (int64_t p = start; p < std::min(start + kVisitBlock, end); ++p) visit_request(p, choice);
  }
};

void write_offsets(const Plan& plan, int64_t num_experts, const Room& room, int64_t rows) {
  int64_t row = 0, requested = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    plan.kept[e] = int32_t(std::min<int64_t>(plan.requested[e], room.of(e)));
    plan.expert_offsets[e] = int32_t(row);
    row += plan.kept[e], requested += plan.requested[e];
  }
  plan.expert_offsets[num_experts] = int32_t(row);
  *plan.dropped = int32_t(requested - row);
  std::fill(plan.row_token + row, plan.row_token + rows, -1);
  std::fill(plan.row_choice + row, plan.row_choice + rows, -1);
}

template <class Index>
void rank(const Requests& r, const Plan& plan, const Room& room, int64_t rows, int threads) {
  int32_t *__restrict slot_row = plan.slot_row, *__restrict row_token = plan.row_token;
  int32_t* __restrict row_choice = plan.row_choice;
  const int64_t num_experts = r.num_experts, step = r.by_choice ? num_experts : 0;
  // First pass: slot_row numbers the requests to an expert from 0 in each chunk, with by_choice in each of its choices.
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t chunk = 0; chunk < r.chunks; ++chunk) {
    int32_t* count = r.count(chunk, 0);
    std::fill(count, count + r.segments() * num_experts, 0);
    r.walk<Index>(chunk, [=](int64_t, int64_t choice, int64_t request, int64_t expert) {
      if (uint64_t(expert) < uint64_t(num_experts)) slot_row[request] = count[choice * step + expert]++;
    });
  }
  // Each count becomes the number of requests to the expert in earlier chunks; with by_choice, in earlier choices of
  // all chunks and in the same choice of earlier chunks. `before`, the running sum, ends as plan.requested.
  int32_t* before = plan.requested;
  std::fill(before, before + num_experts, 0);
  const auto each_count = [&](auto change) {
    for (int64_t segment = 0; segment < r.segments(); ++segment)
      for (int64_t chunk = 0; chunk < r.chunks; ++chunk) {
        int32_t* count = r.count(chunk, segment);
#pragma omp simd
        for (int64_t e = 0; e < num_experts; ++e) change(count[e], e);
      }
  };
  each_count([&](int32_t& count, int64_t e) {
    const int32_t here = count;
    count = before[e];
    before[e] += here;
  });
  write_offsets(plan, num_experts, room, rows);
  // Each count becomes the first row for the requests that it counted.
  each_count([&](int32_t& count, int64_t e) { count += plan.expert_offsets[e]; });
  const int32_t* end = plan.expert_offsets + 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t chunk = 0; chunk < r.chunks; ++chunk) {
    const int32_t* first = r.count(chunk, 0);
    r.walk<Index>(chunk, [=](int64_t token, int64_t choice, int64_t request, int64_t expert) {
      const bool valid = uint64_t(expert) < uint64_t(num_experts);
      const int32_t row = valid ? first[choice * step + expert] + slot_row[request] : -1;
      const bool keep = valid && row < end[expert];  // the expert has room for this request
      slot_row[request] = keep ? row : -1;
      if (keep) {
        __builtin_prefetch(row_token + row + kPrefetchRows, 1);
        __builtin_prefetch(row_choice + row + kPrefetchRows, 1);
        row_token[row] = int32_t(token);
        row_choice[row] = int32_t(choice);
      }
    });
  }
}

// The `capacity` highest of n keys (all of them if n <= capacity): the keys greater than `above`, and the first `ties`
// of the keys equal to `above`. Cutoff::of takes keys padded to a multiple of kMaskBits with the lowest Key.
template <class F>
struct Cutoff {
  typename F::Key above;
  int64_t ties;

  static Cutoff of(const typename F::Key* key, int64_t n, int64_t capacity) {
    using Key = typename F::Key;
    // In the loop, more than `capacity` keys are greater than low, and at most `capacity` are greater than high.
    Key low = std::numeric_limits<Key>::min(), high = F::inf + 1;
    if (n <= capacity) return {low, 0};
    int64_t at_high = 0;
    while (at_high < capacity && int64_t(high) - 1 > int64_t(low)) {
      const Key middle = Key(low + (uint64_t(high) - uint64_t(low)) / 2);
      const int64_t count = count_greater(key, mask_words(n) * kMaskBits, middle);
      if (count > capacity) {
        low = middle;
      } else {
        high = middle;
        at_high = count;
      }
    }
    return {high, capacity - at_high};
  }
};

// Assigns tokens to experts [first, last). keys: scratch, (kColumns, tokens rounded up to a multiple of kMaskBits).
template <class F>
void choose_tokens(const typename F::Key* scores, int64_t stride, int64_t first, int64_t last, const Plan& plan,
                   int64_t tokens, int64_t num_experts, typename F::Key* keys) {
  using Key = typename F::Key;
  const int64_t padded = mask_words(tokens) * kMaskBits, columns = last - first;
  for (int64_t start = 0; start < padded; start += kMaskBits)
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t t = start; t < start + kMaskBits; ++t)
        keys[c * padded + t] = t < tokens ? key_of<F>(scores[t * stride + first + c]) : std::numeric_limits<Key>::min();

  Cutoff<F> cutoff[kColumns];
  int32_t row[kColumns];
  for (int64_t c = 0; c < columns; ++c) {
    cutoff[c] = Cutoff<F>::of(keys + c * padded, tokens, plan.kept[first + c]);
    row[c] = plan.expert_offsets[first + c];
  }
  for (int64_t start = 0; start < tokens; start += kTile) {
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t t = start; t < std::min(start + kTile, tokens); ++t) {
        const Key key = keys[c * padded + t];
        const bool tied = key == cutoff[c].above && cutoff[c].ties > 0, chosen = key > cutoff[c].above || tied;
        cutoff[c].ties -= tied;
        plan.slot_row[t * num_experts + first + c] = chosen ? row[c] : -1;
        if (chosen) {
          plan.row_token[row[c]] = int32_t(t);
          plan.row_choice[row[c]++] = int32_t(first + c);
        }
      }
    }
  }
}

// plan_priority by deferred acceptance: a token goes to its best expert that has room or holds a worse token; the token
// that a full expert gives up is placed again. Tokens and experts rank a pair by the same score, so only one assignment
// is stable, whatever the order of the tokens. The definition finds it by visiting pairs in descending order of score.
template <class F>
class Matching {
 public:
  using Key = typename F::Key;
  struct Held {
    Key key;
    int32_t token;
    // a < b if a ranks higher, so that the worst token is on top of a heap.
    bool operator<(const Held& other) const { return key > other.key || (key == other.key && token < other.token); }
  };

  Matching(const Key* scores, int64_t stride, int64_t num_experts, const Room& room, char* scratch)
      : scores_(scores), stride_(stride), num_experts_(num_experts), room_(room) {
    worst_ = reinterpret_cast<Held*>(scratch);
    held_ = worst_ + num_experts;
    for (int64_t e = 0; e < num_experts; ++e)
      worst_[e] = {room.of(e) ? std::numeric_limits<Key>::min() : std::numeric_limits<Key>::max(), -1};
  }

  int64_t first_choice(int64_t token) const {
    return best(token, [](Key, int64_t) { return true; });
  }

  void place(int64_t token, int32_t* assigned, int32_t* kept) {
    while (token >= 0) {
      const int64_t expert = best(token, [&](Key key, int64_t e) {
        return key > worst_[e].key || (key == worst_[e].key && token < worst_[e].token);
      });
      assigned[token] = int32_t(expert);
      if (expert < 0) return;
      Held* held = held_ + expert * room_.capacity;
      const int64_t most = room_.of(expert);
      int32_t& count = kept[expert];
      const Held arrival{key_of<F>(scores_[token * stride_ + expert]), int32_t(token)};
      token = -1;
      if (count == most) {
        std::pop_heap(held, held + count);
        token = held[--count].token;
      }
      held[count++] = arrival;
      std::push_heap(held, held + count);
      if (count == most) worst_[expert] = held[0];
    }
  }

 private:
  // Of the experts for which accepts(key, expert) holds, the one with the highest score; of equal scores the lowest
  // expert; -1 if it holds for none.
  template <class Accepts>
  int64_t best(int64_t token, Accepts accepts) const {
    const Key* score = scores_ + token * stride_;
    Key highest = std::numeric_limits<Key>::min();
#pragma omp simd reduction(max : highest)
    for (int64_t e = 0; e < num_experts_; ++e) {
      const Key key = key_of<F>(score[e]);
      highest = std::max(highest, accepts(key, e) ? key : std::numeric_limits<Key>::min());
    }
    for (int64_t e = 0; e < num_experts_; ++e) {
      const Key key = key_of<F>(score[e]);
      if (key == highest && accepts(key, e)) return e;
    }
    return -1;
  }

  const Key* scores_;  // (T, E)
  int64_t stride_, num_experts_;
  Room room_;
  Held* worst_;  // (E): worst token of a full expert; the lowest Key if it has room, the highest if it never has
  Held* held_;   // (E, capacity): heaps with the worst token on top
};

}  // namespace

// Returns 1 and writes nothing if an id is neither an expert nor -1, else 0.
int make_plan_fwd(int index_size, const void* experts, const int64_t* visit, const int32_t* limit, int32_t* counts,
                  int64_t chunks, int32_t* expert_offsets, int32_t* row_token, int32_t* row_choice, int32_t* slot_row,
                  int32_t* requested, int32_t* kept, int32_t* dropped, int64_t tokens, int64_t k, int64_t num_experts,
                  int64_t capacity, int64_t rows, int by_choice, int threads) {
  const bool known = index_size == 8 ? within(static_cast<const int64_t*>(experts), tokens * k, num_experts)
                                     : within(static_cast<const int32_t*>(experts), tokens * k, num_experts);
  if (!known) return 1;
  const Plan plan{expert_offsets, row_token, row_choice, slot_row, requested, kept, dropped};
  const Requests requests{experts, visit, tokens, k, num_experts, by_choice != 0, counts, chunks};
  (index_size == 8 ? rank<int64_t> : rank<int32_t>)(requests, plan, Room{capacity, limit}, rows, threads);
  return 0;
}

void plan_expert_choice_fwd(int dtype, const void* scores, int64_t stride, void* keys, int32_t* expert_offsets,
                            int32_t* row_token, int32_t* row_choice, int32_t* slot_row, int32_t* requested,
                            int32_t* kept, int32_t* dropped, int64_t tokens, int64_t num_experts, int64_t capacity,
                            const int32_t* limit, int64_t rows, int threads) {
  const Plan plan{expert_offsets, row_token, row_choice, slot_row, requested, kept, dropped};
  const Room room{std::min(capacity, tokens), limit};
  for (int64_t e = 0; e < num_experts; ++e) requested[e] = int32_t(room.of(e));
  write_offsets(plan, num_experts, room, rows);
  with_format(dtype, [&](auto format) {
    using F = decltype(format);
    using Key = typename F::Key;
    const int64_t scratch = mask_words(tokens) * kMaskBits * kColumns;  // keys of a thread
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t worker = 0; worker < threads; ++worker)
      for (int64_t first = worker * kColumns; first < num_experts; first += threads * kColumns)
        choose_tokens<F>(static_cast<const Key*>(scores), stride, first, std::min(first + kColumns, num_experts), plan,
                         tokens, num_experts, static_cast<Key*>(keys) + worker * scratch);
  });
}

void plan_priority_fwd(int dtype, const void* scores, int64_t stride, void* scratch, int32_t* experts,
                       int32_t* requested, int32_t* kept, int64_t tokens, int64_t num_experts, int64_t capacity,
                       const int32_t* limit, int) {
  std::fill(requested, requested + num_experts, 0);
  std::fill(kept, kept + num_experts, 0);
  with_format(dtype, [&](auto format) {
    using F = decltype(format);
    using Key = typename F::Key;
    Matching<F> matching(static_cast<const Key*>(scores), stride, num_experts, Room{capacity, limit},
                         static_cast<char*>(scratch));
    for (int64_t token = 0; token < tokens; ++token) {
      ++requested[matching.first_choice(token)];
      matching.place(token, experts, kept);
    }
  });
}

}  // namespace MOE_ISA
}  // namespace moe
