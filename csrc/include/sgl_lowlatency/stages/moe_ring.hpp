// The weight ring of MoE layers: what is decided statically streams ahead as ever; an expert's weights wait until the block has routed.
#pragma once
#include "sgl_lowlatency/stages/moe_routing.hpp"
#include "sgl_lowlatency/stages/weight_ring.hpp"

namespace sgl_lowlatency::stages {

// The producer's one thread, stage after stage. A stage is one copy.
// In flight are as many as produce_weights has, for its reasons, and waits and bytes pair with the same. (It keeps code of its own:
// written with this, dense instances took more registers.)
struct StageFiller {
  const DecodeStepParams& p;
  const Shared& s;
  const int32_t max_in_flight, max_ahead;
  RingCursor cursor, landing;  // the next stage to fill; the oldest one whose bytes are still under way
  int32_t in_flight = 0;
  int32_t num_ahead = 0;  // stages that are still to be asked for kMaxStagesInFlightAhead at a time

  SGL_DEVICE StageFiller(const DecodeStepParams& params, const Shared& shared)
      : p(params), s(shared), max_in_flight(min_int(abi::kMaxStagesInFlight, p.num_stages)),
        max_ahead(min_int(abi::kMaxStagesInFlightAhead, p.num_stages)) {}

  SGL_DEVICE void begin_operation(int32_t ahead) { num_ahead = ahead; }

  // row, part, chunk: as load_stage takes them. layer: for the fault record.
  SGL_DEVICE void fill(int32_t layer, const abi::WeightMap* map, int32_t row, int32_t part, int32_t chunk) {
    const sync::FaultSink sink = fault_sink(p);
    for (const int32_t limit = num_ahead > 0 ? max_ahead : max_in_flight; in_flight >= limit; --in_flight) {
      sync::wait_mbarrier(sink, abi::kFaultRingFull, layer, landing.stage, s.full(landing.stage), landing.parity);
      landing.advance(p.num_stages);
    }
    ++in_flight;
    --num_ahead;
    sync::wait_mbarrier(sink, abi::kFaultRingEmpty, layer, cursor.stage, s.empty(cursor.stage), cursor.parity ^ 1u);
    uint64_t* const full = s.full(cursor.stage);
    dialect::mbarrier_arrive_expect_bytes(full, abi::kStageBytes);
    dialect::load_stage(s.stage(cursor.stage), map, row, part, chunk, full);
    cursor.advance(p.num_stages);
  }

  // The block's own tiles of operation `op`, whose weights have kElementBytes, in the order of run_tiles: for panel, for tile, for stage.
  template <int32_t kElementBytes>
  SGL_DEVICE void fill_tiles(int32_t layer, int32_t op, const abi::WeightMap* map) {
    constexpr int32_t kStageK = abi::stage_k(kElementBytes), kChunkK = kStageK / abi::kStageChunks;
    const int32_t own_begin = s.rows()->tiles[op].begin, own_end = own_begin + s.rows()->tiles[op].count;
    const int32_t at_once = abi::tiles_at_once(op, p.ops[op], own_end - own_begin, p.max_tiles_multi_panel);
    const int32_t k_extent = p.ops[op].k_extent, k_panel = p.ops[op].k_panel;
    begin_operation(p.num_stages);
    for (int32_t begin = own_begin; begin < own_end; begin += at_once) {
      const int32_t end = min_int(begin + at_once, own_end);
      for (int32_t k0 = 0; k0 < k_extent; k0 += k_panel) {
        const int32_t k1 = min_int(k0 + k_panel, k_extent);
        for (int32_t tile = begin; tile < end; ++tile) {
          for (int32_t k = k0; k < k1; k += kStageK) fill(layer, map, tile * abi::kTileRows, 0, k / kChunkK);
        }
      }
    }
  }
};

// The tiles of gate_up that the block has in a layer of num_active experts, one after the other: `left` of them from tile `tile` of the expert at
// place `place` on. Over all experts, tile i is tile i % num_tiles of the expert at place i / num_tiles.
struct GateUpShare {
  int32_t place;
  int32_t tile;
  int32_t left;
  SGL_DEVICE GateUpShare(const DecodeStepParams& p, int32_t num_active) {
    const int32_t num_tiles = p.ops[abi::kOpGateUp].num_tiles;
    const abi::TileRange own = abi::even_share(num_active * num_tiles, dialect::block_idx(), dialect::grid_dim());
    place = own.begin / num_tiles;
    tile = own.begin % num_tiles;
    left = own.count;
  }
  SGL_DEVICE void advance(int32_t num_tiles) { advance_by(1, num_tiles); }
  // count <= num_tiles.
  SGL_DEVICE void advance_by(int32_t count, int32_t num_tiles) {
    left -= count;
    tile += count;
    if (tile >= num_tiles) {
      tile -= num_tiles;
      ++place;
    }
  }
};

// Whether a row of the step is no padding: then every layer has active experts, else none has. Entry: behind the block's first barrier.
SGL_DEVICE bool has_live_row(const DecodeStepParams& p, const Shared& s) {
  for (int32_t row = 0; row < p.rows; ++row) {
    if (s.rows()->row[row].slot != abi::kPaddingSlot) return true;
  }
  return false;
}

// Entry: all lanes of the producer warp; one of them does the work. kElementBytes: of the layers' weights, but of the router's, which is bf16 as the LM
// head is.
// It waits for its own block's consumers, which by then need no stage beyond those that are filled: of the router, and of what comes before.
template <int32_t kElementBytes>
SGL_DEVICE void produce_moe_weights(const DecodeStepParams& p, const Shared& s, int32_t lane) {
  if (lane != 0) return;
  constexpr int32_t kStageK = abi::stage_k(kElementBytes), kChunkK = kStageK / abi::kStageChunks;
  StageFiller ring(p, s);
  const MoeWork work = moe_work(p, s);
  const bool has_experts = has_live_row(p, s);
  const abi::WeightMap* map = p.maps;
  const abi::OpPlan& gate_up = p.ops[abi::kOpGateUp];
  const abi::OpPlan& down = p.ops[abi::kOpDown];
  for (int32_t layer = 0; layer < p.geometry.num_layers; ++layer, map += abi::kNumMoeMaps) {
    const abi::WeightMap *const gate_up_map = map + 3, *const down_map = map + 4;
    ring.fill_tiles<kElementBytes>(layer, abi::kOpQkv, map);
    ring.fill_tiles<kElementBytes>(layer, abi::kOpOutProj, map + 1);
    ring.fill_tiles<2>(layer, abi::kOpRouter, map + 2);
    dialect::prefetch_map(gate_up_map);
    dialect::prefetch_map(down_map);
    if (has_experts && !dialect::planted(dialect::Planted::kStaleRouting)) {
      sync::wait_mbarrier(fault_sink(p), abi::kFaultRouting, layer, 0, s.routed(), static_cast<uint32_t>(layer) & 1u);
    }
    const int32_t num_active = has_experts ? work.num_active() : 0;
    const abi::TileRange columns = s.rows()->tiles[abi::kOpDown];
    ring.begin_operation(kElementBytes == 2 ? 0 : p.num_stages);  // faster so in bf16, slower in FP8: DESIGN-moe.md, Measured
    for (GateUpShare own(p, num_active); own.left > 0; own.advance(gate_up.num_tiles)) {
      const int32_t expert = work.expert(own.place), row = own.tile * (abi::kTileRows / 2);
      for (int32_t k = 0; k < gate_up.k_extent; k += kStageK) ring.fill(layer, gate_up_map, row, 2 * expert, k / kChunkK);
    }
    ring.begin_operation(p.num_stages);
    for (int32_t tile = columns.begin; tile < columns.begin + columns.count; ++tile) {
      for (int32_t place = 0; place < num_active; ++place) {
        const int32_t behind = dialect::planted(dialect::Planted::kNextExpert) ? 1 : 0, expert = (work.expert(place) + behind) % p.geometry.num_experts;
        const int32_t row = expert * p.geometry.hidden + tile * abi::kTileRows;
        for (int32_t k = 0; k < down.k_extent; k += kStageK) ring.fill(layer, down_map, row, 0, k / kChunkK);
      }
    }
  }
  if (p.logits != nullptr) ring.fill_tiles<2>(p.geometry.num_layers, abi::kOpHead, map);
}

}  // namespace sgl_lowlatency::stages
