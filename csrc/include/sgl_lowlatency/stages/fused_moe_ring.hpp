// The producer of a fused_moe block: its units' weights and scales into the ring and the scale slots.
#pragma once
#include "sgl_lowlatency/stages/fused_moe_state.hpp"

namespace sgl_lowlatency::stages {

// A stage of FP4, whose rows follow one another, in p.num_copies pieces, and its scales where the stage is the first to need them. Entry: all lanes;
// the stage is free.
SGL_DEVICE void load_fp4_stage(const FusedMoeParams& p, const MoeShared& s, int32_t op, const MoeUnits& unit, int32_t part, int32_t run,
                               const MoeScales& scales, const MoeCursor& at) {
  const abi::MoeGeometry& g = p.geometry;
  const int32_t lane = dialect::thread_idx() % 32;
  int32_t expert = s.job_expert()[unit.job];
  if (dialect::planted(dialect::Planted::kNextExpert) && op == abi::kMoeDown) expert = (expert + 1) % g.num_experts;
  const bool is_gate_up = op == abi::kMoeGateUp, has_scales = scales.is_new && run == 0 && (is_gate_up || part == 0);
  const int32_t columns = is_gate_up ? g.hidden : g.intermediate, rows = is_gate_up ? 8 : 16, row_bytes = columns / 2, scale_bytes = columns * 2;
  // gate_up has rows up | gate; part 0 is gate.
  const int64_t row = is_gate_up ? (static_cast<int64_t>(expert) * 2 + (part == 0 ? 1 : 0)) * g.intermediate + unit.tile * 16
                                 : static_cast<int64_t>(expert) * g.hidden + unit.tile * 32 + part * 16;
  if (lane == 0) dialect::mbarrier_arrive_expect_bytes(s.full(at.stage), rows * row_bytes + (has_scales ? scale_bytes : 0));
  dialect::sync_warp();
  const int32_t piece = rows / p.num_copies, first = lane * piece;  // rows
  if (lane < p.num_copies) {
    const uint8_t* const from = (is_gate_up ? p.gate_up : p.down) + (row + run * 8 + first) * row_bytes;
    dialect::bulk_load(s.stage(at.stage) + abi::moe_fp4_row(first, row_bytes), from, piece * row_bytes, s.full(at.stage));
  }
  if (has_scales && lane == abi::kMoeMaxCopies) {
    const uint8_t* const from = (is_gate_up ? p.gate_up_scale : p.down_scale) + row / 64 * scale_bytes;
    dialect::bulk_load(s.scales(scales.slot_of(is_gate_up ? part : 0), g), from, scale_bytes, s.full(at.stage));
  }
}

// A stage of FP8 or bf16: `steps` steps of K from `begin` on, of 16 rows, a lane each, and of FP8 the scales by the lane behind. Entry: all lanes;
// the stage is free.
SGL_DEVICE void load_row_stage(const FusedMoeParams& p, const MoeShared& s, int32_t op, int32_t tile, int32_t part, int32_t begin, int32_t steps,
                               const MoeCursor& at) {
  const abi::MoeGeometry& g = p.geometry;
  const abi::MoeStage layout = abi::moe_stage(static_cast<MoeOp>(op));
  const int32_t lane = dialect::thread_idx() % 32, bytes = steps * layout.step_bytes;
  const int32_t columns = op == abi::kMoeSharedDown ? g.intermediate : g.hidden, scale_bytes = op == abi::kMoeRouter ? 0 : steps * 16;
  if (lane == 0) dialect::mbarrier_arrive_expect_bytes(s.full(at.stage), 16 * bytes + scale_bytes);
  dialect::sync_warp();
  const uint8_t* matrix = reinterpret_cast<const uint8_t*>(p.router);
  int32_t row = tile / abi::moe_splits(g) * 16;
  if (op == abi::kMoeSharedGateUp) {
    matrix = p.shared_gate_up;
    row = part * g.intermediate + tile * 16;
  } else if (op == abi::kMoeSharedDown) {
    matrix = p.shared_down;
    row = tile * 32 + part * 16;
  }
  if (lane < 16) {
    const int32_t row_bytes = columns / abi::kMoeStepK * layout.step_bytes;
    const uint8_t* const from = matrix + static_cast<int64_t>(row + lane) * row_bytes + begin * layout.step_bytes;
    dialect::bulk_load(s.stage(at.stage) + lane * layout.pitch, from, bytes, s.full(at.stage));
  }
  if (lane == 16 && scale_bytes > 0) {
    const float* const scale = op == abi::kMoeSharedGateUp ? p.shared_gate_up_scale : p.shared_down_scale;
    const float* const from = scale + (row / 32) * (columns / 32) + begin * 4;
    dialect::bulk_load(s.stage(at.stage) + 16 * layout.pitch, from, scale_bytes, s.full(at.stage));
  }
}

// All stages of the block's units of an op. Entry: all lanes of the producer warp.
// The wait on `empty` pairs with the arrivals of the consumer warps: their reads are done before the copies overwrite them; sync_warp hands that to
// the other lanes. The announced bytes and the copies complete `full`, which the consumers wait for.
SGL_DEVICE void produce_moe_op(const FusedMoeParams& p, const MoeShared& s, int32_t op, MoeCursor& at, MoeScales& scales) {
  const int32_t lane = dialect::thread_idx() % 32;
  const MoeWork work = moe_work(p, op);
  // It begins before the block's first barrier, so that static ranges may not be there yet.
  const abi::MoeUnitRange range = is_routed_op(op) ? s.state()->units[op] : moe_unit_range(p, op, 0);
SGL_NO_UNROLL
  for (MoeUnits unit{range.count, range.job, range.tile}; unit.left > 0; unit.advance(work.tiles)) {
    const MoeSplit extent = moe_extent(p, op, work, unit.tile);
    scales.begin_unit(op, unit.is_first, unit.tile);
SGL_NO_UNROLL
    for (int32_t part = 0, run = 0; part < work.parts;) {
      if (lane == 0) sync::wait_mbarrier(fault_sink(p), abi::kFaultRingEmpty, op, at.stage, s.empty(at.stage), at.parity ^ 1u);
      dialect::sync_warp();
      if (is_routed_op(op)) {
        load_fp4_stage(p, s, op, unit, part, run, scales, at);
      } else {
        const int32_t begin = run * work.most, steps = extent.steps - begin < work.most ? extent.steps - begin : work.most;
        load_row_stage(p, s, op, unit.tile, part, extent.begin + begin, steps, at);
      }
      at.advance(s.at.num_stages);
      if (++run < extent.runs) continue;
      run = 0;
      ++part;
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
