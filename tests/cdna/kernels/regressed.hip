// What the resource gate must find: registers that do not fit, an access that the compiler cannot place, a wait for everything inside a ring.
#include "device.hpp"

// 100 values a lane in 64 registers: the others go to scratch memory.
extern "C" __attribute__((global, amdgpu_flat_work_group_size(256, 256), amdgpu_num_vgpr(32))) void spilled(const float* x, float* y) {
  float values[100];
  for (int32_t i = 0; i < 100; i++) values[i] = x[i * 256 + thread_idx()];
  asm volatile("" ::: "memory");
  for (int32_t i = 0; i < 100; i++) y[i * 256 + thread_idx()] = values[99 - i];
}

// Global memory or LDS, as the data says.
KERNEL(64) flat(uint32_t* x, uint32_t which) {
  static __attribute__((shared)) uint32_t shared[64];
  uint32_t* target = x[0] == which ? x : (uint32_t*)shared;
  *(volatile uint32_t*)(target + thread_idx()) = which;
}

// An agent release and acquire where none is designed.
KERNEL(64) fenced(uint32_t* x) { __hip_atomic_fetch_add(x, 1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT); }
