// The HIP dialect (gfx950, gfx942), for clang with no ROCm and for hipcc. The contract of every function is the table in README.md beside this
// file. A warp is a wave of 64. Pointers to global memory are generic in the stages and cast here: a generic access would also count as one
// of shared memory.
#pragma once
#include <cstdint>

#include "sgl_lowlatency/abi/decode_step.hpp"
#include "sgl_lowlatency/abi/monokernel.hpp"
#include "sgl_lowlatency/dialect/planted.hpp"

#define SGL_DEVICE inline __attribute__((device, always_inline))
// Inlined all the same: a call would need a stack, and with it scratch memory.
#define SGL_DEVICE_COLD inline __attribute__((device, always_inline))
// Nothing: a branch that does not come back would have its lanes' mask kept in scalar registers to the end of the kernel.
#define SGL_NORETURN
#define SGL_UNROLL _Pragma("unroll")
#define SGL_NO_UNROLL _Pragma("unroll 1")
#define SGL_GLOBAL __attribute__((address_space(1)))
#define SGL_SHARED __attribute__((address_space(3)))

#ifndef SGL_LOWLATENCY_PLANTED
#define SGL_LOWLATENCY_PLANTED 0
#endif

namespace sgl_lowlatency::dialect {

using abi::bf16;

struct alignas(16) Vec16 {
  uint32_t w[4];
};

constexpr __attribute__((device)) bool planted(Planted which) { return static_cast<int>(which) == SGL_LOWLATENCY_PLANTED; }
constexpr bool kHasGroups = false;  // FaultRecord::group: k1 and k2 have none, other ranks find out by their deadline

// gfx950 is what is compiled for, or gfx942.
#if defined(__gfx950__)
constexpr abi::Isa kIsa = abi::kGfx950;
#else
constexpr abi::Isa kIsa = abi::kGfx942;
#endif

// --- indices -----------------------------------------------------------------------------------------------------------
SGL_DEVICE int32_t thread_idx() { return static_cast<int32_t>(__builtin_amdgcn_workitem_id_x()); }
// The same value in all lanes of a wave, told to the compiler.
SGL_DEVICE int32_t uniform(int32_t value) { return __builtin_amdgcn_readfirstlane(value); }
// The opposite: what is computed from it goes to vector registers, of which there are more.
SGL_DEVICE int32_t varying(int32_t value) {
  asm volatile("" : "+v"(value));
  return value;
}
SGL_DEVICE int32_t block_idx() { return static_cast<int32_t>(__builtin_amdgcn_workgroup_id_x()); }
// XCD times 256 + shader engine, array and CU of the XCD, as the hardware numbers them.
SGL_DEVICE int32_t sm_idx() {
  uint32_t xcc, where;
  asm volatile("s_getreg_b32 %0, hwreg(HW_REG_XCC_ID)" : "=s"(xcc));
  asm volatile("s_getreg_b32 %0, hwreg(HW_REG_HW_ID)" : "=s"(where));
  return static_cast<int32_t>((xcc & 15u) << 8 | (where >> 8 & 255u));
}

// --- shared memory and barriers ------------------------------------------------------------------------------------------
// All that a CU has: a workgroup has its CU for itself.
SGL_DEVICE char* shared_base() {
  static __attribute__((shared, aligned(1024))) char shared[abi::lds_bytes(kIsa)];
  return shared;
}
// Not a call of the dialect: the operand of the instructions below.
SGL_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>((SGL_SHARED const char*)(static_cast<const char*>(p))));
}
// Only shared memory: global accesses and copies stay in flight across it.
SGL_DEVICE void sync_shared() {
  asm volatile("s_waitcnt lgkmcnt(0)" ::: "memory");
  __builtin_amdgcn_s_barrier();
  asm volatile("" ::: "memory");
}
// Every wave waits for its own global accesses first: s_barrier does not, and clang puts no wait in front of it. A release behind it
// covers them all.
SGL_DEVICE void sync_publish() {
  if (!planted(Planted::kMissingStoreWait)) asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
  sync_shared();
}
// A wave's accesses of shared memory are carried out in order: only the compiler has to keep it.
SGL_DEVICE void sync_warp() {
  __builtin_amdgcn_wave_barrier();
  asm volatile("" ::: "memory");
}
SGL_DEVICE uint32_t shuffle(uint32_t value, int32_t src_lane) {
  return static_cast<uint32_t>(__builtin_amdgcn_ds_bpermute(src_lane * 4, static_cast<int32_t>(value)));
}
SGL_DEVICE float shuffle(float value, int32_t src_lane) { return __builtin_bit_cast(float, shuffle(__builtin_bit_cast(uint32_t, value), src_lane)); }
SGL_DEVICE float shuffle_xor(float value, int32_t lane_mask) { return shuffle(value, (thread_idx() % 64) ^ lane_mask); }
SGL_DEVICE uint64_t ballot(bool vote) { return __builtin_amdgcn_ballot_w64(vote); }

// --- global memory ---------------------------------------------------------------------------------------------------------
template <class T>
SGL_DEVICE T load_plain(const T* p) { return *(SGL_GLOBAL const T*)p; }
template <class T>
SGL_DEVICE void store_plain(T* p, T value) { *(SGL_GLOBAL T*)p = value; }
SGL_DEVICE bf16 load_plain(const bf16* p) { return {*(SGL_GLOBAL const uint16_t*)p}; }
SGL_DEVICE void store_plain(bf16* p, bf16 value) { *(SGL_GLOBAL uint16_t*)p = value.bits; }
typedef uint32_t Words4 __attribute__((ext_vector_type(4)));
SGL_DEVICE Vec16 load_plain(const Vec16* p) { return __builtin_bit_cast(Vec16, *(SGL_GLOBAL const Words4*)p); }
SGL_DEVICE void store_plain(Vec16* p, Vec16 v) { *(SGL_GLOBAL Words4*)p = __builtin_bit_cast(Words4, v); }
template <class T>
SGL_DEVICE T load_constant(const T* p) { return load_plain(p); }

// Words: relaxed atomics, so that the compiler neither merges nor keeps them. Agent scope is sc1, system scope sc0 sc1; both go past the L2 of
// the workgroup's XCD, which other XCDs do not see.
template <int32_t kScope>
SGL_DEVICE void load_words_of(uint32_t (&w)[1], const uint32_t* p) {
  w[0] = __hip_atomic_load((SGL_GLOBAL const uint32_t*)p, __ATOMIC_RELAXED, kScope);
}
template <int32_t kScope>
SGL_DEVICE void load_words_of(uint32_t (&w)[2], const uint32_t* p) {
  const uint64_t both = __hip_atomic_load((SGL_GLOBAL const uint64_t*)p, __ATOMIC_RELAXED, kScope);
  w[0] = static_cast<uint32_t>(both);
  w[1] = static_cast<uint32_t>(both >> 32);
}
template <int32_t kScope>
SGL_DEVICE void load_words_of(uint32_t (&w)[4], const uint32_t* p) {
  uint32_t low[2], high[2];
  load_words_of<kScope>(low, p);
  load_words_of<kScope>(high, p + 2);
  w[0] = low[0];
  w[1] = low[1];
  w[2] = high[0];
  w[3] = high[1];
}
template <int32_t kScope>
SGL_DEVICE void store_words_of(uint32_t* p, const uint32_t (&w)[1]) { __hip_atomic_store((SGL_GLOBAL uint32_t*)p, w[0], __ATOMIC_RELAXED, kScope); }
template <int32_t kScope>
SGL_DEVICE void store_words_of(uint32_t* p, const uint32_t (&w)[2]) {
  __hip_atomic_store((SGL_GLOBAL uint64_t*)p, w[0] | static_cast<uint64_t>(w[1]) << 32, __ATOMIC_RELAXED, kScope);
}
template <int32_t kScope>
SGL_DEVICE void store_words_of(uint32_t* p, const uint32_t (&w)[4]) {
  store_words_of<kScope>(p, {w[0], w[1]});
  store_words_of<kScope>(p + 2, {w[2], w[3]});
}
template <int N>
SGL_DEVICE void load_words(uint32_t (&w)[N], const uint32_t* p) { load_words_of<__HIP_MEMORY_SCOPE_AGENT>(w, p); }
template <int N>
SGL_DEVICE void store_words(uint32_t* p, const uint32_t (&w)[N]) { store_words_of<__HIP_MEMORY_SCOPE_AGENT>(p, w); }
template <int N>
SGL_DEVICE void load_words_system(uint32_t (&w)[N], const uint32_t* p) { load_words_of<__HIP_MEMORY_SCOPE_SYSTEM>(w, p); }
template <int N>
SGL_DEVICE void store_words_system(uint32_t* p, const uint32_t (&w)[N]) { store_words_of<__HIP_MEMORY_SCOPE_SYSTEM>(p, w); }
// AMD has no multicast addresses: nobody can have one.
template <int N>
SGL_DEVICE void store_words_multicast(uint32_t*, const uint32_t (&)[N]) {}
SGL_DEVICE void clear_words(uint32_t* p) {
  const uint32_t clear[4] = {abi::kUnwritten, abi::kUnwritten, abi::kUnwritten, abi::kUnwritten};
  store_words(p, clear);
}
SGL_DEVICE void fence_acq_rel_gpu() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "agent"); }
SGL_DEVICE void fence_acq_rel_system() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, ""); }
SGL_DEVICE uint32_t fetch_add_acq_rel_gpu(uint32_t* p, uint32_t value) {
  return __hip_atomic_fetch_add((SGL_GLOBAL uint32_t*)p, value, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T>
SGL_DEVICE T load_relaxed_system(const T* p) { return __hip_atomic_load((SGL_GLOBAL const T*)p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
template <class T>
SGL_DEVICE void store_relaxed_system(T* p, T v) { __hip_atomic_store((SGL_GLOBAL T*)p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
SGL_DEVICE void store_release_system(uint32_t* p, uint32_t v) {
  __hip_atomic_store((SGL_GLOBAL uint32_t*)p, v, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
SGL_DEVICE uint32_t cas_relaxed_system(uint32_t* p, uint32_t expected, uint32_t desired) {
  __hip_atomic_compare_exchange_strong((SGL_GLOBAL uint32_t*)p, &expected, desired, __ATOMIC_RELAXED, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  return expected;
}

// The kernel's parameters, where they are passed, and the same again behind this point: what the compiler keeps of them across phases would be
// more than there are scalar registers.
template <class Params>
SGL_DEVICE const Params& kernel_params() {
  return *(const Params*)(__attribute__((address_space(4))) const Params*)__builtin_amdgcn_kernarg_segment_ptr();
}
template <class Params>
SGL_DEVICE const Params& read_again(const Params& params) {
  auto at = (__attribute__((address_space(4))) const Params*)&params;
  asm volatile("" : "+s"(at));
  return *(const Params*)at;
}

// --- copies to shared memory ---------------------------------------------------------------------------------------------
// What a lane copies of a tile: 16 bytes of a row on gfx950; on gfx942, which copies 4 bytes a lane, 4 bytes of each 16 of a row.
constexpr int32_t kInstructionsOfCopy = kIsa == abi::kGfx950 ? 1 : 4;
SGL_DEVICE int32_t copied_row() { return kIsa == abi::kGfx950 ? thread_idx() % 16 : thread_idx() % 64 / 4; }
SGL_DEVICE int32_t copied_column() { return kIsa == abi::kGfx950 ? thread_idx() % 64 / 16 * 8 : thread_idx() % 4 * 2; }
SGL_DEVICE void copy_tile(char* slot, const bf16* own) {
#if defined(__gfx950__)
  __builtin_amdgcn_global_load_lds((SGL_GLOBAL void*)own, (SGL_SHARED void*)slot, 16, 0, 0);
#else
SGL_UNROLL
  for (int32_t i = 0; i < 4; ++i) __builtin_amdgcn_global_load_lds((SGL_GLOBAL void*)(own + i * 8), (SGL_SHARED void*)(slot + i * 256), 4, 0, 0);
#endif
}
// vmcnt counts in order: whatever else is in flight makes the wait longer, never shorter.
template <int32_t kYounger>
SGL_DEVICE void await_copies() {
  static_assert(kYounger * kInstructionsOfCopy < 64, "vmcnt has six bits");
  if (!planted(Planted::kRingNoWait)) asm volatile("s_waitcnt vmcnt(%0)" ::"n"(kYounger * kInstructionsOfCopy) : "memory");
}
// Written down, for the compiler would wait for every copy in front of it.
SGL_DEVICE Vec16 load_copied(const void* slot) {
  Words4 v;
  asm volatile("ds_read_b128 %0, %1\n\ts_waitcnt lgkmcnt(0)" : "=v"(v) : "v"(shared_address(slot) + thread_idx() % 64 * 16) : "memory");
  return __builtin_bit_cast(Vec16, v);
}

// --- the matrix unit -------------------------------------------------------------------------------------------------------
SGL_DEVICE void mfma_16x16x32(float (&c)[4], const Vec16& a, const Vec16& b) {
  typedef float Floats4 __attribute__((ext_vector_type(4)));
  Floats4 sum = {c[0], c[1], c[2], c[3]};
#if defined(__gfx950__)
  typedef __bf16 Halves8 __attribute__((ext_vector_type(8)));
  sum = __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(Halves8, a), __builtin_bit_cast(Halves8, b), sum, 0, 0, 0);
#elif defined(__AMDGCN__)
  typedef short Halves4 __attribute__((ext_vector_type(4)));  // columns 8 g .. 8 g + 3 of every group g, then the rest: the same of both operands
  struct Pair {
    Halves4 low, high;
  };
  const Pair x = __builtin_bit_cast(Pair, a), y = __builtin_bit_cast(Pair, b);
  sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x.low, y.low, sum, 0, 0, 0);
  sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x.high, y.high, sum, 0, 0, 0);
#endif
SGL_UNROLL
  for (int32_t i = 0; i < 4; ++i) c[i] = sum[i];
}

// --- numbers, time, the end ----------------------------------------------------------------------------------------------
SGL_DEVICE float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
SGL_DEVICE uint32_t float_to_bits(float value) { return __builtin_bit_cast(uint32_t, value); }
SGL_DEVICE float to_float(bf16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }
SGL_DEVICE bf16 to_bf16(float x) {
  uint32_t bits = float_to_bits(x);
  bits = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fff0000u : bits + (0x7fffu + (bits >> 16 & 1u));
  return {static_cast<uint16_t>(bits >> 16)};
}
SGL_DEVICE int32_t popcount(uint32_t x) { return __builtin_popcount(x); }
SGL_DEVICE int32_t popcount(uint64_t x) { return __builtin_popcountll(x); }
SGL_DEVICE float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
SGL_DEVICE float rsqrt(float x) { return __builtin_amdgcn_rsqf(x); }
SGL_DEVICE float divide(float a, float b) { return a * __builtin_amdgcn_rcpf(b); }
SGL_DEVICE uint64_t timer_ns() { return __builtin_amdgcn_s_memrealtime() * 10; }  // a counter of 100 MHz
SGL_DEVICE void await_previous_launch() {}  // a stream's kernels do not overlap
SGL_DEVICE void backoff() { __builtin_amdgcn_s_sleep(1); }
SGL_DEVICE void pause_ns(uint32_t) { __builtin_amdgcn_s_sleep(32); }  // of 64 clocks each, about a microsecond
// What was stored in front of a trap is not waited for by the hardware. A wave whose trap nobody handles ends.
SGL_DEVICE void trap() { asm volatile("s_waitcnt vmcnt(0)\n\ts_trap 2\n\ts_endpgm" ::: "memory"); }

}  // namespace sgl_lowlatency::dialect
