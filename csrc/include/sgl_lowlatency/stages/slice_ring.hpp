// The producer of a slice's block: its tiles of a matrix, of FP8 with their scales, through the ring.
#pragma once
#include "sgl_lowlatency/stages/slice_state.hpp"

namespace sgl_lowlatency::stages {

// Streams the units `own` of operation `op`. unit_of(i): unit number i (SliceUnit). scales: of FP8, scale_pitch floats for each kSliceScaleBlock rows.
// Entry: one lane of the producer warp. It reads weights alone, which nobody writes: it waits neither for the launch in front nor for another block.
// The wait on `empty` pairs with the consumer warps' arrivals (run_slice_op): their reads are done before the copy overwrites them. The announced
// bytes and the copies complete `full`, which they wait for. The first pass over the ring finds it empty.
template <int32_t kElementBytes, class UnitOf>
SGL_DEVICE void produce_slice_op(sync::FaultSink sink, const SliceShared& s, int32_t op, const abi::WeightMap* map, const float* scales,
                                 int32_t scale_pitch, const abi::TileRange& own, const UnitOf& unit_of, RingCursor& at) {
  constexpr int32_t kStageK = abi::stage_k(kElementBytes);
  dialect::prefetch_map(map);
  for (int32_t i = own.begin; i < own.begin + own.count; ++i) {
    const SliceUnit unit = unit_of(i);
    for (int32_t k = unit.k0; k < unit.k1; k += kStageK) {
      const int32_t scale_bytes = kElementBytes == 1 ? min_int(kStageK, unit.k1 - k) / abi::kSliceScaleBlock * 4 : 0;
      sync::wait_mbarrier(sink, abi::kFaultRingEmpty, op, at.stage, s.empty(at.stage), at.parity ^ 1u);
      uint64_t* const full = s.full(at.stage);
      dialect::mbarrier_arrive_expect_bytes(full, abi::kStageBytes + scale_bytes);
      dialect::load_stage(s.stage(at.stage), map, unit.row, 0, k / abi::chunk_k(kElementBytes), full);
      if (kElementBytes == 1) {
        const int64_t row = unit.row / abi::kSliceScaleBlock;
        dialect::bulk_load(s.scales(at.stage), scales + row * scale_pitch + k / abi::kSliceScaleBlock, scale_bytes, full);
      }
      at.advance(s.at.num_stages);
    }
  }
}

}  // namespace sgl_lowlatency::stages
