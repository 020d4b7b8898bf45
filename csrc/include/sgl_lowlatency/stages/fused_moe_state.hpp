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
  // Phase complete: the weights of the stage have landed.
  SGL_DEVICE uint64_t* full(int32_t stage) const { return section<uint64_t>(at.barriers) + stage; }
  // Phase complete: every consumer warp has read the stage.
  SGL_DEVICE uint64_t* empty(int32_t stage) const { return full(abi::kMoeStages + stage); }
  // Phase complete: the jobs are there.
  SGL_DEVICE uint64_t* routed() const { return full(2 * abi::kMoeStages); }
  SGL_DEVICE abi::MoeBlockState* state() const { return section<abi::MoeBlockState>(at.state); }
  SGL_DEVICE uint32_t* row_bits() const { return section<uint32_t>(at.row_bits); }
  SGL_DEVICE uint32_t* ids() const { return section<uint32_t>(at.ids); }
  SGL_DEVICE float* weights() const { return section<float>(at.weights); }
  SGL_DEVICE int32_t* pairs() const { return section<int32_t>(at.pairs); }
  SGL_DEVICE int32_t* pair_rows() const { return section<int32_t>(at.pair_rows); }
  SGL_DEVICE int32_t* job_expert() const { return section<int32_t>(at.job_expert); }
  SGL_DEVICE int32_t* job_first() const { return section<int32_t>(at.job_first); }
  SGL_DEVICE int32_t* job_count() const { return section<int32_t>(at.job_count); }
  SGL_DEVICE float* scratch(int32_t half) const { return section<float>(at.scratch) + half * abi::kNumConsumerWarps * 2 * 16 * abi::kMoeColumns; }
  SGL_DEVICE char* panel() const { return section<char>(at.panel); }
  SGL_DEVICE char* stage(int32_t stage) const { return section<char>(at.ring) + stage * abi::kMoeStageBytes; }
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
};
// Entry: behind the block's first barrier.
SGL_DEVICE MoeWords moe_words(const FusedMoeParams& p, const MoeShared& s) {
  return {abi::moe_handover(p.geometry, p.rows), p.workspace + static_cast<int64_t>(s.state()->generation) * p.generation_words};
}

// A place in the ring; producer and consumers step through it in the same order.
struct MoeCursor {
  int32_t stage = 0;
  uint32_t parity = 0;
  SGL_DEVICE void advance() {
    stage = stage + 1 == abi::kMoeStages ? 0 : stage + 1;
    parity ^= stage == 0 ? 1u : 0u;
  }
};

// One unit: tile `tile` of an op, for the rows of group `job` (static ops) or the pairs of job `job`.
struct MoeUnit {
  int32_t job;
  int32_t tile;
};

// The block's units of an op: number i is tile i % tiles of job i / tiles. Entry for routed ops: the routing is there.
SGL_DEVICE abi::TileRange moe_share(const FusedMoeParams& p, const MoeShared& s, MoeOp op) {
  const int32_t block = dialect::block_idx(), grid = dialect::grid_dim();
  const int32_t fixed = abi::moe_tiles(p.geometry, op) * abi::moe_groups(p.rows);
  if (op != abi::kMoeGateUp && op != abi::kMoeDown) return abi::even_share(fixed, block, grid);
  return abi::moe_routed_share(abi::moe_tiles(p.geometry, op) * s.state()->num_jobs, fixed, block, grid);
}
SGL_DEVICE MoeUnit moe_unit(const FusedMoeParams& p, MoeOp op, int32_t number) {
  const int32_t tiles = abi::moe_tiles(p.geometry, op);
  return {number / tiles, number % tiles};
}

// Steps of K of a unit, and the first of them: all of a matrix but for router items.
struct MoeSteps {
  int32_t begin;
  int32_t count;
};
SGL_DEVICE MoeSteps moe_steps(const FusedMoeParams& p, MoeOp op, int32_t tile) {
  const int32_t of_hidden = p.geometry.hidden / abi::kMoeStepK;
  if (op == abi::kMoeRouter) {
    constexpr int32_t kSteps = abi::kMoeSplitK / abi::kMoeStepK;
    const int32_t begin = tile % abi::moe_splits(p.geometry) * kSteps;
    return {begin, of_hidden - begin < kSteps ? of_hidden - begin : kSteps};
  }
  return {0, op == abi::kMoeSharedGateUp || op == abi::kMoeGateUp ? of_hidden : p.geometry.intermediate / abi::kMoeStepK};
}

}  // namespace sgl_lowlatency::stages
