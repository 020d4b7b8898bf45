// decode_step on the host dialect: the same source as the GPU's, run by the emulation's scheduler.
#pragma once
#include "emulation/emulation.hpp"
#include "sgl_lowlatency/abi/decode_step.hpp"

namespace sgl_lowlatency::emulation {

// One thread of a launch whose layers are MoE layers. Entry: check_decode_step has passed, and with FP8 weights check_moe_fp8.
void run_moe_body(const abi::DecodeStepParams& params);
void run_moe_fp8_body(const abi::DecodeStepParams& params);

// What instances of MoE layers in FP8 there are. Throws std::invalid_argument naming what has none.
void check_moe_fp8(const abi::DecodeStepParams& params);

// Same parameters as launch::decode_step_cuda, with host pointers. Throws std::invalid_argument as check_decode_step does.
Report decode_step(const abi::DecodeStepParams& params, int32_t grid, const Options& options);

}  // namespace sgl_lowlatency::emulation
