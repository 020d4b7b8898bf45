// Tensor-parallel fused_moe on the host dialect: the same source as the GPUs', run by the emulation's scheduler.
#pragma once
#include <vector>

#include "emulation/emulation.hpp"
#include "sgl_lowlatency/abi/parallel_moe.hpp"

namespace sgl_lowlatency::emulation {

// What one emulated GPU is given: its launches, one after the other, of `grid` blocks each. No launches: it never comes.
struct MoeStream {
  std::vector<abi::ParallelMoeParams> launches;
  int32_t grid;
  uint32_t slowness = 1;  // Rank::slowness
};

// Runs the streams at the same time, each behind an empty kernel: what a launch touches before await_previous_launch is misuse. Throws
// std::invalid_argument for parameters that check_parallel_moe refuses.
Report parallel_moe(const std::vector<MoeStream>& streams, const Options& options);

}  // namespace sgl_lowlatency::emulation
