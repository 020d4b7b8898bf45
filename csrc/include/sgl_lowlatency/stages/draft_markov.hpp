// A draft's steps behind its base logits: the bias by the token before, the step's logits, and the block's candidate for each request.
#pragma once
#include "sgl_lowlatency/stages/draft_base_logits.hpp"
#include "sgl_lowlatency/stages/draft_choice.hpp"

namespace sgl_lowlatency::stages {

SGL_DEVICE float draft_temperature(const DraftSamplerParams& p, int32_t request) {
  return p.greedy != 0 ? 0.0f : dialect::load_constant(p.step_temperatures + request);
}

// A line of a row of markov_w1 a lane, on its way into L2. Entry: all lanes of one warp.
SGL_DEVICE void prefetch_latent(const DraftSamplerParams& p, int64_t token) {
  constexpr int32_t kLineElements = 64;
  const int32_t lane = dialect::thread_idx() % 32;
  if (lane < abi::kMarkovRank / kLineElements) dialect::prefetch_l2(p.markov_w1 + token * abi::kMarkovRank + lane * kLineElements);
}

// An anchor outside the vocabulary ends the launch: it would read foreign memory. Entry: all consumer threads.
SGL_DEVICE void check_anchors(const DraftSamplerParams& p, const DraftBlock& b) {
SGL_NO_UNROLL
  for (int32_t request = dialect::thread_idx() / 32; request < p.batch; request += abi::kNumConsumerWarps) {
    const int64_t anchor = dialect::load_constant(p.anchor_tokens + request * p.anchor_stride);
    if (anchor < 0 || anchor >= p.vocab) {
      sync::raise_fault(p.fault, b.rank, abi::kFaultBadTokenId, 0, request, static_cast<uint32_t>(p.vocab), static_cast<uint32_t>(anchor),
                        static_cast<uint64_t>(anchor));
    }
    prefetch_latent(p, anchor);
  }
}

// The row of markov_w1 that the request's next step multiplies: 16 bytes a lane. Entry: all lanes of one warp. A consumer barrier must follow.
SGL_DEVICE void load_latent(const DraftSamplerParams& p, const DraftShared& s, int32_t request, int32_t token) {
  static_assert(abi::kMarkovRank * 2 == 32 * 16, "a warp has a row");
  const int32_t lane = dialect::thread_idx() % 32;
  const Vec16* const row = reinterpret_cast<const Vec16*>(p.markov_w1 + static_cast<int64_t>(token) * abi::kMarkovRank);
  *reinterpret_cast<Vec16*>(s.latents() + request * abi::kLatentPitch + lane * 16) = dialect::load_constant(row + lane);
}

// noise[request][column] of a step, of requests that sample; a thread takes four neighbouring columns at a time, which share a call of Philox.
// Entry: all consumer threads; the step before is chosen from. A consumer barrier must follow.
SGL_DEVICE void fill_noise(const DraftSamplerParams& p, const DraftShared& s, const DraftBlock& b, int32_t step, uint32_t noise_offset) {
  const int32_t columns = p.max_units * abi::kUnitColumns;
  const int32_t quads = b.units.count * abi::kUnitColumns / 4;
  const int32_t first_quad = (p.ranks[b.local_rank].vocab_begin + b.units.begin * abi::kUnitColumns) / 4;
SGL_NO_UNROLL
  for (int32_t request = 0; request < p.batch; ++request) {
    if (draft_temperature(p, request) == 0.0f) continue;
    const uint32_t row = static_cast<uint32_t>(request) + (dialect::planted(dialect::Planted::kNoiseOfNextRow) ? 1u : 0u);
SGL_NO_UNROLL
    for (int32_t quad = dialect::thread_idx(); quad < quads; quad += kConsumerThreads) {
      const DraftNoiseWords words =
          philox4x32_10(p.noise_key, static_cast<uint32_t>(first_quad + quad), row, static_cast<uint32_t>(step), noise_offset);
SGL_UNROLL
      for (int32_t i = 0; i < 4; ++i) s.noise()[request * columns + quad * 4 + i] = log_exponential(words.w[i]);
    }
  }
}

// Stores a step logit of a request to all ranks.
SGL_DEVICE void store_step_logit(const DraftSamplerParams& p, int32_t request, int32_t step, int32_t token, float value) {
  const int64_t at = (static_cast<int64_t>(request) * p.gamma + step) * p.vocab + token;
SGL_NO_UNROLL
  for (int32_t rank = 0; rank < p.num_ranks; ++rank) {
    void* const logits = p.peers[rank].step_logits;
    if (p.step_logits_type == abi::kStepLogitsBf16) {
      dialect::store_plain(static_cast<bf16*>(logits) + at, dialect::to_bf16(value));
    } else {
      dialect::store_plain(static_cast<float*>(logits) + at, value);
    }
  }
}

// A unit's stage has two neighbouring columns of the vocabulary in each of its 16 rows: its first chunks the even ones, its last chunks the odd
// ones. Each warp of a pair takes one kind: a lane has elements (t, i), columns draft_column of requests draft_request.
SGL_DEVICE int32_t draft_request(int32_t t, int32_t i) { return t * 8 + dialect::thread_idx() % 4 * 2 + i % 2; }
SGL_DEVICE int32_t draft_column(int32_t i) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
  return (lane / 4 + i / 2 * 8) * 2 + warp % 2;
}

// Base logits of a unit, of the lane's elements. They are asked for long before they are needed.
template <int32_t kBatchTiles>
struct DraftBase {
  bf16 of[kBatchTiles][4];
};
template <int32_t kBatchTiles>
SGL_DEVICE DraftBase<kBatchTiles> load_base(const DraftSamplerParams& p, const DraftBlock& b, int32_t step, int32_t unit) {
  const abi::DraftRank& own = p.ranks[b.local_rank];
  const int32_t pitch = own.num_units * abi::kUnitColumns, first = (b.units.begin + unit) * abi::kUnitColumns;
  DraftBase<kBatchTiles> base;
SGL_UNROLL
  for (int32_t t = 0; t < kBatchTiles; ++t) {
SGL_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      const int64_t row = draft_request(t, i) * p.gamma + step;
      base.of[t][i] = draft_request(t, i) < p.batch ? dialect::load_plain(own.base_logits + row * pitch + first + draft_column(i)) : bf16{0};
    }
  }
  return base;
}
// Of the first unit that the warp's pair takes in the step.
template <int32_t kBatchTiles>
SGL_DEVICE DraftBase<kBatchTiles> load_first_base(const DraftSamplerParams& p, const DraftBlock& b, int32_t step) {
  const int32_t pair = dialect::thread_idx() / 64;
  return pair < b.units.count ? load_base<kBatchTiles>(p, b, step, pair) : DraftBase<kBatchTiles>{};
}

// The best column of each request, of each warp: DraftBlockState::best. Stores the step's logits of requests that sample. kBatchTiles: of 8 requests,
// enough for all. Entry: all consumer threads; noise and latents are there. A consumer barrier must follow.
template <int32_t kBatchTiles>
SGL_DEVICE void choose_columns(const DraftSamplerParams& p, const DraftShared& s, const DraftBlock& b, int32_t step, DraftBase<kBatchTiles> base) {
  const sync::FaultSink sink = fault_sink(p, b.rank);
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, pair = warp / 2;
  const abi::DraftRank& own = p.ranks[b.local_rank];
  const int32_t columns = p.max_units * abi::kUnitColumns;
  const int32_t num_units = pair_units(b, pair), head_stages = pair_head_stages(p, b, pair);
  constexpr int32_t kHalfChunks = abi::kStageChunks / 2;
  Candidate best[kBatchTiles][2] = {};
SGL_NO_UNROLL
  for (int32_t turn = 0; turn < num_units; ++turn) {
    const DraftUnit unit = draft_unit(pair, head_stages, num_units, step, turn);
    const DraftBase<kBatchTiles> now = base;
    if (turn + 1 < num_units) base = load_base<kBatchTiles>(p, b, step, draft_unit(pair, head_stages, num_units, step, turn + 1).unit);
    sync::wait_mbarrier(sink, abi::kFaultRingFull, step, unit.at.stage, s.full(unit.at.stage), unit.at.parity());
    DraftTile<kBatchTiles> product;
SGL_UNROLL
    for (int32_t c = 0; c < kHalfChunks; ++c) {
      product.multiply(s.stage(unit.at.stage), warp % 2 * kHalfChunks + c, lane, [&](int32_t request) {
        const bool is_request = request < p.batch;
        return PanelRow{is_request ? s.latents() + request * abi::kLatentPitch + (c * abi::chunk_k(2) + lane / 8 * 8) * 2 : s.zero_row(),
                        is_request ? 64 : 0};
      });
    }
    dialect::sync_warp();
    // Pairs with the producer's wait on `empty`: this warp's reads of the stage are done.
    if (!unit.stays && lane == 0) dialect::mbarrier_arrive(s.empty(unit.at.stage));
    const bool is_dropped = dialect::planted(dialect::Planted::kDroppedUnit) && b.block == 0 && unit.unit + 1 == b.units.count;
SGL_UNROLL
    for (int32_t t = 0; t < kBatchTiles; ++t) {
SGL_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t request = draft_request(t, i), column = unit.unit * abi::kUnitColumns + draft_column(i);
        const int32_t of_rank = b.units.begin * abi::kUnitColumns + column, token = own.vocab_begin + of_rank;
        if (request >= p.batch || of_rank >= own.vocab_count) continue;
        float bias = product.sum(t, i);
        if (p.rounds_bias != 0 && !dialect::planted(dialect::Planted::kUnroundedBias)) bias = dialect::to_float(dialect::to_bf16(bias));
        float value = dialect::add_rounded(dialect::to_float(now.of[t][i]), bias);
        if (p.step_logits_type == abi::kStepLogitsBf16) value = dialect::to_float(dialect::to_bf16(value));
        float key = value;
        const float temperature = draft_temperature(p, request);
        if (temperature != 0.0f) {
          store_step_logit(p, request, step, token, value);
          key = sampled_key(value, temperature, s.noise()[request * columns + column]);
        }
        if (!is_dropped) best[t][i % 2] = better(best[t][i % 2], {ordered_key(key), static_cast<uint32_t>(token)});
      }
    }
  }
  // The lanes that have a request are eight, four apart.
SGL_UNROLL
  for (int32_t t = 0; t < kBatchTiles; ++t) {
SGL_UNROLL
    for (int32_t i = 0; i < 2; ++i) {
SGL_UNROLL
      for (int32_t mask = 4; mask < 32; mask *= 2) {
        const Candidate other{dialect::shuffle(best[t][i].key, lane ^ mask), dialect::shuffle(best[t][i].id, lane ^ mask)};
        best[t][i] = better(best[t][i], other);
      }
      if (lane < 4 && draft_request(t, i) < p.batch) s.block()->best[draft_request(t, i)][warp] = best[t][i];
    }
  }
}

// All steps. Entry: all consumer threads, behind the LM head.
template <int32_t kBatchTiles>
SGL_DEVICE void run_draft_steps(const DraftSamplerParams& p, const DraftShared& s, const DraftBlock& b, const DraftMail& mail,
                                uint32_t noise_offset) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
  for (int32_t request = warp; request < p.batch; request += abi::kNumConsumerWarps) {
    load_latent(p, s, request, static_cast<int32_t>(dialect::load_constant(p.anchor_tokens + request * p.anchor_stride)));
  }
  fill_noise(p, s, b, 0, noise_offset);
  DraftBase<kBatchTiles> base = load_first_base<kBatchTiles>(p, b, 0);
  sync_consumers();
SGL_NO_UNROLL
  for (int32_t step = 0; step < p.gamma; ++step) {
    choose_columns<kBatchTiles>(p, s, b, step, base);
    sync_consumers();
SGL_NO_UNROLL
    for (int32_t request = warp; request < p.batch; request += abi::kNumConsumerWarps) {
      const Candidate own = best_of_warp(s.block()->best[request][lane % abi::kNumConsumerWarps]);
      mail.send(step, request, own);
      prefetch_latent(p, own.id);  // what the next step reads if this candidate wins
    }
    if (step + 1 < p.gamma) {  // while the candidates are on their way
      fill_noise(p, s, b, step + 1, noise_offset);
      base = load_first_base<kBatchTiles>(p, b, step + 1);
    }
SGL_NO_UNROLL
    for (int32_t request = warp; request < p.batch; request += abi::kNumConsumerWarps) {
      const int32_t token = mail.receive(step, request);
      if (lane == 0 && b.block == 0) {
        dialect::store_plain(p.ranks[b.local_rank].draft_tokens + request * p.gamma + step, static_cast<int64_t>(token));
      }
      if (step + 1 < p.gamma && !dialect::planted(dialect::Planted::kKeptLatents)) load_latent(p, s, request, token);
    }
    if (!dialect::planted(dialect::Planted::kEarlyLatents)) sync_consumers();
  }
}

}  // namespace sgl_lowlatency::stages
