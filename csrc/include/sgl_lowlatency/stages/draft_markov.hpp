// A draft's steps behind its base logits: the bias by the token before, the step's logits, and the block's candidate for each request.
//
// Of a launch up to 8 requests the warps of a pair hold their columns of the pair's first units in registers: a step reads the latents and nothing
// else from shared memory, whose 128 bytes a clock would take 1,024 clocks for markov_w2. The other units come out of the ring.
#pragma once
#include "sgl_lowlatency/stages/draft_base_logits.hpp"
#include "sgl_lowlatency/stages/draft_choice.hpp"

namespace sgl_lowlatency::stages {

constexpr int32_t kMarkovK16 = abi::kMarkovRank / 16;     // MMAs of a unit's columns
constexpr int32_t kLatentPieces = abi::kMarkovRank / 32;  // of 16 bytes, that a lane has of a request's latents: B of two MMAs

// A line of a row of markov_w1 a lane, on its way into L2. Entry: all lanes of one warp.
SGL_DEVICE void prefetch_latent(const DraftSamplerParams& p, int64_t token) {
  constexpr int32_t kLineElements = 64;
  const int32_t lane = dialect::thread_idx() % 32;
  if (lane < abi::kMarkovRank / kLineElements) dialect::prefetch_l2(p.markov_w1 + token * abi::kMarkovRank + lane * kLineElements);
}

// The row of markov_w1 that the request's next step multiplies: 16 bytes a lane, stored in the order in which lanes take them as B: piece j of quad
// lane q has elements 32 j + 2 q, + 8, + 16, + 24 and their right neighbours. Entry: all lanes of one warp. A consumer barrier must follow.
SGL_DEVICE void load_latent(const DraftSamplerParams& p, const DraftShared& s, int32_t request, int32_t token) {
  static_assert(abi::kMarkovRank * 2 == 32 * 16, "a warp has a row");
  const int32_t lane = dialect::thread_idx() % 32;
  const Vec16 row = dialect::load_constant(reinterpret_cast<const Vec16*>(p.markov_w1 + static_cast<int64_t>(token) * abi::kMarkovRank) + lane);
  uint32_t* const to = reinterpret_cast<uint32_t*>(s.latents() + request * abi::kLatentPitch + lane / 4 * 64) + lane % 4;
SGL_UNROLL
  for (int32_t q = 0; q < 4; ++q) to[q * 4] = row.w[q];
}

// Latents of every request's anchor. An anchor outside the vocabulary ends the launch: it would read foreign memory. Entry: all consumer threads. A
// consumer barrier must follow.
SGL_DEVICE void load_anchors(const DraftSamplerParams& p, const DraftShared& s, const DraftBlock& b) {
SGL_NO_UNROLL
  for (int32_t request = dialect::thread_idx() / 32; request < p.batch; request += abi::kNumConsumerWarps) {
    const int64_t anchor = dialect::load_constant(p.anchor_tokens + request * p.anchor_stride);
    if (anchor < 0 || anchor >= p.vocab) {
      sync::raise_fault(p.fault, b.rank, abi::kFaultBadTokenId, 0, request, static_cast<uint32_t>(p.vocab), static_cast<uint32_t>(anchor),
                        static_cast<uint64_t>(anchor));
    }
    load_latent(p, s, request, static_cast<int32_t>(anchor));
  }
}

// A unit's stage has two neighbouring columns of the vocabulary in each of its 16 rows: its first chunks the even ones, its last chunks the odd
// ones. Each warp of a pair takes one kind: a lane has elements (t, i) of requests draft_request, in columns draft_column and, of i / 2 = 1, 16
// further.
SGL_DEVICE int32_t draft_request(int32_t t, int32_t i) { return t * 8 + dialect::thread_idx() % 4 * 2 + i % 2; }
SGL_DEVICE int32_t draft_column() { return dialect::thread_idx() % 32 / 4 * 2 + dialect::thread_idx() / 32 % 2; }

// A of MMA `k16` of the warp's columns of a unit, from its stage. Entry: all lanes; the stage is full.
SGL_DEVICE void load_columns(uint32_t (&a)[4], const char* stage, int32_t k16) {
  constexpr int32_t kChunkK16 = abi::chunk_k(2) / 16;
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
  const char* const chunk = stage + abi::stage_offset(warp % 2 * (abi::kStageChunks / 2) + k16 / kChunkK16, 0, 0);
  dialect::ldmatrix_x4(a, chunk + (abi::stage_offset(0, lane % 16, lane / 16) ^ k16 % kChunkK16 * 32));
}

SGL_DEVICE void round_bf16(float (&values)[2]) {
  const uint32_t rounded = pack_bf16(values[0], values[1]);
  values[0] = low_float(rounded);
  values[1] = high_float(rounded);
}

// What a unit's columns of a step weigh beside the bias: base logits and noise of the lane's elements. Asked for long before they are needed.
template <int32_t kBatchTiles>
struct DraftElements {
  bf16 base[kBatchTiles][4];
  float noise[kBatchTiles][4];
};
// The sums of a unit's columns: even and odd MMAs apart, so that consecutive ones do not depend on each other.
template <int32_t kBatchTiles>
struct MarkovSums {
  float c[kBatchTiles][2][4] = {};
};

// The steps of a block, as a thread has them. kBatchTiles: of 8 requests, enough for all.
template <int32_t kBatchTiles>
struct DraftSteps {
  static constexpr int32_t kHeld = kBatchTiles == 1 ? 2 : 0;  // abi::draft_held_units
  static constexpr int32_t kSlots = kHeld > 0 ? kHeld : 1;    // no array is empty

  const DraftSamplerParams& p;
  const DraftShared& s;
  const DraftBlock& b;
  DraftFeed& feed;
  int32_t lane_token, end_token;  // of the lane's first element of unit 0; behind the rank's last one
  int32_t lane_at;                // in base_logits and noise, of that element in step 0
  int32_t lane_requests;          // from the lane's first one on
  float temperatures[kBatchTiles][2];
  uint32_t held[kSlots][kMarkovK16][4];
  DraftElements<kBatchTiles> elements[kSlots];  // of the next step's held units, or of its first other one
  float values[kSlots][kBatchTiles][4];         // of the step's held units
  Candidate best[kBatchTiles][2];

  SGL_DEVICE DraftSteps(const DraftSamplerParams& params, const DraftShared& shared, const DraftBlock& block, DraftFeed& of)
      : p(params), s(shared), b(block), feed(of) {
    const abi::DraftRank& own = p.ranks[b.local_rank];
    lane_token = own.vocab_begin + b.units.begin * abi::kUnitColumns + draft_column();
    lane_requests = p.batch - draft_request(0, 0);
    end_token = own.vocab_begin + own.vocab_count;
    lane_at = draft_request(0, 0) * p.gamma * pitch() + b.units.begin * abi::kUnitColumns + draft_column();
SGL_UNROLL
    for (int32_t t = 0; t < kBatchTiles; ++t) {
SGL_UNROLL
      for (int32_t i = 0; i < 2; ++i) temperatures[t][i] = draft_request(t, i) < p.batch ? draft_temperature(p, draft_request(t, i)) : 0.0f;
    }
  }

  // Of a row of base_logits and noise.
  SGL_DEVICE int32_t pitch() const { return p.ranks[b.local_rank].num_units * abi::kUnitColumns; }
  // Columns between the lane's elements i and 0.
  SGL_DEVICE static constexpr int32_t further(int32_t i) { return i / 2 * 16; }
  SGL_DEVICE int32_t pair() const { return dialect::thread_idx() / 64; }
  SGL_DEVICE int32_t num_held() const { return kHeld > 0 ? pair_held_units(p, b, pair()) : 0; }
  SGL_DEVICE DraftUnit other_unit(int32_t step, int32_t turn) const {
    const int32_t first = num_held(), count = pair_head_stages(p, b, pair()) + first;
    return draft_unit(pair(), first, count, pair_units(b, pair()) - first, step, turn);
  }

  SGL_DEVICE DraftElements<kBatchTiles> load_elements(int32_t step, int32_t unit) const {
    const abi::DraftRank& own = p.ranks[b.local_rank];
    const int32_t first = lane_at + step * pitch() + unit * abi::kUnitColumns;
    DraftElements<kBatchTiles> loaded;
SGL_UNROLL
    for (int32_t t = 0; t < kBatchTiles; ++t) {
SGL_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        loaded.base[t][i] = bf16{0};
        loaded.noise[t][i] = 0.0f;
        if (is_empty(t, i)) continue;
        const int32_t at = first + (t * 8 + i % 2) * p.gamma * pitch() + further(i);
        if (is_mine(t, i)) loaded.base[t][i] = dialect::load_plain(own.base_logits + at);
        if (temperatures[t][i % 2] != 0.0f) loaded.noise[t][i] = dialect::load_plain(own.noise + at);
      }
    }
    return loaded;
  }
  // Those that a step begins with.
  SGL_DEVICE void load_first_elements(int32_t step) {
SGL_UNROLL
    for (int32_t u = 0; u < kHeld; ++u) {
      if (u < num_held()) elements[u] = load_elements(step, pair() + u * abi::kDraftPairs);
    }
    if (kHeld == 0 && pair_units(b, pair()) > 0) elements[0] = load_elements(step, other_unit(step, 0).unit);
  }

  // Keeps the pair's first units. Entry: all consumer threads.
  SGL_DEVICE void hold_units() {
    const sync::FaultSink sink = fault_sink(p, b.rank);
SGL_UNROLL
    for (int32_t u = 0; u < kHeld; ++u) {
      if (u >= num_held()) {
SGL_UNROLL
        for (int32_t k16 = 0; k16 < kMarkovK16; ++k16) held[u][k16][0] = held[u][k16][1] = held[u][k16][2] = held[u][k16][3] = 0u;
        continue;
      }
      const DraftPlace at = draft_place(pair(), pair_head_stages(p, b, pair()) + u);
      sync::wait_mbarrier(sink, abi::kFaultRingFull, 0, at.stage, s.full(at.stage), at.parity());
SGL_UNROLL
      for (int32_t k16 = 0; k16 < kMarkovK16; ++k16) load_columns(held[u][k16], s.stage(at.stage), k16);
    }
SGL_NO_UNROLL
    for (int32_t u = 0; u < num_held(); ++u) feed.give_back_unit(draft_place(pair(), pair_head_stages(p, b, pair()) + u).stage);
  }

  // B of MMAs 2 piece and 2 piece + 1, of the requests of N tile t.
  SGL_DEVICE Vec16 latents(int32_t t, int32_t piece) const {
    const int32_t lane = dialect::thread_idx() % 32, request = t * 8 + lane / 4;
    if (request >= p.batch) return Vec16{};
    return *reinterpret_cast<const Vec16*>(s.latents() + request * abi::kLatentPitch + (piece * 4 + lane % 4) * 16);
  }

  // Of every lane: none has a request for elements (t, i). is_mine: this lane has one.
  SGL_DEVICE bool is_empty(int32_t t, int32_t i) const { return t * 8 + i % 2 >= p.batch; }
  SGL_DEVICE bool is_mine(int32_t t, int32_t i) const { return t * 8 + i % 2 < lane_requests; }

  // The lane's elements of a unit: their values into `kept`, the best of them into `best`.
  template <bool kSamples>
  SGL_DEVICE void weigh(int32_t unit, const MarkovSums<kBatchTiles>& sums, const DraftElements<kBatchTiles>& of, float (&kept)[kBatchTiles][4]) {
    const bool is_dropped = dialect::planted(dialect::Planted::kDroppedUnit) && b.block == 0 && unit + 1 == b.units.count;
    const bool is_rounded = p.rounds_bias != 0 && !dialect::planted(dialect::Planted::kUnroundedBias);
    const bool is_bf16 = p.step_logits_type == abi::kStepLogitsBf16;
SGL_UNROLL
    for (int32_t t = 0; t < kBatchTiles; ++t) {
SGL_UNROLL
      for (int32_t r = 0; r < 2; ++r) {
        if (is_empty(t, r)) continue;
        float value[2], key[2];
SGL_UNROLL
        for (int32_t h = 0; h < 2; ++h) value[h] = sums.c[t][0][r + 2 * h] + sums.c[t][1][r + 2 * h];
        if (is_rounded) round_bf16(value);
SGL_UNROLL
        for (int32_t h = 0; h < 2; ++h) value[h] = dialect::add_rounded(dialect::to_float(of.base[t][r + 2 * h]), value[h]);
        if (is_bf16) round_bf16(value);
SGL_UNROLL
        for (int32_t h = 0; h < 2; ++h) {
          kept[t][r + 2 * h] = key[h] = value[h];
          if (kSamples && temperatures[t][r] != 0.0f) key[h] = sampled_key(value[h], temperatures[t][r], of.noise[t][r + 2 * h]);
          const int32_t token = lane_token + unit * abi::kUnitColumns + further(2 * h);
          const uint32_t order = ordered_key(key[h]);
          const bool is_column = is_mine(t, r) && token < end_token && !is_dropped;
          best[t][r] = better(best[t][r], {is_column ? order : 0u, static_cast<uint32_t>(token)});
        }
      }
    }
  }

  // Step logits of a unit, of requests that sample, to all ranks. Rank by rank: a lane's elements lie at fixed distances.
  SGL_DEVICE void store_logits(int32_t step, int32_t unit, const float (&kept)[kBatchTiles][4]) const {
    const int32_t token = lane_token + unit * abi::kUnitColumns;
    const int64_t first = static_cast<int64_t>(draft_request(0, 0) * p.gamma + step) * p.vocab + token;
    const int64_t request_pitch = static_cast<int64_t>(p.gamma) * p.vocab;
SGL_NO_UNROLL
    for (int32_t rank = 0; rank < p.num_ranks; ++rank) {
      void* const logits = p.peers[rank].step_logits;
SGL_UNROLL
      for (int32_t t = 0; t < kBatchTiles; ++t) {
SGL_UNROLL
        for (int32_t i = 0; i < 4; ++i) {
          if (temperatures[t][i % 2] == 0.0f || token + further(i) >= end_token) continue;
          const int64_t at = first + (t * 8 + i % 2) * request_pitch + further(i);
          if (p.step_logits_type == abi::kStepLogitsBf16) {
            dialect::store_plain(static_cast<bf16*>(logits) + at, dialect::to_bf16(kept[t][i]));
          } else {
            dialect::store_plain(static_cast<float*>(logits) + at, kept[t][i]);
          }
        }
      }
    }
  }
  SGL_DEVICE void store_held_logits(int32_t step) const {
    if (p.greedy != 0) return;
SGL_UNROLL
    for (int32_t u = 0; u < kHeld; ++u) {
      if (u < num_held()) store_logits(step, pair() + u * abi::kDraftPairs, values[u]);
    }
  }

  // The held units of a step: all of them at once, so that more sums are on their way.
  template <bool kSamples>
  SGL_DEVICE void choose_held() {
    if (num_held() == 0) return;
    MarkovSums<kBatchTiles> sums[kSlots];
SGL_UNROLL
    for (int32_t piece = 0; piece < kLatentPieces; ++piece) {
SGL_UNROLL
      for (int32_t t = 0; t < kBatchTiles; ++t) {
        const Vec16 latent = latents(t, piece);
        const uint32_t b0[2] = {latent.w[0], latent.w[1]}, b1[2] = {latent.w[2], latent.w[3]};
SGL_UNROLL
        for (int32_t u = 0; u < kHeld; ++u) dialect::mma_m16n8k16(sums[u].c[t][0], held[u][piece * 2], b0);
SGL_UNROLL
        for (int32_t u = 0; u < kHeld; ++u) dialect::mma_m16n8k16(sums[u].c[t][1], held[u][piece * 2 + 1], b1);
      }
    }
SGL_UNROLL
    for (int32_t u = 0; u < kHeld; ++u) {
      if (u < num_held()) weigh<kSamples>(pair() + u * abi::kDraftPairs, sums[u], elements[u], values[u]);
    }
  }

  // The other units of a step.
  template <bool kSamples>
  SGL_DEVICE void choose_others(int32_t step) {
    const sync::FaultSink sink = fault_sink(p, b.rank);
    const int32_t num_units = pair_units(b, pair()) - num_held();
    if (num_units == 0) return;
    DraftElements<kBatchTiles> next = kHeld > 0 ? load_elements(step, other_unit(step, 0).unit) : elements[0];
SGL_NO_UNROLL
    for (int32_t turn = 0; turn < num_units; ++turn) {
      const DraftUnit unit = other_unit(step, turn);
      const DraftElements<kBatchTiles> now = next;
      if (turn + 1 < num_units) next = load_elements(step, other_unit(step, turn + 1).unit);
      sync::wait_mbarrier(sink, abi::kFaultRingFull, step, unit.at.stage, s.full(unit.at.stage), unit.at.parity());
      MarkovSums<kBatchTiles> sums;
SGL_UNROLL
      for (int32_t piece = 0; piece < kLatentPieces; ++piece) {
        uint32_t a0[4], a1[4];
        load_columns(a0, s.stage(unit.at.stage), piece * 2);
        load_columns(a1, s.stage(unit.at.stage), piece * 2 + 1);
SGL_UNROLL
        for (int32_t t = 0; t < kBatchTiles; ++t) {
          const Vec16 latent = latents(t, piece);
          const uint32_t b0[2] = {latent.w[0], latent.w[1]}, b1[2] = {latent.w[2], latent.w[3]};
          dialect::mma_m16n8k16(sums.c[t][0], a0, b0);
          dialect::mma_m16n8k16(sums.c[t][1], a1, b1);
        }
      }
      if (!unit.stays) feed.give_back_unit(unit.at.stage);
      float kept[kBatchTiles][4];
      weigh<kSamples>(unit.unit, sums, now, kept);
      if (kSamples) store_logits(step, unit.unit, kept);
    }
  }

  // The best column of each request, of each warp: DraftBlockState::best. Entry: all consumer threads; noise and latents are there. A consumer
  // barrier must follow.
  SGL_DEVICE void choose(int32_t step) {
    const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
SGL_UNROLL
    for (int32_t t = 0; t < kBatchTiles; ++t) best[t][0] = best[t][1] = Candidate{0u, 0u};
    if (p.greedy != 0) {
      if (kHeld > 0) choose_held<false>();
      choose_others<false>(step);
    } else {
      if (kHeld > 0) choose_held<true>();
      choose_others<true>(step);
    }
    if (p.batch == 1) {
      const Candidate own = best_of_warp(lane % 4 == 0 ? best[0][0] : Candidate{0u, 0u});
      if (lane == 0) s.block()->best[0][warp] = own;
      return;
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
};

// All steps. Entry: all consumer threads, behind the LM head.
template <int32_t kBatchTiles, class Clock>
SGL_DEVICE void run_draft_steps(const DraftSamplerParams& p, const DraftShared& s, const DraftBlock& b, DraftFeed& feed, const DraftMail& mail,
                                const Clock& clock) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
  if (!abi::has_early_latents(p.batch)) {
    load_anchors(p, s, b);
    sync_consumers();
  }
  DraftSteps<kBatchTiles> steps(p, s, b, feed);
  steps.load_first_elements(0);
  steps.hold_units();
SGL_NO_UNROLL
  for (int32_t step = 0; step < p.gamma; ++step) {
    const bool is_last = step + 1 == p.gamma;
    if (is_last) dialect::allow_next_launch();  // all blocks have been running for long; it waits for the end by itself
    steps.choose(step);
    if (is_last) steps.store_held_logits(step);  // in front of the fence that the last candidates have
    clock.stamp_step(step, abi::kDraftChosen);
    sync_consumers();
SGL_NO_UNROLL
    for (int32_t request = warp; request < p.batch; request += abi::kNumConsumerWarps) {
      const Candidate own = best_of_warp(s.block()->best[request][lane % abi::kNumConsumerWarps]);
      mail.send(step, request, own);
      if (!is_last) prefetch_latent(p, own.id);  // what the next step reads if this candidate wins
    }
    clock.stamp_step(step, abi::kDraftSent);
    if (!is_last) {  // while the candidates are on their way
      steps.store_held_logits(step);
      steps.load_first_elements(step + 1);
    }
    if (is_last && b.block != 0) break;
SGL_NO_UNROLL
    for (int32_t request = warp; request < p.batch; request += abi::kNumConsumerWarps) {
      const int32_t token = mail.receive(step, request);
      if (lane == 0 && b.block == 0) {
        dialect::store_plain(p.ranks[b.local_rank].draft_tokens + request * p.gamma + step, static_cast<int64_t>(token));
      }
      if (is_last) {
        order_ranks(p);
      } else if (!dialect::planted(dialect::Planted::kKeptLatents)) {
        load_latent(p, s, request, token);
      }
    }
    clock.stamp_step(step, abi::kDraftToken);
    if (!dialect::planted(dialect::Planted::kEarlyLatents)) sync_consumers();
    clock.stamp_step(step, abi::kDraftStep);
  }
}

}  // namespace sgl_lowlatency::stages
