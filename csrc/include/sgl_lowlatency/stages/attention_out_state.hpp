// An attention_out block's view of its shared memory, of the hand-over words and of its work.
#pragma once
#include "sgl_lowlatency/abi/attention_out.hpp"
#include "sgl_lowlatency/stages/hyper_connection.hpp"
#include "sgl_lowlatency/stages/slice_state.hpp"

namespace sgl_lowlatency::stages {

using abi::AttentionOutParams;
using abi::AttnOutOp;

SGL_DEVICE sync::FaultSink fault_sink(const AttentionOutParams& p) { return {p.fault, p.rank, p.deadline_ns}; }

// The words of this launch's generation.
struct AttnOutWords {
  abi::AttnOutHandover at;
  uint32_t* base;
  SGL_DEVICE uint32_t* mix() const { return base + at.mix; }
  SGL_DEVICE uint32_t* coefficients() const { return base + at.coefficients; }
  SGL_DEVICE uint32_t* partial() const { return base + at.partial; }
  SGL_DEVICE uint32_t* latent() const { return base + at.latent; }
  SGL_DEVICE uint32_t* output() const { return base + at.output; }
  SGL_DEVICE uint32_t* squares() const { return base + at.squares; }
};
// Entry: behind the barrier that publishes the block's state.
SGL_DEVICE AttnOutWords attn_out_words(const AttentionOutParams& p, const SliceShared& s) {
  return {abi::attn_out_handover(p.geometry, p.rows, dialect::grid_dim()),
          p.workspace + static_cast<int64_t>(s.state()->generation) * p.generation_words};
}

SGL_DEVICE HyperView attn_out_hyper(const AttentionOutParams& p, const AttnOutWords& words) {
  return {p.hyper, p.rows, p.geometry.hidden, fault_sink(p), words.mix(), words.coefficients(), abi::kAttnOutEdgeMix, abi::kAttnOutEdgeCoefficients};
}

SGL_DEVICE int32_t attn_out_splits(const AttentionOutParams& p, AttnOutOp op) {
  return abi::attn_out_splits(p.geometry, op, p.rows, dialect::grid_dim());
}

// Unit number i of wo_a: tile i % tiles of panel i / tiles, a panel for each split of K of each group.
SGL_DEVICE SliceUnit attn_out_unit_a(const AttentionOutParams& p, int32_t number) {
  const int32_t tiles = abi::attn_out_tiles(p.geometry, abi::kAttnOutA), splits = attn_out_splits(p, abi::kAttnOutA);
  SliceUnit unit{};
  unit.panel = number / tiles;
  unit.group = unit.panel / splits;
  unit.split = unit.panel % splits;
  unit.row = unit.group * p.geometry.lora + number % tiles * abi::kTileRows;
  unit.k0 = unit.split * p.shared.panel_k;
  unit.k1 = min_int(unit.k0 + p.shared.panel_k, abi::attn_out_k(p.geometry, abi::kAttnOutA));
  return unit;
}
// Of wo_b: tile i % tiles of split i / tiles.
SGL_DEVICE SliceUnit attn_out_unit_b(const AttentionOutParams& p, int32_t number) {
  const int32_t tiles = abi::attn_out_tiles(p.geometry, abi::kAttnOutB), splits = attn_out_splits(p, abi::kAttnOutB);
  const int32_t k = abi::attn_out_latent(p.geometry);
  SliceUnit unit{};
  unit.split = number / tiles;
  unit.row = number % tiles * abi::kTallRows;
  unit.k0 = abi::tall_split_begin(k, splits, unit.split);
  unit.k1 = abi::tall_split_begin(k, splits, unit.split + 1);
  return unit;
}
SGL_DEVICE abi::TileRange attn_out_own(const AttentionOutParams& p, AttnOutOp op) {
  return abi::attn_out_share(p.geometry, op, p.rows, dialect::block_idx(), dialect::grid_dim());
}

}  // namespace sgl_lowlatency::stages
