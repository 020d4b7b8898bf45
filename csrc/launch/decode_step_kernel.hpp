// The instances of decode_step on CUDA, compiled in two files; decode_step.cu launches them.
#pragma once
#include "sgl_lowlatency/abi/decode_step.hpp"

namespace sgl_lowlatency::launch {

using DecodeStepKernel = void (*)(abi::DecodeStepParams);

// The instance for params with MoE layers. Throws std::invalid_argument for sizes that have none.
DecodeStepKernel select_moe_kernel(const abi::DecodeStepParams& params);

}  // namespace sgl_lowlatency::launch
