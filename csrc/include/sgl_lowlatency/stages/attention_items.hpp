// How a step's attention is cut into items: decided on the device from the lengths, because the grid is fixed at capture.
#pragma once
#include "sgl_lowlatency/stages/row_state.hpp"

namespace sgl_lowlatency::stages {

// With L_r the request's length, its new tokens included (at least 1), and U = abi::request_units:
//   chunk = max(kMinItemTokens, ceil(sum_r L_r * U / grid)),  splits_r = max(1, floor(L_r / chunk))
// A request's splits are equal up to kItemTokenMultiple, and the number of items is at most grid + requests * U. A pure function of
// the lengths and the grid: the same step is cut the same way. All new tokens are in the last split: it is the only one or has kMinItemTokens.
struct AttentionSplit {
  int32_t chunk;       // least tokens of a split, before its begin is rounded down
  int32_t units;       // U: items of one split of a request
  int32_t subgroups;   // of a kv head's query heads
  int32_t item_rows;   // most rows of an item
  int32_t row_groups;  // items that the rows of a request take
  int32_t num_requests;
  int32_t num_items;
};
static_assert(abi::kMaxRows <= abi::kMinItemTokens, "the last split begins before the first new token");

// A request without tokens still has items: they hand over zeros.
SGL_DEVICE int32_t positive_length(const Shared& s, int32_t request) { return s.rows()->row[request].length > 0 ? s.rows()->row[request].length : 1; }

SGL_DEVICE int32_t num_splits(const Shared& s, const AttentionSplit& a, int32_t request) {
  const int32_t splits = positive_length(s, request) / a.chunk;
  return splits > 1 ? splits : 1;
}

// Entry: any thread, after the block's first barrier (Row::length).
template <bool kIsVerify>
SGL_DEVICE AttentionSplit split_attention(const DecodeStepParams& p, const Shared& s) {
  AttentionSplit a;
  const int32_t rows = rows_per_request<kIsVerify>(p);
  a.subgroups = abi::head_subgroups(p.geometry.num_q_heads, p.geometry.num_kv_heads);
  a.item_rows = kIsVerify ? abi::item_rows(p.geometry, rows) : 1;
  a.row_groups = (rows + a.item_rows - 1) / a.item_rows;
  a.units = p.geometry.num_kv_heads * a.subgroups * a.row_groups;
  a.num_requests = request_of<kIsVerify>(p, p.rows);
  int64_t tokens = 0;
  for (int32_t request = 0; request < a.num_requests; ++request) tokens += positive_length(s, request);
  const int32_t grid = dialect::grid_dim();
  const int64_t share = (tokens * a.units + grid - 1) / grid;
  a.chunk = static_cast<int32_t>(share > abi::kMinItemTokens ? share : abi::kMinItemTokens);
  a.num_items = 0;
  for (int32_t request = 0; request < a.num_requests; ++request) a.num_items += num_splits(s, a, request) * a.units;
  return a;
}

// First token of split i of a request: multiples of kItemTokenMultiple, the request's end for i = splits.
SGL_DEVICE int32_t split_begin(int32_t length, int32_t splits, int32_t i) {
  if (i == splits) return length;
  return static_cast<int32_t>(static_cast<int64_t>(length) * i / splits) / abi::kItemTokenMultiple * abi::kItemTokenMultiple;
}

// idx in [0, num_items): requests in order, within a request all units of split 0, then of split 1, ...; items that read the same
// tokens of the same kv head are neighbours.
template <bool kIsVerify>
SGL_DEVICE AttentionItem attention_item(const DecodeStepParams& p, const Shared& s, const AttentionSplit& a, int32_t idx) {
  AttentionItem item{};
  int32_t first = 0;
  for (int32_t request = 0; request < a.num_requests; ++request) {
    const int32_t splits = num_splits(s, a, request), count = splits * a.units;
    if (idx < first + count) {
      const int32_t unit = (idx - first) % a.units, group = p.geometry.num_q_heads / p.geometry.num_kv_heads;
      const int32_t heads = unit / a.row_groups, first_row = unit % a.row_groups * a.item_rows, num_rows = rows_per_request<kIsVerify>(p);
      const int32_t subgroup = heads % a.subgroups, head_in_group = subgroup * abi::kMaxHeadsPerItem;
      item.row = request * num_rows + first_row;
      item.num_rows = min_int(num_rows - first_row, a.item_rows);
      item.kv_head = heads / a.subgroups;
      item.head_begin = item.kv_head * group + head_in_group;
      item.num_heads = group - head_in_group < abi::kMaxHeadsPerItem ? group - head_in_group : abi::kMaxHeadsPerItem;
      item.split = (idx - first) / a.units;
      item.num_splits = splits;
      const int32_t length = s.rows()->row[request].length;
      item.begin = split_begin(length, splits, item.split);
      item.end = split_begin(length, splits, item.split + 1);
      if (kIsVerify && item.split + 1 == splits && length > 0) {  // the last row's own token is the last it sees
        const int32_t num_hidden = num_rows - first_row - item.num_rows;
        item.end -= dialect::planted(dialect::Planted::kSeesSibling) && num_hidden > 0 ? num_hidden - 1 : num_hidden;
      }
      item.first_slot = first + unit;
      item.slot_stride = a.units;
      return item;
    }
    first += count;
  }
  return item;  // not reached for idx < num_items
}

// Item number `nth` of the block's: every grid-th of all. Entry: as above; keep_items has filled RowState::items.
template <bool kIsVerify>
SGL_DEVICE AttentionItem block_item(const DecodeStepParams& p, const Shared& s, int32_t nth) {
  if (nth < kKeptItems) return s.rows()->items[nth];
  return attention_item<kIsVerify>(p, s, split_attention<kIsVerify>(p, s), dialect::block_idx() + nth * dialect::grid_dim());
}

// Entry: one thread, after the block's first barrier; a barrier follows.
template <bool kIsVerify>
SGL_DEVICE void keep_items(const DecodeStepParams& p, const Shared& s) {
  const AttentionSplit split = split_attention<kIsVerify>(p, s);
  const int32_t left = split.num_items - dialect::block_idx(), grid = dialect::grid_dim();
  const int32_t count = left > 0 ? (left + grid - 1) / grid : 0;
  s.rows()->num_items = count;
  for (int32_t nth = 0; nth < min_int(count, kKeptItems); ++nth) {
    s.rows()->items[nth] = attention_item<kIsVerify>(p, s, split, dialect::block_idx() + nth * grid);
  }
}

// Columns of the MMA that an item fills.
template <bool kIsVerify>
SGL_DEVICE int32_t num_columns(const AttentionItem& item) { return kIsVerify ? item.num_rows * item.num_heads : item.num_heads; }

// The row of a column, counted from the item's first, and its query head.
template <bool kIsVerify>
SGL_DEVICE int32_t column_row(const AttentionItem& item, int32_t column) { return kIsVerify ? column / item.num_heads : 0; }
template <bool kIsVerify>
SGL_DEVICE int32_t column_head(const AttentionItem& item, int32_t column) {
  return item.head_begin + column - column_row<kIsVerify>(item, column) * item.num_heads;
}

// First token that a column does not see: in the last split every row sees one more than the row before it.
// Of a column beyond the item's it is past the end, and nobody looks at what comes of it.
template <bool kIsVerify>
SGL_DEVICE int32_t column_end(const AttentionItem& item, int32_t column) {
  if (!kIsVerify || item.split + 1 < item.num_splits) return item.end;
  const int32_t end = item.end - (item.num_rows - 1 - column_row<kIsVerify>(item, column));
  return dialect::planted(dialect::Planted::kSeesSibling) ? min_int(end + 1, item.end) : end;
}

}  // namespace sgl_lowlatency::stages
