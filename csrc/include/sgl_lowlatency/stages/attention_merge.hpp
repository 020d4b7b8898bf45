// From the warps' softmax states to the item's output, and from a row's splits to its attention output.
#pragma once
#include "sgl_lowlatency/stages/attention.hpp"

namespace sgl_lowlatency::stages {

// Outputs are merged and handed between splits in the order in which store_state writes them without bank conflicts: position
// 16 i + 2 g + j holds element d = g * head_dim/8 + 2 i + j.
template <int32_t kHeadDim>
SGL_DEVICE int32_t element_at(int32_t position) { return position % 16 / 2 * (kHeadDim / 8) + position / 16 * 2 + position % 2; }

// Every warp's merge area lies over its own stage of tokens (abi::attention_warp_bytes): out[column][kPitch], (max, sum)[column].
template <int32_t kHeadDim>
struct MergeArea {
  static constexpr int32_t kPitch = kHeadDim + abi::kMergePadFloats;
  static constexpr int32_t kWarpBytes = abi::attention_warp_bytes(kHeadDim), kMaxSumBegin = abi::kMaxHeadsPerItem * kPitch * 4;
  char* base;
  SGL_DEVICE explicit MergeArea(const Shared& s) : base(s.panel()) {}
  SGL_DEVICE Float2* out(int32_t warp, int32_t column, int32_t position) const {
    return reinterpret_cast<Float2*>(base + warp * kWarpBytes + (column * kPitch + position) * 4);
  }
  SGL_DEVICE Float2* max_sum(int32_t warp, int32_t column) const {
    return reinterpret_cast<Float2*>(base + warp * kWarpBytes + kMaxSumBegin + column * 8);
  }
};

// Entry: all lanes of a consumer warp, which has read its last tokens.
template <int32_t kHeadDim>
SGL_DEVICE void store_state(const MergeArea<kHeadDim>& area, SoftmaxState<kHeadDim>& state, int32_t columns, int32_t warp, int32_t lane) {
  const int32_t g = lane / 4, t = lane % 4;
SGL_UNROLL
  for (int32_t h = 0; h < 2; ++h) {
SGL_UNROLL
    for (int32_t mask = 4; mask < 32; mask *= 2) state.sum[h] += dialect::shuffle_xor(state.sum[h], mask);
    const int32_t column = 2 * t + h;
    if (column >= columns) continue;
SGL_UNROLL
    for (int32_t i = 0; i < kHeadDim / 16; ++i) *area.out(warp, column, 16 * i + 2 * g) = {state.out[i][h], state.out[i][h + 2]};
    if (g == 0) *area.max_sum(warp, column) = {state.max_score[h], state.sum[h]};
  }
}

struct Merged {
  float max_score;
  float sum;
  float out[2];
};

// Adds n partial softmaxes of two neighbouring elements in index order. max_sum(i), out(i): of part i.
template <class MaxSum, class Out>
SGL_DEVICE Merged merge_parts(int32_t n, MaxSum max_sum, Out out) {
  Merged m{kLowestScore, 0.0f, {}};
  for (int32_t i = 0; i < n; ++i) {
    const float part_max = max_sum(i).x;
    m.max_score = part_max > m.max_score ? part_max : m.max_score;
  }
  for (int32_t i = 0; i < n; ++i) {
    const Float2 part = max_sum(i), part_out = out(i);
    const float weight = dialect::exp2(part.x - m.max_score);
    m.sum += weight * part.y;
    m.out[0] += weight * part_out.x;
    m.out[1] += weight * part_out.y;
  }
  return m;
}

// column: of the item; position: even.
template <int32_t kHeadDim, bool kIsVerify>
SGL_DEVICE void publish_attention_out(const DecodeStepParams& p, const Shared& s, int32_t layer, const AttentionItem& item, int32_t column,
                                      int32_t position, const Merged& m) {
  const int32_t row = item.row + column_row<kIsVerify>(item, column), head = column_head<kIsVerify>(item, column);
  // Without tokens zeros; scores that are all -inf give NaN, as a softmax does.
  const bool has_tokens = s.rows()->row[request_of<kIsVerify>(p, item.row)].length > 0;
  const float scale = has_tokens ? 1.0f / m.sum : 0.0f;
  uint32_t words[1] = {has_tokens ? pack_bf16(m.out[0] * scale, m.out[1] * scale) : 0u};
  const int64_t element = (static_cast<int64_t>(row) * p.geometry.num_q_heads + head) * kHeadDim + element_at<kHeadDim>(position);
  sync::publish(handover_buffer(p, s, layer, p.at.attention_out) + element / 2, words);
}

// Where an item's partial result lies in partial_out: [slot][column][kHeadDim], and in partial_max_sum: [slot][column][2].
template <bool kIsVerify>
SGL_DEVICE int64_t partial_column(const DecodeStepParams& p, const AttentionItem& item, int32_t split, int32_t column) {
  const int32_t columns = abi::item_heads(p.geometry) * (kIsVerify ? abi::item_rows(p.geometry, p.rows_per_request) : 1);
  return static_cast<int64_t>(item.first_slot + split * item.slot_stride) * columns + column;
}

// Merges the warps' states and hands the result over: to out_proj, or to the splits of the same rows and heads.
// Entry: all consumer threads, after store_state and a consumer barrier.
template <int32_t kHeadDim, bool kIsVerify>
SGL_DEVICE void publish_item(const DecodeStepParams& p, const Shared& s, int32_t layer, const AttentionItem& item) {
  const MergeArea<kHeadDim> area(s);
  for (int32_t e = dialect::thread_idx(); e < num_columns<kIsVerify>(item) * (kHeadDim / 2); e += kConsumerThreads) {
    const int32_t column = e / (kHeadDim / 2), position = e % (kHeadDim / 2) * 2;
    const Merged m = merge_parts(abi::kNumConsumerWarps, [&](int32_t warp) { return *area.max_sum(warp, column); },
                                 [&](int32_t warp) { return *area.out(warp, column, position); });
    if (item.num_splits == 1) {
      publish_attention_out<kHeadDim, kIsVerify>(p, s, layer, item, column, position, m);
      continue;
    }
    const int64_t at = partial_column<kIsVerify>(p, item, item.split, column);
    uint32_t out[2] = {dialect::float_to_bits(m.out[0]), dialect::float_to_bits(m.out[1])};
    sync::publish(handover_buffer(p, s, layer, p.at.partial_out) + at * kHeadDim + position, out);
    if (position == 0) {
      uint32_t max_sum[2] = {dialect::float_to_bits(m.max_score), dialect::float_to_bits(m.sum)};
      sync::publish(handover_buffer(p, s, layer, p.at.partial_max_sum) + at * 2, max_sum);
    }
  }
}

// One part of two neighbouring elements, as it waits in shared memory to be merged.
struct alignas(16) Part {
  Float2 max_sum;
  Float2 out;
};

// Every split of some rows and heads merges its share of their elements, from all splits. A thread takes one pair of one split.
// Entry: all consumer threads; the block has published all of its items (so that no two blocks wait for each other), the panel
// is free. Ends with a consumer barrier.
template <int32_t kHeadDim, bool kIsVerify>
SGL_DEVICE void combine_item(const DecodeStepParams& p, const Shared& s, int32_t layer, const AttentionItem& item) {
  const int32_t n = item.num_splits, pairs = num_columns<kIsVerify>(item) * (kHeadDim / 2);
  const int32_t begin = pairs * item.split / n, count = pairs * (item.split + 1) / n - begin;
  const uint32_t* const partial_out = handover_buffer(p, s, layer, p.at.partial_out);
  const uint32_t* const partial_max_sum = handover_buffer(p, s, layer, p.at.partial_max_sum);
  Part* const parts = reinterpret_cast<Part*>(s.panel());  // [split][pair]: at most 8 * 64 + grid
  for (int32_t e = dialect::thread_idx(); e < count * n; e += kConsumerThreads) {
    const int32_t split = e / count, pair = begin + e % count, column = pair / (kHeadDim / 2), position = pair % (kHeadDim / 2) * 2;
    const int64_t at = partial_column<kIsVerify>(p, item, split, column);
    uint32_t out[2], max_sum[2];
    sync::wait_until(
        fault_sink(p), abi::kFaultEdgeDeadline, layer, abi::kEdgePartial, static_cast<uint32_t>(at * kHeadDim + position),
        [&] {
          dialect::load_words(out, partial_out + at * kHeadDim + position);
          dialect::load_words(max_sum, partial_max_sum + at * 2);
          return (sync::is_written(out) && sync::is_written(max_sum)) || dialect::planted(dialect::Planted::kMissingAwait);
        },
        [] { return abi::kUnwritten; });
    parts[e] = {{dialect::bits_to_float(max_sum[0]), dialect::bits_to_float(max_sum[1])}, {dialect::bits_to_float(out[0]), dialect::bits_to_float(out[1])}};
  }
  sync_consumers();
  for (int32_t i = dialect::thread_idx(); i < count; i += kConsumerThreads) {
    const Merged m = merge_parts(n, [&](int32_t split) { return parts[split * count + i].max_sum; },
                                 [&](int32_t split) { return parts[split * count + i].out; });
    const int32_t pair = begin + i;
    publish_attention_out<kHeadDim, kIsVerify>(p, s, layer, item, pair / (kHeadDim / 2), pair % (kHeadDim / 2) * 2, m);
  }
  sync_consumers();
}

}  // namespace sgl_lowlatency::stages
