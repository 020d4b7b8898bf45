// Entering and leaving a phase of the layer: what a block waits for and what it tells the others.
#pragma once
#include "sgl_lowlatency/stages/row_state.hpp"

namespace sgl_lowlatency::stages {

SGL_DEVICE int32_t signals_per_layer(const DecodeStepParams& p, abi::EdgeIdx edge) {
  switch (edge) {
    case abi::kEdgeQkv: return p.ops[abi::kOpQkv].producers;
    case abi::kEdgeOutProj: return p.ops[abi::kOpOutProj].producers;
    case abi::kEdgeGateUp: return p.ops[abi::kOpGateUp].producers;
    case abi::kEdgeDown: return p.ops[abi::kOpDown].producers;
    default: return p.rows * p.geometry.num_kv_heads * abi::head_subgroups(p.geometry.num_q_heads, p.geometry.num_kv_heads);
  }
}

// Entry: all consumer threads. Ends with a consumer barrier: afterwards what `edge` of `layer` covers is visible to them, and
// panel and scratch are free. layer -1 (before the first layer) has nothing to wait for.
SGL_DEVICE void await_phase(const DecodeStepParams& p, const Shared& s, abi::EdgeIdx edge, int32_t layer) {
  if (dialect::thread_idx() == 0 && layer >= 0) {
    const uint32_t target = s.rows()->edge_base[edge] + static_cast<uint32_t>((layer + 1) * signals_per_layer(p, edge));
    sync::await_edge(fault_sink(p), layer, edge, p.sync->edge[edge], target);
  }
  sync_consumers();
}

// Entry: all consumer threads, after their last access of the phase.
SGL_DEVICE void signal_phase(const DecodeStepParams& p, abi::EdgeIdx edge) {
  sync_consumers();
  if (dialect::thread_idx() == 0) sync::signal_edge(p.sync->edge[edge]);
}

}  // namespace sgl_lowlatency::stages
