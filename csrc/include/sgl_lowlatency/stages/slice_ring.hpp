// The producer of a slice's block: its tiles of a matrix through the ring.
#pragma once
#include "sgl_lowlatency/stages/slice_state.hpp"

namespace sgl_lowlatency::stages {

// What a producer keeps from operation to operation.
struct SliceProducer {
  RingCursor at;       // the next stage to fill
  RingCursor landing;  // the oldest one whose bytes are still under way
  int32_t in_flight = 0;
};

// One stage: waits until few enough are under way and until the stage is free, and asks for it.
// No more is under way than kMaxStagesInFlight stages' worth of bytes, `most` stages: enough to saturate memory, while more would only lengthen the
// queues in which hand-overs wait.
// The wait on `empty` pairs with the consumer warps' arrivals (run_slice_op, run_tall_op): their reads are done before the copy overwrites them. The
// announced bytes and the copy complete `full`, which they wait for. The first pass over the ring finds it empty.
SGL_DEVICE void produce_slice_stage(sync::FaultSink sink, const SliceShared& s, int32_t op, const abi::WeightMap* map, int32_t most, int32_t row,
                                    int32_t chunk, SliceProducer& state) {
  for (const int32_t limit = min_int(most, s.at.num_stages); state.in_flight >= limit; --state.in_flight) {
    sync::wait_mbarrier(sink, abi::kFaultRingFull, op, state.landing.stage, s.full(state.landing.stage), state.landing.parity);
    state.landing.advance(s.at.num_stages);
  }
  ++state.in_flight;
  const RingCursor at = state.at;
  sync::wait_mbarrier(sink, abi::kFaultRingEmpty, op, at.stage, s.empty(at.stage), at.parity ^ 1u);
  dialect::mbarrier_arrive_expect_bytes(s.full(at.stage), abi::kStageBytes);
  dialect::load_stage(s.stage(at.stage), map, row, 0, chunk, s.full(at.stage));
  state.at.advance(s.at.num_stages);
}

// Streams the units `own` of operation `op`, tiles of 16 rows of bf16. unit_of(i): unit number i (SliceUnit).
// Entry: one lane of the producer warp. It reads weights alone, which nobody writes: it waits neither for the launch in front nor for another block.
// A unit's last stage may be short: then more of them are under way.
template <class UnitOf>
SGL_DEVICE void produce_slice_op(sync::FaultSink sink, const SliceShared& s, int32_t op, const abi::WeightMap* map, const abi::TileRange& own,
                                 const UnitOf& unit_of, SliceProducer& state) {
  constexpr int32_t kStageK = abi::stage_k(2);
  dialect::prefetch_map(map);
  for (int32_t i = own.begin; i < own.begin + own.count; ++i) {
    const SliceUnit unit = unit_of(i);
    const int32_t width = unit.k1 - unit.k0, most = abi::kMaxStagesInFlight * kStageK * ((width + kStageK - 1) / kStageK) / width;
    for (int32_t k = unit.k0; k < unit.k1; k += kStageK) produce_slice_stage(sink, s, op, map, most, unit.row, k / abi::chunk_k(2), state);
  }
}

// The same of FP8 in tall stages.
template <class UnitOf>
SGL_DEVICE void produce_tall_op(sync::FaultSink sink, const SliceShared& s, int32_t op, const abi::WeightMap* map, const abi::TileRange& own,
                                const UnitOf& unit_of, SliceProducer& state) {
  dialect::prefetch_map(map);
  for (int32_t i = own.begin; i < own.begin + own.count; ++i) {
    const SliceUnit unit = unit_of(i);
    for (int32_t k = unit.k0; k < unit.k1; k += abi::kTallK) {
      produce_slice_stage(sink, s, op, map, abi::kMaxStagesInFlight, unit.row, k / abi::kTallK, state);
    }
  }
}

}  // namespace sgl_lowlatency::stages
