// Products of a warp: steps of 128 columns of 16 rows of weights with the panel's eight rows. Lane 4g + t has rows g and g + 8 of the weights and
// columns 32t .. 32t + 31 of the step, 16 of them at a time: an item. A sum over K may be taken in any order, as long as weights and panel agree.
//
// The items of a stage go to the warps in turn, and the unit's next stage begins with the warp that follows: all warps have the same work, whatever
// the number of items. The loops are short on purpose: what does not fit the innermost instruction cache is fetched anew in every pass (DESIGN.md).
#pragma once
#include "sgl_lowlatency/stages/block_float.hpp"
#include "sgl_lowlatency/stages/fused_moe_state.hpp"

namespace sgl_lowlatency::stages {

// 16 x 8 sums, two of each, so that consecutive MMAs do not depend on each other.
struct MoeTile {
  float c[2][4] = {};
  SGL_DEVICE float sum(int32_t i) const { return c[0][i] + c[1][i]; }
};

SGL_DEVICE Vec16 load_shared_vec(const char* at) { return *reinterpret_cast<const Vec16*>(at); }

// Row of an FP4 tile that lane 4g + t has as its row g: the two rows of eight neighbouring lanes are not neighbours, so that a stage whose rows
// r + 4 lie 64 bytes further on than rows r (abi::moe_fp4_row) is read without bank conflicts.
SGL_DEVICE int32_t fp4_row_of(int32_t g) { return g / 2 + g % 2 * 4; }

// Steps first, first + kNumConsumerWarps, .. of `steps`, of 16 of each 32 columns; returns the number of the warp's next item behind them. words: the
// lane's 16 bytes of its stored row at step 0. scales: of step 0, of the lane's row, tile and columns, its other row's 128 bytes behind. columns: the
// lane's panel row at step 0, from its 16 columns on.
SGL_DEVICE int32_t multiply_fp4_steps(MoeTile& tile, int32_t first, int32_t steps, const char* words, const char* scales, const char* columns) {
  words += first * 64;
  scales += first * 256;
  columns += first * 256;
SGL_NO_UNROLL
  for (; first < steps; first += abi::kNumConsumerWarps) {
    const Vec16 w = load_shared_vec(words);
    const Vec16 b[2] = {load_shared_vec(columns), load_shared_vec(columns + 64)};
    const uint32_t upper = fp4_factor(static_cast<uint8_t>(scales[0])), lower = fp4_factor(static_cast<uint8_t>(scales[8 * 16]));
    words += abi::kNumConsumerWarps * 64;
    scales += abi::kNumConsumerWarps * 256;
    columns += abi::kNumConsumerWarps * 256;
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) {
      uint32_t a[4];
      const uint32_t fragment[2] = {b[j / 2].w[j % 2 * 2], b[j / 2].w[j % 2 * 2 + 1]};
      fp4_fragment(w.w[j], upper, lower, a);
      dialect::mma_m16n8k16(tile.c[j % 2], a, fragment);
    }
  }
  return first - steps;
}

// What a warp multiplies of a stage of FP8 or bf16: items `first`, first + kNumConsumerWarps, .. of `count`.
struct MoeItems {
  int32_t first;
  int32_t count;
};

// Items alternate between the halves of a step. rows: the lane's 32 bytes of row g at step 0, row g + 8 is 8 pitches behind. scales: of step 0, its
// block's. columns: the lane's panel row at step 0.
SGL_DEVICE void multiply_fp8_items(MoeTile& tile, const MoeItems& items, const char* rows, int32_t pitch, const float* scales, const char* columns) {
SGL_NO_UNROLL
  for (int32_t item = items.first; item < items.count; item += abi::kNumConsumerWarps) {
    const int32_t step = item / 2, half = item % 2;
    const char* const at = rows + step * 128 + half * 16;
    const char* const from = columns + item * 128;
    const Vec16 first = load_shared_vec(at), last = load_shared_vec(at + 8 * pitch);
    const Vec16 b[2] = {load_shared_vec(from), load_shared_vec(from + 64)};
    const uint32_t factor = fp8_factor(scales[step * 4]);
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) {
      uint32_t upper[2], lower[2], fragment[2];
      fp8_pairs(first.w[j], factor, upper);
      fp8_pairs(last.w[j], factor, lower);
      const Vec16& pairs = b[j % 2];  // pairs 2j and 2j + 1
      split_pairs(pairs.w[j / 2], pairs.w[j / 2 + 2], fragment);
      const uint32_t a[4] = {upper[0], lower[0], upper[1], lower[1]};
      dialect::mma_m16n8k16(tile.c[j % 2], a, fragment);
    }
  }
}

// As multiply_fp8_items; rows: the lane's 64 bytes.
SGL_DEVICE void multiply_bf16_items(MoeTile& tile, const MoeItems& items, const char* rows, int32_t pitch, const char* columns) {
SGL_NO_UNROLL
  for (int32_t item = items.first; item < items.count; item += abi::kNumConsumerWarps) {
    const char* const at = rows + item / 2 * 256 + item % 2 * 32;
    const char* const from = columns + item * 128;
    Vec16 first[2], last[2];
SGL_UNROLL
    for (int32_t i = 0; i < 2; ++i) {
      first[i] = load_shared_vec(at + i * 16);
      last[i] = load_shared_vec(at + 8 * pitch + i * 16);
    }
    const Vec16 b[2] = {load_shared_vec(from), load_shared_vec(from + 64)};
SGL_UNROLL
    for (int32_t j = 0; j < 4; ++j) {
      const uint32_t a[4] = {first[0].w[j], last[0].w[j], first[1].w[j], last[1].w[j]};
      const uint32_t fragment[2] = {b[j / 2].w[j % 2 * 2], b[j / 2].w[j % 2 * 2 + 1]};
      dialect::mma_m16n8k16(tile.c[j % 2], a, fragment);
    }
  }
}

}  // namespace sgl_lowlatency::stages
