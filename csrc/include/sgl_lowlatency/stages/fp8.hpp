// e4m3fn weights: their values as the MMA takes them, and the scales that go with them.
#pragma once
#include <type_traits>

#include "sgl_lowlatency/stages/op.hpp"
#include "sgl_lowlatency/stages/upkeep.hpp"

namespace sgl_lowlatency::stages {

// Four e4m3fn, exactly: y[0] has bytes 0 and 2 of x as two bf16, y[1] bytes 1 and 3. Sign and the seven other bits go where bf16 has
// them, and 2^120 makes up for the exponents' bias; subnormals are no exception. The NaN codes 0x7f and 0xff come out as 480 and -480.
SGL_DEVICE void fp8_to_bf16x2(uint32_t x, uint32_t (&y)[2]) {
  constexpr uint32_t kRebias = 0x7b807b80u;  // 2^120 twice
  const uint32_t even = x << 8;
  y[0] = dialect::multiply_bf16x2((even & 0x80008000u) | (even >> 4 & 0x07f007f0u), kRebias);
  y[1] = dialect::multiply_bf16x2((x & 0x80008000u) | (x >> 4 & 0x07f007f0u), kRebias);
}

// Scales of a tile's blocks of 128 columns, one a warp and stage: lane i has those of the panel's stage i, for the tile's first and
// last eight rows (they differ in gate_up alone). 1 where a row has one scale. kIsPaired: false where they never differ; a copy of a scale that was
// just asked for would wait for it there and then.
template <int32_t kElementBytes, bool kIsPaired = true>
struct BlockScales {};
template <>
struct BlockScales<1, true> {
  float first = 1.0f;
  float last = 1.0f;
};
template <>
struct BlockScales<1, false> {
  float first = 1.0f;
};

// The scales of the tiles of an operation.
template <int32_t kElementBytes, class Op>
using OpScales = BlockScales<kElementBytes, !std::is_same_v<Op, MoeOp>>;

// Of the matrix whose scales, a row of num_blocks for every 128 of its rows, begin at `scales`: that of block `block` of K and of row `row`.
SGL_DEVICE float block_scale_at(const float* scales, int32_t num_blocks, int32_t block, int32_t row) {
  return dialect::load_constant(scales + block + row / abi::kScaleBlock * num_blocks);
}

// As block_scale_at: those of block `block` of K for a tile's rows, which
// begin at first_row, and where the tile is paired its last eight at last_row.
SGL_DEVICE BlockScales<1> block_scales_at(const float* scales, int32_t num_blocks, int32_t block, int32_t first_row, int32_t last_row, bool is_paired) {
  BlockScales<1> of;
  of.first = of.last = block_scale_at(scales, num_blocks, block, first_row);
  if (is_paired && !dialect::planted(dialect::Planted::kGateScaleForUp)) of.last = block_scale_at(scales, num_blocks, block, last_row);
  return of;
}

// Asked for a tile ahead, so that nothing waits for them. Entry: all lanes of a consumer warp. k0: the panel's first column; past K: no loads.
template <int32_t kElementBytes, class Op>
SGL_DEVICE OpScales<kElementBytes, Op> load_block_scales(const DecodeStepParams& p, const Shared& s, int32_t layer, Op op, int32_t tile, int32_t k0,
                                                         int32_t warp, int32_t lane) {
  OpScales<kElementBytes, Op> scales;
  if constexpr (kElementBytes == 1) {
    const bool is_paired = op == abi::kOpGateUp;
    static_assert(abi::chunk_k(1) == abi::kScaleBlock, "a warp's chunk of a stage has one scale");
    if (p.weights != abi::kWeightsFp8Block || weight_bytes<1>(op) == 2) return scales;
    const int32_t num_blocks = p.ops[op].k_extent / abi::kScaleBlock;
    int32_t block = k0 / abi::kScaleBlock + lane * abi::kStageChunks + warp;
    if (block >= num_blocks) return scales;
    if (dialect::planted(dialect::Planted::kWrongScaleBlock)) block = (block + 1) % num_blocks;
    const int32_t row = tile * (is_paired ? abi::kTileRows / 2 : abi::kTileRows);
    if constexpr (std::is_same_v<Op, MoeOp>) {
      scales.first = block_scale_at(layer_scales(s, layer).of[op], num_blocks, block, row);
    } else {
      return block_scales_at(layer_scales(s, layer).of[op], num_blocks, block, row, p.geometry.intermediate + row, is_paired);
    }
  }
  return scales;
}

// Scales of a finisher's rows m, m + 1 of a tile, and in gate_up of the two up rows: factors of the finished sums. 1 where a block has
// a scale.
template <int32_t kElementBytes>
struct RowScales {};
template <>
struct RowScales<1> {
  float y[2] = {1.0f, 1.0f};
  float up[2] = {1.0f, 1.0f};
};

template <int32_t kElementBytes, class Op>
SGL_DEVICE RowScales<kElementBytes> load_row_scales(const DecodeStepParams& p, const Shared& s, int32_t layer, Op op, int32_t tile, int32_t m) {
  RowScales<kElementBytes> scales;
  if constexpr (kElementBytes == 1) {
    const bool is_paired = op == abi::kOpGateUp;
    if (p.weights != abi::kWeightsFp8Channel) return scales;
    const float* const at = layer_scales(s, layer).of[op] + tile * (is_paired ? abi::kTileRows / 2 : abi::kTileRows) + m;
    const float* const up = dialect::planted(dialect::Planted::kGateScaleForUp) ? at : at + p.geometry.intermediate;
SGL_UNROLL
    for (int32_t i = 0; i < 2; ++i) {
      scales.y[i] = dialect::load_constant(at + i);
      if (is_paired) scales.up[i] = dialect::load_constant(up + i);
    }
  }
  return scales;
}

}  // namespace sgl_lowlatency::stages
