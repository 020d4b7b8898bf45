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

// A tile's steps of one half of 16 columns: four MMAs with the lane's 16 bytes of FP4. first, last: factors of rows g and g + 8.
SGL_DEVICE void multiply_fp4(MoeTile& tile, const Vec16& w, uint32_t first, uint32_t last, const MoeColumns& b) {
SGL_UNROLL
  for (int32_t j = 0; j < 4; ++j) {
    uint32_t a[4];
    const uint32_t fragment[2] = {b.q[j / 2].w[j % 2 * 2], b.q[j / 2].w[j % 2 * 2 + 1]};
    fp4_fragment(w.w[j], first, last, a);
    dialect::mma_m16n8k16(tile.c[j % 2], a, fragment);
  }
}

// The same of FP8. first, last: the lane's 16 bytes of rows g and g + 8.
SGL_DEVICE void multiply_fp8(MoeTile& tile, const Vec16& first, const Vec16& last, float scale, const MoeColumns& b) {
  const uint32_t factor = fp8_factor(scale);
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

// And of bf16: 32 bytes of rows g and g + 8.
SGL_DEVICE void multiply_bf16(MoeTile& tile, const Vec16 (&first)[2], const Vec16 (&last)[2], const MoeColumns& b) {
SGL_UNROLL
  for (int32_t j = 0; j < 4; ++j) {
    const uint32_t a[4] = {first[0].w[j], last[0].w[j], first[1].w[j], last[1].w[j]};
    const Vec16& columns = b.q[j / 2];
    const uint32_t fragment[2] = {columns.w[j % 2 * 2], columns.w[j % 2 * 2 + 1]};
    dialect::mma_m16n8k16(tile.c[j % 2], a, fragment);
  }
}

// Where a lane finds the scales of tile `tile` of a chunk. is_gate_up: the tiles have each their own, else the same.
SGL_DEVICE const char* moe_chunk_scales(const char* chunk, bool is_gate_up, int32_t tile) {
  const int32_t number = is_gate_up && !dialect::planted(dialect::Planted::kGateScaleForUp) ? tile : 0;
  return chunk + abi::kPairBytes + number * abi::kMoeScaleBytes;
}
// A lane's block of 32 columns.
SGL_DEVICE int32_t moe_scale_lane() {
  const int32_t t = dialect::thread_idx() % 4;
  return dialect::planted(dialect::Planted::kWrongScaleBlock) ? (t + 1) % 4 : t;  // of the next block of K
}

// Products of a chunk of FP4, `steps` steps, added to both tiles. row: the lane's panel row, at the chunk's first column. scale_tile: which 16 of its
// block's 64 rows the first tile is.
SGL_DEVICE void multiply_fp4_chunk(MoeTile (&tiles)[2], const char* chunk, int32_t steps, const char* row, bool is_gate_up, int32_t scale_tile) {
  const int32_t lane = dialect::thread_idx() % 32, g = lane / 4, t = lane % 4;
  const char* const words = chunk + g * abi::kFp4StepBytes + t * 16;
  const char* scale[2];
SGL_UNROLL
  for (int32_t n = 0; n < 2; ++n) {
    scale[n] = moe_chunk_scales(chunk, is_gate_up, n) + g * 16 + (scale_tile + (is_gate_up ? 0 : n)) * 4 + moe_scale_lane();
  }
SGL_NO_UNROLL
  for (int32_t step = 0; step < steps; ++step) {  // in a loop, whose code is fetched once
    uint32_t first[2], last[2];
SGL_UNROLL
    for (int32_t n = 0; n < 2; ++n) {
      first[n] = fp4_factor(static_cast<uint8_t>(scale[n][step * 256]));
      last[n] = fp4_factor(static_cast<uint8_t>(scale[n][step * 256 + 8 * 16]));
    }
SGL_UNROLL
    for (int32_t half = 0; half < 2; ++half) {  // stored row g has the first 16 of each 32 columns, row g + 8 the others
      const MoeColumns b = load_moe_columns(row, step, half);
SGL_UNROLL
      for (int32_t n = 0; n < 2; ++n) {
        multiply_fp4(tiles[n], load_shared_vec(words + ((step * 2 + n) * 16 + half * 8) * abi::kFp4StepBytes), first[n], last[n], b);
      }
    }
  }
}

// The same of a chunk of FP8, or of the router's bf16, which is of the first tile alone.
SGL_DEVICE void multiply_static_chunk(MoeTile (&tiles)[2], const char* chunk, const char* row, MoeOp op) {
  const int32_t lane = dialect::thread_idx() % 32, g = lane / 4, t = lane % 4;
SGL_NO_UNROLL
  for (int32_t half = 0; half < 2; ++half) {
    const MoeColumns b = load_moe_columns(row, 0, half);
    if (op == abi::kMoeRouter) {
      Vec16 first[2], last[2];
SGL_UNROLL
      for (int32_t i = 0; i < 2; ++i) {
        const char* const at = chunk + abi::stage_offset(t / 2, g, t % 2 * 4 + half * 2 + i);
        first[i] = load_shared_vec(at);
        last[i] = load_shared_vec(at + 8 * abi::kChunkBytes);
      }
      multiply_bf16(tiles[0], first, last, b);
      continue;
    }
SGL_UNROLL
    for (int32_t n = 0; n < 2; ++n) {
      const char* const at = chunk + abi::stage_offset(n, g, t * 2 + half);
      const float scale = reinterpret_cast<const float*>(moe_chunk_scales(chunk, op == abi::kMoeSharedGateUp, n))[moe_scale_lane()];
      multiply_fp8(tiles[n], load_shared_vec(at), load_shared_vec(at + 8 * abi::kChunkBytes), scale, b);
    }
  }
}

}  // namespace sgl_lowlatency::stages
