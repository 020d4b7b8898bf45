// The weight ring: producer warps stream every weight the block will use, in the order the consumers use them, running
// ahead across tiles, operations and layers. They never wait for another block.
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

SGL_DEVICE const bf16* op_weight(const abi::LayerWeights* layer, int32_t op) {
  const bf16* const* table = op == abi::kOpQkv       ? &layer->qkv
                             : op == abi::kOpOutProj ? &layer->out_proj
                             : op == abi::kOpGateUp  ? &layer->gate_up
                                                     : &layer->down;
  return dialect::load_constant_pointer(table);
}

// Matrix row that is row `lane` of tile `tile`: tiles are 16 consecutive rows, but a gate_up tile is 8 gate rows and
// the 8 up rows of the same neurons, so that one thread holds both factors of SwiGLU.
SGL_DEVICE int64_t tile_row(const DecodeStepParams& p, int32_t op, int32_t tile, int32_t lane) {
  if (op != abi::kOpGateUp) return static_cast<int64_t>(tile) * abi::kTileRows + lane;
  const int32_t half = abi::kTileRows / 2;
  return static_cast<int64_t>(tile) * half + lane % half + (lane < half ? 0 : p.geometry.intermediate);
}

// Rows of a tile that one producer warp copies.
constexpr int32_t kProducerRows = abi::kTileRows / abi::kNumProducerWarps;

// Entry: all lanes of a producer warp. Every warp waits for the stage, announces its own bytes and copies its own rows
// (lanes 0..kProducerRows-1): a copy takes an issue slot of its own, and four warps together refill the ring fast after a stall.
// No more than kMaxStagesInFlight are under way: enough to saturate memory, while every further one would only lengthen the
// queues in which the step's latency-bound loads wait. The rest of the ring fills while the consumers wait for other blocks: before
// qkv and out_proj those waits are the longest, so there it fills with kMaxStagesInFlightAhead and leaves the queues shorter still.
// The wait on `empty` pairs with the consumer warps' arrivals (run_tiles): their reads are done before the copy overwrites them.
// The announced bytes and the copies complete `full`, which run_tiles waits for. The first pass over the ring finds it empty.
SGL_DEVICE void produce_weights(const DecodeStepParams& p, const Shared& s, int32_t producer, int32_t lane) {
  const sync::FaultSink sink = fault_sink(p);
  RingCursor cursor, landing;  // the next stage to fill; the oldest one whose bytes are still under way
  int32_t in_flight = 0;
  const int32_t max_in_flight = min_int(abi::kMaxStagesInFlight, p.num_stages), max_ahead = min_int(abi::kMaxStagesInFlightAhead, p.num_stages);
  const int32_t tile_lane = producer * kProducerRows + lane % kProducerRows;
  const bf16* next_weight = op_weight(p.layers, 0);
  for (int32_t layer = 0; layer < p.geometry.num_layers; ++layer) {
    for (int32_t op = 0; op < abi::kNumOps; ++op) {
      const int32_t begin = s.rows()->tiles[op].begin, end = begin + s.rows()->tiles[op].count;
      const int32_t k_extent = p.ops[op].k_extent, k_panel = p.ops[op].k_panel;
      int32_t num_ahead = op == abi::kOpQkv || op == abi::kOpOutProj ? p.num_stages : 0;
      const bf16* weight = next_weight;
      const bool is_last = layer + 1 == p.geometry.num_layers && op + 1 == abi::kNumOps;
      // Early: hides its latency.
      if (!is_last) next_weight = op_weight(p.layers + layer + (op + 1) / abi::kNumOps, (op + 1) % abi::kNumOps);
      for (int32_t k0 = 0; k0 < k_extent; k0 += k_panel) {
        const int32_t k1 = min_int(k0 + k_panel, k_extent);
        for (int32_t tile = begin; tile < end; ++tile) {
          const bf16* row = weight + tile_row(p, op, tile, tile_lane) * k_extent;
          for (int32_t k = k0; k < k1; k += abi::kStageK) {
            const int32_t width_bytes = min_int(abi::kStageK, k1 - k) * 2;
            uint64_t* full = s.full(cursor.stage);
            const bool is_ahead = num_ahead > 0;
            --num_ahead;
            if (lane == 0) {
              for (const int32_t limit = is_ahead ? max_ahead : max_in_flight; in_flight >= limit; --in_flight) {
                sync::wait_mbarrier(sink, abi::kFaultRingFull, layer, landing.stage, s.full(landing.stage), landing.parity);
                landing.advance(p.num_stages);
              }
              ++in_flight;
              sync::wait_mbarrier(sink, abi::kFaultRingEmpty, layer, cursor.stage, s.empty(cursor.stage), cursor.parity ^ 1u);
              dialect::mbarrier_arrive_expect_bytes(full, width_bytes * kProducerRows);
            }
            dialect::sync_warp();  // the stage is free and the bytes announced before any lane's copy may land
            if (lane < kProducerRows) {
              dialect::bulk_load(s.stage(cursor.stage) + tile_lane * abi::kStagePitchBytes, row + k, width_bytes, full);
            }
            cursor.advance(p.num_stages);
          }
        }
      }
    }
  }
}

}  // namespace sgl_lowlatency::stages
