// The noise of a draft's requests that sample, of all steps, made behind the products of the LM head: weights stream meanwhile. It waits in global
// memory (abi::DraftRank::noise), laid out as the base logits are, for the threads of the same block.
#pragma once
#include "sgl_lowlatency/stages/draft_noise.hpp"
#include "sgl_lowlatency/stages/draft_state.hpp"

namespace sgl_lowlatency::stages {

SGL_DEVICE float draft_temperature(const DraftSamplerParams& p, int32_t request) {
  return p.greedy != 0 ? 0.0f : dialect::load_constant(p.step_temperatures + request);
}

// A thread's part: items of four neighbouring columns of a row, which share a call of Philox, kConsumerThreads apart.
struct DraftGumbel {
  const DraftSamplerParams& p;
  const DraftBlock& b;
  uint32_t offset;  // of the noise
  int32_t next;     // item

  SGL_DEVICE DraftGumbel(const DraftSamplerParams& params, const DraftBlock& block, uint32_t noise_offset)
      : p(params), b(block), offset(noise_offset), next(dialect::thread_idx()) {}

  SGL_DEVICE int32_t quads() const { return b.units.count * abi::kUnitColumns / 4; }
  SGL_DEVICE int32_t num_items() const { return p.greedy != 0 ? 0 : p.batch * p.gamma * quads(); }
  // Items of a thread each time, of `times` times that are to be enough.
  SGL_DEVICE int32_t quota(int32_t times) const {
    return (num_items() + kConsumerThreads * times - 1) / (kConsumerThreads * times);
  }

  // Entry: any thread; it makes up to `count` of its items.
  SGL_DEVICE void make(int32_t count) {
    const abi::DraftRank& own = p.ranks[b.local_rank];
SGL_NO_UNROLL
    for (const int32_t items = num_items(); count > 0 && next < items; --count, next += kConsumerThreads) {
      const int32_t row = next / quads(), quad = next - row * quads(), request = row / p.gamma, step = row - request * p.gamma;
      if (draft_temperature(p, request) == 0.0f) continue;
      const int32_t column = b.units.begin * abi::kUnitColumns + quad * 4;
      const uint32_t of = static_cast<uint32_t>(request) + (dialect::planted(dialect::Planted::kNoiseOfNextRow) ? 1u : 0u);
      DraftNoiseWords words = philox4x32_10(p.noise_key, static_cast<uint32_t>((own.vocab_begin + column) / 4), of,
                                                  static_cast<uint32_t>(step), offset);
      Vec16 noise{};
SGL_NO_UNROLL
      for (int32_t i = 0; i < 4; ++i) {  // words and noise turn: one copy of two logarithms, which few instructions caches hold four times
        noise = {{noise.w[1], noise.w[2], noise.w[3], dialect::float_to_bits(log_exponential(words.w[0]))}};
        words = {{words.w[1], words.w[2], words.w[3], words.w[0]}};
      }
      const int64_t at = static_cast<int64_t>(row) * own.num_units * abi::kUnitColumns + column;
      dialect::store_plain(reinterpret_cast<Vec16*>(own.noise + at), noise);
    }
  }
};

}  // namespace sgl_lowlatency::stages
