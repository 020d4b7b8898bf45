// The context switch of each platform, and the pool of stacks.
#include "fiber.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

#if !SGL_EMULATION_UCONTEXT
// Saves what the ABI lets a callee change, swaps stacks, restores, returns on the other stack. Floating-point control
// words are not switched: no kernel changes them.
#if defined(__x86_64__)
asm(R"(
  .text
  .p2align 4
  .globl sgl_lowlatency_switch_stack
  .hidden sgl_lowlatency_switch_stack
  .type sgl_lowlatency_switch_stack, @function
sgl_lowlatency_switch_stack:
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
  .size sgl_lowlatency_switch_stack, .-sgl_lowlatency_switch_stack
)");
#else
asm(R"(
  .text
  .p2align 4
  .globl sgl_lowlatency_switch_stack
  .hidden sgl_lowlatency_switch_stack
  .type sgl_lowlatency_switch_stack, %function
sgl_lowlatency_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size sgl_lowlatency_switch_stack, .-sgl_lowlatency_switch_stack
)");
#endif
#endif

namespace sgl_lowlatency::emulation {

void prepare_fiber(Fiber& fiber, char* stack, size_t stack_bytes, void (*entry)()) {
#if SGL_EMULATION_UCONTEXT
  if (getcontext(&fiber.context) != 0) throw std::system_error(errno, std::generic_category(), "getcontext");
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = stack_bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
#else
  const uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + stack_bytes) & ~uintptr_t{15};
#if defined(__x86_64__)
  // From below: six saved registers, the address `ret` takes, and the zero return address of entry. Stack alignment at
  // entry is what a call instruction would have left: 8 modulo 16.
  uint64_t* const frame = reinterpret_cast<uint64_t*>(top - 64);
  for (int i = 0; i < 8; ++i) frame[i] = 0;
  frame[6] = reinterpret_cast<uint64_t>(entry);
#else
  uint64_t* const frame = reinterpret_cast<uint64_t*>(top - 160);
  for (int i = 0; i < 20; ++i) frame[i] = 0;
  frame[11] = reinterpret_cast<uint64_t>(entry);  // x30
#endif
  fiber.stack_pointer = frame;
#endif
}

StackPool::~StackPool() {
  for (size_t i = 0; i < num_slabs_; ++i) munmap(slabs_[i], kStacksPerSlab * (kStackBytes + page_bytes_));
}

void StackPool::reserve(size_t count) {
  if (page_bytes_ == 0) page_bytes_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t stride = kStackBytes + page_bytes_;
  const size_t num_slabs = (count + kStacksPerSlab - 1) / kStacksPerSlab;
  if (num_slabs > kMaxSlabs) throw std::invalid_argument("emulation: more threads than the stack pool can hold");
  while (num_slabs_ < num_slabs) {
    void* const slab =
        mmap(nullptr, kStacksPerSlab * stride, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (slab == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "emulation: fiber stacks");
    slabs_[num_slabs_] = static_cast<char*>(slab);
    if ((num_slabs_ + 1) * kStacksPerSlab <= kMaxGuardedStacks) {
      for (size_t i = 0; i < kStacksPerSlab; ++i) {
        if (mprotect(slabs_[num_slabs_] + i * stride, page_bytes_, PROT_NONE) != 0) {
          const int error = errno;
          munmap(slab, kStacksPerSlab * stride);
          throw std::system_error(error, std::generic_category(), "emulation: stack guard page");
        }
      }
    }
    ++num_slabs_;
  }
}

char* StackPool::stack(size_t idx) const {
  const size_t stride = kStackBytes + page_bytes_;  // not a power of two: tops of stacks spread over the cache sets
  return slabs_[idx / kStacksPerSlab] + (idx % kStacksPerSlab) * stride + page_bytes_;
}

}  // namespace sgl_lowlatency::emulation
