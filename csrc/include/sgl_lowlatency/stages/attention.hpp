// Decode attention over SGLang's paged KV pool: q/k norm, rope, the new tokens' KV write, split-KV softmax, on the MMA.
//   out[row, h] = sum_t softmax_t(scale * q[row, h] . k[slot_t, h / group]) v[slot_t, h / group],  t in [0, row's own token]
// Slots of old tokens come from req_to_token; the new tokens' k and v, those of earlier rows of the request too, come from this step's
// qkv buffer, so no block reads a KV row that another block writes in the launch (requests of one step share only older tokens).
//
// A warp takes 16 tokens at a time, straight from the pool into MMA fragments (lane = 4 g + t). The MMA sums over K, so K may
// be permuted if both operands agree: lane t holds elements 32 j + 8 t .. + 7 of chunk j, a 16-byte run of memory, and the k16
// step (j, i), i = 0, 1, takes words 2 i and 2 i + 1 of it. K and V pass through neither shared memory nor shuffles.
// The 8 columns are query heads of one row or of several of one request (AttentionItem).
//   S[16 tokens, 8 columns] = K q^T   A: tokens g and g + 8; B: q of column g
//   O[d, 8 columns] += V^T P          A: tokens 2t, 2t+1, 2t+8, 2t+9; row g of tile i is d = g * head_dim/8 + 2 i, row g + 8
//                                     the d after it; B: P transposed in registers
#pragma once
#include "sgl_lowlatency/stages/head_vector.hpp"

namespace sgl_lowlatency::stages {

constexpr float kLowestScore = -3.4028235e38f;  // the lowest finite float: no score is below it, and the difference of two is 0

// Running softmax of one warp for columns 2t and 2t + 1. max_score (log2 units) is the same in every g, sum is this lane's
// tokens only, out[i] = {d, 2t}, {d, 2t+1}, {d+1, 2t}, {d+1, 2t+1} with d = g * head_dim/8 + 2 i.
template <int32_t kHeadDim>
struct SoftmaxState {
  float max_score[2] = {kLowestScore, kLowestScore};
  float sum[2] = {};
  float out[kHeadDim / 16][4] = {};
};

// One warp's batch of tokens of one kv head in shared memory, K rows then V rows. The 16-byte chunks of a row are swizzled so that
// both fragment reads (K: tokens g, g + 8, chunk 4 j + t; V: tokens 2t.., chunk g * kVecs/8 + j) are free of bank conflicts.
template <int32_t kHeadDim>
struct KvStage {
  static constexpr int32_t kVecs = kHeadDim / 8, kRowBytes = kHeadDim * 2;
  char* base;
  SGL_DEVICE Vec16* at(int32_t is_v, int32_t row, int32_t chunk) const {
    const int32_t swizzle = (row >> 1 & 1) | (((row >> 2) ^ row) & 1) << 2;
    return reinterpret_cast<Vec16*>(base + (is_v * abi::kWarpTokens + row) * kRowBytes) + (chunk ^ swizzle);
  }
};

// The softmax weights of a batch: P as the B operand of V^T P, and what the earlier sums are multiplied by.
struct BatchWeights {
  uint32_t p[2];
  float keep[2];
};

// S = K q^T and the online softmax. scale: of the scores, log2 units; is_live[h]: columns 2t + h see tokens g and g + 8.
// Entry: all lanes.
template <int32_t kHeadDim>
SGL_DEVICE BatchWeights score_batch(SoftmaxState<kHeadDim>& state, const Vec16 (&q)[kHeadDim / 32], const KvStage<kHeadDim>& kv,
                                    const bool (&is_live)[2][2], float scale, int32_t lane) {
  const int32_t g = lane / 4, t = lane % 4;
  float score[4] = {};
SGL_UNROLL
  for (int32_t j = 0; j < kHeadDim / 32; ++j) {
    const Vec16 low = *kv.at(0, g, 4 * j + t), high = *kv.at(0, g + 8, 4 * j + t);
SGL_UNROLL
    for (int32_t i = 0; i < 4; i += 2) {
      const uint32_t a[4] = {low.w[i], high.w[i], low.w[i + 1], high.w[i + 1]};
      const uint32_t b[2] = {q[j].w[i], q[j].w[i + 1]};
      dialect::mma_m16n8k16(score, a, b);
    }
  }
  BatchWeights w;
  float weight[4];
SGL_UNROLL
  for (int32_t h = 0; h < 2; ++h) {  // column 2t + h: scores h (token g) and h + 2 (token g + 8)
    const float low = is_live[h][0] ? score[h] * scale : kLowestScore, high = is_live[h][1] ? score[h + 2] * scale : kLowestScore;
    float m = low > high ? low : high;
SGL_UNROLL
    for (int32_t mask = 4; mask < 32; mask *= 2) {
      const float other = dialect::shuffle_xor(m, mask);
      m = other > m ? other : m;
    }
    m = m > state.max_score[h] ? m : state.max_score[h];
    w.keep[h] = dialect::exp2(state.max_score[h] - m);
    state.max_score[h] = m;
    weight[h] = is_live[h][0] ? dialect::exp2(low - m) : 0.0f;
    weight[h + 2] = is_live[h][1] ? dialect::exp2(high - m) : 0.0f;
    state.sum[h] = state.sum[h] * w.keep[h] + weight[h] + weight[h + 2];
  }
  w.p[0] = dialect::transpose_8x8(pack_bf16(weight[0], weight[1]));
  w.p[1] = dialect::transpose_8x8(pack_bf16(weight[2], weight[3]));
  return w;
}

// O = O * keep + V^T P. A token that is not live weighs nothing; its v must be finite unless a live one's is not.
template <int32_t kHeadDim>
SGL_DEVICE void weigh_values(SoftmaxState<kHeadDim>& state, const BatchWeights& w, const KvStage<kHeadDim>& kv, int32_t lane) {
  constexpr int32_t kVecs = kHeadDim / 64;
  const int32_t g = lane / 4, t = lane % 4;
SGL_UNROLL
  for (int32_t j = 0; j < kVecs; ++j) {
    const Vec16 v0 = *kv.at(1, 2 * t, g * kVecs + j), v1 = *kv.at(1, 2 * t + 1, g * kVecs + j);
    const Vec16 v2 = *kv.at(1, 2 * t + 8, g * kVecs + j), v3 = *kv.at(1, 2 * t + 9, g * kVecs + j);
SGL_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      const uint32_t a[4] = {(v0.w[i] & 0xffffu) | v1.w[i] << 16, v0.w[i] >> 16 | (v1.w[i] & 0xffff0000u),
                             (v2.w[i] & 0xffffu) | v3.w[i] << 16, v2.w[i] >> 16 | (v3.w[i] & 0xffff0000u)};
      float(&out)[4] = state.out[j * 4 + i];
      out[0] *= w.keep[0];
      out[1] *= w.keep[1];
      out[2] *= w.keep[0];
      out[3] *= w.keep[1];
      dialect::mma_m16n8k16(out, a, w.p);
    }
  }
}

// One warp's tokens of an item: every eighth batch of the pool, copied ahead into its stage.
template <int32_t kHeadDim, bool kIsVerify>
struct ItemTokens {
  using Stage = KvStage<kHeadDim>;
  static constexpr int32_t kStride = abi::kNumConsumerWarps * abi::kWarpTokens;
  const DecodeStepParams& p;
  Stage stage;
  const bf16* k_head;
  const bf16* v_head;
  const int32_t* slots;
  int32_t lane, layer, row, first, end;  // first: of the batch in the stage
  int32_t new_begin;                     // tokens from here on are new, at most one a row of the request; -1: the request has none
  int32_t old_end;                       // tokens before this come from the pool
  uint32_t slot, next_slot;              // of token first + lane % 16, and of the batch after

  SGL_DEVICE ItemTokens(const DecodeStepParams& params, const Shared& s, const AttentionItem& item, int32_t layer_idx, const bf16* k_pool, const bf16* v_pool,
                        bool has_kept_slots, int32_t warp, int32_t lane_idx)
      : p(params), stage{s.panel() + warp * abi::attention_warp_bytes(kHeadDim)}, lane(lane_idx), layer(layer_idx), row(item.row) {
    int32_t kv_head = item.kv_head;
    if (dialect::planted(dialect::Planted::kWrongKvHead)) kv_head = (kv_head + 1) % p.geometry.num_kv_heads;
    k_head = k_pool + kv_head * kHeadDim;
    v_head = v_pool + kv_head * kHeadDim;
    const int32_t request = request_of<kIsVerify>(p, item.row);
    slots = p.req_to_token + static_cast<int64_t>(s.rows()->row[request].request) * p.geometry.req_to_token_stride;
    end = item.end;
    new_begin = min_int(item.end, s.rows()->row[request].length - rows_per_request<kIsVerify>(p));
    old_end = new_begin;
    if (dialect::planted(dialect::Planted::kSiblingInPool) && has_new()) old_end = item.end - 1;
    first = item.begin + warp * abi::kWarpTokens;
    if (dialect::planted(dialect::Planted::kMaskOffByOne) && item.split == 0) first += 1;
    if (dialect::planted(dialect::Planted::kOffByOnePage)) slots += 1;
    // The same in every layer; kept by the first.
    slot = has_kept_slots ? s.slots(warp, 0)[lane % abi::kWarpTokens] : load_slot(first);
    next_slot = has_kept_slots ? s.slots(warp, 1)[lane % abi::kWarpTokens] : load_slot(first + kStride);
    copy(slot, first, k_head, 0);
    copy(slot, first, v_head, 1);
  }
  // For the layers to come. Entry: all lanes, before the first batch is used up.
  SGL_DEVICE void keep_slots(const Shared& s, int32_t warp) const {
    if (lane >= abi::kWarpTokens) return;
    s.slots(warp, 0)[lane] = slot;
    s.slots(warp, 1)[lane] = next_slot;
  }
  SGL_DEVICE bool has_batch() const { return first < end; }
  SGL_DEVICE bool has_new() const { return new_begin >= 0 && new_begin < end; }
  // Tokens past the old ones repeat the last: copies need no predicates, what they bring is replaced or masked.
  SGL_DEVICE uint32_t load_slot(int32_t at) const {
    return at < old_end ? static_cast<uint32_t>(dialect::load_constant(slots + min_int(at + lane % abi::kWarpTokens, old_end - 1))) : 0u;
  }
  // One group of copies, empty past the old tokens.
  SGL_DEVICE void copy(uint32_t from_slot, int32_t at, const bf16* head, int32_t is_v) {
    constexpr int32_t kRowsAtOnce = 32 / Stage::kVecs;
    if (at < old_end) {
      if (from_slot >= static_cast<uint32_t>(p.geometry.num_kv_slots)) {
        sync::raise_fault(p.fault, p.rank, abi::kFaultBadSlot, layer, row, static_cast<uint32_t>(p.geometry.num_kv_slots), from_slot,
                          static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(from_slot))));
      }
      const int32_t chunk = lane % Stage::kVecs;
SGL_UNROLL
      for (int32_t i = 0; i < abi::kWarpTokens / kRowsAtOnce; ++i) {
        const int32_t token = i * kRowsAtOnce + lane / Stage::kVecs;
        const int64_t offset = static_cast<int64_t>(dialect::shuffle(from_slot, token)) * p.geometry.kv_slot_stride + 8 * chunk;
        dialect::copy_async_16(stage.at(is_v, token, chunk), head + offset);
      }
    }
    dialect::copy_async_commit();
  }
  // K of the next batch, once every lane has read this one's; then V, which also moves on.
  SGL_DEVICE void copy_next_k() { copy(next_slot, first + kStride, k_head, 0); }
  SGL_DEVICE void copy_next_v() {
    copy(next_slot, first + kStride, v_head, 1);
    first += kStride;
    next_slot = load_slot(first + kStride);
  }
  // The new tokens' k or v, prepared in the block, where this batch holds them: over what was copied there. A batch without old
  // tokens has its last one in every row behind: what is masked must be finite. Entry: all lanes, which have awaited the batch's copies.
  SGL_DEVICE void place_new(const Shared& s, uint32_t free_half, int32_t is_v) const {
    const int32_t num_old = old_end - first, last = end - 1 - first;
    if (!has_new() || num_old >= abi::kWarpTokens) return;
    dialect::sync_warp();  // the other lanes' copies of those rows have arrived too
    if (lane >= Stage::kVecs) return;
    const auto load = [&](int32_t token) { return reinterpret_cast<const Vec16*>(new_vector<kHeadDim, kIsVerify>(p, s, free_half, token, is_v))[lane]; };
    Vec16 value = kIsVerify ? Vec16{} : load(0);
    const int32_t stop = num_old > 0 ? min_int(last + 1, abi::kWarpTokens) : abi::kWarpTokens;
SGL_NO_UNROLL
    for (int32_t i = num_old > 0 ? num_old : 0; i < stop; ++i) {
      if (kIsVerify) value = load(first + min_int(i, last) - new_begin);
      *stage.at(is_v, i, lane) = value;
    }
  }
};

}  // namespace sgl_lowlatency::stages
