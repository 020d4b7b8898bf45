// Host entry of tensor-parallel decode_step in forms that are open, and timed ones, on CUDA. No device code here.
#pragma once
#include <cstdint>
#include <vector>

#include "sgl_lowlatency/abi/parallel_step.hpp"

namespace sgl_lowlatency::launch {

// What both the CUDA launcher and the emulation refuse beside check_parallel_step: throws std::invalid_argument.
void check_trial_step(const abi::TrialStepParams& params, int32_t grid);

// parallel_step_cuda, virtual_step_cuda and parallel_step_max_blocks of params' form.
void trial_step_cuda(const abi::TrialStepParams& params, int32_t grid, uintptr_t stream);
void virtual_trial_cuda(const std::vector<abi::TrialStepParams>& ranks, int32_t grid, uintptr_t stream);
int32_t trial_step_max_blocks(const abi::TrialStepParams& params, bool is_virtual);

}  // namespace sgl_lowlatency::launch
