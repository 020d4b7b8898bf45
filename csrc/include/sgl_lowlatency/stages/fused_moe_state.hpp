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
  SGL_DEVICE uint64_t* empty(int32_t stage) const { return full(at.num_stages + stage); }
  // Phase complete: every consumer warp has stored its parts of a unit in that half of scratch.
  SGL_DEVICE uint64_t* partials(int32_t half) const { return full(2 * at.num_stages + half); }
  // Phase complete: the jobs are there.
  SGL_DEVICE uint64_t* routed() const { return full(2 * at.num_stages + 2); }
  SGL_DEVICE abi::MoeBlockState* state() const { return section<abi::MoeBlockState>(at.state); }
  SGL_DEVICE uint32_t* row_bits() const { return section<uint32_t>(at.row_bits); }
  SGL_DEVICE uint32_t* ids() const { return section<uint32_t>(at.ids); }
  SGL_DEVICE float* weights() const { return section<float>(at.weights); }
  SGL_DEVICE int32_t* pairs() const { return section<int32_t>(at.pairs); }
  SGL_DEVICE int32_t* pair_rows() const { return section<int32_t>(at.pair_rows); }
  SGL_DEVICE int32_t* job_expert() const { return section<int32_t>(at.job_expert); }
  SGL_DEVICE int32_t* job_first() const { return section<int32_t>(at.job_first); }
  SGL_DEVICE int32_t* job_count() const { return section<int32_t>(at.job_count); }
  SGL_DEVICE float* scores() const { return section<float>(at.scores); }
  SGL_DEVICE int32_t* bases() const { return section<int32_t>(at.bases); }
  SGL_DEVICE float* scratch(int32_t half) const { return section<float>(at.scratch) + half * abi::kNumConsumerWarps * 2 * 16 * abi::kMoeColumns; }
  SGL_DEVICE char* scales(int32_t slot, const abi::MoeGeometry& g) const { return section<char>(at.scales) + slot * abi::moe_scale_slot_bytes(g); }
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
  SGL_DEVICE void advance(int32_t num_stages) {
    stage = stage + 1 == num_stages ? 0 : stage + 1;
    parity ^= stage == 0 ? 1u : 0u;
  }
};

// An op's units and what each streams: `parts` tiles of 16 rows, one after the other, each in `runs` stages.
//
// router           16 experts, a split of K: 1 part, 4 steps a run
// shared gate_up   16 gate rows, then their up rows: 10 steps a run
// gate_up          the same of an expert; of the stored rows, which hold 16 of each 32 columns in turn, first 0..7, then 8..15: a run each
// shared down      2 tiles of 16 rows: 9 steps a run
// down             the same of an expert: one run
struct MoeWork {
  int32_t tiles;  // of a job
  int32_t steps;  // of K, of a tile
  int32_t most;   // of a run of FP8 and bf16
  int32_t parts;
  int32_t runs;   // of a part
};
SGL_DEVICE bool is_routed_op(int32_t op) { return op == abi::kMoeGateUp || op == abi::kMoeDown; }
SGL_DEVICE bool reads_x(int32_t op) { return op != abi::kMoeSharedDown && op != abi::kMoeDown; }
SGL_DEVICE MoeWork moe_work(const FusedMoeParams& p, int32_t op) {
  MoeWork work{};
  work.tiles = abi::moe_tiles(p.geometry, static_cast<MoeOp>(op));
  work.steps = (reads_x(op) ? p.geometry.hidden : p.geometry.intermediate) / abi::kMoeStepK;
  work.most = abi::moe_stage(static_cast<MoeOp>(op)).steps;
  work.parts = op == abi::kMoeRouter ? 1 : 2;
  work.runs = op == abi::kMoeGateUp ? 2 : op == abi::kMoeDown ? 1 : abi::moe_ceil_div(work.steps, work.most);
  return work;
}

// A block's way through its units of an op, tile after tile of job after job.
struct MoeUnits {
  int32_t left;
  int32_t job;
  int32_t tile;
  bool is_first = true;
  SGL_DEVICE void advance(int32_t tiles) {
    is_first = false;
    --left;
    ++tile;
    if (tile < tiles) return;
    tile = 0;
    ++job;
  }
};
// num_jobs: of routed ops.
SGL_DEVICE abi::MoeUnitRange moe_unit_range(const FusedMoeParams& p, int32_t op, int32_t num_jobs) {
  const int32_t block = dialect::block_idx(), grid = dialect::grid_dim(), tiles = abi::moe_tiles(p.geometry, static_cast<MoeOp>(op));
  const int32_t fixed = tiles * abi::moe_groups(p.rows);
  const abi::TileRange share = is_routed_op(op) ? abi::moe_routed_share(tiles * num_jobs, fixed, block, grid) : abi::even_share(fixed, block, grid);
  return {share.count, share.begin / tiles, share.begin % tiles};
}
// Entry: behind the block's first barrier; for routed ops the routing is there.
SGL_DEVICE MoeUnits moe_units(const MoeShared& s, int32_t op) {
  const abi::MoeUnitRange& range = s.state()->units[op];
  return {range.count, range.job, range.tile};
}

// Of a unit of the router: its split of K begins at step `begin` and has `steps`, in `runs` stages.
struct MoeSplit {
  int32_t begin;
  int32_t steps;
  int32_t runs;
};
SGL_DEVICE MoeSplit moe_split(const FusedMoeParams& p, const MoeWork& work, int32_t tile) {
  constexpr int32_t kSplit = abi::kMoeSplitK / abi::kMoeStepK;
  const int32_t begin = tile % abi::moe_splits(p.geometry) * kSplit, left = work.steps - begin;
  const int32_t steps = left < kSplit ? left : kSplit;
  return {begin, steps, abi::moe_ceil_div(steps, work.most)};
}
// All of K, for the other ops.
SGL_DEVICE MoeSplit moe_extent(const FusedMoeParams& p, int32_t op, const MoeWork& work, int32_t tile) {
  if (op == abi::kMoeRouter) return moe_split(p, work, tile);
  return {0, work.steps, work.runs};
}

// FP4 scales pass through their slots in turn. A gate_up unit has two (gate, up), a unit of down one; units share them with the one before in the
// same 64 rows.
struct MoeScales {
  int32_t num_slots;
  int32_t next = 0;
  int32_t first = 0;
  bool is_new = false;
  SGL_DEVICE int32_t slot(int32_t number) const { return number < num_slots ? number : number - num_slots; }
  SGL_DEVICE void begin_unit(int32_t op, bool is_first, int32_t tile) {
    is_new = is_routed_op(op) && (is_first || tile % (op == abi::kMoeDown ? 2 : 4) == 0);
    if (!is_new) return;
    first = next;
    next = slot(next + (op == abi::kMoeDown ? 1 : 2));
  }
  // Of gate (0) or up (1); down has 0 alone.
  SGL_DEVICE int32_t slot_of(int32_t which) const { return slot(first + which); }
};

}  // namespace sgl_lowlatency::stages
