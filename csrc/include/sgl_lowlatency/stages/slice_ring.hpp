// The producer of a slice's block: its tiles of a matrix, of FP8 with their scales, through the ring.
#pragma once
#include "sgl_lowlatency/stages/slice_state.hpp"

namespace sgl_lowlatency::stages {

// What a producer keeps from operation to operation.
struct SliceProducer {
  RingCursor at;       // the next stage to fill
  RingCursor landing;  // the oldest one whose bytes are still under way
  int32_t in_flight = 0;
};

// Streams the units `own` of operation `op`. unit_of(i): unit number i (SliceUnit). scales: of FP8, scale_pitch floats for each kSliceScaleBlock rows.
// Entry: one lane of the producer warp. It reads weights alone, which nobody writes: it waits neither for the launch in front nor for another block.
// No more is under way than kMaxStagesInFlight full stages: enough to saturate memory, while more would only lengthen the queues in which hand-overs
// wait. A unit's last stage may be short: then more of them.
// The wait on `empty` pairs with the consumer warps' arrivals (run_slice_op): their reads are done before the copy overwrites them. The announced
// bytes and the copies complete `full`, which they wait for. The first pass over the ring finds it empty.
template <int32_t kElementBytes, class UnitOf>
SGL_DEVICE void produce_slice_op(sync::FaultSink sink, const SliceShared& s, int32_t op, const abi::WeightMap* map, const float* scales,
                                 int32_t scale_pitch, const abi::TileRange& own, const UnitOf& unit_of, SliceProducer& state) {
  constexpr int32_t kStageK = abi::stage_k(kElementBytes);
  dialect::prefetch_map(map);
  for (int32_t i = own.begin; i < own.begin + own.count; ++i) {
    const SliceUnit unit = unit_of(i);
    const int32_t width = unit.k1 - unit.k0, most = abi::kMaxStagesInFlight * kStageK * ((width + kStageK - 1) / kStageK) / width;
    for (int32_t k = unit.k0; k < unit.k1; k += kStageK) {
      const int32_t scale_bytes = kElementBytes == 1 ? min_int(kStageK, unit.k1 - k) / abi::kSliceScaleBlock * 4 : 0;
      const RingCursor at = state.at;
      for (const int32_t limit = min_int(most, s.at.num_stages); state.in_flight >= limit; --state.in_flight) {
        sync::wait_mbarrier(sink, abi::kFaultRingFull, op, state.landing.stage, s.full(state.landing.stage), state.landing.parity);
        state.landing.advance(s.at.num_stages);
      }
      ++state.in_flight;
      sync::wait_mbarrier(sink, abi::kFaultRingEmpty, op, at.stage, s.empty(at.stage), at.parity ^ 1u);
      uint64_t* const full = s.full(at.stage);
      dialect::mbarrier_arrive_expect_bytes(full, abi::kStageBytes + scale_bytes);
      dialect::load_stage(s.stage(at.stage), map, unit.row, 0, k / abi::chunk_k(kElementBytes), full);
      if (kElementBytes == 1) {
        const int64_t row = unit.row / abi::kSliceScaleBlock;
        dialect::bulk_load(s.scales(at.stage), scales + row * scale_pitch + k / abi::kSliceScaleBlock, scale_bytes, full);
      }
      state.at.advance(s.at.num_stages);
    }
  }
}

}  // namespace sgl_lowlatency::stages
