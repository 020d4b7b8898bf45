// A warp's tile of a draft's products: 16 rows of weights by up to 8 kNTiles rows of activations, over a chunk of a stage at a time.
#pragma once
#include "sgl_lowlatency/stages/warp_tile.hpp"

namespace sgl_lowlatency::stages {

// Of few N tiles two sums each, even and odd k16 steps, so that consecutive MMAs do not depend on each other; many are enough by their number, and
// their second sums would spill, as those of several tiles at once would.
template <int32_t kNTiles, int32_t kAtOnce = 1>
struct DraftTile {
  static constexpr int32_t kSums = kNTiles < 5 && kAtOnce == 1 ? 2 : 1;
  float c[kNTiles][kSums][4] = {};

  SGL_DEVICE float sum(int32_t t, int32_t i) const { return kSums == 2 ? c[t][0][i] + c[t][kSums - 1][i] : c[t][0][i]; }

  // row_of(row): where the lane reads that row of the activations, at the chunk's first column (PanelRow). Entry: all lanes; the stage is full.
  template <class RowOf>
  SGL_DEVICE void multiply(const char* stage, int32_t chunk, int32_t lane, const RowOf& row_of) {
    constexpr int32_t kPairs = abi::chunk_k(2) / 32;
    const char* const weights = stage + abi::stage_offset(chunk, 0, 0);
    const int32_t a_lane = abi::stage_offset(0, lane % 16, lane / 16);  // of the first k16 step; the step's number is xored in
SGL_UNROLL
    for (int32_t pair = 0; pair < kPairs; ++pair) {
      uint32_t a0[4], a1[4];
      dialect::ldmatrix_x4(a0, weights + (a_lane ^ pair * 64));
      dialect::ldmatrix_x4(a1, weights + (a_lane ^ (pair * 64 + 32)));
SGL_UNROLL
      for (int32_t t = 0; t < kNTiles; ++t) {
        const PanelRow row = row_of(t * 8 + lane % 8);
        uint32_t b[4];
        dialect::ldmatrix_x4(b, row.at + pair * row.step);
        const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
        dialect::mma_m16n8k16(c[t][0], a0, b0);
        dialect::mma_m16n8k16(c[t][kSums - 1], a1, b1);
      }
    }
  }
};

}  // namespace sgl_lowlatency::stages
