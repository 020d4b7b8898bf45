// A fused_moe block's view of its shared memory, of the hand-over words and of its work.
#pragma once
#include "sgl_lowlatency/abi/fused_moe.hpp"
#include "sgl_lowlatency/stages/panel.hpp"

namespace sgl_lowlatency::stages {

using abi::FusedMoeParams;
using abi::MoeOp;

// The sections of the block's shared memory (abi::MoeSmem), addressed anew at each use: nothing to keep in registers.
struct MoeShared {
  const abi::MoeSmem& at;
  template <class T>
  SGL_DEVICE T* section(int32_t offset) const { return reinterpret_cast<T*>(dialect::shared_base() + offset); }
  // Phase complete: the weights of the chunk have landed in a slot of the warp's ring.
  SGL_DEVICE uint64_t* full(int32_t warp, int32_t slot) const { return section<uint64_t>(at.barriers) + warp * abi::kMoeMaxDepth + slot; }
  // Phase complete: all lanes of the warp have read the chunk.
  SGL_DEVICE uint64_t* empty(int32_t warp, int32_t slot) const { return full(abi::kNumConsumerWarps + warp, slot); }
  // Phase complete: the jobs are there.
  SGL_DEVICE uint64_t* routed() const { return full(2 * abi::kNumConsumerWarps, 0); }
  SGL_DEVICE abi::MoeBlockState* state() const { return section<abi::MoeBlockState>(at.state); }
  SGL_DEVICE uint32_t* row_bits() const { return section<uint32_t>(at.row_bits); }
  SGL_DEVICE int32_t* first_pairs() const { return section<int32_t>(at.first_pairs); }
  SGL_DEVICE uint32_t* ids() const { return section<uint32_t>(at.ids); }
  SGL_DEVICE float* weights() const { return section<float>(at.weights); }
  SGL_DEVICE int32_t* pairs() const { return section<int32_t>(at.pairs); }
  SGL_DEVICE int32_t* pair_rows() const { return section<int32_t>(at.pair_rows); }
  SGL_DEVICE int32_t* job_expert() const { return section<int32_t>(at.job_expert); }
  SGL_DEVICE int32_t* job_first() const { return section<int32_t>(at.job_first); }
  SGL_DEVICE int32_t* job_count() const { return section<int32_t>(at.job_count); }
  SGL_DEVICE float* scratch() const { return section<float>(at.scratch); }
  SGL_DEVICE char* panel() const { return section<char>(at.panel); }
  SGL_DEVICE char* chunk(int32_t warp, int32_t slot) const { return section<char>(at.ring) + (warp * at.depth + slot) * abi::kMoeChunkBytes; }
};

SGL_DEVICE sync::FaultSink fault_sink(const FusedMoeParams& p) { return {p.fault, p.rank, p.deadline_ns}; }

// The words of this launch's generation.
struct MoeWords {
  abi::MoeHandover at;
  uint32_t* base;
  SGL_DEVICE uint32_t* logits() const { return base + at.logits; }
  SGL_DEVICE uint32_t* choices() const { return base + at.choices; }
  SGL_DEVICE uint32_t* activation() const { return base + at.activation; }
  SGL_DEVICE uint32_t* output() const { return base + at.output; }
  SGL_DEVICE uint32_t* mix() const { return base + at.mix; }
  SGL_DEVICE uint32_t* coefficients() const { return base + at.coefficients; }
};
// Entry: behind the block's first barrier.
SGL_DEVICE MoeWords moe_words(const FusedMoeParams& p, const MoeShared& s) {
  return {abi::moe_handover(p.geometry, p.rows), p.workspace + static_cast<int64_t>(s.state()->generation) * p.generation_words};
}

// One unit: tile `tile` of an op, for the rows of group `job` (static ops) or the pairs of job `job`.
struct MoeUnit {
  int32_t job;
  int32_t tile;
};

SGL_DEVICE constexpr bool is_routed(MoeOp op) { return op == abi::kMoeGateUp || op == abi::kMoeDown; }

// The block's units of an op: number i is tile i % tiles of job i / tiles. Entry for routed ops: the routing is there.
SGL_DEVICE abi::TileRange moe_share(const FusedMoeParams& p, const MoeShared& s, MoeOp op) {
  const int32_t block = dialect::block_idx(), grid = dialect::grid_dim();
  const int32_t fixed = abi::moe_tiles(p.geometry, op) * abi::moe_groups(p.rows);
  if (!is_routed(op)) return abi::even_share(fixed, block, grid);
  return abi::moe_routed_share(abi::moe_tiles(p.geometry, op) * s.state()->num_jobs, fixed, block, grid);
}
SGL_DEVICE MoeUnit moe_unit(const FusedMoeParams& p, MoeOp op, int32_t number) {
  const int32_t tiles = abi::moe_tiles(p.geometry, op);
  return {number / tiles, number % tiles};
}

// Chunks of a unit that warp `warp` multiplies. K of a static unit is split over the warps, 128 columns a chunk; a routed one is a warp's own, and a
// chunk kMoeChunkSteps times as wide.
struct MoeChunks {
  int32_t begin;
  int32_t end;
};
SGL_DEVICE int32_t moe_steps(const FusedMoeParams& p, MoeOp op) {
  return (op == abi::kMoeSharedDown || op == abi::kMoeDown ? p.geometry.intermediate : p.geometry.hidden) / abi::kMoeStepK;
}
SGL_DEVICE MoeChunks moe_chunks(const FusedMoeParams& p, MoeOp op, int32_t tile, int32_t warp) {
  const int32_t steps = moe_steps(p, op);
  if (is_routed(op)) return {0, abi::moe_ceil_div(steps, abi::kMoeChunkSteps)};
  if (op != abi::kMoeRouter) return {steps * warp / abi::kNumConsumerWarps, steps * (warp + 1) / abi::kNumConsumerWarps};
  static_assert(abi::kMoeSplitK == abi::kNumConsumerWarps * abi::kMoeStepK, "a chunk of a router item a warp");
  const int32_t chunk = tile % abi::moe_splits(p.geometry) * abi::kNumConsumerWarps + warp;
  return {chunk, chunk < steps ? chunk + 1 : chunk};
}

// A place in a warp's ring.
struct MoeCursor {
  int32_t slot = 0;
  uint32_t parity = 0;
  SGL_DEVICE void advance(int32_t depth) {
    if (++slot < depth) return;
    slot = 0;
    parity ^= 1u;
  }
};

}  // namespace sgl_lowlatency::stages
