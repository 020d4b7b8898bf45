// Host entry of a tensor-parallel fused_moe on CUDA. No device code here.
#pragma once
#include <cstdint>
#include <vector>

#include "sgl_lowlatency/abi/parallel_moe.hpp"

namespace sgl_lowlatency::launch {

// A rank's launch, as fused_moe_cuda; every rank of the group launches the same rows, in the same order.
void parallel_moe_cuda(const abi::ParallelMoeParams& params, int32_t grid, uintptr_t stream);

// One launch of virtual ranks on the current device, `grid` blocks each: rank 0, 1, .. of their group; those that are missing never come.
void virtual_moe_cuda(const std::vector<abi::ParallelMoeParams>& ranks, int32_t grid, uintptr_t stream);

// Blocks that the current device holds at once, of a rank's launch or of one of virtual ranks, with so much shared memory.
int32_t parallel_moe_max_blocks(int32_t shared_bytes, bool is_virtual);

// What both the CUDA launcher and the emulation refuse beside check_fused_moe: throws std::invalid_argument.
void check_parallel_moe(const abi::ParallelMoeParams& params, int32_t grid);

// The parameters of one launch of virtual ranks. Throws std::invalid_argument for ranks that are not a launch's.
abi::VirtualMoeRanks virtual_moe_ranks(const std::vector<abi::ParallelMoeParams>& ranks, int32_t grid);

}  // namespace sgl_lowlatency::launch
