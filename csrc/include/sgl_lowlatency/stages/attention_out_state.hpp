// An attention_out block's view of its shared memory, of the hand-over words and of its work.
#pragma once
#include "sgl_lowlatency/abi/attention_out.hpp"
#include "sgl_lowlatency/stages/weight_ring.hpp"

namespace sgl_lowlatency::stages {

using abi::AttentionOutParams;
using abi::AttnOutOp;

// The sections of the block's shared memory (abi::AttnOutSmem), addressed anew at each use: nothing to keep in registers.
struct AttnOutShared {
  const abi::AttnOutSmem& at;
  template <class T>
  SGL_DEVICE T* section(int32_t offset) const { return reinterpret_cast<T*>(dialect::shared_base() + offset); }
  // Phase complete: the weights of the stage, and their scales, have landed.
  SGL_DEVICE uint64_t* full(int32_t stage) const { return section<uint64_t>(at.barriers) + stage; }
  // Phase complete: every consumer warp has read the stage.
  SGL_DEVICE uint64_t* empty(int32_t stage) const { return full(abi::kAttnOutMaxStages + stage); }
  SGL_DEVICE abi::AttnOutBlockState* state() const { return section<abi::AttnOutBlockState>(at.state); }
  SGL_DEVICE int32_t* positions() const { return section<int32_t>(at.positions); }
  SGL_DEVICE char* zero_row() const { return section<char>(at.zero_row); }
  SGL_DEVICE float* scales(int32_t stage) const { return section<float>(at.scales) + stage * abi::kAttnOutStageScales; }
  SGL_DEVICE float* scratch() const { return section<float>(at.scratch); }
  SGL_DEVICE char* panel() const { return section<char>(at.panel); }
  SGL_DEVICE char* stage(int32_t stage) const { return section<char>(at.ring) + stage * abi::kStageBytes; }
};

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
SGL_DEVICE AttnOutWords attn_out_words(const AttentionOutParams& p, const AttnOutShared& s) {
  return {abi::attn_out_handover(p.geometry, p.rows), p.workspace + static_cast<int64_t>(s.state()->generation) * p.generation_words};
}

// Unit number i of an op: tile i % tiles of panel i / tiles. wo_a has a panel for each split of K of each group, wo_b for each split.
struct AttnOutUnit {
  int32_t panel;
  int32_t group;  // of wo_a, else 0
  int32_t split;
  int32_t row;    // first of 16, of the matrix
  int32_t k0;     // columns [k0, k1) of the matrix
  int32_t k1;
};
SGL_DEVICE AttnOutUnit attn_out_unit(const AttentionOutParams& p, AttnOutOp op, int32_t number) {
  const int32_t tiles = abi::attn_out_tiles(p.geometry, op), splits = abi::attn_out_splits(p.geometry, op, p.rows);
  AttnOutUnit unit{};
  unit.panel = number / tiles;
  unit.group = unit.panel / splits;
  unit.split = unit.panel % splits;
  unit.row = unit.group * p.geometry.lora + number % tiles * abi::kTileRows;
  unit.k0 = unit.split * p.shared.panel_k;
  unit.k1 = min_int(unit.k0 + p.shared.panel_k, abi::attn_out_k(p.geometry, op));
  return unit;
}
SGL_DEVICE abi::TileRange attn_out_units(const AttentionOutParams& p, AttnOutOp op) {
  return abi::attn_out_share(p.geometry, op, p.rows, dialect::block_idx(), dialect::grid_dim());
}
SGL_DEVICE int32_t attn_out_stage_k(AttnOutOp op) { return op == abi::kAttnOutA ? abi::stage_k(2) : abi::stage_k(1); }

}  // namespace sgl_lowlatency::stages
