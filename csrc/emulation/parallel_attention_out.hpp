// Tensor-parallel attention_out on the host dialect: the same source as the GPUs', run by the emulation's scheduler.
#pragma once
#include <vector>

#include "emulation/emulation.hpp"
#include "emulation/parallel_step.hpp"
#include "sgl_lowlatency/abi/parallel_attention_out.hpp"

namespace sgl_lowlatency::emulation {

// Runs the streams of several GPUs at the same time, each behind an empty kernel as attention_out's is. Throws std::invalid_argument as
// check_parallel_attention_out does.
Report parallel_attention_out(const std::vector<StepStream<abi::ParallelAttentionOutParams>>& streams, const Options& options);

}  // namespace sgl_lowlatency::emulation
