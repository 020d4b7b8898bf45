// The attention phase of a layer: this block's items, one after the other.
#pragma once
#include "sgl_lowlatency/stages/attention_combine.hpp"
#include "sgl_lowlatency/stages/phase.hpp"

namespace sgl_lowlatency::stages {

// Entry: all consumer threads. Waits for kEdgeQkv; signals kEdgeAttention once for every (row, kv head, subgroup) completed.
// A function of its own, never inlined: its fragments fill the register file, and must not push the GEMM loops' state out.
template <int32_t kHeadDim>
SGL_DEVICE_COLD void run_attention(const DecodeStepParams& p, int32_t layer) {
  const Shared s{p.shared};
  const AttentionSplit split = split_attention(p, s);
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, g = lane / 4, t = lane % 4;
  const bf16* q_norm = dialect::load_constant_pointer(&p.layers[layer].q_norm);
  const bf16* k_norm = dialect::load_constant_pointer(&p.layers[layer].k_norm);
  bf16* k_pool = dialect::load_constant_pointer(&p.kv[layer].k);
  bf16* v_pool = dialect::load_constant_pointer(&p.kv[layer].v);
  for (int32_t idx = dialect::block_idx(); idx < split.num_items; idx += dialect::grid_dim()) {
    const AttentionItem item = attention_item(p, s, split, idx);
    if (idx == dialect::block_idx()) await_phase(p, s, abi::kEdgeQkv, layer);
    prepare_item<kHeadDim>(p, s, item, q_norm, k_norm, warp, lane);
    const bool is_writer =
        item.split + 1 == item.num_splits && item.head_begin == item.kv_head * (p.geometry.num_q_heads / p.geometry.num_kv_heads);
    if (warp == 0 && is_writer && item.end > 0) write_new_token<kHeadDim>(p, s, item, k_pool, v_pool, lane);
    Vec16 q[kHeadDim / 32] = {};  // lane 4 g + t: chunks of query head g; heads beyond the item's are zeros
    const Vec16* q_vector = reinterpret_cast<const Vec16*>(item_vector<kHeadDim>(s, g));
SGL_UNROLL
    for (int32_t j = 0; j < kHeadDim / 32; ++j) {
      if (g < item.num_heads) q[j] = q_vector[4 * j + t];
    }
    ItemTokens<kHeadDim> tokens(p, s, item, layer, k_pool, v_pool, warp, lane);
    SoftmaxState<kHeadDim> state;
    KvBatch<kHeadDim> kv;
    bool is_live[2];
    while (tokens.load_pool(kv, is_live) || tokens.load_new(kv, is_live)) {
      accumulate_batch<kHeadDim>(state, q, kv, is_live, p.geometry.softmax_scale * kLog2e);
    }
    store_state<kHeadDim>(MergeArea<kHeadDim>(s), state, item.num_heads, warp, lane);
    sync_consumers();
    combine_item<kHeadDim>(p, s, item);
  }
}

}  // namespace sgl_lowlatency::stages
