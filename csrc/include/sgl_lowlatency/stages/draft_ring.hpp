// The weights of a draft_sampler block: its rows of the LM head once, then its rows of markov_w2 for every step.
//
// K is walked once for p.tiles_at_once tiles of each pair: a panel of it for all of these, then the next panel (DraftWalk).
//
// The ring's stages belong to pairs of consumer warps, kPairStages each, and a pair's weights pass through its own stages in turn. Tile t of
// the block is pair t % kDraftPairs's, and so is unit u of u % kDraftPairs. Behind the LM head come the pair's units: as many as it has stages stay
// in them for all steps; of more, the first stays and the others pass through the rest anew in every step, from L2 as far as it holds
// them: odd steps take them in reverse order, so that what was read last is read first.
#pragma once
#include "sgl_lowlatency/abi/weight_map.hpp"
#include "sgl_lowlatency/stages/draft_state.hpp"

namespace sgl_lowlatency::stages {

// Where a stage's worth of weights lies: the stage, and how often that was filled before.
struct DraftPlace {
  int32_t stage;
  int32_t fill;
  SGL_DEVICE uint32_t parity() const { return static_cast<uint32_t>(fill & 1); }
};

SGL_DEVICE int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

// Number `count` of what passes through the stages of `pair`.
SGL_DEVICE DraftPlace draft_place(int32_t pair, int32_t count) {
  return {count % abi::kPairStages * abi::kDraftPairs + pair, count / abi::kPairStages};
}

// Stages of the LM head that pass through the stages of `pair`, and units that it has.
SGL_DEVICE int32_t pair_head_stages(const DraftSamplerParams& p, const DraftBlock& b, int32_t pair) {
  return b.num_tiles > pair ? ceil_div(b.num_tiles - pair, abi::kDraftPairs) * ceil_div(p.hidden, abi::stage_k(2)) : 0;
}
SGL_DEVICE int32_t pair_units(const DraftBlock& b, int32_t pair) {
  return b.units.count > pair ? ceil_div(b.units.count - pair, abi::kDraftPairs) : 0;
}

// A walk through K: the tiles of the block that it is for, `at_once` of each pair, and the numbers of their stages.
struct DraftWalk {
  int32_t first;    // pair p's first tile is first + p
  int32_t at_once;
  int32_t stages_k;  // of a tile

  // Tiles of a pair, of num_tiles of the block.
  SGL_DEVICE int32_t tiles(int32_t num_tiles, int32_t pair) const {
    const int32_t left = num_tiles - first - pair;
    return left <= 0 ? 0 : min_int(ceil_div(left, abi::kDraftPairs), at_once);
  }
  // What passed through the pair's stages in front of tile `turn` of a panel that begins with stage `panel_begin` of K and has panel_stages. `of`:
  // the pair's tiles.
  SGL_DEVICE int32_t count(int32_t of, int32_t panel_begin, int32_t panel_stages, int32_t turn) const {
    return first / abi::kDraftPairs * stages_k + panel_begin * of + turn * panel_stages;
  }
};

// The unit that a pair takes as number `turn` of its num_units in a step, and where it lies.
struct DraftUnit {
  int32_t unit;  // of the block
  DraftPlace at;
  bool stays;    // it is loaded once
};
SGL_DEVICE DraftUnit draft_unit(int32_t pair, int32_t head_stages, int32_t num_units, int32_t step, int32_t turn) {
  static_assert(abi::kPairStages == 2, "one stage keeps a unit, one is left for the others");
  if (num_units <= abi::kPairStages || turn == 0) return {pair + turn * abi::kDraftPairs, draft_place(pair, head_stages + turn), true};
  const int32_t number = step % 2 == 0 ? turn : num_units - turn;
  const DraftPlace first = draft_place(pair, head_stages + 1);
  return {pair + number * abi::kDraftPairs, {first.stage, first.fill + step * (num_units - 1) + turn - 1}, false};
}

// Entry: all lanes of the producer warp; one of them does the work. It never waits for another block.
// The wait on `empty` pairs with the arrivals of the pair's warps: their reads are done before the copy overwrites them. The announced bytes and
// the copy complete `full`, which the pair waits for.
SGL_DEVICE void produce_draft_weights(const DraftSamplerParams& p, const DraftShared& s, int32_t lane) {
  if (lane != 0) return;
  const DraftBlock b = draft_block(p);
  const sync::FaultSink sink = fault_sink(p, b.rank);
  const abi::WeightMap* const head = p.ranks[b.local_rank].maps;
  const int32_t stage_k = abi::stage_k(2), steps_k = ceil_div(p.hidden, stage_k);
  const auto await_free = [&](const DraftPlace& at) {
    sync::wait_mbarrier(sink, abi::kFaultRingEmpty, 0, at.stage, s.empty(at.stage), at.parity() ^ 1u);
    dialect::mbarrier_arrive_expect_bytes(s.full(at.stage), abi::kStageBytes);
  };
  const int32_t panel = ceil_div(p.k_panel, stage_k);
  for (DraftWalk walk{0, p.tiles_at_once, steps_k}; walk.first < b.num_tiles; walk.first += abi::kDraftPairs * walk.at_once) {
    for (int32_t begin = 0; begin < steps_k; begin += panel) {
      const int32_t stages = min_int(panel, steps_k - begin);
      for (int32_t i = 0; i < walk.at_once * stages; ++i) {
        const int32_t turn = i / stages, k = begin + i % stages;
        for (int32_t pair = 0; pair < abi::kDraftPairs; ++pair) {
          const int32_t tiles = walk.tiles(b.num_tiles, pair);
          if (turn >= tiles) continue;
          const DraftPlace at = draft_place(pair, walk.count(tiles, begin, stages, turn) + i % stages);
          await_free(at);
          const int32_t row = (b.units.begin * 2 + walk.first + turn * abi::kDraftPairs + pair) * abi::kTileRows;
          dialect::load_stage(s.stage(at.stage), head, row, 0, k * (stage_k / abi::chunk_k(2)), s.full(at.stage));
        }
      }
    }
  }
  const int32_t most_turns = pair_units(b, 0);
  for (int32_t step = 0; step < p.gamma; ++step) {
    for (int32_t turn = 0; turn < most_turns; ++turn) {
      for (int32_t pair = 0; pair < abi::kDraftPairs; ++pair) {
        const int32_t num_units = pair_units(b, pair);
        if (turn >= num_units) continue;
        const DraftUnit unit = draft_unit(pair, pair_head_stages(p, b, pair), num_units, step, turn);
        if (unit.stays && step > 0) continue;
        await_free(unit.at);
        dialect::load_stage_again(s.stage(unit.at.stage), head + 1, (b.units.begin + unit.unit) * abi::kTileRows, 0, 0, s.full(unit.at.stage));
      }
    }
  }
}

}  // namespace sgl_lowlatency::stages
