// What each operation of a layer reads: the activations that fill its panel.
#pragma once
#include "sgl_lowlatency/stages/op.hpp"
#include "sgl_lowlatency/stages/stream.hpp"
#include "sgl_lowlatency/stages/upkeep.hpp"

namespace sgl_lowlatency::stages {

// The stream that operation `op` of `layer` reads, scaled (qkv, gate_up, router) or to add to it (out_proj, down).
template <class Op>
SGL_DEVICE Stream input_stream(const DecodeStepParams& p, int32_t layer, Op op) {
  return op == abi::kOpQkv || op == abi::kOpOutProj ? end_stream(p, layer - 1) : mid_stream(p, layer);
}

// The norm weights that scale what out_proj or down of `layer` hands over. Scaled by the norm behind the last layer, the stream is the LM head's
// operand.
template <class Op>
SGL_DEVICE const bf16* norm_behind(const DecodeStepParams& p, const Shared& s, int32_t layer, Op op) {
  const bool is_last = op == abi::kOpDown && layer + 1 == p.geometry.num_layers;
  return op == abi::kOpOutProj ? layer_tables(s, layer).weights.post_norm : is_last ? p.final_norm : layer_tables(s, layer + 1).weights.input_norm;
}

// Fills the panel with columns [k0, k1) of operation `op`'s input and passes a consumer barrier; with the last columns, where it
// reads the stream, Row::inverse_rms follows, which the next barrier publishes. Entry: all consumer threads; the panel is free.
template <int32_t kElementBytes, class Op>
SGL_DEVICE void load_operand(const DecodeStepParams& p, const Shared& s, int32_t layer, Op op, int32_t k0, int32_t k1) {
  const bool has_norm = op == abi::kOpQkv || op == abi::kOpGateUp || op == abi::kOpRouter;
  const sync::Awaited source = has_norm                ? stream_words(p, s, input_stream(p, layer, op), p.stream.scaled)
                               : op == abi::kOpOutProj ? awaited(p, s, layer, p.at.attention_out, abi::kEdgeAttention)
                                                       : awaited(p, s, layer, p.at.activation, abi::kEdgeGateUp);
  load_panel<kElementBytes>(p, s, source, p.ops[op].k_extent / 2, p.ops[op].k_panel, k0, k1);
  sync_consumers();
  if (has_norm && k1 == p.ops[op].k_extent) load_inverse_rms(p, s, input_stream(p, layer, op));
}

}  // namespace sgl_lowlatency::stages
