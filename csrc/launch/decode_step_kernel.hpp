// The instances of decode_step on CUDA, compiled in three files; decode_step.cu launches them.
#pragma once
#include "sgl_lowlatency/abi/decode_step.hpp"

namespace sgl_lowlatency::launch {

using DecodeStepKernel = void (*)(abi::DecodeStepParams);

// The instance for params with MoE layers. Throws std::invalid_argument for sizes that have none.
DecodeStepKernel select_moe_kernel(const abi::DecodeStepParams& params);

// Of those, the ones in bf16 with heads of 64 or more than 32 kServedExpertWords experts. Entry: up to 16 rows.
DecodeStepKernel select_wide_moe_kernel(const abi::DecodeStepParams& params);

// Throws std::invalid_argument where the current device is no sm_90 and the params' instance has code there alone: FP8 weights, MoE layers.
void require_hopper(const abi::DecodeStepParams& params);

}  // namespace sgl_lowlatency::launch
