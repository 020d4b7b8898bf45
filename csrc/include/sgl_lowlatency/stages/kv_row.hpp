// A row of DeepSeek-V4's KV cache: 448 values in e4m3 with a scale for each 64, then 64 rotated ones in bf16.
#pragma once
#include "sgl_lowlatency/stages/attention_in_state.hpp"

namespace sgl_lowlatency::stages {

// The e4m3fn code of x, |x| up to 448, rounded to nearest even; above that 448, NaN stays NaN.
SGL_DEVICE uint32_t to_e4m3(float x) {
  const uint32_t bits = dialect::float_to_bits(x), sign = bits >> 24 & 0x80u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7fu;
  if (magnitude < 0x3c800000u) {  // below 2^-6, subnormal: 512 |x| to an integer, which 2^23 leaves in the low bits
    const float steps = dialect::multiply_rounded(dialect::bits_to_float(magnitude), 512.0f);
    return sign | (dialect::float_to_bits(dialect::add_rounded(steps, 8388608.0f)) & 0xffu);
  }
  magnitude += 0x7ffffu + (magnitude >> 20 & 1u);
  const uint32_t code = (magnitude >> 20) - (120u << 3);
  return sign | (code > 0x7eu ? 0x7eu : code);
}

// The e8m0 byte of the least power of two that is not below x > 0.
SGL_DEVICE uint32_t e8m0_above(float x) {
  const uint32_t bits = dialect::float_to_bits(x);
  return (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1u : 0u);
}

// Stores a row: lane l has values 16 l .. 16 l + 15, normed; those of lanes 28..31 rotated. slot: within the cache. Entry: all lanes of a warp.
SGL_DEVICE void store_kv_row(const AttentionInParams& p, int32_t slot, const float (&values)[16]) {
  constexpr int32_t kRopeLane = (abi::kHeadDim - abi::kHeadRope) / 16;
  const int32_t lane = dialect::thread_idx() % 32, in_page = slot % p.page_size;
  uint8_t* const page = p.cache + static_cast<int64_t>(slot / p.page_size) * p.page_bytes;
  float largest = 0.0f;
SGL_UNROLL
  for (int32_t i = 0; i < 16; ++i) {
    const float magnitude = values[i] < 0.0f ? -values[i] : values[i];
    largest = magnitude > largest ? magnitude : largest;
  }
SGL_UNROLL
  for (int32_t mask = 1; mask < abi::kKvGroup / 16; mask *= 2) {
    const float other = dialect::shuffle_xor(largest, mask);
    largest = other > largest ? other : largest;
  }
  const uint32_t scale = e8m0_above(dialect::divide_full(largest < 1e-4f ? 1e-4f : largest, 448.0f));
  uint32_t scales[2] = {0u, 0u};  // of lanes 0, 4, .. 24
SGL_UNROLL
  for (int32_t i = 0; i < abi::kKvScales; ++i) scales[i / 4] |= dialect::shuffle(scale, i * (abi::kKvGroup / 16)) << i % 4 * 8;
  Vec16* const data = reinterpret_cast<Vec16*>(page + static_cast<int64_t>(in_page) * abi::kKvDataBytes);
  if (lane < kRopeLane) {
    const float factor = dialect::bits_to_float((254u - scale) << 23);
    Vec16 codes{};
SGL_UNROLL
    for (int32_t i = 0; i < 16; ++i) codes.w[i / 4] |= to_e4m3(values[i] * factor) << i % 4 * 8;
    dialect::store_plain(data + lane, codes);
  } else {
SGL_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      Vec16 pairs;
SGL_UNROLL
      for (int32_t i = 0; i < 4; ++i) pairs.w[i] = pack_bf16(values[half * 8 + 2 * i], values[half * 8 + 2 * i + 1]);
      dialect::store_plain(data + kRopeLane + 2 * (lane - kRopeLane) + half, pairs);
    }
  }
  if (lane < 2) {
    uint8_t* const at = page + static_cast<int64_t>(p.page_size) * abi::kKvDataBytes + static_cast<int64_t>(in_page) * abi::kKvScaleBytes;
    dialect::store_plain(reinterpret_cast<uint32_t*>(at) + lane, lane == 0 ? scales[0] : scales[1]);
  }
}

}  // namespace sgl_lowlatency::stages
