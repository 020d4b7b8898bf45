// What each operation of a layer reads: the activations that fill its panel.
#pragma once
#include "sgl_lowlatency/stages/stream.hpp"
#include "sgl_lowlatency/stages/upkeep.hpp"

namespace sgl_lowlatency::stages {

// The stream that operation kOp of `layer` reads, scaled (qkv, gate_up, router) or to add to it (out_proj, down).
template <int32_t kOp>
SGL_DEVICE Stream input_stream(const DecodeStepParams& p, int32_t layer) {
  return kOp == abi::kOpQkv || kOp == abi::kOpOutProj ? end_stream(p, layer - 1) : mid_stream(p, layer);
}

// Fills the panel with columns [k0, k1) of operation kOp's input and passes a consumer barrier; with the last columns, where it
// reads the stream, Row::inverse_rms follows, which the next barrier publishes. Entry: all consumer threads; the panel is free.
template <int32_t kElementBytes, int32_t kOp>
SGL_DEVICE void load_operand(const DecodeStepParams& p, const Shared& s, int32_t layer, int32_t k0, int32_t k1) {
  constexpr bool kNorm = kOp == abi::kOpQkv || kOp == abi::kOpGateUp || kOp == abi::kOpRouter;
  const sync::Awaited source = kNorm                    ? stream_words(p, s, input_stream<kOp>(p, layer), p.stream.scaled)
                               : kOp == abi::kOpOutProj ? awaited(p, s, layer, p.at.attention_out, abi::kEdgeAttention)
                                                        : awaited(p, s, layer, p.at.activation, abi::kEdgeGateUp);
  load_panel<kElementBytes>(p, s, source, p.ops[kOp].k_extent / 2, p.ops[kOp].k_panel, k0, k1);
  sync_consumers();
  if (kNorm && k1 == p.ops[kOp].k_extent) load_inverse_rms(p, s, input_stream<kOp>(p, layer));
}

}  // namespace sgl_lowlatency::stages
