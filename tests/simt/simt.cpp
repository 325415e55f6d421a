// The executor: fibers, rendezvous, shared memory, asynchronous copies. Compiled without sanitizer flags, with
// SIMT_ASAN where its kernels have them, so that it can tell the sanitizers about its fibers.
#include "simt.h"

#include <array>
#include <cstdlib>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "simt_state.h"

namespace simt {
namespace {

constexpr int64_t kStepLimit = 20'000'000;  // rendezvous and atomics of one block: seconds, where kernels take ms
constexpr size_t kSharedLimit = 227 * 1024;
constexpr size_t kMaxStaticBytes = 48 * 1024;
constexpr size_t kDynamicAlignment = 128;

class Executor {
 public:
  int seed = 0;

  void launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel);
  void block_barrier(int id, int expected, bool vote, Where where, const char* what);
  int votes(int id) const { return barriers_[id].last_votes; }
  void meet(const char* name, uint32_t mask, void* brought, Operation apply, const void* context, Where where);
  void step(Where where);
  void* static_shared(const void* key, size_t bytes, size_t alignment);
  void* dynamic_shared();
  bool is_shared(const void* pointer, size_t bytes) const;
  [[noreturn]] void fail(const std::string& message, Where where);

  bool running() const { return current_ >= 0; }
  int threads() const { return threads_count_; }
  int lane() const { return current_ % kWarp; }
  Thread& thread() { return threads_[current_]; }
  bool coin() { return random_() & 1; }

 private:
  void run_block(uint3 index);
  void arrive(Barrier& barrier, int id, int expected, bool vote, Where where, const char* what);
  void* shared(const void* key, size_t bytes, size_t alignment);
  void choose_order();
  void set_ready(int thread);
  int next_ready();
  void yield();
  void resume(int thread);
  [[noreturn]] void run_thread();
  [[noreturn]] void deadlock();

  const std::function<void()>* kernel_ = nullptr;
  std::vector<Thread> threads_;
  int threads_count_ = 0, unfinished_ = 0, current_ = -1;
  Fiber scheduler_;
  std::array<Barrier, kBarriers> barriers_;
  std::vector<std::array<Meeting, kWarp>> meetings_;  // by warp, then by the lowest lane of the mask
  std::vector<SharedVariable> shared_;
  size_t dynamic_bytes_ = 0;
  int64_t steps_ = 0;
  std::mt19937 random_;
  // Ready threads as bits at their places in the order, and the order itself both ways.
  std::vector<uint64_t> ready_;
  std::vector<int> place_of_, thread_at_;
  std::string error_;
};

Executor executor;

void Executor::fail(const std::string& message, Where where) {
  std::string text = message;
  if (where.file) text += " at " + place(where);
  if (running()) text += ", thread " + triple(thread().index) + " of block " + triple(blockIdx);
  throw Error(text);
}

void Executor::set_ready(int thread) {
  threads_[thread].state = State::ready;
  const int at = place_of_[thread];
  ready_[at / 64] |= uint64_t(1) << at % 64;
}

int Executor::next_ready() {
  const int words = static_cast<int>(ready_.size());
  const bool any_order = seed > 0 && seed % 2 == 0;
  const int start = any_order ? static_cast<int>(random_() % threads_count_) : 0;
  for (int i = 0; i <= words; i++) {
    const int w = (start / 64 + i) % words;
    uint64_t word = ready_[w];
    if (i == 0) word &= ~uint64_t(0) << start % 64;
    if (!word) continue;
    const int at = w * 64 + __builtin_ctzll(word);
    ready_[w] &= ~(uint64_t(1) << at % 64);
    return thread_at_[at];
  }
  return -1;
}

void Executor::choose_order() {
  const int n = threads_count_;
  thread_at_.resize(n);
  std::iota(thread_at_.begin(), thread_at_.end(), 0);
  if (seed == 1) std::reverse(thread_at_.begin(), thread_at_.end());
  if (seed > 1 && seed % 2) {
    std::vector<uint32_t> priority((n + kWarp - 1) / kWarp);
    for (uint32_t& each : priority) each = random_();
    std::stable_sort(thread_at_.begin(), thread_at_.end(),
                     [&](int a, int b) { return priority[a / kWarp] < priority[b / kWarp]; });
  }
  place_of_.resize(n);
  for (int at = 0; at < n; at++) place_of_[thread_at_[at]] = at;
  ready_.assign((n + 63) / 64, 0);
}

// Leaves the current thread in whatever state it was put and runs another; returns when it is chosen again.
void Executor::yield() {
  const int self = current_, next = next_ready();
  if (next < 0) deadlock();
  if (next == self) return;
  current_ = next;
  threadIdx = threads_[next].index;
  threads_[self].fiber.switch_to(threads_[next].fiber);
}

void Executor::deadlock() {
  std::string text = "not all threads reach the same rendezvous:";
  int finished = 0;
  std::vector<std::pair<std::string, int>> groups;
  std::vector<uint3> example;
  for (const Thread& each : threads_) {
    if (each.state == State::done) {
      finished++;
    } else {
      const std::string name = std::string(each.what) + " at " + place(each.where);
      size_t i = 0;
      while (i < groups.size() && groups[i].first != name) i++;
      if (i == groups.size()) {
        groups.emplace_back(name, 0);
        example.push_back(each.index);
      }
      groups[i].second++;
    }
  }
  for (size_t i = 0; i < groups.size(); i++) {
    text += " " + std::to_string(groups[i].second) + " of " + std::to_string(threads_count_) + " threads wait in " +
            groups[i].first + " (thread " + triple(example[i]) + ");";
  }
  text += " " + std::to_string(finished) + " have returned; block " + triple(blockIdx);
  throw Error(text);
}

// A fiber's life. An error leaves all others where they stand.
void Executor::run_thread() {
  try {
    (*kernel_)();
    Thread& self = thread();
    const size_t pending = self.copies.size();
    if (pending) fail("thread returns with " + std::to_string(pending) + " cp.async pending", {});
  } catch (const Error& error) {
    error_ = error.what();
  }
  Thread& self = thread();
  self.state = State::done;
  unfinished_--;
  if (error_.empty() && unfinished_ > 0) {
    try {
      const int warp = current_ / kWarp;
      for (Meeting& each : meetings_[warp]) {
        if (each.arrived && (each.mask >> lane() & 1)) {
          fail(std::string(each.name) + " at " + place(each.where) + " names lane " + std::to_string(lane()) +
               ", which returned", {});
        }
      }
      const int next = next_ready();
      if (next < 0) deadlock();
      current_ = next;
      threadIdx = threads_[next].index;
      self.fiber.exit_to(threads_[next].fiber);
    } catch (const Error& error) {
      error_ = error.what();
    }
  }
  self.fiber.exit_to(scheduler_);
}

void Executor::block_barrier(int id, int expected, bool vote, Where where, const char* what) {
  if (!running()) fail(std::string(what) + " outside a kernel", where);
  step(where);
  Barrier& barrier = barriers_[id];
  arrive(barrier, id, expected, vote, where, what);
  yield();
}

void Executor::arrive(Barrier& barrier, int id, int expected, bool vote, Where where, const char* what) {
  if (barrier.arrived == 0) {
    barrier.expected = expected;
    barrier.where = where;
    barrier.votes = 0;
  } else if (barrier.expected != expected) {
    fail("barrier " + std::to_string(id) + " is for " + std::to_string(expected) + " threads here and for " +
         std::to_string(barrier.expected) + " at " + place(barrier.where), where);
  } else if (barrier.where.line != where.line || std::strcmp(barrier.where.file, where.file) != 0) {
    fail("threads of one block meet at two different barriers, " + place(barrier.where) + " and here", where);
  }
  barrier.votes += vote;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    barrier.last_votes = barrier.votes;
    for (int waiting : barrier.waiting) set_ready(waiting);
    barrier.waiting.clear();
    set_ready(current_);
  } else {
    barrier.waiting.push_back(current_);
    Thread& self = thread();
    self.state = State::at_barrier;
    self.where = where;
    self.what = what;
  }
}

void Executor::meet(const char* name, uint32_t mask, void* brought, Operation apply, const void* context, Where where) {
  if (!running()) fail(std::string(name) + " outside a kernel", where);
  step(where);
  const int warp = current_ / kWarp, me = lane();
  if (!(mask >> me & 1)) {
    fail(std::string(name) + " by lane " + std::to_string(me) + ", which its mask leaves out", where);
  }
  for (int i = 0; i < kWarp; i++) {
    const int other = warp * kWarp + i;
    if ((mask >> i & 1) && (other >= threads_count_ || threads_[other].state == State::done)) {
      fail(std::string(name) + " names lane " + std::to_string(i) + ", which " +
           (other >= threads_count_ ? "does not exist" : "returned"), where);
    }
  }
  Meeting& meeting = meetings_[warp][__builtin_ctz(mask)];
  if (!meeting.arrived) {
    meeting.mask = mask;
    meeting.name = name;
    meeting.where = where;
  } else if (meeting.mask != mask || std::strcmp(meeting.name, name) != 0) {
    fail("lanes of one warp meet in two different collectives, " + std::string(meeting.name) + " at " +
         place(meeting.where) + " and " + name, where);
  }
  meeting.lanes[me] = brought;
  meeting.arrived |= 1u << me;
  if (meeting.arrived == mask) {
    meeting.arrived = 0;
    apply(context, meeting.lanes, mask);
    for (int i = 0; i < kWarp; i++) {
      if (mask >> i & 1) set_ready(warp * kWarp + i);
    }
  } else {
    Thread& self = thread();
    self.state = State::at_meeting;
    self.where = where;
    self.what = name;
  }
  yield();
}

void Executor::step(Where where) {
  if (!running()) return;
  if (++steps_ > kStepLimit) fail("no end after " + std::to_string(kStepLimit) + " steps", where);
}

void* Executor::shared(const void* key, size_t bytes, size_t alignment) {
  for (const SharedVariable& each : shared_) {
    if (each.key == key) return each.memory.get();
  }
  void* memory = nullptr;
  alignment = std::max(alignment, sizeof(void*));
  if (posix_memalign(&memory, alignment, std::max<size_t>(bytes, 1)) != 0) throw std::bad_alloc();
  std::memset(memory, 0xff, bytes);
  shared_.push_back({key, {memory, std::free}, bytes});
  return memory;
}

void* Executor::static_shared(const void* key, size_t bytes, size_t alignment) {
  void* const memory = shared(key, bytes, alignment);
  size_t total = 0;
  for (const SharedVariable& each : shared_) total += each.key == this ? 0 : each.bytes;
  if (total > kMaxStaticBytes) fail(std::to_string(total) + " bytes of static shared memory, 48 KiB are allowed", {});
  return memory;
}

// The block's dynamic shared memory goes by the executor's own address.
void* Executor::dynamic_shared() { return shared(this, dynamic_bytes_, kDynamicAlignment); }

bool Executor::is_shared(const void* pointer, size_t bytes) const {
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  for (const SharedVariable& each : shared_) {
    const auto start = reinterpret_cast<uintptr_t>(each.memory.get());
    if (at >= start && at + bytes <= start + each.bytes) return true;
  }
  return false;
}

void Executor::run_block(uint3 index) {
  blockIdx = index;
  choose_order();
  for (Barrier& each : barriers_) {
    each.arrived = 0;
    each.waiting.clear();
  }
  for (auto& warp : meetings_) {
    for (Meeting& each : warp) each.arrived = 0;
  }
  unfinished_ = threads_count_;
  for (int i = 0; i < threads_count_; i++) {
    Thread& thread = threads_[i];
    thread.copies.clear();
    thread.groups = 0;
    thread.fiber.start([] { executor.run_thread(); });
    set_ready(i);
  }
  steps_ = 0;
  current_ = next_ready();
  threadIdx = threads_[current_].index;
  scheduler_.adopt_current();
  scheduler_.switch_to(threads_[current_].fiber);
  current_ = -1;
  for (Thread& each : threads_) each.fiber.stop(each.state == State::done);
  shared_.clear();
}

void Executor::launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel) {
  const auto shape = [](dim3 d) { return triple({d.x, d.y, d.z}); };
  if (running()) fail("launch from inside a kernel", {});
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.z > 64) fail("block of " + shape(block) + " threads", {});
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    fail("grid of " + shape(grid) + " blocks", {});
  }
  if (shared_bytes > kSharedLimit) fail(std::to_string(shared_bytes) + " bytes of dynamic shared memory", {});

  kernel_ = &kernel;
  gridDim = grid;
  blockDim = block;
  dynamic_bytes_ = shared_bytes;
  error_.clear();
  random_.seed(static_cast<uint32_t>(seed));
  threads_count_ = static_cast<int>(threads);
  threads_.resize(threads);
  meetings_.resize((threads + kWarp - 1) / kWarp);
  for (unsigned i = 0; i < threads; i++) {
    threads_[i].index = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
  }
  std::vector<uint3> blocks;
  blocks.reserve(uint64_t(grid.x) * grid.y * grid.z);
  for (unsigned z = 0; z < grid.z; z++) {
    for (unsigned y = 0; y < grid.y; y++) {
      for (unsigned x = 0; x < grid.x; x++) blocks.push_back({x, y, z});
    }
  }
  if (seed == 1) std::reverse(blocks.begin(), blocks.end());
  if (seed > 1) std::shuffle(blocks.begin(), blocks.end(), random_);

  for (uint3 each : blocks) {
    run_block(each);
    if (!error_.empty()) break;
  }
  if (!error_.empty()) throw Error(error_);
}

}  // namespace

void set_seed(int seed) { executor.seed = seed; }
size_t shared_memory_limit() { return kSharedLimit; }

void launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel) {
  executor.launch(grid, block, shared_bytes, kernel);
}

void fail(const std::string& message, Where where) { executor.fail(message, where); }
void step(Where where) { executor.step(where); }
int current_lane() { return executor.lane(); }

void block_barrier(Where where) { executor.block_barrier(0, executor.threads(), false, where, "__syncthreads"); }

int block_barrier_count(bool predicate, Where where) {
  executor.block_barrier(0, executor.threads(), predicate, where, "__syncthreads_count");
  return executor.votes(0);
}

void named_barrier(int barrier, int threads, Where where) {
  if (barrier < 0 || barrier >= kBarriers) fail("barrier " + std::to_string(barrier) + " of sixteen", where);
  if (threads <= 0 || threads % kWarp) fail("barrier for " + std::to_string(threads) + " threads", where);
  executor.block_barrier(barrier, threads, false, where, "bar.sync");
}

void meet(const char* name, uint32_t mask, void* brought, Operation apply, const void* context, Where where) {
  executor.meet(name, mask, brought, apply, context, where);
}

void* shared_variable(const void* key, size_t bytes, size_t alignment) {
  return executor.static_shared(key, bytes, alignment);
}

void* dynamic_shared() { return executor.dynamic_shared(); }
bool is_shared(const void* pointer, size_t bytes) { return executor.is_shared(pointer, bytes); }

bool async_coin() { return executor.coin(); }

void async_push(const AsyncCopy& copy) {
  Thread& self = executor.thread();
  self.copies.push_back({copy, self.groups});
}

void async_commit(Where where) {
  executor.step(where);
  executor.thread().groups++;
}

bool async_next(int pending, AsyncCopy& copy) {
  Thread& self = executor.thread();
  if (self.copies.empty() || self.copies.front().group >= self.groups - pending) return false;
  copy = self.copies.front().copy;
  self.copies.pop_front();
  return true;
}

float float_of_half(uint16_t bits) {
  static const std::vector<float> table = [] {
    std::vector<float> values(1 << 16);
    for (uint32_t i = 0; i < values.size(); i++) values[i] = __half2float(__ushort_as_half(static_cast<uint16_t>(i)));
    return values;
  }();
  return table[bits];
}

}  // namespace simt
