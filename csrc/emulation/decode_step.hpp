// decode_step on the host dialect: the same source as the GPU's, run by the emulation's scheduler.
#pragma once
#include "emulation/emulation.hpp"
#include "sgl_lowlatency/abi/decode_step.hpp"

namespace sgl_lowlatency::emulation {

// Same parameters as launch::decode_step_cuda, with host pointers. Throws std::invalid_argument as check_decode_step does.
// One thread of a launch whose layers are MoE layers. Entry: check_decode_step has passed.
void run_moe_body(const abi::DecodeStepParams& params);

Report decode_step(const abi::DecodeStepParams& params, int32_t grid, const Options& options);

}  // namespace sgl_lowlatency::emulation
