// The key by which a draft's tokens are chosen: SGLang's, step by step, so that the same logits give the same token.
//
//   key = value                                      temperature 0
//   key = value / temperature - log(-log1p(-u))      else; u = (fp32(word) + 0.5) * 2^-32, word id % 4 of philox4x32-10(id / 4, row, step, offset)
#pragma once
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::stages {

struct DraftNoiseWords {
  uint32_t w[4];
};
SGL_DEVICE DraftNoiseWords philox4x32_10(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  constexpr uint32_t kRoundA = 0xd2511f53u, kRoundB = 0xcd9e8d57u, kKeyA = 0x9e3779b9u, kKeyB = 0xbb67ae85u;
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
SGL_UNROLL
  for (int32_t round = 0; round < 10; ++round) {
    const uint32_t high_a = dialect::multiply_high(c0, kRoundA), low_a = c0 * kRoundA;
    const uint32_t high_b = dialect::multiply_high(c2, kRoundB), low_b = c2 * kRoundB;
    c0 = high_b ^ c1 ^ k0;
    c1 = low_b;
    c2 = high_a ^ c3 ^ k1;
    c3 = low_a;
    k0 += kKeyA;
    k1 += kKeyB;
  }
  return {{c0, c1, c2, c3}};
}

// log(-log1p(-u)) of a word's u.
SGL_DEVICE float log_exponential(uint32_t word) {
  constexpr float kTwoToMinus32 = 2.3283064365386963e-10f;
  const float uniform = dialect::multiply_rounded(dialect::add_rounded(static_cast<float>(word), 0.5f), kTwoToMinus32);
  return dialect::log(-dialect::log1p(-uniform));
}
SGL_DEVICE float sampled_key(float value, float temperature, float log_noise) {
  return dialect::add_rounded(dialect::divide_full(value, temperature), -log_noise);
}

// A number that orders keys as a draft's choice does: any NaN above all, both zeros alike; 0 is below every key, and no key has all bits set.
SGL_DEVICE uint32_t ordered_key(float key) {
  if (key != key) return 0xff800001u;  // +inf's plus one
  const uint32_t bits = key == 0.0f ? 0u : dialect::float_to_bits(key);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

}  // namespace sgl_lowlatency::stages
