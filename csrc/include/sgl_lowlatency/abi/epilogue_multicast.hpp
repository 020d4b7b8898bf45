// Structs of the `epilogue_multicast` kernel, shared by host C++, CUDA, the host dialect and (through the bindings) Python.
#pragma once
#include <cstdint>

#include "sgl_lowlatency/abi/symmetric_workspace.hpp"

namespace sgl_lowlatency::abi {

constexpr int32_t kMaxPushedRows = 16;     // rows of one launch
constexpr int32_t kReduceColumns = 4;      // of a row, that a thread of the reduction adds at a time: a vector of words
constexpr int32_t kMaxReduceThreads = 512;
constexpr int32_t kReduceVectors = 4;      // of a thread
constexpr int32_t kMaxReducedHidden = kMaxReduceThreads * kReduceVectors * kReduceColumns;

// Threads of a block of the reduction: a vector each, up to kMaxReduceThreads.
SGL_ABI_FUNCTION int32_t reduce_threads(int32_t hidden) {
  const int32_t threads = (hidden / kReduceColumns + 31) / 32 * 32;
  return threads < kMaxReduceThreads ? threads : kMaxReduceThreads;
}

// What one rank brings and gets. Row-major, contiguous, aligned to 16 bytes.
struct RankTensors {
  const bf16* input;     // [rows, K]: its shard of the activations
  const bf16* residual;  // [rows, hidden], the same on every rank
  bf16* sum;             // [rows, hidden]: residual + the ranks' products; may be `residual`
  bf16* normed;          // [rows, hidden]: RMSNorm of it
};

struct EpilogueMulticastParams {
  // What tiles and ring read of a step: rows (1..kMaxPushedRows), ops[kOpOutProj], num_stages, max_panel_bytes, max_tiles_multi_panel, shared,
  // rank (of the first rank of the launch), deadline_ns, fault, and maps: [ranks_in_launch], each its rank's weight shard [hidden, K]. The rest is 0.
  DecodeStepParams product;
  SymmetricLayout at;
  int32_t ranks_in_launch;   // 1; or several virtual ranks of one GPU: product.rank and following
  int32_t blocks_per_rank;   // of the product's grid
  int32_t layer;             // for fault records, 0..65535
  float rms_eps;
  const bf16* norm_weight;   // [hidden]
  char* workspaces[kMaxRanks];  // of every rank of the group, as this device sees them
  char* multicast;              // what stores to all of them at once, or null: a store a peer
  RankTensors tensors[kMaxRanks];  // [ranks_in_launch]
};
static_assert(sizeof(EpilogueMulticastParams) <= 4096, "kernel parameters");

}  // namespace sgl_lowlatency::abi
