// The producer of a fused_moe block: its units' weights and scales into the ring and the scale slots.
#pragma once
#include "sgl_lowlatency/stages/fused_moe_state.hpp"

namespace sgl_lowlatency::stages {

// What a lane of the producer copies of each stage of a part: weights, or lane kMoeScaleLane scales. Addresses are made once a part, since the warp has
// a stage's time for all it does in a stage.
constexpr int32_t kMoeScaleLane = 16;
struct MoeCopy {
  const uint8_t* from;
  char* slot;          // of FP4 scales, or null: behind `to` of the stage
  int32_t to;
  int32_t bytes;       // of FP4 a run's, of the others a step's; 0: none
  int32_t next;        // from run to run
};

// Of FP4 a lane has one of p.num_copies pieces of a stage's rows; scales come with a part's first run, where they are new.
SGL_DEVICE MoeCopy moe_fp4_copy(const FusedMoeParams& p, const MoeShared& s, int32_t op, const MoeUnits& unit, int32_t part, const MoeScales& scales,
                                int32_t piece, int32_t lane) {
  const abi::MoeGeometry& g = p.geometry;
  int32_t expert = s.job_expert()[unit.job];
  if (dialect::planted(dialect::Planted::kNextExpert) && op == abi::kMoeDown) expert = (expert + 1) % g.num_experts;
  const bool is_gate_up = op == abi::kMoeGateUp;
  const int32_t columns = is_gate_up ? g.hidden : g.intermediate, row_bytes = columns / 2, scale_bytes = columns * 2;
  // gate_up has rows up | gate; part 0 is gate.
  const int32_t row = is_gate_up ? (expert * 2 + (part == 0 ? 1 : 0)) * g.intermediate + unit.tile * 16 : expert * g.hidden + unit.tile * 32 + part * 16;
  if (lane == kMoeScaleLane) {
    const bool is_new = scales.is_new && (is_gate_up || part == 0);
    const uint8_t* const from = (is_gate_up ? p.gate_up_scale : p.down_scale) + static_cast<int64_t>(row / 64) * scale_bytes;
    return {from, s.scales(scales.slot_of(is_gate_up ? part : 0), g), 0, is_new ? scale_bytes : 0, 0};
  }
  const uint8_t* const from = (is_gate_up ? p.gate_up : p.down) + static_cast<int64_t>(row + lane * piece) * row_bytes;
  return {from, nullptr, abi::moe_fp4_row(lane * piece, row_bytes), lane < p.num_copies ? piece * row_bytes : 0, 8 * row_bytes};
}

// Of FP8 and bf16 a lane has one of 16 rows, from step `begin` on; FP8 scales lie behind them in the stage.
SGL_DEVICE MoeCopy moe_row_copy(const FusedMoeParams& p, int32_t op, const MoeWork& work, int32_t tile, int32_t part, int32_t begin, int32_t lane) {
  const abi::MoeGeometry& g = p.geometry;
  const abi::MoeStage layout = abi::moe_stage(static_cast<MoeOp>(op));
  const uint8_t* matrix = reinterpret_cast<const uint8_t*>(p.router);
  int32_t row = tile / abi::moe_splits(g) * 16;
  if (op == abi::kMoeSharedGateUp) {
    matrix = p.shared_gate_up;
    row = part * g.intermediate + tile * 16;
  } else if (op == abi::kMoeSharedDown) {
    matrix = p.shared_down;
    row = tile * 32 + part * 16;
  }
  if (lane == kMoeScaleLane) {
    const float* const scale = op == abi::kMoeSharedGateUp ? p.shared_gate_up_scale : p.shared_down_scale;
    return {reinterpret_cast<const uint8_t*>(scale + (row / 32) * (work.steps * 4)), nullptr, 16 * layout.pitch, op == abi::kMoeRouter ? 0 : 16,
            work.most * 16};
  }
  const uint8_t* const from = matrix + (static_cast<int64_t>(row + lane) * work.steps + begin) * layout.step_bytes;
  return {from, nullptr, lane * layout.pitch, lane < 16 ? layout.step_bytes : 0, work.most * layout.step_bytes};
}

// All stages of the block's units of an op. Entry: all lanes of the producer warp.
// The wait on `empty` pairs with the arrivals of the consumer warps: their reads are done before the copies overwrite them; sync_warp hands that to
// the other lanes. The announced bytes and the copies complete `full`, which the consumers wait for.
SGL_DEVICE void produce_moe_op(const FusedMoeParams& p, const MoeShared& s, int32_t op, MoeCursor& at, MoeScales& scales) {
  const int32_t lane = dialect::thread_idx() % 32;
  const MoeWork work = moe_work(p, op);
  const bool is_routed = is_routed_op(op);
  const int32_t rows = op == abi::kMoeGateUp ? 8 : 16, piece = rows / p.num_copies;  // of a stage of FP4
  const int32_t step_bytes = 16 * abi::moe_stage(static_cast<MoeOp>(op)).step_bytes + (op == abi::kMoeRouter ? 0 : 16);  // of the others
  // It begins before the block's first barrier, so that static ranges may not be there yet.
  const abi::MoeUnitRange range = is_routed ? s.state()->units[op] : moe_unit_range(p, op, 0);
SGL_NO_UNROLL
  for (MoeUnits unit{range.count, range.job, range.tile}; unit.left > 0; unit.advance(work.tiles)) {
    const MoeSplit extent = moe_extent(p, op, work, unit.tile);
    scales.begin_unit(op, unit.is_first, unit.tile);
SGL_NO_UNROLL
    for (int32_t part = 0; part < work.parts; ++part) {
      MoeCopy own = is_routed ? moe_fp4_copy(p, s, op, unit, part, scales, piece, lane)
                              : moe_row_copy(p, op, work, unit.tile, part, extent.begin, lane);
      int32_t left = extent.steps;
      bool has_scales = is_routed && scales.is_new && (op == abi::kMoeGateUp || part == 0);
SGL_NO_UNROLL
      for (int32_t run = 0; run < extent.runs; ++run) {
        const int32_t steps = left < work.most ? left : work.most, fp4_bytes = work.steps * (abi::kMoeStepK / 2) * rows;
        const int32_t bytes = is_routed ? own.bytes : own.bytes * steps;
        if (lane == 0) {
          sync::wait_mbarrier(fault_sink(p), abi::kFaultRingEmpty, op, at.stage, s.empty(at.stage), at.parity ^ 1u);
          const int32_t scale_bytes = has_scales ? work.steps * 256 : 0;
          dialect::mbarrier_arrive_expect_bytes(s.full(at.stage), is_routed ? fp4_bytes + scale_bytes : step_bytes * steps);
        }
        dialect::sync_warp();
        if (bytes > 0) dialect::bulk_load(own.slot != nullptr ? own.slot : s.stage(at.stage) + own.to, own.from, bytes, s.full(at.stage));
        own.from += own.next;
        if (own.slot != nullptr) own.bytes = 0;
        has_scales = false;
        left -= work.most;
        at.advance(s.at.num_stages);
      }
    }
  }
}

// Entry: all lanes of the producer warp. It never waits for another block itself, but for its own block's routing, which does.
SGL_DEVICE void produce_moe_weights(const FusedMoeParams& p, const MoeShared& s) {
  MoeCursor at;
  MoeScales scales{s.at.num_scale_slots};
SGL_NO_UNROLL
  for (int32_t op = 0; op < abi::kNumMoeOps; ++op) {
    if (op == abi::kMoeGateUp) {
      dialect::await_previous_launch();  // the weights are nobody's; from here on it waits for what others made of the rows
      // Pairs with the router warp's arrival (route_moe): the jobs are there. Nobody writes them again in this launch.
      if (!dialect::planted(dialect::Planted::kStaleRouting)) sync::wait_mbarrier(fault_sink(p), abi::kFaultRouting, 0, 0, s.routed(), 0u);
    }
    produce_moe_op(p, s, op, at, scales);
  }
}

}  // namespace sgl_lowlatency::stages
