// What a rank of a tensor-parallel attention_out is told beside its own share (DESIGN.md of the kernel, Several ranks). Shared by host C++, CUDA, the
// host dialect and (through the bindings) Python.
#pragma once
#include "sgl_lowlatency/abi/attention_out.hpp"
#include "sgl_lowlatency/abi/symmetric_workspace.hpp"

namespace sgl_lowlatency::abi {

// The launch is the rank's share: `geometry` has its heads and its groups, wo_a their rows, wo_b [hidden, groups * lora] their columns of K, x its
// heads. Positions, streams, mix, norm and what is written are the whole layer's, the same on every rank.
struct ParallelAttentionOutParams : AttentionOutParams {
  SymmetricLayout symmetric;    // of kParities copies; `rank` is the own one of its num_ranks
  char* workspaces[kMaxRanks];  // of every rank, as this device sees them
  int32_t layer;                // for fault records, 0..65535
};

// Several ranks that share a GPU, each with memory of its own.
struct VirtualAttentionOut {
  ParallelAttentionOutParams of[kMaxRanks];
};
static_assert(sizeof(VirtualAttentionOut) <= 4096, "parameters of a launch");

}  // namespace sgl_lowlatency::abi
