// Runs the threads of a kernel as fibers, with rendezvous and shared memory. This file is compiled without sanitizers,
// but tells the address sanitizer of every switch to another stack.
#include "simt.h"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <vector>

extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom_old, size_t* size_old);
void simt_switch_stack(void** from, void* to);
}

// Pushes the general registers that a callee must preserve, saves the stack pointer in *from, and continues on the
// stack `to`.
asm(R"(
.text
.type simt_switch_stack, @function
simt_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch_stack, .-simt_switch_stack
)");

namespace simt {
namespace {

constexpr int kWarp = 32;
constexpr size_t kSharedLimit = 227 * 1024, kAlignment = 128;
constexpr size_t kStackBytes = 128 * 1024, kGuard = 4096;  // of a fiber

struct Fiber {
  void* pointer = nullptr;
  const void* stack = nullptr;
  size_t bytes = 0;
  void* fake_stack = nullptr;
};

enum class State { ready, waiting, done };

struct Thread {
  Fiber fiber;
  State state;
  uint3 index;
};

struct Meeting {
  uint32_t arrived = 0;
  Operation apply;
  void* lanes[kWarp];
};

const std::function<void()>* kernel;
std::vector<Thread> threads;     // as many as in the largest block so far
int count, unfinished, current;  // threads of the block: all, those that have not ended, index of the running one
Fiber host;                      // the program's own stack
int arrived, votes, result;      // of the block's barrier
std::vector<std::array<Meeting, kWarp>> meetings;  // by warp, then by the lowest lane that takes part
std::map<const void*, std::unique_ptr<void, void (*)(void*)>> shared;
size_t dynamic_bytes;

void switch_fiber(Fiber& from, Fiber& to, bool last) {
  __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack, to.stack, to.bytes);
  simt_switch_stack(&from.pointer, to.pointer);
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
}

// Switches to the next ready thread. Returns when another thread switches back.
void yield() {
  Thread& self = threads[current];
  int next = (current + 1) % count;
  while (threads[next].state != State::ready && next != current) next = (next + 1) % count;
  if (threads[next].state != State::ready) fail("not all threads reach the same rendezvous");
  current = next;
  threadIdx = threads[next].index;
  switch_fiber(self.fiber, threads[next].fiber, self.state == State::done);
}

void run_thread() {
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (!host.stack) host.stack = bottom, host.bytes = bytes;  // the first switch to a fiber comes from the host's stack
  (*kernel)();
  threads[current].state = State::done;
  if (--unfinished) yield();
  switch_fiber(threads[current].fiber, host, true);
  __builtin_trap();
}

Fiber make_fiber() {
  void* const memory = mmap(nullptr, kStackBytes + kGuard, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, kGuard, PROT_NONE);
  return {nullptr, static_cast<char*>(memory) + kGuard, kStackBytes, nullptr};
}

// Prepares a fiber to start run_thread. The fiber's stack gets, from the top: a zero as run_thread's return address,
// which also aligns the stack as a call does; the address of run_thread, to which simt_switch_stack returns; and zeros
// for the six registers that simt_switch_stack pops.
void restart(Fiber& fiber) {
  void** top = reinterpret_cast<void**>(static_cast<char*>(const_cast<void*>(fiber.stack)) + kStackBytes) - 1;
  *top = nullptr;
  *--top = reinterpret_cast<void*>(run_thread);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  fiber.pointer = top;
  fiber.fake_stack = nullptr;
}

void run_block() {
  for (int i = 0; i < count; i++) {
    restart(threads[i].fiber);
    threads[i].state = State::ready;
  }
  unfinished = count, current = 0, threadIdx = threads[0].index;
  switch_fiber(host, threads[0].fiber, false);
  shared.clear();
}

}  // namespace

void fail(const char* message) {
  std::fprintf(stderr, "%s, thread (%u, %u, %u) of block (%u, %u, %u)\n", message, threadIdx.x, threadIdx.y,
               threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
  std::fflush(stderr);
  _exit(1);
}

size_t shared_memory_limit() { return kSharedLimit; }
int current_lane() { return current % kWarp; }

int barrier(bool vote) {
  votes += vote;
  if (++arrived == count) {
    result = votes, arrived = votes = 0;
    for (int i = 0; i < count; i++) threads[i].state = State::ready;
  } else {
    threads[current].state = State::waiting;
    yield();
  }
  return result;
}

void meet(uint32_t mask, void* operand, Operation apply, const void* context) {
  if (!(mask >> current_lane() & 1)) fail("a lane executes a collective and is not in its mask");
  Meeting& meeting = meetings[current / kWarp][__builtin_ctz(mask)];
  if (meeting.arrived && meeting.apply != apply)
    fail("lanes of a warp execute two different collectives at a rendezvous");
  meeting.apply = apply;
  meeting.lanes[current_lane()] = operand;
  meeting.arrived |= 1u << current_lane();
  if (meeting.arrived != mask) {
    threads[current].state = State::waiting;
    yield();
    return;
  }
  meeting.arrived = 0;
  apply(context, meeting.lanes, mask);
  for (int i = 0; i < kWarp; i++) {
    if (mask >> i & 1) threads[current / kWarp * kWarp + i].state = State::ready;
  }
}

// Each variable is a heap block of its own, so that the sanitizer finds overruns. It is filled with 0xFF bytes.
void* shared_variable(const void* key, size_t bytes) {
  const auto found = shared.find(key);
  if (found != shared.end()) return found->second.get();
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignment, std::max<size_t>(bytes, 1)) != 0) throw std::bad_alloc();
  std::memset(memory, 0xff, bytes);
  shared.emplace(key, std::unique_ptr<void, void (*)(void*)>(memory, std::free));
  return memory;
}

void* dynamic_shared() { return shared_variable(&dynamic_bytes, dynamic_bytes); }

void launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body) {
  kernel = &body, gridDim = grid, blockDim = block, dynamic_bytes = shared_bytes;
  count = static_cast<int>(block.x * block.y * block.z);
  while (threads.size() < size_t(count)) threads.push_back({make_fiber(), State::done, {}});
  meetings.resize((threads.size() + kWarp - 1) / kWarp);
  for (unsigned i = 0; i < unsigned(count); i++) {
    threads[i].index = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
  }
  for (unsigned z = 0; z < grid.z; z++) {
    for (unsigned y = 0; y < grid.y; y++) {
      for (unsigned x = 0; x < grid.x; x++) {
        blockIdx = {x, y, z};
        run_block();
      }
    }
  }
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
