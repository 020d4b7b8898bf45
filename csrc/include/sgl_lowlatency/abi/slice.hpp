// What the slices of a DeepSeek-V4.1 layer around its attention have alike: attention_in and attention_out. A slice is two products of rows with
// matrices that stream through a ring, and what lies before, between and behind them.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sgl_lowlatency/abi/fused_moe.hpp"
#include "sgl_lowlatency/abi/hyper_connection.hpp"
#include "sgl_lowlatency/abi/weight_map.hpp"

namespace sgl_lowlatency::abi {

constexpr int32_t kSliceMaxRows = 48;
constexpr int32_t kPieceColumns = 128;     // of a row: what a warp has of it between the products
constexpr int32_t kSliceMaxStages = 12;
constexpr int32_t kSliceScaleBlock = 32;   // rows and columns of an FP8 matrix that share a scale
constexpr int32_t kTallK = kChunkBytes;    // columns of a tall stage of FP8
constexpr int32_t kSliceSmemBytes = 232448;  // of one block on sm_90a, sm_100a and sm_103a

// N tiles of eight rows: a kernel's instance.
SGL_ABI_FUNCTION int32_t slice_n_tiles(int32_t rows) { return rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 32 ? 4 : 6; }

// An FP8 matrix passes in tall stages. Splits of its K: as many as make no more units, tiles of kTallRows rows each, than there are blocks, so that
// sums are no more than they must be and blocks have one split each; 1 where tiles alone are as many.
SGL_ABI_FUNCTION int32_t tall_splits(int32_t num_rows, int32_t k, int32_t grid) {
  const int32_t most = grid / (num_rows / kTallRows), steps = k / kTallK;
  return most < 1 ? 1 : most < steps ? most : steps;
}
// First column of a split of K; of split number `splits`: K.
SGL_ABI_FUNCTION int32_t tall_split_begin(int32_t k, int32_t splits, int32_t split) { return k / kTallK * split / splits * kTallK; }

// What a block knows of a launch.
struct SliceBlockState {
  int32_t generation;      // of this launch, 0 or 1
  int32_t words_to_clear;  // of the other generation
  int32_t parity;          // of several ranks: of the words that this launch pushes (stages/pushed_tiles.hpp)
  int32_t rows_to_clear;   // .. of the parity that the launch before has pushed
};

// Dynamic shared memory of one block: byte offsets, multiples of 16.
struct SliceSmem {
  int32_t barriers;   // full[kSliceMaxStages], empty[kSliceMaxStages], partials[2] as uint64_t
  int32_t state;      // SliceBlockState
  int32_t positions;  // [rows] int32
  int32_t zero_row;   // 16 zero bytes: what columns without a row read
  int32_t scratch;    // [2][kNumConsumerWarps][rows][kScratchPitch] float: what warps add up, where K is split over them
  int32_t panel;      // [rows] of panel_row_bytes(panel_k)
  int32_t ring;       // [num_stages] of kStageBytes, at a multiple of 1024
  int32_t panel_k;    // columns of the panel
  int32_t num_stages;
  int32_t total_bytes;
};
SGL_ABI_FUNCTION SliceSmem slice_smem(int32_t rows, int32_t panel_k, bool has_scratch) {
  SliceSmem at{};
  int32_t end = 0;
  const auto take = [&](int32_t bytes) {
    const int32_t begin = end;
    end += (bytes + 15) / 16 * 16;
    return begin;
  };
  at.panel_k = panel_k;
  at.barriers = take((2 * kSliceMaxStages + 2) * 8);
  at.state = take(static_cast<int32_t>(sizeof(SliceBlockState)));
  at.positions = take(rows * 4);
  at.zero_row = take(16);
  at.scratch = take(has_scratch ? 2 * kNumConsumerWarps * rows * kScratchPitch * 4 : 0);
  at.panel = take(rows * panel_row_bytes(panel_k));
  at.ring = (end + kStageAlignment - 1) / kStageAlignment * kStageAlignment;
  const int32_t fit = (kSliceSmemBytes - at.ring) / kStageBytes;
  at.num_stages = fit < kSliceMaxStages ? fit : kSliceMaxStages;
  at.total_bytes = at.ring + at.num_stages * kStageBytes;
  return at;
}

// State in device memory that outlives a launch, zero before the first one: as fused_moe's.
using SliceState = MoeState;
static_assert(kSliceMaxRows == kMoeMaxRows, "counts of every number of rows");

}  // namespace sgl_lowlatency::abi
