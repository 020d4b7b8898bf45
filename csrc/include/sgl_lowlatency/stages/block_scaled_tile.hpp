// A warp's tile of FP8 with a scale for every 32 columns: DraftTile's counterpart, over a chunk of a stage at a time.
#pragma once
#include "sgl_lowlatency/abi/slice.hpp"
#include "sgl_lowlatency/stages/block_float.hpp"
#include "sgl_lowlatency/stages/draft_tile.hpp"

namespace sgl_lowlatency::stages {

// The fragments are WarpTile's of FP8, the panel stored for them. A step of ldmatrix is 32 columns, which have one scale, a power of two: it joins
// the factor that decodes the weights, exactly.
template <int32_t kNTiles>
struct BlockScaledTile {
  static constexpr int32_t kSums = DraftTile<kNTiles>::kSums, kFactors = abi::chunk_k(1) / abi::kSliceScaleBlock;
  float c[kNTiles][kSums][4] = {};

  SGL_DEVICE float sum(int32_t t, int32_t i) const { return kSums == 2 ? c[t][0][i] + c[t][kSums - 1][i] : c[t][0][i]; }

  // factors: fp8_factor of the chunk's blocks of columns. row_of(row): where the lane reads that row of the activations, at the chunk's first column
  // (PanelRow). Entry: all lanes; the stage is full.
  template <class RowOf>
  SGL_DEVICE void multiply(const char* stage, int32_t chunk, int32_t lane, const uint32_t (&factors)[kFactors], const RowOf& row_of) {
    constexpr int32_t kPairs = kFactors;
    static_assert(abi::kSliceScaleBlock == 32, "a step has one scale");
    const char* const weights = stage + abi::stage_offset(chunk, 0, 0);
    const int32_t a_lane = abi::stage_offset(0, lane % 16, lane / 16);  // of the first two k16 steps; their number is xored in
SGL_UNROLL
    for (int32_t pair = 0; pair < kPairs; ++pair) {
      const uint32_t factor = factors[dialect::planted(dialect::Planted::kWrongScaleBlock) ? (pair + 1) % kPairs : pair];
      uint32_t raw[4], a0[4], a1[4];
      dialect::ldmatrix_x4(raw, weights + (a_lane ^ pair * 32));
SGL_UNROLL
      for (int32_t half = 0; half < 2; ++half) {
        uint32_t even[2], odd[2];
        fp8_pairs(raw[half], factor, even);
        fp8_pairs(raw[2 + half], factor, odd);
        a0[half] = even[0];
        a0[half + 2] = even[1];
        a1[half] = odd[0];
        a1[half + 2] = odd[1];
      }
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
