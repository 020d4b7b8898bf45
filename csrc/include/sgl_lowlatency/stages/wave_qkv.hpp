// What k1 computes: the stream that enters the layer, q, k and v of its rows, their norm and rope, and the new tokens' rows of the pool.
#pragma once
#include "sgl_lowlatency/stages/wave_tile.hpp"

namespace sgl_lowlatency::stages {

// The entering stream as an operand: (x + residual) times the weights of the norm. The sum stays fp32 into the norm, as in SGLang.
struct StreamOperand {
  const bf16* x;
  const bf16* residual;  // or null
  const bf16* norm;
  int32_t hidden;

  SGL_DEVICE void load(int32_t row, int32_t column, int32_t stride, int32_t count, Vec16 (&vectors)[kOperandBatch], float& squares) const {
    const int64_t at = static_cast<int64_t>(row) * hidden + column;
    Vec16 added[kOperandBatch] = {}, weights[kOperandBatch];
SGL_UNROLL
    for (int32_t u = 0; u < kOperandBatch; ++u) {
      if (u >= count) continue;
      vectors[u] = dialect::load_plain(reinterpret_cast<const Vec16*>(x + at + u * stride));
      if (residual != nullptr) added[u] = dialect::load_plain(reinterpret_cast<const Vec16*>(residual + at + u * stride));
      weights[u] = dialect::load_constant(reinterpret_cast<const Vec16*>(norm + column + u * stride));
    }
SGL_UNROLL
    for (int32_t u = 0; u < kOperandBatch; ++u) {
      if (u >= count) continue;
SGL_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const float low = low_float(vectors[u].w[i]) + low_float(added[u].w[i]), high = high_float(vectors[u].w[i]) + high_float(added[u].w[i]);
        squares += low * low + high * high;
        vectors[u].w[i] = pack_bf16(low * low_float(weights[u].w[i]), high * high_float(weights[u].w[i]));
      }
    }
  }
};

// residual_out = x + residual, the block's share. Entry: all threads.
SGL_DEVICE void store_stream(const abi::K1Params& p) {
  const int32_t num_vecs = p.launch.rows * p.launch.geometry.hidden / 8, step = p.launch.grid * abi::kMonoThreads;
  for (int32_t i = dialect::block_idx() * abi::kMonoThreads + dialect::thread_idx(); i < num_vecs; i += step) {
    Vec16 sum = dialect::load_plain(reinterpret_cast<const Vec16*>(p.x) + i);
    const Vec16 added = dialect::load_plain(reinterpret_cast<const Vec16*>(p.residual) + i);
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) {
      sum.w[j] = pack_bf16(low_float(sum.w[j]) + low_float(added.w[j]), high_float(sum.w[j]) + high_float(added.w[j]));
    }
    dialect::store_plain(reinterpret_cast<Vec16*>(p.residual_out) + i, sum);
  }
}

// One head of one row: out = rope(x / rms(x) * norm), neox style (element d is paired with d + kHeadDim / 2). norm null: as it is, v.
// Entry: all lanes of a wave; lane l holds elements l * kHeadDim / 64 and following.
template <int32_t kHeadDim>
SGL_DEVICE void finish_head(const abi::K1Params& p, int64_t first_word, const bf16* norm, const float* cos_sin, bool skip_norm, bf16* out) {
  constexpr int32_t kPerLane = kHeadDim / 64, kHalf = kHeadDim / 2;
  const int32_t lane = lane_idx(), first = lane * kPerLane;
  uint32_t words[kPerLane];
  sync::await_words(edge_sink(p.launch), awaited(p.launch, p.launch.at.qkv, abi::kEdgeQkv), first_word + first, words);
  float x[kPerLane];
SGL_UNROLL
  for (int32_t j = 0; j < kPerLane; ++j) x[j] = dialect::bits_to_float(words[j]);
  if (norm != nullptr) {
    float squares = 0.0f;
SGL_UNROLL
    for (int32_t j = 0; j < kPerLane; ++j) squares += x[j] * x[j];
SGL_UNROLL
    for (int32_t mask = 32; mask > 0; mask /= 2) squares += dialect::shuffle_xor(squares, mask);
    const float inverse = skip_norm ? 1.0f : dialect::rsqrt(squares / static_cast<float>(kHeadDim) + p.launch.geometry.rms_eps);
SGL_UNROLL
    for (int32_t j = 0; j < kPerLane; ++j) {
      if (!skip_norm) x[j] *= inverse * dialect::to_float(dialect::load_constant(norm + first + j));
      const float partner = dialect::shuffle_xor(x[j], 32);
      const int32_t angle = (first + j) % kHalf;
      x[j] = x[j] * dialect::load_constant(cos_sin + angle) + (lane < 32 ? -partner : partner) * dialect::load_constant(cos_sin + kHalf + angle);
    }
  }
SGL_UNROLL
  for (int32_t j = 0; j < kPerLane; ++j) dialect::store_plain(out + first + j, dialect::to_bf16(x[j]));
}

// All heads of all rows, a wave a head, over all workgroups. Entry: all threads; MonoRows are there.
template <int32_t kHeadDim, abi::Isa kIsa>
SGL_DEVICE void finish_heads(const abi::K1Params& p, const MonoShared<kIsa>& s) {
  const abi::Geometry& g = p.launch.geometry;
  const int32_t heads = g.num_q_heads + 2 * g.num_kv_heads;
SGL_NO_UNROLL
  for (int32_t i = dialect::block_idx() + wave_idx() * p.launch.grid; i < p.launch.rows * heads; i += p.launch.grid * abi::kMonoWaves) {
    const int32_t row = i / heads, head = i % heads;
    const bool is_q = head < g.num_q_heads, is_k = !is_q && head < g.num_q_heads + g.num_kv_heads;
    const int64_t at = static_cast<int64_t>(s.rows()->row[row].slot) * g.kv_slot_stride;
    bf16* const out = is_q   ? p.q_out + (static_cast<int64_t>(row) * g.num_q_heads + head) * kHeadDim
                      : is_k ? p.k_pool + at + (head - g.num_q_heads) * kHeadDim
                             : p.v_pool + at + (head - g.num_q_heads - g.num_kv_heads) * kHeadDim;
    int32_t position = s.rows()->row[row].position;
    if (dialect::planted(dialect::Planted::kWrongRope) && is_q) position = position > 0 ? position - 1 : 1;
    finish_head<kHeadDim>(p, static_cast<int64_t>(i) * kHeadDim, is_q ? p.q_norm : is_k ? p.k_norm : nullptr,
                          p.cos_sin + static_cast<int64_t>(position) * kHeadDim, is_q && dialect::planted(dialect::Planted::kSkippedNorm), out);
  }
}

}  // namespace sgl_lowlatency::stages
