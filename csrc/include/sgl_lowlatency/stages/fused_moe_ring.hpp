// The producers of a fused_moe block: a lane fills the ring of one consumer warp with the weights and scales of that warp's units, through all ops.
#pragma once
#include "sgl_lowlatency/stages/fused_moe_state.hpp"

namespace sgl_lowlatency::stages {

// Steps of 128 columns in a chunk, and the bytes of scales that a block of rows has for one.
SGL_DEVICE int32_t moe_chunk_width(MoeOp op) { return is_routed(op) ? abi::kMoeChunkSteps : 1; }
SGL_DEVICE int32_t moe_step_bytes(MoeOp op) { return is_routed(op) ? 256 : 16; }

// What a ring is filled with next.
struct MoeFeed {
  int32_t op = -1;    // MoeOp; before the first one none
  int32_t unit = 0;   // number of the op
  int32_t end = 0;    // of the units, which are `by` apart
  int32_t by = 1;
  int32_t chunk = 0;
  int32_t end_chunk = 0;  // of the unit
  int32_t row = 0;        // of the matrix's part, that the unit begins with
  int32_t part = 0;
  const char* scales[2] = {};  // of the chunk
};

// Moves on to warp `warp`'s next chunk, of an op below `limit`; false: there is none. Of a limit behind kMoeGateUp the routing is there.
SGL_DEVICE bool find_moe_chunk(const FusedMoeParams& p, const MoeShared& s, int32_t limit, int32_t warp, MoeFeed& feed) {
  while (feed.chunk == feed.end_chunk) {
    feed.unit += feed.by;
    while (feed.unit >= feed.end) {
      if (feed.op + 1 >= limit) return false;
      ++feed.op;
      const MoeOp op = static_cast<MoeOp>(feed.op);
      const abi::TileRange share = moe_share(p, s, op);
      feed.by = is_routed(op) ? abi::kNumConsumerWarps : 1;
      feed.unit = share.begin + (is_routed(op) ? warp : 0);
      feed.end = share.begin + share.count;
    }
    const MoeOp op = static_cast<MoeOp>(feed.op);
    const MoeUnit unit = moe_unit(p, op, feed.unit);
    const MoeChunks chunks = moe_chunks(p, op, unit.tile, warp);
    feed.chunk = chunks.begin;
    feed.end_chunk = chunks.end;
    feed.part = 0;
    int64_t block = 0;  // of rows that share scales
    int32_t up = 0;     // so many blocks further the second tile's are
    const char* scales = nullptr;
    if (op == abi::kMoeRouter) {
      feed.row = unit.tile / abi::moe_splits(p.geometry) * 16;
      continue;
    }
    if (op == abi::kMoeSharedGateUp || op == abi::kMoeGateUp) {
      const bool is_fp4 = op == abi::kMoeGateUp;
      feed.row = unit.tile * 16;
      feed.part = is_fp4 ? 2 * s.job_expert()[unit.job] : 0;
      up = p.geometry.intermediate / (is_fp4 ? 64 : 32);
      block = static_cast<int64_t>(feed.part) * up + feed.row / (is_fp4 ? 64 : 32);
      scales = is_fp4 ? reinterpret_cast<const char*>(p.gate_up_scale) : reinterpret_cast<const char*>(p.shared_gate_up_scale);
    } else if (op == abi::kMoeDown) {
      int32_t expert = s.job_expert()[unit.job];
      if (dialect::planted(dialect::Planted::kNextExpert)) expert = (expert + 1) % p.geometry.num_experts;
      feed.row = expert * p.geometry.hidden + unit.tile * abi::kMoeDownRows;
      block = feed.row / 64;
      scales = reinterpret_cast<const char*>(p.down_scale);
    } else {
      feed.row = unit.tile * abi::kMoeDownRows;
      block = feed.row / 32;
      scales = reinterpret_cast<const char*>(p.shared_down_scale);
    }
    const int32_t block_bytes = moe_steps(p, op) * moe_step_bytes(op);
    feed.scales[0] = scales + block * block_bytes + feed.chunk * moe_chunk_width(op) * moe_step_bytes(op);
    feed.scales[1] = feed.scales[0] + static_cast<int64_t>(up) * block_bytes;
  }
  return true;
}

// Asks for the feed's chunk: one copy of both tiles, and their scales, of FP4 512 bytes of a block of 64 rows, of FP8 four floats.
SGL_DEVICE void load_moe_chunk(const FusedMoeParams& p, const MoeFeed& feed, char* chunk, uint64_t* full) {
  const MoeOp op = static_cast<MoeOp>(feed.op);
  const int32_t width = moe_chunk_width(op), left = moe_steps(p, op) - feed.chunk * width;
  const int32_t scale_bytes = op == abi::kMoeRouter ? 0 : (left < width ? left : width) * moe_step_bytes(op);
  const bool is_gate_up = op == abi::kMoeSharedGateUp || op == abi::kMoeGateUp;
  dialect::mbarrier_arrive_expect_bytes(full, abi::kPairBytes + (is_gate_up ? 2 * scale_bytes : scale_bytes));
  dialect::load_stage(chunk, p.maps + op, feed.row, feed.part, feed.chunk * (op == abi::kMoeRouter ? 2 : width), full);
  if (scale_bytes == 0) return;
  dialect::bulk_load(chunk + abi::kPairBytes, feed.scales[0], scale_bytes, full);
  if (is_gate_up) dialect::bulk_load(chunk + abi::kPairBytes + abi::kMoeScaleBytes, feed.scales[1], scale_bytes, full);
}

// The chunks of ops below `limit` into a ring, from slot `at` on. Entry: the ring's lane.
// The wait on `empty` pairs with the arrival of the consumer warp, whose lanes have all read the slot. The announced bytes and the copies complete
// `full`, which the warp waits for.
SGL_DEVICE void fill_moe_ring(const FusedMoeParams& p, const MoeShared& s, int32_t limit, int32_t warp, MoeCursor& at, MoeFeed& feed) {
SGL_NO_UNROLL
  while (find_moe_chunk(p, s, limit, warp, feed)) {
    sync::wait_mbarrier(fault_sink(p), abi::kFaultRingEmpty, feed.op, warp * s.at.depth + at.slot, s.empty(warp, at.slot), at.parity ^ 1u);
    load_moe_chunk(p, feed, s.chunk(warp, at.slot), s.full(warp, at.slot));
    at.advance(s.at.depth);
    ++feed.chunk;
    const int32_t bytes = moe_chunk_width(static_cast<MoeOp>(feed.op)) * moe_step_bytes(static_cast<MoeOp>(feed.op));
    feed.scales[0] += bytes;
    feed.scales[1] += bytes;
  }
}

// Entry: all lanes of a producer warp. It never waits for another block itself, but for its own block's routing, which does.
SGL_DEVICE void produce_moe_weights(const FusedMoeParams& p, const MoeShared& s) {
  const int32_t lane = dialect::thread_idx() % 32;
  const int32_t warp = lane * abi::kMoeProducerWarps + dialect::thread_idx() / 32 - abi::kNumConsumerWarps;  // whose ring is this lane's
  if (warp >= abi::kNumConsumerWarps) return;
  MoeCursor at;
  MoeFeed feed;
  fill_moe_ring(p, s, abi::kMoeGateUp, warp, at, feed);
  dialect::await_previous_launch();  // the weights are nobody's; from here on it waits for what others made of the rows
  // Pairs with the router warp's arrival (route_moe): the jobs are there. Nobody writes them again in this launch.
  if (!dialect::planted(dialect::Planted::kStaleRouting)) sync::wait_mbarrier(fault_sink(p), abi::kFaultRouting, 0, 0, s.routed(), 0u);
  fill_moe_ring(p, s, abi::kNumMoeOps, warp, at, feed);
}

}  // namespace sgl_lowlatency::stages
