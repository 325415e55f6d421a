// A fiber: a stack, and a switch to it that the sanitizers are told about.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if !defined(__x86_64__) || defined(SIMT_UCONTEXT)
#define SIMT_USE_UCONTEXT
#include <ucontext.h>
#endif

extern "C" {
#ifdef SIMT_ASAN
void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom_old, size_t* size_old);
void __asan_unpoison_memory_region(void const volatile* address, size_t size);
#endif
}

namespace simt {

#ifndef SIMT_USE_UCONTEXT
// Saves what a callee must preserve on the old stack, its pointer in *from, and takes up the new stack.
extern "C" void simt_switch_stack(void** from, void* to);
asm(R"(
.text
.globl simt_switch_stack
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
#endif

class Fiber {
 public:
  static constexpr size_t kStackBytes = 128 * 1024;  // address space: only touched pages cost memory

  Fiber() = default;
  Fiber(Fiber&& other) noexcept { *this = static_cast<Fiber&&>(other); }
  Fiber& operator=(Fiber&& other) noexcept {
    stack_ = other.stack_;
    other.stack_ = nullptr;
    return *this;
  }
  ~Fiber() { release(); }

  // Prepares the fiber to run `entry`, which never returns, at the first switch to it.
  void start(void (*entry)()) {
    if (!stack_) allocate();
    entry_ = entry;
    fake_stack_ = nullptr;
#ifdef SIMT_USE_UCONTEXT
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = kStackBytes;
    makecontext(&context_, begin, 0);
#else
    // Six zero registers, the entry as return address, and a zero where a caller's return address would be: the
    // entry then finds the stack aligned as after a call.
    void** top = reinterpret_cast<void**>(stack_ + kStackBytes) - 1;
    *top = nullptr;
    *--top = reinterpret_cast<void*>(begin);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    pointer_ = top;
#endif
  }

  // After the fiber's last switch. One that was left in the middle (after an error) has frames still poisoned.
  void stop(bool finished) {
#ifdef SIMT_ASAN
    if (!finished) __asan_unpoison_memory_region(stack_, kStackBytes);
#endif
    (void)finished;
  }

  void switch_to(Fiber& next) { transfer(next, false); }

  [[noreturn]] void exit_to(Fiber& next) {
    transfer(next, true);
    __builtin_unreachable();
  }

  // Makes this object represent the stack of the program itself.
  void adopt_current() {
    adopted_ = true;
#ifdef SIMT_ASAN
    pthread_attr_t attributes;
    void* bottom;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &bottom, &adopted_bytes_);
    pthread_attr_destroy(&attributes);
    adopted_stack_ = static_cast<char*>(bottom);
#endif
  }

 private:
  static size_t guard() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

  void allocate() {
    void* memory = mmap(nullptr, kStackBytes + guard(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, guard(), PROT_NONE);
    stack_ = static_cast<char*>(memory) + guard();
  }

  void release() {
    if (stack_) munmap(stack_ - guard(), kStackBytes + guard());
    stack_ = nullptr;
  }

  static Fiber*& entering() {
    static Fiber* fiber;
    return fiber;
  }

  static void begin() {
    arrived(nullptr);
    entering()->entry_();
    __builtin_trap();
  }

  static void arrived(void* fake_stack) {
#ifdef SIMT_ASAN
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
    (void)fake_stack;
  }

  void transfer(Fiber& next, bool last) {
    entering() = &next;
#ifdef SIMT_ASAN
    __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack_, next.adopted_ ? next.adopted_stack_ : next.stack_,
                                   next.adopted_ ? next.adopted_bytes_ : kStackBytes);
#endif
    (void)last;
#ifdef SIMT_USE_UCONTEXT
    swapcontext(&context_, &next.context_);
#else
    simt_switch_stack(&pointer_, next.pointer_);
#endif
    arrived(fake_stack_);
  }

  char* stack_ = nullptr;
  void (*entry_)() = nullptr;
  void* fake_stack_ = nullptr;
  bool adopted_ = false;
  char* adopted_stack_ = nullptr;
  size_t adopted_bytes_ = 0;
#ifdef SIMT_USE_UCONTEXT
  ucontext_t context_{};
#else
  void* pointer_ = nullptr;
#endif
};

}  // namespace simt
