// How a step's attention is cut into items: decided on the device from the lengths, because the grid is fixed at capture.
#pragma once
#include "sgl_lowlatency/stages/row_state.hpp"

namespace sgl_lowlatency::stages {

// With L_r the row's length (at least 1) and U = num_kv_heads * subgroups:
//   chunk = max(kMinItemTokens, ceil(sum_r L_r * U / grid)),  splits_r = max(1, floor(L_r / chunk))
// A row's splits are equal up to kItemTokenMultiple, and the number of items is at most grid + rows * U. A pure function of
// the lengths and the grid: the same step is cut the same way.
struct AttentionSplit {
  int32_t chunk;      // least tokens of a split, before its begin is rounded down
  int32_t units;      // U: items of one split of a row
  int32_t subgroups;
  int32_t num_items;
};

// A row without tokens still has an item: it hands over zeros.
SGL_DEVICE int32_t positive_length(const Shared& s, int32_t row) { return s.rows()->length[row] > 0 ? s.rows()->length[row] : 1; }

SGL_DEVICE int32_t num_splits(const Shared& s, const AttentionSplit& a, int32_t row) {
  const int32_t splits = positive_length(s, row) / a.chunk;
  return splits > 1 ? splits : 1;
}

// Entry: any thread, after the block's first barrier (RowState::length).
SGL_DEVICE AttentionSplit split_attention(const DecodeStepParams& p, const Shared& s) {
  AttentionSplit a;
  a.subgroups = abi::head_subgroups(p.geometry.num_q_heads, p.geometry.num_kv_heads);
  a.units = p.geometry.num_kv_heads * a.subgroups;
  int64_t tokens = 0;
  for (int32_t row = 0; row < p.rows; ++row) tokens += positive_length(s, row);
  const int32_t grid = dialect::grid_dim();
  const int64_t share = (tokens * a.units + grid - 1) / grid;
  a.chunk = static_cast<int32_t>(share > abi::kMinItemTokens ? share : abi::kMinItemTokens);
  a.num_items = 0;
  for (int32_t row = 0; row < p.rows; ++row) a.num_items += num_splits(s, a, row) * a.units;
  return a;
}

// First token of split i of a row: multiples of kItemTokenMultiple, the row's end for i = splits.
SGL_DEVICE int32_t split_begin(int32_t length, int32_t splits, int32_t i) {
  if (i == splits) return length;
  return static_cast<int32_t>(static_cast<int64_t>(length) * i / splits) / abi::kItemTokenMultiple * abi::kItemTokenMultiple;
}

// idx in [0, num_items): rows in order, within a row all units of split 0, then of split 1, ...
SGL_DEVICE AttentionItem attention_item(const DecodeStepParams& p, const Shared& s, const AttentionSplit& a, int32_t idx) {
  AttentionItem item{};
  int32_t first = 0;
  for (int32_t row = 0; row < p.rows; ++row) {
    const int32_t splits = num_splits(s, a, row), count = splits * a.units;
    if (idx < first + count) {
      const int32_t unit = (idx - first) % a.units, group = p.geometry.num_q_heads / p.geometry.num_kv_heads;
      const int32_t subgroup = unit % a.subgroups, head_in_group = subgroup * abi::kMaxHeadsPerItem;
      item.row = row;
      item.kv_head = unit / a.subgroups;
      item.head_begin = item.kv_head * group + head_in_group;
      item.num_heads = group - head_in_group < abi::kMaxHeadsPerItem ? group - head_in_group : abi::kMaxHeadsPerItem;
      item.split = (idx - first) / a.units;
      item.num_splits = splits;
      const int32_t length = s.rows()->length[row];
      item.begin = split_begin(length, splits, item.split);
      item.end = split_begin(length, splits, item.split + 1);
      item.first_slot = first + unit;
      item.slot_stride = a.units;
      return item;
    }
    first += count;
  }
  return item;  // not reached for idx < num_items
}

// Item number `nth` of the block's: every grid-th of all. Entry: as above; keep_items has filled RowState::items.
SGL_DEVICE AttentionItem block_item(const DecodeStepParams& p, const Shared& s, int32_t nth) {
  if (nth < kKeptItems) return s.rows()->items[nth];
  return attention_item(p, s, split_attention(p, s), dialect::block_idx() + nth * dialect::grid_dim());
}

// Entry: one thread, after the block's first barrier; a barrier follows.
SGL_DEVICE void keep_items(const DecodeStepParams& p, const Shared& s) {
  const AttentionSplit split = split_attention(p, s);
  const int32_t left = split.num_items - dialect::block_idx(), grid = dialect::grid_dim();
  const int32_t count = left > 0 ? (left + grid - 1) / grid : 0;
  s.rows()->num_items = count;
  for (int32_t nth = 0; nth < min_int(count, kKeptItems); ++nth) {
    s.rows()->items[nth] = attention_item(p, s, split, dialect::block_idx() + nth * grid);
  }
}

}  // namespace sgl_lowlatency::stages
