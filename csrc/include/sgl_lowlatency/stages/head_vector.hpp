// q, k and v vectors of an attention item: q/k norm and rope in fp32, one warp a vector, rounded to bf16 in shared memory.
// Of a request with several rows, an item that sees new tokens has k and v of all that it sees, whoever's rows they are.
#pragma once
#include "sgl_lowlatency/stages/attention_items.hpp"
#include "sgl_lowlatency/stages/panel.hpp"

namespace sgl_lowlatency::stages {

// Vectors of an item: q of its columns, then, where requests have one row, the new token's k and v. [kMaxHeadsPerItem + 2][kHeadDim].
template <int32_t kHeadDim>
SGL_DEVICE bf16* item_vector(const Shared& s, int32_t idx) {
  static_assert((abi::kMaxHeadsPerItem + 2) * kHeadDim * 2 <= abi::kVectorBytes, "an item's vectors fit their section");
  return s.vectors() + idx * kHeadDim;
}

// k (is_v 0) or v of the request's new token number `idx`. Those of several rows lie in the half of scratch that the last tile's sums
// do not read, `free_half`: free since that tile's barrier, and taken again by the next operation's first tile.
template <int32_t kHeadDim, bool kIsVerify>
SGL_DEVICE bf16* new_vector(const DecodeStepParams& p, const Shared& s, uint32_t free_half, int32_t idx, int32_t is_v) {
  static_assert(abi::kNumConsumerWarps * abi::kScratchPitch * 4 >= 2 * kHeadDim * 2, "half of scratch holds k and v of every row");
  if (!kIsVerify) return item_vector<kHeadDim>(s, abi::kMaxHeadsPerItem + is_v);
  float* const half = s.scratch() + free_half * (abi::kNumConsumerWarps * p.rows * abi::kScratchPitch);
  return reinterpret_cast<bf16*>(half) + (2 * idx + is_v) * kHeadDim;
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

// All vectors of the item. num_new: of its request's new tokens, how many it sees. Entry: all consumer threads, the vectors are free.
// Ends with a consumer barrier.
template <int32_t kHeadDim, bool kIsVerify>
SGL_DEVICE void prepare_item(const DecodeStepParams& p, const Shared& s, int32_t layer, const AttentionItem& item, int32_t num_new,
                             uint32_t free_half, const bf16* q_norm, const bf16* k_norm, int32_t warp, int32_t lane) {
  const abi::Geometry& g = p.geometry;
  const sync::Awaited qkv = awaited(p, s, layer, p.at.qkv, abi::kEdgeQkv);
  const int32_t columns = num_columns<kIsVerify>(item), first_row = request_of<kIsVerify>(p, item.row) * rows_per_request<kIsVerify>(p);
  for (int32_t idx = warp; idx < columns + 2 * num_new; idx += abi::kNumConsumerWarps) {
    const bool is_q = idx < columns, is_k = !is_q && (idx - columns) % 2 == 0;
    const int32_t token = (idx - columns) / 2;
    const int32_t row = !kIsVerify ? item.row : is_q ? item.row + column_row<kIsVerify>(item, idx) : first_row + token;
    const int32_t head = is_q ? column_head<kIsVerify>(item, idx) : g.num_q_heads + (is_k ? 0 : g.num_kv_heads) + item.kv_head;
    const int64_t row_begin = static_cast<int64_t>(row) * (g.num_q_heads + 2 * g.num_kv_heads) * kHeadDim;
    int32_t position = s.rows()->row[dialect::planted(dialect::Planted::kSiblingPosition) && is_k ? first_row : row].position;
    if (dialect::planted(dialect::Planted::kWrongRope) && is_q) position = position > 0 ? position - 1 : 1;
    prepare_vector<kHeadDim>(p, qkv, row_begin + head * kHeadDim, is_q ? q_norm : is_k ? k_norm : nullptr,
                             is_q || is_k ? p.cos_sin + static_cast<int64_t>(position) * kHeadDim : nullptr,
                             is_q && dialect::planted(dialect::Planted::kSkippedNorm), lane,
                             is_q ? item_vector<kHeadDim>(s, idx) : new_vector<kHeadDim, kIsVerify>(p, s, free_half, token, is_k ? 0 : 1));
  }
  sync_consumers();
}

// Whether the item is the one that writes its request's new tokens of its kv head: it sees all of them, and has the first of the
// heads. has_new: it has new tokens at all.
template <bool kIsVerify>
SGL_DEVICE bool is_writer(const DecodeStepParams& p, const AttentionItem& item, bool has_new) {
  const bool has_first_heads = item.head_begin == item.kv_head * (p.geometry.num_q_heads / p.geometry.num_kv_heads);
  return has_new && has_first_heads && (!kIsVerify || (item.row + item.num_rows) % p.rows_per_request == 0);
}

// Writes k and v of a request's new tokens of one kv head to the pool, for the next launch: this one takes them from shared memory.
// A warp writes every eighth token. Entry: all consumer threads, after prepare_item of the writer.
template <int32_t kHeadDim, bool kIsVerify>
SGL_DEVICE void write_new_tokens(const DecodeStepParams& p, const Shared& s, const AttentionItem& item, uint32_t free_half, bf16* k_pool,
                                 bf16* v_pool, int32_t warp, int32_t lane) {
  constexpr int32_t kVecs = kHeadDim / 8;  // at most 16: lanes 0..15 write k, 16..31 v
  const int32_t vec = lane % 16, is_v = lane / 16;
  if (vec >= kVecs) return;
  const int32_t num_rows = rows_per_request<kIsVerify>(p), first_row = request_of<kIsVerify>(p, item.row) * num_rows;
  for (int32_t token = warp; token < num_rows; token += abi::kNumConsumerWarps) {
    const int64_t at = static_cast<int64_t>(s.rows()->row[first_row + token].slot) * p.geometry.kv_slot_stride + item.kv_head * kHeadDim;
    const Vec16 value = reinterpret_cast<const Vec16*>(new_vector<kHeadDim, kIsVerify>(p, s, free_half, token, is_v))[vec];
    dialect::store_plain(reinterpret_cast<Vec16*>((is_v ? v_pool : k_pool) + at) + vec, value);
  }
}

}  // namespace sgl_lowlatency::stages
