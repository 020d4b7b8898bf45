// Data that one workgroup hands to another, on one GPU and across two, right and with one thing left out; waits with a deadline.
#include "device.hpp"

enum Fault { kNone, kNoStoreWait, kNoRelease, kNoAcquire, kBareInvalidate, kFlagFirst };
constexpr uint32_t kThreads = 256;

template <int kScope, Fault kFault>
DEVICE void produce(uint32_t* data, uint32_t* flag) {
  const uint32_t t = thread_idx();
  data[t] = 3 * t + 1;
  if (kFault != kNoStoreWait) wait_vmcnt<0>();
  if (kFault == kFlagFirst) {
    data[kThreads + t] = 5 * t;  // behind the wait: the flag's store can overtake it
    if (t == 0) asm volatile("global_store_dword %0, %1, off sc1" ::"v"(flag), "v"(1) : "memory");
    return;
  }
  barrier();
  if (t == 0) __hip_atomic_store(flag, 1u, kFault == kNoRelease ? __ATOMIC_RELAXED : __ATOMIC_RELEASE, kScope);
}

template <int kScope, Fault kFault>
DEVICE void consume(const uint32_t* data, const uint32_t* flag, uint32_t* out) {
  const uint32_t t = thread_idx();
  const uint32_t* other = data + (kFault == kFlagFirst ? kThreads : 0) + (kThreads - 1 - t);
  out[kThreads + t] = __builtin_nontemporal_load(other);  // leaves old lines in every cache on the way
  wait_vmcnt<0>();
  if (t == 0) {
    while (__hip_atomic_load(flag, __ATOMIC_RELAXED, kScope) == 0) __builtin_amdgcn_s_sleep(1);
  }
  barrier();
  if (kFault == kBareInvalidate) {
    asm volatile("buffer_inv" ::: "memory");
  } else if (kFault != kNoAcquire) {
    if (kScope == __HIP_MEMORY_SCOPE_SYSTEM) {
      __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
    } else {
      __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    }
  }
  out[t] = *other;
}

#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define SYSTEM __HIP_MEMORY_SCOPE_SYSTEM
// Workgroup 0 produces where role is 0 or negative, others consume where it is not 0.
#define HANDOVER(name, scope, fault)                                                           \
  KERNEL(256) name(uint32_t* data, uint32_t* flag, uint32_t* out, int32_t role) {              \
    if (role == 0 || (role < 0 && block_idx() == 0)) {                                         \
      produce<scope, fault>(data, flag);                                                       \
    } else {                                                                                   \
      consume<scope, fault>(data, flag, out);                                                  \
    }                                                                                          \
  }
HANDOVER(agent, AGENT, kNone)
HANDOVER(agent_no_store_wait, AGENT, kNoStoreWait)
HANDOVER(agent_no_release, AGENT, kNoRelease)
HANDOVER(agent_no_acquire, AGENT, kNoAcquire)
HANDOVER(agent_bare_invalidate, AGENT, kBareInvalidate)
HANDOVER(agent_flag_first, AGENT, kFlagFirst)
HANDOVER(system, SYSTEM, kNone)
HANDOVER(system_no_store_wait, SYSTEM, kNoStoreWait)

// A wait that is never satisfied: a record for the host, then the end. kWaits: whether the record is out before the trap.
template <bool kWaits>
DEVICE void await(const uint32_t* flag, uint64_t ticks, uint32_t* record) {
  if (thread_idx() != 0) return;
  const uint64_t start = clock();
  while (__hip_atomic_load(flag, __ATOMIC_RELAXED, SYSTEM) == 0) {
    if (clock() - start <= ticks) continue;
    __hip_atomic_store(record, 0xFA17u, __ATOMIC_RELAXED, SYSTEM);
    if (kWaits) wait_vmcnt<0>();
    __builtin_trap();
  }
}
KERNEL(64) deadline(const uint32_t* flag, uint64_t ticks, uint32_t* record) { await<true>(flag, ticks, record); }
KERNEL(64) deadline_no_wait(const uint32_t* flag, uint64_t ticks, uint32_t* record) { await<false>(flag, ticks, record); }
