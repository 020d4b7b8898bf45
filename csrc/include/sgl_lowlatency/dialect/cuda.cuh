// The CUDA dialect (sm_90a, sm_100a, sm_103a). The contract of every function is the table in README.md beside this file.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>

#include "sgl_lowlatency/abi/decode_step.hpp"
#include "sgl_lowlatency/abi/weight_map.hpp"
#include "sgl_lowlatency/dialect/planted.hpp"

#define SGL_DEVICE __device__ __forceinline__
// Internal linkage: nvcc leaves a host stub of a function that is not inlined, and the linker must not take it for the host
// dialect's function of the same name.
#define SGL_DEVICE_COLD static __device__ __noinline__
#define SGL_NORETURN [[noreturn]]
#define SGL_UNROLL _Pragma("unroll")
#define SGL_NO_UNROLL _Pragma("unroll 1")

#ifndef SGL_LOWLATENCY_PLANTED
#define SGL_LOWLATENCY_PLANTED 0
#endif

namespace sgl_lowlatency::dialect {

using abi::bf16;

struct alignas(16) Vec16 {
  uint32_t w[4];
};

constexpr __device__ bool planted(Planted which) { return static_cast<int>(which) == SGL_LOWLATENCY_PLANTED; }
constexpr bool kHasGroups = true;  // FaultRecord::group may be set

// --- indices -----------------------------------------------------------------------------------------------------------
// Volatile: what follows from it is computed where it is used, and not kept in registers over all phases of all layers.
SGL_DEVICE int32_t thread_idx() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return static_cast<int32_t>(thread);
}
SGL_DEVICE int32_t block_idx() { return static_cast<int32_t>(blockIdx.x); }
SGL_DEVICE int32_t grid_dim() { return static_cast<int32_t>(gridDim.x); }
SGL_DEVICE int32_t sm_idx() {
  uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return static_cast<int32_t>(sm);
}

// --- shared memory and barriers ------------------------------------------------------------------------------------------
SGL_DEVICE char* shared_base() {
  extern __shared__ __align__(1024) char sgl_lowlatency_shared[];
  return sgl_lowlatency_shared;
}
// Not a call of the dialect: the operand of the instructions below.
SGL_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
SGL_DEVICE void sync_block() { __syncthreads(); }
SGL_DEVICE void sync_named(int32_t id, int32_t num_threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory"); }
#ifndef SGL_WAVES  // a warp is one of the hardware's (else: cuda_waves.cuh)
SGL_DEVICE void sync_warp() { __syncwarp(); }
SGL_DEVICE float shuffle_xor(float value, int32_t lane_mask) { return __shfl_xor_sync(0xffffffffu, value, lane_mask); }
SGL_DEVICE float shuffle(float value, int32_t src_lane) { return __shfl_sync(0xffffffffu, value, src_lane); }
SGL_DEVICE uint32_t shuffle(uint32_t value, int32_t src_lane) { return __shfl_sync(0xffffffffu, value, src_lane); }
#endif
SGL_DEVICE uint32_t reduce_max(uint32_t value) { return __reduce_max_sync(0xffffffffu, value); }
SGL_DEVICE uint32_t reduce_min(uint32_t value) { return __reduce_min_sync(0xffffffffu, value); }
SGL_DEVICE uint32_t reduce_or(uint32_t value) { return __reduce_or_sync(0xffffffffu, value); }

// --- global memory ---------------------------------------------------------------------------------------------------------
template <class T>
SGL_DEVICE T load_plain(const T* p) { return *p; }
template <class T>
SGL_DEVICE void store_plain(T* p, T value) { *p = value; }
SGL_DEVICE Vec16 load_plain(const Vec16* p) {
  const uint4 v = *reinterpret_cast<const uint4*>(p);
  return {{v.x, v.y, v.z, v.w}};
}
SGL_DEVICE void store_plain(Vec16* p, Vec16 v) { *reinterpret_cast<uint4*>(p) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]); }

template <class T>
SGL_DEVICE T load_constant(const T* p) { return __ldg(p); }
SGL_DEVICE bf16 load_constant(const bf16* p) { return {__ldg(reinterpret_cast<const unsigned short*>(p))}; }
SGL_DEVICE int64_t load_constant(const int64_t* p) { return static_cast<int64_t>(__ldg(reinterpret_cast<const long long*>(p))); }
SGL_DEVICE Vec16 load_constant(const Vec16* p) {  // read once, keep L1 for the rest
  Vec16 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p));
  return v;
}
template <class T>
SGL_DEVICE T* load_constant_pointer(T* const* p) {
  return reinterpret_cast<T*>(__ldg(reinterpret_cast<const unsigned long long*>(p)));
}

SGL_DEVICE void load_words(uint32_t (&w)[1], const uint32_t* p) {
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(w[0]) : "l"(p) : "memory");
}
SGL_DEVICE void load_words(uint32_t (&w)[2], const uint32_t* p) {
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p) : "memory");
}
SGL_DEVICE void load_words(uint32_t (&w)[4], const uint32_t* p) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p) : "memory");
}
SGL_DEVICE void store_words(uint32_t* p, const uint32_t (&w)[1]) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(w[0]) : "memory"); }
SGL_DEVICE void store_words(uint32_t* p, const uint32_t (&w)[2]) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(w[0]), "r"(w[1]) : "memory");
}
SGL_DEVICE void store_words(uint32_t* p, const uint32_t (&w)[4]) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
SGL_DEVICE void clear_words(uint32_t* p) {
  const uint32_t clear[4] = {abi::kUnwritten, abi::kUnwritten, abi::kUnwritten, abi::kUnwritten};
  store_words(p, clear);
}
SGL_DEVICE void load_words_system(uint32_t (&w)[1], const uint32_t* p) {
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(w[0]) : "l"(p) : "memory");
}
SGL_DEVICE void load_words_system(uint32_t (&w)[2], const uint32_t* p) {
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p) : "memory");
}
SGL_DEVICE void load_words_system(uint32_t (&w)[4], const uint32_t* p) {
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p) : "memory");
}
SGL_DEVICE void store_words_system(uint32_t* p, const uint32_t (&w)[1]) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(w[0]) : "memory"); }
SGL_DEVICE void store_words_system(uint32_t* p, const uint32_t (&w)[2]) {
  asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(w[0]), "r"(w[1]) : "memory");
}
SGL_DEVICE void store_words_system(uint32_t* p, const uint32_t (&w)[4]) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
// Floats by name, words by content: the store moves bits.
SGL_DEVICE void store_words_multicast(uint32_t* p, const uint32_t (&w)[2]) {
  asm volatile("multimem.st.relaxed.sys.global.v2.f32 [%0], {%1,%2};" ::"l"(p), "f"(__uint_as_float(w[0])), "f"(__uint_as_float(w[1])) : "memory");
}
SGL_DEVICE void store_words_multicast(uint32_t* p, const uint32_t (&w)[4]) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p), "f"(__uint_as_float(w[0])), "f"(__uint_as_float(w[1])),
               "f"(__uint_as_float(w[2])), "f"(__uint_as_float(w[3])) : "memory");
}
SGL_DEVICE void fence_acq_rel_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
SGL_DEVICE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
SGL_DEVICE uint32_t load_acquire_gpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
SGL_DEVICE uint32_t load_relaxed_gpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
SGL_DEVICE void add_release_gpu(uint32_t* p, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
SGL_DEVICE void add_relaxed_gpu(uint32_t* p, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
SGL_DEVICE uint32_t fetch_add_acq_rel_gpu(uint32_t* p, uint32_t value) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(value) : "memory");
  return old;
}

SGL_DEVICE uint32_t load_relaxed_system(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
SGL_DEVICE uint64_t load_relaxed_system(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
SGL_DEVICE uint32_t load_acquire_system(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
SGL_DEVICE void store_relaxed_system(uint32_t* p, uint32_t v) { asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
SGL_DEVICE void store_relaxed_system(uint64_t* p, uint64_t v) { asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
SGL_DEVICE void store_release_system(uint32_t* p, uint32_t v) { asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
SGL_DEVICE uint32_t cas_relaxed_system(uint32_t* p, uint32_t expected, uint32_t desired) {
  uint32_t old;
  asm volatile("atom.relaxed.sys.cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "l"(p), "r"(expected), "r"(desired) : "memory");
  return old;
}

// --- mbarriers and the weight ring's copies ------------------------------------------------------------------------------
SGL_DEVICE void mbarrier_init(uint64_t* bar, int32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
// Pairs with the complete_tx of the block's bulk copies: they see the initialised barriers. sync_block covers the threads.
SGL_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
SGL_DEVICE void mbarrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
SGL_DEVICE void mbarrier_arrive_expect_bytes(uint64_t* bar, int32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
SGL_DEVICE bool mbarrier_test(uint64_t* bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
  return done != 0;
}
// L2 evict-first: a weight is read once a step, and the KV cache and activations want the L2.
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
SGL_DEVICE void load_stage(void* shared, const abi::WeightMap* map, int32_t row, int32_t part, int32_t chunk, uint64_t* bar) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(
                   shared_address(shared)), "l"(map), "r"(0), "r"(row), "r"(part), "r"(chunk), "r"(shared_address(bar)), "l"(kEvictFirst) : "memory");
}
// L2 evict-last: read again a few microseconds later.
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;
SGL_DEVICE void load_stage_again(void* shared, const abi::WeightMap* map, int32_t row, int32_t part, int32_t chunk, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::
          "r"(shared_address(shared)), "l"(map), "r"(0), "r"(row), "r"(part), "r"(chunk), "r"(shared_address(bar)), "l"(kEvictLast) : "memory");
}
SGL_DEVICE void prefetch_map(const abi::WeightMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
SGL_DEVICE void bulk_load(void* shared, const void* global, int32_t bytes, uint64_t* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                   shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(bar)), "l"(kEvictFirst) : "memory");
}

SGL_DEVICE void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }
SGL_DEVICE void copy_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
SGL_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int32_t kPending>
SGL_DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }

// --- the MMA tile ----------------------------------------------------------------------------------------------------------
SGL_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(shared_row)) : "memory");
}
SGL_DEVICE void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

SGL_DEVICE uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// --- numbers, time, the end ----------------------------------------------------------------------------------------------
SGL_DEVICE float to_float(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
SGL_DEVICE bf16 to_bf16(float x) { return {__bfloat16_as_ushort(__float2bfloat16_rn(x))}; }
SGL_DEVICE uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
SGL_DEVICE float bits_to_float(uint32_t x) { return __uint_as_float(x); }
SGL_DEVICE uint32_t float_to_bits(float x) { return __float_as_uint(x); }
SGL_DEVICE int32_t popcount(uint32_t x) { return __popc(x); }
SGL_DEVICE float exp2(float x) { return exp2f(x); }
SGL_DEVICE float rsqrt(float x) { return rsqrtf(x); }
SGL_DEVICE float divide(float a, float b) { return __fdividef(a, b); }
SGL_DEVICE float divide_full(float a, float b) {
  float y;
  asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
SGL_DEVICE float add_rounded(float a, float b) { return __fadd_rn(a, b); }
SGL_DEVICE float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }
SGL_DEVICE float log(float x) { return ::logf(x); }
SGL_DEVICE float log1p(float x) { return ::log1pf(x); }
SGL_DEVICE float exp(float x) { return ::expf(x); }
SGL_DEVICE float log2(float x) { return __log2f(x); }  // within 2^-22 between 0.5 and 2
SGL_DEVICE float square_root(float x) {  // within an ulp
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
SGL_DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
SGL_DEVICE uint64_t timer_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}
SGL_DEVICE void await_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
SGL_DEVICE void allow_next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
SGL_DEVICE void backoff() {}
SGL_DEVICE void pause_ns(uint32_t ns) { __nanosleep(ns); }
[[noreturn]] SGL_DEVICE void trap() {
  asm volatile("trap;");
  __builtin_unreachable();
}

}  // namespace sgl_lowlatency::dialect
