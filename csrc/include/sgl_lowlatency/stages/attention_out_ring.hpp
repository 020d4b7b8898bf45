// The producer of an attention_out block: its tiles of wo_a and wo_b, with wo_b's scales, through the ring.
#pragma once
#include "sgl_lowlatency/stages/attention_out_state.hpp"

namespace sgl_lowlatency::stages {

// Entry: all lanes of the producer warp; one of them does the work. It reads weights alone, which nobody writes: it waits neither for the launch in
// front nor for another block.
// The wait on `empty` pairs with the consumer warps' arrivals (run_attn_out_op): their reads are done before the copy overwrites them. The announced
// bytes and the copies complete `full`, which they wait for. The first pass over the ring finds it empty.
SGL_DEVICE void produce_attn_out_weights(const AttentionOutParams& p, const AttnOutShared& s) {
  if (dialect::thread_idx() % 32 != 0) return;
  const sync::FaultSink sink = fault_sink(p);
  const int32_t scale_pitch = abi::attn_out_latent(p.geometry) / abi::kAttnOutScaleBlock;
  RingCursor at;
  for (int32_t number = 0; number < abi::kNumAttnOutOps; ++number) {
    const AttnOutOp op = static_cast<AttnOutOp>(number);
    const abi::TileRange own = attn_out_units(p, op);
    const int32_t stage_k = attn_out_stage_k(op);
    dialect::prefetch_map(p.maps + op);
    for (int32_t i = own.begin; i < own.begin + own.count; ++i) {
      const AttnOutUnit unit = attn_out_unit(p, op, i);
      for (int32_t k = unit.k0; k < unit.k1; k += stage_k) {
        const int32_t scale_bytes = op == abi::kAttnOutA ? 0 : min_int(stage_k, unit.k1 - k) / abi::kAttnOutScaleBlock * 4;
        sync::wait_mbarrier(sink, abi::kFaultRingEmpty, op, at.stage, s.empty(at.stage), at.parity ^ 1u);
        uint64_t* const full = s.full(at.stage);
        dialect::mbarrier_arrive_expect_bytes(full, abi::kStageBytes + scale_bytes);
        dialect::load_stage(s.stage(at.stage), p.maps + op, unit.row, 0, k / (stage_k / abi::kStageChunks), full);
        if (scale_bytes > 0) {
          const int64_t row = unit.row / abi::kAttnOutScaleBlock;
          dialect::bulk_load(s.scales(at.stage), p.scales + row * scale_pitch + k / abi::kAttnOutScaleBlock, scale_bytes, full);
        }
        at.advance(p.shared.num_stages);
      }
    }
  }
}

}  // namespace sgl_lowlatency::stages
