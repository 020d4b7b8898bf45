// q, k and v vectors of an attention item: q/k norm and rope in fp32, one warp a vector, rounded to bf16 in shared memory.
#pragma once
#include "sgl_lowlatency/stages/attention_items.hpp"
#include "sgl_lowlatency/stages/panel.hpp"

namespace sgl_lowlatency::stages {

// Vectors of an item: its query heads, then the new token's k and v. [kMaxHeadsPerItem + 2][kHeadDim].
template <int32_t kHeadDim>
SGL_DEVICE bf16* item_vector(const Shared& s, int32_t idx) {
  static_assert((abi::kMaxHeadsPerItem + 2) * kHeadDim * 2 <= abi::kVectorBytes, "an item's vectors fit their section");
  return s.vectors() + idx * kHeadDim;
}

// out = rope(x / rms(x) * norm_weight), neox style over the whole head (element d is paired with d + head_dim / 2); without
// norm_weight nothing is normalised, without cos_sin nothing is rotated. x: kHeadDim words of the qkv hand-over, fp32, from word `first_word`. cos_sin: the position's row, cos half |
// sin half. skip_norm: a planted bug. Entry: all lanes of a warp; lane l holds elements l * head_dim/32 and following.
template <int32_t kHeadDim>
SGL_DEVICE void prepare_vector(const DecodeStepParams& p, const sync::Awaited& qkv, int64_t first_word, const bf16* norm_weight,
                               const float* cos_sin, bool skip_norm, int32_t lane, bf16* out) {
  constexpr int32_t kPerLane = kHeadDim / 32, kHalf = kHeadDim / 2;
  const int32_t first = lane * kPerLane;
  bf16 weight[kPerLane] = {};
  float cos[kPerLane] = {}, sin[kPerLane] = {};
SGL_UNROLL
  for (int32_t j = 0; j < kPerLane; ++j) {  // constants first: the wait hides them
    if (norm_weight != nullptr) weight[j] = dialect::load_constant(norm_weight + first + j);
    if (cos_sin != nullptr) {
      cos[j] = dialect::load_constant(cos_sin + (first + j) % kHalf);
      sin[j] = dialect::load_constant(cos_sin + kHalf + (first + j) % kHalf);
    }
  }
  uint32_t words[kPerLane];
  sync::await_words(fault_sink(p), qkv, first_word + first, words);
  float x[kPerLane];
SGL_UNROLL
  for (int32_t j = 0; j < kPerLane; ++j) x[j] = dialect::bits_to_float(words[j]);
  if (norm_weight != nullptr) {
    float squares = 0.0f;
SGL_UNROLL
    for (int32_t j = 0; j < kPerLane; ++j) squares += x[j] * x[j];
SGL_UNROLL
    for (int32_t mask = 16; mask > 0; mask /= 2) squares += dialect::shuffle_xor(squares, mask);
    const float inverse_rms = dialect::rsqrt(squares / static_cast<float>(kHeadDim) + p.geometry.rms_eps);
SGL_UNROLL
    for (int32_t j = 0; j < kPerLane; ++j) {
      if (!skip_norm) x[j] *= inverse_rms * dialect::to_float(weight[j]);
    }
  }
  if (cos_sin != nullptr) {
SGL_UNROLL
    for (int32_t j = 0; j < kPerLane; ++j) {
      const float partner = dialect::shuffle_xor(x[j], 16);
      x[j] = x[j] * cos[j] + (lane < 16 ? -partner : partner) * sin[j];
    }
  }
SGL_UNROLL
  for (int32_t j = 0; j < kPerLane; ++j) out[first + j] = dialect::to_bf16(x[j]);
}

// All vectors of the item. Entry: all consumer threads, the vectors are free. Ends with a consumer barrier.
template <int32_t kHeadDim>
SGL_DEVICE void prepare_item(const DecodeStepParams& p, const Shared& s, int32_t layer, const AttentionItem& item, const bf16* q_norm,
                             const bf16* k_norm, int32_t warp, int32_t lane) {
  const abi::Geometry& g = p.geometry;
  const sync::Awaited qkv = awaited(p, s, layer, p.at.qkv, abi::kEdgeQkv);
  const int64_t row_begin = static_cast<int64_t>(item.row) * (g.num_q_heads + 2 * g.num_kv_heads) * kHeadDim;
  for (int32_t idx = warp; idx < item.num_heads + 2; idx += abi::kNumConsumerWarps) {
    const bool is_q = idx < item.num_heads, is_k = idx == item.num_heads;
    const int32_t head = is_q ? item.head_begin + idx : g.num_q_heads + (is_k ? 0 : g.num_kv_heads) + item.kv_head;
    int32_t position = s.rows()->position[item.row];
    if (dialect::planted(dialect::Planted::kWrongRope) && is_q) position = position > 0 ? position - 1 : 1;
    prepare_vector<kHeadDim>(p, qkv, row_begin + head * kHeadDim, is_q ? q_norm : is_k ? k_norm : nullptr,
                             is_q || is_k ? p.cos_sin + static_cast<int64_t>(position) * kHeadDim : nullptr,
                             is_q && dialect::planted(dialect::Planted::kSkippedNorm), lane,
                             item_vector<kHeadDim>(s, is_q ? idx : abi::kMaxHeadsPerItem + (is_k ? 0 : 1)));
  }
  sync_consumers();
}

// Writes the new token's k and v of one kv head to the pool, for the next launch: this one takes them from shared memory.
// Entry: all lanes of one warp, after prepare_item of the row's last split (of the kv head's first subgroup: one writer).
template <int32_t kHeadDim>
SGL_DEVICE void write_new_token(const DecodeStepParams& p, const Shared& s, const AttentionItem& item, bf16* k_pool, bf16* v_pool, int32_t lane) {
  constexpr int32_t kVecs = kHeadDim / 8;  // at most 16: lanes 0..15 write k, 16..31 v
  const int64_t at = static_cast<int64_t>(s.rows()->slot[item.row]) * p.geometry.kv_slot_stride + item.kv_head * kHeadDim;
  const int32_t vec = lane % 16, is_v = lane / 16;
  if (vec >= kVecs) return;
  const Vec16 value = reinterpret_cast<const Vec16*>(item_vector<kHeadDim>(s, abi::kMaxHeadsPerItem + is_v))[vec];
  dialect::store_plain(reinterpret_cast<Vec16*>((is_v ? v_pool : k_pool) + at) + vec, value);
}

}  // namespace sgl_lowlatency::stages
