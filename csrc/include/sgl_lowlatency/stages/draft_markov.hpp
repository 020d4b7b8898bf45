// One step of a draft block behind its base logits: the bias by the token before, the step's logits, and the block's candidate for each request.
#pragma once
#include "sgl_lowlatency/stages/draft_base_logits.hpp"
#include "sgl_lowlatency/stages/draft_choice.hpp"

namespace sgl_lowlatency::stages {

// The rows of markov_w1 that the step multiplies. Entry: all consumer threads; DraftBlockState::previous is there. Ends with a consumer barrier.
SGL_DEVICE void load_latents(const DraftSamplerParams& p, const DraftShared& s) {
  constexpr int32_t kRowVecs = abi::kMarkovRank / 8;
  for (int32_t i = dialect::thread_idx(); i < p.batch * kRowVecs; i += kConsumerThreads) {
    const int32_t request = i / kRowVecs, v = i % kRowVecs;
    const Vec16* const row = reinterpret_cast<const Vec16*>(p.markov_w1 + static_cast<int64_t>(s.block()->previous[request]) * abi::kMarkovRank);
    *reinterpret_cast<Vec16*>(s.latents() + request * abi::kLatentPitch + v * 16) = dialect::load_constant(row + v);
  }
  if (!dialect::planted(dialect::Planted::kEarlyLatents)) sync_consumers();
}

// values[request][column] of the block's columns: base logit plus bias, rounded as the step logits are.
// A unit's stage has two neighbouring columns of the vocabulary in each of its 16 rows: its first chunks the even ones, its last chunks the odd
// ones. Each warp of the pair takes one kind. kBatchTiles: of 8 requests, enough for all. Entry: all consumer threads. A consumer barrier must follow.
template <int32_t kBatchTiles>
SGL_DEVICE void add_markov_bias(const DraftSamplerParams& p, const DraftShared& s, const DraftBlock& b, int32_t step) {
  const sync::FaultSink sink = fault_sink(p, b.rank);
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, pair = warp / 2, odd = warp % 2;
  const abi::DraftRank& own = p.ranks[b.local_rank];
  const int32_t columns = p.max_units * abi::kUnitColumns, base_pitch = own.num_units * abi::kUnitColumns;
  const int32_t num_units = pair_units(b, pair), head_stages = pair_head_stages(p, b, pair);
  constexpr int32_t kHalfChunks = abi::kStageChunks / 2;
SGL_NO_UNROLL
  for (int32_t turn = 0; turn < num_units; ++turn) {
    const DraftUnit unit = draft_unit(pair, head_stages, num_units, step, turn);
    bf16 base[kBatchTiles][4];  // asked for before the weights are awaited
SGL_UNROLL
    for (int32_t t = 0; t < kBatchTiles; ++t) {
SGL_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t request = t * 8 + lane % 4 * 2 + i % 2;
        const int32_t column = (b.units.begin + unit.unit) * abi::kUnitColumns + (lane / 4 + i / 2 * 8) * 2 + odd;
        base[t][i] = request < p.batch ? dialect::load_plain(own.base_logits + static_cast<int64_t>(request * p.gamma + step) * base_pitch + column)
                                       : bf16{0};
      }
    }
    sync::wait_mbarrier(sink, abi::kFaultRingFull, step, unit.at.stage, s.full(unit.at.stage), unit.at.parity());
    DraftTile<kBatchTiles> product;
SGL_UNROLL
    for (int32_t c = 0; c < kHalfChunks; ++c) {
      product.multiply(s.stage(unit.at.stage), odd * kHalfChunks + c, lane, [&](int32_t request) {
        const bool is_request = request < p.batch;
        return PanelRow{is_request ? s.latents() + request * abi::kLatentPitch + (c * abi::chunk_k(2) + lane / 8 * 8) * 2 : s.zero_row(),
                        is_request ? 64 : 0};
      });
    }
    dialect::sync_warp();
    // Pairs with the producer's wait on `empty`: this warp's reads of the stage are done.
    if (!unit.stays && lane == 0) dialect::mbarrier_arrive(s.empty(unit.at.stage));
SGL_UNROLL
    for (int32_t t = 0; t < kBatchTiles; ++t) {
SGL_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t request = t * 8 + lane % 4 * 2 + i % 2;
        if (request >= p.batch) continue;
        float bias = product.sum(t, i);
        if (!dialect::planted(dialect::Planted::kUnroundedBias)) bias = dialect::to_float(dialect::to_bf16(bias));
        float value = dialect::add_rounded(dialect::to_float(base[t][i]), bias);
        if (p.step_logits_type == abi::kStepLogitsBf16) value = dialect::to_float(dialect::to_bf16(value));
        s.values()[request * columns + unit.unit * abi::kUnitColumns + (lane / 4 + i / 2 * 8) * 2 + odd] = value;
      }
    }
  }
}

// Stores one step logit of a request to all ranks.
SGL_DEVICE void store_step_logit(const DraftSamplerParams& p, int32_t request, int32_t step, int32_t token, float value) {
  const int64_t at = (static_cast<int64_t>(request) * p.gamma + step) * p.vocab + token;
  for (int32_t rank = 0; rank < p.num_ranks; ++rank) {
    void* const logits = p.peers[rank].step_logits;
    if (p.step_logits_type == abi::kStepLogitsBf16) {
      dialect::store_plain(static_cast<bf16*>(logits) + at, dialect::to_bf16(value));
    } else {
      dialect::store_plain(static_cast<float*>(logits) + at, value);
    }
  }
}

// The best of this thread's columns for a request; a thread takes four neighbouring ones at a time, which share a call of the noise. Stores the
// step's logits of a request that samples.
SGL_DEVICE Candidate choose_column(const DraftSamplerParams& p, const DraftShared& s, const DraftBlock& b, int32_t step, int32_t request,
                                   uint32_t noise_offset) {
  const abi::DraftRank& own = p.ranks[b.local_rank];
  const float temperature = p.greedy != 0 ? 0.0f : dialect::load_constant(p.step_temperatures + request);
  const int32_t first = b.units.begin * abi::kUnitColumns, end = min_int(own.vocab_count, first + b.units.count * abi::kUnitColumns);
  const float* const values = s.values() + request * (p.max_units * abi::kUnitColumns) - first;
  const uint32_t row = static_cast<uint32_t>(request) + (dialect::planted(dialect::Planted::kNoiseOfNextRow) ? 1u : 0u);
  const int32_t chosen_end = dialect::planted(dialect::Planted::kDroppedUnit) && b.block == 0 ? end - abi::kUnitColumns : end;
  Candidate best{0u, 0u};
SGL_NO_UNROLL
  for (int32_t column = first + dialect::thread_idx() * 4; column < end; column += kConsumerThreads * 4) {
    const int32_t token = own.vocab_begin + column;
    DraftNoiseWords noise{};
    if (temperature != 0.0f) {
      noise = philox4x32_10(p.noise_key, static_cast<uint32_t>(token / 4), row, static_cast<uint32_t>(step), noise_offset);
    }
SGL_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      if (column + i >= end) continue;
      const float value = values[column + i];
      if (temperature != 0.0f && p.peers[b.rank].step_logits != nullptr) store_step_logit(p, request, step, token + i, value);
      if (column + i >= chosen_end) continue;
      const float key = temperature != 0.0f ? gumbel_key(value, temperature, noise.w[i]) : value;
      best = better(best, {ordered_key(key), static_cast<uint32_t>(token + i)});
    }
  }
  return best;
}

// From the values of the block's columns to the token of each request: DraftBlockState::previous and, of the leader, draft_tokens.
// Entry: all consumer threads, behind a barrier that follows add_markov_bias. Ends with a consumer barrier.
SGL_DEVICE void choose_tokens(const DraftSamplerParams& p, const DraftShared& s, const DraftBlock& b, const DraftWords& words, int32_t step,
                              uint32_t noise_offset) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
SGL_NO_UNROLL
  for (int32_t request = 0; request < p.batch; ++request) {
    const Candidate best = best_of_warp(choose_column(p, s, b, step, request, noise_offset));
    if (lane == 0) s.block()->best[request][warp] = best;
  }
  sync_consumers();
SGL_NO_UNROLL
  for (int32_t request = warp; request < p.batch; request += abi::kNumConsumerWarps) {
    const Candidate own = best_of_warp(s.block()->best[request][lane % abi::kNumConsumerWarps]);
    // The row that the next step reads if this block's candidate wins: two lines of 128 bytes a half of it, on their way into L2.
    if (lane < abi::kMarkovRank * 2 / 128) dialect::prefetch_l2(p.markov_w1 + static_cast<int64_t>(own.id) * abi::kMarkovRank + lane * 64);
    const int32_t token = agree_on_token(words, step, request, own);
    if (lane == 0) {
      if (!dialect::planted(dialect::Planted::kKeptLatents)) s.block()->previous[request] = token;
      if (b.is_leader()) dialect::store_plain(p.ranks[b.local_rank].draft_tokens + request * p.gamma + step, static_cast<int64_t>(token));
    }
  }
  sync_consumers();
}

}  // namespace sgl_lowlatency::stages
