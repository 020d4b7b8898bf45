// What a rank of a tensor-parallel fused_moe is told beside its own layer (DESIGN.md of the kernel, Ranks). Shared by host C++, CUDA, the host
// dialect and (through the bindings) Python.
#pragma once
#include "sgl_lowlatency/abi/fused_moe.hpp"
#include "sgl_lowlatency/abi/symmetric_workspace.hpp"

namespace sgl_lowlatency::abi {

// The layer is the rank's share: `geometry.intermediate` channels of every expert and of the shared one, rows of gate and up and columns of down;
// x, router and biases are whole, and the same on every rank. out gets the sum over all ranks.
struct ParallelMoeParams : FusedMoeParams {
  SymmetricLayout symmetric;    // of kParities copies; `rank` is the own one of its num_ranks
  char* workspaces[kMaxRanks];  // of every rank, as this device sees them
  int32_t layer;                // for fault records, 0..65535
};

// Several ranks that share a GPU, each with memory of its own.
struct VirtualMoeRanks {
  ParallelMoeParams of[kMaxRanks];
};
static_assert(sizeof(VirtualMoeRanks) <= 4096, "kernel parameters");

}  // namespace sgl_lowlatency::abi
