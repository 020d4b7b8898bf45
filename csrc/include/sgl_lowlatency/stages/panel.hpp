// The activation panel: the B operand [rows, k1 - k0] bf16 in shared memory, read by every tile of an operation.
#pragma once
#include "sgl_lowlatency/stages/weight_ring.hpp"

namespace sgl_lowlatency::stages {

SGL_DEVICE float low_float(uint32_t pair) { return dialect::to_float(bf16{static_cast<uint16_t>(pair & 0xffffu)}); }
SGL_DEVICE float high_float(uint32_t pair) { return dialect::to_float(bf16{static_cast<uint16_t>(pair >> 16)}); }
SGL_DEVICE uint32_t pack_bf16(float low, float high) {
  return static_cast<uint32_t>(dialect::to_bf16(low).bits) | static_cast<uint32_t>(dialect::to_bf16(high).bits) << 16;
}

// Warps that share one row of the panel: 8, 4, 2, 1 for 1, 2, 3..4, 5..16 rows.
SGL_DEVICE int32_t warps_per_row(int32_t rows) { return rows == 1 ? 8 : rows == 2 ? 4 : rows <= 4 ? 2 : 1; }

// Copies columns [k0, k1) of each row; source(row) is the row's first element.
// With kNorm, elements become bf16(x * norm_weight[k]) and the squares of x are added to RowState::square_sum: the row's 1/rms is
// a factor of the whole product and is applied to the finished tile (see finish_square_sums), so x is read once.
// Entry: all consumer threads; the panel is free and the source is visible. Ends with a consumer barrier.
template <bool kNorm, class Source>
SGL_DEVICE void load_panel(const DecodeStepParams& p, const Shared& s, int32_t k_panel, int32_t k0, int32_t k1, const bf16* norm_weight,
                           Source source) {
  constexpr int32_t kUnroll = 8, kVec = 8;
  const int32_t warp = dialect::thread_idx() / 32, lane = dialect::thread_idx() % 32;
  const int32_t segments = warps_per_row(p.rows), segment = warp % segments;
  const int32_t pitch = abi::panel_row_bytes(k_panel), stride = segments * 32, num_vecs = (k1 - k0) / kVec;
  for (int32_t row = warp / segments; row < p.rows; row += abi::kNumConsumerWarps / segments) {
    const Vec16* x = reinterpret_cast<const Vec16*>(source(row) + k0);
    Vec16* out = reinterpret_cast<Vec16*>(s.panel() + row * pitch);
    float squares = 0.0f;
    for (int32_t first = segment * 32 + lane; first < num_vecs; first += stride * kUnroll) {
      Vec16 v[kUnroll], w[kUnroll];
SGL_UNROLL
      for (int32_t u = 0; u < kUnroll; ++u) {
        const int32_t i = first + u * stride;
        if (i < num_vecs) v[u] = dialect::load_plain(x + i);
        if (i < num_vecs && kNorm) w[u] = dialect::load_constant(reinterpret_cast<const Vec16*>(norm_weight + k0) + i);
      }
SGL_UNROLL
      for (int32_t u = 0; u < kUnroll; ++u) {
        const int32_t i = first + u * stride;
        if (i >= num_vecs) continue;
        if (kNorm) {
SGL_UNROLL
          for (int32_t j = 0; j < 4; ++j) {
            const float a = low_float(v[u].w[j]), b = high_float(v[u].w[j]);
            squares += a * a;
            squares += b * b;
            v[u].w[j] = dialect::multiply_bf16x2(v[u].w[j], w[u].w[j]);
          }
        }
        out[i] = v[u];
      }
    }
    if (kNorm) {
SGL_UNROLL
      for (int32_t mask = 16; mask > 0; mask /= 2) squares += dialect::shuffle_xor(squares, mask);
      if (lane == 0) s.rows()->square_sum[row][segment] = (k0 == 0 ? 0.0f : s.rows()->square_sum[row][segment]) + squares;
    }
  }
  sync_consumers();
}

// 1/rms of every row. Entry: all consumer threads, after load_panel of the last panel; the next consumer barrier publishes it.
SGL_DEVICE void finish_square_sums(const DecodeStepParams& p, const Shared& s) {
  const int32_t row = dialect::thread_idx();
  if (row >= p.rows) return;
  float sum = 0.0f;
  for (int32_t i = 0; i < warps_per_row(p.rows); ++i) sum += s.rows()->square_sum[row][i];
  s.rows()->inverse_rms[row] = dialect::rsqrt(sum / static_cast<float>(p.geometry.hidden) + p.geometry.rms_eps);
}

}  // namespace sgl_lowlatency::stages
