// The weights of a draft_sampler block: its rows of the LM head once, then its rows of markov_w2 for every step.
//
// K is walked once for p.tiles_at_once tiles of each pair: a panel of it for all of these, then the next panel (DraftWalk).
//
// The ring's stages belong to pairs of consumer warps, kPairStages each, and a pair's weights pass through its own stages in turn. Tile t of
// the block is pair t % kDraftPairs's, and so is unit u of u % kDraftPairs. Behind the LM head come the pair's units: first those that its warps keep
// in registers (draft_held_units), once. Of the others as many as the pair has stages stay in them for all steps; of more, the first stays and the
// others pass through the rest anew in every step, from L2 as far as it holds them: odd steps take them in reverse order, so that what was read last
// is read first.
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

// Units that the pair's warps keep in registers: the first ones.
SGL_DEVICE int32_t pair_held_units(const DraftSamplerParams& p, const DraftBlock& b, int32_t pair) {
  return min_int(pair_units(b, pair), abi::draft_held_units(p.batch));
}

// The unit that a pair takes as number `turn` in a step, of those that it does not hold, and where it lies. first: the number of held ones.
// count: what passed through the pair's stages in front of number 0: the LM head and the held ones.
struct DraftUnit {
  int32_t unit;  // of the block
  DraftPlace at;
  bool stays;    // it is loaded once
};
SGL_DEVICE DraftUnit draft_unit(int32_t pair, int32_t first, int32_t count, int32_t num_units, int32_t step, int32_t turn) {
  static_assert(abi::kPairStages == 2, "one stage keeps a unit, one is left for the others");
  if (num_units <= abi::kPairStages || turn == 0) return {pair + (first + turn) * abi::kDraftPairs, draft_place(pair, count + turn), true};
  const int32_t number = step % 2 == 0 ? turn : num_units - turn;
  const DraftPlace place = draft_place(pair, count + 1);
  return {pair + (first + number) * abi::kDraftPairs, {place.stage, place.fill + step * (num_units - 1) + turn - 1}, false};
}

// Asks for a pair's weights, in the order in which the pair takes them: one stage's worth for each that it gives back. There is no producer: a warp
// more would leave every thread a third of its registers less, and who gives a stage back knows that it is free.
// Panels of K: one for all of the pair's tiles of a walk, then the next one.
struct DraftFeed {
  const DraftSamplerParams& p;
  const DraftShared& s;
  const DraftBlock& b;
  int32_t pair;
  int32_t count = 0;                             // stages' worth of the LM head and of held units that were asked for
  int32_t first = 0, begin = 0, turn = 0, k = 0;  // of the LM head, the next: walk, panel and stage of K, tile of the walk, stage of the panel
  int32_t step = 0, unit = 0;                    // of the units, the next: the step, number in it

  SGL_DEVICE DraftFeed(const DraftSamplerParams& params, const DraftShared& shared, const DraftBlock& block)
      : p(params), s(shared), b(block), pair(dialect::thread_idx() / 64) {}

  // Of a pair, who asks.
  SGL_DEVICE static bool is_feeder() { return dialect::thread_idx() % 64 == 32; }

  // Fills the ring. Entry: any thread; the barriers are there.
  SGL_DEVICE void fill() {
    if (!is_feeder()) return;
SGL_NO_UNROLL
    for (int32_t i = 0; i < abi::kPairStages; ++i) ask();
  }

  // This warp has read the stage; what comes next may overwrite it. Behind the LM head: give_back_unit. Entry: all lanes.
  SGL_DEVICE void give_back(int32_t stage) {
    leave(stage);
    if (is_feeder()) ask();
  }
  SGL_DEVICE void give_back_unit(int32_t stage) {
    leave(stage);
    if (is_feeder()) ask_unit();
  }

 private:
  SGL_DEVICE void leave(int32_t stage) const {
    dialect::sync_warp();
    // Pairs with the feeder's wait on `empty`: this warp's reads of the stage are done.
    if (dialect::thread_idx() % 32 == 0) dialect::mbarrier_arrive(s.empty(stage));
  }

  // The wait on `empty` pairs with the arrivals of the pair's warps: their reads are done before the copy overwrites them. Nobody waits for the
  // feeder's warp before that has arrived itself. The announced bytes and the copy complete `full`, which the pair waits for.
  SGL_DEVICE void await_free(const DraftPlace& at) const {
    sync::wait_mbarrier(fault_sink(p, b.rank), abi::kFaultRingEmpty, 0, at.stage, s.empty(at.stage), at.parity() ^ 1u);
    dialect::mbarrier_arrive_expect_bytes(s.full(at.stage), abi::kStageBytes);
  }

  SGL_DEVICE void ask() {
    if (first + pair < b.num_tiles) {
      ask_head();
    } else {
      ask_unit();
    }
  }

  SGL_DEVICE void ask_head() {
    const int32_t stage_k = abi::stage_k(2), steps_k = ceil_div(p.hidden, stage_k), panel = ceil_div(p.k_panel, stage_k);
    const int32_t left = ceil_div(b.num_tiles - first - pair, abi::kDraftPairs), tiles = min_int(left, p.tiles_at_once);
    const DraftPlace at = draft_place(pair, count++);
    await_free(at);
    const int32_t row = (b.units.begin * 2 + first + turn * abi::kDraftPairs + pair) * abi::kTileRows;
    dialect::load_stage(s.stage(at.stage), p.ranks[b.local_rank].maps, row, 0, (begin + k) * (stage_k / abi::chunk_k(2)), s.full(at.stage));
    if (++k < min_int(panel, steps_k - begin)) return;
    k = 0;
    if (++turn < tiles) return;
    turn = 0;
    begin += panel;
    if (begin < steps_k) return;
    begin = 0;
    first += abi::kDraftPairs * p.tiles_at_once;
  }

  SGL_DEVICE void ask_unit() {
    const int32_t held = pair_held_units(p, b, pair), others = pair_units(b, pair) - held;
    DraftUnit next{pair + unit * abi::kDraftPairs, draft_place(pair, count), true};
    if (unit < held) {
      ++count;
      ++unit;
    } else {
      if (unit >= held + others || step >= p.gamma) return;
      next = draft_unit(pair, held, count, others, step, unit - held);
      if (++unit == held + others && others > abi::kPairStages) {
        unit = held + 1;  // the one that stays is there
        ++step;
      }
    }
    await_free(next.at);
    const int32_t row = (b.units.begin + next.unit) * abi::kTileRows;
    dialect::load_stage_again(s.stage(next.at.stage), p.ranks[b.local_rank].maps + 1, row, 0, 0, s.full(next.at.stage));
  }
};

}  // namespace sgl_lowlatency::stages
