// Fibers: stackful coroutines switched by hand. No scheduling here.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#define SGL_EMULATION_UCONTEXT 0
#else
#define SGL_EMULATION_UCONTEXT 1
#include <ucontext.h>
#endif

namespace sgl_lowlatency::emulation {

// A suspended point of execution. Objects on an abandoned stack are not destroyed.
struct Fiber {
#if SGL_EMULATION_UCONTEXT
  ucontext_t context;
#else
  void* stack_pointer = nullptr;
#endif
};

// Prepares `fiber` to call entry() on the given stack at the first switch to it. entry never returns.
void prepare_fiber(Fiber& fiber, char* stack, size_t stack_bytes, void (*entry)());

// Suspends the running code in `from` and continues `to`.
#if SGL_EMULATION_UCONTEXT
inline void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
inline void prefetch_fiber(const Fiber&) {}
#else
extern "C" void sgl_lowlatency_switch_stack(void** from, void* to);
inline void switch_fiber(Fiber& from, Fiber& to) { sgl_lowlatency_switch_stack(&from.stack_pointer, to.stack_pointer); }
// Brings what the fiber will touch first into the cache. A launch's live stacks are larger than the cache.
inline void prefetch_fiber(const Fiber& fiber) {
  for (int line = 0; line < 8; ++line) __builtin_prefetch(static_cast<const char*>(fiber.stack_pointer) + line * 64, 1);
}
#endif

// Stacks, kept from one launch to the next. Each has an inaccessible page below it while the pool holds at most
// kMaxGuardedStacks, so that an overflow faults instead of corrupting a neighbour.
constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kMaxGuardedStacks = 16 * 1024;  // every guard page costs the kernel a mapping

class StackPool {
 public:
  ~StackPool();
  // Makes stack(0) .. stack(count - 1) valid. Throws std::system_error when memory is refused.
  void reserve(size_t count);
  char* stack(size_t idx) const;

 private:
  static constexpr size_t kStacksPerSlab = 1024;
  static constexpr size_t kMaxSlabs = 1024;
  char* slabs_[kMaxSlabs] = {};
  size_t num_slabs_ = 0;
  size_t page_bytes_ = 0;
};

}  // namespace sgl_lowlatency::emulation
