// From the warps' softmax states to the item's output, and from a row's splits to its final attention output.
#pragma once
#include "sgl_lowlatency/stages/attention.hpp"

namespace sgl_lowlatency::stages {

// Warp states in the panel's shared memory (abi::merge_scratch_bytes): out[warp][head][d], then (max, sum)[warp][head].
template <int32_t kHeadDim>
struct MergeArea {
  float* out;
  float* max_sum;
  SGL_DEVICE explicit MergeArea(const Shared& s)
      : out(reinterpret_cast<float*>(s.panel())), max_sum(out + abi::kNumConsumerWarps * abi::kMaxHeadsPerItem * kHeadDim) {}
};

// Entry: all lanes of a consumer warp; the panel is free.
template <int32_t kHeadDim>
SGL_DEVICE void store_state(const MergeArea<kHeadDim>& area, SoftmaxState<kHeadDim>& state, int32_t num_heads, int32_t warp, int32_t lane) {
  const int32_t g = lane / 4, t = lane % 4;
SGL_UNROLL
  for (int32_t h = 0; h < 2; ++h) {
SGL_UNROLL
    for (int32_t mask = 4; mask < 32; mask *= 2) state.sum[h] += dialect::shuffle_xor(state.sum[h], mask);
    const int32_t head = 2 * t + h, at = warp * abi::kMaxHeadsPerItem + head;
    if (head >= num_heads) continue;
SGL_UNROLL
    for (int32_t i = 0; i < kHeadDim / 16; ++i) {
      float* out = area.out + at * kHeadDim + g * (kHeadDim / 8) + 2 * i;
      out[0] = state.out[i][h];
      out[1] = state.out[i][h + 2];
    }
    if (g == 0) {
      area.max_sum[at * 2] = state.max_score[h];
      area.max_sum[at * 2 + 1] = state.sum[h];
    }
  }
}

// Adds n partial softmaxes in index order, kMergeBatch at a time so that their loads are under way together.
// read(i, which) returns max (0), sum (1) or the element (2) of part i.
constexpr int32_t kMergeBatch = 8;
struct Merged {
  float max_score;
  float sum;
  float out;
};
template <class Read>
SGL_DEVICE Merged merge_parts(int32_t n, Read read) {
  Merged m{kLowestScore, 0.0f, 0.0f};
  for (int32_t first = 0; first < n; first += kMergeBatch) {
    float part[kMergeBatch][3];
    float top = m.max_score;
SGL_UNROLL
    for (int32_t i = 0; i < kMergeBatch; ++i) {
SGL_UNROLL
      for (int32_t which = 0; which < 3; ++which) {
        part[i][which] = first + i < n ? read(first + i, which) : which == 0 ? kLowestScore : 0.0f;
      }
    }
SGL_UNROLL
    for (int32_t i = 0; i < kMergeBatch; ++i) top = part[i][0] > top ? part[i][0] : top;
    const float keep = dialect::exp2(m.max_score - top);
    m.max_score = top;
    m.sum *= keep;
    m.out *= keep;
SGL_UNROLL
    for (int32_t i = 0; i < kMergeBatch; ++i) {
      const float weight = dialect::exp2(part[i][0] - top);
      m.sum += weight * part[i][1];
      m.out += weight * part[i][2];
    }
  }
  return m;
}

SGL_DEVICE void store_attention_out(const DecodeStepParams& p, int32_t row, int32_t head, int32_t d, int32_t head_dim, const Merged& m) {
  const float out = m.sum > 0.0f || m.sum != m.sum ? m.out / m.sum : 0.0f;  // a row without tokens gives zeros; NaN stays NaN
  dialect::store_plain(p.attention_out + (static_cast<int64_t>(row) * p.geometry.num_q_heads + head) * head_dim + d, dialect::to_bf16(out));
}

// Entry: all consumer threads, after store_state and a consumer barrier. The block that completes a (row, kv head, subgroup)
// writes its output and signals kEdgeAttention. Afterwards panel and scratch are free: a consumer barrier follows their last use.
template <int32_t kHeadDim>
SGL_DEVICE void combine_item(const DecodeStepParams& p, const Shared& s, const AttentionItem& item) {
  const MergeArea<kHeadDim> area(s);
  const int32_t thread = dialect::thread_idx(), num_elements = item.num_heads * kHeadDim;
  const auto partial_slot = [&](int32_t split) {
    return static_cast<int64_t>(item.first_slot + split * item.slot_stride) * abi::kMaxHeadsPerItem;
  };
  for (int32_t e = thread; e < num_elements; e += kConsumerThreads) {
    const int32_t h = e / kHeadDim, d = e % kHeadDim;
    const Merged m = merge_parts(abi::kNumConsumerWarps, [&](int32_t warp, int32_t which) {
      const int32_t at = warp * abi::kMaxHeadsPerItem + h;
      return which < 2 ? area.max_sum[at * 2 + which] : area.out[at * kHeadDim + d];
    });
    if (item.num_splits == 1) {
      store_attention_out(p, item.row, item.head_begin + h, d, kHeadDim, m);
    } else {
      const int64_t at = partial_slot(item.split) + h;
      dialect::store_plain(p.partial_out + at * kHeadDim + d, m.out);
      if (d == 0) {
        dialect::store_plain(p.partial_max_sum + at * 2, m.max_score);
        dialect::store_plain(p.partial_max_sum + at * 2 + 1, m.sum);
      }
    }
  }
  sync_consumers();
  bool is_final = true;
  if (item.num_splits > 1) {
    // Acquire and release, gpu scope: pairs with the other splits' arrivals on the same ticket, each after its block's barrier, so
    // that the last one sees every split's partials. Its reset is ordered before the next layer's arrivals by the edges between.
    if (thread == 0) s.rows()->broadcast = dialect::fetch_add_acq_rel_gpu(p.split_tickets + item.ticket, 1u);
    sync_consumers();
    is_final = s.rows()->broadcast == static_cast<uint32_t>(item.num_splits - 1);
    if (is_final) {
      for (int32_t e = thread; e < num_elements; e += kConsumerThreads) {
        const int32_t h = e / kHeadDim, d = e % kHeadDim;
        const Merged m = merge_parts(item.num_splits, [&](int32_t split, int32_t which) {
          const int64_t at = partial_slot(split) + h;
          return which < 2 ? dialect::load_plain(p.partial_max_sum + at * 2 + which) : dialect::load_plain(p.partial_out + at * kHeadDim + d);
        });
        store_attention_out(p, item.row, item.head_begin + h, d, kHeadDim, m);
      }
      if (thread == 0) dialect::store_plain(p.split_tickets + item.ticket, 0u);
    }
    sync_consumers();
  }
  // Covers the stores above by the barrier since, and through the ticket the other splits' reads of the qkv buffer.
  if (is_final && thread == 0) sync::signal_edge(p.sync->edge[abi::kEdgeAttention]);
}

}  // namespace sgl_lowlatency::stages
