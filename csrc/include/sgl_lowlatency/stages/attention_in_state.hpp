// An attention_in block's view of the hand-over words and of its work.
#pragma once
#include "sgl_lowlatency/abi/attention_in.hpp"
#include "sgl_lowlatency/stages/slice_state.hpp"

namespace sgl_lowlatency::stages {

using abi::AttentionInParams;
using abi::AttnInOp;

SGL_DEVICE sync::FaultSink fault_sink(const AttentionInParams& p) { return {p.fault, p.rank, p.deadline_ns}; }

// The words of this launch's generation.
struct AttnInWords {
  abi::AttnInHandover at;
  uint32_t* base;
  SGL_DEVICE uint32_t* combined() const { return base + at.combined; }
  SGL_DEVICE uint32_t* squares() const { return base + at.squares; }
  SGL_DEVICE uint32_t* partial() const { return base + at.partial; }
  SGL_DEVICE uint32_t* latent() const { return base + at.latent; }
  SGL_DEVICE uint32_t* latent_squares() const { return base + at.latent_squares; }
};
// Entry: behind the barrier that publishes the block's state.
SGL_DEVICE AttnInWords attn_in_words(const AttentionInParams& p, const SliceShared& s) {
  return {abi::attn_in_handover(p.geometry, p.rows, dialect::grid_dim()),
          p.workspace + static_cast<int64_t>(s.state()->generation) * p.generation_words};
}

SGL_DEVICE int32_t attn_in_splits(const AttentionInParams& p, AttnInOp op) { return abi::attn_in_splits(p.geometry, op, dialect::grid_dim()); }

// Unit number i of an op: tile i % tiles of split i / tiles.
SGL_DEVICE SliceUnit attn_in_unit(const AttentionInParams& p, AttnInOp op, int32_t number) {
  SliceUnit unit{};
  const int32_t tiles = abi::attn_in_num_rows(p.geometry, op) / abi::kTallRows, k = abi::attn_in_k(p.geometry, op), splits = attn_in_splits(p, op);
  unit.split = number / tiles;
  unit.row = number % tiles * abi::kTallRows;
  unit.k0 = abi::tall_split_begin(k, splits, unit.split);
  unit.k1 = abi::tall_split_begin(k, splits, unit.split + 1);
  return unit;
}
SGL_DEVICE abi::TileRange attn_in_own(const AttentionInParams& p, AttnInOp op) {
  return abi::attn_in_share(p.geometry, op, dialect::block_idx(), dialect::grid_dim());
}

// A vector that is handed over before it is normed, in pieces: pairs of bf16, and a piece's sum of squares.
struct NormedWords {
  const uint32_t* pairs;
  const uint32_t* squares;
  abi::AttnInEdge pairs_edge;
  abi::AttnInEdge squares_edge;
  const bf16* weight;
  int32_t width;
  float eps;
};
SGL_DEVICE NormedWords normed_x(const AttentionInParams& p, const AttnInWords& words) {
  return {words.combined(), words.squares(), abi::kAttnInEdgeCombined, abi::kAttnInEdgeSquares, p.norm, p.geometry.hidden, p.norm_eps};
}
SGL_DEVICE NormedWords normed_latent(const AttentionInParams& p, const AttnInWords& words) {
  return {words.latent(), words.latent_squares(), abi::kAttnInEdgeLatent, abi::kAttnInEdgeLatentSquares, p.q_norm, p.geometry.lora, p.q_norm_eps};
}

}  // namespace sgl_lowlatency::stages
