// The consumers' part of a bf16 product of a slice: rows times the block's units of a matrix, K split over the eight warps.
#pragma once
#include "sgl_lowlatency/stages/draft_tile.hpp"
#include "sgl_lowlatency/stages/slice_state.hpp"

namespace sgl_lowlatency::stages {

// Columns m, m + 1 of row n of a tile that every warp has its part of, added up in the warps' order.
SGL_DEVICE Float2 slice_tile_sum(const float* scratch, int32_t rows, int32_t n, int32_t m) {
  Float2 y{0.0f, 0.0f};
SGL_UNROLL
  for (int32_t w = 0; w < abi::kNumConsumerWarps; ++w) {
    const Float2 part = *reinterpret_cast<const Float2*>(scratch + (w * rows + n) * abi::kScratchPitch + m);
    y.x += part.x;
    y.y += part.y;
  }
  return y;
}

// Units `own` of operation `op`, number i being unit_of(i). load(unit): fills the panel with the unit's columns and ends with a consumer barrier;
// called where the panel changes. finish(unit, scratch, nth): hands over the tile; called by all consumer threads, this one being number nth.
//
// All but the last unit are finished a unit late, by warps in turn, which multiply the next one first: no warp waits for a sum, and none is late more
// than once in a while. At the end of unit i a warp awaits that all have delivered i - 1, stores its part of i, finishes i - 1, and delivers i. The
// half of scratch that takes i is free then: who delivered i - 1 had finished i - 2.
// Entry: all consumer threads.
template <int32_t kNTiles, class UnitOf, class Load, class Finish>
SGL_DEVICE void run_slice_op(sync::FaultSink sink, const SliceShared& s, int32_t rows, int32_t op, const abi::TileRange& own, const UnitOf& unit_of,
                             const Load& load, const Finish& finish, SliceConsumer& state) {
  constexpr int32_t kStageK = abi::stage_k(2), kChunkK = abi::chunk_k(2);
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, pitch = abi::panel_row_bytes(s.at.panel_k);
  const int32_t finishers = min_int((rows * (abi::kTileRows / 2) + 31) / 32 * 32, kConsumerThreads);  // of a unit
  const int32_t half_floats = abi::kNumConsumerWarps * rows * abi::kScratchPitch;
  int32_t panel = kNoSlicePanel;
  // Finishes unit number i, whose parts are in half `half` of scratch, and before that stores what comes behind it.
  const auto await_and = [&](int32_t half, const auto& store, int32_t i) {
    // Pairs with the arrivals below: every warp's part of the unit, and what its finishers read of the one before.
    if (!dialect::planted(dialect::Planted::kPartialNoWait)) {
      sync::wait_mbarrier(sink, abi::kFaultPartial, op, half, s.partials(half), state.parities >> half & 1u);
    }
    state.parities ^= 1u << half;
    store();
    finish(unit_of(i), s.scratch() + half * half_floats, (dialect::thread_idx() - (i - own.begin) * finishers) & (kConsumerThreads - 1));
  };
SGL_NO_UNROLL
  for (int32_t i = own.begin; i < own.begin + own.count; ++i) {
    const SliceUnit unit = unit_of(i);
    if (unit.panel != panel) {
      sync_consumers();  // everybody has read what the panel holds
      load(unit);
      panel = unit.panel;
    }
    DraftTile<kNTiles> tile;
SGL_NO_UNROLL
    for (int32_t k = unit.k0; k < unit.k1; k += kStageK) {
      if (!dialect::planted(dialect::Planted::kRingNoWait)) {
        sync::wait_mbarrier(sink, abi::kFaultRingFull, op, state.at.stage, s.full(state.at.stage), state.at.parity);
      }
      const int32_t chunk = k + warp * kChunkK;  // its first column
      if (chunk < unit.k1) {
        const auto row_of = [&](int32_t row) {
          const bool is_row = row < rows;
          return PanelRow{is_row ? s.panel() + row * pitch + (chunk - unit.k0 + lane / 8 * 8) * 2 : s.zero_row(), is_row ? 64 : 0};
        };
        tile.multiply(s.stage(state.at.stage), warp, lane, row_of);
      }
      dialect::sync_warp();
      // Pairs with the producer's wait for `empty`: the warp has read the stage.
      if (lane == 0) dialect::mbarrier_arrive(s.empty(state.at.stage));
      state.at.advance(s.at.num_stages);
    }
    const int32_t half = state.half;
    const auto store = [&] { store_partial<kNTiles>(s.scratch() + half * half_floats + warp * rows * abi::kScratchPitch, rows, lane, tile); };
    if (i > own.begin) {
      await_and(half ^ 1, store, i - 1);
    } else {
      store();
    }
    dialect::sync_warp();
    // Pairs with the wait above: this warp's part is stored, and what it finished is read.
    if (lane == 0) dialect::mbarrier_arrive(s.partials(half));
    state.half ^= 1;
  }
  if (own.count > 0) await_and(state.half ^ 1, [] {}, own.begin + own.count - 1);
}

}  // namespace sgl_lowlatency::stages
