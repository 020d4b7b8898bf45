// The attention phase of a layer: this block's items, one after the other, and then its shares of the rows they belong to.
// free_half: of scratch, see new_vector.
#pragma once
#include "sgl_lowlatency/stages/attention_merge.hpp"
#include "sgl_lowlatency/stages/upkeep.hpp"

namespace sgl_lowlatency::stages {

// One item up to its hand-over. Entry: all consumer threads; vectors and panel are free. Ends with a consumer barrier.
template <int32_t kHeadDim, bool kIsVerify>
SGL_DEVICE void run_item(const DecodeStepParams& p, const Shared& s, int32_t layer, const AttentionItem& item, bool is_first, uint32_t free_half) {
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32, g = lane / 4, t = lane % 4;
  const LayerTables& tables = layer_tables(s, layer);
  bf16 *const k_pool = tables.kv.k, *const v_pool = tables.kv.v;
  // Its copies are under way before the wait for qkv.
  ItemTokens<kHeadDim, kIsVerify> tokens(p, s, item, layer, k_pool, v_pool, is_first && layer > 0, warp, lane);
  if (is_first && layer == 0) tokens.keep_slots(s, warp);
  const int32_t columns = num_columns<kIsVerify>(item), num_new = !kIsVerify ? 1 : tokens.has_new() ? tokens.end - tokens.new_begin : 0;
  prepare_item<kHeadDim, kIsVerify>(p, s, layer, item, num_new, free_half, tables.weights.q_norm, tables.weights.k_norm, warp, lane);
  if (is_writer<kIsVerify>(p, item, tokens.has_new())) write_new_tokens<kHeadDim, kIsVerify>(p, s, item, free_half, k_pool, v_pool, warp, lane);
  Vec16 q[kHeadDim / 32] = {};  // lane 4 g + t: chunks of column g; columns beyond the item's are zeros
  const Vec16* q_vector = reinterpret_cast<const Vec16*>(item_vector<kHeadDim>(s, g));
SGL_UNROLL
  for (int32_t j = 0; j < kHeadDim / 32; ++j) {
    if (g < columns) q[j] = q_vector[4 * j + t];
  }
  const int32_t ends[2] = {column_end<kIsVerify>(item, 2 * t), column_end<kIsVerify>(item, 2 * t + 1)};
  SoftmaxState<kHeadDim> state;
  while (tokens.has_batch()) {
    const bool is_live[2][2] = {{tokens.first + g < ends[0], tokens.first + g + 8 < ends[0]}, {tokens.first + g < ends[1], tokens.first + g + 8 < ends[1]}};
    dialect::copy_async_wait<1>();
    tokens.place_new(s, free_half, 0);
    dialect::sync_warp();
    const BatchWeights w = score_batch<kHeadDim>(state, q, tokens.stage, is_live, p.geometry.softmax_scale * kLog2e, lane);
    dialect::sync_warp();
    tokens.copy_next_k();
    dialect::copy_async_wait<1>();
    tokens.place_new(s, free_half, 1);
    dialect::sync_warp();
    weigh_values<kHeadDim>(state, w, tokens.stage, lane);
    dialect::sync_warp();
    tokens.copy_next_v();
  }
  dialect::copy_async_wait<0>();
  dialect::sync_warp();  // the merge area lies over the warp's own stage
  store_state<kHeadDim>(MergeArea<kHeadDim>(s), state, columns, warp, lane);
  sync_consumers();
  publish_item<kHeadDim, kIsVerify>(p, s, layer, item);
  sync_consumers();
}

// Entry: all consumer threads. Awaits kEdgeQkv and kEdgePartial, publishes kEdgePartial and kEdgeAttention. All items are handed
// over before any row is merged, so that no two blocks wait for each other.
template <int32_t kHeadDim, bool kIsVerify>
SGL_DEVICE void run_attention(const DecodeStepParams& p, const Shared& s, int32_t layer, uint32_t free_half) {
  const int32_t num_items = s.rows()->num_items;
  for (int32_t nth = 0; nth < num_items; ++nth) {
    run_item<kHeadDim, kIsVerify>(p, s, layer, block_item<kIsVerify>(p, s, nth), nth == 0, free_half);
  }
  for (int32_t nth = 0; nth < num_items; ++nth) {
    const AttentionItem item = block_item<kIsVerify>(p, s, nth);
    if (item.num_splits > 1) combine_item<kHeadDim, kIsVerify>(p, s, layer, item);
  }
}

}  // namespace sgl_lowlatency::stages
