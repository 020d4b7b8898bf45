// What a rank of a tensor-parallel decode_step is told beside its own step (DESIGN-tp.md of the kernel). Shared by host C++, CUDA, the host
// dialect and (through the bindings) Python.
#pragma once
#include "sgl_lowlatency/abi/symmetric_workspace.hpp"

namespace sgl_lowlatency::abi {

constexpr int32_t kPeerGenerations = 4;  // copies of the words that ranks push to each other; consecutive layers take them in turn
constexpr int32_t kPeerClearAhead = 3;   // layer l clears those of layer l + kPeerClearAhead, which layer l - 1 left
constexpr int32_t kPeerCopies = 2 * kPeerGenerations;  // SymmetricLayout::copies: of a layer, out_proj's and down's
static_assert(kGenerations % kPeerGenerations == 0, "a layer's copies follow from its generation of the hand-over buffers");
constexpr int32_t kMaxParallelRows = 16;  // rows of a step
constexpr int32_t kMaxTimedRows = 8;      // of a timed step
constexpr int32_t kMaxVirtualRanks = 4;   // of one launch: kernel parameters are 4096 bytes

// The step is the rank's share: its heads, its channels of the MLP or of every expert, `geometry.vocab` columns of logits; all else is the whole
// model's. out_proj [hidden, num_q_heads * head_dim] and down [hidden, intermediate] are the rank's columns of K.
struct ParallelStepParams : DecodeStepParams {
  SymmetricLayout symmetric;    // of kPeerCopies copies; `rank` is the own one of its num_ranks
  char* workspaces[kMaxRanks];  // of every rank, as this device sees them
  int32_t num_tokens;           // ids of the whole vocabulary
  int32_t vocab_shard;          // rows of `embedding`: rank r has those of ids r * vocab_shard and following
};
static_assert(kMaxVirtualRanks * sizeof(ParallelStepParams) <= 4096, "kernel parameters");

// Where a layer of a dense step reads the clock, in this order.
enum TimelinePoint : int32_t {
  kPointBegin = 0,
  kPointQkvOperand = 1,  // an operand, its first panel, has come
  kPointQkv = 2,         // the block's tiles are done
  kPointAttention = 3,
  kPointOutProjOperand = 4,
  kPointOutProj = 5,  // .. and pushed
  kPointMid = 6,      // all ranks' sums of the block's tiles are taken
  kPointGateUpOperand = 7,
  kPointClears = 8,      // this thread's clears of the upkeep are made
  kPointFence = 9,       // its fence begins
  kPointFenced = 10,
  kPointGateUp = 11,
  kPointDownOperand = 12,
  kPointDown = 13,  // .. and pushed
  kPointEnd = 14,   // all ranks' sums are taken
  kTimelinePoints = 15,
};

// A step that is timed: decode, bf16, dense layers, up to kMaxTimedRows rows.
struct TimedStepParams : ParallelStepParams {
  uint64_t* timeline;  // [grid][num_layers][kTimelinePoints] ns of the GPU's timer, by thread 0 of each block
};

// Several ranks that share a GPU, each with memory of its own.
struct VirtualRanks {
  ParallelStepParams of[kMaxVirtualRanks];
};

}  // namespace sgl_lowlatency::abi
