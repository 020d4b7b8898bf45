// The weight ring of MoE layers: what is decided statically streams ahead as ever; an expert's weights wait until the block has routed.
#pragma once
#include "sgl_lowlatency/stages/moe_routing.hpp"
#include "sgl_lowlatency/stages/weight_ring.hpp"

namespace sgl_lowlatency::stages {

// Tiles of gate_up that block `block` has in a layer of num_active experts: tile i is tile i % num_tiles of the expert at place i / num_tiles.
SGL_DEVICE abi::TileRange gate_up_share(const DecodeStepParams& p, int32_t num_active) {
  return abi::even_share(num_active * p.ops[abi::kOpGateUp].num_tiles, dialect::block_idx(), dialect::grid_dim());
}

// Entry: all lanes of the producer warp; one of them does the work. bf16.
// It waits for its own block's consumers, which by then need no stage beyond those that are filled: of the router, and of what comes before.
SGL_DEVICE void produce_moe_weights(const DecodeStepParams& p, const Shared& s, int32_t lane) {
  if (lane != 0) return;
  constexpr int32_t kStageK = abi::stage_k(2), kChunkK = kStageK / abi::kStageChunks;
  StageFiller ring(p, s);
  const MoeWork work = moe_work(p, s);
  const abi::WeightMap* map = p.maps;
  const abi::OpPlan& gate_up = p.ops[abi::kOpGateUp];
  const abi::OpPlan& down = p.ops[abi::kOpDown];
  for (int32_t layer = 0; layer < p.geometry.num_layers; ++layer, map += abi::kNumMoeMaps) {
    const abi::WeightMap *const gate_up_map = map + 3, *const down_map = map + 4;
    ring.fill_tiles<2>(layer, abi::kOpQkv, map);
    ring.fill_tiles<2>(layer, abi::kOpOutProj, map + 1);
    ring.fill_tiles<2>(layer, abi::kOpRouter, map + 2);
    dialect::prefetch_map(gate_up_map);
    dialect::prefetch_map(down_map);
    if (!dialect::planted(dialect::Planted::kStaleRouting)) {
      sync::wait_mbarrier(fault_sink(p), abi::kFaultRouting, layer, 0, s.routed(), static_cast<uint32_t>(layer) & 1u);
    }
    const int32_t num_active = work.num_active();
    const abi::TileRange own = gate_up_share(p, num_active), columns = s.rows()->tiles[abi::kOpDown];
    ring.begin_operation();
    for (int32_t i = own.begin; i < own.begin + own.count; ++i) {
      const int32_t expert = work.expert(i / gate_up.num_tiles), row = i % gate_up.num_tiles * (abi::kTileRows / 2);
      for (int32_t k = 0; k < gate_up.k_extent; k += kStageK) ring.fill(layer, gate_up_map, row, 2 * expert, k / kChunkK);
    }
    ring.begin_operation();
    for (int32_t tile = columns.begin; tile < columns.begin + columns.count; ++tile) {
      for (int32_t place = 0; place < num_active; ++place) {
        const int32_t row = work.expert(place) * p.geometry.hidden + tile * abi::kTileRows;
        for (int32_t k = 0; k < down.k_extent; k += kStageK) ring.fill(layer, down_map, row, 0, k / kChunkK);
      }
    }
  }
  if (p.logits != nullptr) ring.fill_tiles<2>(p.geometry.num_layers, abi::kOpHead, map);
}

}  // namespace sgl_lowlatency::stages
