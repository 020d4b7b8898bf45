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
  SGL_DEVICE char* scales(int32_t number, const abi::MoeGeometry& g) const {
    return section<char>(at.scales) + number % abi::kMoeScaleSlots * abi::moe_scale_slot_bytes(g);
  }
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
  SGL_DEVICE uint32_t* mix() const { return base + at.mix; }
  SGL_DEVICE uint32_t* coefficients() const { return base + at.coefficients; }
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

// What a stage of a unit has: `steps` steps of K from `begin` on, of rows that go to the warps' tile number `part`.
//
// router           16 experts, 4 steps at a time
// shared gate_up   16 gate rows in runs of 10 steps, then the up rows: part 0, part 1
// gate_up          8 stored rows of gate, the other 8, and the same of up: of the stored rows r, word after word, 16 of 32 columns (`half`)
// shared down      tiles 0, 1 in turn, runs of 9 steps, then tiles 2, 3
// down             tiles 0..3, 16 stored rows each
struct MoePiece {
  int32_t begin;
  int32_t steps;
  int32_t part;
  int32_t tile;  // of 16 rows, of down's 64
  int32_t half;  // of gate_up
};
SGL_DEVICE int32_t moe_steps_of(const FusedMoeParams& p, MoeOp op) {
  return (op == abi::kMoeSharedDown || op == abi::kMoeDown ? p.geometry.intermediate : p.geometry.hidden) / abi::kMoeStepK;
}
// Stages of a unit.
SGL_DEVICE int32_t moe_num_stages(const FusedMoeParams& p, MoeOp op, int32_t tile) {
  if (op == abi::kMoeGateUp || op == abi::kMoeDown) return 4;
  const int32_t steps = moe_steps_of(p, op), runs = abi::moe_ceil_div(steps, abi::moe_stage(op).steps);
  if (op != abi::kMoeRouter) return (op == abi::kMoeSharedGateUp ? 2 : 4) * runs;
  constexpr int32_t kSplit = abi::kMoeSplitK / abi::kMoeStepK;
  const int32_t left = steps - tile % abi::moe_splits(p.geometry) * kSplit;
  return abi::moe_ceil_div(left < kSplit ? left : kSplit, abi::moe_stage(op).steps);
}
SGL_DEVICE MoePiece moe_piece(const FusedMoeParams& p, MoeOp op, int32_t tile, int32_t stage) {
  const int32_t steps = moe_steps_of(p, op);
  if (op == abi::kMoeGateUp) return {0, steps, stage / 2, 0, stage % 2};
  if (op == abi::kMoeDown) return {0, steps, stage / 2, stage, 0};
  const int32_t most = abi::moe_stage(op).steps, runs = abi::moe_ceil_div(steps, most);
  MoePiece piece{};
  if (op == abi::kMoeRouter) {
    piece.begin = tile % abi::moe_splits(p.geometry) * (abi::kMoeSplitK / abi::kMoeStepK) + stage * most;
  } else if (op == abi::kMoeSharedGateUp) {
    piece.begin = stage % runs * most;
    piece.part = stage / runs;
  } else {
    piece.begin = stage / 2 % runs * most;
    piece.part = stage / (2 * runs);
    piece.tile = 2 * piece.part + stage % 2;
  }
  piece.steps = steps - piece.begin < most ? steps - piece.begin : most;
  return piece;
}

// FP4 scales pass through their slots by number. A gate_up unit has the numbers `first` and `first` + 1 (gate, up), which a unit shares with the one
// before it in the same 64 rows; a unit of down has a number of its own.
struct MoeScales {
  int32_t next = 0;
  int32_t first = 0;
  bool is_new = false;
  SGL_DEVICE void begin_unit(MoeOp op, bool is_first, int32_t tile) {
    is_new = op == abi::kMoeDown || (op == abi::kMoeGateUp && (is_first || tile % 4 == 0));
    if (!is_new) return;
    first = next;
    next += op == abi::kMoeDown ? 1 : 2;
  }
};

}  // namespace sgl_lowlatency::stages
