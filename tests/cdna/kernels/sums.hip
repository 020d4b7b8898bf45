// Small pieces of kernels whose results numpy knows: a product on the MFMA with a rope-like epilogue, sums across lanes, workgroups and atomics.
#include "device.hpp"

typedef __attribute__((ext_vector_type(4))) float Float4;
typedef __attribute__((ext_vector_type(8))) __bf16 Bf16x8;
typedef __attribute__((ext_vector_type(4))) short Short4;

// out [16, 16] f32 = a [16, depth] b [16, depth]^T, bf16, one wave; depth a multiple of 32.
KERNEL(64) product(const uint16_t* a, const uint16_t* b, float* out, int32_t depth) {
  const int32_t lane = thread_idx(), row = lane & 15, group = lane >> 4;
  Float4 sum = {0, 0, 0, 0};
  for (int32_t k = 8 * group; k < depth; k += 32) {
    const Bf16x8 x = *(const Bf16x8*)(a + row * depth + k), y = *(const Bf16x8*)(b + row * depth + k);
#if defined(__gfx950__)
    sum = __builtin_amdgcn_mfma_f32_16x16x32_bf16(x, y, sum, 0, 0, 0);
#else
    struct Halves { Short4 low, high; };
    const Halves p = __builtin_bit_cast(Halves, x), q = __builtin_bit_cast(Halves, y);
    sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(p.low, q.low, sum, 0, 0, 0);
    sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(p.high, q.high, sum, 0, 0, 0);
#endif
  }
  for (int32_t i = 0; i < 4; i++) out[(4 * group + i) * 16 + row] = sum[i];
}

// out [blocks] f32: the sum of exp(x) over each workgroup's share of x [count]; total: the integers' sum of all, by atomics.
KERNEL(256) exp_sums(const float* x, float* out, uint32_t* total, int32_t count, int32_t blocks) {
  static __attribute__((shared)) float waves[4];
  const int32_t t = thread_idx();
  float sum = 0;
  uint32_t seen = 0;
  for (int32_t i = block_idx() * 256 + t; i < count; i += blocks * 256) {
    sum += __builtin_amdgcn_exp2f(x[i] * 1.442695041f);
    seen += i;
  }
  for (int32_t distance = 32; distance > 0; distance /= 2) {
    const int32_t other = (lane_idx() ^ distance) * 4;
    sum += __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute(other, __builtin_bit_cast(int32_t, sum)));
  }
  if (lane_idx() == 0) waves[t / 64] = sum;
  barrier();
  if (t == 0) out[block_idx()] = waves[0] + waves[1] + waves[2] + waves[3];
  __hip_atomic_fetch_add(total, seen, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// out [count] i64 = x / y of i32, widened; a table of constants and a ballot beside it.
KERNEL(64) quotients(const int32_t* x, const int32_t* y, int64_t* out, uint64_t* odd, int32_t count) {
  static const int32_t kTable[8] = {3, 1, 4, 1, 5, 9, 2, 6};
  const int32_t t = thread_idx();
  odd[0] = __builtin_amdgcn_ballot_w64(x[t] & 1);
  if (t < count) out[t] = (int64_t)(x[t] / y[t]) * kTable[t & 7] + ((int64_t)x[t] << 20) % 1000003;
}
