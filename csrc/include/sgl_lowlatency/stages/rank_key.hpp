// The order in which logits are ranked.
#pragma once
#include "sgl_lowlatency/dialect/dialect.hpp"

namespace sgl_lowlatency::stages {

constexpr float kNanRank = -1e30f;           // a NaN logit ranks as this one
constexpr uint32_t kNoExpert = 0xffffffffu;  // above every id

// A number that orders logits as floats compare, both zeros alike, NaN as kNanRank; never 0.
SGL_DEVICE uint32_t rank_key(float logit) {
  if (logit != logit) logit = dialect::planted(dialect::Planted::kNanOutranks) ? dialect::bits_to_float(0x7f800000u) : kNanRank;
  const uint32_t bits = logit == 0.0f ? 0u : dialect::float_to_bits(logit);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
SGL_DEVICE float ranked_logit(uint32_t key) { return dialect::bits_to_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key); }

}  // namespace sgl_lowlatency::stages
