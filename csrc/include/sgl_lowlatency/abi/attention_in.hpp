// Structs of the `attention_in` kernel, shared by host C++, CUDA, the host dialect and (through the bindings) Python.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sgl_lowlatency/abi/slice.hpp"

namespace sgl_lowlatency::abi {

constexpr int32_t kHeadDim = 512;                // of a query head, and of the one row of keys that are values too
constexpr int32_t kHeadRope = 64;                // the last ones, rotated
constexpr int32_t kKvGroup = 64;                 // values of a KV row that share a scale
constexpr int32_t kKvScales = (kHeadDim - kHeadRope) / kKvGroup;
constexpr int32_t kKvDataBytes = kHeadDim - kHeadRope + 2 * kHeadRope;  // of a slot: e4m3, then bf16
constexpr int32_t kKvScaleBytes = 8;             // of a slot: e8m0 each, and a byte of padding
constexpr int32_t kAttnInPanel = 1024;           // most columns of wqkv_a's panel
constexpr int32_t kAttnInMaxLora = 1408;         // what a panel of kSliceMaxRows rows leaves the ring five stages of
constexpr int32_t kAttnInRowsWarp = kNumConsumerWarps + 1;
constexpr int32_t kAttnInThreads = (kNumConsumerWarps + 2) * 32;  // consumers first, then the producer and the rows' warp
static_assert(kKvScales < kKvScaleBytes, "a slot's scales fit");

// What blocks stream weights for, in this order.
enum AttnInOp : int32_t { kAttnInA = 0, kAttnInB = 1, kNumAttnInOps = 2 };

// Edges, for fault records.
enum AttnInEdge : int32_t {
  kAttnInEdgeCombined = 0,
  kAttnInEdgeSquares = 1,
  kAttnInEdgePartial = 2,
  kAttnInEdgeLatent = 3,
  kAttnInEdgeLatentSquares = 4
};

// Points of a block's way through a launch, of which AttentionInParams::trace keeps the times.
enum AttnInPoint : int32_t {
  kAttnInPointBegin = 0,  // the launch in front is over
  kAttnInPointCombine = 1,
  kAttnInPointA = 2,
  kAttnInPointJoin = 3,
  kAttnInPointB = 4,
  kAttnInPointRows = 5,
  kNumAttnInPoints = 6
};

struct AttnInGeometry {
  int32_t hidden;  // a multiple of 128
  int32_t lora;    // of the queries: a multiple of 128 up to kAttnInMaxLora
  int32_t heads;
};
SGL_ABI_FUNCTION int32_t attn_in_rows_a(const AttnInGeometry& g) { return g.lora + kHeadDim; }  // of wqkv_a
SGL_ABI_FUNCTION int32_t attn_in_num_rows(const AttnInGeometry& g, AttnInOp op) { return op == kAttnInA ? attn_in_rows_a(g) : g.heads * kHeadDim; }
SGL_ABI_FUNCTION int32_t attn_in_k(const AttnInGeometry& g, AttnInOp op) { return op == kAttnInA ? g.hidden : g.lora; }
// wq_b's K is whole, so that queries are finished where they are multiplied.
SGL_ABI_FUNCTION int32_t attn_in_splits(const AttnInGeometry& g, AttnInOp op, int32_t grid) {
  return op == kAttnInA ? tall_splits(attn_in_rows_a(g), g.hidden, grid) : 1;
}
SGL_ABI_FUNCTION int32_t attn_in_panel_k(const AttnInGeometry& g) {
  const int32_t most = g.hidden < kAttnInPanel ? g.hidden : kAttnInPanel;
  return g.lora > most ? g.lora : most;
}
// A block's units: tiles of kTallRows rows and of a split of K.
SGL_ABI_FUNCTION TileRange attn_in_share(const AttnInGeometry& g, AttnInOp op, int32_t block, int32_t grid) {
  return even_share(attn_in_num_rows(g, op) / kTallRows * attn_in_splits(g, op, grid), block, grid);
}

// One generation of the hand-over words: offsets in words, multiples of 4.
struct AttnInHandover {
  int32_t combined;        // [rows, hidden / 2] pairs of bf16: not yet normed
  int32_t squares;         // [rows, hidden / 128] fp32: sums of their squares
  int32_t partial;         // [splits, rows, lora + kHeadDim] fp32
  int32_t latent;          // [rows, lora / 2] pairs of bf16: not yet normed
  int32_t latent_squares;  // [rows, lora / 128] fp32
  int32_t total_words;
};
SGL_ABI_FUNCTION AttnInHandover attn_in_handover(const AttnInGeometry& g, int32_t rows, int32_t grid) {
  AttnInHandover at{};
  at.squares = at.combined + rows * (g.hidden / 2);
  at.partial = (at.squares + rows * (g.hidden / kPieceColumns) + 3) / 4 * 4;
  at.latent = at.partial + attn_in_splits(g, kAttnInA, grid) * rows * attn_in_rows_a(g);
  at.latent_squares = at.latent + rows * (g.lora / 2);
  at.total_words = (at.latent_squares + rows * (g.lora / kPieceColumns) + 3) / 4 * 4;
  return at;
}
SGL_ABI_FUNCTION SliceSmem attn_in_smem(const AttnInGeometry& g, int32_t rows) {
  return slice_smem(rows, attn_in_panel_k(g), false);
}

struct AttentionInParams {
  int32_t rows;  // 1..kSliceMaxRows
  AttnInGeometry geometry;
  float norm_eps;     // of the norm in front
  float q_norm_eps;
  float kv_norm_eps;
  int32_t max_position;   // rows of freqs
  int32_t pre_stride;     // floats from row to row of pre, a multiple of 4
  int32_t q_stride;       // elements from row to row of q, a multiple of 8
  int32_t page_size;      // slots of a page
  int32_t num_pages;
  int64_t page_bytes;     // a multiple of 16: slots' data one after the other, then their scales
  SliceSmem shared;       // attn_in_smem of geometry and rows
  uint64_t deadline_ns;   // of a wait for another block; a wait for the ring lasts twice as long
  int32_t rank;           // for the fault record

  const bf16* streams;       // [rows, kStreams, hidden]
  const float* pre;          // [rows, kStreams], or null: stream 0 alone, as the first layer has it
  const bf16* norm;          // [hidden]
  const bf16* q_norm;        // [lora]
  const bf16* kv_norm;       // [kHeadDim]
  const int64_t* positions;  // [rows]
  const float* freqs;        // [max_position, kHeadRope / 2, 2]: cosine and sine
  const int32_t* slots;      // [rows]: of the KV row, or below 0: it has none
  const WeightMap* maps;     // [kNumAttnInOps]: wqkv_a e4m3fn [lora + kHeadDim, hidden], rows q | kv, and wq_b e4m3fn [heads * kHeadDim, lora]
  const float* scales[kNumAttnInOps];  // of blocks of 32 x 32: powers of two

  uint8_t* cache;       // [num_pages, page_bytes]
  bf16* x;              // [rows, hidden]: normed
  bf16* q_lora;         // [rows, lora]: normed
  bf16* q;              // [rows, heads, kHeadDim]: rotated
  uint64_t* trace;      // [grid, kNumAttnInPoints] of timer_ns, or null
  uint32_t* workspace;  // two generations of generation_words, all bits set before the first launch
  int32_t generation_words;  // a multiple of 4, at least attn_in_handover(geometry, rows, grid).total_words
  SliceState* state;
  uint64_t* executed_mirror;  // [kSliceMaxRows + 1] host-visible copy of the state's counts, or null: this launch is not counted
  FaultRecord* fault;   // host-visible
};
static_assert(sizeof(AttentionInParams) <= 4096, "parameters of a launch");

}  // namespace sgl_lowlatency::abi
