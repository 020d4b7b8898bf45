// The attention phase of a layer: this block's items, one after the other, and then its shares of the rows they belong to.
#pragma once
#include "sgl_lowlatency/stages/attention_merge.hpp"
#include "sgl_lowlatency/stages/upkeep.hpp"

namespace sgl_lowlatency::stages {

// One item up to its hand-over. Entry: all consumer threads; vectors and panel are free. Ends with a consumer barrier.
template <int32_t kHeadDim>
SGL_DEVICE void run_item(const DecodeStepParams& p, const Shared& s, int32_t layer, const AttentionItem& item, bool is_first) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, g = lane / 4, t = lane % 4;
  const LayerTables& tables = layer_tables(s, layer);
  bf16 *const k_pool = tables.kv.k, *const v_pool = tables.kv.v;
  // Its copies are under way before the wait for qkv.
  ItemTokens<kHeadDim> tokens(p, s, item, layer, k_pool, v_pool, is_first && layer > 0, warp, lane);
  if (is_first && layer == 0) tokens.keep_slots(s, warp);
  prepare_item<kHeadDim>(p, s, layer, item, tables.weights.q_norm, tables.weights.k_norm, warp, lane);
  const bool is_writer = tokens.has_new() && item.head_begin == item.kv_head * (p.geometry.num_q_heads / p.geometry.num_kv_heads);
  if (warp == 0 && is_writer) write_new_token<kHeadDim>(p, s, item, k_pool, v_pool, lane);
  Vec16 q[kHeadDim / 32] = {};  // lane 4 g + t: chunks of query head g; heads beyond the item's are zeros
  const Vec16* q_vector = reinterpret_cast<const Vec16*>(item_vector<kHeadDim>(s, g));
SGL_UNROLL
  for (int32_t j = 0; j < kHeadDim / 32; ++j) {
    if (g < item.num_heads) q[j] = q_vector[4 * j + t];
  }
  SoftmaxState<kHeadDim> state;
  while (tokens.has_batch()) {
    const bool is_live[2] = {tokens.first + g < tokens.end, tokens.first + g + 8 < tokens.end};
    dialect::copy_async_wait<1>();
    tokens.place_new(s, 0);
    dialect::sync_warp();
    const BatchWeights w = score_batch<kHeadDim>(state, q, tokens.stage, is_live, p.geometry.softmax_scale * kLog2e, lane);
    dialect::sync_warp();
    tokens.copy_next_k();
    dialect::copy_async_wait<1>();
    tokens.place_new(s, 1);
    dialect::sync_warp();
    weigh_values<kHeadDim>(state, w, tokens.stage, lane);
    dialect::sync_warp();
    tokens.copy_next_v();
  }
  dialect::copy_async_wait<0>();
  dialect::sync_warp();  // the merge area lies over the warp's own stage
  store_state<kHeadDim>(MergeArea<kHeadDim>(s), state, item.num_heads, warp, lane);
  sync_consumers();
  publish_item<kHeadDim>(p, s, layer, item);
  sync_consumers();
}

// Entry: all consumer threads. Awaits kEdgeQkv and kEdgePartial, publishes kEdgePartial and kEdgeAttention. All items are handed
// over before any row is merged, so that no two blocks wait for each other.
template <int32_t kHeadDim>
SGL_DEVICE void run_attention(const DecodeStepParams& p, const Shared& s, int32_t layer) {
  const int32_t num_items = s.rows()->num_items;
  for (int32_t nth = 0; nth < num_items; ++nth) run_item<kHeadDim>(p, s, layer, block_item(p, s, nth), nth == 0);
  for (int32_t nth = 0; nth < num_items; ++nth) {
    const AttentionItem item = block_item(p, s, nth);
    if (item.num_splits > 1) combine_item<kHeadDim>(p, s, layer, item);
  }
}

}  // namespace sgl_lowlatency::stages
