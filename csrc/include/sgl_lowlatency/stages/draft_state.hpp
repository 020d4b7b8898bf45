// A draft_sampler block's view of its shared memory, its share of the vocabulary and its place among ranks.
#pragma once
#include "sgl_lowlatency/abi/draft_sampler.hpp"
#include "sgl_lowlatency/stages/row_state.hpp"

namespace sgl_lowlatency::stages {

using abi::DraftSamplerParams;

// A token that may win: its key as ordered_key has it, and its id. Key 0: none.
struct Candidate {
  uint32_t key;
  uint32_t id;
};

struct DraftBlockState {
  float inverse_rms[abi::kMaxDraftRows];
  Candidate best[abi::kMaxDraftBatch][abi::kNumConsumerWarps];  // of each warp
};
static_assert(sizeof(DraftBlockState) <= abi::kDraftBlockStateBytes, "draft_smem reserves kDraftBlockStateBytes");

// The sections of the block's shared memory (abi::DraftSmem), addressed anew at each use: nothing to keep in registers.
struct DraftShared {
  const abi::DraftSmem& at;
  // Phase complete: the weights of the stage have landed.
  SGL_DEVICE uint64_t* full(int32_t stage) const { return reinterpret_cast<uint64_t*>(dialect::shared_base() + at.barriers) + stage; }
  // Phase complete: both warps of the pair have read the stage.
  SGL_DEVICE uint64_t* empty(int32_t stage) const { return full(abi::kDraftStages + stage); }
  SGL_DEVICE char* zero_row() const { return dialect::shared_base() + at.zero_row; }
  SGL_DEVICE DraftBlockState* block() const { return reinterpret_cast<DraftBlockState*>(dialect::shared_base() + at.block_state); }
  SGL_DEVICE float* exchange() const { return reinterpret_cast<float*>(dialect::shared_base() + at.exchange); }
  SGL_DEVICE char* panel() const { return dialect::shared_base() + at.panel; }
  SGL_DEVICE float* noise() const { return reinterpret_cast<float*>(dialect::shared_base() + at.panel); }
  SGL_DEVICE char* latents() const { return dialect::shared_base() + at.latents; }
  SGL_DEVICE char* stage(int32_t stage) const { return dialect::shared_base() + at.ring + stage * abi::kStageBytes; }
};

SGL_DEVICE sync::FaultSink fault_sink(const DraftSamplerParams& p, int32_t rank) { return {p.fault, rank, p.deadline_ns}; }

// What a block is: the rank it works for, its number among that rank's blocks, its units and their tiles of the LM head.
struct DraftBlock {
  int32_t local_rank;
  int32_t rank;
  int32_t block;       // of the rank's
  int32_t num_blocks;  // of the rank
  abi::TileRange units;
  int32_t num_tiles;  // from units.begin * 2 on
};

SGL_DEVICE DraftBlock draft_block(const DraftSamplerParams& p) {
  DraftBlock b;
  b.num_blocks = dialect::grid_dim() / p.num_local_ranks;
  b.local_rank = dialect::block_idx() / b.num_blocks;
  b.rank = p.first_rank + b.local_rank;
  b.block = dialect::block_idx() % b.num_blocks;
  const abi::DraftRank& own = p.ranks[b.local_rank];
  b.units = abi::even_share(own.num_units, b.block, b.num_blocks);
  const int32_t left = own.num_head_tiles - b.units.begin * 2;
  b.num_tiles = left < b.units.count * 2 ? left : b.units.count * 2;
  if (b.num_tiles < 0) b.num_tiles = 0;
  return b;
}

}  // namespace sgl_lowlatency::stages
