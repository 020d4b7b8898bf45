// The few words of HIP that the test kernels use, for clang without ROCm.
#pragma once
#include <cstdint>

#define KERNEL(threads) extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads))) void
#define DEVICE inline __attribute__((device, always_inline))
#define GLOBAL __attribute__((address_space(1)))
#define SHARED __attribute__((address_space(3)))

DEVICE uint32_t thread_idx() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE uint32_t block_idx() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE uint32_t lane_idx() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)); }
DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
template <int kLeft>
DEVICE void wait_vmcnt() {
  asm volatile("s_waitcnt vmcnt(%0)" ::"n"(kLeft) : "memory");
}
DEVICE uint64_t clock() { return __builtin_amdgcn_s_memrealtime(); }
