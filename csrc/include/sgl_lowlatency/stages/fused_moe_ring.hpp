// The producer of a fused_moe block: its units' weights and scales into the ring and the scale slots.
#pragma once
#include "sgl_lowlatency/stages/fused_moe_state.hpp"

namespace sgl_lowlatency::stages {

// One bulk copy of a stage of FP4, and its scales where the stage is the first to need them.
SGL_DEVICE void load_fp4_stage(const FusedMoeParams& p, const MoeShared& s, MoeOp op, const MoeUnit& unit, const MoePiece& piece, int32_t stage,
                               const MoeScales& scales, const MoeCursor& at) {
  const abi::MoeGeometry& g = p.geometry;
  int64_t expert = s.job_expert()[unit.job];
  if (dialect::planted(dialect::Planted::kNextExpert) && op == abi::kMoeDown) expert = (expert + 1) % g.num_experts;
  const bool is_gate_up = op == abi::kMoeGateUp;
  const int64_t row_bytes = (is_gate_up ? g.hidden : g.intermediate) / 2;
  // Rows up | gate; part 0 is gate.
  const int64_t up_row = expert * 2 * g.intermediate + unit.tile * 16, row = piece.part == 0 ? up_row + g.intermediate : up_row;
  const uint8_t* const from = is_gate_up ? p.gate_up + (row + piece.half * 8) * row_bytes
                                         : p.down + (expert * g.hidden + unit.tile * 64 + piece.tile * 16) * row_bytes;
  const int32_t bytes = static_cast<int32_t>(row_bytes) * (is_gate_up ? 8 : 16), scale_bytes = piece.steps * 256;
  const bool has_scales = scales.is_new && (is_gate_up ? piece.half == 0 : stage == 0);
  dialect::mbarrier_arrive_expect_bytes(s.full(at.stage), bytes + (has_scales ? scale_bytes : 0));
  dialect::bulk_load(s.stage(at.stage), from, bytes, s.full(at.stage));
  if (!has_scales) return;
  const int64_t block = is_gate_up ? row / 64 : expert * (g.hidden / 64) + unit.tile;
  const uint8_t* const scale = (is_gate_up ? p.gate_up_scale : p.down_scale) + block * scale_bytes;
  dialect::bulk_load(s.scales(scales.first + (is_gate_up ? piece.part : 0), g), scale, scale_bytes, s.full(at.stage));
}

// A stage of FP8 or bf16: 16 rows, a lane each, and of FP8 the scales by the lane behind. Entry: all lanes; the stage is free.
SGL_DEVICE void load_row_stage(const FusedMoeParams& p, const MoeShared& s, MoeOp op, const MoeUnit& unit, const MoePiece& piece,
                               const MoeCursor& at) {
  const abi::MoeGeometry& g = p.geometry;
  const abi::MoeStage layout = abi::moe_stage(op);
  const int32_t lane = dialect::thread_idx() % 32, bytes = piece.steps * layout.step_bytes;
  const int32_t scale_bytes = op == abi::kMoeRouter ? 0 : piece.steps * 16;
  if (lane == 0) dialect::mbarrier_arrive_expect_bytes(s.full(at.stage), 16 * bytes + scale_bytes);
  dialect::sync_warp();
  const int64_t row_bytes = op == abi::kMoeRouter ? g.hidden * 2 : op == abi::kMoeSharedGateUp ? g.hidden : g.intermediate;
  const uint8_t* matrix = reinterpret_cast<const uint8_t*>(p.router);
  int32_t row = unit.tile / abi::moe_splits(g) * 16;
  if (op == abi::kMoeSharedGateUp) {
    matrix = p.shared_gate_up;
    row = piece.part * g.intermediate + unit.tile * 16;
  } else if (op == abi::kMoeSharedDown) {
    matrix = p.shared_down;
    row = unit.tile * 64 + piece.tile * 16;
  }
  if (lane < 16) {
    const uint8_t* const from = matrix + (row + lane) * row_bytes + piece.begin * layout.step_bytes;
    dialect::bulk_load(s.stage(at.stage) + lane * layout.pitch, from, bytes, s.full(at.stage));
  }
  if (lane == 16 && scale_bytes > 0) {
    const float* const scale = op == abi::kMoeSharedGateUp ? p.shared_gate_up_scale : p.shared_down_scale;
    const float* const from = scale + static_cast<int64_t>(row / 32) * (moe_steps_of(p, op) * 4) + piece.begin * 4;
    dialect::bulk_load(s.stage(at.stage) + 16 * layout.pitch, from, scale_bytes, s.full(at.stage));
  }
}

// All stages of the block's units of an op. Entry: all lanes of the producer warp.
// The wait on `empty` pairs with the arrivals of the consumer warps: their reads are done before the copies overwrite them; sync_warp hands that to
// the other lanes. The announced bytes and the copies complete `full`, which the consumers wait for.
SGL_DEVICE void produce_moe_op(const FusedMoeParams& p, const MoeShared& s, MoeOp op, MoeCursor& at, MoeScales& scales) {
  const int32_t lane = dialect::thread_idx() % 32;
  const abi::TileRange share = moe_share(p, s, op);
SGL_NO_UNROLL
  for (int32_t i = share.begin; i < share.begin + share.count; ++i) {
    const MoeUnit unit = moe_unit(p, op, i);
    const int32_t num_stages = moe_num_stages(p, op, unit.tile);
    scales.begin_unit(op, i == share.begin, unit.tile);
SGL_NO_UNROLL
    for (int32_t stage = 0; stage < num_stages; ++stage) {
      const MoePiece piece = moe_piece(p, op, unit.tile, stage);
      if (lane == 0) sync::wait_mbarrier(fault_sink(p), abi::kFaultRingEmpty, op, at.stage, s.empty(at.stage), at.parity ^ 1u);
      dialect::sync_warp();
      if (op != abi::kMoeGateUp && op != abi::kMoeDown) {
        load_row_stage(p, s, op, unit, piece, at);
      } else if (lane == 0) {
        load_fp4_stage(p, s, op, unit, piece, stage, scales, at);
      }
      at.advance();
    }
  }
}

// Entry: all lanes of the producer warp. It never waits for another block itself, but for its own block's routing, which does.
SGL_DEVICE void produce_moe_weights(const FusedMoeParams& p, const MoeShared& s) {
  MoeCursor at;
  MoeScales scales;
  produce_moe_op(p, s, abi::kMoeRouter, at, scales);
  produce_moe_op(p, s, abi::kMoeSharedGateUp, at, scales);
  dialect::await_previous_launch();  // the weights are nobody's; from here on it waits for what others made of the rows
  // Pairs with the router warp's arrival (route_moe): the jobs are there. Nobody writes them again in this launch.
  if (!dialect::planted(dialect::Planted::kStaleRouting)) sync::wait_mbarrier(fault_sink(p), abi::kFaultRouting, 0, 0, s.routed(), 0u);
  produce_moe_op(p, s, abi::kMoeGateUp, at, scales);
  produce_moe_op(p, s, abi::kMoeSharedDown, at, scales);
  produce_moe_op(p, s, abi::kMoeDown, at, scales);
}

}  // namespace sgl_lowlatency::stages
