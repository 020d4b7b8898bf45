// Tensor-parallel decode_step on the host dialect: the same source as the GPUs', run by the emulation's scheduler.
#pragma once
#include <vector>

#include "emulation/emulation.hpp"
#include "sgl_lowlatency/abi/parallel_step.hpp"

namespace sgl_lowlatency::emulation {

// What one emulated GPU is given: its launches, one after the other, of `grid` blocks each. No launches: it never comes.
template <class Params>
struct StepStream {
  std::vector<Params> launches;
  int32_t grid;
  uint32_t slowness = 1;  // Rank::slowness
};

// One thread of a launch; of MoE layers. Entry: check_parallel_step has passed.
void run_parallel_moe_body(const abi::ParallelStepParams& params);

// Runs the streams at the same time. Throws std::invalid_argument as check_parallel_step does, of TimedStepParams as check_timed_step does.
Report parallel_step(const std::vector<StepStream<abi::ParallelStepParams>>& streams, const Options& options);
Report parallel_step(const std::vector<StepStream<abi::TimedStepParams>>& streams, const Options& options);

}  // namespace sgl_lowlatency::emulation
