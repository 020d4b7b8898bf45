// Decode attention over SGLang's paged KV pool: q/k norm, rope, the new token's KV write, split-KV softmax, on the MMA.
//   out[row, h] = sum_t softmax_t(scale * q[row, h] . k[slot_t, h / group]) v[slot_t, h / group],  t in [0, length)
// Slots of old tokens come from req_to_token; the newest token's k and v come from this step's qkv buffer, so no block reads a
// KV row that another block writes in the launch (rows of one step are different requests, or share only older tokens).
//
// A warp takes 16 tokens at a time, straight from the pool into MMA fragments (lane = 4 g + t). The MMA sums over K, so K may
// be permuted if both operands agree: lane t holds elements 32 j + 8 t .. + 7 of chunk j, a 16-byte run of memory, and the k16
// step (j, i), i = 0, 1, takes words 2 i and 2 i + 1 of it. K and V pass through neither shared memory nor shuffles.
//   S[16 tokens, 8 heads] = K q^T     A: tokens g and g + 8; B: q of head g
//   O[d, 8 heads] += V^T P            A: tokens 2t, 2t+1, 2t+8, 2t+9; row g of tile i is d = g * head_dim/8 + 2 i, row g + 8
//                                     the d after it; B: P transposed in registers
#pragma once
#include "sgl_lowlatency/stages/head_vector.hpp"

namespace sgl_lowlatency::stages {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLowestScore = -1e30f;  // finite, so that exp2 of a difference of two of them is defined
constexpr int32_t kWarpTokens = 16;

// Running softmax of one warp for heads 2t and 2t + 1. max_score (log2 units) is the same in every g, sum is this lane's
// tokens only, out[i] = {d, 2t}, {d, 2t+1}, {d+1, 2t}, {d+1, 2t+1} with d = g * head_dim/8 + 2 i.
template <int32_t kHeadDim>
struct SoftmaxState {
  float max_score[2] = {kLowestScore, kLowestScore};
  float sum[2] = {};
  float out[kHeadDim / 16][4] = {};
};

// 16 tokens of one kv head as this lane's words of the MMA operands.
template <int32_t kHeadDim>
struct KvBatch {
  static constexpr int32_t kChunks = kHeadDim / 32, kVecs = kHeadDim / 64;
  Vec16 k[2][kChunks];  // tokens g, g + 8
  Vec16 v[4][kVecs];    // tokens 2t, 2t + 1, 2t + 8, 2t + 9; elements g * head_dim/8 ...
};

// Adds a batch. scale: of the scores, log2 units. A token that is not live weighs nothing; its v must be finite unless a live
// one's is not. is_live: of tokens g and g + 8. Entry: all lanes.
template <int32_t kHeadDim>
SGL_DEVICE void accumulate_batch(SoftmaxState<kHeadDim>& state, const Vec16 (&q)[kHeadDim / 32], const KvBatch<kHeadDim>& kv,
                                 const bool (&is_live)[2], float scale) {
  float score[4] = {};
SGL_UNROLL
  for (int32_t j = 0; j < kHeadDim / 32; ++j) {
SGL_UNROLL
    for (int32_t i = 0; i < 4; i += 2) {
      const uint32_t a[4] = {kv.k[0][j].w[i], kv.k[1][j].w[i], kv.k[0][j].w[i + 1], kv.k[1][j].w[i + 1]};
      const uint32_t b[2] = {q[j].w[i], q[j].w[i + 1]};
      dialect::mma_m16n8k16(score, a, b);
    }
  }
  float weight[4], keep[2];
SGL_UNROLL
  for (int32_t h = 0; h < 2; ++h) {  // head 2t + h: scores h (token g) and h + 2 (token g + 8)
    const float low = is_live[0] ? score[h] * scale : kLowestScore, high = is_live[1] ? score[h + 2] * scale : kLowestScore;
    float m = low > high ? low : high;
SGL_UNROLL
    for (int32_t mask = 4; mask < 32; mask *= 2) {
      const float other = dialect::shuffle_xor(m, mask);
      m = other > m ? other : m;
    }
    m = m > state.max_score[h] ? m : state.max_score[h];
    keep[h] = dialect::exp2(state.max_score[h] - m);
    state.max_score[h] = m;
    weight[h] = is_live[0] ? dialect::exp2(low - m) : 0.0f;
    weight[h + 2] = is_live[1] ? dialect::exp2(high - m) : 0.0f;
    state.sum[h] = state.sum[h] * keep[h] + weight[h] + weight[h + 2];
  }
  const uint32_t p[2] = {dialect::transpose_8x8(pack_bf16(weight[0], weight[1])),
                         dialect::transpose_8x8(pack_bf16(weight[2], weight[3]))};
SGL_UNROLL
  for (int32_t i = 0; i < kHeadDim / 16; ++i) {
    const uint32_t v0 = kv.v[0][i / 4].w[i % 4], v1 = kv.v[1][i / 4].w[i % 4], v2 = kv.v[2][i / 4].w[i % 4], v3 = kv.v[3][i / 4].w[i % 4];
    const uint32_t a[4] = {(v0 & 0xffffu) | v1 << 16, v0 >> 16 | (v1 & 0xffff0000u),
                           (v2 & 0xffffu) | v3 << 16, v2 >> 16 | (v3 & 0xffff0000u)};
    state.out[i][0] *= keep[0];
    state.out[i][1] *= keep[1];
    state.out[i][2] *= keep[0];
    state.out[i][3] *= keep[1];
    dialect::mma_m16n8k16(state.out[i], a, p);
  }
}

// One warp's tokens of an item: every eighth run of kWarpTokens of the pool, and for the last warp of the last split the
// newest token in a batch of its own. Control flow is uniform over the warp: the shuffles need all lanes.
template <int32_t kHeadDim>
struct ItemTokens {
  using Batch = KvBatch<kHeadDim>;
  static constexpr int32_t kStride = abi::kNumConsumerWarps * kWarpTokens;
  const DecodeStepParams& p;
  const Shared& s;
  const AttentionItem& item;
  int32_t layer, lane, end, first;
  bool has_new_token;
  const int32_t* slots;
  const bf16* k_pool;
  const bf16* v_pool;
  uint32_t next_slot;  // of token first + lane % kWarpTokens

  SGL_DEVICE ItemTokens(const DecodeStepParams& params, const Shared& shared, const AttentionItem& of, int32_t layer_idx, const bf16* k,
                        const bf16* v, int32_t warp, int32_t lane_idx)
      : p(params), s(shared), item(of), layer(layer_idx), lane(lane_idx), k_pool(k), v_pool(v) {
    slots = p.req_to_token + static_cast<int64_t>(s.rows()->request[item.row]) * p.geometry.req_to_token_stride;
    end = min_int(item.end, s.rows()->length[item.row] - 1);
    first = item.begin + warp * kWarpTokens;
    has_new_token = warp == abi::kNumConsumerWarps - 1 && item.split + 1 == item.num_splits && item.end > 0;
    if (dialect::planted(dialect::Planted::kMaskOffByOne) && item.split == 0) first += 1;
    if (dialect::planted(dialect::Planted::kOffByOnePage)) slots += 1;
    next_slot = first < end ? load_slot(first) : 0u;
  }

  // Tokens past the end repeat the last one: loads need no predicates, and their scores are masked.
  SGL_DEVICE uint32_t load_slot(int32_t at) const {
    return static_cast<uint32_t>(dialect::load_constant(slots + min_int(at + lane % kWarpTokens, end - 1)));
  }

  // The next batch of old tokens, or false. They were written before this launch: no edge to wait for.
  SGL_DEVICE bool load_pool(Batch& kv, bool (&is_live)[2]) {
    if (first >= end) return false;
    const int32_t g = lane / 4, t = lane % 4;
    int32_t kv_head = item.kv_head;
    if (dialect::planted(dialect::Planted::kWrongKvHead)) kv_head = (kv_head + 1) % p.geometry.num_kv_heads;
    const bf16* k_head = k_pool + kv_head * kHeadDim + 8 * t;
    const bf16* v_head = v_pool + kv_head * kHeadDim + g * (kHeadDim / 8);
    const uint32_t slot = next_slot;
    next_slot = first + kStride < end ? load_slot(first + kStride) : 0u;
    if (slot >= static_cast<uint32_t>(p.geometry.num_kv_slots)) {
      sync::raise_fault(p.fault, p.rank, abi::kFaultBadSlot, layer, item.row, static_cast<uint32_t>(p.geometry.num_kv_slots), slot, 0);
    }
SGL_UNROLL
    for (int32_t i = 0; i < 2; ++i) {
      is_live[i] = first + g + 8 * i < end;
      const int64_t at = static_cast<int64_t>(dialect::shuffle(slot, g + 8 * i)) * p.geometry.kv_slot_stride;
SGL_UNROLL
      for (int32_t j = 0; j < Batch::kChunks; ++j) {
        kv.k[i][j] = dialect::load_constant(reinterpret_cast<const Vec16*>(k_head + at + 32 * j));
      }
    }
SGL_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t token = 2 * t + i % 2 + i / 2 * 8;
      const int64_t at = static_cast<int64_t>(dialect::shuffle(slot, token)) * p.geometry.kv_slot_stride;
SGL_UNROLL
      for (int32_t j = 0; j < Batch::kVecs; ++j) {
        kv.v[i][j] = dialect::load_constant(reinterpret_cast<const Vec16*>(v_head + at) + j);
      }
    }
    first += kStride;
    return true;
  }

  // The newest token as token 0 of an otherwise empty batch, or false. Its k and v are prepare_item's.
  SGL_DEVICE bool load_new(Batch& kv, bool (&is_live)[2]) {
    if (!has_new_token) return false;
    has_new_token = false;
    const int32_t g = lane / 4, t = lane % 4;
    const Vec16* k = reinterpret_cast<const Vec16*>(item_vector<kHeadDim>(s, abi::kMaxHeadsPerItem));
    const Vec16* v = reinterpret_cast<const Vec16*>(item_vector<kHeadDim>(s, abi::kMaxHeadsPerItem + 1));
    is_live[0] = g == 0;
    is_live[1] = false;
    kv = Batch{};
SGL_UNROLL
    for (int32_t j = 0; j < Batch::kChunks; ++j) {
      if (g == 0) kv.k[0][j] = k[4 * j + t];
    }
SGL_UNROLL
    for (int32_t j = 0; j < Batch::kVecs; ++j) {
      if (t == 0) kv.v[0][j] = v[g * Batch::kVecs + j];
    }
    return true;
  }
};

}  // namespace sgl_lowlatency::stages
