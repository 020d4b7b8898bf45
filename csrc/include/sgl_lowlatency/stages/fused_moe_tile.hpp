// Products of a warp: steps of 128 columns of 16 rows of weights with the panel's eight rows. Lane 4g + t has rows g and g + 8 of the weights and
// columns 32t .. 32t + 31 of the step; a sum over K may be taken in any order, as long as weights and panel agree.
#pragma once
#include "sgl_lowlatency/stages/block_float.hpp"
#include "sgl_lowlatency/stages/fused_moe_state.hpp"

namespace sgl_lowlatency::stages {

// 16 x 8 sums, two of each, so that consecutive MMAs do not depend on each other.
struct MoeTile {
  float c[2][4] = {};
  SGL_DEVICE float sum(int32_t i) const { return c[0][i] + c[1][i]; }
};

// A lane's 32 columns of a step of its panel row. Of each 16, pair p (columns 2p, 2p + 1) and pair p + 4 are neighbours: B fragments as FP4 words
// have their columns, in registers that follow one another.
struct MoeColumns {
  Vec16 q[4];
};
SGL_DEVICE Vec16 load_shared_vec(const char* at) { return *reinterpret_cast<const Vec16*>(at); }
// row: the lane's panel row, at its first piece.
SGL_DEVICE MoeColumns load_moe_columns(const char* row, int32_t step) {
  MoeColumns b;
SGL_UNROLL
  for (int32_t i = 0; i < 4; ++i) b.q[i] = load_shared_vec(row + step * 256 + i * 64);
  return b;
}

// stage_row: the lane's row g of the tile, at the step. pitch: from row to row. scales: of the step's block, at [g][tile within the block][t].
SGL_DEVICE void multiply_fp4(MoeTile& tile, const char* stage_row, int32_t pitch, const char* scales, const MoeColumns& b) {
  const Vec16 first = load_shared_vec(stage_row), last = load_shared_vec(stage_row + 8 * pitch);
  const uint32_t first_factor = fp4_factor(static_cast<uint8_t>(scales[0])), last_factor = fp4_factor(static_cast<uint8_t>(scales[8 * 16]));
SGL_UNROLL
  for (int32_t j = 0; j < 4; ++j) {
    uint32_t a[4];
    const Vec16 &upper = b.q[j / 2], &lower = b.q[2 + j / 2];
    const uint32_t b0[2] = {upper.w[j % 2 * 2], upper.w[j % 2 * 2 + 1]}, b1[2] = {lower.w[j % 2 * 2], lower.w[j % 2 * 2 + 1]};
    fp4_fragment(first.w[j], first_factor, last_factor, a);
    dialect::mma_m16n8k16(tile.c[0], a, b0);
    fp4_fragment(last.w[j], first_factor, last_factor, a);
    dialect::mma_m16n8k16(tile.c[1], a, b1);
  }
}

SGL_DEVICE void multiply_fp8(MoeTile& tile, const char* stage_row, int32_t pitch, float scale, const MoeColumns& b) {
  const uint32_t factor = fp8_factor(scale);
SGL_UNROLL
  for (int32_t half = 0; half < 2; ++half) {
    const Vec16 first = load_shared_vec(stage_row + half * 16), last = load_shared_vec(stage_row + 8 * pitch + half * 16);
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) {
      uint32_t upper[2], lower[2], fragment[2];
      fp8_pairs(first.w[j], factor, upper);
      fp8_pairs(last.w[j], factor, lower);
      const Vec16& columns = b.q[2 * half + j % 2];  // pairs 2j and 2j + 1
      split_pairs(columns.w[j / 2], columns.w[j / 2 + 2], fragment);
      const uint32_t a[4] = {upper[0], lower[0], upper[1], lower[1]};
      dialect::mma_m16n8k16(tile.c[j % 2], a, fragment);
    }
  }
}

SGL_DEVICE void multiply_bf16(MoeTile& tile, const char* stage_row, int32_t pitch, const MoeColumns& b) {
SGL_UNROLL
  for (int32_t half = 0; half < 2; ++half) {
    Vec16 first[2], last[2];
SGL_UNROLL
    for (int32_t i = 0; i < 2; ++i) {
      first[i] = load_shared_vec(stage_row + half * 32 + i * 16);
      last[i] = load_shared_vec(stage_row + 8 * pitch + half * 32 + i * 16);
    }
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) {
      const uint32_t a[4] = {first[0].w[j], last[0].w[j], first[1].w[j], last[1].w[j]};
      const Vec16& columns = b.q[2 * half + j / 2];
      const uint32_t fragment[2] = {columns.w[j % 2 * 2], columns.w[j % 2 * 2 + 1]};
      dialect::mma_m16n8k16(tile.c[j % 2], a, fragment);
    }
  }
}

// The part of a stage that a warp multiplies, added to its one or two tiles: of gate_up the warp's gate and up rows, of down a tile of 16 rows
// (warp % 4), of the router all 16. at: the stage. steps: of the stage. row: the lane's panel row at the stage's first step.
SGL_DEVICE void multiply_moe_stage(MoeOp op, MoeTile (&tiles)[2], const char* at, int32_t steps, const char* row, MoeUnit unit, int32_t warp) {
  const abi::MoeStage layout = abi::moe_stage(op);
  const int32_t lane = dialect::thread_idx() % 32, g = lane / 4, t = lane % 4;
  const char* const scales = at + layout.rows * layout.pitch;
  const bool is_wrong = dialect::planted(dialect::Planted::kWrongScaleBlock);  // the scale of the next block of K
  if (op == abi::kMoeGateUp) {
    if (warp >= steps) return;
    const MoeColumns b = load_moe_columns(row, warp);
SGL_UNROLL
    for (int32_t part = 0; part < 2; ++part) {
      const int32_t scale_part = dialect::planted(dialect::Planted::kGateScaleForUp) ? 0 : part;
      const char* const scale = scales + (scale_part * steps + warp) * 256 + g * 16 + unit.tile % 4 * 4 + (is_wrong ? (t + 1) % 4 : t);
      multiply_fp4(tiles[part], at + (part * 16 + g) * layout.pitch + warp * 64 + t * 16, layout.pitch, scale, b);
    }
    return;
  }
  if (op == abi::kMoeDown) {
    const int32_t tile = warp % 4;
SGL_NO_UNROLL
    for (int32_t step = warp / 4; step < steps; step += 2) {
      const MoeColumns b = load_moe_columns(row, step);
      const char* const scale = scales + step * 256 + g * 16 + tile * 4 + (is_wrong ? (t + 1) % 4 : t);
      multiply_fp4(tiles[0], at + (tile * 16 + g) * layout.pitch + step * 64 + t * 16, layout.pitch, scale, b);
    }
    return;
  }
  const float* const blocks = reinterpret_cast<const float*>(scales);
  if (op == abi::kMoeSharedGateUp) {
    const int32_t step = warp % 4, part = warp / 4;
    if (step >= steps) return;
    const MoeColumns b = load_moe_columns(row, step);
    const float scale = blocks[(part * steps + step) * 4 + (is_wrong ? (t + 1) % 4 : t)];
    multiply_fp8(tiles[0], at + (part * 16 + g) * layout.pitch + step * 128 + t * 32, layout.pitch, scale, b);
    return;
  }
  if (op == abi::kMoeSharedDown) {
    const int32_t tile = warp % 4, step = warp / 4;
    if (step >= steps) return;
    const MoeColumns b = load_moe_columns(row, step);
    multiply_fp8(tiles[0], at + (tile * 16 + g) * layout.pitch + step * 128 + t * 32, layout.pitch, blocks[(tile / 2 * steps + step) * 4 + t], b);
    return;
  }
  if (warp >= steps) return;
  multiply_bf16(tiles[0], at + g * layout.pitch + warp * 256 + t * 64, layout.pitch, load_moe_columns(row, warp));
}

}  // namespace sgl_lowlatency::stages
