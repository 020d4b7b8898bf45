// Products of a warp: steps of 128 columns of 16 rows of weights with the panel's eight rows. Lane 4g + t has rows g and g + 8 of the weights and
// columns 32t .. 32t + 31 of the step, 16 of them at a time; a sum over K may be taken in any order, as long as weights and panel agree.
#pragma once
#include "sgl_lowlatency/stages/block_float.hpp"
#include "sgl_lowlatency/stages/fused_moe_state.hpp"

namespace sgl_lowlatency::stages {

// 16 x 8 sums, two of each, so that consecutive MMAs do not depend on each other.
struct MoeTile {
  float c[2][4] = {};
  SGL_DEVICE float sum(int32_t i) const { return c[0][i] + c[1][i]; }
};

// A lane's 16 columns of a step of its panel row: pair p (columns 2p, 2p + 1) and pair p + 4 are neighbours, B fragments as FP4 words have their
// columns, in registers that follow one another.
struct MoeColumns {
  Vec16 q[2];
};
SGL_DEVICE Vec16 load_shared_vec(const char* at) { return *reinterpret_cast<const Vec16*>(at); }
// row: the lane's panel row, at its first piece. half: of the lane's 32 columns.
SGL_DEVICE MoeColumns load_moe_columns(const char* row, int32_t step, int32_t half) {
  const char* const at = row + step * 256 + half * 128;
  return {{load_shared_vec(at), load_shared_vec(at + 64)}};
}

// A step of FP4. words: the lane's 16 bytes of a stored row, four fragments. scales: of the step's block, at [g][tile of the 64 rows][t]. columns:
// the lane's panel row, at the step and the half.
SGL_DEVICE void multiply_fp4(MoeTile& tile, const char* words, const char* scales, const char* columns) {
  const Vec16 w = load_shared_vec(words);
  const uint32_t first = fp4_factor(static_cast<uint8_t>(scales[0])), last = fp4_factor(static_cast<uint8_t>(scales[8 * 16]));
  const Vec16 b[2] = {load_shared_vec(columns), load_shared_vec(columns + 64)};
SGL_UNROLL
  for (int32_t j = 0; j < 4; ++j) {
    uint32_t a[4];
    const uint32_t fragment[2] = {b[j / 2].w[j % 2 * 2], b[j / 2].w[j % 2 * 2 + 1]};
    fp4_fragment(w.w[j], first, last, a);
    dialect::mma_m16n8k16(tile.c[j % 2], a, fragment);
  }
}
// `count` steps, kStride apart. kServed of them, DeepSeek-V4.1's number, go without a loop: no addresses to compute, and the loads of later steps are
// under way while earlier ones are multiplied.
template <int32_t kStride, int32_t kServed>
SGL_DEVICE void multiply_fp4_steps(MoeTile& tile, int32_t count, const char* words, const char* scales, const char* columns) {
  if (count == kServed) {
SGL_UNROLL
    for (int32_t i = 0; i < kServed; ++i) multiply_fp4(tile, words + i * kStride * 64, scales + i * kStride * 256, columns + i * kStride * 256);
    return;
  }
SGL_NO_UNROLL
  for (int32_t i = 0; i < count; ++i) multiply_fp4(tile, words + i * kStride * 64, scales + i * kStride * 256, columns + i * kStride * 256);
}

// row: the lane's 16 bytes of row g. pitch: from row to row.
SGL_DEVICE void multiply_fp8(MoeTile& tile, const char* row, int32_t pitch, float scale, const MoeColumns& b) {
  const uint32_t factor = fp8_factor(scale);
  const Vec16 first = load_shared_vec(row), last = load_shared_vec(row + 8 * pitch);
SGL_UNROLL
  for (int32_t j = 0; j < 4; ++j) {
    uint32_t upper[2], lower[2], fragment[2];
    fp8_pairs(first.w[j], factor, upper);
    fp8_pairs(last.w[j], factor, lower);
    const Vec16& columns = b.q[j % 2];  // pairs 2j and 2j + 1
    split_pairs(columns.w[j / 2], columns.w[j / 2 + 2], fragment);
    const uint32_t a[4] = {upper[0], lower[0], upper[1], lower[1]};
    dialect::mma_m16n8k16(tile.c[j % 2], a, fragment);
  }
}

// row: the lane's 32 bytes of row g.
SGL_DEVICE void multiply_bf16(MoeTile& tile, const char* row, int32_t pitch, const MoeColumns& b) {
  Vec16 first[2], last[2];
SGL_UNROLL
  for (int32_t i = 0; i < 2; ++i) {
    first[i] = load_shared_vec(row + i * 16);
    last[i] = load_shared_vec(row + 8 * pitch + i * 16);
  }
SGL_UNROLL
  for (int32_t j = 0; j < 4; ++j) {
    const uint32_t a[4] = {first[0].w[j], last[0].w[j], first[1].w[j], last[1].w[j]};
    const Vec16& columns = b.q[j / 2];
    const uint32_t fragment[2] = {columns.w[j % 2 * 2], columns.w[j % 2 * 2 + 1]};
    dialect::mma_m16n8k16(tile.c[j % 2], a, fragment);
  }
}

// The part of a stage that a warp multiplies, added to its tile of the piece. Stages of gate_up are all warps'; of the other ops, whose steps are no
// multiple of eight, two stages are multiplied side by side, each by four warps. at: the stage. row: the lane's panel row.
template <MoeOp kOp>
SGL_DEVICE void multiply_moe_stage(const FusedMoeParams& p, const MoeShared& s, MoeTile& tile, const char* at, const MoePiece& piece, int32_t stage,
                                   const MoeUnit& unit, const MoeScales& scales, const char* row, int32_t warp) {
  const int32_t lane = dialect::thread_idx() % 32, g = lane / 4, t = lane % 4;
  const int32_t scale_lane = dialect::planted(dialect::Planted::kWrongScaleBlock) ? (t + 1) % 4 : t;  // of the next block of K
  if (kOp == abi::kMoeGateUp) {
    const int32_t part = dialect::planted(dialect::Planted::kGateScaleForUp) ? 0 : piece.part;
    const char* const scale = s.scales(scales.first + part, p.geometry) + g * 16 + unit.tile % 4 * 4 + scale_lane;
    const char* const words = at + g * (p.geometry.hidden / 2) + t * 16;
    multiply_fp4_steps<abi::kNumConsumerWarps, 5>(tile, abi::moe_ceil_div(piece.steps - warp, abi::kNumConsumerWarps), words + warp * 64,
                                                  scale + warp * 256, row + warp * 256 + piece.half * 128);
    return;
  }
  if (warp / 4 != stage % 2) return;
  if (kOp == abi::kMoeDown) {
    const char* const scale = s.scales(scales.first, p.geometry) + g * 16 + piece.tile * 4 + scale_lane;
    // Of the warps of a stage two have the first 16 of each 32 columns, two the others, each every other step.
    const int32_t half = warp % 2, step = warp % 4 / 2;
    const char* const words = at + (half * 8 + g) * (p.geometry.intermediate / 2) + step * 64 + t * 16;
    multiply_fp4_steps<2, 9>(tile, abi::moe_ceil_div(piece.steps - step, 2), words, scale + step * 256, row + step * 256 + half * 128);
    return;
  }
  constexpr abi::MoeStage kLayout = abi::moe_stage(kOp);
  row += piece.begin * 256;
SGL_NO_UNROLL
  for (int32_t item = warp % 4; item < 2 * piece.steps; item += 4) {
    const int32_t step = item / 2, half = item % 2;
    const MoeColumns b = load_moe_columns(row, step, half);
    const char* const from = at + g * kLayout.pitch + step * kLayout.step_bytes + (t * 2 + half) * (kLayout.step_bytes / 8);
    if (kOp == abi::kMoeRouter) {
      multiply_bf16(tile, from, kLayout.pitch, b);
    } else {
      multiply_fp8(tile, from, kLayout.pitch, reinterpret_cast<const float*>(at + 16 * kLayout.pitch)[step * 4 + scale_lane], b);
    }
  }
}

}  // namespace sgl_lowlatency::stages
