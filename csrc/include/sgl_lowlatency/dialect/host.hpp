// The dialect on the host: the calls of README.md, carried out by the emulated machine in csrc/emulation/.
// Valid only on a thread of a running emulation::launch. Wrong use ends the launch with a diagnosis, never a hang.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "sgl_lowlatency/abi/decode_step.hpp"
#include "sgl_lowlatency/abi/weight_map.hpp"
#include "sgl_lowlatency/dialect/planted.hpp"

#define SGL_DEVICE inline
#define SGL_DEVICE_COLD inline
#define SGL_NORETURN [[noreturn]]
#define SGL_UNROLL
#define SGL_NO_UNROLL

namespace sgl_lowlatency::emulation {

// What a thread of the launch knows about itself.
struct ThreadIdentity {
  int32_t thread_idx;
  int32_t block_idx;
  int32_t grid_dim;
  char* shared_base;
};

enum class Order : uint8_t { kRelaxed, kAcquire, kRelease, kAcquireRelease };
enum class Scope : uint8_t { kGpu, kSystem };  // of one rank, of all ranks

extern const ThreadIdentity* current_identity;  // of the running fiber
extern dialect::Planted current_planted;        // Options::planted of the running launch

void load_plain_bytes(void* value, const void* address, uint32_t bytes);
void load_constant_bytes(void* value, const void* address, uint32_t bytes);
void store_plain_bytes(void* address, const void* value, uint32_t bytes);
uint32_t atomic_load_u32(const uint32_t* address, Order order, Scope scope);
uint64_t atomic_load_u64(const uint64_t* address, Order order, Scope scope);
void atomic_store_u32(uint32_t* address, uint32_t value, Order order, Scope scope);
void atomic_store_u64(uint64_t* address, uint64_t value, Order order, Scope scope);
uint32_t atomic_add_u32(uint32_t* address, uint32_t value, Order order, Scope scope);
uint32_t atomic_cas_u32(uint32_t* address, uint32_t expected, uint32_t desired, Order order, Scope scope);
void load_word_vector(uint32_t* words, const uint32_t* address, uint32_t num_words, Scope scope);
void store_word_vector(uint32_t* address, const uint32_t* words, uint32_t num_words, Scope scope);
void store_word_vector_multicast(uint32_t* address, const uint32_t* words, uint32_t num_words);
void wait_for_copies(uint32_t max_pending);

}  // namespace sgl_lowlatency::emulation

namespace sgl_lowlatency::dialect {

constexpr bool kHasGroups = true;  // FaultRecord::group may be set

using abi::bf16;

struct alignas(16) Vec16 {
  uint32_t w[4];
};

SGL_DEVICE int32_t thread_idx() { return emulation::current_identity->thread_idx; }
SGL_DEVICE int32_t block_idx() { return emulation::current_identity->block_idx; }
SGL_DEVICE int32_t grid_dim() { return emulation::current_identity->grid_dim; }
SGL_DEVICE int32_t sm_idx() { return emulation::current_identity->block_idx; }
SGL_DEVICE char* shared_base() { return emulation::current_identity->shared_base; }

void sync_block();
void sync_named(int32_t id, int32_t num_threads);
void sync_shared();
SGL_DEVICE void sync_publish() { emulation::current_planted == Planted::kMissingStoreWait ? sync_shared() : sync_block(); }
void sync_warp();

float shuffle_xor(float value, int32_t lane_mask);
uint32_t shuffle(uint32_t value, int32_t src_lane);
float shuffle(float value, int32_t src_lane);
uint32_t reduce_max(uint32_t value);
uint32_t reduce_min(uint32_t value);
uint32_t reduce_or(uint32_t value);
uint64_t ballot(bool vote);

// Vec16 and the scalar types of README.md; `address` has the type's natural alignment.
template <typename T>
SGL_DEVICE T load_plain(const T* address) {
  static_assert(std::is_trivially_copyable<T>::value && sizeof(T) >= 2 && sizeof(T) <= 16, "one access of 2 to 16 bytes");
  T value;
  emulation::load_plain_bytes(&value, address, sizeof(T));
  return value;
}

template <typename T>
SGL_DEVICE void store_plain(T* address, std::common_type_t<T> value) {
  static_assert(std::is_trivially_copyable<T>::value && sizeof(T) >= 2 && sizeof(T) <= 16, "one access of 2 to 16 bytes");
  emulation::store_plain_bytes(address, &value, sizeof(T));
}

template <typename T>
SGL_DEVICE T load_constant(const T* address) {
  static_assert(std::is_trivially_copyable<T>::value && sizeof(T) >= 2, "one access of at least 2 bytes");
  T value;
  emulation::load_constant_bytes(&value, address, sizeof(T));
  return value;
}

template <typename T>
SGL_DEVICE T* load_constant_pointer(T* const* address) {
  T* value;
  emulation::load_constant_bytes(&value, address, sizeof(value));
  return value;
}

SGL_DEVICE uint32_t load_acquire_gpu(const uint32_t* address) {
  return emulation::atomic_load_u32(address, emulation::Order::kAcquire, emulation::Scope::kGpu);
}
SGL_DEVICE uint32_t load_relaxed_gpu(const uint32_t* address) {
  return emulation::atomic_load_u32(address, emulation::Order::kRelaxed, emulation::Scope::kGpu);
}
SGL_DEVICE void add_release_gpu(uint32_t* address, uint32_t value) {
  emulation::atomic_add_u32(address, value, emulation::Order::kRelease, emulation::Scope::kGpu);
}
SGL_DEVICE void add_relaxed_gpu(uint32_t* address, uint32_t value) {
  emulation::atomic_add_u32(address, value, emulation::Order::kRelaxed, emulation::Scope::kGpu);
}
SGL_DEVICE uint32_t fetch_add_acq_rel_gpu(uint32_t* address, uint32_t value) {
  return emulation::atomic_add_u32(address, value, emulation::Order::kAcquireRelease, emulation::Scope::kGpu);
}

SGL_DEVICE uint32_t load_relaxed_system(const uint32_t* address) {
  return emulation::atomic_load_u32(address, emulation::Order::kRelaxed, emulation::Scope::kSystem);
}
SGL_DEVICE uint64_t load_relaxed_system(const uint64_t* address) {
  return emulation::atomic_load_u64(address, emulation::Order::kRelaxed, emulation::Scope::kSystem);
}
SGL_DEVICE uint32_t load_acquire_system(const uint32_t* address) {
  return emulation::atomic_load_u32(address, emulation::Order::kAcquire, emulation::Scope::kSystem);
}
SGL_DEVICE void store_relaxed_system(uint32_t* address, uint32_t value) {
  emulation::atomic_store_u32(address, value, emulation::Order::kRelaxed, emulation::Scope::kSystem);
}
SGL_DEVICE void store_relaxed_system(uint64_t* address, uint64_t value) {
  emulation::atomic_store_u64(address, value, emulation::Order::kRelaxed, emulation::Scope::kSystem);
}
SGL_DEVICE void store_release_system(uint32_t* address, uint32_t value) {
  emulation::atomic_store_u32(address, value, emulation::Order::kRelease, emulation::Scope::kSystem);
}
// Returns the value found; the exchange happened when that equals `expected`.
SGL_DEVICE uint32_t cas_relaxed_system(uint32_t* address, uint32_t expected, uint32_t desired) {
  return emulation::atomic_cas_u32(address, expected, desired, emulation::Order::kRelaxed, emulation::Scope::kSystem);
}

// Each word is atomic by itself, the vector is not. `address` is a multiple of 4N bytes.
template <int N>
SGL_DEVICE void load_words(uint32_t (&w)[N], const uint32_t* address) {
  static_assert(N == 1 || N == 2 || N == 4, "one access of 1, 2 or 4 words");
  emulation::load_word_vector(w, address, N, emulation::Scope::kGpu);
}
template <int N>
SGL_DEVICE void store_words(uint32_t* address, const uint32_t (&w)[N]) {
  static_assert(N == 1 || N == 2 || N == 4, "one access of 1, 2 or 4 words");
  emulation::store_word_vector(address, w, N, emulation::Scope::kGpu);
}
// The same at system scope: words that another rank may store or load.
template <int N>
SGL_DEVICE void load_words_system(uint32_t (&w)[N], const uint32_t* address) {
  static_assert(N == 1 || N == 2 || N == 4, "one access of 1, 2 or 4 words");
  emulation::load_word_vector(w, address, N, emulation::Scope::kSystem);
}
template <int N>
SGL_DEVICE void store_words_system(uint32_t* address, const uint32_t (&w)[N]) {
  static_assert(N == 1 || N == 2 || N == 4, "one access of 1, 2 or 4 words");
  emulation::store_word_vector(address, w, N, emulation::Scope::kSystem);
}
// `address` lies in one of emulation::Options::multicasts.
template <int N>
SGL_DEVICE void store_words_multicast(uint32_t* address, const uint32_t (&w)[N]) {
  static_assert(N == 2 || N == 4, "one access of 2 or 4 words");
  emulation::store_word_vector_multicast(address, w, N);
}
void clear_words(uint32_t* address);
void fence_acq_rel_gpu();
void fence_acq_rel_system();

SGL_DEVICE void prefetch_l2(const void*) {}  // a hint: nothing to see
void copy_async_16(void* shared, const void* global);
void copy_async_commit();
// At most kPending of the groups this thread committed last are still pending.
template <int32_t kPending>
SGL_DEVICE void copy_async_wait() {
  static_assert(kPending >= 0, "a number of groups");
  emulation::wait_for_copies(kPending);
}

// Waves: what a lane copies of a tile, and the copy. A lane reads back what the MFMA wants of it, 16 bytes from slot + 16 lane on.
SGL_DEVICE int32_t copied_row() { return thread_idx() % 16; }
SGL_DEVICE int32_t copied_column() { return thread_idx() % 64 / 16 * 8; }
SGL_DEVICE void copy_tile(char* slot, const bf16* own) {
  copy_async_16(slot + thread_idx() % 64 * 16, own);
  copy_async_commit();
}
SGL_DEVICE int32_t uniform(int32_t value) { return value; }
SGL_DEVICE int32_t varying(int32_t value) { return value; }
template <int32_t kYounger>
SGL_DEVICE void await_copies() {
  if (emulation::current_planted != Planted::kRingNoWait) copy_async_wait<kYounger>();
}
template <class Params>
SGL_DEVICE const Params& read_again(const Params& params) { return params; }
Vec16 load_copied(const void* slot);

void mbarrier_init(uint64_t* mbarrier, uint32_t count);
void mbarrier_init_fence();
void mbarrier_arrive(uint64_t* mbarrier);
void mbarrier_arrive_expect_bytes(uint64_t* mbarrier, uint32_t bytes);
// True once the phase of this parity has completed.
bool mbarrier_test(uint64_t* mbarrier, uint32_t parity);
void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* mbarrier);
void load_stage(void* shared, const abi::WeightMap* map, int32_t row, int32_t part, int32_t chunk, uint64_t* mbarrier);
SGL_DEVICE void load_stage_again(void* shared, const abi::WeightMap* map, int32_t row, int32_t part, int32_t chunk, uint64_t* mbarrier) {
  load_stage(shared, map, row, part, chunk, mbarrier);
}
SGL_DEVICE void prefetch_map(const abi::WeightMap*) {}  // a hint: nothing to see

void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row);
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void mfma_16x16x32(float (&c)[4], const Vec16& a, const Vec16& b);

SGL_DEVICE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
SGL_DEVICE uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

SGL_DEVICE float to_float(bf16 value) { return bits_to_float(static_cast<uint32_t>(value.bits) << 16); }
SGL_DEVICE bf16 to_bf16(float value) {
  uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>(0x7fffu)};  // what cvt.rn.bf16.f32 makes of NaN
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return bf16{static_cast<uint16_t>(bits >> 16)};
}

SGL_DEVICE int32_t popcount(uint32_t value) { return __builtin_popcount(value); }
SGL_DEVICE int32_t popcount(uint64_t value) { return __builtin_popcountll(value); }
SGL_DEVICE float exp2(float value) { return ::exp2f(value); }
SGL_DEVICE float rsqrt(float value) { return 1.0f / ::sqrtf(value); }
SGL_DEVICE float divide(float a, float b) { return a / b; }
SGL_DEVICE float divide_full(float a, float b) { return a / b; }
SGL_DEVICE float add_rounded(float a, float b) { return a + b; }
SGL_DEVICE float multiply_rounded(float a, float b) { return a * b; }
SGL_DEVICE float log(float x) { return ::logf(x); }
SGL_DEVICE float log1p(float x) { return ::log1pf(x); }
SGL_DEVICE float exp(float x) { return ::expf(x); }
SGL_DEVICE float log2(float x) { return ::log2f(x); }
SGL_DEVICE float square_root(float x) { return ::sqrtf(x); }
SGL_DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) { return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32); }

// A rank's kernels run one after the other: the previous one is over, and the next one comes when this one is. But a kernel might begin earlier on
// a GPU: a thread that touches, without this call, what the previous one may write, is misuse.
void await_previous_launch();
SGL_DEVICE void allow_next_launch() {}
uint64_t timer_ns();
void backoff();
void pause_ns(uint32_t duration_ns);
[[noreturn]] void trap();

SGL_DEVICE bool planted(Planted bug) { return emulation::current_planted == bug; }

// Row r of the result is column r of the operand, two 16-bit elements a lane.
inline uint32_t transpose_8x8(uint32_t x) {
  const int32_t lane = thread_idx() % 32, row = lane / 4, column = lane % 4 * 2;
  const uint32_t first = shuffle(x, column * 4 + row / 2), second = shuffle(x, (column + 1) * 4 + row / 2);
  const int32_t shift = row % 2 * 16;
  return (first >> shift & 0xffffu) | (second >> shift & 0xffffu) << 16;
}

// The product of two bf16 is exact in float, so one rounding gives mul.rn.bf16x2.
SGL_DEVICE uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  const auto half = [](uint32_t x, int32_t shift) { return to_float(bf16{static_cast<uint16_t>(x >> shift)}); };
  const uint32_t low = to_bf16(half(a, 0) * half(b, 0)).bits, high = to_bf16(half(a, 16) * half(b, 16)).bits;
  return low | high << 16;
}

}  // namespace sgl_lowlatency::dialect
