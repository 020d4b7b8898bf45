// Structs of the `attention_out` kernel, shared by host C++, CUDA, the host dialect and (through the bindings) Python.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sgl_lowlatency/abi/hyper_connection.hpp"
#include "sgl_lowlatency/abi/slice.hpp"

namespace sgl_lowlatency::abi {

constexpr int32_t kAttnOutMaxPanel = 4096;  // columns of the panel, of up to eight rows
constexpr int32_t kAttnOutMaxLatent = 8192;
constexpr int32_t kAttnOutMixerWarp = kNumConsumerWarps + 1;
constexpr int32_t kAttnOutThreads = (kNumConsumerWarps + 2) * 32;  // consumers first, then the producer and the mixer

// What blocks stream weights for, in this order.
enum AttnOutOp : int32_t { kAttnOutA = 0, kAttnOutB = 1, kNumAttnOutOps = 2 };

// Edges, for fault records.
enum AttnOutEdge : int32_t {
  kAttnOutEdgeMix = 0,
  kAttnOutEdgeCoefficients = 1,
  kAttnOutEdgePartial = 2,
  kAttnOutEdgeLatent = 3,
  kAttnOutEdgeOutput = 4,
  kAttnOutEdgeSquares = 5
};

// Points of a block's way through a launch, of which AttentionOutParams::trace keeps the times.
enum AttnOutPoint : int32_t {
  kAttnOutPointBegin = 0,  // the launch in front is over
  kAttnOutPointA = 1,
  kAttnOutPointJoin = 2,
  kAttnOutPointB = 3,
  kAttnOutPointPost = 4,
  kAttnOutPointNorm = 5,
  kNumAttnOutPoints = 6
};

struct AttnOutGeometry {
  int32_t hidden;    // a multiple of 128
  int32_t heads;     // a multiple of groups
  int32_t head_dim;  // a multiple of 8
  int32_t rope_dim;  // the last ones of a head that are rotated: a multiple of 8
  int32_t groups;    // each projected by its own part of wo_a
  int32_t lora;      // rows of wo_a of one group, a multiple of 16
};
// Multiples of 64 up to kAttnOutMaxPanel, and of 128 up to kAttnOutMaxLatent.
SGL_ABI_FUNCTION int32_t attn_out_group_k(const AttnOutGeometry& g) { return g.heads / g.groups * g.head_dim; }
SGL_ABI_FUNCTION int32_t attn_out_latent(const AttnOutGeometry& g) { return g.groups * g.lora; }

// Columns of K that a panel holds: of more rows fewer, so that it fits.
SGL_ABI_FUNCTION int32_t attn_out_panel_k(int32_t rows) {
  return rows <= 8 ? kAttnOutMaxPanel : rows <= 16 ? kAttnOutMaxPanel / 2 : kAttnOutMaxPanel / 4;
}

SGL_ABI_FUNCTION int32_t attn_out_k(const AttnOutGeometry& g, AttnOutOp op) { return op == kAttnOutA ? attn_out_group_k(g) : attn_out_latent(g); }
// Of wo_a as many as there are panels, of wo_b as many as keep the blocks busy.
SGL_ABI_FUNCTION int32_t attn_out_splits(const AttnOutGeometry& g, AttnOutOp op, int32_t rows, int32_t grid) {
  return op == kAttnOutA ? moe_ceil_div(attn_out_group_k(g), attn_out_panel_k(rows)) : tall_splits(g.hidden, attn_out_latent(g), grid);
}
// Units that have the same columns: of wo_a, of a group, tiles of 16 rows, of wo_b of kTallRows.
SGL_ABI_FUNCTION int32_t attn_out_tiles(const AttnOutGeometry& g, AttnOutOp op) {
  return op == kAttnOutA ? g.lora / kTileRows : g.hidden / kTallRows;
}
// A block's units.
SGL_ABI_FUNCTION TileRange attn_out_share(const AttnOutGeometry& g, AttnOutOp op, int32_t rows, int32_t block, int32_t grid) {
  return even_share(attn_out_tiles(g, op) * attn_out_splits(g, op, rows, grid) * (op == kAttnOutA ? g.groups : 1), block, grid);
}

// One generation of the hand-over words: offsets in words, multiples of 4.
struct AttnOutHandover {
  int32_t mix;           // [mix units, rows, kMixWords] fp32
  int32_t coefficients;  // [rows, kMixes] fp32: pre, post, comb
  int32_t partial;       // [splits of wo_a, rows, latent] fp32; none of one split
  int32_t latent;        // [rows, latent / 2] pairs of bf16
  int32_t output;        // [splits of wo_b, rows, hidden] fp32
  int32_t squares;       // [rows, hidden / 128] fp32
  int32_t total_words;
};
SGL_ABI_FUNCTION AttnOutHandover attn_out_handover(const AttnOutGeometry& g, int32_t rows, int32_t grid) {
  AttnOutHandover at{};
  const int32_t splits = attn_out_splits(g, kAttnOutA, rows, grid), latent = attn_out_latent(g);
  at.coefficients = at.mix + mix_units(g.hidden) * rows * kMixWords;
  at.partial = at.coefficients + rows * kMixes;
  at.latent = at.partial + (splits > 1 ? splits * rows * latent : 0);
  at.output = at.latent + rows * (latent / 2);
  at.squares = at.output + attn_out_splits(g, kAttnOutB, rows, grid) * rows * g.hidden;
  at.total_words = (at.squares + rows * (g.hidden / 128) + 3) / 4 * 4;
  return at;
}

SGL_ABI_FUNCTION SliceSmem attn_out_smem(const AttnOutGeometry& g, int32_t rows) {
  const int32_t widest = attn_out_group_k(g) > attn_out_latent(g) ? attn_out_group_k(g) : attn_out_latent(g), most = attn_out_panel_k(rows);
  return slice_smem(rows, most < widest ? most : widest, true);
}

struct AttentionOutParams {
  int32_t rows;  // 1..kSliceMaxRows
  AttnOutGeometry geometry;
  HyperConnection hyper;  // the attention's; its streams are what the layer was given
  float norm_eps;
  int32_t max_position;   // rows of freqs
  int32_t x_stride;       // elements from row to row of x, a multiple of 8
  SliceSmem shared;     // attn_out_smem of geometry and rows
  uint64_t deadline_ns;   // of a wait for another block; a wait for the ring lasts twice as long
  int32_t rank;           // for the fault record

  const bf16* x;             // [rows, heads, head_dim]: attention, still rotated
  const int64_t* positions;  // [rows]
  const float* freqs;        // [max_position, rope_dim / 2, 2]: cosine and sine
  const bf16* norm;          // [hidden]: of the sublayer behind
  // [kNumAttnOutOps]: wo_a bf16 [groups * lora, heads / groups * head_dim] and wo_b e4m3fn [hidden, groups * lora]
  const WeightMap* maps;
  const float* scales;       // [hidden / 32, groups * lora / 32], of wo_b: powers of two

  bf16* out;            // [rows, hidden]: the next sublayer's input
  uint64_t* trace;      // [grid, kNumAttnOutPoints] of timer_ns, or null
  uint32_t* workspace;  // two generations of generation_words, all bits set before the first launch
  int32_t generation_words;  // a multiple of 4, at least attn_out_handover(geometry, rows, grid).total_words
  SliceState* state;
  uint64_t* executed_mirror;  // [kSliceMaxRows + 1] host-visible copy of the state's counts, or null: this launch is not counted
  FaultRecord* fault;   // host-visible
};
static_assert(sizeof(AttentionOutParams) <= 4096, "parameters of a launch");

}  // namespace sgl_lowlatency::abi
