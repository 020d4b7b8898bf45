// What each operation of a layer reads: the activations that fill its panel.
#pragma once
#include "sgl_lowlatency/stages/stream.hpp"
#include "sgl_lowlatency/stages/upkeep.hpp"

namespace sgl_lowlatency::stages {

// The stream that operation kOp of `layer` reads, scaled (qkv, gate_up) or to add to it (out_proj, down).
template <int32_t kOp>
SGL_DEVICE Stream input_stream(const DecodeStepParams& p, int32_t layer) {
  return kOp == abi::kOpQkv || kOp == abi::kOpOutProj ? end_stream(p, layer - 1) : mid_stream(p, layer);
}

// The panel area holds two panels of an operation that has several, where they fit: one is read while the next one comes.
template <int32_t kOp>
SGL_DEVICE bool has_two_panels(const DecodeStepParams& p) {
  return p.ops[kOp].k_panel < p.ops[kOp].k_extent && 2 * p.rows * abi::panel_row_bytes(p.ops[kOp].k_panel) <= p.max_panel_bytes;
}

// Where the panel that begins at column k0 of operation kOp lies.
template <int32_t kOp>
SGL_DEVICE char* panel_at(const DecodeStepParams& p, const Shared& s, int32_t k0) {
  const int32_t k_panel = p.ops[kOp].k_panel;
  return s.panel() + (has_two_panels<kOp>(p) && k0 / k_panel % 2 == 1 ? p.rows * abi::panel_row_bytes(k_panel) : 0);
}

template <int32_t kOp>
SGL_DEVICE PanelPart panel_part(const DecodeStepParams& p, const Shared& s, int32_t layer, int32_t k0) {
  constexpr bool kNorm = kOp == abi::kOpQkv || kOp == abi::kOpGateUp;
  const sync::Awaited source = kNorm                    ? stream_words(p, s, input_stream<kOp>(p, layer), p.stream.scaled)
                               : kOp == abi::kOpOutProj ? awaited(p, s, layer, p.at.attention_out, abi::kEdgeAttention)
                                                        : awaited(p, s, layer, p.at.activation, abi::kEdgeGateUp);
  const int32_t k_extent = p.ops[kOp].k_extent, k_panel = p.ops[kOp].k_panel;
  // Later columns have most likely been there since the first ones were.
  const int32_t lead = k0 > 0 ? 0 : p.rows == 1 ? kPanelLeadOneRow : kPanelLead;
  return {source, k_extent / 2, k0, min_int(k0 + k_panel, k_extent), panel_at<kOp>(p, s, k0), abi::panel_row_bytes(k_panel), lead};
}

// Fills the panel with operation kOp's input from column k0 on and passes a consumer barrier; with the last columns, where it
// reads the stream, Row::inverse_rms follows, which the next barrier publishes. The next panel is asked for, where it has a place.
// Entry: all consumer threads, which read no panel any more but, of two, the one before this.
template <int32_t kElementBytes, int32_t kOp>
SGL_DEVICE void load_operand(const DecodeStepParams& p, const Shared& s, int32_t layer, int32_t k0) {
  constexpr bool kNorm = kOp == abi::kOpQkv || kOp == abi::kOpGateUp;
  const PanelPart part = panel_part<kOp>(p, s, layer, k0);
  if (k0 == 0 || !has_two_panels<kOp>(p)) request_panel<kElementBytes>(p, part);
  settle_panel<kElementBytes>(p, part);
  sync_consumers();
  const bool is_last = part.k1 == p.ops[kOp].k_extent;
  // The barrier is behind everyone's last tile of the panel before, whose place the next one takes.
  if (!is_last && has_two_panels<kOp>(p)) request_panel<kElementBytes>(p, panel_part<kOp>(p, s, layer, part.k1));
  if (kNorm && is_last) load_inverse_rms(p, s, input_stream<kOp>(p, layer));
}

}  // namespace sgl_lowlatency::stages
