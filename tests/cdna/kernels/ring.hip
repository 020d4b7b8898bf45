// A ring of LDS slots that LDS-DMA fills ahead: every wave copies its part of a chunk, waits by vmcnt, and adds up what all waves copied.
#include "device.hpp"

// What a lane copies at a time: gfx942 has no copies of 16 bytes.
#if defined(__gfx950__)
typedef __attribute__((ext_vector_type(4))) uint32_t Part;
#define READ_PART "ds_read_b128 %0, %1\n\ts_waitcnt lgkmcnt(0)"
#else
typedef uint32_t Part;
#define READ_PART "ds_read_b32 %0, %1\n\ts_waitcnt lgkmcnt(0)"
#endif
constexpr int32_t kSlots = 4, kAhead = 3, kThreads = 256;

enum Fault { kNone, kOneTooMany, kNoBarrier };

template <Fault kFault>
DEVICE void ring(const char* chunks, Part* out, int32_t count) {
  static __attribute__((shared, aligned(16))) char slots[kSlots][kThreads * sizeof(Part)];
  const int32_t t = thread_idx();
  const auto copy = [&](int32_t chunk) {
    char* slot = slots[chunk % kSlots] + t / 64 * 64 * sizeof(Part);
    __builtin_amdgcn_global_load_lds((GLOBAL void*)(chunks + (chunk * kThreads + t) * sizeof(Part)), (SHARED void*)slot, sizeof(Part), 0, 0);
  };
  for (int32_t i = 0; i < kAhead; i++) copy(i);
  Part sum = 0;
  for (int32_t i = 0; i < count; i++) {
    wait_vmcnt<kFault == kOneTooMany ? kAhead : kAhead - 1>();
    if (kFault != kNoBarrier) __builtin_amdgcn_s_barrier();
    copy(i + kAhead);  // into the slot that was read last: everyone is past it, by the barrier
    // The neighbour of another wave. In assembly: behind a load from LDS clang waits for every copy.
    const uint32_t from = (uint32_t)(uintptr_t)(SHARED char*)slots[i % kSlots] + (t ^ 64) * sizeof(Part);
    Part value;
    asm volatile(READ_PART : "=v"(value) : "v"(from) : "memory");
    sum += value;
  }
  out[t] = sum;
}
KERNEL(256) ring_right(const char* chunks, Part* out, int32_t count) { ring<kNone>(chunks, out, count); }
KERNEL(256) ring_one_too_many(const char* chunks, Part* out, int32_t count) { ring<kOneTooMany>(chunks, out, count); }
KERNEL(256) ring_no_barrier(const char* chunks, Part* out, int32_t count) { ring<kNoBarrier>(chunks, out, count); }
