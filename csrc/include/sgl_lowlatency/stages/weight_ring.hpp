// The weight ring: a producer warp streams every weight the block will use, in the order the consumers use them, running
// ahead across tiles, operations and layers. It never waits for another block.
#pragma once
#include "sgl_lowlatency/abi/weight_map.hpp"
#include "sgl_lowlatency/stages/row_state.hpp"

namespace sgl_lowlatency::stages {

// Position in the ring; every producer and consumer warp steps through the same sequence.
struct RingCursor {
  int32_t stage = 0;
  uint32_t parity = 0;
  SGL_DEVICE void advance(int32_t num_stages) {
    if (++stage == num_stages) {
      stage = 0;
      parity ^= 1u;
    }
  }
};

// Entry: all lanes of the producer warp; one of them does the work. A stage is one copy. The LM head, bf16 whatever the layers are, is
// streamed as the only operation of one more layer.
// No more than kMaxStagesInFlight are under way: enough to saturate memory, while every further one would only lengthen the
// queues in which the step's latency-bound loads wait. The stages that a ring's worth of an operation's first tiles fills are asked for
// while the consumers wait for other blocks: kMaxStagesInFlightAhead of them at a time, which leaves the queues shorter still.
// The wait on `empty` pairs with the consumer warps' arrivals (run_tiles): their reads are done before the copy overwrites them.
// The announced bytes and the copy complete `full`, which run_tiles waits for. The first pass over the ring finds it empty.
template <int32_t kElementBytes>
SGL_DEVICE void produce_weights(const DecodeStepParams& p, const Shared& s, int32_t lane) {
  if (lane != 0) return;
  const sync::FaultSink sink = fault_sink(p);
  RingCursor cursor, landing;  // the next stage to fill; the oldest one whose bytes are still under way
  int32_t in_flight = 0;
  const int32_t max_in_flight = min_int(abi::kMaxStagesInFlight, p.num_stages), max_ahead = min_int(abi::kMaxStagesInFlightAhead, p.num_stages);
  const abi::WeightMap* map = p.maps;
  const int32_t num_layers = p.geometry.num_layers, all_layers = num_layers + (p.logits != nullptr);
  for (int32_t layer = 0; layer < all_layers; ++layer) {
    const bool is_head = layer == num_layers;
    const int32_t stage_k = is_head ? abi::stage_k(2) : abi::stage_k(kElementBytes), chunk_k = stage_k / abi::kStageChunks;
    for (int32_t op = is_head ? abi::kOpHead : 0; op < (is_head ? abi::kOpHead + 1 : abi::kNumOps); ++op, ++map) {
      const int32_t own_begin = s.rows()->tiles[op].begin, own_end = own_begin + s.rows()->tiles[op].count;
      const int32_t at_once = abi::tiles_at_once(op, p.ops[op], own_end - own_begin, p.max_tiles_multi_panel);
      const int32_t k_extent = p.ops[op].k_extent, k_panel = p.ops[op].k_panel;
      const int32_t part_rows = op == abi::kOpGateUp ? abi::kTileRows / 2 : abi::kTileRows;
      int32_t num_ahead = p.num_stages;
      if (layer + 1 < all_layers || (!is_head && op + 1 < abi::kNumOps)) dialect::prefetch_map(map + 1);
      for (int32_t begin = own_begin; begin < own_end; begin += at_once) {
        const int32_t end = min_int(begin + at_once, own_end);
        for (int32_t k0 = 0; k0 < k_extent; k0 += k_panel) {
          const int32_t k1 = min_int(k0 + k_panel, k_extent);
          for (int32_t tile = begin; tile < end; ++tile) {
            for (int32_t k = k0; k < k1; k += stage_k) {
              for (const int32_t limit = num_ahead > 0 ? max_ahead : max_in_flight; in_flight >= limit; --in_flight) {
                sync::wait_mbarrier(sink, abi::kFaultRingFull, layer, landing.stage, s.full(landing.stage), landing.parity);
                landing.advance(p.num_stages);
              }
              ++in_flight;
              --num_ahead;
              sync::wait_mbarrier(sink, abi::kFaultRingEmpty, layer, cursor.stage, s.empty(cursor.stage), cursor.parity ^ 1u);
              uint64_t* const full = s.full(cursor.stage);
              dialect::mbarrier_arrive_expect_bytes(full, abi::kStageBytes);
              dialect::load_stage(s.stage(cursor.stage), map, tile * part_rows, 0, k / chunk_k, full);
              cursor.advance(p.num_stages);
            }
          }
        }
      }
    }
  }
}

}  // namespace sgl_lowlatency::stages
