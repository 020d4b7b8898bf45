// The producer of a fused_moe block: its units' weights and scales, row by row, into the ring.
#pragma once
#include "sgl_lowlatency/stages/fused_moe_state.hpp"

namespace sgl_lowlatency::stages {

// Where a stage's rows and scales come from: rows in two runs, the first half from `first` on, the second from `second`.
struct MoeSource {
  const uint8_t* first;
  const uint8_t* second;
  int64_t row_bytes;
  const void* scale_first;  // null: none
  const void* scale_second; // null: all are in the first run
};

SGL_DEVICE MoeSource moe_source(const FusedMoeParams& p, const MoeShared& s, MoeOp op, MoeUnit unit, int32_t step) {
  const abi::MoeGeometry& g = p.geometry;
  const int32_t of_hidden = g.hidden / abi::kMoeStepK, of_intermediate = g.intermediate / abi::kMoeStepK;
  MoeSource from{};
  if (op == abi::kMoeRouter) {
    from.row_bytes = g.hidden * 2;
    from.first = reinterpret_cast<const uint8_t*>(p.router) + (unit.tile / abi::moe_splits(g) * 16) * from.row_bytes + step * 256;
    from.second = from.first + 8 * from.row_bytes;
    return from;
  }
  if (op == abi::kMoeSharedGateUp) {
    from.row_bytes = g.hidden;
    from.first = p.shared_gate_up + unit.tile * 16 * from.row_bytes + step * 128;
    from.second = from.first + g.intermediate * from.row_bytes;
    from.scale_first = p.shared_gate_up_scale + unit.tile / 2 * (of_hidden * 4) + step * 4;
    from.scale_second = p.shared_gate_up_scale + (g.intermediate / 32 + unit.tile / 2) * (of_hidden * 4) + step * 4;
    return from;
  }
  if (op == abi::kMoeSharedDown) {
    from.row_bytes = g.intermediate;
    from.first = p.shared_down + unit.tile * 64 * from.row_bytes + step * 128;
    from.second = from.first + 32 * from.row_bytes;
    from.scale_first = p.shared_down_scale + unit.tile * 2 * (of_intermediate * 4) + step * 4;
    from.scale_second = p.shared_down_scale + (unit.tile * 2 + 1) * (of_intermediate * 4) + step * 4;
    return from;
  }
  int64_t expert = s.job_expert()[unit.job];
  if (dialect::planted(dialect::Planted::kNextExpert) && op == abi::kMoeDown) expert = (expert + 1) % g.num_experts;
  if (op == abi::kMoeGateUp) {  // rows up | gate; in the stage gate | up
    from.row_bytes = g.hidden / 2;
    const uint8_t* const up = p.gate_up + (expert * 2 * g.intermediate + unit.tile * 16) * from.row_bytes + step * 64;
    from.first = up + g.intermediate * from.row_bytes;
    from.second = up;
    const uint8_t* const scale = p.gate_up_scale + ((expert * (2 * g.intermediate / 64) + unit.tile / 4) * of_hidden + step) * 256;
    from.scale_first = scale + static_cast<int64_t>(g.intermediate / 64) * of_hidden * 256;
    from.scale_second = scale;
    return from;
  }
  from.row_bytes = g.intermediate / 2;
  from.first = p.down + (expert * g.hidden + unit.tile * 64) * from.row_bytes + step * 64;
  from.second = from.first + 32 * from.row_bytes;
  from.scale_first = p.down_scale + ((expert * (g.hidden / 64) + unit.tile) * of_intermediate + step) * 256;
  return from;
}

// All stages of the block's units of an op. Entry: all lanes of the producer warp.
// The wait on `empty` pairs with the arrivals of the consumer warps: their reads are done before the copies overwrite them; sync_warp hands that to
// the other lanes. The announced bytes and the copies complete `full`, which the consumers wait for.
SGL_DEVICE void produce_moe_op(const FusedMoeParams& p, const MoeShared& s, MoeOp op, MoeCursor& at) {
  const int32_t lane = dialect::thread_idx() % 32;
  const abi::TileRange share = moe_share(p, s, op);
  const abi::MoeStage layout = abi::moe_stage(op);
SGL_NO_UNROLL
  for (int32_t i = share.begin; i < share.begin + share.count; ++i) {
    const MoeUnit unit = moe_unit(p, op, i);
    const MoeSteps steps = moe_steps(p, op, unit.tile);
    // A unit of as many stages as the ring has leaves each of them where the next one's same columns come: of a tile in the same block of 64 rows, the
    // scales are there.
    const bool has_scales = op == abi::kMoeGateUp && i > share.begin && unit.tile % 4 != 0 && steps.count == abi::kMoeStages * layout.steps;
SGL_NO_UNROLL
    for (int32_t done = 0; done < steps.count; done += layout.steps) {
      const int32_t count = steps.count - done < layout.steps ? steps.count - done : layout.steps, bytes = count * layout.step_bytes;
      const int32_t scale_bytes = has_scales ? 0 : abi::moe_scale_bytes(op, count);
      if (lane == 0) {
        sync::wait_mbarrier(fault_sink(p), abi::kFaultRingEmpty, op, at.stage, s.empty(at.stage), at.parity ^ 1u);
        dialect::mbarrier_arrive_expect_bytes(s.full(at.stage), layout.rows * bytes + scale_bytes);
      }
      dialect::sync_warp();
      const MoeSource from = moe_source(p, s, op, unit, steps.begin + done);
      char* const stage = s.stage(at.stage);
SGL_NO_UNROLL
      for (int32_t row = lane; row < layout.rows; row += 32) {
        const int32_t half = layout.rows / 2;
        const uint8_t* const source = row < half ? from.first + row * from.row_bytes : from.second + (row - half) * from.row_bytes;
        dialect::bulk_load(stage + row * layout.pitch, source, bytes, s.full(at.stage));
      }
      const int32_t runs = scale_bytes == 0 ? 0 : from.scale_second == nullptr ? 1 : 2;
      if (lane < runs) {
        const int32_t run_bytes = scale_bytes / runs;
        dialect::bulk_load(stage + layout.rows * layout.pitch + lane * run_bytes, lane == 0 ? from.scale_first : from.scale_second, run_bytes,
                           s.full(at.stage));
      }
      at.advance();
    }
  }
}

// Entry: all lanes of the producer warp. It never waits for another block itself, but for its own block's routing, which does.
SGL_DEVICE void produce_moe_weights(const FusedMoeParams& p, const MoeShared& s) {
  MoeCursor at;
  produce_moe_op(p, s, abi::kMoeRouter, at);
  produce_moe_op(p, s, abi::kMoeSharedGateUp, at);
  dialect::await_previous_launch();  // the weights are nobody's; from here on it waits for what others made of the rows
  // Pairs with the router warp's arrival (route_moe): the jobs are there. Nobody writes them again in this launch.
  if (!dialect::planted(dialect::Planted::kStaleRouting)) sync::wait_mbarrier(fault_sink(p), abi::kFaultRouting, 0, 0, s.routed(), 0u);
  produce_moe_op(p, s, abi::kMoeGateUp, at);
  produce_moe_op(p, s, abi::kMoeSharedDown, at);
  produce_moe_op(p, s, abi::kMoeDown, at);
}

}  // namespace sgl_lowlatency::stages
