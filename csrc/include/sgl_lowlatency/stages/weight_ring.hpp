// The weight ring: a producer warp streams every weight the block will use, in the order the consumers use them, running
// ahead across tiles, operations and layers. It never waits for another block.
#pragma once
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

// Entry: all lanes of the producer warp; one of them does the work. A stage is one copy.
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
  for (int32_t layer = 0; layer < p.geometry.num_layers; ++layer) {
    for (int32_t op = 0; op < abi::kNumOps; ++op, ++map) {
      const int32_t begin = s.rows()->tiles[op].begin, end = begin + s.rows()->tiles[op].count;
      const int32_t k_extent = p.ops[op].k_extent, k_panel = p.ops[op].k_panel;
      const int32_t part_rows = op == abi::kOpGateUp ? abi::kTileRows / 2 : abi::kTileRows;
      int32_t num_ahead = p.num_stages;
      if (layer + 1 < p.geometry.num_layers || op + 1 < abi::kNumOps) dialect::prefetch_map(map + 1);
      for (int32_t k0 = 0; k0 < k_extent; k0 += k_panel) {
        const int32_t k1 = min_int(k0 + k_panel, k_extent);
        for (int32_t tile = begin; tile < end; ++tile) {
          for (int32_t k = k0; k < k1; k += abi::stage_k(kElementBytes)) {
            for (const int32_t limit = num_ahead > 0 ? max_ahead : max_in_flight; in_flight >= limit; --in_flight) {
              sync::wait_mbarrier(sink, abi::kFaultRingFull, layer, landing.stage, s.full(landing.stage), landing.parity);
              landing.advance(p.num_stages);
            }
            ++in_flight;
            --num_ahead;
            sync::wait_mbarrier(sink, abi::kFaultRingEmpty, layer, cursor.stage, s.empty(cursor.stage), cursor.parity ^ 1u);
            uint64_t* const full = s.full(cursor.stage);
            dialect::mbarrier_arrive_expect_bytes(full, abi::kStageBytes);
            dialect::load_stage(s.stage(cursor.stage), map, tile * part_rows, k / abi::chunk_k(kElementBytes), full);
            cursor.advance(p.num_stages);
          }
        }
      }
    }
  }
}

}  // namespace sgl_lowlatency::stages
