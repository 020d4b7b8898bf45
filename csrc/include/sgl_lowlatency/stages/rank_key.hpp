// The order in which logits are ranked.
#pragma once
#include "sgl_lowlatency/abi/routing_layout.hpp"
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
// From the rank_key of a logit that is a bf16, and its expert below 512, a key that no other expert has: of equal logits the lower id has the larger
// one. NaN has the upper half of the next bf16 above it, and comes right below that.
SGL_DEVICE uint32_t expert_key(uint32_t key, int32_t expert) {
  static_assert(abi::kMaxExperts <= 512, "an expert's number has nine bits of the key");
  const uint32_t is_number = key != rank_key(kNanRank) ? 1u : 0u;
  const uint32_t order = static_cast<uint32_t>(dialect::planted(dialect::Planted::kTieToHigherId) ? expert : 511 - expert);
  return (key >> 16 << 1 | is_number) << 9 | order;
}
SGL_DEVICE int32_t ranked_expert(uint32_t key) {
  return static_cast<int32_t>(dialect::planted(dialect::Planted::kTieToHigherId) ? key & 511u : 511u - (key & 511u));
}
SGL_DEVICE float ranked_logit(uint32_t key) { return dialect::bits_to_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key); }

}  // namespace sgl_lowlatency::stages
