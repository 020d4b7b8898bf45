// Host entry of a tensor-parallel decode_step on CUDA. No device code here.
#pragma once
#include <cstdint>
#include <vector>

#include "sgl_lowlatency/abi/parallel_step.hpp"

namespace sgl_lowlatency::launch {

// A rank's launch, as decode_step_cuda; every rank of the group launches the same plan's step.
void parallel_step_cuda(const abi::ParallelStepParams& params, int32_t grid, uintptr_t stream);

// One launch of virtual ranks on the current device, `grid` blocks each; they are all ranks of their group. bf16.
void virtual_step_cuda(const std::vector<abi::ParallelStepParams>& ranks, int32_t grid, uintptr_t stream);

// Blocks that the current device holds at once, of a rank's launch or of one of virtual ranks.
int32_t parallel_step_max_blocks(const abi::ParallelStepParams& params, bool is_virtual);

// What both the CUDA launcher and the emulation refuse beside check_decode_step: throws std::invalid_argument.
void check_parallel_step(const abi::ParallelStepParams& params, int32_t grid);

}  // namespace sgl_lowlatency::launch
