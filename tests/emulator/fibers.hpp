// Switching between the stacks of a block's threads, all of which run on one thread of the CPU.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulated {

constexpr std::size_t kStackBytes = 256 << 10, kGuardBytes = 64 << 10;

// Stacks for `count` fibers, one after another, each above a guard that may not be touched; pages count once they are used.
inline char* allocate_stacks(int count) {
  void* all = mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  for (int i = 0; i < count; ++i) mprotect(static_cast<char*>(all) + i * kStackBytes, kGuardBytes, PROT_NONE);
  return static_cast<char*>(all);
}
inline void free_stacks(char* stacks, int count) {
  if (stacks != nullptr) munmap(stacks, count * kStackBytes);
}

#if defined(__x86_64__)

struct Fiber {
  void* stack_pointer;
};

// swapcontext makes a system call each time; this takes nanoseconds.
extern "C" __attribute__((visibility("hidden"))) void emulated_switch_stack(void** from, void* to);
asm(R"(
.text
.hidden emulated_switch_stack
.globl emulated_switch_stack
.type emulated_switch_stack, @function
emulated_switch_stack:
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
.size emulated_switch_stack, . - emulated_switch_stack
)");

// The next switch to `fiber` calls `entry`, which must never return.
inline void prepare(Fiber& fiber, char* stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + kStackBytes);
  *--top = nullptr;  // no caller
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
}
inline void switch_fiber(Fiber& from, Fiber& to) { emulated_switch_stack(&from.stack_pointer, to.stack_pointer); }

#else

struct Fiber {
  ucontext_t context;
};

inline void prepare(Fiber& fiber, char* stack, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack + kGuardBytes;
  fiber.context.uc_stack.ss_size = kStackBytes - kGuardBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}
inline void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

#endif

}  // namespace emulated
