// A consumer warp's partial tile: 16 rows of weights by the step's rows, over the warp's chunk of every stage.
#pragma once
#include "sgl_lowlatency/stages/fp8.hpp"
#include "sgl_lowlatency/stages/panel.hpp"

namespace sgl_lowlatency::stages {

// Where a lane reads the B operand: `step` bytes further with every 32 K elements; columns without a row read zeros.
struct PanelRow {
  const char* at;
  int32_t step;
};
// k: the first column, of the panel, of the warp's chunk.
SGL_DEVICE PanelRow panel_row(const DecodeStepParams& p, const Shared& s, int32_t row, int32_t pitch, int32_t k, int32_t lane) {
  const bool is_row = row < p.rows;
  return {is_row ? s.panel() + row * pitch + (k + lane / 8 * 8) * 2 : s.zero_row(), is_row ? 64 : 0};
}

// multiply: one stage's share of the tile. Entry: all lanes of a consumer warp, the stage is full. pitch: bytes of a panel row; k_local:
// the stage's first column in the panel; width: K elements of the stage, a multiple of a chunk's; index: of the stage in the panel.
// multiply_rows: the same of columns that lie elsewhere; row_of(column): its PanelRow, at the warp's chunk. Scales: of lane `index`.
// sum: element i of the MMA's result for N tile t.
template <int32_t kNTiles, int32_t kElementBytes>
struct WarpTile;

// bf16. Two sums an N tile, even and odd k16 steps, so that consecutive MMAs do not depend on each other.
template <int32_t kNTiles>
struct WarpTile<kNTiles, 2> {
  float c[kNTiles][2][4] = {};

  SGL_DEVICE float sum(int32_t t, int32_t i) const { return c[t][0][i] + c[t][1][i]; }

  template <bool kIsPaired>
  SGL_DEVICE void multiply(const DecodeStepParams& p, const Shared& s, const char* stage, int32_t pitch, int32_t k_local, int32_t width,
                           int32_t index, int32_t warp, int32_t lane, const BlockScales<2, kIsPaired>& scales) {
    multiply_rows(stage, width, index, warp, lane, scales,
                  [&](int32_t row) { return panel_row(p, s, row, pitch, k_local + warp * abi::chunk_k(2), lane); });
  }

  template <bool kIsPaired, class RowOf>
  SGL_DEVICE void multiply_rows(const char* stage, int32_t width, int32_t, int32_t warp, int32_t lane, const BlockScales<2, kIsPaired>&,
                                const RowOf& row_of) {
    constexpr int32_t kWarpK = abi::chunk_k(2), kPairs = kWarpK / 32;
    const char* const chunk = stage + abi::stage_offset(warp, 0, 0);
    const int32_t a_lane = abi::stage_offset(0, lane % 16, lane / 16);  // of the first k16 step; the step's number is xored in
    PanelRow b_row[kNTiles];
SGL_UNROLL
    for (int32_t t = 0; t < kNTiles; ++t) b_row[t] = row_of(t * 8 + lane % 8);
    if (warp * kWarpK >= width) return;
SGL_UNROLL
    for (int32_t pair = 0; pair < kPairs; ++pair) {
      uint32_t a0[4], a1[4];
      dialect::ldmatrix_x4(a0, chunk + (a_lane ^ pair * 64));
      dialect::ldmatrix_x4(a1, chunk + (a_lane ^ (pair * 64 + 32)));
SGL_UNROLL
      for (int32_t t = 0; t < kNTiles; ++t) {
        uint32_t b[4];
        dialect::ldmatrix_x4(b, b_row[t].at + pair * b_row[t].step);
        const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
        dialect::mma_m16n8k16(c[t][0], a0, b0);
        dialect::mma_m16n8k16(c[t][1], a1, b1);
      }
    }
  }
};

// FP8. ldmatrix gives a lane four neighbouring weights, columns 4t .. 4t + 3 of 16: the MMA gets 4t, 4t + 2 as its columns 2t, 2t + 1, and
// 4t + 1, 4t + 3 as 2t + 8, 2t + 9. The panel is stored in that order (store_panel_vector), so both operands agree. The chunk's
// sum is exact in its scale: it is multiplied once, in fp32.
template <int32_t kNTiles>
struct WarpTile<kNTiles, 1> {
  float scaled[kNTiles][4] = {};

  SGL_DEVICE float sum(int32_t t, int32_t i) const { return scaled[t][i]; }

  template <bool kIsPaired>
  SGL_DEVICE void multiply(const DecodeStepParams& p, const Shared& s, const char* stage, int32_t pitch, int32_t k_local, int32_t width, int32_t index,
                           int32_t warp, int32_t lane, const BlockScales<1, kIsPaired>& scales) {
    multiply_rows(stage, width, index, warp, lane, scales,
                  [&](int32_t row) { return panel_row(p, s, row, pitch, k_local + warp * abi::chunk_k(1), lane); });
  }

  template <bool kIsPaired, class RowOf>
  SGL_DEVICE void multiply_rows(const char* stage, int32_t width, int32_t index, int32_t warp, int32_t lane, const BlockScales<1, kIsPaired>& scales,
                                const RowOf& row_of) {
    constexpr int32_t kWarpK = abi::chunk_k(1), kPairs = kWarpK / 32;
    const char* const chunk = stage + abi::stage_offset(warp, 0, 0);
    const int32_t a_lane = abi::stage_offset(0, lane % 16, lane / 16);  // of the first two k16 steps; their number is xored in
    PanelRow b_row[kNTiles];
SGL_UNROLL
    for (int32_t t = 0; t < kNTiles; ++t) b_row[t] = row_of(t * 8 + lane % 8);
    if (warp * kWarpK >= width) return;
    const float first = dialect::shuffle(scales.first, index);
    float last = first;
    if constexpr (kIsPaired) last = dialect::shuffle(scales.last, index);
    float c[kNTiles][2][4] = {};
SGL_UNROLL
    for (int32_t pair = 0; pair < kPairs; ++pair) {
      uint32_t raw[4], a0[4], a1[4];
      dialect::ldmatrix_x4(raw, chunk + (a_lane ^ pair * 32));
SGL_UNROLL
      for (int32_t half = 0; half < 2; ++half) {
        uint32_t even[2], odd[2];
        fp8_to_bf16x2(raw[half], even);
        fp8_to_bf16x2(raw[2 + half], odd);
        a0[half] = even[0];
        a0[half + 2] = even[1];
        a1[half] = odd[0];
        a1[half + 2] = odd[1];
      }
SGL_UNROLL
      for (int32_t t = 0; t < kNTiles; ++t) {
        uint32_t b[4];
        dialect::ldmatrix_x4(b, b_row[t].at + pair * b_row[t].step);
        const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
        dialect::mma_m16n8k16(c[t][0], a0, b0);
        dialect::mma_m16n8k16(c[t][1], a1, b1);
      }
    }
SGL_UNROLL
    for (int32_t t = 0; t < kNTiles; ++t) {
SGL_UNROLL
      for (int32_t i = 0; i < 4; ++i) scaled[t][i] += (c[t][0][i] + c[t][1][i]) * (i < 2 ? first : last);
    }
  }

  // The same of a stage of bf16 weights, 64 columns a warp, against a panel in the order of FP8's: a lane takes the four neighbouring columns that it
  // has of the panel.
  SGL_DEVICE void multiply_bf16(const DecodeStepParams& p, const Shared& s, const char* stage, int32_t pitch, int32_t k_local, int32_t width,
                                int32_t warp, int32_t lane) {
    constexpr int32_t kWarpK = abi::chunk_k(2), kSteps = kWarpK / 16;
    PanelRow b_row[kNTiles];
SGL_UNROLL
    for (int32_t t = 0; t < kNTiles; ++t) b_row[t] = panel_row(p, s, t * 8 + lane % 8, pitch, k_local + warp * kWarpK, lane);
    if (warp * kWarpK >= width) return;
SGL_UNROLL
    for (int32_t step = 0; step < kSteps; step += 2) {
      uint32_t a[2][4];
SGL_UNROLL
      for (int32_t i = 0; i < 4; ++i) {  // k16 step i / 2, rows of half i % 2
        const int32_t row = i % 2 * 8 + lane / 4, column_bytes = (step + i / 2) * 32 + lane % 4 * 8;
        const Word2 w = *reinterpret_cast<const Word2*>(stage + abi::stage_offset(warp, row, column_bytes / 16) + column_bytes % 16);
        a[i / 2][i % 2] = (w.x & 0xffffu) | w.y << 16;
        a[i / 2][i % 2 + 2] = w.x >> 16 | (w.y & 0xffff0000u);
      }
SGL_UNROLL
      for (int32_t t = 0; t < kNTiles; ++t) {
        uint32_t b[4];
        dialect::ldmatrix_x4(b, b_row[t].at + step / 2 * b_row[t].step);
        const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
        dialect::mma_m16n8k16(scaled[t], a[0], b0);
        dialect::mma_m16n8k16(scaled[t], a[1], b1);
      }
    }
  }
};

// Stores a warp's partial tile as [rows][kScratchPitch] floats: column n, then tile row m.
template <int32_t kNTiles, class Tile>
SGL_DEVICE void store_partial(float* scratch, int32_t rows, int32_t lane, const Tile& tile) {
SGL_UNROLL
  for (int32_t t = 0; t < kNTiles; ++t) {
    const int32_t n = t * 8 + lane % 4 * 2;
    float* column = scratch + n * abi::kScratchPitch + lane / 4;
    if (n < rows) {
      column[0] = tile.sum(t, 0);
      column[8] = tile.sum(t, 2);
    }
    if (n + 1 < rows) {
      column[abi::kScratchPitch] = tile.sum(t, 1);
      column[abi::kScratchPitch + 8] = tile.sum(t, 3);
    }
  }
}

}  // namespace sgl_lowlatency::stages
