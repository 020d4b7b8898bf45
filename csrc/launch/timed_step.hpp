// Host entry of a timed tensor-parallel decode_step on CUDA. No device code here.
#pragma once
#include <cstdint>

#include "sgl_lowlatency/abi/parallel_step.hpp"

namespace sgl_lowlatency::launch {

// What both the CUDA launcher and the emulation refuse beside check_parallel_step: throws std::invalid_argument.
void check_timed_step(const abi::TimedStepParams& params, int32_t grid);

// A rank's launch, as parallel_step_cuda.
void timed_step_cuda(const abi::TimedStepParams& params, int32_t grid, uintptr_t stream);

// Blocks of a rank's launch that the current device holds at once.
int32_t timed_step_max_blocks(const abi::TimedStepParams& params);

}  // namespace sgl_lowlatency::launch
